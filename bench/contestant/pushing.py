"""Services that push data when a client asks for it, by a byte: see sink_client.c.

A request is answered with `size` bytes on each connection. They are written in pieces of `piece`
bytes; the pieces repeat after `cycle` bytes, so that a lost or doubled one shows.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import cast

from .pattern import pattern
from .served import Served, Wanted, serve_protocol, serve_streams


def cut(wanted: Wanted) -> list[bytes]:
    """The pieces of one request's answer. The same few objects: memory is not what is measured."""
    contents = pattern(wanted.cycle)
    pieces = [contents[i : i + wanted.piece] for i in range(0, wanted.cycle, wanted.piece)]
    return pieces * (wanted.size // wanted.cycle)


async def bulk(wanted: Wanted) -> Served:
    """`write` and `drain` of one piece after the other."""
    answer = cut(wanted)

    async def push(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            for piece in answer:
                writer.write(piece)
                await writer.drain()
        writer.close()

    return await serve_streams(push)


async def sendfile(wanted: Wanted) -> Served:
    """`loop.sendfile` of one file."""
    loop = asyncio.get_running_loop()
    file = tempfile.TemporaryFile()  # noqa: SIM115  # it ends with the process
    file.write(pattern(wanted.size))
    file.flush()

    async def push(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            file.seek(0)  # asyncio's own fallback takes offset 0 for "where the file stands"
            if await loop.sendfile(writer.transport, file) != wanted.size:
                raise RuntimeError("loop.sendfile sent another number of bytes")
        writer.close()

    return await serve_streams(push)


class Group:
    """All connections of the fan-out; the first request waits until they are complete."""

    def __init__(self, wanted: Wanted) -> None:
        contents = pattern(wanted.cycle)
        self.answers = [contents[i : i + wanted.size] for i in range(0, wanted.cycle, wanted.size)]
        self.expected = wanted.connections
        self.members: list[asyncio.Transport] = []
        self.requests = 0
        self.answered = 0

    def review(self) -> None:
        while self.answered < self.requests and len(self.members) == self.expected:
            answer = self.answers[self.answered % len(self.answers)]
            self.answered += 1
            for member in self.members:
                member.write(answer)


class Member(asyncio.Protocol):
    def __init__(self, group: Group) -> None:
        self.group = group

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.group.members.append(cast(asyncio.Transport, transport))
        self.group.review()

    def data_received(self, data: bytes) -> None:
        self.group.requests += len(data)
        self.group.review()


async def fan_out(wanted: Wanted) -> Served:
    """One buffer to every connection, by `write`."""
    group = Group(wanted)
    return await serve_protocol(lambda: Member(group))


SERVICES = {"bulk": bulk, "sendfile": sendfile, "fan-out": fan_out}
