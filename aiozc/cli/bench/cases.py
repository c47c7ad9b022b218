"""What can be measured: one Case is one row. Owns the matrix of `send`, and why a row has to be left out.

Used by the subcommands and by sender.py. Sends nothing.
"""

from __future__ import annotations

import functools
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiozc
from aiozc.transports.datagram import DatagramTransport

SIZES = (1200, 4000, 8000, 65536)
PARTS = (1, 8, 32, 64)
PROTOCOLS = ("tcp", "udp")
FAMILIES = (4, 6)
MODES = ("copy", "gather-copy", "msg-zerocopy", "zc", "zc-epoll", "zc-registered", "sendfile")
REFERENCE = "reference"
CEILING = "c-gather"
SENDFILE_LEAST = 65536
# Payload of a datagram that leaves a device of 65,535 bytes MTU in one piece; fragments are copied.
UDP_MOST = {4: 65507, 6: 65487}
UDP_SEGMENTS = 64  # of one request by UDP_SEGMENT, in kernels before 6.9


@dataclass(frozen=True, slots=True)
class Case:
    """protocol: tcp, udp. size: bytes of one part. parts: buffers of one call.

    Over UDP a part is a datagram, and a call of several is one request by UDP_SEGMENT.
    """

    protocol: str
    family: int
    size: int
    parts: int
    mode: str

    @property
    def label(self) -> str:
        return f"{self.protocol}/{self.family} {self.parts} x {self.size} {self.mode}"


def matrix(
    sizes: Sequence[int],
    parts: Sequence[int],
    protocols: Sequence[str],
    families: Sequence[int],
    modes: Sequence[str],
) -> Iterator[Case]:
    """The rows. Those that would measure the same thing twice are not among them: copying by
    send() and sendfile know no parts."""
    for protocol in protocols:
        for family in families:
            for size in sizes:
                for count in parts:
                    for mode in modes:
                        if count != min(parts) and mode in ("copy", "sendfile"):
                            continue
                        if mode == "sendfile" and (protocol != "tcp" or size < SENDFILE_LEAST):
                            continue
                        single = mode in ("copy", "sendfile")
                        yield Case(protocol, family, size, 1 if single else count, mode)


@functools.cache
def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def why_not(case: Case) -> str | None:
    """Why this row cannot be measured here; None: it can."""
    if case.family == 6 and not _has_ipv6():
        return "this machine has no IPv6 address ::1"
    if case.protocol == "udp":
        most = UDP_MOST[case.family]
        if case.mode not in (REFERENCE, CEILING) and case.size * case.parts > most:
            return f"one UDP request holds at most {most} bytes"
        if case.size > most:
            return f"a datagram holds at most {most} bytes"
        if case.parts > UDP_SEGMENTS and case.mode != REFERENCE:
            return f"one UDP request holds at most {UDP_SEGMENTS} datagrams"
    if case.mode == CEILING and case.protocol != "tcp":
        return "the C program sends TCP"
    if case.mode == "zc-epoll" and not aiozc.capabilities().features["msg_zerocopy"]:
        return "no MSG_ZEROCOPY here"
    if case.mode in ("zc", "zc-registered"):
        found = aiozc.capabilities()
        if found.backend != "uring" or not found.zerocopy:
            return f"no zero-copy by io_uring here: {found.reason} (python -m aiozc doctor says what to do)"
        if case.protocol == "udp" and not hasattr(DatagramTransport, "zc_sendto"):
            return "this version of aiozc has no zc_sendto for datagrams"
        if case.mode == "zc-registered" and not hasattr(aiozc, "BufferPool"):
            return "this version of aiozc has no BufferPool, so no registered memory"
    return None


def slots(size: int, parts: int) -> int:
    """How many buffers of this size a sender goes round: whole calls, and at least 16 buffers."""
    return parts * max(1, -(-16 // parts))


@functools.lru_cache(maxsize=4)
def pattern(size: int, parts: int) -> bytes:
    """All buffers of a sender in a row. The stream is this over and over, so that a byte out of
    its place shows."""
    return random.Random(size).randbytes(size * slots(size, parts))
