"""What subscribers that never read cost the others: `aiozc.broadcast`, on_slow="drop", with and without them.

    python bench/stalled.py --rounds 8

Frames of 256 KiB go to 190 subscribers that read, alone or beside 10 more (5 %) that have connected and never
read. The two are interleaved, round by round; p99 is the median of the rounds', and `ratio` of both medians.
On loopback p99 is from publishing a frame to its last byte at a reading subscriber, every byte compared. In the
sink (needs root) nobody reads, so it is of the calls: from publishing to the acknowledgement of the last of the
190, which is later than that of any single one. There those that never read are sockets behind the
same device, whose kernel closes its window.

Owns: the two cases side by side, and the sockets that never read. The rest is workloads.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from harness import front
from harness.lock import only_benchmark
from rich.console import Console
from rich.table import Table
from sink.sink import MAC_A, MAC_B, TCP, SinkError, sink
from workload.clients import CorruptBytes
from workloads import CLIENT_CORE, Case, on_loopback, on_sink

NEVER = "192.0.2.3"
BOUND = 1.10
WAYS = {
    "loopback": ("aiozc-uring call", "aiozc-epoll call"),
    "sink": ("aiozc-uring call", "aiozc-uring pool", "aiozc-epoll call"),
}
LISTENER = """
import socket, sys
with socket.socket() as listening:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 << 10)
    listening.bind((sys.argv[1], 0))
    listening.listen(1024)  # never accepts: the kernel takes what fits its buffers
    print(listening.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def case(reading: int, stalled: int, rate: int) -> Case:
    options = {"connections": reading + stalled, "stalled": stalled, "slow": 0, "rate": rate}
    return Case("broadcast", f"{stalled} stalled", options, ())


@contextlib.contextmanager
def never_reads(given: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Where the namespace of the sink can connect to sockets that nobody reads from."""
    near, far = given["namespace"], given["namespace"].replace("aiozcA", "aiozcB")
    for command in (
        f"ip -n {far} addr add {NEVER}/24 dev far",
        f"ip -n {far} neigh add {TCP['4'][0]} lladdr {MAC_A} dev far nud permanent",
        f"ip -n {near} neigh add {NEVER} lladdr {MAC_B} dev near nud permanent",
    ):
        subprocess.run(command.split(), check=True)
    child = subprocess.Popen(
        ["ip", "netns", "exec", far, sys.executable, "-c", LISTENER, NEVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout
        yield NEVER, int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()


def once(path: str, way: str, stalled: int, args: argparse.Namespace, given: Any) -> float:
    found = case(args.reading, stalled, args.rate)
    if path == "loopback":
        figures = on_loopback(found, way, args.seconds)
    else:
        options = {"connections": args.reading, "rate": args.rate}
        options["never_read"] = [given["never"]] * stalled
        figures = on_sink(Case("broadcast", found.name, options, ()), way, args.seconds, given)
    if figures["dropped"] < stalled:
        raise SystemExit(f"stalled.py: {path}, {way}: only {figures['dropped']} were slow")
    return figures["p99_ms" if path == "loopback" else "call_p99_ms"]


def measure(args: argparse.Namespace, given: Any) -> dict[Any, list[float]]:
    seen: dict[Any, list[float]] = {}
    for turn in range(args.rounds):
        for path in args.paths:
            for way in (way for way in WAYS[path] if not args.ways or way in args.ways):
                both = (0, args.stalled) if turn % 2 == 0 else (args.stalled, 0)
                for stalled in both:
                    seen.setdefault((path, way, stalled), []).append(
                        once(path, way, stalled, args, given)
                    )
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=front.positive, default=8)
    parser.add_argument("--seconds", type=front.positive_float, default=2.0)
    parser.add_argument("--reading", type=front.positive, default=190)
    parser.add_argument("--stalled", type=front.positive, default=10)
    parser.add_argument("--rate", type=front.positive, default=20, help="frames a second")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="default: all")
    parser.add_argument("--paths", nargs="+", choices=list(WAYS), default=list(WAYS))
    args = parser.parse_args()
    os.sched_setaffinity(0, {CLIENT_CORE})
    given: dict[str, Any] = {}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_benchmark())
            if "sink" in args.paths:
                given = dict(stack.enter_context(sink(CLIENT_CORE)))
                given["never"] = stack.enter_context(never_reads(given))
            seen = measure(args, given)
    except (SinkError, CorruptBytes) as error:
        print(f"stalled.py: {error}", file=sys.stderr)
        return 1
    share = args.stalled / (args.stalled + args.reading)
    table = Table(title=f"p99 of {args.reading} subscribers that read, at {args.rate} frames/s")
    for heading in ("path", "way", "0 stalled, ms", f"{share:.0%} stalled, ms", "ratio", "rounds"):
        table.add_column(heading, justify="left" if heading in ("path", "way") else "right")
    missed = 0
    for path, way, stalled in seen:
        if stalled:
            continue
        alone, beside = seen[path, way, 0], seen[path, way, args.stalled]
        base, other = statistics.median(alone), statistics.median(beside)
        pairs = sorted(b / a for a, b in zip(alone, beside, strict=True))
        missed += other / base > BOUND
        table.add_row(
            *(path, way, f"{base:.1f}", f"{other:.1f}", f"{other / base:.2f}"),
            f"{pairs[0]:.2f}-{pairs[-1]:.2f}",
        )
    Console(width=120 if not sys.stdout.isatty() else None).print(table)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
