"""The soak and idle scripts, run small; and that the soak sees what it is there to see.

A soak that calls a broken loop sound is worth less than none, so some of these tests break something: they
run the script in a process where a part of the package, or of the script, was replaced before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
# The script's own bound on what comes after --seconds, and the start of its processes.
MORE = 100.0
QUICK = ("--seconds", "4", "--connections", "50", "--seed", "7")


def run(*command: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=seconds + MORE,
        cwd=SCRIPTS,
        env={**os.environ, "COLUMNS": "100", "TERM": "dumb"},
    )


def violations(setup: str, *args: str, backend: str = "epoll") -> str:
    """What a soak reports that must find something: `setup` was executed in its process first."""
    args = ("--backend", backend, *(args or QUICK))
    code = f"import sys; sys.argv = ['soak.py', *{args!r}]; import soak\n{setup}\nsys.exit(soak.main())"
    result = run("-c", code, seconds=10.0)
    assert result.returncode == 1, result.stderr + result.stdout
    return result.stderr


@pytest.mark.parametrize("how", [(), ("--forced", "--runs", "many")], ids=["plain", "forced-many"])
def test_connections_at_random_lose_nothing_and_leave_nothing(
    backend: str, how: tuple[str, ...]
) -> None:
    result = run("soak.py", "--backend", backend, *QUICK, *how, seconds=4.0)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "no violation" in result.stdout
    assert result.stdout.count("quiet") == 4  # before, and after each of three rounds


@pytest.mark.slow
def test_two_minutes_of_connections_at_random_lose_nothing_and_leave_nothing(backend: str) -> None:
    args = ("--seconds", "120", "--connections", "200", "--seed", "11")
    result = run("soak.py", "--backend", backend, *args, seconds=120.0)
    assert result.returncode == 0, result.stderr + result.stdout


def test_the_soak_sees_a_wrong_byte() -> None:
    spoil = """
from aiozc.transports.stream import StreamTransport
write = StreamTransport.write
def spoiled(self, data):
    if len(data) == 777 or len(data) > 50_000:
        data = bytearray(getattr(data, 'obj', data)); data[500] ^= 1
    write(self, data)
StreamTransport.write = spoiled
"""
    assert "instead of" in violations(spoil)


def test_the_soak_sees_a_lost_byte() -> None:
    spoil = """
from aiozc.transports.stream import StreamTransport
write = StreamTransport.write
def spoiled(self, data):
    whole = memoryview(getattr(data, 'obj', data))
    write(self, whole[:-1] if len(whole) > 9000 else data)
StreamTransport.write = spoiled
"""
    assert "VIOLATION" in violations(spoil)


def test_the_soak_sees_a_descriptor_that_stays() -> None:
    leak = """
import os
soak.QUIET_LIMIT = 1.0
greeted = soak.greeted
async def leaking(reader, writer):
    os.dup(0)
    return await greeted(reader, writer)
soak.greeted = leaking
"""
    assert "descriptors with every connection over" in violations(leak)


def test_the_soak_sees_memory_that_is_kept() -> None:
    keep = """
kept = []
greeted = soak.greeted
async def keeping(reader, writer):
    kept.append(bytearray(60_000))
    kept.extend(object() for _ in range(100))
    return await greeted(reader, writer)
soak.greeted = keeping
"""
    told = violations(keep)
    assert "heap MiB grew by" in told
    assert "blocks grew by" in told


def test_the_soak_sees_a_loop_that_does_not_turn() -> None:
    block = """
import time
soak.TURN_LIMIT = 0.5
greeted = soak.greeted
async def blocking(reader, writer):
    time.sleep(1.0)
    return await greeted(reader, writer)
soak.greeted = blocking
"""
    assert "did not turn" in violations(block, "--connections", "2", "--seconds", "1")


def test_the_soak_sees_memory_that_is_given_back_before_the_kernel_read_it() -> None:
    early = """
from soaking import lives
async def spoil(self, op, memory):
    with lives.contextlib.suppress(OSError):
        await op.sent
    for own in memory:
        if isinstance(own, bytearray):
            lives.overwrite(own)
lives.Life.spoil = spoil
"""
    assert "given back and overwritten" in violations(early, "--forced", *QUICK, backend="uring")


def test_idle_and_busy_connections_cost_bounded_memory_and_leave_nothing(backend: str) -> None:
    args = ("--idle", "500", "--busy", "20", "--seconds", "3", "--loop", backend)
    result = run("idle.py", *args, seconds=3.0)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "bytes an idle connection" in result.stdout
