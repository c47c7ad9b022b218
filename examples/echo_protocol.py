"""The echo server as an `asyncio.Protocol`: callbacks, flow control in both directions, half-close.

What it shows: a protocol written for asyncio runs on the aiozc loop as it is. While the peer does
not read, `pause_writing` stops our own receiving; at the peer's end of file everything unsent still
goes out before the transport closes. `get_extra_info("zero_copy")` tells that the loop is aiozc's.

    python examples/echo_protocol.py serve --port 8007
    python examples/echo_protocol.py client --port 8007 --bytes 10000000
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from typing import cast

import aiozc


class Echo(asyncio.Protocol):
    def __init__(self, on_close: Callable[[], None]) -> None:
        self.on_close = on_close

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_close()


class Check(asyncio.Protocol):
    """Sends everything, compares what comes back; `done` ends as None or with the reason."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.data)
        self.transport.write_eof()

    def data_received(self, data: bytes) -> None:
        if data != self.data[self.offset : self.offset + len(data)]:
            self.fail(ValueError(f"wrong data within {len(data)} bytes from {self.offset}"))
        self.offset += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self.offset != len(self.data):
            exc = ValueError(f"{self.offset} bytes came back instead of {len(self.data)}")
        if exc is not None:
            self.fail(exc)
        elif not self.done.done():
            self.done.set_result(None)

    def fail(self, exc: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(exc)
        self.transport.abort()


async def serve(args: argparse.Namespace) -> None:
    closed = 0
    enough = asyncio.Event()

    def on_close() -> None:
        nonlocal closed
        closed += 1
        if closed == args.connections:
            enough.set()

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Echo(on_close), args.host, args.port)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"listening on {host}:{port}", flush=True)
    async with server:
        await enough.wait()  # without --connections: until interrupted


async def client(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    data = random.Random(args.bytes).randbytes(args.bytes)
    transport, check = await loop.create_connection(lambda: Check(data), args.host, args.port)
    info = transport.get_extra_info("zero_copy")  # None on a loop that is not aiozc's
    await check.done
    print(f"ok: {len(data)} bytes echoed, every byte checked, engine {info and info.engine}")


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
