"""The command line, `python -m aiozc COMMAND`: owns the parser, knows no command's inside.

Called by `aiozc/__main__.py` only; the library never imports it. Each command is a module of this
package with `register(subparsers)`, which adds its parser and sets `run=` to a function that takes
the parsed arguments and returns the exit code. Every module is imported on each call, for its
parser: what only its work needs (rich above all) is imported when that runs, never at the top.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from aiozc.cli import bench, demo, doctor

# In the order that --help shows them.
COMMANDS = (doctor, demo, bench)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m aiozc", description="An asyncio event loop on io_uring, zero-copy sends."
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
