"""What a service of a contestant gives to __main__.py, and what it is asked for.

Used by echoing.py and pushing.py; scheduling.py has no peer and needs none of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

HOST = "127.0.0.1"
BACKLOG = 1024


@dataclass(frozen=True)
class Wanted:
    """A row's numbers; see harness/rows.py."""

    connections: int
    size: int
    piece: int
    cycle: int


@dataclass(frozen=True)
class Served:
    """A service that runs. `apart`: a thread whose CPU time is not the loop's."""

    port: int
    close: Callable[[], None]
    apart: int | None = None


def served(server: asyncio.AbstractServer) -> Served:
    return Served(server.sockets[0].getsockname()[1], server.close)  # type: ignore[attr-defined]


async def serve_protocol(factory: Callable[[], asyncio.BaseProtocol]) -> Served:
    loop = asyncio.get_running_loop()
    return served(await loop.create_server(factory, HOST, 0, backlog=BACKLOG))


async def serve_streams(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object],
) -> Served:
    return served(await asyncio.start_server(handler, HOST, 0, backlog=BACKLOG))
