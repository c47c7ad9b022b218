"""The datagram transport, for UDP and Unix sockets: asyncio's behaviour on the native datagram queue.

Owns: what base.py does not: addresses, and what a received buffer means. Made by loop.py; its `_on_*`
methods are called by reactor.py. `sendto` copies a datagram when it is queued, `zc_sendto` locks the caller's
memory; those of one turn go out together, in call order.
Errors of the network (ICMP), and of sending what `sendto` queued, reach `error_received`; an error of sending
what `zc_sendto` queued fails that operation. The transport lives.
"""

from __future__ import annotations

import asyncio
import errno
import operator
import os
import socket
import struct
from asyncio.log import logger
from typing import TYPE_CHECKING, Any

from .. import _fast, hooks
from .._reactor_c import ffi, lib
from ..operation import Operation, path_name
from .base import NativeTransport, os_error
from .names import FAMILY, INET, INET6, SCOPE, address_of
from .stream import Sendable, ZeroCopyInfo

if TYPE_CHECKING:
    from ..loop import EventLoop

_HEADER = struct.Struct("=IIII")
_NAME_AT = _HEADER.size
_DATA_AT = _HEADER.size + lib.AZC_NAME_MAX
_FAST_DATAGRAM = 3  # FAST_DGRAM of fast.h
_REMEMBERED = 4096  # addresses whose two forms are kept
MAX_SEGMENT = 65507  # payload of the largest IPv4 datagram
MAX_SEGMENTS = 128  # UDP_MAX_SEGMENTS (measured on 6.18); 64 in older kernels
_OPEN_DATAGRAM = 2  # as in _native/fast/fast.h: zc_sendto may queue without asking
_MAX_BUFFERS = 1024  # UIO_MAXIOV

_MANY = frozenset((list, tuple))

_ADVICE = {
    errno.EINVAL: "; with segment_size: a segment and its headers must fit the path's MTU, older kernels "
    "take 64 segments a call, and some devices none; without it: is the port 0?",
    errno.EMSGSIZE: "; a call carries at most 65507 bytes over IPv4 and 65527 over IPv6, with segment_size "
    "too, and a segment must fit the path's MTU",
    errno.EIO: "; with segment_size: the route's device cannot compute checksums",
}


class DatagramOperation(Operation):
    """The operation of one `zc_sendto`."""

    __slots__ = ()

    def _explain(self, error: int) -> str:
        return super()._explain(error) + _ADVICE.get(error, "")


class DatagramTransport(NativeTransport, asyncio.DatagramTransport):
    """asyncio.DatagramTransport over a datagram socket, with `zc_sendto` and `zc_configure`."""

    _kind = lib.AZC_DATAGRAM
    _errors_are_events = True

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        address: Any = None,
        waiter: asyncio.Future[Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._address = address
        self._family = sock.family
        # By address. On a connected socket the name is empty, for sendto only compares the address.
        self._names = {}
        self._addresses = {}
        super().__init__(loop, sock, protocol, waiter, extra, None, int(self._family))
        self._open = _OPEN_DATAGRAM

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name != "zero_copy":
            return super().get_extra_info(name, default)
        conn = self._conn
        if not conn.zc_ok:
            return ZeroCopyInfo("copy", 0, bool(conn.adaptive), "copied")
        path = path_name(conn.path) if conn.path else "unknown"
        return ZeroCopyInfo(self._reactor.engine, int(conn.zc_threshold), bool(conn.adaptive), path)

    if TYPE_CHECKING:  # fields of the native base
        _names: dict[Any, bytes]
        _addresses: dict[bytes, Any]

    # -- receiving: native (fast/events.c), but errors and what comes while closing --

    def _begin(self) -> None:
        super()._begin()
        if not self._closing:
            self._fast = _FAST_DATAGRAM

    def _stopped(self) -> None:
        self._fast = 0

    def _on_datagram(self, res: int, start: int) -> None:
        if self._conn_lost or (self._closing and res >= 0):
            return  # while closing, the errors of what is still sent are told, as asyncio does
        try:
            if res < 0:
                self._context.run(self._protocol.error_received, os_error(res))
                return
            memory = self._reactor.memory
            namelen, _, size, _ = _HEADER.unpack_from(memory, start)
            name = bytes(memory[start + _NAME_AT : start + _NAME_AT + namelen])
            address = self._addresses.get(name)
            if address is None:
                address = self._learn(name)
            data = bytes(memory[start + _DATA_AT : start + _DATA_AT + size])
            self._context.run(self._protocol.datagram_received, data, address)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._datagram_failed(exc)

    def _datagram_failed(self, exc: BaseException) -> None:
        # As from asyncio's reader callback: reported, and the transport goes on.
        self._loop.call_exception_handler(
            {
                "message": "Exception in a datagram protocol's callback",
                "exception": exc,
                "transport": self,
                "protocol": self._protocol,
            }
        )

    def _learn(self, name: bytes) -> Any:
        """The address that socket.recvfrom would give for a sockaddr."""
        address = address_of(name) or None
        if type(address) is not tuple:
            return address
        if len(self._addresses) >= _REMEMBERED:
            self._addresses.clear()
        self._addresses[name] = address
        return address

    # -- sending --

    sendto = _fast.datagram_sendto()

    def _sendto(self, data: Any, addr: Any = None) -> None:
        """What sendto() does not do by itself."""
        given = addr
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"data argument must be a bytes-like object, not {type(data).__name__!r}"
            )
        if self._address:
            if addr not in (None, self._address):
                raise ValueError(f"Invalid address: must be None or {self._address}")
            addr = self._address
        if self._conn_lost:
            if self._address:
                if self._conn_lost >= hooks.constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES:
                    logger.warning("socket.send() raised exception.")
                self._conn_lost += 1
            return
        name = b""
        peer = self._extra["peername"]  # "": connected, to a Unix socket without a name
        if not peer and (peer is None or addr is not None):
            name = self._known(addr) or self._name(addr)
            if not name:
                self._send_by_socket(data, addr)
                return
        if type(data) is memoryview and not data.c_contiguous:
            data = data.tobytes()
        kept = data if type(data) is bytes else ffi.from_buffer(data)
        rc = lib.azc_sendto(self._conn, kept, len(kept), name, len(name))
        if rc > 0:
            self._maybe_pause_protocol()
        elif rc < 0:
            raise MemoryError("aiozc: no memory to queue a datagram")
        elif not name:
            self._remember_connected(given)

    zc_sendto = _fast.zc_sendto_method(DatagramOperation)

    def _zc_sendto(
        self, data: Sendable, addr: Any = None, segment_size: int | None = None
    ) -> Operation:
        """What zc_sendto does natively for one buffer to an address that it knows."""
        if self._closing or self._conn_lost:
            raise ConnectionResetError(
                errno.ECONNRESET,
                "the transport is closing: nothing was queued; open a new endpoint",
            )
        name = self._destination(addr)
        if type(data) in _MANY and len(data) > _MAX_BUFFERS:
            raise ValueError(
                f"a datagram is gathered from at most {_MAX_BUFFERS} buffers, not {len(data)}; "
                "join some of them"
            )
        parts = _fast.Parts(data)
        segment = 0 if segment_size is None else self._segment(segment_size, parts.nbytes)
        op: Operation = self._zc_datagram(parts, name, segment)
        if not name:
            self._remember_connected(addr)
        return op

    def _segment(self, segment_size: Any, size: int) -> int:
        segment = operator.index(segment_size)
        if not 1 <= segment <= MAX_SEGMENT:
            raise ValueError(
                f"segment_size is the bytes of one datagram, 1 to {MAX_SEGMENT}, not {segment}"
            )
        if self._family not in (socket.AF_INET, socket.AF_INET6):
            raise ValueError("segment_size needs a UDP socket; call zc_sendto for each datagram")
        if size > segment * MAX_SEGMENTS:
            raise ValueError(
                f"{size} bytes are more than {MAX_SEGMENTS} segments of {segment} bytes; "
                "raise segment_size, or share the data among several calls"
            )
        return segment

    def _destination(self, addr: Any) -> bytes:
        """The sockaddr to send to; b"" on a connected socket. ValueError: see zc_sendto."""
        peer = self._address or self._extra["peername"]
        if peer or (peer is not None and addr is None):  # "": a Unix socket without a name
            if addr not in (None, peer):
                raise ValueError(f"Invalid address: must be None or {peer}")
            return b""
        if addr is None:
            raise ValueError(
                "an address is needed: the socket is not connected; pass addr, or give "
                "create_datagram_endpoint a remote_addr"
            )
        name = self._known(addr) or self._name(addr)
        if not name:
            raise ValueError(
                f"{addr!r} is not a numeric address of this socket's family; look a name up first, "
                "with loop.getaddrinfo()"
            )
        return name

    def _remember_connected(self, addr: Any) -> None:
        """A call with this address goes where the socket is connected: the next one need not ask Python."""
        if addr is None or type(addr) is tuple:
            self._names[addr] = b""

    def _known(self, addr: Any) -> bytes | None:
        try:
            return self._names.get(addr) if type(addr) is tuple else None
        except TypeError:  # something in it cannot be hashed
            return None

    def _name(self, addr: Any) -> bytes:
        """The sockaddr for an address; b"" where only a look-up, or an error, can tell."""
        name = b""
        try:
            if self._family == socket.AF_INET:
                host, port = addr
                packed = socket.inet_pton(socket.AF_INET, host)
                name = FAMILY.pack(socket.AF_INET) + INET.pack(port, packed)[2:]
            elif self._family == socket.AF_INET6:
                host, port, *more = addr
                flow, scope = (*more, 0, 0)[:2]
                packed = socket.inet_pton(socket.AF_INET6, host)
                name = FAMILY.pack(socket.AF_INET6) + INET6.pack(port, flow, packed, 0)[2:24]
                name += SCOPE.pack(scope)
            elif self._family == socket.AF_UNIX:
                path = os.fsencode(addr)
                if 0 < len(path) < 108:
                    return FAMILY.pack(socket.AF_UNIX) + path + (b"\0" if path[0] else b"")
        except (OSError, TypeError, ValueError, struct.error):
            return b""
        if type(addr) is tuple and name:
            if len(self._names) >= _REMEMBERED:
                self._names.clear()
            self._names[addr] = name
        return name

    def _send_by_socket(self, data: Any, addr: Any) -> None:
        """An address that is not numeric, or not one at all: as asyncio does, in the call."""
        assert self._sock is not None
        try:
            self._sock.sendto(data, addr)
        except BlockingIOError:
            return  # full: a datagram may be lost, and who it was for is not known without a look-up
        except OSError as exc:
            self._protocol.error_received(exc)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._fatal_error(exc, "Fatal write error on datagram transport")
