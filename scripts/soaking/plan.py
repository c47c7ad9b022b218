"""What happens on one connection: drawn from (seed, number), so both processes know it without asking.

Used by lives.py, on the loop under test, and by the peers. Our side writes stream 2 * number, the peer stream
2 * number + 1. Whoever connects says the number in 8 bytes first, and the other side answers ACK.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

KIB = 1024
MIB = 1024 * KIB
ACK = b"\x06"
HEADER = 8
FAMILIES = ("tcp", "tcp6", "unix")
PEERS = ("plain", "asyncio")
# A slow or stalled reader reads fast after this many seconds, so that every life is bounded.
PATIENCE = 1.5


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ours. `parts` are (size, kind of buffer); `then` is what is awaited after it."""

    how: str  # write, writelines, zc_submit, zc_send, withdraw
    parts: tuple[tuple[int, str], ...]
    then: str  # nothing, turn, sleep, drain, zc_drain, sent, released, impatient


@dataclass(frozen=True, slots=True)
class Plan:
    number: int
    family: str
    peer: str
    dialled: bool  # we connect; else the peer does
    buffered: bool  # receive by a BufferedProtocol (where we connect)
    steps: tuple[Step, ...]
    end: str  # eof, close, abort, reset; peer: it ends the connection, at any time
    cut: float  # abort, reset: so many seconds after the start; < 0: after the last step
    sndbuf: int
    threshold: int
    cap: int
    pauses: bool  # we pause reading at random
    # the peer
    reads: str  # fast, slow, stall, never
    rcvbuf: int
    sends: int
    chunk: int
    half_closes: bool  # it shuts down its side once it sent all
    late: bool  # it sends only after our end of file
    peer_end: str  # "", reset, close
    peer_end_bytes: int
    peer_end_after: float

    @property
    def exact(self) -> bool:
        """Every byte must arrive, both ways."""
        return self.end in ("eof", "close")

    @property
    def total(self) -> int:
        return sum(size for step in self.steps for size, _ in step.parts)

    def __str__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "steps"]
        steps = [
            f"{s.how}[{len(s.parts)}: {sum(size for size, _ in s.parts)}]/{s.then}"
            for s in self.steps
        ]
        return f"{' '.join(said)} steps={' '.join(steps)}"


_KINDS = ("bytes", "bytearray", "view", "frozen", "mmap")
_THEN = (
    "nothing",
    "nothing",
    "turn",
    "sleep",
    "drain",
    "zc_drain",
    "sent",
    "released",
    "impatient",
)


def _size(rng: random.Random, largest: int) -> int:
    """Log-uniform, and often at one of the bounds that the queue has."""
    if rng.random() < 0.2:
        edge = rng.choice((1, 512, 8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB))
        return min(largest, max(1, edge + rng.randint(-1, 1)))
    return min(largest, int(2 ** rng.uniform(0, 20.0)))


def _step(rng: random.Random, room: int) -> Step:
    how = rng.choice(
        ("write", "write", "writelines", "zc_submit", "zc_submit", "zc_many", "zc_send", "withdraw")
    )
    count = 1
    if how == "writelines":
        count = rng.choice((1, 2, 3, 8, 40))
    elif how == "zc_many":
        how = "zc_submit"
        count = rng.choice((2, 2, 3, 4, 16, 64, 300, 1500))
    elif how == "zc_send" and rng.random() < 0.3:
        count = rng.choice((2, 5, 20))
    largest = max(1, min(room // count, MIB))
    kinds = [rng.choice(_KINDS) for _ in range(min(count, 4))]
    parts = tuple(
        (0 if count > 1 and rng.random() < 0.05 else _size(rng, largest), kinds[i % len(kinds)])
        for i in range(count)
    )
    if how in ("write", "writelines"):
        then = rng.choice(("nothing", "nothing", "turn", "sleep", "drain", "zc_drain"))
    else:
        then = rng.choice(_THEN)
    return Step(how, parts, then)


def make(seed: int, number: int, families: tuple[str, ...] = FAMILIES) -> Plan:
    rng = random.Random(f"{seed}:{number}")
    end = rng.choices(("eof", "close", "abort", "reset", "peer"), (30, 25, 15, 12, 18))[0]
    reads = rng.choices(("fast", "slow", "stall", "never"), (50, 25, 15, 10))[0]
    if reads == "never" and end != "peer":
        reads = "stall"
    largest = 8 * MIB if rng.random() < 0.1 else rng.choice((4 * KIB, 128 * KIB, MIB))
    steps = []
    room = largest
    for _ in range(rng.randint(0, 12)):
        steps.append(_step(rng, room))
        room -= sum(size for size, _ in steps[-1].parts)
        if room <= 0:
            break
    sends = 0 if rng.random() < 0.4 else _size(rng, MIB)
    late = end == "eof" and rng.random() < 0.3
    return Plan(
        number=number,
        family=rng.choices(families, (60, 20, 20)[: len(families)])[0],
        peer=rng.choice(PEERS),
        dialled=rng.random() < 0.5,
        buffered=rng.random() < 0.3,
        steps=tuple(steps),
        end=end,
        cut=rng.uniform(0.0, 0.5) if end in ("abort", "reset") and rng.random() < 0.6 else -1.0,
        sndbuf=rng.choice((0, 0, 16 * KIB, 64 * KIB, MIB)),
        threshold=rng.choice((-1, -1, -1, 0, 4096, 1 << 40)),
        cap=rng.choice((-1, -1, -1, -1, 0, 64 * KIB)),
        pauses=rng.random() < 0.3,
        reads=reads,
        # Not smaller: zero-copy parts are charged by the page, and what the window promised is
        # then dropped and sent again after pauses of seconds.
        rcvbuf=rng.choice((0, 0, 128 * KIB, 512 * KIB)),
        sends=sends,
        chunk=max(_size(rng, 128 * KIB), sends // 200),
        half_closes=rng.random() < 0.3 and not late,
        late=late,
        peer_end=rng.choice(("reset", "close")) if end == "peer" else "",
        peer_end_bytes=_size(rng, largest),
        peer_end_after=rng.uniform(0.0, 1.2),
    )
