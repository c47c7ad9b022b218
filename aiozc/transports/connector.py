"""A socket that is connecting: waits in the reactor until it is writable, then its future is told.

Made by loop.py's `_sock_connect`, under every connect of asyncio (`create_connection`, `sock_connect`, happy
eyeballs). Owns a native connection from then until the future is done, whoever ends it: cancelling takes
it out of the kernel at once. Never: closes the socket, which is the caller's.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from .._reactor_c import lib

if TYPE_CHECKING:
    from ..loop import EventLoop


class Connector:
    __slots__ = ("_address", "_conn", "_future", "_reactor", "_sock")

    def __init__(
        self, loop: EventLoop, sock: socket.socket, address: Any, future: asyncio.Future[None]
    ) -> None:
        self._reactor = loop._reactor
        self._sock = sock
        self._address = address
        self._future = future
        self._conn: Any = self._reactor.open(sock.fileno(), lib.AZC_CONNECT, self)
        lib.azc_conn_start(self._conn)
        future.add_done_callback(self._end)

    def _on_write(self, _res: int, _what: int) -> None:
        self._end()  # before anybody makes a transport of this descriptor
        if self._future.done():
            return
        try:
            error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except OSError as exc:  # it was closed meanwhile
            self._future.set_exception(exc)
            return
        if error:
            self._future.set_exception(OSError(error, f"Connect call failed {self._address}"))
        else:
            self._future.set_result(None)

    def _end(self, _future: Any = None) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            self._reactor.close_conn(conn, 0)

    _loop_closed = _end
