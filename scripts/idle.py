"""Ten thousand connections that say nothing beside some that echo without pause: their cost, and no growth.

    python scripts/idle.py --loop uring epoll uvloop asyncio --seconds 60

Each loop serves in a process of its own, clients (plain epoll) are in others. Reported: resident memory of the
server for each idle connection, how flat it stays, errors, receives that found no buffer and were armed again,
what is left after closing. In the end every idle connection is woken at once and must answer. Ends with status
1 if a byte was wrong, a connection was lost, memory moved by more than its bound, a loop used the processor
with nothing to do, or a descriptor stayed.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from soaking.child import Child, Failed
from soaking.watch import MIB, descriptors, mib, rss

LOOPS = ("uring", "epoll", "uvloop", "asyncio")
CLIENTS = 2  # processes
WARM_UP = 0.2  # of the time: memory is not judged
TICK = os.sysconf("SC_CLK_TCK")
COUNT_LIMIT = 15.0  # seconds for the server to learn of what the clients did
IDLE_CPU = 0.1  # share of one core that a loop may use when nothing happens at all


def cpu(pid: int) -> float:
    """Seconds that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def need_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(count, hard)))
    except (ValueError, OSError):
        sys.exit(
            f"idle.py: {count} descriptors are needed and {hard} allowed; raise the limit "
            f"(ulimit -Hn {count}, as root) or take fewer connections (--idle)"
        )


class Run:
    """One loop's."""

    def __init__(self, loop: str, args: argparse.Namespace, tick: Callable[[float], None]) -> None:
        self.loop = loop
        self.args = args
        self.tick = tick
        self.rows: dict[str, str] = {}
        self.violations: list[str] = []
        self.clients: list[Child] = []

    def wrong(self, text: str) -> None:
        self.violations.append(f"{self.loop}: {text}")

    def all(self, word: str, count: int = 0) -> list[dict[str, Any]]:
        """Give every client its share of an order."""
        shares = [count // CLIENTS + (i < count % CLIENTS) for i in range(CLIENTS)]
        for client, share in zip(self.clients, shares, strict=True):
            client.tell(f"{word} {share}")
        return [client.hear(90) for client in self.clients]

    def measure(self) -> None:
        with Child("idle_server", self.loop) as server:
            port = str(server.hear()["port"])
            with Child("idle_clients", port, "2") as one, Child("idle_clients", port, "32") as two:
                self.clients = [one, two]
                for client in self.clients:
                    client.hear()
                self.play(server)

    def play(self, server: Child) -> None:
        args, rows, pid = self.args, self.rows, server.pid
        self.all("busy", args.busy)  # what a loop allocates once is no idle connection's
        time.sleep(min(1.0, args.seconds / 5))
        self.all("pause")
        self.all("close")
        self.count(server, 0)
        server.ask("settle")
        before, fds = rss(pid), descriptors(pid)

        began = time.monotonic()
        opened = self.all("idle", args.idle)
        self.count(server, args.idle)
        rows["opened a second"] = f"{args.idle / (time.monotonic() - began):,.0f}"
        if sum(said["open"] for said in opened) != args.idle:
            self.wrong(f"only {sum(said['open'] for said in opened)} connections opened")
        server.ask("settle")
        idle = rss(pid)
        rows["RSS before, MiB"] = mib(before)
        rows[f"RSS with {args.idle:,} idle, MiB"] = mib(idle)
        rows["bytes an idle connection"] = f"{(idle - before) / args.idle:,.0f}"
        used = cpu(pid)
        time.sleep(1.0)
        used = cpu(pid) - used
        rows["CPU while all idle, %"] = f"{used * 100:.0f}"
        if used > IDLE_CPU:
            self.wrong(f"{used:.2f} s of CPU in one second in which nothing happened")

        self.all("busy", args.busy)
        self.busy(server)
        self.end(server, before, fds)

    def busy(self, server: Child) -> None:
        args, rows, pid = self.args, self.rows, server.pid
        samples = []
        used, began = cpu(pid), time.monotonic()
        while (at := time.monotonic() - began) < args.seconds:
            if at >= args.seconds * WARM_UP:
                samples.append(rss(pid))
            self.tick(at / args.seconds)
            time.sleep(min(0.2, args.seconds / 20))
        took, used = time.monotonic() - began, cpu(pid) - used
        said = self.all("pause")
        echoes = sum(s["echoes"] for s in said)
        rows["RSS in the run, MiB"] = f"{mib(min(samples))} .. {mib(max(samples))}"
        rows["echoes a second"] = f"{echoes / took:,.0f}"
        rows["fewest of one connection"] = f"{min(s['least'] for s in said):,}"
        rows["server CPU an echo, µs"] = f"{used / max(1, echoes) * 1e6:.1f}"
        if max(samples) - min(samples) > args.rss_bound * MIB:
            self.wrong(
                f"RSS moved by {mib(max(samples) - min(samples))} MiB in the run; "
                f"the bound is {args.rss_bound} MiB"
            )
        if not min(s["least"] for s in said):
            self.wrong("a busy connection got no echo at all")

    def end(self, server: Child, before: int, fds: int) -> None:
        args, rows, pid = self.args, self.rows, server.pid
        woken = self.all("wake")
        rows["all woken at once, ms"] = f"{max(s['seconds'] for s in woken) * 1000:,.0f}"
        if sum(s["open"] for s in woken) != args.idle + args.busy:
            self.wrong(f"{sum(s['open'] for s in woken)} connections are left at the end")
        began = time.monotonic()
        closed = self.all("close")
        stats = self.count(server, 0)
        rows["all closed, ms"] = f"{(time.monotonic() - began) * 1000:,.0f}"
        server.ask("settle")
        left = descriptors(pid)
        rows["descriptors before, after"] = f"{fds}, {left}"
        rows["RSS after closing, MiB"] = mib(rss(pid))
        for name in ("enobufs", "cq_overflows"):
            rows[name] = f"{stats['stats'][name]:,}" if stats["stats"] else ""
        errors = [text for said in (*closed, stats) for text in said["errors"]]
        rows["errors"] = str(len(errors))
        for text in errors[:5]:
            self.wrong(text)
        if left != fds:
            self.wrong(f"{left} descriptors after closing, {fds} before")
        for name in ("queued_bytes", "pinned_bytes", "operations_live", "connections"):
            if stats["stats"].get(name):
                self.wrong(f"{name} is {stats['stats'][name]} after closing")

    def count(self, server: Child, wanted: int) -> dict[str, Any]:
        """Wait until the server has so many connections."""
        for _ in range(round(COUNT_LIMIT / 0.05)):
            stats = server.ask("stats")
            if stats["connections"] == wanted:
                return stats
            time.sleep(0.05)
        self.wrong(f"the server has {stats['connections']} connections, not {wanted}")
        return stats


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loop", nargs="+", choices=LOOPS, default=["uring", "epoll"])
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--busy", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rss-bound", type=float, default=2.0, metavar="MIB")
    return parser.parse_args()


def main() -> int:
    args = parse()
    console = Console()
    need_descriptors(args.idle + args.busy + 200)
    runs = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name in args.loop:
            task = progress.add_task(name, total=1.0)
            run = Run(name, args, lambda part, task=task: progress.update(task, completed=part))
            runs.append(run)
            try:
                run.measure()
            except (Failed, OSError) as error:
                run.wrong(f"{type(error).__name__}: {error}")
    table = Table(title=f"{args.idle:,} idle connections, {args.busy:,} busy, {args.seconds:g} s")
    table.add_column("")
    for run in runs:
        table.add_column(run.loop, justify="right")
    for name in max((run.rows for run in runs), key=len):
        table.add_row(name, *(run.rows.get(name, "") for run in runs))
    console.print(table)
    violations = [text for run in runs for text in run.violations]
    for text in violations:
        console.print(f"[red]VIOLATION[/red] {text}", highlight=False, soft_wrap=True)
    console.print("no violation" if not violations else f"{len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
