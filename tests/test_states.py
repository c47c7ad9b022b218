"""The state table of operation.py, as data, against operations; and what is drawn from it and from other code.

The documentation's picture shows TRANSITIONS: a way that operations go and the table does not have is found
here, and so is one that it has and they do not go.
"""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import MIB, SMALL_SNDBUF, StalledReader, eventually, soon, stalled

import aiozc
from aiozc.operation import TRANSITIONS

State = aiozc.OperationState
FIGURES = Path(__file__).resolve().parent.parent / "scripts" / "figures.py"
ENDS = {State.RELEASED, State.WITHDRAWN, State.FAILED}
WAYS = {(a, b) for a, b, _ in TRANSITIONS}


class Watched:
    """The states in which an operation was seen, looked at whenever a test does something."""

    def __init__(self, op: aiozc.Operation) -> None:
        self.op = op
        self.seen = [op.state]

    def look(self) -> State:
        if self.op.state is not self.seen[-1]:
            self.seen.append(self.op.state)
        return self.op.state

    async def until(self, *states: State) -> None:
        await eventually(lambda: self.look() in states)


async def travel() -> list[Watched]:
    """Operations by all ways that a stream has."""
    async with stalled(sndbuf=SMALL_SNDBUF) as (peer, writer):
        whole = Watched(writer.zc_submit(b"a" * 20_000))
        await whole.until(State.SENT, State.RELEASED)
        await peer.take(20_000)
        await whole.until(State.RELEASED)
        stuck = Watched(writer.zc_submit(b"b" * MIB))
        withdrawn = Watched(writer.zc_submit(b"c" * MIB))
        queued = Watched(writer.zc_submit(b"d" * MIB))
        await stuck.until(State.ISSUED)
        assert withdrawn.look() is queued.look() is State.QUEUED
        assert withdrawn.op.withdraw()
        withdrawn.look()
        peer.reset()
        for one in (stuck, queued):
            await one.until(State.FAILED)
        return [whole, stuck, withdrawn, queued]


async def time_out() -> Watched:
    with StalledReader() as peer:
        _, writer = await asyncio.open_connection(sock=peer.connect(sndbuf=SMALL_SNDBUF))
        # More than the peer's receive buffer can ever take.
        accepted = Watched(writer.zc_submit(b"a" * 40_000))  # type: ignore[attr-defined]
        await soon(accepted.op.sent)
        if accepted.look() is State.SENT:  # pinned
            await accepted.until(State.FAILED)
        writer.transport.abort()
        return accepted


def reachable(a: State, b: State) -> bool:
    """By any number of ways: a state that lasted less than a turn may not have been seen."""
    found, todo = set(), {a}
    while todo:
        found |= (todo := {y for x, y in WAYS if x in todo} - found)
    return b in found


def test_operations_go_the_ways_of_the_table_and_all_of_a_streams(
    run: Any, backend: str, forced_loop_factory: Any
) -> None:
    # Fails when: a way is left out of TRANSITIONS, or one is in it that no operation goes.
    timing = functools.partial(
        aiozc.new_event_loop, backend=backend, adaptive=False, zc_threshold=0, zc_timeout=0.4
    )
    watched = [*run(travel(), forced_loop_factory), run(time_out(), timing)]
    steps = {pair for one in watched for pair in zip(one.seen, one.seen[1:], strict=False)}
    assert not {(a.name, b.name) for a, b in steps if not reachable(a, b)}
    if backend == "uring":
        # Too short to be seen where the socket has room, and what only datagrams do.
        unseen = {
            (State.QUEUED, State.ISSUED),
            (State.ISSUED, State.SENT),
            (State.ISSUED, State.QUEUED),
        }
        assert not {(a.name, b.name) for a, b in WAYS - steps - unseen}


def test_the_table_has_every_state_and_ends_only_where_it_says() -> None:
    assert {a for a, _ in WAYS} | {b for _, b in WAYS} == set(State)
    assert {state for state in State if not any(a is state for a, _ in WAYS)} == ENDS


def test_what_is_made_from_code_and_figures_is_current() -> None:
    # Fails when: the state table, the metrics or measured data were changed without scripts/figures.py.
    if not FIGURES.is_file():
        pytest.skip("not a source tree")
    done = subprocess.run(
        [sys.executable, str(FIGURES), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
