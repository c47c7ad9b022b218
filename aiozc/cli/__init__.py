"""The command line, `python -m aiozc COMMAND`: owns the parser, knows no command's inside.

Called by `aiozc/__main__.py` only; the library never imports it. Each command is a module of this
package with `register(subparsers)`, which adds its parser and sets `run=` to a function that takes
the parsed arguments and returns the exit code. Every module is imported on each call, for its
parser: what only its work needs (rich above all) is imported when that runs, never at the top.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from aiozc._version import __version__
from aiozc.cli import bench, demo, doctor

# In the order that --help shows them.
COMMANDS = (doctor, demo, bench)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m aiozc", description="An asyncio event loop on io_uring, zero-copy sends."
    )
    parser.add_argument("--version", action="version", version=f"aiozc {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.register(subparsers)
    parser.set_defaults(run=lambda _: _what_there_is(parser))
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `... | head`: as a program that SIGPIPE ends, and no complaint at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _what_there_is(parser: argparse.ArgumentParser) -> int:
    """No command was given."""
    parser.print_help(sys.stderr)
    return 2
