"""Plain write() of data that nobody can change: zero-copy by itself where the path does not copy."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
from aiozc._reactor_c import lib
from support import KIB, SMALL_SNDBUF, assert_stream, eventually, soon, stalled

import aiozc

FORCED = {"adaptive": False, "zc_threshold": 0, "zc_write": "always"}
A, B, C = b"ABC"


def stats():
    return asyncio.get_running_loop().zc_stats()


def run(main, **settings):
    return aiozc.run(main, backend="uring", **settings)


@pytest.mark.parametrize(
    ("make", "goes"),
    [
        (lambda: b"A" * 256 * KIB, True),
        (lambda: memoryview(b"A" * 256 * KIB), True),
        (lambda: aiozc.frozen(bytearray(b"A" * 256 * KIB)), True),
        (lambda: bytearray(b"A" * 256 * KIB), False),
        (lambda: memoryview(bytearray(b"A" * 256 * KIB)), False),
    ],
    ids=["bytes", "view of bytes", "frozen", "bytearray", "view of bytearray"],
)
def test_what_cannot_change_goes_zero_copy_and_the_rest_does_not(make, goes):
    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            data = make()
            writer.write(data)
            if isinstance(data, bytearray):
                data[:] = b"-" * len(data)  # asyncio's promise: never seen
            assert_stream(await peer.take(256 * KIB), [(A, 256 * KIB)])
            assert (stats().zc_requests > 0) is goes
            assert stats().operations == 0

    run(main(), **FORCED)


def test_what_only_the_call_refers_to_is_copied_if_it_is_small():
    # Pinned, each would need new memory from the system: bench/workloads.py, asgi 1 MiB chunked.
    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            write = writer.transport.write
            for size, goes in ((128 * KIB, False), (256 * KIB, True)):
                write(b"".join([bytes([A]) * size]))
                assert_stream(await peer.take(size), [(A, size)])
                assert (stats().zc_requests > 0) is goes
            before = stats().zc_requests
            kept = [b"B" * 128 * KIB]
            write(kept[0])
            assert_stream(await peer.take(128 * KIB), [(B, 128 * KIB)])
            assert stats().zc_requests > before
            before = stats().zc_requests
            blob = b"".join(
                [bytes([A]) * 128 * KIB]
            )  # a variable's alone: from 3.14 on it counts as one
            write(blob)
            assert_stream(await peer.take(128 * KIB), [(A, 128 * KIB)])
            assert stats().zc_requests > before

    run(main(), **FORCED)


def test_where_the_path_is_known_to_copy_nothing_is_tried():
    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            for _ in range(40):
                writer.write(b"A" * 256 * KIB)
                await peer.take(256 * KIB)
            assert stats().zc_requests == 0

    run(main())


@pytest.mark.parametrize("adaptive", [True, False])
def test_forced_operations_do_not_force_writes(adaptive):
    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            for _ in range(3):
                op = writer.zc_submit(b"A" * 64 * KIB)
                await peer.take(64 * KIB)
                await soon(op.released)
            before = stats().zc_requests
            writer.write(b"A" * 256 * KIB)
            await peer.take(256 * KIB)
            assert stats().zc_requests == before > 0

    run(main(), adaptive=adaptive, zc_threshold=0)


def test_a_path_that_began_to_copy_is_left():
    """As if the kernel had reported that it does not copy, when it does: loopback."""

    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            writer.transport._conn.path = lib.AZC_PATH_ZC
            before = 0
            for i in range(40):
                writer.write(bytes([i]) * 256 * KIB)
                assert_stream(await peer.take(256 * KIB), [(i, 256 * KIB)])
                if i == 4:
                    before = stats().zc_requests
                    assert before >= 1
            assert stats().zc_requests == before
            assert writer.get_extra_info("zero_copy").path == "copied"

    run(main())


@pytest.mark.parametrize("how", ["loop", "threshold", "zerocopy"])
def test_it_can_be_switched_off(how):
    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            if how == "threshold":
                writer.transport.zc_configure(threshold=1 << 30)
            writer.write(b"A" * 256 * KIB)
            await peer.take(256 * KIB)
            assert stats().zc_requests == 0

    off = {"loop": {"zc_write": "off"}, "zerocopy": {"zerocopy": "off"}}.get(how, {})
    run(main(), **{**FORCED, **off})


def test_small_writes_are_copied():
    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            for _ in range(8):
                writer.write(b"A" * 16 * KIB)
            await peer.take(128 * KIB)
            assert stats().zc_requests == 0

    run(main(), adaptive=False, zc_write="always")


def test_writes_of_every_kind_keep_their_order():
    async def main():
        async with stalled() as (peer, writer):
            expected = []
            for i in range(60):
                value, n = i + 1, (100, 40 * KIB, 300 * KIB, 17 * KIB)[i % 4]
                data = bytes([value]) * n
                if i % 5 == 1:
                    writer.write(bytearray(data))
                elif i % 5 == 2:
                    writer.zc_submit([data[: n // 2], data[n // 2 :]])
                elif i % 5 == 3:
                    writer.writelines([data[:7], data[7:]])
                else:
                    writer.write(data)
                expected.append((value, n))
                if i % 7 == 0:
                    await asyncio.sleep(0)
            writer.close()
            assert_stream(await peer.take_all(), expected)
            assert stats().zc_requests > 0

    run(main(), **FORCED)


def test_the_object_is_held_until_the_kernel_released_it():
    async def main():
        async with stalled() as (peer, writer):
            array = np.full(512 * KIB, A, "u1")
            gone = weakref.ref(array)
            writer.write(aiozc.frozen(array))
            del array
            await eventually(lambda: writer.transport.get_write_buffer_size() == 0)
            await asyncio.sleep(0.05)
            gc.collect()
            assert gone() is not None, "let go while the peer had not read"
            assert_stream(await peer.take(512 * KIB), [(A, 512 * KIB)])
            await eventually(lambda: gone() is None)

    run(main(), **FORCED)


@pytest.mark.parametrize("settings", [FORCED, {}], ids=["forced", "default"])
def test_what_was_written_before_abort_is_sent(settings):
    """asyncio's own write() would have sent it in the call."""

    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            writer.write(b"A" * 100 * KIB)
            writer.write(b"B" * 100)
            writer.transport.abort()
            assert_stream(await peer.take_all(), [(A, 100 * KIB), (B, 100)])

    run(main(), **settings)


def test_flow_control_counts_it():
    async def main():
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            writer.write(b"A" * 1024 * KIB)
            assert writer.transport.get_write_buffer_size() == 1024 * KIB
            drain = asyncio.ensure_future(writer.drain())
            await asyncio.sleep(0.05)
            assert not drain.done()
            assert_stream(await peer.take(1024 * KIB), [(A, 1024 * KIB)])
            await soon(drain)
            await eventually(lambda: stats().pinned_bytes == 0)

    run(main(), **FORCED)


def test_what_waits_in_several_writes_is_sent_before_an_abort():
    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            writer.transport.set_write_buffer_limits(high=1 << 20)
            writer.transport.pause_reading()
            for value in b"ABC":
                writer.write(bytes([value]) * 30_000)
            writer.transport.abort()
            assert_stream(await peer.take_all(), [(A, 30_000), (B, 30_000), (C, 30_000)])

    run(main(), **FORCED)


def test_a_full_socket_is_not_asked_again_by_every_write():
    async def main():
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            writer.write(b"A" * 1024 * KIB)
            await asyncio.sleep(0.05)
            before = stats().enters
            for _ in range(200):
                writer.write(b"B" * 20_000)
            assert stats().enters - before < 5
            assert_stream(
                await peer.take(1024 * KIB + 4_000_000), [(A, 1024 * KIB), (B, 4_000_000)]
            )

    run(main(), **FORCED)
