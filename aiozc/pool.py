"""Registered memory: `BufferPool`, and `Region` for memory that a caller has.

Memory that is registered with a ring is locked once, instead of page by page in every send; sending from it
costs the least of all. Nothing has to be said when it is sent: the native side finds a buffer's region by its
address (_native/regions.c), whoever passes it, and each ring registers a region when it first meets it. On
the epoll backend the same memory is plain memory.

Owns: the memory of pools, and when a slice of it may be used again: when nobody refers to it any more,
neither its user nor an operation that the kernel may still read for. Used from any thread.
Never: takes a slice back that somebody can still reach.
"""

from __future__ import annotations

import collections
import errno
import mmap
import operator
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from . import _fast
from ._reactor_c import ffi, lib
from .buffers import export
from .hugepages import HUGE, all_huge

if TYPE_CHECKING:
    from types import TracebackType

    from .reactor import Reactor

_MAX_REGION: int = lib.AZC_REGION_BYTES
_CACHE_LINE = 64

_REMEDY = {
    errno.EFAULT: "memory of a file mapping, or memory that is only readable, cannot be registered; send it "
    "unregistered, or copy it into an aiozc.BufferPool",
    errno.ENOMEM: "over RLIMIT_MEMLOCK, to which registered memory counts as long as it is registered; raise "
    "it (ulimit -l), or register less",
    errno.ENOSPC: "this loop's ring has its 256 regions; close some, or use fewer and larger ones",
    errno.EINVAL: "this kernel cannot register buffers one by one (Linux 5.19 can); send it unregistered",
}


class PoolExhausted(RuntimeError):
    """No buffer of the pool is free, and it may not grow."""


def _add(address: int, size: int) -> int:
    number = int(lib.azc_region_add(ffi.cast("char *", address), size))
    if not number:
        raise OSError(
            errno.ENOSPC,
            f"the process has its {lib.AZC_REGIONS_MAX} regions; close pools or regions that are not used",
        )
    return number


def _register(reactor: Reactor, number: int) -> None:
    """With this loop's ring, now. OSError: the kernel refused; says what to do."""
    error = -int(lib.azc_region_register(reactor.native, number))
    if error and error != errno.ENXIO:  # ENXIO: the loop does not run here; it does it on first use
        raise OSError(error, f"cannot register: {_REMEDY.get(error, os.strerror(error))}")


class _Closing:
    """`with` closes it."""

    if TYPE_CHECKING:

        def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class Region(_Closing):
    """A caller's memory, registered. Made by `loop.register_buffer`; a context manager.

    The object is locked (a bytearray cannot be resized) until `close()`. After that, what was sent from
    it is still safe: each operation holds the object itself.

    Memory of nothing but huge pages is not kept registered, for the kernel makes that much dearer to send;
    it is sent as any other memory is.
    """

    def __init__(self, obj: Any) -> None:
        """BufferError: not contiguous. ValueError: empty, or larger than 1 GiB, the kernel's limit."""
        self._lock = export(obj)
        self.nbytes = len(self._lock)
        if not 0 < self.nbytes <= _MAX_REGION:
            raise ValueError(
                f"a region has 1 byte to 1 GiB, not {self.nbytes}; register slices of it: "
                "memoryview(obj)[a:b]"
            )
        self._address = int(ffi.cast("uintptr_t", self._lock))
        self._number = _add(self._address, self.nbytes)

    @property
    def closed(self) -> bool:
        return self._lock is None

    @property
    def registered(self) -> bool:
        """False: it is closed, or it is made of huge pages."""
        return bool(self._number)

    def close(self) -> None:
        """Not registered any more, and unlocked. Idempotent."""
        self._drop()
        self._lock = None

    def _drop(self) -> None:
        number, self._number = self._number, 0
        if number:
            lib.azc_region_drop(number)

    def _review(self) -> None:
        """Now that the kernel has seen it, so all its pages are there."""
        if all_huge(self._address, self.nbytes):
            self._drop()

    def __del__(self) -> None:
        if getattr(self, "_number", 0):  # 0, too, when __init__ raised
            self.close()

    def __repr__(self) -> str:
        state = "" if self._number else ", closed" if self.closed else ", of huge pages"
        return f"<aiozc.Region of {self.nbytes} bytes{state}>"


def register_buffer(reactor: Reactor, obj: Any) -> Region | None:
    """See EventLoop.register_buffer."""
    if isinstance(obj, BufferPool):
        for segment in obj._segments:
            _register(reactor, segment.number)
        return None
    region = Region(obj)
    try:
        _register(reactor, region._number)
    except OSError:
        region.close()
        raise
    region._review()
    return region


class _Segment:
    """One mapping of a pool. Slices keep it alive; it goes with the last of them."""

    def __init__(self, size: int, huge: bool) -> None:
        if huge:
            size = -(-size // HUGE) * HUGE
        self.number = 0
        self._args = size, huge
        self._mapped = lib.azc_map(size, huge)
        if self._mapped == ffi.NULL:
            error = ffi.errno
            if not huge:
                raise OSError(error, f"no {size} bytes for a pool: {os.strerror(error)}")
            raise OSError(
                error,
                f"no {size >> 20} MiB of huge pages are free: reserve them (sysctl "
                f"vm.nr_hugepages={size // HUGE}), or use huge_pages=False",
            )
        self.address = int(ffi.cast("uintptr_t", self._mapped))
        # Huge pages with the one behind them, see pages.c.
        self.number = _add(self.address, size + mmap.PAGESIZE * huge)

    def __del__(self) -> None:
        # Out of the list before the mapping goes: its address may be somebody else's next.
        if self.number:
            lib.azc_region_drop(self.number)
        if self._mapped != ffi.NULL:
            lib.azc_unmap(self._mapped, *self._args)


class _Layout:
    """Where buffers of one size lie in a mapping. They do not share cache lines, and none touches more pages
    than it must: each page that a part touches is a piece of a packet, which has room for 17."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        line = -(-size // _CACHE_LINE) * _CACHE_LINE
        self.group = max(1, page // line)  # buffers that share a page, or pages
        self.span = page if line <= page else -(-size // page) * page
        self._line = line

    def place(self, i: int) -> int:
        group, within = divmod(i, self.group)
        return group * self.span + within * self._line

    def bytes(self, count: int) -> int:
        return -(-count // self.group) * self.span


class BufferPool(_Closing):
    """Buffers of one size out of registered memory.

    size: bytes of a buffer. count: buffers at the start. max_count: the pool grows by `count` up to so
    many; default: it does not grow. huge_pages: from 2 MiB pages, which the system must have reserved.

    A buffer is a writable memoryview. It is free again once it was released (`view.release()`, the end
    of `with pool.acquire() as view:`, or simply dropped), every slice of it was dropped, too, and the
    kernel has released every operation that sends from it: so it may be released right after
    `zc_submit`. Its contents are whatever the last user left.

    Registered memory is locked: it counts to RLIMIT_MEMLOCK (unless the process has CAP_IPC_LOCK) from
    its first use in a loop until the pool is closed. If a ring cannot register it, sends from it work
    all the same, unregistered; `loop.register_buffer(pool)` tells why. Used from any thread.
    """

    def __init__(
        self,
        *,
        size: int = 65536,
        count: int = 64,
        max_count: int | None = None,
        huge_pages: bool = False,
    ) -> None:
        """TypeError: not an int. ValueError: not positive, or a buffer over 1 GiB. OSError: no memory, or no
        huge pages."""
        if max_count is None:
            max_count = count
        size, count, max_count = map(operator.index, (size, count, max_count))
        if size < 1 or count < 1 or max_count < count:
            raise ValueError("size and count must be at least 1, and max_count at least count")
        self._layout = _Layout(size)
        self._most = _MAX_REGION - HUGE * huge_pages
        if self._layout.span > self._most:
            raise ValueError(
                "a buffer cannot be larger than 1 GiB (with huge pages, 1 GiB - 2 MiB), for the kernel's "
                "limit of a region"
            )
        self.size = size
        self._step = count
        self._max = max_count
        self._huge = huge_pages
        self._made = 0
        self._closed = False
        self._free: collections.deque[tuple[int, _Segment]] = collections.deque()
        self._segments: list[_Segment] = []
        self._growing = threading.Lock()
        self._grow()

    def _grow(self) -> None:
        """More buffers, in regions of at most 1 GiB."""
        left = min(self._step, self._max - self._made)
        while left:
            n = min(left, self._most // self._layout.span * self._layout.group)
            segment = _Segment(self._layout.bytes(n), self._huge)
            self._segments.append(segment)
            self._free.extend((segment.address + self._layout.place(i), segment) for i in range(n))
            self._made += n
            left -= n

    def acquire(self) -> memoryview:
        """A buffer, of `size` bytes. PoolExhausted: none is free, and the pool may not grow.

        RuntimeError: the pool is closed."""
        if self._closed:
            raise RuntimeError("the pool is closed; make another one")
        try:
            place = self._free.pop()  # what was used last lies in the cache
        except IndexError:
            place = self._more()
        # The slice's owner: goes when the last view, and the last operation's lock, go.
        return memoryview(_fast.Slot(place[0], self.size, _giver(self._free, place)))

    def _more(self) -> tuple[int, _Segment]:
        with self._growing:
            while True:  # another thread's acquire() may take what was just made
                try:
                    return self._free.pop()
                except IndexError:
                    if self._made < self._max:
                        self._grow()
                        continue
                raise PoolExhausted(
                    f"all {self._made} buffers are in use: release them (a buffer is free once its views "
                    "are dropped and its sends released), or give the pool a larger count or max_count"
                )

    @property
    def count(self) -> int:
        """Buffers made so far."""
        return self._made

    @property
    def free(self) -> int:
        """Buffers that acquire() has without growing."""
        return len(self._free)

    def close(self) -> None:
        """No more buffers. Those in use stay valid; their memory goes with the last of them. Idempotent."""
        self._closed = True
        for segment in self._segments:
            number, segment.number = segment.number, 0
            if number:
                lib.azc_region_drop(number)
        self._segments.clear()
        self._free.clear()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.free} of {self.count} free"
        return f"<aiozc.BufferPool of {self.size} bytes, {state}>"


def _giver(
    free: collections.deque[tuple[int, _Segment]], place: tuple[int, _Segment]
) -> Callable[[], None]:
    def give_back() -> None:
        if place[1].number:  # 0: the pool was closed meanwhile
            free.append(place)

    return give_back
