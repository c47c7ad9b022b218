"""The live test: send, overwrite as soon as that is allowed, compare what arrived. And: do requests stack?

Called by doctor/__init__.py. It runs in a forked child, so that a native module which crashes or hangs is
a finding and not the doctor's end. Loopback only, some megabytes.
On loopback the kernel copies: this proves contents and that requests are taken, not speed.
Never: raises; whatever goes wrong is in the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import time
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiozc

ROUNDS = 8
NBYTES = 256 * 1024
POOL_BYTES = 64 * 1024
SECONDS = 20.0
_SMALL = 1200  # less than a segment, so a second one can join the packet
_STACKED = 8
_TCP_INFO_BYTES, _DATA_SEGS_OUT = 232, 156


def run(seconds: float = SECONDS) -> dict[str, Any]:
    """The report of `_test` from a child, or {"ok": False, "error": why}."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        # Threads of a program that calls this would be a danger; the command line has none.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        os.close(readable)
        _child(writable)
    os.close(writable)
    try:
        answer, in_time = _read(readable, seconds)
    finally:
        os.close(readable)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not in_time:
        return {"ok": False, "error": f"the test did not end within {seconds:g} s"}
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return {"ok": False, "error": f"the test's process was killed by {name}"}
    try:
        report: dict[str, Any] = json.loads(answer)
    except ValueError:
        return {"ok": False, "error": "the test's process ended without a report"}
    return report


def _read(fd: int, seconds: float) -> tuple[bytes, bool]:
    end, answer = time.monotonic() + seconds, b""
    while select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (piece := os.read(fd, 65536)):
            return answer, True
        answer += piece
    return answer, False


def _child(fd: int) -> None:
    """Never returns: nothing of the parent's, like buffered output, may happen twice."""
    try:
        try:
            report = _test()
        except BaseException as exc:
            report = {"ok": False, "error": f"{type(exc).__name__}: {exc}"}
        os.write(fd, json.dumps(report).encode())
    finally:
        os._exit(0)


def _test() -> dict[str, Any]:
    report: dict[str, Any] = {"ok": True, "error": None}
    loop = aiozc.new_event_loop(adaptive=False, zc_threshold=0)
    try:
        report.update(loop.run_until_complete(_exchange()))
        stats = loop.zc_stats()
        report["backend"] = stats.backend
        report["reason"] = loop._reactor.capabilities.reason
        report["zero_copy_requests"] = stats.zc_requests
        report["registered_requests"] = stats.fixed_requests
        report["fallbacks"] = dict(stats.fallbacks)
    finally:
        loop.close()
    if report["ok"] and report["zero_copy_requests"] and report["backend"] == "uring":
        report["stacking"] = _with_loop(_stacking, zc_eor_bytes=1 << 20)
    return report


def _with_loop(test: Callable[[], Any], **settings: Any) -> Any:
    loop = aiozc.new_event_loop(adaptive=False, zc_threshold=0, **settings)
    try:
        return loop.run_until_complete(test())
    finally:
        loop.close()


@contextlib.asynccontextmanager
async def _connection() -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    """Over loopback: the receiving reader, and the writer at the other end."""
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result((reader, writer))

    try:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
    except OSError:
        server = await asyncio.start_server(serve, "::1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    reader, back = await accepted
    server.close()
    try:
        yield reader, writer
    finally:
        for each in writer, back:
            each.close()
            with contextlib.suppress(OSError):
                await each.wait_closed()


async def _exchange() -> dict[str, Any]:
    paths = set()
    pool = aiozc.BufferPool(size=POOL_BYTES, count=2)
    async with _connection() as (reader, writer):
        buffer = bytearray(NBYTES)
        for number in range(ROUNDS):
            bad, path = await _round(reader, writer, memoryview(buffer), number)
            paths.add(path)
            if bad is not None:
                return {"ok": False, "error": f"round {number}: {bad}"}
        bad, path = await _round(reader, writer, pool.acquire(), ROUNDS)
        paths.add(path)
        if bad is not None:
            return {"ok": False, "error": f"registered memory: {bad}"}
    pool.close()
    return {"bytes": ROUNDS * NBYTES + POOL_BYTES, "paths": sorted(paths)}


async def _round(
    reader: asyncio.StreamReader, writer: Any, view: memoryview, number: int
) -> tuple[str | None, str]:
    """Send, overwrite when the memory is free, read, compare. What is wrong, or None; and the path."""
    expected = os.urandom(len(view))
    view[:] = expected
    reading = asyncio.ensure_future(reader.readexactly(len(view)))
    result = await writer.zc_send(view)
    view[:] = bytes([number]) * len(view)
    return compare(expected, await reading), result.path


def compare(expected: bytes, got: bytes) -> str | None:
    if expected == got:
        return None
    at = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
    return f"the peer received other bytes than were sent, from byte {at} of {len(expected)} on"


async def _stacking() -> bool | None:
    """Whether the kernel (6.10) lets requests share a packet: small ones on a corked connection go out as one
    segment then, else as one each. None: the kernel tells no number of segments."""
    async with _connection() as (reader, writer):
        sock = writer.get_extra_info("socket")
        before = _segments(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        ops = []
        for _ in range(_STACKED):
            op = writer.zc_submit(bytearray(_SMALL))
            await op.sent
            ops.append(op)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        await reader.readexactly(_STACKED * _SMALL)
        for op in ops:
            await op.released
        after = _segments(sock)
    return None if before is None or after is None else after - before <= _STACKED // 2


def _segments(sock: Any) -> int | None:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _DATA_SEGS_OUT + 4:
        return None
    segments: int = struct.unpack_from("=I", info, _DATA_SEGS_OUT)[0]
    return segments
