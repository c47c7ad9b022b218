"""An echo server on one of several event loops, told what to do by lines on its standard input.

    python -m soaking.idle_server uring|epoll|uvloop|asyncio

Started by idle.py, which measures it from outside. "stats": what happened so far; "settle": give unused memory
back; "quit". As little of its own per connection as can be: what is measured is the loop's.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import asdict
from typing import Any

from . import peer
from .watch import settle

BACKLOG = 4096
connections = 0
echoes = 0
errors: list[str] = []


class Echo(asyncio.Protocol):
    __slots__ = ("transport",)

    def connection_made(self, transport: Any) -> None:
        global connections
        connections += 1
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        global echoes
        echoes += 1
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        global connections
        connections -= 1
        if exc is not None:
            errors.append(f"connection_lost({exc!r})")


def new_loop(name: str) -> asyncio.AbstractEventLoop:
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    if name == "asyncio":
        return asyncio.SelectorEventLoop()
    import aiozc

    return aiozc.new_event_loop(backend=name)


async def serve(loop: Any) -> None:
    over = asyncio.Event()
    loop.set_exception_handler(lambda _, context: errors.append(str(context)))
    server = await loop.create_server(Echo, "127.0.0.1", 0, backlog=BACKLOG)

    def command(word: str) -> None:
        if word == "stats":
            stats = asdict(loop.zc_stats()) if hasattr(loop, "zc_stats") else {}
            peer.say(
                {"connections": connections, "echoes": echoes, "errors": errors, "stats": stats}
            )
        elif word == "settle":
            settle()
            peer.say({})
        else:
            over.set()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(command, line.strip())
        loop.call_soon_threadsafe(command, "quit")

    threading.Thread(target=listen, daemon=True).start()
    peer.say({"port": server.sockets[0].getsockname()[1]})
    await over.wait()
    server.close()
    await server.wait_closed()


def main() -> None:
    loop = new_loop(sys.argv[1])
    try:
        loop.run_until_complete(serve(loop))
    finally:
        loop.close()


if __name__ == "__main__":
    main()
