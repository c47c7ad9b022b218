"""One run of serving.py, in the namespace: LOOP WAY SIZE SECONDS CORE HOST PORT. Prints figures as JSON.

Imports aiozc only where it is measured. Data is random, in 8 MiB of separate objects, so that neither the
kernel's zero page nor one cached buffer flatters anybody.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

WARMUP = 0.2
CONNECTIONS = 100
SUBMIT = 512 << 10  # bytes that one zc_submit takes from the pool, in parts of SIZE
BYTES_ACKED = 120  # of struct tcp_info


def acked(sock: Any) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("Q", info, BYTES_ACKED)[0])


class Write:
    """writer.write and drain of `bytes`."""

    connections = 1

    def __init__(self, writers: list[Any], size: int) -> None:
        self.writers = writers
        self.size = size
        self.turn = 0
        self.prepare()

    def prepare(self) -> None:
        self.parts = [os.urandom(self.size) for _ in range(max(1, (8 << 20) // self.size))]

    async def once(self) -> int:
        """Sends something; how many bytes."""
        writer = self.writers[0]
        writer.write(self.parts[self.turn])
        self.turn = (self.turn + 1) % len(self.parts)
        await writer.drain()
        return self.size


class Send(Write):
    """zc_send, which waits for the release."""

    async def once(self) -> int:
        await self.writers[0].zc_send(self.parts[self.turn])
        self.turn = (self.turn + 1) % len(self.parts)
        return self.size


class Pool(Write):
    """zc_submit of slices of registered memory, gathered, and zc_drain."""

    def prepare(self) -> None:
        import aiozc

        self.pool = aiozc.BufferPool(size=8 << 20, count=1)
        whole = self.pool.acquire()
        whole[:] = os.urandom(len(whole))
        asyncio.get_running_loop().register_buffer(self.pool)  # type: ignore[attr-defined]
        parts = [whole[i : i + self.size] for i in range(0, len(whole), self.size)]
        count = max(1, SUBMIT // self.size)
        self.groups = [parts[i : i + count] for i in range(0, len(parts), count)]

    async def once(self) -> int:
        group = self.groups[self.turn]
        self.turn = (self.turn + 1) % len(self.groups)
        self.writers[0].zc_submit(group)
        await self.writers[0].zc_drain()
        return self.size * len(group)


class Submit(Write):
    """aiozc.zc_submit of `bytes` on a loop that is not ours, 2 MiB ahead of what the kernel took."""

    backend = "uring"

    def prepare(self) -> None:
        import aiozc

        super().prepare()
        aiozc.zc_attach(backend=self.backend)
        self.submit = aiozc.zc_submit
        self.waiting: collections.deque[Any] = collections.deque()
        self.ahead = max(1, (2 << 20) // self.size)

    async def once(self) -> int:
        self.waiting.append(self.submit(self.writers[0], self.parts[self.turn]))
        self.turn = (self.turn + 1) % len(self.parts)
        if len(self.waiting) > self.ahead:
            await self.waiting.popleft().sent
        return self.size


class SubmitEpoll(Submit):
    """The same by MSG_ZEROCOPY."""

    backend = "epoll"


class Sendfile(Write):
    """loop.sendfile out of memory (memfd)."""

    def prepare(self) -> None:
        descriptor = os.memfd_create("serving")
        os.write(descriptor, os.urandom(self.size))
        self.file = os.fdopen(descriptor, "rb")

    async def once(self) -> int:
        loop = asyncio.get_running_loop()
        await loop.sendfile(self.writers[0].transport, self.file, 0, self.size, fallback=False)
        return self.size


class Fan(Write):
    """The same bytes to every connection: write, then drain."""

    connections = CONNECTIONS

    async def once(self) -> int:
        for writer in self.writers:
            writer.write(self.parts[0])
        for writer in self.writers:
            await writer.drain()
        return self.size * len(self.writers)


class Broadcast(Fan):
    """aiozc.broadcast of bytes."""

    data: Any

    def prepare(self) -> None:
        self.data = os.urandom(self.size)

    async def once(self) -> int:
        import aiozc

        await aiozc.broadcast(self.writers, self.data)
        return self.size * len(self.writers)


class BroadcastPool(Broadcast):
    """aiozc.broadcast of registered memory."""

    def prepare(self) -> None:
        import aiozc

        self.pool = aiozc.BufferPool(size=self.size, count=1)
        self.data = self.pool.acquire()
        self.data[:] = os.urandom(self.size)
        asyncio.get_running_loop().register_buffer(self.pool)  # type: ignore[attr-defined]


WAYS: dict[str, type[Write]] = {
    "write": Write,
    "send": Send,
    "pool": Pool,
    "submit": Submit,
    "submit-epoll": SubmitEpoll,
    "sendfile": Sendfile,
    "fan": Fan,
    "broadcast": Broadcast,
    "broadcast-pool": BroadcastPool,
}


async def for_seconds(once: Callable[[], Awaitable[int]], seconds: float) -> int:
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end:
        done += await once()
    return done


async def main(way: str, size: int, seconds: float, host: str, port: int) -> dict[str, float]:
    kind = WAYS[way]
    writers = [(await asyncio.open_connection(host, port))[1] for _ in range(kind.connections)]
    work = kind(writers, size)
    sent = await for_seconds(work.once, WARMUP)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    measured = await for_seconds(work.once, seconds)
    took, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
    sent += measured
    limit = time.monotonic() + 5
    socks = [writer.get_extra_info("socket") for writer in writers]
    first = 1  # the SYN counts as a byte
    while (arrived := sum(acked(s) - first for s in socks)) != sent:
        if time.monotonic() > limit:
            raise SystemExit(f"{arrived} of {sent} bytes were acknowledged")
        await asyncio.sleep(0.01)
    gb = measured / 1e9
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    figures = {
        "gb_per_s": gb / took,
        "cpu_s_per_gb": (user + system) / gb,
        "user": user / gb,
        "system": system / gb,
    }
    for writer in writers:
        writer.transport.abort()
    return figures


def run() -> None:
    loop, way, size, seconds, core, host, port = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    job = main(way, int(size), float(seconds), host, int(port))
    if loop in ("aiozc", "copying") or "submit" in way:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if loop == "uvloop":
        import uvloop

        figures = uvloop.run(job)
    elif loop in ("aiozc", "copying"):
        import aiozc

        zerocopy = "off" if loop == "copying" else "auto"
        figures = aiozc.run(job, backend="uring", zerocopy=zerocopy)
    else:
        figures = asyncio.run(job)
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(figures))


if __name__ == "__main__":
    run()
