"""Memory that the kernel still reads when its connection is closed, or when the loop's thread has changed.

A notification belongs to a ring, and a ring to a thread. So a connection that closes with memory pinned
keeps a duplicate of its descriptor: it tells what was acknowledged, and by it `zc_linger` resets a peer
that stopped reading. Whatever happens, `released` comes, nothing comes early, and the peer sees what
close() of a socket would have shown it.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Coroutine
from contextlib import closing
from typing import Any

import pytest
from order_support import in_thread as in_own_thread
from support import (
    MIB,
    StalledReader,
    assert_prefix,
    assert_stream,
    copies,
    eventually,
    in_thread,
    linger_0,
    locked,
    no_descriptor_free,
    open_descriptors,
    soon,
)

import aiozc

A = ord("a")


def in_another_thread(loop: Any, coro: Coroutine[Any, Any, Any]) -> Any:
    """Runs `loop` there: with uring that takes a new ring."""
    return in_own_thread(loop.run_until_complete, asyncio.wait_for(coro, 20))


async def pinned(peer: StalledReader, backend: str) -> tuple[asyncio.StreamWriter, Any, bytearray]:
    """A connection with 1 MiB sent, and pinned where the backend pins."""
    sock = peer.connect(sndbuf=4 * MIB)
    _reader, writer = await asyncio.open_connection(sock=sock)
    buffer = bytearray([A]) * MIB
    op = writer.zc_submit(buffer)  # type: ignore[attr-defined]
    await soon(op.sent)
    await asyncio.sleep(0.05)
    assert op.released.done() == copies(backend)
    return writer, op, buffer


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await soon(writer.wait_closed())


@pytest.fixture
def loop(forced_loop_factory):
    with closing(forced_loop_factory()) as loop:
        yield loop


# --- in one thread ------------------------------------------------------------------------------


def test_the_peer_of_a_closed_connection_reads_all_and_sees_its_end_at_once(
    run, forced_loop_factory, backend
) -> None:
    # Fails when: the duplicate is never closed.
    async def main() -> None:
        with StalledReader() as peer:
            fds = open_descriptors()
            writer, op, _ = await pinned(peer, backend)
            await close(writer)
            assert_stream(await peer.take_all(), [(A, MIB)])
            await soon(op.released)
            await eventually(lambda: open_descriptors() <= fds + 1)  # the peer's own

    run(main(), forced_loop_factory)


def test_a_peer_that_writes_to_a_closed_connection_is_reset(
    run, forced_loop_factory, backend
) -> None:
    # As close() of the only descriptor has it. Fails when: the duplicate is not shut down.
    async def main() -> None:
        with StalledReader() as peer:
            writer, op, _ = await pinned(peer, backend)
            await close(writer)
            await asyncio.sleep(0.05)
            peer.peer.sendall(b"anybody there?")
            await soon(op.released, 2.0)  # the peer does not read: only the reset can free it
            _data, was_reset = await in_thread(peer.read_until_reset)
            assert was_reset

    run(main(), forced_loop_factory)


@pytest.mark.parametrize("why", ["unread data", "linger 0"])
def test_closing_resets_where_a_socket_s_close_would(
    run, forced_loop_factory, backend, why
) -> None:
    # Fails when: the duplicate is shut down although close() would have sent RST.
    async def main() -> None:
        with StalledReader() as peer:
            writer, op, _ = await pinned(peer, backend)
            if why == "unread data":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.05)
                peer.peer.sendall(b"never read")
                await asyncio.sleep(0.05)
            else:
                linger_0(writer.get_extra_info("socket"))
            await close(writer)
            await soon(op.released, 2.0)
            data, was_reset = await in_thread(peer.read_until_reset)
            assert was_reset
            assert_prefix(data, [(A, MIB)])

    run(main(), forced_loop_factory)


@pytest.mark.timing
@pytest.mark.parametrize("how", ["close", "abort"])
def test_zc_linger_ends_the_pins_of_a_closed_connection_whose_peer_stalls(
    run, forced_loop_factory, backend, how
) -> None:
    # Case 45. Fails when: azc_linger does not reset.

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        with StalledReader() as peer:
            fds = open_descriptors()
            writer, op, buffer = await pinned(peer, backend)
            began = time.monotonic()
            if how == "close":
                await close(writer)
            else:
                writer.transport.abort()
            await asyncio.sleep(0.15)
            assert not op.released.done()
            with pytest.raises(BufferError):
                buffer.extend(b"x")
            await soon(op.released, 5.0)
            assert 0.4 <= time.monotonic() - began < 2.0
            buffer.extend(b"x")
            assert loop.zc_stats().pinned_bytes == 0
            assert open_descriptors() <= fds + 1
            data, was_reset = await in_thread(peer.read_until_reset)
            assert was_reset
            assert_prefix(data, [(A, MIB)])

    run(main(), lambda: forced_loop_factory(zc_linger=0.4))


def test_zc_linger_spares_a_peer_that_reads_slowly(run, forced_loop_factory, backend) -> None:
    # Fails when: azc_linger counts from the close, not from the last acknowledgement.
    async def main() -> None:
        with StalledReader(rcvbuf=64 * 1024) as peer:
            writer, op, _ = await pinned(peer, backend)
            await close(writer)
            began = time.monotonic()
            data = await peer.take(MIB, pace=0.05, step=1 << 16)
            assert time.monotonic() - began > 0.6
            data += await peer.take_all()
            assert_stream(data, [(A, MIB)])
            await soon(op.released)

    run(main(), lambda: forced_loop_factory(zc_linger=0.4))


def test_zc_linger_is_checked() -> None:
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="zc_linger is in seconds"):
            aiozc.Settings(zc_linger=bad)


# --- no descriptor is free for the duplicate ----------------------------------------------------


@pytest.mark.parametrize("how", ["close", "abort"])
def test_without_a_free_descriptor_memory_stays_locked_until_somebody_can_tell(
    forced_loop_factory, backend, how
) -> None:
    # A ring tells without a descriptor; an error queue cannot be read any more, so there it is kept for good.
    # Fails when: a connection that could keep none is taken for released.
    if copies(backend):
        pytest.skip("nothing is pinned")
    loop = forced_loop_factory(zc_close_timeout=0.2)

    async def main() -> tuple[Any, bytearray]:
        with StalledReader() as peer:
            writer, op, buffer = await pinned(peer, backend)
            with no_descriptor_free():
                writer.transport.abort() if how == "abort" else writer.close()
                await eventually(lambda: writer.transport._sock is None)  # type: ignore[attr-defined]
            await asyncio.sleep(0.1)
            assert not op.released.done() and locked(buffer)
            assert_stream(await peer.take_all(), [(A, MIB)])  # and then the end of the stream
            if backend == "uring":
                assert (await soon(op.released)).nbytes == MIB
            return op, buffer

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        op, buffer = loop.run_until_complete(asyncio.wait_for(main(), 20))
        loop.close()
    for_good = [w for w in seen if "kernel" in str(w.message)]
    if backend == "uring":
        assert not for_good and not locked(buffer)
    else:
        assert not op.released.done() and locked(buffer)
        assert [w.category for w in for_good] == [ResourceWarning]


# --- the loop goes on in another thread ---------------------------------------------------------


def test_a_connection_closed_in_one_thread_releases_in_another(loop, backend) -> None:
    # Fails when: no duplicate of the descriptor is kept.
    with StalledReader() as peer:

        async def begin() -> Any:
            writer, op, _ = await pinned(peer, backend)
            await close(writer)
            return op

        async def wait() -> None:
            await asyncio.sleep(0.1)
            assert op.released.done() == copies(backend)
            assert_stream(await peer.take_all(), [(A, MIB)])
            assert (await soon(op.released, 3.0)).nbytes == MIB

        op = in_another_thread(loop, begin())
        in_another_thread(loop, wait())
        assert loop.zc_stats().pinned_bytes == loop.zc_stats().operations_live == 0


def test_an_orphan_is_released_when_its_peer_resets(loop, backend) -> None:
    # Fails when: only acknowledgements release an orphan, not the end of its connection.
    with StalledReader() as peer:

        async def wait() -> None:
            await asyncio.sleep(0.1)
            assert op.released.done() == copies(backend)
            peer.reset()
            assert (await soon(op.released, 3.0)).nbytes == MIB
            writer.transport.abort()

        writer, op, _ = in_another_thread(loop, pinned(peer, backend))
        in_another_thread(loop, wait())


def test_zc_reset_of_a_connection_with_an_orphan_resets_and_releases(loop, backend) -> None:
    # Fails when: the duplicate keeps the socket from being reset.
    with StalledReader() as peer:

        async def reset() -> None:
            await asyncio.sleep(0.1)
            assert op.released.done() == copies(backend)
            writer.transport.zc_reset()
            assert (await soon(op.released, 3.0)).nbytes == MIB
            data, was_reset = await in_thread(peer.read_until_reset)
            assert was_reset
            assert_prefix(data, [(A, MIB)])

        writer, op, _ = in_another_thread(loop, pinned(peer, backend))
        in_another_thread(loop, reset())


def test_an_orphan_whose_connection_closes_lingers_no_longer_than_others(
    forced_loop_factory, backend
) -> None:
    with closing(forced_loop_factory(zc_linger=0.4)) as loop, StalledReader() as peer:

        async def end() -> None:
            await close(writer)
            assert not op.released.done()
            assert (await soon(op.released, 3.0)).nbytes == MIB

        writer, op, _ = in_another_thread(loop, pinned(peer, backend))
        in_another_thread(loop, end())


def test_nothing_is_released_while_the_peer_may_still_be_sent_it(loop, backend) -> None:
    # Overwritten as soon as `released` came: the peer must never see it.
    with StalledReader(rcvbuf=64 * 1024) as peer:

        async def go_on() -> None:
            received = asyncio.ensure_future(peer.take_all(pace=0.005, step=1 << 16))
            writer.close()
            await soon(op.released)
            buffer[:] = b"!" * len(buffer)
            assert_stream(await received, [(A, MIB)])

        writer, op, buffer = in_another_thread(loop, pinned(peer, backend))
        in_another_thread(loop, go_on())
