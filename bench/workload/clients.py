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

    def connect(self, receive: int = 0) -> socket.socket:
        sock = socket.socket()
        if receive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", self.port))
        self.socks.append(sock)
        return sock

    def begin(self, sock: socket.socket, reading: Iterator[None]) -> None:
        """`reading` goes on whenever there is something to read, and yields when there is not."""
        next(reading)
        sock.setblocking(False)
        self.selector.register(sock, selectors.EVENT_READ, reading.__next__)

    def go(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.turn(left)

    def turn(self, left: float) -> None:
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
        with Path(options["file"]).open("rb") as file:
            self.wanted = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for number in range(options["connections"]):
            sock = self.connect()
            self.begin(sock, self.one(sock, random.Random(number), options["largest"]))

    def one(self, sock: socket.socket, choose: random.Random, largest: int) -> Iterator[None]:
        while True:
            length = choose.randint(1 << 20, largest)
            start = choose.randrange(len(self.wanted) - length)
            sock.send(RANGE.pack(start, length))
            asked = time.monotonic()
            end = start + length
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
        stalled, slow = max(1, count // 100), max(1, count // 20)
        random.seed(1)
        self.bodies = [random.randbytes(FRAME - STAMP.size) for _ in range(8)]
        self.pause = 5 / options["rate"]
        self.asleep: list[tuple[float, int, socket.socket, Any]] = []
        self.numbers = itertools.count()
        for number in range(count):
            late = number < stalled + slow
            sock = self.connect(FRAME // 2 if late else 0)
            if number >= stalled:
                self.begin(sock, self.one(sock, late))

    def one(self, sock: socket.socket, late: bool) -> Iterator[None]:
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
                reading = self.selector.unregister(sock).data
                wake = time.monotonic() + self.pause
                heapq.heappush(self.asleep, (wake, next(self.numbers), sock, reading))
            else:
                self.load.times.append((time.monotonic_ns() - stamp) / 1e9)

    def turn(self, left: float) -> None:
        now = time.monotonic()
        while self.asleep and self.asleep[0][0] <= now:
            _, _, sock, reading = heapq.heappop(self.asleep)
            self.selector.register(sock, selectors.EVENT_READ, reading)
        super().turn(min(left, self.asleep[0][0] - now) if self.asleep else left)


class CacheClient(Client):
    """So many requests at once on each connection, nine GETs to a SET; a value is one byte all over."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        super().__init__(port)
        self.values = [bytes([number]) * VALUE for number in range(256)]
        for number in range(options["connections"]):
            sock = self.connect()
            self.begin(sock, self.one(sock, random.Random(number), options["pipeline"]))

    def one(self, sock: socket.socket, choose: random.Random, pipeline: int) -> Iterator[None]:
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


CLIENTS: dict[str, Any] = {
    "weights": WeightsClient,
    "broadcast": BroadcastClient,
    "cache": CacheClient,
}
