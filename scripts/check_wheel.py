"""Is this wheel what a user can install? Installs it in a clean environment and runs tests against it there.

    python scripts/check_wheel.py dist/aiozc-*.whl [--without-liburing] [--python python3.12] [--tests FILE ...]

The tests are copies in another folder, so the package that they import is the installed one, and never this
tree's: that is checked, too. --without-liburing hides every liburing.so of the system from them, in a mount
namespace of their own (root, or user namespaces, and util-linux's `unshare`). Called by `make wheel-check` and
by people. Changes nothing outside of a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
NEEDS = ["pytest>=8", "pytest-asyncio>=0.24", "pytest-rerunfailures", "hypothesis", "trustme"]
HIDE = """
import ctypes, subprocess
known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
for name in {line.split()[-1] for line in known.splitlines() if "liburing" in line}:
    subprocess.run(["mount", "--bind", "/dev/null", name], check=True)
try:
    ctypes.CDLL("liburing.so.2")
except OSError as error:
    print("no liburing here:", error, flush=True)
else:
    raise SystemExit("liburing.so.2 can still be loaded")
"""
ABOUT = """
import importlib.metadata, importlib.resources, sys, aiozc
where = aiozc.__file__
assert where.startswith(sys.prefix), f"not the installed one: {where}"
assert importlib.metadata.version("aiozc") == aiozc.__version__
assert importlib.resources.files(aiozc).joinpath("py.typed").is_file()
licences = importlib.metadata.metadata("aiozc").get_all("License-File")
print("aiozc", aiozc.__version__, "liburing", aiozc.capabilities().liburing, "licences", *licences)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--without-liburing", action="store_true", help="hide the system's from the tests"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--tests", nargs="+", default=["test_contract.py"], help="files of tests/")
    args = parser.parse_args()
    if not args.wheel.is_file():
        parser.error(f"there is no file {args.wheel}; `make wheel` builds one")
    missing = [name for name in args.tests if not (TESTS / name).is_file()]
    if missing:
        parser.error(f"not in {TESTS}: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="aiozc-wheel-") as made:
        return check(args, Path(made))


def check(args: argparse.Namespace, where: Path) -> int:
    subprocess.run([args.python, "-m", "venv", where / "venv"], check=True)
    python = where / "venv/bin/python"
    wheel = args.wheel.resolve()
    # No compiler is asked for aiozc: what pip cannot install from wheels is a failure.
    install = [python, "-m", "pip", "install", "-q", "--only-binary", "aiozc,cffi", wheel, *NEEDS]
    subprocess.run(install, check=True)
    shutil.copytree(TESTS, where / "tests", ignore=shutil.ignore_patterns("__pycache__", "native"))
    tests = [where / "tests" / name for name in args.tests]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        where,
        "-o",
        "markers=slow\nfaults\ntiming",
        "-o",
        "asyncio_default_fixture_loop_scope=function",
        "-m",
        "not slow",
    ]
    steps = [[python, "-c", ABOUT], [python, "-m", "pytest", *options, *tests]]
    if args.without_liburing:
        steps.insert(0, [python, "-c", HIDE])
    script = " && ".join(shlex.join(map(str, step)) for step in steps)
    command = ["sh", "-c", script]
    if args.without_liburing:
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        command = ["unshare", "--mount", *as_root, *command]
    # From elsewhere, and without the current folder on the path.
    told = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("PYTHONPATH", "AIOZC_BACKEND", "AIOZC_ZEROCOPY"):
        told.pop(name, None)
    return subprocess.run(command, cwd=where, env=told).returncode


if __name__ == "__main__":
    raise SystemExit(main())
