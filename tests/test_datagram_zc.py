"""zc_sendto: datagrams from the caller's memory, on both backends, over IPv4, IPv6 and Unix sockets.

Over loopback the kernel copies when it delivers, so nothing stays pinned there; what needs memory that is
really read later is in test_datagram_pinned.py.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from order_support import in_thread
from support import copies, eventually, soon
from test_datagram import FAMILIES, Collector, endpoint

import aiozc


@pytest.fixture(params=FAMILIES, ids=["ipv4", "ipv6"])
def host(request: pytest.FixtureRequest) -> Iterator[str]:
    family, name = request.param
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))
        except OSError:
            pytest.skip(f"no {name} here")
    yield name


@pytest.fixture
def forced(run: Any, forced_loop_factory: Any) -> Any:
    """run() on a loop that sends every operation zero-copy."""
    return functools.partial(run, factory=forced_loop_factory)


async def pair(host: str, connected: bool = True) -> tuple[Any, Any, Any, Any, Any]:
    """A receiver's transport and protocol, a sender's, and the address to give to the sender."""
    server, got = await endpoint(Collector, local_addr=(host, 0))
    address = server.get_extra_info("sockname")
    if connected:
        client, mine = await endpoint(Collector, remote_addr=address[:2])
        return server, got, client, mine, None
    sock = server.get_extra_info("socket")
    client, mine = await endpoint(Collector, family=sock.family)
    return server, got, client, mine, address


def data_of(got: Any) -> list[bytes]:
    return [data for data, _ in got.got]


# --- what arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
def test_datagrams_arrive_whole_and_in_call_order_with_copied_ones(
    forced: Any, host: str, connected: bool, backend: str
) -> None:
    # Fails when: a copied datagram does not wait for the requests before it.
    async def main() -> None:
        server, got, client, mine, addr = await pair(host, connected)
        sent, ops = [], []
        for i in range(60):
            data = b"%03d" % i + bytes([i]) * (i * 37)
            sent.append(data)
            if i % 5 == 3:
                client.sendto(data, addr)
            else:
                ops.append(client.zc_sendto(bytearray(data), addr))
        results = [await soon(op) for op in ops]
        await got.have(60)
        assert data_of(got) == sent
        assert [r.nbytes for r in results] == [op.nbytes for op in ops]
        assert {r.path for r in results} == {"copied"}  # loopback: the kernel's report
        assert client.get_write_buffer_size() == 0
        stats = asyncio.get_running_loop().zc_stats()
        assert stats.operations == 48
        assert stats.operations_live == stats.queued_bytes == stats.pinned_bytes == 0
        assert stats.zc_requests == (0 if copies(backend) else 48)
        assert not mine.errors
        client.close()
        server.close()

    forced(main())


@pytest.mark.parametrize("size", [500, 1200, 1201, 9999, 60_000])
def test_segment_size_makes_many_datagrams_of_one_call(forced: Any, host: str, size: int) -> None:
    async def main() -> None:
        server, got, client, _, addr = await pair(host, connected=False)
        data = bytes(i * 7 % 251 for i in range(size))
        op = client.zc_sendto(data, addr, 1200)
        assert (await soon(op)).nbytes == size
        # in parts, and small: behind it, in order
        client.zc_sendto([data[:100], b"", data[100:1300]], addr, segment_size=1000)
        want = [data[i : i + 1200] for i in range(0, size, 1200)]
        start = data[:100] + data[100:1300]
        want += [start[i : i + 1000] for i in range(0, len(start), 1000)]
        await got.have(len(want))
        assert data_of(got) == want
        client.close()
        server.close()

    forced(main())


def test_a_list_of_buffers_is_one_datagram(forced: Any, host: str) -> None:
    async def main() -> None:
        server, got, client, mine, _ = await pair(host)
        # More pages than one packet has fragments for: the kernel would refuse to send them zero-copy.
        far = [bytearray([i]) * 5000 for i in range(60)]
        parts = [memoryview(b)[i * 50 : i * 50 + 900] for i, b in enumerate(far)]
        ops = [
            client.zc_sendto(x) for x in ([b"ab", bytearray(b"cd"), memoryview(b"ef")], parts, [])
        ]
        for op in ops:
            await soon(op)
        await got.have(3)
        assert data_of(got) == [b"abcdef", b"".join(parts), b""]
        assert not mine.errors
        client.close()
        server.close()

    forced(main())


def test_an_empty_datagram_is_sent_and_resolves(forced: Any, host: str) -> None:
    async def main() -> None:
        server, got, client, mine, _ = await pair(host)
        op = client.zc_sendto(b"")
        assert not op.sent.done()
        client.close()  # it has no bytes, and is sent all the same
        assert (await soon(op)).nbytes == 0
        await got.have(1)
        assert data_of(got) == [b""]
        assert mine.lost == [None]
        server.close()

    forced(main())


def test_what_is_written_into_the_buffer_after_released_is_not_received(
    forced: Any, host: str
) -> None:
    async def main() -> None:
        server, got, client, _, _ = await pair(host)
        buffer = bytearray(8000)
        for i in range(50):
            buffer[:] = bytes([i]) * 8000
            await soon(client.zc_sendto(buffer))
            buffer[:] = b"\xff" * 8000
            await got.have(i + 1)
        assert data_of(got) == [bytes([i]) * 8000 for i in range(50)]
        client.close()
        server.close()

    forced(main())


def test_tiny_rings_send_many(run: Any, backend: str) -> None:
    async def main() -> None:
        server, got, client, _, _ = await pair("127.0.0.1")
        ops = [client.zc_sendto(b"%03d" % i * 30) for i in range(150)]
        for op in ops:
            await soon(op)
        await got.have(150)
        assert data_of(got) == [b"%03d" % i * 30 for i in range(150)]
        client.close()
        server.close()

    run(
        main(),
        functools.partial(
            aiozc.new_event_loop,
            backend=backend,
            adaptive=False,
            zc_threshold=0,
            ring_entries=2,
            cq_entries=4,
        ),
    )


# --- errors ---------------------------------------------------------------------------------------


def test_a_datagram_that_is_too_long_fails_its_own_operation(forced: Any, host: str) -> None:
    async def main() -> None:
        server, got, client, mine, _ = await pair(host)
        ops = [client.zc_sendto(x) for x in (b"before", bytearray(66_000), b"after")]
        segments = client.zc_sendto(bytearray(66_000), segment_size=1200)
        for op in (ops[1], segments):
            for stage in (op.sent, op.released):
                with pytest.raises(OSError, match="at most 65507 bytes") as info:
                    await soon(stage)
                assert info.value.errno == errno.EMSGSIZE
            assert op.state is aiozc.OperationState.FAILED
            assert op.bytes_sent == 0
        assert (await soon(ops[0])).nbytes == 6
        assert (await soon(ops[2])).nbytes == 5
        await got.have(2)
        assert data_of(got) == [b"before", b"after"]
        assert not mine.errors
        assert client.get_write_buffer_size() == 0
        assert asyncio.get_running_loop().zc_stats().pinned_bytes == 0
        client.close()
        server.close()

    forced(main())


def test_an_error_of_the_call_is_the_operations_and_not_the_protocols(forced: Any) -> None:
    # EACCES is also what an ICMP error may say: sent a second time, it is known for its own.
    async def main() -> None:
        client, mine = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        op = client.zc_sendto(bytearray(3000), ("255.255.255.255", 9))  # without SO_BROADCAST
        zero = client.zc_sendto(bytearray(3000), ("127.0.0.1", 0))
        with pytest.raises(PermissionError):
            await soon(op)
        with pytest.raises(OSError, match="is the port 0") as info:
            await soon(zero)
        assert info.value.errno == errno.EINVAL
        assert not mine.errors
        client.close()

    forced(main())


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_an_icmp_error_costs_no_operation_its_datagram(forced: Any, host: str, n: int) -> None:
    # Fails when: an operation takes the error that the datagram before it met (refused() in dgramq.c).
    async def main() -> None:
        server, _ = await endpoint(Collector, local_addr=(host, 0))
        address = server.get_extra_info("sockname")
        server.close()
        await asyncio.sleep(0.02)
        client, mine = await endpoint(Collector, remote_addr=address[:2])
        ops = [client.zc_sendto(bytearray(2000)) for _ in range(n)]
        for op in ops:
            assert (await soon(op)).nbytes == 2000
        await mine.have(0, errors=1)
        assert {type(e) for e in mine.errors} == {ConnectionRefusedError}
        assert len(mine.errors) <= n
        client.close()

    forced(main())


@pytest.mark.parametrize("n", [2, 5])
def test_an_icmp_error_that_nobody_has_read_is_not_the_next_operations(forced: Any, n: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
            receiver.bind(("127.0.0.1", 0))
            address = receiver.getsockname()
        client, mine = await endpoint(Collector, remote_addr=address)
        with client.get_extra_info("socket").dup() as same:
            same.send(b"refused")  # the error is pending now, and the loop has not looked
        ops = [client.zc_sendto(bytearray(2000)) for _ in range(n)]
        for op in ops:
            await soon(op)
        await mine.have(0, errors=1)
        assert {type(e) for e in mine.errors} == {ConnectionRefusedError}
        client.close()
        assert loop.zc_stats().operations_live == 0

    forced(main())


@pytest.mark.faults
def test_enobufs_of_zero_copy_is_copied_and_counted(
    run: Any, forced_loop_factory: Any, backend: str
) -> None:
    if copies(backend):
        pytest.skip("every send copies")

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        server, got, client, mine, _ = await pair("127.0.0.1")
        loop.zc_fault("zc_enobufs", 3)
        loop.zc_fault("zc_enomem", 4)
        ops = [client.zc_sendto(b"%02d" % i * 900) for i in range(24)]
        assert {(await soon(op)).nbytes for op in ops} == {1800}
        await got.have(24)
        assert data_of(got) == [b"%02d" % i * 900 for i in range(24)]
        stats = loop.zc_stats()
        assert stats.fallbacks["ENOMEM"] == 6
        assert stats.fallbacks["ENOBUFS"] == 6  # every third of the other 18
        assert stats.zc_requests == 12
        assert not mine.errors
        client.close()
        server.close()

    run(main(), forced_loop_factory)


@pytest.mark.faults
def test_segments_that_are_sent_again_are_segments_still(
    forced: Any, forced_loop_factory: Any, backend: str
) -> None:
    # Case 17. Fails when: the control message (UDP_SEGMENT) is not with the copy that goes in its place.
    if copies(backend):
        pytest.skip("every send copies")

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        server, got, client, _, _ = await pair("127.0.0.1")
        loop.zc_fault("zc_enobufs", 2)
        for number in range(4):
            data = bytes([number]) * 4000
            assert (await soon(client.zc_sendto(data, segment_size=1500))).nbytes == 4000
        await got.have(12)
        assert data_of(got) == [
            bytes([number]) * size for number in range(4) for size in (1500, 1500, 1000)
        ]
        assert loop.zc_stats().fallbacks["ENOBUFS"] == 2
        client.close()
        server.close()

    forced(main())


@pytest.mark.faults
def test_enobufs_of_copying_fails_its_operation_alone(run: Any) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        server, got, client, mine, _ = await pair("127.0.0.1")
        loop.zc_fault("copy_enobufs", 2)
        results = []
        for i in range(4):  # one a turn: one system call each
            op = client.zc_sendto(b"%d" % i)
            try:
                results.append((await soon(op)).nbytes)
            except OSError as exc:
                results.append(-(exc.errno or 0))
        assert results == [1, -errno.ENOBUFS, 1, -errno.ENOBUFS]
        await got.have(2)
        assert data_of(got) == [b"0", b"2"]
        assert not mine.errors
        assert client.get_write_buffer_size() == 0
        client.close()
        server.close()

    run(main())


def test_wrong_arguments_are_refused_in_the_call(forced: Any, tmp_path: Path) -> None:
    async def main() -> None:
        server, got, client, _, _ = await pair("127.0.0.1")
        address = server.get_extra_info("sockname")
        free, _ = await endpoint(Collector, local_addr=("127.0.0.1", 0))
        unix, _ = await endpoint(Collector, family=socket.AF_UNIX)
        path = str(tmp_path / "nobody")
        for error, match, call in (
            (TypeError, "bytes-like", lambda: client.zc_sendto("text")),
            (TypeError, "bytes-like", lambda: client.zc_sendto([b"x", 1])),
            (BufferError, "contiguous", lambda: client.zc_sendto(memoryview(b"abcd")[::2])),
            (ValueError, "Invalid address", lambda: client.zc_sendto(b"x", ("127.0.0.1", 1))),
            (ValueError, "an address is needed", lambda: free.zc_sendto(b"x")),
            (ValueError, "getaddrinfo", lambda: free.zc_sendto(b"x", ("localhost", 9))),
            (ValueError, "numeric", lambda: free.zc_sendto(b"x", ("127.0.0.1",))),
            (ValueError, "numeric", lambda: free.zc_sendto(b"x", ("::1", 9))),
            (ValueError, "numeric", lambda: free.zc_sendto(b"x", ("127.0.0.1", 70_000))),
            (ValueError, "1 to 65507, not 0", lambda: client.zc_sendto(b"x", None, 0)),
            (ValueError, "not -1", lambda: client.zc_sendto(b"x", None, -1)),
            (ValueError, "not 65508", lambda: client.zc_sendto(b"x", None, 65_508)),
            (TypeError, "integer", lambda: client.zc_sendto(b"x", None, 1.5)),
            (ValueError, "128 segments", lambda: client.zc_sendto(bytes(1290), None, 10)),
            (ValueError, "128 segments", lambda: client.zc_sendto([bytes(1290)], None, 10)),
            (ValueError, "1024 buffers", lambda: client.zc_sendto([b"x"] * 1025)),
            (ValueError, "UDP socket", lambda: unix.zc_sendto(b"x", path, 1)),
        ):
            with pytest.raises(error, match=match):
                call()
        for transport in (client, free, unix):
            assert transport.get_write_buffer_size() == 0
        assert asyncio.get_running_loop().zc_stats().operations == 0
        await soon(client.zc_sendto(b"good", address))
        await soon(free.zc_sendto(b"good", address))
        await got.have(2)
        for transport in (server, client, free, unix):
            transport.close()

    forced(main())


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
def test_the_second_call_to_an_address_is_as_the_first(
    forced: Any, host: str, connected: bool
) -> None:
    # It is queued natively (known_name() in _native/fast/transport.c), the first one is not.
    async def main() -> None:
        server, got, client, _, addr = await pair(host, connected=connected)
        whole = [bytes([65 + i]) * 2000 for i in range(4)]
        ops = [client.zc_sendto(whole[0], addr), client.zc_sendto(whole[1], addr)]
        ops.append(client.zc_sendto(addr=addr, data=whole[2]))
        ops.append(client.zc_sendto(whole[3], addr=addr, segment_size=None))
        for op in ops:
            assert (await soon(op)).nbytes == 2000
        await got.have(4)
        assert data_of(got) == whole
        for error, call in (
            (TypeError, lambda: client.zc_sendto("text", addr)),
            (TypeError, lambda: client.zc_sendto()),
            (TypeError, lambda: client.zc_sendto(b"x", addr, None, None)),
            (TypeError, lambda: client.zc_sendto(b"x", address=addr)),
            (TypeError, lambda: client.zc_sendto(b"x", addr, addr=addr)),
            (ValueError, lambda: client.zc_sendto(b"x", ("127.0.0.1", []))),
            (BufferError, lambda: client.zc_sendto(memoryview(b"abcd")[::2], addr)),
            (NotImplementedError, lambda: client.write(b"not of a datagram transport")),
            (AttributeError, lambda: client.zc_write(b"not of a datagram transport")),
        ):
            with pytest.raises(error):
                call()
        client.abort()
        for _ in range(2):
            with pytest.raises(ConnectionResetError, match="closing"):
                client.zc_sendto(b"never", addr)
            await asyncio.sleep(0)
        assert len(got.got) == 4
        server.close()

    forced(main())


# --- Unix sockets ---------------------------------------------------------------------------------


def test_unix_datagrams_keep_order_through_a_full_receiver(forced: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "receiver")

    async def main() -> None:
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind(path)
        receiver.setblocking(False)
        client, mine = await endpoint(Collector, family=socket.AF_UNIX)
        client.set_write_buffer_limits(high=20_000)
        assert client.get_extra_info("zero_copy").engine == "copy"
        ops = []
        for i in range(300):
            buffer = bytearray(b"%03d" % i + bytes(1000))
            if i % 3 == 1:
                client.sendto(buffer, path)
            else:
                ops.append(client.zc_sendto(buffer, path))
        await asyncio.sleep(0.05)
        size = client.get_write_buffer_size()
        assert size > 0, "the receiver was never full"
        assert mine.paused == 1
        assert ops[0].released.done()
        assert not ops[0].withdraw()
        assert not ops[-1].sent.done()
        with pytest.raises(BufferError):
            buffer.extend(b"x")
        assert ops[-1].withdraw()
        buffer.extend(b"x")
        assert ops[-1].state is aiozc.OperationState.WITHDRAWN
        assert client.get_write_buffer_size() == size - 1003
        got = []
        while len(got) < 299:
            try:
                got.append(int(receiver.recv(2000)[:3]))
            except BlockingIOError:
                await asyncio.sleep(0.001)
        assert got == list(range(299))
        assert {(await soon(op)).path for op in ops[:-1]} == {"copied"}
        with pytest.raises(asyncio.CancelledError):
            await ops[-1].sent
        await eventually(lambda: mine.resumed == 1)
        assert client.get_write_buffer_size() == 0
        client.close()
        receiver.close()

    forced(main())


def test_close_waits_for_an_empty_datagram_too(forced: Any, tmp_path: Path) -> None:
    # Fails when: DRAINED is told as soon as no byte is queued.
    path = str(tmp_path / "receiver")

    async def main() -> None:
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind(path)
        receiver.setblocking(False)
        filler = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        filler.setblocking(False)
        filled = 0
        with pytest.raises(BlockingIOError):
            while True:
                filler.sendto(b"full", path)
                filled += 1
        client, mine = await endpoint(Collector, family=socket.AF_UNIX)
        op = client.zc_sendto(b"", path)
        client.close()
        await asyncio.sleep(0.05)
        assert not mine.lost
        assert not op.sent.done()
        assert [receiver.recv(10) for _ in range(filled)] == [b"full"] * filled
        await soon(op)
        await eventually(lambda: mine.lost == [None])
        assert receiver.recv(10) == b""
        filler.close()
        receiver.close()

    forced(main())


def test_a_unix_receiver_that_is_gone_fails_the_operation(forced: Any) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        client, _ = await endpoint(Collector, sock=ours)
        theirs.setblocking(False)
        await soon(client.zc_sendto([b"a", b"b"]))
        assert theirs.recv(10) == b"ab"
        theirs.close()
        for expected in ({errno.ECONNREFUSED, errno.ECONNRESET}, {errno.ENOTCONN}):
            with pytest.raises(OSError, match="after 0 bytes") as info:
                await soon(client.zc_sendto(b"anybody?"))
            assert info.value.errno in expected
        client.close()

    forced(main())


# --- accounting and limits ------------------------------------------------------------------------


def test_writing_is_paused_and_resumed_by_what_is_queued(forced: Any) -> None:
    async def main() -> None:
        server, got, client, mine, _ = await pair("127.0.0.1")
        client.set_write_buffer_limits(high=10_000, low=1000)
        ops = [client.zc_sendto(bytearray(4000))]
        ops.append(client.zc_sendto([bytearray(2000), bytearray(2000)]))
        assert (client.get_write_buffer_size(), mine.paused) == (8000, 0)
        ops.append(client.zc_sendto(bytearray(4000), segment_size=1000))
        assert (client.get_write_buffer_size(), mine.paused) == (12_000, 1)
        assert asyncio.get_running_loop().zc_stats().queued_bytes == 12_000
        for op in ops:
            await soon(op)
        await eventually(lambda: mine.resumed == 1)
        assert client.get_write_buffer_size() == 0
        await got.have(6)
        client.close()
        server.close()

    forced(main())


def test_withdraw_takes_a_queued_datagram_out(forced: Any, host: str) -> None:
    async def main() -> None:
        server, got, client, _, _ = await pair(host)
        buffer = bytearray(b"never")
        first, second, third = (client.zc_sendto(x) for x in (b"first", buffer, b"third"))
        with pytest.raises(BufferError):
            buffer.append(1)
        assert second.withdraw()
        assert not second.withdraw()
        buffer.append(1)
        assert client.get_write_buffer_size() == 10
        await soon(second.released)
        with pytest.raises(asyncio.CancelledError):
            await second.sent
        await soon(first)
        await soon(third)
        assert not third.withdraw()
        client.sendto(b"last")
        await got.have(3)
        assert data_of(got) == [b"first", b"third", b"last"]
        stats = asyncio.get_running_loop().zc_stats()
        assert stats.operations_live == 0
        assert stats.bytes == 14
        client.close()
        server.close()

    forced(main())


@pytest.mark.parametrize(
    ("settings", "reason", "zc"),
    [
        ({"zc_threshold": 2000}, None, 5),
        ({"zc_transport_cap": 3000}, "cap", 1),
        ({"zc_loop_cap": 100}, "cap", 0),
        ({"zerocopy": "off"}, None, 0),
    ],
    ids=["threshold", "transport-cap", "loop-cap", "off"],
)
def test_what_does_not_go_zero_copy_is_copied_with_the_same_contract(
    run: Any, backend: str, settings: dict[str, Any], reason: str | None, zc: int
) -> None:
    async def main() -> None:
        server, got, client, _, _ = await pair("127.0.0.1")
        ops = [client.zc_sendto(bytes([i]) * n) for i, n in enumerate([1999, 2000] * 5)]
        for op in ops:
            assert (await soon(op.released)).nbytes == op.nbytes
        await got.have(10)
        assert data_of(got) == [bytes([i]) * n for i, n in enumerate([1999, 2000] * 5)]
        stats = asyncio.get_running_loop().zc_stats()
        if copies(backend):
            assert stats.zc_requests == 0
        elif reason == "cap" and zc:
            # one at a time is under the cap, two are not
            assert 0 < stats.zc_requests < 10
            assert stats.pinned_peak <= 3000
        else:
            assert stats.zc_requests == zc
        if reason is not None and not copies(backend):
            assert stats.fallbacks[reason] + stats.zc_requests == 10
        client.close()
        server.close()

    all_settings = {"adaptive": False, "zc_threshold": 0, **settings}
    run(main(), functools.partial(aiozc.new_event_loop, backend=backend, **all_settings))


def test_a_path_that_copies_is_left_and_said_so(run: Any, backend: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server, got, client, _, _ = await pair("127.0.0.1")
        client.zc_configure(threshold=1000)
        for i in range(10):
            assert (await soon(client.zc_sendto(bytes(5000)))).path == "copied"
            await got.have(i + 1)
        stats = loop.zc_stats()
        if not copies(backend):
            assert (stats.zc_requests, stats.copied_reports) == (2, 2)
            assert stats.fallbacks["path"] == 8
            assert client.get_extra_info("zero_copy") == aiozc.ZeroCopyInfo(
                "uring" if backend == "uring" else "msg_zerocopy", 1000, True, "copied"
            )
        else:
            assert client.get_extra_info("zero_copy").engine == "copy"
        with pytest.raises(ValueError, match="negative"):
            client.zc_configure(cap=-1)
        client.close()
        server.close()

    run(main())


# --- ends -----------------------------------------------------------------------------------------


def test_close_sends_what_is_queued_and_then_refuses(forced: Any, host: str) -> None:
    # Fails when: known_name() in _native/fast/transport.c does not ask whether the transport is closing.
    async def main() -> None:
        server, got, client, mine, addr = await pair(host, connected=False)
        ops = [client.zc_sendto(b"%d" % i * 2000, addr) for i in range(9)]
        client.sendto(b"last", addr)
        client.close()
        with pytest.raises(ConnectionResetError, match="closing"):
            client.zc_sendto(b"never", addr)
        for op in ops:
            await soon(op)
        await got.have(10)
        assert data_of(got) == [b"%d" % i * 2000 for i in range(9)] + [b"last"]
        await eventually(lambda: mine.lost == [None])
        with pytest.raises(ConnectionResetError, match="closing"):
            client.zc_sendto(b"never", addr)
        server.close()

    forced(main())


def test_abort_fails_what_is_queued(forced: Any) -> None:
    async def main() -> None:
        server, got, client, mine, _ = await pair("127.0.0.1")
        buffer = bytearray(2000)
        ops = [client.zc_sendto(buffer) for _ in range(5)]
        waiting = asyncio.ensure_future(soon(ops[1].sent))
        await asyncio.sleep(0)  # it waits; the datagrams have left by now, or not
        more = [client.zc_sendto(buffer) for _ in range(5)]
        client.abort()
        done = 0
        for op in ops + more:
            try:
                done += (await soon(op)).nbytes == 2000
            except ConnectionAbortedError:
                assert op.bytes_sent == 0
        await asyncio.wait([waiting])
        await eventually(lambda: mine.lost == [None])
        await asyncio.sleep(0.02)
        assert len(got.got) == done
        buffer.extend(b"x")
        stats = asyncio.get_running_loop().zc_stats()
        assert stats.operations_live == stats.queued_bytes == stats.pinned_bytes == 0
        server.close()

    forced(main())


def test_a_loop_that_closes_with_datagrams_queued_sends_or_fails_them(
    forced_loop_factory: Any,
) -> None:
    buffer = bytearray(b"x" * 2000)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer,
        closing(forced_loop_factory()) as loop,
    ):
        peer.bind(("127.0.0.1", 0))
        peer.settimeout(5)

        async def begin() -> Any:
            return (await endpoint(Collector, remote_addr=peer.getsockname()))[0]

        client = loop.run_until_complete(begin())
        ops = [client.zc_sendto(buffer) for _ in range(5)]
        loop.close()
        assert [op.bytes_sent for op in ops] == [2000] * 5
        assert all(op.released.done() for op in ops)
        assert [peer.recv(4000) for _ in range(5)] == [b"x" * 2000] * 5
        buffer.extend(b"x")
        client._sock.close()
        client._sock = None


def test_a_full_unix_socket_goes_on_in_another_thread(forced_loop_factory: Any) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    theirs.setblocking(False)
    with theirs, closing(forced_loop_factory()) as loop:

        async def begin() -> Any:
            client, _ = await endpoint(Collector, sock=ours)
            ops = [client.zc_sendto(b"%d" % i * 50) for i in range(500)]
            await asyncio.sleep(0.02)
            assert client.get_write_buffer_size()
            return client, ops

        async def rest(client: Any, ops: Any) -> None:
            got = []
            while len(got) < 500:
                try:
                    got.append(theirs.recv(1000))
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            assert got == [b"%d" % i * 50 for i in range(500)]
            for op in ops:
                await soon(op)
            client.close()

        client, ops = loop.run_until_complete(begin())
        in_thread(loop.run_until_complete, rest(client, ops))
        loop.run_until_complete(asyncio.sleep(0))


def test_a_forked_child_fails_its_copies_and_the_parent_sends_all(backend: str) -> None:
    script = """
import asyncio, errno, os, socket, sys, aiozc
loop = aiozc.new_event_loop(backend=sys.argv[1], adaptive=False, zc_threshold=0)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
for sock in (ours, theirs, udp):
    sock.setblocking(False)
got = []
def drain():
    while True:
        try:
            got.append(int(theirs.recv(100)))
        except BlockingIOError:
            return
async def begin():
    unix, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, sock=ours)
    inet, _ = await loop.create_datagram_endpoint(
        asyncio.DatagramProtocol, remote_addr=udp.getsockname())
    ops = [unix.zc_sendto(b"%d" % i) for i in range(1000)]
    await inet.zc_sendto(bytearray(3000))
    return unix, inet, ops
async def in_child(inet):
    failed = 0
    for op in ops:
        try:
            await asyncio.wait_for(op, 10)
        except OSError as exc:
            assert exc.errno == errno.ECANCELED, exc
            failed += 1
    assert failed and not ops[0].bytes_sent == 0, failed
    await inet.zc_sendto(b"from the child")
async def rest(unix):
    while unix.get_write_buffer_size():
        drain()
        await asyncio.sleep(0.005)
    drain()
    for op in ops:
        await asyncio.wait_for(op, 10)
unix, inet, ops = loop.run_until_complete(begin())
inet.zc_sendto(b"queued by the parent")
child = os.fork()
if not child:
    status = 1
    try:
        loop.run_until_complete(in_child(inet))
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
loop.run_until_complete(rest(unix))
assert got == list(range(1000)), (len(got), got[:50])
udp.setblocking(True)
udp.settimeout(5)
words = [udp.recv(4000)[:8] for _ in range(3)]
assert words == [bytes(8), b"from the", b"queued b"], words
"""
    done = subprocess.run(
        [sys.executable, "-c", script, backend], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
