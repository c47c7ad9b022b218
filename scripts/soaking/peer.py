"""What both kinds of peer share: their addresses, their orders, their reports.

A peer process listens on every family, says where in one line of JSON, and then takes orders on its standard
input: "dial N" (connect to the loop under test, as connection N) and "quit". For each connection whose number
it knows it writes one report. Used by peer_plain.py and peer_asyncio.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
from dataclasses import asdict, dataclass
from typing import Any

LINGER_0 = struct.pack("ii", 1, 0)
BACKLOG = 1024


@dataclass(slots=True)
class Report:
    number: int
    got: int = 0  # bytes of our stream, all of them right up to `wrong`
    sent: int = 0
    end: str = ""  # eof, reset; own: it ended the connection itself
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Orders:
    """The command line of a peer."""

    seed: int
    families: tuple[str, ...]
    server: dict[str, Any]  # family: address of the loop under test
    directory: str  # for Unix sockets

    @classmethod
    def read(cls) -> Orders:
        said = json.loads(sys.argv[1])
        return cls(said["seed"], tuple(said["families"]), said["server"], said["directory"])

    def text(self) -> str:
        return json.dumps(asdict(self))


def listen(family: str, path: str) -> socket.socket:
    if family == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
    else:
        sock = socket.socket(socket.AF_INET if family == "tcp" else socket.AF_INET6)
        sock.bind(("127.0.0.1" if family == "tcp" else "::1", 0))
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> Any:
    """As JSON carries it."""
    name = sock.getsockname()
    return name if isinstance(name, str) else list(name[:2])


def dialler(family: str) -> socket.socket:
    kinds = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6, "unix": socket.AF_UNIX}
    sock = socket.socket(kinds[family])
    sock.setblocking(False)
    return sock


def target(address: Any) -> Any:
    return address if isinstance(address, str) else tuple(address)


def set_rcvbuf(sock: Any, size: int) -> None:
    if size:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def set_reset(sock: Any) -> None:
    """Closing it resets the connection. (A Unix socket has no such thing: it just closes.)"""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)


def say(what: dict[str, Any]) -> None:
    """One line, whole, also while the reader is slow."""
    line = json.dumps(what).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]
