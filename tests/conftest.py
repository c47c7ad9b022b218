"""Fixtures that give every test both backends, and loops that are always closed; runs under fault knobs.

`backend` is a parameter; `loop_factory` makes ordinary loops, `forced_loop_factory` loops that send every
operation zero-copy. `run` runs one coroutine on such a loop, with a limit.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fault_support import reason_against

import aiozc
from aiozc import faults

LIMIT_SECONDS = 60.0


# -- where the environment's AIOZC_FAULT has the native code pretend faults --

KNOBS = {item.partition("=")[0] for item in os.environ.get(faults.VARIABLE, "").split(",") if item}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not faults.KNOBS and item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.skip(reason="needs a build with fault knobs"))
        if KNOBS and (why := reason_against(KNOBS, item.name)):
            item.add_marker(pytest.mark.skip(reason=f"cannot hold under this fault: {why}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A fault that never happened has tested nothing."""
    for name in sorted(KNOBS):
        print(f"\nfault {name}: {faults.fired(name)}")
        if not faults.fired(name):
            session.exitstatus = 1


# -- backends and loops --


@pytest.fixture(params=["uring", "epoll"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and aiozc.capabilities().backend != "uring":
        pytest.skip(f"no io_uring here: {aiozc.capabilities().reason}")
    return str(request.param)


@pytest.fixture
def loop_factory(backend: str) -> Callable[[], aiozc.EventLoop]:
    return functools.partial(aiozc.new_event_loop, backend=backend)


@pytest.fixture
def forced_loop_factory(backend: str) -> Callable[[], aiozc.EventLoop]:
    return functools.partial(aiozc.new_event_loop, backend=backend, adaptive=False, zc_threshold=0)


@pytest.fixture
def run(loop_factory: Callable[[], aiozc.EventLoop]) -> Callable[..., Any]:
    """run(coroutine, factory=None, limit=60.0): its result, from a loop of its own."""

    def runner(
        coro: Coroutine[Any, Any, Any],
        factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
        limit: float = LIMIT_SECONDS,
    ) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(limit):
                return await coro

        with asyncio.Runner(loop_factory=factory or loop_factory) as r:
            return r.run(bounded())

    return runner
