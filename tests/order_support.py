"""Helpers of the order, lifecycle, transport and reactor tests.

Owns patterned payloads, the run-length print of a stream that went wrong, connected pairs of
sockets, and readers. The receiving half is always a plain blocking socket in a thread of its
own: nothing here may depend on the loop under test to find out what arrived.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterable

from support import linger_0, set_rcvbuf

TIMEOUT = 20.0  # seconds that any single wait of a test may take before it counts as a hang

# What a test writes over a buffer that it has got back. No pattern contains this value, so every
# run of it in a received stream is a byte that was read from memory too late.
OVERWRITTEN = 0xFF

# Inside a piece the value steps every 997 bytes (a prime, so that no page or block boundary
# coincides with a step): swapped halves of one large piece show as well as swapped pieces.
_STEP = 997
_VALUES = 251
_CYCLE = b"".join(bytes([value]) * _STEP for value in range(_VALUES))


def pattern(index: int, size: int) -> bytes:
    """The bytes of piece `index`: its own first value, and a step every 997 bytes."""
    start = (index * 53 + 1) % _VALUES * _STEP
    repeats = (start + size) // len(_CYCLE) + 1
    return (_CYCLE * repeats)[start : start + size]


def overwrite(buffer: bytearray | memoryview) -> None:
    view = memoryview(buffer).cast("B")
    view[:] = bytes([OVERWRITTEN]) * len(view)


def runs(data: bytes, limit: int = 24) -> str:
    """`data` run-length coded: "17x997 18x997 255x64 ..."."""
    out: list[str] = []
    position = 0
    while position < len(data) and len(out) < limit:
        value = data[position]
        end = position + 1
        while end < len(data) and data[end] == value:
            end += 1
        out.append(f"{value}x{end - position}")
        position = end
    if position < len(data):
        out.append(f"... {len(data) - position} bytes more")
    return " ".join(out) or "(nothing)"


def first_difference(left: bytes, right: bytes) -> int:
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # left[:low] is equal, left[:high] is not
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def assert_same_stream(expected: Iterable[bytes] | bytes, received: bytes) -> None:
    """Fails with a run-length print from just before the first byte that is wrong."""
    pieces = [expected] if isinstance(expected, bytes) else list(expected)
    whole = b"".join(pieces)
    if whole == received:
        return
    at = first_difference(whole, received)
    start, piece = 0, 0
    for piece, content in enumerate(pieces):  # noqa: B007
        if start + len(content) > at:
            break
        start += len(content)
    context = max(0, at - 16)
    raise AssertionError(
        f"the stream differs at byte {at} (piece {piece}, its byte {at - start});"
        f" {len(whole)} bytes called, {len(received)} received\n"
        f"  called:   {runs(whole[context : context + 16384])}\n"
        f"  received: {runs(received[context : context + 16384])}"
    )


def assert_prefix(whole: bytes, received: bytes) -> None:
    assert_same_stream(whole[: len(received)], received)


def connected_pair(
    family: str = "tcp",
    *,
    sndbuf: int | None = None,
    rcvbuf: int | None = None,
    nodelay: bool = True,
) -> tuple[socket.socket, socket.socket]:
    """A connection as (non-blocking server side, blocking peer with a time limit)."""
    if family == "unix":
        ours, peer = socket.socketpair()
        if rcvbuf is not None:
            set_rcvbuf(peer, rcvbuf)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.socket()
            if rcvbuf is not None:
                set_rcvbuf(peer, rcvbuf)
            peer.connect(listener.getsockname())
            # Nagle at the peer would wait for our delayed ACK: 40 ms a message, and no news.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours, _ = listener.accept()
        # Not left to the transport: asyncio sets it only where the socket knows its protocol.
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, nodelay)
    if sndbuf is not None:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
    ours.setblocking(False)
    peer.settimeout(TIMEOUT)
    return ours, peer


def reset(sock: socket.socket) -> None:
    """Closes with linger 0: the other side gets ECONNRESET."""
    linger_0(sock)
    sock.close()


def in_thread(function, *args):
    """Runs `function` in a new thread and returns what it returned, or raises what it raised."""
    outcome = {}

    def target():
        try:
            outcome["value"] = function(*args)
        except BaseException as exc:
            outcome["error"] = exc

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(TIMEOUT * 2)
    assert not thread.is_alive(), f"{function} still runs"
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


class Reader(threading.Thread):
    """Reads a socket until EOF: at once or from `go()` on, in chunks, with pauses or at a rate."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        chunk: int = 1 << 18,
        pause: float = 0.0,
        every: int = 1,
        rate: float | None = None,
        stalled: bool = False,
        keep: bool = True,
    ) -> None:
        super().__init__(daemon=True)
        self._sock = sock
        self._chunk = chunk
        self._pause = pause
        self._every = every
        self._rate = rate
        self._keep = keep
        self._may_read = threading.Event()
        self._parts: list[bytes] = []
        self.count = 0
        self.error: BaseException | None = None
        self.ended_at = 0.0
        if not stalled:
            self._may_read.set()
        self.start()

    def go(self) -> None:
        self._may_read.set()

    def run(self) -> None:
        try:
            if not self._may_read.wait(TIMEOUT * 3):
                raise TimeoutError("nobody let the stalled reader go")
            began = time.monotonic()
            turn = 0
            while data := self._sock.recv(self._chunk):
                self.count += len(data)
                if self._keep:
                    self._parts.append(data)
                turn += 1
                if self._pause and turn % self._every == 0:
                    time.sleep(self._pause)
                if self._rate is not None:
                    ahead = self.count / self._rate - (time.monotonic() - began)
                    if ahead > 0:
                        time.sleep(ahead)
        except BaseException as exc:
            self.error = exc
        finally:
            self.ended_at = time.monotonic()

    def result(self, timeout: float = TIMEOUT) -> bytes:
        """Everything up to EOF. Blocks: call it off the loop, or by `aresult`."""
        self.join(timeout)
        if self.is_alive():
            raise TimeoutError(f"no EOF within {timeout} s; {self.count} bytes so far")
        if self.error is not None:
            raise self.error
        return b"".join(self._parts)

    def so_far(self) -> bytes:
        return b"".join(self._parts)

    async def aresult(self, timeout: float = TIMEOUT) -> bytes:
        # Off the loop and without a timer of its own: the loop has to be woken by what it waits for.
        return await asyncio.to_thread(self.result, timeout)


async def eventually(condition: Callable[[], object], timeout: float = 5.0, what: str = "") -> None:
    """Waits until `condition()` holds; the loop keeps running meanwhile."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        await asyncio.sleep(0.002)


async def limited(awaitable, timeout: float = TIMEOUT):
    return await asyncio.wait_for(awaitable, timeout)


async def unpinned(loop) -> None:
    while loop.zc_stats().pinned_bytes:
        await asyncio.sleep(0.005)


async def receive(peer: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes from a blocking socket, read off the loop."""
    return await asyncio.to_thread(receive_now, peer, count)


def receive_now(peer: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        data = peer.recv(min(count, 1 << 20))
        if not data:
            break
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def collect() -> None:
    gc.collect()


class Recorder(asyncio.Protocol):
    """Writes down every call of the transport, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.data = bytearray()
        self.transport = None
        self.lost: list[BaseException | None] = []
        self.keep_open = False
        self.writing_paused = False

    def connection_made(self, transport) -> None:
        self.calls.append("connection_made")
        self.transport = transport

    def data_received(self, data) -> None:
        self.calls.append("data_received")
        self.data += data

    def eof_received(self):
        self.calls.append("eof_received")
        return self.keep_open

    def pause_writing(self) -> None:
        self.calls.append("pause_writing")
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.calls.append("resume_writing")
        self.writing_paused = False

    def connection_lost(self, exc) -> None:
        self.calls.append("connection_lost")
        self.lost.append(exc)


async def connect(
    factory: Callable[[], asyncio.BaseProtocol] = Recorder, family: str = "tcp", **sizes
):
    """(transport, protocol, peer) on the running loop; the peer is a blocking socket."""
    ours, peer = connected_pair(family, **sizes)
    try:
        transport, protocol = await asyncio.get_running_loop().create_connection(factory, sock=ours)
    except BaseException:
        ours.close()
        peer.close()
        raise
    return transport, protocol, peer


async def open_stream(family: str = "tcp", **sizes):
    """(reader, writer, peer) on the running loop; the peer is a blocking socket."""
    ours, peer = connected_pair(family, **sizes)
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()
        peer.close()
        raise
    return reader, writer, peer
