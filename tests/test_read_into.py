"""aiozc.read_into: fills a caller's buffer, loses nothing, and leaves the rest with the reader."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiozc


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A reader and, of the other end, a writer."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, mine = await asyncio.open_connection(*server.sockets[0].getsockname())
    other = await accepted
    try:
        yield reader, other
    finally:
        mine.close()
        other.close()
        server.close()


def test_a_large_buffer_is_filled_whole(run: Any) -> None:
    async def main() -> None:
        data = os.urandom(20_000_000)
        async with pair() as (reader, writer):
            target = bytearray(len(data))
            sending = asyncio.ensure_future(writer.zc_send(data))
            assert await aiozc.read_into(reader, target) == len(data)
            await sending
            assert hashlib.sha256(target).digest() == hashlib.sha256(data).digest()

    run(main())


def test_it_takes_what_the_reader_has_and_leaves_what_is_behind(run: Any) -> None:
    async def main() -> None:
        async with pair() as (reader, writer):
            writer.write(b"line\n" + b"A" * 1000 + b"B" * 1000 + b"tail")
            assert await reader.readline() == b"line\n"
            first, second = bytearray(1000), bytearray(1000)
            assert await aiozc.read_into(reader, first) == 1000
            assert await aiozc.read_into(reader, memoryview(second)) == 1000
            assert (first, second) == (b"A" * 1000, b"B" * 1000)
            assert await reader.readexactly(4) == b"tail"

    run(main())


def test_end_of_file_ends_it_short(run: Any) -> None:
    async def main() -> None:
        async with pair() as (reader, writer):
            target = bytearray(100)
            reading = asyncio.ensure_future(aiozc.read_into(reader, target))
            await asyncio.sleep(0.02)
            assert not reading.done()
            writer.write(b"12345")
            writer.write_eof()
            assert await reading == 5
            assert target[:5] == b"12345"
            assert await aiozc.read_into(reader, target) == 0
            assert reader.at_eof()

    run(main())


def test_cancelling_gives_everything_back_to_the_reader(run: Any) -> None:
    async def main() -> None:
        async with pair() as (reader, writer):
            writer.write(b"abc")
            await asyncio.sleep(0.02)
            target = bytearray(100)
            reading = asyncio.ensure_future(aiozc.read_into(reader, target))
            await asyncio.sleep(0.02)
            writer.write(b"def")
            await asyncio.sleep(0.02)
            assert not reading.done()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            target[:] = bytes(100)
            writer.write(b"ghi")
            assert await reader.readexactly(9) == b"abcdefghi"
            assert target == bytes(100)

    run(main())


def test_a_lost_connection_raises_as_read_does(run: Any) -> None:
    async def main() -> None:
        async with pair() as (reader, writer):
            reading = asyncio.ensure_future(aiozc.read_into(reader, bytearray(100)))
            await asyncio.sleep(0.02)
            assert not reading.done()
            writer.transport.zc_reset()
            with pytest.raises(ConnectionResetError):
                await reading

    run(main())


def test_wrong_buffers_and_a_second_reader_are_refused(run: Any) -> None:
    async def main() -> None:
        async with pair() as (reader, writer):
            with pytest.raises(TypeError):
                await aiozc.read_into(reader, "text")
            with pytest.raises(BufferError, match="read-only"):
                await aiozc.read_into(reader, b"bytes")
            with pytest.raises(BufferError, match="contiguous"):
                await aiozc.read_into(reader, memoryview(bytearray(10))[::2])
            target = bytearray(4)
            reading = asyncio.ensure_future(aiozc.read_into(reader, target))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another coroutine"):
                await aiozc.read_into(reader, bytearray(4))
            writer.write(b"good")
            assert await reading == 4
            assert target == b"good"

    run(main())


def test_a_paused_reader_is_resumed(run: Any) -> None:
    # More than twice the reader's limit arrives before anybody reads: the transport is paused.
    async def main() -> None:
        data = os.urandom(3_000_000)
        async with pair() as (reader, writer):
            sending = asyncio.ensure_future(writer.zc_send(data))
            await asyncio.sleep(0.1)
            target = bytearray(len(data))
            assert await aiozc.read_into(reader, target) == len(data)
            assert target == data
            await sending

    run(main())


def test_it_works_on_another_loop() -> None:
    async def main() -> None:
        data = os.urandom(300_000)
        async with pair() as (reader, writer):
            writer.write(data)
            target = bytearray(len(data))
            assert await aiozc.read_into(reader, target) == len(data)
            assert target == data

    asyncio.run(main())
