"""Every private part of asyncio that aiozc relies on, in one place. tests/test_hooks.py holds each
against the running Python.

    what                                        why
    asyncio.StreamWriter.zc_*                   added methods, so a plain start_server's writer has them
    Server._attach / _detach, ._clients         take the transport from 3.13 on, and keep it in a WeakSet
    sslproto.SSLProtocol, _SSLProtocolTransport TLS runs over our transport; zc_* on it copies, and asks
                                                _get_write_buffer_size what TLS holds back
    constants.*                                 retry delays and log thresholds, TLS timeouts
    transports._FlowControlMixin                high and low water, pause and resume
    StreamReader._buffer, ._maybe_resume_transport
                                                read_into takes what is buffered first
    StreamReaderProtocol.data_received, ._stream_reader(_wr); StreamReader.feed_data, ._wakeup_waiter, ._eof,
    ._limit, ._waiter                           fast/feed.c does what these functions do
    `context` of _start_serving and others      passed from 3.15 on
    Handle's and TimerHandle's slots, _run, cancel; _ThreadSafeHandle's _lock and _run (from 3.14 on);
    format_helpers._format_callback_source      fast/handle.c makes and runs subclasses of them

On the loop (loop.py overrides): _make_socket_transport, _make_ssl_transport, _make_datagram_transport,
_start_serving, _stop_serving, _accept_connection2 (called), _sock_connect, _run_once, _process_events,
_write_to_self, _read_from_self, _make_self_pipe, _close_self_pipe; bare.py calls _ensure_fd_no_transport;
reads or sets _ssock, _transports, _task_factory, calls _process_self_data. fast/schedule.c has
_ready, _scheduled, _stopping, _debug, _closed, _timer_cancelled_count and _clock_resolution as fields.
On transports (transports/stream.py provides): _sock, _sock_fd, _make_empty_waiter, _reset_empty_waiter,
_force_close, _start_tls_compatible, _sendfile_compatible.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from asyncio import base_events, constants, format_helpers, selector_events, sslproto, streams
from asyncio.transports import _FlowControlMixin
from typing import Any

from . import _fast

__all__ = [
    "HIGH_WATER",
    "LOW_WATER",
    "MIN_SCHEDULED",
    "FlowControlMixin",
    "SSLProtocol",
    "SSLProtocolTransport",
    "attach",
    "constants",
    "context_keyword",
    "forget_client",
    "keep_clients",
    "patch_stream_writer",
    "report_callback_error",
]

FlowControlMixin: Any = _FlowControlMixin
MIN_SCHEDULED: int = base_events._MIN_SCHEDULED_TIMER_HANDLES  # type: ignore[attr-defined]
HIGH_WATER, LOW_WATER = 64 * 1024, 16 * 1024  # what the mixin's __init__ sets
SSLProtocol: Any = sslproto.SSLProtocol
SSLProtocolTransport: Any = sslproto._SSLProtocolTransport

_ATTACH_TAKES_TRANSPORT = (
    len(inspect.signature(base_events.Server._attach).parameters) > 1  # type: ignore[attr-defined]
)


_HAS_CONTEXT = (  # from 3.15 on transports, servers and accepting pass one
    "context" in inspect.signature(selector_events.BaseSelectorEventLoop._start_serving).parameters  # type: ignore[attr-defined]
)


def context_keyword(context: Any) -> dict[str, Any]:
    return {"context": context} if _HAS_CONTEXT else {}


def report_callback_error(handle: Any, exc: BaseException) -> None:
    """What Handle._run does with an exception of its callback."""
    source = format_helpers._format_callback_source(handle._callback, handle._args)
    context = {
        "message": f"Exception in callback {source}",
        "exception": exc,
        "handle": handle,
    }
    if handle._source_traceback:
        context["source_traceback"] = handle._source_traceback
    handle._loop.call_exception_handler(context)


def attach(server: Any, transport: Any) -> None:
    if _ATTACH_TAKES_TRANSPORT:
        server._attach(transport)
    else:
        server._attach()


# fast/accept.c attaches what was accepted, fast/life.c detaches.
_fast.servers_take_transport(_ATTACH_TAKES_TRANSPORT)


def reader_is_known() -> bool:
    """Are the functions through which bytes come to a StreamReader those that fast/feed.c stands for? A
    Python that has others, or a program that replaced one before, has them called as ever."""
    protocol, reader = streams.StreamReaderProtocol, streams.StreamReader
    fed = "_buffer extend _wakeup_waiter _transport _paused len _limit pause_reading NotImplementedError"
    known = (
        (protocol.data_received, "_stream_reader feed_data"),
        (inspect.getattr_static(protocol, "_stream_reader").fget, "_stream_reader_wr"),
        (reader.feed_data, f"_eof {fed}" if __debug__ else fed),  # it is asserted
        (reader._wakeup_waiter, "_waiter cancelled set_result"),  # type: ignore[attr-defined]
    )
    return all(
        getattr(function, "__globals__", None) is vars(streams)
        and function.__code__.co_names == tuple(names.split())
        for function, names in known
    )


if reader_is_known():
    _fast.bind_streams(streams.StreamReaderProtocol, streams.StreamReader)


def keep_clients(server: Any) -> None:
    """A plain set for the weak one of a Server that has no clients yet: the reactor has our transports as
    long anyway, and a weak reference is one of the dearer things of a short connection."""
    clients = getattr(server, "_clients", None)
    if type(clients) is weakref.WeakSet and not clients:
        server._clients = set()


def forget_client(server: Any, transport: Any) -> None:
    """The loop is closed, and the reactor has the transport no longer: whoever abandoned it is to be told."""
    clients = getattr(server, "_clients", None)
    if type(clients) is set:
        clients.discard(transport)


def patch_stream_writer() -> None:
    """Add zc_send, zc_submit and zc_drain to asyncio.StreamWriter. Idempotent; additions only.

    On a writer of another loop they raise RuntimeError with the remedy.
    """
    from . import streams

    for name in ("zc_send", "zc_submit", "zc_drain"):
        if name not in vars(asyncio.StreamWriter):
            setattr(asyncio.StreamWriter, name, getattr(streams, name))
