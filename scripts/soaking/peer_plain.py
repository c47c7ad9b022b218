"""A peer of plain sockets: one thread, one epoll, no event loop of anybody.

    python -m soaking.peer_plain ORDERS

Started by soak.py. Plays the peer's part of every plan, checks each byte that arrives. See peer.py.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict

from . import pattern, peer, plan

FAST = 256 * 1024
_GONE = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


class World:
    def __init__(self, orders: peer.Orders) -> None:
        self.orders = orders
        self.epoll = select.epoll()
        self.ready: dict[int, Callable[[int], None]] = {}
        self.masks: dict[int, int] = {}
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.commands = b""
        self.going = True
        self.listeners: list[socket.socket] = []
        addresses = {}
        for family in orders.families:
            sock = peer.listen(family, os.path.join(orders.directory, "plain"))
            self.listeners.append(sock)
            addresses[family] = peer.address(sock)
            self.watch(sock, select.EPOLLIN, lambda _mask, s=sock: self.accept(s))
        os.set_blocking(0, False)
        self.ready[0] = self.command
        self.epoll.register(0, select.EPOLLIN)
        peer.say({"listening": addresses})

    def watch(self, sock: socket.socket, mask: int, call: Callable[[int], None]) -> None:
        """Mask 0 takes it out: EPOLLHUP cannot be masked and would spin."""
        fd = sock.fileno()
        self.ready[fd] = call
        before = self.masks.get(fd, 0)
        if mask == before:
            return
        if not mask:
            self.epoll.unregister(fd)
        elif before:
            self.epoll.modify(fd, mask)
        else:
            self.epoll.register(fd, mask)
        self.masks[fd] = mask

    def forget(self, sock: socket.socket) -> None:
        if self.masks.pop(sock.fileno(), 0):
            self.epoll.unregister(sock.fileno())
        self.ready.pop(sock.fileno(), None)
        sock.close()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self.count), call))

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                sock, _ = listener.accept()
                sock.setblocking(False)
                Connection(self, sock, None)

    def dial(self, number: int) -> None:
        what = plan.make(self.orders.seed, number, self.orders.families)
        sock = peer.dialler(what.family)
        peer.set_rcvbuf(sock, what.rcvbuf)
        error = sock.connect_ex(peer.target(self.orders.server[what.family]))
        if error not in (0, errno.EINPROGRESS):
            sock.close()
            said = peer.Report(number, end="own", wrong=f"cannot connect: {os.strerror(error)}")
            peer.say(asdict(said))
            return
        Connection(self, sock, what)

    def command(self, _mask: int) -> None:
        data = os.read(0, 65536)
        if not data:
            self.going = False
        *lines, self.commands = (self.commands + data).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"dial":
                self.dial(int(number))
            else:
                self.going = False

    def run(self) -> None:
        while self.going:
            now = time.monotonic()
            while self.timers and self.timers[0][0] <= now:
                heapq.heappop(self.timers)[2]()
            wait = self.timers[0][0] - now if self.timers else 1.0
            for fd, mask in self.epoll.poll(max(0.0, min(wait, 1.0))):
                call = self.ready.get(fd)
                if call is not None:
                    call(mask)


class Connection:
    """`plan` is None until the header of an accepted one was read."""

    def __init__(self, world: World, sock: socket.socket, what: plan.Plan | None) -> None:
        self.world = world
        self.sock = sock
        self.plan = what
        self.header = b""
        self.handshake = b"" if what is None else what.number.to_bytes(plan.HEADER, "big")
        self.began = 0.0
        self.open = True
        self.reading = True
        self.sending = False
        self.stalled = False
        self.eof_seen = False
        self.said = peer.Report(what.number if what else -1)
        self.update()

    # -- what is wanted --

    def update(self) -> None:
        if self.open:
            mask = select.EPOLLIN if self.reading and not self.eof_seen else 0
            if self.handshake or (self.sending and self.left()):
                mask |= select.EPOLLOUT
            self.world.watch(self.sock, mask, self.on_ready)

    def left(self) -> int:
        return self.plan.sends - self.said.sent if self.plan else 0

    def begin(self) -> None:
        """Both sides know the number."""
        what = self.plan
        assert what is not None
        peer.set_rcvbuf(self.sock, what.rcvbuf)
        self.began = time.monotonic()
        self.sending = not what.late
        self.reading = what.reads != "never"
        if what.peer_end:
            self.world.later(what.peer_end_after, self.end_it)
        self.all_sent()

    def all_sent(self) -> None:
        if self.handshake or self.left() or not self.sending or not self.plan:
            return
        if self.eof_seen:
            self.finish("eof")
        elif self.plan.half_closes:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    # -- what happens --

    def on_ready(self, mask: int) -> None:
        try:
            if mask & ~select.EPOLLIN and (self.handshake or (self.sending and self.left())):
                self.send()
            if self.open and self.reading and not self.eof_seen and mask & ~select.EPOLLOUT:
                self.receive()
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in _GONE:
                self.said.wrong = self.said.wrong or f"{type(error).__name__}: {error}"
            self.finish("reset")
        self.update()

    def send(self) -> None:
        if self.handshake:
            self.handshake = self.handshake[self.sock.send(self.handshake) :]
            self.all_sent()
        elif self.plan:
            size = min(self.left(), self.plan.chunk)
            data = pattern.piece(2 * self.plan.number + 1, self.said.sent, size)
            self.said.sent += self.sock.send(data)
            self.all_sent()

    def receive(self) -> None:
        if self.plan is None:
            data = self.sock.recv(plan.HEADER - len(self.header))
            self.header += data
            if not data:
                self.finish("eof")
            elif len(self.header) == plan.HEADER:
                self.said.number = int.from_bytes(self.header, "big")
                orders = self.world.orders
                self.plan = plan.make(orders.seed, self.said.number, orders.families)
                self.handshake = plan.ACK
                self.begin()
            return
        if not self.began:
            data = self.sock.recv(len(plan.ACK))
            if data == plan.ACK:
                self.begin()
            else:
                self.said.wrong = f"{data!r} instead of the acknowledgement"
                self.finish("eof")
            return
        slow = self.plan.reads == "slow" and time.monotonic() < self.began + plan.PATIENCE
        data = self.sock.recv(max(256, self.plan.chunk // 8) if slow else FAST)
        if data:
            self.check(data)
        else:
            self.eof_seen = True
            self.sending = True
            self.all_sent()
        if not self.open:
            return
        if slow:
            self.rest(0.01)
        elif self.plan.reads == "stall" and not self.stalled:
            self.stalled = True
            self.rest(self.plan.peer_end_after)

    def check(self, data: bytes) -> None:
        assert self.plan is not None
        stream = 2 * self.plan.number
        if not self.said.wrong and pattern.first_wrong(stream, self.said.got, data) is not None:
            self.said.wrong = pattern.describe(stream, self.said.got, data)
        self.said.got += len(data)
        if self.plan.peer_end and self.said.got >= self.plan.peer_end_bytes:
            self.end_it()

    def rest(self, seconds: float) -> None:
        self.reading = False
        self.world.later(seconds, self.rested)

    def rested(self) -> None:
        self.reading = True
        self.update()

    # -- its end --

    def end_it(self) -> None:
        if self.open:
            assert self.plan is not None
            if self.plan.peer_end == "reset":
                peer.set_reset(self.sock)
            self.finish("own")

    def finish(self, how: str) -> None:
        if not self.open:
            return
        self.open = False
        self.world.forget(self.sock)
        self.said.end = how
        if self.said.number >= 0:
            peer.say(asdict(self.said))


if __name__ == "__main__":
    World(peer.Orders.read()).run()
