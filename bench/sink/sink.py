"""Network namespaces with a path that truly does not copy: owns their set-up, and their removal.

Called by `python -m aiozc bench --path sink` (aiozc/cli/bench/path.py loads it from here), or by hand:
`python bench/sink/sink.py up 1`, `... down 1`. Needs nothing but the standard library, root, and the
programs in TOOLS.

Two namespaces: in aiozcA<tag> the sender; in aiozcB<tag> the far end of a veth pair, which answers TCP
without a socket (sink.bpf.c). In the first also a device that drops everything: the way for UDP.

Never: touches an interface, route or rule outside of the two; leaves them behind where `sink()` is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PORT = 9100
MTU = 1500
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "clang": "clang"}
SOURCE = Path(__file__).with_name("sink.bpf.c")
NAME = re.compile(r"aiozc[AB](\d+)")
MAC_A, MAC_B = "02:00:00:00:0a:0a", "02:00:00:00:0b:0b"
# Documentation's own networks, so that no machine has a route to them.
TCP = {"4": ("192.0.2.1", "192.0.2.2", 24), "6": ("2001:db8:a::1", "2001:db8:a::2", 64)}
UDP = {"4": ("198.51.100.1", "198.51.100.2", 24), "6": ("2001:db8:b::1", "2001:db8:b::2", 64)}
UDP_DEVICE = "drop"
UDP_MTU = 65535
RULES = f"""table netdev sink {{
  chain arriving {{
    type filter hook ingress device far priority 0; policy accept;
    tcp dport {PORT} tcp flags & ack == 0 reject with tcp reset
  }}
}}
"""


class SinkError(Exception):
    """The path cannot be had here; the message says what is missing."""


def missing() -> list[str]:
    """What has to be done first, in words; empty when all is there."""
    wanted = []
    if os.geteuid() != 0:
        wanted.append("root: run it with sudo, or as root")
    for tool, package in TOOLS.items():
        if shutil.which(tool, path=_search_path()) is None:
            wanted.append(f"the program {tool}: apt-get install {package}")
    if _headers() is None:
        wanted.append("the kernel's headers for users: apt-get install linux-libc-dev")
    return wanted


def _search_path() -> str:
    """sbin is not in everybody's PATH."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _headers() -> Path | None:
    """The directory with asm/types.h, which a cross compiler such as clang -target bpf does not know."""
    machine = os.uname().machine
    for directory in (*Path("/usr/include").glob(f"{machine}-linux-*"), Path("/usr/include")):
        if (directory / "asm" / "types.h").exists():
            return directory
    return None


def _run(*command: str, given: str | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PATH": _search_path()},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SinkError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or [
            f"exit code {done.returncode}"
        ]
        # The verifier prints every state that it saw, and its verdict at the end.
        raise SinkError(f"{' '.join(command)}: {' / '.join(words[-8:])}")


def _names(tag: int) -> tuple[str, str]:
    return f"aiozcA{tag}", f"aiozcB{tag}"


def up(tag: int, ack_cpu: int | None = None) -> dict[str, Any]:
    """Make the namespaces of this number; what `python -m aiozc bench` needs to know of them.

    ack_cpu: the processor that does what the sink does, and what acknowledgements cost, so that none of
    it counts as the sender's work; None: whichever sent. SinkError names what is missing, and nothing is
    left behind.
    """
    if wanted := missing():
        raise SinkError("the path `sink` needs: " + "; ".join(wanted))
    try:
        _make(tag, ack_cpu)
    except BaseException:
        down(tag)
        raise
    return {
        "namespace": _names(tag)[0],
        "port": PORT,
        "tcp": {family: addresses[1] for family, addresses in TCP.items()},
        "udp": {family: addresses[1] for family, addresses in UDP.items()},
        "udp_device": UDP_DEVICE,
    }


def _make(tag: int, ack_cpu: int | None) -> None:
    near, far = _names(tag)
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/sink.o"
        _run(
            *("clang", "-O2", "-target", "bpf", f"-I{_headers()}"),
            *(f"-DSINK_PORT={PORT}", f"-DSINK_MTU={MTU}", "-c", str(SOURCE), "-o", program),
        )
        for name in (near, far):
            _run("ip", "netns", "add", name)
        _run(
            *("ip", "link", "add", "near", "netns", near, "address", MAC_A, "mtu", str(MTU)),
            *("type", "veth", "peer", "name", "far", "netns", far, "address", MAC_B),
            *("mtu", str(MTU)),
        )
        _make_dropping(near)
        for name, devices in ((near, ("lo", "near", UDP_DEVICE)), (far, ("far",))):
            for device in devices:
                # Router solicitations and the like would be counted as our datagrams.
                _inside(name, f"echo 0 > /proc/sys/net/ipv6/conf/{device}/router_solicitations")
                _run("ip", "-n", name, "link", "set", device, "up")
        for device, addresses in (("near", TCP), (UDP_DEVICE, UDP)):
            for family, (ours, theirs, bits) in addresses.items():
                nodad = ["nodad"] if family == "6" else []
                _run("ip", "-n", near, "addr", "add", f"{ours}/{bits}", "dev", device, *nodad)
                _run(
                    *("ip", "-n", near, "neigh", "add", theirs, "lladdr", MAC_B),
                    *("dev", device, "nud", "permanent"),
                )
        # What paces by itself (bbr) would measure its own timers on a path without a round trip.
        _inside(near, "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
        if ack_cpu is not None:
            for name, device in ((near, "near"), (far, "far")):
                queue = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
                _inside(name, f"echo {_mask(ack_cpu)} > {queue}")
        _run("tc", "-n", far, "qdisc", "add", "dev", "far", "clsact")
        for direction, section in (("ingress", "tc/in"), ("egress", "tc/out")):
            _run(
                *("tc", "-n", far, "filter", "add", "dev", "far", direction),
                *("bpf", "da", "obj", program, "sec", section),
            )
        _run("ip", "netns", "exec", far, "nft", "-f", "-", given=RULES)


def _make_dropping(namespace: str) -> None:
    """A device that drops what it is given. Kernels are built with one of the two, or the other."""
    words = []
    for kind in ("dummy", "ifb"):
        try:
            _run(
                *("ip", "-n", namespace, "link", "add", UDP_DEVICE),
                *("mtu", str(UDP_MTU), "type", kind),
            )
            return
        except SinkError as error:
            words.append(str(error))
    raise SinkError("the kernel module `dummy` or `ifb`: " + "; ".join(words))


def _mask(cpu: int) -> str:
    """As /sys wants it: groups of 32 bits, the highest first."""
    groups = ["0" * 8] * (cpu // 32)
    return ",".join([f"{1 << cpu % 32:x}", *groups])


def _inside(namespace: str, command: str) -> None:
    _run("ip", "netns", "exec", namespace, "sh", "-ec", command)


def down(tag: int) -> None:
    """Remove the namespaces of this number, and with them all that is in them."""
    present = _present()
    for name in _names(tag):
        if name in present:
            _run("ip", "netns", "del", name)


def _present() -> list[str]:
    # Not by `ip netns list`: it prints more than names.
    directory = Path("/run/netns")
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def _remove_forgotten() -> None:
    """Namespaces of runs that were killed: their number is that of a process that is no more."""
    for name in _present():
        found = NAME.fullmatch(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            down(int(found[1]))


@contextlib.contextmanager
def sink(ack_cpu: int | None = None) -> Iterator[dict[str, Any]]:
    """The path, for as long as the block runs. Named after this process."""
    if os.geteuid() == 0:
        _remove_forgotten()
    try:
        yield up(os.getpid(), ack_cpu)
    finally:
        down(os.getpid())


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in ("up", "down") or not sys.argv[2].isdigit():
        print("usage: sink.py up|down NUMBER", file=sys.stderr)
        return 2
    try:
        if sys.argv[1] == "up":
            print(json.dumps(up(int(sys.argv[2])), indent=2))
        else:
            down(int(sys.argv[2]))
    except SinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
