"""Compiles and runs the C programs of tests/native/, with sanitizers, against the sources in _native/."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted((ROOT / "tests" / "native").glob("*.c"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_native_program(program: Path, tmp_path: Path) -> None:
    if shutil.which("gcc") is None or shutil.which("pkg-config") is None:
        pytest.skip("gcc and pkg-config are needed")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "liburing"], check=True, capture_output=True, text=True
    ).stdout.split()
    sources = [str(path) for path in sorted((ROOT / "_native").glob("*.c"))]
    binary = tmp_path / program.stem
    subprocess.run(
        [
            "gcc",
            "-std=gnu11",
            "-g",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            f"-I{ROOT / '_native'}",
            "-o",
            str(binary),
            str(program),
            *sources,
            *flags,
        ],
        check=True,
    )
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"
    done = subprocess.run(
        [str(binary)], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
