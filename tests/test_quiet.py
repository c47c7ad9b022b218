"""Small sends whose success no completion tells of (uring_submit.c): one enter a message, and nothing is lost
where the socket does not take it all."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from order_support import pattern, runs

import aiozc

pytestmark = pytest.mark.skipif(
    aiozc.capabilities().backend != "uring", reason="requests are of the uring backend"
)


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        ours = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    return ours, peer


PAIRS = {"tcp": tcp, "unix": socket.socketpair}


def run(main: Any, **settings: Any) -> Any:
    return aiozc.run(asyncio.wait_for(main, 30), backend="uring", **settings)


async def connect(ours: socket.socket, protocol: asyncio.BaseProtocol) -> Any:
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(lambda: protocol, sock=ours))[0]


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_message_and_its_answer_are_one_enter(pair: str) -> None:
    # Fails when: the completion of the send ends the wait that the same enter began.
    messages = 300

    async def main() -> int:
        ours, peer = PAIRS[pair]()
        transport = await connect(ours, Echo())
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def talk() -> None:
            peer.settimeout(10)
            for i in range(messages):
                peer.sendall(pattern(i, 100))
                assert peer.recv(100, socket.MSG_WAITALL) == pattern(i, 100)
            loop.call_soon_threadsafe(done.set_result, None)

        thread = threading.Thread(target=talk)
        enters = loop.zc_stats().enters  # type: ignore[attr-defined]
        thread.start()
        await done
        enters = loop.zc_stats().enters - enters  # type: ignore[attr-defined]
        thread.join()
        transport.close()
        peer.close()
        return int(enters)

    enters = run(main())
    # A Unix socket's receive is armed anew for each message, in the same enter.
    assert enters < messages * 1.2, f"{enters} enters for {messages} messages"


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("size", [97, 3001, 16000])
def test_what_the_socket_does_not_take_follows_in_order(pair: str, size: int) -> None:
    # Fails when: a send that was cut short counts as whole, or its rest waits for another event.
    count = (1 << 20) // size

    async def main() -> bytes:
        ours, peer = PAIRS[pair]()
        transport = await connect(ours, asyncio.Protocol())
        transport.set_write_buffer_limits(high=4 << 20)
        for i in range(count):
            transport.write(pattern(i, size))
            await asyncio.sleep(0)  # a turn, and a request, of its own
        assert transport.get_write_buffer_size() > 0, "the socket took everything"
        got = bytearray()

        def read() -> None:
            while len(got) < count * size and (data := peer.recv(1 << 16)):
                got.extend(data)

        peer.settimeout(10)
        await asyncio.to_thread(read)
        while transport.get_write_buffer_size():
            await asyncio.sleep(0.001)
        transport.close()
        peer.close()
        return bytes(got)

    got = run(main())
    expected = b"".join(pattern(i, size) for i in range(count))
    assert got == expected, runs(got)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_send_that_nobody_reads_fails_its_connection(pair: str) -> None:
    async def main() -> None:
        ours, peer = PAIRS[pair]()
        loop = asyncio.get_running_loop()
        lost = loop.create_future()

        class Told(asyncio.Protocol):
            def eof_received(self) -> bool:
                return True  # stay open, to write

            def connection_lost(self, exc: Exception | None) -> None:
                lost.set_result(exc)

        transport = await connect(ours, Told())
        peer.close()
        while not lost.done():
            transport.write(b"into the void")
            await asyncio.sleep(0.001)
        assert isinstance(await lost, (ConnectionResetError, BrokenPipeError))

    run(main())


@pytest.mark.parametrize(("entries", "completions"), [(1, 2), (2, 8), (8, 8), (0, 0)])
def test_many_small_answers_through_a_small_ring(entries: int, completions: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Echo, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()

        async def client(number: int) -> None:
            reader, writer = await asyncio.open_connection(*address)
            for turn in range(20):
                message = pattern(number * 20 + turn, 10 + number * 7 + turn * 131)
                writer.write(message)
                assert await reader.readexactly(len(message)) == message
            writer.close()
            await writer.wait_closed()

        await asyncio.gather(*(client(n) for n in range(100)))
        server.close()

    settings = {"ring_entries": entries, "cq_entries": completions} if entries else {}
    run(main(), **settings)
