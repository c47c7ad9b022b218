"""What a process holds: memory, descriptors, and what its loop has in flight. Samples, and the table of them.

Used by soak.py in its own process and by idle.py from outside. Must never allocate much: it is part of what it
measures.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1024 * 1024


def rss(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE


def descriptors(pid: int | str = "self") -> int:
    """Open descriptors; for this process without the one that lists them."""
    return len(os.listdir(f"/proc/{pid}/fd")) - (pid == "self")


class _Mallinfo2(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def heap() -> int:
    """Bytes that C code has allocated and not freed: exact, where RSS also counts holes. 0: unknown."""
    if _mallinfo2 is None:
        return 0
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


def settle() -> None:
    """Give back what nobody refers to, so that what is left is held by somebody."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def mib(size: float) -> str:
    return f"{size / MIB:.1f}"


class Witness:
    """A thread that looks at the clock. Where it saw a gap, the machine stood still, and not the loop.

    It also ends the process when it ran for `limit` seconds: a hang is told, with the stacks of all threads.
    """

    TICK = 0.1

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.lost = 0.0  # seconds in which this thread did not run
        threading.Thread(target=self.look, daemon=True).start()
        # And should nobody let go of the interpreter's lock, by a clock that does not need it:
        faulthandler.dump_traceback_later(4 * limit, exit=True)

    def look(self) -> None:
        ran, last = 0.0, time.monotonic()
        while ran < self.limit:
            time.sleep(self.TICK)
            now = time.monotonic()
            ran += min(now - last, 2 * self.TICK)
            self.lost += max(0.0, now - last - 2 * self.TICK)
            last = now
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    quiet: bool  # nothing was going on: every level must be as at the start
    rss: int
    heap: int
    blocks: int  # of Python's own allocator
    fds: int
    lives: int
    connections: int
    queued: int
    pinned: int
    operations: int
    held: int


@dataclass
class Watch:
    loop: Any
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)

    def take(self, lives: int, quiet: bool = False) -> Sample:
        stats = self.loop.zc_stats()
        sample = Sample(
            at=time.monotonic() - self.began,
            quiet=quiet,
            rss=rss(),
            heap=heap(),
            blocks=sys.getallocatedblocks(),
            fds=descriptors(),
            lives=lives,
            connections=stats.connections,
            queued=stats.queued_bytes,
            pinned=stats.pinned_bytes,
            operations=stats.operations_live,
            held=len(self.loop._reactor.held),
        )
        self.samples.append(sample)
        return sample

    def show(self, console: Console, title: str, rows: int = 16) -> None:
        """Every quiet moment, and of the busy ones as many as there is room for."""
        table = Table(title=title, title_justify="left")
        for name in ("s", "lives", "fds", "RSS MiB", "heap MiB", "blocks", "queued MiB"):
            table.add_column(name, justify="right")
        for name in ("pinned MiB", "operations", "held", ""):
            table.add_column(name, justify="right")
        step = max(1, len(self.samples) // rows)
        for i, s in enumerate(self.samples):
            if s.quiet or i % step == 0:
                table.add_row(
                    f"{s.at:.1f}",
                    str(s.lives),
                    str(s.fds),
                    mib(s.rss),
                    mib(s.heap),
                    f"{s.blocks:,}",
                    mib(s.queued),
                    mib(s.pinned),
                    str(s.operations),
                    str(s.held),
                    "quiet" if s.quiet else "",
                )
        console.print(table)
