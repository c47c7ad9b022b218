"""Rings so small that submission and completion queues are full all the time: nothing is lost, doubled,
reordered, or sent on another connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiozc

pytestmark = pytest.mark.skipif(
    aiozc.capabilities().backend != "uring", reason="rings are of the uring backend"
)


def tiny(entries: int, completions: int) -> Any:
    def factory() -> aiozc.EventLoop:
        return aiozc.new_event_loop(
            backend="uring",
            adaptive=False,
            zc_threshold=0,
            ring_entries=entries,
            cq_entries=completions,
        )

    return factory


@pytest.mark.parametrize(("entries", "completions"), [(1, 2), (2, 8), (8, 8)])
def test_a_hundred_connections_through_a_ring_of_a_few_entries(
    run: Any, entries: int, completions: int
) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: Any) -> None:
            while data := await reader.read(65536):
                writer.zc_submit(data)
                writer.write(b"")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()

        async def client(number: int) -> None:
            reader, writer = await asyncio.open_connection(*address)
            for turn in range(10):
                message = bytes([number]) * (100 + turn * 700 + number)
                await writer.zc_send(message)
                assert await reader.readexactly(len(message)) == message
            writer.close()
            await writer.wait_closed()

        await asyncio.gather(*(client(n) for n in range(100)))
        server.close()
        stats = asyncio.get_running_loop().zc_stats()  # type: ignore[attr-defined]
        assert stats.operations >= 2000

    run(main(), tiny(entries, completions))


def test_two_thousand_sends_through_eight_completions_overflow_and_arrive(run: Any) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        received = 0

        async def serve(reader: asyncio.StreamReader, writer: Any) -> None:
            nonlocal received
            expected = 0
            while data := await reader.read(1 << 20):
                for value in data:
                    assert value == expected % 251
                    expected += 1
                received += len(data)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        writers = [
            (await asyncio.open_connection(*server.sockets[0].getsockname()))[1] for _ in range(50)
        ]
        ops = [
            writer.zc_submit(bytes([turn % 251]))  # type: ignore[attr-defined]
            for turn in range(40)
            for writer in writers
        ]
        await asyncio.gather(*(op.released for op in ops))
        for writer in writers:
            writer.close()
        while received < 2000:
            await asyncio.sleep(0.01)
        stats = loop.zc_stats()
        assert stats.operations == 2000
        assert stats.operations_live == 0
        assert stats.pinned_bytes == 0
        server.close()

    run(main(), tiny(8, 8))


def test_a_descriptor_that_is_used_again_gets_only_its_own_bytes(run: Any) -> None:
    # A request left in a full queue when its connection is closed must not go out on the next one.
    async def main() -> None:
        connections: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: Any) -> None:
            connections.append(await reader.read(-1))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        for number in range(200):
            _, writer = await asyncio.open_connection(*address)
            value = bytes([number % 256])
            writer.zc_submit(value * 5000)  # type: ignore[attr-defined]
            writer.write(value * 100)
            if number % 3 == 0:
                writer.transport.abort()
            else:
                writer.close()
                await writer.wait_closed()
        while len(connections) < 200:
            await asyncio.sleep(0.01)
        for number, data in enumerate(connections):
            assert set(data) <= {data[0]} if data else True, f"connection {number} is mixed"
        server.close()

    run(main(), tiny(1, 2))
