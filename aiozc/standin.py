"""What a writer of another loop has in place of its transport while zero-copy operations are unsent.

Owns: nothing but references. It asks each time whether the connection has a queue (foreign.py) and puts what is
sent there, else it hands on; so those who kept it, like TLS after an upgrade, may go on using it.
Made by foreign.py, asked by attach.py.
Never: sends by itself.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from asyncio import constants
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attach import Attachment
    from .foreign import Stream


def real_of(transport: Any) -> Any:
    return transport._real if isinstance(transport, StandIn) else transport


def stream_of(transport: Any) -> Stream | None:
    """Of a stand-in whose queue is not empty."""
    return transport.stream() if type(transport) is StandIn else None


def socket_of(real: Any) -> Any:
    """The transport's socket. Raises where nothing could ever be queued."""
    sock = real.get_extra_info("socket")
    if sock is None or sock.type != socket.SOCK_STREAM or not _is_socket(sock.fileno()):
        raise RuntimeError(
            f"zc_send needs a connection of a stream socket, and this is a {type(real).__name__}; "
            "write to it as ever"
        )
    return sock


def check(real: Any) -> None:
    """Raises where nothing can be queued any more."""
    if getattr(real, "_eof", False) is True:
        raise RuntimeError("Cannot call zc_submit() after write_eof()")
    if real.is_closing():
        raise closing()


def _is_socket(fd: int) -> bool:
    """uvloop says "socket" of pipes, too."""
    return fd < 0 or stat.S_ISSOCK(os.fstat(fd).st_mode)


def closing() -> ConnectionResetError:
    return ConnectionResetError(
        errno.ECONNRESET, "the transport is closing: nothing was queued; open a new connection"
    )


class StartTls:
    """Stands for writer.start_tls while the queue is not empty: the handshake is not for the queue."""

    def __init__(self, stream: Stream, writer: Any) -> None:
        self._stream = stream
        self._writer = writer

    async def __call__(self, *args: Any, **kwargs: Any) -> None:
        await self._stream.when_empty()
        await type(self._writer).start_tls(self._writer, *args, **kwargs)


class StandIn(asyncio.Transport):
    """What a writer has in place of its transport while operations are unsent. Afterwards, for those who kept
    it, it hands everything on; and everything that is not sending always."""

    def __init__(self, at: Attachment, real: Any) -> None:
        super().__init__()
        self._at = at
        self._real = real

    def stream(self) -> Stream | None:
        stream = self._at.streams.get(id(self._real))
        return stream if stream is not None and stream.queueing else None

    def write(self, data: Any) -> None:
        (self.stream() or self._real).write(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        if (stream := self.stream()) is None:
            self._real.writelines(list_of_data)
            return
        for data in list_of_data:
            stream.write(data)

    def write_eof(self) -> None:
        (self.stream() or self._real).write_eof()

    def can_write_eof(self) -> bool:
        return bool(self._real.can_write_eof())

    def close(self) -> None:
        (self.stream() or self._real).close()

    def abort(self) -> None:
        (self.stream() or self._real).abort()

    def is_closing(self) -> bool:
        return bool((self.stream() or self._real).is_closing())

    def get_write_buffer_size(self) -> int:
        stream = self.stream()
        held: int = self._real.get_write_buffer_size()
        return held + (stream.unsent() if stream else 0)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        low, high = self._real.get_write_buffer_limits()
        return low, high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._real.set_write_buffer_limits(high=high, low=low)
        if stream := self.stream():
            stream.take_limits()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._real.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        (self.stream() or self._real).set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._real.get_protocol()
        return protocol

    def is_reading(self) -> bool:
        return bool(self._real.is_reading())

    def pause_reading(self) -> None:
        self._real.pause_reading()

    def resume_reading(self) -> None:
        self._real.resume_reading()

    @property
    def _sendfile_compatible(self) -> Any:
        """loop.sendfile sends from the socket itself, past any queue: it raises while there is one."""
        no = constants._SendfileMode.UNSUPPORTED
        return no if self.stream() else getattr(self._real, "_sendfile_compatible", no)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __repr__(self) -> str:
        return f"<aiozc stand-in for {self._real!r}>"
