"""zc_* over the TLS of a loop that is not ours: copies, since encryption makes new bytes anyway.

Called by attach.py. The buffer is read completely before the call returns. No loop tells when TLS and the
transport below have handed everything on, so that is looked at, more and more seldom.
Never: calls an operation sent while bytes of it are seen to wait, or after they were thrown away.
"""

from __future__ import annotations

import asyncio
import errno
import gc
from typing import TYPE_CHECKING, Any

from ._fast import Parts
from .operation import Operation
from .standin import closing

if TYPE_CHECKING:
    from .transports.stream import Sendable

_TLS_MIN, _TLS_MAX = 0.0005, 0.02  # seconds between two looks


def tls_submit(
    loop: asyncio.AbstractEventLoop, writer: Any, transport: Any, data: Sendable
) -> Operation:
    """Written as copies, in order. `sent` and `released` come once neither TLS nor the transport below it
    holds anything any more."""
    if transport.is_closing():
        raise closing()
    keep = Parts(data)
    if not keep.nbytes:
        return Operation.finished(loop)
    copies = keep.copies()
    op = Operation.copied(loop, keep.nbytes)
    transport.writelines(copies)
    _TlsWait(loop, writer, transport, op).look()
    return op


def _below(transport: Any) -> tuple[bool, Any]:
    """The transport that TLS writes to. uvloop's TLS does not show it, but the garbage collector knows what it
    refers to. (True, None): TLS has let go of it. (False, None): a TLS that we do not know."""
    tls = getattr(transport, "_ssl_protocol", None)
    if tls is not None:
        return True, tls._transport
    for tls in gc.get_referents(transport):
        if type(tls).__name__ == "SSLProtocol":
            for below in gc.get_referents(tls):
                if below is not transport and hasattr(below, "get_write_buffer_size"):
                    return True, below
            return True, None
    return False, None


class _TlsWait:
    """Looks, more and more seldom, whether TLS has handed everything on."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, writer: Any, transport: Any, op: Operation
    ) -> None:
        self._loop = loop
        self._protocol = getattr(writer, "_protocol", None)
        self._transport = transport
        self._op = op
        self._pause = _TLS_MIN

    def look(self) -> None:
        known, below = _below(self._transport)
        size = self._transport.get_write_buffer_size()
        # A transport throws its buffer away when it is lost: an empty one says nothing then.
        lost = bool(getattr(self._protocol, "_connection_lost", False))
        if known and below is None:
            lost = True
        elif below is not None:
            size += below.get_write_buffer_size()
            lost = lost or below.is_closing()
        if lost:
            self._op._settle(errno.ECONNRESET)
        elif not size:
            self._op._settle(0)
        else:
            self._loop.call_later(self._pause, self.look)
            self._pause = min(2 * self._pause, _TLS_MAX)
