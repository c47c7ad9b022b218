"""The ownership contract at its limits: locked memory, pin caps, resident memory, sizes, counts.

Owns what needs a process of its own for its privileges or its memory, and the counters that must
come back to nothing. Must never raise a limit of this process itself.

A comment "Fails when" names the protection whose removal makes that test fail.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
from typing import Any

import pytest
from support import (
    KIB,
    LARGE_SNDBUF,
    MIB,
    PAUSE,
    WAIT,
    StalledReader,
    assert_stream,
    copies,
    eventually,
    is_sanitized,
    live_operations,
    open_descriptors,
    plain_python,
    soon,
    stalled,
)

import aiozc


def stats() -> Any:
    return asyncio.get_running_loop().zc_stats()  # type: ignore[attr-defined]


# --- locked memory --------------------------------------------------------------------------

UNPRIVILEGED = """
import encodings.idna, json, resource, stringprep  # while this user can still read the library
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
sock = connect()
SO_SNDBUFFORCE = 32
sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 32 << 20)  # more than may be locked
os.setgroups([])
os.setgid(65534)
os.setuid(65534)

async def main():
    _, writer = await asyncio.open_connection(sock=sock)
    ops = []
    for value in range(1, 65):
        ops.append(writer.zc_submit(bytearray(bytes([value])) * (1 << 20)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.3)
    say("stalled")
    for op in ops:
        result = await asyncio.wait_for(op, 30)
        assert (result.nbytes, op.bytes_sent) == (1 << 20, 1 << 20)
    stats = asyncio.get_running_loop().zc_stats()
    say("done " + json.dumps([stats.pinned_peak, stats.fallbacks, stats.operations_live,
                              stats.zc_requests]))
    writer.close()
    await writer.wait_closed()

SETTINGS = json.loads(sys.argv[3])
with asyncio.Runner(loop_factory=lambda: forced(**SETTINGS)) as runner:
    runner.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("caps", ["default caps", "no caps"])
def test_an_unprivileged_sender_is_not_stopped_by_the_memory_lock_limit(backend, caps) -> None:
    # Case 20. Fails when: ENOMEM of a part is an error of the connection, or the part is sent again
    # out of its turn. With the loop's own caps out of the way the kernel's limit is what is hit.
    settings = (
        {} if caps == "default caps" else {"zc_transport_cap": 1 << 40, "zc_loop_cap": 1 << 40}
    )
    with StalledReader() as peer:
        with plain_python(UNPRIVILEGED, peer.port, backend, json.dumps(settings)) as child:
            peer.accept()
            child.expect("stalled")
            data = peer.read(64 * MIB, pace=0.0001)
            pinned_peak, fallbacks, live, zc_requests = json.loads(" ".join(child.expect("done")))
            child.finish()
            assert peer.read_all() == b""
    assert_stream(data, [(value, MIB) for value in range(1, 65)])
    assert live == 0
    if copies(backend):
        assert pinned_peak == 0
        return
    assert zc_requests > 0
    counted = {reason.lower() for reason, count in fallbacks.items() if count}
    if caps == "no caps":
        # MSG_ZEROCOPY says ENOBUFS where the ring says ENOMEM.
        assert ("enomem" if backend == "uring" else "enobufs") in counted, fallbacks
    else:
        assert counted, fallbacks
        assert pinned_peak <= 8 * MIB


# --- caps -----------------------------------------------------------------------------------


def capped(backend: str, **caps: int) -> Any:
    return functools.partial(
        aiozc.new_event_loop, backend=backend, adaptive=False, zc_threshold=0, **caps
    )


async def overfill(cap: int, writer: Any, peer: StalledReader, backend: str) -> None:
    """Sends three times the cap to a stalled peer; all of it is sent, no more than the cap pinned."""
    size, count = 256 * KIB, 3 * cap // (256 * KIB)
    assert 256 * KIB * count < 2 * LARGE_SNDBUF
    ops = []
    for index in range(count):
        ops.append(writer.zc_submit(bytearray(bytes([1 + index])) * size))
        await asyncio.sleep(0)
    for op in ops:
        await soon(op.sent)
    await asyncio.sleep(PAUSE)
    if copies(backend):
        assert stats().pinned_bytes == 0
        assert all(op.released.done() for op in ops)
    else:
        # At the cap (a request may be cut at it, so nearly), and never over it.
        assert cap // 2 <= stats().pinned_bytes <= cap
        assert stats().pinned_peak <= cap
        assert sum(stats().fallbacks.values()) > 0
        assert not ops[1].released.done()
        # What went by copying is free at once, however stalled the peer is.
        assert ops[-1].released.done()
        assert (await soon(ops[-1])).path == "copied"
    assert_stream(await peer.take(size * count), [(1 + i, size) for i in range(count)])
    for op in ops:
        await soon(op)
    assert stats().pinned_bytes == 0


@pytest.mark.parametrize("name", ["zc_transport_cap", "zc_loop_cap"])
def test_over_a_cap_a_transport_sends_by_copying(run, backend, name) -> None:
    # Fails when: the cap is not looked at, or a transport at it waits.
    cap = 2 * MIB

    async def main() -> None:
        async with stalled() as (peer, writer):
            await overfill(cap, writer, peer, backend)

    run(main(), capped(backend, **{name: cap}))


def test_a_transport_s_cap_can_be_set_on_it_alone(run, forced_loop_factory, backend) -> None:
    async def main() -> None:
        async with stalled() as (peer, writer), stalled() as (other_peer, other):
            writer.transport.zc_configure(cap=2 * MIB)
            await overfill(2 * MIB, writer, peer, backend)
            op = other.zc_submit(bytearray(4 * MIB))
            await soon(op.sent)
            await asyncio.sleep(PAUSE)
            if not copies(backend):
                assert stats().pinned_bytes > 3 * MIB
            await other_peer.take(4 * MIB)
            await soon(op)

    run(main(), forced_loop_factory)


def test_one_transport_s_cap_leaves_the_others_alone(run, backend) -> None:
    # Fails when: the transport's cap is compared with the loop's count.
    cap = 2 * MIB

    async def main() -> None:
        async with stalled() as (peer, writer), stalled() as (other_peer, other):
            hog = other.zc_submit(bytearray(b"H") * cap)
            await soon(hog.sent)
            op = writer.zc_submit(bytearray(b"A") * MIB)
            await soon(op.sent)
            await asyncio.sleep(PAUSE)
            assert op.released.done() == copies(backend)
            assert_stream(await peer.take(MIB), [(65, MIB)])
            await soon(op)
            assert_stream(await other_peer.take(cap), [(72, cap)])
            await soon(hog)

    run(main(), capped(backend, zc_transport_cap=cap))


# --- memory ---------------------------------------------------------------------------------

RESIDENT = """
async def main(how):
    blob = b"A" * (512 << 20)
    view = memoryview(blob)
    _, writer = await asyncio.open_connection(sock=connect(SMALL_SNDBUF))
    writer.write(b"A" * 1000)
    await writer.drain()
    await asyncio.sleep(0.1)
    gc.collect()
    before = resident_bytes()
    for start in range(0, len(blob), 1 << 20):
        part = view[start : start + (1 << 20)]
        if how == "write":
            writer.write(part)
        elif how == "writelines":
            writer.writelines([part[:1000], part[1000:]])
        else:
            writer.zc_submit(part)
        if start % (32 << 20) == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0.3)
    size = writer.transport.get_write_buffer_size()
    say(f"grown {resident_bytes() - before} {size}")
    await heard("go")
    writer.transport.abort()
    await asyncio.sleep(0.1)

with asyncio.Runner(
    loop_factory=functools.partial(aiozc.new_event_loop, backend=BACKEND)
) as runner:
    runner.run(main(sys.argv[3]))
"""


@pytest.mark.skipif(is_sanitized(), reason="AddressSanitizer's own memory is resident, too")
@pytest.mark.parametrize("how", ["write", "writelines", "zc_submit"])
def test_slices_of_bytes_cost_no_memory_while_they_wait(backend, how) -> None:
    # Case 41. Fails when: a view rooted in exact bytes is snapshotted.
    with StalledReader() as peer, plain_python(RESIDENT, peer.port, backend, how) as child:
        peer.accept()
        grown, size = map(int, child.expect("grown"))
        assert size > 500 * MIB  # nearly all of it waits
        assert grown <= 1 * MIB, f"{grown} bytes more are resident"
        assert_stream(peer.read(3 * MIB), [(65, 3 * MIB)])
        peer.reset()
        child.tell("go")
        child.finish()


HUGE = """
import mmap
SIZE = (2 << 30) + (9 << 20) + 5
MARKS = [0, (1 << 30) - 1, (2 << 30) - 1, 2 << 30, (2 << 30) + 4096, SIZE - 1]

async def main():
    blob = mmap.mmap(-1, SIZE)  # zeros that nobody has touched take no memory
    for index, mark in enumerate(MARKS):
        blob[mark] = 1 + index
    _, writer = await asyncio.open_connection(sock=connect())
    op = writer.zc_submit(blob)
    assert op.nbytes == SIZE
    say(f"size {SIZE} " + " ".join(map(str, MARKS)))
    result = await asyncio.wait_for(op, 50)
    assert (result.nbytes, op.bytes_sent) == (SIZE, SIZE)
    assert asyncio.get_running_loop().zc_stats().bytes == SIZE
    blob.close()
    writer.close()
    await writer.wait_closed()
    say("done")

with asyncio.Runner(loop_factory=forced) as runner:
    runner.run(main())
"""


@pytest.mark.slow
def test_more_than_two_gigabytes_go_as_one_operation(backend) -> None:
    # Fails when: a length passes through 32 bits, or the split loses its place.
    with StalledReader(rcvbuf=None) as peer, plain_python(HUGE, peer.port, backend) as child:
        peer.accept()
        size, *marks = map(int, child.expect("size"))
        zeros, found, offset = bytes(MIB), {}, 0
        buffer = bytearray(MIB)
        view = memoryview(buffer)
        while offset < size:
            got = peer.peer.recv_into(buffer)
            assert got, f"the stream ended after {offset} of {size} bytes"
            if view[:got] != memoryview(zeros)[:got]:
                found |= {offset + i: buffer[i] for i in range(got) if buffer[i]}
            offset += got
        assert found == {mark: 1 + index for index, mark in enumerate(marks)}
        child.expect("done")
        assert offset == size and peer.read_all() == b""
        child.finish()


# --- counts ---------------------------------------------------------------------------------


def test_ten_thousand_operations_leave_nothing_behind(run, forced_loop_factory) -> None:
    # Fails when: a slot, a pin, a reference or a descriptor is not given back on one of the ways an
    # operation can end: released, withdrawn, cancelled waiters, failed.
    async def main() -> None:
        await asyncio.sleep(0)
        async with stalled(rcvbuf=None) as (peer, writer):
            op = writer.zc_submit(b"first")  # whatever is made lazily is made now
            await peer.take(5)
            await soon(op)
            del op
            descriptors, objects = open_descriptors(), live_operations()
            reading = asyncio.ensure_future(peer.take(9 * 1000 * 1024))
            for _ in range(9):
                ops = [writer.zc_submit(bytearray(1024)) for _ in range(1000)]
                waiter = asyncio.ensure_future(asyncio.wait_for(ops[-1], 10))
                await asyncio.sleep(0)
                waiter.cancel()
                await asyncio.wait([waiter])
                for op in ops:
                    await soon(op)
            await reading
            del ops, op, waiter
        for end in ("withdraw", "abort", "zc_reset", "peer reset"):
            async with stalled(sndbuf=64 * KIB) as (peer, writer):
                ops = [writer.zc_submit(bytearray(64 * KIB)) for _ in range(250)]
                await asyncio.sleep(PAUSE / 2)
                assert not ops[-1].sent.done()
                if end == "withdraw":
                    assert sum(op.withdraw() for op in ops) > 200
                    writer.transport.abort()
                    peer.close()
                elif end == "abort":
                    writer.transport.abort()
                    peer.close()
                elif end == "zc_reset":
                    writer.transport.zc_reset()
                else:
                    peer.reset()
                await eventually(lambda ops=ops: all(op.released.done() for op in ops))
                del ops
        await eventually(lambda: stats().operations_live == 0)
        now = stats()
        assert now.operations >= 10_000
        assert now.pinned_bytes == 0
        assert now.queued_bytes == 0
        assert now.notifications_outstanding == 0
        gc.collect()  # asyncio's cancelled waiters are in cycles with their tracebacks
        await eventually(lambda: live_operations() <= objects)
        # Three descriptors of the first pair (listener, peer, writer) were counted and are closed.
        await eventually(lambda: open_descriptors() == descriptors - 3)
        await eventually(lambda: stats().connections == 0)

    run(main(), forced_loop_factory)


def test_descriptors_of_a_closed_loop_are_given_back(backend) -> None:
    # Fails when: loop.close() leaves the ring, the epoll set or a duplicate for the linger open.
    def once() -> None:
        async def main() -> None:
            async with stalled() as (peer, writer):
                op = writer.zc_submit(bytearray(MIB))
                await soon(op.sent)
                writer.close()
                await peer.take(MIB)
                await soon(op)

        with asyncio.Runner(loop_factory=capped(backend)) as runner:
            runner.run(main())

    once()
    before = open_descriptors()
    for _ in range(5):
        once()
    assert open_descriptors() == before


def test_a_thousand_small_operations_of_one_turn_go_in_a_few_requests(
    run, forced_loop_factory
) -> None:
    # Fails when: every operation becomes a request of its own.
    async def main() -> None:
        async with stalled(rcvbuf=None) as (peer, writer):
            await asyncio.sleep(PAUSE / 2)
            before = stats()
            ops = [writer.zc_submit(bytearray([1 + i % 250]) * KIB) for i in range(1000)]
            for op in ops:
                await soon(op.sent)
            after = stats()
            assert after.operations - before.operations == 1000
            assert after.bytes - before.bytes == 1000 * KIB
            assert 1 <= after.requests - before.requests <= 4
            data = await peer.take(1000 * KIB)
            assert_stream(data, [(1 + i % 250, KIB) for i in range(1000)])
            for op in ops:
                await soon(op, WAIT)

    run(main(), forced_loop_factory)
