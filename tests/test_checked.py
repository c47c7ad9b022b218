"""Debug mode tells of memory that was written to before its release: which operation, and who submitted it.

The peer of every test reads late, so that there is a time in which the memory must not be changed. What is said
does not depend on whether the peer got wrong bytes: writing there is the caller's mistake on every path.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
import timeit
import zlib
from typing import Any

import pytest
from support import (
    MIB,
    SMALL_SNDBUF,
    LoopErrors,
    StalledReader,
    eventually,
    soon,
    stalled,
)

import aiozc
from aiozc import checked
from aiozc._fast import Parts

SIZE = 300_000


def told(errors: LoopErrors) -> list[dict[str, Any]]:
    return [c for c in errors.contexts if "changed before it was released" in c["message"]]


def last_line(context: dict[str, Any]) -> tuple[str, str]:
    """(function, source) of whoever called the library."""
    frame = context["source_traceback"][-1]
    assert frame.filename == __file__
    return frame.name, frame.line


@pytest.fixture
def in_debug(run: Any, forced_loop_factory: Any) -> Any:
    def runner(coro: Any, **settings: Any) -> Any:
        def factory() -> aiozc.EventLoop:
            loop = forced_loop_factory(**settings)
            loop.set_debug(True)
            loop.slow_callback_duration = 10.0
            return loop

        return run(coro, factory)

    return runner


@pytest.mark.parametrize("how", ["zc_submit", "zc_send", "zc_write"])
def test_a_late_write_is_told_once_with_the_operation_and_the_caller(
    in_debug: Any, how: str
) -> None:
    # Fails when: operation_finish does not call what it kept.
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            buffer = bytearray(b"a" * SIZE)
            if how == "zc_submit":
                op = writer.zc_submit(buffer)  # type: ignore[attr-defined]
            elif how == "zc_write":
                op = writer.transport.zc_write(buffer)  # type: ignore[attr-defined]
            else:
                op = asyncio.ensure_future(writer.zc_send(buffer))  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)
            assert not errors.contexts
            buffer[SIZE - 1] = 0
            await peer.take(SIZE)
            assert (await soon(op)).nbytes == SIZE
            await asyncio.sleep(0.02)
            (context,) = told(errors)
            assert context["operation"].nbytes == SIZE
            assert "its only part" in context["message"]
            if how == "zc_send":  # the frame of its caller is not there any more: a task runs it
                assert context["source_traceback"]
            else:
                assert last_line(context)[0] == "main" and how in last_line(context)[1]
            assert len(errors.contexts) == 1

    in_debug(main())


def test_pinned_memory_that_is_written_to_after_sent_is_told(in_debug: Any) -> None:
    async def main() -> None:
        errors = LoopErrors()
        async with stalled() as (peer, writer):
            buffer = bytearray(b"a" * SIZE)
            op = writer.zc_submit(buffer)  # type: ignore[attr-defined]
            await soon(op.sent)
            await asyncio.sleep(0.02)
            buffer[0] = 0
            await peer.take(SIZE)
            await soon(op)
            assert len(told(errors)) == 1

    in_debug(main())


def test_the_parts_that_were_changed_are_named(in_debug: Any) -> None:
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            parts = [bytearray(b"a" * 100_000), b"", bytearray(b"b" * 100_000), b"c" * 100_000]
            op = writer.zc_submit([*parts, memoryview(parts[0])[:10]])  # type: ignore[attr-defined]
            parts[0][5] = parts[2][5] = 0  # type: ignore[index]
            await peer.take(SIZE + 10)
            await soon(op)
            (context,) = told(errors)
            assert "(part 0, 2, 4 of 5, counted from 0)" in context["message"]

    in_debug(main())


@pytest.mark.parametrize("where", ["debug mode", "setting"])
def test_correct_use_is_told_of_nothing(
    in_debug: Any, run: Any, forced_loop_factory, where
) -> None:
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            buffer = bytearray(SIZE)
            for value in range(20):
                buffer[:] = bytes([value]) * SIZE
                sending = asyncio.ensure_future(writer.zc_send(buffer))  # type: ignore[attr-defined]
                data = await peer.take(SIZE)
                await soon(sending)
                assert data == bytes([value]) * SIZE
        errors.check()

    if where == "debug mode":
        in_debug(main())
    else:
        run(main(), lambda: forced_loop_factory(zc_check=True))


def test_the_setting_is_enough_and_off_wins(in_debug: Any, run: Any, forced_loop_factory) -> None:
    # Fails when: the setting is not looked at, or debug mode wins over it.
    async def main(expected: int) -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            buffer = bytearray(b"a" * SIZE)
            op = writer.zc_submit(buffer)  # type: ignore[attr-defined]
            buffer[7] = 0
            await peer.take(SIZE)
            await soon(op)
            assert len(told(errors)) == expected

    run(main(1), lambda: forced_loop_factory(zc_check=True))
    in_debug(main(0), zc_check=False)
    with pytest.raises(ValueError, match="zc_check"):
        forced_loop_factory(zc_check="yes")


def test_nothing_is_summed_where_it_is_off(run: Any, forced_loop_factory, monkeypatch) -> None:
    # Fails when: Reactor.checked makes one without asking.
    def never(*_: object) -> int:
        raise AssertionError("summed")

    monkeypatch.setattr(checked, "_sum", never)

    async def main() -> None:
        errors = LoopErrors()
        async with stalled() as (peer, writer):
            op = writer.zc_submit(bytearray(SIZE))  # type: ignore[attr-defined]
            writer.write(aiozc.frozen(bytearray(SIZE)))  # type: ignore[arg-type]
            await peer.take(2 * SIZE)
            await soon(op)
        errors.check()

    run(main(), forced_loop_factory)


def test_frozen_data_that_is_changed_is_told(in_debug: Any) -> None:
    # Fails when: drop_released does not call what it kept.
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            frozen, kept = bytearray(b"f" * MIB), bytearray(b"k" * MIB)
            writer.write(b"first" * 100_000)
            writer.write(aiozc.frozen(frozen))  # type: ignore[arg-type]
            writer.write(aiozc.frozen(kept))  # type: ignore[arg-type]
            await asyncio.sleep(0.02)
            frozen[-1] = 0
            await peer.take(500_000 + 2 * MIB)
            await eventually(lambda: bool(told(errors)))
            await asyncio.sleep(0.02)
            (context,) = told(errors)
            assert "frozen" in context["message"] and "operation" not in context
            assert "aiozc.frozen(frozen)" in last_line(context)[1]

    in_debug(main())


def test_a_datagram_is_checked(in_debug: Any) -> None:
    async def main() -> None:
        errors = LoopErrors()
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.bind(("127.0.0.1", 0))
            transport, _ = await loop.create_datagram_endpoint(
                asyncio.DatagramProtocol, remote_addr=peer.getsockname()
            )
            buffer = bytearray(b"d" * 9000)
            good = transport.zc_sendto(bytearray(buffer))
            bad = transport.zc_sendto([buffer, b"tail"])
            buffer[0] = 0  # it goes out when this turn ends
            await soon(good)
            await soon(bad)
            (context,) = told(errors)
            assert context["operation"] is bad and "part 0 of 2" in context["message"]
            transport.close()

    in_debug(main())


def test_a_bare_socket_is_checked(in_debug: Any) -> None:
    async def main() -> None:
        errors = LoopErrors()
        loop: Any = asyncio.get_running_loop()
        with StalledReader() as peer, peer.connect(sndbuf=SMALL_SNDBUF) as sock:
            buffer = bytearray(b"s" * SIZE)
            sending = asyncio.ensure_future(loop.sock_zc_sendall(sock, buffer))
            await asyncio.sleep(0.02)
            buffer[-1] = 0
            await peer.take(SIZE)
            await soon(sending)
            assert len(told(errors)) == 1

    in_debug(main())


@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
def test_other_loops_in_debug_mode_check_too(backend: str, library: str) -> None:
    async def main() -> None:
        errors = LoopErrors()
        asyncio.get_running_loop().set_debug(True)
        aiozc.zc_attach(backend=backend, adaptive=False, zc_threshold=0)
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            buffer = bytearray(b"o" * SIZE)
            op = aiozc.zc_submit(writer, buffer)
            await asyncio.sleep(0.02)
            buffer[-1] = 0
            await peer.take(SIZE)
            await soon(op)
            (context,) = told(errors)
            assert context["operation"] is op
            assert "aiozc.zc_submit(writer, buffer)" in last_line(context)[1]

    if library == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop
    else:
        factory = asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(main(), 30))


def test_a_failed_operation_is_told_of_and_a_withdrawn_one_is_not(in_debug: Any) -> None:
    # Nothing of the withdrawn one was sent: its memory was the caller's all the time.
    async def main() -> None:
        errors = LoopErrors()
        async with stalled(sndbuf=SMALL_SNDBUF) as (_, writer):
            first, second = bytearray(b"1" * SIZE), bytearray(b"2" * SIZE)
            failing = writer.zc_submit(first)  # type: ignore[attr-defined]
            await asyncio.sleep(0.02)
            withdrawn = writer.zc_submit(second)  # type: ignore[attr-defined]
            first[0] = second[0] = 0
            assert withdrawn.withdraw()
            writer.transport.zc_reset()  # type: ignore[attr-defined]
            with pytest.raises(OSError):
                await soon(failing)
            (context,) = told(errors)
            assert context["operation"] is failing

    in_debug(main())


def test_a_handler_that_exits_keeps_no_memory_and_no_event_back(
    forced_loop_factory: Any,
) -> None:
    # Fails when: operation_finish returns before it lets go, or the walk loses the events behind.
    async def begin() -> tuple[Any, Any, list[bytearray], list[Any]]:
        peer = StalledReader()
        _, writer = await asyncio.open_connection(sock=peer.connect(sndbuf=SMALL_SNDBUF))
        buffers = [bytearray(bytes([65 + i]) * SIZE) for i in range(4)]
        ops = [writer.zc_submit(b) for b in buffers]  # type: ignore[attr-defined]
        await asyncio.sleep(0.02)
        buffers[1][0] = 0
        return peer, writer, buffers, ops

    def leave(_loop: Any, _context: Any) -> None:
        raise SystemExit("told")

    async def finish(peer: Any, ops: list[Any]) -> None:
        await asyncio.gather(peer.take(4 * SIZE), *(soon(op) for op in ops))

    loop = forced_loop_factory(zc_check=True)
    peer, writer, buffers, ops = loop.run_until_complete(begin())
    loop.set_exception_handler(leave)
    task = loop.create_task(finish(peer, ops))
    with pytest.raises(SystemExit, match="told"):
        loop.run_until_complete(task)
    loop.set_exception_handler(None)
    loop.run_until_complete(task)
    for buffer in buffers:
        buffer.append(0)  # the locks are gone
    assert [op.bytes_sent for op in ops] == [SIZE] * 4
    writer.transport.abort()
    loop.run_until_complete(asyncio.sleep(0.01))
    peer.close()
    loop.close()


def test_an_exit_where_plain_writes_are_released_loses_nothing(
    forced_loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A signal handler's KeyboardInterrupt in the check itself. Fails when: drop_released stops at the first, or
    # the events of that turn are not put by before.
    calls = []
    check = checked.Checked.__call__

    def interrupted(self: Any, op: Any = None) -> None:
        calls.append(op)
        if len(calls) == 1:
            raise KeyboardInterrupt
        check(self, op)

    monkeypatch.setattr(checked.Checked, "__call__", interrupted)

    async def begin() -> tuple[Any, Any, Any]:
        peer = StalledReader()
        _, writer = await asyncio.open_connection(sock=peer.connect(sndbuf=SMALL_SNDBUF))
        for i in range(40):  # some of them are released together
            writer.write(aiozc.frozen(bytearray([65 + i]) * 20_000))  # type: ignore[arg-type]
        op = writer.zc_submit(bytearray(b"z" * SIZE))  # type: ignore[attr-defined]
        await asyncio.sleep(0.02)
        return peer, writer, op

    async def finish(peer: Any, op: Any) -> Any:
        return await asyncio.gather(peer.take(800_000 + SIZE), soon(op))

    loop = forced_loop_factory(zc_check=True)
    peer, writer, op = loop.run_until_complete(begin())
    task = loop.create_task(finish(peer, op))
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    data, result = loop.run_until_complete(task)
    assert len(data) == 800_000 + SIZE and result.nbytes == SIZE
    assert calls[-1] is op and calls[0] is None and len(calls) >= 2
    assert not loop._reactor.held
    writer.transport.abort()
    loop.run_until_complete(asyncio.sleep(0.01))
    peer.close()
    loop.close()


@pytest.mark.timing
def test_a_sum_costs_less_than_the_alternative() -> None:
    data = os.urandom(8 * MIB)

    def best(function: Any) -> float:
        times = []
        for _ in range(3):
            began = time.process_time()
            function(data)
            times.append(time.process_time() - began)
        return len(data) / min(times) / 1e9

    crc, blake = best(zlib.crc32), best(lambda d: hashlib.blake2b(d).digest())
    loop: Any = None  # it is only kept
    call = min(
        timeit.repeat(lambda: checked.Checked(loop, Parts(b"x" * 1000)), number=200, repeat=5)
    )
    print(f"crc32 {crc:.2f} GB/s, blake2b {blake:.2f} GB/s; a small call {call / 200 * 1e6:.1f} us")
    assert crc > blake / 2  # or the choice in checked.py is to be made anew
