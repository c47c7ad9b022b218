"""Puts aiozc's loop into test suites that were not written for it. Called by child.py, before any test
is imported.

The backend is the one that AIOZC_BACKEND names, so interpreters which tests start have the same.
Never: changes what a test does, beyond which loop it gets.
"""

from __future__ import annotations

import asyncio
import unittest
from typing import Any

loops_made = 0


def into_cpython() -> None:
    """Every way in which test.test_asyncio gets a loop: the class by name, with or without a selector, and
    the default policy, which each module's tearDownModule installs anew."""
    import aiozc

    class EventLoop(aiozc.EventLoop):
        def __init__(self, selector: Any = None) -> None:
            if selector is not None:
                selector.close()
            super().__init__()

    class Policy(aiozc.EventLoopPolicy):
        def _loop_factory(self) -> Any:
            return EventLoop()

    replaced = {
        "SelectorEventLoop": EventLoop,
        "EventLoop": EventLoop,
        "DefaultEventLoopPolicy": Policy,
        "_DefaultEventLoopPolicy": Policy,
    }
    for name, ours in replaced.items():
        if name in vars(asyncio):
            setattr(asyncio, name, ours)
    if hasattr(asyncio.unix_events, "_DefaultEventLoopPolicy"):  # where 3.14 looks for it
        asyncio.unix_events._DefaultEventLoopPolicy = Policy
    _count(aiozc.EventLoop)


def into_uvloop(stock: bool) -> None:
    """The stand-in package does the rest. `implementation` is asked by tests that have a uvloop side, and
    by tests that do not run on "asyncio"; it is imported, too."""
    from uvloop import _testbase

    _testbase.UVTestCase.implementation = "asyncio.runners" if stock else "aiozc"
    if not stock:
        import aiozc

        _count(aiozc.EventLoop)


def for_asyncio_alone(test: unittest.TestCase) -> bool:
    """uvloop's suite runs each test on uvloop and on asyncio; the second never meets our loop."""
    return any(base.__name__ == "AIOTestCase" for base in type(test).__mro__)


def _count(kind: Any) -> None:
    made = kind.__init__

    def counting(self: Any, **settings: Any) -> None:
        global loops_made
        loops_made += 1
        made(self, **settings)

    kind.__init__ = counting
