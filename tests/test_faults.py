"""Faults of the kernel and of memory, one test each for what the contract tests do not meet under a knob
(scripts/faults.py runs those), and for every request that a kernel may lack."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_support import CANNOT_HOLD, UNDER
from order_support import (
    Reader,
    Recorder,
    assert_same_stream,
    connected_pair,
    limited,
    open_stream,
    pattern,
)
from support import SMALL_SNDBUF, LoopErrors, eventually, in_thread, locked, stalled

import aiozc
from aiozc import attach, faults

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("no_nop", "no_poll", "no_cancel", "no_recv", "no_recvmsg", "no_send", "no_sendmsg")
NEEDED += ("no_accept", "no_recv_multishot", "no_accept_multishot", "no_buf_ring")

# One transfer on the default loop, in a process whose probe does not find something.
TRANSFER = """
import asyncio, sys, aiozc
from aiozc import faults
content = bytes(range(251)) * 8000
async def main():
    got = asyncio.get_running_loop().create_future()
    async def serve(reader, writer):
        got.set_result(await reader.read(-1))
        writer.close()
    server = await aiozc.start_server(serve, "127.0.0.1", 0)
    _, writer = await aiozc.open_connection(*server.sockets[0].getsockname())
    op = writer.zc_submit(content)
    writer.write(content)
    path = (await op).path
    writer.close()
    assert await got == content * 2
    return path
path = aiozc.run(main(), adaptive=False, zc_threshold=0)
can = aiozc.capabilities()
print(can.backend, can.zerocopy, path, faults.fired(sys.argv[1]))
print(can.reason)
"""


def without(knob: str, script: str = TRANSFER) -> list[str]:
    environment = {**os.environ, faults.VARIABLE: f"{knob}=1"}
    environment.pop("AIOZC_BACKEND", None)
    done = subprocess.run(
        [sys.executable, "-c", script, knob],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


needs_uring = pytest.mark.skipif(
    aiozc.capabilities().backend != "uring", reason="requests are of the uring backend"
)


@pytest.mark.faults
@needs_uring
@pytest.mark.parametrize("knob", NEEDED)
def test_a_kernel_that_lacks_a_request_gets_epoll_and_is_told_which(knob: str) -> None:
    # Fails when: the probe does not look for it, and the loop meets EINVAL when it runs.
    facts, reason = without(knob)
    backend, _, path, fired = facts.split()
    assert (backend, path) == ("epoll", "copied")
    assert int(fired) > 0
    feature = knob[3:] if knob.endswith(("multishot", "buf_ring")) else "plain_requests"
    assert f"lacks {feature}" in reason


@pytest.mark.faults
@needs_uring
@pytest.mark.parametrize("knob", ["no_send_zc", "no_sendmsg_zc"])
def test_a_kernel_without_zero_copy_sends_gets_uring_that_copies(knob: str) -> None:
    facts, reason = without(knob)
    backend, zerocopy, path, fired = facts.split()
    assert (backend, zerocopy, path) == ("uring", "False", "copied")
    assert int(fired) > 0 and "copied" in reason


@pytest.mark.faults
@needs_uring
def test_uring_that_was_demanded_is_refused_where_a_request_is_missing() -> None:
    script = "import aiozc\ntry: aiozc.new_event_loop(backend='uring')\nexcept RuntimeError as e: print(e)"
    (said,) = without("no_recvmsg", script)
    assert "plain_requests" in said and "epoll" in said


@pytest.mark.faults
@needs_uring
def test_the_doctor_says_which_request_is_missing() -> None:
    # Fails when: a feature that the loop needs is not among those that the doctor looks for.
    environment = {**os.environ, faults.VARIABLE: "no_accept_multishot=1,no_poll=1"}
    environment.pop("AIOZC_BACKEND", None)
    done = subprocess.run(
        [sys.executable, "-m", "aiozc", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 1, done.stderr
    (finding,) = (f for f in json.loads(done.stdout)["findings"] if f["id"] == "kernel")
    assert "plain_requests, accept_multishot" in finding["what"]


# -- memory --


@contextlib.contextmanager
def fault(loop: aiozc.EventLoop, name: str, every: int) -> Iterator[None]:
    before = faults.fired(name)
    loop.zc_fault(name, every)
    try:
        yield
    finally:
        loop.zc_fault(name, 0)
    assert faults.fired(name) > before, "it never happened: nothing was tested"


@pytest.mark.faults
def test_a_request_that_found_no_memory_is_made_in_the_next_turn(run, forced_loop_factory) -> None:
    # Fails when: the connection is not looked at again until something else wakes the loop.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        _, writer, peer = await open_stream()
        reader = Reader(peer)
        pieces = [pattern(index, 100_000) for index in range(20)]
        with fault(loop, "req_nomem", 2):
            for index, piece in enumerate(pieces):
                began = time.monotonic()
                if index % 2:
                    await limited(writer.zc_submit(piece).sent, 5)
                else:
                    writer.write(piece)
                    await limited(writer.drain(), 5)
                    # Nothing else is due on this loop: only it can bring the next turn.
                    await asyncio.sleep(0)
                assert time.monotonic() - began < 2
        writer.close()
        assert_same_stream(pieces, await reader.aresult())
        peer.close()

    run(main(), forced_loop_factory)


@pytest.mark.faults
def test_an_operation_without_memory_raises_and_leaves_nothing(run, forced_loop_factory) -> None:
    # Fails when: a refused call leaves a part queued, or its buffer locked.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        _, writer, peer = await open_stream()
        reader = Reader(peer)
        buffer = bytearray(b"x" * 5000)
        with fault(loop, "op_nomem", 1):
            for call in (writer.zc_submit, writer.write):
                for data in (
                    (buffer, [buffer, b"y" * 100_000]) if call != writer.write else (buffer,)
                ):
                    with pytest.raises(MemoryError):
                        call(data)
                    assert not locked(buffer)
        assert writer.transport.get_write_buffer_size() == 0
        assert loop.zc_stats().operations_live == 0
        expected = [pattern(1, 70_000), pattern(2, 300)]
        op = writer.zc_submit(expected[0])
        writer.write(expected[1])
        writer.close()
        assert_same_stream(expected, await reader.aresult())
        await limited(op.released)
        peer.close()

    run(main(), forced_loop_factory)


@pytest.mark.faults
@pytest.mark.parametrize("size", [100, 50_000])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_write_without_memory_raises_also_where_writing_is_paused(
    run, forced_loop_factory, kind: type, size: int
) -> None:
    # Fails when: who is above high water is only looked at for pausing; or more than that write is lost.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            data = [pattern(1, 400_000), pattern(2, size), pattern(3, size), pattern(4, size)]
            writer.write(data[0])
            writer.write(data[1])
            level = writer.transport.get_write_buffer_size()
            assert level > writer.transport.get_write_buffer_limits()[1]
            # A small write may find room behind the one before it.
            with fault(asyncio.get_running_loop(), "op_nomem", 1):
                await eventually(lambda: not fits(writer, kind(data[2])))
                refused_at = writer.transport.get_write_buffer_size()
                for _ in range(3):
                    assert not fits(writer, kind(data[2]))
                assert writer.transport.get_write_buffer_size() == refused_at
            went = (refused_at - level) // size
            writer.write(data[3])
            writer.write_eof()
            assert_same_stream([*data[:2], *[data[2]] * went, data[3]], await peer.take_all())

    run(main(), forced_loop_factory)


def fits(writer: asyncio.StreamWriter, data: bytes) -> bool:
    try:
        writer.write(data)
    except MemoryError:
        return False
    return True


@pytest.mark.faults
def test_a_write_of_which_part_went_and_no_more_can_be_queued_ends_the_connection(
    run, forced_loop_factory
) -> None:
    # Fails when: that is a MemoryError like any other, for then what is written next follows a gap.
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            lost = writer.transport.get_protocol()._closed
            whole = pattern(1, 4_000_000)
            with fault(asyncio.get_running_loop(), "op_nomem", 1):
                writer.write(whole)
            writer.write(b"?" * 100)
            with pytest.raises(OSError) as told:
                await limited(asyncio.shield(lost))
            assert told.value.errno == errno.ENOMEM
            data, _ = await in_thread(peer.read_until_reset)
            assert data and whole.startswith(data)
        assert not [c for c in errors.contexts if not isinstance(c.get("exception"), OSError)]

    run(main(), forced_loop_factory)


# -- waking --


def in_time(main, **settings) -> None:
    """Runs it in a thread, for a loop that sleeps too long has no timer of its own that could tell."""
    done = []
    thread = threading.Thread(
        target=lambda: done.append(aiozc.run(main(), **settings) is None), daemon=True
    )
    thread.start()
    thread.join(20)
    assert done, "the loop sleeps"


@pytest.mark.faults
def test_a_wake_up_that_was_lost_comes_again(run, loop_factory) -> None:
    # Fails when: the wake-up descriptor is not watched again while its byte was not read.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with fault(loop, "lost_wake", 2), ours, theirs:
            for turn in range(30):
                called = loop.create_future()
                thread = threading.Thread(
                    target=lambda f=called: (
                        time.sleep(0.002),
                        loop.call_soon_threadsafe(f.set_result, None),
                    )
                )
                thread.start()
                began = time.monotonic()
                await limited(called, 5)  # this timer is the only other thing that could wake it
                assert time.monotonic() - began < 2
                thread.join()
                readable = loop.create_future()
                loop.add_reader(ours, readable.set_result, None)
                theirs.send(bytes([turn]))
                await limited(readable, 5)
                loop.remove_reader(ours)
                assert ours.recv(10) == bytes([turn])

    run(main(), loop_factory)


@pytest.mark.faults
@needs_uring
def test_what_a_full_queue_did_not_take_is_asked_for_again(run) -> None:
    # Fails when: the loop goes to sleep with a connection whose request found no place.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        opened = [await open_stream() for _ in range(20)]
        with fault(loop, "short_submit", 2):
            for turn in range(10):
                message = pattern(turn, 3000)
                for _, writer, _ in opened:
                    writer.zc_submit(message)
                # The peers answer nothing: no completion but these brings the next turn.
                for _, _, peer in opened:
                    got = await asyncio.wait_for(asyncio.to_thread(receive, peer, 3000), 5)
                    assert got == message
        for _, writer, peer in opened:
            writer.close()
            peer.close()

    def receive(peer: socket.socket, n: int) -> bytes:
        data = b""
        while len(data) < n:
            data += peer.recv(n - len(data))
        return data

    run(
        main(),
        lambda: aiozc.new_event_loop(
            backend="uring", adaptive=False, zc_threshold=0, ring_entries=2, cq_entries=8
        ),
    )


@pytest.mark.faults
@needs_uring
def test_what_the_ring_did_not_take_goes_on_a_loop_that_is_not_ours() -> None:
    # Fails when: a turn of an attached reactor ends with a request in the submission queue, and nothing
    # brings the next one.
    async def main() -> None:
        aiozc.zc_attach(backend="uring", adaptive=False, zc_threshold=0)
        _, writer, peer = await open_stream()
        await aiozc.zc_send(writer, b"first")
        reactor = attach._find(asyncio.get_running_loop()).reactor
        reactor.fault("short_submit", 1)
        op = aiozc.zc_submit(writer, b"second")
        await asyncio.sleep(0.1)
        reactor.fault("short_submit", 0)
        await asyncio.wait_for(op.sent, 5)
        assert peer.recv(100) == b"firstsecond"
        writer.close()
        peer.close()

    asyncio.run(main())


@pytest.mark.faults
@needs_uring
@pytest.mark.parametrize("wait", ["write_eof", "drain", "close"])
def test_the_end_of_a_small_send_is_told_though_the_queue_took_it_late(wait) -> None:
    # Fails when: the loop sleeps with a quiet request (uring_submit.c) that the kernel had not taken when
    # somebody began to wait for its end: no completion would ever tell.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(20):
            _, writer, peer = await open_stream()
            transport = writer.transport
            with fault(loop, "short_submit", 2):
                for _ in range(2):  # one of the two is not taken at once
                    transport.write(pattern(number, 12))
                    await asyncio.sleep(0)
                if wait == "write_eof":
                    transport.write_eof()
                elif wait == "close":
                    transport.close()
                else:
                    transport.set_write_buffer_limits(high=0)
                    transport.write(b"1")
                    await asyncio.wait_for(writer.drain(), 5)
                    transport.close()
                got = await asyncio.wait_for(asyncio.to_thread(receive, peer), 5)
            assert got == pattern(number, 12) * 2 + (b"1" if wait == "drain" else b"")
            transport.close()
            peer.close()

    def receive(peer: socket.socket) -> bytes:
        data = b""
        while more := peer.recv(100):
            data += more
        return data

    aiozc.run(main(), backend="uring")


@pytest.mark.faults
@needs_uring
def test_a_receive_that_found_no_place_in_the_queue_is_armed_before_the_loop_sleeps() -> None:
    # Fails when: the loop sleeps, with no limit, while a connection waits for a place in the queue.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with fault(loop, "short_submit", 2):
            for sends in range(8):
                pairs = [connected_pair() for _ in range(8)]
                opened = await asyncio.gather(*(asyncio.open_connection(sock=s) for s, _ in pairs))
                for _, writer in opened:
                    writer.transport.pause_reading()
                for _ in range(20):
                    await asyncio.sleep(0)
                for _, writer in opened:  # all of them in one turn, and then it sleeps
                    writer.transport.resume_reading()
                threading.Timer(0.05, pairs[sends][1].send, (b"x",)).start()
                # No timer of the loop, and nothing else that wakes it.
                assert await opened[sends][0].readexactly(1) == b"x"
                for (_, writer), (_, peer) in zip(opened, pairs, strict=True):
                    writer.close()
                    peer.close()

    # In a queue of one place: half of one is nothing.
    in_time(main, backend="uring", ring_entries=1, cq_entries=8)


@pytest.mark.faults
@needs_uring
@pytest.mark.parametrize("asked", [False, True], ids=["native", "socket object"])
def test_a_descriptor_outlives_requests_that_did_not_end_with_its_connection(asked: bool) -> None:
    # Fails when: it is closed all the same. Then a request that was not taken yet names a number that is
    # somebody else's by the time it is.
    async def main() -> None:
        errors = LoopErrors()
        loop = asyncio.get_running_loop()
        lost = loop.create_future()
        protocol = Recorder()
        protocol.connection_lost = lambda exc: lost.set_result(exc)
        server = await loop.create_server(lambda: protocol, "127.0.0.1", 0)
        peer = socket.create_connection(server.sockets[0].getsockname())
        await eventually(lambda: protocol.transport is not None)
        transport = protocol.transport
        if asked:
            transport.get_extra_info("socket")
        descriptor = transport._sock_fd
        with fault(
            loop, "ebusy", 1
        ):  # nothing is entered: neither its receive nor the cancelling ends
            transport.abort()
            still = loop.create_future()  # right behind the end of it, before the loop's next wait
            loop.call_soon(lambda: still.set_result(os.path.exists(f"/proc/self/fd/{descriptor}")))
            assert await still, "its number is free, and a request names it"
            assert lost.done()
        assert [type(told["exception"]) for told in errors.contexts] == [OSError]
        assert errors.contexts[0]["exception"].errno == errno.EBUSY
        assert await limited(in_thread(lambda: peer.recv(1))) == b""
        await eventually(
            lambda: not os.path.exists(f"/proc/self/fd/{descriptor}")
        )  # it ended: so is this
        assert transport not in loop._transports.values()
        server.close()
        await limited(server.wait_closed())  # it was told of the end
        peer.close()

    in_time(main, backend="uring")


@pytest.mark.faults
@needs_uring
def test_receiving_goes_on_where_buffers_run_out(monkeypatch) -> None:
    # A loop is made with two receive buffers, and sixteen peers send at once, again and again.
    monkeypatch.setattr(faults, "KNOBS", dict(faults.KNOBS))
    before = faults.fired("recv_enobufs")
    faults.turn(faults.ffi.NULL, "recv_enobufs", 1)
    try:
        loop = aiozc.new_event_loop(backend="uring")
    finally:
        faults.turn(faults.ffi.NULL, "recv_enobufs", 0)

    async def main() -> None:
        opened = [await open_stream() for _ in range(16)]
        for turn in range(20):
            message = pattern(turn, 150_000)
            for _, _, peer in opened:
                threading.Thread(target=peer.sendall, args=(message,), daemon=True).start()
            for reader, _, _ in opened:
                assert await limited(reader.readexactly(len(message))) == message
        for _, writer, peer in opened:
            writer.close()
            peer.close()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert faults.fired("recv_enobufs") > before


def test_a_missed_event_of_the_reactor_s_descriptor_comes_again_on_another_loop(
    backend, monkeypatch
) -> None:
    # Fails when: the eventfd is read before it is sure that a turn follows.
    readable = attach.Attachment._readable
    events: list[bool] = []

    def every_second(self) -> None:
        events.append(len(events) % 2 == 1)
        if events[-1]:
            readable(self)

    monkeypatch.setattr(attach.Attachment, "_readable", every_second)

    async def main() -> None:
        aiozc.zc_attach(backend=backend, adaptive=False, zc_threshold=0)
        ours, peer = connected_pair(sndbuf=16384, rcvbuf=65536)
        _, writer = await asyncio.open_connection(sock=ours)
        reader = Reader(peer)
        pieces = [pattern(index, 1 << 20) for index in range(8)]
        for piece in pieces:
            await limited(aiozc.zc_send(writer, piece), 5)
        writer.close()
        assert_same_stream(pieces, await reader.aresult())
        await writer.wait_closed()
        peer.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())
    assert events.count(False) and events.count(True)


# -- the knobs themselves --


@pytest.mark.faults
def test_an_unknown_knob_is_refused_with_the_list_of_them(loop_factory) -> None:
    loop = loop_factory()
    try:
        with pytest.raises(ValueError, match="zc_enomem"):
            loop.zc_fault("zc_nothing", 1)
    finally:
        loop.close()
    for bad in ("zc_enomem", "zc_enomem=x", "unknown=1"):
        done = subprocess.run(
            [sys.executable, "-c", "import aiozc"],
            capture_output=True,
            text=True,
            env={**os.environ, faults.VARIABLE: bad},
        )
        assert done.returncode == 1 and "ValueError" in done.stderr


@pytest.mark.skipif(bool(faults.KNOBS), reason="they run here")
def test_the_tests_that_need_fault_knobs_pass_in_a_build_that_has_them(tmp_path: Path) -> None:
    # So that `make test`, whose build is the one for use, does not go without them.
    for name in ("aiozc", "_native"):
        ignored = shutil.ignore_patterns("_reactor_c*", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    if not (tmp_path / "_native" / "faults.c").exists():
        pytest.skip("the sources are not here")
    build = "import runpy; runpy.run_path('_native/build.py')['ffibuilder'].compile(tmpdir='.')"
    environment = {
        **os.environ,
        "AIOZC_FAULTS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(tmp_path),
    }
    subprocess.run(
        [sys.executable, "-c", build],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "faults and not slow", str(ROOT / "tests")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 30, done.stdout


@pytest.mark.skipif(bool(faults.KNOBS), reason="this build has fault knobs")
def test_a_build_for_use_has_no_knobs_and_says_which_build_has(loop_factory) -> None:
    # Fails when: the flavour for tests is what `make build` or an installation compiles.
    loop = loop_factory()
    try:
        with pytest.raises(RuntimeError, match="AIOZC_FAULTS=1"):
            loop.zc_fault("zc_enomem", 1)
    finally:
        loop.close()


@pytest.mark.faults
def test_every_knob_is_met_somewhere() -> None:
    here = {*NEEDED, "no_send_zc", "no_sendmsg_zc", "op_nomem", "copy_enobufs"}
    assert set(faults.KNOBS) == set(UNDER) | here
    assert all(why for _, _, why in CANNOT_HOLD)
