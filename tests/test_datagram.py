"""Datagrams: IPv4, IPv6 and Unix sockets, connected and not, on both backends; asyncio's behaviour is the
measure."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Collector(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.transport: Any = None
        self.got: list[tuple[bytes, Any]] = []
        self.errors: list[Exception] = []
        self.lost: list[Exception | None] = []
        self.paused = 0
        self.resumed = 0
        self.arrived = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.got.append((data, addr))
        self.arrived.set()

    def error_received(self, exc: Exception) -> None:
        self.errors.append(exc)
        self.arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.resumed += 1

    async def have(self, n: int, errors: int = 0) -> None:
        async with asyncio.timeout(20):
            while len(self.got) < n or len(self.errors) < errors:
                self.arrived.clear()
                await self.arrived.wait()


class Echo(Collector):
    def datagram_received(self, data: bytes, addr: Any) -> None:
        super().datagram_received(data, addr)
        self.transport.sendto(data, addr)


FAMILIES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


@pytest.fixture(params=FAMILIES, ids=["ipv4", "ipv6"])
def host(request: pytest.FixtureRequest) -> Iterator[str]:
    family, name = request.param
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))
        except OSError:
            pytest.skip(f"no {name} here")
    yield name


async def endpoint(factory: Any, **kwargs: Any) -> Any:
    return await asyncio.get_running_loop().create_datagram_endpoint(factory, **kwargs)


def test_datagrams_of_all_sizes_are_echoed_whole_and_with_addresses(run: Any, host: str) -> None:
    sizes = [0, 1, 2, 100, 1200, 1472, 1473, 8192, 8193, 30_000, 65_000]

    async def main() -> None:
        server, echo = await endpoint(Echo, local_addr=(host, 0))
        address = server.get_extra_info("sockname")
        client, back = await endpoint(Collector, remote_addr=address[:2])
        for i, size in enumerate(sizes):
            client.sendto(bytes([i]) * size)
            await back.have(i + 1)
        assert [len(data) for data, _ in back.got] == sizes
        assert all(data == bytes([i]) * sizes[i] for i, (data, _) in enumerate(back.got))
        assert {addr for _, addr in back.got} == {address}
        assert {addr for _, addr in echo.got} == {client.get_extra_info("sockname")}
        client.close()
        server.close()
        await asyncio.sleep(0.05)
        assert echo.lost == back.lost == [None]

    run(main())


def test_a_burst_of_one_turn_keeps_its_order(run: Any, host: str) -> None:
    async def main() -> None:
        server, got = await endpoint(Collector, local_addr=(host, 0))
        sock = server.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        address = server.get_extra_info("sockname")
        client, _ = await endpoint(Collector, family=sock.family)
        for i in range(150):
            client.sendto(b"%d" % i, address)
        await got.have(150)
        assert [data for data, _ in got.got] == [b"%d" % i for i in range(150)]
        assert client.get_write_buffer_size() == 0
        client.close()
        server.close()

    run(main())


def test_what_the_caller_changes_after_sendto_is_not_sent(run: Any) -> None:
    async def main() -> None:
        server, got = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        client, _ = await endpoint(Collector, remote_addr=server.get_extra_info("sockname"))
        data = bytearray(b"first")
        client.sendto(data)
        data[:] = b"later"
        client.sendto(memoryview(b"a-b-c")[::2])
        await got.have(2)
        assert [d for d, _ in got.got] == [b"first", b"abc"]
        client.close()
        server.close()

    run(main())


def test_a_refused_port_reaches_error_received_and_the_transport_lives(run: Any, host: str) -> None:
    async def main() -> None:
        server, _ = await endpoint(Collector, local_addr=(host, 0))
        address = server.get_extra_info("sockname")
        server.close()
        await asyncio.sleep(0.05)
        client, mine = await endpoint(Collector, remote_addr=address[:2])
        client.sendto(b"anybody?")
        await mine.have(0, errors=1)
        assert isinstance(mine.errors[0], ConnectionRefusedError)
        assert not client.is_closing()
        again, got = await endpoint(Collector, local_addr=address[:2])
        for _ in range(3):
            client.sendto(b"now")
            await asyncio.sleep(0.02)
        await got.have(1)
        client.close()
        again.close()

    run(main())


def test_a_datagram_that_is_too_long_is_an_error_of_its_own(run: Any) -> None:
    async def main() -> None:
        server, got = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        client, mine = await endpoint(Collector, remote_addr=server.get_extra_info("sockname"))
        client.sendto(b"before")
        client.sendto(bytes(70_000))
        client.sendto(b"after")
        await got.have(2)
        await mine.have(0, errors=1)
        assert [d for d, _ in got.got] == [b"before", b"after"]
        assert isinstance(mine.errors[0], OSError)
        assert client.get_write_buffer_size() == 0
        client.close()
        server.close()

    run(main())


def test_wrong_arguments_are_refused_in_the_call(run: Any) -> None:
    async def main() -> None:
        server, _ = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        address = server.get_extra_info("sockname")
        client, _ = await endpoint(Collector, remote_addr=address)
        with pytest.raises(TypeError):
            client.sendto("text")
        with pytest.raises(ValueError, match="Invalid address"):
            client.sendto(b"x", ("127.0.0.1", 1))
        client.sendto(b"x", address)
        client.close()
        server.close()

    run(main())


def test_a_host_name_is_looked_up_as_in_asyncio(run: Any) -> None:
    async def main() -> None:
        server, got = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        port = server.get_extra_info("sockname")[1]
        client, _ = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        client.sendto(b"named", ("localhost", port))
        await got.have(1)
        assert got.got[0] == (b"named", client.get_extra_info("sockname"))
        client.close()
        server.close()

    run(main())


def test_unix_datagrams_keep_order_through_a_full_receiver(run: Any, tmp_path: Path) -> None:
    # A Unix datagram socket loses nothing: a full one makes the sender wait, in order.
    path = str(tmp_path / "receiver")

    async def main() -> None:
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind(path)
        client, mine = await endpoint(Collector, family=socket.AF_UNIX)
        client.set_write_buffer_limits(high=20_000)
        for i in range(500):
            client.sendto(b"%03d" % i + bytes(1000), path)
        await asyncio.sleep(0.05)
        assert client.get_write_buffer_size() > 0, "the receiver was never full"
        assert mine.paused == 1
        assert mine.resumed == 0
        got = []
        receiver.setblocking(False)
        while len(got) < 500:
            try:
                got.append(int(receiver.recv(2000)[:3]))
            except BlockingIOError:
                await asyncio.sleep(0.001)
        assert got == list(range(500))
        await asyncio.sleep(0.05)
        assert client.get_write_buffer_size() == 0
        assert mine.resumed == 1
        client.close()
        await asyncio.sleep(0)
        receiver.close()

    run(main())


def test_unix_addresses_are_those_of_recvfrom(run: Any, tmp_path: Path) -> None:
    async def main() -> None:
        server, echo = await endpoint(
            Echo, family=socket.AF_UNIX, local_addr=str(tmp_path / "server")
        )
        client, mine = await endpoint(
            Collector,
            family=socket.AF_UNIX,
            local_addr=str(tmp_path / "client"),
            remote_addr=str(tmp_path / "server"),
        )
        client.sendto(b"hello")
        await mine.have(1)
        assert mine.got == [(b"hello", str(tmp_path / "server"))]
        assert echo.got == [(b"hello", str(tmp_path / "client"))]
        client.close()
        server.close()

    run(main())


def test_close_sends_what_is_queued_and_abort_does_not_raise(run: Any) -> None:
    async def main() -> None:
        server, got = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        address = server.get_extra_info("sockname")
        client, mine = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        client.sendto(b"last", address)
        client.close()
        await got.have(1)
        assert mine.lost == [None]
        client.sendto(b"never", address)
        other, lost = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        other.abort()
        await asyncio.sleep(0.01)
        assert lost.lost == [None]
        server.close()

    run(main())


def test_errors_of_what_is_sent_while_closing_are_told_before_the_end(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_datagram_endpoint(
            Collector, local_addr=("127.0.0.1", 0)
        )
        order: list[str] = []
        protocol.error_received = lambda exc: order.append(type(exc).__name__)  # type: ignore[method-assign]
        protocol.connection_lost = lambda exc: order.append(f"lost: {exc}")  # type: ignore[method-assign]
        transport.sendto(bytes(70_000), ("127.0.0.1", 9))  # EMSGSIZE, whoever listens
        transport.close()
        await asyncio.sleep(0.1)
        assert order == ["OSError", "lost: None"]

    run(main())


def test_an_exception_in_the_protocol_is_reported_and_the_next_datagram_comes(run: Any) -> None:
    reports: list[dict[str, Any]] = []

    class Failing(Collector):
        def datagram_received(self, data: bytes, addr: Any) -> None:
            super().datagram_received(data, addr)
            if data == b"bad":
                raise RuntimeError("on purpose")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        server, got = await endpoint(Failing, local_addr=("127.0.0.1", 0))
        client, _ = await endpoint(Collector, remote_addr=server.get_extra_info("sockname"))
        client.sendto(b"bad")
        client.sendto(b"good")
        await got.have(2)
        client.close()
        server.close()

    run(main())
    assert [str(r["exception"]) for r in reports] == ["on purpose"]


def test_thousands_of_round_trips_lose_nothing_when_one_is_in_flight(run: Any) -> None:
    async def main() -> None:
        server, _ = await endpoint(Echo, local_addr=("127.0.0.1", 0))
        client, back = await endpoint(Collector, remote_addr=server.get_extra_info("sockname"))
        for i in range(3000):
            client.sendto(b"%d" % i)
            await back.have(i + 1)
        assert [d for d, _ in back.got] == [b"%d" % i for i in range(3000)]
        client.close()
        server.close()

    run(main())


def test_a_forked_child_does_not_send_what_its_parent_has_queued(backend: str) -> None:
    script = """
import asyncio, os, socket, sys, aiozc
loop = aiozc.new_event_loop(backend=sys.argv[1])
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for sock in (ours, theirs):
    sock.setblocking(False)
got = []
def drain():
    while True:
        try:
            got.append(int(theirs.recv(100)))
        except BlockingIOError:
            return
async def begin():
    transport, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, sock=ours)
    for i in range(3000):
        transport.sendto(b"%d" % i)
    await asyncio.sleep(0.05)
    return transport
async def rest(transport):
    while transport.get_write_buffer_size():
        drain()
        await asyncio.sleep(0.005)
    drain()
transport = loop.run_until_complete(begin())
assert transport.get_write_buffer_size()
child = os.fork()
if not child:
    loop.run_until_complete(asyncio.sleep(0.3))
    os._exit(0)
while not os.waitpid(child, os.WNOHANG)[0]:
    drain()
assert len(got) < 3000
loop.run_until_complete(rest(transport))
assert got == list(range(3000)), (len(got), got[:50])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, backend], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
