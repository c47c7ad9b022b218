"""Connections to the server of idle.py: some that say nothing, some that echo without pause. One plain epoll.

    python -m soaking.idle_clients PORT FIRST_ADDRESS

Told by lines on its standard input: "idle N", "busy N" (open so many more), "wake" (one echo on every idle one,
all at once), "pause" (the busy ones stop), "close" (all). Each is answered by one line. Every echo is checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import time
from typing import Any

from . import peer
from .pattern import describe, first_wrong, piece

SIZE = 1024
ADDRESSES = 8  # source addresses of one process: each has a range of ports of its own
AT_ONCE = 200  # connections that are being opened
LIMIT = 60.0  # seconds for any order
BIND_NO_PORT = 24  # IP_BIND_ADDRESS_NO_PORT: the port is chosen when the whole tuple is known


class Connection:
    __slots__ = ("busy", "echoes", "got", "number", "out", "sock", "stream_pos", "up")

    def __init__(self, number: int, sock: socket.socket, busy: bool) -> None:
        self.number = number
        self.sock = sock
        self.busy = busy
        self.up = False
        self.stream_pos = 0  # of the message that is on its way
        self.got = SIZE  # of it
        self.out = b""
        self.echoes = 0


class Clients:
    def __init__(self, port: int, first: int) -> None:
        self.port = port
        self.first = first
        self.epoll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.errors: list[str] = []
        self.opened = self.opening = 0
        self.running = False
        self.commands = b""
        os.set_blocking(0, False)
        self.epoll.register(0, select.EPOLLIN)

    # -- connections --

    def open(self, busy: bool) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, BIND_NO_PORT, 1)
        sock.bind((f"127.0.0.{self.first + self.opened % ADDRESSES}", 0))
        error = sock.connect_ex(("127.0.0.1", self.port))
        if error not in (0, errno.EINPROGRESS):
            self.errors.append(f"connect: {os.strerror(error)}")
        connection = Connection(self.first * 1_000_000 + self.opened, sock, busy)
        self.opened += 1
        self.opening += 1
        self.connections[sock.fileno()] = connection
        self.epoll.register(sock, select.EPOLLIN | select.EPOLLOUT)

    def begin(self, c: Connection) -> None:
        """Send the next message."""
        c.got = 0
        c.out = piece(c.number, c.stream_pos, SIZE)
        self.push(c)

    def push(self, c: Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            c.out = c.out[c.sock.send(c.out) :]
        if c.out:
            self.epoll.modify(c.sock, select.EPOLLIN | select.EPOLLOUT)

    def on_ready(self, c: Connection, mask: int) -> None:
        try:
            if mask & select.EPOLLOUT:
                self.epoll.modify(c.sock, select.EPOLLIN)
                if not c.up:
                    c.up = True
                    self.opening -= 1
                elif c.out:
                    self.push(c)
            if mask & ~select.EPOLLOUT:
                self.receive(c)
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(c, str(error))

    def receive(self, c: Connection) -> None:
        data = c.sock.recv(65536)
        if not data:
            self.fail(c, "end of file")
            return
        at = c.stream_pos + c.got
        if c.got + len(data) > SIZE:
            self.fail(c, f"{len(data)} bytes that nobody asked for")
        elif first_wrong(c.number, at, data) is not None:
            self.fail(c, describe(c.number, at, data))
        else:
            c.got += len(data)
            if c.got == SIZE:
                c.echoes += 1
                c.stream_pos += SIZE
                if c.busy and self.running:
                    self.begin(c)

    def fail(self, c: Connection, why: str) -> None:
        self.errors.append(f"connection {c.number} ({'busy' if c.busy else 'idle'}): {why}")
        if not c.up:
            self.opening -= 1
        self.drop(c)

    def drop(self, c: Connection) -> None:
        del self.connections[c.sock.fileno()]
        self.epoll.unregister(c.sock)
        c.sock.close()

    # -- orders --

    def turn(self, wait: float = 0.5) -> None:
        for fd, mask in self.epoll.poll(wait):
            c = self.connections.get(fd)
            if c is not None:
                self.on_ready(c, mask)
            elif fd == 0:
                self.commands += os.read(0, 4096) or b"quit\n"

    def until(self, true: Any) -> None:
        limit = time.monotonic() + LIMIT
        while not true():
            before = time.monotonic()
            if before > limit:
                self.errors.append("an order was not carried out in time")
                return
            self.turn(0.1)
            if (took := time.monotonic() - before) > 1.0:
                limit += took  # the machine stood still

    def add(self, count: int, busy: bool) -> None:
        for _ in range(count):
            self.open(busy)
            if self.opening >= AT_ONCE:
                self.until(lambda: self.opening < AT_ONCE // 2)
        self.until(lambda: self.opening == 0)
        if busy:
            self.running = True
            for c in list(self.connections.values()):
                if c.busy and c.got == SIZE:
                    self.begin(c)

    def waiting(self) -> bool:
        return any(c.got < SIZE for c in self.connections.values())

    def order(self, word: str, count: int) -> dict[str, Any]:
        began = time.monotonic()
        if word in ("idle", "busy"):
            self.add(count, word == "busy")
        elif word == "pause":
            self.running = False
            self.until(lambda: not self.waiting())
        elif word == "wake":
            for c in list(self.connections.values()):
                self.begin(c)
            self.until(lambda: not self.waiting())
        elif word == "close":
            for c in list(self.connections.values()):
                self.drop(c)
        busy = [c.echoes for c in self.connections.values() if c.busy]
        return {
            "open": len(self.connections),
            "echoes": sum(busy),
            "least": min(busy, default=0),
            "seconds": time.monotonic() - began,
            "errors": self.errors,
        }

    def run(self) -> None:
        peer.say({})
        while True:
            while b"\n" in self.commands:
                line, _, self.commands = self.commands.partition(b"\n")
                word, _, count = line.decode().partition(" ")
                if word == "quit":
                    return
                peer.say(self.order(word, int(count or 0)))
            self.turn()


if __name__ == "__main__":
    Clients(int(sys.argv[1]), int(sys.argv[2])).run()
