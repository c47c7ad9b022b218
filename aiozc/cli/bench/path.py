"""The two paths that data can go: loopback, which verifies, and the sink, which truly does not copy.

Called by the subcommands: a path is entered once and gives each row an endpoint. The sink's own set-up
is bench/sink/ of a source checkout, loaded from there; this module only knows where.

Never: lets a path outlive its `with` block.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import ModuleType
from typing import Any

import aiozc
from aiozc.cli.bench.errors import BenchError, RowFailed, WrongData
from aiozc.cli.bench.receiver import Receiver

LOOPBACK_NOTE = (
    "Loopback: every byte was verified. It proves no speed: the kernel copies whatever it hands to a "
    "receiver on this machine. Use --path sink (root) or a network device for that."
)
SINK_NOTE = (
    "Sink: a path without a copy, answered by the kernel; all bytes were acknowledged (TCP) or taken by "
    "the device (UDP), nothing was read. No receiver, no round trip: an upper bound of a sender's speed."
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a sender sends to. receiver: None where the kernel answers by itself."""

    address: str
    port: int
    counter: int = -1
    device: str = ""
    receiver: Receiver | None = None

    def check(self, sent: int, arrived: int) -> None:
        """Only what arrived counts. RowFailed: bytes are missing. WrongData: they are not those sent."""
        if self.receiver is not None:
            self.receiver.finish(sent)
            if self.receiver.fault:
                raise WrongData(f"wrong data: {self.receiver.fault}")
            arrived = self.receiver.received
            if arrived > sent:
                raise WrongData(f"wrong data: {arrived} bytes arrived, {sent} were sent")
        if arrived < sent:
            raise RowFailed(f"only {arrived} of {sent} bytes arrived")


@dataclass(frozen=True, slots=True)
class Path:
    """name, what may be said of its figures, and how to run a command in it. cpu: the sender's; -1: any."""

    name: str
    note: str
    prefix: tuple[str, ...] = ()
    sink: dict[str, Any] | None = None
    cpu: int = -1
    other_cpu: int = -1

    @contextlib.contextmanager
    def endpoint(
        self, protocol: str, family: int, size: int, pattern: bytes, connections: int = 1
    ) -> Iterator[Endpoint]:
        if self.sink is not None:
            address = self.sink[protocol][str(family)]
            device = self.sink["udp_device"] if protocol == "udp" else ""
            yield Endpoint(address, self.sink["port"], device=device)
            return
        try:
            receiver = Receiver(protocol, family, size, pattern, self.other_cpu, connections)
        except OSError as error:
            raise RowFailed(f"no receiver on loopback: {error}") from error
        receiver.start()
        try:
            yield Endpoint(receiver.address, receiver.port, receiver.counter, receiver=receiver)
        finally:
            receiver.stop()


@contextlib.contextmanager
def open_path(name: str) -> Iterator[Path]:
    """The path of this name, for as long as the block runs. BenchError: what is missing for it."""
    processors = sorted(os.sched_getaffinity(0))
    several = len(processors) > 1
    cpu, other = (processors[0], processors[1]) if several else (-1, -1)
    if name == "loopback":
        yield Path(name, LOOPBACK_NOTE, cpu=cpu, other_cpu=other)
        return
    module = _sink_module()
    # /sbin may not be in PATH, and `ip` is started by name.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    with contextlib.ExitStack() as stack:
        try:
            given = stack.enter_context(module.sink(other if several else None))
        except module.SinkError as error:
            raise BenchError(str(error)) from error
        prefix = ("ip", "netns", "exec", given["namespace"])
        yield Path(name, SINK_NOTE, prefix, given, cpu, other)


def _sink_module() -> ModuleType:
    file = FilePath(aiozc.__file__).resolve().parents[1] / "bench" / "sink" / "sink.py"
    if not file.is_file():
        raise BenchError(
            f"--path sink needs the files in bench/sink/ of a source checkout, and {file} is not "
            "there: run it from a checkout, with the package installed by `pip install -e .`"
        )
    spec = importlib.util.spec_from_file_location("aiozc_bench_sink", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
