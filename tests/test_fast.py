"""The native part that runs once an event: turns, handles, buffers locked for an operation."""

from __future__ import annotations

import array
import asyncio
import contextvars
import gc
import mmap
import select
import socket
import sys
import weakref
from asyncio import events

import numpy as np
import pytest

import aiozc
from aiozc import _fast
from aiozc.transports.base import NativeTransport
from aiozc.transports.stream import StreamTransport

BACKENDS = ["uring", "epoll"]


def run(main, **settings):
    return aiozc.run(main, **settings)


class Quiet(asyncio.Protocol):
    pass


def errors_of(loop: asyncio.AbstractEventLoop) -> list[dict]:
    seen: list[dict] = []
    loop.set_exception_handler(lambda _, context: seen.append(context))
    return seen


# -- handles --


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_of_an_event_is_told_and_the_events_behind_it_are_served(backend, monkeypatch):
    # Fails when: what a method of ours raises leaves the walk over the events, and ends the run.
    made = StreamTransport._on_recv
    failed = []

    def fail_once(self, res, start):
        if not failed:
            failed.append(self)
            raise ValueError("an error in the event")
        made(self, res, start)

    monkeypatch.setattr(StreamTransport, "_on_recv", fail_once)

    async def main():
        loop = asyncio.get_running_loop()
        seen = errors_of(loop)
        ended = []

        class Ends(asyncio.Protocol):
            def connection_lost(self, exc):
                ended.append(exc)

        pairs = [socket.socketpair() for _ in range(3)]
        for ours, peer in pairs:
            transport, _ = await loop.create_connection(Ends, sock=ours)
            transport.write(b"never read: so closing it is a reset")
            while not select.select([peer], [], [], 0)[0]:
                await asyncio.sleep(0)
        for _, peer in pairs:
            peer.close()
        async with asyncio.timeout(10):
            while len(ended) < 2:
                await asyncio.sleep(0.001)
        failed[0].abort()
        return [(type(c["exception"]), c["message"]) for c in seen]

    ((kind, message),) = run(main(), backend=backend)
    assert kind is ValueError
    assert message.startswith("Exception in callback")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_of_a_callback_is_told_as_asyncio_tells_it(backend):
    def fail(what):
        raise ValueError(what)

    async def main():
        loop = asyncio.get_running_loop()
        seen = errors_of(loop)
        handle = loop.call_soon(fail, "soon")
        timer = loop.call_later(0.001, fail, "later")
        await asyncio.sleep(0.01)
        return seen, handle, timer

    def told(seen, handle, timer):
        assert [c["handle"] for c in seen] == [handle, timer]
        return [(c["message"], repr(c["exception"]), sorted(c)) for c in seen]

    ours = told(*run(main(), backend=backend))
    assert ours == told(*asyncio.run(main()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_source_traceback_of_a_handle_is_told(backend):
    async def main():
        loop = asyncio.get_running_loop()
        seen = errors_of(loop)
        loop.set_debug(True)
        handle = loop.call_soon(lambda: 1 / 0)
        loop.set_debug(False)
        await asyncio.sleep(0)
        assert seen[0]["source_traceback"] is handle._source_traceback

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_method_that_somebody_put_in_place_is_used(backend, monkeypatch):
    seen = []
    original = events.Handle._run

    def traced(self):
        seen.append(self._callback)
        original(self)

    def mine():
        seen.append("ran")

    async def main():
        monkeypatch.setattr(events.Handle, "_run", traced)
        asyncio.get_running_loop().call_soon(mine)
        await asyncio.sleep(0.001)
        monkeypatch.undo()

    run(main(), backend=backend)
    assert seen[:2] == [mine, "ran"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_handle_that_cancels_the_next_one(backend):
    ran = []

    async def main():
        loop = asyncio.get_running_loop()
        handles = []
        loop.call_soon(lambda: handles[0].cancel())
        handles.append(loop.call_soon(ran.append, "cancelled"))
        loop.call_soon(ran.append, "kept")
        await asyncio.sleep(0)

    run(main(), backend=backend)
    assert ran == ["kept"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_callback_keeps_its_arguments_while_it_cancels_itself(backend):
    seen = []

    async def main():
        loop = asyncio.get_running_loop()

        def callback(payload):
            handle.cancel()  # drops the handle's references
            gc.collect()
            seen.append(bytes(payload))

        handle = loop.call_soon(callback, bytearray(b"x" * 1000))
        await asyncio.sleep(0)

    run(main(), backend=backend)
    assert seen == [b"x" * 1000]


@pytest.mark.parametrize("backend", BACKENDS)
def test_system_exit_of_a_callback_leaves_the_rest_ready(backend):
    loop = aiozc.new_event_loop(backend=backend)
    ran = []

    def leave():
        raise SystemExit(3)

    loop.call_soon(leave)
    loop.call_soon(ran.append, 1)
    with pytest.raises(SystemExit):
        loop.run_forever()
    assert ran == []
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert ran == [1]
    loop.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_timers_run_in_order_and_cancelled_ones_leave_the_heap(backend):
    order = []

    async def main():
        loop = asyncio.get_running_loop()
        now = loop.time()
        for i in (3, 1, 2):
            loop.call_at(now + i / 1000, order.append, i)
        dropped = [loop.call_at(now + 0.0005, order.append, "never") for _ in range(300)]
        for handle in dropped:
            handle.cancel()
        await asyncio.sleep(0.01)
        assert not [h for h in loop._scheduled if h._cancelled]
        assert loop._timer_cancelled_count == 0
        assert not any(h._scheduled for h in dropped)

    run(main(), backend=backend)
    assert order == [1, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_million_callbacks_leave_no_reference(backend):
    async def main():
        loop = asyncio.get_running_loop()
        token = object()
        before = sys.getrefcount(token)
        done = loop.create_future()
        left = 20_000

        def again(value):
            nonlocal left
            left -= 1
            if left:
                loop.call_soon(again, value)
            else:
                done.set_result(None)

        for _ in range(50):
            left = 20_000
            done = loop.create_future()
            loop.call_soon(again, token)
            await done
        assert sys.getrefcount(token) == before

    run(main(), backend=backend)


def test_a_handle_has_every_slot_that_asyncio_sets():
    async def main():
        loop = asyncio.get_running_loop()
        ours = loop.call_soon(print, 1, 2)
        theirs = events.Handle(print, (1, 2), loop)
        ours.cancel()
        for name in events.Handle.__slots__:
            if name not in ("_context", "_cancelled", "_args", "_callback", "_repr", "__weakref__"):
                assert getattr(ours, name) == getattr(theirs, name), name
        again = loop.call_soon(print, 1, 2)
        assert isinstance(again, events.Handle)
        assert (again._callback, again._args, again._cancelled) == (print, (1, 2), False)
        assert again._repr is None and again._source_traceback is None
        assert repr(again) == repr(theirs)
        again.cancel()
        assert again.cancelled()

    run(main())


def test_call_soon_takes_a_context_and_copies_the_current_one():
    variable = contextvars.ContextVar("variable", default="default")

    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        given = contextvars.Context()
        given.run(variable.set, "given")
        variable.set("current")
        loop.call_soon(lambda: seen.append(variable.get()), context=given)
        loop.call_soon(lambda: seen.append(variable.get()), context=None)
        loop.call_soon(lambda: (seen.append(variable.get()), variable.set("mine")))
        variable.set("later")
        await asyncio.sleep(0)
        assert seen == ["given", "current", "current"]
        assert variable.get() == "later"

    run(main())


def test_wrong_calls_of_call_soon_are_told_as_asyncio_tells_them():
    ours, theirs = aiozc.new_event_loop(), asyncio.SelectorEventLoop()
    try:
        for args, kwargs in (
            ((), {}),
            ((print,), {"other": 1}),
            ((print,), {"context": 1, "x": 2}),
        ):
            told = []
            for loop in (ours, theirs):
                with pytest.raises(TypeError) as info:
                    loop.call_soon(*args, **kwargs)
                told.append(str(info.value))
            assert told[0] == told[1]
        assert not ours._ready
    finally:
        ours.close()
        theirs.close()
    with pytest.raises(RuntimeError, match="closed"):
        ours.call_soon(print)


def test_debug_mode_checks_the_callback_and_keeps_where_it_came_from():
    loop = aiozc.new_event_loop()
    loop.set_debug(True)

    async def coroutine():
        """Never run."""

    with pytest.raises(TypeError, match="coroutines"):
        loop.call_soon(coroutine)
    with pytest.raises(TypeError, match="callable"):
        loop.call_soon(1)
    handle = loop.call_soon(print)
    assert handle._source_traceback[-1].name.startswith("test_debug_mode")
    handle.cancel()
    loop.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_call_of_run_once_is_one_turn(backend):
    loop = aiozc.new_event_loop(backend=backend)
    ran = []

    def again():
        ran.append(1)
        loop.call_soon(again)

    loop.call_soon(again)
    loop._reactor.attach()
    for n in range(1, 4):
        loop._run_once()
        assert len(ran) == n
    loop._reactor.detach()
    loop.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_stop_ends_the_turn_in_which_it_is_called(backend):
    loop = aiozc.new_event_loop(backend=backend)
    ran = []
    loop.call_soon(loop.stop)
    loop.call_soon(ran.append, 1)
    loop.call_soon(lambda: loop.call_soon(ran.append, 2))
    loop.run_forever()
    assert ran == [1]
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert ran == [1, 2]
    loop.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_debug_can_be_switched_while_it_runs(backend):
    async def main():
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 0.001
        for debug in (True, False, True):
            loop.set_debug(debug)
            for _ in range(3):
                await asyncio.sleep(0)
        return loop.get_debug()

    assert run(main(), backend=backend)


# -- transports --


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cycle_through_a_closed_transport_is_collected(backend):
    async def main():
        loop = asyncio.get_running_loop()
        a, b = socket.socketpair()
        transport, protocol = await loop.create_connection(Quiet, sock=a)
        protocol.transport = transport
        transport.set_write_buffer_limits(high=10)
        gone = weakref.ref(transport)
        transport.close()
        await asyncio.sleep(0.01)
        transport._extra["me"] = transport  # a slot of asyncio's class
        transport.mine = transport
        del transport, protocol
        gc.collect()
        assert gone() is None
        b.close()

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_leave_no_reference(backend):
    """Ten thousand messages and their events: nothing grows."""

    class Echo(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.transport.write(data)

    async def main():
        loop = asyncio.get_running_loop()
        a, b = socket.socketpair()
        b.setblocking(False)
        transport, protocol = await loop.create_connection(Echo, sock=a)
        message = b"m" * 100

        async def some(n):
            for _ in range(n):
                await loop.sock_sendall(b, message)
                assert await loop.sock_recv(b, 1000) == message

        await some(100)
        gc.collect()
        before = [sys.getrefcount(x) for x in (transport, protocol, transport._context, message)]
        blocks = sys.getallocatedblocks()
        await some(10_000)
        gc.collect()
        after = [sys.getrefcount(x) for x in (transport, protocol, transport._context, message)]
        assert after == before
        assert sys.getallocatedblocks() - blocks < 200
        transport.close()
        b.close()

    run(main(), backend=backend)


# How two transports throw one message to and fro. Each throw is four events: a call that sends, the request's
# end or the release, a receive, and a callback of the protocol.
THROWS = {
    "write": lambda transport, message: transport.write(message),
    "write a view": lambda transport, message: transport.write(memoryview(message)),
    "write what can change": lambda transport, message: transport.write(bytearray(message)),
    "writelines": lambda transport, message: transport.writelines([message[:10], message[10:]]),
    "zc_write": lambda transport, message: transport.zc_write(message),
    "zc_write of what can change": lambda transport, message: transport.zc_write(
        bytearray(message)
    ),
    "zc_write of many": lambda transport, message: transport.zc_write([message[:9], message[9:]]),
    "withdraw": lambda transport, message: (
        transport.zc_write(message).withdraw(),
        transport.zc_write(message),
    ),
}


class Thrown:
    """Both ends: once the message is whole it is thrown back, until `left` is used up."""

    def __init__(self, throw, size, done):
        self.throw, self.size, self.done = throw, size, done
        self.got = self.left = 0

    def connection_made(self, transport):
        self.transport = transport

    def eof_received(self):
        return None

    def took(self, n):
        self.got += n
        if self.got < self.size:
            return
        self.got = 0
        self.left -= 1
        if self.left > 0:
            self.throw(self.transport)
        elif not self.left:
            self.done()


class ThrownPlain(Thrown, asyncio.Protocol):
    def data_received(self, data):
        self.took(len(data))


class ThrownInto(Thrown, asyncio.BufferedProtocol):
    room = bytearray(7000)

    def get_buffer(self, hint):
        return self.room

    def buffer_updated(self, n):
        self.took(n)


def throw_messages(backend, how, protocol, size, times):
    """Nothing that takes part has more references afterwards, and nothing else is left."""

    async def main():
        loop = asyncio.get_running_loop()
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        ended = []
        ends = [
            protocol(lambda t: THROWS[how](t, message), size, lambda: ended[-1].set_result(None))
            for _ in range(2)
        ]
        listener = socket.create_server(("127.0.0.1", 0))
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
        listener.close()
        for sock, end in zip((a, b), ends, strict=True):
            await loop.create_connection(lambda end=end: end, sock=sock)

        async def some(n):
            ended.append(loop.create_future())
            ends[0].left = n
            ends[1].left = n + 1  # one more than it gets
            THROWS[how](ends[0].transport, message)
            await ended[-1]
            while loop.zc_stats().operations_live or loop._reactor.held:
                await asyncio.sleep(0.001)

        def count():
            gc.collect()
            things = [message, protocol, ThrownInto.room, *ends]
            things += [end.transport for end in ends] + [end.transport._context for end in ends]
            return [sys.getrefcount(x) for x in things], sys.getallocatedblocks()

        await some(300)
        before, blocks = count()
        await some(times)
        after, now = count()
        assert after == before
        assert now - blocks < 300, "something is left of each event"
        for end in ends:
            end.transport.close()

    run(main(), backend=backend, adaptive=False, zc_threshold=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [100, 40_000])
@pytest.mark.parametrize("protocol", [ThrownPlain, ThrownInto])
@pytest.mark.parametrize("how", THROWS)
def test_messages_of_every_kind_leave_no_reference(backend, how, protocol, size):
    throw_messages(backend, how, protocol, size, 600)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("protocol", [ThrownPlain, ThrownInto])
@pytest.mark.parametrize("how", THROWS)
def test_a_million_events_of_every_kind_leave_no_reference(backend, how, protocol):
    throw_messages(backend, how, protocol, 100, 125_000)  # both ways, four events each


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_thousand_timers_leave_no_reference(backend):
    """Run, cancelled before, cancelled by themselves, and raising."""

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        token = object()

        def fails(_):
            raise ValueError

        async def some(n):
            for _ in range(n // 100):
                handles = [loop.call_later(0, id, token) for _ in range(50)]
                handles += [loop.call_later(0.5, id, token) for _ in range(40)]
                for handle in handles[40:]:
                    handle.cancel()
                for _ in range(10):
                    loop.call_later(0, fails, token)
                await asyncio.sleep(0.0001)

        def count():
            gc.collect()
            return [sys.getrefcount(x) for x in (token, fails)], sys.getallocatedblocks()

        await some(2000)
        before, blocks = count()
        await some(100_000)
        after, now = count()
        assert after == before
        assert now - blocks < 300

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", [False, True])
def test_what_is_queued_is_held_before_a_signal_handler_can_run(backend, view, monkeypatch):
    """KeyboardInterrupt in the first line of Python behind the native call; the bytes are still sent."""

    def interrupted(self, kept):
        raise KeyboardInterrupt

    async def main():
        loop = asyncio.get_running_loop()
        a, b = socket.socketpair()
        transport, _ = await loop.create_connection(Quiet, sock=a)
        monkeypatch.setattr(type(transport), "_look", interrupted)
        data = b"x" * 20_000_000
        with pytest.raises(KeyboardInterrupt):
            transport.write(memoryview(data) if view else data)
        monkeypatch.undo()
        before = len(loop._reactor.held)
        assert before == 1
        del data
        gc.collect()
        junk = [b"-" * 20_000_000 for _ in range(3)]
        received = bytearray()
        b.setblocking(False)
        while len(received) < 20_000_000:
            received += await loop.sock_recv(b, 1 << 20)
        assert received.count(b"x") == 20_000_000
        await asyncio.sleep(0)
        assert not loop._reactor.held
        del junk
        transport.close()
        b.close()

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffered_protocol_that_leaves_the_run_gets_the_rest_later(backend):
    got = bytearray()

    class Small(asyncio.BufferedProtocol):
        exits = 1

        def get_buffer(self, hint):
            assert hint == -1
            self.buffer = bytearray(7)
            return self.buffer

        def buffer_updated(self, n):
            got.extend(self.buffer[:n])
            if self.exits:
                self.exits -= 1
                raise SystemExit

        def eof_received(self):
            loop.stop()

    loop = aiozc.new_event_loop(backend=backend)
    a, b = socket.socketpair()
    loop.run_until_complete(loop.create_connection(Small, sock=a))
    b.sendall(bytes(range(100)))
    with pytest.raises(SystemExit):
        loop.run_forever()
    b.close()
    loop.run_forever()
    assert got == bytes(range(100))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["get_buffer", "empty", "buffer_updated", "not a buffer"])
def test_an_error_of_a_buffered_protocol_ends_the_transport(backend, where):
    class Bad(asyncio.BufferedProtocol):
        lost = None

        def get_buffer(self, hint):
            if where == "get_buffer":
                raise ValueError("no")
            if where == "not a buffer":
                return "text"
            return bytearray(0 if where == "empty" else 10)

        def buffer_updated(self, n):
            raise ValueError("no")

        def connection_lost(self, exc):
            self.lost = exc

    async def main():
        loop = asyncio.get_running_loop()
        seen = errors_of(loop)
        a, b = socket.socketpair()
        _, protocol = await loop.create_connection(Bad, sock=a)
        b.sendall(b"data")
        await asyncio.sleep(0.02)
        name = "buffer_updated" if where == "buffer_updated" else "get_buffer"
        assert [c["message"] for c in seen] == [f"Fatal error: protocol.{name}() call failed."]
        kinds = {"empty": RuntimeError, "not a buffer": TypeError}
        assert type(protocol.lost) is kinds.get(where, ValueError)
        b.close()

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_who_wait_in_zc_drain_are_woken_and_one_that_was_cancelled_does_no_harm(backend):
    async def main():
        loop = asyncio.get_running_loop()
        a, b = socket.socketpair()
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        b.setblocking(False)
        _, writer = await asyncio.open_connection(sock=a)
        data = [b"x" * 100_000 for _ in range(10)]
        operation = writer.zc_submit(data)
        waiters = [asyncio.ensure_future(writer.zc_drain()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not any(waiter.done() for waiter in waiters)
        waiters[1].cancel()
        left = 1_000_000
        while left:
            left -= len(await loop.sock_recv(b, left))
        async with asyncio.timeout(10):
            await asyncio.gather(waiters[0], waiters[2])
            await operation.released
            await writer.zc_drain()
        assert waiters[1].cancelled()
        before = [sys.getrefcount(x) for x in (writer.transport, data)]
        for _ in range(100):
            writer.zc_submit(data[0])
            wait = asyncio.ensure_future(writer.zc_drain())
            left = 100_000
            while left:
                left -= len(await loop.sock_recv(b, left))
            await wait
        await asyncio.sleep(0.01)
        assert [sys.getrefcount(x) for x in (writer.transport, data)] == before
        writer.zc_submit(data)
        lost = asyncio.ensure_future(writer.zc_drain())
        await asyncio.sleep(0)
        writer.transport.abort()
        with pytest.raises(ConnectionResetError):
            await lost
        with pytest.raises(ConnectionResetError):
            await writer.zc_drain()
        b.close()

    run(main(), backend=backend, zc_low_water=1000)


# -- datagrams --


@pytest.mark.parametrize("backend", BACKENDS)
def test_datagrams_leave_no_reference(backend):
    # Fails when: what a datagram is handed out with, or sent to, is not given back.
    class Echo(asyncio.DatagramProtocol):
        def connection_made(self, transport):
            self.transport = transport

        def datagram_received(self, data, addr):
            self.addr = addr
            self.transport.sendto(data, addr)

    async def main():
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_datagram_endpoint(Echo, ("127.0.0.1", 0))
        peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        peer.setblocking(False)
        peer.connect(transport.get_extra_info("sockname"))
        message = b"m" * 100

        async def some(n):
            for _ in range(n):
                await loop.sock_sendall(peer, message)
                assert await loop.sock_recv(peer, 1000) == message

        await some(100)
        gc.collect()
        kept = (transport, protocol, transport._context, protocol.addr)
        before = [sys.getrefcount(x) for x in kept]
        blocks = sys.getallocatedblocks()
        await some(5_000)
        gc.collect()
        assert [sys.getrefcount(x) for x in kept] == before
        assert sys.getallocatedblocks() - blocks < 200
        transport.close()
        peer.close()

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_protocol_that_closes_within_a_batch_gets_no_more_datagrams(backend):
    # Fails when: closing does not end the native way of receiving.
    class Once(asyncio.DatagramProtocol):
        got = 0

        def connection_made(self, transport):
            self.transport = transport

        def datagram_received(self, data, addr):
            self.got += 1
            self.transport.close()

        def connection_lost(self, exc):
            self.lost.set_result(exc)

    async def main():
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_datagram_endpoint(Once, ("127.0.0.1", 0))
        protocol.lost = loop.create_future()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            for _ in range(10):
                peer.sendto(b"x", transport.get_extra_info("sockname"))
        async with asyncio.timeout(10):
            assert await protocol.lost is None
        assert protocol.got == 1

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_system_exit_of_a_datagram_protocol_leaves_the_rest_for_the_next_run(backend):
    class Leaves(asyncio.DatagramProtocol):
        got = ()

        def datagram_received(self, data, addr):
            self.got += (data,)
            if data == b"0":
                raise SystemExit
            if data == b"4":
                loop.stop()

    loop = aiozc.new_event_loop(backend=backend)
    transport, protocol = loop.run_until_complete(
        loop.create_datagram_endpoint(Leaves, ("127.0.0.1", 0))
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        for i in range(5):
            peer.sendto(b"%d" % i, transport.get_extra_info("sockname"))
    with pytest.raises(SystemExit):
        loop.run_forever()
    loop.run_forever()
    assert protocol.got == (b"0", b"1", b"2", b"3", b"4")
    transport.close()
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()


def test_an_address_that_closes_the_transport_when_it_is_hashed():
    # Fails when: the connection is not looked at again after the look-up.
    async def main():
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, ("127.0.0.1", 0)
        )

        class Port(int):
            def __hash__(self):
                transport._loop_closed()
                return int.__hash__(self)

            def __eq__(self, other):
                return int.__eq__(self, other)

        to = transport.get_extra_info("sockname")
        transport.sendto(b"1", to)
        sock = transport._sock
        transport.sendto(b"2", (to[0], Port(to[1])))
        sock.close()
        transport._sock = None

    run(main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_sendto_takes_keywords_and_whatever_asyncio_takes(backend):
    class Data(bytes):
        pass

    async def main():
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, ("127.0.0.1", 0)
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.bind(("127.0.0.1", 0))
            peer.settimeout(10)
            to = peer.getsockname()
            for _ in range(2):
                transport.sendto(b"1", to)
                transport.sendto(data=b"2", addr=to)
                transport.sendto(b"3", addr=to)
                transport.sendto(Data(b"4"), to)
                transport.sendto(memoryview(b"5"), tuple(to))
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert b"".join(peer.recv(10) for _ in range(10)) == b"1234512345"
        with pytest.raises(TypeError):
            transport.sendto()
        with pytest.raises(TypeError, match="bytes-like"):
            transport.sendto("text", to)
        a, b = socket.socketpair()
        stream, _ = await loop.create_connection(Quiet, sock=a)
        assert not hasattr(stream, "sendto")
        stream.close()
        b.close()
        transport.close()

    run(main(), backend=backend)


# -- parts --


def test_parts_lock_what_can_be_resized_and_hold_the_rest():
    data = bytearray(b"12345")
    numbers = array.array("i", [1, 2])
    area = mmap.mmap(-1, 4096)
    parts = _fast.Parts([data, numbers, area, b"abc", np.arange(3, dtype="u1")])
    assert len(parts) == 5
    assert parts.nbytes == 5 + 2 * numbers.itemsize + 4096 + 3 + 3
    for change in (lambda: data.append(1), lambda: numbers.append(1), area.close):
        with pytest.raises(BufferError):
            change()
    del parts
    data.append(1)
    numbers.append(1)
    area.close()


@pytest.mark.parametrize("base", [bytes, bytearray])
def test_a_view_may_be_released_at_once(base):
    data = base(b"x" * 100)
    view = memoryview(data)[10:20]
    parts = _fast.Parts([view])
    view.release()
    assert parts.nbytes == 10
    if base is bytearray:
        with pytest.raises(BufferError):
            data.clear()
        del parts
        data.clear()


def test_parts_keep_their_exporters_alive():
    whole = np.zeros(100, "u1")
    gone = weakref.ref(whole)
    parts = _fast.Parts(memoryview(whole))
    del whole
    assert gone() is not None
    del parts
    assert gone() is None


def test_a_frozen_object_stands_for_what_it_holds():
    data = bytearray(b"123")
    parts = _fast.Parts([aiozc.frozen(data), aiozc.frozen(b"4")])
    assert parts.nbytes == 4
    with pytest.raises(BufferError):
        data.clear()


@pytest.mark.parametrize(
    ("bad", "error", "remedy"),
    [
        ("text", TypeError, "encode"),
        (None, TypeError, "bytes-like"),
        (np.zeros((4, 4))[:, 1], BufferError, "ascontiguousarray"),
        (memoryview(b"12345")[::2], BufferError, "contiguous"),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_a_bad_part_locks_nothing(bad, error, remedy, many):
    data = bytearray(b"123")
    with pytest.raises(error, match=remedy):
        _fast.Parts([data, bad, data] if many else bad)
    data.append(4)


def test_a_released_view_is_refused():
    view = memoryview(b"123")
    view.release()
    with pytest.raises(BufferError, match="released"):
        _fast.Parts(view)


def test_a_released_view_whose_memory_is_gone_is_refused():
    # Fails when: the view's exporter is looked at, which a released view does not hold any more.
    for _ in range(20):
        view = memoryview(bytes(1 << 22))
        view.release()
        with pytest.raises(BufferError, match="released"):
            _fast.Parts([view])


def test_a_list_that_shrinks_while_it_is_locked():
    if sys.version_info < (3, 12):
        pytest.skip("Python classes export buffers from 3.12 on")
    items: list = []

    class Shrinks:
        def __buffer__(self, flags):
            items.clear()
            return memoryview(b"123")

    items += [Shrinks(), b"gone"]
    parts = _fast.Parts(items)
    assert parts.nbytes == 3


def test_handles_must_have_slots():
    """The offsets are read off asyncio's class: another layout is refused, not guessed."""

    class Handle:
        _callback = _args = _context = _cancelled = None

    with pytest.raises(TypeError, match="slot"):
        _fast.bind_asyncio(Handle, Handle, None, asyncio.BaseEventLoop)


# -- flow control --


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["write", "zc_write", "sendto", "zc_sendto"])
def test_python_is_asked_once_for_each_pause_however_much_is_queued(backend, way, monkeypatch):
    # Fails when: every call beyond high water goes through Python, or one of a later pause does not.
    made = NativeTransport._maybe_pause_protocol
    asked = []
    monkeypatch.setattr(
        NativeTransport, "_maybe_pause_protocol", lambda self: (asked.append(self), made(self))[1]
    )

    class Counting(asyncio.Protocol):
        paused = resumed = 0

        def pause_writing(self):
            self.paused += 1

        def resume_writing(self):
            self.resumed += 1

        def error_received(self, exc):
            raise exc

    async def main():
        loop = asyncio.get_running_loop()
        datagrams = way.endswith("sendto")
        ours, peer = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM
        )
        if datagrams:
            transport, protocol = await loop.create_datagram_endpoint(Counting, sock=ours)
        else:
            transport, protocol = await loop.create_connection(Counting, sock=ours)
        peer.setblocking(False)
        send = getattr(transport, way)
        piece = bytes(8192)
        send(piece)  # a datagram's address is learned
        for cycle in range(1, 4):
            while protocol.paused < cycle:
                send(piece)
            before = len(asked)
            for _ in range(100):
                send(piece)
            assert len(asked) == before
            assert protocol.paused == cycle
            while protocol.resumed < cycle:
                try:
                    await asyncio.wait_for(loop.sock_recv(peer, 1 << 20), 5)
                except TimeoutError:
                    pytest.fail("it is not resumed")
        transport.abort()
        await asyncio.sleep(0)
        peer.close()

    run(main(), backend=backend)
