"""Large operations on a path that is known to copy: sent within the call, with the contract unchanged.

Loopback is such a path, once the kernel has reported it twice; on epoll the same by MSG_ZEROCOPY.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from support import LARGE_SNDBUF, MIB, StalledReader, in_thread, soon

import aiozc


def test_a_large_zc_send_on_a_path_that_copies_is_done_within_the_call(run, backend) -> None:
    # Fails when: the locks are given back only by the event (operation_settle), or bytes that are queued before
    # it are overtaken (conn_copy_now in write.c).
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        with StalledReader(rcvbuf=4 * MIB) as peer:
            sock = peer.connect(sndbuf=LARGE_SNDBUF)
            _, writer = await aiozc.open_connection(sock=sock)
            reading = asyncio.ensure_future(peer.take(32 * 100_000))
            for _ in range(32):  # until two trusted reports said so
                await soon(writer.zc_send(bytearray(b"a" * 100_000)))
            await soon(reading)
            for number in range(3):
                held = len(loop._reactor.held)
                buffer = bytearray([number]) * 200_000
                writer.write(b"before")
                sending = writer.zc_send(buffer)
                with pytest.raises(StopIteration) as done:
                    sending.send(None)  # as a task's step does; it does not suspend
                assert done.value.value == aiozc.Result(200_000, "copied")
                buffer.extend(b"free, and not seen by the peer")
                assert len(loop._reactor.held) == held
                data = await soon(in_thread(lambda: peer.read(200_006)))
                assert data == b"before" + bytes([number]) * 200_000
            op = writer.zc_submit(bytearray(200_000))
            assert op.withdraw()  # nobody waits for it: it leaves at the end of the turn
            assert loop.zc_stats().operations_live <= 3  # their events come with the next turn
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert loop.zc_stats().operations_live == loop.zc_stats().queued_bytes == 0
            writer.close()

    run(main(), functools.partial(aiozc.new_event_loop, backend=backend))


def test_what_went_in_part_with_a_send_behind_it_cannot_be_withdrawn(run, backend) -> None:
    # Fails when: conn_copy_now in write.c leaves it as if no byte had gone. The rest of it is missing then.
    async def main() -> None:
        with StalledReader(rcvbuf=None) as peer:
            _, writer = await aiozc.open_connection(sock=peer.connect(sndbuf=65536))
            reading = asyncio.ensure_future(peer.take(32 * 100_000))
            for _ in range(32):
                await soon(writer.zc_send(b"a" * 100_000))
            await soon(reading)
            op = writer.zc_submit(b"0123456789" * (MIB // 2))
            sending = writer.zc_send(b"b" * 100_000)
            sending.send(None)  # as a task's step does; it waits
            assert 0 < op.bytes_sent < op.nbytes
            assert not op.withdraw()
            sending.close()
            writer.write_eof()
            size = op.nbytes + 100_000
            data = await soon(in_thread(lambda: peer.read(size)))
            assert data == b"0123456789" * (MIB // 2) + b"b" * 100_000
            await soon(op.released)
            writer.close()

    run(main(), functools.partial(aiozc.new_event_loop, backend=backend))


def test_who_sends_much_on_a_path_that_copies_leaves_others_their_turn(run, backend) -> None:
    # Fails when: conn_copy_now in write.c has no bound a turn.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with StalledReader(rcvbuf=None) as peer:
            _, writer = await aiozc.open_connection(sock=peer.connect(sndbuf=LARGE_SNDBUF))
            data = b"s" * 100_000
            reading = asyncio.ensure_future(peer.take(32 * len(data)))
            for _ in range(32):  # until two trusted reports said so
                await soon(writer.zc_send(data))
            await soon(reading)
            await asyncio.sleep(0.01)
            turned = loop.create_future()
            loop.call_soon(turned.set_result, None)
            calls = 0
            while not turned.done():
                await writer.zc_send(data)  # the socket takes 8 MiB, and nobody reads
                calls += 1
            assert 1 < calls <= 1 + 4 * MIB // len(data) + 1
            peer.reset()
            writer.transport.abort()

    run(main(), functools.partial(aiozc.new_event_loop, backend=backend))
