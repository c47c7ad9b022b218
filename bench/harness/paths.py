"""Where things are, and the C programs: compiled once for each version of their sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import BenchmarkError

BENCH = Path(__file__).resolve().parent.parent
SHARED = ("load.c", "load.h")
FLOOR = ("floor.c", "floor.h")  # of the servers in C


def python_path() -> str:
    """The source tree first, so that an interpreter without aiozc installed finds it."""
    found = (str(BENCH.parent), str(BENCH), os.environ.get("PYTHONPATH"))
    return os.pathsep.join(filter(None, found))


def program(name: str) -> Path:
    shared = SHARED + FLOOR * name.endswith("_floor")
    sources = [BENCH / file for file in (f"{name}.c", *shared)]
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise BenchmarkError("a C compiler is needed for the client: install gcc")
    directory = Path(tempfile.gettempdir()) / f"aiozc-bench-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise BenchmarkError(f"{directory} belongs to somebody else")
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    found = directory / digest[:16] / name
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        unfinished = found.with_suffix(f".{os.getpid()}")
        units = [source for source in sources if source.suffix == ".c"]
        subprocess.run([compiler, "-O2", "-o", unfinished, *units], check=True)
        unfinished.rename(found)
    return found
