"""The event loops that can take part, by the names that the benchmarks know them by.

Used by __main__.py, which makes one, and by harness/, which needs only the names. An entry here is
all that a new loop needs. Never: imports a loop before it is asked for.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata


@dataclass(frozen=True)
class Loop:
    """`make` makes a loop or raises; `distribution` is what its version is read from."""

    make: Callable[[], asyncio.AbstractEventLoop]
    distribution: str | None

    def version(self) -> str:
        if self.distribution is None:
            return platform.python_version()
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:  # a source tree that is not installed
            return str(getattr(import_module(self.distribution), "__version__", "unknown"))


def package(name: str) -> Loop:
    """A package with the usual new_event_loop()."""
    return Loop(lambda: import_module(name).new_event_loop(), name)


def aiozc(backend: str) -> Loop:
    return Loop(lambda: import_module("aiozc").new_event_loop(backend=backend), "aiozc")


LOOPS = {
    "aiozc-uring": aiozc("uring"),
    "aiozc-epoll": aiozc("epoll"),
    "uvloop": package("uvloop"),
    "asyncio": Loop(asyncio.SelectorEventLoop, None),
    "rloop": package("rloop"),
    "rsloop": package("rsloop"),
    "blazio": package("blazio"),
    "loopmini": package("loopmini"),
    "zloop": package("zloop"),
    "zuvloop": package("zuvloop"),
}
