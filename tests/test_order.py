"""One queue per transport: bytes leave in the order of the calls, whatever the calls were.

Owns the property test over `write`, `writelines`, `zc_submit` (one part, many parts) and `zc_send`
(awaited, as a task), mixed in one stream. The oracle is the plain concatenation of what was
passed, copied at the time of the call; the receiver is a blocking socket in a thread, so nothing
of the loop under test takes part in deciding what is right.

`AIOZC_ORDER_EXAMPLES` sets the number of examples of the quick tests (40), `AIOZC_ORDER_SHRINK=1`
has a failure reduced, `AIOZC_ORDER_LIMIT` is the number of seconds after which one counts as hung.
"""

from __future__ import annotations

import array
import asyncio
import os
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from order_support import (
    OVERWRITTEN,
    Reader,
    assert_prefix,
    assert_same_stream,
    collect,
    connected_pair,
    limited,
    open_stream,
    overwrite,
    pattern,
    reset,
    unpinned,
)
from support import copies

import aiozc

QUICK = int(os.environ.get("AIOZC_ORDER_EXAMPLES", "40"))
SLOW = max(500, QUICK)
LIMIT = float(os.environ.get("AIOZC_ORDER_LIMIT", "20"))  # seconds an example may take to arrive
BUDGET = 12 << 20  # bytes per example: a few 8 MiB pieces would otherwise be most of the run time

# How zero-copy is used: for everything, also in small requests through queues that overflow, as
# the loop sees fit, not at all.
FORCED = {"adaptive": False, "zc_threshold": 0}
MODES = {
    "forced": FORCED,
    "small": {**FORCED, "max_request": 4096, "ring_entries": 2, "cq_entries": 4},
    "auto": {},
    "off": {"zerocopy": "off"},
}

# "frozen" is a bytearray that the test promises not to change: never overwritten.
KINDS = ("bytes", "view of bytes", "frozen", "bytearray", "view", "read-only view", "array")
MUTABLE = {"bytearray", "view", "read-only view", "array"}


def make(kind: str, content: bytes):
    """(the object to pass, the memory to overwrite once that is allowed)."""
    if kind == "bytes":
        return content, None
    if kind == "view of bytes":
        return memoryview(b"<" + content + b">")[1 : 1 + len(content)], None
    if kind == "frozen":
        return aiozc.frozen(bytearray(content)), None
    if kind == "array" and len(content) % 4 == 0:
        items = array.array("I", content)  # four bytes an item: a length in items would show
        return memoryview(items), items
    memory = bytearray(content)
    if kind == "view":
        return memoryview(memory), memory
    if kind == "read-only view":
        return memoryview(memory).toreadonly(), memory  # read-only, but its owner still writes
    return memory, memory


SIZES = st.one_of(
    st.integers(0, 64),
    st.integers(0, 5_000),
    st.integers(0, 5_000),
    st.sampled_from([0, 1, 4096, 16383, 16384, 16385, 65535, 65536, 65537]),
    st.integers(0, 200_000),
    st.sampled_from([(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20, 8 << 20]),
)
PIECE = st.tuples(st.sampled_from(KINDS), SIZES)
SMALL_PIECE = st.tuples(st.sampled_from(KINDS), st.integers(0, 3_000))
# Beyond the 1024 iovecs that one request may carry.
MANY = st.one_of(
    st.lists(PIECE, max_size=6),
    st.lists(SMALL_PIECE, max_size=40),
    st.tuples(SMALL_PIECE, st.integers(1000, 1100)).map(lambda t: [t[0]] * t[1]),
)


@dataclass(frozen=True)
class Plan:
    """One example: the connection, the reader, the calls, and how the stream ends."""

    steps: list[tuple]
    family: str
    sndbuf: int | None
    rcvbuf: int | None
    chunk: int
    pause: float
    every: int
    late: float
    nodelay: bool
    mode: str
    ending: str

    def budget(self) -> int:
        tiny = self.sndbuf == 4608 or (self.rcvbuf is not None and self.rcvbuf < 65536)
        if self.mode == "small" and self.rcvbuf is not None:
            # Zero-copy in pieces of 4 KiB into a window that copied data has filled crawls at
            # 1 MB/s on loopback (measured, with MSG_ZEROCOPY as well).
            return 1 << 19
        if tiny and self.pause:
            return 1 << 18  # a few hundred stops are as telling as many thousand
        if tiny:
            return 2 << 20
        if self.pause and self.chunk < 1 << 20:
            return 1 << 20 if self.chunk < 4096 else 3 << 20
        return BUDGET


def plans(family=("tcp", "tcp", "tcp", "unix"), modes=("forced", "forced", "small", "auto", "off")):
    step = st.one_of(
        st.tuples(st.just("write"), PIECE),
        st.tuples(st.just("write"), PIECE),
        st.tuples(st.just("writelines"), MANY),
        st.tuples(st.just("submit"), PIECE),
        st.tuples(st.just("submit"), PIECE),
        st.tuples(st.just("submit many"), MANY),
        st.tuples(st.just("send"), PIECE),
        st.tuples(st.just("send task"), PIECE),
        st.tuples(st.just("send task"), PIECE),
        st.tuples(st.just("await sent"), st.none()),
        st.tuples(st.just("drain"), st.none()),
        st.tuples(st.just("zc_drain"), st.none()),
        st.tuples(st.just("yield"), st.integers(1, 5)),
        st.tuples(st.just("sleep"), st.sampled_from([0.001, 0.01])),
    )
    readers = st.sampled_from(
        [
            (1 << 18, 0.0, 1),  # eager
            (1 << 18, 0.0, 1),
            (1 << 16, 0.002, 1),  # bursty
            (1 << 20, 0.01, 1),
            (4096, 0.001, 16),  # slow
            (777, 0.001, 64),
        ]
    )
    # The two sizes are drawn together, because the kernel is slow beyond use between some: a small
    # send buffer before a larger window stops at every delayed ACK, and a window below 64 KiB
    # has no room for the whole pages that zero-copy parts are charged with (8 KB/s measured, with
    # MSG_ZEROCOPY as well).
    sizes = [(None, None), (None, None), (4608, 65536), (16384, 65536), (4 << 20, 65536)]
    tiny = [(4608, 2304), (None, 4096), (16384, 16384)]
    ways = st.one_of(
        *(st.tuples(st.just(mode), st.sampled_from(sizes)) for mode in modes if mode != "off"),
        *(st.tuples(st.just("off"), st.sampled_from(sizes + tiny)) for m in modes if m == "off"),
    )
    return st.builds(
        lambda steps, family, way, reader, late, nodelay, ending: Plan(
            steps, family, *way[1], *reader, late, nodelay, way[0], ending
        ),
        st.lists(step, min_size=1, max_size=30),
        st.sampled_from(family),
        ways,
        readers,
        st.sampled_from([0.0, 0.005, 0.05]),  # calls meet a request that waits for a full socket
        st.booleans(),
        st.sampled_from(["write_eof", "close"]),
    )


class Caller:
    """Makes the calls of one plan and writes down what was called, in order."""

    def __init__(self, writer, budget: int) -> None:
        self.writer = writer
        self.left = budget
        self.called: list[bytes] = []
        self.operations: list[tuple[object, int]] = []
        self.tasks: list[asyncio.Task] = []

    def piece(self, kind: str, size: int):
        size = min(size, self.left)
        self.left -= size
        content = pattern(len(self.called), size)
        self.called.append(content)
        return make(kind, content)

    def pieces(self, parts):
        made = [self.piece(kind, size) for kind, size in parts]
        return [data for data, _ in made], [memory for _, memory in made if memory is not None]

    def submit(self, data, memories, size: int) -> None:
        operation = self.writer.zc_submit(data)
        assert operation.nbytes == size
        self.operations.append((operation, size))
        if memories:
            self.tasks.append(asyncio.create_task(self.reuse(operation, memories)))

    async def reuse(self, operation, memories) -> None:
        await operation.released
        for memory in memories:
            overwrite(memory)

    async def send(self, kind: str, size: int) -> None:
        # A coroutine's call happens when it first runs: that is where its place in the order is.
        data, memory = self.piece(kind, size)
        size = len(self.called[-1])
        result = await self.writer.zc_send(data)
        assert result.nbytes == size
        assert result.path in {"zero-copy", "copied", "mixed", "unknown"}
        if memory is not None:
            overwrite(memory)

    async def step(self, name: str, argument) -> None:
        if name == "write":
            data, memory = self.piece(*argument)
            self.writer.write(data)
            if memory is not None:
                overwrite(memory)
        elif name == "writelines":
            data, memories = self.pieces(argument)
            self.writer.writelines(data)
            for memory in memories:
                overwrite(memory)
        elif name == "submit":
            data, memory = self.piece(*argument)
            self.submit(data, [] if memory is None else [memory], len(self.called[-1]))
        elif name == "submit many":
            before = len(self.called)
            data, memories = self.pieces(argument)
            self.submit(data, memories, sum(map(len, self.called[before:])))
        elif name == "send":
            await self.send(*argument)
        elif name == "send task":
            self.tasks.append(asyncio.create_task(self.send(*argument)))
        elif name == "await sent":
            if self.operations:
                await self.operations[-1][0].sent
        elif name == "drain":
            await self.writer.drain()
        elif name == "zc_drain":
            await self.writer.zc_drain()
        elif name == "yield":
            for _ in range(argument):
                await asyncio.sleep(0)
        elif name == "sleep":
            await asyncio.sleep(argument)
        else:
            raise AssertionError(name)


async def follow(plan: Plan) -> None:
    loop = asyncio.get_running_loop()
    _, writer, peer = await open_stream(
        plan.family, sndbuf=plan.sndbuf, rcvbuf=plan.rcvbuf, nodelay=plan.nodelay
    )
    reader = Reader(
        peer, chunk=plan.chunk, pause=plan.pause, every=plan.every, stalled=plan.late > 0
    )
    if plan.late:
        loop.call_later(plan.late, reader.go)
    caller = Caller(writer, plan.budget())
    try:
        for name, argument in plan.steps:
            await caller.step(name, argument)
        await asyncio.sleep(0)  # every task has made its call before the stream ends
        if plan.ending == "write_eof":
            writer.write_eof()
        else:
            writer.close()
        received = await reader.aresult(LIMIT)
        assert_same_stream(caller.called, received)

        for operation, size in caller.operations:
            result = await limited(operation.released)
            assert operation.state is aiozc.OperationState.RELEASED
            assert (operation.bytes_sent, result.nbytes) == (size, size)
            assert operation.sent.done()
        for task in caller.tasks:
            await limited(task)
        await limited(unpinned(loop))  # plain writes are pinned, too, and nobody awaits those
        stats = loop.zc_stats()
        assert (stats.operations_live, stats.queued_bytes, stats.pinned_bytes) == (0, 0, 0)
        writer.close()
        await limited(writer.wait_closed())
    except BaseException:
        for task in caller.tasks:
            task.cancel()
        writer.transport.abort()
        raise
    finally:
        peer.close()


def run_plan(plan: Plan, factory, *, fault: int = 0):
    """Runs one example on a loop of its own and returns the loop's last figures."""
    loop = factory(**MODES[plan.mode])
    try:
        if fault:
            loop.zc_fault("zc_enomem", fault)
        loop.run_until_complete(asyncio.wait_for(follow(plan), 2 * LIMIT))
        return loop.zc_stats()
    finally:
        loop.close()


# A failure may be a hang of many seconds: hundreds of further examples that shrink or explain it
# are run only on demand. The blob that is printed reproduces it either way.
PHASES = (Phase.explicit, Phase.generate)
if os.environ.get("AIOZC_ORDER_SHRINK"):
    PHASES = (*PHASES, Phase.shrink)


def examples(count: int):
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def check_interleaving(backend, loop_factory, count: int) -> None:
    @examples(count)
    @given(plans())
    def property_holds(plan):
        run_plan(plan, loop_factory)

    property_holds()


def check_fall_back(backend, loop_factory, count: int) -> None:
    if copies(backend):
        pytest.skip("the fault knob acts on zero-copy requests, and this variant makes none")
    totals = {"fallbacks": 0, "requests": 0}

    @examples(count)
    @given(plans(family=("tcp",), modes=("forced", "small")), st.sampled_from([2, 3]))
    def property_holds(plan, every):
        stats = run_plan(plan, loop_factory, fault=every)
        fallbacks = sum(stats.fallbacks.values())
        # Requests that fell back may or may not count as zero-copy requests; twice the interval
        # is reached either way.
        if stats.zc_requests >= 2 * every:
            assert fallbacks >= 1, stats
        totals["fallbacks"] += fallbacks
        totals["requests"] += stats.zc_requests

    property_holds()
    assert totals["requests"] > 0, "no example made a zero-copy request: nothing was tested"
    assert totals["fallbacks"] > 0, "no example fell back: nothing was tested"


def test_the_stream_equals_the_calls_in_order(backend, loop_factory):
    check_interleaving(backend, loop_factory, QUICK)


@pytest.mark.faults
def test_the_stream_keeps_its_order_when_parts_fall_back_in_mid_stream(backend, loop_factory):
    check_fall_back(backend, loop_factory, QUICK)


@pytest.mark.slow
def test_the_stream_equals_the_calls_in_order_in_many_examples(backend, loop_factory):
    check_interleaving(backend, loop_factory, SLOW)


@pytest.mark.slow
@pytest.mark.faults
def test_the_order_survives_many_fall_backs(backend, loop_factory):
    check_fall_back(backend, loop_factory, SLOW)


@pytest.mark.parametrize(
    "every", [0, *(pytest.param(every, marks=pytest.mark.faults) for every in (1, 2, 3))]
)
def test_twelve_large_sends_arrive_in_order_while_some_are_refused(
    run, backend, forced_loop_factory, every
):
    # CASES 14: unlinked requests that meet a full socket overtake each other.
    refused = every and not copies(backend)

    async def main():
        loop = asyncio.get_running_loop()
        if refused:
            loop.zc_fault("zc_enomem", every)
        _, writer, peer = await open_stream(rcvbuf=65536)
        reader = Reader(peer, stalled=True)
        pieces = [pattern(index, 1 << 20) for index in range(12)]
        operations = [writer.zc_submit(piece) for piece in pieces]
        await asyncio.sleep(0.05)
        assert not operations[-1].sent.done()
        reader.go()
        writer.close()
        assert_same_stream(pieces, await reader.aresult())
        for operation in operations:
            await limited(operation.released)
        if refused:
            assert sum(loop.zc_stats().fallbacks.values()) > 0
        await limited(writer.wait_closed())

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("count", [1023, 1024, 1025, 3000])
def test_parts_beyond_one_request_arrive_in_order(run, forced_loop_factory, count):
    # CASES 6: the vectors of a request must not move while the socket is full.
    async def main():
        _, writer, peer = await open_stream(sndbuf=16384, rcvbuf=131072)
        reader = Reader(peer, stalled=True)
        pieces = [pattern(index, 1 + index % 2000) for index in range(count)]
        operation = writer.zc_submit([bytearray(piece) for piece in pieces])
        collect()
        await asyncio.sleep(0.02)
        assert not operation.sent.done()
        reader.go()
        result = await limited(operation.released)
        assert result.nbytes == operation.bytes_sent == sum(map(len, pieces))
        writer.close()
        assert_same_stream(pieces, await reader.aresult())
        await limited(writer.wait_closed())

    run(main(), forced_loop_factory)


def test_calls_made_from_different_callbacks_of_one_turn_keep_their_order(run, forced_loop_factory):
    async def main():
        loop = asyncio.get_running_loop()
        _, writer, peer = await open_stream()
        reader = Reader(peer)
        pieces = [pattern(index, 100 + 7000 * (index % 5)) for index in range(100)]
        operations = []

        def call(index):
            if index % 3 == 0:
                writer.write(pieces[index])
            elif index % 3 == 1:
                operations.append(writer.zc_submit(pieces[index]))
            else:
                half = len(pieces[index]) // 2
                writer.writelines([pieces[index][:half], pieces[index][half:]])

        for index in range(len(pieces)):
            loop.call_soon(call, index)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        writer.write_eof()
        assert_same_stream(pieces, await reader.aresult())
        for operation in operations:
            await limited(operation.released)
        writer.close()
        await limited(writer.wait_closed())

    run(main(), forced_loop_factory)


def test_a_withdrawn_operation_leaves_no_hole_and_no_byte(run, forced_loop_factory):
    async def main():
        _, writer, peer = await open_stream(sndbuf=16384, rcvbuf=16384)
        reader = Reader(peer, stalled=True)
        pieces = [pattern(index, 1 << 20) for index in range(6)]
        operations = [writer.zc_submit(piece) for piece in pieces]
        await asyncio.sleep(0.02)
        assert not operations[3].sent.done()
        withdrawn = [operation.withdraw() for operation in operations]
        assert withdrawn[0] is False  # its first bytes are on their way
        assert withdrawn[-1] is True  # megabytes behind a full socket
        last = writer.zc_submit(b"the end")
        reader.go()
        await limited(last.released)
        writer.close()
        kept = [piece for piece, gone in zip(pieces, withdrawn, strict=True) if not gone]
        assert_same_stream([*kept, b"the end"], await reader.aresult())
        for operation, gone in zip(operations, withdrawn, strict=True):
            await limited(operation.released)
            state = aiozc.OperationState.WITHDRAWN if gone else aiozc.OperationState.RELEASED
            assert operation.state is state
            assert operation.bytes_sent == (0 if gone else operation.nbytes)
        await limited(writer.wait_closed())

    run(main(), forced_loop_factory)


def test_a_reset_in_mid_stream_leaves_an_exact_prefix_and_an_exact_count(run, forced_loop_factory):
    # CASES 15: what the operations report as sent covers at least what the peer has seen.
    async def main():
        _, writer, peer = await open_stream(sndbuf=65536, rcvbuf=65536)
        pieces = [pattern(index, 300_000) for index in range(20)]
        operations = [writer.zc_submit(piece) for piece in pieces]
        seen = b""
        while len(seen) < 1_000_000:
            seen += await asyncio.to_thread(peer.recv, 65536)
        assert not operations[-1].sent.done()
        reset(peer)
        for operation in operations:
            try:
                await limited(operation.released)
            except OSError:
                assert operation.state is aiozc.OperationState.FAILED
                assert operation.bytes_sent < operation.nbytes
        assert_prefix(b"".join(pieces), seen)
        counts = [operation.bytes_sent for operation in operations]
        assert sum(counts) >= len(seen)
        whole = sum(count == 300_000 for count in counts)
        assert counts[:whole] == [300_000] * whole  # whole ones first, then at most one in part
        assert not any(counts[whole + 1 :])
        writer.transport.abort()

    run(main(), forced_loop_factory)


def test_the_oracle_sees_a_swap_inside_one_piece_and_an_overwritten_byte():
    piece = pattern(3, 1 << 20)
    swapped = piece[500_000:600_000] + piece[:500_000] + piece[600_000:]
    with pytest.raises(AssertionError, match="differs at byte 0 "):
        assert_same_stream([piece], swapped)
    late = bytearray(piece)
    overwrite(memoryview(late)[70_000:70_010])
    with pytest.raises(AssertionError, match=f"differs at byte 70000 .*(\n|.)* {OVERWRITTEN}x10 "):
        assert_same_stream([piece[:60_000], piece[60_000:]], bytes(late))
    ours, peer = connected_pair()
    ours.close()
    assert Reader(peer).result() == b""
    peer.close()
