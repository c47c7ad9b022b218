"""Which container networks copy: the rows of docs/containers.md, measured by examples/containers/path.py.

Each way is made of network namespaces that end with the test: a sender, where need be a middle (a bridge or a
router, as container networks have), and a receiver or an `ifb`, a device that drops what it is to send.

    pytest tests/test_container_networks.py -m slow

Needs root and iproute2 (nft for one row); skipped without. A kernel that copies elsewhere fails it, and then
the page is wrong for that kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiozc

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "examples" / "containers" / "path.py"
PORT = "9200"
LIMIT = 60
MAC = "02:00:00:00:00:02"
# Reads whatever comes on one connection.
RECEIVER = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as listener:
    print("ready", flush=True)
    peer = listener.accept()[0]
    while peer.recv(1 << 20):
        continue
"""
CAPTURE = """
import socket, sys
sees_everything = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
print("ready", flush=True)
sys.stdin.read()
"""


@dataclasses.dataclass(frozen=True)
class Way:
    row: str  # of the table in docs/containers.md
    kernel: str
    middle: str = ""  # or "bridge", "router"
    device: bool = False  # the last device drops; else a receiver
    masquerade: bool = False
    capture: bool = False

    @property
    def protocol(self) -> str:
        return "UDP" if self.device else "TCP"


WAYS = (
    Way("veth to a receiver in another namespace", "copied"),
    Way("veth, bridge, veth to a receiver on this machine", "copied", "bridge"),
    Way("veth, router, veth to a receiver on this machine", "copied", "router"),
    Way("device of the machine (host network)", "zero-copy", device=True),
    Way("veth, router, device", "zero-copy", "router", device=True),
    Way(
        "veth, router with masquerading, device",
        "zero-copy",
        "router",
        device=True,
        masquerade=True,
    ),
    Way("veth, bridge, device", "zero-copy", "bridge", device=True),
    Way(
        "the same, while something captures packets on the way",
        "copied",
        "bridge",
        device=True,
        capture=True,
    ),
)


def sh(*lines: str) -> None:
    for line in lines:
        subprocess.run(line.split(), check=True, capture_output=True, text=True, timeout=LIMIT)


class Spaces:
    """Namespaces by a letter: A sends, M is in the middle, B receives."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.names: dict[str, str] = {}

    def add(self, letter: str) -> None:
        name = f"azcways{os.getpid()}{letter}"
        sh(f"ip netns add {name}")
        self.stack.callback(sh, f"ip netns del {name}")
        self.names[letter] = name
        self.ip(letter, "link set lo up")

    def ip(self, letter: str, *commands: str) -> None:
        for command in commands:
            sh(f"ip -n {self.names[letter]} {command}")

    def run(self, letter: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[letter], *command]

    def link(self, a: str, a_device: str, b: str, b_device: str) -> None:
        peer = f"name {b_device} netns {self.names[b]}"
        self.ip(a, f"link add {a_device} type veth peer {peer}", f"link set {a_device} up")
        self.ip(b, f"link set {b_device} up")

    def start(self, letter: str, program: str) -> None:
        child = subprocess.Popen(
            self.run(letter, sys.executable, "-c", program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.stack.callback(child.wait)
        self.stack.callback(child.kill)
        assert child.stdout and child.stdout.readline() == b"ready\n"


def build(way: Way, spaces: Spaces) -> str:
    """The way; returns the address to send to."""
    spaces.add("A")
    if way.middle:
        spaces.add("M")
        spaces.link("A", "out", "M", "in")
    # The last link: from `last` by the device "far" to a receiver, or to nobody.
    last = "M" if way.middle else "A"
    far = "far" if way.middle else "out"
    if way.device:
        spaces.ip(last, f"link add {far} type ifb", f"link set {far} up")
    else:
        spaces.add("B")
        spaces.link(last, far, "B", "in")
    target = "10.77.2.2" if way.middle == "router" else "10.77.1.2"
    spaces.ip("A", "addr add 10.77.1.1/24 dev out")
    if not way.device:
        spaces.ip("B", f"addr add {target}/24 dev in")
    if way.middle == "bridge":
        spaces.ip("M", "link add br0 type bridge", "link set br0 up")
        spaces.ip("M", "link set in master br0", f"link set {far} master br0")
        if way.device:
            spaces.ip("A", f"neigh add {target} lladdr {MAC} dev out")
    elif way.middle == "router":
        spaces.ip("M", "addr add 10.77.1.254/24 dev in", f"addr add 10.77.2.254/24 dev {far}")
        spaces.ip("A", "route add default via 10.77.1.254")
        sh(" ".join(spaces.run("M", "sysctl", "-qw", "net.ipv4.ip_forward=1")))
        if way.device:
            spaces.ip("M", f"neigh add {target} lladdr {MAC} dev {far}")
        else:
            spaces.ip("B", "route add default via 10.77.2.254")
    elif way.device:
        spaces.ip("A", f"neigh add {target} lladdr {MAC} dev {far}")
    if way.masquerade:
        rules = "table ip t { chain c { type nat hook postrouting priority 100; masquerade; }; }"
        subprocess.run(spaces.run("M", "nft", rules), check=True, timeout=LIMIT)
    return target


@pytest.fixture
def spaces() -> Iterator[Spaces]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    if not aiozc.capabilities().zerocopy:
        pytest.skip("no zero-copy here")
    with contextlib.ExitStack() as stack:
        yield Spaces(stack)


# Fails when: the page says of a way what this kernel does not do.
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.row)
def test_a_way_copies_or_does_not_as_the_page_says(way: Way, spaces: Spaces) -> None:
    if way.masquerade and shutil.which("nft") is None:
        pytest.skip("needs nft")
    target = build(way, spaces)
    if way.capture:
        spaces.start("M", CAPTURE)
    if not way.device:
        spaces.start("B", RECEIVER)
    command = spaces.run("A", sys.executable, str(PATH), target, PORT)
    command += ["--udp"] if way.device else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout.strip()) == (0, way.kernel), done.stderr


def test_the_page_has_these_rows() -> None:
    lines = (ROOT / "docs" / "containers.md").read_text().splitlines()
    words = {"copied": "copied", "zero-copy": "not copied"}
    missing = [
        way.row
        for way in WAYS
        if not any(
            line.startswith(f"| {way.row}")
            and line.endswith(f"| {way.protocol} | {words[way.kernel]} |")
            for line in lines
        )
    ]
    assert not missing
