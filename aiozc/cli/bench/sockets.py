"""What every sender needs of its socket: connecting, flow control, and knowing that all has gone.

Called by bare.py and engine.py, in the sending process.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import resource
import socket
import struct
import termios
import time
from pathlib import Path
from typing import Any

from aiozc.cli.bench.errors import RowFailed
from aiozc.cli.bench.job import Job

# Offsets in struct tcp_info, see linux/tcp.h.
_BYTES_ACKED, _DATA_SEGS_OUT, _TCP_INFO = 120, 156, 232
PATIENCE = 5.0  # seconds for what is on its way


def connect(job: Job) -> socket.socket:
    family = socket.AF_INET if job.family == 4 else socket.AF_INET6
    kind = socket.SOCK_STREAM if job.protocol == "tcp" else socket.SOCK_DGRAM
    sock = socket.socket(family, kind)
    sock.settimeout(PATIENCE)
    sock.connect((job.address, job.port))
    sock.settimeout(None)
    if job.protocol == "tcp":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as asyncio has it
    return sock


def unsent(sock: Any) -> int:
    """Bytes that are not acknowledged (TCP), or that no device has taken (UDP)."""
    answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    return int(struct.unpack("i", answer)[0])


def tcp_counts(sock: Any) -> tuple[int, int]:
    """Bytes acknowledged, and segments sent that carried data."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
    if len(info) < _DATA_SEGS_OUT + 4:
        raise RowFailed("this kernel's TCP_INFO does not count acknowledged bytes and segments")
    (acked,) = struct.unpack_from("Q", info, _BYTES_ACKED)
    (segments,) = struct.unpack_from("I", info, _DATA_SEGS_OUT)
    return acked - 1, segments  # the SYN counts as one


class Dropped:
    """Counts what a dropping device was given: `dummy` counts it as sent, `ifb` as received."""

    def __init__(self, job: Job) -> None:
        self._base = Path(f"/sys/class/net/{job.device}/statistics")
        # Ethernet, IP, UDP: once for each request, which reaches the device in one piece.
        self._headers = 14 + (20 if job.family == 4 else 40) + 8
        self._before = self._bytes()

    def _bytes(self) -> int:
        return sum(int((self._base / name).read_text()) for name in ("tx_bytes", "rx_bytes"))

    def payload(self, requests: int) -> int:
        return self._bytes() - self._before - requests * self._headers


class Cpu:
    """CPU time of this process since this was made."""

    def __init__(self) -> None:
        self._start = resource.getrusage(resource.RUSAGE_SELF)

    def user(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime - self._start.ru_utime

    def total(self) -> float:
        now = resource.getrusage(resource.RUSAGE_SELF)
        return now.ru_utime + now.ru_stime - self._start.ru_utime - self._start.ru_stime


class Throttle:
    """Keeps datagrams from outrunning a receiver on this machine, which would lose them. Elsewhere: nothing."""

    def __init__(self, job: Job) -> None:
        self._count = mmap.mmap(job.counter, 8, prot=mmap.PROT_READ) if job.counter >= 0 else None
        # What fits a default receive buffer, as the kernel charges it.
        self._most = max(65536, 2 * job.size * job.parts)

    def must_wait(self, sent: int) -> bool:
        if self._count is None:
            return False
        (received,) = struct.unpack("Q", self._count[:8])
        return bool(sent - received > self._most)

    async def wait_here(self, sent: int) -> None:
        """The same as wait(), on a loop."""
        end = time.monotonic() + PATIENCE
        while self.must_wait(sent):
            if time.monotonic() > end:
                raise RowFailed("the receiver did not get the datagrams: some were lost")
            await asyncio.sleep(50e-6)

    def wait(self, sent: int) -> None:
        end = time.monotonic() + PATIENCE
        while self.must_wait(sent):
            if time.monotonic() > end:
                raise RowFailed("the receiver did not get the datagrams: some were lost")
            time.sleep(50e-6)


def pin(cpu: int) -> None:
    if cpu >= 0:
        os.sched_setaffinity(0, {cpu})
