"""What the command line, and wrong arguments, say to someone who does not know aiozc yet."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

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


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"zc_treshold": 1}, "aiozc has no setting 'zc_treshold'; did you mean 'zc_threshold'?"),
        ({"workers": 4}, "aiozc has no setting 'workers'; there are backend, zerocopy"),
        ({"zc_threshold": "16k"}, "zc_threshold must be an int, not '16k'"),
        ({"zc_loop_cap": 1.5}, "zc_loop_cap must be an int, not 1.5"),
        ({"zc_eor_bytes": None}, "zc_eor_bytes must be an int, not None"),
        ({"max_request": True}, "max_request must be an int, not True"),
        ({"zc_timeout": "1"}, "zc_timeout is a number of seconds, not '1'"),
        ({"zc_linger": None}, "zc_linger is a number of seconds, not None"),
    ],
)
def test_a_setting_that_is_none_or_of_another_type_is_refused_in_words(
    wrong: dict[str, Any], told: str
) -> None:
    # Fails when: Python's own words come first (Settings.__init__() got ..., '<' not supported ...).
    with pytest.raises(TypeError) as caught:
        aiozc.new_event_loop(**wrong)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        ({"cq_entries": 512}, "cq_entries=1024 or more"),
        ({"ring_entries": 8193}, "cq_entries=16384 or more"),
        ({"ring_entries": 65536, "cq_entries": 16384}, "cq_entries=32768 or more"),
        ({"ring_entries": 2, "cq_entries": 1}, "fewer ring_entries"),
    ],
)
def test_a_ring_that_the_kernel_would_not_make_is_refused_with_the_remedy(
    wrong: dict[str, int], remedy: str
) -> None:
    # Fails when: it is left to the kernel, whose EINVAL comes when the loop starts, and names nothing.
    with pytest.raises(ValueError, match=remedy):
        aiozc.new_event_loop(**wrong)


@pytest.mark.parametrize(
    "entries, completions", [(1, 1), (5, 8), (1000, 1024), (1025, 2048), (40000, 32768)]
)
def test_a_ring_that_the_kernel_makes_is_not_refused(entries: int, completions: int) -> None:
    # Fails when: what was asked for is compared, and not what the kernel makes of it.
    aiozc.run(asyncio.sleep(0), ring_entries=entries, cq_entries=completions)


@pytest.mark.parametrize(
    "obj, told", [("text", ".encode()"), (None, "bytearray"), (5, "bytearray")]
)
def test_what_is_no_buffer_is_refused_with_a_remedy_that_fits(obj: Any, told: str) -> None:
    # Fails when: somebody who passed None is told to encode it.
    with pytest.raises(TypeError, match="a bytes-like object is needed") as caught:
        aiozc.frozen(obj)
    assert told in str(caught.value)
    assert isinstance(obj, str) or "encode" not in str(caught.value)


def test_a_pool_of_no_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match="interpreted as an integer"):
        aiozc.BufferPool(size="64k")  # type: ignore[arg-type]


def test_a_reader_that_ends_early_is_no_error_to_speak_of() -> None:
    # Fails when: `python -m aiozc doctor | head -3` ends with a traceback.
    command = [sys.executable, "-m", "aiozc", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (141, b"")
