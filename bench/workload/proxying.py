"""A proxy between clients and an origin, as written for asyncio, and out of a pool. Run by child.py.

`write`: a Protocol that writes what it received to the other side, paused by pause_writing. `pool`: the
proxy of examples/proxy.py. Clients ask by one byte, which is forwarded; the origin (clients.py, or a child of
`push`) answers with a body. TLS, if asked for, is between client and proxy.
"""

from __future__ import annotations

import asyncio
import collections
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

CHUNK = 256 * 1024
# As fast as it is read: what `push` has for an origin.
FIREHOSE = """
import os, socket, sys, threading
os.sched_setaffinity(0, {int(sys.argv[1])})
listener = socket.create_server(("127.0.0.1", 0), backlog=256)
print(listener.getsockname()[1], flush=True)
data = os.urandom(1 << 20)
def pour(peer):
    try:
        while True:
            peer.sendall(data)
    except OSError:
        pass
while True:
    threading.Thread(target=pour, args=(listener.accept()[0],), daemon=True).start()
"""


class Plain(asyncio.Protocol):
    """One side of a pair."""

    transport: Any

    def __init__(self, other: Plain | None = None) -> None:
        self.other: Any = other
        self.early: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self.other is None:
            transport.pause_reading()
        elif self.other.transport.is_closing():
            transport.abort()
        else:
            self.other.other = self
            transport.writelines(self.other.early)
            self.other.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.other is None:  # uvloop does not heed pause_reading() in connection_made
            self.early.append(data)
        else:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class Proxy:
    connections = 8  # of push

    def __init__(self, way: str, options: dict[str, Any]) -> None:
        self.options = options
        self.tasks: set[asyncio.Task[Any]] = set()
        if way == "pool":
            sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
            from proxy import Half

            import aiozc

            pool = aiozc.BufferPool(size=CHUNK, count=64, max_count=4096)
            loop: Any = asyncio.get_running_loop()
            loop.register_buffer(pool)
            self.half: Any = lambda other=None: Half(pool, other)
        else:
            self.half = Plain

    async def listen(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()

        async def connect(front: Any) -> None:
            while getattr(front, "transport", None) is None:  # TLS: after the handshake
                await asyncio.sleep(0.001)
            behind = lambda: self.half(front)  # noqa: E731
            await loop.create_connection(behind, "127.0.0.1", self.options["origin"])

        def accept() -> Any:
            front = self.half()
            task = loop.create_task(connect(front))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            return front

        context = None
        if self.options.get("certificate"):
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self.options["certificate"])
        return await loop.create_server(accept, "127.0.0.1", 0, ssl=context, backlog=256)

    async def connect(self, host: str, port: int) -> list[Any]:
        """Pairs of an origin on the other core and a sink; their transports into the sink."""
        loop = asyncio.get_running_loop()
        origin = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FIREHOSE, str(self.options["core"])), stdout=subprocess.PIPE
        )
        assert origin.stdout
        number = int(await origin.stdout.readline())
        self.ends: Any = collections.deque([origin])
        transports = []
        for _ in range(self.connections):
            # The front is the side of the sink, which never says anything.
            transport, front = await loop.create_connection(self.half, host, port)
            await loop.create_connection(lambda front=front: self.half(front), "127.0.0.1", number)
            transports.append(transport)
        return transports

    async def push(self, transports: list[Any]) -> None:
        await asyncio.Event().wait()  # the origin drives

    def end(self) -> None:
        self.ends[0].kill()


class WebSocket:
    """The package `websockets`: one binary message to all, by its own broadcast()."""

    def __init__(self, way: str, options: dict[str, Any]) -> None:
        self.options = options
        self.message = bytes(range(256)) * (options["size"] // 256)

    async def listen(self) -> Any:
        from websockets.asyncio.server import broadcast, serve

        ready = asyncio.Event()

        async def stay(socket: Any) -> None:
            if len(server.connections) == self.options["connections"]:
                ready.set()
            await socket.wait_closed()

        async def publish() -> None:
            loop = asyncio.get_running_loop()
            await ready.wait()
            due = loop.time()
            while True:
                broadcast(server.connections, self.message)
                due += 1 / self.options["rate"]
                await asyncio.sleep(max(0, due - loop.time()))

        server = await serve(stay, "127.0.0.1", 0, compression=None, ping_interval=None)
        self.publishing = asyncio.create_task(publish())
        return server
