"""The stream transport, for TCP and Unix sockets: asyncio's behaviour on the native send queue and receive.

Owns: what base.py does not: receiving, the byte queue, end of file, zero-copy operations. Made by loop.py; its
`_on_*` methods are called by reactor.py with what the native side tells.

Receiving: data arrives as events, copied out of the reactor's buffers. While reading is paused, what had
arrived already waits in `_held`, in order, with end of file (b"") and errors (OSError) in their place.
`_fast` says that none of this applies, and the native turn calls the protocol itself: data_received (1), or
get_buffer and buffer_updated (2); 4: those of `_sink`, for what the native side receives itself.
Sending: everything goes through the native queue, in call order. Small writes are copied into it, large
ones are sent at once, and what the socket does not take is held by reference if nobody can change it
(exact bytes, read-only views of bytes, aiozc.frozen), or copied.

Never: gives a protocol's buffer to the kernel.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import errno
import socket
from asyncio.log import logger
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Union

from .. import hooks
from .._fast import Parts, is_buffered
from .._reactor_c import lib
from ..buffers import Frozen, immutable
from ..operation import Operation, path_name
from .base import NativeTransport, linger_0, notify, os_error

if TYPE_CHECKING:
    from ..loop import EventLoop

TLS_RETRY_SECONDS = 0.005
outstanding = lib.azc_conn_outstanding

Sendable = Union["bytes", "bytearray", "memoryview", Frozen, Sequence[Any], Any]


@dataclass(frozen=True, slots=True)
class ZeroCopyInfo:
    """`transport.get_extra_info("zero_copy")`: what zc_* does on this connection.

    engine: "uring", "msg_zerocopy" (on epoll), or "copy" where every send is copied. threshold: bytes
    of operations in one request from which it goes zero-copy. path: what the kernel's last report that
    can be trusted said, "zero-copy", "copied", or "unknown" before the first one.
    """

    engine: str
    threshold: int
    adaptive: bool
    path: str


class Turn(Protocol):
    """What waits for unsent and pinned bytes to fall to `limit`: a message of broadcast.py."""

    limit: int

    def ready(self) -> bool:
        """At most `limit` now, with whatever a layer above this transport holds back."""

    def come(self, error: BaseException | None) -> None:
        """It is; or the connection ended first."""


class Sink:
    """Where `read_into` wants the next bytes: a caller's buffer, until it is full or the stream ends."""

    __slots__ = ("filled", "target", "waiter")

    def __init__(self, target: memoryview, waiter: asyncio.Future[None]) -> None:
        self.target = target
        self.waiter = waiter
        self.filled = 0

    def take(self, view: memoryview) -> memoryview:
        """Copy what fits; the rest is the protocol's."""
        n = min(len(self.target) - self.filled, len(view))
        if self.waiter.done():
            n = 0
        self.target[self.filled : self.filled + n] = view[:n]
        self.filled += n
        if self.filled == len(self.target):
            self.end()
        return view[n:]

    def get_buffer(self, sizehint: int) -> memoryview:
        """With `buffer_updated`, for large receives, which come here without a copy: as a BufferedProtocol
        has them, but that there may be no room."""
        return self.target[self.filled :] if not self.waiter.done() else self.target[:0]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        if self.filled == len(self.target):
            self.end()

    def end(self) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)


class StreamTransport(NativeTransport):
    """asyncio.Transport over a stream socket, with `zc_write`, `zc_reset` and `zc_configure`."""

    _kind = lib.AZC_STREAM
    _start_tls_compatible = True
    _read_ready_cb = None  # test_ssl of CPython 3.14 and 3.15 asks for it
    if TYPE_CHECKING:  # fields of the native base; the objects are made when first needed
        _eof: bool  # write_eof was called
        _eof_seen: bool
        _buffered: bool
        _sink: Sink | None
        _held: collections.deque[bytes | OSError] | None
        _marks: collections.deque[tuple[int, Operation]] | None
        _zc_waiters: list[asyncio.Future[None]] | None
        _turns: collections.deque[Turn] | None
        _empty_waiter: asyncio.Future[None] | None
    _sendfile_compatible = hooks.constants._SendfileMode.TRY_NATIVE

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[Any] | None = None,
        extra: dict[str, Any] | None = None,
        server: Any = None,
        family: int | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        if family is None:
            family = int(sock.family)
        super().__init__(loop, sock, protocol, waiter, extra, server, family, context)
        self._open = True  # write() may queue: nothing of what forbids it happened

    # -- protocol and information --

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Also while writing is paused: the old protocol is resumed, the new one takes over the pause."""
        old = self._protocol
        super().set_protocol(protocol)
        self._buffered = is_buffered(protocol)
        self._review()  # before anything that may raise
        if self._protocol_paused and old is not None and old is not protocol:
            self._call(old.resume_writing, "protocol.resume_writing() failed", old)
            self._call(protocol.pause_writing, "protocol.pause_writing() failed", protocol)

    def _call(self, method: Any, message: str, protocol: Any) -> None:
        try:
            method()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._loop.call_exception_handler(
                {"message": message, "exception": exc, "transport": self, "protocol": protocol}
            )

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "zero_copy":
            return self._zero_copy_info()
        return super().get_extra_info(name, default)

    def _zero_copy_info(self) -> ZeroCopyInfo:
        conn = self._conn
        if not conn.zc_ok or isinstance(self._protocol, hooks.SSLProtocol):
            return ZeroCopyInfo("copy", 0, bool(conn.adaptive), "copied")
        path = path_name(conn.path) if conn.path else "unknown"
        return ZeroCopyInfo(self._reactor.engine, int(conn.zc_threshold), bool(conn.adaptive), path)

    def _review(self) -> None:
        """After any change of what receiving depends on."""
        if self._paused or self._closing or self._held:
            self._fast = 0
        elif self._sink:
            self._fast = 4
        else:
            self._fast = 2 if self._buffered else 1

    # -- receiving --

    def pause_reading(self) -> None:
        if not self.is_reading():
            return
        self._paused = True
        self._review()
        self._receive(False)
        if self._loop.get_debug():
            logger.debug("%r pauses reading", self)

    def resume_reading(self) -> None:
        if self._closing or not self._paused:
            return
        self._paused = False
        if self._held:
            self._loop.call_soon(self._deliver_held)
        elif self._started:
            self._receive(True)
        self._review()
        if self._loop.get_debug():
            logger.debug("%r resumes reading", self)

    def _on_recv(self, res: int, start: int) -> None:
        """An event that the reactor did not deliver by itself."""
        if self._conn_lost or self._closing:
            return
        view = self._reactor.memory[start : start + res] if res > 0 else None
        if self._paused or self._held:
            if view is not None:
                self._holding().append(bytes(view))
            else:
                self._holding().append(b"" if res == 0 else os_error(res))
        elif view is not None:
            self._context.run(self._deliver, view)
        else:
            self._context.run(self._end_of_data, None if res == 0 else os_error(res))

    def _set_sink(self, sink: Sink | None) -> None:
        self._sink = sink
        self._review()

    def _deliver_held(self) -> None:
        try:
            while self._held and not self._paused and not self._closing:
                item = self._held.popleft()
                if isinstance(item, OSError):
                    self._context.run(self._end_of_data, item)
                elif item:
                    self._context.run(self._deliver, memoryview(item))
                else:
                    self._context.run(self._end_of_data, None)
        finally:
            if not self._paused and not self._closing:
                if self._held:  # SystemExit out of the protocol: the next run goes on with the rest
                    self._loop.call_soon(self._deliver_held)
                elif self._started:
                    # Not before: a reader that pauses again at once would hold ever more.
                    self._receive(True)
            self._review()

    def _deliver(self, view: memoryview) -> None:
        """Hand one piece to the protocol; a BufferedProtocol may take it in several buffers, and
        pause, close, or be replaced between them. `read_into` comes before the protocol."""
        if self._sink is not None:
            view = self._sink.take(view)
        while view:
            if self._closing:
                return
            if self._paused:
                self._holding().appendleft(bytes(view))
                return
            protocol = self._protocol  # a buffer and what was put into it are of the same one
            try:
                if not self._buffered:
                    name = "data_received"
                    protocol.data_received(bytes(view))
                    return
                name = "get_buffer"
                buffer = protocol.get_buffer(-1)
                room = len(buffer)
                if not room:
                    raise RuntimeError("get_buffer() returned an empty buffer")
                target = memoryview(buffer).cast("B")
                n = min(target.nbytes, len(view))
                target[:n] = view[:n]
                target.release()
                view = view[n:]
                name = "buffer_updated"
                protocol.buffer_updated(n)
            except (SystemExit, KeyboardInterrupt):
                if view and self._buffered:
                    self._hold_rest(view)
                raise
            except BaseException as exc:
                self._fatal_error(exc, f"Fatal error: protocol.{name}() call failed.")
                return

    def _hold_rest(self, view: memoryview) -> None:
        if not self._held:
            self._loop.call_soon(self._deliver_held)
        self._holding().appendleft(bytes(view))
        self._review()

    def _hold_at(self, n: int, start: int) -> None:
        """SystemExit out of a BufferedProtocol: what it did not take."""
        self._hold_rest(self._reactor.memory[start : start + n])

    def _holding(self) -> collections.deque[bytes | OSError]:
        if not self._held:
            self._held = collections.deque()
        return self._held

    def _end_of_data(self, error: OSError | None) -> None:
        if error is not None:
            self._fatal_error(error, "Fatal read error on socket transport")
            return
        self._eof_seen = True
        self._release_sink()
        if self._loop.get_debug():
            logger.debug("%r received EOF", self)
        try:
            keep_open = self._protocol.eof_received()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._fatal_error(exc, "Fatal error: protocol.eof_received() call failed.")
            return
        if not keep_open:
            self.close()

    # -- sending --

    def _write(self, data: Any) -> None:
        """write() of what is not bytes, or on a transport that is not open any more."""
        if not isinstance(data, (bytes, bytearray, memoryview, Frozen)):
            raise TypeError(
                f"data argument must be a bytes-like object, not {type(data).__name__!r}"
            )
        # A subclass of bytes may have a buffer of its own making only from 3.12 on; it is copied.
        by_reference = type(data) in (bytes, Frozen)
        if isinstance(data, memoryview):
            by_reference = immutable(data)
            if not data.c_contiguous:
                data, by_reference = data.tobytes(), True
        kept = Parts(data)
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._empty_waiter is not None:
            raise RuntimeError("unable to write; sendfile is in progress")
        if not kept.nbytes:
            return
        if self._conn_lost:
            if self._conn_lost >= hooks.constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES:
                logger.warning("socket.send() raised exception.")
            self._conn_lost += 1
            return
        held = self._reactor.held
        checked = self._reactor.checked(kept) if type(data) is Frozen else kept
        if kept.write_to(self._conn.address, held, by_reference):
            if checked is not kept and (token := self._conn.ref_token):
                held[token] = checked
            self._look(kept)

    def _look(self, kept: Any) -> None:
        """azc_write has something to say: the queue is above high water, or an error; `kept` is held."""
        conn = self._conn
        if error := -conn.error:
            self._fatal_error(os_error(-error), "Fatal write error on socket transport")
        elif conn.unsent > self._high_water:
            self._maybe_pause_protocol()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        if self._eof:
            raise RuntimeError("Cannot call writelines() after write_eof()")
        if self._empty_waiter is not None:
            raise RuntimeError("unable to writelines; sendfile is in progress")
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._closing or self._eof:
            return
        self._eof = True
        self._open = False
        if self._conn.unsent:
            notify(self._conn, lib.AZC_NOTIFY_DRAINED)
        else:
            self._shutdown()

    def _shutdown(self) -> None:
        assert self._sock is not None
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as exc:
            if exc.errno != errno.ENOTCONN:  # the peer is gone: the receive side tells
                raise

    def _sent_some(self, res: int, what: int) -> None:
        if res < 0:
            error = os_error(res)
            while self._marks:
                self._marks.popleft()[1]._settle(-res)
            self._fatal_error(error, "Fatal write error on socket transport")
            if self._empty_waiter is not None and not self._empty_waiter.done():
                self._empty_waiter.set_exception(error)
            return
        if self._conn_lost:
            return  # what still waits is told by _ended
        if what & lib.AZC_NOTIFY_ZC_LOW:
            self._low_reached()
        if what & lib.AZC_NOTIFY_MARK:
            self._pass_marks()
        super()._sent_some(res, what)

    def _drained(self) -> None:
        if self._empty_waiter is not None and not self._empty_waiter.done():
            self._empty_waiter.set_result(None)
        if self._eof and not self._closing:
            self._shutdown()
        super()._drained()

    def _make_empty_waiter(self) -> asyncio.Future[None]:
        if self._empty_waiter is not None:
            raise RuntimeError("Empty waiter is already set")
        self._empty_waiter = self._loop.create_future()
        self._open = False
        if self._conn.unsent:
            notify(self._conn, lib.AZC_NOTIFY_DRAINED)
        else:
            self._empty_waiter.set_result(None)
        return self._empty_waiter

    def _reset_empty_waiter(self) -> None:
        self._empty_waiter = None
        self._open = not self._eof and not self._conn_lost

    # -- zero-copy --

    def _zc_write(self, data: Sendable) -> Operation:
        """zc_write() on a transport that is not open, or of no bytes."""
        self._zc_check()
        keep = data if type(data) is Parts else Parts(data)
        return self.zc_write(keep) if keep.nbytes else Operation.finished(self._loop)

    def _zc_check(self) -> None:
        """Raises where nothing can be queued any more."""
        if self._eof:
            raise RuntimeError("Cannot call zc_write() after write_eof()")
        if self._closing or self._conn_lost:
            raise ConnectionResetError(
                errno.ECONNRESET,
                "the transport is closing: nothing was queued; open a new connection",
            )
        if self._empty_waiter is not None:
            raise RuntimeError("unable to write; sendfile is in progress")

    def _settle_when_sent(self, op: Operation) -> None:
        """`op` (made by Operation.copied) ends when everything queued until now was accepted."""
        if not self._marks:
            self._marks = collections.deque()
        self._marks.append((self._conn.queued_pos, op))
        self._pass_marks()

    def _pass_marks(self) -> None:
        conn, marks = self._conn, self._marks
        while marks and marks[0][0] <= conn.sent_pos:
            marks.popleft()[1]._settle(0)
        if marks:
            conn.mark = marks[0][0]
            notify(conn, lib.AZC_NOTIFY_MARK)

    def _low_waiter(self) -> asyncio.Future[None] | None:
        """What _zc_wait() does not do by itself."""
        if self._conn_lost:
            raise ConnectionResetError("Connection lost")
        if outstanding(self._conn) <= self._reactor.settings.zc_low_water:
            return None
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._zc_waiters = [*(self._zc_waiters or ()), waiter]
        self._ask_low()
        return waiter

    def _when_low(self, turn: Turn) -> None:
        """`turn` comes once it is ready, behind those that wait already."""
        if not self._turns:
            self._turns = collections.deque()
        self._turns.append(turn)
        self._ask_low()

    def _leave(self, turn: Turn) -> None:
        """It waits no more; what stands behind it may have been ready before it."""
        if self._turns and turn in self._turns:
            self._turns.remove(turn)
            if not self._conn_lost:
                self._ask_low()

    def _ask_low(self) -> None:
        """The native side tells of one level: the highest that anybody waits for now."""
        low = self._reactor.settings.zc_low_water if self._zc_waiters else -1
        if self._turns:
            low = max(low, self._turns[0].limit)
        if low >= 0:
            self._conn.zc_low = low
            notify(self._conn, lib.AZC_NOTIFY_ZC_LOW)

    def _low_reached(self) -> None:
        low_water = self._reactor.settings.zc_low_water
        if self._zc_waiters and not self._conn_lost and outstanding(self._conn) <= low_water:
            self._wake_zc_waiters(None)
        while self._turns and not self._conn_lost and self._turns[0].ready():
            self._turns.popleft().come(None)
        if self._turns and not self._conn_lost and outstanding(self._conn) <= self._turns[0].limit:
            # TLS holds bytes back, and tells nobody when it goes on.
            self._loop.call_later(TLS_RETRY_SECONDS, self._low_reached)
        elif not self._conn_lost:
            self._ask_low()

    def _wake_zc_waiters(self, error: BaseException | None) -> None:
        waiters, self._zc_waiters = self._zc_waiters, None
        for waiter in waiters or ():
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    # -- closing --

    def zc_reset(self) -> None:
        """Reset the connection (linger 0): destroys what the peer has not read, and so ends the pins
        of this connection at once. connection_lost(None) follows."""
        if self._sock is None or self._conn_lost:
            return
        # With a receive armed, close() would send nothing at all (measured): so first the kernel
        # gives up whatever it does for this socket.
        lib.azc_conn_abort(self._conn, -errno.ECONNABORTED)
        lib.azc_conn_quiesce(self._conn)
        linger_0(self._sock_fd)
        self._force_close(None)

    def _stopped(self) -> None:
        self._held = None
        self._fast = 0

    def _loop_closed(self) -> None:
        super()._loop_closed()
        self._turns = None  # nobody will come to them, and they hold buffers

    def _release_sink(self) -> None:
        if self._sink is not None:
            self._sink.end()

    def _ended(self) -> None:
        self._release_sink()
        if self._zc_waiters:
            self._wake_zc_waiters(ConnectionResetError("Connection lost"))
        while self._turns:
            self._turns.popleft().come(ConnectionResetError("Connection lost"))
        while self._marks:
            self._marks.popleft()[1]._settle(errno.ECONNRESET)
        if self._empty_waiter is not None and not self._empty_waiter.done():
            self._empty_waiter.set_exception(ConnectionError("Connection is closed by peer"))
