"""`python echo_server.py LOOP CONNECTIONS CPU`: the process that `bench echo` measures.

Started by echo.py. Prints {"port"}, serves until all connections have come and gone, and prints {"user",
"system"}: CPU seconds, from the last one's coming to the first one's going.

Never: imports aiozc for another loop. What a process imported before decides how malloc treats asyncio's
receive buffers, and so whether each costs page faults.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, cast


def cpu_seconds() -> tuple[float, float]:
    """User, system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


class Echo(asyncio.Protocol):
    def __init__(self, served: Served) -> None:
        self._served = served

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._served.came()

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._served.went()


class Served:
    def __init__(self, connections: int) -> None:
        self._connections = self._left = connections
        self._before = (0.0, 0.0)
        self._used: tuple[float, float] | None = None
        self.done: asyncio.Future[tuple[float, float]] = asyncio.get_running_loop().create_future()

    def came(self) -> None:
        self._before = cpu_seconds()

    def went(self) -> None:
        if self._used is None:
            user, system = cpu_seconds()
            self._used = user - self._before[0], system - self._before[1]
        self._left -= 1
        if not self._left:
            self.done.set_result(self._used)


async def serve(connections: int) -> None:
    served = Served(connections)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Echo(served), "127.0.0.1", 0, backlog=connections)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    async with server:
        user, system = await asyncio.wait_for(served.done, 300)
    print(json.dumps({"user": user, "system": system}), flush=True)


def _factory(name: str) -> Callable[[], Any]:
    if name == "asyncio":
        return asyncio.SelectorEventLoop
    if name == "uvloop":
        return cast("Callable[[], Any]", importlib.import_module("uvloop").new_event_loop)
    aiozc = importlib.import_module("aiozc")
    return lambda: aiozc.new_event_loop(backend=name.removeprefix("aiozc-"))


def main() -> None:
    name, connections, cpu = sys.argv[1:]
    if int(cpu) >= 0:
        os.sched_setaffinity(0, {int(cpu)})
    with asyncio.Runner(loop_factory=_factory(name)) as runner:
        runner.run(serve(int(connections)))


if __name__ == "__main__":
    main()
