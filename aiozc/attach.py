"""Zero-copy on event loops that are not ours: uvloop's, asyncio's own, or any with add_reader.

Owns: one reactor for each such loop, made on first use and torn down when the loop is closed. It sleeps in
no call of its own: the loop watches one descriptor of it (an eventfd that the ring signals, or the epoll
set), and then, and after each submission, a turn that never waits is run. Called by users; what
happens on one connection is in foreign.py.
Never: changes what the loop does otherwise, or a setting of its transports.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from . import foreign, foreign_tls, standin, streams
from ._fast import Parts
from ._reactor_c import lib
from .capabilities import choose
from .loop import EventLoop
from .operation import Operation, Result
from .reactor import Reactor
from .settings import Settings, settings_of

if TYPE_CHECKING:
    from .transports.stream import Sendable

_ORPHANS = 0.01  # seconds
_TURNS = 8  # before others on the loop have theirs
_LOOK_MIN = 0.05  # seconds

_attachments: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Attachment]] = (
    weakref.WeakKeyDictionary()
)


def zc_attach(**settings: Any) -> None:
    """Give the running loop, which is not aiozc's, its zero-copy side now, with these Settings.

    Otherwise that happens on first use, with the defaults. RuntimeError: it has one already, or it is
    a loop of aiozc, which takes its settings when it is made.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, EventLoop):
        raise RuntimeError("this is a loop of aiozc: give the settings to aiozc.new_event_loop")
    if _find(loop) is not None:
        raise RuntimeError(
            "this loop has its zero-copy side already; call zc_attach before its use"
        )
    _make(loop, settings_of(settings))


def zc_submit(writer: asyncio.StreamWriter, data: Sendable) -> Operation:
    """Queue a buffer, or a list of buffers, to be sent zero-copy by any asyncio StreamWriter, on any loop.

    As StreamWriter.zc_submit on a loop of aiozc, with the same contract and errors. On another loop
    `writer.transport` is a stand-in until everything queued is sent: what is written, ended and
    closed through the writer, or through that stand-in, keeps its order. The transport that other
    code holds (a protocol's, from connection_made) must not be written to meanwhile; where that is
    noticed the loop's exception handler is told.
    Over TLS it copies, and the memory is free when the call returns.
    RuntimeError: no connection of a stream socket (a pipe), or the writer is another loop's.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, EventLoop):
        return streams.zc_submit(writer, data)
    if getattr(writer, "_loop", loop) is not loop:
        raise RuntimeError("the writer belongs to another event loop; call it there")
    transport = writer.transport
    stream = standin.stream_of(transport)  # while it has one, a few looks are spared
    if stream is not None:
        real, sock = stream.real, None
    else:
        real = standin.real_of(transport)
        if real.get_extra_info("sslcontext") is not None:
            return foreign_tls.tls_submit(loop, writer, real, data)
        sock = standin.socket_of(real)
    standin.check(real)
    keep = Parts(data)
    if not keep.nbytes:
        return Operation.finished(loop)
    if stream is None:
        attachment = _find(loop) or _make(loop, Settings())
        attachment.enter()
        stream = attachment.streams.get(id(real)) or foreign.Stream(attachment, real, sock)
    else:
        stream.at.enter()
    return stream.submit(writer, keep)


async def zc_send(writer: asyncio.StreamWriter, data: Sendable) -> Result:
    """Send zero-copy by any asyncio StreamWriter, and wait until the memory may be used again.

    Raises like `zc_submit`, or the OSError that ended the connection. Being cancelled does not cut the
    stream: the bytes still go, and the memory stays locked until they went.
    """
    return await zc_submit(writer, data).released


def _find(loop: asyncio.AbstractEventLoop) -> Attachment | None:
    found = _attachments.get(loop)
    attachment = found and found()
    return attachment if attachment and not attachment.ended else None


def _make(loop: asyncio.AbstractEventLoop, settings: Settings) -> Attachment:
    attachment = Attachment(loop, settings)
    _attachments[loop] = weakref.ref(attachment)  # the loop itself keeps it
    return attachment


class Attachment:
    """The reactor of one loop. `streams`: its connections with unreleased operations, by id(transport).
    `pumps` counts turns."""

    ended = True  # until it was made

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
        self.loop = loop
        self.reactor = Reactor(loop, choose(settings.backend, settings.zerocopy), settings)
        self.ended = False
        self.streams: dict[int, foreign.Stream] = {}
        self.pumps = 0
        self._fd = -1
        self._thread: tuple[int, int] | None = None
        self._soon = False
        self._orphans = False
        self._watching = False
        self._context = contextvars.Context()  # not that of whoever happens to submit
        self._close_loop = loop.close
        self.enter()
        # What tells that a loop is closed? Only its close(). A class without room for attributes is
        # left alone: then __del__ ends the reactor, together with the loop.
        with contextlib.suppress(AttributeError, TypeError):
            loop.close = self._close  # type: ignore[method-assign]

    # -- turns --

    def enter(self) -> None:
        """Before each turn: a ring answers only the thread that made it.

        Another thread runs the loop: it gets a ring. Between two turns the old one owes notifications only
        (requests of our connections never wait in the kernel), and those become orphans, see _native/uring.c.
        """
        here = os.getpid(), threading.get_native_id()
        if here == self._thread:
            return
        self._orphans = self._thread is not None
        if self._fd >= 0:
            self.loop.remove_reader(self._fd)
            self._fd = -1
        self.reactor.attach()
        fd = int(lib.azc_wake_fd(self.reactor.native))
        if fd < 0:
            raise OSError(-fd, f"aiozc: cannot be attached to this loop: {os.strerror(-fd)}")
        self.loop.add_reader(fd, self._readable)
        self._fd = fd
        self._thread = here

    def soon(self) -> None:
        """A turn follows: what is submitted until then is gathered."""
        if not self._soon:
            self._soon = True
            self.loop.call_soon(self._run, context=self._context)

    def _run(self) -> None:
        self._soon = False
        self._turn()

    def _readable(self) -> None:
        if self.reactor.backend == "uring":
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        self._turn()

    def _turn(self) -> None:
        reactor = self.reactor
        self.pumps += 1
        if reactor.native is not None:
            self.enter()
        self._walk()  # what SystemExit left
        for _ in range(_TURNS):
            if reactor.native is None:
                return
            if rc := lib.azc_wait(reactor.native, 0):
                reactor.take(rc)
                self._walk()
            if not (reactor.native and lib.azc_more(reactor.native)):
                break
        else:
            self.soon()
        if self._orphans:
            # Only looking tells when the kernel is done with them.
            if self._orphans_left():
                self.loop.call_later(_ORPHANS, self._turn, context=self._context)
            else:
                self._orphans = False

    def _orphans_left(self) -> bool:
        return self.reactor.zc_stats().notifications_outstanding > 0

    def _walk(self) -> None:
        core = self.reactor.core
        while core.pending:
            try:
                core.dispatch()
            except (SystemExit, KeyboardInterrupt):
                self.soon()
                raise
            except BaseException as exc:
                self.report("an event was handled badly", exc)

    def report(self, message: str, exc: BaseException | None = None) -> None:
        context: dict[str, Any] = {"message": f"aiozc: {message}"}
        if exc is not None:
            context["exception"] = exc
        self.loop.call_exception_handler(context)

    # -- peers that take nothing --

    def watch(self) -> None:
        """One timer for all streams, while there are any; see zc_linger in Settings."""
        if not self._watching:
            self._watching = True
            pause = max(self.reactor.settings.zc_linger / 8, _LOOK_MIN)
            self.loop.call_later(pause, self._look, context=self._context)

    def _look(self) -> None:
        self._watching = False
        for stream in list(self.streams.values()):
            stream.look(self.loop.time(), self.reactor.settings.zc_linger)
        if self.streams:
            self.watch()

    # -- the end --

    def _close(self) -> None:
        """Stands for the loop's close()."""
        if not self.loop.is_running() and not self.loop.is_closed():
            self._end()
        self._close_loop()

    def _end(self) -> None:
        self.ended = True
        if self.loop.__dict__.get("close") == self._close:
            del self.loop.close
        if not self.loop.is_closed():
            self.loop.remove_reader(self._fd)
        if left := self.reactor.close():
            pinned = self.reactor.zc_stats().pinned_bytes
            warnings.warn(
                f"{self.loop!r} was closed while the kernel still read {pinned} bytes of {left} "
                "zero-copy requests; their memory is kept for the life of the process. Await "
                "op.released before the loop is closed",
                ResourceWarning,
                source=self.loop,
                stacklevel=3,
            )

    def __del__(self) -> None:
        # A loop that nobody closed, or closed otherwise. At the end of the process the kernel does it.
        if not self.ended and not sys.is_finalizing():
            self._end()
