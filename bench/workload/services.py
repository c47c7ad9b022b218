"""What serves: the same job in several ways, each as a user of that loop would write it. Run by child.py.

A service listens (loopback), or makes its own connections into a sink and works as if it had been asked
(`push`), which shows what sending costs where the kernel does not copy. Protocol on loopback: fixed-size binary
requests, for parsing is not what is measured.
Imports aiozc only where it is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

from .proxying import Proxy, WebSocket

RANGE = struct.Struct("<QQ")  # start, length: asked of the weights
FRAME = 256 * 1024
STAMP = struct.Struct("<QQ")  # number, nanoseconds of time.monotonic: heads each frame
VALUE = 64 * 1024
GET, SET = b"G", b"S"
REQUEST = struct.Struct("<cI")  # what, key
KEYS = 256
PIECE = 16 << 20


def pool_of(view: memoryview) -> tuple[Any, list[memoryview]]:
    """A copy in registered memory, in pieces."""
    import aiozc

    pool = aiozc.BufferPool(size=PIECE, count=-(-len(view) // PIECE))
    loop: Any = asyncio.get_running_loop()
    loop.register_buffer(pool)
    pieces = []
    for start in range(0, len(view), PIECE):
        piece = pool.acquire()
        part = view[start : start + PIECE]
        piece[: len(part)] = part
        pieces.append(piece)
    return pool, pieces


class Weights:
    """Ranges of a file mapping."""

    def __init__(self, way: str, options: dict[str, Any]) -> None:
        self.file = open(options["file"], "rb")  # noqa: SIM115
        self.view = memoryview(mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ))
        self.largest = options["largest"]
        self.connections = options["connections"]
        self.send: Callable[[Any, int, int], Awaitable[None]] = getattr(self, way)
        if way == "pool":
            self.pool, self.pieces = pool_of(self.view)

    async def write(self, writer: Any, start: int, end: int) -> None:
        writer.write(self.view[start:end])
        await writer.drain()

    async def frozen(self, writer: Any, start: int, end: int) -> None:
        import aiozc

        writer.write(
            aiozc.frozen(self.view[start:end])
        )  # else a copy: nobody says that it stays as it is
        await writer.drain()

    async def zc(self, writer: Any, start: int, end: int) -> None:
        writer.zc_submit(self.view[start:end])
        await writer.zc_drain()

    async def pool(self, writer: Any, start: int, end: int) -> None:
        parts = []
        while start < end:
            number, offset = divmod(start, PIECE)
            parts.append(self.pieces[number][offset : min(PIECE, offset + end - start)])
            start += len(parts[-1])
        writer.zc_submit(parts)
        await writer.zc_drain()

    async def sendfile(self, writer: Any, start: int, end: int) -> None:
        await writer.drain()
        loop = asyncio.get_running_loop()
        await loop.sendfile(writer.transport, self.file, start, end - start, fallback=False)

    async def on_client(self, reader: Any, writer: Any) -> None:
        while True:
            start, length = RANGE.unpack(await reader.readexactly(RANGE.size))
            await self.send(writer, start, start + length)

    async def push(self, writers: list[Any]) -> None:
        async def one(number: int, writer: Any) -> None:
            choose = random.Random(number)
            while True:
                length = choose.randint(1 << 20, self.largest)
                start = choose.randrange(len(self.view) - length)
                await self.send(writer, start, start + length)

        await asyncio.gather(*(one(*pair) for pair in enumerate(writers)))


class Broadcast:
    """Frames at a fixed rate to all subscribers; who has a frame waiting already misses this one."""

    def __init__(self, way: str, options: dict[str, Any]) -> None:
        self.rate = options["rate"]
        self.connections = options["connections"]
        self.writers: list[Any] = []
        random.seed(1)  # the client makes the same
        self.bodies = [random.randbytes(FRAME - STAMP.size) for _ in range(8)]
        self.send: Callable[[bytes], None] = getattr(self, way)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.times: list[float] = []  # of calls: until every subscriber's kernel was done with it
        self.dropped = 0  # in the last call that ended
        self.stalled: list[Any] = options.get(
            "never_read", []
        )  # (host, port) of each, when pushing
        if way == "pool":
            import aiozc

            self.memory = aiozc.BufferPool(size=FRAME, count=64, max_count=1024)
            loop: Any = asyncio.get_running_loop()
            loop.register_buffer(self.memory)

    def write(self, frame: bytes) -> None:
        for writer in self.writers:
            if writer.transport.get_write_buffer_size() < FRAME:
                writer.write(frame)

    def call(self, frame: Any) -> None:
        import aiozc

        called = time.monotonic()
        call = aiozc.broadcast(self.writers, frame, max_queued=2 * FRAME, on_slow="drop")
        task = asyncio.get_running_loop().create_task(call)
        self.tasks.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self.tasks.discard(task)
            self.dropped = len(task.result().dropped)
            self.times.append(time.monotonic() - called)

        task.add_done_callback(done)

    def pool(self, frame: bytes) -> None:
        with self.memory.acquire() as place:
            place[:] = frame
            self.call(place[:])

    async def on_client(self, reader: Any, writer: Any) -> None:
        self.writers.append(writer)
        if len(self.writers) == self.connections:
            self.publishing = asyncio.ensure_future(self.publish())
        try:
            await reader.read()
        finally:
            if writer in self.writers:
                self.writers.remove(writer)

    async def publish(self) -> None:
        number, due = 0, time.monotonic()
        while True:
            stamp = STAMP.pack(number, time.monotonic_ns())
            self.send(stamp + self.bodies[number % len(self.bodies)])
            number += 1
            due += 1 / self.rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def push(self, writers: list[Any]) -> None:
        for host, port in self.stalled:
            self.writers.append((await asyncio.open_connection(host, port))[1])
        self.writers += writers
        await self.publish()

    def told(self) -> dict[str, Any]:
        p99 = sorted(self.times)[int(len(self.times) * 0.99)] if self.times else 0.0
        return {"dropped": self.dropped, "call_p99_ms": p99 * 1e3}


class Cache:
    """64 KiB values: `write` keeps them as bytes, `pool` in registered memory that a SET exchanges."""

    def __init__(self, way: str, options: dict[str, Any]) -> None:
        self.way = way
        self.connections = options["connections"]
        self.pipeline = options["pipeline"]
        self.values: list[Any] = [bytes([key % 251]) * VALUE for key in range(KEYS)]
        if way == "pool":
            import aiozc

            self.memory = aiozc.BufferPool(size=VALUE, count=1024, max_count=8192)
            loop: Any = asyncio.get_running_loop()
            loop.register_buffer(self.memory)
            for key, value in enumerate(self.values):
                self.values[key] = self.memory.acquire()
                self.values[key][:] = value

    async def on_client(self, reader: Any, writer: Any) -> None:
        if self.way == "pool":
            from aiozc import read_into
        while True:
            what, key = REQUEST.unpack(await reader.readexactly(REQUEST.size))
            if what == GET:
                self.get(writer, key)
            elif self.way == "pool":
                value = self.memory.acquire()  # never the one that may still be read
                await read_into(reader, value)
                self.values[key] = value
                writer.write(b"+")
            else:
                self.values[key] = await reader.readexactly(VALUE)
                writer.write(b"+")
            with contextlib.suppress(ConnectionError):
                await (writer.zc_drain() if self.way == "pool" else writer.drain())

    def get(self, writer: Any, key: int) -> None:
        if self.way == "pool":
            writer.zc_submit([b"V", self.values[key]])
        else:
            writer.writelines([b"V", self.values[key]])

    async def push(self, writers: list[Any]) -> None:
        """GETs, in as large batches as are in flight; every tenth request exchanges a value."""

        async def one(number: int, writer: Any) -> None:
            choose = random.Random(number)
            while True:
                for _ in range(self.pipeline):
                    key = choose.randrange(KEYS)
                    if choose.random() < 0.1:
                        fresh: Any = bytes([choose.randrange(256)]) * VALUE
                        if self.way == "pool":
                            place = self.memory.acquire()
                            place[:] = fresh
                            fresh = place
                        self.values[key] = fresh
                    else:
                        self.get(writer, key)
                await (writer.zc_drain() if self.way == "pool" else writer.drain())
                await asyncio.sleep(0)

        await asyncio.gather(*(one(*pair) for pair in enumerate(writers)))


SERVICES: dict[str, Any] = {
    "weights": Weights,
    "broadcast": Broadcast,
    "cache": Cache,
    "proxy": Proxy,
    "websocket": WebSocket,
}
