"""The ownership contract when somebody goes away in the middle: the caller's references, the task,
the transport, the peer, the loop, the interpreter.

Owns one subprocess per case, with memory that changes as soon as it is freed (see `poisoned_python`):
a buffer that is given up while the kernel still reads it shows as foreign bytes at the peer, which
lives in this process and reads last. Nothing here may rely on what the subprocess says about
contents: only the received stream counts.

A comment "Fails when" names the protection whose removal makes that test fail.
"""

from __future__ import annotations

import re

import pytest
from support import (
    LARGE_SNDBUF,
    MIB,
    POISON,
    SMALL_SNDBUF,
    StalledReader,
    assert_prefix,
    assert_stream,
    copies,
    plain_python,
    poisoned_python,
    runs,
    show,
)

# What every script below sends: (value, size), 6 MiB in all, no value near the poison's.
MESSAGES = [(1 + index % 80, 20_000 + 137 * index) for index in range(160)]
TOTAL = sum(size for _, size in MESSAGES)

SETUP = f"""
MESSAGES = {MESSAGES!r}

def message(value, size):
    return bytearray(bytes([value])) * size

async def scribbling():
    while True:
        scribble()
        await asyncio.sleep(0.01)

def stats():
    return asyncio.get_running_loop().zc_stats()

async def opened(sndbuf):
    _, writer = await asyncio.open_connection(sock=connect(sndbuf))
    return writer

def check_pending(ops):
    # The case is worth something only if some of it is with the kernel and some of it queued.
    if not copies(BACKEND):
        assert any(op.sent.done() and not op.released.done() for op in ops), "nothing is pinned"
    assert any(not op.sent.done() for op in ops), "everything is sent"
    assert ops[-1].state is aiozc.OperationState.QUEUED

def run(main, factory=forced):
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
"""


def test_the_witness_sees_memory_that_is_freed_too_early() -> None:
    # The rig itself, without the library: a zero-copy send by hand whose buffer is freed at once.
    script = """
sock = connect()
sock.setsockopt(socket.SOL_SOCKET, 60, 1)  # SO_ZEROCOPY
data = bytearray(b"A") * 300_000
assert sock.send(data, 0x4000000) == 300_000  # MSG_ZEROCOPY
del data
say("freed")
hear("go")
scribble()
say("scribbled")
hear("go")
sock.close()
"""
    with StalledReader() as peer, poisoned_python(script, peer.port, "none") as child:
        peer.accept()
        child.expect("freed")
        data = peer.read(100_000)
        child.tell("go")
        child.expect("scribbled")
        data += peer.read(200_000)
        child.tell("go")
        child.finish()
    values = {value for value, _ in runs(data)}
    assert POISON in values, f"nothing was poisoned: {show(data)}"


DROPPED = """
async def main():
    writer = await opened(SNDBUF)
    for index, (value, size) in enumerate(MESSAGES):
        kind = index % 8
        if kind == 4:
            writer.write(bytes(message(value, size)))
        elif kind == 5:
            writer.write(memoryview(b"--" + bytes(message(value, size)))[2:])
        elif kind == 6:
            writer.write(aiozc.frozen(message(value, size)))
        elif kind == 7:
            half = size // 2
            writer.zc_submit([message(value, half), memoryview(message(value, size - half))])
        else:
            writer.zc_submit(message(value, size))
    await asyncio.sleep(0.2)
    live = stats().operations_live
    scribble()
    say(f"dropped {live}")
    work = asyncio.ensure_future(scribbling())
    await heard("go")
    await asyncio.wait_for(writer.zc_drain(), 20)
    writer.close()
    await asyncio.wait_for(writer.wait_closed(), 20)
    for _ in range(1000):
        if not stats().operations_live:
            break
        await asyncio.sleep(0.01)
    assert stats().operations_live == 0, stats()
    assert stats().pinned_bytes == 0, stats()
    work.cancel()

run(main())
"""


@pytest.mark.parametrize("sndbuf", [SMALL_SNDBUF, LARGE_SNDBUF], ids=["queued", "pinned"])
def test_buffers_and_operations_that_were_dropped_are_sent_whole(backend, sndbuf) -> None:
    # Case 2. Fails when: the loop's own reference is missing, for an operation, for a part of a
    # list, or for what write() took by reference.
    script = SETUP + DROPPED.replace("SNDBUF", str(sndbuf))
    with StalledReader() as peer, poisoned_python(script, peer.port, backend) as child:
        peer.accept()
        live = int(child.expect("dropped")[0])
        if sndbuf == SMALL_SNDBUF or not copies(backend):
            assert live > 10
        data = peer.read(TOTAL // 2, pace=0.001, step=100_000)
        child.tell("go")
        data += peer.read_all(pace=0.0005)
        child.finish()
    assert_stream(data, MESSAGES)


CANCELS = """
async def main():
    writer = await opened(SMALL_SNDBUF)
    writer.zc_submit(message(99, 1 << 20))  # so that all of them are pending
    tasks = []
    for index in range(1000):
        value, size = 1 + index % 80, 3000 + index
        tasks.append(asyncio.ensure_future(writer.zc_send(message(value, size))))
        if index % 10 == 9:
            await asyncio.sleep(0)  # they have called; now cancel while nothing went out yet
            for task in tasks[-10:]:
                assert not task.done()
                task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    tasks.clear()
    scribble()
    say(f"cancelled {stats().operations_live}")
    work = asyncio.ensure_future(scribbling())
    await heard("go")
    writer.close()
    await asyncio.wait_for(writer.wait_closed(), 20)
    for _ in range(1000):
        if not stats().operations_live:
            break
        await asyncio.sleep(0.01)
    assert stats().operations_live == 0, stats()
    work.cancel()

run(main())
"""


def test_a_thousand_cancelled_sends_neither_cut_nor_corrupt_the_stream(backend) -> None:
    # Case 5. Fails when: a cancelled await gives up the buffer, or takes the operation back.
    with StalledReader(rcvbuf=None) as peer:
        with poisoned_python(SETUP + CANCELS, peer.port, backend) as child:
            peer.accept()
            assert int(child.expect("cancelled")[0]) > 900
            data = peer.read(1 * MIB, pace=0.001)
            child.tell("go")
            data += peer.read_all()
            child.finish()
    plan = [(99, MIB)] + [(1 + index % 80, 3000 + index) for index in range(1000)]
    assert_stream(data, plan)


CLOSE = """
async def main():
    writer = await opened(MIB)
    ops = [writer.zc_submit(message(value, size)) for value, size in MESSAGES]
    await asyncio.sleep(0.2)
    check_pending(ops)
    writer.close()
    del ops
    scribble()
    say("closed")
    work = asyncio.ensure_future(scribbling())
    await asyncio.wait_for(writer.wait_closed(), 20)
    del writer
    scribble()
    say("gone")
    await heard("go")
    work.cancel()

run(main())
"""


def test_close_sends_what_is_in_flight_to_the_last_byte(backend) -> None:
    # Fails when: the transport's end takes its operations, or its descriptor, with it.
    with StalledReader() as peer:
        with poisoned_python(SETUP + CLOSE, peer.port, backend) as child:
            peer.accept()
            child.expect("closed")
            data = peer.read(TOTAL // 2)
            data += peer.read_all()
            child.expect("gone")
            child.tell("go")
            child.finish()
    assert_stream(data, MESSAGES)


ABORT = """
async def main():
    writer = await opened(MIB)
    ops = [writer.zc_submit(message(value, size)) for value, size in MESSAGES]
    await asyncio.sleep(0.2)
    check_pending(ops)
    writer.transport.abort()
    await asyncio.wait_for(asyncio.gather(*(settled(op.sent) for op in ops)), 5)
    states = {op.state.name for op in ops}
    assert "FAILED" in states and "QUEUED" not in states and "ISSUED" not in states, states
    if not copies(BACKEND):
        assert any(not op.released.done() for op in ops), "the pins ended: was it a reset?"
    accepted = sum(op.bytes_sent for op in ops)
    del ops, writer
    scribble()
    say(f"aborted {accepted}")
    work = asyncio.ensure_future(scribbling())
    await heard("go")
    for _ in range(1000):
        if not stats().operations_live:
            break
        await asyncio.sleep(0.01)
    assert stats().operations_live == 0, stats()
    work.cancel()

async def settled(stage):
    try:
        await stage
    except OSError:
        pass

run(main())
"""


def test_abort_keeps_what_the_kernel_accepted_and_nothing_more(backend) -> None:
    # Fails when: abort() frees the buffers of failed operations at once, closes with linger 0, or
    # miscounts the request that it cancelled.
    with StalledReader() as peer:
        with poisoned_python(SETUP + ABORT, peer.port, backend) as child:
            peer.accept()
            accepted = int(child.expect("aborted")[0])
            data = peer.read_all()
            child.tell("go")
            child.finish()
    assert 0 < accepted < TOTAL
    assert len(data) == accepted
    assert_prefix(data, MESSAGES)


RESET = """
async def main():
    writer = await opened(MIB)
    ops = [writer.zc_submit(message(value, size)) for value, size in MESSAGES]
    await asyncio.sleep(0.2)
    check_pending(ops)
    writer.transport.zc_reset()
    began = asyncio.get_running_loop().time()
    for op in ops:
        try:
            await asyncio.wait_for(op, 5)
        except OSError:
            pass
        else:
            assert op.bytes_sent == op.nbytes
    assert asyncio.get_running_loop().time() - began < 10
    del ops
    assert stats().operations_live == 0, stats()
    assert stats().pinned_bytes == 0, stats()
    scribble()
    say("reset")
    await heard("go")

run(main())
"""


def test_zc_reset_frees_everything_and_the_peer_sees_nothing_of_it(backend) -> None:
    # Fails when: the buffers are freed before the kernel threw the send queue away.
    with StalledReader() as peer:
        with poisoned_python(SETUP + RESET, peer.port, backend) as child:
            peer.accept()
            child.expect("reset")
            data, was_reset = peer.read_until_reset()
            child.tell("go")
            child.finish()
    assert was_reset
    assert_prefix(data, MESSAGES)


PEER_RESET = """
async def main():
    writer = await opened(MIB)
    ops = [writer.zc_submit(message(value, size)) for value, size in MESSAGES]
    await asyncio.sleep(0.2)
    check_pending(ops)
    say("pending")
    work = asyncio.ensure_future(scribbling())
    failed = 0
    for op in ops:
        try:
            await asyncio.wait_for(op, 20)
        except (ConnectionResetError, BrokenPipeError):
            failed += 1
            assert op.state is aiozc.OperationState.FAILED
            assert op.bytes_sent < op.nbytes
        else:
            assert op.bytes_sent == op.nbytes
    sent = sum(op.bytes_sent for op in ops)
    del op, ops
    gc.collect()
    assert stats().operations_live == 0, stats()
    assert stats().notifications_outstanding == 0, stats()
    say(f"failed {failed} {sent}")
    work.cancel()

run(main())
"""


def test_a_peer_reset_in_mid_stream_corrupts_nothing_that_arrived_before(backend) -> None:
    # Case 9. Fails when: a table slot is freed twice (once by the error, once by its notification):
    # under poisoned memory that is a crash or a wrong operation.
    with StalledReader() as peer:
        with poisoned_python(SETUP + PEER_RESET, peer.port, backend) as child:
            peer.accept()
            child.expect("pending")
            data = peer.read(1_234_567, pace=0.0005, step=50_000)
            peer.reset()
            failed, sent = map(int, child.expect("failed"))
            child.finish()
    assert 0 < failed < len(MESSAGES)
    assert 1_234_567 <= sent < TOTAL
    assert_prefix(data, MESSAGES)


LOOP_CLOSE = """
import time
from functools import partial

async def main(how):
    writer = await opened(MIB)
    ops = [writer.zc_submit(message(value, size)) for value, size in MESSAGES]
    await asyncio.sleep(0.2)
    check_pending(ops)
    if how == "transport closed":
        writer.close()
    elif how == "transport aborted":
        writer.transport.abort()
        await asyncio.sleep(0.05)
    return sum(op.bytes_sent for op in ops)

loop = forced(zc_close_timeout=0.3)
accepted = loop.run_until_complete(main(sys.argv[3]))
began = time.monotonic()
loop.close()
took = time.monotonic() - began
assert loop.is_closed()
del loop
gc.collect()
scribble()
say(f"closed {accepted} {took}")
hear("scribble")
scribble()
say("scribbled")
hear("go")
"""


@pytest.mark.parametrize("how", ["transport open", "transport closed", "transport aborted"])
def test_a_loop_closed_with_pins_outstanding_leaks_them(backend, how) -> None:
    # Case 27. Fails when: loop.close() gives up buffers whose notification it did not see. (The
    # kernel goes on reading the pages after the ring is gone.)
    with StalledReader() as peer:
        with poisoned_python(SETUP + LOOP_CLOSE, peer.port, backend, how) as child:
            peer.accept()
            words = child.expect("closed")
            accepted, took = int(words[0]), float(words[1])
            data = peer.read(min(accepted, 100_000))
            child.tell("scribble")
            child.expect("scribbled")
            rest, _ = peer.read_until_reset()
            data += rest
            child.tell("go")
            errors = child.finish()
    assert took < 0.3 + 5.0
    assert len(data) >= accepted > 100_000
    assert_prefix(data, MESSAGES)
    if not copies(backend):
        assert re.search("leak|memory is kept", errors), f"nothing was said about it: {errors}"


EXITS = {
    "end of the program": """
loop = forced()
asyncio.set_event_loop(loop)
accepted, writer, ops = loop.run_until_complete(main())
say(f"ending {accepted}")
""",
    "nobody holds the loop": """
loop = forced()
accepted = loop.run_until_complete(main())[0]
del loop
gc.collect()
scribble()
say(f"ending {accepted}")
""",
    "sys.exit in a callback": """
async def leaving():
    accepted, writer, ops = await main()
    def leave():
        say(f"ending {accepted}")
        sys.exit(0)
    asyncio.get_running_loop().call_soon(leave)
    await asyncio.sleep(30)

loop = forced()
loop.run_until_complete(leaving())
""",
    "runner": """
async def leaving():
    accepted, writer, ops = await main()
    say(f"ending {accepted}")

with asyncio.Runner(loop_factory=lambda: forced(zc_close_timeout=0.1)) as runner:
    runner.run(leaving())
""",
    "exception": """
async def leaving():
    accepted, writer, ops = await main()
    say(f"ending {accepted}")
    raise SystemExit(0)

aiozc.run(leaving(), backend=BACKEND, adaptive=False, zc_threshold=0, zc_close_timeout=0.1)
""",
}

EXIT_MAIN = """
async def main():
    writer = await opened(MIB)
    ops = [writer.zc_submit(message(value, size)) for value, size in MESSAGES]
    await asyncio.sleep(0.2)
    check_pending(ops)
    return sum(op.bytes_sent for op in ops), writer, ops

class Late:
    # Outlives the other objects, and writes over what they gave back.
    def __del__(self, scribble=scribble):
        try:
            scribble()
        except Exception:
            pass

sys.late = Late()
"""


@pytest.mark.parametrize("how", EXITS)
def test_what_was_sent_survives_the_end_of_the_interpreter(backend, how) -> None:
    # Fails when: interpreter teardown drops the last references of pinned buffers (a list in a
    # module is one of the things it tears down), or hangs, or crashes.
    with StalledReader() as peer:
        with poisoned_python(SETUP + EXIT_MAIN + EXITS[how], peer.port, backend) as child:
            peer.accept()
            accepted = int(child.expect("ending")[0])
            errors = child.finish()
            data, _ = peer.read_until_reset()
    assert "Fatal" not in errors and "Segmentation" not in errors, errors
    assert len(data) >= accepted > 100_000
    assert_prefix(data, MESSAGES)


# --- plain asyncio writers, in every way to get an aiozc loop -------------------------------

PLAIN_WRITERS = """
import os
os.environ["AIOZC_BACKEND"] = BACKEND

async def main():
    loop = asyncio.get_running_loop()
    assert isinstance(loop, aiozc.EventLoop), loop
    assert loop.zc_stats().backend == BACKEND
    done = loop.create_future()

    async def handler(reader, writer):
        assert type(writer) is asyncio.StreamWriter
        first = await reader.readexactly(300_000)
        result = await writer.zc_send(bytearray(b"B") * 200_000)
        assert result.nbytes == 200_000, result
        op = writer.zc_submit([b"C" * 10, bytearray(b"D") * 10])
        await op.sent
        await op
        await writer.zc_drain()
        writer.close()
        done.set_result(first)

    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert type(writer) is asyncio.StreamWriter
    op = writer.zc_submit(bytearray(b"A") * 300_000)
    assert op.nbytes == 300_000
    await asyncio.wait_for(op, 10)
    assert await asyncio.wait_for(done, 10) == b"A" * 300_000
    assert await reader.read() == b"B" * 200_000 + b"C" * 10 + b"D" * 10
    writer.close()
    server.close()
    say("fine")
"""

WAYS = {
    "policy": "asyncio.set_event_loop_policy(aiozc.EventLoopPolicy())\nasyncio.run(main())\n",
    "install": "aiozc.install()\nasyncio.run(main())\n",
    "loop_factory": (
        "with asyncio.Runner(loop_factory=aiozc.new_event_loop) as runner:\n    runner.run(main())\n"
    ),
    "aiozc.run": "aiozc.run(main())\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_plain_asyncio_writers_have_the_methods(backend, way) -> None:
    with plain_python(PLAIN_WRITERS + WAYS[way], 0, backend) as child:
        child.expect("fine")
        child.finish()


STOCK_LOOP = """
async def nothing():
    pass

aiozc.run(nothing(), backend=BACKEND)

async def main():
    assert not isinstance(asyncio.get_running_loop(), aiozc.EventLoop)
    _, writer = await asyncio.open_connection(sock=connect())
    for call in (
        lambda: writer.zc_send(b"x" * 100),
        lambda: writer.zc_submit(b"x" * 100),
        lambda: writer.zc_drain(),
    ):
        try:
            outcome = call()
            if asyncio.iscoroutine(outcome):
                await outcome
        except (RuntimeError, TypeError) as error:
            assert "aiozc" in str(error), error
        else:
            raise AssertionError("no error")
    writer.write(b"plain")  # and the writer is none the worse
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    say("fine")

asyncio.run(main())
"""


def test_a_stock_loop_s_writer_names_the_remedy(backend) -> None:
    with StalledReader() as peer, plain_python(STOCK_LOOP, peer.port, backend) as child:
        peer.accept()
        child.expect("fine")
        child.finish()
        assert peer.read_all() == b"plain"
