"""Stacks of zero-copy requests: where they end (zc_eor_bytes), and what zc_stats() tells of releases.

A stack shows on the wire only, so the counters are compared with what is known here: requests of one
operation each, of a size that decides where MSG_EOR is due, and a peer that holds releases back.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import pytest
from support import MIB, SMALL_SNDBUF, soon, stalled

import aiozc
from aiozc import stats as stats_module


def stats() -> aiozc.ZcStats:
    return asyncio.get_running_loop().zc_stats()  # type: ignore[attr-defined]


async def send_one_by_one(writer: Any, count: int, size: int) -> None:
    for _ in range(count):
        await soon(writer.zc_submit(b"s" * size).sent)


@pytest.mark.parametrize(
    ("eor_bytes", "stacks"),
    [(None, 10), (64 * 1024, 10), (8000, 85), (8001, 56), (1, 170), (0, 0)],
)
def test_a_stack_ends_each_so_many_bytes(run, backend, forced_loop_factory, eor_bytes, stacks):
    # Fails when: sendq.c has a constant in place of the setting, or 0 is not "never".
    async def main() -> None:
        async with stalled() as (_peer, writer):
            await send_one_by_one(writer, 170, 4000)
            now = stats()
            assert now.zc_requests == 170
            # MSG_ZEROCOPY: the kernel ends its own.
            assert now.stacks == (stacks if backend == "uring" else 0)

    settings = {} if eor_bytes is None else {"zc_eor_bytes": eor_bytes}
    run(main(), lambda: forced_loop_factory(**settings))


def test_release_times_are_those_from_issue_to_notification(run, forced_loop_factory):
    # Fails when: the clock is read once a run and not once a turn, or unreleased requests count.
    async def main() -> None:
        async with stalled() as (peer, writer):
            began = time.monotonic()
            op = writer.zc_submit(bytearray(MIB))
            await soon(op.sent)
            assert stats().release_max == stats().release_p50 == 0.0
            assert stats().notifications_per_turn == 0.0
            await asyncio.sleep(0.3)
            await peer.take(MIB)
            await soon(op)
            whole = time.monotonic() - began
            now = stats()
            assert 0.3 <= now.release_max <= whole
            assert now.release_p50 == now.release_p90 == now.release_p99 == now.release_max
            assert now.notifications == 1
            assert now.notification_turns == 1

    run(main(), forced_loop_factory)


def test_a_release_time_is_not_read_before_the_wait_for_it(run, forced_loop_factory):
    # Fails when: the clock that was read for an issue serves after the wait for completions, too.
    async def main() -> None:
        async with stalled() as (peer, writer), stalled(sndbuf=SMALL_SNDBUF) as (_, full):
            op = writer.zc_submit(bytearray(MIB))
            await soon(op.sent)
            reader = threading.Timer(0.4, peer.read, [MIB])
            reader.start()
            full.transport.zc_write(bytearray(MIB))  # issued by the turn that now waits
            await op
            assert stats().release_max >= 0.3
            reader.join()

    run(main(), forced_loop_factory)


def test_percentiles_tell_quick_releases_from_the_slow_one(run, forced_loop_factory):
    async def main() -> None:
        async with stalled(rcvbuf=None) as (peer, writer):
            reading = asyncio.ensure_future(peer.take(200 * 4000))
            for _ in range(200):
                await soon(writer.zc_submit(b"q" * 4000))
            await reading
            slow = writer.zc_submit(bytearray(8 * MIB))
            await asyncio.sleep(0.9)
            await peer.take(8 * MIB)
            await soon(slow)
            now = stats()
            assert 0 < now.release_p50 <= now.release_p90 <= now.release_p99 <= now.release_max
            assert now.release_p50 < 0.5
            assert now.release_max >= 0.8
            assert now.notification_turns <= now.notifications
            assert now.notifications_per_turn == now.notifications / now.notification_turns

    run(main(), forced_loop_factory)


def buckets(*microseconds: int) -> list[int]:
    counts = [0] * 256
    for us in microseconds:
        power = us.bit_length() - 1
        counts[us if us < 8 else (power - 2) * 8 + (us >> (power - 3)) % 8] += 1
    return counts


@pytest.mark.parametrize("us", [0, 1, 7, 8, 9, 15, 16, 17, 1000, 65535, 65536, 10_000_000])
def test_a_percentile_is_at_most_an_eighth_too_high(us):
    (found,) = stats_module.percentiles(buckets(us), math.inf, [0.5])
    assert us < found * 1e6 <= max(us + 1, us * 1.125 + 1e-3)


def test_percentiles_are_those_of_the_sorted_list():
    times = [3] * 50 + [100] * 40 + [5000] * 9 + [70_000]
    found = stats_module.percentiles(buckets(*times), 0.071, (0.5, 0.9, 0.99, 1.0))
    assert found == pytest.approx([4e-6, 104e-6, 5.12e-3, 0.071])
    assert stats_module.percentiles([0] * 256, 0.0, (0.5, 0.99)) == [0.0, 0.0]


def test_zc_eor_bytes_is_checked():
    with pytest.raises(ValueError, match="zc_eor_bytes is a number of bytes"):
        aiozc.Settings(zc_eor_bytes=-1)
