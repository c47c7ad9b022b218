"""The other ends on loopback: one thread, plain sockets, and every byte compared. Run by workloads.py itself.

Each client drives one service of services.py for a warm-up and a window, and gives requests, bytes and times.
CorruptBytes ends everything: no figure stands beside a wrong byte.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import random
import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cffi

from .services import FRAME, GET, KEYS, RANGE, REQUEST, SET, STAMP, VALUE

_ffi = cffi.FFI()
_ffi.cdef("int memcmp(const void *, const void *, size_t);")
_libc: Any = _ffi.dlopen(None)


HTTP_RANGE = b"GET /weights HTTP/1.1\r\nHost: x\r\nRange: bytes=%d-%d\r\n\r\n"

# What a client does with one socket: see Client.begin.
Reading = Iterator["float | None"]


class CorruptBytes(Exception):
    pass


def same(one: Any, other: Any, where: str) -> None:
    """Both are buffers of one size. memoryviews compare their elements one by one, which is slow."""
    a, b = _ffi.from_buffer(one), _ffi.from_buffer(other)
    if len(a) != len(b) or _libc.memcmp(a, b, len(a)):
        raise CorruptBytes(f"wrong bytes: {where}")


@dataclass
class Load:
    """What a client did between two moments."""

    requests: int = 0
    bytes: int = 0
    times: list[float] = field(default_factory=list)

    def p99(self) -> float:
        return sorted(self.times)[int(len(self.times) * 0.99)] if self.times else 0.0


class Client:
    """Turns over sockets until a moment; `load` begins anew with the window."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.load = Load()
        self.selector = selectors.DefaultSelector()
        self.socks: list[socket.socket] = []
        self.room = memoryview(bytearray(1 << 20))
        self.asleep: list[tuple[float, int, socket.socket, Any]] = []
        self.numbers = itertools.count()

    def connect(self, receive: int = 0) -> socket.socket:
        sock = socket.socket()
        if receive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", self.port))
        self.socks.append(sock)
        return sock

    def begin(self, sock: socket.socket, reading: Reading) -> None:
        """`reading` goes on whenever there is something to read; it yields when there is not, or seconds for
        which it does not want to read."""
        next(reading)
        sock.setblocking(False)
        self.selector.register(sock, selectors.EVENT_READ, lambda: self.step(sock, reading))

    def step(self, sock: socket.socket, reading: Reading) -> None:
        if pause := next(reading):
            data = self.selector.unregister(sock).data
            wake = time.monotonic() + pause
            heapq.heappush(self.asleep, (wake, next(self.numbers), sock, data))

    def go(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.turn(left)

    def turn(self, left: float) -> None:
        now = time.monotonic()
        while self.asleep and self.asleep[0][0] <= now:
            _, _, sock, data = heapq.heappop(self.asleep)
            self.selector.register(sock, selectors.EVENT_READ, data)
        if self.asleep:
            left = min(left, self.asleep[0][0] - now)
        for key, _ in self.selector.select(left):
            key.data()

    def close(self) -> None:
        for sock in self.socks:
            sock.close()
        self.selector.close()


class WeightsClient(Client):
    """Random ranges, the next one as soon as one is complete."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        super().__init__(port)
        self.http = options.get("http", False)
        with Path(options["file"]).open("rb") as file:
            self.wanted = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for number in range(options["connections"]):
            sock = self.connect()
            self.begin(sock, self.one(sock, random.Random(number), options["largest"]))

    def head(self, sock: socket.socket) -> Reading:
        """nginx's: byte by byte, so that the body begins where it is looked for."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            try:
                head += sock.recv(1)
            except BlockingIOError:
                yield
        if not head.startswith(b"HTTP/1.1 206"):
            raise CorruptBytes(f"the answer begins with {head[:40]!r}")

    def one(self, sock: socket.socket, choose: random.Random, largest: int) -> Reading:
        while True:
            length = choose.randint(1 << 20, largest)
            start = choose.randrange(len(self.wanted) - length)
            asked = time.monotonic()
            end = start + length
            if self.http:
                sock.send(HTTP_RANGE % (start, end - 1))
                yield
                yield from self.head(sock)
            else:
                sock.send(RANGE.pack(start, length))
            while start < end:
                yield
                n = sock.recv_into(self.room[: end - start])
                if not n:
                    raise CorruptBytes("the server closed in the middle of a range")
                same(self.room[:n], self.wanted[start : start + n], f"at {start} of the file")
                start += n
                self.load.bytes += n
            self.load.requests += 1
            self.load.times.append(time.monotonic() - asked)


class BroadcastClient(Client):
    """Subscribers: most read at once, some late, some never."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        super().__init__(port)
        count = options["connections"]
        stalled = options.get("stalled", max(1, count // 100))
        slow = options.get("slow", max(1, count // 20))
        random.seed(1)
        self.bodies = [random.randbytes(FRAME - STAMP.size) for _ in range(8)]
        self.pause = 5 / options["rate"]
        for number in range(count):
            late = number < stalled + slow
            sock = self.connect(FRAME // 2 if late else 0)
            if number >= stalled:
                self.begin(sock, self.one(sock, late))

    def one(self, sock: socket.socket, late: bool) -> Reading:
        last = -1
        frame = memoryview(bytearray(FRAME))
        while True:
            filled = 0
            while filled < FRAME:
                yield
                n = sock.recv_into(frame[filled:])
                if not n:
                    raise CorruptBytes("the server closed a subscriber")
                filled += n
            number, stamp = STAMP.unpack_from(frame)
            if number <= last:
                raise CorruptBytes(f"frame {number} after {last}")
            same(frame[STAMP.size :], self.bodies[number % 8], f"in frame {number}")
            last = number
            self.load.requests += 1
            self.load.bytes += FRAME
            if late:
                yield self.pause
            else:
                self.load.times.append((time.monotonic_ns() - stamp) / 1e9)


class CacheClient(Client):
    """So many requests at once on each connection, nine GETs to a SET; a value is one byte all over."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        super().__init__(port)
        self.values = [bytes([number]) * VALUE for number in range(256)]
        for number in range(options["connections"]):
            sock = self.connect()
            self.begin(sock, self.one(sock, random.Random(number), options["pipeline"]))

    def one(self, sock: socket.socket, choose: random.Random, pipeline: int) -> Reading:
        value = memoryview(bytearray(VALUE + 1))
        while True:
            asked, sets = [], []
            for _ in range(pipeline):
                key = choose.randrange(KEYS)
                what = SET if choose.random() < 0.1 else GET
                asked.append(REQUEST.pack(what, key))
                sets.append(what == SET)
                if what == SET:
                    asked.append(self.values[choose.randrange(256)])
            begun = time.monotonic()
            sock.setblocking(True)
            sock.sendall(b"".join(asked))
            sock.setblocking(False)
            for is_set in sets:
                wanted = 1 if is_set else VALUE + 1
                filled = 0
                while filled < wanted:
                    try:
                        n = sock.recv_into(value[filled:wanted])
                    except BlockingIOError:
                        yield
                        continue
                    if not n:
                        raise CorruptBytes("the server closed in the middle of an answer")
                    filled += n
                if value[0] != (b"+" if is_set else b"V")[0]:
                    raise CorruptBytes(f"an answer begins with {bytes(value[:1])!r}")
                if not is_set:
                    same(value[1:], self.values[value[1]], "a value is of two pieces")
                self.load.requests += 1
                self.load.bytes += wanted
            self.load.times.append(time.monotonic() - begun)


class ProxyClient(Client):
    """Pairs through a proxy, and the origin behind it; one third of the clients reads slowly."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Without a port at first: the proxy has to know the origin's."""
        super().__init__(0)
        self.size = options["size"]
        self.pairs = options["pairs"]
        self.certificate = options["certificate"]
        self.body = memoryview(random.Random(1).randbytes(self.size))
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.origin = self.listener.getsockname()[1]
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        peer, _ = self.listener.accept()
        self.socks.append(peer)
        peer.setblocking(False)
        reading = self.answer(peer)
        next(reading)
        self.selector.register(peer, selectors.EVENT_READ, lambda: next(reading, None))

    def answer(self, peer: socket.socket) -> Reading:
        while True:
            yield
            if not peer.recv(1):
                self.selector.unregister(peer)
                return
            sent = 0
            key = self.selector.modify(
                peer, selectors.EVENT_WRITE, self.selector.get_key(peer).data
            )
            while sent < self.size:
                yield
                sent += peer.send(self.body[sent : sent + (1 << 20)])
            self.selector.modify(peer, selectors.EVENT_READ, key.data)

    def connect_all(self, port: int) -> None:
        self.port = port
        context = None
        if self.certificate:
            context = ssl.create_default_context(cafile=self.certificate)
        for number in range(self.pairs):
            slow = number % 3 == 0
            sock = self.connect(128 * 1024 if slow else 0)
            if context is not None:
                self.socks.remove(sock)
                sock = context.wrap_socket(sock, server_hostname="localhost")
                self.socks.append(sock)
            self.begin(sock, self.one(sock, slow))

    def one(self, sock: socket.socket, slow: bool) -> Reading:
        while True:
            asked = time.monotonic()
            try:
                sock.send(b"R")
            except ssl.SSLWantWriteError:
                raise CorruptBytes("one byte could not be sent") from None
            filled = 0
            yield
            while filled < self.size:
                try:
                    n = sock.recv_into(
                        self.room[: min(65536 if slow else 1 << 20, self.size - filled)]
                    )
                except (BlockingIOError, ssl.SSLWantReadError):
                    yield
                    continue
                if not n:
                    raise CorruptBytes("the proxy closed in the middle of a body")
                same(self.room[:n], self.body[filled : filled + n], f"at {filled} of a body")
                filled += n
                self.load.bytes += n
                if slow and filled < self.size:
                    yield 0.02 * n / 65536  # 3 MB/s
            self.load.requests += 1
            if not slow:
                self.load.times.append(time.monotonic() - asked)


class WebSocketClient(Client):
    """Subscribers that read every message as it comes."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        super().__init__(port)
        self.message = bytes(range(256)) * (options["size"] // 256)
        wanted = b"\x82\x7f" + options["size"].to_bytes(8, "big")
        for _ in range(options["connections"]):
            sock = self.connect()
            sock.sendall(
                b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            )
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += sock.recv(1)
            if not head.startswith(b"HTTP/1.1 101"):
                raise CorruptBytes(f"no WebSocket: {head[:60]!r}")
            self.begin(sock, self.one(sock, wanted))

    def one(self, sock: socket.socket, wanted: bytes) -> Reading:
        frame = memoryview(bytearray(len(wanted) + len(self.message)))
        while True:
            filled = 0
            while filled < len(frame):
                yield
                n = sock.recv_into(frame[filled:])
                if not n:
                    raise CorruptBytes("the server closed a subscriber")
                filled += n
            same(frame[: len(wanted)], wanted, "the head of a message")
            same(frame[len(wanted) :], self.message, "in a message")
            self.load.requests += 1
            self.load.bytes += len(self.message)


CLIENTS: dict[str, Any] = {
    "websocket": WebSocketClient,
    "weights": WeightsClient,
    "broadcast": BroadcastClient,
    "cache": CacheClient,
}
