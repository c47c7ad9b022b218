"""Owns the native reactor and everything that its events refer to; hands the events out.

Made by loop.py, one a loop. `select` is the loop's selector call, `core.dispatch` runs as one handle behind
the handles that are already ready, as asyncio's own reader callbacks do. A batch of events
survives any exception: what SystemExit from one callback left in it, the next run goes on with (fast/turn.c).

`held` keeps every buffer that the native side may still hand to the kernel, by token. The dictionary has
one C reference more than Python knows of, given back only when it is empty at close: so neither a
dropped loop, nor garbage collection, nor the interpreter's teardown frees such memory.

Never: called from another thread than the one that runs the loop.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import _fast, checked, faults, hooks, stats
from ._reactor_c import ffi, lib
from .buffers import Frozen, refuse
from .capabilities import default_caps, fallen_back, no_ring, uring_demanded
from .operation import Operation
from .settings import timeout_ns

if TYPE_CHECKING:
    import asyncio

    from .capabilities import Capabilities
    from .settings import Settings


def address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


_EVENTS: int = lib.AZC_FIRED_EVENTS
_POLL: int = lib.AZC_FIRED_POLL
_WAKE: int = lib.AZC_FIRED_WAKE
_RELEASED: int = lib.AZC_FIRED_RELEASED
MAX_WAIT = 24 * 3600.0  # seconds
_wait = lib.azc_wait
_fast.bind(address(lib.azc_api_table()), Frozen, refuse, Operation)

_incref = ctypes.pythonapi.Py_IncRef
_decref = ctypes.pythonapi.Py_DecRef
_incref.argtypes = _decref.argtypes = [ctypes.py_object]
_incref.restype = _decref.restype = None


def _check(rc: int, what: str) -> int:
    if rc < 0:
        raise OSError(-rc, f"{what}: {os.strerror(-rc)}")
    return rc


class Reactor:
    """See the module. `conns` maps a connection's token to its transport or listener."""

    def __init__(self, loop: asyncio.AbstractEventLoop, can: Capabilities, cfg: Settings) -> None:
        transport_cap, loop_cap = default_caps()
        native = ffi.new("azc_config *")
        native.backend = lib.AZC_URING if can.backend == "uring" else lib.AZC_EPOLL
        native.zerocopy = can.zerocopy
        native.msg_zerocopy = can.zerocopy and can.features["msg_zerocopy"]
        native.sq_entries = cfg.ring_entries
        native.cq_entries = cfg.cq_entries
        native.max_request = cfg.max_request
        # From 6.15 on a request gathers out of registered memory; before, it is one part.
        # Without a ring there is nothing to register with.
        native.fixed_parts = 1024 if can.features["sendmsg_zc_fixed"] else 1
        if can.backend == "epoll":
            native.fixed_parts = 0
        native.zc_threshold = cfg.zc_threshold
        native.zc_low_water = cfg.zc_low_water
        native.adaptive = cfg.adaptive
        native.auto_write = ("off", "auto", "always").index(cfg.zc_write)
        native.zc_eor_bytes = cfg.zc_eor_bytes
        native.zc_timeout_ns = timeout_ns(cfg.zc_timeout)
        native.zc_loop_cap = loop_cap if cfg.zc_loop_cap is None else cfg.zc_loop_cap
        native.zc_transport_cap = (
            transport_cap if cfg.zc_transport_cap is None else cfg.zc_transport_cap
        )
        error = ffi.new("int *")
        self.native: Any = lib.azc_open(native, error)
        _check(error[0] if self.native == ffi.NULL else 0, "aiozc: cannot make a reactor")
        self.loop = loop
        self.backend = can.backend
        self.settings = cfg
        self.capabilities = can
        self.conns: dict[int, Any] = {}
        self.listeners: dict[int, Any] = {}  # by descriptor
        # Listening sockets that their owner made: other processes may listen on them, too.
        self.given: weakref.WeakSet[Any] = weakref.WeakSet()
        self.bare: dict[int, Any] = {}  # by SO_COOKIE: see bare.py
        self.bare_watched = False  # its timer runs
        self.held: dict[int, Any] = {}
        _incref(self.held)
        self._lingering = False  # azc_linger is to be called again
        if cfg.zc_check:
            checked.watch()
        size, stride = ffi.new("size_t *"), ffi.new("size_t *")
        memory = lib.azc_recv_memory(self.native, size, stride)
        self.memory = memoryview(ffi.buffer(memory, size[0]))
        self.stride: int = stride[0]
        self._stats = lib.azc_stats_of(self.native)
        self.core = _fast.Core(
            address(self.native),
            address(lib.azc_events(self.native)),
            address(memory),
            self.stride,
            self.conns,
            self.held,
            hooks.report_callback_error,
            MAX_WAIT,
        )

    # -- runs --

    def attach(self) -> None:
        """A run begins in this thread.

        capabilities.py tried a ring, but this one may not fit any more into what the user may lock (or another
        process has used up the descriptors): then the loop goes on with epoll, if nobody demanded uring.
        """
        rc = int(lib.azc_attach(self.native))
        if rc >= 0:
            return
        why = no_ring(-rc) + ", or use backend 'epoll'"
        may = self.backend == "uring" and not uring_demanded(self.settings.backend)
        if may and lib.azc_fall_back(self.native) == 0:
            self.capabilities = fallen_back(self.capabilities, no_ring(-rc))
            self.backend = "epoll"
            rc = int(lib.azc_attach(self.native))
            why = os.strerror(-rc)
        if rc < 0:
            raise OSError(-rc, f"aiozc: cannot start the reactor: {why}")

    def detach(self) -> None:
        """The run ends: queued bytes go out as far as the sockets take them; then the kernel holds
        nothing of ours but memory that waits for its notification."""
        _check(lib.azc_detach(self.native), "aiozc: requests did not end")

    def take(self, rc: int) -> int:
        """What azc_wait answered: AZC_FIRED_* bits; a batch of events waits for `dispatch`."""
        if rc < 0:
            if rc != -4:  # EINTR: Python runs its signal handlers when this call returns
                _check(rc, "aiozc: waiting failed")
            return 0
        if n := rc & _EVENTS:  # first: the batch survives whatever happens
            self.core.begin(n)
        if rc & _RELEASED:
            self.core.drop_released()
        return rc

    # -- connections and operations --

    def open(self, fd: int, kind: int, owner: Any, family: int = 0) -> Any:
        conn = lib.azc_conn_open(self.native, fd, kind, family)
        if conn == ffi.NULL:
            raise MemoryError("aiozc: no memory for a connection")
        self.conns[conn.token] = owner
        return conn

    def close_conn(self, conn: Any, error: int) -> None:
        """Afterwards the descriptor may be closed; `conn` must not be used."""
        if self.native is None:
            return
        self.conns.pop(conn.token, None)
        if answer := lib.azc_conn_close(conn, -error):
            self._pinned(answer)

    def _pinned(self, answer: int) -> None:
        """azc_conn_close (here, or natively in fast/life.c) answered not 0: an error, or memory is pinned."""
        _check(answer, "aiozc: a request did not end")
        if not self._lingering and not self.loop.is_closed():
            self._linger()

    def _linger(self) -> None:
        self._lingering = True
        self.loop.call_later(self.settings.zc_linger / 8, self._look_at_lingering)

    def _look_at_lingering(self) -> None:
        """Closed connections whose memory is pinned: see zc_linger in Settings."""
        self._lingering = False
        if self.native is None:
            return
        if lib.azc_linger(self.native, int(self.settings.zc_linger * 1e9)):
            self._linger()

    def checked(self, keep: Any) -> Any:
        """What an operation is to hold of its locked buffers: where the loop is in debug mode (or zc_check
        says so) what also knows their contents. The native zc_write asks, too."""
        if not checked.wanted(self.loop, self.settings.zc_check):
            return keep
        checked.watch()
        return checked.Checked(self.loop, keep)

    def queue(self, conn: Any, keep: Any, put: Callable[[], Any]) -> Operation:
        """`put` queues natively and answers the azc_op, or NULL. What keeps the buffers locked is held
        before: the exception of a signal handler may come between any two lines of Python."""
        keep = self.checked(keep)
        mark = -id(keep)
        self.held[mark] = keep
        native = put()
        if not native:
            del self.held[mark]
        op = self.admit(conn, native, keep)
        del self.held[mark]
        return op

    def submit(self, conn: Any, parts: _fast.Parts) -> Operation:
        """Queue locked buffers on a connection that has no transport of ours."""
        return self.queue(conn, parts, lambda: ffi.cast("azc_op *", parts.submit_to(conn.address)))

    def admit(self, conn: Any, native: Any, keep: Any) -> Operation:
        """The Operation for a native one that was just queued."""
        if not native:
            raise MemoryError("aiozc: no memory for an operation; nothing was queued")
        op = Operation(self.loop, self, conn, native, keep)
        self.held[native.token] = op
        return op

    @property
    def engine(self) -> str:
        """How zero-copy sends go, where a connection's can."""
        return "uring" if self.backend == "uring" else "msg_zerocopy"

    def zc_stats(self) -> stats.ZcStats:
        return stats.read(self._stats, self.backend)

    def fault(self, name: str, every: int) -> None:
        faults.turn(self.native, name, every)

    def close(self) -> int:
        """Wait for the kernel to give memory back; the number of requests that it did not.

        What it still reads stays held for the life of the process, by the extra reference."""
        if self.native is None:
            return 0
        for op in self.held.values():
            if isinstance(op, Operation):
                op._waiters = None  # nobody can be waiting: the loop does not run any more
        if self._stats.queued_bytes:
            # Written after the last run: it goes out as far as the sockets take it.
            self.attach()
            self.detach()
        lib.azc_drain(self.native, int(self.settings.zc_close_timeout * 1e9))
        for owner in list(self.conns.values()):
            if owner is not None:
                owner._loop_closed()  # what is queued, and not with the kernel, is given up
        self.conns.clear()
        while True:
            self.core.dispatch()
            self.take(lib.azc_take_events(self.native))
            if not self.core.pending:
                break
        self._stats = ffi.new("azc_stats *", self._stats[0])
        for op in self.held.values():
            if isinstance(op, Operation) and op._token:
                op._orphan()
        left = int(lib.azc_close(self.native))
        self.native = None
        self.memory.release()
        if not left:
            self.held.clear()
            _decref(self.held)
        return left


class ReactorSelector(selectors.BaseSelector):
    """The selector that asyncio's loop calls: the reactor, with a real epoll set beside it.

    The set is for add_reader and add_writer, exactly as asyncio has it; its descriptor is polled
    by the reactor while anything is in it. The loop's wake-up descriptor is polled directly, and so is its
    bell, by which threads wake it.
    """

    def __init__(self, reactor: Reactor, is_wakeup: Callable[[Any], bool]) -> None:
        self._reactor = reactor
        self._is_wakeup = is_wakeup
        self._fds = selectors.EpollSelector()
        self._poll = reactor.open(self._fds.fileno(), lib.AZC_POLL, None)
        self._polling = False
        self._wake: selectors.SelectorKey | None = None
        self._wake_conn: Any = None
        self._bell = -1
        self._bell_conn: Any = None

    def _wakes(self, fd: int) -> Any:
        conn = self._reactor.open(fd, lib.AZC_WAKE, None)
        lib.azc_conn_start(conn)
        return conn

    def hang_bell(self) -> int:
        """A new eventfd: who writes to it wakes the loop."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bell_conn = self._wakes(self._bell)
        return self._bell

    def drop_bell(self) -> None:
        """Idempotent."""
        if self._bell_conn is not None:
            self._reactor.close_conn(self._bell_conn, 0)
            os.close(self._bell)
        self._bell, self._bell_conn = -1, None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._wake is None and self._is_wakeup(fileobj):
            self._wake = selectors.SelectorKey(fileobj, fileobj, events, data)
            self._wake_conn = self._wakes(fileobj)
            return self._wake
        key = self._fds.register(fileobj, events, data)
        self._watch()
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        if self._wake is not None and fileobj == self._wake.fileobj:
            key, self._wake = self._wake, None
            self._reactor.close_conn(self._wake_conn, 0)
            self._wake_conn = None
            return key
        key = self._fds.unregister(fileobj)
        self._watch()
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._wake is not None and fileobj == self._wake.fileobj:
            self._wake = selectors.SelectorKey(self._wake.fileobj, self._wake.fd, events, data)
            return self._wake
        return self._fds.modify(fileobj, events, data)

    def _watch(self) -> None:
        wanted = bool(self._fds.get_map())
        if wanted != self._polling and self._reactor.native is not None:
            self._polling = wanted
            (lib.azc_conn_start if wanted else lib.azc_conn_stop)(self._poll)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        reactor = self._reactor
        if reactor.core.pending:
            return []  # an exception left it half walked: first the rest
        # One turn. This runs each time round the loop: no call more than needed.
        if timeout is None:
            fired = _wait(reactor.native, -1)
        elif timeout <= 0:
            fired = _wait(reactor.native, 0)
        else:
            fired = _wait(reactor.native, int(min(timeout, MAX_WAIT) * 1e9) + 1)
        return self.finish(fired) if fired else []

    def finish(self, fired: int) -> list[tuple[selectors.SelectorKey, int]]:
        """What azc_wait answered: which descriptors are ready; a batch of events is put by."""
        if not (fired := self._reactor.take(fired)) & (_POLL | _WAKE):
            return []
        ready: list[tuple[selectors.SelectorKey, int]] = []
        if fired & _WAKE and self._wake is not None:
            ready.append((self._wake, selectors.EVENT_READ))
        if fired & _POLL:
            ready += self._fds.select(0)
        return ready

    def close(self) -> None:
        self._fds.close()

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        if self._wake is not None and fileobj == self._wake.fileobj:
            return self._wake
        return self._fds.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return _Map(self._fds.get_map(), self._wake)


class _Map(Mapping[Any, selectors.SelectorKey]):
    """The epoll set's map, and the wake-up descriptor in it."""

    def __init__(
        self, fds: Mapping[Any, selectors.SelectorKey], wake: selectors.SelectorKey | None
    ) -> None:
        self._fds = fds
        self._wake = wake

    def __getitem__(self, fileobj: Any) -> selectors.SelectorKey:
        if self._wake is not None and fileobj == self._wake.fileobj:
            return self._wake
        return self._fds[fileobj]

    def __iter__(self) -> Iterator[Any]:
        yield from self._fds
        if self._wake is not None:
            yield self._wake.fileobj

    def __len__(self) -> int:
        return len(self._fds) + (self._wake is not None)
