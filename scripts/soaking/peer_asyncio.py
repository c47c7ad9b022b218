"""A peer on the standard library's event loop and streams.

    python -m soaking.peer_asyncio ORDERS

Started by soak.py. Plays the peer's part of every plan, checks each byte that arrives. See peer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import asdict

from . import pattern, peer, plan

FAST = 256 * 1024


class World:
    def __init__(self, orders: peer.Orders) -> None:
        self.orders = orders
        self.tasks: set[asyncio.Task[None]] = set()
        self.over = asyncio.Event()

    def spawn(self, coro) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self.tasks.add(task)
        task.add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            print(f"peer_asyncio: {error!r}", file=sys.stderr)

    async def run(self) -> None:
        servers, addresses = [], {}
        for family in self.orders.families:
            sock = peer.listen(family, os.path.join(self.orders.directory, "asyncio"))
            addresses[family] = peer.address(sock)
            start = asyncio.start_unix_server if family == "unix" else asyncio.start_server
            server = await start(self.accepted, sock=sock, backlog=peer.BACKLOG)
            servers.append(server)
        peer.say({"listening": addresses})
        commands = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
        )
        while line := await commands.readline():
            word, _, number = line.partition(b" ")
            if word != b"dial":
                break
            self.spawn(self.dial(int(number)))

    def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.spawn(self.serve(reader, writer))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            number = int.from_bytes(await reader.readexactly(plan.HEADER), "big")
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
            return
        writer.write(plan.ACK)
        what = plan.make(self.orders.seed, number, self.orders.families)
        await Connection(what, reader, writer).run()

    async def dial(self, number: int) -> None:
        what = plan.make(self.orders.seed, number, self.orders.families)
        sock = peer.dialler(what.family)
        peer.set_rcvbuf(sock, what.rcvbuf)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, peer.target(self.orders.server[what.family]))
            connect = (
                asyncio.open_unix_connection if what.family == "unix" else asyncio.open_connection
            )
            reader, writer = await connect(sock=sock)
            writer.write(number.to_bytes(plan.HEADER, "big"))
            await reader.readexactly(len(plan.ACK))
        except (OSError, asyncio.IncompleteReadError) as error:
            sock.close()
            peer.say(asdict(peer.Report(number, end="own", wrong=f"cannot connect: {error!r}")))
            return
        await Connection(what, reader, writer).run()


class Connection:
    def __init__(
        self, what: plan.Plan, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.plan = what
        self.reader = reader
        self.writer = writer
        self.said = peer.Report(what.number)
        self.enough = asyncio.Event()  # it received as much as its own end needs

    async def run(self) -> None:
        what, said = self.plan, self.said
        sock = self.writer.get_extra_info("socket")
        peer.set_rcvbuf(sock, what.rcvbuf)
        tasks = [asyncio.create_task(self.receive()), asyncio.create_task(self.send())]
        limit = what.peer_end_after if what.peer_end else None
        await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        lost = any(task.done() and task.exception() for task in tasks)
        said.end = "own" if what.peer_end else "reset" if lost else "eof"
        if what.peer_end == "reset":
            peer.set_reset(sock)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
                said.wrong = said.wrong or f"the peer itself failed: {outcome!r}"
        if said.end == "eof":
            self.writer.close()
        else:
            self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        peer.say(asdict(said))

    async def send(self) -> None:
        what, said = self.plan, self.said
        if what.late:
            await self.enough.wait()
        while said.sent < what.sends:
            size = min(what.sends - said.sent, what.chunk)
            self.writer.write(pattern.piece(2 * what.number + 1, said.sent, size))
            said.sent += size
            await self.writer.drain()
        if what.half_closes:
            with contextlib.suppress(OSError):
                self.writer.write_eof()

    async def receive(self) -> None:
        what, said = self.plan, self.said
        if what.reads == "never":
            await asyncio.sleep(3600)
        began = time.monotonic()
        stream = 2 * what.number
        stalled = False
        while True:
            slow = what.reads == "slow" and time.monotonic() < began + plan.PATIENCE
            data = await self.reader.read(max(256, what.chunk // 8) if slow else FAST)
            if not data:
                break
            if not said.wrong and pattern.first_wrong(stream, said.got, data) is not None:
                said.wrong = pattern.describe(stream, said.got, data)
            said.got += len(data)
            if what.peer_end and said.got >= what.peer_end_bytes:
                self.enough.set()
                return
            if slow:
                await asyncio.sleep(0.01)
            elif what.reads == "stall" and not stalled:
                stalled = True
                await asyncio.sleep(what.peer_end_after)
        self.enough.set()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(World(peer.Orders.read()).run())
