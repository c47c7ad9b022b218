"""`aiozc bench send`: the matrix of sizes, protocols, families, modes and parts.

Owns its arguments and its table. Called by aiozc.cli.bench.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from typing import Any

from aiozc.cli.bench import cases, ceiling, options, reference, report
from aiozc.cli.bench.cases import Case
from aiozc.cli.bench.errors import BenchError
from aiozc.cli.bench.path import open_path
from aiozc.cli.bench.run import Row, rounds, row_of, run_sender

COLUMNS: tuple[report.Column, ...] = (
    ("protocol", lambda row: f"{row['protocol']} IPv{row['family']}"),
    ("size", lambda row: str(row["size"])),
    ("parts", lambda row: str(row["parts"])),
    ("mode", lambda row: row["mode"]),
    *report.FIGURES,
)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "send",
        help="sizes x protocols x ways to send x parts",
        description="What sending costs in every way there is, by sizes, numbers of parts and protocols: some "
        "200 rows, a few minutes. --sizes, --parts, --protocol, --family and --modes make it short.",
    )
    number = options.whole
    parser.add_argument("--sizes", nargs="+", type=number(1, 1 << 24), default=list(cases.SIZES))
    parser.add_argument("--parts", nargs="+", type=number(1, 1024), default=list(cases.PARTS))
    parser.add_argument(
        "--protocol", nargs="+", choices=cases.PROTOCOLS, default=list(cases.PROTOCOLS)
    )
    parser.add_argument(
        "--family", nargs="+", type=int, choices=cases.FAMILIES, default=list(cases.FAMILIES)
    )
    parser.add_argument("--modes", nargs="+", choices=cases.MODES, default=list(cases.MODES))
    parser.add_argument(
        "--window",
        type=number(1, 1 << 30),
        default=1 << 20,
        help="bytes that the zero-copy modes keep unsent or unreleased before they wait",
    )
    parser.add_argument(
        "--max-request",
        type=number(4096, 1 << 30),
        default=1 << 20,
        help="bytes that one request of the zero-copy modes gathers at most (the loop's setting)",
    )
    parser.add_argument(
        "--reference", metavar="BINARY", help="liburing's send-zerocopy, run in the same rounds"
    )
    parser.add_argument(
        "--ceiling",
        action="store_true",
        help="a C program that gathers registered memory and does nothing else, in the same rounds "
        "(TCP, --path sink; needs gcc)",
    )
    options.add_path(parser)
    options.add_common(parser, run)


def run(args: argparse.Namespace) -> int:
    binary = reference.check(args.reference) if args.reference else ""
    if args.ceiling and args.path != "sink":
        raise BenchError("--ceiling needs --path sink: nobody compares its bytes")
    modes = [*args.modes, *([cases.REFERENCE] if binary else [])]
    modes += [cases.CEILING] if args.ceiling else []
    # Each once, in the order given.
    axes = (args.sizes, args.parts, args.protocol, args.family, modes)
    wanted = list(cases.matrix(*(list(dict.fromkeys(values)) for values in axes)))
    reasons = {case: cases.why_not(case) for case in wanted}
    todo = [case for case in wanted if reasons[case] is None]
    with (
        tempfile.TemporaryDirectory() as directory,
        open_path(args.path) as path,
        report.progress(len(todo) * args.rounds) as show,
    ):
        program = ceiling.build(directory) if args.ceiling else ""

        def measure(case: Case) -> Row:
            if case.mode == cases.REFERENCE:
                row = reference.measure(binary, path, case, args.seconds)
            elif case.mode == cases.CEILING:
                row = ceiling.measure(program, path, case, args)
            else:
                data = cases.pattern(case.size, case.parts)
                limits = {"window": args.window, "max_request": args.max_request}
                result = run_sender(path, case, data, args.seconds, **limits)
                row = row_of(case, result)
            return {**row, "label": case.label}

        rows, failed = rounds(todo, args.rounds, measure, lambda case: case.label, show)
    told = report.document(args, "send", path, [row for _, row in rows])
    told["window"] = args.window
    told["max_request"] = args.max_request
    told["left_out"] = [
        {**dataclasses.asdict(case), "label": case.label, "reason": reason}
        for case, reason in reasons.items()
        if reason
    ]
    told["failed"] = [
        {**dataclasses.asdict(case), "label": case.label, "reason": reason}
        for case, reason in failed
    ]
    return report.finish(args, told, COLUMNS, remarks(told), draw=report.lines)


def remarks(told: dict[str, Any]) -> list[str]:
    lines = ["CPU: of the sending process, user and system, on one processor."]
    if any(row["engine"] == "bare sockets" for row in told["rows"]):
        lines.append(
            "Rows by `bare sockets` are blocking system calls of this benchmark, without a loop: "
            "aiozc has no engine of its own for them."
        )
    if any(row["outstanding"] for row in told["rows"]):
        counts = sorted({row["outstanding"] for row in told["rows"] if row["outstanding"]})
        lines.append(
            f"Rows by aiozc: one task, at most {told['window']} bytes unsent or unreleased "
            f"(or one call, where that is more): {', '.join(map(str, counts))} submits outstanding."
        )
    return lines
