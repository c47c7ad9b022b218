"""What the machine says about itself: limits, sysctls, seccomp, captures. Facts only, no judgement.

Called by doctor/__init__.py. Everything is read from /proc and from this process's limits; what cannot
be read is None, for a container may hide any of it.
Never: starts a program, makes a socket, needs a privilege.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

_ETH_P_ALL = 0x0003


@dataclass(frozen=True, slots=True)
class Machine:
    """seccomp: 0 none, 1 strict, 2 a filter. io_uring_disabled, io_uring_group, optmem_max: the sysctls
    kernel.* and net.core.optmem_max (bytes). captures: names of the devices that AF_PACKET sockets of this
    network namespace see every packet of; "any" for all. memlock, nofile: soft limits; None is
    unlimited (bytes; descriptors)."""

    kernel: str
    arch: str
    python: str
    free_threaded: bool
    seccomp: int | None
    io_uring_disabled: int | None
    io_uring_group: int | None
    optmem_max: int | None
    captures: tuple[str, ...]
    memlock: int | None
    nofile: int | None


def read(proc: Path = Path("/proc")) -> Machine:
    return Machine(
        kernel=platform.release(),
        arch=platform.machine(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        free_threaded="t" in sys.abiflags,
        seccomp=_status(proc, "Seccomp"),
        io_uring_disabled=_number(proc / "sys/kernel/io_uring_disabled"),
        io_uring_group=_number(proc / "sys/kernel/io_uring_group"),
        optmem_max=_number(proc / "sys/net/core/optmem_max"),
        captures=captures(proc),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _status(proc: Path, name: str) -> int | None:
    for line in _text(proc / "self/status").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value)
    return None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def captures(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Devices with a running AF_PACKET socket for all protocols: sent packets are cloned for it, and a clone's
    pages are copied. One for a single protocol (a DHCP client, LLDP) does not see what is sent."""
    found = set()
    for line in _text(proc / "net/packet").splitlines()[1:]:
        # sk RefCnt Type Proto Iface R Rmem User Inode; Proto in hexadecimal
        fields = line.split()
        if len(fields) < 6 or int(fields[3], 16) != _ETH_P_ALL or fields[5] != "1":
            continue
        found.add(_device(int(fields[4])))
    return tuple(sorted(found))


def _device(index: int) -> str:
    if not index:
        return "any"
    try:
        return socket.if_indextoname(index)
    except OSError:
        return f"device {index}"


def coloured(stream: object) -> bool:
    """Whether ANSI colours may be written to it: a terminal, and nobody said no (NO_COLOR)."""
    is_terminal = getattr(stream, "isatty", lambda: False)()
    return bool(is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")
