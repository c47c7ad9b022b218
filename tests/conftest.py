"""Fixtures that give every test both backends, and loops that are always closed; runs under fault knobs.

`backend` is a parameter, of three variants where order and contract are tested: io_uring, epoll with
MSG_ZEROCOPY, epoll that copies (AIOZC_ZEROCOPY=off, for child processes too; `support.copies` tells).
Which passed how often is printed at the end of a run. `loop_factory` makes ordinary loops,
`forced_loop_factory` loops that send every operation zero-copy. `run` runs one coroutine on such a
loop, with a limit.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fault_support import reason_against

import aiozc
from aiozc import faults

LIMIT_SECONDS = 60.0
VARIANTS = ["uring", "epoll", "epoll-copy"]
COPYING_TOO = (
    "test_contract",
    "test_order",
    "test_datagram_zc",
    "test_attach",
)  # beginnings of modules' names


# -- where the environment's AIOZC_FAULT has the native code pretend faults --

KNOBS = {item.partition("=")[0] for item in os.environ.get(faults.VARIABLE, "").split(",") if item}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    by_hand = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "backend" in metafunc.fixturenames and "backend" not in by_hand:
        all_three = metafunc.module.__name__.startswith(COPYING_TOO)
        metafunc.parametrize("backend", VARIANTS if all_three else VARIANTS[:2], indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    variant = str(request.param)
    request.node.user_properties.append(("variant", variant))
    if variant == "uring" and aiozc.capabilities().backend != "uring":
        pytest.skip(f"no io_uring here: {aiozc.capabilities().reason}")
    if variant == "epoll-copy":
        monkeypatch.setenv("AIOZC_ZEROCOPY", "off")
    return variant.removesuffix("-copy")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many tests passed, by variant and by the loop that they ran on."""
    passed: collections.Counter[tuple[str, str]] = collections.Counter()
    for report in terminalreporter.stats.get("passed", ()):
        told = dict(report.user_properties)
        if report.when == "call" and "variant" in told:
            passed[told.get("loop", "aiozc"), told["variant"]] += 1
    loops = sorted({loop for loop, _ in passed})
    if not loops:
        return
    terminalreporter.section("passed, by loop and variant (epoll: MSG_ZEROCOPY)")
    for row in [("", *VARIANTS), *((loop, *(passed[loop, v] for v in VARIANTS)) for loop in loops)]:
        terminalreporter.line(f"{row[0]:<10}" + "".join(f"{cell:>12}" for cell in row[1:]))


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
