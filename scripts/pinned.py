"""Pinned memory over time on a busy zero-copy stream, with stacks bounded (zc_eor_bytes) and without.

    python scripts/pinned.py HOST PORT --parts 1 8 32 --eor 65536 0 --json pinned.json --plot pinned.png

Connects to a sink that is given and sets nothing up: one that discards, at the end of a path that does not
copy and has less bandwidth than the processor (loopback copies, and shows nothing of this). Operations of
PARTS buffers are always waiting, and a request takes one of them (of 4,096 bytes at least: max_request is no
smaller).

Every 20 ms it notes the pinned bytes and those that the kernel holds unacknowledged (SIOCOUTQ). Of an
operation in each 256 KiB it notes the time from `sent` to `released`, and compares it with what the kernel's
queue takes at the rate of the whole run. "max/peak" compares the longest release of all with what the
largest queue takes. An EOR of 0 is no bound; the caps on pinned bytes are lifted for all.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import fcntl
import json
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Any, cast

import aiozc

TICK = 0.02
BATCH = 256 * 1024  # bytes that are submitted at a time; two of them wait
NO_CAP = 1 << 60


def unacknowledged(writer: asyncio.StreamWriter) -> int:
    fd = writer.get_extra_info("socket").fileno()
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))[0])


def share(values: list[float], part: float) -> float:
    """The value below which this part of them lies; 0.0 of none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] if values else 0.0


async def push(args: argparse.Namespace, parts: int) -> dict[str, Any]:
    loop = cast(aiozc.EventLoop, asyncio.get_running_loop())
    _, writer = await aiozc.open_connection(args.host, args.port)
    buffers = [bytes(args.size)] * parts
    waiting: collections.deque[tuple[aiozc.Operation, float, int]] = collections.deque()
    samples: list[tuple[float, int, int, int]] = []
    releases: list[tuple[float, int]] = []  # seconds from `sent`, bytes that were queued then
    batch = max(1, BATCH // (parts * args.size))
    began = time.monotonic()
    now, due, sent = began, began, 0
    ahead: collections.deque[aiozc.Operation] = collections.deque()
    while now < began + args.seconds:
        for _ in range(batch):
            op = writer.zc_submit(buffers)
        ahead.append(op)
        if len(ahead) < 2:
            continue
        op = ahead.popleft()
        await op.sent
        await asyncio.sleep(0)  # first in its turn: notifications were read just before
        now, queued = time.monotonic(), unacknowledged(writer)
        sent += batch * parts * args.size
        waiting.append((op, now, queued))
        while waiting and waiting[0][0].released.done():
            _, since, before = waiting.popleft()
            releases.append((now - since, before))
        if now >= due:
            due = now + TICK
            stats = loop.zc_stats()
            samples.append((now - began, stats.pinned_bytes, queued, stats.notifications))
    seconds = now - began
    rate = (sent - unacknowledged(writer)) / seconds
    stats = loop.zc_stats()
    transport: Any = writer.transport
    transport.zc_reset()
    queue_peak = max((queued for _, _, queued, _ in samples), default=0)
    steady = [sample for sample in samples if sample[0] >= 0.1 * args.seconds]
    ratios = [pinned / queued for _, pinned, queued, _ in steady if queued]
    waits = [wait / (before / rate) for wait, before in releases if before]
    return {
        "parts": parts,
        "size": args.size,
        "seconds": seconds,
        "bytes_per_second": rate,
        "requests": stats.zc_requests,
        "stacks": stats.stacks,
        "notifications": stats.notifications,
        "notifications_per_turn": stats.notifications_per_turn,
        "copied_reports": stats.copied_reports,
        "pinned_peak": stats.pinned_peak,
        "unacknowledged_peak": queue_peak,
        "pinned_to_unacknowledged": [share(ratios, 0.5), share(ratios, 0.99), share(ratios, 1.0)],
        "release_to_queue_delay": [share(waits, 0.5), share(waits, 0.99), share(waits, 1.0)],
        "released_within_twice": sum(wait <= 2 for wait in waits) / len(waits) if waits else 0.0,
        "release_max_to_peak_delay": stats.release_max / max(queue_peak / rate, 1e-9),
        "release_seconds": [
            stats.release_p50,
            stats.release_p90,
            stats.release_p99,
            stats.release_max,
        ],
        "samples": samples,
    }


def row(found: dict[str, Any]) -> str:
    ratios = " ".join(f"{x:7.2f}" for x in found["pinned_to_unacknowledged"])
    waits = " ".join(f"{x:7.2f}" for x in found["release_to_queue_delay"])
    release = " ".join(f"{x * 1e3:8.1f}" for x in found["release_seconds"])
    return (
        f"{found['parts']:5} {found['eor_bytes']:8} {found['bytes_per_second'] / 1e6:6.1f} "
        f"{found['requests']:8} {found['stacks']:7} {found['notifications']:8} "
        f"{found['pinned_peak'] / 1e6:8.2f} {found['unacknowledged_peak'] / 1e6:8.2f}  {ratios}  "
        f"{waits} {found['released_within_twice']:7.1%} {release} "
        f"{found['release_max_to_peak_delay']:8.2f}"
    )


HEAD = (
    "parts      EOR   MB/s requests  stacks  notifs  peak: MB    unack  pinned/unacknowledged    "
    "release/queue's delay   <= 2     release ms: p50, p90, p99, max  max/peak\n"
    "                                                  pinned            p50     p99     max      "
    "p50     p99     max"
)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    sizes = sorted({found["parts"] for found in results})
    figure = Figure(figsize=(4.5 * len(sizes), 4))
    for place, parts in enumerate(sizes, 1):
        axes = figure.add_subplot(1, len(sizes), place)
        for found in (found for found in results if found["parts"] == parts):
            times = [sample[0] for sample in found["samples"]]
            bound = found["eor_bytes"] or "no bound"
            axes.plot(times, [s[1] / 1e6 for s in found["samples"]], label=f"pinned, {bound}")
            axes.plot(
                times, [s[2] / 1e6 for s in found["samples"]], ":", label=f"unacknowledged, {bound}"
            )
        axes.set_yscale("log")
        axes.set_title(f"{parts} x {found['size']} B a request", fontsize=10)
        axes.set_xlabel("seconds")
        axes.set_ylabel("MB")
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--size", type=int, default=4000, help="bytes of a part")
    parser.add_argument("--eor", type=int, nargs="+", default=[65536, 0], help="zc_eor_bytes")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--json", type=Path, help="write figures and samples to FILE")
    parser.add_argument("--plot", type=Path, help="draw a picture (matplotlib)")
    args = parser.parse_args()
    if aiozc.capabilities().backend != "uring" or not aiozc.capabilities().zerocopy:
        sys.exit(f"pinned.py: nothing is pinned here: {aiozc.capabilities().reason}")
    results = []
    print(HEAD)
    for parts in args.parts:
        for eor in args.eor:
            settings = {"zc_eor_bytes": eor, "adaptive": False, "zc_threshold": 0}
            settings["max_request"] = max(4096, parts * args.size)
            caps = {"zc_loop_cap": NO_CAP, "zc_transport_cap": NO_CAP}
            found = aiozc.run(push(args, parts), backend="uring", **settings, **caps)
            results.append({"eor_bytes": eor, **found})
            print(row(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results))
    if args.plot:
        plot(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
