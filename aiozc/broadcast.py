"""One buffer to many connections: locked once, queued on each, and a result that says who got it.

Owns: the lock on the buffer until every connection released it, and the turns of slow connections. Called by
users, on the loop's thread. Uses the transports' own queues (transports/stream.py, tls.py): bytes stay
in call order with whatever else is written to the same connections.
Never: withdraws or cuts what is queued on a connection, lets one connection delay another, or keeps a
buffer of a broadcast that was given up for a connection that has nothing of it.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from . import hooks
from ._fast import Parts
from .streams import refuse
from .transports.stream import StreamTransport, outstanding
from .transports.tls import tls_check, tls_queue, tls_raw

if TYPE_CHECKING:
    from .operation import Operation
    from .transports.stream import Sendable

_W = TypeVar("_W")


@dataclass(frozen=True, slots=True)
class BroadcastResult(Generic[_W]):
    """Who got the message of a broadcast; every writer is in exactly one of these, in the order given.

    sent: the kernel accepted all of it, which is no proof of delivery. dropped: slow, and no byte
    of it was queued. aborted: slow, and reset. failed: closed, or lost before the kernel had accepted
    all; the exception says how many bytes it had. nbytes: the size of the message.
    """

    nbytes: int
    sent: tuple[_W, ...]
    dropped: tuple[_W, ...]
    aborted: tuple[_W, ...]
    failed: Mapping[_W, BaseException]


class _Message:
    """The locked buffer, and how many connections still have to be heard of.

    It stands among the waiters of each operation, where it looks like a future: one call an operation, instead
    of a future and a turn of the loop.
    """

    __slots__ = ("_copies", "keep", "left", "nbytes", "waiter")

    def __init__(self, buf: Sendable, waiter: asyncio.Future[None]) -> None:
        self.keep: Any = Parts(buf)
        self.nbytes: int = self.keep.nbytes
        self.left = 0
        self.waiter = waiter
        self._copies: list[bytes] | None = None

    def copies(self) -> list[bytes]:
        """For TLS: one copy, however many connections encrypt it."""
        if self._copies is None:
            self._copies = self.keep.copies()
        return self._copies

    def forget(self) -> None:
        self.keep = self._copies = None

    def done(self) -> bool:
        return False

    def set_result(self, _: None) -> None:
        """One connection more is done with."""
        self.left -= 1
        if not self.left and not self.waiter.done():
            self.waiter.set_result(None)


class _Leg:
    """The message on its way to one writer; a stream.Turn while the writer is slow."""

    __slots__ = ("aborted", "dropped", "error", "limit", "message", "op", "raw", "tls", "writer")

    def __init__(
        self, writer: Any, raw: StreamTransport | None, tls: Any, limit: int, message: _Message
    ) -> None:
        self.writer = writer
        self.raw: Any = raw
        self.tls = tls
        self.limit = limit
        self.message = message
        self.op: Operation | None = None
        self.error: BaseException | None = None
        self.dropped = self.aborted = False

    def start(self, on_slow: str) -> None:
        if not self._open() or not self.message.nbytes:
            return
        if not self.raw._turns and self.ready():
            self._queue()
        elif on_slow == "wait":
            self.message.left += 1
            self.raw._when_low(self)
        elif on_slow == "drop":
            self.dropped = True
        else:
            self.aborted = True
            self.raw.zc_reset()

    def ready(self) -> bool:
        level: int = outstanding(self.raw._conn)
        if self.tls is not None and self.tls._ssl_protocol is not None:
            level += self.tls.get_write_buffer_size()
        return level <= self.limit

    def come(self, error: BaseException | None) -> None:
        if error is not None:
            self.error = error
        elif self._open():
            self._queue()
        self.message.set_result(None)

    def _open(self) -> bool:
        try:
            if self.tls is not None:
                tls_check(self.tls)
            elif self.raw._closing or not self.raw._open:
                self.raw._zc_check()
        except (RuntimeError, OSError) as exc:
            self.error = exc.with_traceback(None)
        return self.error is None

    def _queue(self) -> None:
        message = self.message
        try:
            if self.tls is not None:
                self.op = tls_queue(self.tls, message.copies())
            else:
                self.op = self.raw.zc_write(message.keep)
        except (RuntimeError, OSError, MemoryError) as exc:
            self.error = exc.with_traceback(None)
            return
        if self.op.tell(message):
            message.left += 1

    def end(self) -> None:
        """Everything was heard of: what became of the operation."""
        if self.op is not None:
            try:
                self.op._outcome(False)
            except OSError as exc:
                self.error = exc.with_traceback(None)


async def broadcast(
    writers: Iterable[_W],
    buf: Sendable,
    *,
    max_queued: int = 1 << 20,
    on_slow: Literal["wait", "drop", "abort"] = "wait",
) -> BroadcastResult[_W]:
    """Send one buffer, or list of buffers, zero-copy to many connections; wait until it may be reused.

    writers: StreamWriters or stream transports of the running aiozc loop, TCP, Unix and TLS alike. The buffer
    is locked once, and queued on each behind what was written to it before, when the coroutine first
    runs: with `await broadcast(...)`, before anything else runs. It must not be changed before the
    end, and may be changed then: the kernel reads it for no connection. Over TLS one copy is
    made for all of them.

    A writer is slow if its unsent and pinned bytes together exceed `max_queued` (0: it must be idle), or if an
    earlier broadcast still waits for it. on_slow then says what to do with it, and only with it:

    "wait": it gets the message once it is below, behind earlier broadcasts that wait for it, and behind
    what was written to it meanwhile. A peer that never reads makes this wait without end.
    "drop": it does not get this message, not a byte of it.
    "abort": it is reset, as by `zc_reset`: that destroys what its peer has not read, and so ends
    everything that it keeps pinned at once, also for earlier operations.

    A writer that is closing, or that is lost before the kernel accepted everything, is in
    `failed`, and the others are not touched by it. Being cancelled cuts no stream: what is queued
    still goes, and the buffer stays locked until it went; writers that were waited for get nothing.

    Raises before anything is queued: TypeError (no buffer; no writer), BufferError (not contiguous), ValueError
    (on_slow, negative max_queued, two writers of one connection), RuntimeError (a transport of
    another loop).
    """
    if on_slow not in ("wait", "drop", "abort"):
        raise ValueError(f"on_slow must be 'wait', 'drop' or 'abort', not {on_slow!r}")
    limit = operator.index(max_queued)
    if limit < 0:
        raise ValueError(f"max_queued is a number of bytes and cannot be {limit}")
    loop = asyncio.get_running_loop()
    message = _Message(buf, loop.create_future())
    legs = _legs(writers, loop, limit, message)
    try:
        for leg in legs:
            leg.start(on_slow)
        if message.left:
            await message.waiter
    finally:
        message.forget()
        for leg in legs:
            if leg.op is None and leg.raw is not None:
                leg.raw._leave(leg)
    return _result(legs, message.nbytes)


def _legs(
    writers: Iterable[Any], loop: asyncio.AbstractEventLoop, limit: int, message: _Message
) -> list[_Leg]:
    legs = []
    seen = set()
    for writer in writers:
        transport = writer.transport if isinstance(writer, asyncio.StreamWriter) else writer
        raw: Any = transport
        tls = None
        if isinstance(transport, hooks.SSLProtocolTransport):
            tls = transport
            raw = tls_raw(tls)  # None once it is closed
        elif not isinstance(transport, asyncio.BaseTransport):
            raise TypeError(
                f"a StreamWriter or a stream transport is needed, not {type(writer).__name__!r}"
            )
        if raw is not None and not isinstance(raw, StreamTransport):
            raise refuse(raw)
        if raw is not None and raw._loop is not loop and raw._loop is not None:
            raise RuntimeError(
                f"{writer!r} belongs to another loop; broadcast to it from a task of that loop"
            )
        if transport in seen:
            raise ValueError(
                f"{writer!r} is given twice; give each connection once, for it gets the message once"
            )
        seen.add(transport)
        legs.append(_Leg(writer, raw, tls, limit, message))
    return legs


def _result(legs: list[_Leg], nbytes: int) -> BroadcastResult[Any]:
    for leg in legs:
        leg.end()
    return BroadcastResult(
        nbytes,
        tuple(e.writer for e in legs if not (e.error or e.dropped or e.aborted)),
        tuple(e.writer for e in legs if e.dropped),
        tuple(e.writer for e in legs if e.aborted),
        {e.writer: e.error for e in legs if e.error is not None},
    )
