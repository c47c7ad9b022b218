"""Sending without a loop: the rows that zero-copy is compared with, by plain system calls.

Called by sender.py. One blocking socket, one thread: the cheapest way that each call allows in Python.

Never: changes a buffer, so that MSG_ZEROCOPY needs no wait before the next round over them.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Callable

from aiozc.cli.bench import cases, sockets
from aiozc.cli.bench.errors import RowFailed
from aiozc.cli.bench.job import Job, Result

_SO_ZEROCOPY, _MSG_ZEROCOPY = 60, 0x4000000
_UDP_SEGMENT = 103
_FROM_ZEROCOPY, _SAYS_COPIED = 5, 1  # SO_EE_ORIGIN_ZEROCOPY, SO_EE_CODE_ZEROCOPY_COPIED
_REAP_EVERY = 16  # requests
_LOOK_EVERY = 8  # requests between two looks at the clock

Group = list[bytes]


def run(job: Job) -> Result:
    data = cases.pattern(job.size, job.parts)
    # One skb has room for 17 pieces of memory: datagrams that go together lie together.
    size = job.size
    if job.protocol == "udp" and job.mode == "msg-zerocopy":
        size *= job.parts
    buffers = [data[at : at + size] for at in range(0, len(data), size)]
    together = job.size * job.parts // size
    groups = [buffers[at : at + together] for at in range(0, len(buffers), together)]
    with sockets.connect(job) as sock:
        notices = Notices(sock, job.size * job.parts) if job.mode == "msg-zerocopy" else None
        send = _sender(job, sock, data, notices)
        throttle = sockets.Throttle(job)
        device = sockets.Dropped(job) if job.device else None
        nbytes = requests = 0
        cpu, start = sockets.Cpu(), time.monotonic()
        end = start + job.seconds
        for group in itertools.cycle(groups):
            nbytes += send(group)
            requests += 1
            throttle.wait(nbytes)
            if requests % _LOOK_EVERY == 0 and time.monotonic() >= end:
                break
        limit = time.monotonic() + sockets.PATIENCE
        while sockets.unsent(sock) or (notices and notices.outstanding):
            if time.monotonic() > limit:
                raise RowFailed("what was sent did not leave in time")
            if notices:
                notices.reap()
            time.sleep(0.0005)
        result = Result(
            nbytes=nbytes,
            sends=nbytes // job.size,
            requests=requests,
            seconds=time.monotonic() - start,
            cpu=cpu.total(),
            user=cpu.user(),
            parts_per_request=float(job.parts),
            engine="bare sockets",
        )
        if job.protocol == "tcp":
            acked, result.segments = sockets.tcp_counts(sock)
            result.arrived = acked
        else:
            result.segments = result.sends
            if device:
                result.arrived = device.payload(requests)
        if notices is None:
            result.path = "copied" if job.mode != "sendfile" else "unknown"
        else:
            result.notifications = notices.count
            result.peak_pinned = notices.peak
            result.path = notices.path
        return result


def _sender(
    job: Job, sock: socket.socket, data: bytes, notices: Notices | None
) -> Callable[[Group], int]:
    total = job.size * job.parts
    control: list[tuple[int, int, bytes]] = []
    if job.protocol == "udp" and job.parts > 1:
        control.append((socket.SOL_UDP, _UDP_SEGMENT, struct.pack("H", job.size)))

    def rest(done: int, group: Group) -> int:
        """A signal may cut a blocking send short."""
        if done < total:
            sock.sendall(b"".join(group)[done:])
        return total

    def copy(group: Group) -> int:
        return rest(sock.send(group[0]), group)

    def gather(group: Group) -> int:
        return rest(sock.sendmsg(group, control), group)

    def zerocopy(group: Group) -> int:
        assert notices is not None
        return rest(notices.send(group, control), group)

    if job.mode == "sendfile":
        return _file_sender(sock, job, data)
    return {"copy": copy, "gather-copy": gather, "msg-zerocopy": zerocopy}[job.mode]


def _file_sender(sock: socket.socket, job: Job, data: bytes) -> Callable[[Group], int]:
    """From memory that is a file: what a page cache would give."""
    file = os.memfd_create("aiozc-bench")
    for at in range(0, len(data), 1 << 20):
        os.write(file, data[at : at + (1 << 20)])
    offsets = itertools.cycle(range(0, len(data), job.size))

    def send(_group: Group) -> int:
        at = next(offsets)
        done = 0
        while done < job.size:
            done += os.sendfile(sock.fileno(), file, at + done, job.size - done)
        return done

    return send


class Notices:
    """MSG_ZEROCOPY and its error queue, which tells which requests' memory is free, and whether it copied."""

    def __init__(self, sock: socket.socket, request: int) -> None:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ZEROCOPY, 1)
        self._sock = sock
        self._request = request  # bytes
        self._poll = select.poll()
        self._poll.register(sock, 0)  # POLLERR is always told
        self.outstanding = self.peak = self.count = 0
        self._said: set[str] = set()
        self._sent = 0

    @property
    def path(self) -> str:
        return self._said.copy().pop() if len(self._said) == 1 else "mixed"

    def send(self, group: Group, control: list[tuple[int, int, bytes]]) -> int:
        while True:
            try:
                done = self._sock.sendmsg(group, control, _MSG_ZEROCOPY)
                break
            except OSError as error:
                # The limit of notices (net.core.optmem_max): wait for some.
                if error.errno != errno.ENOBUFS:
                    raise
                if not self.outstanding:
                    raise RowFailed(
                        "MSG_ZEROCOPY has no room for one request: raise RLIMIT_MEMLOCK (ulimit -l)"
                    ) from error
                self._poll.poll(1000)
                self.reap()
        self._sent += 1
        self.outstanding += 1
        self.peak = max(self.peak, self.outstanding * self._request)
        if self._sent % _REAP_EVERY == 0:
            self.reap()
        return done

    def reap(self) -> None:
        while True:
            try:
                _, control, _, _ = self._sock.recvmsg(
                    0, 512, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            for _level, _kind, data in control:
                number, origin, _type, code, _pad, first, last = struct.unpack("IBBBBII", data[:16])
                if origin == _FROM_ZEROCOPY and number == 0:
                    self.count += 1
                    self.outstanding -= (last - first & 0xFFFFFFFF) + 1
                    self._said.add("copied" if code & _SAYS_COPIED else "zero-copy")
