"""What serving data from memory costs, loop beside loop, on a path that does not copy: CPU seconds a GB.

    python bench/serving.py --rounds 5 --json serving.json --markdown serving.md

Unmodified asyncio code (`writer.write(data)`, `await writer.drain()`; `loop.sendfile`) on each loop, and
aiozc's own calls beside it, into a sink in network namespaces that acknowledges and discards (sink/; needs
root, and says what is missing). One process a run (serving_child.py), pinned to the first core; what the
sink costs is the other core's. Rounds are interleaved, medians shown, of the ratios, too. A run counts only
if the peer acknowledged every byte.

`--path loopback` compares aiozc with itself where nothing can be saved: as it comes, and told to copy.

Owns: which ways there are, and the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import operator
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import front
from harness.about import about
from harness.lock import only_benchmark
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sink.sink import SinkError, sink

CHILD = Path(__file__).with_name("serving_child.py")
SIZES = (4096, 65536, 262144, 1048576)
BASELINE = "uvloop write"
# What is done, by whom. "fan": 256 KiB to each of 100 connections.
WAYS = {
    "uvloop write": SIZES,
    "asyncio write": SIZES,
    "aiozc write": SIZES,
    "aiozc pool": SIZES,
    "uvloop submit": SIZES[
        1:
    ],  # aiozc.zc_submit on uvloop's transports: io_uring, and MSG_ZEROCOPY
    "uvloop submit-epoll": SIZES[1:],
    "asyncio sendfile": (1048576,),
    "uvloop fan": (262144,),
    "aiozc fan": (262144,),
    "aiozc broadcast": (262144,),
    "aiozc broadcast-pool": (262144,),
}
# On loopback: "copying" is aiozc with zerocopy="off", which everything is compared with.
HERE = {
    "copying write": SIZES[1:],
    "aiozc write": SIZES[1:],
    "copying send": SIZES[1:],
    "aiozc send": SIZES[1:],
}
READER = """
import os, socket, sys, threading
os.sched_setaffinity(0, {int(sys.argv[1])})
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def read(sock):
    into = bytearray(1 << 20)
    while sock.recv_into(into):
        pass
while True:
    threading.Thread(target=read, args=(listener.accept()[0],), daemon=True).start()
"""


def measure(way: str, size: int, seconds: float, given: dict[str, Any]) -> dict[str, float]:
    core = min(os.sched_getaffinity(0))
    within = ["ip", "netns", "exec", given["namespace"]] if given["namespace"] else []
    command = [*within, sys.executable, str(CHILD)]
    command += [
        *way.split(),
        str(size),
        str(seconds),
        str(core),
        given["tcp"]["4"],
        str(given["port"]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 4 * seconds)
    if done.returncode:
        raise SystemExit(f"serving.py: {way} {size} failed:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


@contextlib.contextmanager
def loopback(core: int) -> Iterator[dict[str, Any]]:
    """Somebody who reads and forgets, on another core."""
    command = [sys.executable, "-c", READER, str(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        try:
            port = int(reader.stdout.readline())
            yield {"namespace": "", "tcp": {"4": "127.0.0.1"}, "port": port}
        finally:
            reader.kill()


def baseline(way: str, path: str) -> str:
    if path == "loopback":
        return f"copying {way.split()[1]}"
    return "uvloop fan" if "fan" in way or "broadcast" in way else BASELINE


def table(rows: list[dict[str, Any]], path: str) -> Table:
    here = path == "loopback"
    found = Table(title=f"CPU seconds a GB, {path if here else 'into a path that does not copy'}")
    base = "/copying" if here else "/uvloop"
    for heading in ("size", "way", "GB/s", "CPU s/GB", base, "user", "system", "rounds"):
        found.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        found.add_row(
            f"{row['size']:,}",
            row["way"],
            f"{row['gb_per_s']:.2f}",
            f"{row['cpu_s_per_gb']:.4f}",
            f"{row['ratio']:.2f}" if row["ratio"] else "-",
            f"{row['user']:.4f}",
            f"{row['system']:.4f}",
            " ".join(f"{value:.3f}" for value in row["cpu_rounds"]),
        )
    return found


def markdown(rows: list[dict[str, Any]], path: str) -> str:
    base = "/copying" if path == "loopback" else "/uvloop"
    lines = [
        f"| bytes a write | way | GB/s | CPU s/GB | {base} | user | system |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['size']:,} | {row['way']} | {row['gb_per_s']:.2f} | {row['cpu_s_per_gb']:.4f} | "
        f"{row['ratio']:.2f} | {row['user']:.4f} | {row['system']:.4f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=front.positive, default=5)
    parser.add_argument("--seconds", type=front.positive_float, default=1.0)
    parser.add_argument("--path", choices=("sink", "loopback"), default="sink")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *HERE], metavar="WAY")
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to FILE")
    args = parser.parse_args()
    ways = HERE if args.path == "loopback" else WAYS
    if unknown := set(args.ways or ()) - set(ways):
        parser.error(f"not on the path {args.path}: {', '.join(sorted(unknown))}")
    todo = [(way, size) for size in args.sizes for way in args.ways or ways if size in ways[way]]
    seen: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in todo}
    others = sorted(os.sched_getaffinity(0))[1:2]
    try:
        other = others[0] if others else None
        way_there = sink(other) if args.path == "sink" else loopback(other or 0)
        with only_benchmark(), way_there as given, Progress() as show:
            task = show.add_task("serving", total=len(todo) * args.rounds)
            for _ in range(args.rounds):
                for case in todo:
                    seen[case].append(measure(*case, args.seconds, given))
                    show.advance(task)
    except SinkError as error:
        print(f"serving.py: {error}", file=sys.stderr)
        return 1
    rows = []
    for way, size in todo:
        rounds = seen[way, size]
        middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        base = [r["cpu_s_per_gb"] for r in seen.get((baseline(way, args.path), size), [])]
        cpu = [r["cpu_s_per_gb"] for r in rounds]
        # Of each round by itself: what else ran on the machine was the same for both.
        ratio = statistics.median(map(operator.truediv, cpu, base)) if base else 0.0
        rows.append({"way": way, "size": size, **middle, "ratio": ratio, "cpu_rounds": cpu})
    Console(width=150 if not sys.stdout.isatty() else None).print(table(rows, args.path))
    if args.markdown:
        args.markdown.write_text(markdown(rows, args.path))
    if args.json:
        described = about("serving", sys.executable, args.seconds, 0.2, args.rounds)
        args.json.write_text(
            json.dumps({**dataclasses.asdict(described), "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
