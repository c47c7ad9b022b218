"""What stream and datagram transports share: the socket, its native connection, flow control, the end.

Owns: one socket and its native connection, from construction until connection_lost returned. Subclassed by
stream.py and datagram.py; made by loop.py. The attributes are those of asyncio's own selector transport,
for asyncio's code (sendfile, start_tls, TLS) and its users' read them.

Never: touches the native connection after it was closed (`_Gone` stands in its place).
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import socket
import struct
import warnings
from asyncio import futures, trsock
from asyncio.log import logger
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _fast, hooks
from .._reactor_c import ffi, lib
from ..settings import timeout_ns
from .names import address_of

if TYPE_CHECKING:
    from ..loop import EventLoop

notify = lib.azc_conn_notify
_ALWAYS = frozenset(("socket", "sockname", "peername"))  # what every transport tells of itself


def os_error(res: int) -> OSError:
    """For a negative errno: the subclass that asyncio would raise."""
    return OSError(-res, os.strerror(-res))


def linger_0(fd: int) -> None:
    """Closing the socket resets it, and destroys what the peer has not read."""
    sock = socket.socket(fileno=fd)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        sock.detach()


def non_blocking(family: int, kind: int, proto: int, fileno: int) -> socket.socket:
    """For an accepted descriptor, which is non-blocking: the object is to know that, for asyncio asks it."""
    sock = socket.socket(family, kind, proto, fileno)
    sock.setblocking(False)
    return sock


def _name(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except OSError:
        return None


class _Gone:
    """Stands for the native connection once that is closed: nothing unsent, nothing asked."""

    token = queued_pos = sent_pos = mark = error = 0
    unsent = pinned = high = low = zc_low = zc_cap = zc_threshold = 0
    zc_ok = path = adaptive = 0


class NativeTransport(_fast.transport_base((hooks.FlowControlMixin, asyncio.Transport))):  # type: ignore[misc]
    """asyncio.Transport on a native connection. Its base has the fields that every event reads."""

    _kind: int
    _errors_are_events = False  # connection_lost must not come ahead of them
    # What most connections never change is kept here once, not in each of them.
    _high_water, _low_water = hooks.HIGH_WATER, hooks.LOW_WATER  # the native side's defaults, too
    if TYPE_CHECKING:  # fields of the native base, and its methods
        _sock: socket.socket | None
        _has_socket: bool
        _sock_fd: int
        _conn: Any  # the azc_conn, made when asked for
        _loop: Any
        _reactor: Any
        _server: Any
        _context: Any
        _protocol: Any
        _protocol_paused: bool
        _conn_lost: int  # as asyncio's: connection_lost is scheduled, or writes after it
        _closing: bool
        _open: int  # as in _native/fast/fast.h; 0: the native calls have to ask here
        _fast: int
        _paused: bool
        _started: bool  # connection_made was called
        _info: dict[str, Any] | None
        _here: bytes | None
        _peer: bytes | None
        _made_of: tuple[int, int, int]

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[Any] | None,
        extra: dict[str, Any] | None,
        server: Any,
        family: int,
        context: contextvars.Context | None = None,
    ) -> None:
        """Of a socket that asyncio hands over; an accepted one gets its transport in fast/accept.c."""
        fd = self._sock_fd = sock.fileno()
        self._loop = loop
        self._reactor = reactor = loop._reactor
        conn = reactor.open(fd, self._kind, self, family)
        self._bind(conn.address, reactor.held)
        self._info = extra = {} if extra is None else extra
        extra["socket"] = trsock.TransportSocket(sock)
        if "sockname" not in extra:  # an accepted connection brings them
            extra["sockname"] = _name(sock.getsockname)
        if "peername" not in extra:
            extra["peername"] = _name(sock.getpeername)
        self._sock = sock
        # As CPython from 3.15 on, and uvloop: what the loop calls of a protocol runs in one context.
        self._context = contextvars.copy_context() if context is None else context
        self.set_protocol(protocol)
        if server is not None:
            hooks.attach(server, self)
            self._server = server
        loop._transports[fd] = self
        loop.call_soon(self._begin, context=self._context)
        if waiter is not None:
            loop.call_soon(futures._set_result_unless_cancelled, waiter, None)  # type: ignore[attr-defined]

    # -- what the native side makes when somebody asks --

    @staticmethod
    def _view(at: int) -> Any:
        return ffi.cast("azc_conn *", at) if at else _Gone()

    def _own_socket(self) -> socket.socket:
        return non_blocking(*self._made_of, fileno=self._sock_fd)

    @property
    def _extra(self) -> dict[str, Any]:
        """What get_extra_info knows."""
        if self._info is None:
            sock = self._sock
            if sock is None:  # closed meanwhile, and asked for only now
                sock = socket.socket(*self._made_of)
                sock.close()
            self._info = {
                "socket": trsock.TransportSocket(sock),
                "sockname": address_of(self._here),
                "peername": address_of(self._peer),
            }
        return self._info

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if self._info is None and name not in _ALWAYS:
            return default
        return self._extra.get(name, default)

    def __repr__(self) -> str:
        info = [self.__class__.__name__]
        if not self._has_socket:
            info.append("closed")
        elif self._closing:
            info.append("closing")
        info.append(f"fd={self._sock_fd}")
        if self._loop is not None and not self._loop.is_closed():
            info.append(f"read={'polling' if self.is_reading() else 'idle'}")
            size = self.get_write_buffer_size()
            info.append(f"write=<{'polling' if size else 'idle'}, bufsize={size}>")
        return f"<{' '.join(info)}>"

    def _unclosed(self, _warn: Any = warnings.warn) -> None:
        """Nobody has it any more, and its socket is open."""
        _warn(f"unclosed transport {self!r}", ResourceWarning, source=self)
        if self._sock is not None:
            self._sock.close()

    # -- protocol and receiving --

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol  # type: ignore[no-any-return]

    def is_reading(self) -> bool:
        return not self._closing and not self._paused

    def _not_begun(self, exc: BaseException) -> None:
        """connection_made of an accepted connection raised; data comes all the same, as in asyncio."""
        self._loop.call_exception_handler(
            {
                "message": "Exception in callback connection_made()",
                "exception": exc,
                "transport": self,
                "protocol": self._protocol,
            }
        )

    def _receive(self, wanted: bool) -> None:
        if self._conn.token:
            (lib.azc_conn_start if wanted else lib.azc_conn_stop)(self._conn)

    def _write(self, data: Any) -> None:
        """What write() does not do by itself."""
        raise NotImplementedError

    # -- flow control --

    def get_write_buffer_size(self) -> int:
        return int(self._conn.unsent)

    def _set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        super()._set_write_buffer_limits(high=high, low=low)
        self._conn.high = self._high_water
        self._conn.low = self._low_water

    def _maybe_pause_protocol(self) -> None:
        super()._maybe_pause_protocol()
        if self._protocol_paused:
            notify(self._conn, lib.AZC_NOTIFY_LOW)

    def _on_write(self, res: int, what: int) -> None:
        """The native side tells what `notify` asked for, or that sending is over."""
        self._context.run(self._sent_some, res, what)

    def _sent_some(self, res: int, what: int) -> None:
        if self._conn_lost:
            return
        if what & lib.AZC_NOTIFY_LOW:
            self._maybe_resume_protocol()  # which may write again
            if self._protocol_paused:
                notify(self._conn, lib.AZC_NOTIFY_LOW)
        if what & lib.AZC_NOTIFY_DRAINED:
            if self._conn.unsent:
                notify(self._conn, lib.AZC_NOTIFY_DRAINED)
            else:
                self._drained()

    def _drained(self) -> None:
        if self._closing:
            self._lose()
            self._call_connection_lost(None)

    # -- zero-copy --

    def zc_configure(
        self,
        *,
        threshold: int | None = None,
        adaptive: bool | None = None,
        cap: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Change zero-copy settings of this transport: see zc_threshold, adaptive, zc_transport_cap and
        zc_timeout (streams only) in aiozc.Settings. None leaves one as it is; timeout=math.inf is no
        timeout. ValueError: negative, or a timeout of 0; nothing is changed then."""
        limit = timeout_ns(timeout)
        if (threshold is not None and threshold < 0) or (cap is not None and cap < 0):
            raise ValueError("threshold and cap are numbers of bytes and cannot be negative")
        if timeout is not None and self._kind != lib.AZC_STREAM:
            raise ValueError("a timeout is for streams: nobody acknowledges datagrams")
        if threshold is not None:
            self._conn.zc_threshold = threshold
        if cap is not None:
            self._conn.zc_cap = cap
        if adaptive is not None:
            self._conn.adaptive = adaptive
        if timeout is not None and self._conn.token:
            lib.azc_conn_timeout(self._conn, limit)

    # -- closing --

    def _close(self) -> None:
        """What close() does not do by itself."""
        self._closing = True
        self._stopped()
        self._receive(False)
        if self._conn.unsent or self._protocol_paused or self._errors_are_events:
            # A paused protocol may write once more when it is resumed: TLS keeps its last records.
            notify(self._conn, lib.AZC_NOTIFY_DRAINED)
        else:
            self._lose()
            self._loop.call_soon(self._call_connection_lost, None, context=self._context)

    def _lose(self) -> None:
        self._conn_lost += 1
        self._open = False

    def _stopped(self) -> None:
        """Nothing more is delivered to the protocol."""

    def abort(self) -> None:
        """Drops what is unsent; what was sent still reaches the peer (no linger)."""
        loop = self._loop
        if loop is not None and loop._elsewhere():  # as close(), which says why
            loop.call_soon_threadsafe(self.abort)
        else:
            self._force_close(None)

    def _fatal_error(self, exc: BaseException, message: str = "Fatal error on transport") -> None:
        if isinstance(exc, OSError):
            if self._loop is not None and self._loop.get_debug():
                logger.debug("%r: %s", self, message, exc_info=True)
        elif self._loop is not None:
            self._loop.call_exception_handler(
                {
                    "message": message,
                    "exception": exc,
                    "transport": self,
                    "protocol": self._protocol,
                }
            )
        self._force_close(exc)

    def _force_close(self, exc: BaseException | None) -> None:
        if self._conn_lost:
            return
        error = exc.errno if isinstance(exc, OSError) and exc.errno else errno.ECONNABORTED
        if self._conn.unsent:
            lib.azc_conn_flush(self._conn)
        lib.azc_conn_abort(self._conn, -error)
        self._closing = True
        self._stopped()
        self._lose()
        self._loop.call_soon(self._call_connection_lost, exc, context=self._context)

    def _loop_closed(self) -> None:
        """The loop ends with this transport open: as asyncio does, leave the socket to __del__."""
        conn = self._conn
        self._unbind()
        self._lose()
        self._reactor.close_conn(conn, errno.ECONNABORTED)
        self._unlist()
        hooks.forget_client(self._server, self)

    def _unlist(self) -> None:
        transports = self._loop._transports
        if transports.get(self._sock_fd) is self:  # asyncio's sendfile takes it out, too
            del transports[self._sock_fd]

    def _ended(self) -> None:
        """The descriptor is closed: whoever still waits is told."""
