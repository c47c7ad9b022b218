"""`python -m aiozc bench`: owns the arguments of its subcommands, and what is refused before one runs.

Called by `aiozc.cli` alone. Each subcommand is a module with `register(subparsers)`; `options` below
adds what several of them share. What does the sending is sender.py, in a process of its own.

Never: imports rich or matplotlib here, for every call of the command line comes through.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from aiozc.cli.bench import crossover, echo, fanout, options, send


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure sending: zero-copy beside copying",
        description="Measures what sending costs on this machine. Begin with: "
        "sudo python -m aiozc bench crossover --path sink. Needs rich: pip install 'aiozc[bench]'.",
    )
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    for module in (send, crossover, fanout, echo):
        module.register(commands)
    for benchmark in commands.choices.values():
        options.describe(benchmark)
    parser.set_defaults(run=lambda _: _what_there_is(parser))


def _what_there_is(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2
