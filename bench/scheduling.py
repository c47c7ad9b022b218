"""The scheduling rows of peers.py by CPU time, all loops in one process, in turn: nanoseconds a call.

    python bench/scheduling.py call-soon timers --loops aiozc-uring rloop uvloop

There is no clock of the wall in it, and each loop has a twentieth of a second before it is another's
turn: so what it says holds on a machine that does other things too, as far as that leaves the caches
alone. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from contestant.loops import LOOPS
from contestant.scheduling import WORKLOADS

SLICE = 0.05  # seconds of CPU time


async def cost(workload: Callable[[], Awaitable[int]]) -> float:
    await workload()
    calls, began = 0, time.process_time()
    while (used := time.process_time() - began) < SLICE:
        calls += await workload()
    return used / calls * 1e9


def once(loop: asyncio.AbstractEventLoop, workload: Callable[[], Awaitable[int]]) -> float:
    try:
        return loop.run_until_complete(cost(workload))
    finally:
        loop.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", choices=[[], *WORKLOADS], metavar="ROW")
    parser.add_argument(
        "--loops", nargs="+", choices=list(LOOPS), default=["aiozc-uring", "uvloop"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print("| row |", " | ".join(args.loops), "|")
    print("|---|" + "--:|" * len(args.loops))
    for name in args.rows or WORKLOADS:
        seen: dict[str, list[float]] = {loop: [] for loop in args.loops}
        for _ in range(args.rounds):
            for loop in args.loops:
                seen[loop].append(once(LOOPS[loop].make(), WORKLOADS[name]))
        medians = (f"{statistics.median(seen[loop]):,.0f}" for loop in args.loops)
        print(f"| {name} |", " | ".join(medians), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
