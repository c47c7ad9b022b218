"""broadcast: one locked buffer to many connections, who got it, and what becomes of slow ones.

Owns the tests of aiozc/broadcast.py and of what it uses of the transports: turns, levels, TLS marks. The
peers are plain blocking sockets in threads. A comment "Fails when" names the protection whose
removal makes that test fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import sys
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest
from order_support import assert_same_stream, overwrite, pattern
from support import (
    LARGE_SNDBUF,
    MIB,
    PAUSE,
    SMALL_SNDBUF,
    WAIT,
    LoopErrors,
    StalledReader,
    assert_prefix,
    assert_stream,
    eventually,
    in_thread,
    locked,
    soon,
    stalled,
    tls_contexts,
)

import aiozc
from aiozc import _fast, broadcast

A, B, C, X = b"ABCX"


def level(writer: Any) -> int:
    """Unsent and pinned bytes, as broadcast counts them."""
    return int(aiozc.transports.stream.outstanding(writer.transport._conn))


async def peers(stack: AsyncExitStack, n: int, **kwargs: Any) -> list[tuple[StalledReader, Any]]:
    return [await stack.enter_async_context(stalled(**kwargs)) for _ in range(n)]


class TlsPeer:
    """The blocking server end of a TLS connection: handshakes at once, reads from `go` on.

    At `limit` bytes it stops until `more`.
    """

    def __init__(self, peer: StalledReader, context: ssl.SSLContext) -> None:
        self.go, self.more = threading.Event(), threading.Event()
        self.limit = 1 << 62
        self.data = bytearray()
        self._peer, self._context = peer, context
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            tls = self._context.wrap_socket(self._peer.peer, server_side=True)
            assert self.go.wait(WAIT)
            while piece := tls.recv(1 << 16):
                self.data += piece
                if len(self.data) >= self.limit:
                    assert self.more.wait(WAIT)

    async def all(self) -> bytes:
        self.go.set()
        self.more.set()
        await in_thread(self.thread.join)
        return bytes(self.data)


@contextlib.asynccontextmanager
async def tls_stalled(contexts: Any, sndbuf: int = SMALL_SNDBUF):
    server, client = contexts
    with StalledReader() as peer:
        sock = peer.connect(sndbuf=sndbuf)
        end = TlsPeer(peer, server)
        _, writer = await asyncio.open_connection(
            sock=sock, ssl=client, server_hostname="localhost"
        )
        try:
            yield end, writer
        finally:
            writer.transport.abort()
            end.go.set()
            end.more.set()


@pytest.fixture(scope="module")
def contexts() -> Any:
    return tls_contexts()


# --- who gets it --------------------------------------------------------------------------------


def test_tcp_unix_and_tls_writers_and_a_bare_transport_get_it_alike(
    run, forced_loop_factory, contexts
):
    message = [bytearray(pattern(0, 300_000)), b"", memoryview(pattern(1, 5000))]
    whole = b"".join(message)

    async def main():
        errors = LoopErrors()
        async with AsyncExitStack() as stack:
            tcp = await peers(stack, 3)
            tcp += await peers(stack, 1, family=socket.AF_UNIX)
            tls = await stack.enter_async_context(tls_stalled(contexts))
            tls[0].go.set()
            targets = [w for _, w in tcp] + [tls[1]]
            targets[1] = targets[1].transport
            reads = [asyncio.ensure_future(p.take(len(whole))) for p, _ in tcp]
            result = await soon(broadcast(iter(targets), message))
            assert result == aiozc.BroadcastResult(len(whole), tuple(targets), (), (), {})
            for read in reads:
                assert_same_stream(whole, await soon(read))
            tls[1].close()
            assert_same_stream(whole, await tls[0].all())
            assert not locked(message[0])
        errors.check()

    run(main(), forced_loop_factory)


def test_nobody_and_nothing_are_easy(run):
    async def main():
        assert await broadcast([], b"x") == aiozc.BroadcastResult(1, (), (), (), {})
        async with stalled() as (_peer, writer):
            writer.write(b"A" * MIB * 16)  # slow, but there is nothing to queue
            result = await soon(broadcast([writer], [b"", bytearray()], max_queued=0))
            assert result == aiozc.BroadcastResult(0, (writer,), (), (), {})

    run(main())


def test_the_buffer_is_locked_once_for_all(run, forced_loop_factory, monkeypatch):
    # Fails when: each transport exports it again.
    locks = []

    def parts(obj):
        locks.append(obj)
        return _fast.Parts(obj)

    monkeypatch.setattr(sys.modules["aiozc.broadcast"], "Parts", parts)
    monkeypatch.setattr(aiozc.transports.stream, "Parts", parts)
    buffer = bytearray(b"A") * 1000

    async def main():
        async with AsyncExitStack() as stack:
            every = await peers(stack, 20)
            reads = [p.take(1000) for p, _ in every]
            await asyncio.gather(soon(broadcast([w for _, w in every], buffer)), *reads)

    run(main(), forced_loop_factory)
    assert len(locks) == 1


@pytest.mark.parametrize("sndbuf", [SMALL_SNDBUF, LARGE_SNDBUF])
def test_overwriting_it_after_the_return_changes_nothing_for_any_peer(
    run, forced_loop_factory, sndbuf
):
    # Fails when: broadcast waits for `sent` instead of `released`, or for the first one only.
    content = pattern(3, MIB)

    async def main():
        async with AsyncExitStack() as stack:
            every = await peers(stack, 6, sndbuf=sndbuf)
            buffer = bytearray(content)
            writers = [w for _, w in every]
            task = asyncio.ensure_future(broadcast(writers, buffer))
            await asyncio.sleep(PAUSE)
            *others, last = every
            for peer, _ in others:
                assert_same_stream(content, await peer.take(MIB))
            await asyncio.sleep(PAUSE)
            assert not task.done()
            assert locked(buffer)
            read = asyncio.ensure_future(last[0].take(MIB, step=4096))
            assert (await soon(task)).sent == tuple(writers)
            assert not locked(buffer)
            overwrite(buffer)
            assert_same_stream(content, await soon(read))

    run(main(), forced_loop_factory)


def test_it_stays_in_call_order_with_other_writes_on_the_same_writers(run, forced_loop_factory):
    async def main():
        async with AsyncExitStack() as stack:
            every = await peers(stack, 3, sndbuf=SMALL_SNDBUF)
            writers: list[Any] = [w for _, w in every]
            limit = 64 * MIB
            for w in writers:
                w.write(b"A" * 70_000)
                w.zc_submit(b"B" * 200_000)
            task = asyncio.ensure_future(broadcast(writers, b"C" * MIB, max_queued=limit))
            await asyncio.sleep(0)
            for w in writers:
                w.write(b"A" * 10)
            again = asyncio.ensure_future(broadcast(writers, [b"B" * 7, b"C"], max_queued=limit))
            await asyncio.sleep(0)
            for w in writers:
                w.write(b"X" * 100_000)
                w.close()
            expected = [(A, 70_000), (B, 200_000), (C, MIB), (A, 10), (B, 7), (C, 1), (X, 100_000)]
            for peer, _ in every:
                assert_stream(await peer.take_all(), expected)
            for sent in (await soon(task), await soon(again)):
                assert sent.sent == tuple(writers)

    run(main(), forced_loop_factory)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"buf": "text"}, TypeError, "bytes-like"),
        ({"buf": [b"x", 3]}, TypeError, "bytes-like"),
        ({"buf": memoryview(bytes(10))[::2]}, BufferError, "contiguous"),
        ({"on_slow": "skip"}, ValueError, "'wait', 'drop' or 'abort'"),
        ({"max_queued": -1}, ValueError, "bytes"),
        ({"max_queued": 1.5}, TypeError, "integer"),
        ({"more": [7]}, TypeError, "StreamWriter"),
        ({"more": "same"}, ValueError, "twice"),
        ({"more": "transport"}, ValueError, "twice"),
        ({"more": "datagram"}, RuntimeError, "DatagramTransport"),
        ({"more": "stock"}, RuntimeError, "aiozc"),
        ({"more": "other loop"}, RuntimeError, "another loop"),
    ],
)
def test_bad_input_raises_with_nothing_queued(run, change, error, words):
    # Fails when: the first writers are served before the last one is looked at.
    def elsewhere(factory: Any, box: list[Any]) -> None:
        async def connect() -> None:
            a, box_b = socket.socketpair()
            box.extend([(await asyncio.open_connection(sock=a))[1], box_b])

        box.append(factory())
        box[0].run_until_complete(connect())

    async def main():
        box: list[Any] = []
        async with stalled() as (peer, writer):
            more = change.get("more", [])
            if more == "same":
                more = [writer]
            elif more == "transport":
                more = [writer.transport]
            elif more == "datagram":
                transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                    asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)
                )
                more = [transport]
            elif more in ("stock", "other loop"):
                stock = asyncio.SelectorEventLoop
                factory = stock if more == "stock" else aiozc.new_event_loop
                await asyncio.to_thread(elsewhere, factory, box)
                more = [box[1]]
            buffer = change.get("buf", bytearray(10))
            rest = {k: v for k, v in change.items() if k in ("max_queued", "on_slow")}
            with pytest.raises(error, match=words):
                await broadcast([writer, *more], buffer, **rest)
            if isinstance(buffer, bytearray):
                assert not locked(buffer)
            writer.write(b"end")
            writer.close()
            assert await peer.take_all() == b"end"
            if box:
                box[1].transport.abort()
                await asyncio.to_thread(box[0].run_until_complete, asyncio.sleep(0))
                box[0].close()
                box[2].close()

    run(main())


# --- slow ones ----------------------------------------------------------------------------------


async def slow(stack: AsyncExitStack, fill: int = 600_000) -> tuple[StalledReader, Any]:
    """A writer with `fill` bytes of "A" queued that its peer does not read."""
    [(peer, writer)] = await peers(stack, 1, sndbuf=SMALL_SNDBUF)
    writer.write(b"A" * fill)
    await asyncio.sleep(PAUSE)
    assert level(writer) > fill // 2
    return peer, writer


def test_drop_gives_a_slow_writer_not_a_byte_and_delays_nobody(run, forced_loop_factory):
    async def main():
        async with AsyncExitStack() as stack:
            fast = await peers(stack, 2)
            peer, writer = await slow(stack)
            message = bytearray(b"C") * 100_000
            reads = [asyncio.ensure_future(p.take(100_000)) for p, _ in fast]
            result = await soon(
                broadcast(
                    [fast[0][1], writer, fast[1][1]], message, max_queued=300_000, on_slow="drop"
                )
            )
            assert result.sent == (fast[0][1], fast[1][1])
            assert (result.dropped, result.aborted, result.failed) == ((writer,), (), {})
            assert not locked(message)
            for read in reads:
                assert_stream(await soon(read), [(C, 100_000)])
            writer.close()
            assert_stream(await peer.take_all(), [(A, 600_000)])

    run(main(), forced_loop_factory)


def test_a_writer_is_slow_from_one_byte_over_the_limit_on(run, forced_loop_factory):
    # Fails when: the bytes of a request under way are counted twice, unsent and pinned.
    async def main():
        async with AsyncExitStack() as stack:
            [(peer, writer)] = await peers(stack, 1, sndbuf=SMALL_SNDBUF)
            op = writer.zc_submit(bytearray(b"A") * MIB)
            await asyncio.sleep(PAUSE)
            now = level(writer)
            assert MIB - 300_000 < now <= MIB
            result = await soon(broadcast([writer], b"B" * 9, max_queued=now - 1, on_slow="drop"))
            assert result.dropped == (writer,)
            task = asyncio.ensure_future(
                broadcast([writer], b"C" * 9, max_queued=now, on_slow="drop")
            )
            await asyncio.sleep(0)
            writer.close()
            assert_stream(await peer.take_all(), [(A, MIB), (C, 9)])
            assert (await soon(task)).sent == (writer,)
            await soon(op)

    run(main(), forced_loop_factory)


def test_wait_queues_a_slow_writer_later_and_does_not_delay_the_others(run, forced_loop_factory):
    # Fails when: a later broadcast, or one with a higher limit, overtakes one that waits.
    async def main():
        async with AsyncExitStack() as stack:
            fast, other = await peers(stack, 2)
            peer, writer = await slow(stack)
            message = bytearray(b"B") * 50_000
            writers = [writer, fast[1], other[1]]
            first = asyncio.ensure_future(broadcast(writers, message, max_queued=0))
            await asyncio.sleep(0)
            second = asyncio.ensure_future(broadcast(writers, b"C" * 50_000, max_queued=16 * MIB))
            await asyncio.sleep(0)
            third = await soon(broadcast([writer], b"X", max_queued=16 * MIB, on_slow="drop"))
            assert third.dropped == (writer,)
            for p, _ in (fast, other):
                assert_stream(await p.take(100_000), [(B, 50_000), (C, 50_000)])
            await asyncio.sleep(PAUSE)
            assert not first.done()
            assert not second.done()
            assert locked(message)
            data = asyncio.ensure_future(peer.take(700_000))
            assert (await soon(first)).sent == tuple(writers)
            assert not locked(message)
            assert (await soon(second)).sent == tuple(writers)
            assert_stream(await soon(data), [(A, 600_000), (B, 50_000), (C, 50_000)])

    run(main(), forced_loop_factory)


def test_abort_resets_a_slow_writer_and_ends_its_pins(run, forced_loop_factory):
    # Fails when: the transport's abort() is used, which leaves the pins to the peer.
    async def main():
        async with AsyncExitStack() as stack:
            [fast] = await peers(stack, 1)
            [(peer, writer)] = await peers(stack, 1, sndbuf=LARGE_SNDBUF)
            early = bytearray(b"A") * (2 * MIB)
            op = writer.zc_submit(early)
            await soon(op.sent)
            writer.write(b"A" * (32 * MIB))
            await asyncio.sleep(PAUSE)
            assert locked(early)
            read = asyncio.ensure_future(fast[0].take(1000))
            message = bytearray(b"B") * 1000
            result = await soon(broadcast([writer, fast[1]], message, on_slow="abort"), 5)
            assert (result.aborted, result.sent) == ((writer,), (fast[1],))
            assert writer.transport.is_closing()
            assert_stream(await soon(read), [(B, 1000)])
            await soon(op, 5)
            assert not locked(early)
            assert not locked(message)
            data, was_reset = await in_thread(peer.read_until_reset)
            assert was_reset
            assert set(data) <= {A}

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("on_slow", ["wait", "drop", "abort"])
def test_two_of_forty_writers_are_slow(run, forced_loop_factory, on_slow):
    # Each message has its own content: what a peer lacks or has in excess shows in its stream.
    messages = [bytes([i + 1]) * 20_000 for i in range(25)]

    async def main():
        async with AsyncExitStack() as stack:
            every = await peers(stack, 40, sndbuf=SMALL_SNDBUF)
            lazy, quick = every[:2], every[2:]
            reads = [asyncio.ensure_future(p.take_all()) for p, _ in quick]
            writers: list[Any] = [w for _, w in every]
            tasks = []
            for message in messages:
                buffer = bytearray(message)
                task = asyncio.ensure_future(
                    broadcast(writers, buffer, max_queued=100_000, on_slow=on_slow)
                )
                tasks.append((task, buffer))
                await asyncio.sleep(0)
                await eventually(lambda: all(not level(w) for _, w in quick))
            if on_slow != "abort":
                reads += [asyncio.ensure_future(p.take_all()) for p, _ in lazy]
                await soon(asyncio.wait([t for t, _ in tasks]))
            for _, w in every:
                w.close()
            results = [await soon(t) for t, _ in tasks]
            for _, buffer in tasks:
                overwrite(buffer)
            got = [await soon(r) for r in reads]
            for (_, writer), data in zip(quick + lazy, got, strict=False):
                expected = [m for m, r in zip(messages, results, strict=True) if writer in r.sent]
                assert_same_stream(b"".join(expected), data)
            for _, writer in quick:
                assert all(writer in r.sent for r in results)
            for result in results:
                for _, writer in lazy:
                    if on_slow == "wait":
                        assert writer in result.sent
                    elif on_slow == "drop":
                        assert (writer in result.sent) != (writer in result.dropped)
                assert not (on_slow == "drop" and result.failed)
            if on_slow == "drop":
                assert 1 < sum(len(r.dropped) for r in results) < 2 * len(messages)
            if on_slow == "abort":
                assert sum(len(r.aborted) for r in results) == 2
                # Before: sent, or broken off by the reset. After: closed.
                assert all(w in results[-1].failed for _, w in lazy)

    run(main(), forced_loop_factory)


# --- failures -----------------------------------------------------------------------------------


def test_writers_that_are_closed_closing_or_at_their_end_fail_alone(
    run, forced_loop_factory, contexts
):
    async def main():
        async with AsyncExitStack() as stack:
            (good_peer, good), *bad = await peers(stack, 4)
            closed, closing, ended = (w for _, w in bad)
            tls = (await stack.enter_async_context(tls_stalled(contexts)))[1]
            closed.close()
            await soon(closed.wait_closed())
            closing.write(b"A" * MIB)
            closing.close()
            ended.write_eof()
            tls.transport.abort()
            await asyncio.sleep(PAUSE)
            read = asyncio.ensure_future(good_peer.take(1000))
            message = bytearray(b"B") * 1000
            writers = [closed, closing, good, ended, tls]
            result = await soon(broadcast(writers, message))
            assert result.sent == (good,)
            assert list(result.failed) == [closed, closing, ended, tls]
            assert all(
                isinstance(result.failed[w], ConnectionError) for w in (closed, closing, tls)
            )
            assert "write_eof" in str(result.failed[ended])
            assert not locked(message)
            assert_stream(await soon(read), [(B, 1000)])

    run(main(), forced_loop_factory)


def test_a_reset_in_mid_broadcast_fails_that_writer_alone(run, forced_loop_factory):
    # CASES 9: exactly one failure, and the memory is free afterwards.
    async def main():
        async with AsyncExitStack() as stack:
            every = await peers(stack, 3, sndbuf=SMALL_SNDBUF)
            buffer = bytearray(b"A") * (4 * MIB)
            writers = [w for _, w in every]
            task = asyncio.ensure_future(broadcast(writers, buffer))
            await asyncio.sleep(PAUSE)
            await every[1][0].take(100_000)
            every[1][0].reset()
            for peer, _ in (every[0], every[2]):
                assert_stream(await peer.take(4 * MIB), [(A, 4 * MIB)])
            result = await soon(task)
            assert result.sent == (writers[0], writers[2])
            assert list(result.failed) == [writers[1]]
            error = result.failed[writers[1]]
            assert isinstance(error, OSError)
            assert "bytes)" in str(error)
            assert not locked(buffer)

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("how", ["reset", "close", "abort"])
def test_a_writer_that_is_lost_while_it_is_waited_for_fails(run, forced_loop_factory, how):
    # Fails when: the end of a connection does not tell those that wait for it.
    async def main():
        errors = LoopErrors()
        async with AsyncExitStack() as stack:
            [(fast_peer, fast)] = await peers(stack, 1)
            peer, writer = await slow(stack)
            buffer = bytearray(b"B") * 1000
            read = asyncio.ensure_future(fast_peer.take(1000))
            task = asyncio.ensure_future(broadcast([writer, fast], buffer, max_queued=0))
            await soon(read)
            assert not task.done()
            if how == "reset":
                peer.reset()
            elif how == "close":
                writer.close()
                assert_stream(await peer.take_all(), [(A, 600_000)])
            else:
                writer.transport.abort()
            result = await soon(task)
            assert result.sent == (fast,)
            assert isinstance(result.failed[writer], ConnectionResetError)
            assert not locked(buffer)
        errors.check()

    run(main(), forced_loop_factory)


# --- giving up ----------------------------------------------------------------------------------


def test_a_cancelled_broadcast_cuts_nothing_and_queues_nothing_more(
    run, forced_loop_factory, backend
):
    # Fails when: a writer that was waited for still gets it, the lock goes with the task, or what
    # waited behind the cancelled one is forgotten.
    async def main():
        async with AsyncExitStack() as stack:
            [(fast_peer, fast)] = await peers(stack, 1, sndbuf=SMALL_SNDBUF)
            peer, writer = await slow(stack)
            buffer = bytearray(b"B") * MIB
            task = asyncio.ensure_future(broadcast([fast, writer], buffer, max_queued=0))
            await asyncio.sleep(0)
            behind = asyncio.ensure_future(broadcast([writer], b"C" * 50, max_queued=MIB))
            await asyncio.sleep(PAUSE)
            before = level(writer)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()
            assert locked(buffer)
            assert_stream(await fast_peer.take(MIB), [(B, MIB)])
            await eventually(lambda: not locked(buffer))
            # What stood behind it is below its own limit, and needs no reader for that.
            assert level(writer) == before + 50
            data = asyncio.ensure_future(peer.take(600_050))
            assert (await soon(behind)).sent == (writer,)
            assert_stream(await soon(data), [(A, 600_000), (C, 50)])
            assert level(writer) == 0

    run(main(), forced_loop_factory)


def test_one_that_was_cancelled_before_it_ran_did_nothing(run, forced_loop_factory):
    async def main():
        async with stalled() as (peer, writer):
            buffer = bytearray(10)
            task = asyncio.ensure_future(broadcast([writer], buffer))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not locked(buffer)
            writer.close()
            assert await peer.take_all() == b""

    run(main(), forced_loop_factory)


@pytest.mark.filterwarnings("ignore:.*was closed while the kernel still read:ResourceWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_loop_that_is_closed_in_mid_broadcast_changes_nothing_for_the_peers(forced_loop_factory):
    # CASES 27: what the kernel has goes out as it was, whatever is done to memory afterwards.
    with contextlib.ExitStack() as stack:
        every = [stack.enter_context(StalledReader()) for _ in range(3)]
        socks = [peer.connect(sndbuf=LARGE_SNDBUF) for peer in every]
        blocked = stack.enter_context(StalledReader())
        socks.append(blocked.connect(sndbuf=SMALL_SNDBUF))

        async def main():
            writers: list[Any] = [(await asyncio.open_connection(sock=s))[1] for s in socks]
            writers[-1].write(b"A" * (8 * MIB))
            await asyncio.sleep(PAUSE)
            task = asyncio.ensure_future(broadcast(writers, bytearray(b"B") * MIB))
            await asyncio.sleep(PAUSE)
            assert not task.done()

        loop = forced_loop_factory()
        loop.run_until_complete(main())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        gc.collect()
        trash = [bytearray(b"\xa5") * MIB for _ in range(16)]
        for sock in socks:
            sock.close()
        for peer in every:
            assert_stream(peer.read_all(), [(B, MIB)])
        assert_prefix(blocked.read_until_reset()[0], [(A, 8 * MIB)])
        del trash


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
def test_a_loop_that_is_closed_gives_up_a_message_that_waits(forced_loop_factory):
    # Fails when: the turns of a transport outlive its loop.
    buffer = bytearray(b"B") * 1000
    with StalledReader() as peer, peer.connect(sndbuf=SMALL_SNDBUF) as sock:

        async def main():
            writer: Any = (await asyncio.open_connection(sock=sock))[1]
            writer.write(b"A" * MIB)
            await asyncio.sleep(PAUSE)
            task = asyncio.create_task(broadcast([writer], buffer, max_queued=0))
            await asyncio.sleep(PAUSE)
            assert not task.done()
            return writer, task

        loop = forced_loop_factory()
        loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending!"
        writer, task = loop.run_until_complete(main())
        loop.close()
        del task
        gc.collect()
        assert not locked(buffer)
        del writer
        gc.collect()


# --- TLS ----------------------------------------------------------------------------------------


def test_a_slow_tls_writer_is_dropped_or_waited_for_like_another(
    run, forced_loop_factory, contexts
):
    # Fails when: what TLS holds back above a full stream is not counted.
    async def main():
        async with AsyncExitStack() as stack:
            end, writer = await stack.enter_async_context(tls_stalled(contexts))
            writer.write(b"A" * 600_000)
            writer.write(b"A" * 600_000)  # stays above the stream, which is over its high water
            await asyncio.sleep(PAUSE)
            below = writer.transport._ssl_protocol._transport
            assert below.get_write_buffer_size() < 700_000
            kwargs: Any = {"max_queued": 700_000}
            result = await soon(broadcast([writer], b"B" * 100, on_slow="drop", **kwargs))
            assert result.dropped == (writer,)
            buffer = bytearray(b"C") * 100_000
            task = asyncio.ensure_future(broadcast([writer], buffer, **kwargs))
            await asyncio.sleep(PAUSE)
            assert not task.done()
            end.go.set()
            assert (await soon(task)).sent == (writer,)
            overwrite(buffer)
            # The encrypted bytes may be pinned, too.
            await eventually(lambda: asyncio.get_running_loop().zc_stats().pinned_bytes == 0)
            result = await soon(broadcast([writer], b"X" * 10, on_slow="abort", **kwargs))
            assert result.sent == (writer,)
            writer.close()
            assert_stream(await end.all(), [(A, 1_200_000), (C, 100_000), (X, 10)])

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("way", ["broadcast", "submit"])
def test_a_tls_writer_that_is_closed_twice_harms_nobody(run, forced_loop_factory, contexts, way):
    # Fails when: the second close() of asyncio's TLS, which takes its protocol away, is not known.
    async def main():
        errors = LoopErrors()
        async with AsyncExitStack() as stack:
            end, writer = await stack.enter_async_context(tls_stalled(contexts))
            writer.write(b"A" * (2 * MIB))
            if way == "broadcast":
                task = asyncio.ensure_future(broadcast([writer], b"B" * 100, max_queued=1000))
            else:
                task = asyncio.ensure_future(writer.zc_send(b"B" * MIB))
            await asyncio.sleep(PAUSE)
            writer.transport.close()
            writer.transport.close()
            with pytest.raises(ConnectionResetError):
                writer.zc_submit(b"C")
            result = await soon(broadcast([writer], b"C"))
            assert list(result.failed) == [writer]
            end.go.set()
            done, _ = await asyncio.wait([task], timeout=20)
            assert done, "still waiting"
            task.exception()
            await end.all()
        errors.check()

    run(main(), forced_loop_factory)


def test_a_slow_tls_writer_is_reset(run, forced_loop_factory, contexts):
    async def main():
        errors = LoopErrors()
        async with AsyncExitStack() as stack:
            end, writer = await stack.enter_async_context(tls_stalled(contexts))
            writer.write(b"A" * (2 * MIB))
            await asyncio.sleep(PAUSE)
            result = await soon(broadcast([writer], b"B", on_slow="abort"))
            assert result.aborted == (writer,)
            await asyncio.sleep(PAUSE)
            assert writer.transport.is_closing()
            assert_prefix(await end.all(), [(A, 2 * MIB)])
        errors.check()

    run(main(), forced_loop_factory)


def test_over_tls_sent_waits_for_what_is_held_back_above_a_full_stream(
    run, forced_loop_factory, contexts
):
    # Fails when: only what TLS has not encrypted is waited for, and not what it has and holds.
    async def main():
        async with tls_stalled(contexts) as (end, writer):
            first = writer.zc_submit(b"A" * 600_000)
            second = writer.zc_submit(b"B" * 600_000)
            await asyncio.sleep(PAUSE)
            assert not first.released.done()
            end.limit = 600_000
            end.go.set()
            await soon(first)
            await asyncio.sleep(PAUSE)
            assert not second.sent.done()
            end.more.set()
            await soon(second)

    run(main(), forced_loop_factory)
