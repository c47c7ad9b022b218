"""Where and how a run measured: for the JSON document and below the tables."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .errors import BenchmarkError

PYTHON_LIMIT = 30.0


@dataclass(frozen=True)
class About:
    benchmark: str
    command: list[str]
    date: str
    python: str  # of the contestants
    kernel: str
    machine: str
    cpu: str
    cores: int
    congestion: str  # TCP's control of it: one that paces, as bbr does, decides what bulk rows get
    seconds: float
    warmup: float
    rounds: int

    def __str__(self) -> str:
        return (
            f"`{shlex.join(self.command)}`: Python {self.python}, Linux {self.kernel}, "
            f"TCP {self.congestion}, {self.cpu}, {self.cores} cores; "
            f"medians of {self.rounds} rounds of {self.seconds:g} s"
        )


def about(benchmark: str, python: str, seconds: float, warmup: float, rounds: int) -> About:
    return About(
        benchmark,
        [f"bench/{benchmark}.py", *sys.argv[1:]],
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        python_version(python),
        platform.release(),
        platform.machine(),
        processor(),
        os.cpu_count() or 0,
        Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        seconds,
        warmup,
        rounds,
    )


def python_version(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    try:
        answer = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=PYTHON_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkError(f"--python {python}: {error}") from None
    if answer.returncode:
        raise BenchmarkError(f"--python {python}: {answer.stderr.strip() or 'does not run'}")
    return answer.stdout.strip()


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
