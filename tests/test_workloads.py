"""The services and clients of bench/workloads.py: they work on both backends, and a wrong byte ends a run.

No figures: those need a quiet machine. One short turn of each service that needs nothing but this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))
from workload.clients import CLIENTS, CorruptBytes, ProxyClient  # noqa: E402

SIZE = 8 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


@contextlib.contextmanager
def service(
    backend: str, name: str, way: str, options: dict[str, Any]
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    core = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "workload.child", f"aiozc-{backend}", name, way]
    child = subprocess.Popen(
        [*command, json.dumps(options), core],
        env=os.environ | {"PYTHONPATH": str(BENCH)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout
        yield int(child.stdout.readline()), child
    finally:
        child.kill()
        child.wait()


OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "weights": (
        ["write", "frozen", "zc", "pool", "sendfile"],
        {"connections": 2, "largest": 4 << 20},
    ),
    "broadcast": (["write", "call", "pool"], {"connections": 5, "rate": 50}),
    "cache": (["write", "pool"], {"connections": 2, "pipeline": 4}),
    "proxy": (["write", "pool"], {"size": 1 << 20, "pairs": 3, "certificate": ""}),
}
WAYS = [(name, way) for name, (ways, _) in OPTIONS.items() for way in ways]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_service_gives_its_client_the_right_bytes(
    backend: str, name: str, way: str, file: Path
) -> None:
    options = OPTIONS[name][1] | {"file": str(file)}
    client: Any = None
    if name == "proxy":
        client = ProxyClient(options)
        options["origin"] = client.origin
    with service(backend, name, way, options) as (port, child):
        if client is None:
            client = CLIENTS[name](port, options)
        else:
            client.connect_all(port)
        for _ in range(50):
            client.go(0.1)
            if client.load.requests >= 5:
                break
        client.close()
        assert child.stdin and child.stdout
        child.stdin.close()
        told = json.loads(child.stdout.readline())
    assert client.load.requests >= 5 and client.load.bytes > 0
    assert told["anonymous"] > 0


# bench/stalled.py counts on that. Fails when: who never reads is no subscriber, or reads after all.
def test_subscribers_that_never_read_are_dropped_and_the_others_are_not(backend: str) -> None:
    options = {"connections": 5, "rate": 50, "stalled": 2, "slow": 0}
    with service(backend, "broadcast", "call", options) as (port, child):
        client = CLIENTS["broadcast"](port, options)
        for _ in range(50):
            client.go(0.1)
            if client.load.requests >= 60:
                break
        client.go(0.2)
        assert child.stdin and child.stdout
        child.stdin.close()
        told = json.loads(child.stdout.readline())
        client.close()
    assert client.load.requests >= 60 and len(client.load.times) == client.load.requests
    assert told["dropped"] >= 2 and told["call_p99_ms"] > 0


# Fails when: `same` compares nothing, or less than all of it.
@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_one_wrong_byte_ends_the_run(backend: str, file: Path, place: int) -> None:
    options = {"file": str(file), "connections": 2, "largest": 6 << 20}
    with service(backend, "weights", "zc", options) as (port, _):
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        other = file.with_name("other")
        other.write_bytes(data)
        client = WholeFile(port, options | {"file": str(other)})
        with pytest.raises(CorruptBytes, match="of the file"):
            client.go(20)


class WholeFile(CLIENTS["weights"]):  # type: ignore[misc]
    """Asks for all of it."""

    def one(self, sock: Any, choose: random.Random, largest: int) -> Any:
        class All:
            randint = staticmethod(lambda low, high: SIZE)
            randrange = staticmethod(lambda stop: 0)

        return super().one(sock, All(), largest)  # type: ignore[arg-type]
