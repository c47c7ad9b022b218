"""zc_* on a TLS transport: the contract by copying, since encryption makes new bytes anyway.

The buffer is read completely before the call returns, so it may be reused at once; `sent` and `released`
both resolve when the kernel accepted the encrypted bytes, which keeps `await zc_send` a brake.
Called by streams.py. Holds nothing of the caller's.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any

from .._reactor_c import ffi
from ..buffers import export
from ..operation import Operation
from .stream import Sendable

_RETRY_SECONDS = 0.005


def tls_write(transport: Any, data: Sendable) -> Operation:
    """Queue copies behind what was written before; see StreamWriter.zc_submit for the errors."""
    raw = transport._ssl_protocol._transport
    if transport.is_closing() or raw is None or raw.is_closing():
        raise ConnectionResetError(
            errno.ECONNRESET, "the transport is closing: nothing was queued; open a new connection"
        )
    exports = [export(part) for part in (data if isinstance(data, (list, tuple)) else [data])]
    parts = [bytes(ffi.buffer(part)) for part in exports if len(part)]
    if not parts:
        return Operation.finished(transport._loop)
    op = Operation.copied(transport._loop, sum(map(len, parts)))
    transport.writelines(parts)
    _settle_later(transport, op)
    return op


def _settle_later(transport: Any, op: Operation) -> None:
    """Once TLS has encrypted all of it, the stream below tells when the kernel took it."""
    tls = transport._ssl_protocol
    raw = tls._transport
    if raw is None or raw._loop is None:
        op._settle(errno.ECONNRESET)
    elif tls._write_buffer_size:
        # A handshake, or a renegotiation, holds application data back; asyncio tells nobody when
        # it goes on.
        raw._loop.call_later(_RETRY_SECONDS, _settle_later, transport, op)
    else:
        raw._settle_when_sent(op)


async def tls_drain(transport: Any) -> None:
    """Until everything written before was encrypted and accepted by the kernel."""
    raw = transport._ssl_protocol._transport
    if raw is None:
        raise ConnectionResetError("Connection lost")
    op = Operation.copied(asyncio.get_running_loop(), 0)
    _settle_later(transport, op)
    await op.released
