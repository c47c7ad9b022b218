"""Compiles and runs the C programs of tests/native/ against the sources in _native/: with sanitizers, that of
leaks among them, and (slow) under Valgrind and with many seeds. `make native` runs all of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted((ROOT / "tests" / "native").glob("*.c"))
RANDOM = [path for path in PROGRAMS if path.stem in ("test_model", "test_tables")]
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Valgrind runs one thread at a time, and none while another one waits in io_uring_enter.
ONE_THREAD = [path for path in PROGRAMS if path.stem != "test_unix_eof"]
QUICK_STEPS = 20_000

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("pkg-config") is None,
    reason="gcc and pkg-config are needed",
)


def by_name(path: Path) -> str:
    return path.stem


def gcc(*arguments: str) -> None:
    flags = ("-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / '_native'}")
    liburing = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "liburing"], check=True, capture_output=True, text=True
    ).stdout.split()
    subprocess.run(["gcc", *flags, *arguments, *liburing], check=True)


Compile = Callable[[Path, bool], str]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """compiled(program, sanitized): its binary. The sources of _native/ are compiled once for all programs."""
    libraries: dict[bool, Path] = {}

    def compile(program: Path, sanitized: bool) -> str:
        flags = SANITIZE if sanitized else ()
        if sanitized not in libraries:
            into = libraries[sanitized] = tmp_path_factory.mktemp("native")
            for source in sorted((ROOT / "_native").glob("*.c")):
                gcc(*flags, "-c", "-o", str(into / f"{source.stem}.o"), str(source))
        objects = [str(path) for path in sorted(libraries[sanitized].glob("*.o"))]
        binary = libraries[sanitized] / f"{program.stem}.program"
        gcc(*flags, "-o", str(binary), str(program), *objects)
        return str(binary)

    return compile


def run(*command: str, limit: float = 60) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=1"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=by_name)
def test_native_program(program: Path, compiled: Compile) -> None:
    run(compiled(program, True), str(QUICK_STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("program", ONE_THREAD, ids=by_name)
def test_native_program_under_valgrind(program: Path, compiled: Compile) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is needed (Debian package valgrind)")
    binary = compiled(program, False)
    checks = ("--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=all")
    run("valgrind", *checks, binary, str(QUICK_STEPS), limit=300)


@pytest.mark.slow
@pytest.mark.parametrize("program", RANDOM, ids=by_name)
def test_native_program_with_many_seeds(program: Path, compiled: Compile) -> None:
    binary = compiled(program, True)
    for seed in range(2, 8):
        run(binary, "100000", str(seed), limit=120)
