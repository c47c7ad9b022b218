"""Connections that open, send, reset, stop and break at random for a while, and nothing may be left of them.

    python scripts/soak.py --seconds 60 --connections 200 --backend uring --seed 7

Each connection lives by a plan drawn from (seed, number); its peer, in another process (plain sockets, or the
standard library's loop), draws the same plan. Both sides check every byte that arrives. The run is cut into
rounds: at the end of each, when every connection is over, descriptors, pinned and queued bytes, operations and
held buffers must be as at the start, and memory must not have grown after the first third. Ends with status 1
at the first round with a violation, which is told with the plan of its connection; `--seed S --only N` plays
that one again. Bounded in time: --seconds, and at most a minute and a half more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from soaking import peer, plan
from soaking.lives import BufferedStream, Life, greet, greeted
from soaking.watch import MIB, Watch, Witness, descriptors, settle

import aiozc
from aiozc import faults

GRACE = 90.0  # seconds after the end of --seconds until everything is over, or it hangs
QUIET_LIMIT = 10.0  # seconds for the last pins and descriptors to go, once every life is over
HEAP_BOUND = 2.0  # MiB that C code may hold more than after warm-up: what one unlucky round leaves
BLOCKS_BOUND = 3_000  # and Python's objects, beside those that a sample of ours is made of
BLOCKS_A_SAMPLE = 8
TURN_LIMIT = 5.0  # seconds in which the loop must turn
SHOWN = 10  # violations that are printed whole


class PeerProcess:
    """A child that plays the peer's parts. Its reports come through a thread, not through the loop."""

    def __init__(self, kind: str, orders: peer.Orders, told: Any) -> None:
        self.kind = kind
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"soaking.peer_{kind}", orders.text()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.addresses = json.loads(self.stdout.readline())["listening"]
        self.thread = threading.Thread(target=self.listen, args=(told,), daemon=True)
        self.thread.start()

    def listen(self, told: Any) -> None:
        for line in self.stdout:
            told(peer.Report(**json.loads(line)))
        told(None)

    def order(self, line: str) -> None:
        self.stdin.write(line.encode() + b"\n")
        self.stdin.flush()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.order("quit")
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.thread.join(5.0)
        self.stdin.close()
        self.stdout.close()


class Soak:
    def __init__(self, args: argparse.Namespace, loop: aiozc.EventLoop, directory: str) -> None:
        self.args = args
        self.seed: int = args.seed
        self.loop = loop
        self.directory = directory
        self.totals: Counter[str] = Counter()
        self.violations: list[str] = []
        self.reports: dict[int, asyncio.Future[peer.Report]] = {}
        self.arrivals: dict[int, asyncio.Future[Any]] = {}
        self.peers: dict[str, PeerProcess] = {}
        self.numbers = iter(args.only) if args.only else itertools.count()
        self.watch = Watch(loop)
        self.witness = Witness(args.seconds + GRACE)
        self.alive = 0
        self.growth: dict[str, str] = {}
        self.slowest_turn = 0.0
        self.workers = 0  # threads that the kernel made for requests which would not wait
        self.slowest_life = (0.0, "")
        self.families = tuple(f for f in plan.FAMILIES if self.has(f))
        loop.set_exception_handler(self.on_exception)

    def has(self, family: str) -> bool:
        try:
            peer.listen(family, os.path.join(self.directory, "probe")).close()
        except OSError:
            return False
        return True

    # -- what went wrong --

    def wrong(self, what: plan.Plan, text: str) -> None:
        self.violate(f"{text}\n    {what}")

    def violate(self, text: str) -> None:
        """Told at once: who hangs afterwards is not asked any more."""
        self.violations.append(text)
        if len(self.violations) <= SHOWN:
            print(f"VIOLATION {text}", file=sys.stderr, flush=True)

    def on_exception(self, loop: Any, context: dict[str, Any]) -> None:
        self.violate(f"exception handler: {context}")

    # -- connections --

    def report(self, number: int) -> asyncio.Future[peer.Report]:
        return self.reports.setdefault(number, self.loop.create_future())

    def told(self, said: peer.Report | None) -> None:
        """In a peer's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.file, said)

    def file(self, said: peer.Report | None) -> None:
        if said is None:
            if self.peers:
                self.violate("a peer process ended")
            return
        report = self.reports.get(said.number)
        if report is None or report.done():
            self.violate(f"a report that nobody waits for: {said}")
        else:
            report.set_result(said)

    async def open(self, what: plan.Plan) -> tuple[asyncio.StreamReader, Any] | None:
        peer_process = self.peers[what.peer]
        if what.dialled:
            reader = asyncio.StreamReader()
            kind = BufferedStream if what.buffered else asyncio.StreamReaderProtocol
            protocol: Any = kind(reader)
            address = peer.target(peer_process.addresses[what.family])
            if what.family == "unix":
                transport, _ = await self.loop.create_unix_connection(lambda: protocol, address)
            else:
                transport, _ = await self.loop.create_connection(lambda: protocol, *address)
            writer = asyncio.StreamWriter(transport, protocol, reader, self.loop)
            await greet(writer, what.number)
            return reader, writer
        arrival = self.arrivals[what.number] = self.loop.create_future()
        try:
            peer_process.order(f"dial {what.number}")
            report = self.report(what.number)
            await asyncio.wait({arrival, report}, return_when=asyncio.FIRST_COMPLETED)
            return arrival.result() if arrival.done() else None
        finally:
            del self.arrivals[what.number]

    async def arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            arrival = self.arrivals.get(await greeted(reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            arrival = None
        if arrival is None or arrival.done():
            self.violate(f"a connection that nobody waits for: {writer.transport!r}")
            writer.transport.abort()
        else:
            arrival.set_result((reader, writer))

    def accepting(self) -> asyncio.BaseProtocol:
        reader = asyncio.StreamReader()
        self.totals["accepted"] += 1
        kind = BufferedStream if self.totals["accepted"] % 3 == 0 else asyncio.StreamReaderProtocol
        return kind(reader, self.arrived)  # type: ignore[no-any-return]

    # -- the run --

    async def main(self) -> None:
        servers, addresses = [], {}
        for family in self.families:
            sock = peer.listen(family, os.path.join(self.directory, "loop"))
            addresses[family] = peer.address(sock)
            unix = family == "unix"
            start: Any = self.loop.create_unix_server if unix else self.loop.create_server
            servers.append(await start(self.accepting, sock=sock, backlog=peer.BACKLOG))
        orders = peer.Orders(self.seed, self.families, addresses, self.directory)
        for kind in plan.PEERS:
            self.peers[kind] = PeerProcess(kind, orders, self.told)
        sampling = asyncio.create_task(self.sample())
        try:
            await self.quiet()
            rounds = max(3, round(self.args.seconds / 10))
            began = self.loop.time()
            for k in range(rounds):
                if faults.KNOBS:
                    self.loop.zc_fault("zc_enomem", 7 if k % 3 == 1 else 0)
                # By the clock of the whole: on a busy machine the last lives of each round take long.
                until = began + self.args.seconds * (k + 1) / rounds
                slots = (self.slot(until) for _ in range(self.args.connections))
                await asyncio.gather(*slots)
                await self.quiet()
                if self.violations:
                    break
        finally:
            sampling.cancel()
            peers, self.peers = self.peers, {}
            for process in peers.values():
                process.end()
            for server in servers:
                server.close()
                await server.wait_closed()

    async def slot(self, until: float) -> None:
        while self.loop.time() < until and not self.violations:
            number = next(self.numbers, None)
            if number is None:
                return
            what = plan.make(self.seed, number, self.families)
            self.alive += 1
            began = self.loop.time()
            try:
                await Life(self, what).run()
            finally:
                self.alive -= 1
                self.reports.pop(what.number, None)
            self.slowest_life = max(self.slowest_life, (self.loop.time() - began, str(what)))
            self.totals["lives"] += 1

    async def sample(self) -> None:
        while True:
            self.watch.take(self.alive)
            workers = len(os.listdir("/proc/self/task")) - threading.active_count()
            self.workers = max(self.workers, workers)
            due, lost = self.loop.time() + 0.25, self.witness.lost
            await asyncio.sleep(0.25)
            turn = self.loop.time() - due - (self.witness.lost - lost)
            self.slowest_turn = max(self.slowest_turn, turn)
            if turn > TURN_LIMIT:
                self.violate(f"the loop did not turn for {turn:.1f} s")

    async def quiet(self) -> None:
        """Every life is over. Wait for what the kernel still has to do, then look at what is left."""
        first = next((s for s in self.watch.samples if s.quiet), None)
        for _ in range(round(QUIET_LIMIT / 0.05)):
            stats = self.loop.zc_stats()
            left = stats.pinned_bytes or stats.operations_live or stats.connections
            if not left and (first is None or descriptors() == first.fds):
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)  # and for what is told in the turn after
        settle()
        now = self.watch.take(self.alive, quiet=True)
        for name in ("connections", "queued", "pinned", "operations", "held"):
            if getattr(now, name):
                self.violate(f"{name} is {getattr(now, name)} with every connection over")
        if first is not None and now.fds != first.fds:
            self.violate(f"{now.fds} descriptors with every connection over; {first.fds} before")

    def check_memory(self) -> None:
        """The last quiet moment against the first third of them, in which memory may still grow."""
        quiet = [s for s in self.watch.samples if s.quiet]
        warm = quiet[1 : 1 + max(1, len(quiet) // 3)]
        if not warm or quiet[-1] in warm:
            return
        for name, unit, bound in (
            ("rss", MIB, self.args.rss_bound),
            ("heap", MIB, HEAP_BOUND),
            ("blocks", 1, BLOCKS_BOUND + BLOCKS_A_SAMPLE * len(self.watch.samples)),
        ):
            base = max(getattr(s, name) for s in warm)
            growth = (getattr(quiet[-1], name) - base) / unit
            what = f"{name}{' MiB' if unit == MIB else ''}"
            self.growth[what] = f"{growth:,.2f} of {bound:,g}"
            if growth > bound:
                self.violate(f"{what} grew by {growth:,.1f} after warm-up; the bound is {bound:,g}")


def run(args: argparse.Namespace, soak: Soak) -> None:
    """One run, or many: between two runs nothing of the loop's may be with the kernel."""
    loop = soak.loop
    main = loop.create_task(soak.main())

    def once() -> None:
        loop.run_until_complete(asyncio.wait({main}, timeout=0.3))

    while not main.done():
        if args.runs == "one":
            loop.run_until_complete(asyncio.wait({main}))
        elif args.runs == "many":
            once()
        else:
            thread = threading.Thread(target=once)
            thread.start()
            thread.join()
    main.result()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--backend", choices=("uring", "epoll"), default="uring")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--forced", action="store_true", help="zero-copy for every operation")
    parser.add_argument(
        "--runs",
        choices=("one", "many", "threads"),
        default="one",
        help="many: the loop is stopped and run again each 0.3 s; threads: in another thread each",
    )
    parser.add_argument("--rss-bound", type=float, default=16.0, metavar="MIB")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these connections")
    args = parser.parse_args()
    if args.seed is None:
        args.seed = time.time_ns() % 1_000_000
    return args


def main() -> int:
    args = parse()
    console = Console()
    faulthandler.enable()
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    warnings.simplefilter("always", ResourceWarning)
    fds = descriptors()
    settings: dict[str, Any] = {"adaptive": False, "zc_threshold": 0} if args.forced else {}
    loop = aiozc.new_event_loop(backend=args.backend, **settings)
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(record=True) as said:
        soak = Soak(args, loop, directory)
        try:
            run(args, soak)
        finally:
            loop.close()
    stats = loop.zc_stats()
    for warning in said:
        soak.violate(f"{warning.category.__name__}: {warning.message}")
    if descriptors() != fds:
        soak.violate(f"{descriptors()} descriptors after loop.close(); {fds} before the loop")
    soak.check_memory()

    title = f"{args.backend}{' forced' if args.forced else ''}, seed {args.seed}, runs: {args.runs}"
    soak.watch.show(console, title)
    table = Table(title="what happened", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for name, count in sorted(soak.totals.items()):
        table.add_row(name, f"{count:,}")
    for name, growth in soak.growth.items():
        table.add_row(f"growth after warm-up, {name}", growth)
    table.add_row("slowest turn, ms", f"{soak.slowest_turn * 1000:.0f}")
    table.add_row("kernel's worker threads, peak", str(soak.workers))
    table.add_row("slowest life, ms", f"{soak.slowest_life[0] * 1000:.0f}")
    for name in ("requests", "zc_requests", "notifications", "enobufs", "cq_overflows"):
        table.add_row(name, f"{getattr(stats, name):,}")
    for name, count in stats.fallbacks.items():
        table.add_row(f"fall-back {name}", f"{count:,}")
    console.print(table)
    console.print(f"slowest life: {soak.slowest_life[1]}", highlight=False, soft_wrap=True)
    if soak.violations:
        console.print(f"{len(soak.violations)} violations; run it again with --seed {args.seed}")
        return 1
    console.print("no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
