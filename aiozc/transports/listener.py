"""A listening socket: accepted descriptors become transports, those of TLS by asyncio's own
`_accept_connection2`, which waits for the handshake.

Owns: the native accept of one socket. Made by loop.py's `_start_serving`; closed by `_stop_serving`, before
the socket is, so that it can be bound again at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import os
import socket
from asyncio import trsock
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import hooks
from .._reactor_c import lib
from .stream import StreamTransport

if TYPE_CHECKING:
    from ..loop import EventLoop

_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    __slots__ = ("_args", "_conn", "_context", "_factory", "_kind", "_loop", "_sock", "_timer")

    def __init__(
        self,
        loop: EventLoop,
        factory: Callable[[], Any],
        sock: socket.socket,
        args: tuple[Any, ...],
        context: contextvars.Context | None = None,
    ) -> None:
        self._loop = loop
        self._factory = factory
        self._sock = sock
        self._args = args  # sslcontext, server, backlog, ssl timeouts: as asyncio passes them
        self._kind = (int(sock.family), int(sock.type), sock.proto)
        self._timer: Any = None
        # Each connection is served in a copy: what a protocol factory sets is that connection's.
        self._context = contextvars.copy_context() if context is None else context
        self._conn: Any = loop._reactor.open(sock.fileno(), lib.AZC_LISTEN, self)

    def start(self) -> None:
        self._timer = None
        if self._conn is not None:
            lib.azc_conn_start(self._conn)

    def _serve(
        self,
        sock: socket.socket,
        extra: dict[str, Any],
        server: Any,
        context: contextvars.Context,
    ) -> None:
        try:
            protocol = self._factory()
            StreamTransport(self._loop, sock, protocol, None, extra, server, self._kind[0], context)
        except (SystemExit, KeyboardInterrupt):
            sock.close()
            raise
        except BaseException as exc:
            sock.close()
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
        self._loop._listeners.pop(self._sock.fileno(), None)
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
        family, kind, proto = self._kind
        sock = socket.socket(family, kind, proto, fileno=fd)
        extra: dict[str, Any] = {}
        with contextlib.suppress(OSError):  # gone again: its transport will say so
            extra["peername"] = sock.getpeername()
        sslcontext, server, _backlog, *timeouts = self._args
        if sslcontext is None:
            # Nothing to wait for: no task, and a burst has its transports within the turn.
            self._serve(sock, extra, server, context)
            return
        self._loop.create_task(
            self._loop._accept_connection2(  # type: ignore[attr-defined]
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
