"""The stream transport keeps asyncio's behaviour, on TCP and on Unix sockets.

Owns parity of one connection: reading, writing, flow control, half-close, close, errors. All of
it holds on asyncio's own selector loop too, except what is marked as ours. The peer is a blocking
socket in a thread or in the executor.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import contextvars
import logging
import random
import socket
import tempfile
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
from order_support import (
    OVERWRITTEN,
    Reader,
    Recorder,
    assert_prefix,
    assert_same_stream,
    collect,
    connect,
    connected_pair,
    eventually,
    limited,
    open_stream,
    overwrite,
    pattern,
    receive,
    receive_now,
    reset,
)
from support import tls_contexts

import aiozc


@pytest.fixture(params=["tcp", "unix"])
def family(request):
    return request.param


async def lost(protocol, timeout: float = 10.0):
    await eventually(lambda: protocol.lost, timeout, "connection_lost")
    await asyncio.sleep(0.005)  # a second call would show
    assert len(protocol.lost) == 1, "connection_lost was called more than once"
    return protocol.lost[0]


def send_in_thread(peer, data: bytes) -> threading.Thread:
    def target():
        with contextlib.suppress(OSError):
            peer.sendall(data)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


# --- reading -------------------------------------------------------------------------------------


def test_the_calls_of_a_protocol_come_in_asyncio_order(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family)
        assert protocol.calls == ["connection_made"]
        assert protocol.transport is transport
        peer.sendall(b"hello")
        await eventually(lambda: protocol.data == b"hello")
        peer.shutdown(socket.SHUT_WR)
        assert await lost(protocol) is None
        assert protocol.calls == [
            "connection_made",
            "data_received",
            "eof_received",
            "connection_lost",
        ]
        assert receive_now(peer, 1) == b""
        peer.close()

    run(main())


def test_received_data_is_bytes_that_stay_as_they_are(run, family):
    # A receive buffer that is reused by the kernel must not show through.
    class Keeper(Recorder):
        def __init__(self):
            super().__init__()
            self.kept = []

        def data_received(self, data):
            assert type(data) is bytes
            self.kept.append(data)

    async def main():
        transport, protocol, peer = await connect(Keeper, family)
        content = pattern(0, 8 << 20)
        thread = send_in_thread(peer, content)
        await eventually(lambda: sum(map(len, protocol.kept)) == len(content), 20)
        thread.join(5)
        assert_same_stream(content, b"".join(protocol.kept))
        transport.close()
        peer.close()
        await lost(protocol)

    run(main())


def test_sixty_four_megabytes_arrive_whole_through_random_pauses_and_none_while_paused(run, family):
    class Pausing(Recorder):
        paused = False
        pauses = 0

        def __init__(self):
            super().__init__()
            self.random = random.Random(1)
            self.while_paused = 0

        def pause(self):
            self.paused = True
            self.pauses += 1
            self.transport.pause_reading()
            assert not self.transport.is_reading()

        def resume(self):
            if self.paused:
                self.paused = False
                self.transport.resume_reading()
                assert self.transport.is_reading()

        def data_received(self, data):
            self.while_paused += self.paused
            self.data += data
            if self.random.random() < 0.3:
                self.pause()
                delay = self.random.choice([0, 0, 0, 0.0005, 0.003])
                loop = asyncio.get_running_loop()
                if delay:
                    loop.call_later(delay, self.resume)
                elif self.random.random() < 0.5:
                    loop.call_soon(self.resume)
                else:
                    self.resume()

    async def main():
        transport, protocol, peer = await connect(Pausing, family)
        content = pattern(0, 64 << 20)
        thread = send_in_thread(peer, content)
        outside = random.Random(2)
        while len(protocol.data) < len(content):  # and pauses from outside a callback
            before = len(protocol.data)
            if not protocol.paused:
                protocol.pause()
                count = len(protocol.data)
                await asyncio.sleep(outside.choice([0, 0, 0.001, 0.005]))
                assert len(protocol.data) == count
                protocol.resume()
            await asyncio.sleep(outside.choice([0, 0.001]))
            if len(protocol.data) == before:
                await eventually(lambda b=before: len(protocol.data) > b, 10, "more data")
        thread.join(5)
        assert protocol.while_paused == 0
        assert protocol.pauses > 20
        assert_same_stream(content, bytes(protocol.data))
        transport.close()
        assert await lost(protocol) is None
        peer.close()

    run(main())


def test_data_and_eof_that_arrive_while_paused_come_after_the_resume(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family)
        peer.sendall(b"first")
        await eventually(lambda: protocol.data == b"first")
        transport.pause_reading()
        peer.sendall(b" second")
        peer.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.1)
        assert protocol.data == b"first"
        assert "eof_received" not in protocol.calls
        transport.resume_reading()
        assert await lost(protocol) is None
        assert protocol.data == b"first second"
        peer.close()

    run(main())


def test_a_pause_in_data_received_holds_back_an_eof_that_came_with_the_data(run, family):
    class Pausing(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()

    async def main():
        transport, protocol, peer = await connect(Pausing, family)
        await asyncio.sleep(0.01)
        peer.sendall(b"data")
        peer.shutdown(socket.SHUT_WR)
        time.sleep(0.05)  # blocks the loop: data and end of file are read in one turn
        await eventually(lambda: protocol.data == b"data")
        await asyncio.sleep(0.05)
        assert protocol.calls == ["connection_made", "data_received"]
        transport.resume_reading()
        assert await lost(protocol) is None
        assert protocol.calls[2:] == ["eof_received", "connection_lost"]
        peer.close()

    run(main())


def test_pausing_and_resuming_twice_is_harmless(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family)
        assert transport.is_reading()
        transport.resume_reading()
        transport.pause_reading()
        transport.pause_reading()
        assert not transport.is_reading()
        peer.sendall(b"data")
        await asyncio.sleep(0.02)
        assert protocol.data == b""
        transport.resume_reading()
        transport.resume_reading()
        assert transport.is_reading()
        await eventually(lambda: protocol.data == b"data")
        for _ in range(100):  # faster than any request can be cancelled
            transport.pause_reading()
            transport.resume_reading()
        peer.sendall(b" more")
        await eventually(lambda: protocol.data == b"data more")
        transport.close()
        assert not transport.is_reading()
        transport.pause_reading()
        transport.resume_reading()
        await lost(protocol)
        peer.close()

    run(main())


# Fails when: resume_reading() starts the receive again before what is held was delivered: some 40 MiB are
# held at the end then, for each pause finds more arrived than the reader took.
def test_a_reader_slower_than_its_peer_is_not_given_more_than_it_takes(run, family):
    async def main():
        ours, peer = connected_pair(family)
        reader, writer = await asyncio.open_connection(sock=ours)
        thread = send_in_thread(peer, bytes(64 << 20))
        for _ in range(100):
            await reader.readexactly(64 << 10)
            await asyncio.sleep(0.005)
        held = sum(map(len, writer.transport._held or ()))  # within one turn's receives of it
        assert held < 8 << 20, f"{held} bytes are held for a reader that took {100 * (64 << 10)}"
        writer.transport.abort()
        await asyncio.sleep(0.05)  # the peer's thread sees it
        peer.close()
        thread.join(5)

    run(main())


def test_pausing_in_connection_made_keeps_the_first_data_back(run, family):
    class Paused(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()

    async def main():
        ours, peer = connected_pair(family)
        peer.sendall(b"early")
        transport, protocol = await asyncio.get_running_loop().create_connection(Paused, sock=ours)
        await asyncio.sleep(0.05)
        assert protocol.data == b""
        transport.resume_reading()
        await eventually(lambda: protocol.data == b"early")
        transport.close()
        await lost(protocol)
        peer.close()

    run(main())


def test_closing_from_data_received_delivers_nothing_more(run, family):
    class Closer(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.close()

    async def main():
        _, protocol, peer = await connect(Closer, family)
        thread = send_in_thread(peer, bytes(4 << 20))
        await lost(protocol)
        await asyncio.sleep(0.05)
        assert protocol.calls.count("data_received") == 1
        assert protocol.calls[-1] == "connection_lost"
        peer.close()
        thread.join(5)

    run(main())


def test_a_protocol_is_exchanged_in_mid_stream_without_losing_a_byte(run, family):
    class Switching(Recorder):
        def __init__(self, log, rest):
            super().__init__()
            self.log = log
            self.rest = rest

        def data_received(self, data):
            self.log.append((len(self.rest), bytes(data)))
            if self.rest:
                following = Switching(self.log, self.rest[1:])
                following.transport = self.transport
                self.transport.set_protocol(following)
                assert self.transport.get_protocol() is following

    async def main():
        log = []
        transport, _, peer = await connect(lambda: Switching(log, [0] * 20), family)
        content = pattern(0, 16 << 20)
        thread = send_in_thread(peer, content)
        await eventually(lambda: sum(len(data) for _, data in log) == len(content), 20)
        thread.join(5)
        assert_same_stream(content, b"".join(data for _, data in log))
        assert [rest for rest, _ in log[:21]] == list(range(20, -1, -1))
        transport.abort()
        peer.close()

    run(main())


class SmallBuffers(asyncio.BufferedProtocol):
    """Offers buffers of 1 to 4000 bytes, and the same memory again and again."""

    def __init__(self) -> None:
        self.memory = bytearray(4000)
        self.random = random.Random(3)
        self.data = bytearray()
        self.offered = 0
        self.lost: list[BaseException | None] = []
        self.eof = 0
        self.hints: list[int] = []

    def connection_made(self, transport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint):
        self.hints.append(sizehint)
        self.offered = self.random.choice([1, 2, 7, 100, 4000])
        self.memory[:] = bytes([OVERWRITTEN]) * 4000
        return memoryview(self.memory)[: self.offered]

    def buffer_updated(self, count) -> None:
        assert 0 < count <= self.offered
        self.data += self.memory[:count]
        assert self.memory[self.offered :] == bytes([OVERWRITTEN]) * (4000 - self.offered)

    def eof_received(self):
        self.eof += 1

    def connection_lost(self, exc) -> None:
        self.lost.append(exc)


def test_a_buffered_protocol_with_small_buffers_gets_every_byte(run, family):
    async def main():
        _, protocol, peer = await connect(SmallBuffers, family)
        content = pattern(0, 1 << 20)
        thread = send_in_thread(peer, content)
        await eventually(lambda: len(protocol.data) == len(content), 20)
        thread.join(5)
        assert_same_stream(content, bytes(protocol.data))
        assert all(hint == -1 or hint > 0 for hint in protocol.hints)
        peer.shutdown(socket.SHUT_WR)
        assert await lost(protocol) is None
        assert protocol.eof == 1
        peer.close()

    run(main())


def test_a_buffered_protocol_may_pause_between_two_of_its_buffers(run, family):
    class Pausing(SmallBuffers):
        paused = False
        while_paused = 0

        def get_buffer(self, sizehint):
            self.while_paused += self.paused
            return super().get_buffer(sizehint)

        def buffer_updated(self, count):
            self.while_paused += self.paused
            super().buffer_updated(count)
            if self.random.random() < 0.2:
                self.transport.pause_reading()
                self.paused = True
                asyncio.get_running_loop().call_later(0.0005, self.resume)

        def resume(self):
            self.paused = False
            self.transport.resume_reading()

    async def main():
        transport, protocol, peer = await connect(Pausing, family)
        content = pattern(0, 200_000)
        thread = send_in_thread(peer, content)
        await eventually(lambda: len(protocol.data) == len(content), 30)
        thread.join(5)
        assert_same_stream(content, bytes(protocol.data))
        assert protocol.while_paused == 0
        transport.close()
        await lost(protocol)
        peer.close()

    run(main())


def test_streaming_and_buffered_protocols_may_take_turns(run, family):
    async def main():
        log = bytearray()

        class Stream(Recorder):
            def data_received(self, data):
                log.extend(data)
                transport.set_protocol(Buffered())

        class Buffered(SmallBuffers):
            def buffer_updated(self, count):
                log.extend(self.memory[:count])
                transport.set_protocol(Stream())

        transport, _, peer = await connect(Stream, family)
        content = pattern(0, 3 << 20)
        thread = send_in_thread(peer, content)
        await eventually(lambda: len(log) == len(content), 20)
        thread.join(5)
        assert_same_stream(content, bytes(log))
        transport.abort()
        peer.close()

    run(main())


@pytest.mark.parametrize("held", [False, True], ids=["as it comes", "held back"])
def test_whose_buffer_was_filled_is_told_though_get_buffer_replaced_the_protocol(run, family, held):
    # Fails when: the protocol is looked up again between get_buffer and buffer_updated: a protocol without
    # buffers was then told of one, and the connection lost.
    async def main():
        class Handing(SmallBuffers):
            def get_buffer(self, sizehint):
                transport.set_protocol(following)
                return super().get_buffer(sizehint)

        transport, protocol, peer = await connect(Handing, family)
        following = Recorder()
        following.keep_open = True
        content = pattern(0, 30_000)  # in more than one buffer
        if held:
            transport._holding().append(content)  # what had arrived when it paused
            transport.pause_reading()
            transport.resume_reading()
        else:
            peer.sendall(content)
        await eventually(lambda: len(protocol.data) + len(following.data) == len(content))
        assert protocol.data
        assert_same_stream(content, bytes(protocol.data + following.data))
        transport.abort()
        peer.close()

    run(main())


@pytest.mark.parametrize("fault", ["get_buffer raises", "empty buffer", "buffer_updated raises"])
def test_a_faulty_buffered_protocol_loses_its_connection_and_the_loop_hears_of_it(
    run, family, fault
):
    class Faulty(SmallBuffers):
        def get_buffer(self, sizehint):
            if fault == "get_buffer raises":
                raise ZeroDivisionError
            if fault == "empty buffer":
                return bytearray()
            return super().get_buffer(sizehint)

        def buffer_updated(self, count):
            raise ZeroDivisionError

    async def main():
        contexts = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: contexts.append(context))
        transport, protocol, peer = await connect(Faulty, family)
        peer.sendall(b"x")
        expected = RuntimeError if fault == "empty buffer" else ZeroDivisionError
        assert isinstance(await lost(protocol), expected)
        assert len(contexts) == 1
        assert isinstance(contexts[0]["exception"], expected)
        assert contexts[0]["transport"] is transport
        assert contexts[0]["protocol"] is protocol
        peer.close()

    run(main())


def test_an_exception_in_data_received_ends_the_connection_and_the_loop_hears_of_it(run, family):
    class Faulty(Recorder):
        def data_received(self, data):
            super().data_received(data)
            raise ZeroDivisionError("on purpose")

    async def main():
        contexts = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: contexts.append(context))
        transport, protocol, peer = await connect(Faulty, family)
        _, other, other_peer = await connect(Recorder, family)
        peer.sendall(b"x")
        other_peer.sendall(b"y")
        exc = await lost(protocol)
        assert isinstance(exc, ZeroDivisionError)
        assert len(contexts) == 1
        assert contexts[0]["exception"] is exc
        assert contexts[0]["transport"] is transport
        assert contexts[0]["protocol"] is protocol
        assert "data_received" in contexts[0]["message"]
        await eventually(lambda: other.data == b"y")  # nobody else is touched
        assert other.lost == []
        other.transport.close()
        peer.close()
        other_peer.close()

    run(main())


def test_an_exception_in_eof_received_ends_the_connection(run, family):
    class Faulty(Recorder):
        def eof_received(self):
            raise ZeroDivisionError

    async def main():
        contexts = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: contexts.append(context))
        _, protocol, peer = await connect(Faulty, family)
        peer.shutdown(socket.SHUT_WR)
        assert isinstance(await lost(protocol), ZeroDivisionError)
        assert len(contexts) == 1
        peer.close()

    run(main())


def test_callbacks_run_in_the_context_in_which_the_connection_was_made(run, family):
    variable = contextvars.ContextVar("variable", default="unset")

    class Looking(Recorder):
        def __init__(self):
            super().__init__()
            self.seen = []

        def data_received(self, data):
            self.seen.append(variable.get())
            super().data_received(data)

        def eof_received(self):
            self.seen.append(variable.get())

    async def main():
        made = []
        for value in ("one", "two"):
            variable.set(value)
            made.append(await connect(Looking, family))
        variable.set("three")
        for _ in range(3):
            for number, (_, protocol, peer) in enumerate(made):
                count = len(protocol.seen)
                peer.sendall(b"x")
                await eventually(lambda p=protocol, c=count: len(p.seen) > c)
                assert set(protocol.seen) == {("one", "two")[number]}
        for number, (_, protocol, peer) in enumerate(made):
            peer.close()
            await lost(protocol)
            assert set(protocol.seen) == {("one", "two")[number]}

    run(main())


def test_the_handlers_of_a_server_see_the_context_in_which_it_was_started(run):
    variable = contextvars.ContextVar("variable", default="unset")

    async def main():
        seen = []

        async def serve(reader, writer):
            seen.append(variable.get())
            await reader.read(1)
            seen.append(variable.get())
            writer.close()

        variable.set("server")
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        variable.set("client")
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        await eventually(lambda: len(seen) == 2)
        assert seen == ["server", "server"]
        writer.close()
        server.close()

    run(main())


# --- writing -------------------------------------------------------------------------------------


def test_writes_of_every_buffer_type_arrive_as_they_were_at_the_call(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family, sndbuf=16384, rcvbuf=16384)
        reader = Reader(peer, stalled=True)
        called = []
        for index in range(40):
            content = pattern(index, 40_000)
            called.append(content)
            kind = index % 4
            if kind == 0:
                transport.write(content)
            elif kind == 1:
                transport.write(memoryview(b"." + content)[1:])
            else:
                memory = bytearray(content)
                transport.write(memory if kind == 2 else memoryview(memory))
                overwrite(memory)
                memory.clear() if kind == 2 else None  # not locked by a plain write
        assert transport.get_write_buffer_size() > 1_000_000
        reader.go()
        transport.close()
        assert_same_stream(called, await reader.aresult())
        assert await lost(protocol) is None

    run(main())


def test_a_view_with_items_of_several_bytes_is_sent_by_bytes(run, family):
    # Ours: asyncio of 3.11 slices such a view by items when the socket is full.
    async def main():
        transport, _, peer = await connect(family=family, sndbuf=16384, rcvbuf=16384)
        reader = Reader(peer, stalled=True)
        items = array.array("Q", range(100_000))
        content = items.tobytes()
        transport.write(memoryview(items))
        transport.writelines([memoryview(items), memoryview(items)])
        reader.go()
        transport.close()
        assert_same_stream([content] * 3, await reader.aresult())

    run(main())


@pytest.mark.parametrize("wrong", ["text", None, 5, [b"x"], object()])
def test_a_write_of_something_else_is_a_type_error_and_queues_nothing(run, family, wrong):
    async def main():
        transport, protocol, peer = await connect(family=family)
        with pytest.raises(TypeError):
            transport.write(wrong)
        assert transport.get_write_buffer_size() == 0
        transport.write(b"right")
        assert await receive(peer, 5) == b"right"
        transport.close()
        await lost(protocol)
        assert receive_now(peer, 1) == b""
        peer.close()

    run(main())


def test_writelines_takes_any_iterable(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family)
        transport.writelines([])
        transport.writelines([b""])
        memory = bytearray(b"c")
        transport.writelines([b"a", memoryview(b"b"), memory, b""])
        memory[:] = b"!"
        transport.writelines(bytes([n]) for n in b"def")
        transport.writelines((b"g", b"h"))
        transport.write(b"")
        transport.write(b"i")
        assert await receive(peer, 9) == b"abcdefghi"
        transport.close()
        await lost(protocol)
        peer.close()

    run(main())


def test_the_write_buffer_limits_are_those_of_asyncio(run, family):
    async def main():
        transport, _, peer = await connect(family=family)
        assert transport.get_write_buffer_limits() == (16384, 65536)
        transport.set_write_buffer_limits(high=1000)
        assert transport.get_write_buffer_limits() == (250, 1000)
        transport.set_write_buffer_limits(low=1000)
        assert transport.get_write_buffer_limits() == (1000, 4000)
        transport.set_write_buffer_limits(high=0)
        assert transport.get_write_buffer_limits() == (0, 0)
        transport.set_write_buffer_limits(high=10, low=3)
        assert transport.get_write_buffer_limits() == (3, 10)
        for wrong in ({"high": 1, "low": 2}, {"high": 1, "low": -1}):
            with pytest.raises(ValueError):
                transport.set_write_buffer_limits(**wrong)
        transport.set_write_buffer_limits()
        assert transport.get_write_buffer_limits() == (16384, 65536)
        transport.abort()
        peer.close()

    run(main())


def test_writing_pauses_above_the_high_water_mark_and_resumes_below_the_low_one(run, family):
    class Watching(Recorder):
        def resume_writing(self):
            super().resume_writing()
            self.size_at_resume = self.transport.get_write_buffer_size()

    async def main():
        transport, protocol, peer = await connect(Watching, family, sndbuf=16384, rcvbuf=16384)
        transport.set_write_buffer_limits(high=200_000, low=50_000)
        content = pattern(0, 1 << 20)
        position = 0
        while not protocol.writing_paused:
            transport.write(content[position : position + 10_000])
            position += 10_000
            await asyncio.sleep(0.001)
        assert transport.get_write_buffer_size() > 200_000
        assert transport.get_write_buffer_size() <= position
        transport.write(content[position:])
        assert protocol.calls.count("pause_writing") == 1
        await asyncio.sleep(0.02)
        assert protocol.writing_paused
        reader = Reader(peer)
        await eventually(lambda: not protocol.writing_paused, what="resume_writing")
        assert protocol.size_at_resume <= 50_000
        await eventually(lambda: transport.get_write_buffer_size() == 0)
        assert protocol.calls.count("pause_writing") == 1
        assert protocol.calls.count("resume_writing") == 1
        transport.close()
        assert_same_stream(content, await reader.aresult())

    run(main())


def test_drain_waits_for_a_stalled_reader_and_only_for_it(run, family):
    async def main():
        _, writer, peer = await open_stream(family, sndbuf=16384, rcvbuf=16384)
        await limited(writer.drain(), 1)
        content = pattern(0, 1 << 20)
        writer.write(content)
        draining = asyncio.create_task(writer.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        reader = Reader(peer)
        await limited(draining)
        writer.close()
        await limited(writer.wait_closed())
        assert_same_stream(content, await reader.aresult())

    run(main())


def test_a_lost_connection_wakes_a_waiting_drain_with_its_error(run, family):
    async def main():
        _, writer, peer = await open_stream(family, sndbuf=16384, rcvbuf=16384)
        writer.write(bytes(1 << 20))
        draining = asyncio.create_task(writer.drain())
        await asyncio.sleep(0.02)
        assert not draining.done()
        reset(peer)
        with pytest.raises(ConnectionError):
            await limited(draining)
        with contextlib.suppress(ConnectionError):
            await limited(writer.wait_closed())

    run(main())


def test_a_pause_is_handed_on_to_the_next_protocol(run, family):
    # Ours: asyncio gives the second protocol a resume without a pause.
    async def main():
        transport, first, peer = await connect(family=family, sndbuf=16384, rcvbuf=16384)
        reader = Reader(peer, stalled=True)
        content = pattern(0, 1 << 20)
        transport.write(content)
        assert first.writing_paused
        second = Recorder()
        transport.set_protocol(second)
        reader.go()
        # The size is the kernel's view; the call comes with the turn's events, which may be a step later.
        await eventually(lambda: "resume_writing" in second.calls)
        assert second.calls == ["pause_writing", "resume_writing"]
        transport.close()
        assert_same_stream(content, await reader.aresult())

    run(main())


def test_write_eof_comes_after_everything_that_was_queued(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family, sndbuf=65536, rcvbuf=65536)
        reader = Reader(peer, stalled=True)
        assert transport.can_write_eof()
        content = pattern(0, 4 << 20)
        transport.write(content)
        transport.write_eof()
        transport.write_eof()
        with pytest.raises(RuntimeError):
            transport.write(b"late")
        with pytest.raises(RuntimeError):
            transport.writelines([b"late"])
        await asyncio.sleep(0.02)
        assert reader.is_alive()
        reader.go()
        assert_same_stream(content, await reader.aresult())
        assert not transport.is_closing()
        peer.sendall(b"the other half is open")
        await eventually(lambda: protocol.data == b"the other half is open")
        peer.close()
        assert await lost(protocol) is None

    run(main())


def test_eof_received_may_keep_the_connection_open_for_writing(run, family):
    async def main():
        def keeping():
            protocol = Recorder()
            protocol.keep_open = True
            return protocol

        transport, protocol, peer = await connect(keeping, family)
        peer.sendall(b"question")
        peer.shutdown(socket.SHUT_WR)
        await eventually(lambda: "eof_received" in protocol.calls)
        await asyncio.sleep(0.05)
        assert protocol.lost == [] and not transport.is_closing()
        assert protocol.calls.count("eof_received") == 1
        content = pattern(0, 3 << 20)
        reader = Reader(peer)
        transport.write(content)
        await asyncio.sleep(0.02)
        transport.close()
        assert_same_stream(content, await reader.aresult())
        assert await lost(protocol) is None
        peer.close()

    run(main())


def test_eof_received_that_returns_nothing_closes_after_the_flush(run, family):
    class Answering(Recorder):
        def eof_received(self):
            self.transport.write(content)

    content = pattern(0, 3 << 20)

    async def main():
        transport, protocol, peer = await connect(Answering, family, sndbuf=65536)
        reader = Reader(peer)
        peer.shutdown(socket.SHUT_WR)
        assert_same_stream(content, await reader.aresult())
        assert await lost(protocol) is None
        assert transport.is_closing()

    run(main())


def test_both_sides_half_close_and_then_the_connection_ends(run, family):
    async def main():
        def keeping():
            protocol = Recorder()
            protocol.keep_open = True
            return protocol

        transport, protocol, peer = await connect(keeping, family)
        transport.write(b"bye")
        transport.write_eof()
        assert await receive(peer, 4) == b"bye"
        peer.sendall(b"bye too")
        peer.shutdown(socket.SHUT_WR)
        await eventually(lambda: "eof_received" in protocol.calls)
        assert protocol.data == b"bye too"
        if not transport.is_closing():
            transport.close()
        assert await lost(protocol) is None
        peer.close()

    run(main())


# --- close, abort, reset -------------------------------------------------------------------------


def test_close_flushes_what_is_queued_and_then_ends(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family, sndbuf=65536, rcvbuf=65536)
        reader = Reader(peer, stalled=True)
        content = pattern(0, 8 << 20)
        transport.write(content)
        transport.close()
        assert transport.is_closing()
        await asyncio.sleep(0.05)
        assert protocol.lost == []  # not before everything was sent
        reader.go()
        assert_same_stream(content, await reader.aresult())
        assert await lost(protocol) is None
        assert transport.get_extra_info("socket").fileno() == -1

    run(main())


def test_nothing_is_read_after_close_even_while_it_flushes(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family, sndbuf=16384, rcvbuf=16384)
        peer.sendall(b"before")
        await eventually(lambda: protocol.data == b"before")
        transport.write(bytes(1 << 20))
        transport.close()
        peer.sendall(b"after")
        await asyncio.sleep(0.05)
        assert protocol.data == b"before"
        assert protocol.lost == []
        transport.abort()
        assert await lost(protocol) is None
        assert protocol.data == b"before"
        peer.close()

    run(main())


def test_close_without_anything_queued_reports_from_a_later_turn(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family)
        transport.close()
        transport.close()
        assert protocol.lost == []
        assert await lost(protocol) is None
        assert receive_now(peer, 1) == b""
        peer.close()

    run(main())


def test_abort_drops_what_was_not_sent_and_delivers_what_was(run, family):
    # CASES 38: no linger 0. The peer reads an exact prefix and then EOF.
    async def main():
        transport, protocol, peer = await connect(family=family, sndbuf=65536, rcvbuf=65536)
        content = pattern(0, 32 << 20)
        transport.write(content)
        await asyncio.sleep(0.05)
        unsent = transport.get_write_buffer_size()
        assert 0 < unsent < len(content)
        transport.abort()
        assert transport.is_closing()
        assert protocol.lost == []
        assert await lost(protocol) is None
        received = Reader(peer, chunk=4096)
        data = await received.aresult()
        assert_prefix(content, data)
        # At least what the transport had called sent; at most a socket buffer more.
        assert len(content) - unsent <= len(data) < len(content) // 2

    run(main())


def test_what_was_written_just_before_abort_was_sent(run, family):
    # asyncio's write() sends in the call; ours may have left it to the turn's end.
    async def main():
        transport, protocol, peer = await connect(family=family)
        transport.write(b"last ")
        transport.writelines([b"words"])
        transport.abort()
        assert await lost(protocol) is None
        assert receive_now(peer, 100) == b"last words"
        peer.close()

    run(main())


def test_a_drained_and_then_aborted_connection_delivers_everything(run, family):
    async def main():
        # Room for everything in the two socket buffers together, but not in the peer's alone.
        _, writer, peer = await open_stream(family, sndbuf=4 << 20, rcvbuf=65536)
        writer.transport.set_write_buffer_limits(high=0)
        content = pattern(0, 150_000 if family == "unix" else 500_000)
        writer.write(content)
        await limited(writer.drain())
        writer.transport.abort()
        await asyncio.sleep(0.1)
        assert_same_stream(content, await Reader(peer).aresult())
        with contextlib.suppress(ConnectionError):
            await limited(writer.wait_closed())

    run(main())


@pytest.mark.parametrize(
    "calls",
    [
        ["close", "close"],
        ["abort", "abort"],
        ["close", "abort"],
        ["abort", "close"],
        ["write_eof", "close"],
        ["write_eof", "abort"],
    ],
)
@pytest.mark.parametrize("queued", [False, True])
def test_connection_lost_comes_once_whatever_ends_the_connection(run, family, calls, queued):
    async def main():
        transport, protocol, peer = await connect(family=family, sndbuf=16384, rcvbuf=16384)
        if queued:
            transport.write(bytes(1 << 20))
        for call in calls:
            getattr(transport, call)()
        if not queued or "abort" in calls:
            assert await lost(protocol) is None
            peer.close()
        else:
            await asyncio.sleep(0.02)
            assert protocol.lost == []
            assert len(await Reader(peer).aresult()) == 1 << 20
            assert await lost(protocol) is None

    run(main())


@pytest.mark.parametrize("state", ["idle", "sending", "paused", "closing"])
def test_a_reset_by_the_peer_is_reported_once_with_its_error(run, family, state):
    async def main():
        contexts = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: contexts.append(context))
        transport, protocol, peer = await connect(family=family, sndbuf=16384, rcvbuf=16384)
        if state in ("sending", "closing", "paused"):
            transport.write(bytes(1 << 20))
        else:
            transport.write(b"unread data makes a Unix peer's close a reset, too")
        if state == "paused":
            transport.pause_reading()
        if state == "closing":
            transport.close()
        await asyncio.sleep(0.05)
        assert protocol.lost == []
        reset(peer)
        assert isinstance(await lost(protocol), (ConnectionResetError, BrokenPipeError))
        assert contexts == []  # the peer's doing is no error of this program
        transport.write(b"late")  # silently dropped
        transport.abort()
        assert len(protocol.lost) == 1

    run(main())


def test_a_write_to_a_peer_that_is_gone_ends_with_an_error(run, family):
    async def main():
        def keeping():
            protocol = Recorder()
            protocol.keep_open = True
            return protocol

        transport, protocol, peer = await connect(keeping, family)
        peer.close()
        await eventually(lambda: "eof_received" in protocol.calls)
        for _ in range(200):
            transport.write(b"x" * 1000)
            await asyncio.sleep(0.005)
            if protocol.lost:
                break
        assert isinstance(await lost(protocol), (BrokenPipeError, ConnectionResetError))

    run(main())


@pytest.mark.parametrize("how", ["close", "abort"])
def test_writes_after_the_end_are_dropped_and_finally_warned_about(run, family, caplog, how):
    async def main():
        transport, protocol, peer = await connect(family=family)
        getattr(transport, how)()
        with caplog.at_level(logging.WARNING):
            for _ in range(10):
                transport.write(b"never")
                transport.writelines([b"never"])
        assert await lost(protocol) is None
        assert receive_now(peer, 1) == b""
        assert any("socket.send() raised exception" in r.getMessage() for r in caplog.records)
        peer.close()

    run(main())


def test_connection_lost_may_raise_and_the_socket_is_closed_all_the_same(run, family):
    class Faulty(Recorder):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            raise ZeroDivisionError

    async def main():
        contexts = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: contexts.append(context))
        transport, protocol, peer = await connect(Faulty, family)
        transport.close()
        await lost(protocol)
        await eventually(lambda: contexts)
        assert isinstance(contexts[0]["exception"], ZeroDivisionError)
        assert await receive(peer, 1) == b""
        peer.close()

    run(main())


def test_nothing_is_held_after_connection_lost(run, family):
    # CASES 32.
    async def main():
        transport, protocol, peer = await connect(family=family, sndbuf=16384, rcvbuf=16384)
        transport.write(bytes(1 << 20))
        transport.close()
        assert len(await Reader(peer).aresult()) == 1 << 20
        await lost(protocol)
        protocol.transport = None
        references = [weakref.ref(protocol), weakref.ref(transport)]
        del transport, protocol
        await asyncio.sleep(0.01)
        collect()
        assert [reference() for reference in references] == [None, None]

    run(main())


def test_an_unclosed_transport_warns_when_it_is_collected(loop_factory, family):
    loop = loop_factory()

    async def main():
        _, _, peer = await connect(family=family)
        return peer

    peer = loop.run_until_complete(main())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.close()
        del loop
        collect()
    text = [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)]
    assert any("unclosed transport" in message for message in text), text
    peer.close()


# --- what a transport tells of itself --------------------------------------------------------------


def test_extra_info_is_that_of_asyncio(run, family):
    async def main():
        ours, peer = connected_pair(family)
        transport, protocol = await asyncio.get_running_loop().create_connection(
            Recorder, sock=ours
        )
        sock = transport.get_extra_info("socket")
        assert isinstance(sock, asyncio.trsock.TransportSocket)
        assert sock.fileno() == ours.fileno()
        assert sock.family == ours.family and sock.type == socket.SOCK_STREAM
        assert sock.gettimeout() == 0
        assert not hasattr(sock, "recv")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        assert transport.get_extra_info("sockname") == peer.getpeername()
        assert transport.get_extra_info("peername") == peer.getsockname()
        assert transport.get_extra_info("nonsense") is None
        assert transport.get_extra_info("nonsense", 7) == 7
        assert transport.get_extra_info("sslcontext") is None
        transport.close()
        await lost(protocol)
        assert transport.get_extra_info("peername") is not None or family == "unix"
        peer.close()

    run(main())


def test_both_ends_of_a_tcp_connection_send_without_delay(run):
    async def main():
        seen = []

        def look(writer):
            sock = writer.get_extra_info("socket")
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

        async def serve(reader, writer):
            seen.append(look(writer))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await limited(reader.read()) == b""
        assert look(writer) and seen[0]
        writer.close()
        server.close()

    run(main())


def test_extra_info_tells_about_zero_copy(run, family, backend, forced_loop_factory):
    async def main():
        transport, protocol, peer = await connect(family=family)
        info = transport.get_extra_info("zero_copy")
        assert isinstance(info, aiozc.ZeroCopyInfo)
        assert isinstance(info.engine, str) and info.engine
        assert info.threshold == 0
        assert info.adaptive is False
        assert info.path in {"zero-copy", "copied", "mixed", "unknown"}
        transport.close()
        await lost(protocol)
        peer.close()

    run(main(), forced_loop_factory)


def test_a_transport_is_an_asyncio_transport_with_free_attributes(run, family):
    async def main():
        transport, protocol, peer = await connect(family=family)
        assert isinstance(transport, asyncio.Transport)
        transport.anything = 5
        assert transport.anything == 5
        assert not transport.is_closing()
        fd = transport.get_extra_info("socket").fileno()
        assert f"fd={fd}" in repr(transport)
        transport.close()
        assert transport.is_closing()
        assert "clos" in repr(transport)
        await lost(protocol)
        assert "closed" in repr(transport)
        peer.close()

    run(main())


# --- servers, TLS ----------------------------------------------------------------------------------


async def start(factory, family, path):
    loop = asyncio.get_running_loop()
    if family == "unix":
        server = await loop.create_unix_server(factory, path)
        return server, lambda: _dial(socket.AF_UNIX, path)
    server = await loop.create_server(factory, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    return server, lambda: _dial(socket.AF_INET, address)


def _dial(kind, address):
    sock = socket.socket(kind)
    sock.settimeout(10)
    sock.connect(address)
    return sock


def test_a_closed_server_accepts_no_more_but_keeps_its_connections(run, family):
    async def main():
        with tempfile.TemporaryDirectory() as directory:
            protocols = []

            def factory():
                protocols.append(Recorder())
                return protocols[-1]

            server, dial = await start(factory, family, f"{directory}/socket")
            assert server.is_serving()
            clients = [await asyncio.to_thread(dial) for _ in range(5)]
            await eventually(lambda: len(protocols) == 5)
            server.close()
            assert not server.is_serving()
            await asyncio.sleep(0.02)
            with pytest.raises(OSError):
                await asyncio.to_thread(dial)
            for number, client in enumerate(clients):
                client.sendall(b"still %d" % number)
            for protocol in protocols:
                await eventually(lambda p=protocol: len(p.data) == 7)
            assert sorted(bytes(p.data) for p in protocols) == [b"still %d" % n for n in range(5)]
            for protocol in protocols:
                protocol.transport.close()
            await limited(server.wait_closed(), 5)
            for client in clients:
                assert receive_now(client, 1) == b""
                client.close()

    run(main())


def test_serve_forever_ends_when_it_is_cancelled(run, family):
    async def main():
        with tempfile.TemporaryDirectory() as directory:
            server, dial = await start(Recorder, family, f"{directory}/socket")
            serving = asyncio.create_task(server.serve_forever())
            await asyncio.sleep(0.01)
            client = await asyncio.to_thread(dial)
            client.close()
            assert not serving.done()
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await limited(serving, 5)
            assert not server.is_serving()

    run(main())


def test_a_server_that_has_not_started_serves_once_it_is_told_to(run):
    async def main():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Recorder, "127.0.0.1", 0, start_serving=False)
        address = server.sockets[0].getsockname()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(_dial, socket.AF_INET, address)
        await server.start_serving()
        client = await asyncio.to_thread(_dial, socket.AF_INET, address)
        client.close()
        server.close()
        await limited(server.wait_closed(), 5)

    run(main())


def test_a_protocol_factory_that_raises_costs_only_that_connection(run, family):
    async def main():
        with tempfile.TemporaryDirectory() as directory:
            made = []

            def factory():
                made.append(Recorder())
                if len(made) == 1:
                    raise ZeroDivisionError
                return made[-1]

            server, dial = await start(factory, family, f"{directory}/socket")
            first = await asyncio.to_thread(dial)
            await eventually(lambda: len(made) == 1)
            second = await asyncio.to_thread(dial)
            second.sendall(b"served")
            await eventually(lambda: len(made) == 2 and made[1].data == b"served")
            made[1].transport.close()
            server.close()
            first.close()
            second.close()

    run(main())


def test_start_tls_upgrades_a_connection_in_mid_stream(run):
    server_context, client_context = tls_contexts()
    content = pattern(0, 4 << 20)

    async def main():
        async def serve(reader, writer):
            assert await reader.readline() == b"STARTTLS\n"
            writer.write(b"GO\n")
            await writer.drain()
            await writer.start_tls(server_context)
            data = await reader.readexactly(len(content))
            writer.write(data)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"STARTTLS\n")
        assert await limited(reader.readline()) == b"GO\n"
        await limited(writer.start_tls(client_context, server_hostname="localhost"))
        assert writer.get_extra_info("ssl_object") is not None

        async def send():
            writer.write(content)
            await writer.drain()

        sending = asyncio.create_task(send())
        assert_same_stream(content, await limited(reader.readexactly(len(content)), 30))
        await sending
        writer.close()
        with contextlib.suppress(OSError):
            await limited(writer.wait_closed())
        server.close()

    run(main())


def test_a_tls_server_and_a_blocking_tls_client_understand_each_other(run):
    server_context, client_context = tls_contexts()
    content = pattern(1, 2 << 20)

    async def main():
        async def serve(reader, writer):
            writer.write(await reader.readexactly(len(content)))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context)
        address = server.sockets[0].getsockname()

        def client():
            with (
                socket.create_connection(address, 20) as plain,
                client_context.wrap_socket(plain, server_hostname="localhost") as sock,
            ):
                sock.sendall(content)
                return b"".join(iter(lambda: sock.recv(1 << 16), b""))

        assert_same_stream(content, await limited(asyncio.to_thread(client), 30))
        server.close()

    run(main())


def test_start_tls_with_writing_paused_sees_no_resume_without_a_pause(run):
    # CASES 42: every protocol in the chain sees pauses and resumes in pairs.
    server_context, client_context = tls_contexts()

    class Paired(Recorder):
        depth = 0
        unpaired = 0

        def pause_writing(self):
            self.depth += 1
            self.unpaired += self.depth != 1

        def resume_writing(self):
            self.depth -= 1
            self.unpaired += self.depth != 0

    async def main():
        loop = asyncio.get_running_loop()
        content = pattern(2, 1 << 20)
        ours, peer = connected_pair(sndbuf=16384, rcvbuf=16384)
        transport, protocol = await loop.create_connection(Paired, sock=ours)
        transport.write(content)
        assert protocol.depth == 1

        def client():
            first = receive_now(peer, len(content))
            with client_context.wrap_socket(peer, server_hostname="localhost") as sock:
                return first, receive_now(sock, len(content))

        answering = asyncio.create_task(asyncio.to_thread(client))
        upgraded = await limited(
            loop.start_tls(transport, protocol, server_context, server_side=True)
        )
        upgraded.write(content)
        first, second = await limited(answering, 30)
        assert_same_stream(content, first)
        assert_same_stream(content, second)
        await eventually(lambda: protocol.depth == 0, what="resume_writing")
        assert protocol.unpaired == 0
        upgraded.abort()

    run(main())


def test_unix_servers_and_connections_work_by_path(run):
    async def main():
        with tempfile.TemporaryDirectory() as directory:
            path = str(Path(directory) / "socket")

            async def serve(reader, writer):
                writer.write(await reader.read(-1))
                await writer.drain()
                writer.close()

            server = await asyncio.start_unix_server(serve, path)
            reader, writer = await asyncio.open_unix_connection(path)
            content = pattern(0, 2 << 20)
            writer.write(content)
            writer.write_eof()
            assert_same_stream(content, await limited(reader.read(-1)))
            writer.close()
            await limited(writer.wait_closed())
            server.close()
            await limited(server.wait_closed(), 5)

    run(main())


def test_an_ipv6_connection_works(run):
    async def main():
        async def serve(reader, writer):
            writer.write(await reader.read(100))
            writer.close()

        try:
            server = await asyncio.start_server(serve, "::1", 0)
        except OSError:
            pytest.skip("no IPv6 here")
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection("::1", address[1])
        assert writer.get_extra_info("peername") == address
        writer.write(b"six")
        assert await limited(reader.read(-1)) == b"six"
        writer.close()
        server.close()

    run(main())


def test_a_cancelled_connect_leaves_no_descriptor_behind(run):
    async def main():
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(4):  # fill the backlog: further connects hang
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
            fillers.append(sock)
        connecting = asyncio.create_task(asyncio.open_connection(*listener.getsockname()))
        await asyncio.sleep(0.1)
        assert not connecting.done()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await limited(connecting, 5)
        for sock in [*fillers, listener]:
            sock.close()

    run(main())


# --- contexts -------------------------------------------------------------------------------------


def test_what_one_connection_s_factory_sets_no_other_connection_sees(run):
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            seen.append(("made", variable.get()))

        def data_received(self, data):
            seen.append(("data", variable.get()))
            self.transport.close()

        def connection_lost(self, exc):
            seen.append(("lost", variable.get()))

    def factory():
        seen.append(("factory", variable.get()))
        variable.set(f"connection {sum(what == 'factory' for what, _ in seen)}")
        return Protocol()

    async def main():
        loop = asyncio.get_running_loop()
        variable.set("server")
        server = await loop.create_server(factory, "127.0.0.1", 0)
        variable.set("later")
        for number in (1, 2):
            with socket.create_connection(server.sockets[0].getsockname()) as peer:
                peer.sendall(b"x")
                await eventually(lambda n=number: len(seen) == 4 * n, what="connection_lost")
        server.close()
        await server.wait_closed()
        assert seen == [
            (what, value)
            for number in (1, 2)
            for what, value in (
                ("factory", "server"),
                ("made", f"connection {number}"),
                ("data", f"connection {number}"),
                ("lost", f"connection {number}"),
            )
        ]

    run(main())
