"""`aiozc bench fanout`: one buffer to many connections, zero-copy beside copying, by aiozc's own engine.

Owns its arguments and its table. Zero-copy needs the buffer once however many connections there are; copying
puts it into each connection's send buffer.
"""

from __future__ import annotations

import argparse
from typing import Any

from aiozc.cli.bench import cases, options, report
from aiozc.cli.bench.cases import Case
from aiozc.cli.bench.path import open_path
from aiozc.cli.bench.run import Row, rounds, row_of, run_sender

MODES = ("copy", "zc", "zc-registered")
COLUMNS: tuple[report.Column, ...] = (
    ("connections", lambda row: str(row["connections"])),
    ("size", lambda row: str(row["size"])),
    ("mode", lambda row: row["mode"]),
    *report.FIGURES,
)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "fanout",
        help="one buffer to many connections",
        description="What it costs to send one buffer to many connections, again and again: by copying, "
        "zero-copy, and out of registered memory.",
    )
    parser.add_argument("--connections", type=options.whole(1, 1000), default=100)
    parser.add_argument("--size", type=options.whole(1, 1 << 24), default=256 << 10)
    parser.add_argument("--family", type=int, choices=cases.FAMILIES, default=4)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options.add_path(parser)
    options.add_common(parser, run)


def draw(figure: Any, rows: list[Row]) -> None:
    report.bars(figure, rows, "mode")


def run(args: argparse.Namespace) -> int:
    wanted = [Case("tcp", args.family, args.size, 1, mode) for mode in dict.fromkeys(args.modes)]
    reasons = {case: cases.why_not(case) for case in wanted}
    todo = [case for case in wanted if reasons[case] is None]
    # One buffer, again and again: the first of the pattern.
    data = cases.pattern(args.size, 1)[: args.size]
    with open_path(args.path) as path, report.progress(len(todo) * args.rounds) as show:

        def measure(case: Case) -> Row:
            count = args.connections
            result = run_sender(path, case, data, args.seconds, engine="fanout", connections=count)
            return {**row_of(case, result), "connections": count, "label": case.label}

        rows, failed = rounds(todo, args.rounds, measure, lambda case: case.label, show)
    told = report.document(args, "fanout", path, [row for _, row in rows])
    told["connections"] = args.connections
    told["left_out"] = [
        {"label": case.label, "reason": reason} for case, reason in reasons.items() if reason
    ]
    told["failed"] = [{"label": case.label, "reason": reason} for case, reason in failed]
    return report.finish(
        args, told, COLUMNS, ["sends/s: buffers, of all connections together."], draw=draw
    )
