"""A state machine over one connection at a time: anything a caller, a peer or a loop can do, in any order.

The oracle is plain. The peer gets exactly the bytes of what was not withdrawn, in the order of the calls, or
where the connection was cut a prefix of them. Each operation ends once, is released after it was sent, and
keeps its memory locked until then; that memory is overwritten the moment it is given back. What the protocol
is told of high and low water comes in pairs. When a connection is over nothing is left of it.

The loop runs in a thread of its own, is stopped between any two calls, and goes on in that thread or another.
The calls are made in its thread, whether it runs or not. The peer is a blocking socket, read by a third thread.

`AIOZC_FUZZ_STEPS` sets the number of steps of the slow test (10,000 a backend); a failure prints the blob that
plays it again, and AIOZC_ORDER_SHRINK=1 has it reduced.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from order_support import assert_prefix, assert_same_stream, connected_pair, overwrite, pattern
from support import linger_0, locked
from test_order import KINDS, MODES, examples, make

import aiozc

STEPS = int(os.environ.get("AIOZC_FUZZ_STEPS", "10000"))
LIMIT = 20.0  # seconds that anything may take before it counts as a hang
ENDED = {
    aiozc.OperationState.RELEASED,
    aiozc.OperationState.WITHDRAWN,
    aiozc.OperationState.FAILED,
}

SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.sampled_from([1, 4096, 16384, 16385, 65536]),
    st.integers(0, 300_000),
    st.sampled_from([(1 << 20) + 1]),
)
PIECE = st.tuples(st.sampled_from(KINDS), SIZES)
FEW = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40_000)), max_size=8)
WHICH = st.integers(0, 1 << 16)


class Protocol(asyncio.streams.FlowControlMixin, asyncio.Protocol):
    """Writes down what it is told; stays open after the peer's end of file."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.data = bytearray()
        self.told: list[str] = []
        self.losses = 0
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> bool:
        self.told.append("eof")
        return True

    def pause_writing(self) -> None:
        if self.paused:
            self.told.append("paused twice")
        self.paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        if not self.paused:
            self.told.append("resumed twice")
        self.paused = False
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.losses += 1
        super().connection_lost(exc)


class Peer:
    """The other end. Its thread reads while it may; ends at the end of the stream, at a reset, or when told."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.got = bytearray()
        self.sent = bytearray()
        self.may_read = threading.Event()
        self.may_read.set()
        self.over = self.was_shut = False
        self.end = ""  # eof, reset
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        while not self.over and not self.end:
            if not self.may_read.wait(0.01) or not select.select([self.sock], [], [], 0.01)[0]:
                continue
            try:
                data = self.sock.recv(1 << 17)
            except OSError:
                self.end = "reset"
            else:
                self.got += data
                self.end = "" if data else "eof"

    def send(self, data: bytes) -> None:
        """As much of it as goes at once."""
        with contextlib.suppress(OSError):
            self.sent += data[: self.sock.send(data, socket.MSG_DONTWAIT)]

    def shutdown(self) -> None:
        self.was_shut = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.close(linger_0)

    def close(self, before: Callable[[socket.socket], None] = lambda _: None) -> None:
        self.over = True
        self.thread.join(LIMIT)
        before(self.sock)
        self.sock.close()


class Watched:
    """One operation, and who is told when its memory is free: it is overwritten then and there."""

    def __init__(self, op: aiozc.Operation, memories: list[Any], chunk: list[Any]) -> None:
        self.op = op
        self.memories = [memory for memory in memories if len(memory)]
        self.chunk = chunk  # in the oracle's stream
        self.states = [op.state]
        self.ends = 0
        self.wrong: list[str] = []
        self.withdrawn = False
        if not op.tell(self):
            self.set_result(None)

    def done(self) -> bool:
        return False

    def set_result(self, _: None) -> None:
        self.ends += 1
        op = self.op
        if not (op.released.done() and op.sent.done()):
            self.wrong.append("told before it was sent and released")
        if op.state not in ENDED:
            self.wrong.append(f"told in state {op.state}")
        for memory in self.memories:
            overwrite(memory)

    def look(self) -> None:
        state, before = self.op.state, self.states[-1]
        if state is not before:
            # Only forwards, and never out of a state that ends it.
            if before in ENDED or state < before:
                self.wrong.append(f"{before} became {state}")
            self.states.append(state)
        free = self.op.released.done()
        for memory in self.memories:
            if locked(memory) == free:
                self.wrong.append(f"in state {state} its memory is {'locked' if free else 'free'}")


class Machine(RuleBasedStateMachine):
    backend = "epoll"
    steps: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop: Any = None

    # -- the loop and its thread --

    def start(self) -> None:
        self.running = True
        self.run = self.worker.submit(self.loop.run_forever)

    def stop_loop(self) -> None:
        self.running = False
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.run.result(LIMIT)

    def call(self, function: Callable[[], Any]) -> Any:
        """In the loop's thread; as a callback of it while it runs."""
        if not self.running:
            return self.worker.submit(function).result(LIMIT)
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def callback() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(callback)
        return done.result(LIMIT)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + LIMIT
        while not self.call(condition):
            assert time.monotonic() < end, f"not within {LIMIT} s: {what}"
            time.sleep(0.002)

    # -- a connection --

    @initialize(
        mode=st.sampled_from(["forced", "forced", "small", "auto", "off"]),
        family=st.sampled_from(["tcp", "tcp", "tcp", "unix"]),
        sizes=st.sampled_from([(None, None), (16384, 65536), (16384, 65536), (4 << 20, 65536)]),
        stalled=st.booleans(),
    )
    def begin(
        self, mode: str, family: str, sizes: tuple[int | None, int | None], stalled: bool
    ) -> None:
        self.loop = aiozc.new_event_loop(backend=self.backend, **MODES[mode])
        self.reported: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.reported.append(context))
        self.family, self.sizes, self.stalled = family, sizes, stalled
        # Zero-copy in pieces of 4 KiB into a small window crawls at 1 MB/s (see test_order.py).
        self.largest = 20_000 if mode == "small" else 1 << 30
        self.worker = concurrent.futures.ThreadPoolExecutor(1)
        self.moved: list[concurrent.futures.ThreadPoolExecutor] = []
        self.start()
        self.open()

    def open(self) -> None:
        sndbuf, rcvbuf = self.sizes
        ours, theirs = connected_pair(self.family, sndbuf=sndbuf, rcvbuf=rcvbuf)
        theirs.setblocking(True)

        async def connect() -> Any:
            return await self.loop.create_connection(lambda: Protocol(self.loop), sock=ours)

        connecting = asyncio.run_coroutine_threadsafe(connect(), self.loop)
        self.transport, self.protocol = connecting.result(LIMIT)
        self.writer: Any = asyncio.StreamWriter(self.transport, self.protocol, None, self.loop)
        self.peer = Peer(theirs)
        if self.stalled:
            self.peer.may_read.clear()
        self.stream: list[list[Any]] = []  # [bytes], emptied when withdrawn
        self.ops: list[Watched] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.waits: list[asyncio.Task[Any]] = []
        self.eof = self.ended = self.cut = False
        self.steps["connections"] += 1

    def is_open(self) -> bool:
        return not self.ended

    def pieces(self, parts: list[tuple[str, int]]) -> tuple[list[Any], list[Any], bytes]:
        data, memories, whole = [], [], b""
        for kind, size in parts:
            size = min(size, self.largest)
            content = pattern(len(self.stream) * 7 + len(data), size)
            one, memory = make(kind, content)
            data.append(one)
            whole += content
            if memory is not None:
                memories.append(memory)
        return data, memories, whole

    def put(self, call: Callable[[], Any], whole: bytes) -> Any:
        """A call that queues: what it must raise is known."""

        def checked() -> Any:
            closing = self.transport.is_closing()
            try:
                answer = call()
            except ConnectionResetError:
                assert closing, "the connection is not closing"
            except RuntimeError as error:
                assert self.eof, f"there was no end of file: {error}"
            else:
                chunk = [whole]
                self.stream.append(chunk)
                return answer, chunk
            return None, None

        return self.call(checked)

    # -- sending --

    @precondition(is_open)
    @rule(piece=PIECE)
    def write(self, piece: tuple[str, int]) -> None:
        (data,), memories, whole = self.pieces([piece])
        self.put(lambda: self.transport.write(data), whole)
        for memory in memories:
            overwrite(memory)

    @precondition(is_open)
    @rule(parts=FEW)
    def writelines(self, parts: list[tuple[str, int]]) -> None:
        data, memories, whole = self.pieces(parts)
        if self.eof and not whole:
            return  # nothing to write is no error to asyncio
        self.put(lambda: self.transport.writelines(data), whole)
        for memory in memories:
            overwrite(memory)

    def submit(self, data: Any, memories: list[Any], whole: bytes) -> None:
        box = [data]
        del data
        op, chunk = self.put(lambda: self.transport.zc_write(box.pop()), whole)
        if op is not None:
            assert op.nbytes == len(whole)
            self.call(lambda: self.ops.append(Watched(op, memories, chunk)))

    @rule(piece=PIECE)
    def zc_submit(self, piece: tuple[str, int]) -> None:
        data, memories, whole = self.pieces([piece])
        self.submit(data.pop(), memories, whole)

    @rule(parts=FEW)
    def zc_submit_many(self, parts: list[tuple[str, int]]) -> None:
        self.submit(*self.pieces(parts))

    @precondition(lambda self: self.running and not self.ended)
    @rule(piece=PIECE)
    def zc_send(self, piece: tuple[str, int]) -> None:
        """A coroutine makes its call in its first step: the loop makes that before our next call."""
        (data,), memories, whole = self.pieces([piece])

        async def send() -> None:
            op = None
            try:
                op, _chunk = box[0]()
                if op is not None:
                    result = await op.released
                    withdrawn = op.state is aiozc.OperationState.WITHDRAWN
                    assert result.nbytes == (0 if withdrawn else len(whole))
            finally:
                if op is not None and op.released.done():
                    for memory in memories:
                        overwrite(memory)

        def call() -> Any:
            closing = self.transport.is_closing()
            try:
                op = self.transport.zc_write(data)
            except (ConnectionResetError, RuntimeError):
                assert closing or self.eof
                return None, None
            chunk = [whole]
            self.stream.append(chunk)
            self.ops.append(Watched(op, [], chunk))
            return op, chunk

        box = [call]
        self.call(lambda: self.tasks.append(self.loop.create_task(send())))
        self.call(lambda: None)

    @precondition(lambda self: self.running and self.tasks)
    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        """The bytes go, and the memory stays locked until they went."""
        task = self.tasks[which % len(self.tasks)]
        self.call(task.cancel)

    @precondition(lambda self: self.ops)
    @rule(which=WHICH, late=st.booleans())
    def withdraw(self, which: int, late: bool) -> None:
        watched = self.ops[-1 if late else which % len(self.ops)]

        def call() -> None:
            before = watched.op.state
            if watched.op.withdraw():
                assert before is aiozc.OperationState.QUEUED
                assert watched.op.bytes_sent == 0
                watched.withdrawn = True
                watched.chunk[0] = b""

        self.call(call)

    @precondition(is_open)
    @rule()
    def write_eof(self) -> None:
        if not self.call(self.transport.is_closing):
            self.call(self.transport.write_eof)
            self.eof = True

    @precondition(lambda self: self.running)
    @rule(zc=st.booleans())
    def drain(self, zc: bool) -> None:
        async def wait() -> None:
            with contextlib.suppress(ConnectionError):
                await (self.writer.zc_drain() if zc else drained())

        async def drained() -> None:
            await self.protocol._drain_helper()

        self.call(lambda: self.waits.append(self.loop.create_task(wait())))

    @precondition(is_open)
    @rule(high=st.sampled_from([0, 1, 4096, 65536, 1 << 20]))
    def limits(self, high: int) -> None:
        self.call(lambda: self.transport.set_write_buffer_limits(high=high))

    # -- receiving --

    @precondition(is_open)
    @rule(on=st.booleans())
    def our_reading(self, on: bool) -> None:
        self.call(self.transport.resume_reading if on else self.transport.pause_reading)

    @rule(on=st.booleans())
    def their_reading(self, on: bool) -> None:
        (self.peer.may_read.set if on else self.peer.may_read.clear)()

    @precondition(is_open)
    @rule(size=st.integers(1, 200_000))
    def peer_sends(self, size: int) -> None:
        self.peer.send(pattern(len(self.peer.sent) % 1000, size))

    @precondition(is_open)
    @rule()
    def peer_shuts_down(self) -> None:
        self.peer.shutdown()

    # -- the loop --

    @precondition(lambda self: self.running)
    @rule(seconds=st.sampled_from([0, 0, 0.001, 0.01]))
    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
        self.call(lambda: None)

    @precondition(lambda self: self.running)
    @rule()
    def stop(self) -> None:
        self.stop_loop()

    @precondition(lambda self: not self.running)
    @rule(elsewhere=st.booleans())
    def run_again(self, elsewhere: bool) -> None:
        if elsewhere:
            self.moved.append(self.worker)  # its thread, whose ring it was, lives on
            self.worker = concurrent.futures.ThreadPoolExecutor(1)
        self.start()

    # -- the end --

    @precondition(is_open)
    @rule(how=st.sampled_from(["close", "close", "abort", "reset", "peer resets"]), go_on=WHICH)
    def end(self, how: str, go_on: int = 0) -> None:
        if go_on % 3:
            return  # lives are longer than that
        self.ended = True
        self.steps[how] += 1
        if how == "peer resets":
            self.cut = True
            self.peer.reset()
            return

        def call() -> None:
            if how == "close":
                # What is unread when a socket is closed makes it a reset, and that may overtake.
                self.cut |= bytes(self.protocol.data) != bytes(self.peer.sent)
                self.transport.close()
            else:
                self.cut = True
                (self.transport.abort if how == "abort" else self.transport.zc_reset)()

        self.call(call)

    @precondition(lambda self: self.ended)
    @rule()
    def next(self) -> None:
        self.check_end()
        self.open()

    def check_end(self) -> None:
        if not self.running:
            self.start()
        if not self.ended:
            self.end("close")
        self.peer.may_read.set()
        if self.peer.over:
            # A reset is seen by who receives; not by who pauses, or was told of the end of file already.
            self.call(self.transport.resume_reading)
            if self.family == "tcp" and not self.peer.was_shut:
                self.until(lambda: self.protocol.losses, "connection_lost after a reset")
            self.call(self.transport.close)
        self.until(lambda: self.protocol.losses, "connection_lost")
        self.until(
            lambda: all(w.op.released.done() for w in self.ops), "the end of every operation"
        )
        self.until(lambda: all(t.done() for t in self.tasks + self.waits), "every task")
        if not self.peer.over:
            self.until(lambda: self.peer.end, "the end of the stream")
            self.peer.close()
        whole = b"".join(chunk[0] for chunk in self.stream)
        got, sent = bytes(self.peer.got), bytes(self.peer.sent)
        if self.cut:
            assert_prefix(whole, got)
        else:
            assert_same_stream([chunk[0] for chunk in self.stream], got)
            assert self.peer.end == "eof"
        assert_prefix(sent, bytes(self.protocol.data))
        self.call(self.look)
        for watched in self.ops:
            self.judge(watched)
        for task in self.tasks:
            error = None if task.cancelled() else task.exception()
            assert error is None or (self.cut and isinstance(error, OSError)), error
        for task in self.waits:
            assert task.cancelled() or task.exception() is None
        protocol = self.protocol
        assert protocol.losses == 1 and set(protocol.told) <= {"eof"}, protocol.told
        assert protocol.told.count("eof") <= 1
        assert self.cut or not protocol.paused
        self.until(lambda: self.left() == (0, 0, 0, 0), "nothing is left")
        assert not self.reported
        self.steps["operations"] += len(self.ops)
        self.steps["bytes"] += len(got)

    def left(self) -> tuple[int, int, int, int]:
        stats = self.loop.zc_stats()
        held = len(self.loop._reactor.held)
        return stats.operations_live, stats.queued_bytes, stats.pinned_bytes, held

    def judge(self, watched: Watched) -> None:
        op = watched.op
        assert not watched.wrong, (watched.wrong, op)
        assert watched.ends == 1, (watched.ends, op)
        assert (op.state is aiozc.OperationState.WITHDRAWN) == watched.withdrawn, op
        if watched.withdrawn:
            assert op.bytes_sent == 0
        elif not self.cut:
            assert (op.state, op.bytes_sent) == (aiozc.OperationState.RELEASED, op.nbytes)
        self.steps[op.state.name.lower()] += 1

    def look(self) -> None:
        for watched in self.ops:
            watched.look()

    @invariant()
    def holds(self) -> None:
        if self.loop is None:
            return
        self.steps["steps"] += 1
        self.call(self.look)
        for watched in self.ops:
            assert not watched.wrong and watched.ends <= 1, (watched.wrong, watched.ends)
        assert "twice" not in " ".join(self.protocol.told), self.protocol.told
        assert not self.reported, self.reported

    def teardown(self) -> None:
        if self.loop is None:
            return
        try:
            self.check_end()
        finally:
            if not self.peer.over:
                self.peer.close()
            if self.running:
                self.stop_loop()
            self.worker.submit(self.loop.close).result(LIMIT)
            for worker in [self.worker, *self.moved]:
                worker.shutdown()


def fuzz(backend: str, steps: int, a_run: int) -> Counter[str]:
    class On(Machine):
        pass

    On.backend = backend
    On.steps = Counter()
    # Some runs are shorter: what one of them may draw is limited.
    with_steps = settings(examples(steps * 3 // (2 * a_run)), stateful_step_count=a_run)
    run_state_machine_as_test(On, settings=with_steps)
    return On.steps


def test_two_hundred_steps(backend: str) -> None:
    counts = fuzz(backend, 200, 25)
    assert counts["steps"] >= 200 and counts["operations"] > 0


@pytest.mark.slow
def test_ten_thousand_steps(backend: str) -> None:
    counts = fuzz(backend, STEPS, 50)
    print(dict(counts))
    assert counts["steps"] >= STEPS
    for what in ("close", "abort", "reset", "peer resets", "withdrawn", "failed", "released"):
        assert counts[what] or STEPS < 10_000, what
