"""`python -m aiozc bench`: owns the arguments of its subcommands, and what is refused before one runs.

Called by `aiozc.cli` alone. Each subcommand is a module with `register(subparsers)`; `options` below
adds what several of them share. What does the sending is sender.py, in a process of its own.

Never: imports rich or matplotlib here, for every call of the command line comes through.
"""

from __future__ import annotations

from typing import Any

from aiozc.cli.bench import crossover, echo, fanout, send


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure sending: zero-copy beside copying",
        description=__doc__.split("\n")[0],
    )
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for module in (send, crossover, fanout, echo):
        module.register(commands)
