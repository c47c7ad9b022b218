"""zc_timeout: peers that stop reading are reset, and none that reads, however slowly.

The peer is a blocking socket that reads in a thread when it is told. Times are bounded on both sides: a
connection is never given up before its timeout, and not much later.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import time
from typing import Any

import pytest
from support import (
    MIB,
    RCVBUF,
    SMALL_SNDBUF,
    StalledReader,
    assert_prefix,
    assert_stream,
    eventually,
    in_thread,
    soon,
    stalled,
    tls_contexts,
)

import aiozc

TIMEOUT = 0.4
SLACK = 1.6  # seconds more that a busy machine may need


def stats() -> aiozc.ZcStats:
    return asyncio.get_running_loop().zc_stats()  # type: ignore[attr-defined]


async def lost(writer: Any) -> BaseException:
    """What connection_lost was called with."""
    with pytest.raises(OSError) as caught:
        await soon(writer.wait_closed())
    return caught.value


async def assert_timed_out(stage: Any) -> None:
    with pytest.raises(TimeoutError) as caught:
        await soon(stage)
    assert caught.value.errno == errno.ETIMEDOUT


@pytest.mark.timing
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_peer_that_stops_reading_is_reset(run, forced_loop_factory, family):
    # Fails when: nobody looks, when linger is not 0 (TCP: an end of file, and pins that stay), or when
    # the error is not told to those operations whose bytes were all accepted.
    async def main() -> None:
        with StalledReader(family=family) as peer:
            sock = peer.connect(sndbuf=SMALL_SNDBUF)
            _, writer = await asyncio.open_connection(sock=sock)
            began = time.monotonic()
            buffer = bytearray(b"a" * 50_000)
            accepted = writer.zc_submit(buffer)
            await soon(accepted.sent)  # into the two socket buffers, whole; not all acknowledged
            waiting = writer.zc_submit(b"b" * MIB)
            queued = writer.zc_submit(b"c" * MIB)
            writer.write(b"d" * MIB)
            pinned = not accepted.released.done()
            assert pinned == bool(writer.transport._conn.zc_ok)
            if pinned:
                with pytest.raises(BufferError):
                    buffer.append(0)
            assert isinstance(await lost(writer), TimeoutError)
            assert TIMEOUT <= time.monotonic() - began < TIMEOUT + SLACK
            for op in (waiting, queued, *([accepted] if pinned else [])):
                await assert_timed_out(op.sent)
                await assert_timed_out(op.released)
                assert op.state is aiozc.OperationState.FAILED
            assert 0 < waiting.bytes_sent < MIB
            assert queued.bytes_sent == 0
            buffer.append(0)
            now = stats()
            assert (now.pinned_bytes, now.queued_bytes, now.operations_live) == (0, 0, 0)
            assert (now.timeouts, now.connections) == (1, 0)
            data, was_reset = await in_thread(peer.read_until_reset)
            assert was_reset == (family == socket.AF_INET)
            assert_prefix(data, [(97, 50_000), (98, MIB)])

    run(main(), lambda: forced_loop_factory(zc_timeout=TIMEOUT))


def test_pinned_bytes_count_without_anything_unsent(run, forced_loop_factory):
    # Fails when: only unsent bytes are looked at.
    async def main() -> None:
        async with stalled() as (_, writer):
            op = writer.zc_submit(bytearray(MIB))
            await soon(op.sent)
            assert writer.transport.get_write_buffer_size() == 0
            await assert_timed_out(op.released)
            assert isinstance(await lost(writer), TimeoutError)
            assert stats().pinned_bytes == 0

    run(main(), lambda: forced_loop_factory(zc_timeout=TIMEOUT))


@pytest.mark.timing
def test_plain_writes_count_and_drain_raises(run, loop_factory):
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (_, writer):
            writer.write(b"w" * MIB)
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                await soon(writer.drain())
            assert TIMEOUT <= time.monotonic() - began < TIMEOUT + SLACK

    run(main(), lambda: loop_factory(zc_timeout=TIMEOUT))


@pytest.mark.timing
def test_tls_and_what_it_waits_with_get_the_same_error(run, loop_factory):
    # Fails when: what waits for a position of the stream is told of a reset that nobody sent.
    server_context, client_context = tls_contexts()

    async def main() -> None:
        with StalledReader() as peer:

            def handshake() -> Any:
                return server_context.wrap_socket(peer.listener.accept()[0], server_side=True)

            serving = asyncio.ensure_future(in_thread(handshake))
            _, writer = await asyncio.open_connection(
                *peer.address, ssl=client_context, server_hostname="localhost"
            )
            stalled_peer = await serving
            op = writer.zc_submit(bytes(20 * MIB))
            began = time.monotonic()
            await assert_timed_out(op)
            assert TIMEOUT <= time.monotonic() - began < TIMEOUT + SLACK
            with pytest.raises(TimeoutError):
                await soon(writer.wait_closed())
            stalled_peer.close()

    run(main(), lambda: loop_factory(zc_timeout=TIMEOUT))


def test_a_transport_that_is_closing_is_given_up_too(run, forced_loop_factory):
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (_, writer):
            op = writer.zc_submit(bytearray(MIB))
            writer.close()
            assert isinstance(await lost(writer), TimeoutError)
            await assert_timed_out(op)

    run(main(), lambda: forced_loop_factory(zc_timeout=TIMEOUT))


@pytest.mark.parametrize("sndbuf", [SMALL_SNDBUF, 4 * MIB])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_peer_that_reads_slowly_but_steadily_is_spared(run, forced_loop_factory, family, sndbuf):
    # Fails when: time counts from the send, or (the small send buffer, whose fill stands still while the
    # request goes on) progress is only seen in SIOCOUTQ and in requests that end.
    size, step = 768 * 1024, 32 * 1024

    async def main() -> None:
        rcvbuf = RCVBUF * 4 if family == socket.AF_INET else None
        async with stalled(sndbuf=sndbuf, rcvbuf=rcvbuf, family=family) as (peer, writer):
            op = writer.zc_submit(bytearray(b"s" * size))
            began = time.monotonic()
            data = await peer.take(size, pace=0.08, step=step)
            assert time.monotonic() - began > 3 * TIMEOUT
            assert_stream(data, [(115, size)])
            await soon(op)
            assert stats().timeouts == 0

    run(main(), lambda: forced_loop_factory(zc_timeout=TIMEOUT))


@pytest.mark.timing
def test_time_counts_from_the_last_progress(run, forced_loop_factory):
    # Fails when: what was seen of a connection before it was idle is compared with what comes after.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (_, other):
            # Outstanding all the time, so the looks go on while the other one is idle.
            other.transport.zc_configure(timeout=60.0)
            held = other.zc_submit(bytearray(MIB))
            async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
                first = writer.zc_submit(bytearray(MIB))
                await asyncio.sleep(0.7 * TIMEOUT)
                await peer.take(MIB)
                await soon(first)
                await asyncio.sleep(2 * TIMEOUT)
                began = time.monotonic()
                second = writer.zc_submit(bytearray(MIB))
                await assert_timed_out(second)
                assert TIMEOUT <= time.monotonic() - began < TIMEOUT + SLACK
            assert not held.sent.done()
            assert stats().timeouts == 1

    run(main(), lambda: forced_loop_factory(zc_timeout=TIMEOUT))


def test_a_loop_that_was_blocked_blames_nobody(run, forced_loop_factory):
    # Fails when: a second look may follow the first by the wall clock alone.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = writer.zc_submit(bytearray(b"l" * MIB))
            await asyncio.sleep(TIMEOUT / 2)
            time.sleep(2 * TIMEOUT)
            await asyncio.sleep(0.0)
            reading = asyncio.ensure_future(peer.take(MIB))
            assert_stream(await reading, [(108, MIB)])
            await soon(op)

    run(main(), lambda: forced_loop_factory(zc_timeout=TIMEOUT))


@pytest.mark.timing
def test_a_timeout_of_one_transport(run, forced_loop_factory):
    # Fails when: the setting is the loop's alone, or infinity does not switch it off.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (_, writer), stalled() as (peer, other):
            other.transport.zc_configure(timeout=math.inf)
            kept = other.zc_submit(bytearray(b"k" * 20 * MIB))
            writer.transport.zc_configure(timeout=TIMEOUT)
            began = time.monotonic()
            await assert_timed_out(writer.zc_submit(bytearray(MIB)))
            assert TIMEOUT <= time.monotonic() - began < TIMEOUT + SLACK
            await asyncio.sleep(TIMEOUT)
            assert not kept.sent.done()
            assert_stream(await peer.take(20 * MIB), [(107, 20 * MIB)])
            await soon(kept)
            writer.transport.zc_configure(timeout=1.0)  # it is closed: nothing to do
            assert stats().timeouts == 1

    run(main(), lambda: forced_loop_factory(zc_timeout=5 * TIMEOUT))


def test_nothing_runs_while_nothing_is_outstanding(run, forced_loop_factory):
    # Fails when: the looks go on for ever. Eight a timeout would be 1,600 turns here.
    async def main() -> None:
        async with stalled(rcvbuf=None) as (peer, writer):
            op = writer.zc_submit(b"x" * 1000)
            await peer.take(1000)
            await soon(op)
            await eventually(lambda: stats().pinned_bytes == 0)
            before = stats().enters
            await asyncio.sleep(1.0)
            assert stats().enters - before <= 10

    run(main(), lambda: forced_loop_factory(zc_timeout=0.005))


def test_looking_costs_few_turns(run, forced_loop_factory):
    # Fails when: the wait is bounded by more than a look needs.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (_, writer):
            writer.zc_submit(bytearray(MIB))
            await asyncio.sleep(0.1)
            before = stats().enters
            await asyncio.sleep(1.0)
            assert 2 <= stats().enters - before <= 20
            assert stats().timeouts == 0

    run(main(), lambda: forced_loop_factory(zc_timeout=2.0))


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan])
def test_zc_timeout_is_checked(run, loop_factory, bad):
    with pytest.raises(ValueError, match="zc_timeout must be more than 0 seconds"):
        aiozc.Settings(zc_timeout=bad)

    async def main() -> None:
        async with stalled() as (_, writer):
            threshold = writer.transport._conn.zc_threshold
            with pytest.raises(ValueError, match="zc_timeout must be more than 0 seconds"):
                writer.transport.zc_configure(threshold=1, timeout=bad)
            assert writer.transport._conn.zc_threshold == threshold

    run(main())
