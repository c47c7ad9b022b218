"""Socket addresses: the kernel's sockaddr as bytes, and what the socket module makes of it.

Used by base.py (whose connection is it?) and datagram.py. Never: looks a name up.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

FAMILY = struct.Struct("=H")
INET = struct.Struct("!2xH4s8x")
INET6 = struct.Struct("!2xHI16sI")
SCOPE = struct.Struct("=I")  # sin6_scope_id alone is in host order


def address_of(name: bytes | None) -> Any:
    """As socket.getpeername() and recvfrom() give it; None: it is not known. "": a Unix socket with no name."""
    if name is None or len(name) < FAMILY.size:
        return None
    (family,) = FAMILY.unpack_from(name)
    if family == socket.AF_INET:
        port, host = INET.unpack(name[: INET.size])
        return (socket.inet_ntop(socket.AF_INET, host), port)
    if family == socket.AF_INET6:
        port, flow, host, _ = INET6.unpack(name[: INET6.size])
        (scope,) = SCOPE.unpack_from(name, 24)
        return (socket.inet_ntop(socket.AF_INET6, host), port, flow, scope)
    if family == socket.AF_UNIX:
        path = name[FAMILY.size :]
        if path.startswith(b"\0"):
            return path
        return os.fsdecode(path.split(b"\0", 1)[0])
    return None
