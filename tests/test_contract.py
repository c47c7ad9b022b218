"""The ownership contract, seen from inside the process: who may do what with a buffer, and when.

Owns the cases in which the caller, the loop and a stalled peer are all alive; what happens when one
of them goes away in the middle is in test_contract_lifetime.py, the limits in
test_contract_limits.py. Written from the contract alone: nothing here looks into the loop.

Both backends keep one contract. The one difference, asserted wherever it matters: where zero-copy is
forced the kernel reads the pages until the peer took the bytes, so `released` comes after `sent`; where
the bytes were copied (the third variant, see conftest.py) `released` comes with `sent` and the path is
"copied".

A comment "Fails when" names the protection whose removal makes that test fail.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import functools
import gc
import io
import logging
import mmap
import random
import socket
import ssl
import sys
import threading
import time
import weakref
from typing import Any

import pytest
from support import (
    KIB,
    LARGE_SNDBUF,
    MIB,
    PAUSE,
    RCVBUF,
    SMALL_SNDBUF,
    LoopErrors,
    StalledReader,
    accepted_by_kernel,
    assert_prefix,
    assert_stream,
    copies,
    eventually,
    in_thread,
    numbers,
    runs,
    set_rcvbuf,
    show,
    soon,
    stalled,
    tls_contexts,
)

import aiozc

State = aiozc.OperationState

A, B, C, D, E = b"ABCDE"
SPOILED = 0xEE  # what a test writes over a buffer; no message contains it


def filled(value: int, size: int) -> bytearray:
    return bytearray(bytes([value])) * size


def spoil(buffer: Any) -> None:
    view = memoryview(buffer).cast("B")
    view[:] = bytes([SPOILED]) * len(view)


def stats() -> Any:
    return asyncio.get_running_loop().zc_stats()  # type: ignore[attr-defined]


async def waiter(awaitable: Any) -> Any:
    return await awaitable


def waiting(awaitable: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(waiter(awaitable))


async def ended(task: asyncio.Task[Any], limit: float = 20.0) -> asyncio.Task[Any]:
    """Waits for the task's end without raising what it raised."""
    done, _ = await asyncio.wait([task], timeout=limit)
    assert done, "still pending"
    if not task.cancelled():
        task.exception()  # looked at: else asyncio complains whenever the task is collected
    return task


async def error_of(awaitable: Any) -> BaseException:
    task = await ended(waiting(awaitable))
    assert not task.cancelled(), "cancelled instead of failed"
    error = task.exception()
    assert error is not None, f"succeeded with {task.result()!r}"
    return error


def assert_locked(buffer: bytearray) -> None:
    with pytest.raises(BufferError):
        buffer.extend(b"x")


def assert_unlocked(buffer: bytearray) -> None:
    buffer.extend(b"x")
    del buffer[-1]


def is_released_with_sent(backend: str) -> bool:
    return copies(backend)


# --- the two stages -------------------------------------------------------------------------


def test_a_stalled_reader_separates_sent_from_released(run, forced_loop_factory, backend) -> None:
    # Fails when: `released` is resolved by the request's first completion instead of by its
    # notification.
    async def main() -> None:
        async with stalled() as (peer, writer):
            buffer = filled(A, MIB)
            op = writer.zc_submit(buffer)
            assert op.nbytes == MIB
            await soon(op.sent)
            assert op.bytes_sent == MIB
            await asyncio.sleep(PAUSE)
            if is_released_with_sent(backend):
                assert op.released.done()
                assert op.state is State.RELEASED
            else:
                assert not op.released.done()
                assert op.state is State.SENT
            assert_stream(await peer.take(MIB), [(A, MIB)])
            result = await soon(op)
            assert op.released.done()
            assert op.state is State.RELEASED
            assert result.nbytes == MIB
            if is_released_with_sent(backend):
                assert result.path == "copied"
            else:
                # Loopback copies on delivery and the kernel's report lies for stacked sends: no
                # word is wrong here except one that says nothing at all.
                assert result.path in ("zero-copy", "copied", "mixed", "unknown")

    run(main(), forced_loop_factory)


def test_sent_is_pending_until_the_kernel_took_the_last_byte(run, forced_loop_factory) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = writer.zc_submit(filled(A, MIB))
            await asyncio.sleep(PAUSE)
            assert not op.sent.done()
            assert not op.released.done()
            assert op.state is State.ISSUED
            assert 0 <= op.bytes_sent < MIB
            # All but what the socket's buffers can hold: still not the last byte.
            await peer.take(MIB // 2)
            await asyncio.sleep(PAUSE)
            assert not op.sent.done()
            await peer.take(MIB // 2)
            await soon(op.sent)
            assert op.bytes_sent == MIB
            result = await soon(op.released)
            assert result.nbytes == MIB

    run(main(), forced_loop_factory)


def test_pages_overwritten_after_sent_are_what_a_zero_copy_peer_gets(
    run, forced_loop_factory, backend
) -> None:
    # The proof that the other tests can see anything: here the caller breaks the rule. What the
    # peer's receive buffer held was copied already, the rest is read from the pages. Fails when
    # zero-copy is not in force (every test below would then pass without protection).
    async def main() -> None:
        async with stalled() as (peer, writer):
            buffer = filled(A, MIB)
            op = writer.zc_submit(buffer)
            await soon(op.sent)
            await eventually(lambda: peer.waiting() >= RCVBUF // 2)
            await asyncio.sleep(PAUSE)
            held = peer.waiting()
            assert held < MIB // 2
            spoil(buffer)
            data = await peer.take(MIB)
            if is_released_with_sent(backend):
                assert_stream(data, [(A, MIB)])
            else:
                assert_stream(data, [(A, held), (SPOILED, MIB - held)])
            await soon(op)

    run(main(), forced_loop_factory)


def test_pages_overwritten_after_released_never_reach_the_peer(
    run, forced_loop_factory, backend
) -> None:
    # Fails when: `released` does not wait for the notification of every request that had a part
    # of the operation (a buffer over the request limit takes several).
    async def main() -> None:
        size = 2 * MIB + 4321
        async with stalled() as (peer, writer):
            buffer = filled(A, size)
            for value in range(1, 9):
                memoryview(buffer)[:] = bytes([value]) * size
                op = writer.zc_submit(buffer)
                await soon(op.sent)
                await asyncio.sleep(0.02)
                assert op.released.done() == is_released_with_sent(backend)
                reading = asyncio.ensure_future(peer.take(size, pace=0.001))
                await soon(op.released)
                spoil(buffer)
                assert_stream(await reading, [(value, size)])

    run(main(), forced_loop_factory)


def test_buffers_reused_as_soon_as_they_are_released_never_corrupt_a_busy_stream(
    run, forced_loop_factory
) -> None:
    # Fails when: a notification is matched to the wrong operation (by arrival order, or by a slot
    # without its generation): some buffer is then released, and here overwritten, too early.
    sizes = [1, 700, 4 * KIB, 17 * KIB, 64 * KIB, 300 * KIB]
    rounds = 60

    async def main() -> None:
        plan: list[tuple[int, int]] = []
        async with stalled(sndbuf=256 * KIB) as (peer, writer):
            reading = asyncio.ensure_future(peer.take_all(pace=0.0005))

            async def reuse(lane: int) -> None:
                size = sizes[lane]
                buffer = bytearray(size)
                for turn in range(rounds):
                    value = 1 + (turn * len(sizes) + lane) % 230
                    buffer[:] = bytes([value]) * size
                    op = writer.zc_submit(buffer)
                    plan.append((value, size))  # the call's order is the stream's order
                    await op
                    spoil(buffer)

            await soon(asyncio.gather(*(reuse(lane) for lane in range(len(sizes)))), 40.0)
            writer.close()
            assert_stream(await reading, plan)

    run(main(), forced_loop_factory)


def test_a_notification_releases_only_what_it_belongs_to(run, forced_loop_factory, backend) -> None:
    # Fails when: notifications are matched in the order of their requests, or by a slot number
    # alone: another connection's notifications would release the stalled one's buffer.
    async def main() -> None:
        async with stalled() as (peer, writer), stalled() as (other_peer, other):
            writer.write(b"A" * 2 * RCVBUF)  # fills the receive buffer: what follows stays pinned
            await asyncio.sleep(PAUSE / 2)
            buffer = filled(B, 70_000)
            pinned = writer.zc_submit(buffer)
            await soon(pinned.sent)
            reading = asyncio.ensure_future(other_peer.take(200 * 80_000))
            for value in range(1, 201):
                size = 80_000
                assert (await soon(other.zc_send(filled(value, size)))).nbytes == size
            assert_stream(await reading, [(value, 80_000) for value in range(1, 201)])
            if not is_released_with_sent(backend):
                assert not pinned.released.done()
                assert_locked(buffer)
            reading = asyncio.ensure_future(peer.take(2 * RCVBUF + 70_000))
            await soon(pinned)
            spoil(buffer)
            assert_stream(await reading, [(A, 2 * RCVBUF), (B, 70_000)])

    run(main(), forced_loop_factory)


def test_operations_go_on_when_the_loop_stops_and_runs_again(forced_loop_factory, backend) -> None:
    # Fails when: the end of a run drops, repeats or releases what was with the kernel.
    issued, pinned_buffer = filled(A, 12 * MIB), filled(B, 256 * KIB)

    async def begin() -> Any:
        writers = []
        for peer, sndbuf in ((peers[0], SMALL_SNDBUF), (peers[1], LARGE_SNDBUF)):
            writers.append((await asyncio.open_connection(sock=peer.connect(sndbuf=sndbuf)))[1])
        first = writers[0].zc_submit(issued)
        second = writers[0].zc_submit(filled(C, 1000))
        third = writers[1].zc_submit(pinned_buffer)
        await soon(third.sent)
        await asyncio.sleep(PAUSE / 2)
        assert first.state is State.ISSUED
        return writers, (first, second, third)

    async def middle(writers: Any, ops: Any) -> None:
        assert_locked(issued)
        assert ops[2].released.done() == is_released_with_sent(backend)
        assert not ops[0].sent.done() and not ops[1].sent.done()
        data.extend(await peers[0].take(3 * MIB))

    async def end(writers: Any, ops: Any) -> None:
        assert not ops[0].sent.done()
        reading = asyncio.ensure_future(peers[0].take_all())
        last = asyncio.ensure_future(peers[1].take_all())
        for op in ops:
            await soon(op)
        spoil(issued)
        spoil(pinned_buffer)
        for writer in writers:
            writer.close()
        data.extend(await reading)
        assert_stream(await last, [(B, 256 * KIB)])
        for writer in writers:
            await soon(writer.wait_closed())

    data = bytearray()
    with StalledReader() as one, StalledReader() as two:
        peers = (one, two)
        loop = forced_loop_factory()
        try:
            writers, ops = loop.run_until_complete(begin())
            time.sleep(0.05)  # nobody runs the loop
            loop.run_until_complete(middle(writers, ops))
            for _ in range(5):
                loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(asyncio.wait_for(end(writers, ops), 40))
        finally:
            loop.close()
    assert_stream(data, [(A, 12 * MIB), (C, 1000)])


def test_later_operations_advance_to_sent_although_the_first_is_pinned(
    run, forced_loop_factory, backend
) -> None:
    # Case 12. Fails when: a request waits for the notification of the one before it.
    async def main() -> None:
        async with stalled() as (peer, writer):
            ops = []
            for value in range(1, 21):
                ops.append(writer.zc_submit(filled(value, 64 * KIB)))
                await asyncio.sleep(0)
            for op in ops:
                await soon(op.sent)
            await asyncio.sleep(PAUSE)
            assert [op.bytes_sent for op in ops] == [64 * KIB] * 20
            if is_released_with_sent(backend):
                assert all(op.released.done() for op in ops)
            else:
                # The first may lie in the receive buffer whole; the second cannot.
                assert not any(op.released.done() for op in ops[1:])
            data = await peer.take(20 * 64 * KIB)
            assert_stream(data, [(value, 64 * KIB) for value in range(1, 21)])
            for op in ops:
                await soon(op)

    run(main(), forced_loop_factory)


def test_zc_send_returns_only_when_the_buffer_may_be_reused(
    run, forced_loop_factory, backend
) -> None:
    # Fails when: zc_send awaits `sent`.
    async def main() -> None:
        async with stalled() as (peer, writer):
            buffer = filled(A, MIB)
            send = asyncio.ensure_future(writer.zc_send(buffer))
            await asyncio.sleep(PAUSE)
            assert send.done() == is_released_with_sent(backend)
            reading = asyncio.ensure_future(peer.take(MIB, pace=0.0005, step=16 * KIB))
            result = await soon(send)
            spoil(buffer)
            assert result.nbytes == MIB
            assert_stream(await reading, [(A, MIB)])

    run(main(), forced_loop_factory)


def test_bytes_are_counted_once(run, forced_loop_factory) -> None:
    # Case 10. Fails when: the notification's completion is accounted like the request's.
    async def main() -> None:
        async with stalled() as (peer, writer):
            before = stats()
            ops = [writer.zc_submit(filled(value, 100_000)) for value in (A, B, C)]
            ops.append(writer.zc_submit([filled(D, 70_000), b"", filled(E, 30_000)]))
            results = []
            reading = asyncio.ensure_future(peer.take(400_000))
            for op in ops:
                results.append(await soon(op))
            await reading
            after = stats()
            assert [op.bytes_sent for op in ops] == [100_000] * 4
            assert [result.nbytes for result in results] == [100_000] * 4
            assert after.bytes - before.bytes == 400_000
            assert after.operations - before.operations == 4
            assert after.queued_bytes == 0
            assert after.pinned_bytes == 0
            assert after.notifications_outstanding == 0

    run(main(), forced_loop_factory)


# --- awaiting -------------------------------------------------------------------------------


def test_many_may_await_and_cancelling_one_leaves_the_others(run, forced_loop_factory) -> None:
    # Case 44. Fails when: waiters share one future that `wait_for` cancels.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = writer.zc_submit(filled(A, MIB))
            sent = [waiting(op.sent) for _ in range(3)]
            released = [waiting(op.released) for _ in range(3)] + [waiting(op)]
            for stage in (op.sent, op.released, op):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(stage, 0.03)
            sent[0].cancel()
            released[0].cancel()
            released[3].cancel()
            await asyncio.sleep(PAUSE)
            assert not op.sent.done()
            assert not op.released.done()
            assert not any(task.done() for task in sent[1:] + released[1:3])
            assert op.state is State.ISSUED

            assert_stream(await peer.take(MIB), [(A, MIB)])
            for task in sent[1:]:
                await soon(task)
            results = [await soon(task) for task in released[1:3]] + [await soon(op)]
            assert {result.nbytes for result in results} == {MIB}
            assert sent[0].cancelled() and released[0].cancelled() and released[3].cancelled()
            # Long after the fact, and again: resolved stages stay resolved.
            await soon(op.sent)
            assert (await soon(op)).nbytes == MIB

    run(main(), forced_loop_factory)


def test_cancelling_zc_send_neither_cuts_nor_withdraws(run, forced_loop_factory) -> None:
    # Fails when: cancelling the await cancels the request, or takes the operation out of the queue.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            first, second, third = filled(A, MIB), filled(B, 100_000), filled(C, 100_000)
            issued = asyncio.ensure_future(writer.zc_send(first))
            await asyncio.sleep(PAUSE)
            queued = asyncio.ensure_future(writer.zc_send(second))
            await asyncio.sleep(PAUSE)
            assert not issued.done() and not queued.done()
            issued.cancel()
            queued.cancel()
            assert (await ended(issued)).cancelled()
            assert (await ended(queued)).cancelled()
            assert_locked(first)
            assert_locked(second)
            last = writer.zc_submit(third)
            data = await peer.take(MIB + 200_000)
            assert_stream(data, [(A, MIB), (B, 100_000), (C, 100_000)])
            await soon(last)
            await eventually(lambda: stats().operations_live == 0)
            assert_unlocked(first)
            assert_unlocked(second)

    run(main(), forced_loop_factory)


# --- withdraw -------------------------------------------------------------------------------


def test_withdraw_removes_an_operation_that_was_not_touched(run, forced_loop_factory) -> None:
    # Fails when: withdraw() answers True without taking the parts out of the native queue.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            first = writer.zc_submit(filled(A, 2 * MIB))
            await asyncio.sleep(PAUSE)
            assert first.state is State.ISSUED
            buffer = filled(B, 64 * KIB)
            second = writer.zc_submit([buffer, filled(B, KIB)])
            third = writer.zc_submit(filled(C, 32 * KIB))
            await asyncio.sleep(PAUSE)
            assert second.state is State.QUEUED
            assert not second.sent.done() and not second.released.done()
            waits = waiting(second.sent)
            await asyncio.sleep(0)
            size = writer.transport.get_write_buffer_size()
            assert_locked(buffer)

            assert second.withdraw() is True

            assert second.state is State.WITHDRAWN
            assert second.bytes_sent == 0
            assert writer.transport.get_write_buffer_size() == size - 65 * KIB
            assert second.released.done()
            assert_unlocked(buffer)
            assert (await ended(waits)).cancelled()
            assert (await ended(waiting(second.sent))).cancelled()
            await soon(second.released)
            data = await peer.take(2 * MIB + 32 * KIB)
            assert_stream(data, [(A, 2 * MIB), (C, 32 * KIB)])
            await soon(third)
            assert second.state is State.WITHDRAWN
            writer.close()
            assert await peer.take_all() == b""

    run(main(), forced_loop_factory)


def test_withdraw_answers_false_once_a_byte_was_issued(run, forced_loop_factory, backend) -> None:
    # Fails when: withdraw() looks at what was sent instead of at what was issued.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            buffer = filled(A, MIB)
            op = writer.zc_submit(buffer)
            await asyncio.sleep(PAUSE)
            assert op.state is State.ISSUED
            assert op.withdraw() is False
            assert op.state is State.ISSUED
            assert_locked(buffer)
            assert_stream(await peer.take(MIB), [(A, MIB)])
            await soon(op)
            assert op.withdraw() is False
            assert op.state is State.RELEASED
        async with stalled() as (peer, writer):
            op = writer.zc_submit(filled(A, MIB))
            await soon(op.sent)
            assert op.withdraw() is False
            assert op.state is (State.RELEASED if is_released_with_sent(backend) else State.SENT)
            assert_stream(await peer.take(MIB), [(A, MIB)])
            await soon(op)

    run(main(), forced_loop_factory)


def test_every_queued_operation_can_be_withdrawn_and_the_rest_stays_whole(
    run, forced_loop_factory
) -> None:
    # Fails when: a withdrawal shifts or drops a neighbour's parts.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            writer.zc_submit(filled(A, 2 * MIB))
            await asyncio.sleep(PAUSE)
            expected = [(A, 2 * MIB)]
            ops = []
            for turn in range(100):
                value, size = 1 + turn, 3_000 + turn
                half = size // 2
                op = writer.zc_submit([filled(value, half), filled(value, size - half)])
                ops.append((op, value, size))
                if turn % 10 == 0:
                    writer.write(bytes([SPOILED - 1]) * 10)
                    ops.append((None, SPOILED - 1, 10))
            for index, (op, value, size) in enumerate(ops):
                if op is not None and index % 3:
                    assert op.withdraw() is True
                else:
                    expected.append((value, size))
            writer.close()
            assert_stream(await peer.take_all(), expected)

    run(main(), forced_loop_factory)


# --- bad input ------------------------------------------------------------------------------


def fortran_order() -> Any:
    """Contiguous, but not in the order in which its bytes would be sent."""
    numpy = pytest.importorskip("numpy")
    return numpy.asfortranarray(numpy.arange(600, dtype="u1").reshape(20, 30))


def strided_array() -> Any:
    numpy = pytest.importorskip("numpy")
    return numpy.zeros((64, 64), dtype="u1")[:, ::2]


BAD_INPUT = {
    "str": (lambda: "text", TypeError),
    "int": (lambda: 7, TypeError),
    "none": (lambda: None, TypeError),
    "object": (object, TypeError),
    "list with an int": (lambda: [b"fine", 7], TypeError),
    "list with a str": (lambda: [b"fine", "text", b"fine"], TypeError),
    "list in a list": (lambda: [b"fine", [b"nested"]], TypeError),
    "strided view": (lambda: memoryview(bytes(100))[::2], BufferError),
    "reversed view": (lambda: memoryview(bytearray(100))[::-1], BufferError),
    "list with a strided view": (lambda: [b"fine", memoryview(bytes(99))[::3]], BufferError),
    "strided array": (strided_array, BufferError),
    "Fortran order": (fortran_order, BufferError),
    "view of Fortran order": (lambda: memoryview(fortran_order()), BufferError),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_raises_at_the_call_and_queues_nothing(run, forced_loop_factory, name) -> None:
    # Case 3. Fails when: a buffer is taken without asking for contiguous memory, or the members of
    # a list are queued one by one while they are being checked.
    make, error = BAD_INPUT[name]

    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            writer.zc_submit(filled(A, MIB))
            await asyncio.sleep(PAUSE / 2)
            transport = writer.transport
            before, size = stats(), transport.get_write_buffer_size()
            assert size > 0
            bad = make()
            with pytest.raises(error) as caught:
                writer.zc_submit(bad)
            assert len(str(caught.value)) > 10, "no word about what to do instead"
            with pytest.raises(error):
                transport.zc_write(bad)
            with pytest.raises(error):
                await writer.zc_send(bad)
            after = stats()
            assert transport.get_write_buffer_size() == size
            assert after.operations_live == before.operations_live
            assert after.queued_bytes == before.queued_bytes
            good = writer.zc_submit(b"B" * 1000)
            assert_stream(await peer.take(MIB + 1000), [(A, MIB), (B, 1000)])
            await soon(good)
            writer.close()
            assert await peer.take_all() == b""

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("last", ["text", memoryview(bytes(100))[::2]], ids=["type", "strided"])
def test_a_list_with_one_bad_member_leaves_no_lock(run, forced_loop_factory, last) -> None:
    # Fails when: the locks taken for the good members are not given back.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (_peer, writer):
            buffers = [filled(value, 1000) for value in (A, B, C)]
            for _ in range(3):
                with pytest.raises((TypeError, BufferError)):
                    writer.zc_submit([*buffers, last])
            assert writer.transport.get_write_buffer_size() == 0
            for buffer in buffers:
                assert_unlocked(buffer)

    run(main(), forced_loop_factory)


def test_sending_after_write_eof_raises_runtime_error(run, forced_loop_factory) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = writer.zc_submit(filled(A, MIB))
            writer.write_eof()
            size = writer.transport.get_write_buffer_size()
            buffer = filled(B, 100)
            with pytest.raises(RuntimeError):
                writer.zc_submit(buffer)
            with pytest.raises(RuntimeError):
                writer.transport.zc_write([buffer])
            with pytest.raises(RuntimeError):
                await writer.zc_send(buffer)
            assert_unlocked(buffer)
            assert writer.transport.get_write_buffer_size() == size
            # The end of the stream waits its turn behind what was queued before it.
            assert_stream(await peer.take_all(), [(A, MIB)])
            await soon(op)

    run(main(), forced_loop_factory)


def test_sending_while_closing_raises_connection_reset(run, forced_loop_factory) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = writer.zc_submit(filled(A, MIB))
            writer.close()
            size = writer.transport.get_write_buffer_size()
            buffer = filled(B, 100)
            with pytest.raises(ConnectionResetError):
                writer.zc_submit(buffer)
            with pytest.raises(ConnectionResetError):
                writer.transport.zc_write([buffer])
            with pytest.raises(ConnectionResetError):
                await writer.zc_send(buffer)
            assert_unlocked(buffer)
            assert writer.transport.get_write_buffer_size() == size
            assert not op.sent.done()
            assert_stream(await peer.take_all(), [(A, MIB)])
            await soon(op)
            # Closed altogether: the same.
            await soon(writer.wait_closed())
            with pytest.raises(ConnectionResetError):
                writer.zc_submit(buffer)

    run(main(), forced_loop_factory)


@pytest.mark.parametrize(
    "nothing",
    [b"", bytearray(), memoryview(b""), [], [b"", bytearray()]],
    ids=["bytes", "bytearray", "memoryview", "empty list", "list of empties"],
)
def test_zero_length_resolves_at_once(run, forced_loop_factory, nothing) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            ahead = writer.zc_submit(filled(A, MIB))
            await asyncio.sleep(PAUSE / 2)
            op = writer.zc_submit(nothing)
            assert op.sent.done() and op.released.done()
            assert (op.nbytes, op.bytes_sent) == (0, 0)
            await soon(op.sent)
            assert (await soon(op)).nbytes == 0
            assert op.withdraw() is False
            assert (await soon(writer.zc_send(nothing))).nbytes == 0
            assert not ahead.sent.done()
            assert_stream(await peer.take(MIB), [(A, MIB)])
            await soon(ahead)

    run(main(), forced_loop_factory)


# --- the export lock ------------------------------------------------------------------------


def test_a_bytearray_cannot_be_resized_before_it_is_released(
    run, forced_loop_factory, backend
) -> None:
    # Case 4. Fails when: only a reference is held, without an export of the buffer, or the export
    # is given back at `sent`.
    async def main() -> None:
        async with stalled() as (peer, writer):
            buffer = filled(A, MIB)
            op = writer.zc_submit(buffer)
            await soon(op.sent)
            await asyncio.sleep(PAUSE)
            if is_released_with_sent(backend):
                assert_unlocked(buffer)
            else:
                assert not op.released.done()
                assert_locked(buffer)
                with pytest.raises(BufferError):
                    buffer.clear()
            # The error was the caller's alone: the operation went on.
            assert_stream(await peer.take(MIB), [(A, MIB)])
            await soon(op.released)
            assert_unlocked(buffer)

    run(main(), forced_loop_factory)


def test_queued_and_issued_buffers_are_locked_on_every_backend(run, forced_loop_factory) -> None:
    # Fails when: the lock is taken when the request is made instead of at the call.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            issued, queued, member = filled(A, 2 * MIB), filled(B, 1000), filled(C, 1000)
            first = writer.zc_submit(issued)
            assert_locked(issued)
            await asyncio.sleep(PAUSE)
            second = writer.zc_submit(queued)
            third = writer.zc_submit([b"x" * 10, member, memoryview(member)[:0]])
            assert second.state is third.state is State.QUEUED
            for buffer in (issued, queued, member):
                assert_locked(buffer)
            await peer.take(2 * MIB + 2010)
            for op, buffer in ((first, issued), (second, queued), (third, member)):
                await soon(op)
                assert_unlocked(buffer)

    run(main(), forced_loop_factory)


def test_a_buffer_in_two_operations_is_locked_until_both_are_released(
    run, forced_loop_factory
) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            buffer = filled(A, MIB)
            first = writer.zc_submit(buffer)
            await asyncio.sleep(PAUSE)
            second = writer.zc_submit(buffer)
            third = writer.zc_submit(memoryview(buffer)[:100])
            assert third.withdraw() is True
            assert_locked(buffer)
            reading = asyncio.ensure_future(peer.take(MIB + MIB // 4))
            await soon(first)
            assert not second.released.done()
            assert_locked(buffer)
            await reading
            await peer.take(MIB - MIB // 4)
            await soon(second)
            assert_unlocked(buffer)

    run(main(), forced_loop_factory)


def test_a_mapping_cannot_be_closed_while_it_is_pinned(run, forced_loop_factory, backend) -> None:
    # Fails when: the export of the mmap is not held until the release.
    async def main() -> None:
        async with stalled() as (peer, writer):
            mapping = mmap.mmap(-1, MIB)
            mapping[:] = b"A" * MIB
            op = writer.zc_submit(mapping)
            await soon(op.sent)
            await asyncio.sleep(PAUSE)
            if not is_released_with_sent(backend):
                assert not op.released.done()
                with pytest.raises(BufferError):
                    mapping.close()
            assert_stream(await peer.take(MIB), [(A, MIB)])
            await soon(op)
            mapping.close()

    run(main(), forced_loop_factory)


class Traced(bytearray):
    """Tells in which thread it was given up."""

    gone: list[int] = []

    def __del__(self) -> None:
        self.gone.append(threading.get_ident())


def test_the_loop_keeps_a_buffer_that_the_caller_dropped_and_lets_go_in_its_own_thread(
    run, forced_loop_factory, backend
) -> None:
    # Cases 2 and 7. Fails when: the reference goes with the operation object (which the caller
    # dropped too), or is let go from a thread that reaps completions.
    async def main() -> None:
        Traced.gone = []
        async with stalled() as (peer, writer):
            buffer = Traced(filled(A, MIB))
            watch = weakref.ref(buffer)
            op = writer.zc_submit(buffer)
            await soon(op.sent)
            del buffer, op
            gc.collect()
            await asyncio.sleep(PAUSE)
            if not is_released_with_sent(backend):
                assert watch() is not None
                assert Traced.gone == []
            assert_stream(await peer.take(MIB), [(A, MIB)])
            await eventually(lambda: bool(Traced.gone))
            assert Traced.gone == [threading.get_ident()]
            assert watch() is None

    run(main(), forced_loop_factory)


def test_nothing_holds_a_buffer_after_its_release(run, forced_loop_factory) -> None:
    # Case 32. Fails when: the operation, the queue or the slot table keeps the buffer.
    async def main() -> None:
        Traced.gone = []
        async with stalled() as (peer, writer):
            op = writer.zc_submit([Traced(filled(A, 100_000)), Traced(filled(B, 100_000))])
            await soon(op.sent)
            await peer.take(200_000)
            await soon(op)
            gc.collect()
            assert len(Traced.gone) == 2  # `op` itself is still there
            assert op.bytes_sent == 200_000

    run(main(), forced_loop_factory)


# --- what write() promises ------------------------------------------------------------------


def changeable_forms(size: int) -> list[tuple[Any, Any]]:
    """(what is passed to write, what is spoiled afterwards), all of them one value, 1 to 7."""
    whole = max(size // 4, 1)
    ints = numbers(4, whole)
    text = io.BytesIO(bytes([5]) * size)
    cells = filled(6, whole * 4)
    plain, view, closed, nested = (filled(value, size) for value in (1, 2, 3, 7))
    return [
        (plain, plain),
        (memoryview(view), view),
        (memoryview(closed).toreadonly(), closed),  # read-only, but not immutable
        (memoryview(ints), ints),
        (text.getbuffer(), text.getbuffer()),
        (memoryview(cells).cast("I"), cells),
        (memoryview(memoryview(nested))[0:size].toreadonly(), nested),
    ]


WRITE_SIZES = [1, 4 * KIB, 100 * KIB, 8 * MIB]


@pytest.mark.parametrize("behind", [False, True], ids=["idle", "behind others"])
@pytest.mark.parametrize("size", WRITE_SIZES)
def test_what_changes_after_write_returned_is_never_seen(
    run, forced_loop_factory, size, behind
) -> None:
    # Case 1. Fails when: write() queues a bytearray, or a view whose root is not exact bytes, by
    # reference.
    async def main() -> None:
        expected: list[tuple[int, int]] = []
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            if behind:
                writer.write(b"A" * MIB)
                expected.append((A, MIB))
            for data, owner in changeable_forms(size):
                expected.append((memoryview(data).tobytes()[0], memoryview(data).nbytes))
                writer.write(data)
                spoil(owner)
            await asyncio.sleep(PAUSE / 2)
            writer.close()
            set_rcvbuf(peer.peer, MIB)
            assert_stream(await peer.take_all(), expected)

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("size", WRITE_SIZES)
def test_what_changes_after_writelines_returned_is_never_seen(
    run, forced_loop_factory, size
) -> None:
    # Fails when: writelines() takes another way into the queue than write().
    async def main() -> None:
        expected: list[tuple[int, int]] = []
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            forms = changeable_forms(size)
            mixed: list[Any] = []
            for data, _ in forms:
                mixed += [b"B" * 10, data, memoryview(b"xxCCCxx")[2:5], aiozc.frozen(filled(D, 7))]
                expected += [(B, 10), (memoryview(data).tobytes()[0], memoryview(data).nbytes)]
                expected += [(C, 3), (D, 7)]
            writer.writelines(mixed[:8])
            writer.writelines(item for item in mixed[8:])
            for _, owner in forms:
                spoil(owner)
            del mixed
            await asyncio.sleep(PAUSE / 2)
            writer.close()
            set_rcvbuf(peer.peer, MIB)
            assert_stream(await peer.take_all(), expected)

    run(main(), forced_loop_factory)


def test_write_leaves_no_lock_on_what_it_copied(run, forced_loop_factory) -> None:
    # asyncio's own idiom: fill one bytearray, write it, clear it, fill it again.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            expected: list[tuple[int, int]] = []
            buffer = bytearray()
            for value in range(1, 41):
                buffer += bytes([value]) * 30_000
                writer.write(buffer)
                buffer.clear()
                view = memoryview(bytearray(bytes([value + 100]) * 5000))
                writer.write(view)
                view.release()
                expected += [(value, 30_000), (value + 100, 5000)]
            writer.close()
            assert_stream(await peer.take_all(), expected)

    run(main(), forced_loop_factory)


def test_a_view_of_bytes_may_be_released_as_soon_as_it_was_written(
    run, forced_loop_factory
) -> None:
    # As with asyncio's own transport. The bytes are held by reference, but not through this view.
    # Fails when: the buffer is exported from the caller's view instead of from one of our own.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            writer.write(b"A" * MIB)
            for value in (B, C, D):
                with memoryview(bytes([value]) * 50_000) as view:
                    writer.write(view)
            writer.close()
            assert_stream(await peer.take_all(), [(A, MIB), (B, 50_000), (C, 50_000), (D, 50_000)])

    run(main(), forced_loop_factory)


def test_immutable_data_is_written_by_reference(run, forced_loop_factory) -> None:
    # Fails when: bytes, views rooted in bytes, or frozen() are snapshotted. (Case 41 measures it in
    # memory.)
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            writer.write(b"A" * MIB)
            await asyncio.sleep(PAUSE / 2)
            frozen = Traced(filled(B, MIB))
            watch = weakref.ref(frozen)
            writer.write(aiozc.frozen(frozen))
            assert_locked(frozen)
            del frozen
            gc.collect()
            assert watch() is not None, "a copy was made: nobody holds the object"
            blob = b"C" * MIB
            writer.write(blob)
            writer.write(memoryview(blob)[1000:])
            assert sys.getrefcount(blob) >= 2 + 2, "nobody holds the object: a copy was made"
            writer.close()
            assert_stream(await peer.take_all(), [(A, MIB), (B, MIB), (C, 2 * MIB - 1000)])
            await eventually(lambda: watch() is None)
            await eventually(lambda: sys.getrefcount(blob) == 2)

    run(main(), forced_loop_factory)


def test_all_calls_leave_in_call_order(run, forced_loop_factory) -> None:
    # Fails when: any of the calls has a queue of its own, or sends at once past what is queued.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            expected: list[tuple[int, int]] = []

            def plan(value: int, size: int) -> bytearray:
                expected.append((value, size))
                return filled(value, size)

            sends = []
            for turn in range(40):
                base = 1 + turn * 5
                writer.write(plan(base, 1 + turn * 997))
                writer.zc_submit(plan(base + 1, 1 + (turn * 7919) % 90_000))
                writer.writelines([plan(base + 2, 3), plan(base + 3, 40_000 if turn % 3 else 5)])
                sends.append(asyncio.ensure_future(writer.zc_send(plan(base + 4, 20_000))))
                await asyncio.sleep(0)
                if turn % 8 == 0:
                    await asyncio.sleep(0.005)
            writer.write_eof()
            reading = asyncio.ensure_future(peer.take_all(pace=0.0002, step=50_000))
            await soon(asyncio.gather(*sends))
            assert_stream(await reading, expected)

    run(main(), forced_loop_factory)


@pytest.mark.faults
def test_order_and_contract_survive_a_fall_back_in_mid_stream(
    run, forced_loop_factory, backend
) -> None:
    # Fails when: a part that the kernel refused zero-copy is sent out of its turn, sent twice, or
    # its operation is never released.
    async def main() -> None:
        if copies(backend):
            pytest.skip("every send copies: there is nothing to fall back from")
        loop = asyncio.get_running_loop()
        expected = [(1 + turn, 10_000 + turn * 500) for turn in range(100)]
        async with stalled(sndbuf=256 * KIB) as (peer, writer):
            loop.zc_fault("zc_enomem", 3)  # type: ignore[attr-defined]
            try:
                before = sum(stats().fallbacks.values())
                ops = []
                for value, size in expected:
                    ops.append((writer.zc_submit(filled(value, size)), size))
                    if value % 7 == 0:
                        await asyncio.sleep(0.001)
                reading = asyncio.ensure_future(peer.take_all(pace=0.0005))
                for op, size in ops:
                    result = await soon(op)
                    assert (result.nbytes, op.bytes_sent) == (size, size)
                writer.close()
                assert_stream(await reading, expected)
                assert sum(stats().fallbacks.values()) > before
            finally:
                loop.zc_fault("zc_enomem", 0)  # type: ignore[attr-defined]

    run(main(), forced_loop_factory)


def test_a_thousand_and_more_parts_pass_a_full_socket_in_order(run, forced_loop_factory) -> None:
    # Case 6. Fails when: the iovec array or the message header is moved or reused while a request
    # that did not fit into the socket is still with the kernel; or a part goes on at another byte
    # than where it was cut, for which each byte is told from its neighbours.
    async def main() -> None:
        # A receive buffer of ordinary size: parts of odd sizes fill a tiny one so badly that it
        # would hardly open its window again.
        async with stalled(sndbuf=SMALL_SNDBUF, rcvbuf=None) as (peer, writer):
            parts = [random.Random(n).randbytes(1 + (n * 37) % 3000) for n in range(1500)]
            op = writer.zc_submit([bytearray(part) for part in parts])
            await asyncio.sleep(PAUSE)
            assert not op.sent.done()
            again = writer.zc_submit([bytearray(part) for part in parts])
            single = [writer.zc_submit(bytearray(part)) for part in parts]
            gc.collect()
            await asyncio.sleep(PAUSE)
            assert not any(thing.sent.done() for thing in (op, again, single[0], single[-1]))
            whole = b"".join(parts)
            data = await peer.take(3 * len(whole), pace=0.0005, step=60_000)
            for lap in range(3):
                piece = data[lap * len(whole) : (lap + 1) * len(whole)]
                assert piece == whole, next(
                    f"lap {lap}, byte {at}" for at, b in enumerate(piece) if b != whole[at]
                )
            for thing in (op, again, *single):
                await soon(thing)

    run(main(), forced_loop_factory)


def test_multidimensional_and_typed_buffers_are_sent_as_their_bytes(
    run, forced_loop_factory
) -> None:
    # Fails when: a length is counted in items instead of bytes.
    async def main() -> None:
        async with stalled() as (peer, writer):
            typed = numbers(A, 25_000)
            table = memoryview(filled(B, 60_000)).cast("B", shape=[200, 300])
            doubles = array.array("d", [0.0]) * 1000
            first, second, third = (writer.zc_submit(x) for x in (typed, table, [doubles, typed]))
            assert (first.nbytes, second.nbytes, third.nbytes) == (100_000, 60_000, 108_000)
            writer.write(memoryview(typed))
            writer.close()
            data = await peer.take_all()
            assert_stream(data, [(A, 100_000), (B, 60_000), (0, 8000), (A, 200_000)])
            for op in (first, second, third):
                await soon(op)

    run(main(), forced_loop_factory)


# --- the two counters -----------------------------------------------------------------------


def test_pinned_bytes_are_counted_apart_from_unsent_ones(run, forced_loop_factory, backend) -> None:
    # Fails when: bytes stay in the transport's buffer size until their release (drain() would then
    # wait for the peer), or are not counted at all.
    async def main() -> None:
        async with stalled() as (peer, writer):
            transport = writer.transport
            op = writer.zc_submit(filled(A, MIB))
            await soon(op.sent)
            await asyncio.sleep(PAUSE)
            assert transport.get_write_buffer_size() == 0
            assert stats().queued_bytes == 0
            await soon(writer.drain(), 1.0)
            if is_released_with_sent(backend):
                assert stats().pinned_bytes == 0
            else:
                assert not op.released.done()
                assert 0 < stats().pinned_bytes <= MIB
                assert stats().pinned_peak >= stats().pinned_bytes
                assert stats().notifications_outstanding > 0
            await peer.take(MIB)
            await soon(op)
            assert stats().pinned_bytes == 0
            assert stats().notifications_outstanding == 0
            assert stats().operations_live == 0

    run(main(), forced_loop_factory)


def test_unsent_bytes_of_every_kind_are_the_write_buffer_size(run, forced_loop_factory) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            transport = writer.transport
            writer.zc_submit(filled(A, MIB))
            await asyncio.sleep(PAUSE)
            size = transport.get_write_buffer_size()
            assert MIB - 512 * KIB < size <= MIB
            writer.zc_submit([filled(B, 1000), filled(B, 500)])
            assert transport.get_write_buffer_size() == size + 1500
            writer.write(bytearray(700))
            assert transport.get_write_buffer_size() == size + 2200
            writer.writelines([b"x" * 50, bytearray(50)])
            assert transport.get_write_buffer_size() == size + 2300
            drain = asyncio.ensure_future(writer.drain())
            await asyncio.sleep(PAUSE)
            assert not drain.done()
            await peer.take(MIB + 2300)
            await soon(drain)
            await eventually(lambda: transport.get_write_buffer_size() == 0)

    run(main(), forced_loop_factory)


class Recorder(asyncio.Protocol):
    """A protocol that writes down what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lost: list[BaseException | None] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost.append(exc)


@contextlib.asynccontextmanager
async def protocol_pair(protocol: Any, *, sndbuf: int = SMALL_SNDBUF) -> Any:
    with StalledReader() as peer:
        sock = peer.connect(sndbuf=sndbuf)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
        try:
            yield peer, transport
        finally:
            transport.abort()


def test_a_zero_copy_write_drives_pause_and_resume_like_write(
    run, forced_loop_factory, backend
) -> None:
    # Fails when: zc_write() passes the flow control by.
    async def main() -> None:
        protocol = Recorder()
        async with protocol_pair(protocol) as (peer, transport):
            transport.set_write_buffer_limits(high=100_000, low=10_000)
            transport.zc_write(filled(A, 90_000))
            assert protocol.calls == []
            op = transport.zc_write(filled(B, MIB))
            assert protocol.calls == ["pause"]
            await asyncio.sleep(PAUSE)
            assert protocol.calls == ["pause"]
            assert_stream(await peer.take(MIB + 90_000), [(A, 90_000), (B, MIB)])
            await soon(op)
            assert protocol.calls == ["pause", "resume"]
        # Sent but pinned: resumed all the same.
        protocol = Recorder()
        async with protocol_pair(protocol, sndbuf=LARGE_SNDBUF) as (_peer, transport):
            op = transport.zc_write(filled(A, MIB))
            await soon(op.sent)
            await asyncio.sleep(PAUSE)
            assert op.released.done() == is_released_with_sent(backend)
            assert protocol.calls.count("pause") == protocol.calls.count("resume")

    run(main(), forced_loop_factory)


def test_set_protocol_while_paused_hands_the_pause_on(run, forced_loop_factory) -> None:
    # Fails when: the transport remembers "paused" without a look at whom it told.
    async def main() -> None:
        errors = LoopErrors()
        old, new = Recorder(), Recorder()
        async with protocol_pair(old) as (peer, transport):
            transport.zc_write(filled(A, MIB))
            transport.write(b"B" * 1000)
            await asyncio.sleep(PAUSE)
            assert old.calls == ["pause"]
            transport.set_protocol(new)
            await asyncio.sleep(PAUSE / 2)
            assert new.calls == ["pause"]
            assert_stream(await peer.take(MIB + 1000), [(A, MIB), (B, 1000)])
            await eventually(lambda: new.calls == ["pause", "resume"])
            # Whether the old one hears "resume" when it hands over is open; nothing else may be.
            assert old.calls in (["pause"], ["pause", "resume"])
        await eventually(lambda: bool(new.lost))
        assert old.lost == []
        errors.check()

    run(main(), forced_loop_factory)


def test_set_protocol_while_not_paused_pauses_nobody(run, forced_loop_factory) -> None:
    async def main() -> None:
        old, new = Recorder(), Recorder()
        async with protocol_pair(old) as (peer, transport):
            transport.set_protocol(new)
            await asyncio.sleep(PAUSE / 2)
            assert new.calls == []
            transport.zc_write(filled(A, MIB))
            assert (old.calls, new.calls) == ([], ["pause"])
            await peer.take(MIB)
            await eventually(lambda: new.calls == ["pause", "resume"])
            assert old.calls == []

    run(main(), forced_loop_factory)


def test_start_tls_with_writing_paused_resumes_only_what_was_paused(
    run, loop_factory, certificates
) -> None:
    # Case 42. asyncio's SSLProtocol asserts that every resume_writing has its pause_writing.
    server_context, client_context = certificates
    received: list[bytes] = []

    def serve(peer: StalledReader) -> None:
        received.append(peer.read(2 * MIB, pace=0.001))
        with server_context.wrap_socket(peer.peer, server_side=True) as tls:
            tls.settimeout(20)
            data = bytearray()
            while piece := tls.recv(1 << 16):
                data += piece
            received.append(bytes(data))

    async def main() -> None:
        errors = LoopErrors()
        loop = asyncio.get_running_loop()
        protocol = Recorder()
        async with protocol_pair(protocol) as (peer, transport):
            transport.write(b"A" * 2 * MIB)
            assert protocol.calls == ["pause"]
            serving = asyncio.ensure_future(in_thread(lambda: serve(peer)))
            inner = Recorder()
            secure = await soon(
                loop.start_tls(transport, inner, client_context, server_hostname="localhost")
            )
            secure.write(b"B" * MIB)
            secure.close()
            await soon(serving)
            assert_stream(received[0], [(A, 2 * MIB)])
            assert_stream(received[1], [(B, MIB)])
            assert inner.calls.count("pause") == inner.calls.count("resume")
        errors.check()

    run(main(), loop_factory)


def test_zc_drain_waits_for_pins_and_drain_does_not(run, forced_loop_factory, backend) -> None:
    # Fails when: zc_drain() looks at unsent bytes only.
    async def main() -> None:
        async with stalled() as (peer, writer):
            op = writer.zc_submit(filled(A, MIB))
            await soon(op.sent)
            await soon(writer.drain(), 1.0)
            drains = [asyncio.ensure_future(writer.zc_drain()) for _ in range(3)]
            await asyncio.sleep(PAUSE)
            if is_released_with_sent(backend):
                assert all(drain.done() for drain in drains)
            else:
                assert not any(drain.done() for drain in drains)
                drains[0].cancel()
                await asyncio.sleep(PAUSE / 2)
                assert not drains[1].done() and not drains[2].done()
            await peer.take(MIB)
            for drain in drains[1:]:
                await soon(drain)
            await soon(writer.zc_drain())

    run(main(), lambda: forced_loop_factory(zc_low_water=256 * KIB))


def test_zc_drain_waits_for_queued_bytes(run, forced_loop_factory) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            await soon(writer.zc_drain(), 1.0)  # nothing there yet
            writer.zc_submit(filled(A, MIB))
            writer.write(b"B" * 1000)
            drain = asyncio.ensure_future(writer.zc_drain())
            await asyncio.sleep(PAUSE)
            assert not drain.done()
            await peer.take(MIB + 1000)
            await soon(drain)

    run(main(), lambda: forced_loop_factory(zc_low_water=256 * KIB))


def test_zc_drain_ends_when_the_connection_is_lost(run, forced_loop_factory) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            writer.zc_submit(filled(A, MIB))
            drain = asyncio.ensure_future(writer.zc_drain())
            await asyncio.sleep(PAUSE)
            assert not drain.done()
            peer.reset()
            await ended(drain)
            assert isinstance(drain.exception(), OSError)  # as drain() does

    run(main(), lambda: forced_loop_factory(zc_low_water=256 * KIB))


# --- protocols ------------------------------------------------------------------------------


def test_protocols_send_by_zc_write_in_order_with_write(run, forced_loop_factory, backend) -> None:
    async def main() -> None:
        async with protocol_pair(Recorder(), sndbuf=LARGE_SNDBUF) as (peer, transport):
            transport.write(b"A" * 1000)
            op = transport.zc_write([filled(B, 100_000), b"C" * 10, memoryview(b"DDD")])
            transport.writelines([b"E" * 5, bytearray(b"A" * 5)])
            assert op.nbytes == 100_013
            await soon(op.sent)
            await asyncio.sleep(PAUSE)
            assert op.released.done() == is_released_with_sent(backend)
            expected = [(A, 1000), (B, 100_000), (C, 10), (D, 3), (E, 5), (A, 5)]
            assert_stream(await peer.take(101_023), expected)
            assert (await soon(op)).nbytes == 100_013
            assert transport.get_extra_info("zero_copy") is not None

    run(main(), forced_loop_factory)


def test_unix_sockets_keep_the_contract_by_copying(run, forced_loop_factory) -> None:
    # Case 24. Fails when: the kernel's refusal is taken for an error of the connection, or the
    # operation is released before the copy was made.
    async def main() -> None:
        async with stalled(family=socket.AF_UNIX, rcvbuf=None, sndbuf=SMALL_SNDBUF) as (
            peer,
            writer,
        ):
            buffer = filled(A, MIB)
            op = writer.zc_submit(buffer)
            await asyncio.sleep(PAUSE)
            assert not op.sent.done() and not op.released.done()
            assert_locked(buffer)
            writer.write(b"B" * 1000)
            last = writer.zc_submit([filled(C, 1000), filled(D, 5)])
            reading = asyncio.ensure_future(peer.take(MIB + 2005, pace=0.0005))
            result = await soon(op)
            spoil(buffer)
            assert_unlocked(buffer)
            assert (result.nbytes, result.path) == (MIB, "copied")
            assert_stream(await reading, [(A, MIB), (B, 1000), (C, 1000), (D, 5)])
            await soon(last)
            assert stats().pinned_bytes == 0
        async with stalled(family=socket.AF_UNIX, rcvbuf=None) as (peer, writer):
            # Small enough to be accepted whole by a peer that does not read.
            buffer = filled(A, 100 * KIB)
            op = writer.zc_submit(buffer)
            await soon(op)
            spoil(buffer)
            assert_stream(await peer.take(100 * KIB), [(A, 100 * KIB)])

    run(main(), forced_loop_factory)


# --- failures -------------------------------------------------------------------------------


def test_abort_fails_what_is_unsent_and_keeps_pinned_pages(
    run, forced_loop_factory, backend
) -> None:
    # Fails when: a failed operation gives its buffer back although the kernel still reads the part
    # of it that was accepted.
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=512 * KIB) as (peer, writer):
            buffer = filled(A, 4 * MIB)
            first = writer.zc_submit(buffer)
            await asyncio.sleep(PAUSE)
            second = writer.zc_submit(filled(B, 1000))
            assert first.state is State.ISSUED and second.state is State.QUEUED
            assert not first.sent.done() and not second.sent.done()
            writer.transport.abort()
            for op in (first, second):
                assert isinstance(await error_of(op.sent), ConnectionAbortedError)
                assert op.state is State.FAILED
            assert isinstance(await error_of(second.released), ConnectionAbortedError)
            assert second.bytes_sent == 0
            await asyncio.sleep(PAUSE)
            if is_released_with_sent(backend):
                assert first.released.done()
            else:
                assert not first.released.done()
                assert_locked(buffer)
            # No linger: everything that the kernel accepted arrives, then an orderly end.
            data = await peer.take_all()
            assert isinstance(await error_of(first.released), ConnectionAbortedError)
            assert isinstance(await error_of(first), ConnectionAbortedError)
            assert_unlocked(buffer)
            assert 0 < first.bytes_sent < 4 * MIB
            assert_stream(data, [(A, first.bytes_sent)])
        errors.check()

    run(main(), forced_loop_factory)


def test_a_drained_and_aborted_transport_loses_nothing(run, forced_loop_factory, backend) -> None:
    # Case 38. Fails when: abort() closes with linger 0.
    async def main() -> None:
        async with stalled() as (peer, writer):
            writer.write(b"A" * 250_000)
            buffer = filled(B, 250_000)
            op = writer.zc_submit(buffer)
            await soon(writer.drain())
            await soon(op.sent)
            await eventually(lambda: writer.transport.get_write_buffer_size() == 0)
            writer.transport.abort()
            await asyncio.sleep(PAUSE)
            assert op.released.done() == is_released_with_sent(backend)
            data = await peer.take_all()
            assert_stream(data, [(A, 250_000), (B, 250_000)])
            # It was sent before the abort, and the abort took nothing of it back.
            assert (await soon(op)).nbytes == 250_000
            assert_unlocked(buffer)

    run(main(), forced_loop_factory)


def test_zc_reset_ends_the_pins_at_once(run, forced_loop_factory, backend) -> None:
    # Fails when: zc_reset() closes without linger 0 (the pins would last until the peer reads).
    async def main() -> None:
        async with stalled() as (peer, writer):
            sent, unsent = filled(A, MIB), filled(B, 20 * MIB)
            first = writer.zc_submit(sent)
            await soon(first.sent)
            second = writer.zc_submit(unsent)
            await asyncio.sleep(PAUSE)
            assert first.released.done() == is_released_with_sent(backend)
            assert not second.sent.done() and not second.released.done()
            writer.transport.zc_reset()
            # The peer still does not read.
            await ended(waiting(first.released), 2.0)
            assert isinstance(await error_of(second.sent), OSError)
            await ended(waiting(second.released), 2.0)
            assert_unlocked(sent)
            assert_unlocked(unsent)
            await eventually(lambda: stats().operations_live == 0)
            assert stats().pinned_bytes == 0
            data, was_reset = await in_thread(peer.read_until_reset)
            assert was_reset
            assert_prefix(data, [(A, MIB), (B, 20 * MIB)])

    run(main(), forced_loop_factory)


def test_a_peer_reset_fails_each_operation_once_and_frees_every_page(
    run, forced_loop_factory
) -> None:
    # Case 9. Fails when: an error completion is counted as the release although a notification is
    # still to come, or the other way round is never counted.
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            buffers = [filled(1 + index, 300_000) for index in range(6)]
            ops = [writer.zc_submit(buffer) for buffer in buffers]
            waits = [waiting(op.sent) for op in ops] + [waiting(op.released) for op in ops]
            await asyncio.sleep(PAUSE)
            assert not any(wait.done() for wait in waits)
            peer.reset()
            for op, buffer in zip(ops, buffers, strict=True):
                for stage in (op.sent, op.released, op):
                    error = await error_of(stage)
                    assert isinstance(error, ConnectionResetError | BrokenPipeError), error
                assert op.state is State.FAILED
                assert 0 <= op.bytes_sent < op.nbytes
                assert_unlocked(buffer)
            for wait in waits:
                await ended(wait)
                assert isinstance(wait.exception(), OSError)
            await eventually(lambda: stats().operations_live == 0)
            assert stats().notifications_outstanding == 0
            assert stats().pinned_bytes == 0
            assert stats().queued_bytes == 0
            assert writer.transport.get_write_buffer_size() == 0
        errors.check()

    run(main(), forced_loop_factory)


def test_sent_operations_are_released_when_the_peer_resets(
    run, forced_loop_factory, backend
) -> None:
    # `released` is about pages, not about delivery: what was sent whole does not fail afterwards.
    async def main() -> None:
        async with stalled() as (peer, writer):
            buffer = filled(A, MIB)
            op = writer.zc_submit(buffer)
            await soon(op.sent)
            await asyncio.sleep(PAUSE)
            assert op.released.done() == is_released_with_sent(backend)
            peer.reset()
            assert (await soon(op)).nbytes == MIB
            assert op.state is State.RELEASED
            assert_unlocked(buffer)

    run(main(), forced_loop_factory)


def test_the_count_after_a_reset_in_mid_stream_is_exact(run, forced_loop_factory) -> None:
    # Case 15. Fails when: the partial result of the request that the reset ended is dropped.
    async def main() -> None:
        async with stalled(sndbuf=256 * KIB) as (peer, writer):
            sock = writer.get_extra_info("socket")
            ops = [writer.zc_submit(filled(1 + index, 200_001)) for index in range(20)]
            await peer.take(777_777)
            accepted = await accepted_by_kernel(peer, sock)
            assert 777_777 < accepted < 20 * 200_001
            assert not ops[-1].sent.done()
            peer.reset()
            for op in ops:
                await ended(waiting(op))
            assert sum(op.bytes_sent for op in ops) == accepted
            whole = accepted // 200_001
            for index, op in enumerate(ops):
                if index < whole:
                    assert op.bytes_sent == 200_001
                    assert op.state is State.RELEASED
                else:
                    assert op.bytes_sent == (accepted % 200_001 if index == whole else 0)
                    assert op.state is State.FAILED

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("how", ["peer reset", "abort", "zc_reset"])
def test_a_failed_operation_that_nobody_awaited_logs_nothing(
    run, forced_loop_factory, caplog, how
) -> None:
    # Fails when: `sent` and `released` are futures that carry the exception themselves.
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            ops = [writer.zc_submit(filled(A, MIB)) for _ in range(3)]
            looked_at = ops[0].sent, ops[1].released  # touched, never awaited
            await asyncio.sleep(PAUSE)
            assert not ops[0].sent.done()
            if how == "peer reset":
                peer.reset()
            elif how == "abort":
                writer.transport.abort()
                peer.close()
            else:
                writer.transport.zc_reset()
            await eventually(lambda: all(op.released.done() for op in ops))
            assert all(op.state is State.FAILED for op in ops)
            del looked_at
            ops.clear()
            gc.collect()
            await asyncio.sleep(0)
            gc.collect()
        errors.check()

    with caplog.at_level(logging.WARNING):
        run(main(), forced_loop_factory)
        gc.collect()
    noise = [record.getMessage() for record in caplog.records]
    assert not [line for line in noise if "never retrieved" in line or "Exception" in line], noise


@pytest.mark.parametrize("pinned", [False, True], ids=["queued", "pinned"])
def test_a_closed_loop_locks_only_what_the_kernel_still_reads(
    forced_loop_factory, backend, pinned
) -> None:
    # Fails when: loop.close() forgets operations that were never issued (their buffers would stay
    # locked as long as somebody holds the operation), or unlocks those that it had to leak.
    buffer, behind = filled(A, 4 * MIB), filled(B, 1000)

    async def main() -> Any:
        sock = peer.connect(sndbuf=LARGE_SNDBUF if pinned else SMALL_SNDBUF)
        _, writer = await asyncio.open_connection(sock=sock)
        if not pinned:
            writer.write(b"C" * 4 * MIB)  # sent or snapshotted: no part of the buffers is issued
            await asyncio.sleep(PAUSE)
        ops = [writer.zc_submit(buffer), writer.zc_submit(behind)]
        if pinned:
            await soon(ops[0].sent)
        else:
            assert ops[0].state is ops[1].state is State.QUEUED
        return writer, ops

    with StalledReader() as peer:
        loop = functools.partial(forced_loop_factory, zc_close_timeout=0.05)()
        try:
            writer, ops = loop.run_until_complete(main())
            assert not ops[1].released.done() or pinned
            if not pinned:
                assert_locked(buffer)
                peer.reset()  # so that nothing is with the kernel when the loop is closed
                time.sleep(0.05)
            elif not is_released_with_sent(backend):
                assert_locked(buffer)
        finally:
            loop.close()
        if pinned and not is_released_with_sent(backend):
            assert not ops[0].released.done()
            assert_locked(buffer)
        else:
            assert_unlocked(buffer)
            assert_unlocked(behind)
        del writer  # its socket goes with it


# --- TLS ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificates() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return tls_contexts()


def test_a_tls_writer_keeps_the_contract_by_copying(run, forced_loop_factory, certificates) -> None:
    # Fails when: a TLS writer's zc_* pass the encryption by, keep a reference into the caller's
    # buffer after the release, or overtake write().
    server_context, client_context = certificates
    go = threading.Event()

    def client(port: int) -> bytes:
        plain = socket.socket()
        set_rcvbuf(plain, RCVBUF)
        plain.settimeout(20)
        plain.connect(("127.0.0.1", port))
        with client_context.wrap_socket(plain, server_hostname="localhost") as tls:
            assert go.wait(20)
            data = bytearray()
            while piece := tls.recv(1 << 16):
                data += piece
            return bytes(data)

    async def main() -> None:
        errors = LoopErrors()
        finished = asyncio.Event()

        async def handler(_reader: Any, writer: Any) -> None:
            try:
                buffers = [filled(value, MIB) for value in (B, D, E)]
                writer.write(b"A" * 1000)
                send = asyncio.ensure_future(writer.zc_send(buffers[0]))
                await asyncio.sleep(0)
                writer.write(b"C" * 1000)
                op = writer.zc_submit([buffers[1], b"A" * 10])
                assert op.nbytes == MIB + 10
                writer.write(b"B" * 5)
                await asyncio.sleep(PAUSE)
                go.set()
                result = await soon(send)
                spoil(buffers[0])
                assert_unlocked(buffers[0])
                assert (result.nbytes, result.path) == (MIB, "copied")
                assert (await soon(op)).path == "copied"
                spoil(buffers[1])
                last = await soon(writer.zc_send(buffers[2]))
                spoil(buffers[2])
                assert last.nbytes == MIB
                with pytest.raises(TypeError):
                    writer.zc_submit("text")
                with pytest.raises(BufferError):
                    writer.zc_submit(memoryview(bytes(10))[::2])
                await soon(writer.zc_drain())
            finally:
                writer.close()
                go.set()
                finished.set()

        server = await asyncio.start_server(handler, "127.0.0.1", 0, ssl=server_context)
        port = server.sockets[0].getsockname()[1]
        data = await in_thread(lambda: client(port))
        await soon(finished.wait())
        server.close()
        assert_stream(
            data,
            [(A, 1000), (B, MIB), (C, 1000), (D, MIB), (A, 10), (B, 5), (E, MIB)],
        )
        errors.check()

    run(main(), forced_loop_factory)


# --- many connections -----------------------------------------------------------------------


def test_a_stalled_peer_at_the_pin_cap_slows_nobody_else(run, backend) -> None:
    # Case 40. Fails when: a transport over the loop's cap waits for somebody else's release instead
    # of sending by copying.
    cap = 2 * MIB
    factory = functools.partial(
        aiozc.new_event_loop,
        backend=backend,
        adaptive=False,
        zc_threshold=0,
        zc_loop_cap=cap,
    )
    connections, size, count = 30, 100 * KIB, 10

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            stalled_peer, stalled_writer = await stack.enter_async_context(stalled())
            hog = [stalled_writer.zc_submit(filled(1 + i, 256 * KIB)) for i in range(20)]
            for op in hog:
                await soon(op.sent)
            await asyncio.sleep(PAUSE)
            pinned = stats().pinned_bytes
            if is_released_with_sent(backend):
                assert pinned == 0
            else:
                # At the cap (a request may be cut at it, so nearly), and never over it.
                assert cap // 2 <= pinned <= cap
                assert not hog[1].released.done()
            pairs = [await stack.enter_async_context(stalled()) for _ in range(connections)]
            began = time.monotonic()

            async def one(peer: StalledReader, writer: Any, value: int) -> None:
                reading = asyncio.ensure_future(peer.take(size * count))
                buffer = filled(value, size)
                for _ in range(count):
                    await writer.zc_send(buffer)
                assert_stream(await reading, [(value, size * count)])

            await soon(asyncio.gather(*(one(peer, w, 1 + i) for i, (peer, w) in enumerate(pairs))))
            assert time.monotonic() - began < 10.0
            if not is_released_with_sent(backend):
                assert not hog[1].released.done()
                assert stats().pinned_peak <= cap
                assert sum(stats().fallbacks.values()) > 0
            data = await stalled_peer.take(20 * 256 * KIB)
            assert_stream(data, [(1 + i, 256 * KIB) for i in range(20)])
            for op in hog:
                await soon(op)

    run(main(), factory)


def test_run_length_print_shows_holes_and_swaps() -> None:
    # The witness itself.
    assert runs(b"") == []
    assert runs(b"AAB\n\nA") == [(A, 2), (B, 1), (10, 2), (A, 1)]
    assert show(b"AAB") == "65*2 66*1"
    with pytest.raises(AssertionError, match="66\\*2 65\\*1"):
        assert_stream(b"BBA", [(A, 1), (B, 2)])
    with pytest.raises(AssertionError, match="more than were ever sent"):
        assert_prefix(b"AAA", [(A, 2)])
    assert_prefix(b"AAB", [(A, 2), (B, 9)])
