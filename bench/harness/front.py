"""What the fronts share: their options, and the way from rows to tables, JSON and a picture."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from .about import about
from .contestants import NAMES, Window, available
from .document import write_json
from .errors import BenchmarkError, Failed
from .lock import only_benchmark
from .measure import Bench, measure
from .report import show, write_markdown
from .rounds import Results, run_rounds
from .rows import Row

WARMUP = 0.3  # seconds before the measured window
PROFILE_LINES = 25
OURS = "aiozc"


def parser(description: str | None, *, rounds: int, seconds: float) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--seconds", type=positive_float, default=seconds, help="measured window")
    found.add_argument("--rounds", type=positive, default=rounds)
    found.add_argument("--loops", nargs="+", choices=NAMES, help="default: all that there are")
    found.add_argument("--python", default=sys.executable, help="interpreter of the servers")
    found.add_argument("--json", type=Path, metavar="FILE", help="write all rounds to FILE")
    found.add_argument("--markdown", type=Path, metavar="FILE", help="write a page to FILE")
    found.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (matplotlib)")
    found.add_argument(
        "--profile",
        action="store_true",
        help="one round under cProfile, no figures (default loop: aiozc-uring)",
    )
    return found


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def run(name: str, args: argparse.Namespace, rows: Sequence[Row], loops: Sequence[str]) -> int:
    """The exit status: 1 where our own loop did anything wrong, or nothing could be measured."""
    try:
        bench = prepare(args)
        if args.profile and not args.loops:
            args.loops = ["aiozc-uring"]
        described = about(name, args.python, args.seconds, WARMUP, args.rounds)
        results = Results(described, rows, *available(args.python, args.loops, loops))
        with only_benchmark():
            if args.profile:
                show_profiles(bench, results)
                return 0
            run_rounds(bench, results)
    except BenchmarkError as error:
        print(f"{name}.py: {error}", file=sys.stderr)
        return 1
    write(args, results)
    return int(any(c.name.startswith(OURS) for _, c, _ in results.complaints()))


def prepare(args: argparse.Namespace) -> Bench:
    """Everything that can be refused is refused before anything is measured."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise BenchmarkError("two cores are needed: one for the server, one for the client")
    if args.plot and util.find_spec("matplotlib") is None:
        raise BenchmarkError("--plot needs matplotlib: pip install matplotlib")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return Bench(Window(args.seconds, WARMUP), *cores)


def show_profiles(bench: Bench, results: Results) -> None:
    for row in results.rows:
        for contestant in results.contestants:
            print(f"{contestant.name}, {row.title}:")
            try:
                print(measure(bench, row, contestant, "--profile", str(PROFILE_LINES)).output)
            except Failed as failure:
                print(f"failed: {failure}")


def write(args: argparse.Namespace, results: Results) -> None:
    show(results)
    if args.json:
        write_json(results, args.json)
    if args.markdown:
        write_markdown(results, args.markdown)
    if args.plot:
        from .plot import write_plot

        write_plot(results, args.plot)
