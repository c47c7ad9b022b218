"""Accepted connections: natively from the descriptor to the protocol, and to their end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import gc
import os
import socket
import struct
import sys
import warnings

import pytest

import aiozc
from aiozc.transports import listener as listeners
from aiozc.transports.stream import StreamTransport

BACKENDS = ["uring", "epoll"]
FAMILIES = ["127.0.0.1", "::1", "unix", "abstract", "0.0.0.0"]


def run(main, **settings):
    return aiozc.run(asyncio.wait_for(main, 20), **settings)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Recorder(asyncio.Protocol):
    """Notes what happens, in order; `fails` names the callback that raises."""

    fails = ""
    error: BaseException = ValueError("on purpose")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lost = asyncio.get_running_loop().create_future()

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise self.error

    def connection_made(self, transport):
        self.transport = transport
        self.note("made")

    def data_received(self, data):
        self.calls.append(data.decode())

    def eof_received(self):
        self.note("eof")

    def connection_lost(self, exc):
        self.lost.set_result(exc)
        self.note("lost")


def recorders():
    """A protocol factory, and what it made so far."""
    made: list[Recorder] = []

    def factory():
        made.append(Recorder())
        return made[-1]

    return made, factory


async def serve(factory, where="127.0.0.1", tmp_path=None):
    """The server, and what connects to it."""
    loop = asyncio.get_running_loop()
    if where in ("unix", "abstract"):
        path = str(tmp_path / "s") if where == "unix" else f"\0aiozc-test-{os.getpid()}"
        server = await loop.create_unix_server(factory, path)
        return server, lambda: connected(socket.AF_UNIX, path)
    server = await loop.create_server(factory, where, 0)
    address = server.sockets[0].getsockname()[:2]
    family = server.sockets[0].family
    return server, lambda: connected(
        family, ("127.0.0.1" if where == "0.0.0.0" else where, address[1])
    )


def connected(family, address) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.connect(address)
    return sock


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def ended(server) -> None:
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", FAMILIES)
@pytest.mark.parametrize("when", ["open", "reset", "closed"])
def test_addresses_and_socket_are_told_whenever_they_are_asked_for(backend, where, when, tmp_path):
    # Fails when: the peer's address is read only when it is asked for, and the peer is gone by then.
    async def main():
        made, factory = recorders()
        server, connect = await serve(factory, where, tmp_path)
        peer = connect()
        mine, theirs, family = peer.getsockname(), peer.getpeername(), peer.family
        await until(lambda: made and made[0].calls)
        transport = made[0].transport
        if when == "reset":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if when != "open":
            peer.close()
            await made[0].lost
            await asyncio.sleep(0)
        assert transport.get_extra_info("peername") == mine
        assert transport.get_extra_info("sockname") == theirs
        assert transport.get_extra_info("sslcontext", "none") == "none"
        sock = transport.get_extra_info("socket")
        assert sock.family == family
        assert sock.type == socket.SOCK_STREAM
        assert (sock.fileno() >= 0) is (when == "open")
        assert transport.get_extra_info("socket") is sock
        peer.close()
        await made[0].lost
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_family_whose_addresses_are_not_read_natively_is_left_to_asyncio(backend, monkeypatch):
    # Fails when: the addresses of an AF_VSOCK connection are told as None.
    async def main():
        made, factory = recorders()
        with contextlib.suppress(OSError), socket.socket(socket.AF_VSOCK) as sock:
            sock.bind((socket.VMADDR_CID_ANY, socket.VMADDR_PORT_ANY))
            server = await asyncio.get_running_loop().create_server(factory, sock=sock)
            (listener,) = asyncio.get_running_loop()._reactor.listeners.values()
            assert listener._transport is None
            await ended(server)
        # Nobody may be there to connect to that, so the rest is of another family.
        monkeypatch.setattr(listeners, "NAMED", ())
        server, connect = await serve(factory)
        peer = connect()
        await until(lambda: made and made[0].calls)
        assert made[0].transport.get_extra_info("peername") == peer.getsockname()
        assert made[0].transport.get_extra_info("sockname") == peer.getpeername()
        peer.sendall(b"data")
        peer.close()
        await made[0].lost
        assert made[0].calls == ["made", "data", "eof", "lost"]
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("how", ["close", "abort", "peer"])
def test_a_connection_leaves_no_descriptor_behind(backend, asked, how):
    async def main():
        made, factory = recorders()
        server, connect = await serve(factory)
        connect().close()
        await until(lambda: made and made[0].lost.done())
        before = descriptors()
        for _ in range(20):
            peer = connect()
            n = len(made)
            await until(lambda n=n: len(made) > n and made[-1].calls)
            transport = made[-1].transport
            if asked:
                assert transport.get_extra_info("socket").fileno() >= 0
            if how == "peer":
                peer.close()
            else:
                getattr(transport, how)()
                getattr(transport, how)()
            await made[-1].lost
            peer.close()
        await asyncio.sleep(0)
        assert descriptors() == before
        assert all(protocol.calls.count("lost") == 1 for protocol in made)
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_is_sent_on_an_accepted_connection_in_debug_mode(backend, tmp_path):
    # Fails when: the socket object does not know that it is non-blocking, which asyncio looks at then.
    async def main():
        asyncio.get_running_loop().set_debug(True)
        made, factory = recorders()
        server, connect = await serve(factory)
        peer = connect()
        await until(lambda: made and made[0].calls)
        (tmp_path / "file").write_bytes(b"x" * 10_000)
        with (tmp_path / "file").open("rb") as file:
            await asyncio.get_running_loop().sendfile(made[0].transport, file, fallback=False)
        assert peer.recv(10_000, socket.MSG_WAITALL) == b"x" * 10_000
        peer.close()
        await made[0].lost
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_connection_that_ends_while_a_file_is_sent_is_not_listed_any_more(backend, tmp_path):
    async def main():
        loop = asyncio.get_running_loop()
        made, factory = recorders()
        server, connect = await serve(factory)
        peer = connect()
        await until(lambda: made and made[0].calls)
        with (tmp_path / "file").open("wb+") as file:
            file.truncate(50 << 20)
            sending = asyncio.ensure_future(loop.sendfile(made[0].transport, file, fallback=False))
            await asyncio.sleep(0.05)
            made[0].transport.abort()
            await made[0].lost
            sending.cancel()
            await asyncio.wait([sending])
        assert made[0].transport not in loop._transports.values()
        peer.close()
        await ended(server)

    run(main(), backend=backend)


def test_two_who_ask_for_the_socket_at_once_get_the_same(monkeypatch):
    # As threads do: the second one asks while the first one's object is made.
    own_socket = StreamTransport._own_socket
    inner = []

    def asked_meanwhile(self):
        monkeypatch.undo()
        inner.append(self._sock)
        return own_socket(self)

    async def main():
        made, factory = recorders()
        server, connect = await serve(factory)
        peer = connect()
        await until(lambda: made and made[0].calls)
        transport = made[0].transport
        monkeypatch.setattr(StreamTransport, "_own_socket", asked_meanwhile)
        assert transport._sock is inner[0]
        assert inner[0].fileno() == transport._sock_fd
        peer.close()
        await made[0].lost
        await ended(server)

    run(main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_connection_leaves_no_reference_behind(backend):
    class Echo(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.transport.write(data)

    class Closes(Echo):
        def data_received(self, data):
            self.transport.write(data)
            self.transport.close()

    class Fails(Echo):
        def connection_made(self, transport):
            raise ValueError("connection_made")

    class Refuses(Echo):
        def __init__(self):
            raise ValueError("factory")

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        kinds = iter(())

        def factory():
            return next(kinds)()

        server, connect = await serve(factory)

        async def round_of(n):
            nonlocal kinds
            for kind in (Echo, Closes, Fails, Refuses):
                kinds = iter([kind] * n)
                peers = [connect() for _ in range(n)]
                for peer in peers:
                    peer.setblocking(False)
                    await loop.sock_sendall(peer, b"x")
                    if kind in (Echo, Closes):
                        assert await loop.sock_recv(peer, 10) == b"x"
                    peer.close()
                await until(lambda: not loop._transports)
                await asyncio.sleep(0.01)
            gc.collect()
            listener = next(iter(loop._reactor.listeners.values()))
            known = [loop, server, factory, listener, listener._context, listener._made_of]
            known += [loop._reactor, loop._reactor.held, type(listener._transport), None]
            return [sys.getrefcount(x) for x in known[:-1]], sys.getallocatedblocks()

        await round_of(40)
        refs, blocks = await round_of(40)
        again, more = await round_of(40)
        assert again == refs
        assert more - blocks < 40, f"{more - blocks} blocks for 160 connections"
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("debug", [False, True])
def test_a_factory_that_raises_closes_the_connection_and_is_told_in_debug_mode(backend, debug):
    async def main():
        loop = asyncio.get_running_loop()
        told = []
        loop.set_exception_handler(lambda _, context: told.append(context))
        loop.set_debug(debug)

        def factory():
            raise ValueError("no protocol")

        server, connect = await serve(factory)
        before = descriptors()
        for _ in range(5):
            peer = connect()
            peer.setblocking(False)
            assert await loop.sock_recv(peer, 1) == b""
            peer.close()
        assert descriptors() == before
        assert not loop._transports
        assert [c["message"] for c in told] == [
            "Error on transport creation for incoming connection"
        ] * (5 if debug else 0)
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_refuses_the_transport_leaves_nothing_of_it(backend):
    # Fails when: what was told of the transport before is not taken back.
    async def main():
        loop = asyncio.get_running_loop()
        server, connect = await serve(Recorder)

        def refuse(*_):
            raise ValueError("refused")

        server._attach = refuse
        conns, before = set(loop._reactor.conns), descriptors()
        peer = connect()
        peer.setblocking(False)
        assert await loop.sock_recv(peer, 1) == b""
        peer.close()
        assert set(loop._reactor.conns) == conns
        assert not loop._transports
        assert descriptors() == before
        assert loop.zc_stats().connections == 0
        del server._attach
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_comes_after_a_connection_made_that_raised(backend):
    async def main():
        loop = asyncio.get_running_loop()
        told, made = [], []
        loop.set_exception_handler(lambda _, context: told.append(context))

        class Fails(Recorder):
            fails = "made"

            def __init__(self):
                super().__init__()
                made.append(self)

        server, connect = await serve(Fails)
        with connect() as peer:
            peer.send(b"hello")
        await until(lambda: made)
        assert await made[0].lost is None
        assert made[0].calls == ["made", "hello", "eof", "lost"]
        ((message, exception, protocol),) = (
            (c["message"], c["exception"], c["protocol"]) for c in told
        )
        assert message == "Exception in callback connection_made()"
        assert (exception, protocol) == (Fails.error, made[0])
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fails", ["eof", "lost"])
def test_a_callback_of_the_end_that_raises_is_told_and_the_end_comes(backend, fails):
    async def main():
        loop = asyncio.get_running_loop()
        told, made = [], []
        loop.set_exception_handler(lambda _, context: told.append(context))

        class Fails(Recorder):
            def __init__(self):
                super().__init__()
                self.fails = fails
                made.append(self)

        server, connect = await serve(Fails)
        before = descriptors()
        connect().close()
        await until(lambda: made)
        error = await made[0].lost
        await asyncio.sleep(0)
        assert made[0].calls == ["made", "eof", "lost"]
        assert error is (Fails.error if fails == "eof" else None)
        assert [c["exception"] for c in told] == [Fails.error]
        if fails == "eof":
            assert told[0]["message"] == "Fatal error: protocol.eof_received() call failed."
        assert not loop._transports
        assert descriptors() == before
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["factory", "made", "eof"])
def test_an_exit_ends_the_run_and_the_next_one_goes_on(backend, where):
    # Fails when: SystemExit out of one connection loses those behind it in the same batch.
    loop = aiozc.new_event_loop(backend=backend)
    made, exits = [], [SystemExit("on purpose")]

    class Exits(Recorder):
        def __init__(self):
            if where == "factory" and exits:
                raise exits.pop()
            super().__init__()
            made.append(self)

        def note(self, name):
            super().note(name)
            if name == where and exits:
                raise exits.pop()

    async def rest(server, peers):
        for peer in peers:
            peer.close()
        await until(lambda: len(made) == (3 if where == "factory" else 4))
        if where == "eof":  # as in asyncio, it is left as it is
            await until(lambda: sum("lost" in p.calls for p in made) == 3)
            (left,) = (p for p in made if p.calls == ["made", "eof"])
            left.transport.abort()
        await asyncio.wait_for(asyncio.gather(*(p.lost for p in made)), 10)
        await ended(server)

    try:
        server, connect = loop.run_until_complete(serve(Exits))
        peers = [connect() for _ in range(4)]  # while the loop does not run: one batch
        if where == "eof":
            for peer in peers:
                peer.close()
        with pytest.raises(SystemExit):
            loop.run_until_complete(asyncio.sleep(5))
        loop.run_until_complete(rest(server, peers))
        assert all(p.calls == ["made", "eof", "lost"] for p in made)
    finally:
        loop.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_connection_has_a_context_of_its_own_from_factory_to_end(backend):
    number = contextvars.ContextVar("number")

    async def main():
        made = []
        number.set("server's")

        class Sets(Recorder):
            def __init__(self):
                super().__init__()
                assert number.get() == "server's"
                number.set(len(made))
                self.seen = []
                made.append(self)

            def note(self, name):
                super().note(name)
                self.seen.append(number.get())

            def data_received(self, data):
                self.note("data")

        server, connect = await serve(Sets)
        peers = [connect() for _ in range(5)]
        for peer in peers:
            peer.send(b"x")
            peer.close()
        await until(lambda: len(made) == 5)
        await asyncio.gather(*(p.lost for p in made))
        assert [p.calls for p in made] == [["made", "data", "eof", "lost"]] * 5
        assert [p.seen for p in made] == [[i] * 4 for i in range(5)]
        assert number.get() == "server's"
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 100_000, 8 << 20])
def test_what_was_written_before_close_arrives_and_then_the_end(backend, size):
    async def main():
        loop = asyncio.get_running_loop()
        made = []

        class Answers(Recorder):
            def __init__(self):
                super().__init__()
                made.append(self)

            def connection_made(self, transport):
                super().connection_made(transport)
                transport.write(bytes(size))
                transport.close()
                assert transport.is_closing()
                transport.write(b"")

        server, connect = await serve(Answers)
        peer = connect()
        peer.setblocking(False)
        got = 0
        while data := await loop.sock_recv(peer, 1 << 20):
            got += len(data)
        assert got == size
        assert await made[0].lost is None
        assert made[0].calls == ["made", "lost"]
        peer.close()
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_protocol_that_only_looks_like_a_buffered_one_is_served_as_one(backend):
    async def main():
        loop = asyncio.get_running_loop()
        got = loop.create_future()

        class Looks(asyncio.BaseProtocol):
            def get_buffer(self, hint):
                self.buffer = bytearray(100)
                return self.buffer

            def buffer_updated(self, n):
                got.set_result(bytes(self.buffer[:n]))

            def eof_received(self):
                pass

        server, connect = await serve(Looks)
        with connect() as peer:
            peer.send(b"buffered")
            assert await got == b"buffered"
        await ended(server)

    run(main(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asked", [False, True])
def test_a_transport_that_outlives_its_loop_unclosed_is_warned_of(backend, asked):
    loop = aiozc.new_event_loop(backend=backend)
    made = []

    class Keeps(Recorder):
        def __init__(self):
            super().__init__()
            made.append(self)

    async def main():
        server, connect = await serve(Keeps)
        peer = connect()
        await until(lambda: made and made[0].calls)
        if asked:
            made[0].transport.get_extra_info("socket")
        return server, peer

    server, peer = loop.run_until_complete(main())
    server.close()
    loop.close()
    fd = made[0].transport._sock_fd
    os.fstat(fd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.clear()
        gc.collect()
    assert [str(w.message)[:19] for w in caught if w.category is ResourceWarning] == [
        "unclosed transport "
    ]
    with pytest.raises(OSError) as error:
        os.fstat(fd)
    assert error.value.errno == errno.EBADF
    peer.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_server_waits_for_its_connections(backend):
    async def main():
        made = []

        class Keeps(Recorder):
            def __init__(self):
                super().__init__()
                made.append(self)

        server, connect = await serve(Keeps)
        peers = [connect() for _ in range(3)]
        await until(lambda: len(made) == 3)
        server.close()
        waiting = asyncio.ensure_future(server.wait_closed())
        await asyncio.sleep(0.01)
        if sys.version_info >= (3, 12):
            assert not waiting.done()
        if sys.version_info >= (3, 13):
            server.close_clients()
        else:
            for protocol in made:
                protocol.transport.close()
        await waiting
        await asyncio.gather(*(p.lost for p in made))
        for peer in peers:
            assert peer.recv(1) == b""
            peer.close()

    run(main(), backend=backend)
