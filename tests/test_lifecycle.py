"""The life of a loop: runs, threads, signals, forks, close, and what must survive each of them.

Owns everything about when a loop runs and ends; transports' own semantics are in
`test_transport.py`. Peers are blocking sockets in threads. Whatever could hang the test process
for good (signals, fork) runs in a process of its own, under a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
from order_support import (
    OVERWRITTEN,
    TIMEOUT,
    Reader,
    Recorder,
    assert_prefix,
    assert_same_stream,
    collect,
    connect,
    connected_pair,
    eventually,
    in_thread,
    limited,
    open_stream,
    pattern,
    receive,
    receive_now,
)

import aiozc

TESTS = str(Path(__file__).parent)


@contextlib.contextmanager
def closing(loop):
    try:
        yield loop
    finally:
        loop.close()


def run_script(body: str, backend: str, *, timeout: float = 30, env=None, options=()):
    """Runs `body` in a fresh interpreter with `backend` and the helpers in scope."""
    prologue = f"import sys; sys.path.insert(0, {TESTS!r}); backend = {backend!r}\n"
    return subprocess.run(
        [sys.executable, *options, "-c", prologue + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
    )


def check_script(body: str, backend: str, **how) -> str:
    done = run_script(body, backend, **how)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def open_descriptors() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


# --- many operations at once -------------------------------------------------------------------


@pytest.mark.parametrize("entries", [8, 8192])
def test_two_thousand_sends_to_stalled_readers_all_release_when_they_drain(
    run, backend, loop_factory, entries
):
    # CASES 22: every request leaves a notification behind, and all of them come in one burst.
    # Four connections: the page under each part is charged whole to its socket's send buffer.
    async def main():
        loop = asyncio.get_running_loop()
        filler = pattern(5000, 300_000)  # fills the receive window: nothing behind it is acked
        pieces = [pattern(index, 16 + index % 100) for index in range(500)]
        streams, readers, operations = [], [], []
        for _ in range(4):
            _, writer, peer = await open_stream(sndbuf=4 << 20, rcvbuf=65536)
            streams.append(writer)
            readers.append(Reader(peer, stalled=True))
            await limited(writer.zc_submit(filler).sent)
        for piece in pieces:
            for writer in streams:
                operations.append(writer.zc_submit(piece))
            await limited(operations[-1].sent)
        await limited(asyncio.gather(*(wait(operation.sent) for operation in operations)))
        if backend == "uring":
            assert not any(operation.released.done() for operation in operations)
            assert loop.zc_stats().notifications_outstanding >= 1000
        for reader in readers:
            reader.go()
        for operation in operations:
            result = await limited(operation.released)
            assert result.nbytes == operation.nbytes
        for writer, reader in zip(streams, readers, strict=True):
            writer.close()
            assert_same_stream([filler, *pieces], await reader.aresult())
            await limited(writer.wait_closed())
        stats = loop.zc_stats()
        assert (stats.notifications_outstanding, stats.pinned_bytes) == (0, 0)
        if backend == "uring":
            assert (stats.cq_overflows > 0) == (entries == 8), stats

    async def wait(awaitable):
        await awaitable

    small = {"ring_entries": entries, "cq_entries": entries}
    run(main(), lambda: loop_factory(adaptive=False, zc_threshold=0, **small))


def test_two_thousand_sends_on_a_hundred_connections_in_one_turn_all_complete(
    run, forced_loop_factory
):
    async def main():
        loop = asyncio.get_running_loop()
        streams = [await open_stream() for _ in range(100)]
        operations = []
        for index in range(2000):
            writer = streams[index % 100][1]
            operations.append(writer.zc_submit(pattern(index, 1 + index * 7 % 5000)))
        assert not any(operation.released.done() for operation in operations)
        for operation in operations:
            await limited(operation.sent)
        expected = [
            b"".join(pattern(i, 1 + i * 7 % 5000) for i in range(number, 2000, 100))
            for number in range(100)
        ]
        for (_, writer, peer), content in zip(streams, expected, strict=True):
            assert_same_stream(content, await receive(peer, len(content)))
            writer.close()
        for operation in operations:
            await limited(operation.released)
        assert loop.zc_stats().operations_live == 0
        for _, writer, peer in streams:
            await limited(writer.wait_closed())
            peer.close()

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("entries", [1, 8, 8192])
def test_four_hundred_connections_made_at_once_are_all_served(run, loop_factory, entries):
    # Accepts, receives, sends and closes all overflow a small submission or completion queue.
    async def main():
        async def serve(reader, writer):
            writer.write(await reader.readexactly(8))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
        address = server.sockets[0].getsockname()

        def clients():
            socks = [socket.create_connection(address, TIMEOUT) for _ in range(400)]
            for number, sock in enumerate(socks):
                sock.sendall(b"%08d" % number)
            answers = [receive_now(sock, 9) for sock in socks]
            for sock in socks:
                sock.close()
            return answers

        answers = await limited(asyncio.to_thread(clients), 30)
        assert answers == [b"%08d" % number for number in range(400)]
        server.close()
        await limited(server.wait_closed())

    run(main(), lambda: loop_factory(ring_entries=entries, cq_entries=entries))


# --- close of transports -----------------------------------------------------------------------


def test_two_hundred_connections_one_after_another_see_eof_at_once_and_only_their_own_data(run):
    # CASES 25: a receive left armed keeps the FIN back, or takes data of whoever reuses the fd.
    async def main():
        fds = []

        async def serve(reader, writer):
            fds.append(writer.get_extra_info("socket").fileno())
            data = await reader.readexactly(16)
            writer.write(data[::-1])
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()

        def clients():
            slowest = 0.0
            for number in range(200):
                with socket.create_connection(address, TIMEOUT) as sock:
                    sent = b"request %08d" % number
                    sock.sendall(sent)
                    began = time.monotonic()
                    assert receive_now(sock, 17) == sent[::-1]  # 17: up to EOF
                    slowest = max(slowest, time.monotonic() - began)
            return slowest

        slowest = await limited(asyncio.to_thread(clients), 40)
        assert slowest < 1.0, f"EOF after {slowest:.2f} s"
        assert len(fds) == 200 and len(set(fds)) < 100, "no descriptor was ever reused"
        server.close()
        await limited(server.wait_closed())

    run(main())


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_descriptor_reused_after_close_keeps_its_data(run, how):
    async def main():
        reused = 0
        for number in range(50):
            transport, protocol, peer = await connect()
            fd = transport.get_extra_info("socket").fileno()
            peer.sendall(b"x")
            await eventually(lambda p=protocol: p.data == b"x", what="the first byte")
            getattr(transport, how)()  # with its receive armed
            await eventually(lambda p=protocol: p.lost, what="connection_lost")
            ours, other = socket.socketpair()
            if fd in (ours.fileno(), other.fileno()):
                reused += 1
            content = pattern(number, 1000)
            ours.sendall(content)
            other.sendall(content)
            for _ in range(3):
                await asyncio.sleep(0)
            ours.settimeout(5)
            other.settimeout(5)
            assert receive_now(ours, 1000) == content
            assert receive_now(other, 1000) == content
            assert bytes(protocol.data) == b"x"
            assert receive_now(peer, 1) == b""
            for sock in (ours, other, peer):
                sock.close()
        assert reused > 25, f"the descriptor was reused only {reused} times"

    run(main())


def test_a_reused_descriptor_gets_no_byte_of_a_send_that_was_aborted(run, forced_loop_factory):
    async def main():
        reused = 0
        for _ in range(30):
            _, writer, peer = await open_stream(sndbuf=16384, rcvbuf=16384)
            fd = writer.get_extra_info("socket").fileno()
            operation = writer.zc_submit(pattern(1, 1 << 20))
            await asyncio.sleep(0.002)
            assert not operation.sent.done()
            writer.transport.abort()
            with pytest.raises(OSError):
                await limited(operation.sent)
            with contextlib.suppress(OSError):
                await limited(writer.wait_closed())
            ours, other = socket.socketpair()
            ours.setblocking(False)
            reused += fd in (ours.fileno(), other.fileno())
            await asyncio.sleep(0.002)
            other.settimeout(0.01)
            for sock in (ours, other):
                with pytest.raises((BlockingIOError, TimeoutError)):
                    sock.recv(1)
            for sock in (ours, other, peer):
                sock.close()
            with contextlib.suppress(OSError):
                await limited(operation.released)
        assert reused > 10, f"the descriptor was reused only {reused} times"

    run(main(), forced_loop_factory)


def test_a_listener_can_be_bound_again_right_after_it_closed(run):
    # CASES 26.
    async def main():
        port = 0
        for _ in range(50):
            server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", port)
            port = server.sockets[0].getsockname()[1]
            server.close()
            await limited(server.wait_closed())
        with socket.socket() as plain:  # also without SO_REUSEADDR: nobody listens any more
            plain.bind(("127.0.0.1", port))

    run(main())


# --- threads -----------------------------------------------------------------------------------


def test_a_loop_moves_through_three_threads_with_a_stalled_send_and_an_armed_receive(loop_factory):
    # CASES 29: a ring answers only the thread that made it.
    loop = loop_factory(adaptive=False, zc_threshold=0)
    with closing(loop):
        state = {}
        first = pattern(0, 300_000)
        second = pattern(1, 8 << 20)

        async def begin():
            _, writer, stalled = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
            state["reader"] = Reader(stalled, stalled=True)
            state["writer"] = writer
            state["accepted"] = writer.zc_submit(first)
            await limited(state["accepted"].sent)
            state["waiting"] = writer.zc_submit(second)
            state["transport"], state["protocol"], state["peer"] = await connect()
            state["peer"].sendall(b"one ")
            await eventually(lambda: state["protocol"].data == b"one ", what="data, thread 1")
            await asyncio.sleep(0.05)

        async def go_on():
            state["peer"].sendall(b"two ")
            await eventually(
                lambda: state["protocol"].data == b"one early two ", what="data, thread 2"
            )
            assert not state["waiting"].sent.done()
            state["transport"].write(b"answer")
            assert await receive(state["peer"], 6) == b"answer"
            await asyncio.sleep(0.05)

        async def finish():
            state["peer"].sendall(b"three")
            await eventually(
                lambda: state["protocol"].data == b"one early two three", what="data, thread 3"
            )
            assert not state["waiting"].sent.done()
            assert not state["accepted"].released.done()
            state["reader"].go()
            for name, content in (("accepted", first), ("waiting", second)):
                result = await limited(state[name].released)
                assert result.nbytes == len(content)
            state["writer"].close()
            state["transport"].close()
            received = await state["reader"].aresult()
            assert_same_stream([first, second], received)
            await eventually(lambda: state["protocol"].lost == [None], what="connection_lost")

        in_thread(loop.run_until_complete, begin())
        assert not state["waiting"].sent.done()
        state["peer"].sendall(b"early ")  # arrives while no thread runs the loop
        in_thread(loop.run_until_complete, go_on())
        in_thread(loop.run_until_complete, finish())
        assert receive_now(state["peer"], 1) == b""
        state["peer"].close()


def test_data_that_waits_when_the_loop_changes_its_thread_is_not_received_over(loop_factory):
    # Fails when: a new ring is given the buffers in which undelivered data lies.
    with closing(loop_factory()) as loop:
        ends = []

        async def begin():
            ends.extend([await connect() for _ in range(30)])
            await asyncio.sleep(0.05)  # every receive is armed

        def send(first):
            for index, (_, _, peer) in enumerate(ends):
                peer.sendall(pattern(first + index, 500))

        async def finish():
            await eventually(lambda: all(len(p.data) >= 1000 for _, p, _ in ends), what="data")
            for index, (transport, protocol, peer) in enumerate(ends):
                assert protocol.data == pattern(index, 500) + pattern(100 + index, 500)
                transport.close()
                peer.close()

        in_thread(loop.run_until_complete, begin())
        loop.call_soon(send, 0)
        loop.call_soon(loop.stop)
        in_thread(loop.run_forever)  # ends with all of it received, and none of it delivered
        assert not any(protocol.data for _, protocol, _ in ends)
        send(100)
        in_thread(loop.run_until_complete, finish())


def test_a_reader_that_drains_between_two_runs_releases_in_the_next_run(forced_loop_factory):
    with closing(forced_loop_factory()) as loop:
        content = pattern(0, 400_000)

        async def begin():
            _, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
            operation = writer.zc_submit(content)
            await limited(operation.sent)
            return writer, peer, operation

        writer, peer, operation = in_thread(loop.run_until_complete, begin())
        assert not operation.released.done()
        assert_same_stream(content, receive_now(peer, len(content)))

        async def finish():
            await limited(operation.released)
            writer.close()
            await limited(writer.wait_closed())

        in_thread(loop.run_until_complete, finish())
        assert receive_now(peer, 1) == b""
        peer.close()


def test_a_listener_and_a_timer_survive_the_move_to_another_thread(loop_factory):
    with closing(loop_factory()) as loop:
        fired = []

        async def begin():
            async def serve(reader, writer):
                writer.write(await reader.read(100))
                writer.close()

            loop.call_later(0.1, fired.append, threading.get_ident())
            return await asyncio.start_server(serve, "127.0.0.1", 0)

        server = in_thread(loop.run_until_complete, begin())
        address = server.sockets[0].getsockname()
        with socket.create_connection(address, TIMEOUT) as early:  # completes in the backlog
            early.sendall(b"early")

            async def go_on():
                assert await receive(early, 6) == b"early"
                late = await asyncio.to_thread(socket.create_connection, address, TIMEOUT)
                with late:
                    late.sendall(b"late")
                    assert await receive(late, 5) == b"late"
                await eventually(lambda: fired, what="the timer")
                server.close()
                await limited(server.wait_closed())

            in_thread(loop.run_until_complete, go_on())
        assert len(fired) == 1


def test_two_loops_in_two_threads_serve_at_once(loop_factory):
    def serve_one(number):
        async def main():
            _, writer, peer = await open_stream(rcvbuf=65536)
            reader = Reader(peer, chunk=65536)
            pieces = [pattern(number * 1000 + i, 20_000 + i) for i in range(400)]
            operations = []
            for index, piece in enumerate(pieces):
                if index % 2:
                    writer.write(piece)
                    await limited(writer.drain())
                else:
                    operations.append(writer.zc_submit(piece))
            for operation in operations:
                await limited(operation.released)
            writer.close()
            assert_same_stream(pieces, await reader.aresult())

        with closing(loop_factory(adaptive=False, zc_threshold=0)) as loop:
            loop.run_until_complete(asyncio.wait_for(main(), 40))
        return number

    outcomes = {}
    threads = [
        threading.Thread(target=lambda n=n: outcomes.__setitem__(n, serve_one(n)), daemon=True)
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {0: 0, 1: 1}


def test_closing_a_loop_that_ran_in_another_thread_leaves_this_threads_loop_alone(loop_factory):
    # Fails when: a ring goes with its descriptor registered, by a number that is another's here.
    # That needs a liburing newer than 2.3, which unregisters by number.
    other = loop_factory()

    async def main():
        _, writer, peer = await open_stream()
        await asyncio.to_thread(in_thread, other.run_until_complete, asyncio.sleep(0.01))
        other.close()
        writer.write(b"still here")
        assert await receive(peer, 10) == b"still here"
        await limited(asyncio.sleep(0.01))
        writer.close()
        peer.close()

    with closing(loop_factory()) as loop:
        loop.run_until_complete(main())


def pinned_kilobytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmPin:")[2].split()[0])


def test_a_ring_does_not_outlive_its_loop_with_the_thread_that_ran_it(forced_loop_factory):
    # Fails when: the ring's descriptor stays registered in the thread, and all that the ring holds.
    before = pinned_kilobytes()
    pool = aiozc.BufferPool(size=1 << 20, count=1)

    async def main():
        _, writer, peer = await open_stream()
        sent = writer.zc_submit(pool.acquire())
        assert len(await receive(peer, 1 << 20)) == 1 << 20
        await limited(sent.released)
        writer.close()
        peer.close()
        return pinned_kilobytes()

    loop = forced_loop_factory()
    ran, leave = threading.Event(), threading.Event()
    during = []

    def run_and_stay():
        try:
            during.append(loop.run_until_complete(main()))
        finally:
            ran.set()
        leave.wait(TIMEOUT)

    thread = threading.Thread(target=run_and_stay, daemon=True)
    thread.start()
    try:
        assert ran.wait(TIMEOUT)
        loop.close()
        deadline = time.monotonic() + TIMEOUT / 2
        while pinned_kilobytes() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert thread.is_alive()
        assert during
        assert pinned_kilobytes() <= before, during
    finally:
        leave.set()
        thread.join(TIMEOUT)
        pool.close()


def test_two_loops_in_two_threads_talk_to_each_other(loop_factory):
    ours, theirs = connected_pair()
    theirs.setblocking(False)
    content = pattern(7, 6 << 20)

    def echo():
        async def main():
            reader, writer = await asyncio.open_connection(sock=theirs)
            while data := await limited(reader.read(1 << 16)):
                writer.write(data)
                await limited(writer.drain())
            writer.close()
            await limited(writer.wait_closed())

        with closing(loop_factory()) as loop:
            loop.run_until_complete(main())

    async def client():
        reader, writer = await asyncio.open_connection(sock=ours)

        async def send():
            for start in range(0, len(content), 1 << 18):
                writer.write(content[start : start + (1 << 18)])
                await writer.drain()
            writer.write_eof()

        task = asyncio.create_task(send())
        received = await limited(reader.read(-1), 40)
        await task
        writer.close()
        await limited(writer.wait_closed())
        return received

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    with closing(loop_factory()) as loop:
        assert_same_stream(content, loop.run_until_complete(client()))
    thread.join(TIMEOUT)
    assert not thread.is_alive()


# --- waking an idle loop -----------------------------------------------------------------------


@pytest.mark.parametrize("server_side", [False, True], ids=["client", "accepted"])
@pytest.mark.parametrize("how", ["collected", "close", "abort"])
def test_a_connection_that_another_thread_gives_up_is_ended_by_the_loop(run, how, server_side):
    # The collector runs in any thread, and StreamWriter.__del__ closes. Fails when: that thread touches the
    # native connection. It sleeps in a wait without the GIL meanwhile, and nobody wakes it: the peer waits for
    # the end until something else happens.
    async def main():
        loop = asyncio.get_running_loop()
        ended = []
        protocol = Recorder()
        protocol.connection_lost = lambda exc: ended.append(threading.get_ident())
        if server_side:
            server = await loop.create_server(lambda: protocol, "127.0.0.1", 0)
            peer = socket.create_connection(server.sockets[0].getsockname())
            await eventually(lambda: protocol.transport is not None)
            server.close()
        else:
            ours, peer = connected_pair()
            await loop.create_connection(lambda: protocol, sock=ours)
        peer.settimeout(3)
        transport = protocol.transport

        def give_up():
            time.sleep(0.1)
            if how == "collected":
                reader = asyncio.StreamReader(loop=loop)
                asyncio.StreamWriter(
                    transport, asyncio.StreamReaderProtocol(reader, loop=loop), reader, loop
                )
            else:
                getattr(transport, how)()
            return peer.recv(1)  # in this thread: the end must not need the loop's next turn

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            assert await loop.run_in_executor(None, give_up) == b""
        await eventually(lambda: ended)
        assert ended == [threading.get_ident()]
        peer.close()

    run(main())


def test_call_soon_threadsafe_wakes_an_idle_loop(loop_factory):
    # CASES 28. No timer and no traffic: only the wake-up itself can end the wait.
    loop = loop_factory()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        slowest = 0.0
        for _ in range(100):
            time.sleep(0.003)  # back in its wait
            done = threading.Event()
            began = time.monotonic()
            loop.call_soon_threadsafe(done.set)
            assert done.wait(5), "the idle loop was never woken"
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.1, f"{slowest * 1000:.0f} ms"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        assert not thread.is_alive()
        loop.close()


def test_call_soon_threadsafe_from_many_threads_loses_no_call(loop_factory):
    loop = loop_factory()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    seen = []

    def caller(number):
        for index in range(500):
            loop.call_soon_threadsafe(seen.append, (number, index))

    callers = [threading.Thread(target=caller, args=(n,)) for n in range(4)]
    for one in callers:
        one.start()
    for one in callers:
        one.join(TIMEOUT)
    done = threading.Event()
    loop.call_soon_threadsafe(done.set)
    assert done.wait(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()
    for number in range(4):
        assert [i for n, i in seen if n == number] == list(range(500))


@pytest.mark.timing
def test_a_notification_wakes_an_idle_loop(run, forced_loop_factory):
    # Nothing but the notification can end this wait: there is no traffic and no near timer.
    async def main():
        _, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
        content = pattern(0, 300_000)
        operation = writer.zc_submit(content)
        await limited(operation.sent)
        drained = threading.Timer(0.2, receive_now, (peer, len(content)))
        drained.start()
        began = time.monotonic()
        await limited(operation.released)
        assert time.monotonic() - began < 2.0
        writer.close()
        await limited(writer.wait_closed())
        drained.join(5)
        peer.close()

    run(main(), forced_loop_factory)


@pytest.mark.timing
def test_a_timer_alone_ends_the_wait_on_time(run):
    async def main():
        for delay in (0.0, 0.001, 0.01, 0.1):
            began = time.monotonic()
            await asyncio.sleep(delay)
            took = time.monotonic() - began
            assert delay * 0.9 <= took < delay + 0.1, (delay, took)

    run(main())


# --- signals -----------------------------------------------------------------------------------


@pytest.mark.timing
def test_a_signal_handler_of_the_loop_runs_during_an_idle_wait(run):
    async def main():
        loop = asyncio.get_running_loop()
        seen = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, seen.set)
        try:
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            began = time.monotonic()
            await limited(seen.wait(), 5)
            assert time.monotonic() - began < 1.0
            timer.join()
        finally:
            assert loop.remove_signal_handler(signal.SIGUSR1)
        assert not loop.remove_signal_handler(signal.SIGUSR1)

    run(main())


@pytest.mark.timing
def test_a_plain_python_signal_handler_runs_during_an_idle_wait(run):
    # EINTR has to come back to Python: asyncio's wake-up descriptor is not set up here.
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    try:

        async def main():
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            await asyncio.sleep(1.0)
            assert seen, "the handler did not run within the wait"
            assert seen[0] - began < 0.5
            assert time.monotonic() - began >= 0.99  # and the wait was not cut short

        run(main())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.timing
def test_a_signal_ends_a_wait_that_also_submitted(run):
    # Fails when: only EINTR ends the sleep; such an enter answers the number submitted instead.
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    try:

        async def main():
            transport, _, peer = await connect()
            transport.pause_reading()
            await asyncio.sleep(0.05)
            for _ in range(3):
                seen.clear()
                loop = asyncio.get_running_loop()
                # The last callback before the sleep makes a request: the receive is armed again.
                loop.call_soon(loop.call_soon, transport.resume_reading)
                began = time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                await asyncio.sleep(1.0)
                assert seen and seen[0] - began < 0.6, "the handler did not run within the wait"
                transport.pause_reading()
                await asyncio.sleep(0.05)
            transport.abort()
            peer.close()

        run(main())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.timing
def test_keyboard_interrupt_ends_an_idle_wait_and_the_loop_still_works(backend):
    check_script(
        """
        import asyncio, os, signal, threading, time
        import aiozc
        from order_support import connect, eventually, receive
        loop = aiozc.new_event_loop(backend=backend)

        async def begin():
            return await connect()

        transport, protocol, peer = loop.run_until_complete(begin())
        for round in range(3):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            began = time.monotonic()
            try:
                loop.run_until_complete(asyncio.sleep(10))
            except KeyboardInterrupt:
                pass
            else:
                raise SystemExit("no KeyboardInterrupt")
            took = time.monotonic() - began
            assert took < 2, took

        async def finish():
            peer.sendall(b"still")
            await eventually(lambda: protocol.data == b"still")
            transport.write(b"here")
            assert await receive(peer, 4) == b"here"
            transport.close()
            await eventually(lambda: protocol.lost == [None])

        loop.run_until_complete(finish())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        """,
        backend,
    )


def test_control_c_under_aiozc_run_cancels_the_main_task(backend):
    out = check_script(
        """
        import asyncio, os, signal, threading
        import aiozc

        async def main():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                print("cancelled")
                raise

        try:
            aiozc.run(main(), backend=backend)
        except KeyboardInterrupt:
            print("interrupted")
        """,
        backend,
    )
    assert out.split() == ["cancelled", "interrupted"]


def test_signals_during_traffic_do_not_disturb_the_stream(run):
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    try:

        async def main():
            _, writer, peer = await open_stream(rcvbuf=65536)
            reader = Reader(peer, chunk=65536, pause=0.001)
            pieces = [pattern(index, 100_000) for index in range(200)]
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            for index, piece in enumerate(pieces):
                if index % 2:
                    writer.write(piece)
                    await limited(writer.drain())
                else:
                    await limited(writer.zc_submit(piece).sent)
            signal.setitimer(signal.ITIMER_REAL, 0)
            writer.close()
            assert_same_stream(pieces, await reader.aresult())

        run(main())
        assert len(seen) > 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- exceptions that leave the loop --------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("guilty", range(5))
def test_an_exit_out_of_one_protocol_costs_no_other_connection_its_data(
    loop_factory, guilty, error
):
    # CASES 39: five connections and a notification have become ready in the same turn.
    class Guilty(Recorder):
        def data_received(self, data):
            super().data_received(data)
            raise error

    with closing(loop_factory(adaptive=False, zc_threshold=0)) as loop:
        content = pattern(0, 300_000)

        async def begin():
            made = [await connect(Guilty if n == guilty else Recorder) for n in range(5)]
            _, writer, stalled = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
            operation = writer.zc_submit(content)
            await limited(operation.sent)
            await asyncio.sleep(0.05)
            assert not operation.released.done()
            return made, writer, stalled, operation

        made, writer, stalled, operation = loop.run_until_complete(begin())
        for number, (_, _, peer) in enumerate(made):
            peer.sendall(b"data for %d" % number)
        assert_same_stream(content, receive_now(stalled, len(content)))
        time.sleep(0.3)  # past the delayed ACK: the notification is there too

        with pytest.raises(error):
            loop.run_until_complete(asyncio.sleep(5))

        async def finish():
            for number, (_, protocol, _) in enumerate(made):
                await eventually(
                    lambda p=protocol, n=number: p.data == b"data for %d" % n,
                    what=f"the data of connection {number}",
                )
            await limited(operation.released)
            for number, (transport, protocol, peer) in enumerate(made):
                if number != guilty:
                    peer.sendall(b"!")
                    await eventually(lambda p=protocol: p.data.endswith(b"!"), what="more data")
                    transport.write(b"answer")
                    assert await receive(peer, 6) == b"answer"
            for transport, _, _ in made:
                transport.close()
            writer.close()
            await asyncio.sleep(0.05)

        loop.run_until_complete(finish())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        for _, _, peer in made:
            peer.close()
        stalled.close()


@pytest.mark.parametrize("buffered", [False, True])
def test_an_exit_while_held_back_data_is_delivered_loses_none_of_it(loop_factory, buffered):
    # Data and end of file that arrived before a pause took effect wait in the transport.
    content = pattern(0, 4 << 20)

    class Pausing(Recorder):
        exits = 0

        def take(self, data):
            super().data_received(data)
            if self.exits < 20:
                self.exits += 1
                self.transport.pause_reading()
                asyncio.get_running_loop().call_soon(self.resume_and_exit)

        def resume_and_exit(self):
            self.transport.resume_reading()
            self.exiting = True

        exiting = False

        def received(self, data):
            if self.exiting:
                self.exiting = False
                super().data_received(data)
                raise SystemExit
            self.take(data)

    class Streaming(Pausing):
        def data_received(self, data):
            self.received(data)

    class Buffered(Pausing, asyncio.BufferedProtocol):
        def get_buffer(self, sizehint):
            self.memory = bytearray(5000)
            return self.memory

        def buffer_updated(self, count):
            self.received(self.memory[:count])

    with closing(loop_factory()) as loop:

        async def begin():
            return await connect(Buffered if buffered else Streaming)

        async def finish():
            await eventually(lambda: protocol.lost, 10, f"the end; {len(protocol.data)} bytes")

        _, protocol, peer = loop.run_until_complete(begin())
        sender = threading.Thread(
            target=lambda: (peer.sendall(content), peer.shutdown(socket.SHUT_WR)), daemon=True
        )
        sender.start()
        exits = 0
        while not protocol.lost:
            try:
                loop.run_until_complete(finish())
            except SystemExit:
                exits += 1
        sender.join(5)
        assert exits > 5
        assert_same_stream(content, bytes(protocol.data))
        assert protocol.calls.count("eof_received") == 1
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        peer.close()


def test_an_exit_while_a_protocol_is_replaced_leaves_the_new_one_served_as_what_it_is(loop_factory):
    # set_protocol resumes the old protocol, and that may raise. Fails when: how the new one is served is
    # decided behind that.
    class Old(Recorder):
        def resume_writing(self):
            raise SystemExit

    class New(Recorder, asyncio.BufferedProtocol):
        def get_buffer(self, sizehint):
            self.memory = bytearray(1000)
            return self.memory

        def buffer_updated(self, count):
            self.data += self.memory[:count]

        data_received = None

    async def main(loop):
        transport, old, peer = await connect(Old)
        transport.set_write_buffer_limits(0)
        while not old.writing_paused:
            transport.write(bytes(1 << 20))
        new = New()
        with pytest.raises(SystemExit):
            transport.set_protocol(new)
        peer.sendall(b"for the new one")
        await eventually(lambda: new.data == b"for the new one")
        transport.abort()
        peer.close()

    with closing(loop_factory()) as loop:
        loop.run_until_complete(main(loop))


def test_a_run_that_is_stopped_in_mid_turn_keeps_what_had_arrived(loop_factory):
    # loop.stop() from one data_received: the other connections' data comes in the next run.
    class Stopper(Recorder):
        def data_received(self, data):
            super().data_received(data)
            asyncio.get_running_loop().stop()

    with closing(loop_factory()) as loop:

        async def begin():
            return [await connect(Stopper) for _ in range(5)]

        made = loop.run_until_complete(begin())
        for number, (_, _, peer) in enumerate(made):
            peer.sendall(b"data for %d" % number)
        for _ in range(20):
            loop.call_later(2, loop.stop)
            loop.run_forever()
            if all(protocol.data for _, protocol, _ in made):
                break
        for number, (transport, protocol, peer) in enumerate(made):
            assert protocol.data == b"data for %d" % number
            transport.abort()
            peer.close()
        loop.run_until_complete(asyncio.sleep(0))


# --- the end of a run, the end of a loop ---------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1000, 60_000])
@pytest.mark.parametrize(
    "call",
    ["write", "zc_submit", "write and close", "writelines", "last write", "last zc_submit"],
)
@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_data_written_just_before_the_loop_ends_arrives(forced_loop_factory, family, call, size):
    # CASES 31.
    content = pattern(size, size)

    async def main():
        _, writer, peer = await open_stream(family)
        if call == "zc_submit":
            writer.zc_submit(content)
        elif call == "writelines":
            writer.writelines([content[:10], content[10:]])
        elif call == "last write":  # runs in the very turn that ends the loop
            loop.call_soon(writer.write, content)
        elif call == "last zc_submit":
            loop.call_soon(writer.zc_submit, content)
        else:
            writer.write(content)
        if call == "write and close":
            writer.close()
        return writer, peer

    loop = forced_loop_factory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with closing(loop):
            _writer, peer = loop.run_until_complete(main())
        peer.settimeout(5)
        assert_same_stream(content, receive_now(peer, len(content)))
        peer.close()
        del _writer
        collect()


@pytest.mark.parametrize("call", ["write", "zc_submit"])
def test_data_written_between_the_last_run_and_close_arrives(forced_loop_factory, call):
    content = pattern(7, 50_000)
    loop = forced_loop_factory()

    async def begin():
        return await open_stream()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with closing(loop):
            _, writer, peer = loop.run_until_complete(begin())
            getattr(writer, call)(content)
        peer.settimeout(5)
        del writer, _
        collect()
        assert_same_stream(content, receive_now(peer, len(content)))
        assert receive_now(peer, 1) == b""
        peer.close()


def test_data_written_between_two_runs_arrives_in_the_next(forced_loop_factory):
    with closing(forced_loop_factory()) as loop:

        async def begin():
            return await open_stream()

        _, writer, peer = loop.run_until_complete(begin())
        pieces = [pattern(index, 1000 * index) for index in range(20)]
        for index, piece in enumerate(pieces):
            if index % 2:
                writer.write(piece)
            else:
                writer.zc_submit(piece)
        writer.write_eof()

        async def finish():
            return await limited(asyncio.to_thread(receive_now, peer, 1 << 20))

        assert_same_stream(pieces, loop.run_until_complete(finish()))
        writer.close()
        loop.run_until_complete(asyncio.sleep(0.01))
        peer.close()


def test_three_hundred_runs_keep_an_open_connection_alive(forced_loop_factory):
    class Echo(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.write(data)

    with closing(forced_loop_factory()) as loop:

        async def begin():
            return await connect(Echo)

        transport, protocol, peer = loop.run_until_complete(begin())
        for number in range(300):
            message = b"message %08d" % number
            peer.sendall(message)
            got = len(protocol.data) + len(message)

            async def until(count=got, number=number):
                await eventually(lambda: len(protocol.data) >= count, what=f"run {number}")
                if number % 3 == 0:
                    await limited(transport.zc_write(b"and more").sent)

            loop.run_until_complete(until())
            assert receive_now(peer, len(message)) == message
            if number % 3 == 0:
                assert receive_now(peer, 8) == b"and more"
        assert_same_stream(
            b"".join(b"message %08d" % number for number in range(300)), bytes(protocol.data)
        )
        transport.close()
        loop.run_until_complete(asyncio.sleep(0.01))
        assert protocol.lost == [None]
        assert receive_now(peer, 1) == b""
        peer.close()


def test_a_bulk_transfer_goes_on_over_three_hundred_short_runs(forced_loop_factory):
    # The end of every run takes back what was not sent and must put back exactly that.
    content = pattern(0, 24 << 20)
    with closing(forced_loop_factory()) as loop:
        ours, peer = connected_pair(sndbuf=65536, rcvbuf=65536)
        reader = Reader(peer, chunk=1 << 16, rate=40e6)

        async def begin():
            return await asyncio.open_connection(sock=ours)

        _, writer = loop.run_until_complete(begin())
        operations = [
            writer.zc_submit(content[start : start + (1 << 20)])
            for start in range(0, len(content), 1 << 20)
        ]
        runs = 0
        deadline = time.monotonic() + TIMEOUT
        while not operations[-1].sent.done():
            loop.run_until_complete(asyncio.sleep(0.001 if runs % 2 else 0))
            runs += 1
            assert time.monotonic() < deadline, f"{reader.count} bytes after {runs} runs"
        assert runs > 100
        writer.close()

        async def finish():
            for operation in operations:
                await limited(operation.released)
            return await reader.aresult()

        assert_same_stream(content, loop.run_until_complete(finish()))


def test_receiving_goes_on_over_three_hundred_short_runs(loop_factory):
    content = pattern(0, 16 << 20)
    with closing(loop_factory()) as loop:

        async def begin():
            return await connect()

        transport, protocol, peer = loop.run_until_complete(begin())
        sender = threading.Thread(target=peer.sendall, args=(content,), daemon=True)
        sender.start()
        runs = 0
        deadline = time.monotonic() + TIMEOUT
        while len(protocol.data) < len(content):
            loop.run_until_complete(asyncio.sleep(0))
            runs += 1
            assert time.monotonic() < deadline, f"{len(protocol.data)} bytes after {runs} runs"
        sender.join(5)
        assert_same_stream(content, bytes(protocol.data))
        transport.close()
        loop.run_until_complete(asyncio.sleep(0.01))
        peer.close()


@pytest.mark.timing
def test_close_with_a_stalled_peer_returns_and_leaks_the_memory_on_purpose(
    forced_loop_factory, caplog
):
    # CASES 27: the kernel still reads the pages, so neither the memory nor its lock may go.
    content = pattern(0, 400_000)
    buffer = bytearray(content)
    loop = forced_loop_factory()

    async def main(buffer):
        _, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
        operation = writer.zc_submit(buffer)
        await limited(operation.sent)
        return writer, peer, operation

    writer, peer, operation = loop.run_until_complete(main(buffer))
    assert not operation.released.done()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        began = time.monotonic()
        loop.close()
        took = time.monotonic() - began
    assert loop.is_closed()
    assert took < 2.0, f"loop.close() took {took:.1f} s"
    said = [str(w.message) for w in warned] + [r.getMessage() for r in caplog.records]
    assert any("releas" in text or "pinned" in text or "leak" in text for text in said), said
    with pytest.raises(BufferError):
        buffer.extend(b"x")
    del writer, operation, loop
    collect()
    with pytest.raises(BufferError):  # still locked with every Python reference gone
        buffer.extend(b"x")
    del buffer
    collect()
    bait = [bytes([OVERWRITTEN]) * 400_000 for _ in range(8)]
    assert_same_stream(content, receive_now(peer, len(content)))
    del bait
    peer.close()


@pytest.mark.timing
def test_close_waits_for_releases_that_come_in_time(loop_factory, caplog):
    content = pattern(0, 300_000)
    buffer = bytearray(content)
    loop = loop_factory(adaptive=False, zc_threshold=0, zc_close_timeout=5.0)

    async def main():
        _, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
        operation = writer.zc_submit(buffer)
        await limited(operation.sent)
        return writer, peer

    writer, peer = loop.run_until_complete(main())
    received = []
    drain = threading.Timer(0.3, lambda: received.append(receive_now(peer, len(content))))
    drain.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        began = time.monotonic()
        loop.close()
        assert time.monotonic() - began < 4.0
        drain.join(5)
        assert_same_stream(content, received[0])
        del writer
        collect()
    buffer.extend(b"x")  # free again
    peer.close()


@pytest.mark.timing
@pytest.mark.parametrize("limit", [0.0, 0.2])
def test_the_close_timeout_is_settable(loop_factory, limit):
    loop = loop_factory(adaptive=False, zc_threshold=0, zc_close_timeout=limit)

    async def main():
        _, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
        await limited(writer.zc_submit(pattern(0, 300_000)).sent)
        return writer, peer

    writer, peer = loop.run_until_complete(main())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.monotonic()
        loop.close()
        assert time.monotonic() - began < limit + 0.5
        del writer
        collect()
    peer.close()


def test_a_closed_loop_refuses_to_run_and_closing_twice_is_fine(loop_factory):
    loop = loop_factory()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    loop.close()
    coro = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_until_complete(coro)
    coro.close()
    with pytest.raises(RuntimeError):
        loop.call_soon(print)


def test_a_loop_that_never_ran_can_be_closed(loop_factory):
    before = len(open_descriptors())
    for _ in range(20):
        loop_factory().close()
    collect()
    assert len(open_descriptors()) <= before + 1


def test_a_loop_whose_sockets_were_closed_before_it_can_be_closed(loop_factory):
    # What the garbage collector does to a loop that nobody closed, in an order of its own.
    loop = loop_factory()
    loop.run_until_complete(asyncio.sleep(0))
    loop._ssock.close()
    loop._csock.close()
    loop.close()
    assert loop.is_closed()


def test_a_callback_of_an_event_that_fails_keeps_no_transport_alive(run):
    # Fails when: a frame of the loop refers to the handle that ran last (asyncio's gh-159049).
    async def main():
        class Protocol(asyncio.Protocol):
            kept = None

            def data_received(self, data):
                transports[0]().abort()
                try:
                    raise ValueError("kept with its traceback, and so with every frame below")
                except ValueError as exc:
                    waiters[0].set_exception(exc)

        gc.disable()
        try:
            waiters = [asyncio.get_running_loop().create_future()]
            ours, peer = connected_pair()
            transport, _ = await asyncio.get_running_loop().create_connection(Protocol, sock=ours)
            transports = [weakref.ref(transport)]
            del transport
            peer.sendall(b"x")
            with contextlib.suppress(ValueError):
                await waiters[0]
            waiters.clear()
            del _
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert transports[0]() is None
        finally:
            gc.enable()
        peer.close()

    run(main())


def test_fifty_loops_leave_no_descriptor_and_no_ring_behind(forced_loop_factory):
    async def main():
        _, writer, peer = await open_stream()
        await limited(writer.zc_submit(b"x" * 1000).sent)
        assert await receive(peer, 1000) == b"x" * 1000
        writer.close()
        await limited(writer.wait_closed())
        peer.close()

    def one():
        with closing(forced_loop_factory()) as loop:
            loop.run_until_complete(main())

    one()
    collect()
    before = open_descriptors()
    for _ in range(50):
        one()
    collect()
    after = open_descriptors()
    assert len(after) <= len(before) + 2, sorted(after)
    assert not [name for name in after if "io_uring" in name]


def test_the_ring_is_made_when_the_loop_first_runs(backend):
    # CASES 37: a ring keeps the credentials of whoever made it, so not before a setuid.
    out = check_script(
        """
        import asyncio, os
        import aiozc
        def rings():
            names = []
            for fd in os.listdir("/proc/self/fd"):
                try:
                    names.append(os.readlink("/proc/self/fd/" + fd))
                except OSError:
                    pass
            return sum("io_uring" in name for name in names)
        async def count():
            return rings()
        loop = aiozc.new_event_loop(backend=backend)
        made = rings()
        running = loop.run_until_complete(count())
        loop.close()
        print(made, running, rings())
        """,
        backend,
    )
    assert out.split() == ["0", "1" if backend == "uring" else "0", "0"]


# --- processes -----------------------------------------------------------------------------------


def test_a_forked_child_runs_a_loop_of_its_own_and_the_parent_notices_nothing(backend):
    check_script(
        """
        import asyncio, os, time
        import aiozc
        from order_support import assert_same_stream, eventually, open_stream, pattern
        settings = dict(backend=backend, adaptive=False, zc_threshold=0)

        async def transfer(count, first):
            listener_reader = asyncio.get_running_loop().create_future()
            async def serve(reader, writer):
                listener_reader.set_result(await reader.read(-1))
                writer.close()
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            pieces = [pattern(first + n, 50_000) for n in range(count)]
            operations = []
            for n, piece in enumerate(pieces):
                operations.append(writer.zc_submit(piece))
                if n == count // 2:
                    yield
            writer.write_eof()
            for operation in operations:
                await asyncio.wait_for(operation.released, 20)
            assert_same_stream(pieces, await asyncio.wait_for(listener_reader, 20))
            writer.close()
            server.close()

        async def parent():
            _, stalled, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
            held = stalled.zc_submit(pattern(9, 300_000))
            await asyncio.wait_for(held.sent, 10)
            children = []
            async for _ in transfer(40, 0):
                for _ in range(3):
                    pid = os.fork()
                    if pid == 0:
                        code = 1
                        try:
                            async def child():
                                async for _ in transfer(40, 1000):
                                    pass
                            loop = aiozc.new_event_loop(**settings)
                            loop.run_until_complete(asyncio.wait_for(child(), 15))
                            loop.close()
                            code = 0
                        except BaseException:
                            import traceback; traceback.print_exc()
                        finally:
                            os._exit(code)
                    children.append(pid)
            for pid in children:
                status = None
                def exited():
                    nonlocal status
                    done, code = os.waitpid(pid, os.WNOHANG)
                    status = code
                    return done
                await eventually(exited, 20, "the child's exit")
                assert os.waitstatus_to_exitcode(status) == 0, status
            assert not held.released.done()
            from order_support import receive
            assert_same_stream(pattern(9, 300_000), await receive(peer, 300_000))
            await asyncio.wait_for(held.released, 10)
            async for _ in transfer(40, 500):
                pass
            stalled.close()

        loop = aiozc.new_event_loop(**settings)
        loop.run_until_complete(asyncio.wait_for(parent(), 50))
        loop.close()
        """,
        backend,
        timeout=60,
    )


def test_a_forked_child_that_closes_the_loop_leaves_it_to_its_parent(backend):
    # Fails when: the child takes connections out of the epoll set, which is the parent's, too; reads its
    # notifications; or shuts down, as a closed connection's whose memory is pinned, what the parent has open.
    check_script(
        """
        import asyncio, os, socket, threading
        import aiozc
        from order_support import assert_same_stream, eventually, open_stream, pattern, receive
        loop = aiozc.new_event_loop(backend=backend, adaptive=False, zc_threshold=0)
        accepted = []

        async def begin():
            server = await asyncio.start_server(lambda *a: accepted.append(a), "127.0.0.1", 0)
            reader, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
            op = writer.zc_submit(pattern(9, 300_000))  # more than the peer takes: it stays pinned
            await asyncio.wait_for(op.sent, 10)
            peer.send(b"1")
            assert await reader.readexactly(1) == b"1"
            return server, reader, writer, peer, op

        server, reader, writer, peer, op = loop.run_until_complete(begin())
        assert loop.zc_stats().pinned_bytes
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                loop.close()
                code = 0
            except BaseException:
                import traceback; traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status

        async def go_on():
            peer.send(b"2")
            assert await asyncio.wait_for(reader.readexactly(1), 5) == b"2"
            assert not op.released.done()
            with socket.create_connection(server.sockets[0].getsockname()):
                await eventually(lambda: accepted, 5, "the listener")
            rung = loop.create_future()
            threading.Timer(0.05, loop.call_soon_threadsafe, (rung.set_result, None)).start()
            await asyncio.wait_for(rung, 5)
            assert_same_stream(pattern(9, 300_000), await receive(peer, 300_000))
            assert (await asyncio.wait_for(op.released, 10)).nbytes == 300_000
            writer.close()
            server.close()

        loop.run_until_complete(asyncio.wait_for(go_on(), 30))
        loop.close()
        """,
        backend,
    )


def test_a_child_that_was_forked_in_a_run_may_close_the_listener(backend):
    # Fails when: the child asks the ring, or the epoll set, of its parent to let go of the listener.
    check_script(
        """
        import asyncio, os
        import aiozc
        loop = aiozc.new_event_loop(backend=backend)

        async def echo(reader, writer):
            writer.write(await reader.readexactly(1))
            writer.close()

        async def main():
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            address = server.sockets[0].getsockname()
            await asyncio.sleep(0.01)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    server.close()
                    code = 0
                except BaseException:
                    import traceback; traceback.print_exc()
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"x")
            assert await asyncio.wait_for(reader.read(), 5) == b"x"
            writer.close()
            server.close()

        loop.run_until_complete(asyncio.wait_for(main(), 20))
        loop.close()
        """,
        backend,
    )


def test_a_forked_child_may_go_on_with_the_idle_loop_of_its_parent(backend):
    # The ring belongs to the parent: the child makes its own, anew.
    check_script(
        """
        import asyncio, os
        import aiozc
        from order_support import open_stream, receive
        loop = aiozc.new_event_loop(backend=backend, adaptive=False, zc_threshold=0)

        async def main():
            _, writer, peer = await open_stream()
            await asyncio.wait_for(writer.zc_submit(b"x" * 5000).sent, 10)
            assert await receive(peer, 5000) == b"x" * 5000
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), 10)

        async def begin():
            await asyncio.sleep(0.01)

        loop.run_until_complete(begin())
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                loop.run_until_complete(asyncio.wait_for(main(), 10))
                code = 0
            except BaseException:
                import traceback; traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        loop.run_until_complete(asyncio.wait_for(main(), 10))
        loop.close()
        """,
        backend,
    )


def test_subprocesses_work_while_operations_are_in_flight(run, forced_loop_factory):
    # CASES 30: fork, then exec in the child, while notifications are outstanding.
    async def main():
        _, writer, peer = await open_stream(sndbuf=1 << 20, rcvbuf=65536)
        content = pattern(0, 300_000)
        more = pattern(1, 4 << 20)
        held = writer.zc_submit(content)
        await limited(held.sent)
        queued = writer.zc_submit(more)
        for number in range(5):
            process = await limited(
                asyncio.create_subprocess_exec(
                    "/bin/cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
                )
            )
            text = pattern(number, 500_000)
            out, _ = await limited(process.communicate(text))
            assert out == text
            assert process.returncode == 0
        assert not held.released.done()
        assert not queued.sent.done()
        assert_same_stream([content, more], await receive(peer, len(content) + len(more)))
        await limited(held.released)
        await limited(queued.released)
        writer.close()
        await limited(writer.wait_closed())
        peer.close()

    run(main(), forced_loop_factory)


def test_a_subprocess_that_is_killed_is_reported(run):
    async def main():
        process = await limited(asyncio.create_subprocess_exec("/bin/sleep", "60"))
        process.kill()
        assert await limited(process.wait(), 5) == -signal.SIGKILL
        shell = await limited(
            asyncio.create_subprocess_shell("echo out; echo err >&2; exit 7", stdout=-1, stderr=-1)
        )
        assert await limited(shell.communicate(), 5) == (b"out\n", b"err\n")
        assert shell.returncode == 7

    run(main())


# --- descriptors, sockets, files ---------------------------------------------------------------


def pipes():
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write, functools.partial(os.close, read), functools.partial(os.close, write)


def pairs():
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    return left, right, left.close, right.close


def write_to(target, data):
    return os.write(target if isinstance(target, int) else target.fileno(), data)


def read_from(source, count):
    return os.read(source if isinstance(source, int) else source.fileno(), count)


@pytest.mark.parametrize("make", [pipes, pairs])
def test_add_reader_is_level_triggered(run, make):
    async def main():
        loop = asyncio.get_running_loop()
        source, sink, close_source, close_sink = make()
        calls = []
        loop.add_reader(source, lambda: calls.append(read_from(source, 1)))
        await asyncio.sleep(0.05)
        assert calls == []  # nothing to read
        write_to(sink, b"abc")
        await eventually(lambda: len(calls) == 3, what="one call per byte left over")
        await asyncio.sleep(0.02)
        assert calls == [b"a", b"b", b"c"]

        ignored = []
        loop.add_reader(source, ignored.append, 1)  # replaces the callback
        write_to(sink, b"d")
        await eventually(lambda: len(ignored) > 5, what="calls for data that nobody reads")
        assert len(calls) == 3
        assert loop.remove_reader(source)
        assert not loop.remove_reader(source)
        count = len(ignored)
        for _ in range(5):
            await asyncio.sleep(0.002)
        assert len(ignored) == count

        loop.add_reader(source, lambda: calls.append(read_from(source, 1)))  # was ready before
        await eventually(lambda: calls[3:] == [b"d"], what="the byte that was waiting")
        close_sink()
        await eventually(lambda: calls[-1] == b"", what="end of file")
        loop.remove_reader(source)
        close_source()

    run(main())


@pytest.mark.parametrize("make", [pipes, pairs])
def test_add_writer_is_level_triggered(run, make):
    async def main():
        loop = asyncio.get_running_loop()
        source, sink, close_source, close_sink = make()
        with contextlib.suppress(BlockingIOError):
            while True:
                write_to(sink, bytes(4096))
        calls = []
        loop.add_writer(sink, calls.append, 1)
        await asyncio.sleep(0.05)
        assert calls == []  # full
        with contextlib.suppress(BlockingIOError):
            while True:
                read_from(source, 1 << 16)
        await eventually(lambda: len(calls) > 5, what="calls while there is room")
        assert loop.remove_writer(sink)
        assert not loop.remove_writer(sink)
        count = len(calls)
        for _ in range(5):
            await asyncio.sleep(0.002)
        assert len(calls) == count
        close_source()
        close_sink()

    run(main())


def test_a_reader_and_a_writer_on_one_socket_work_side_by_side(run):
    async def main():
        loop = asyncio.get_running_loop()
        left, right, close_left, close_right = pairs()
        reads, writes = [], []
        loop.add_writer(left, writes.append, 1)
        loop.add_reader(left, lambda: reads.append(left.recv(10)))
        await eventually(lambda: len(writes) > 3)
        right.send(b"x")
        await eventually(lambda: reads == [b"x"])
        assert loop.remove_writer(left)
        count = len(writes)
        right.send(b"y")
        await eventually(lambda: reads == [b"x", b"y"])
        assert len(writes) == count
        assert loop.remove_reader(left)
        close_left()
        close_right()

    run(main())


def test_a_descriptor_number_that_comes_back_is_watched_anew(run):
    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        for number in range(50):
            left, right, close_left, close_right = pairs()
            loop.add_reader(left, lambda s=left: seen.append(s.recv(10)))
            right.send(b"%d" % number)
            await eventually(lambda n=number: seen[n:] == [b"%d" % n], what=f"round {number}")
            assert loop.remove_reader(left)
            close_left()
            close_right()

    run(main())


def test_a_reader_that_raises_goes_to_the_exception_handler_and_stays(run):
    async def main():
        loop = asyncio.get_running_loop()
        contexts = []
        loop.set_exception_handler(lambda _, context: contexts.append(context))
        source, sink, close_source, close_sink = pipes()

        def callback():
            os.read(source, 1)
            raise ZeroDivisionError

        loop.add_reader(source, callback)
        os.write(sink, b"ab")
        await eventually(lambda: len(contexts) == 2)
        assert isinstance(contexts[0]["exception"], ZeroDivisionError)
        loop.remove_reader(source)
        close_source()
        close_sink()

    run(main())


def test_add_reader_refuses_a_descriptor_of_a_transport_and_a_bad_one(run):
    async def main():
        loop = asyncio.get_running_loop()
        transport, _, peer = await connect()
        fd = transport.get_extra_info("socket").fileno()
        with pytest.raises(RuntimeError, match="used by transport"):
            loop.add_reader(fd, print)
        with pytest.raises(RuntimeError, match="used by transport"):
            loop.remove_writer(fd)
        transport.close()
        read, write = os.pipe()
        os.close(read)
        os.close(write)
        with pytest.raises(OSError) as caught:
            loop.add_reader(read, print)
        assert caught.value.errno == errno.EBADF
        await asyncio.sleep(0)
        peer.close()

    run(main())


def test_pipe_transports_carry_data_both_ways(run):
    async def main():
        loop = asyncio.get_running_loop()
        read, write = os.pipe()
        reader = asyncio.StreamReader()
        read_transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
        )
        write_transport, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(write, "wb")
        )
        content = pattern(0, 1 << 20)
        write_transport.write(content)
        write_transport.close()
        assert_same_stream(content, await limited(reader.read(-1)))
        read_transport.close()

    run(main())


def test_the_socket_coroutines_move_data(run):
    async def main():
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        client = socket.socket()
        client.setblocking(False)
        accept = asyncio.create_task(loop.sock_accept(listener))
        await limited(loop.sock_connect(client, listener.getsockname()))
        server, address = await limited(accept)
        assert address == client.getsockname()

        content = pattern(0, 5 << 20)
        sending = asyncio.create_task(loop.sock_sendall(client, content))
        received = bytearray()
        await asyncio.sleep(0.02)
        assert not sending.done()
        while len(received) < len(content) // 2:
            received += await limited(loop.sock_recv(server, 1 << 16))
        buffer = bytearray(1 << 16)
        while len(received) < len(content):
            count = await limited(loop.sock_recv_into(server, buffer))
            received += buffer[:count]
        await limited(sending)
        assert_same_stream(content, bytes(received))

        waiting = asyncio.create_task(loop.sock_recv(server, 10))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await limited(loop.sock_sendall(client, b"after"))
        assert await limited(loop.sock_recv(server, 10)) == b"after"
        client.close()
        assert await limited(loop.sock_recv(server, 10)) == b""
        server.close()
        listener.close()

    run(main())


def test_the_datagram_socket_coroutines_move_datagrams(run):
    async def main():
        loop = asyncio.get_running_loop()
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        two = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for sock in (one, two):
            sock.setblocking(False)
            sock.bind(("127.0.0.1", 0))
        assert await limited(loop.sock_sendto(one, b"hello", two.getsockname())) == 5
        assert await limited(loop.sock_recvfrom(two, 100)) == (b"hello", one.getsockname())
        await limited(loop.sock_sendto(two, b"back", one.getsockname()))
        buffer = bytearray(10)
        assert await limited(loop.sock_recvfrom_into(one, buffer)) == (4, two.getsockname())
        assert buffer[:4] == b"back"
        one.close()
        two.close()

    run(main())


def test_connecting_to_a_closed_port_is_refused(run):
    async def main():
        loop = asyncio.get_running_loop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = probe.getsockname()
            client = socket.socket()
            client.setblocking(False)
            with pytest.raises(ConnectionRefusedError):
                await limited(loop.sock_connect(client, address))
            client.close()
            with pytest.raises(ConnectionRefusedError):
                await limited(asyncio.open_connection(*address))

    run(main())


@pytest.mark.parametrize("fallback", [True, False])
def test_sendfile_keeps_its_place_between_two_writes(run, fallback):
    async def main():
        loop = asyncio.get_running_loop()
        content = pattern(0, 3_000_000)
        before, after = pattern(1, 200_000), pattern(2, 200_000)
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
            transport, _, peer = await connect()
            reader = Reader(peer, chunk=1 << 16, pause=0.0005)
            transport.write(before)
            sent = await limited(loop.sendfile(transport, file, 1000, 2_000_000, fallback=fallback))
            assert sent == 2_000_000
            transport.write(after)
            assert await limited(loop.sendfile(transport, file, 0, None)) == len(content)
            transport.close()
            assert_same_stream(
                [before, content[1000:2_001_000], after, content], await reader.aresult()
            )

    run(main())


def test_sendfile_behind_a_zero_copy_operation_keeps_the_order(run, forced_loop_factory):
    async def main():
        loop = asyncio.get_running_loop()
        content, first, last = pattern(0, 1_000_000), pattern(1, 3 << 20), pattern(2, 100_000)
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
            _, writer, peer = await open_stream(rcvbuf=65536)
            reader = Reader(peer, chunk=1 << 16, pause=0.0005)
            one = writer.zc_submit(first)
            assert await limited(loop.sendfile(writer.transport, file, 0, None)) == len(content)
            two = writer.zc_submit(last)
            await limited(one.released)
            await limited(two.released)
            writer.close()
            assert_same_stream([first, content, last], await reader.aresult())

    run(main(), forced_loop_factory)


def test_sock_sendfile_sends_the_file(run):
    async def main():
        loop = asyncio.get_running_loop()
        ours, peer = connected_pair()
        reader = Reader(peer)
        content = pattern(4, 2_000_000)
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
            assert await limited(loop.sock_sendfile(ours, file)) == len(content)
        ours.close()
        assert_same_stream(content, await reader.aresult())

    run(main())


def test_getaddrinfo_and_the_executor_work(run):
    async def main():
        loop = asyncio.get_running_loop()
        infos = await limited(loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM))
        assert infos[0][4] == ("127.0.0.1", 80)
        assert await limited(loop.run_in_executor(None, threading.get_ident)) != (
            threading.get_ident()
        )
        await limited(loop.shutdown_default_executor())

    run(main())


# --- debug mode, environment, import -----------------------------------------------------------


def test_an_echo_works_in_debug_mode(forced_loop_factory):
    with closing(forced_loop_factory()) as loop:
        loop.set_debug(True)
        assert loop.get_debug()

        async def main():
            async def serve(reader, writer):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.zc_send(b"+")
                writer.close()

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for number in range(50):
                writer.write(b"%04d" % number)
                assert await limited(reader.readexactly(5)) == b"%04d+" % number
            writer.close()
            await limited(writer.wait_closed())
            server.close()
            await limited(server.wait_closed())

        loop.run_until_complete(main())


def test_debug_mode_reports_a_call_from_the_wrong_thread(loop_factory):
    with closing(loop_factory()) as loop:
        loop.set_debug(True)

        async def main():
            with pytest.raises(RuntimeError, match="Non-thread-safe"):
                await asyncio.to_thread(loop.call_soon, print)

        loop.run_until_complete(main())


@pytest.mark.parametrize("variable", ["AIOZC_BACKEND", "setting"])
def test_the_backend_can_be_chosen(backend, variable):
    out = check_script(
        """
        import asyncio, os
        import aiozc
        async def main():
            return asyncio.get_running_loop().zc_stats().backend
        settings = {} if "AIOZC_BACKEND" in os.environ else {"backend": backend}
        print(aiozc.run(main(), **settings))
        if "AIOZC_BACKEND" in os.environ:
            print(aiozc.capabilities().backend, bool(aiozc.capabilities().reason))
        """,
        backend,
        env={"AIOZC_BACKEND": backend} if variable == "AIOZC_BACKEND" else {},
    )
    expected = [backend] + ([backend, "True"] if variable == "AIOZC_BACKEND" else [])
    assert out.split() == expected


def test_zero_copy_can_be_switched_off_by_the_environment(backend):
    out = check_script(
        """
        import asyncio
        import aiozc
        from order_support import open_stream
        async def main():
            _, writer, peer = await open_stream()
            operation = writer.zc_submit(b"x" * 100_000)
            result = await asyncio.wait_for(operation.released, 5)
            stats = asyncio.get_running_loop().zc_stats()
            print(result.path, stats.zc_requests)
            writer.close()
        print(aiozc.capabilities().zerocopy)
        aiozc.run(main(), backend=backend, adaptive=False, zc_threshold=0)
        """,
        backend,
        env={"AIOZC_ZEROCOPY": "off"},
    )
    assert out.split() == ["False", "copied", "0"]


@pytest.mark.parametrize("variable", ["AIOZC_BACKEND", "AIOZC_ZEROCOPY"])
def test_a_value_that_is_no_choice_is_refused_by_name(variable):
    done = run_script(
        "import aiozc; aiozc.new_event_loop().close()", "", env={variable: "nonsense"}
    )
    assert done.returncode != 0
    assert variable in done.stderr and "nonsense" in done.stderr


def test_the_import_is_quiet_and_starts_nothing(backend):
    done = run_script(
        """
        import ctypes, os, threading  # ctypes keeps a descriptor of its own, from 3.14 on
        before = len(os.listdir("/proc/self/fd"))
        import aiozc
        import asyncio
        assert threading.active_count() == 1
        assert len(os.listdir("/proc/self/fd")) == before
        loop = asyncio.new_event_loop()
        assert "aiozc" not in type(loop).__module__, loop
        loop.close()
        """,
        backend,
        options=["-W", "error"],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_install_makes_asyncio_run_use_this_loop():
    out = check_script(
        """
        import asyncio
        import aiozc
        async def main():
            return isinstance(asyncio.get_running_loop(), aiozc.EventLoop)
        print(asyncio.run(main()))
        aiozc.install()
        print(asyncio.run(main()))
        with asyncio.Runner(loop_factory=aiozc.new_event_loop) as runner:
            print(runner.run(main()))
        asyncio.set_event_loop_policy(None)
        print(asyncio.run(main()), aiozc.run(main()))
        """,
        "",
    )
    assert out.split() == ["False", "True", "True", "False", "True"]


def test_the_other_thread_may_poll_a_socket_while_the_loop_sends_on_it(run):
    # A transport's socket is non-blocking and stays usable for getsockopt and polling.
    async def main():
        _, writer, peer = await open_stream(sndbuf=16384, rcvbuf=16384)
        reader = Reader(peer, stalled=True)
        content = pattern(0, 1 << 20)
        writer.write(content)
        await asyncio.sleep(0.02)
        fd = writer.get_extra_info("socket").fileno()
        assert select.select([], [fd], [], 0)[1] == []
        assert not os.get_blocking(fd)
        assert_prefix(content, reader.so_far())
        reader.go()
        writer.close()
        assert_same_stream(content, await reader.aresult())

    run(main())
