"""A listening socket: accepted descriptors become transports, natively (fast/accept.c); those of TLS by
asyncio's own `_accept_connection2`, which waits for the handshake, and those of families whose addresses only
the socket module knows (AF_VSOCK).

Owns: the native accept of one socket. Made by loop.py's `_start_serving`; closed by `_stop_serving`, before
the socket is, so that it can be bound again at once.
"""

from __future__ import annotations

import contextvars
import errno
import os
import socket
from asyncio import trsock
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _fast, hooks
from .._reactor_c import lib
from .base import non_blocking
from .stream import StreamTransport

if TYPE_CHECKING:
    from ..loop import EventLoop

_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


NAMED = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)  # address_of reads their addresses
_TRANSPARENT = {socket.AF_INET: (socket.SOL_IP, 19), socket.AF_INET6: (socket.IPPROTO_IPV6, 75)}


def _one_name(sock: socket.socket) -> bool:
    """Is `sockname` of every connection that is accepted here the listener's? Bound to one address, and not
    for other hosts' addresses (IP_TRANSPARENT)."""
    try:
        if sock.family == socket.AF_UNIX:
            return True
        if sock.family not in _TRANSPARENT or sock.getsockname()[0] in ("0.0.0.0", "::"):
            return False
        return not sock.getsockopt(*_TRANSPARENT[sock.family])
    except OSError:
        return False


class Listener(_fast.Acceptor):
    __slots__ = ("_args", "_conn", "_sock", "_timer")

    def __init__(
        self,
        loop: EventLoop,
        factory: Callable[[], Any],
        sock: socket.socket,
        args: tuple[Any, ...],
        context: contextvars.Context | None = None,
    ) -> None:
        self._loop = loop
        self._reactor = loop._reactor
        self._factory = factory
        self._sock = sock
        self._args = args  # sslcontext, server, backlog, ssl timeouts: as asyncio passes them
        sslcontext, self._server, *_ = args
        named = sslcontext is None and sock.family in NAMED
        self._transport = StreamTransport if named else None
        self._family = int(sock.family)
        self._made_of = (self._family, int(sock.type), sock.proto)
        self._timer: Any = None
        self._same_here = _one_name(sock)
        # Each connection is served in a copy: what a protocol factory sets is that connection's.
        self._context = contextvars.copy_context() if context is None else context
        self._conn: Any = loop._reactor.open(sock.fileno(), lib.AZC_LISTEN, self)
        self._conn.shared = sock in loop._reactor.given

    def start(self) -> None:
        self._timer = None
        if self._conn is not None:
            lib.azc_conn_start(self._conn)

    def _failed(self, exc: BaseException) -> None:
        """The protocol factory raised, or there is no transport for what it made: the socket is closed."""
        if self._loop.get_debug():  # as asyncio: told only then
            self._loop.call_exception_handler(
                {
                    "message": "Error on transport creation for incoming connection",
                    "exception": exc,
                }
            )

    def close(self) -> None:
        """Nothing is accepted afterwards. Idempotent; the socket is the caller's to close."""
        if self._conn is None:
            return
        conn, self._conn = self._conn, None
        if self._timer is not None:
            self._timer.cancel()
        self._loop._reactor.listeners.pop(self._sock.fileno(), None)
        self._loop._reactor.close_conn(conn, errno.ECONNABORTED)

    _loop_closed = close

    def _on_accept(self, res: int) -> None:
        if res >= 0:
            context = self._context.copy()
            context.run(self._accepted, res, context)
            return
        error = OSError(-res, os.strerror(-res))
        about = {"exception": error, "socket": trsock.TransportSocket(self._sock)}
        what = "out of system resource" if -res in _NO_RESOURCE else "failed"
        self._loop.call_exception_handler({"message": f"socket.accept() {what}", **about})
        self._timer = self._loop.call_later(hooks.constants.ACCEPT_RETRY_DELAY, self.start)

    def _accepted(self, fd: int, context: contextvars.Context) -> None:
        sock = non_blocking(*self._made_of, fileno=fd)
        try:
            extra = {"peername": sock.getpeername()}
        except OSError:  # gone again: its transport will say so
            extra = {"peername": None}
        sslcontext, server, _backlog, *timeouts = self._args
        self._loop.create_task(
            self._loop._accept_connection2(
                self._factory,
                sock,
                extra,
                sslcontext,
                server,
                *timeouts,
                **hooks.context_keyword(context),
            ),
            context=context,
        )
