"""What processes do to a loop with operations in flight: fork, exec, signals, the end.

Owns the servers of several processes on one listening socket, programs that replace themselves, and programs
that are ended from outside or end by themselves with memory pinned. The peer lives in this process and reads
last: what it receives is what counts. Other files have: the ring made when the loop first runs, fork with
operations in flight, subprocesses (test_lifecycle.py), the ends of the interpreter (test_contract_lifetime.py).

A comment "Fails when" names the protection whose removal makes that test fail.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import (
    MIB,
    WAIT,
    StalledReader,
    assert_prefix,
    assert_stream,
    in_thread,
    linger_0,
    plain_python,
    poisoned_python,
    runs,
    show,
    soon,
)

HERE = Path(__file__).parent

# --- servers of several processes -----------------------------------------------------------------

CHILDREN = 3
ANSWER = 200_000


def serve(listener: socket.socket, backend: str, ready: Any) -> None:
    """In a child: answers each line "VALUE\\n" by its pid and ANSWER bytes of that value; "busy\\n" stops its
    loop for a while. Ends by SIGTERM."""
    import asyncio

    import aiozc

    async def answer(reader: Any, writer: Any) -> None:
        line = await reader.readline()
        writer.write(b"%d\n" % os.getpid())
        if line == b"busy\n":
            asyncio.get_running_loop().call_later(0.05, time.sleep, 1.2)
        else:
            await writer.zc_send(bytearray([int(line)]) * ANSWER)
        writer.close()

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        server = await asyncio.start_server(answer, sock=listener)
        ready.release()
        await stop.wait()
        server.close()

    aiozc.run(main(), backend=backend, adaptive=False, zc_threshold=0)


def ask(address: Any, line: bytes) -> tuple[int, bytes]:
    """Who answered, and what."""
    with socket.create_connection(address, WAIT) as sock:
        sock.sendall(line)
        data = bytearray()
        while piece := sock.recv(1 << 16):
            data += piece
    pid, _, body = bytes(data).partition(b"\n")
    return int(pid), body


@contextlib.contextmanager
def served(method: str, backend: str) -> Iterator[tuple[Any, list[Any]]]:
    """An address, and the processes that serve it."""
    context: Any = multiprocessing.get_context(method)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        listener.setblocking(False)
        ready = context.Semaphore(0)
        children = [
            context.Process(target=serve, args=(listener, backend, ready), daemon=True)
            for _ in range(CHILDREN)
        ]
        for child in children:
            child.start()
        try:
            assert all(ready.acquire(timeout=WAIT) for _ in children)
            yield listener.getsockname(), children
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.join(WAIT)
        assert [child.exitcode for child in children] == [0] * CHILDREN


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_servers_of_several_processes_share_a_listener(backend: str, method: str) -> None:
    # Fails when: the listener of the caller is accepted from by exclusive waiters; then one process gets all.
    with served(method, backend) as (address, _):
        answered: collections.Counter[int] = collections.Counter()
        wrong: list[str] = []

        def client(first: int) -> None:
            for value in range(first, first + 10):
                pid, body = ask(address, b"%d\n" % value)
                answered[pid] += 1
                if body != bytes([value]) * ANSWER:
                    wrong.append(show(body))

        end = time.monotonic() + WAIT
        while len(answered) < 2 and time.monotonic() < end:  # the first may be alone for a while
            threads = [threading.Thread(target=client, args=(1 + 10 * i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong
        assert len(answered) >= 2, answered


def test_a_busy_process_leaves_connections_to_the_others(backend: str) -> None:
    # Fails when: the kernel tells only one process of a connection.
    with served("fork", backend) as (address, _):
        seen: set[int] = set()
        end = time.monotonic() + WAIT
        while len(seen) < CHILDREN and time.monotonic() < end:  # all of them are there
            seen.add(ask(address, b"1\n")[0])
        assert len(seen) == CHILDREN
        for _ in range(3):
            busy, _ = ask(address, b"busy\n")
            time.sleep(0.2)
            began = time.monotonic()
            others = {ask(address, b"2\n")[0] for _ in range(10)}
            if time.monotonic() - began < 0.8:
                assert busy not in others
                break
            time.sleep(1)  # this machine is busy, too: that it took its time says nothing
        else:
            pytest.fail("connections wait for the busy one, or this machine is slow")


def test_a_process_that_is_killed_takes_no_connection_of_another(backend: str) -> None:
    with served("fork", backend) as (address, children):
        first, _ = ask(address, b"1\n")
        (victim,) = [child for child in children if child.pid == first]
        victim.kill()
        victim.join(WAIT)
        for value in range(2, 12):
            pid, body = ask(address, b"%d\n" % value)
            assert pid != first and body == bytes([value]) * ANSWER
        victim._popen.returncode = 0  # what `served` asks of the others


def test_a_listener_of_the_caller_takes_a_backlog_and_is_free_when_it_is_closed(
    backend: str, run: Any
) -> None:
    # It is accepted from otherwise than those that the loop makes: a few connections a turn.
    async def main() -> None:
        async def answer(_reader: Any, writer: Any) -> None:
            writer.write(b"here")
            writer.close()

        address = None
        for count in (100, 1, 1, 0):
            listener = socket.create_server(address or ("127.0.0.1", 0), backlog=128)
            address = listener.getsockname()
            waiting = [socket.create_connection(address) for _ in range(count)]
            server = await asyncio.start_server(answer, sock=listener)
            for one in waiting:
                assert await in_thread(functools.partial(one.recv, 10)) == b"here"
                linger_0(one)
                one.close()
            server.close()
            await soon(server.wait_closed())
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)

    run(main())


GUNICORN_APP = """
import os
from uvicorn_worker import UvicornWorker

class Worker(UvicornWorker):
    CONFIG_KWARGS = {"loop": "aiozc:new_event_loop", "http": "h11", "lifespan": "off"}

async def app(scope, receive, send):
    import asyncio
    size = int(scope["path"][1:])
    loop = type(asyncio.get_running_loop())
    headers = [(b"pid", b"%d" % os.getpid()), (b"loop", loop.__module__.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in range(4):
        await send({"type": "http.response.body", "body": bytes([65 + part]) * size,
                    "more_body": part < 3})
"""


def test_gunicorn_with_uvicorn_s_worker_serves_and_restarts_one(
    tmp_path: Path, backend: str
) -> None:
    pytest.importorskip("gunicorn")
    pytest.importorskip("uvicorn_worker")
    import http.client

    (tmp_path / "served.py").write_text(GUNICORN_APP)
    address = tmp_path / "socket"
    arguments = ["--workers=2", "--worker-class=served.Worker", f"--bind=unix:{address}"]
    with open(tmp_path / "log", "w+") as log:
        master = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", *arguments, "--graceful-timeout=2", "served:app"],
            cwd=tmp_path,
            env={**os.environ, "AIOZC_BACKEND": backend, "PYTHONPATH": str(tmp_path)},
            stdout=log,
            stderr=log,
        )

        def get(size: int) -> tuple[int, str, bytes]:
            connection = http.client.HTTPConnection("localhost", timeout=WAIT)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(WAIT)
            connection.sock.connect(str(address))
            connection.request("GET", f"/{size}")
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return int(answer.headers["pid"]), answer.headers["loop"], body

        def until_there(other_than: int = 0) -> int:
            end = time.monotonic() + WAIT
            while True:
                with contextlib.suppress(OSError):
                    pid, loop, _ = get(10)
                    assert loop == "aiozc.loop"
                    if pid != other_than:
                        return pid
                log.seek(0)
                assert time.monotonic() < end and master.poll() is None, log.read()
                time.sleep(0.02)

        try:
            worker = until_there()
            for size in (1, 1000, 100_000, 500_000):
                assert_stream(get(size)[2], [(65 + part, size) for part in range(4)])
            os.kill(worker, signal.SIGKILL)
            until_there(worker)
            assert_stream(get(100_000)[2], [(65 + part, 100_000) for part in range(4)])
            master.terminate()
            assert master.wait(WAIT) == 0
        finally:
            if master.poll() is None:
                master.kill()
                master.wait()


# --- programs that replace themselves -------------------------------------------------------------

PINNED = """
async def pinned(size=500_000, value=112):
    _, writer = await asyncio.open_connection(sock=connect())
    op = writer.zc_submit(bytearray([value]) * size)
    await asyncio.wait_for(op.sent, 10)
    await asyncio.sleep(0.05)
    assert not op.released.done()
    return writer, op
"""

# The new program writes all over the memory that the old one gave back.
REPLACEMENT = """
import sys
trash = [bytearray(b"-") * (1 << 20) for _ in range(64)]
print("replaced", flush=True)
sys.stdin.readline()
"""

EXEC = f"""
arguments = [sys.executable, "-c", {REPLACEMENT!r}]

async def main():
    kept = await pinned()
    if sys.argv[3] == "running":
        try:
            aiozc.execve("/nowhere/at/all", ["x"])
        except FileNotFoundError:
            pass
        else:
            raise SystemExit("no error")
        aiozc.execve(sys.executable, arguments)
    return kept

loop = forced(zc_close_timeout=0.05)
kept = loop.run_until_complete(main())
if sys.argv[3] == "closed":
    loop.close()
aiozc.execve(sys.executable, arguments, dict(os.environ))
"""


@pytest.mark.parametrize("when", ["running", "stopped", "closed"])
def test_execve_with_memory_pinned_is_immediate_and_changes_nothing(
    backend: str, when: str
) -> None:
    # Case 30. Fails when: os.execve is called in the thread that ran the loop (it then waits for the peer).
    with StalledReader() as peer:
        with plain_python(PINNED + EXEC, peer.port, backend, when) as child:
            peer.accept()
            child.expect("replaced")
            data = peer.read_all()
            child.tell("go")
            child.finish()
    assert_stream(data, [(112, 500_000)])


# --- signals ---------------------------------------------------------------------------------------

SIGNALS = """
import signal

class Tick(Exception):
    pass

armed, ticks = False, 0

def tick(*_):
    global armed, ticks
    if armed:
        armed = False
        ticks += 1
        raise Tick

signal.signal(signal.SIGALRM, tick)

async def main():
    global armed
    _, writer = await asyncio.open_connection(sock=connect(1 << 20))
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    certain, n = [], 0
    while ticks < 300 and n < 100_000:
        n += 1
        buffer = bytearray(n.to_bytes(4, "big")) * 250
        kind = n % 3
        try:
            armed = True
            for _ in range(40):  # where the signal may come
                pass
            if kind == 0:
                writer.zc_submit(buffer)
            elif kind == 1:
                writer.zc_submit([buffer[:400], memoryview(bytes(buffer))[400:]])
            else:
                writer.write(buffer)
            armed = False
            certain.append(n)
        except Tick:
            pass  # queued whole, or not at all
        finally:
            armed = False
        if n % 64 == 0:
            await writer.zc_drain()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert ticks >= 300, (ticks, n)
    await writer.zc_drain()
    writer.close()
    await writer.wait_closed()
    for _ in range(500):
        if not asyncio.get_running_loop().zc_stats().operations_live:
            break
        await asyncio.sleep(0.01)
    assert not asyncio.get_running_loop().zc_stats().operations_live
    say(f"certain {n}")
    for at in range(0, len(certain), 2000):
        say("some " + " ".join(map(str, certain[at:at + 2000])))
    say("end")

with asyncio.Runner(loop_factory=forced) as runner:
    runner.run(main())
"""


def test_signal_handlers_that_raise_leave_whole_messages_in_order(backend: str) -> None:
    # Fails when: an operation is queued in two steps with a line of Python between them.
    with StalledReader(rcvbuf=None) as peer:
        with poisoned_python(SIGNALS, peer.port, backend) as child:
            peer.accept()
            data = peer.read_all()
            last = int(child.expect("certain")[0])
            certain: set[int] = set()
            while (line := child.line()) != "end":
                word, *numbers = line.split(" ")
                assert word == "some", child.stderr()
                certain.update(map(int, numbers))
            child.finish()
    assert len(data) % 1000 == 0
    arrived = []
    for at in range(0, len(data), 1000):
        message = data[at : at + 1000]
        assert message == message[:4] * 250, f"a torn message at {at}: {message[:40]!r}"
        arrived.append(int.from_bytes(message[:4], "big"))
    assert arrived == sorted(set(arrived)) and arrived[-1] <= last
    assert certain <= set(arrived)


INTERRUPTED = """
import signal

armed, interrupts = False, 0

def interrupt(*_):
    global armed, interrupts
    if armed:
        armed = False  # not again in what cleans up behind it
        interrupts += 1
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)

async def send(writer, n):
    global armed
    armed = True
    try:
        await writer.zc_send(bytearray([n % 251]) * 30_000)
    finally:
        armed = False

loop = forced()
_, writer = loop.run_until_complete(asyncio.open_connection(sock=connect(1 << 18)))
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
tasks = []
for n in range(5000):
    if interrupts == 60:
        break
    task = loop.create_task(send(writer, n))
    try:
        loop.run_until_complete(task)
    except KeyboardInterrupt:
        pass
    finally:
        armed = False
    tasks.append(task)
signal.setitimer(signal.ITIMER_REAL, 0)

async def finish():
    for task in tasks:
        if not task.done():
            await asyncio.wait_for(task, 10)
    writer.close()
    await writer.wait_closed()
    assert loop.zc_stats().operations_live == 0

loop.run_until_complete(finish())
loop.close()
say(f"interrupts {interrupts} {len(tasks)}")
"""


def test_keyboard_interrupts_out_of_the_loop_lose_no_byte(backend: str) -> None:
    # The message whose very first line was interrupted may be missing; no other, and none in part.
    with StalledReader(rcvbuf=None) as peer:
        with poisoned_python(INTERRUPTED, peer.port, backend) as child:
            peer.accept()
            data = peer.read_all()
            interrupts, messages = map(int, child.expect("interrupts"))
            child.finish()
    assert interrupts > 20, (interrupts, messages)
    seen = [(value, count) for value, count in runs(data)]
    assert all(count == 30_000 for _, count in seen), show(data)
    missing, at = 0, 0
    for n in range(messages):
        if at < len(seen) and seen[at][0] == n % 251:
            at += 1
        else:
            missing += 1
    assert at == len(seen), "messages out of order"
    assert missing <= interrupts


CONTROL_C = (
    PINNED
    + """
async def main():
    writer, op = await pinned(3 << 20)
    queued = writer.zc_submit(bytearray([113]) * (8 << 20))
    await asyncio.sleep(0.1)
    say("ready")
    await asyncio.wait_for(queued, 60)

try:
    aiozc.run(main(), backend=BACKEND, adaptive=False, zc_threshold=0, zc_close_timeout=0.2)
except KeyboardInterrupt:
    pass  # its traceback, which keeps the writer, goes before what follows
else:
    raise SystemExit("not interrupted")
scribble()
say("interrupted")
hear("go")
"""
)


def test_control_c_with_operations_in_flight_ends_soon_and_corrupts_nothing(backend: str) -> None:
    # Fails when: what the kernel still reads is given back by the loop's close().
    with StalledReader() as peer:
        with poisoned_python(CONTROL_C, peer.port, backend) as child:
            peer.accept()
            child.expect("ready")
            began = time.monotonic()
            child.process.send_signal(signal.SIGINT)
            child.expect("interrupted")
            assert time.monotonic() - began < 20
            data, _ = peer.read_until_reset()
            child.tell("go")
            child.finish()
    assert len(data) >= 3 * MIB
    assert_prefix(data, [(112, 3 * MIB), (113, 8 * MIB)])


TERMINATED = (
    PINNED
    + """
import signal

async def main():
    writer, op = await pinned(3 << 20)
    queued = writer.zc_submit(bytearray([113]) * (8 << 20))
    await asyncio.sleep(0.1)
    if sys.argv[3] == "handled":
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        say("ready")
        await stop.wait()
    else:
        say("ready")
        await asyncio.sleep(60)

aiozc.run(main(), backend=BACKEND, adaptive=False, zc_threshold=0, zc_close_timeout=0.2)
"""
)


@pytest.mark.parametrize("how", ["default", "handled"])
def test_sigterm_ends_a_process_whose_peers_stall(backend: str, how: str) -> None:
    # Fails when: the end waits for peers, or gives memory up that they have not got yet.
    with StalledReader() as peer:
        with poisoned_python(TERMINATED, peer.port, backend, how) as child:
            peer.accept()
            child.expect("ready")
            began = time.monotonic()
            child.process.terminate()
            child.finish(0 if how == "handled" else -signal.SIGTERM)
            assert time.monotonic() - began < 20
            data, _ = peer.read_until_reset()
    assert len(data) >= 3 * MIB
    assert_prefix(data, [(112, 3 * MIB), (113, 8 * MIB)])


# --- the end of the interpreter -------------------------------------------------------------------

DAEMON = (
    PINNED
    + """
import threading

def work():
    async def main():
        kept = await pinned(3 << 20)
        kept[0].zc_submit(bytearray([113]) * (8 << 20))
        await asyncio.sleep(0.1)
        ready.set()
        while True:
            scribble()
            await asyncio.sleep(0)
    loop = forced()
    loop.run_until_complete(main())

ready = threading.Event()
threading.Thread(target=work, daemon=True).start()
assert ready.wait(10)
say("ending")
"""
)


def test_a_loop_in_a_daemon_thread_at_the_end_of_the_interpreter(backend: str) -> None:
    # What the loop holds is safe in any case, for nobody takes a daemon thread's frames apart: this looks for
    # a crash in that thread, and for an end that waits for it.
    with StalledReader() as peer:
        with poisoned_python(DAEMON, peer.port, backend) as child:
            peer.accept()
            child.expect("ending")
            began = time.monotonic()
            errors = child.finish()
            assert time.monotonic() - began < 20
            data, _ = peer.read_until_reset()
    assert "Fatal" not in errors and "Segmentation" not in errors, errors
    assert len(data) >= 3 * MIB
    assert_prefix(data, [(112, 3 * MIB), (113, 8 * MIB)])
