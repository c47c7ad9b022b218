"""Who takes part: the event loops that an interpreter has, and the C server that is the floor."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contestant.loops import LOOPS

from .errors import BenchmarkError
from .paths import program, python_path
from .rows import Row

FLOOR = "c-epoll"
BASELINE = "uvloop"
NAMES = (FLOOR, *LOOPS)
PROBE_LIMIT = 60.0


@dataclass(frozen=True)
class Window:
    """How long a measurement takes."""

    seconds: float
    warmup: float


@dataclass(frozen=True)
class Contestant:
    name: str
    python: str
    version: str

    def takes_part(self, row: Row) -> bool:
        return self.name != FLOOR or bool(row.floor)

    def command(self, row: Row, window: Window) -> list[str | Path]:
        if self.name == FLOOR:
            return [program(row.floor[0]), *row.floor[1:]]
        numbers = {
            "connections": row.connections,
            "size": row.size,
            "piece": row.piece or row.size,
            "cycle": row.cycle,
            "seconds": window.seconds,
            "warmup": window.warmup,
        }
        options = [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
        return [self.python, "-m", "contestant", self.name, row.service, *options]


def available(
    python: str, wanted: Sequence[str] | None, default: Sequence[str]
) -> tuple[list[Contestant], dict[str, str]]:
    """Those of `wanted` that this interpreter has, and of the others the reasons.

    Those asked for by name must be there; of the default ones, those that are missing are left out.
    """
    found, missing = [], {}
    for name in wanted or default:
        if name == FLOOR:
            found.append(Contestant(name, python, "-"))
            continue
        try:
            probe = subprocess.run(
                [python, "-m", "contestant", name, "--probe"],
                env=os.environ | {"PYTHONPATH": python_path()},
                capture_output=True,
                text=True,
                timeout=PROBE_LIMIT,
            )
        except subprocess.TimeoutExpired:
            missing[name] = "making a loop does not end"
            continue
        if probe.returncode == 0:
            found.append(Contestant(name, python, probe.stdout.strip()))
        else:
            missing[name] = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
    if wanted and missing:
        raise BenchmarkError("; ".join(f"{name}: {why}" for name, why in missing.items()))
    return found, missing
