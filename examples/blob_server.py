"""Serves named buffers from memory by zero-copy sends: `GET name` in, `LENGTH` and the bytes out.

What it shows: `zc_submit` never waits, takes a list (here the length line and the blob) and is
right for data that nobody changes; `zc_drain` holds back a connection whose pinned and queued bytes
have grown too many. Several requests per connection, also pipelined; an unknown name gets an error
line. A buffer that is to be reused would go by `await writer.zc_send(buf)` instead.

    python examples/blob_server.py serve --port 8008
    python examples/blob_server.py client --port 8008 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib

import aiozc

SIZES = {"empty": 0, "note": 1000, "page": 64 * 1024, "weights": 16 << 20}


def content(name: str) -> bytes:
    """A blob's bytes follow from its name, so that the client can check every one of them."""
    return hashlib.shake_128(name.encode()).digest(SIZES[name])


async def serve(args: argparse.Namespace) -> None:
    blobs = {name: content(name) for name in SIZES}
    served = 0
    enough = asyncio.Event()

    async def on_client(reader: asyncio.StreamReader, writer: aiozc.StreamWriter) -> None:
        nonlocal served
        try:
            while line := await reader.readline():
                verb, _, name = line.decode("latin-1").strip().partition(" ")
                blob = blobs.get(name) if verb == "GET" else None
                if blob is None:
                    writer.write(b"ERROR no such buffer\n")
                else:
                    writer.zc_submit([b"%d\n" % len(blob), blob])
                await writer.zc_drain()
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, ValueError):
            pass  # the client went away, or sent a line without end
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
    wanted = {name: content(name) for name in SIZES}
    names = [*SIZES, "missing"] * args.rounds
    reader, writer = await aiozc.open_connection(args.host, args.port)
    buffers = received = 0
    try:
        writer.write("".join(f"GET {name}\n" for name in names).encode())  # all at once: pipelined
        for name in names:
            head = (await reader.readline()).decode("latin-1").strip()
            if name not in wanted:
                if not head.startswith("ERROR"):
                    raise ValueError(f"an unknown name was answered with {head!r}")
                continue
            if head != str(len(wanted[name])):
                raise ValueError(f"{name}: {head!r} instead of its length {len(wanted[name])}")
            if await reader.readexactly(len(wanted[name])) != wanted[name]:
                raise ValueError(f"{name}: wrong data")
            buffers += 1
            received += len(wanted[name])
        writer.write_eof()
        if await reader.read():
            raise ValueError("bytes after the last reply")
    finally:
        writer.close()
    print(f"ok: {buffers} buffers, {received} bytes, every byte checked")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["serve", "client"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (serve only)")
    parser.add_argument("--backend", choices=["auto", "uring", "epoll"], default="auto")
    parser.add_argument("--connections", type=int, default=0, help="serve: end after so many")
    parser.add_argument("--rounds", type=int, default=3, help="client: how often to get everything")
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
