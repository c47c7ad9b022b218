"""aiozc.zc_send and zc_submit on loops that are not aiozc's: asyncio's own and uvloop's, on both backends.

The peer is a plain socket (support.StalledReader): it does not read until told, and is no part of either loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support import (
    KIB,
    LARGE_SNDBUF,
    MIB,
    PAUSE,
    SMALL_SNDBUF,
    StalledReader,
    assert_stream,
    copies,
    eventually,
    in_thread,
    soon,
    stalled,
    tls_contexts,
)

import aiozc
from aiozc import attach
from aiozc.standin import StandIn

Runner = Callable[..., Any]


def _uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop").new_event_loop()


@pytest.fixture(params=[asyncio.SelectorEventLoop, _uvloop], ids=["asyncio", "uvloop"])
def factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    made: Callable[[], asyncio.AbstractEventLoop] = request.param
    made().close()
    return made


@pytest.fixture
def go(factory: Any, backend: str, request: pytest.FixtureRequest) -> Runner:
    """go(coroutine, **settings): run on a foreign loop whose operations all go zero-copy."""

    name = "uvloop" if factory is _uvloop else "asyncio"
    request.node.user_properties.append(("loop", name))

    def runner(coro: Coroutine[Any, Any, Any], **settings: Any) -> Any:
        forced: dict[str, Any] = {"backend": backend, "adaptive": False, "zc_threshold": 0}

        async def main() -> Any:
            aiozc.zc_attach(**(forced | settings))
            async with asyncio.timeout(60):
                return await coro

        errors: list[Any] = []
        with asyncio.Runner(loop_factory=factory) as r:
            r.get_loop().set_exception_handler(lambda _, context: errors.append(context))
            result = r.run(main())
        assert not errors
        return result

    return runner


def attachment() -> attach.Attachment:
    found = attach._find(asyncio.get_running_loop())
    assert found is not None
    return found


def filled(value: int, nbytes: int) -> bytearray:
    return bytearray([value]) * nbytes


# --- order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX], ids=["tcp", "unix"])
def test_everything_keeps_its_order(go: Runner, family: socket.AddressFamily) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF, family=family) as (peer, writer):
            real = writer.transport
            expected = []

            def wrote(value: int, nbytes: int) -> bytearray:
                expected.append((value, nbytes))
                return filled(value, nbytes)

            writer.write(wrote(1, 1 * MIB))  # most of it stays in the transport's own buffer
            assert real.get_write_buffer_size() > 0
            ops = [aiozc.zc_submit(writer, wrote(2, 300 * KIB))]
            assert isinstance(writer.transport, StandIn)
            writer.write(wrote(3, 10))
            writer.write(bytes(wrote(4, 200 * KIB)))
            ops.append(aiozc.zc_submit(writer, [wrote(5, 70 * KIB), wrote(6, 1)]))
            writer.writelines([wrote(7, 20 * KIB), memoryview(wrote(8, 3))])
            unsent = sum(count for _, count in expected)
            assert unsent - 2 * MIB < writer.transport.get_write_buffer_size() <= unsent
            ops.append(aiozc.zc_submit(writer, wrote(9, 100 * KIB)))
            writer.write(wrote(10, 5))
            writer.write_eof()
            with pytest.raises(RuntimeError):
                writer.write(b"after the end")
            with pytest.raises(RuntimeError):
                aiozc.zc_submit(writer, b"after the end")
            await asyncio.sleep(PAUSE)
            assert not ops[-1].sent.done()
            assert_stream(await peer.take_all(), expected)
            for op in ops:
                assert (await soon(op)).nbytes == op.nbytes
            await eventually(lambda: writer.transport is real)
            assert real.get_write_buffer_size() == 0
            await eventually(lambda: not attachment().streams)

    go(main())


def test_what_is_written_is_held_before_a_signal_handler_can_run(
    go: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fails when: the bytes are held by a line of Python behind the native call.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = aiozc.zc_submit(writer, filled(1, MIB))
            (stream,) = attachment().streams.values()

            def interrupted(self: Any) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(type(stream), "_queued", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.write(bytes(filled(2, 8 * MIB)))
            monkeypatch.undo()
            gc.collect()
            junk = [bytes(filled(3, 8 * MIB)) for _ in range(3)]
            assert_stream(await peer.take(9 * MIB), [(1, MIB), (2, 8 * MIB)])
            del junk
            await soon(op)

    go(main())


def test_what_is_changed_after_write_is_not_seen(go: Runner) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = aiozc.zc_submit(writer, filled(1, 512 * KIB))
            data = filled(2, 256 * KIB)
            writer.write(data)
            data[:] = filled(3, len(data))
            writer.write(memoryview(data)[: 100 * KIB])
            data[:] = filled(4, len(data))
            expected = [(1, 512 * KIB), (2, 256 * KIB), (3, 100 * KIB)]
            assert_stream(await peer.take(868 * KIB), expected)
            await soon(op)

    go(main())


def test_sends_one_after_the_other_with_writes_between(go: Runner) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF, rcvbuf=None) as (peer, writer):
            expected = []
            reading = asyncio.ensure_future(peer.take_all())
            buffer = bytearray(150 * KIB)
            for turn in range(1, 41):
                buffer[:] = filled(turn, len(buffer))
                await soon(aiozc.zc_send(writer, buffer))
                buffer[:] = bytes(len(buffer))  # it is ours again
                writer.write(bytes([100 + turn]) * turn)
                expected += [(turn, len(buffer)), (100 + turn, turn)]
                if turn % 3 == 0:
                    await writer.drain()
            writer.close()
            assert_stream(await reading, expected)
            await soon(writer.wait_closed())

    go(main())


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_arrives_in_order(go: Runner, seed: int) -> None:
    """Random writes, operations, withdrawals, drains and pauses, to a reader of random pace."""
    dice = random.Random(seed)

    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            pieces: list[bytes] = []  # what must arrive; b"": withdrawn
            reading = asyncio.ensure_future(
                in_thread(lambda: peer.read_all(pace=0.0005, step=1 << dice.randint(13, 17)))
            )
            ops = []
            for number in range(120):
                nbytes = dice.choice([1, 700, 5000, 20_000, 70_000, 200_000])
                piece = number.to_bytes(2, "big") * (nbytes // 2 + 1)
                match dice.randrange(8):
                    case 0 | 1 | 2:
                        writer.write(piece if dice.random() < 0.5 else bytearray(piece))
                    case 3:
                        writer.writelines([piece[:1], piece[1:]])
                    case 4 | 5:
                        ops.append((aiozc.zc_submit(writer, bytearray(piece)), len(pieces)))
                    case 6:
                        ops.append((aiozc.zc_submit(writer, [piece[:3], piece[3:]]), len(pieces)))
                        if dice.random() < 0.5 and ops[-1][0].withdraw():
                            piece = b""
                    case _:
                        piece = b""
                        await (writer.drain() if dice.random() < 0.5 else asyncio.sleep(0.002))
                pieces.append(piece)
            if dice.random() < 0.5:
                writer.write_eof()
            else:
                writer.close()
            assert await reading == b"".join(pieces)
            for op, at in ops:
                assert (await soon(op)).nbytes == (op.nbytes if pieces[at] else 0)

    go(main())


def test_sendfile_does_not_overtake(go: Runner, factory: Any, tmp_path: Path) -> None:
    if factory is _uvloop:
        pytest.skip("uvloop has no loop.sendfile")
    path = tmp_path / "file"
    path.write_bytes(filled(3, 300 * KIB))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = aiozc.zc_submit(writer, filled(1, MIB))
            stand_in = writer.transport
            with path.open("rb") as file, pytest.raises(RuntimeError, match="sendfile"):
                await loop.sendfile(stand_in, file)
            reading = asyncio.ensure_future(peer.take(MIB + 300 * KIB))
            await soon(op.sent)
            await eventually(lambda: writer.transport is not stand_in)
            with path.open("rb") as file:
                await soon(loop.sendfile(writer.transport, file))
            assert_stream(await reading, [(1, MIB), (3, 300 * KIB)])
            await soon(op)

    go(main())


def test_many_writers(go: Runner) -> None:
    async def main() -> None:
        done = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data = await reader.read(-1)
            done.append(data)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)

        async def client(number: int) -> None:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for turn in range(5):
                writer.write(b"%03d" % number)
                op = aiozc.zc_submit(writer, filled(number, 3000 + 10000 * turn))
                if turn % 2:
                    await op.sent
            writer.close()
            await writer.wait_closed()

        await asyncio.gather(*map(client, range(1, 101)))
        await eventually(lambda: len(done) == 100)
        server.close()
        for data in done:
            number = int(data[:3])
            parts = [b"%03d" % number + filled(number, 3000 + 10000 * t) for t in range(5)]
            assert data == b"".join(parts)
        await eventually(lambda: not attachment().streams)
        await eventually(lambda: not attachment().reactor.held)

    go(main())


# --- stages ---------------------------------------------------------------------------------


def test_sent_and_released_are_apart(go: Runner, backend: str) -> None:
    async def main() -> None:
        async with stalled(sndbuf=LARGE_SNDBUF) as (peer, writer):
            real = writer.transport
            data = filled(7, MIB)
            op = aiozc.zc_submit(writer, data)
            await soon(op.sent)
            await eventually(lambda: writer.transport is real)  # all is sent: it goes on alone
            await asyncio.sleep(PAUSE)
            if not copies(backend):
                assert not op.released.done()
                assert attachment().reactor.zc_stats().zc_requests > 0
                with pytest.raises(BufferError):
                    data.append(1)
            writer.write(bytes([8]) * 100)
            again = aiozc.zc_submit(writer, filled(9, 100 * KIB))
            expected = [(7, MIB), (8, 100), (9, 100 * KIB)]
            assert_stream(await peer.take(MIB + 100 + 100 * KIB), expected)
            result = await soon(op.released)
            assert result.nbytes == MIB
            data.append(1)
            await soon(again)

    go(main())


@pytest.mark.timing
@pytest.mark.parametrize("state", ["reading", "paused", "closed"])
def test_nothing_spins_while_memory_is_pinned(go: Runner, backend: str, state: str) -> None:
    # With MSG_ZEROCOPY the loop's own descriptor shows EPOLLERR until the reactor has read what there is.
    # Fails when: that waits for a later turn than the one in which it came.
    if copies(backend) or backend == "uring":
        pytest.skip("no error queue")

    async def main() -> None:
        async with stalled(sndbuf=LARGE_SNDBUF) as (peer, writer):
            ops = []
            for value in range(8):
                ops.append(aiozc.zc_submit(writer, filled(value, 128 * KIB)))
                await soon(ops[-1].sent)
            if state == "paused":
                writer.transport.pause_reading()
            elif state == "closed":
                writer.close()
            for value in range(8):
                await asyncio.sleep(0.02)
                assert not ops[-1].released.done()
                reactor, cpu = attachment().reactor, time.process_time()
                before = reactor.zc_stats().enters
                await asyncio.sleep(0.15)
                assert time.process_time() - cpu < 0.05
                assert reactor.zc_stats().enters - before < 10
                assert_stream(await peer.take(128 * KIB), [(value, 128 * KIB)])
            for op in ops:
                await soon(op)

    go(main())


def test_cancelling_cuts_nothing(go: Runner) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(aiozc.zc_send(writer, filled(1, MIB)), PAUSE)
            writer.write(bytes([2]) * 10)
            assert_stream(await peer.take(MIB + 10), [(1, MIB), (2, 10)])

    go(main())


def test_withdraw(go: Runner) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            real = writer.transport
            first = aiozc.zc_submit(writer, filled(1, MIB))
            second = aiozc.zc_submit(writer, filled(2, MIB))
            await asyncio.sleep(PAUSE)
            assert not first.withdraw()
            assert second.withdraw()
            writer.write(bytes([3]) * 10)
            assert_stream(await peer.take(MIB + 10), [(1, MIB), (3, 10)])
            await soon(first)
            await eventually(lambda: writer.transport is real)
            # Behind what the transport holds itself, alone in the queue, and taken out again.
            writer.write(filled(4, MIB))
            third = aiozc.zc_submit(writer, filled(5, 10))
            assert third.withdraw()
            await eventually(lambda: writer.transport is real)
            writer.write(bytes([6]) * 10)
            assert_stream(await peer.take(MIB + 10), [(4, MIB), (6, 10)])

    go(main())


def test_drain_waits_for_what_is_unsent(go: Runner) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = aiozc.zc_submit(writer, filled(1, MIB))
            drained = asyncio.ensure_future(writer.drain())
            await asyncio.sleep(PAUSE)
            assert not drained.done()
            await peer.take(MIB)
            await soon(drained)
            await soon(op)
            # While the transport itself has paused the protocol, and then goes on to the queue.
            writer.write(filled(2, MIB))
            op = aiozc.zc_submit(writer, filled(3, MIB))
            drained = asyncio.ensure_future(writer.drain())
            await peer.take(MIB)
            await asyncio.sleep(PAUSE)
            assert not op.sent.done()
            await peer.take(MIB)
            await soon(drained)
            await soon(op)
            await soon(writer.drain())

    go(main())


# --- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, MIB], ids=["alone", "behind a write"])
def test_close_behind_operations(go: Runner, before: int) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            if before:
                writer.write(filled(1, before))
            op = aiozc.zc_submit(writer, filled(2, MIB))
            writer.write(bytes([3]) * 10)
            writer.close()
            assert writer.is_closing()
            with pytest.raises(ConnectionResetError):
                aiozc.zc_submit(writer, b"too late")
            await asyncio.sleep(PAUSE)
            assert_stream(await peer.take_all(), [(1, before), (2, MIB), (3, 10)])
            await soon(op)
            await soon(writer.wait_closed())

    go(main())


def test_the_end_comes_while_memory_is_pinned(go: Runner) -> None:
    async def main() -> None:
        async with stalled(sndbuf=LARGE_SNDBUF) as (peer, writer):
            op = aiozc.zc_submit(writer, filled(1, MIB))
            await soon(op.sent)
            writer.close()
            await soon(writer.wait_closed())
            assert_stream(await peer.take_all(), [(1, MIB)])
            await soon(op)
            await eventually(lambda: not attachment().streams)

    go(main())


def test_abort(go: Runner) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = aiozc.zc_submit(writer, filled(1, MIB))
            await asyncio.sleep(PAUSE)
            writer.transport.abort()
            with pytest.raises(ConnectionError):
                await soon(op.sent)
            await soon(writer.wait_closed())
            data = await peer.take_all()
            assert len(data) == op.bytes_sent < MIB
            assert_stream(data, [(1, len(data))])
            with pytest.raises(ConnectionError):
                await soon(op)

    go(main())


@pytest.mark.parametrize("before", [0, MIB], ids=["alone", "behind a write"])
def test_a_reset_fails_operations_and_transport(go: Runner, before: int) -> None:
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            if before:
                writer.write(filled(1, before))
            op = aiozc.zc_submit(writer, filled(2, MIB))
            writer.write(bytes(10))
            await asyncio.sleep(PAUSE)
            peer.reset()
            with pytest.raises(ConnectionError):
                await soon(op)
            assert op.bytes_sent < MIB
            with contextlib.suppress(ConnectionError):
                await soon(writer.wait_closed())
            await eventually(writer.is_closing)
            with pytest.raises(ConnectionResetError):
                aiozc.zc_submit(writer, b"too late")
            await eventually(lambda: not attachment().streams)

    go(main())


def test_nothing_follows_bytes_that_the_transport_threw_away(go: Runner) -> None:
    # The holder of the transport itself aborts it: its buffer is lost, and ours must not come behind.
    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            real = writer.transport
            writer.write(filled(1, MIB))
            op = aiozc.zc_submit(writer, filled(2, MIB))
            await asyncio.sleep(PAUSE)
            real.abort()
            await asyncio.sleep(0)
            data = await peer.take_all()
            assert set(data) == {1}
            assert len(data) < MIB
            with pytest.raises(ConnectionError):
                await soon(op)

    go(main())


def test_a_closed_connection_whose_peer_takes_nothing_is_reset(go: Runner, backend: str) -> None:
    async def main() -> None:
        async with stalled(sndbuf=LARGE_SNDBUF) as (peer, writer):
            op = aiozc.zc_submit(writer, filled(1, MIB))
            await soon(op.sent)
            writer.close()
            await soon(op.released if copies(backend) else _failed_or_free(op))
            await eventually(lambda: not attachment().streams)
            assert peer.waiting() < MIB

    go(main(), zc_linger=0.4)


async def _failed_or_free(op: aiozc.Operation) -> None:
    with contextlib.suppress(ConnectionError):
        await op


# --- TLS ------------------------------------------------------------------------------------


def test_tls_copies_in_order(go: Runner) -> None:
    server_context, client_context = tls_contexts()

    async def main() -> None:
        got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got.set_result(await reader.read(-1))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context)
        address = server.sockets[0].getsockname()
        _, writer = await asyncio.open_connection(
            *address, ssl=client_context, server_hostname="localhost"
        )
        data = filled(1, MIB)
        op = aiozc.zc_submit(writer, data)
        data[:] = filled(2, len(data))  # it was copied
        writer.write(bytes([3]) * 10)
        result = await soon(aiozc.zc_send(writer, [filled(4, 1000), filled(5, 1000)]))
        assert (result.nbytes, result.path) == (2000, "copied")
        assert op.sent.done()
        writer.close()
        with pytest.raises(ConnectionResetError):
            aiozc.zc_submit(writer, b"too late")
        assert_stream(await soon(got), [(1, MIB), (3, 10), (4, 1000), (5, 1000)])
        server.close()

    go(main())


def test_tls_whose_peer_is_gone_is_not_called_sent(go: Runner) -> None:
    server_context, client_context = tls_contexts()

    async def main() -> None:
        ready = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()
            await ready.wait()
            writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context)
        _, writer = await asyncio.open_connection(
            *server.sockets[0].getsockname(), ssl=client_context, server_hostname="localhost"
        )
        op = aiozc.zc_submit(writer, filled(1, 32 * MIB))
        await asyncio.sleep(PAUSE)
        assert not op.sent.done()
        ready.set()
        with pytest.raises(ConnectionResetError):
            await soon(op)
        writer.close()
        server.close()

    go(main())


@pytest.mark.parametrize("nbytes", [MIB, 100])
@pytest.mark.parametrize("how", ["writer", "loop"])
def test_upgraded_to_tls_meanwhile(go: Runner, factory: Any, how: str, nbytes: int) -> None:
    if how == "loop" and factory is _uvloop:
        pytest.skip("uvloop's start_tls takes its own transports only: TypeError, nothing is mixed")
    server_context, client_context = tls_contexts()

    def serve(peer: StalledReader) -> tuple[bytes, bytes]:
        plain = peer.read(nbytes + 10)
        with server_context.wrap_socket(peer.peer, server_side=True) as sock:
            secret = bytearray()
            while piece := sock.recv(MIB):
                secret += piece
        return plain, bytes(secret)

    async def main() -> None:
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            op = aiozc.zc_submit(writer, filled(1, nbytes))
            writer.write(bytes([2]) * 10)
            assert isinstance(writer.transport, StandIn)
            serving = asyncio.ensure_future(in_thread(lambda: serve(peer)))
            if how == "writer":
                # At once: wait_for would give the queue a turn of the loop.
                await writer.start_tls(client_context, server_hostname="localhost")
            else:
                loop = asyncio.get_running_loop()
                protocol = writer.transport.get_protocol()
                writer._transport = await loop.start_tls(  # type: ignore[attr-defined]
                    writer.transport, protocol, client_context, server_hostname="localhost"
                )
            await soon(op)
            writer.write(bytes([3]) * 10)
            await soon(aiozc.zc_send(writer, filled(4, MIB)))
            writer.close()
            plain, secret = await soon(serving)
            assert_stream(plain, [(1, nbytes), (2, 10)])
            assert_stream(secret, [(3, 10), (4, MIB)])

    go(main())


# --- the loop -------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["pinned", "unsent", "held"])
def test_an_idle_loop_does_not_turn(go: Runner, kind: str) -> None:
    async def main() -> None:
        async with stalled(sndbuf=LARGE_SNDBUF if kind == "pinned" else SMALL_SNDBUF) as (
            peer,
            writer,
        ):
            if kind == "held":
                writer.write(filled(0, MIB))
            op = aiozc.zc_submit(writer, filled(1, MIB))
            await asyncio.sleep(0.3)
            assert op.sent.done() == (kind == "pinned")
            at = attachment()
            pumps, cpu = at.pumps, time.process_time()
            await asyncio.sleep(0.6)
            assert at.pumps - pumps <= 2
            assert time.process_time() - cpu < 0.15
            await peer.take(MIB)

    go(main())


def test_a_long_send_takes_few_requests_and_turns(go: Runner) -> None:
    # Fails when: requests that were taken whole do not let the next be larger (256 of 64 KiB).
    async def main() -> None:
        async with stalled(sndbuf=LARGE_SNDBUF, rcvbuf=LARGE_SNDBUF) as (peer, writer):
            reading = asyncio.ensure_future(peer.take(16 * MIB))
            for value in range(16):
                await aiozc.zc_submit(writer, filled(value, MIB))
            assert attachment().reactor.zc_stats().requests <= 170
            assert_stream(await reading, [(value, MIB) for value in range(16)])

    go(main())


def test_a_turn_does_not_wake_the_loop_for_what_it_completed_itself() -> None:
    # Fails when: the ring signals what is completed within a turn. Withdrawn: nothing comes afterwards.
    if aiozc.capabilities().backend != "uring":
        pytest.skip("epoll signals nothing")

    async def main() -> None:
        aiozc.zc_attach(backend="uring", zc_threshold=1 << 30)  # copies: complete with the call
        async with stalled(rcvbuf=LARGE_SNDBUF) as (_, writer):
            await aiozc.zc_submit(writer, b"first")
            await asyncio.sleep(0.01)
            pumps = attachment().pumps
            for _ in range(20):
                await aiozc.zc_submit(writer, b"more")
                await asyncio.sleep(0.001)
            print(attachment().pumps - pumps)
            assert attachment().pumps - pumps <= 45

    asyncio.run(main())


def test_a_transport_that_makes_no_progress_is_not_looked_at_all_the_time(
    backend: str,
) -> None:
    async def main() -> None:
        aiozc.zc_attach(backend=backend)
        async with stalled() as (peer, writer):
            real: Any = writer.transport
            looks = 0

            def stuck() -> int:
                nonlocal looks
                looks += 1
                return 1000

            real.get_write_buffer_size = stuck
            op = aiozc.zc_submit(writer, filled(1, 1000))
            await asyncio.sleep(0.5)
            assert 5 < looks < 2000
            assert op.bytes_sent == 0
            del real.get_write_buffer_size
            assert await peer.take(1000) == filled(1, 1000)
            await soon(op)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as r:
        r.run(main())


def test_loop_close_with_operations_in_flight(factory: Any, backend: str) -> None:
    data = filled(5, MIB)
    late = filled(6, 8 * MIB)
    with StalledReader() as peer:
        sock = peer.connect(sndbuf=LARGE_SNDBUF)
        loop = factory()

        async def main() -> tuple[Any, Any]:
            aiozc.zc_attach(backend=backend, adaptive=False, zc_threshold=0, zc_close_timeout=0.1)
            _, writer = await asyncio.open_connection(sock=sock)
            op = aiozc.zc_submit(writer, data)
            await op.sent
            return op, aiozc.zc_submit(writer, late)

        op, unsent = loop.run_until_complete(main())
        at = attach._find(loop)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.close()
            gc.collect()
        assert loop.is_closed()
        assert at is not None and at.ended
        leaked = [w for w in caught if "zero-copy" in str(w.message)]
        assert bool(leaked) != copies(backend)
        assert unsent.state in (aiozc.OperationState.FAILED, aiozc.OperationState.ISSUED)
        if not copies(backend):
            with pytest.raises(BufferError):
                data.append(1)
        del op, unsent
        got = peer.read_all()
        assert_stream(got, [(5, MIB), (6, len(got) - MIB)])


def test_a_loop_that_nobody_closes_ends_with_its_last_reference(factory: Any, backend: str) -> None:
    if factory is _uvloop:
        pytest.skip("uvloop's loops are never collected before they are closed")

    def use() -> Any:
        loop = factory()

        async def main() -> None:
            aiozc.zc_attach(backend=backend)
            async with stalled() as (peer, writer):
                aiozc.zc_submit(writer, b"x" * 1000)
                await peer.take(1000)
                await eventually(lambda: not attachment().streams)

        loop.run_until_complete(main())
        at = attach._find(loop)
        assert at is not None
        return at.reactor  # the loop and the attachment are garbage

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        reactor = use()
        reactor.loop = None
        gc.collect()
    assert reactor.native is None


def test_one_loop_after_the_other_and_runs_of_one(factory: Any, backend: str) -> None:
    async def exchange() -> None:
        async with stalled() as (peer, writer):
            op = aiozc.zc_submit(writer, b"y" * 100_000)
            assert_stream(await peer.take(100_000), [(ord("y"), 100_000)])
            await soon(op)
            await eventually(lambda: not attachment().streams)

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        loop = factory()
        for _ in range(2):
            loop.run_until_complete(exchange())
        loop.close()
        loop.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_runs_in_several_threads(factory: Any, backend: str) -> None:
    loop = factory()

    async def exchange() -> None:
        async with stalled() as (peer, writer):
            op = aiozc.zc_submit(writer, b"z" * 100_000)
            assert_stream(await peer.take(100_000), [(ord("z"), 100_000)])
            await soon(op)
            await eventually(lambda: not attachment().streams)

    async def begin() -> None:
        aiozc.zc_attach(backend=backend, adaptive=False, zc_threshold=0)

    loop.run_until_complete(begin())
    failures = []

    def work() -> None:
        try:
            loop.run_until_complete(exchange())
        except BaseException as exc:
            failures.append(exc)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    loop.run_until_complete(exchange())
    loop.close()
    assert not failures


@pytest.mark.parametrize("submits", [True, False])
def test_another_thread_goes_on_with_pinned_memory_and_a_full_queue(
    factory: Any, backend: str, submits: bool
) -> None:
    loop = factory()
    with StalledReader() as peer:
        sock = peer.connect(sndbuf=MIB)

        async def begin() -> tuple[Any, Any]:
            aiozc.zc_attach(backend=backend, adaptive=False, zc_threshold=0)
            _, writer = await asyncio.open_connection(sock=sock)
            op = aiozc.zc_submit(writer, filled(1, 8 * MIB))
            writer.write(filled(2, 100))
            await asyncio.sleep(PAUSE)
            assert 0 < op.bytes_sent < 8 * MIB
            return op, writer

        op, writer = loop.run_until_complete(begin())
        box = []

        async def finish() -> None:
            more = MIB if submits else 0
            again = aiozc.zc_submit(writer, filled(3, more)) if submits else op
            box.append(await peer.take(8 * MIB + 100 + more))
            await soon(op)
            await soon(again)
            await eventually(lambda: not attachment().streams)
            writer.close()
            await writer.wait_closed()

        thread = threading.Thread(target=lambda: loop.run_until_complete(finish()))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        loop.close()
        assert_stream(box[0], [(1, 8 * MIB), (2, 100), (3, MIB if submits else 0)])


def test_what_the_ring_of_another_thread_pinned_is_released(factory: Any) -> None:
    if aiozc.capabilities().backend != "uring":
        pytest.skip("nothing is ever pinned here")
    loop = factory()
    with StalledReader() as peer, StalledReader() as other:
        socks = peer.connect(sndbuf=LARGE_SNDBUF), other.connect()

        async def begin() -> tuple[Any, Any, Any]:
            aiozc.zc_attach(adaptive=False, zc_threshold=0)
            _, first = await asyncio.open_connection(sock=socks[0])
            _, second = await asyncio.open_connection(sock=socks[1])
            op = aiozc.zc_submit(first, filled(1, MIB))
            await op.sent
            return op, first, second

        op, first, second = loop.run_until_complete(begin())

        async def finish() -> None:
            await aiozc.zc_submit(second, b"x").sent  # so this thread has a ring now
            await asyncio.sleep(PAUSE)
            assert not op.released.done()
            assert_stream(await peer.take(MIB), [(1, MIB)])
            await asyncio.wait_for(op.released, 5)  # nothing but looking tells
            for writer in first, second:
                writer.close()
                await writer.wait_closed()
            await eventually(lambda: not attachment().reactor.held)

        failures: list[BaseException] = []

        def work() -> None:
            try:
                loop.run_until_complete(finish())
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        loop.close()
        assert not failures


def test_writing_to_the_transport_itself_is_noticed(factory: Any, backend: str) -> None:
    errors: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, c: errors.append(c))
        aiozc.zc_attach(backend=backend, adaptive=False, zc_threshold=0)
        async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
            real = writer.transport
            op = aiozc.zc_submit(writer, filled(1, MIB))
            await asyncio.sleep(PAUSE)
            real.write(filled(2, MIB))
            aiozc.zc_submit(writer, filled(1, 10))
            await peer.take(2 * MIB)
            await soon(op)

    with asyncio.Runner(loop_factory=factory) as r:
        r.run(main())
    # asyncio adds that its own pause_writing failed: the protocol is paused by us already.
    ours = [e["message"] for e in errors if e["message"].startswith("aiozc")]
    assert len(ours) == 1 and "StreamWriter" in ours[0]


# --- what is refused ------------------------------------------------------------------------


def test_bad_input_queues_nothing(go: Runner) -> None:
    async def main() -> None:
        async with stalled() as (peer, writer):
            real = writer.transport
            for bad, error in [("text", TypeError), ([b"x", 1], TypeError), (None, TypeError)]:
                with pytest.raises(error):
                    aiozc.zc_submit(writer, bad)  # type: ignore[arg-type]
            with pytest.raises(BufferError):
                aiozc.zc_submit(writer, memoryview(bytearray(100))[::2])
            assert (await aiozc.zc_send(writer, b"")).nbytes == 0
            assert writer.transport is real
            writer.write_eof()
            if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
                with pytest.raises(RuntimeError, match="write_eof"):
                    aiozc.zc_submit(writer, b"x")
            assert await peer.take_all() == b""

    go(main())


def test_a_pipe_is_refused(go: Runner) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = os.pipe()
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin,  # type: ignore[attr-defined]
            os.fdopen(theirs, "wb"),
        )
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        with pytest.raises(RuntimeError, match="stream socket"):
            aiozc.zc_submit(writer, b"x")
        writer.close()
        os.close(ours)

    go(main())


def test_settings_are_given_once(go: Runner) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="already"):
            aiozc.zc_attach()

    go(main())


def test_on_a_loop_of_aiozc_it_is_the_writers_own(backend: str) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="new_event_loop"):
            aiozc.zc_attach()
        async with stalled() as (peer, writer):
            op = aiozc.zc_submit(writer, b"a" * 1000)
            assert await peer.take(1000) == b"a" * 1000
            assert (await op).nbytes == 1000
            assert (await aiozc.zc_send(writer, b"")).nbytes == 0
            assert isinstance(writer.transport, aiozc.StreamTransport)

    aiozc.run(main(), backend=backend)
