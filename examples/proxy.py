"""A TCP proxy: receives into a pool's memory, and forwards from there zero-copy.

What it shows: a BufferedProtocol hands out registered memory to receive into, and what came is queued on
the other side by `zc_write`, a slice of the same memory. Nobody counts slices: a buffer is the pool's
again when the kernel has released everything that was sent from it. Back-pressure goes by bytes
that are not released, for these are what a slow reader costs.

    python examples/proxy.py serve --port 8013 --upstream 127.0.0.1:8007
    python examples/proxy.py client --port 8013 --bytes 10000000    # to an upstream that echoes

Without --upstream it echoes by itself, behind the proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
from typing import Any

import aiozc

BUFFER = 256 * 1024
LEAST = 16 * 1024  # room that is worth receiving into
WINDOW = 1 << 20  # bytes of one direction that are forwarded and not released


class Half(asyncio.BufferedProtocol):
    """One side of a pair. What it receives goes to `other`; until that is there it receives nothing."""

    transport: Any
    ended = False

    def __init__(self, pool: aiozc.BufferPool, other: Half | None = None) -> None:
        self.pool = pool
        self.other: Any = other
        self.room = memoryview(b"")
        self.forwarded: collections.deque[aiozc.Operation] = collections.deque()
        self.pinned = 0
        self.lost = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self.other is None:
            transport.pause_reading()
        elif self.other.transport.is_closing():
            transport.abort()
        else:
            self.other.other = self
            self.other.transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        if len(self.room) < LEAST:
            self.room = self.pool.acquire()
        return self.room

    def buffer_updated(self, nbytes: int) -> None:
        came, self.room = self.room[:nbytes], self.room[nbytes:]
        if self.other.transport.is_closing():
            return
        self.forwarded.append(self.other.transport.zc_write(came))
        self.pinned += nbytes
        if self.pinned > WINDOW:
            self.transport.pause_reading()
            self.waiting = asyncio.get_running_loop().create_task(self.wait())

    async def wait(self) -> None:
        try:
            while self.pinned > WINDOW // 2:
                operation = self.forwarded.popleft()
                await operation.released
                self.pinned -= operation.nbytes
            self.transport.resume_reading()
        except OSError:
            pass  # the other side was lost, and its connection_lost ends this one

    def eof_received(self) -> bool:
        self.ended = True
        self.other.transport.write_eof()  # behind what is queued
        return not self.other.ended  # the other direction goes on

    def connection_lost(self, exc: Exception | None) -> None:
        self.room = memoryview(b"")  # the pool's again
        self.lost.set()
        if self.other is not None:
            (self.other.transport.abort if exc else self.other.transport.close)()


async def serve(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    pool = aiozc.BufferPool(size=BUFFER, count=64, max_count=4096)
    pairs = set()
    served = 0
    enough = asyncio.Event()

    async def pair(front: Half) -> None:
        nonlocal served
        try:
            await loop.create_connection(lambda: Half(pool, front), *upstream)
        except OSError:
            front.transport.abort()
        await front.lost.wait()
        served += 1
        if served == args.connections:
            enough.set()

    def accept() -> Half:
        front = Half(pool)
        task = loop.create_task(pair(front))
        pairs.add(task)
        task.add_done_callback(pairs.discard)
        return front

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(BUFFER):
            writer.write(data)
            await writer.drain()
        writer.close()

    behind = await asyncio.start_server(echo, "127.0.0.1", 0)
    upstream = behind.sockets[0].getsockname()[:2]
    if args.upstream:
        host, _, number = args.upstream.rpartition(":")
        upstream = (host, int(number))
    server = await loop.create_server(accept, args.host, args.port)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"listening on {host}:{port}", flush=True)
    async with server:
        await enough.wait()  # without --connections: until interrupted


async def client(args: argparse.Namespace) -> None:
    data = random.Random(args.bytes).randbytes(args.bytes)
    reader, writer = await aiozc.open_connection(args.host, args.port)
    writer.write(data)
    writer.write_eof()
    got = bytearray(len(data))
    count = await aiozc.read_into(reader, got)
    if got[:count] != data[:count]:
        raise ValueError("wrong data came back")
    if count < len(data) or await reader.read():
        raise ValueError(f"{count} bytes or more came back instead of {len(data)}")
    writer.close()
    print(f"ok: {count} bytes there and back, every byte checked")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["serve", "client"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (serve only)")
    parser.add_argument("--backend", choices=["auto", "uring", "epoll"], default="auto")
    parser.add_argument("--connections", type=int, default=0, help="serve: end after so many")
    parser.add_argument("--upstream", metavar="HOST:PORT", help="serve: where to forward to")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="client: how much to send")
    args = parser.parse_args()
    backend = None if args.backend == "auto" else args.backend
    try:
        aiozc.run(serve(args) if args.mode == "serve" else client(args), backend=backend)
    except (OSError, EOFError, ValueError) as exc:
        raise SystemExit(f"error: {exc}") from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
