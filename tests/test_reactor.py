"""What the reactor costs: kernel entries, gathering, pinned memory on a busy stream.

Owns tests by counters. They say nothing about contents (`test_order.py`) and compare figures of
`loop.zc_stats()` with what the kernel itself reports (SIOCOUTQ) or with a plain bound.
"""

from __future__ import annotations

import asyncio
import collections
import fcntl
import os
import socket
import struct
import termios
import threading
import time

import pytest
from order_support import (
    Reader,
    assert_prefix,
    assert_same_stream,
    connect,
    eventually,
    limited,
    open_stream,
    pattern,
    receive,
    receive_now,
)


def unacknowledged(writer) -> int:
    """Bytes in the socket's send queue: not sent yet, or sent and not acknowledged."""
    fd = writer.get_extra_info("socket").fileno()
    return struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))[0]


def stats():
    return asyncio.get_running_loop().zc_stats()


# --- kernel entries --------------------------------------------------------------------------------


def test_a_turn_with_nothing_to_do_does_not_enter_the_kernel(run, backend):
    if backend != "uring":
        pytest.skip("epoll has to ask the kernel in every turn")

    async def main():
        _, writer, peer = await open_stream()  # with its receive armed
        await asyncio.sleep(0.05)
        before = stats().enters
        for _ in range(1000):
            await asyncio.sleep(0)
        assert stats().enters - before <= 10
        # And the turns were not deaf: data still gets in between them.
        peer.sendall(b"x")
        await eventually(lambda: stats().enters > before)
        writer.close()
        peer.close()

    run(main())


def test_turns_that_never_wait_still_see_what_arrives(run):
    # The completion is only run inside the kernel: a loop that is always busy must look.
    async def main():
        transport, protocol, peer = await connect()
        peer.sendall(b"x")
        deadline = time.monotonic() + 5
        while protocol.data != b"x":
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
        transport.close()
        peer.close()

    run(main())


def test_turns_that_never_wait_still_see_a_notification(run, forced_loop_factory):
    async def main():
        _, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
        content = pattern(0, 300_000)
        operation = writer.zc_submit(content)
        await limited(operation.sent)
        thread = threading.Thread(target=receive_now, args=(peer, len(content)), daemon=True)
        thread.start()
        deadline = time.monotonic() + 5
        while not operation.released.done():
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
        thread.join(5)
        writer.close()
        peer.close()

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("what", ["data", "notifications"])
def test_turns_that_never_wait_still_see_what_overflowed(run, backend, loop_factory, what):
    # What did not fit into the completion queue waits in the kernel, with no task work left to
    # run; notifications do not even ask for a receive to be armed again.
    async def main():
        streams = [await open_stream(sndbuf=1 << 20, rcvbuf=65536) for _ in range(40)]
        content = pattern(0, 300_000)
        if what == "data":
            waited = [asyncio.create_task(reader.readexactly(100)) for reader, _, _ in streams]
            await asyncio.sleep(0.01)
            for _, _, peer in streams:
                peer.sendall(b"x" * 100)
        else:
            operations = [writer.zc_submit(content) for _, writer, _ in streams]
            for operation in operations:
                await limited(operation.sent)
            waited = [operation.released for operation in operations]
            assert not any(one.done() for one in waited)
            for _, _, peer in streams:
                assert receive_now(peer, len(content)) == content
        time.sleep(0.3)  # all of it is ready before the loop looks
        deadline = time.monotonic() + 5
        while not all(one.done() for one in waited):
            assert time.monotonic() < deadline, f"{sum(one.done() for one in waited)} of 40"
            await asyncio.sleep(0)
        if backend == "uring":
            assert stats().cq_overflows > 0
        for _, writer, peer in streams:
            writer.close()
            peer.close()

    small = {"ring_entries": 8, "cq_entries": 8}
    run(main(), lambda: loop_factory(adaptive=False, zc_threshold=0, **small))


@pytest.mark.timing
def test_an_idle_loop_sleeps(run):
    async def main():
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        streams = [await open_stream() for _ in range(20)]
        read, write = os.pipe()
        asyncio.get_running_loop().add_reader(read, print)
        await asyncio.sleep(0.1)
        enters, cpu = stats().enters, time.process_time()
        await asyncio.sleep(1.0)
        assert stats().enters - enters <= 5
        assert time.process_time() - cpu < 0.05
        asyncio.get_running_loop().remove_reader(read)
        os.close(read)
        os.close(write)
        for _, writer, peer in streams:
            writer.close()
            peer.close()
        server.close()

    run(main())


@pytest.mark.timing
def test_a_loop_with_a_stalled_stream_sleeps(run, forced_loop_factory):
    async def main():
        _, writer, peer = await open_stream(sndbuf=65536, rcvbuf=65536)
        operation = writer.zc_submit(pattern(0, 8 << 20))
        writer.write(bytes(1 << 20))
        await asyncio.sleep(0.1)
        enters, cpu = stats().enters, time.process_time()
        await asyncio.sleep(1.0)
        assert not operation.sent.done()
        assert stats().enters - enters <= 5
        assert time.process_time() - cpu < 0.05
        writer.transport.abort()
        peer.close()
        with pytest.raises(OSError):
            await limited(operation.released)

    run(main(), forced_loop_factory)


@pytest.mark.timing
def test_a_paused_transport_with_data_waiting_lets_the_loop_sleep(run):
    async def main():
        transport, _, peer = await connect()
        transport.pause_reading()
        peer.sendall(bytes(50_000))
        await asyncio.sleep(0.1)
        enters, cpu = stats().enters, time.process_time()
        await asyncio.sleep(0.5)
        assert stats().enters - enters <= 5
        assert time.process_time() - cpu < 0.05
        transport.abort()
        peer.close()

    run(main())


def test_a_round_trip_costs_few_kernel_entries(run, backend):
    if backend != "uring":
        pytest.skip("counts entries into the ring")

    async def main():
        class Echo(asyncio.Protocol):
            def connection_made(self, transport):
                self.transport = transport

            def data_received(self, data):
                self.transport.write(data)

        transport, _, peer = await connect(Echo)

        def client():
            for number in range(500):
                peer.sendall(b"%08d" % number)
                assert receive_now(peer, 8) == b"%08d" % number

        before = stats().enters
        await limited(asyncio.to_thread(client))
        assert stats().enters - before <= 3 * 500 + 20
        transport.close()
        peer.close()

    run(main())


# --- gathering -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "zc_submit"])
def test_the_calls_of_one_turn_leave_in_few_requests(run, forced_loop_factory, call):
    async def main():
        _, writer, peer = await open_stream(sndbuf=4 << 20)
        reader = Reader(peer)
        pieces = [pattern(index, 4096) for index in range(200)]
        before = stats()
        for piece in pieces:
            writer.write(piece) if call == "write" else writer.zc_submit(piece)
        await limited(writer.zc_drain())
        await eventually(lambda: writer.transport.get_write_buffer_size() == 0)
        after = stats()
        # A request may leave before the turn ends, once enough is queued, but never one per call.
        assert 1 <= after.requests - before.requests <= len(pieces) // 8
        writer.close()
        assert_same_stream(pieces, await reader.aresult())

    run(main(), forced_loop_factory)


def test_one_request_at_a_time_and_at_most_a_megabyte_is_issued(run, forced_loop_factory):
    # What is queued behind a full socket is locked, not pinned.
    async def main():
        _, writer, peer = await open_stream(sndbuf=65536, rcvbuf=65536)
        operations = [writer.zc_submit(pattern(index, 1 << 20)) for index in range(16)]
        await asyncio.sleep(0.1)
        figures = stats()
        assert not operations[2].sent.done()
        assert 0 < figures.pinned_bytes <= 3 << 20
        assert figures.queued_bytes >= 12 << 20
        assert figures.operations_live == 16
        writer.transport.abort()
        peer.close()
        for operation in operations:
            with pytest.raises(OSError):
                await limited(operation.released)
        figures = stats()
        assert (figures.operations_live, figures.pinned_bytes, figures.queued_bytes) == (0, 0, 0)

    run(main(), forced_loop_factory)


# --- a stalled reader ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4000, 100_000])
def test_a_stalled_reader_lets_later_operations_be_sent_until_the_socket_is_full(
    run, forced_loop_factory, size
):
    # CASES 12: whoever waits for each notification before the next send stops at the first.
    async def main():
        _, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
        filler = pattern(99, 300_000)  # more than the peer's window: nothing behind it is acked
        writer.zc_submit(filler)
        operations, pieces = [], []
        for index in range(2000 if size == 1 else 400):
            pieces.append(pattern(index, size))
            operations.append(writer.zc_submit(pieces[-1]))
            try:
                await asyncio.wait_for(asyncio.shield(wait(operations[-1].sent)), 0.5)
            except TimeoutError:
                break
        sent = sum(operation.sent.done() for operation in operations)
        # A pinned page is charged whole to the send buffer, however little of it is sent.
        assert sent >= 200_000 // max(size, 1000)
        assert [o.sent.done() for o in operations] == [True] * sent + [False] * (
            len(operations) - sent
        )
        if size == 100_000:
            assert sent < len(operations)  # it did get full
            assert unacknowledged(writer) > 200_000
        assert not any(operation.released.done() for operation in operations)
        assert stats().pinned_bytes >= sent * size
        reader = Reader(peer)
        for operation in operations:
            await limited(operation.released)
        writer.close()
        assert_same_stream([filler, *pieces], await reader.aresult())

    async def wait(awaitable):
        await awaitable

    run(main(), forced_loop_factory)


def test_other_connections_go_at_full_rate_beside_a_stalled_one(run, forced_loop_factory):
    async def main():
        _, stalled, stalled_peer = await open_stream(sndbuf=65536, rcvbuf=65536)
        blocked = [stalled.zc_submit(pattern(0, 1 << 20)) for _ in range(64)]
        contents = [pattern(number, 4 << 20) for number in range(8)]
        streams = [await open_stream() for _ in contents]
        readers = [Reader(peer) for _, _, peer in streams]
        began = time.monotonic()

        async def send(writer, content):
            for start in range(0, len(content), 1 << 18):
                await limited(writer.zc_send(content[start : start + (1 << 18)]))
            writer.close()

        await asyncio.gather(
            *(
                send(writer, content)
                for (_, writer, _), content in zip(streams, contents, strict=True)
            )
        )
        assert time.monotonic() - began < 10
        for reader, content in zip(readers, contents, strict=True):
            assert_same_stream(content, await reader.aresult())
        assert not blocked[-1].sent.done()
        stalled.transport.abort()
        stalled_peer.close()

    run(main(), forced_loop_factory)


# --- a saturated stream ------------------------------------------------------------------------------


REQUEST, STACK = 1 << 20, 64 << 10  # max_request and zc_eor_bytes


def acknowledged(writer) -> int:
    """Bytes of the stream that the peer has acknowledged: tcpi_bytes_acked."""
    sock = writer.get_extra_info("socket")
    return struct.unpack_from("Q", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), 120)[
        0
    ]


def check_pinned_memory(run, forced_loop_factory, part: int, seconds: float) -> None:
    # A request pins all of its memory until its end, and that of the stack it shares, is acknowledged. So what
    # may be pinned lies between the beginning of the request that was acknowledged last and the end of the one
    # under way, of which the kernel may have taken all.
    rate = 20e6

    async def main():
        _, writer, peer = await open_stream(rcvbuf=262144)
        reader = Reader(peer, chunk=1 << 16, rate=rate, keep=False)
        stop = time.monotonic() + seconds
        samples: list[tuple[int, int]] = []
        operations = 0

        async def produce():
            nonlocal operations
            content = pattern(0, part)
            ahead: collections.deque = collections.deque()
            while time.monotonic() < stop:
                while ahead and ahead[0].sent.done():
                    ahead.popleft()
                # A queue that never runs empty: that is when notifications starve.
                while len(ahead) * part < 4 << 20:
                    ahead.append(writer.zc_submit(content))
                    operations += 1
                await asyncio.sleep(0.002)

        async def sample():
            while time.monotonic() < stop:
                await asyncio.sleep(0.02)
                acked = acknowledged(writer)
                await asyncio.sleep(0)  # a turn: the loop was told of all that this releases
                samples.append((stats().pinned_bytes, writer.transport._conn.sent_pos - acked))

        await asyncio.gather(produce(), sample())
        figures = stats()
        writer.transport.abort()
        peer.close()
        await eventually(lambda: stats().pinned_bytes == 0, what="the last releases")

        assert reader.count > rate * seconds / 3, "the stream was not busy"
        assert len(samples) > seconds * 10
        pinned, open_bytes = max(samples, key=lambda sample: sample[0] - sample[1])
        print(f"worst sample: {pinned} pinned, {open_bytes} not acknowledged; {figures}")
        assert pinned <= open_bytes + 2 * REQUEST + STACK
        assert max(pinned for pinned, _ in samples) > STACK, "nothing was ever pinned"
        assert figures.notifications > 10, "no notification in a busy stream"

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("part", [4000, 262_144])
def test_pinned_memory_follows_what_is_unacknowledged(run, forced_loop_factory, part):
    # CASES 13: without bounds to stacking, a busy stream pins everything that it ever sent.
    check_pinned_memory(run, forced_loop_factory, part, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1200, 4000, 65536, 262_144, 1 << 20])
def test_pinned_memory_follows_what_is_unacknowledged_for_long(
    run, backend, forced_loop_factory, part
):
    check_pinned_memory(run, forced_loop_factory, part, 10.0)


def test_releases_keep_coming_while_the_stream_is_busy(run, backend, forced_loop_factory):
    # The same seen from a caller: each release within a bounded time of its send.
    async def main():
        _, writer, peer = await open_stream(sndbuf=262144, rcvbuf=262144)
        reader = Reader(peer, chunk=1 << 16, rate=20e6, keep=False)
        waits: list[float] = []

        async def watch(operation):
            await limited(operation.sent)
            sent = time.monotonic()
            await limited(operation.released)
            waits.append(time.monotonic() - sent)

        watching = []
        stop = time.monotonic() + 1.5
        while time.monotonic() < stop:
            for _ in range(20):
                operation = writer.zc_submit(pattern(0, 8000))
                watching.append(asyncio.create_task(watch(operation)))
            await limited(operation.sent)
        released_while_busy = len(waits)
        assert released_while_busy > len(watching) / 2
        for task in watching:
            await limited(task)
        waits.sort()
        assert waits[len(waits) * 95 // 100] < 1.0  # not the worst: machines are stopped at times
        writer.close()
        await reader.aresult()

    run(main(), forced_loop_factory)


def test_the_counters_add_up_after_a_transfer(run, backend, forced_loop_factory):
    async def main():
        before = stats()
        assert before.backend == backend
        _, writer, peer = await open_stream()
        reader = Reader(peer)
        pieces = [pattern(index, 1000 * index) for index in range(1, 51)]
        operations = [writer.zc_submit(piece) for piece in pieces]
        for operation in operations:
            await limited(operation.released)
        after = stats()
        assert after.operations - before.operations == 50
        assert after.bytes - before.bytes == sum(map(len, pieces))  # each byte counted once
        assert (after.operations_live, after.queued_bytes, after.pinned_bytes) == (0, 0, 0)
        assert after.notifications_outstanding == 0
        assert after.queued_peak >= before.queued_peak
        assert after.cq_overflows == 0
        assert after.zc_requests > before.zc_requests
        assert after.notifications - before.notifications == after.zc_requests - before.zc_requests
        writer.close()
        assert_prefix(b"".join(pieces), await reader.aresult())

    run(main(), forced_loop_factory)


def test_operations_that_are_not_read_by_anyone_still_release(run, forced_loop_factory):
    async def main():
        _, writer, peer = await open_stream()
        for index in range(100):
            writer.zc_submit(pattern(index, 5000))
        data = await receive(peer, 500_000)
        assert_same_stream([pattern(index, 5000) for index in range(100)], data)
        await eventually(lambda: stats().operations_live == 0, what="the releases")
        writer.close()
        peer.close()

    run(main(), forced_loop_factory)


# --- receive buffers ---------------------------------------------------------------------------------


def test_the_kernel_is_given_as_many_buffers_as_a_turn_uses(run, backend):
    # Fails when: the number given never grows (every turn refuses most of the connections).
    async def main():
        ends = [await connect() for _ in range(60)]
        refused = []
        for _ in range(30):
            before = stats().enobufs
            for _, _, peer in ends:
                peer.sendall(b"x" * 100)
            wanted = 100 + len(ends[0][1].data)
            await eventually(lambda n=wanted: all(len(p.data) == n for _, p, _ in ends))
            refused.append(stats().enobufs - before)
        assert sum(refused[10:]) == 0, refused
        if backend == "uring":
            assert sum(refused) > 0  # it began with fewer than 60
        for transport, _, peer in ends:
            transport.close()
            peer.close()

    run(main())


def test_more_connections_than_buffers_send_at_once_and_lose_nothing(run):
    async def main():
        ends = [await connect() for _ in range(300)]
        for index, (_, _, peer) in enumerate(ends):
            peer.sendall(pattern(index, 3000))
        await eventually(lambda: all(len(p.data) == 3000 for _, p, _ in ends))
        for index, (transport, protocol, peer) in enumerate(ends):
            assert protocol.data == pattern(index, 3000)
            transport.close()
            peer.close()

    run(main())
