"""Arguments that several benchmarks share, checked, and the frame in which each of them runs.

Called by the modules of the subcommands. Never: measures.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Callable
from typing import Any

from aiozc.cli.bench.errors import BenchError
from aiozc.cli.bench.lock import only_benchmark

# A run is bounded: nobody waits an hour because of one digit too many.
MOST_SECONDS, MOST_ROUNDS = 60.0, 100


def whole(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    convert.__name__ = "number"  # argparse names it: "invalid number value"
    return convert


def seconds(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.01 and {MOST_SECONDS:g}")
    return value


def add_common(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument(
        "--rounds", type=whole(1, MOST_ROUNDS), default=3, help="interleaved; medians are shown"
    )
    parser.add_argument("--seconds", type=seconds, default=0.5, help="of each row in each round")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--plot", metavar="FILE", help="picture; needs matplotlib")
    parser.set_defaults(run=lambda args: framed(args, run))


def add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        choices=["loopback", "sink"],
        default="loopback",
        help="loopback: every byte verified, proves no speed (it copies); sink: network namespaces "
        "with a path that does not copy, needs root",
    )


# Of arguments whose benchmark says nothing else.
_HELP = {
    "sizes": "bytes of one buffer",
    "size": "bytes of one buffer, or message",
    "parts": "buffers a call",
    "protocol": "over UDP several parts are one call by UDP_SEGMENT",
    "family": "IPv4 or IPv6",
    "modes": "what sends; see docs/performance.md",
    "connections": "how many at once",
    "loops": "which event loops",
}


def describe(parser: argparse.ArgumentParser) -> None:
    """A help text for every argument, with its default; lists of choices are shown once."""
    for action in parser._actions:
        action.help = action.help or _HELP.get(action.dest)
        if not action.help:
            continue  # a test finds it
        default = action.default
        if action.choices is not None and action.nargs == "+":
            action.metavar = action.dest.upper().rstrip("S")
            action.help = f"{action.help}: {', '.join(map(str, action.choices))}"
            default = "all" if default == list(action.choices) else default
        if default not in (None, False, argparse.SUPPRESS):
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            action.help = f"{action.help} (default: {shown})"


def framed(args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Runs a benchmark: alone on the machine, with its errors in words. Returns the exit code."""
    if not _there("rich"):
        print("error: the benchmarks need rich: pip install 'aiozc[bench]'", file=sys.stderr)
        return 2
    if args.plot and not _there("matplotlib"):
        print("error: --plot needs matplotlib: pip install 'aiozc[bench]'", file=sys.stderr)
        return 2
    # So that a terminated run removes its namespaces, as an interrupted one does.
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with only_benchmark():
            return run(args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # sys.modules has None, or a module without a spec, in its place
        return False


def _terminated(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)
