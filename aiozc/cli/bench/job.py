"""What the process that sends is told, and what it answers: two records that travel as JSON.

Made by run.py, read by sender.py, and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """engine: which function of sender.py sends. window: bytes that the zero-copy modes keep unsent or
    unreleased at most, before they wait. cpu: to run on; -1: any. counter: descriptor of a memory
    file in which the receiver counts, for UDP on loopback; -1: none. device: whose packets count as
    arrived, for UDP into a device that drops.
    """

    engine: str
    protocol: str
    family: int
    size: int
    parts: int
    mode: str
    address: str
    port: int
    seconds: float
    window: int = 1 << 20
    cpu: int = -1
    counter: int = -1
    device: str = ""
    max_request: int = 1 << 20
    connections: int = 1


@dataclass(slots=True)
class Result:
    """nbytes: handed over. arrived: what the sender knows to have arrived (acknowledged, or counted by
    the device); -1: it cannot know, and the receiver is asked. cpu: seconds, user and system; user: of
    them, by the timer tick, so of long runs, or medians of several. path: what
    the kernel said about copying: "zero-copy", "copied", "mixed", "unknown".
    """

    nbytes: int
    sends: int
    requests: int
    seconds: float
    cpu: float
    user: float = 0.0
    arrived: int = -1
    segments: int | None = None
    parts_per_request: float | None = None
    notifications: int = 0
    peak_pinned: int = 0
    path: str = "unknown"
    outstanding: int | None = None
    engine: str = ""
    note: str = ""
