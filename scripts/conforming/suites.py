"""Where the suites are: CPython's comes with the interpreter, uvloop's is fetched from PyPI.

Called by conformance.py. Writes only below build/conformance.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BUILD = Path(__file__).parent.parent.parent / "build" / "conformance"
STANDIN = Path(__file__).parent / "standin"
# The exceptions in conformance_expected.toml are this version's.
UVLOOP = "0.23.0"
QUICK = (
    "test_events",
    "test_streams",
    "test_server",
    "test_buffered_proto",
    "test_sslproto",
    "test_sendfile",
)
NEEDS = {"aiohttp": "aiohttp", "psutil": "psutil", "OpenSSL": "pyOpenSSL"}


class Missing(Exception):
    """A suite cannot be run here; the text says what would help."""


@dataclass(frozen=True)
class Suite:
    name: str
    package: str  # before the modules' names
    modules: list[str]
    path: tuple[Path, ...] = ()  # first on PYTHONPATH, also of interpreters that tests start
    helpers: Path | None = None  # where uvloop's `_testbase` is


def modules_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("test_*.py"))


def cpython(quick: bool) -> Suite:
    # Not imported: this is not the process that the loop is put into.
    spec = None
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec("test.test_asyncio")
    if spec is None or spec.origin is None:
        major, minor = sys.version_info[:2]
        raise Missing(
            "this interpreter came without its tests; on Debian they are in "
            f"libpython{major}.{minor}-testsuite"
        )
    folder = Path(spec.origin).parent
    modules = [name for name in modules_in(folder) if not quick or name in QUICK]
    return Suite("cpython", "test.test_asyncio.", modules)


def uvloop() -> Suite:
    lacking = [package for name, package in NEEDS.items() if importlib.util.find_spec(name) is None]
    if lacking:
        raise Missing(f"uvloop's tests need {', '.join(lacking)}: pip install '.[conformance]'")
    tree = BUILD / f"uvloop-{UVLOOP}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "fetching").open("w") as lock:  # runs side by side fetch it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            _fetch(tree)
    tests = tree / "tests"
    return Suite("uvloop", "", modules_in(tests), (STANDIN, tests), tree / "uvloop")


def _fetch(tree: Path) -> None:
    """The sdist, unpacked: it appears only once it is whole."""
    sdist = BUILD / f"uvloop-{UVLOOP}.tar.gz"
    if not sdist.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        command += ["--no-binary", "uvloop", "--no-deps", "-d", str(BUILD), f"uvloop=={UVLOOP}"]
        try:
            subprocess.run(command, check=True, timeout=600)
        except (subprocess.SubprocessError, OSError) as exc:
            raise Missing(f"uvloop's sdist could not be fetched: {exc}") from exc
    unpacked = BUILD / "unpacking"
    unpacked.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(unpacked)], check=True)
    os.rename(unpacked / tree.name, tree)
    unpacked.rmdir()
