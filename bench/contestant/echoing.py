"""Services that send back what they get: one for each way in which asyncio hands out data."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

from .served import HOST, Served, Wanted, serve_protocol, serve_streams

READ_SIZE = 64 * 1024  # asyncio's own default limit of a stream


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class BufferedEcho(asyncio.BufferedProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = memoryview(bytearray(READ_SIZE))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        # Copied: the buffer is filled again while the transport may still hold what it got.
        self.transport.write(bytes(self.buffer[:nbytes]))


class DatagramEcho(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self.transport.sendto(data, addr)


async def echo_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_SIZE):
        writer.write(data)
        await writer.drain()
    writer.close()


async def protocol(wanted: Wanted) -> Served:
    return await serve_protocol(Echo)


async def buffered(wanted: Wanted) -> Served:
    return await serve_protocol(BufferedEcho)


async def streams(wanted: Wanted) -> Served:
    return await serve_streams(echo_stream)


async def datagrams(wanted: Wanted) -> Served:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(DatagramEcho, local_addr=(HOST, 0))
    return Served(transport.get_extra_info("sockname")[1], transport.close)


async def beside_thread(wanted: Wanted) -> Served:
    """The protocol echo, while a thread of the same process computes all the time."""
    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    return replace(await protocol(wanted), apart=thread.native_id)


def compute() -> None:
    while True:
        sum(range(100))


SERVICES = {
    "protocol": protocol,
    "buffered": buffered,
    "streams": streams,
    "datagrams": datagrams,
    "beside-thread": beside_thread,
}
