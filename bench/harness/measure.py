"""One measurement: one contestant in one row. Gives its figures, or raises Failed."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass

from .contestants import Contestant, Window
from .counters import Counters, Figures
from .errors import Failed
from .paths import program
from .process import Process
from .rows import Row

PATIENCE = 30.0  # seconds beyond the measured window before a process counts as hung
DEATH_LIMIT = 0.2  # how long after the client a server that crashed may be noticed


@dataclass(frozen=True)
class Bench:
    """Where and how long is measured: the same for all contestants."""

    window: Window
    server_core: int
    client_core: int

    @property
    def limit(self) -> float:
        return self.window.seconds + self.window.warmup + PATIENCE


def measure(bench: Bench, row: Row, contestant: Contestant, *more: str) -> tuple[Figures, str]:
    """`more`: arguments for the contestant (--profile); second comes what it says at its end."""
    command = [*contestant.command(row, bench.window), *more]
    with Process(contestant.name, command, bench.server_core, bench.limit) as server:
        if row.client is None:
            return dialogue(server, server, None)
        figures = load(bench, row, server)
        return figures, server.stop()


def load(bench: Bench, row: Row, server: Process) -> Figures:
    assert row.client is not None
    port, *rest = server.read_line().removeprefix("port ").split()
    apart = int(rest[1]) if rest else None
    numbers = (
        port,
        row.connections,
        row.size,
        bench.window.seconds,
        bench.window.warmup,
        row.cycle,
    )
    command = [program(row.client), *map(str, numbers)]
    try:
        with Process("the client", command, bench.client_core, bench.limit) as client:
            return dialogue(client, server, apart)[0]
    except Failed as failure:
        raise blame(failure, server) from None


def dialogue(client: Process, server: Process, apart: int | None) -> tuple[Figures, str]:
    """What load.h describes; second comes what the client says at its end."""
    if client.read_line() != "ready":
        client.fail("did not get ready")
    before = Counters.read(server.pid, apart)
    client.go_on()
    result = client.read_line()
    after = Counters.read(server.pid, apart)
    client.go_on()
    output = client.finish()
    requests, elapsed_ns, p50_ns, p99_ns = map(int, result.split())
    if not requests:
        raise Failed("no request was answered")
    cpu, user, system, faults = after.since(before)
    figures = Figures(
        requests_per_s=requests / elapsed_ns * 1e9,
        p50_us=p50_ns / 1e3,
        p99_us=p99_ns / 1e3,
        cpu_us=cpu / requests,
        user_us=user / requests,
        system_us=system / requests,
        minor_faults=faults / requests,
    )
    return figures, output


def blame(failure: Failed, server: Process) -> Failed:
    """What the client saw, with what the server has to say about it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(DEATH_LIMIT)
        return Failed(f"{server.name} {server.end()} ({failure})", server.said())
    said = server.said()
    if not said:
        return failure
    return Failed(f"{failure}; {server.name} said: {said.splitlines()[-1].strip()}", said)
