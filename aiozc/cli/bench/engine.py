"""Sending by aiozc's public API: one task on one loop, as an application would write it.

Called by sender.py. `zc_submit` and `zc_drain` on TCP, `zc_sendto` on UDP; the fan-out of `bench fanout`
is here too. The loop is told to try zero-copy always (adaptive=False, zc_threshold=0) where a mode is
named so: the benchmark is to show what it costs, also where it does not pay. `zc-epoll` is MSG_ZEROCOPY.

Never: changes a buffer that was submitted.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import aiozc
from aiozc.cli.bench import cases, sockets
from aiozc.cli.bench.errors import RowFailed
from aiozc.cli.bench.job import Job, Result

_LOOK_EVERY = 8  # submits between two looks at the clock
_ZERO_COPY = ("zc", "zc-epoll", "zc-registered")
_pools: list[Any] = []  # kept for the life of this process, which has one job


def run(job: Job) -> Result:
    forced = job.mode in _ZERO_COPY
    backend = "epoll" if job.mode == "zc-epoll" else "uring" if forced else None
    send = {"engine": _stream, "fanout": _fan_out}[job.engine]
    if job.protocol == "udp":
        send = _datagrams
    return aiozc.run(
        send(job),
        backend=backend,
        zerocopy="auto" if forced else "off",
        adaptive=not forced,
        zc_threshold=0,
        zc_low_water=_window(job),
        zc_transport_cap=1 << 40,
        zc_loop_cap=1 << 40,
        max_request=max(4096, job.max_request),
    )


def _window(job: Job) -> int:
    return max(job.window, job.size * job.parts)


def _loop() -> aiozc.EventLoop:
    return cast(aiozc.EventLoop, asyncio.get_running_loop())


def _groups(job: Job) -> Iterator[Any]:
    """What is submitted, call by call, for ever: a buffer, or a list of them."""
    data = cases.pattern(job.size, job.parts)
    # One skb has room for 17 pieces of memory: datagrams that go together lie together.
    together = job.parts if job.protocol == "udp" else 1
    size, parts = job.size * together, job.parts // together
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    if job.mode == "zc-registered":
        pieces = _registered(pieces, size)
    if parts == 1:
        return itertools.cycle(pieces)
    return itertools.cycle([pieces[at : at + parts] for at in range(0, len(pieces), parts)])


def _registered(pieces: list[bytes], size: int) -> list[Any]:
    """The same in registered memory."""
    pool = cast(Any, aiozc).BufferPool(size=size, count=len(pieces))
    _pools.append(pool)
    views = []
    for piece in pieces:
        view = pool.acquire()
        view[:size] = piece
        views.append(view if len(view) == size else view[:size])
    return views


async def _settled(unsent: Callable[[], bool]) -> None:
    """Until nothing is unsent, unacknowledged or unreleased."""
    loop = _loop()
    end = time.monotonic() + sockets.PATIENCE
    while unsent() or loop.zc_stats().pinned_bytes or loop.zc_stats().queued_bytes:
        if time.monotonic() > end:
            raise RowFailed("what was sent was not acknowledged and released in time")
        await asyncio.sleep(0.0005)


async def _stream(job: Job) -> Result:
    groups = _groups(job)
    _reader, writer = await aiozc.open_connection(job.address, job.port)
    sock = writer.get_extra_info("socket")
    nbytes, calls = 0, 0
    cpu, start = sockets.Cpu(), time.monotonic()
    end = start + job.seconds
    for group in groups:
        writer.zc_submit(group)
        await writer.zc_drain()
        calls += 1
        if calls % _LOOK_EVERY == 0 and time.monotonic() >= end:
            break
    await _settled(lambda: bool(sockets.unsent(sock)))
    nbytes = calls * job.parts * job.size
    result = _result(job, nbytes, cpu, start)
    result.arrived, result.segments = sockets.tcp_counts(sock)
    result.path = writer.get_extra_info("zero_copy").path
    result.outstanding = _window(job) // (job.parts * job.size) + 1
    writer.close()
    await writer.wait_closed()
    return result


async def _datagrams(job: Job) -> Result:
    groups = _groups(job)
    throttle = sockets.Throttle(job)
    device = sockets.Dropped(job) if job.device else None
    transport, _ = await _loop().create_datagram_endpoint(
        asyncio.DatagramProtocol, remote_addr=(job.address, job.port)
    )
    zc_sendto = cast(Any, transport).zc_sendto
    sock = transport.get_extra_info("socket")
    segment = job.size if job.parts > 1 else None
    most = max(1, _window(job) // (job.parts * job.size))
    waiting: collections.deque[Any] = collections.deque()
    nbytes, calls = 0, 0
    cpu, start = sockets.Cpu(), time.monotonic()
    end = start + job.seconds
    for group in groups:
        waiting.append(zc_sendto(group, None, segment))
        calls += 1
        nbytes += job.parts * job.size
        if len(waiting) >= most:
            await waiting.popleft()
        if job.counter >= 0:
            await throttle.wait_here(nbytes)
        if calls % _LOOK_EVERY == 0 and time.monotonic() >= end:
            break
    results = [await operation.released for operation in waiting]
    await _settled(lambda: bool(sockets.unsent(sock)))
    result = _result(job, nbytes, cpu, start)
    result.segments = result.sends
    result.parts_per_request = float(job.parts)
    if device:
        result.arrived = device.payload(calls)
    said = {each.path for each in results}
    result.path = said.pop() if len(said) == 1 else "mixed"
    result.outstanding = most
    transport.close()
    return result


async def _fan_out(job: Job) -> Result:
    """One buffer to many connections, again and again."""
    buffer = next(_groups(job))
    opened = [await aiozc.open_connection(job.address, job.port) for _ in range(job.connections)]
    writers = [writer for _reader, writer in opened]
    socks = [writer.get_extra_info("socket") for writer in writers]
    forced = job.mode in _ZERO_COPY
    times = 0
    cpu, start = sockets.Cpu(), time.monotonic()
    end = start + job.seconds
    while times == 0 or time.monotonic() < end:
        for writer in writers:
            if forced:
                writer.zc_submit(buffer)
            else:
                writer.write(buffer)
        for writer in writers:
            await (writer.zc_drain() if forced else writer.drain())
        times += 1
    await _settled(lambda: any(sockets.unsent(sock) for sock in socks))
    result = _result(job, times * job.size * job.connections, cpu, start)
    counts = [sockets.tcp_counts(sock) for sock in socks]
    result.arrived = sum(acked for acked, _ in counts)
    result.segments = sum(segments for _, segments in counts)
    said = {writer.get_extra_info("zero_copy").path for writer in writers} if forced else {"copied"}
    result.path = said.pop() if len(said) == 1 else "mixed"
    for writer in writers:
        writer.close()
    for writer in writers:
        await writer.wait_closed()
    return result


def _result(job: Job, nbytes: int, cpu: sockets.Cpu, start: float) -> Result:
    stats = _loop().zc_stats()
    copied = stats.requests - stats.zc_requests if job.mode in _ZERO_COPY else 0
    return Result(
        nbytes=nbytes,
        sends=nbytes // job.size,
        requests=stats.requests,
        seconds=time.monotonic() - start,
        cpu=cpu.total(),
        user=cpu.user(),
        parts_per_request=stats.parts_per_request,
        notifications=stats.notifications,
        peak_pinned=stats.pinned_peak,
        engine=f"aiozc {stats.backend}",
        note=f"{job.parts} x {job.size}: {copied} of {stats.requests} requests went by copying"
        if copied
        else "",
    )
