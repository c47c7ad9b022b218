"""aiozc: an asyncio event loop on io_uring whose transports send zero-copy.

Public names only; every one is documented where it is defined. Linux, CPython 3.11 or newer.
"""

import sys as _sys

if not _sys.platform.startswith("linux"):
    raise ImportError(
        "aiozc needs Linux (io_uring or epoll); on other systems use asyncio's own loop"
    )

try:
    from . import _fast as _fast
    from . import _reactor_c as _reactor_c
except ImportError as _error:
    from ._broken import explain as _explain

    raise _explain(_error) from _error

from ._version import __version__
from .attach import zc_attach, zc_send, zc_submit
from .broadcast import BroadcastResult, broadcast
from .buffers import Frozen, frozen
from .capabilities import Capabilities, capabilities
from .execve import execve
from .loop import EventLoop, new_event_loop, run
from .operation import Operation, OperationState, Result
from .policy import EventLoopPolicy, install
from .pool import BufferPool, PoolExhausted, Region
from .receive import read_into
from .settings import Settings
from .stats import ZcStats
from .streams import StreamWriter, open_connection, start_server
from .tensors import as_buffer
from .transports.datagram import DatagramTransport
from .transports.stream import StreamTransport, ZeroCopyInfo

__all__ = [
    "BroadcastResult",
    "BufferPool",
    "Capabilities",
    "DatagramTransport",
    "EventLoop",
    "EventLoopPolicy",
    "Frozen",
    "Operation",
    "OperationState",
    "PoolExhausted",
    "Region",
    "Result",
    "Settings",
    "StreamTransport",
    "StreamWriter",
    "ZcStats",
    "ZeroCopyInfo",
    "__version__",
    "as_buffer",
    "broadcast",
    "capabilities",
    "execve",
    "frozen",
    "install",
    "new_event_loop",
    "open_connection",
    "read_into",
    "run",
    "start_server",
    "zc_attach",
    "zc_send",
    "zc_submit",
]
