"""Serves a file of weights to many clients, by byte ranges, from memory: HTTP/1.1, so curl is a client too.

What it shows: a file mapping is sent as it lies, whatever its size: no read, no copy in this process, and
the page cache is the only memory used. `--pool` holds the same in registered memory instead, which costs
least to send and is locked. Pages that are not in the cache are read while the kernel takes them, which holds
the loop up: hence madvise. Truncating the file while it is served would fail the sends (EFAULT).

    python examples/weights_server.py serve --port 8011 --file model.safetensors
    python examples/weights_server.py client --port 8011 --file model.safetensors --clients 8 --ranges 20
    curl -r 1000-1999 http://127.0.0.1:8011/ | sha256sum
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import random
import re
from pathlib import Path

import aiozc

PIECE = 16 << 20  # of the pool
RANGE = re.compile(rb"(?im)^range: *bytes=(\d+)-(\d*) *\r$")


class Mapped:
    """The file as it lies in the page cache."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(self.mapping)
        self.size = len(self.view)

    def parts(self, start: int, end: int) -> list[memoryview]:
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.mapping.madvise(mmap.MADV_WILLNEED, page, end - page)
        return [self.view[start:end]]


class Pooled:
    """The file in registered memory: pieces, for no buffer is larger than 1 GiB."""

    def __init__(self, path: Path) -> None:
        self.size = path.stat().st_size
        self.pool = aiozc.BufferPool(size=PIECE, count=max(1, -(-self.size // PIECE)))
        self.pieces = [self.pool.acquire() for _ in range(self.pool.count)]
        with path.open("rb") as file:
            for piece in self.pieces:
                file.readinto(piece)

    def parts(self, start: int, end: int) -> list[memoryview]:
        found = []
        while start < end:
            number, offset = divmod(start, PIECE)
            found.append(self.pieces[number][offset : min(PIECE, offset + end - start)])
            start += len(found[-1])
        return found


async def serve(args: argparse.Namespace) -> None:
    weights = Pooled(args.file) if args.pool else Mapped(args.file)
    served = 0
    enough = asyncio.Event()

    def answer(request: bytes) -> list[bytes | memoryview]:
        start, end, status = 0, weights.size, b"200 OK"
        if wanted := RANGE.search(request):
            start, end = int(wanted[1]), min(int(wanted[2] or weights.size - 1) + 1, weights.size)
            status = b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d"
            status %= (start, end - 1, weights.size)
        if start >= end:
            size = b"Content-Range: bytes */%d\r\nContent-Length: 0\r\n\r\n" % weights.size
            return [b"HTTP/1.1 416 Range Not Satisfiable\r\n", size]
        head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, end - start)
        return [head, *weights.parts(start, end)]

    async def on_client(reader: asyncio.StreamReader, writer: aiozc.StreamWriter) -> None:
        nonlocal served
        try:
            while True:
                writer.zc_submit(answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.zc_drain()  # a slow client must not have the next range queued as well
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client went away, or sends something else
        finally:
            writer.close()
            served += 1
            if served == args.connections:
                enough.set()

    server = await aiozc.start_server(on_client, args.host, args.port)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"listening on {host}:{port}", flush=True)
    async with server:
        await enough.wait()  # without --connections: until interrupted


async def client(args: argparse.Namespace) -> None:
    file = Mapped(args.file)

    async def one(number: int) -> int:
        choose = random.Random(number)
        reader, writer = await aiozc.open_connection(args.host, args.port)
        received = 0
        for _ in range(args.ranges):
            start = choose.randrange(file.size)
            end = min(file.size, start + choose.randint(1, args.largest))
            writer.write(b"GET / HTTP/1.1\r\nRange: bytes=%d-%d\r\n\r\n" % (start, end - 1))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 206 ") or b": %d\r" % (end - start) not in head:
                raise ValueError(f"wrong data: {head[:80]!r} for {end - start} bytes")
            got = bytearray(end - start)  # filled in place, instead of joined from pieces
            if await aiozc.read_into(reader, got) < len(got) or got != file.view[start:end]:
                raise ValueError(f"wrong data between {start} and {end}")
            received += len(got)
        writer.close()
        return received

    received = sum(await asyncio.gather(*map(one, range(args.clients))))
    print(f"ok: {args.clients * args.ranges} ranges, {received} bytes, every byte checked")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["serve", "client"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (serve only)")
    parser.add_argument("--backend", choices=["auto", "uring", "epoll"], default="auto")
    parser.add_argument("--connections", type=int, default=0, help="serve: end after so many")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--pool", action="store_true", help="serve: from registered memory")
    parser.add_argument("--clients", type=int, default=4, help="client: connections at once")
    parser.add_argument("--ranges", type=int, default=10, help="client: of each connection")
    parser.add_argument("--largest", type=int, default=8 << 20, help="client: bytes of a range")
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
