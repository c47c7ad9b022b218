"""One connection of a loop that is not ours: the native queue beside its transport, and the stand-in.

Owns: a duplicate of the transport's descriptor, with a native queue on it, from the first operation until
the last is released; and while anything of it is unsent the stand-in, which the writer then has in
place of its transport. Order: the queue is held until the transport has sent its own buffer; from
then on everything goes through the queue; once that is empty the transport goes on alone.
Called by attach.py and the reactor.
Never: reads from the socket, changes its options, or sends behind bytes that the transport has dropped.
"""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

from ._fast import Parts
from ._reactor_c import lib
from .bare import open_duplicate, unacked
from .operation import Operation
from .standin import StandIn, StartTls, closing
from .transports.base import linger_0

if TYPE_CHECKING:
    from .attach import Attachment

# A transport that made no progress in so many looks is looked at again after so many seconds.
_LOOKS, _STUCK = 8, 0.005


class Stream:
    """See the module. Told of its operations like a future, and of its connection by the reactor."""

    def __init__(self, at: Attachment, real: Any, sock: Any) -> None:
        self.at = at
        self._reactor = reactor = at.reactor
        self.real = real
        self._fd, self._conn = open_duplicate(reactor, sock, self)
        self.queueing = False
        self._room: _Room | None = None  # while the queue is held
        self._held_size = self._idle_looks = 0
        self._eof = self._closing = self._warned = False
        self._ops = 0
        self._writers: list[Any] = []
        self._stand_in = StandIn(at, real)
        self._paused: Any = None  # the protocol whose writing we paused
        self._waiters: list[asyncio.Future[None]] = []
        self._far: tuple[int, int] | None = None
        self._since = 0.0
        self.take_limits()
        at.streams[id(real)] = self
        at.watch()

    # -- queueing --

    def submit(self, writer: Any, keep: Any) -> Operation:
        if self._eof:
            raise RuntimeError("Cannot call zc_submit() after write_eof()")
        if self._closing:
            raise closing()
        if self._conn.error:
            raise OSError(-self._conn.error, os.strerror(-self._conn.error))
        self._take_over(writer)
        try:
            op = self._reactor.submit(self._conn, keep)
        except BaseException:
            self._queued()
            raise
        self._ops += 1
        if not op.tell(self):
            self._ops -= 1
        self._queued()
        return op

    def write(self, data: Any) -> None:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"data argument must be a bytes-like object, not {type(data).__name__!r}"
            )
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        kept = data if type(data) is bytes else bytes(data)
        if not kept:
            return
        Parts(kept).write_to(self._conn.address, self._reactor.held, True)
        self._queued()

    def write_eof(self) -> None:
        if not self._closing and not self._eof:
            self._eof = True
            self._queued()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._queued()

    def is_closing(self) -> bool:
        return self._closing or bool(self.real.is_closing())

    def unsent(self) -> int:
        return int(self._conn.unsent) if self._conn is not None else 0

    def take_limits(self) -> None:
        self._conn.low, self._conn.high = self.real.get_write_buffer_limits()

    def _queued(self) -> None:
        """Something was put into the queue."""
        self._pause()
        lib.azc_conn_notify(self._conn, lib.AZC_NOTIFY_DRAINED)
        self.at.soon()

    def _take_over(self, writer: Any) -> None:
        if not self.queueing:
            self.queueing = True
            if self.real.get_write_buffer_size():
                lib.azc_conn_hold(self._conn, 1)
                self._room = _Room(self, self.at, self._fd)
                self._await_flush()
        elif self._room is None:
            self._look_for_strangers()
        if writer._transport is not self._stand_in:
            writer._transport = self._stand_in
            writer.start_tls = StartTls(self, writer)
            self._writers.append(writer)

    def _give_back(self) -> None:
        """The queue is empty, or given up: the transport is the writer's again."""
        self._release_flush()
        self.queueing = False
        writers, self._writers = self._writers, []
        for writer in writers:
            if writer._transport is self._stand_in:
                writer._transport = self.real
            vars(writer).pop("start_tls", None)
        self._resume()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def when_empty(self) -> None:
        while self.queueing:
            waiter = self.at.loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _look_for_strangers(self) -> None:
        if self.real.get_write_buffer_size() and not self._warned:
            self._warned = True
            self.at.report(
                f"bytes were written to {self.real!r} itself while zero-copy operations of its writer "
                "were unsent: the peer may get them out of order. Write through the StreamWriter"
            )

    # -- what the transport held when we came --

    def _await_flush(self) -> None:
        """Its own buffer goes first: whenever the socket has room the loop sends from it."""
        self._held_size = self.real.get_write_buffer_size()
        self._idle_looks = 0
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        if self._room is not None:
            self._room.wait()

    def look_at_buffer(self) -> None:
        size = self.real.get_write_buffer_size()
        if self.real.is_closing():
            # Ended by others; its buffer may have been thrown away, and nothing may follow the gap.
            self._lose(errno.ECONNRESET)
        elif not size:
            self._release_flush()
            self._pause()
            self.at.soon()
        elif size < self._held_size:
            self._await_flush_soon(size)
        elif (looks := self._idle_looks + 1) < _LOOKS:
            self._await_flush_soon(size, looks)
        else:
            # Not a byte went although the socket has room: no spinning on that.
            self._idle_looks = 0
            self.at.loop.call_later(_STUCK, self._wait_for_room)

    def _await_flush_soon(self, size: int, looks: int = 0) -> None:
        """In the loop's next turn, for it sends from the buffer in between."""
        self._held_size, self._idle_looks = size, looks
        self.at.loop.call_soon(self._wait_for_room)

    def _release_flush(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.end()
            if self._conn is not None:
                lib.azc_conn_hold(self._conn, 0)

    # -- flow control --

    def _pause(self) -> None:
        if self._paused is not None or self._conn.unsent <= self._conn.high:
            return
        protocol = self.real.get_protocol()
        if getattr(protocol, "_paused", False) or getattr(protocol, "_ssl_writing_paused", False):
            return  # by the transport, which resumes it when its own buffer is sent: then again
        self._paused = protocol
        try:
            protocol.pause_writing()
        except Exception as exc:
            self.at.report("protocol.pause_writing() failed", exc)
        lib.azc_conn_notify(self._conn, lib.AZC_NOTIFY_LOW)

    def _resume(self) -> None:
        protocol, self._paused = self._paused, None
        if protocol is not None:
            try:
                protocol.resume_writing()
            except Exception as exc:
                self.at.report("protocol.resume_writing() failed", exc)

    def set_protocol(self, protocol: Any) -> None:
        paused = self._paused is not None
        self._resume()
        self.real.set_protocol(protocol)
        if paused:
            self._pause()

    # -- told by operations --

    def done(self) -> bool:
        return False

    def set_result(self, _: None) -> None:
        self._ops -= 1
        if self._conn is not None and not self._conn.unsent:
            # Withdrawn, maybe: the event that the queue is empty comes with the next turn.
            self.at.soon()
        self._maybe_end()

    # -- told by the reactor --

    def _on_write(self, res: int, what: int) -> None:
        if self._conn is None:
            return
        if what & lib.AZC_NOTIFY_ERROR:
            self._lose(-res)
            return
        if what & lib.AZC_NOTIFY_LOW:
            if self._conn.unsent <= self._conn.low:
                self._resume()
            else:
                lib.azc_conn_notify(self._conn, lib.AZC_NOTIFY_LOW)
        if what & lib.AZC_NOTIFY_DRAINED and self.queueing:
            if self._conn.unsent:
                lib.azc_conn_notify(self._conn, lib.AZC_NOTIFY_DRAINED)
            else:
                self._drained()

    def _on_recv(self, res: int, _start: int) -> None:
        """Nothing is received; the epoll set did not take the descriptor."""
        if self._conn is not None:
            self._lose(-res)

    def _drained(self) -> None:
        if self._room is None:
            self._look_for_strangers()
        self._give_back()
        if self._eof:
            self.real.write_eof()
        if self._closing:
            if not self.real.get_write_buffer_size():  # else a shutdown would cut that off
                self._close_now()
            self.real.close()
        self._maybe_end()

    def _lose(self, error: int) -> None:
        """Sending is over; what was queued is dropped, so nothing may be sent behind the gap."""
        lib.azc_conn_abort(self._conn, -error)
        self._give_back()
        self.at.soon()  # it tells the operations
        if not self.real.is_closing():
            force = getattr(self.real, "_force_close", None)
            exc = OSError(error, os.strerror(error))
            force(exc) if force is not None else self.real.abort()
        self._maybe_end()

    def _loop_closed(self) -> None:
        conn, self._conn = self._conn, None
        self._unlist()
        lib.azc_conn_abort(conn, -errno.ECONNABORTED)
        self._give_back()
        if lib.azc_conn_quiesce(conn) >= 0:
            os.close(self._fd)

    # -- the end --

    def abort(self) -> None:
        lib.azc_conn_flush(self._conn)  # what write() alone would have sent already
        lib.azc_conn_abort(self._conn, -errno.ECONNABORTED)
        self._closing = True
        self._give_back()
        self._close_now()
        self.real.abort()

    def _maybe_end(self) -> None:
        if not self._ops and not self.queueing and self._conn is not None:
            self._close_now()

    def _unlist(self) -> None:
        if self.at.streams.get(id(self.real)) is self:
            del self.at.streams[id(self.real)]

    def _close_now(self) -> None:
        """The queue's end. With memory pinned the socket is shut down, for the transport is closed, too; the
        native side then keeps a duplicate until the memory is free, or zc_linger is over."""
        conn, self._conn = self._conn, None
        if conn is None:
            return
        self._unlist()
        self.at.soon()
        try:
            self._reactor.close_conn(conn, errno.ECONNABORTED)
        except OSError as exc:  # the kernel still has a request: its descriptor must not be closed
            self.at.report("a descriptor is kept", exc)
            return
        os.close(self._fd)

    def look(self, now: float, limit: float) -> None:
        """Once the transport is closed nobody else could end a peer that takes nothing: it is reset."""
        if self._conn is None or not self.real.is_closing():
            self._far = None
            return
        far = int(self._conn.sent_pos), unacked(self._fd)
        if far != self._far:
            self._far, self._since = far, now
        elif now - self._since >= limit:
            lib.azc_conn_abort(self._conn, -errno.ECONNABORTED)
            lib.azc_conn_quiesce(self._conn)
            self._give_back()
            if self._conn is not None:
                linger_0(self._fd)
                self._close_now()


class _Room:
    """Waits in the reactor until the socket has room, or is broken (libuv tells no writer of that)."""

    def __init__(self, stream: Stream, at: Attachment, fd: int) -> None:
        self._stream = stream
        self._at = at
        self._conn: Any = at.reactor.open(fd, lib.AZC_CONNECT, self)

    def wait(self) -> None:
        if self._conn is not None:
            lib.azc_conn_start(self._conn)
            self._at.soon()

    def _on_write(self, _res: int, _what: int) -> None:
        if self._conn is not None:
            self._stream.look_at_buffer()

    def end(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            self._at.reactor.close_conn(conn, 0)

    _loop_closed = end
