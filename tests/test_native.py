"""Compiles and runs the C programs of tests/native/ against the sources in _native/: with sanitizers, that of
leaks among them, and (slow) under Valgrind and with many seeds. `make native` runs all of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted((ROOT / "tests" / "native").glob("*.c"))
RANDOM = [path for path in PROGRAMS if path.stem in ("test_model", "test_tables")]
SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
QUICK_STEPS = 20_000

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("pkg-config") is None,
    reason="gcc and pkg-config are needed",
)


def by_name(path: Path) -> str:
    return path.stem


def compiled(program: Path, into: Path, *flags: str) -> str:
    liburing = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "liburing"], check=True, capture_output=True, text=True
    ).stdout.split()
    sources = [str(path) for path in sorted((ROOT / "_native").glob("*.c"))]
    binary = str(into / program.stem)
    command = ["gcc", "-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-I{ROOT / '_native'}", "-o", binary, str(program), *sources, *liburing]
    subprocess.run(command, check=True)
    return binary


def run(*command: str, limit: float = 60) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=1"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=by_name)
def test_native_program(program: Path, tmp_path: Path) -> None:
    run(compiled(program, tmp_path, *SANITIZE), str(QUICK_STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=by_name)
def test_native_program_under_valgrind(program: Path, tmp_path: Path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is needed (Debian package valgrind)")
    binary = compiled(program, tmp_path, "-O1")
    checks = ("--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=all")
    run("valgrind", *checks, binary, str(QUICK_STEPS), limit=300)


@pytest.mark.slow
@pytest.mark.parametrize("program", RANDOM, ids=by_name)
def test_native_program_with_many_seeds(program: Path, tmp_path: Path) -> None:
    binary = compiled(program, tmp_path, *SANITIZE)
    for seed in range(2, 12):
        run(binary, "200000", str(seed), limit=120)
