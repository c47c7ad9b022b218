"""One measurement: one contestant in one row. Gives its figures, or raises Failed."""

from __future__ import annotations

import contextlib
import re
import subprocess
from dataclasses import dataclass

from .contestants import Contestant, Window
from .counters import Counters, Figures
from .errors import Failed
from .paths import program
from .process import Process, gist
from .rows import Row

PATIENCE = 30.0  # seconds beyond the measured window before a process counts as hung
ONLY_THE_END = 2  # a client's exit status: see load.h
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


@dataclass(frozen=True)
class Measurement:
    """`output`: what the contestant said at its end. `flaw`: the figures are right, every byte was, but
    afterwards a connection was not ended, or a process did not end well."""

    figures: Figures
    output: str = ""
    flaw: Failed | None = None


def measure(bench: Bench, row: Row, contestant: Contestant, *more: str) -> Measurement:
    """`more`: arguments for the contestant (--profile)."""
    command = [*contestant.command(row, bench.window), *more]
    with Process("the server", command, bench.server_core, bench.limit) as server:
        if row.client is not None:
            return with_client(bench, row, server)
        figures = dialogue(server, server, None)
        try:
            return Measurement(figures, server.finish())
        except Failed as failure:
            return Measurement(figures, flaw=failure)


def with_client(bench: Bench, row: Row, server: Process) -> Measurement:
    assert row.client is not None
    port, apart = address(server)
    window = bench.window
    numbers = (port, row.connections, row.size, window.seconds, window.warmup, row.cycle)
    command = [program(row.client), *map(str, numbers)]
    flaw, output = None, ""
    try:
        with Process("the client", command, bench.client_core, bench.limit) as client:
            figures = dialogue(client, server, apart)
            try:
                client.finish()
            except Failed as failure:
                if client.process.returncode != ONLY_THE_END:
                    raise
                flaw = blame(failure, server)
    except Failed as failure:
        raise blame(failure, server) from None
    try:
        output = server.stop()
    except Failed as failure:
        flaw = flaw or failure
    return Measurement(figures, output, flaw)


def address(server: Process) -> tuple[str, int | None]:
    """Its port, and the thread whose CPU time is not the loop's, if there is one."""
    line = server.read_line()
    found = re.fullmatch(r"port (\d+)(?: apart (\d+))?", line)
    if found is None:
        server.fail(f"said {line!r} instead of its port")
    return found[1], int(found[2]) if found[2] else None


def dialogue(client: Process, server: Process, apart: int | None) -> Figures:
    """What load.h describes, but for the client's end."""
    if client.read_line() != "ready":
        client.fail("did not get ready")
    before = count(server, apart)
    client.go_on()
    result = client.read_line()
    after = count(server, apart)
    client.go_on()
    if not re.fullmatch(r"[1-9]\d* \d+ \d+ \d+", result):
        client.fail(f"said {result!r} instead of what it measured")
    requests, elapsed_ns, p50_ns, p99_ns = map(int, result.split())
    cpu, user, system, faults = after.since(before)
    return Figures(
        requests_per_s=requests / elapsed_ns * 1e9,
        p50_us=p50_ns / 1e3,
        p99_us=p99_ns / 1e3,
        cpu_us=cpu / requests,
        user_us=user / requests,
        system_us=system / requests,
        minor_faults=faults / requests,
    )


def count(server: Process, apart: int | None) -> Counters:
    try:
        return Counters.read(server.pid, apart)
    except OSError:
        server.fail()


def blame(failure: Failed, server: Process) -> Failed:
    """What the client saw, with what the server has to say about it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(DEATH_LIMIT)
        return Failed(f"the server {server.end()} ({failure})", server.said())
    said = server.said()
    return Failed(f"{failure}; the server said: {gist(said)}", said) if said else failure
