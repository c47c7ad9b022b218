"""zc_* on a TLS transport: the contract by copying, since encryption makes new bytes anyway.

The buffer is read completely before the call returns, so it may be reused at once; `sent` and `released`
both resolve when the kernel accepted the encrypted bytes, which keeps `await zc_send` a brake.
Called by streams.py. Holds nothing of the caller's.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any

from .._fast import Parts
from ..operation import Operation
from .stream import TLS_RETRY_SECONDS, Sendable


def tls_raw(transport: Any) -> Any:
    """The stream below; None: it is gone. A second close() takes `_ssl_protocol` away."""
    tls = transport._ssl_protocol
    return None if tls is None else tls._transport


def tls_check(transport: Any) -> None:
    """Raises where nothing can be queued any more."""
    raw = tls_raw(transport)
    if transport.is_closing() or raw is None or raw.is_closing():
        raise ConnectionResetError(
            errno.ECONNRESET, "the transport is closing: nothing was queued; open a new connection"
        )


def tls_write(transport: Any, data: Sendable) -> Operation:
    """Queue copies behind what was written before; see StreamWriter.zc_submit for the errors."""
    tls_check(transport)
    keep = Parts(data)
    return (
        tls_queue(transport, keep.copies()) if keep.nbytes else Operation.finished(transport._loop)
    )


def tls_queue(transport: Any, parts: list[bytes]) -> Operation:
    """Queue what nobody changes, after `tls_check`: the same may go to many transports."""
    op = Operation.copied(transport._loop, sum(map(len, parts)))
    transport.writelines(parts)
    _settle_later(transport._ssl_protocol, op)
    return op


class _Again:
    """Stands for an operation among the marks of the stream below: then it is looked at again."""

    __slots__ = ("_op", "_tls")

    def __init__(self, tls: Any, op: Operation) -> None:
        self._tls = tls
        self._op = op

    def _settle(self, error: int) -> None:
        if error:
            self._op._settle(error)
        else:
            _settle_later(self._tls, self._op)


def _settle_later(tls: Any, op: Operation) -> None:
    """Once TLS has encrypted all of it, the stream below tells when the kernel took it."""
    raw = tls._transport
    if raw is None or raw._loop is None:
        op._settle(errno.ECONNRESET)
    elif tls._get_write_buffer_size() and raw.get_write_buffer_size():
        # The stream below is above high water: encrypted bytes wait for its resume_writing.
        raw._settle_when_sent(_Again(tls, op))
    elif tls._get_write_buffer_size():
        # A handshake, or a renegotiation, holds application data back; asyncio tells nobody when
        # it goes on.
        raw._loop.call_later(TLS_RETRY_SECONDS, _settle_later, tls, op)
    else:
        raw._settle_when_sent(op)


async def tls_drain(transport: Any) -> None:
    """Until everything written before was encrypted and accepted by the kernel."""
    if tls_raw(transport) is None:
        raise ConnectionResetError("Connection lost")
    op = Operation.copied(asyncio.get_running_loop(), 0)
    _settle_later(transport._ssl_protocol, op)
    await op.released
