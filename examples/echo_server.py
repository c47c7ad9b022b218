"""Unmodified asyncio streams on the aiozc loop: an echo server and a client that checks it.

What it shows: nothing here but `aiozc.run` is aiozc's. `reader.read()` hands out exact `bytes`,
which nobody can change: `write()` + `drain()` send them by reference, without copying them first.

    python examples/echo_server.py serve --port 8007
    python examples/echo_server.py client --port 8007 --bytes 10000000
"""

from __future__ import annotations

import argparse
import asyncio
import random

import aiozc

CHUNK = 64 * 1024


async def serve(args: argparse.Namespace) -> None:
    served = 0
    enough = asyncio.Event()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        try:
            while data := await reader.read(CHUNK):
                writer.write(data)
                await writer.drain()  # a client that does not read must not fill our memory
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            pass  # the client went away: its loss, not the server's
        finally:
            writer.close()
            served += 1
            if served == args.connections:
                enough.set()

    server = await asyncio.start_server(on_client, args.host, args.port)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"listening on {host}:{port}", flush=True)
    async with server:
        await enough.wait()  # without --connections: until interrupted


async def client(args: argparse.Namespace) -> None:
    data = random.Random(args.bytes).randbytes(args.bytes)
    reader, writer = await asyncio.open_connection(args.host, args.port)

    async def send() -> None:
        for start in range(0, len(data), CHUNK):
            writer.write(data[start : start + CHUNK])
            await writer.drain()
        writer.write_eof()

    async def check() -> None:
        offset = 0
        while echoed := await reader.read(CHUNK):
            if echoed != data[offset : offset + len(echoed)]:
                raise ValueError(f"wrong data within {len(echoed)} bytes from offset {offset}")
            offset += len(echoed)
        if offset != len(data):
            raise ValueError(f"{offset} bytes came back instead of {len(data)}")

    sending = asyncio.create_task(send())
    try:
        await check()
        await sending
    finally:
        sending.cancel()
        writer.close()
    print(f"ok: {len(data)} bytes echoed, every byte checked")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["serve", "client"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (serve only)")
    parser.add_argument("--backend", choices=["auto", "uring", "epoll"], default="auto")
    parser.add_argument("--connections", type=int, default=0, help="serve: end after so many")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="client: how much to send")
    args = parser.parse_args()
    backend = None if args.backend == "auto" else args.backend
    try:
        aiozc.run(serve(args) if args.mode == "serve" else client(args), backend=backend)
    except (OSError, ValueError) as exc:
        raise SystemExit(f"error: {exc}") from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
