"""Fault knobs of a build for tests (AIOZC_FAULTS=1 when it is compiled); any other build has none.

The environment's AIOZC_FAULT, "name=every,name=every", sets knobs for every loop of the process, and for
the probe, before it runs: read when this module is imported. `turn` sets one of a single loop. What they do
is said in _native/faults.h. Called by reactor.py (EventLoop.zc_fault), capabilities.py and tests.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

from ._reactor_c import ffi, lib

VARIABLE = "AIOZC_FAULT"


def _knobs() -> dict[str, int]:
    if not hasattr(lib, "azc_fault"):
        return {}
    names = itertools.takewhile(lambda name: name, map(lib.azc_fault_name, itertools.count()))
    return {ffi.string(name).decode(): kind for kind, name in enumerate(names)}


# By name; empty in a build for use.
KNOBS = _knobs()


def _kind(name: str) -> int:
    if not KNOBS:
        raise RuntimeError(
            "this build of aiozc has no fault knobs: compile it with AIOZC_FAULTS=1, or `make faults`"
        )
    if name not in KNOBS:
        raise ValueError(f"no fault {name!r}; there are {', '.join(KNOBS)}")
    return KNOBS[name]


def turn(native: Any, name: str, every: int) -> None:
    """Of one native reactor, or (ffi.NULL) as every later one begins."""
    kind = _kind(name)
    lib.azc_fault(native, kind, every)


def fired(name: str) -> int:
    """How often it happened in this process. Those of queues and receive buffers are counted when their
    loop closes."""
    kind = _kind(name)
    return int(lib.azc_fault_fired(kind))


def _from_environment() -> None:
    for item in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, every = item.partition("=")
        if not every.isdigit():
            raise ValueError(f"environment {VARIABLE}: {item!r} is not NAME=EVERY")
        turn(ffi.NULL, name, int(every))


_from_environment()
