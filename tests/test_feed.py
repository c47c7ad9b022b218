"""Bytes into a StreamReader without asyncio's own functions (fast/feed.c): what a program sees is what
they would have done, and whatever is not plain is done by them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import socket
import sys
import weakref
from asyncio import streams
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from aiozc import hooks

Run = Callable[[Coroutine[Any, Any, Any]], Any]
PYTHONS = ("data_received", "_stream_reader", "feed_data", "_wakeup_waiter")


class Derived(asyncio.StreamReaderProtocol):
    """Feeds as asyncio's, but by asyncio's functions: it is another class."""


@contextlib.asynccontextmanager
async def connected(
    protocol_class: Any = asyncio.StreamReaderProtocol, limit: int = 2**16
) -> AsyncIterator[tuple[Any, Any, socket.socket]]:
    """A reader, its protocol, and the peer's socket."""
    loop = asyncio.get_running_loop()
    ours, peer = socket.socketpair()
    peer.setblocking(False)
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = protocol_class(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, sock=ours)
    try:
        yield reader, protocol, peer
    finally:
        transport.close()
        peer.close()
        await asyncio.sleep(0)


async def until(done: Callable[[], Any]) -> None:
    for _ in range(2000):
        if done():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


@contextlib.contextmanager
def called(names: tuple[str, ...] = PYTHONS) -> Iterator[list[str]]:
    """The Python functions of asyncio.streams with these names that run meanwhile."""
    seen: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename == streams.__file__ and code.co_name in names:
            seen.append(code.co_name)

    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def told(loop: asyncio.AbstractEventLoop) -> list[dict[str, Any]]:
    contexts: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: contexts.append(context))
    return contexts


def test_asyncio_is_as_it_is_known() -> None:
    # Fails when: a Python has other functions there. Then all is slower and nothing is wrong; read
    # what they do, and bring feed.c and hooks.reader_is_known to that.
    assert hooks.reader_is_known()


def test_a_plain_reader_is_fed_without_pythons_functions(backend: str, run: Run) -> None:
    async def main() -> None:
        async with connected() as (reader, _, peer):
            with called() as seen:
                reading = asyncio.ensure_future(reader.read(100))
                await asyncio.sleep(0.01)
                peer.send(b"who waits is woken")
                await until(reading.done)
                peer.send(b"nobody waits")
                await until(lambda: reader._buffer)
            assert seen == []
            assert reading.result() == b"who waits is woken"
            assert await reader.read(100) == b"nobody waits"

    run(main())


def test_a_derived_protocol_is_called(backend: str, run: Run) -> None:
    # Fails when: the class is not compared; this one counts what it gets.
    class Counts(asyncio.StreamReaderProtocol):
        count = 0

        def data_received(self, data: bytes) -> None:
            self.count += len(data)
            super().data_received(data)

    async def main() -> None:
        async with connected(Counts) as (reader, protocol, peer):
            peer.send(b"12345")
            assert await reader.readexactly(5) == b"12345"
            assert protocol.count == 5

    run(main())


class ReaderOfUpperCase(asyncio.StreamReader):
    def feed_data(self, data: bytes) -> None:
        super().feed_data(data.upper())


def test_a_derived_reader_is_called(backend: str, run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with connected() as (_, protocol, peer):
            reader = ReaderOfUpperCase(loop=loop)
            protocol._stream_reader_wr = weakref.ref(reader)
            peer.send(b"abc")
            assert await reader.readexactly(3) == b"ABC"

    run(main())


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (asyncio.StreamReaderProtocol, "data_received"),
        (asyncio.StreamReader, "feed_data"),
        (asyncio.StreamReader, "_wakeup_waiter"),
    ],
)
def test_a_method_replaced_on_the_class_is_called_from_then_on(
    backend: str, run: Run, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    # Fails when: the classes are compared once, or not at all. Twice, for the second answer is remembered.
    async def main() -> None:
        async with connected() as (reader, _, peer):
            for _ in range(2):
                seen: list[str] = []
                with monkeypatch.context() as patch:
                    original = getattr(where, name)

                    def spy(self: Any, *args: Any, original: Any = original) -> None:
                        seen.append(name)  # noqa: B023
                        original(self, *args)

                    patch.setattr(where, name, spy)
                    for expected in (1, 2):
                        reading = asyncio.ensure_future(reader.read(10))
                        await asyncio.sleep(0)
                        peer.send(b"x")
                        assert await reading == b"x"
                        assert len(seen) == expected
                with called() as frames:
                    peer.send(b"y")
                    assert await reader.read(10) == b"y"
                assert frames == []  # and not any more

    run(main())


@pytest.mark.parametrize("name", ["data_received", "feed_data", "_wakeup_waiter"])
def test_a_method_replaced_on_one_object_is_called(backend: str, run: Run, name: str) -> None:
    # Fails when: the objects' own dictionaries are not looked into.
    async def main() -> None:
        async with connected() as (reader, protocol, peer):
            peer.send(b"before")
            assert await reader.read(10) == b"before"
            target = protocol if name == "data_received" else reader
            original, seen = getattr(target, name), []

            def spy(*args: Any) -> None:
                seen.append(args)
                original(*args)

            setattr(target, name, spy)
            peer.send(b"after")
            assert await reader.read(10) == b"after"
            assert len(seen) == 1

    run(main())


@pytest.mark.parametrize("name", ["_buffer", "_waiter", "_limit", "_eof"])
def test_an_attribute_that_the_class_computes_is_asked(
    backend: str, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Fails when: the object's dictionary is believed though the class has a property of that name.
    async def main() -> None:
        asked = []
        async with connected() as (reader, _, peer):

            def getter(self: Any) -> Any:
                asked.append(name)
                return self.__dict__[name]

            def setter(self: Any, value: Any) -> None:
                self.__dict__[name] = value

            with monkeypatch.context() as patch, called() as seen:
                patch.setattr(asyncio.StreamReader, name, property(getter, setter), raising=False)
                peer.send(b"x")
                await until(lambda: reader.__dict__["_buffer"])
            assert "feed_data" in seen
            assert await reader.read(10) == b"x"

    run(main())


@pytest.mark.parametrize("protocol_class", [asyncio.StreamReaderProtocol, Derived])
def test_reading_pauses_beyond_twice_the_limit(backend: str, run: Run, protocol_class: Any) -> None:
    # Fails when: what exceeds the limit is appended natively, which never pauses.
    async def main() -> None:
        async with connected(protocol_class, limit=50) as (reader, _, peer):
            peer.send(bytes(60))
            await until(lambda: len(reader._buffer) == 60)
            peer.send(bytes(40))
            await until(lambda: len(reader._buffer) == 100)
            assert reader._transport.is_reading() and not reader._paused
            peer.send(b"1")
            await until(lambda: reader._paused)
            assert len(reader._buffer) == 101
            assert not reader._transport.is_reading()
            assert await reader.readexactly(101) == bytes(100) + b"1"
            assert reader._transport.is_reading() and not reader._paused

    run(main())


@pytest.mark.parametrize("protocol_class", [asyncio.StreamReaderProtocol, Derived])
def test_random_pieces_and_reads_come_out_alike(
    backend: str, run: Run, protocol_class: Any
) -> None:
    async def main() -> None:
        chance = random.Random(7)
        contents = chance.randbytes(60_000)
        async with connected(protocol_class, limit=700) as (reader, _, peer):

            async def send() -> None:
                loop = asyncio.get_running_loop()
                at = 0
                while at < len(contents):
                    n = chance.choice((1, 10, 300, 699, 1400, 1401, 5000))
                    await loop.sock_sendall(peer, contents[at : at + n])
                    at += n
                    if chance.random() < 0.3:
                        await asyncio.sleep(0)
                peer.shutdown(socket.SHUT_WR)

            sending, got = asyncio.ensure_future(send()), b""
            while len(got) < len(contents):
                how = chance.randrange(3)
                left = len(contents) - len(got)
                if how == 0:
                    piece = await reader.read(chance.randrange(1, 2000))
                elif how == 1:
                    piece = await reader.readexactly(min(left, chance.randrange(1, 3000)))
                else:
                    try:
                        piece = await reader.readuntil(b"\n")
                    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                        piece = await reader.read(1000)
                if not piece:
                    break
                got += piece
            await sending
            assert got == contents

    run(main())


def test_who_was_cancelled_is_not_woken_and_nothing_is_lost(backend: str, run: Run) -> None:
    async def main() -> None:
        async with connected() as (reader, _, peer):
            waiter = asyncio.get_running_loop().create_future()
            reader._waiter = waiter
            waiter.cancel()
            errors = told(asyncio.get_running_loop())
            peer.send(b"kept")
            await until(lambda: reader._buffer)
            assert reader._waiter is None and errors == []
            assert await reader.read(10) == b"kept"

    run(main())


def test_a_waiter_runs_in_the_transports_context(backend: str, run: Run) -> None:
    # Fails when: the context is not entered: whatever the waiter does would see another one.
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")
    seen = []

    class Waiter:
        def cancelled(self) -> bool:
            return False

        def set_result(self, _: None) -> None:
            seen.append(mark.get())

    async def main() -> None:
        mark.set("of the one who connected")
        async with connected() as (reader, _, peer):
            reader._waiter = Waiter()
            mark.set("later")
            peer.send(b"x")
            await until(lambda: seen)

    run(main())
    assert seen == ["of the one who connected"]


def failing(reader: Any) -> None:
    class Waiter:
        def cancelled(self) -> bool:
            raise ValueError("an error of the waiter")

    reader._waiter = Waiter()


def exported(reader: Any) -> None:
    reader._buffer.extend(b"held")
    reader.view = memoryview(reader._buffer)


@pytest.mark.parametrize("protocol_class", [asyncio.StreamReaderProtocol, Derived])
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (failing, ValueError),
        (exported, BufferError),
        (lambda reader: setattr(reader, "_buffer", None), AttributeError),
        (lambda reader: setattr(reader, "_limit", "10"), TypeError),
        (lambda reader: reader.feed_eof(), AssertionError),
    ],
)
def test_errors_are_told_as_out_of_data_received(
    backend: str, run: Run, protocol_class: Any, spoil: Any, error: type[Exception]
) -> None:
    # Fails when: something odd is taken for plain; or an exception on the native way is lost.
    async def main() -> None:
        async with connected(protocol_class) as (reader, _, peer):
            contexts = told(asyncio.get_running_loop())
            spoil(reader)
            peer.send(b"x")
            await until(lambda: contexts)
            assert type(contexts[0]["exception"]) is error
            assert contexts[0]["message"] == "Fatal error: protocol.data_received() call failed."
            await until(lambda: reader._transport.is_closing())

    run(main())


class OddKey:
    """In an object's dictionary: the look-up of that attribute fails once."""

    def __init__(self, name: str) -> None:
        self.hash = hash(name)
        self.fails = False

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if self.fails:
            self.fails = False
            raise ValueError("odd")
        return False


@pytest.mark.parametrize("name", ["_stream_reader_wr", "_limit", "_eof", "_buffer", "_waiter"])
def test_a_look_up_that_failed_is_not_told_out_of_what_did_not_fail(
    backend: str, run: Run, name: str
) -> None:
    # Fails when: data_received is called with that exception set.
    async def main() -> None:
        contexts = told(asyncio.get_running_loop())
        async with connected() as (reader, protocol, peer):
            attributes = vars(protocol if name == "_stream_reader_wr" else reader)
            before = dict(attributes)
            attributes.clear()
            attributes[odd := OddKey(name)] = None
            attributes.update(before)
            odd.fails = True
            peer.send(b"x")
            await until(lambda: not odd.fails)
            await until(lambda: reader._buffer)
        assert contexts == []
        assert bytes(reader._buffer) == b"x"

    run(main())


def test_a_reader_that_nobody_has_any_more_is_no_error(backend: str, run: Run) -> None:
    async def main() -> None:
        contexts = told(asyncio.get_running_loop())
        async with connected() as (_, protocol, peer):
            protocol._stream_reader_wr = None
            peer.send(b"x")
            await asyncio.sleep(0.02)
            protocol._stream_reader_wr = weakref.ref(asyncio.StreamReader())
            peer.send(b"x")
            await asyncio.sleep(0.02)
        assert contexts == []

    run(main())


def test_no_reference_is_lost_or_kept(backend: str, run: Run) -> None:
    async def main() -> None:
        async with connected() as (reader, protocol, peer):
            for _ in range(20):
                peer.send(b"x")
                await reader.read(10)
            counted = (reader, protocol, reader._buffer, None)
            before = [sys.getrefcount(o) for o in counted]
            for _ in range(300):
                peer.send(b"x")
                await reader.read(10)
            after = [sys.getrefcount(o) for o in counted]
            assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True))

    run(main())
