"""Other people's test suites on aiozc's loop: CPython's test.test_asyncio, and uvloop's.

    python scripts/conformance.py                          both suites, both backends
    python scripts/conformance.py --quick                  what .ci/run runs
    python scripts/conformance.py --suite uvloop --backend uring -k test_tcp
    python scripts/conformance.py --stock --json out.json  the same tests on stock asyncio beside ours
    python scripts/conformance.py --backend epoll --against out.json   compared with stock's times of that run
    python scripts/conformance.py --load a.json b.json --markdown   the tables of docs/compatibility.md

Exceptions, with their reasons, are in conformance_expected.toml. Status 0 says: nothing failed that is not
in there, nothing in there passed, every suite was run, and (with --stock or --against) no test took over
twice its time on stock asyncio: conforming/slow.py says how that is measured. A test that fails
unexpectedly is run once more alone, and that is told. What children print, and the tracebacks, are in
build/conformance/logs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import time
from pathlib import Path

from conforming import expected, report, slow, suites
from conforming.run import Orders, Result, run_module
from conforming.suites import Missing, Suite
from conforming.summary import Run
from rich.console import Console

STATUS = Console(stderr=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=["cpython", "uvloop", "all"], default="all")
    parser.add_argument("--backend", choices=["uring", "epoll", "both"], default="both")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(suites.QUICK)}")
    parser.add_argument("--stock", action="store_true", help="also on stock asyncio, to compare")
    parser.add_argument(
        "--against",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[],
        help="results of --stock --json: compare with the times there, stock is not run again",
    )
    parser.add_argument("-k", metavar="REGEX", default="", help="only tests with such an id")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("--markdown", action="store_true", help="print tables for the docs")
    parser.add_argument(
        "--load", nargs="+", type=Path, metavar="FILE", help="results of --json, instead of a run"
    )
    return parser.parse_args()


def wanted_suites(args: argparse.Namespace) -> tuple[list[Suite], list[str]]:
    """What can be run here, and what is missing for the rest."""
    found, missing = [], []
    names = ["cpython", "uvloop"] if args.suite == "all" else [args.suite]
    if args.quick:
        names = ["cpython"]
    for name in names:
        try:
            found.append(suites.cpython(args.quick) if name == "cpython" else suites.uvloop())
        except Missing as exc:
            missing.append(f"{name}: {exc}")
    return found, missing


def run_suite(suite: Suite, loop: str, args: argparse.Namespace) -> Run:
    here = [e for e in expected.load() if e.applies(suite.name, loop)]
    left_out = [pattern for e in here if not e.run for pattern in e.tests]
    # What fails when its module is imported is left out by the module's name.
    modules = [m for m in suite.modules if f"{m}.*" not in left_out]
    if re.fullmatch(r"test_\w+(\..*)?", args.k):
        modules = [m for m in modules if m.startswith(args.k.partition(".")[0])] or modules
    limits = [(pattern, e.limit) for e in here if e.limit for pattern in e.tests]
    orders = Orders(suite, loop, args.timeout, args.k, left_out, limits)
    logs = suites.BUILD / "logs" / f"{expected.PYTHON}-{suite.name}-{loop}"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    began = time.monotonic()
    results: list[Result] = []
    for number, module in enumerate(modules, 1):
        with STATUS.status(f"{suite.name} on {loop}: {module} ({number} of {len(modules)})"):
            log = logs / f"{module}.log"
            found = run_module(orders, module, log)
            if loop != "stock":
                found = [again(result, orders, module, log, here) for result in found]
            results += found
    stale = []
    if loop != "stock" and not args.quick and not args.k:
        ids = [result.id for result in results]
        stale = [e for e in here if e.run and not any(map(e.names, ids))]
    return Run(
        suite.name,
        expected.PYTHON,
        loop,
        results,
        time.monotonic() - began,
        stale=[", ".join(e.tests) for e in stale],
    )


def again(
    result: Result, orders: Orders, module: str, log: Path, here: list[expected.Exception_]
) -> Result:
    """The reason of an expected failure, or a second attempt at an unexpected one."""
    entry = next((e for e in here if e.run and e.names(result.id)), None)
    if entry is not None:
        result.reason = entry.reason
        if result.outcome == "passed" and entry.may_pass:
            result.reason = ""
        return result
    if result.outcome != "failed":
        return result
    second = next(
        (r for r in run_module(orders, module, log, only=[result.id]) if r.id == result.id), result
    )
    return Result(
        result.id,
        second.outcome,
        second.seconds,
        second.loops,
        result.message,
        attempts=2,
    )


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # children are ended on the way out
    if args.load:
        runs, missing = [run for path in args.load for run in report.read(path)], []
    else:
        found, missing = wanted_suites(args)
        loops = ["uring", "epoll"] if args.backend == "both" else [args.backend]
        if args.stock:
            loops.insert(0, "stock")
        runs = [run_suite(suite, loop, args) for suite in found for loop in loops]
        if args.stock or args.against:
            earlier = [run for path in args.against for run in report.read(path)]
            slow.look(runs, [*earlier, *runs], found, args)
        if args.json:
            report.write(runs, args.json)
    if args.markdown:
        report.markdown(runs)
    else:
        report.show(runs)
    for text in missing:
        print(f"conformance: not run: {text}")
    if not args.markdown:
        print(report.closing_line(runs))
    ours = [run for run in runs if run.loop != "stock"]
    return 0 if ours and not missing and all(run.clean for run in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
