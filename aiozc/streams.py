"""zc_* on asyncio's StreamWriter, and the typed names for those who check types.

`zc_send`, `zc_submit` and `zc_drain` are plain functions that hooks.py adds to asyncio.StreamWriter;
`StreamWriter` here only declares them. Called by users. Holds no state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from . import hooks
from .operation import Operation, Result
from .transports.stream import StreamTransport
from .transports.tls import tls_drain, tls_write

if TYPE_CHECKING:
    from .transports.stream import Sendable


class StreamWriter(asyncio.StreamWriter):
    """For type checkers: what an asyncio.StreamWriter is on an aiozc loop. Never instantiated."""

    if TYPE_CHECKING:

        def write(self, data: Sendable) -> None: ...

        def writelines(self, data: Iterable[Sendable]) -> None: ...

        async def zc_send(self, data: Sendable) -> Result: ...

        def zc_submit(self, data: Sendable) -> Operation: ...

        async def zc_drain(self) -> None: ...


def refuse(transport: Any) -> RuntimeError:
    return RuntimeError(
        f"zc_* needs a transport of an aiozc loop, and this is a {type(transport).__name__}; "
        "use aiozc.zc_send(writer, data), which takes any loop's, or "
        "run the program by aiozc.run(main()) or asyncio.Runner(loop_factory=aiozc.new_event_loop)"
    )


def zc_submit(self: asyncio.StreamWriter, data: Sendable) -> Operation:
    """Queue a buffer, or a list of buffers, to be sent zero-copy, behind everything written before.

    Never waits. Until `op.released` the memory is locked against resizing and must not be changed.
    A list is one operation and raises as a whole, with nothing queued: TypeError (not a buffer),
    BufferError (not contiguous), RuntimeError (after write_eof), ConnectionResetError (closing).
    """
    transport: Any = self._transport  # type: ignore[attr-defined]
    if isinstance(transport, StreamTransport):
        op: Operation = transport.zc_write(data)
        return op
    if isinstance(transport, hooks.SSLProtocolTransport):
        return tls_write(transport, data)
    raise refuse(transport)


async def zc_send(self: asyncio.StreamWriter, data: Sendable) -> Result:
    """Send zero-copy and wait until the memory may be used again, about a round trip.

    Raises like `zc_submit`, or the OSError that ended the connection. Being cancelled does not cut
    the stream: the bytes still go, and the memory stays locked until they went.
    """
    transport: Any = self._transport  # type: ignore[attr-defined]
    if isinstance(transport, StreamTransport):
        op: Operation = transport.zc_write(data)
        transport._send_now(op)
    else:
        op = zc_submit(self, data)
    return await op.released


async def zc_drain(self: asyncio.StreamWriter) -> None:
    """Wait until this transport's unsent and pinned bytes are at most `zc_low_water` together.

    ConnectionResetError: the connection is gone.
    """
    transport: Any = self._transport  # type: ignore[attr-defined]
    if isinstance(transport, StreamTransport):
        waiter = transport._zc_wait()
        if waiter is not None:
            await waiter
    elif isinstance(transport, hooks.SSLProtocolTransport):
        await tls_drain(transport)
    else:
        raise refuse(transport)


async def start_server(
    client_connected_cb: Callable[[asyncio.StreamReader, StreamWriter], Awaitable[None] | None],
    host: Any = None,
    port: Any = None,
    **kwargs: Any,
) -> asyncio.Server:
    """asyncio.start_server, with the writer's type told. An aiozc loop must be running."""
    _check_loop()
    callback = cast(
        "Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]",
        client_connected_cb,
    )
    return await asyncio.start_server(callback, host, port, **kwargs)


async def open_connection(
    host: Any = None, port: Any = None, **kwargs: Any
) -> tuple[asyncio.StreamReader, StreamWriter]:
    """asyncio.open_connection, with the writer's type told. An aiozc loop must be running."""
    _check_loop()
    reader, writer = await asyncio.open_connection(host, port, **kwargs)
    return reader, cast(StreamWriter, writer)


def _check_loop() -> None:
    from .loop import EventLoop

    if not isinstance(asyncio.get_running_loop(), EventLoop):
        raise RuntimeError(
            "no aiozc loop is running; start the program by aiozc.run(main()) "
            "or asyncio.Runner(loop_factory=aiozc.new_event_loop)"
        )
