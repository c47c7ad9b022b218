"""The event loop: asyncio's own unix loop with the reactor in place of its selector.

Owns: the life of the reactor, and which transport a socket gets. Everything that is not a stream or
datagram socket (pipes, signals, subprocesses, add_reader, executors) is asyncio's own code, which sees
a selector. Events of the reactor run as one handle behind those that are already ready.
Never: per-packet work; that is reactor.py, transports/ and the native side.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from . import _fast, bare, checked, hooks
from .capabilities import choose
from .pool import Region, register_buffer
from .reactor import Reactor, ReactorSelector
from .settings import settings_of
from .stats import ZcStats
from .transports.connector import Connector
from .transports.datagram import DatagramTransport
from .transports.listener import Listener
from .transports.stream import StreamTransport

if TYPE_CHECKING:
    from .operation import Result
    from .transports.stream import Sendable

_T = TypeVar("_T")


class _Dispatch(events.Handle):
    """The one handle by which a turn's events run. asyncio sees an ordinary, never cancelled one."""

    __slots__ = ()

    def _run(self) -> None:
        self._callback()  # type: ignore[attr-defined]


_fast.bind_asyncio(
    events.Handle,
    events.TimerHandle,
    getattr(events, "_ThreadSafeHandle", None),  # from 3.14 on
    asyncio.BaseEventLoop,
)


class EventLoop(_fast.Scheduler, asyncio.SelectorEventLoop):  # type: ignore[misc]
    """An asyncio event loop whose stream transports can send zero-copy. Keywords: see Settings."""

    if TYPE_CHECKING:  # asyncio's
        _selector: ReactorSelector

    def __init__(self, **settings: Any) -> None:
        # Until asyncio's __init__: a loop that failed to be made is not "unclosed".
        self._closed = True
        # All that is ours is kept there. asyncio's loop has nearly 30 attributes, and from the 31st on
        # CPython 3.13 reaches every one of them more slowly (bench/peers.py, rows call-soon).
        wanted = settings_of(settings)
        self._reactor = Reactor(self, choose(wanted.backend, wanted.zerocopy), wanted)
        self._ssock: socket.socket | None = None
        super().__init__(ReactorSelector(self._reactor, self._is_wakeup))
        # Whose descriptor is not for add_reader. Where asyncio has a WeakValueDictionary our transports take
        # themselves out, for a weak reference is one of the dearer things of a short connection.
        self._transports: dict[int, Any] = {}
        self._reactor.core.handle = _Dispatch(self._reactor.core.dispatch, (), self, None)
        hooks.patch_stream_writer()

    def _is_wakeup(self, fd: int) -> bool:
        return self._ssock is not None and fd == self._ssock.fileno()

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(enabled)
        if enabled:
            checked.watch()

    # -- waking: native, but in debug mode; fast/schedule.c has the order of these --

    def _make_self_pipe(self) -> None:
        super()._make_self_pipe()  # type: ignore[misc]
        assert self._ssock is not None
        self._set_wake(self._ssock.fileno(), self._selector.hang_bell())

    def _write_to_self(self) -> None:
        if not self._woken:
            self._woken = True
            super()._write_to_self()  # type: ignore[misc]

    def _read_from_self(self) -> None:
        super()._read_from_self()  # type: ignore[misc]
        self._silence()

    def _close_self_pipe(self) -> None:
        # A loop that nobody closed: the garbage collector may come to its sockets before it comes to it.
        self._set_wake(-1, -1)
        self._selector.drop_bell()
        if self._ssock is not None and self._ssock.fileno() >= 0:
            super()._close_self_pipe()  # type: ignore[misc]

    # -- running --

    def run_forever(self) -> None:
        self._check_closed()  # type: ignore[attr-defined]
        self._check_running()  # type: ignore[attr-defined]
        self._reactor.attach()
        self._begin_run()
        try:
            super().run_forever()
        finally:
            self._end_run()
            self._reactor.detach()

    def _run_once(self) -> None:
        """One turn, in asyncio's order: what was ready and descriptors, then the reactor's events, then timers;
        within run_forever native turns until the loop is to stop.

        Native (fast/turn.c), but in debug mode, where callbacks are timed. A native turn that only brings
        events runs them at once, and what their callbacks schedule runs in the same turn: a loop with one
        busy connection spends most of its time on turns (bench/peers.py, rows x1).
        """
        if not self._reactor.core.turn(self, hooks.MIN_SCHEDULED):
            super()._run_once()  # type: ignore[misc]

    def _fired(self, fired: int) -> None:
        """The native turn's wait answered more than plain events: descriptors, a signal, an error."""
        self._process_events(self._selector.finish(fired))

    def _process_events(self, event_list: list[Any]) -> None:
        if event_list:
            super()._process_events(event_list)  # type: ignore[misc]
        if self._reactor.core.pending:
            self._ready.append(self._reactor.core.handle)

    def close(self) -> None:
        """As asyncio's; also waits, at most `zc_close_timeout` seconds, for the kernel to release memory.

        What it has not released by then is kept for the life of the process, with a ResourceWarning:
        the peer still gets the right bytes.
        """
        if self.is_running():
            raise RuntimeError("Cannot close a running event loop")
        if self.is_closed():
            return
        for listener in list(self._reactor.listeners.values()):
            listener.close()
        left = self._reactor.close()
        super().close()
        if left:
            pinned = self.zc_stats().pinned_bytes
            warnings.warn(
                f"{self!r} was closed while the kernel still read {pinned} bytes of {left} zero-copy "
                "requests; their memory is kept for the life of the process. Await op.released, or "
                "end the connections with transport.zc_reset(), before the loop is closed",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    # -- transports --

    def _make_socket_transport(
        self,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[Any] | None = None,
        *,
        extra: dict[str, Any] | None = None,
        server: Any = None,
        context: contextvars.Context | None = None,
    ) -> Any:
        self._ensure_fd_no_transport(sock)  # type: ignore[attr-defined]
        if sock.type != socket.SOCK_STREAM:
            # SOCK_SEQPACKET and the like: boundaries that a gathering queue would not keep.
            return super()._make_socket_transport(  # type: ignore[misc]
                sock, protocol, waiter, extra=extra, server=server, **hooks.context_keyword(context)
            )
        return StreamTransport(self, sock, protocol, waiter, extra, server, None, context)

    def _sock_connect(self, fut: asyncio.Future[None], sock: socket.socket, address: Any) -> None:
        try:
            sock.connect(address)
        except (BlockingIOError, InterruptedError):  # it goes on in the kernel
            self._ensure_fd_no_transport(sock)  # type: ignore[attr-defined]
            Connector(self, sock, address, fut)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            fut.set_exception(exc)
        else:
            fut.set_result(None)

    def _make_ssl_transport(
        self,
        rawsock: socket.socket,
        protocol: asyncio.BaseProtocol,
        sslcontext: Any,
        waiter: asyncio.Future[Any] | None = None,
        *,
        server_side: bool = False,
        server_hostname: str | None = None,
        extra: dict[str, Any] | None = None,
        server: Any = None,
        ssl_handshake_timeout: float | None = hooks.constants.SSL_HANDSHAKE_TIMEOUT,
        ssl_shutdown_timeout: float | None = hooks.constants.SSL_SHUTDOWN_TIMEOUT,
        context: contextvars.Context | None = None,
        **kwargs: Any,
    ) -> Any:
        self._ensure_fd_no_transport(rawsock)  # type: ignore[attr-defined]
        tls = hooks.SSLProtocol(
            self,
            protocol,
            sslcontext,
            waiter,
            server_side,
            server_hostname,
            ssl_handshake_timeout=ssl_handshake_timeout,
            ssl_shutdown_timeout=ssl_shutdown_timeout,
        )
        StreamTransport(self, rawsock, tls, None, extra, server, None, context)
        return tls._app_transport

    def _make_datagram_transport(
        self,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        address: Any = None,
        waiter: asyncio.Future[Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Any:
        self._ensure_fd_no_transport(sock)  # type: ignore[attr-defined]
        return DatagramTransport(self, sock, protocol, address, waiter, extra)

    async def _sendfile_native(self, transp: Any, file: Any, offset: int, count: Any) -> Any:
        """asyncio lists the transport again afterwards, also one that has ended meanwhile."""
        try:
            return await super()._sendfile_native(transp, file, offset, count)  # type: ignore[misc]
        finally:
            fd = transp._sock_fd
            if not transp._has_socket and self._transports.get(fd) is transp:
                del self._transports[fd]

    # -- serving --

    async def create_server(
        self, protocol_factory: Callable[[], Any], *args: Any, sock: Any = None, **kwargs: Any
    ) -> asyncio.Server:
        if isinstance(sock, socket.socket):
            self._reactor.given.add(sock)
        return await super().create_server(protocol_factory, *args, sock=sock, **kwargs)

    async def create_unix_server(
        self, protocol_factory: Callable[[], Any], *args: Any, sock: Any = None, **kwargs: Any
    ) -> asyncio.Server:
        if isinstance(sock, socket.socket):
            self._reactor.given.add(sock)
        return await super().create_unix_server(protocol_factory, *args, sock=sock, **kwargs)

    def _start_serving(
        self,
        protocol_factory: Callable[[], Any],
        sock: socket.socket,
        sslcontext: Any = None,
        server: Any = None,
        backlog: int = 100,
        ssl_handshake_timeout: float | None = hooks.constants.SSL_HANDSHAKE_TIMEOUT,
        ssl_shutdown_timeout: float | None = hooks.constants.SSL_SHUTDOWN_TIMEOUT,
        context: contextvars.Context | None = None,
    ) -> None:
        self._check_closed()  # type: ignore[attr-defined]
        args = (sslcontext, server, backlog, ssl_handshake_timeout, ssl_shutdown_timeout)
        if sock.type != socket.SOCK_STREAM:
            keyword = hooks.context_keyword(context)
            super()._start_serving(protocol_factory, sock, *args, **keyword)  # type: ignore[misc]
            return
        hooks.keep_clients(server)
        listener = Listener(self, protocol_factory, sock, args, context)
        self._reactor.listeners[sock.fileno()] = listener
        listener.start()

    def _stop_serving(self, sock: socket.socket) -> None:
        listener = self._reactor.listeners.get(sock.fileno())
        if listener is not None:
            listener.close()
        super()._stop_serving(sock)  # type: ignore[misc]  # closes it, and unlinks a Unix path

    # -- zero-copy --

    def zc_stats(self) -> ZcStats:
        """The loop's counters, and its levels now."""
        return self._reactor.zc_stats()

    def register_buffer(self, obj: Any) -> Region | None:
        """Register memory with this loop's ring: what is sent from it costs less. Returns its Region.

        obj: a contiguous buffer of at most 1 GiB in anonymous or tmpfs memory (a bytearray, a numpy
        array, an anonymous mmap), locked until the region is closed; or a BufferPool, whose memory is
        then registered at once instead of on first use, and None is returned. Called where the loop
        runs, it raises what the kernel refuses; elsewhere that is done on first use, and a refusal
        only means that sends go unregistered. On the epoll backend it is plain memory.

        OSError: EFAULT, a file mapping or read-only memory; ENOMEM, RLIMIT_MEMLOCK; ENOSPC, too many
        regions. BufferError, ValueError: as Region. Each says what to do.
        """
        return register_buffer(self._reactor, obj)

    async def sock_zc_sendall(self, sock: socket.socket, data: Sendable) -> Result:
        """Send a buffer, or a list of buffers, zero-copy on a connected stream socket of the caller's.

        As sock_sendall, with the contract of StreamWriter.zc_send: returns when the kernel no longer reads the
        memory, which is locked against resizing until then and must not be changed. Calls on one
        socket go out one behind the other, in the order in which they began; what is sent by other
        means meanwhile goes between them. Receiving is not touched. Where zero-copy is not to be
        had (Unix sockets, zero-copy switched off) it copies.

        Being cancelled: if nothing of it was issued, nothing is sent; else it goes on, and the memory stays
        locked until it went. Closing the socket cuts nothing either: the peer sees its end after the
        last byte, or after `zc_linger` seconds in which it takes nothing, a reset. shutdown() of the
        socket ends all at once.

        Raises before anything is queued: ValueError (blocking, no stream), TypeError (no buffer; SSLSocket),
        BufferError (not contiguous), RuntimeError (the socket is a transport's); OSError when
        sending failed, once the memory is free.
        """
        return await bare.sendall(self, sock, data)

    async def sock_zc_sendto(self, sock: socket.socket, data: Sendable, address: Any) -> Result:
        """Send one datagram, of a buffer or a list of buffers, from a datagram socket of the caller's.

        As sock_sendto, and any number of calls may wait on one socket: they are sent in the order in which they
        began. The memory is locked until it returns and may be changed then. `Result.path` says
        "copied": no datagram is sent zero-copy yet. Being cancelled while it waits sends nothing.
        Errors as for sock_zc_sendall; an OSError is the kernel's, of this datagram or an earlier one.
        """
        return await bare.sendto(self, sock, data, address)

    def zc_fault(self, name: str, every: int) -> None:
        """For tests: let every n-th event of a kind meet a fault; 0 switches it off.

        The kinds are in _native/faults.h. RuntimeError: this build has no such knobs.
        """
        self._reactor.fault(name, every)


def new_event_loop(**settings: Any) -> EventLoop:
    """A new loop; a `loop_factory` for asyncio.Runner and asyncio.run. Keywords: see Settings."""
    return EventLoop(**settings)


def run(main: Coroutine[Any, Any, _T], *, debug: bool | None = None, **settings: Any) -> _T:
    """Like asyncio.run, on a loop of aiozc."""
    with asyncio.Runner(debug=debug, loop_factory=lambda: new_event_loop(**settings)) as runner:
        return runner.run(main)
