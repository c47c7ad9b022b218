"""`read_into`: the receiving half of sending large buffers. Fills a caller's buffer from a StreamReader.

Bytes go from the reactor's receive buffers straight into the caller's, without `bytes` objects collected in
the reader first. Called by users. The caller's buffer is never with the kernel: it is filled by copies on
the loop's thread, and left alone from the moment the call ends, however it ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

from .transports.stream import Sink, StreamTransport


async def read_into(reader: asyncio.StreamReader, buf: Any) -> int:
    """Read into `buf` until it is full or the stream ends; the number of bytes read.

    Fewer than the buffer holds only at end of file. TypeError: not a buffer. BufferError: read-only, or
    not contiguous. RuntimeError: another coroutine is reading. Raises what `reader.read` would when
    the connection is lost. Cancelling it loses nothing: what was filled goes back to the reader.
    Works with any asyncio reader; the straight way is taken on aiozc's transports.
    """
    view = memoryview(buf)
    if view.readonly:
        raise BufferError("the buffer is read-only; pass a bytearray, or a writable array")
    if not view.c_contiguous:
        raise BufferError("the buffer is not contiguous; read into a contiguous one and copy")
    target = view.cast("B")
    private: Any = reader
    if private._waiter is not None:
        raise RuntimeError("read_into() called while another coroutine is reading")
    if private._exception is not None:
        raise private._exception
    filled = _take(private, target)
    try:
        while filled < len(target) and not private._eof:
            transport = private._transport
            if isinstance(transport, StreamTransport) and not transport._eof_seen:
                filled = await _fill(private, transport, target, filled)
                if private._exception is not None:
                    raise private._exception
                filled += _take(private, target[filled:])
            else:
                data = await reader.read(len(target) - filled)
                target[filled : filled + len(data)] = data
                filled += len(data)
    except asyncio.CancelledError:
        private._buffer[:0] = target[:filled]
        raise
    return filled


async def _fill(reader: Any, transport: StreamTransport, target: memoryview, filled: int) -> int:
    if transport._sink is not None:
        raise RuntimeError("read_into() called while another coroutine is reading")
    sink = Sink(target, transport._loop.create_future())
    sink.filled = filled
    transport._set_sink(sink)
    try:
        await sink.waiter
    except asyncio.CancelledError:
        # Before the caller's handler, which puts back what it knows of.
        reader._buffer[:0] = target[filled : sink.filled]
        raise
    finally:
        transport._set_sink(None)
    return sink.filled


def _take(reader: Any, target: memoryview) -> int:
    """Move what the reader has already collected."""
    n = min(len(reader._buffer), len(target))
    if n:
        target[:n] = reader._buffer[:n]
        del reader._buffer[:n]
    reader._maybe_resume_transport()
    return n
