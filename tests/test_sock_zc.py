"""sock_zc_sendall and sock_zc_sendto: zero-copy on sockets that have no transport.

Owns the tests of aiozc/bare.py. The peers are plain blocking sockets, in threads. A comment "Fails when"
names the protection whose removal makes that test fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import pytest
from order_support import assert_same_stream, overwrite, pattern
from order_support import in_thread as in_own_thread
from support import (
    LARGE_SNDBUF,
    MIB,
    PAUSE,
    SMALL_SNDBUF,
    LoopErrors,
    StalledReader,
    assert_stream,
    eventually,
    in_thread,
    locked,
    open_descriptors,
    plain_python,
    soon,
)

import aiozc

A, B, C, X = b"ABCX"


def current() -> Any:
    return asyncio.get_running_loop()


def sendall(sock: socket.socket, data: Any) -> Any:
    return current().sock_zc_sendall(sock, data)


def begin(sock: socket.socket, data: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(sendall(sock, data))


@contextlib.contextmanager
def connected(
    *, sndbuf: int = LARGE_SNDBUF, family: socket.AddressFamily = socket.AF_INET
) -> Iterator[tuple[StalledReader, socket.socket]]:
    with StalledReader(family=family) as peer, peer.connect(sndbuf=sndbuf) as sock:
        yield peer, sock


def descriptors_of(sock: socket.socket) -> int:
    """How many descriptors of this process are of this socket."""
    inode = os.fstat(sock.fileno()).st_ino
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found += os.fstat(int(name)).st_ino == inode
    return found


def nothing_left(loop: Any) -> bool:
    stats = loop.zc_stats()
    return not (loop._reactor.bare or stats.operations_live or stats.connections)


# --- what arrives -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_any_buffer_of_any_size_arrives_and_nothing_is_left_behind(
    run, forced_loop_factory, family
):
    async def main():
        with connected(family=family) as (peer, sock):
            peer_data = asyncio.ensure_future(peer.take_all())
            sizes = [1, 1000, 65_536, 3 * MIB + 7]
            pieces: list[Any] = [bytearray(pattern(i, n)) for i, n in enumerate(sizes)]
            pieces += [
                memoryview(pattern(7, 5000)),
                [pattern(8, 10), b"", bytearray(b"x") * 70_000],
            ]
            flat = [b"".join(p) if isinstance(p, list) else bytes(p) for p in pieces]
            for piece, whole in zip(pieces, flat, strict=True):
                result = await soon(sendall(sock, piece))
                assert result.nbytes == len(whole)
                assert descriptors_of(sock) == 1
                assert nothing_left(current())
            zerocopy = family == socket.AF_INET
            assert (current().zc_stats().zc_requests > 0) == zerocopy
            assert zerocopy or result.path == "copied"  # loopback reports copies, too
            assert (await sendall(sock, b"")).nbytes == 0
            assert (await sendall(sock, [b"", bytearray()])).nbytes == 0
            sock.shutdown(socket.SHUT_WR)
            assert_same_stream(flat, await soon(peer_data))

    run(main(), forced_loop_factory)


def test_the_options_of_the_socket_stay_as_they_are(run, forced_loop_factory):
    # Fails when: the queue is opened like a transport's, which sets TCP_NODELAY.
    async def main():
        with connected() as (peer, sock):
            read = asyncio.ensure_future(peer.take(MIB))
            assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            task = begin(sock, b"A" * MIB)
            await asyncio.sleep(0)
            assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            await soon(task)
            await soon(read)
            assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.gettimeout() == 0

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("sndbuf", [SMALL_SNDBUF, LARGE_SNDBUF])
def test_it_returns_when_the_memory_is_free(run, forced_loop_factory, sndbuf):
    # Fails when: it returns at `sent`.
    content = pattern(3, MIB)

    async def main():
        with connected(sndbuf=sndbuf) as (peer, sock):
            buffer = bytearray(content)
            task = begin(sock, buffer)
            await asyncio.sleep(PAUSE)
            assert not task.done()
            assert locked(buffer)
            data = asyncio.ensure_future(peer.take(MIB, step=4096))
            await soon(task)
            assert not locked(buffer)
            overwrite(buffer)
            assert_same_stream(content, await soon(data))

    run(main(), forced_loop_factory)


def test_calls_on_one_socket_go_out_in_the_order_of_the_calls(run, forced_loop_factory):
    # CASES 14, with many callers.
    sizes = [70_000, 3, 1, 20_000, 250_000, 16_384, 100, 65_537] * 6
    pieces = [pattern(i, n) for i, n in enumerate(sizes)]

    async def main():
        with connected(sndbuf=SMALL_SNDBUF) as (peer, sock):
            data = asyncio.ensure_future(peer.take(sum(sizes), step=30_000))
            results = await soon(asyncio.gather(*[sendall(sock, piece) for piece in pieces]))
            assert [r.nbytes for r in results] == sizes
            assert_same_stream(pieces, await soon(data))
            assert nothing_left(current())

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_receiving_on_the_same_socket_is_asyncios_own(run, forced_loop_factory, family):
    # Fails when: the queue receives, too.
    content = pattern(5, 4 * MIB)

    async def main():
        with connected(sndbuf=SMALL_SNDBUF, family=family) as (peer, sock):
            received = bytearray()

            async def receive() -> None:
                while len(received) < len(content):
                    received.extend(await current().sock_recv(sock, 100_000))

            def echo() -> None:
                for _ in range(len(content) // (1 << 16)):
                    peer.peer.sendall(peer.read(1 << 16))

            receiving = asyncio.create_task(receive())
            await asyncio.sleep(PAUSE)  # it waits in add_reader before anything is sent
            echoing = asyncio.ensure_future(in_thread(echo))
            await soon(sendall(sock, content))
            await soon(receiving)
            await soon(echoing)
            assert_same_stream(content, bytes(received))
            # And asyncio's own sending afterwards.
            await current().sock_sendall(sock, b"end")
            assert await peer.take(3) == b"end"

    run(main(), forced_loop_factory)


def test_a_half_closed_peer_gets_everything_and_costs_no_turns(run, forced_loop_factory):
    async def main():
        with connected(sndbuf=SMALL_SNDBUF) as (peer, sock):
            peer.peer.shutdown(socket.SHUT_WR)
            task = begin(sock, b"A" * MIB)
            await asyncio.sleep(PAUSE)
            enters = current().zc_stats().enters
            await asyncio.sleep(0.3)
            assert current().zc_stats().enters - enters < 50
            assert_stream(await peer.take(MIB), [(A, MIB)])
            assert (await soon(task)).nbytes == MIB

    run(main(), forced_loop_factory)


# --- giving up ----------------------------------------------------------------------------------


def test_a_cancelled_call_is_withdrawn_or_goes_on_whole(run, forced_loop_factory):
    # Fails when: cancelling cuts the stream, gives the lock back early, or leaves what was not begun.
    async def main():
        with connected(sndbuf=SMALL_SNDBUF) as (peer, sock):
            buffers = [bytearray([v]) * MIB for v in (A, B, C)]
            tasks = [begin(sock, b) for b in buffers]
            await asyncio.sleep(PAUSE)
            for task in tasks[:2]:
                task.cancel()
            await asyncio.wait(tasks[:2])
            assert all(t.cancelled() for t in tasks[:2])
            assert not locked(buffers[1])
            overwrite(buffers[1])
            gc.collect()
            assert locked(buffers[0])
            assert locked(buffers[2])
            data = asyncio.ensure_future(peer.take(2 * MIB))
            await soon(tasks[2])
            assert not locked(buffers[0])
            assert_stream(await soon(data), [(A, MIB), (C, MIB)])
            assert nothing_left(current())

    run(main(), forced_loop_factory)


def test_a_call_that_is_cancelled_before_it_ran_sends_nothing(run, forced_loop_factory):
    async def main():
        with connected() as (peer, sock):
            before = open_descriptors()
            buffer = bytearray(b"A") * 1000
            task = begin(sock, buffer)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert not locked(buffer)
            assert open_descriptors() == before
            assert nothing_left(current())
            sock.shutdown(socket.SHUT_WR)
            assert await peer.take_all() == b""

    run(main(), forced_loop_factory)


# --- the socket's end ---------------------------------------------------------------------------


def test_closing_the_socket_cuts_nothing_and_its_number_may_be_used_again(run, forced_loop_factory):
    # CASES 25. Fails when: requests, polls or the close name the caller's descriptor.
    async def main():
        with connected(sndbuf=SMALL_SNDBUF) as (peer, sock):
            fds = open_descriptors()
            buffer = bytearray(b"A") * (2 * MIB)
            task, more = begin(sock, buffer), begin(sock, b"B" * 100_000)
            await asyncio.sleep(PAUSE)
            number = sock.fileno()
            sock.close()
            left, right = socket.socketpair()
            with left, right:
                reused = left if left.fileno() == number else right
                assert reused.fileno() == number
                other = right if reused is left else left
                reused.setblocking(False)
                other.setblocking(False)
                third = begin(reused, b"C" * 50)  # and a call on the new one stays apart
                await soon(third)
                assert_stream(await peer.take_all(), [(A, 2 * MIB), (B, 100_000)])
                await soon(task)
                await soon(more)
                assert other.recv(100) == b"C" * 50
                with pytest.raises(BlockingIOError):
                    other.recv(1)
                assert os.path.sameopenfile(reused.fileno(), number)
            assert not locked(buffer)
            assert open_descriptors() == fds - 1
            assert nothing_left(current())
            with pytest.raises(OSError, match="Bad file"):
                await sendall(sock, b"x")

    run(main(), forced_loop_factory)


def test_a_closed_socket_whose_peer_takes_nothing_is_reset(forced_loop_factory):
    # CASES 45. Fails when: zc_linger knows nothing of bare sockets: the memory stays for ever.
    async def main():
        loop = current()
        with connected() as (peer, sock), connected() as (other_peer, kept):
            fds = open_descriptors()
            buffers = [bytearray(b"A") * MIB, bytearray(b"A") * (32 * MIB)]
            tasks = [begin(sock, b) for b in buffers]
            open_ones = [begin(kept, b"B" * (32 * MIB))]
            await asyncio.sleep(PAUSE)
            sock.close()
            # Also one whose owner goes by its number alone.
            kept_fd = kept.detach()
            await soon(asyncio.wait([tasks[1]]), 5)
            with pytest.raises(OSError, match=os.strerror(errno.ECONNABORTED)):
                await tasks[1]
            await soon(asyncio.wait([tasks[0]]), 5)
            await eventually(lambda: not any(map(locked, buffers)))
            data, was_reset = await in_thread(peer.read_until_reset)
            assert was_reset
            assert set(data) <= {A}
            assert not open_ones[0].done()
            data = await other_peer.take(32 * MIB)
            assert_stream(data, [(B, 32 * MIB)])
            await soon(open_ones[0])
            os.close(kept_fd)
            await eventually(lambda: nothing_left(loop))
            assert open_descriptors() <= fds - 2

    with contextlib.closing(forced_loop_factory(zc_linger=0.4)) as loop:
        loop.run_until_complete(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("how", ["reset", "shutdown"])
def test_an_error_comes_to_every_call_and_to_the_next(run, forced_loop_factory, how):
    # CASES 9. Fails when: a call is queued behind an error, where nothing is ever sent.
    async def main():
        errors = LoopErrors()
        with connected(sndbuf=SMALL_SNDBUF) as (peer, sock):
            fds = open_descriptors()
            buffers = [bytearray(b"A") * MIB for _ in range(3)]
            tasks = [begin(sock, b) for b in buffers]
            await asyncio.sleep(PAUSE)
            if how == "reset":
                await peer.take(1000)
                peer.reset()
                fds -= 1
            else:
                sock.shutdown(socket.SHUT_RDWR)
                await asyncio.sleep(PAUSE)
                # What the kernel had taken it still sends; that ends the pins.
                reading = asyncio.ensure_future(peer.take_all())
            await soon(asyncio.wait(tasks))
            assert all(isinstance(t.exception(), OSError) for t in tasks)
            assert not any(map(locked, buffers))
            for _ in range(2):
                with pytest.raises(OSError):
                    await soon(sendall(sock, b"more"))
            if how == "shutdown":
                assert set(await soon(reading)) == {A}
            assert open_descriptors() == fds
            assert nothing_left(current())
        errors.check()

    run(main(), forced_loop_factory)


def test_a_call_behind_an_error_fails_though_earlier_memory_is_still_read(run, forced_loop_factory):
    # Fails when: it is queued where sending is over, but the memory of an earlier call is not free.
    async def main():
        with connected() as (peer, sock):
            fds = open_descriptors()
            early = begin(sock, bytearray(b"A") * MIB)
            await asyncio.sleep(PAUSE)
            assert not early.done()
            sock.shutdown(socket.SHUT_WR)
            first, second = begin(sock, b"B" * 10), begin(sock, b"C" * 10)
            for task in (first, second):
                with pytest.raises(BrokenPipeError):
                    await soon(task)
            with pytest.raises(BrokenPipeError):
                await soon(sendall(sock, b"X" * 10))
            assert not early.done()
            assert_stream(await peer.take_all(), [(A, MIB)])
            assert (await soon(early)).nbytes == MIB
            assert open_descriptors() == fds
            assert nothing_left(current())

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("debug", [False, True])
def test_bad_input_raises_with_nothing_queued(run, debug):
    async def main():
        loop = current()
        loop.set_debug(debug)
        with connected() as (peer, sock), socket.socket(type=socket.SOCK_DGRAM) as dgram:
            dgram.setblocking(False)
            fds = open_descriptors()
            buffer = bytearray(10)
            with pytest.raises(TypeError, match="bytes-like"):
                await sendall(sock, "text")
            with pytest.raises(TypeError, match="bytes-like"):
                await sendall(sock, [buffer, 3])
            with pytest.raises(BufferError, match="contiguous"):
                await sendall(sock, memoryview(b"123456")[::2])
            with pytest.raises(ValueError, match="sock_zc_sendto"):
                await sendall(dgram, buffer)
            with pytest.raises(ValueError, match="sock_zc_sendall"):
                await loop.sock_zc_sendto(sock, buffer, ("127.0.0.1", 9))
            with pytest.raises(TypeError, match="bytes-like"):
                await loop.sock_zc_sendto(dgram, "text", ("127.0.0.1", 9))
            for blocking in (None, 2.0):
                sock.settimeout(blocking)
                dgram.settimeout(blocking)
                with pytest.raises(ValueError, match="the socket must be non-blocking"):
                    await sendall(sock, buffer)
                with pytest.raises(ValueError, match="the socket must be non-blocking"):
                    await loop.sock_zc_sendto(dgram, buffer, ("127.0.0.1", 9))
            sock.setblocking(False)
            context = ssl.create_default_context()
            copy = sock.dup()
            copy.setblocking(False)
            with (
                context.wrap_socket(
                    copy, server_hostname="x", do_handshake_on_connect=False
                ) as tls,
                pytest.raises(TypeError, match="SSLSocket"),
            ):
                await sendall(tls, buffer)
            with socket.socket() as unconnected:
                unconnected.setblocking(False)
                with pytest.raises(OSError):
                    await soon(sendall(unconnected, buffer))
            assert open_descriptors() == fds
            assert not locked(buffer)
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=sock)
            with pytest.raises(RuntimeError, match="is used by transport"):
                await sendall(sock, buffer)
            transport.write(b"end")
            transport.close()
            assert await peer.take_all() == b"end"

    run(main())


# --- the loop's end, threads, fork --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*was closed while the kernel still read:ResourceWarning")
def test_a_closed_loop_leaves_the_socket_to_its_owner(forced_loop_factory):
    # CASES 27. Fails when: the queue's end shuts the socket down, or gives memory back too early.
    with connected() as (peer, sock), connected(sndbuf=SMALL_SNDBUF) as (other, blocked):
        fds = open_descriptors()
        loop = forced_loop_factory()

        async def main():
            sending = [begin(sock, bytearray(pattern(1, MIB)))]
            sending += [begin(blocked, bytearray(b"A") * (8 * MIB))]
            await asyncio.sleep(PAUSE)
            for task in sending:
                task.cancel()
            await asyncio.wait(sending)

        loop.run_until_complete(main())
        loop.close()
        gc.collect()
        trash = [bytearray(b"\xa5") * MIB for _ in range(16)]
        assert open_descriptors() <= fds
        sock.sendall(b"and more")
        sock.close()
        assert_same_stream([pattern(1, MIB), b"and more"], peer.read_all())
        blocked.setblocking(True)
        blocked.shutdown(socket.SHUT_WR)
        assert set(other.read_all()) <= {A}
        del trash


def test_operations_outlive_the_run_and_end_in_another_thread(forced_loop_factory):
    # CASES 29: the ring of the first thread is lost, and with it the notifications.
    with connected() as (peer, sock), contextlib.closing(forced_loop_factory()) as loop:
        small, large = bytearray(b"A") * MIB, bytearray(b"B") * (8 * MIB)
        tasks: list[Any] = []

        async def first():
            tasks.extend([begin(sock, small), begin(sock, large)])
            await asyncio.sleep(PAUSE)

        async def second():
            tasks.append(begin(sock, b"C" * 10))
            data = await peer.take(9 * MIB + 10)
            for task in tasks:
                await soon(task)
            return data

        in_own_thread(loop.run_until_complete, first())
        assert locked(large)
        data = in_own_thread(loop.run_until_complete, second())
        overwrite(small)
        overwrite(large)
        assert_stream(data, [(A, MIB), (B, 8 * MIB), (C, 10)])
        assert nothing_left(loop)


FORK = """
loop = forced()
async def main():
    sock = connect(65536)
    buffer = bytearray(b"A") * (1 << 20)
    task = asyncio.ensure_future(asyncio.get_running_loop().sock_zc_sendall(sock, buffer))
    await asyncio.sleep(0.1)
    return sock, task, buffer
sock, task, buffer = loop.run_until_complete(main())
pid = os.fork()
if not pid:
    code = 1
    try:
        async def child():
            await asyncio.wait([task], timeout=10)
            assert isinstance(task.exception(), OSError), task
            assert "canceled" in str(task.exception()), task
            a, b = socket.socketpair()
            a.setblocking(False)
            await asyncio.get_running_loop().sock_zc_sendall(a, b"child")
            assert b.recv(9) == b"child"
        loop.run_until_complete(child())
        code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
say("forked")
result = loop.run_until_complete(task)
say(f"sent {result.nbytes}")
sock.close()
loop.close()
"""


def test_a_forked_child_fails_and_its_parent_goes_on(backend):
    with StalledReader() as peer, plain_python(FORK, peer.port, backend) as child:
        peer.accept()
        child.expect("forked")
        assert_stream(peer.read_all(), [(A, MIB)])
        assert child.expect("sent") == [str(MIB)]
        child.finish()


# --- datagrams ----------------------------------------------------------------------------------


def sendto(sock: socket.socket, data: Any, address: Any) -> Any:
    return current().sock_zc_sendto(sock, data, address)


@contextlib.contextmanager
def datagram(family: socket.AddressFamily) -> Iterator[tuple[socket.socket, socket.socket, Any]]:
    """A receiver, a sender that is not connected, and the receiver's address."""
    with socket.socket(family, socket.SOCK_DGRAM) as receiver:
        receiver.bind("" if family == socket.AF_UNIX else ("127.0.0.1", 0))
        receiver.settimeout(20)
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            yield receiver, sender, receiver.getsockname()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_datagram_goes_out_whole_and_its_memory_is_free(run, family):
    async def main():
        with datagram(family) as (receiver, sender, address):
            fds = open_descriptors()
            parts = [bytearray(b"A") * 1000, b"", memoryview(b"B" * 7)]
            result = await soon(sendto(sender, parts, address))
            assert result == aiozc.Result(1007, "copied")
            overwrite(parts[0])  # type: ignore[arg-type]
            assert_stream(receiver.recv(2000), [(A, 1000), (B, 7)])
            assert await soon(sendto(sender, b"", address)) == aiozc.Result(0, "copied")
            assert receiver.recv(10) == b""
            assert not locked(parts[0])  # type: ignore[arg-type]
            with pytest.raises(OSError, match=os.strerror(errno.EMSGSIZE)):
                await soon(sendto(sender, bytes(1 << 22), address))
            assert open_descriptors() == fds

    run(main())


@pytest.mark.parametrize("is_connected", [True, False])
def test_datagrams_wait_for_room_in_call_order(run, is_connected):
    # Fails when: two callers wait by add_writer, where the second takes the place of the first; or
    # a receiver that is full makes the loop spin.
    async def main():
        with datagram(socket.AF_UNIX) as (receiver, sender, address):
            if is_connected:
                sender.connect(address)
            fds = open_descriptors()
            buffers = [bytearray(pattern(i, 100)) for i in range(60)]
            tasks = [asyncio.create_task(sendto(sender, b, address)) for b in buffers]
            await asyncio.sleep(PAUSE)
            waiting = [i for i, t in enumerate(tasks) if not t.done()]
            assert waiting == list(range(waiting[0], 60))
            assert locked(buffers[-1])
            enters = current().zc_stats().enters
            await asyncio.sleep(0.5)
            assert current().zc_stats().enters - enters < 100
            for i in (waiting[0], waiting[5]):
                tasks[i].cancel()
            await asyncio.wait([tasks[waiting[0]], tasks[waiting[5]]])
            assert not locked(buffers[waiting[0]])
            kept = [b for i, b in enumerate(buffers) if i not in (waiting[0], waiting[5])]
            expected = [bytes(b) for b in kept]
            got = await in_thread(lambda: [receiver.recv(200) for _ in expected])
            assert got == expected
            results = await soon(asyncio.gather(*tasks, return_exceptions=True))
            assert sum(isinstance(r, aiozc.Result) for r in results) == 58
            assert not any(map(locked, buffers))
            assert open_descriptors() == fds
            assert not current()._reactor.bare

    run(main())


def test_waiting_for_room_leaves_asyncios_own_writer_alone(run):
    async def main():
        with datagram(socket.AF_UNIX) as (receiver, sender, address):
            sender.connect(address)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(b"full")
            own = asyncio.create_task(current().sock_sendall(sender, b"own"))
            await asyncio.sleep(0)
            ours = asyncio.create_task(sendto(sender, b"ours", address))
            await asyncio.sleep(PAUSE)
            assert not own.done()
            assert not ours.done()
            got = []
            end = time.monotonic() + 20
            while time.monotonic() < end and not {b"own", b"ours"} <= set(got):
                got.append(await in_thread(lambda: receiver.recv(10)))
            await soon(own)
            await soon(ours)

    run(main())


def test_a_loop_that_closes_while_a_datagram_waits_leaves_nothing(loop_factory):
    with datagram(socket.AF_UNIX) as (_, sender, address):
        sender.connect(address)
        before = open_descriptors()

        async def main():
            tasks = [asyncio.create_task(sendto(sender, b"A", address)) for _ in range(40)]
            await asyncio.sleep(PAUSE)
            assert not all(t.done() for t in tasks)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())
        gc.collect()
        assert open_descriptors() == before


def test_zc_timeout_is_not_for_sockets_of_the_caller(run, backend):
    async def main():
        with connected(sndbuf=SMALL_SNDBUF) as (peer, sock):
            task = begin(sock, b"A" * MIB)
            await asyncio.sleep(0.5)
            assert not task.done()
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == bytes(8)
            assert current().zc_stats().timeouts == 0
            await soon(peer.take(MIB))
            await soon(task)

    aiozc.run(main(), backend=backend, adaptive=False, zc_threshold=0, zc_timeout=0.1)
