"""BufferPool and registered regions: what is registered, and when memory may be used again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading

import numpy as np
import pytest
from support import (
    KIB,
    LARGE_SNDBUF,
    assert_stream,
    eventually,
    in_thread,
    soon,
    stalled,
)

import aiozc
from aiozc import hugepages
from aiozc import pool as pool_module

BACKENDS = ["uring", "epoll"]
FORCED = {"adaptive": False, "zc_threshold": 0}


def run(main, backend="uring", **settings):
    return aiozc.run(main, backend=backend, **{**FORCED, **settings})


def stats():
    return asyncio.get_running_loop().zc_stats()


def said(script: str) -> list[str]:
    """What a script printed, which must end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def gathers_fixed() -> bool:
    return aiozc.capabilities().features["sendmsg_zc_fixed"]


# -- the pool by itself --


def test_a_buffer_is_ordinary_writable_memory_of_its_size():
    with aiozc.BufferPool(size=1000, count=3) as pool:
        views = [pool.acquire() for _ in range(3)]
        assert [v.nbytes for v in views] == [1000] * 3
        assert all(v.format == "B" and not v.readonly and v.contiguous for v in views)
        for i, view in enumerate(views):
            view[:] = bytes([i]) * 1000
        assert [set(bytes(v)) for v in views] == [{0}, {1}, {2}]
        np.frombuffer(views[0], "u1")[5] = 9
        assert views[0][5] == 9


@pytest.mark.parametrize("size", [1, 64, 1200, 2100, 4000, 4096, 5000, 8192])
def test_a_buffer_touches_no_more_pages_than_it_must(size):
    # Fails when: buffers lie back to back. Each page of a part is a piece of a packet, which holds 17.
    pool = aiozc.BufferPool(size=size, count=40)
    views = [pool.acquire() for _ in range(40)]
    page = mmap.PAGESIZE
    starts = sorted(np.frombuffer(view, "u1").ctypes.data for view in views)
    assert all((at % page + size - 1) // page == (size - 1) // page for at in starts)
    assert all((a + size - 1) // 64 < b // 64 for a, b in itertools.pairwise(starts))
    first, last = pool._segments[0].address, pool._segments[0].address + pool._segments[0]._args[0]
    assert first <= starts[0] and starts[-1] + size <= last
    if size <= page:
        pages = len({at // page for at in starts})
        assert pages == -(-40 // (page // (-(-size // 64) * 64)))  # as many on one page as it holds


def test_a_pool_is_never_made_of_transparent_huge_pages():
    # Fails when: the system may use them. The kernel charges a part of registered huge pages up to 2 MiB.
    pool = aiozc.BufferPool(size=4 << 20, count=1)
    address, inside, flags = pool._segments[0].address, False, ""
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(mapping[1], 16) <= address < int(mapping[2], 16)
            elif inside and line.startswith("VmFlags:"):
                flags = line
    assert "nh" in flags.split()


@pytest.mark.parametrize("how", ["release", "with", "drop"])
def test_a_buffer_that_nobody_holds_is_free_again(how):
    pool = aiozc.BufferPool(size=100, count=1)
    view = pool.acquire()
    assert pool.free == 0
    if how == "release":
        view.release()
    elif how == "with":
        with view:
            pass
    del view
    assert pool.free == 1
    pool.acquire()


def test_a_slice_keeps_its_buffer():
    pool = aiozc.BufferPool(size=100, count=1)
    view = pool.acquire()
    part = view[10:20]
    view.release()
    del view
    gc.collect()
    assert pool.free == 0
    with pytest.raises(aiozc.PoolExhausted, match="max_count"):
        pool.acquire()
    del part
    assert pool.free == 1


def test_a_pool_grows_to_its_limit_and_not_beyond():
    pool = aiozc.BufferPool(size=64, count=2, max_count=5)
    views = [pool.acquire() for _ in range(5)]
    assert pool.count == 5
    with pytest.raises(aiozc.PoolExhausted, match="all 5 buffers"):
        pool.acquire()
    for i, view in enumerate(views):
        view[:] = bytes([i]) * 64
    assert [view[0] for view in views] == list(range(5))


def test_a_closed_pool_gives_nothing_and_takes_nothing_back():
    pool = aiozc.BufferPool(size=64, count=2)
    view = pool.acquire()
    pool.close()
    pool.close()
    view[:] = b"x" * 64  # still valid
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire()
    del view
    assert pool.free == 0
    assert "closed" in repr(pool)


def test_the_mapping_goes_with_the_last_of_its_buffers():
    def mapped():
        with open("/proc/self/maps") as maps:
            return f"{address:x}-" in maps.read()

    pool = aiozc.BufferPool(size=1 << 20, count=3)
    view = pool.acquire()
    address = pool._segments[0].address
    assert mapped()
    pool.close()
    del pool
    gc.collect()
    assert mapped()
    view[:5] = b"12345"
    del view
    gc.collect()
    assert not mapped()


@pytest.mark.parametrize(
    "bad", [{"size": 0}, {"count": 0}, {"count": 4, "max_count": 3}, {"size": (1 << 30) + 1}]
)
def test_a_bad_pool_is_refused(bad):
    with pytest.raises(ValueError):
        aiozc.BufferPool(**bad)


def test_huge_pages_that_are_not_there_are_told_with_the_remedy():
    try:
        pool = aiozc.BufferPool(size=1 << 20, count=4096, huge_pages=True)
    except OSError as exc:
        assert "vm.nr_hugepages" in str(exc)
    else:  # a machine that has them
        pool.close()


def free_huge_pages():
    with open("/proc/meminfo") as meminfo:
        found = dict(line.split(":", 1) for line in meminfo)
    wanted = found.get("Hugepagesize", "").split() == ["2048", "kB"]
    return int(found["HugePages_Free"]) if wanted else 0


@pytest.mark.skipif(free_huge_pages() < 1, reason="no huge page is reserved")
def test_a_part_of_huge_pages_is_charged_as_what_it_is():
    # Fails when: the region is the huge pages alone. Each part is then charged with its place in its page.
    async def main():
        with aiozc.BufferPool(size=4000, count=500, huge_pages=True) as pool:
            async with stalled() as (peer, writer):
                parts = [pool.acquire() for _ in range(100)]
                op = writer.zc_submit(parts)
                await soon(op.sent)
                memory = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, 55, 64)
                queued = struct.unpack_from("9I", memory)[5]  # SO_MEMINFO, SK_MEMINFO_WMEM_QUEUED
                assert stats().fixed_requests >= 1
                assert await peer.take(400_000) == bytes(400_000)
                await soon(op.released)
                del op, parts
        return queued

    assert 100_000 < run(main()) < 1 << 20


def test_buffers_are_given_and_taken_in_many_threads():
    pool = aiozc.BufferPool(size=64, count=4, max_count=16)
    wrong = []

    def work(mark):
        for _ in range(2000):
            with pool.acquire() as view:
                view[:] = bytes([mark]) * 64
                if bytes(view) != bytes([mark]) * 64:
                    wrong.append(mark)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.free == pool.count


# -- sending from it --


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_pool_arrive_and_go_registered(backend):
    async def main():
        pool = aiozc.BufferPool(size=8 * KIB, count=16)
        async with stalled() as (peer, writer):
            before = stats()
            views = [pool.acquire() for _ in range(16)]
            for i, view in enumerate(views):
                view[:] = bytes([i]) * 8 * KIB
            op = writer.zc_submit(views)
            data = await peer.take(128 * KIB)
            await soon(op.released)
            assert_stream(data, [(i, 8 * KIB) for i in range(16)])
            after = stats()
            if backend == "uring":
                fixed = after.fixed_requests - before.fixed_requests
                assert fixed == after.zc_requests - before.zc_requests >= 1
                if gathers_fixed():
                    assert fixed < 16
            else:
                assert after.fixed_requests == 0

    run(main(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_is_not_free_while_the_kernel_may_read_it(backend):
    """The view is released and the operation dropped at once: only the kernel's release counts."""

    async def main():
        pool = aiozc.BufferPool(size=512 * KIB, count=1)
        async with stalled(sndbuf=LARGE_SNDBUF) as (peer, writer):
            with pool.acquire() as view:
                view[:] = b"A" * 512 * KIB
                writer.zc_submit(view[: 256 * KIB])
                writer.zc_submit([view[256 * KIB :]])
            del view
            await asyncio.sleep(0.1)
            gc.collect()
            assert pool.free == 0
            with pytest.raises(aiozc.PoolExhausted):
                pool.acquire()
            data = await peer.take(512 * KIB)
            await eventually(lambda: pool.free == 1)
            assert_stream(data, [(ord("A"), 512 * KIB)])

    run(main(), backend)


def test_a_buffer_stays_taken_when_the_loop_is_closed_with_it_in_flight():
    """What the kernel still reads when the loop goes is never used again."""
    lines = said("""
        import asyncio, gc, socket, warnings
        import aiozc
        warnings.simplefilter("ignore")
        pool = aiozc.BufferPool(size=1 << 20, count=1)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        async def main():
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            with pool.acquire() as view:
                view[:] = b"A" * (1 << 20)
                op = writer.zc_submit(view)
            await op.sent
        aiozc.run(main(), backend="uring", adaptive=False, zc_threshold=0, zc_close_timeout=0.05,
                  zc_linger=3600)
        gc.collect()
        free = pool.free
        peer, _ = listener.accept()
        data = b""
        while piece := peer.recv(1 << 20):
            data += piece
        print(free, len(data), set(data) == {65})
        """)
    assert lines == [f"0 {1 << 20} True"]


@pytest.mark.parametrize("segment", [None, 1200])
def test_datagrams_of_a_pool_go_registered(segment):
    async def main():
        loop = asyncio.get_running_loop()
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(10)
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=receiver.getsockname()
        )
        pool = aiozc.BufferPool(size=16 * KIB, count=2)
        a, b = pool.acquire(), pool.acquire()
        a[:] = b"a" * 16 * KIB
        b[:] = b"b" * 16 * KIB
        other = bytearray(b"o" * 100)
        sends = [a[:4800], [a[:1200], b[:1200]], [a[:1200], other[:100]]]
        for data in sends:
            op = transport.zc_sendto(data, segment_size=segment)
            whole = b"".join(data) if isinstance(data, list) else bytes(data)
            got = b""
            while len(got) < len(whole):
                piece = await in_thread(lambda: receiver.recv(65536))
                assert segment is None or len(piece) <= segment
                got += piece
            assert got == whole
            await soon(op.released)
        fixed = stats().fixed_requests
        assert fixed == 2 if gathers_fixed() else fixed == 1
        assert stats().zc_requests == 3
        transport.close()
        receiver.close()

    run(main())


def test_regions_and_other_memory_keep_their_order():
    async def main():
        pool = aiozc.BufferPool(size=40 * KIB, count=4)
        other = bytearray(b"o" * 40 * KIB)
        async with stalled() as (peer, writer):
            a, b, c = (pool.acquire() for _ in range(3))
            for view, value in ((a, b"a"), (b, b"b"), (c, b"c")):
                view[:] = value * 40 * KIB
            ops = [
                writer.zc_submit([a, b, other, memoryview(other)[:7], c]),
                writer.zc_submit(a[:100]),
                writer.zc_submit([other, a[:5], other]),
            ]
            writer.write(b"plain")
            ops.append(writer.zc_submit(c))
            total = sum(op.nbytes for op in ops) + 5
            data = await peer.take(total)
            for op in ops:
                await soon(op.released)
            o, k = ord("o"), 40 * KIB
            expected = [(97, k), (98, k), (o, k + 7), (99, k), (97, 100), (o, k), (97, 5), (o, k)]
            expected += [(v, 1) for v in b"plain"] + [(99, k)]
            assert_stream(data, expected)
            s = stats()
            assert 0 < s.fixed_requests < s.zc_requests

    run(main())


def test_memory_that_reaches_beyond_its_region_goes_unregistered():
    async def main():
        data = bytearray(b"a" * 64 * KIB + b"b" * 64 * KIB)
        view = memoryview(data)
        async with stalled(rcvbuf=None) as (peer, writer):
            with asyncio.get_running_loop().register_buffer(view[: 64 * KIB]):
                ops = [writer.zc_submit(data), writer.zc_submit([view[60 * KIB : 68 * KIB]])]
                received = await peer.take(136 * KIB)
                for op in ops:
                    await soon(op.released)
            a, b = ord("a"), ord("b")
            assert_stream(received, [(a, 64 * KIB), (b, 64 * KIB), (a, 4 * KIB), (b, 4 * KIB)])
            assert stats().fixed_requests == 0
            assert stats().zc_requests >= 1

    run(main())


def test_a_pool_goes_over_to_the_ring_of_the_next_loop_and_thread():
    pool = aiozc.BufferPool(size=64 * KIB, count=2)
    fixed = []

    async def main():
        async with stalled() as (peer, writer):
            with pool.acquire() as view:
                view[:] = b"z" * 64 * KIB
                op = writer.zc_submit(view)
            data = await peer.take(64 * KIB)
            await soon(op.released)
            assert_stream(data, [(ord("z"), 64 * KIB)])
            fixed.append(stats().fixed_requests)

    run(main())
    thread = threading.Thread(target=lambda: run(main()))
    thread.start()
    thread.join()
    run(main())
    assert len(fixed) == 3 and all(fixed)


def test_memory_at_the_address_of_a_closed_pool_is_not_taken_for_it():
    """The kernel would still have the old pages under the old number."""

    async def main():
        async with stalled(rcvbuf=None) as (peer, writer):
            for value in b"abcdefgh":
                pool = aiozc.BufferPool(size=256 * KIB, count=1)
                address = pool._segments[0].address
                view = pool.acquire()
                view[:] = bytes([value]) * 256 * KIB
                op = writer.zc_submit(view)
                data = await peer.take(256 * KIB)
                await soon(op.released)
                assert_stream(data, [(value, 256 * KIB)])
                del view, op
                pool.close()
                again = mmap.mmap(-1, 256 * KIB)  # most often at the same address
                again[:] = b"-" * 256 * KIB
                op = writer.zc_submit(again)
                data = await peer.take(256 * KIB)
                await soon(op.released)
                assert_stream(data, [(ord("-"), 256 * KIB)])
                del op
                addresses.append((address, np.frombuffer(again, "u1").ctypes.data))
                del again

    addresses: list[tuple[int, int]] = []
    run(main())
    assert any(a == b for a, b in addresses), "no address came again: the test showed nothing"


def test_a_closed_region_is_unregistered():
    """What is locked for a ring goes back: /proc says so (VmPin does not; the ring's table does)."""

    async def main():
        loop = asyncio.get_running_loop()
        async with stalled(rcvbuf=None) as (peer, writer):
            # More than a ring's table holds, one after the other.
            for i in range(600):
                with loop.register_buffer(bytearray(64 * KIB)):
                    pass
                if i % 100 == 0:
                    await asyncio.sleep(0)
            numbers = np.full(64 * KIB, 7, "u1")
            with loop.register_buffer(numbers):
                op = writer.zc_submit(numbers)
                await peer.take(64 * KIB)
                await soon(op.released)
                assert stats().fixed_requests == 1

    run(main())


# -- regions --


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_locks_its_object_until_it_is_closed(backend):
    async def main():
        data = bytearray(100_000)
        region = asyncio.get_running_loop().register_buffer(data)
        with pytest.raises(BufferError):
            data.append(1)
        assert region.nbytes == 100_000 and not region.closed
        region.close()
        region.close()
        data.append(1)
        assert region.closed

    run(main(), backend)


def test_what_was_sent_from_a_region_is_safe_after_its_close():
    async def main():
        data = bytearray(b"r" * 1024 * KIB)
        async with stalled() as (peer, writer):
            with asyncio.get_running_loop().register_buffer(data):
                op = writer.zc_submit(memoryview(data)[: 1024 * KIB])
                await soon(op.sent)
            assert stats().fixed_requests >= 1
            with pytest.raises(BufferError):
                data.append(1)  # the operation's own lock
            received = await peer.take(1024 * KIB)
            assert_stream(received, [(ord("r"), 1024 * KIB)])
            await soon(op.released)
            data.append(1)

    run(main())


def test_what_the_kernel_refuses_is_told_with_the_remedy():
    async def main():
        loop = asyncio.get_running_loop()
        with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
            file.write(bytes(64 * KIB))
            file.flush()
            shared = mmap.mmap(file.fileno(), 64 * KIB)
            view = mmap.mmap(file.fileno(), 64 * KIB, prot=mmap.PROT_READ)
            for memory in (view, shared):
                with pytest.raises(OSError, match="BufferPool") as info:
                    loop.register_buffer(memory)
                assert info.value.errno == 14
            async with stalled(rcvbuf=None) as (peer, writer):  # it can be sent all the same
                op = writer.zc_submit(view)
                assert await peer.take(64 * KIB) == bytes(64 * KIB)
                await soon(op.released)
                del op
            view.close()
            shared.close()

    run(main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_region_is_refused_in_the_call(backend):
    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(ValueError, match="1 GiB"):
            loop.register_buffer(b"")
        with pytest.raises(TypeError, match="bytes-like"):
            loop.register_buffer("text")
        with pytest.raises(BufferError, match="contiguous"):
            loop.register_buffer(np.zeros((10, 10))[:, 1])
        large = mmap.mmap(-1, (1 << 30) + 4096)
        with pytest.raises(ValueError, match="slices"):
            loop.register_buffer(large)
        large.close()  # nothing kept a lock

    run(main(), backend)


def test_memory_of_huge_pages_alone_is_sent_unregistered():
    # Fails when: it is registered. The kernel charges a part with all that lies before it in its huge page.
    memory = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(4 << 20)
    view = memoryview(memory)
    if not hugepages.all_huge(np.frombuffer(view, "u1").ctypes.data, len(view)):
        pytest.skip("the system gave no huge pages")

    async def main():
        with asyncio.get_running_loop().register_buffer(memory) as region:
            assert not region.registered and not region.closed and "huge" in repr(region)
            async with stalled(rcvbuf=None) as (peer, writer):
                op = writer.zc_submit(view[: 64 * KIB])
                assert await peer.take(64 * KIB) == bytes(64 * KIB)
                await soon(op.released)
            assert stats().zc_requests >= 1 and stats().fixed_requests == 0
        assert region.closed

    run(main())
    view.release()
    memory.close()


def test_too_many_regions_are_told():
    regions = []
    try:
        with pytest.raises(OSError, match="1024 regions"):
            for _ in range(2000):
                regions.append(aiozc.Region(bytearray(100)))
        assert len(regions) <= 1024

        async def main():
            loop = asyncio.get_running_loop()
            for region in regions[:-300]:
                region.close()
            more = []
            with pytest.raises(OSError, match="256 regions"):
                for _ in range(300):
                    more.append(loop.register_buffer(bytearray(4096)))
            assert len(more) == 256
            for region in more:
                region.close()
            loop.register_buffer(bytearray(4096)).close()  # there is room again

        run(main())
    finally:
        for region in regions:
            region.close()


def test_a_region_of_a_loop_that_does_not_run_is_registered_on_first_use():
    loop = aiozc.new_event_loop(backend="uring", **FORCED)
    data = bytearray(b"q" * 64 * KIB)
    region = loop.register_buffer(data)

    async def main():
        async with stalled() as (peer, writer):
            op = writer.zc_submit(data)
            await peer.take(64 * KIB)
            await soon(op.released)
            return stats().fixed_requests

    assert loop.run_until_complete(main()) == 1
    region.close()
    loop.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root to meet RLIMIT_MEMLOCK")
def test_over_the_memlock_limit_it_is_told_and_sends_go_on():
    lines = said("""
        import asyncio, concurrent.futures.thread, os, resource, socket
        import aiozc
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
        os.setgid(65534); os.setuid(65534)
        async def main():
            loop = asyncio.get_running_loop()
            pool = aiozc.BufferPool(size=1 << 20, count=16)
            try:
                loop.register_buffer(pool)
            except OSError as exc:
                print(exc.errno, "ulimit -l" in str(exc))
            small = aiozc.BufferPool(size=1 << 20, count=2)
            print(loop.register_buffer(small))
            listener = socket.create_server(("127.0.0.1", 0))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            peer, _ = listener.accept()
            view = pool.acquire()
            view[:] = b"A" * (1 << 20)
            op = writer.zc_submit(view)
            data = await loop.run_in_executor(None, lambda: peer.recv(1 << 20, socket.MSG_WAITALL))
            await op.released
            print(len(data), set(data) == {65}, loop.zc_stats().fixed_requests)
            writer.close()
        aiozc.run(main(), backend="uring", adaptive=False, zc_threshold=0)
        """)
    assert lines == ["12 True", "None", f"{1 << 20} True 0"]


def test_a_forked_child_has_the_pool_for_itself():
    if not hasattr(os, "fork"):
        pytest.skip("no fork")
    lines = said("""
        import asyncio, os, socket, warnings
        import aiozc
        warnings.simplefilter("ignore")
        pool = aiozc.BufferPool(size=1 << 16, count=2)
        async def one(value):
            loop = asyncio.get_running_loop()
            listener = socket.create_server(("127.0.0.1", 0))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            peer, _ = listener.accept()
            with pool.acquire() as view:
                view[:] = value * (1 << 16)
                op = writer.zc_submit(view)
            data = await loop.run_in_executor(None, lambda: peer.recv(1 << 16, socket.MSG_WAITALL))
            await op.released
            writer.close()
            return set(data) == set(value), loop.zc_stats().fixed_requests
        settings = dict(backend="uring", adaptive=False, zc_threshold=0)
        print(aiozc.run(one(b"p"), **settings), flush=True)
        child = os.fork()
        if not child:
            print(aiozc.run(one(b"c"), **settings), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(aiozc.run(one(b"q"), **settings), flush=True)
        """)
    assert lines == ["(True, 1)"] * 3


def test_python_knows_the_limits_that_the_header_states():
    assert pool_module._MAX_REGION == 1 << 30
    assert sys.getsizeof(aiozc.BufferPool(size=1, count=1)) < 200


def test_a_view_that_garbage_saves_keeps_its_buffer():
    # Fails when: the buffer is given back by a finalizer, which the collector runs before `saved` is known.
    saved = []

    class Saves:
        def __del__(self):
            saved.append(self.view)

    pool = aiozc.BufferPool(size=100, count=1)
    garbage = Saves()
    garbage.view = pool.acquire()
    garbage.view[:5] = b"mine!"
    garbage.me = garbage
    del garbage
    gc.collect()
    assert bytes(saved[0][:5]) == b"mine!"
    assert pool.free == 0
    saved.clear()
    gc.collect()
    assert pool.free == 1


def test_a_growing_pool_is_not_exhausted_before_its_limit():
    for _ in range(20):
        pool = aiozc.BufferPool(size=64, count=8, max_count=64)
        wrong = []

        barrier = threading.Barrier(8)

        def work(pool=pool, wrong=wrong, barrier=barrier):
            try:
                views = [pool.acquire() for _ in range(8)]
                assert len(views) == 8
                barrier.wait(20)
            except BaseException as exc:
                wrong.append(exc)
                barrier.abort()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_regions_dropped_in_another_thread_harm_nobody():
    # Fails when: a place of the ring's table is emptied while a prepared request names it.
    async def main():
        pool = aiozc.BufferPool(size=64 * KIB, count=8)
        stop = threading.Event()

        def make_and_drop():
            while not stop.is_set():
                regions = [aiozc.Region(bytearray(4096)) for _ in range(4)]
                for region in regions:
                    region.close()

        async with contextlib.AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(stalled(rcvbuf=None)) for _ in range(8)]
            thread = threading.Thread(target=make_and_drop)
            thread.start()
            try:
                for _ in range(40):
                    extra = [asyncio.get_running_loop().register_buffer(bytearray(4096))]
                    views = [pool.acquire() for _ in peers]
                    ops = []
                    for (_, writer), view in zip(peers, views, strict=True):
                        view[:] = b"v" * 64 * KIB
                        ops.append(writer.zc_submit(view))
                    extra[0].close()
                    for peer, _ in peers:
                        assert set(await peer.take(64 * KIB)) == {ord("v")}
                    for op in ops:
                        await soon(op.released)
                    del views, ops, view
            finally:
                stop.set()
                thread.join()
            assert stats().fixed_requests > 0

    run(main())
