"""Connecting waits in the reactor, on both backends; asyncio's behaviour is the measure."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from support import eventually, open_descriptors, soon

FILLERS = 2  # connections that a queue of length 0 holds


@contextmanager
def full_listener() -> Iterator[socket.socket]:
    """A listener whose queue is full: the next connection's SYN is dropped, so it stays connecting."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(FILLERS):
            stack.enter_context(connecting()).connect_ex(listener.getsockname())
        yield listener


def make_room(listener: socket.socket) -> None:
    """The next SYN is answered."""
    for _ in range(FILLERS):
        listener.accept()[0].close()


def connecting() -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    return sock


def test_a_connection_is_made_and_its_socket_can_be_used_at_once(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener, connecting() as sock:
            await soon(loop.sock_connect(sock, listener.getsockname()))
            peer, _ = listener.accept()
            with peer:
                reader, writer = await asyncio.open_connection(sock=sock)
                writer.write(b"hello")
                await asyncio.sleep(0.02)
                assert peer.recv(10) == b"hello"
                peer.sendall(b"you")
                assert await soon(reader.readexactly(3)) == b"you"
                writer.close()

    run(main())


def test_waiting_needs_no_selector(run: Any) -> None:
    # Fails when: connecting goes through add_writer.
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        with full_listener() as listener, connecting() as sock:
            task = asyncio.ensure_future(loop.sock_connect(sock, listener.getsockname()))
            await asyncio.sleep(0.05)
            assert not task.done()
            assert list(loop._selector.get_map()) == [loop._ssock.fileno()]
            make_room(listener)
            await soon(task)

    run(main())


def test_a_refused_connection_is_told_with_its_address(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
        with connecting() as sock:
            with pytest.raises(ConnectionRefusedError, match=r"Connect call failed \('127"):
                await soon(loop.sock_connect(sock, address))
            with pytest.raises(ConnectionRefusedError):
                await soon(loop.create_connection(asyncio.Protocol, *address))

    run(main())


def test_a_cancelled_attempt_leaves_nothing_in_the_kernel(run: Any) -> None:
    # Fails when: the poll is left armed; it holds the socket open after its close.
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        with full_listener() as listener:
            await asyncio.sleep(0.01)
            before, conns = open_descriptors(), len(loop._reactor.conns)
            for _ in range(20):
                with connecting() as sock:
                    attempt = loop.sock_connect(sock, listener.getsockname())
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(attempt, 0.005)
                    await asyncio.sleep(0)
            assert open_descriptors() == before
            assert len(loop._reactor.conns) == conns

    run(main())


def test_a_socket_that_is_closed_during_the_attempt_fails_it_and_nothing_else(run: Any) -> None:
    # Fails when: asking the closed socket how it went raises out of the event, and ends the run.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener, connecting() as sock:
            attempt = asyncio.ensure_future(loop.sock_connect(sock, listener.getsockname()))
            loop.call_soon(sock.close)
            with pytest.raises(OSError) as caught:
                await soon(attempt)
            assert caught.value.errno == errno.EBADF

    run(main())


def test_an_attempt_goes_on_over_two_runs(loop_factory: Any) -> None:
    with closing(loop_factory()) as loop, full_listener() as listener, connecting() as sock:

        async def begin() -> Any:
            task = asyncio.ensure_future(loop.sock_connect(sock, listener.getsockname()))
            await asyncio.sleep(0.02)
            return task

        task = loop.run_until_complete(begin())
        assert not task.done()
        make_room(listener)
        loop.run_until_complete(asyncio.wait_for(task, 10))


def test_a_loop_can_be_closed_with_an_attempt_going_on(loop_factory: Any) -> None:
    loop = loop_factory()
    with full_listener() as listener, connecting() as sock:
        task = loop.create_task(loop.sock_connect(sock, listener.getsockname()))
        loop.run_until_complete(asyncio.sleep(0.02))
        assert not task.done()
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()


def test_two_hundred_at_once(run: Any) -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, backlog=300)
        address = server.sockets[0].getsockname()
        pairs = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(200)))
        for reader, _ in pairs:
            assert await soon(reader.read()) == b""
        for _, writer in pairs:
            writer.close()
        server.close()
        loop: Any = asyncio.get_running_loop()
        await eventually(lambda: loop.zc_stats().connections == 0)

    run(main())


def test_the_next_address_is_tried(run: Any) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            loop = asyncio.get_running_loop()

            async def resolve(*_: Any, **__: Any) -> Any:
                return [
                    (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
                    for host in ("127.0.0.2", "127.0.0.1")
                ]

            loop.getaddrinfo = resolve  # type: ignore[method-assign]
            for delay in (None, 0.1):
                transport, _ = await soon(
                    loop.create_connection(
                        asyncio.Protocol, "somewhere", port, happy_eyeballs_delay=delay
                    )
                )
                assert transport.get_extra_info("peername") == ("127.0.0.1", port)
                transport.abort()

    run(main())
