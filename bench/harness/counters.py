"""What the operating system counts for a process, and the figures of a measurement.

The server's CPU time and page faults are read before and after the measured window, while nothing is in
flight.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Figures:
    """One measurement, or the medians of several. "Request" is a call in rows without a network."""

    requests_per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float  # of the server, for each request; user and system together
    user_us: float
    system_us: float
    minor_faults: float  # for each request


def medians(rounds: Sequence[Figures]) -> Figures:
    return Figures(
        **{f.name: statistics.median(getattr(r, f.name) for r in rounds) for f in fields(Figures)}
    )


def stat(path: Path) -> tuple[int, int, int]:
    """User ticks, system ticks and minor faults of a process or a thread."""
    # The name in the second field may hold spaces: count from behind it.
    values = (path / "stat").read_text().rpartition(")")[2].split()
    return int(values[11]), int(values[12]), int(values[7])


@dataclass(frozen=True)
class Counters:
    """What was counted for one process, all threads together but for one that is `apart`."""

    run_ns: dict[str, int]  # by thread: exact, but gone when the thread ends
    user_ticks: int
    system_ticks: int
    minor_faults: int

    @classmethod
    def read(cls, pid: int, apart: int | None = None) -> Counters:
        process = Path(f"/proc/{pid}")
        run_ns = {}
        for thread in (process / "task").iterdir():
            # A worker thread of the kernel may end between the listing and the reading.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                run_ns[thread.name] = int((thread / "schedstat").read_text().split()[0])
        whole = stat(process)
        other = (0, 0, 0)
        if apart is not None:
            run_ns.pop(str(apart), None)
            other = stat(process / "task" / str(apart))
        return cls(run_ns, *(a - b for a, b in zip(whole, other, strict=True)))

    def since(self, before: Counters) -> tuple[float, float, float, int]:
        """CPU, user and system microseconds, and minor faults.

        The split between user and system is sampled by the timer tick; the sum is exact as long as
        no thread ended in between (else it comes from the ticks too).
        """
        tick_us = 1e6 / os.sysconf("SC_CLK_TCK")
        user = (self.user_ticks - before.user_ticks) * tick_us
        system = (self.system_ticks - before.system_ticks) * tick_us
        total = user + system
        if before.run_ns.keys() <= self.run_ns.keys():
            total = (sum(self.run_ns.values()) - sum(before.run_ns.values())) / 1e3
        share = user / (user + system) if user + system else 0.0
        return total, total * share, total * (1 - share), self.minor_faults - before.minor_faults
