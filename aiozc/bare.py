"""Sending zero-copy on a bare socket, which has no transport: loop.sock_zc_sendall and loop.sock_zc_sendto.

Owns: a duplicate of the descriptor, and a native send queue on it, for as long as operations are on that
socket. The kernel and the reactor know only the duplicate: the caller may close his descriptor, and its
number may be used again, without harm. Called by loop.py. A socket is known by its SO_COOKIE, which the
kernel gives to no other one.
Never: receives (sock_recv and add_reader stay asyncio's), changes an option of the socket, or ends it,
except for one that its owner has closed and whose peer takes nothing (zc_linger).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import ssl
import struct
import termios
from typing import TYPE_CHECKING, Any

from ._fast import Parts
from ._reactor_c import lib
from .operation import Operation, Result
from .transports.base import linger_0

if TYPE_CHECKING:
    from .loop import EventLoop
    from .reactor import Reactor
    from .transports.stream import Sendable

_SO_COOKIE = 57
_COOKIE = struct.Struct("=Q")
_INT = struct.Struct("=i")
_LOOK_MIN = 0.05  # seconds
_AGAIN_MIN, _AGAIN_MAX = 0.001, 0.05  # seconds


def _check(loop: EventLoop, sock: socket.socket) -> int:
    """The socket's cookie. Errors as asyncio's sock_* raise them, in debug mode or not."""
    if isinstance(sock, ssl.SSLSocket):
        raise TypeError("Socket cannot be of type SSLSocket")
    if sock.gettimeout() != 0:
        raise ValueError("the socket must be non-blocking; call sock.setblocking(False)")
    loop._ensure_fd_no_transport(sock)  # type: ignore[attr-defined]
    cookie: int = _COOKIE.unpack(sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))[0]
    return cookie


async def sendall(loop: EventLoop, sock: socket.socket, data: Sendable) -> Result:
    """See EventLoop.sock_zc_sendall."""
    cookie = _check(loop, sock)
    if sock.type != socket.SOCK_STREAM:
        raise ValueError(
            f"sock_zc_sendall needs a stream socket, not {sock.type!r}; "
            "send a datagram by sock_zc_sendto"
        )
    keep = Parts(data)
    if not keep.nbytes:
        return await Operation.finished(loop)
    queue = loop._reactor.bare.get(cookie)
    if queue is None or queue.failed():
        queue = _Queue(loop, sock, cookie)
    op = queue.submit(keep)
    del keep  # the operation holds the lock: an exception's frames must not
    try:
        return await op
    except asyncio.CancelledError:
        op.withdraw()
        raise


def open_duplicate(reactor: Reactor, sock: Any, owner: Any) -> tuple[int, Any]:
    """A duplicate of a stream socket's descriptor, and a connection on it that only sends."""
    fd = os.dup(sock.fileno())
    try:
        # Family 0: the socket's options are its owner's business.
        conn: Any = reactor.open(fd, lib.AZC_STREAM, owner, 0)
    except BaseException:
        os.close(fd)
        raise
    inet = sock.family in (socket.AF_INET, socket.AF_INET6)
    conn.zc_ok = inet and reactor.capabilities.zerocopy
    return fd, conn


class _Queue:
    """The native queue of one bare socket. It ends with its last operation, before anybody is told."""

    __slots__ = (
        "_conn",
        "_cookie",
        "_fd",
        "_loop",
        "_now",
        "_number",
        "_ops",
        "_reactor",
        "_since",
    )

    def __init__(self, loop: EventLoop, sock: socket.socket, cookie: int) -> None:
        self._loop = loop
        self._reactor = reactor = loop._reactor
        self._cookie = cookie
        self._number = sock.fileno()  # the caller's
        self._ops = 0
        self._now: tuple[int, int] | None = None  # how far it was when it was last looked at
        self._since = 0.0
        self._fd, self._conn = open_duplicate(reactor, sock, self)
        # zc_timeout resets, and this socket is not ours to reset.
        lib.azc_conn_timeout(self._conn, 0)
        reactor.bare[cookie] = self
        _watch(loop)

    def submit(self, keep: Parts) -> Operation:
        try:
            op = self._reactor.submit(self._conn, keep)
        except BaseException:
            if not self._ops:
                self._end()
            raise
        self._ops += 1
        op.tell(self)
        return op

    def failed(self) -> bool:
        """Nothing more is sent by it. Who sends again learns why from a queue of his own."""
        return bool(self._conn.error)

    # -- told by operations, like a future --

    def done(self) -> bool:
        return False

    def set_result(self, _: None) -> None:
        self._ops -= 1
        if not self._ops:
            self._end()

    # -- told by the reactor --

    def _on_write(self, _res: int, _what: int) -> None:
        """Sending is over: each operation is told so by an event of its own."""

    def _on_recv(self, res: int, _start: int) -> None:
        """Nothing is received; the epoll set did not take the descriptor."""
        lib.azc_conn_abort(self._conn, res)

    def _loop_closed(self) -> None:
        """The socket stays its owner's, as asyncio leaves it; azc_conn_close would shut it down."""
        conn, self._conn = self._conn, None
        self._unlist()
        lib.azc_conn_abort(conn, -errno.ECONNABORTED)
        if lib.azc_conn_quiesce(conn) >= 0:
            os.close(self._fd)

    # -- the end --

    def _unlist(self) -> None:
        if self._reactor.bare.get(self._cookie) is self:
            del self._reactor.bare[self._cookie]

    def _end(self) -> None:
        conn, self._conn = self._conn, None
        self._unlist()
        if conn is None:
            return
        try:
            self._reactor.close_conn(conn, errno.ECONNABORTED)
        except OSError as exc:  # the kernel still has a request: its descriptor must not be closed
            self._loop.call_exception_handler(
                {"message": "aiozc: a descriptor is kept", "exception": exc}
            )
            return
        os.close(self._fd)

    def look(self, now: float, limit: float) -> None:
        """Once its owner has closed the socket, a peer that takes nothing for so long is reset: nobody is
        left who could end it. That frees the memory."""
        if self._conn is None or _same(self._number, self._fd):
            self._now = None
            return
        far = int(self._conn.sent_pos), unacked(self._fd)
        if far != self._now:
            self._now, self._since = far, now
        elif now - self._since >= limit:
            # As StreamTransport.zc_reset; the duplicate that close_conn keeps for pins is reset, too.
            lib.azc_conn_abort(self._conn, -errno.ECONNABORTED)
            lib.azc_conn_quiesce(self._conn)
            if self._conn is not None:
                linger_0(self._fd)
                self._end()


def _same(a: int, b: int) -> bool:
    """Are both descriptors of one socket?"""
    try:
        return os.path.sameopenfile(a, b)
    except OSError:
        return False


def unacked(fd: int) -> int:
    try:
        return int(_INT.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0


def _watch(loop: EventLoop) -> None:
    """One timer for all queues of a loop, while there are any."""
    reactor = loop._reactor
    if not reactor.bare_watched:
        reactor.bare_watched = True
        loop.call_later(max(reactor.settings.zc_linger / 8, _LOOK_MIN), _look, loop)


def _look(loop: EventLoop) -> None:
    reactor = loop._reactor
    reactor.bare_watched = False
    queues = [owner for owner in reactor.conns.values() if type(owner) is _Queue]
    for queue in queues:
        queue.look(loop.time(), reactor.settings.zc_linger)
    if queues:
        _watch(loop)


# -- datagrams --


class _Row:
    """Who waits to send a datagram on one socket, in call order."""

    __slots__ = ("lock", "waiting")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0


class _Writable:
    """Waits in the reactor until a socket is writable: beside whatever add_writer does for it."""

    __slots__ = ("_conn", "_fd", "_future", "_reactor")

    def __init__(self, loop: EventLoop, sock: socket.socket) -> None:
        self._reactor = loop._reactor
        self._future = loop.create_future()
        self._fd = os.dup(sock.fileno())
        try:
            self._conn: Any = self._reactor.open(self._fd, lib.AZC_CONNECT, self)
        except BaseException:
            os.close(self._fd)
            raise
        lib.azc_conn_start(self._conn)

    async def wait(self) -> None:
        try:
            await self._future
        finally:
            self._loop_closed()

    def _on_write(self, _res: int, _what: int) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def _loop_closed(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            self._reactor.close_conn(conn, 0)
            os.close(self._fd)


async def sendto(loop: EventLoop, sock: socket.socket, data: Sendable, address: Any) -> Result:
    """See EventLoop.sock_zc_sendto."""
    cookie = _check(loop, sock)
    if sock.type == socket.SOCK_STREAM:
        raise ValueError(
            "sock_zc_sendto needs a datagram socket; send on a stream by sock_zc_sendall"
        )
    keep = Parts(data)
    try:
        return await _in_row(loop, sock, cookie, b"".join(keep.copies()), address)
    finally:
        del keep  # an exception's frames must not hold the lock


async def _in_row(
    loop: EventLoop, sock: socket.socket, cookie: int, payload: bytes, address: Any
) -> Result:
    rows = loop._reactor.bare
    row = rows.get(cookie)
    if row is None:
        try:
            return Result(sock.sendto(payload, address), "copied")
        except (BlockingIOError, InterruptedError):
            row = rows[cookie] = _Row()
    row.waiting += 1
    pause = _AGAIN_MIN
    try:
        async with row.lock:
            while True:
                await _Writable(loop, sock).wait()
                try:
                    return Result(sock.sendto(payload, address), "copied")
                except (BlockingIOError, InterruptedError):
                    # The receiver is what is full: an unconnected Unix socket is writable all the same.
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _AGAIN_MAX)
    finally:
        row.waiting -= 1
        if not row.waiting:
            del rows[cookie]
