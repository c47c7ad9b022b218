"""A peer that closed its side and does not read: it costs nothing while it waits, and gets every byte.

The kernel's own waiting is no good for such a peer (see uring_submit.c): a request spins, or sleeps in a
thread of the kernel. So what is watched here is requests and threads, beside the bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest
from support import SMALL_SNDBUF, StalledReader, assert_stream, eventually, soon, stalled

SIZE = 3_000_000
FORMS = {
    "one operation": lambda w: w.zc_submit(b"a" * SIZE),
    "an operation of parts": lambda w: w.zc_submit([b"a" * (SIZE // 100)] * 100),
    "write": lambda w: w.write(b"a" * SIZE),
    "writelines": lambda w: w.writelines([b"a" * (SIZE // 300)] * 300),
}


def requests() -> int:
    return int(asyncio.get_running_loop().zc_stats().requests)  # type: ignore[attr-defined]


def busy_kernel_workers() -> list[str]:
    """Where threads that the kernel made for requests of ours sleep; idle ones wait for work."""
    places = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            if not comm.read().startswith("iou-wrk"):
                continue
        with open(f"/proc/self/task/{task}/wchan") as wchan:
            places.append(wchan.read().strip())
    return [place for place in places if place not in ("io_wq_worker", "0", "")]


async def costs_nothing() -> None:
    await asyncio.sleep(0.15)
    before = requests()
    await asyncio.sleep(0.25)
    assert requests() - before <= 3
    assert not busy_kernel_workers()


async def gets_everything(peer: StalledReader, writer: Any) -> None:
    received = asyncio.ensure_future(peer.take(SIZE))
    assert_stream(await soon(received), [(ord("a"), SIZE)])
    await eventually(lambda: not writer.transport.get_write_buffer_size())


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX], ids=["tcp", "unix"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("when", ["before", "while it waits"])
@pytest.mark.parametrize("reading", [True, False], ids=["reading", "paused"])
def test_a_half_closed_peer_costs_nothing_and_loses_nothing(
    run, forced_loop_factory, family, form, when, reading
) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF, family=family) as (peer, writer):
            if not reading:
                writer.transport.pause_reading()
            if when == "before":
                peer.peer.shutdown(socket.SHUT_WR)
                await asyncio.sleep(0.05)
            FORMS[form](writer)
            await asyncio.sleep(0.05)
            if when != "before":
                peer.peer.shutdown(socket.SHUT_WR)
            await costs_nothing()
            await gets_everything(peer, writer)

    run(main(), forced_loop_factory)


def test_a_request_that_waits_when_reading_pauses_does_not_end_in_a_kernel_thread(
    run, forced_loop_factory
) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = writer.zc_submit(b"a" * SIZE)
            await asyncio.sleep(0.1)
            writer.transport.pause_reading()
            await asyncio.sleep(0.1)
            peer.peer.shutdown(socket.SHUT_WR)
            await costs_nothing()
            await gets_everything(peer, writer)
            await soon(op.released)

    run(main(), forced_loop_factory)


def test_pins_of_a_half_closed_slow_reader_stay_near_what_is_unacknowledged(
    run, forced_loop_factory
) -> None:
    # Requests that end short do not close their stack of notifications: they must be small.
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with stalled(sndbuf=1 << 20, rcvbuf=256 * 1024) as (peer, writer):
            peer.peer.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.05)
            size = 40_000_000
            ops = [writer.zc_submit(b"a" * 4000) for _ in range(size // 4000)]
            received = asyncio.ensure_future(peer.take(size, pace=0.0005, step=1 << 16))
            peak = 0
            while not received.done():
                peak = max(peak, loop.zc_stats().pinned_bytes)
                await asyncio.sleep(0.002)
            assert_stream(await received, [(ord("a"), size)])
            await soon(ops[-1].released)
            assert peak <= 4_000_000  # without the bound on requests: the whole of it
            assert peak > 0

    run(main(), forced_loop_factory)
