"""`aiozc bench crossover`: from which size of a request zero-copy costs less CPU time than copying.

Owns its arguments, and the rule by which it tells the crossover. Both sides are aiozc's own engine, by
the same calls; each request is one buffer, since `max_request` is the buffer's size. So the result is what
the setting `zc_threshold` is compared with. A call submits several buffers: what Python costs a call is
the same for both, and would only hide the difference.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from aiozc.cli.bench import cases, options, report
from aiozc.cli.bench.cases import Case
from aiozc.cli.bench.errors import BenchError
from aiozc.cli.bench.path import open_path
from aiozc.cli.bench.run import Row, rounds, row_of, run_sender

LEAST = 4096  # the least that `max_request` may be
SIZES = tuple(1 << bits for bits in range(12, 21))
MODES = ("gather-copy", "zc")
PARTS = 8  # of a call
COLUMNS: tuple[report.Column, ...] = (
    ("request", lambda row: str(row["size"])),
    ("mode", lambda row: row["mode"]),
    *report.FIGURES,
)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "crossover",
        help="from which request size zero-copy costs less, and what to set",
        description="From which size of a request zero-copy costs less CPU time than copying, both by aiozc's "
        "engine; at the end it says what to set on this machine. Only --path sink can tell.",
    )
    size = options.whole(LEAST, 1 << 24)
    parser.add_argument("--sizes", nargs="+", type=size, default=list(SIZES))
    parser.add_argument("--family", type=int, choices=cases.FAMILIES, default=4)
    options.add_path(parser)
    options.add_common(parser, run)
    parser.set_defaults(rounds=5)


def cheaper(rows: Sequence[Row]) -> dict[int, bool]:
    """For each size, whether zero-copy cost less CPU time."""
    cost = {(row["size"], row["mode"]): row["cpu_s_per_gb"] for row in rows}
    sizes = sorted({row["size"] for row in rows})
    return {size: cost[size, "zc"] < cost[size, "gather-copy"] for size in sizes}


def crossover(rows: Sequence[Row]) -> int | None:
    """The smallest size from which on zero-copy cost less CPU time at every size measured."""
    found = None
    for size, less in reversed(cheaper(rows).items()):
        if not less:
            break
        found = size
    return found


def run(args: argparse.Namespace) -> int:
    todo = [
        Case("tcp", args.family, size, PARTS, mode)
        for size, mode in itertools.product(sorted(set(args.sizes)), MODES)
    ]
    if reason := cases.why_not(todo[-1]):
        raise BenchError(reason)
    with open_path(args.path) as path, report.progress(len(todo) * args.rounds) as show:

        def measure(case: Case) -> Row:
            result = run_sender(
                path,
                case,
                cases.pattern(case.size, PARTS),
                args.seconds,
                engine="engine",
                max_request=case.size,
            )
            return {**row_of(case, result), "label": case.label}

        rows, failed = rounds(todo, args.rounds, measure, lambda case: case.label, show)
    told = report.document(args, "crossover", path, [row for _, row in rows])
    told["failed"] = [{"label": case.label, "reason": reason} for case, reason in failed]
    told["crossover"] = None if failed else crossover(told["rows"])
    told["zc_threshold"] = told["crossover"]
    return report.finish(args, told, COLUMNS, _advice(told), draw=draw)


def draw(figure: Any, rows: list[Row]) -> None:
    report.lines(figure, rows, "size of a request")


def _advice(told: dict[str, Any]) -> list[str]:
    found = told["crossover"]
    if told["failed"]:
        return ["No crossover: rows are missing."]
    if told["path"] == "loopback":
        shown = "at no size measured" if found is None else f"from {found} bytes a request on"
        return [
            f"On loopback zero-copy cost less {shown}. Set nothing by that: the kernel copied in both."
        ]
    if found is None:
        return [
            "Zero-copy cost more CPU time than copying at the largest size measured. To set: "
            'zerocopy="off" (or AIOZC_ZEROCOPY=off), or measure larger ones with --sizes.'
        ]
    smallest = min(row["size"] for row in told["rows"])
    below = " (the smallest measured: it may lie below)" if found == smallest else ""
    lines = [
        f"Crossover: {found} bytes a request{below}. To set: aiozc.run(main(), zc_threshold={found}), "
        f"or for one connection transport.zc_configure(threshold={found})."
    ]
    early = [size for size, less in cheaper(told["rows"]).items() if less and size < found]
    if early:
        lines.append(
            f"It cost less at {early[0]} bytes too, but more again behind that: either noise, and more "
            "--rounds on a quiet machine will tell, or both cost about the same there."
        )
    return lines
