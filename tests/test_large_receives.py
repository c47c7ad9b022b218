"""Large receives go straight into what the protocol gets; nothing else about receiving changes.

Owns: the way into that mode and out of it (events.c, azc_recv), and what may happen while a connection
is in it: pauses, the end of the stream, errors, another protocol, another run.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time

import pytest
from order_support import (
    Recorder,
    assert_same_stream,
    connect,
    eventually,
    open_stream,
    pattern,
    reset,
)

import aiozc

LARGE = 32 << 10
ASKED, ASKED_MOST = 66048, 256 << 10  # events.c: RECEIVE, RECEIVE_MOST
PIECES = 16  # more than it takes to be found large; one may come in two halves


@pytest.fixture(params=["tcp", "unix"])
def family(request):
    return request.param


def direct() -> int:
    return asyncio.get_running_loop().zc_stats().direct_receives


class Buffered(asyncio.BufferedProtocol):
    """Takes data in buffers of `room` bytes."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.buffer = bytearray(room)
        self.data = bytearray()
        self.ended = False
        self.lost: list[BaseException | None] = []

    def connection_made(self, transport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]

    def eof_received(self) -> bool:
        self.ended = True
        return False

    def connection_lost(self, exc) -> None:
        self.lost.append(exc)


async def one_by_one(peer: socket.socket, protocol, pieces) -> None:
    """Each is received before the next one is sent."""
    loop = asyncio.get_running_loop()
    for piece in pieces:
        want = len(protocol.data) + len(piece)
        await loop.run_in_executor(None, peer.sendall, piece)
        await eventually(lambda n=want: len(protocol.data) >= n, 10, "data")


async def made_direct(factory=Recorder, family: str = "tcp"):
    transport, protocol, peer = await connect(factory, family)
    before = direct()
    await one_by_one(peer, protocol, [pattern(0, LARGE)] * PIECES)
    assert direct() > before
    return transport, protocol, peer


@pytest.mark.parametrize("factory", [Recorder, Buffered])
def test_large_receives_are_direct_and_small_ones_are_not(run, family, factory):
    async def main():
        transport, protocol, peer = await connect(factory, family)
        small, large = pattern(1, 100), pattern(2, LARGE)
        await one_by_one(peer, protocol, [small] * PIECES)
        assert direct() == 0
        await one_by_one(peer, protocol, [large] * PIECES)
        assert direct() >= 3
        await one_by_one(peer, protocol, [small] * PIECES)
        settled = direct()
        await one_by_one(peer, protocol, [small] * PIECES)
        assert direct() == settled
        assert_same_stream([small * PIECES, large * PIECES, small * 2 * PIECES], protocol.data)
        transport.close()
        peer.close()

    run(main())


@pytest.mark.parametrize("room", [1, 4096, 65536, 1 << 20])
def test_a_buffer_of_any_size_is_filled(run, family, room):
    async def main():
        transport, protocol, peer = await connect(lambda: Buffered(max(room, 16 << 10)), family)
        content = pattern(0, LARGE * PIECES)
        await one_by_one(peer, protocol, [content])
        await one_by_one(peer, protocol, [content] * 4)
        protocol.buffer = bytearray(room)
        last = pattern(1, min(LARGE, room * 1000))
        await one_by_one(peer, protocol, [last])
        assert_same_stream([content * 5, last], protocol.data)
        transport.close()
        peer.close()

    run(main())


def test_messages_of_all_sizes_stay_in_order(run, family):
    async def main():
        transport, protocol, peer = await made_direct(Recorder, family)
        protocol.data.clear()
        choice = random.Random(3)
        content = pattern(0, 24 << 20)

        def send() -> None:
            at = 0
            while at < len(content):
                n = choice.choice([1, 100, 5_000, 9_000, 65_536, 65_537, 300_000])
                peer.sendall(content[at : at + n])
                at += n

        await asyncio.get_running_loop().run_in_executor(None, send)
        await eventually(lambda: len(protocol.data) == len(content), 20, "all data")
        assert_same_stream(content, bytes(protocol.data))
        transport.close()
        peer.close()

    run(main())


def test_what_was_announced_twice_is_not_received_out_of_turn(backend):
    """A large write enters the kernel in the middle of a turn, and what waits is announced once more. The
    second announcement finds the mode left, and an event behind it has what came first."""

    class Then(Recorder):
        then = None

        def data_received(self, data) -> None:
            super().data_received(data)
            if self.then is not None:
                then, self.then = self.then, None
                then()

    async def main():
        loop = asyncio.get_running_loop()
        transport, protocol, peer = await made_direct(Then)
        small = [pattern(i, 100) for i in range(6)]
        await one_by_one(peer, protocol, small[:3])  # one more ends the mode

        def announced() -> None:
            peer.send(small[3])
            loop.call_soon(transport.write, bytes(300_000))

        def ended() -> None:
            peer.send(small[4])
            loop.call_soon(peer.send, small[5])

        protocol.then = ended
        loop.call_soon(announced)
        have = PIECES * LARGE
        await eventually(lambda: len(protocol.data) == have + 600, 10, "all data")
        assert_same_stream(small, bytes(protocol.data[have:]))
        transport.abort()
        peer.close()

    aiozc.run(main(), backend=backend, zc_write="always", zc_threshold=0, adaptive=False)


@pytest.mark.parametrize("factory", [Recorder, Buffered])
def test_nothing_comes_while_reading_is_paused(run, family, factory):
    async def main():
        transport, protocol, peer = await made_direct(factory, family)
        have = len(protocol.data)
        transport.pause_reading()
        peer.sendall(pattern(1, LARGE))
        await asyncio.sleep(0.05)
        assert len(protocol.data) == have
        transport.resume_reading()
        await eventually(lambda: len(protocol.data) == have + LARGE, 10, "the rest")
        # By another callback of the same batch, and taken back before the turn ends.
        transport.pause_reading()
        transport.resume_reading()
        await one_by_one(peer, protocol, [pattern(2, LARGE)])
        assert bytes(protocol.data[-LARGE:]) == pattern(2, LARGE)
        transport.close()
        peer.close()

    run(main())


def test_who_pauses_in_data_received_gets_nothing_more(run, family):
    class Pausing(Recorder):
        armed = False

        def data_received(self, data) -> None:
            super().data_received(data)
            if self.armed:
                self.transport.pause_reading()

    async def main():
        transport, protocol, peer = await made_direct(Pausing, family)
        have = len(protocol.data)
        protocol.armed = True
        content = pattern(1, 1 << 20)
        thread = threading.Thread(target=peer.sendall, args=(content,), daemon=True)
        thread.start()
        while len(protocol.data) < have + len(content):
            before, calls = len(protocol.data), len(protocol.calls)
            await eventually(lambda n=before: len(protocol.data) > n, 10, "data")
            await asyncio.sleep(0)
            assert len(protocol.calls) == calls + 1
            transport.resume_reading()
        thread.join(5)
        assert bytes(protocol.data[have:]) == content
        transport.close()
        peer.close()

    run(main())


class Sizes(Recorder):
    """Slow, so that more waits than was asked for; counts what one turn of the loop brings."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.turn = self.most = 0

    def data_received(self, data) -> None:
        super().data_received(data)
        self.sizes.append(len(data))
        self.turn += len(data)
        self.most = max(self.most, self.turn)
        time.sleep(0.002)

    def next_turn(self) -> None:
        self.turn = 0
        asyncio.get_running_loop().call_soon(self.next_turn)


async def flood(transport, protocol, peer) -> list[int]:
    """The sizes in which 4 MiB are received, of which some wait before the first."""
    have = len(protocol.data)
    content = pattern(7, 4 << 20)
    protocol.sizes.clear()
    transport.pause_reading()
    thread = threading.Thread(target=peer.sendall, args=(content,), daemon=True)
    thread.start()
    await asyncio.sleep(0.2)
    transport.resume_reading()
    await eventually(lambda: len(protocol.data) >= have + len(content), 20, "all data")
    thread.join(5)
    assert_same_stream(content, bytes(protocol.data[have:]))
    return protocol.sizes


def test_who_has_more_waiting_is_asked_for_more_until_it_has_not(run, family):
    async def main():
        transport, protocol, peer = await made_direct(Sizes, family)
        first = await flood(transport, protocol, peer)
        assert ASKED in first
        assert ASKED < max(first) <= ASKED_MOST
        again = await flood(transport, protocol, peer)
        assert again[0] > ASKED
        await one_by_one(peer, protocol, [pattern(0, LARGE)] * PIECES)
        after = await flood(transport, protocol, peer)
        assert after[0] == ASKED, "it still asks for as much"
        assert max(after) > ASKED
        transport.close()
        peer.close()

    run(main())


def test_one_connection_does_not_keep_the_turn(run):
    async def main():
        transport, protocol, peer = await made_direct(Sizes)
        protocol.next_turn()
        for _ in range(4):
            await flood(transport, protocol, peer)
        # Two visits may come between two runs of a callback: one behind it, one before the next.
        assert ASKED < protocol.most <= 2 * (ASKED + ASKED_MOST)
        transport.close()
        peer.close()

    run(main())


def test_who_was_paused_before_it_could_receive_is_told_nothing(run, family):
    # Fails when: that there is nothing to do counts as the end of the stream.
    async def main():
        transport, protocol, peer = await made_direct(Recorder, family)
        for number in range(50):
            have = len(protocol.data)
            peer.sendall(pattern(number, LARGE))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            transport.pause_reading()
            await asyncio.sleep(0.002)
            transport.resume_reading()
            await eventually(lambda n=have + LARGE: len(protocol.data) >= n, 10, "data")
        assert protocol.calls.count("eof_received") == 0
        transport.close()
        peer.close()

    run(main())


@pytest.mark.parametrize("factory", [Recorder, Buffered])
def test_the_end_of_the_stream_is_told(run, family, factory):
    async def main():
        _, protocol, peer = await made_direct(factory, family)
        have = len(protocol.data)
        peer.sendall(pattern(1, LARGE))
        peer.close()
        await eventually(lambda: protocol.lost, 10, "connection_lost")
        assert protocol.lost == [None]
        assert bytes(protocol.data[have:]) == pattern(1, LARGE)

    run(main())


def test_a_half_closed_peer_still_gets_its_answer(run, family):
    async def main():
        transport, protocol, peer = await made_direct(Recorder, family)
        protocol.keep_open = True
        peer.shutdown(socket.SHUT_WR)
        await eventually(lambda: "eof_received" in protocol.calls, 10, "eof_received")
        transport.write(b"x" * 100_000)
        transport.close()
        got = bytearray()
        loop = asyncio.get_running_loop()
        while piece := await loop.run_in_executor(None, peer.recv, 65536):
            got += piece
        assert bytes(got) == b"x" * 100_000
        assert protocol.calls.count("eof_received") == 1
        peer.close()

    run(main())


@pytest.mark.parametrize("factory", [Recorder, Buffered])
def test_a_reset_is_told(run, factory):
    async def main():
        _, protocol, peer = await made_direct(factory)
        reset(peer)
        await eventually(lambda: protocol.lost, 10, "connection_lost")
        assert isinstance(protocol.lost[0], ConnectionResetError)

    run(main())


def test_urgent_data_does_not_stop_the_stream(run):
    """What is behind the mark of urgent data is not announced another time by everything."""

    async def main():
        transport, protocol, peer = await made_direct()
        have = len(protocol.data)
        for _ in range(20):
            peer.send(pattern(1, LARGE))
            peer.send(b"!", socket.MSG_OOB)
            peer.send(pattern(2, LARGE))
        await eventually(lambda: len(protocol.data) >= have + 40 * LARGE, 10, "all data")
        transport.close()
        peer.close()

    run(main())


def test_another_protocol_takes_over(run, family):
    async def main():
        transport, first, peer = await made_direct(Recorder, family)
        for second in (Buffered(), Recorder(), Buffered(5000)):
            have = len(first.data)
            transport.set_protocol(second)
            await one_by_one(peer, second, [pattern(1, LARGE)] * PIECES)
            assert bytes(second.data) == pattern(1, LARGE) * PIECES
            assert len(first.data) == have
        transport.close()
        peer.close()

    run(main())


def test_read_into_between_large_receives(run, family):
    async def main():
        reader, writer, peer = await open_stream(family)
        for _ in range(PIECES):
            peer.sendall(pattern(1, LARGE))
            assert await reader.readexactly(LARGE) == pattern(1, LARGE)
        assert direct() > 0
        content = pattern(0, 8 << 20)
        thread = threading.Thread(target=peer.sendall, args=(content,), daemon=True)
        thread.start()
        got = bytearray()
        while len(got) < len(content):
            got += await reader.readexactly(512 << 10)
            target = bytearray(512 << 10)
            await aiozc.read_into(reader, target)
            got += target
        thread.join(5)
        assert_same_stream(content, bytes(got))
        writer.close()
        peer.close()

    run(main())


def test_read_into_is_direct_and_takes_no_byte_beyond_its_buffer(run, family):
    async def main():
        reader, writer, peer = await open_stream(family)
        content = pattern(0, 4 << 20)

        def send() -> None:
            peer.sendall(content)
            peer.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        got = bytearray()
        n = 1
        while n:
            target = bytearray(100_000)  # the last one ends with the stream
            n = await aiozc.read_into(reader, target)
            got += target[:n]
        thread.join(5)
        assert direct() > 10
        assert_same_stream(content, bytes(got))
        assert await reader.read(1) == b""
        writer.close()
        peer.close()

    run(main())


def test_a_cancelled_read_into_gives_back_what_was_received_directly(run, family):
    async def main():
        reader, writer, peer = await open_stream(family)
        for _ in range(PIECES):
            peer.sendall(pattern(1, LARGE))
            assert await reader.readexactly(LARGE) == pattern(1, LARGE)
        before = direct()
        target = bytearray(10 * LARGE)
        reading = asyncio.create_task(aiozc.read_into(reader, target))
        await asyncio.sleep(0)
        peer.sendall(pattern(2, LARGE))
        await eventually(lambda: direct() > before and target[LARGE - 1], 10, "the data")
        reading.cancel()
        peer.sendall(pattern(3, LARGE))
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await reader.readexactly(2 * LARGE) == pattern(2, LARGE) + pattern(3, LARGE)
        writer.close()
        peer.close()

    run(main())


def test_get_buffer_may_pause_and_close(run, family):
    class Odd(Buffered):
        then = None

        def get_buffer(self, sizehint: int) -> bytearray:
            if self.then is not None:
                self.then()
                self.then = None
            return self.buffer

    async def main():
        transport, protocol, peer = await made_direct(Odd, family)
        have = len(protocol.data)
        protocol.then = transport.pause_reading
        peer.sendall(pattern(1, LARGE))
        await asyncio.sleep(0.05)
        assert len(protocol.data) == have
        transport.resume_reading()
        await eventually(lambda: len(protocol.data) == have + LARGE, 10, "the rest")
        protocol.then = transport.abort
        peer.sendall(pattern(1, LARGE))
        await eventually(lambda: protocol.lost, 10, "connection_lost")
        assert len(protocol.data) == have + LARGE
        peer.close()

    run(main())


@pytest.mark.parametrize("factory", [Recorder, Buffered])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_exception_of_the_protocol(loop_factory, factory, error):
    """ValueError ends the transport; SystemExit ends the run, and the next one loses nothing."""
    runner = asyncio.Runner(loop_factory=loop_factory)
    told: list[str] = []

    class Raising(factory):
        armed = False

        def raise_once(self) -> None:
            if self.armed:
                self.armed = False
                raise error("on purpose")

        def data_received(self, data) -> None:
            super().data_received(data)
            self.raise_once()

        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            self.raise_once()

    async def first():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(context["message"]))
        return await made_direct(Raising)

    async def second(protocol, have):
        if error is ValueError:
            await eventually(lambda: protocol.lost, 10, "connection_lost")
            assert isinstance(protocol.lost[0], ValueError)
            assert len(told) == 1
        else:
            await eventually(lambda: len(protocol.data) == have + LARGE, 10, "the data")
            assert not protocol.lost

    with runner:
        transport, protocol, peer = runner.run(first())
        have = LARGE * PIECES
        protocol.armed = True
        peer.sendall(pattern(1, LARGE))
        if error is SystemExit:

            async def waits():
                await asyncio.sleep(10)

            with pytest.raises(SystemExit):
                runner.run(waits())
        runner.run(second(protocol, have))
        if error is SystemExit:
            runner.run(one_by_one(peer, protocol, [pattern(2, LARGE)] * PIECES))
        transport.abort()
        peer.close()


def test_the_next_run_is_in_another_thread(loop_factory):
    loop = loop_factory()
    transport, protocol, peer = loop.run_until_complete(made_direct())
    failed: list[BaseException] = []

    def go_on() -> None:
        try:
            loop.run_until_complete(one_by_one(peer, protocol, [pattern(1, LARGE)] * PIECES))
        except BaseException as exc:
            failed.append(exc)

    peer.sendall(pattern(2, LARGE))  # nobody runs it
    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join(20)
    assert not failed
    assert_same_stream(
        [pattern(0, LARGE) * PIECES, pattern(2, LARGE), pattern(1, LARGE) * PIECES], protocol.data
    )
    transport.close()
    peer.close()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
