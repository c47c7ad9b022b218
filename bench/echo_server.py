"""One contestant of the echo benchmark: an echo server on one event loop, in its own process.

echo.py starts it with the interpreter under test, reads "port N" from its standard output and
ends it with SIGTERM. It measures nothing itself, and must stay free of imports that the contestant
does not need: echo.py's own libraries are not required in the interpreter under test.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import cast

READ_SIZE = 64 * 1024  # asyncio's own default limit of a stream


def asyncio_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop()


def uvloop_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def aiozc_loop(backend: str) -> asyncio.AbstractEventLoop:
    import aiozc

    return aiozc.new_event_loop(backend=backend)


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "aiozc-uring": lambda: aiozc_loop("uring"),
    "aiozc-epoll": lambda: aiozc_loop("epoll"),
    "uvloop": uvloop_loop,
    "asyncio": asyncio_loop,
}


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


async def echo_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_SIZE):
        writer.write(data)
        await writer.drain()
    writer.close()


async def serve(mode: str) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    host = "127.0.0.1"
    server: asyncio.AbstractServer
    if mode == "protocol":
        server = await loop.create_server(Echo, host, 0, backlog=1024)
    else:
        server = await asyncio.start_server(echo_stream, host, 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    print(f"port {port}", flush=True)
    await stop.wait()
    server.close()


def end_with_parent() -> None:
    """A benchmark that is killed leaves no server behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the benchmark is gone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--mode", choices=("protocol", "streams"), default="protocol")
    parser.add_argument("--probe", action="store_true", help="only show that the loop can be made")
    parser.add_argument("--profile", type=int, metavar="N", help="print the N costliest functions")
    args = parser.parse_args()

    end_with_parent()
    if args.probe:
        LOOPS[args.loop]().close()
        return
    with asyncio.Runner(loop_factory=LOOPS[args.loop]) as runner:
        if args.profile is None:
            runner.run(serve(args.mode))
            return
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.runcall(runner.run, serve(args.mode))
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(args.profile)


if __name__ == "__main__":
    main()
