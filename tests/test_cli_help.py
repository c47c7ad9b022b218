"""What the command line says to someone who does not know it yet."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

import pytest

import aiozc
from aiozc.cli import COMMANDS


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                yield from parsers(choice)


def everything() -> list[argparse.ArgumentParser]:
    top = argparse.ArgumentParser(prog="aiozc")
    commands = top.add_subparsers()
    for command in COMMANDS:
        command.register(commands)
    return list(parsers(top))[1:]


def call(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aiozc", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("parser", everything(), ids=lambda parser: parser.prog)
def test_every_argument_has_a_help_text(parser: argparse.ArgumentParser) -> None:
    # Fails when: an argument is added without a word about it.
    bare = [
        action.dest
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert not bare
    assert "`" not in parser.format_help()  # a comment for developers, shown to users


@pytest.mark.parametrize("args", [(), ("bench",)])
def test_no_command_shows_what_there_is(args: tuple[str, ...]) -> None:
    done = call(*args)
    assert done.returncode == 2 and not done.stdout
    assert "usage:" in done.stderr and "-h, --help" in done.stderr


def test_the_version_is_the_packages() -> None:
    assert call("--version").stdout == f"aiozc {aiozc.__version__}\n"
