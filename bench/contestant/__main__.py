"""The process of one contestant: makes the loop, and runs one service or workload on it.

A service prints "port N" (and "apart TID": see served.py) and ends with SIGTERM; a workload of
scheduling.py talks as the C clients do. --probe prints the loop's version, or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from . import echoing, pushing, scheduling
from .loops import LOOPS
from .served import Wanted

SERVICES = echoing.SERVICES | pushing.SERVICES


async def serve(service: str, wanted: Wanted) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    served = await SERVICES[service](wanted)
    apart = f" apart {served.apart}" if served.apart else ""
    print(f"port {served.port}{apart}", flush=True)
    await stop.wait()
    served.close()


def end_with_parent() -> None:
    """A benchmark that is killed leaves no server behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the benchmark is gone")


def work(args: argparse.Namespace) -> Coroutine[Any, Any, None]:
    if args.service in scheduling.WORKLOADS:
        return scheduling.measure(args.service, args.seconds, args.warmup)
    wanted = Wanted(args.connections, args.size, args.piece, args.cycle)
    return serve(args.service, wanted)


def main() -> None:
    parser = argparse.ArgumentParser(prog="contestant", description=__doc__)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("service", nargs="?", choices=[*SERVICES, *scheduling.WORKLOADS])
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--piece", type=int, default=1024)
    parser.add_argument("--cycle", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--warmup", type=float, default=0.3)
    parser.add_argument("--probe", action="store_true", help="only show that the loop can be made")
    parser.add_argument("--profile", type=int, metavar="N", help="print the N costliest functions")
    args = parser.parse_args()

    end_with_parent()
    loop = LOOPS[args.loop]
    if args.probe:
        loop.make().close()
        print(loop.version())
        return
    if args.service is None:
        parser.error("a service is needed")
    with asyncio.Runner(loop_factory=loop.make) as runner:
        if args.profile is None:
            runner.run(work(args))
            return
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.runcall(runner.run, work(args))
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(args.profile)


if __name__ == "__main__":
    main()
