"""Plain writes of 8 to 16 KiB: the first of a turn goes within the call, the others are gathered (write.c).

Owns: which of them leave when, in how many requests, and their order where the socket does not take them.
"""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from order_support import (
    Reader,
    Recorder,
    assert_same_stream,
    connect,
    eventually,
    pattern,
    receive,
    reset,
)

SIZES = [8192, 16384]


@pytest.fixture(params=["tcp", "unix"])
def family(request):
    return request.param


def requests() -> int:
    return asyncio.get_running_loop().zc_stats().requests


def there(peer: socket.socket) -> bytes:
    """What arrived, without a turn of the loop."""
    return peer.recv(1 << 20, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_a_turn_goes_within_the_call(run, family, size):
    async def main():
        transport, _, peer = await connect(Recorder, family)
        for number in range(3):
            before = requests()
            transport.write(pattern(number, size))
            assert transport.get_write_buffer_size() == 0
            assert_same_stream(pattern(number, size), there(peer))
            assert requests() == before + 1
            await asyncio.sleep(0.001)
        transport.close()
        peer.close()

    run(main())


def test_a_turn_without_the_kernel_is_a_turn(run, family):
    async def main():
        transport, _, peer = await connect(Recorder, family)
        await asyncio.sleep(0.01)
        for number in range(6):
            transport.write(pattern(number, 10_000))
            assert transport.get_write_buffer_size() == 0
            assert_same_stream(pattern(number, 10_000), there(peer))
            await asyncio.sleep(0)
        transport.close()
        peer.close()

    run(main())


@pytest.mark.parametrize("size", SIZES)
def test_those_behind_it_are_gathered(run, family, size):
    async def main():
        transport, _, peer = await connect(Recorder, family)
        await asyncio.sleep(0)
        before = requests()
        for number in range(4):
            transport.write(pattern(number, size))
        assert transport.get_write_buffer_size() == 3 * size
        got = await receive(peer, 4 * size)
        assert_same_stream([pattern(number, size) for number in range(4)], got)
        assert requests() == before + 2
        transport.close()
        peer.close()

    run(main())


def test_a_small_write_before_it_goes_with_it(run, family):
    async def main():
        transport, _, peer = await connect(Recorder, family)
        await asyncio.sleep(0)
        before = requests()
        transport.write(b"head")
        assert transport.get_write_buffer_size() == 4
        transport.write(pattern(1, SIZES[0]))
        assert transport.get_write_buffer_size() == 0
        assert_same_stream([b"head", pattern(1, SIZES[0])], there(peer))
        assert requests() == before + 1
        transport.close()
        peer.close()

    run(main())


def test_what_is_changed_after_the_call_is_not_seen(run, family):
    async def main():
        transport, _, peer = await connect(Recorder, family, sndbuf=4096, rcvbuf=4096)
        content, sent = bytearray(), 0
        while transport.get_write_buffer_size() < 32768:
            data = bytearray(pattern(sent, 12000))
            content += data
            transport.write(data)
            data[:] = b"x" * len(data)
            sent += 1
            await asyncio.sleep(0)
        assert_same_stream(bytes(content), await receive(peer, len(content)))
        transport.close()
        peer.close()

    run(main())


def test_nothing_overtakes_what_the_socket_did_not_take(run, family):
    async def main():
        transport, _, peer = await connect(Recorder, family, sndbuf=8192, rcvbuf=8192)
        reader = Reader(peer)
        choose, content, held = random.Random(1), [], 0
        for number in range(400):
            content.append(
                pattern(number, choose.choice([1, 100, 5000, 8192, 12000, 16384, 20000]))
            )
            transport.write(content[-1])
            held += transport.get_write_buffer_size() > 0
            if choose.random() < 0.7:
                await asyncio.sleep(choose.choice([0, 0, 0.001]))
        assert held > 50
        transport.close()
        assert_same_stream(content, await reader.aresult())

    run(main())


def test_an_error_in_the_call_ends_the_connection(run):
    async def main():
        transport, protocol, peer = await connect(Recorder)
        transport.pause_reading()  # or the reset is told by receiving
        reset(peer)
        await asyncio.sleep(0.05)
        transport.write(pattern(0, SIZES[0]))
        await eventually(lambda: protocol.lost, 5, "connection_lost")
        assert isinstance(protocol.lost[0], (ConnectionResetError, BrokenPipeError))

    run(main())
