"""The event loop policy: a thin shim for programs that still use one (deprecated in 3.14, gone in 3.16).

Prefer `aiozc.run` or `loop_factory=aiozc.new_event_loop`. Importing this module touches nothing.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from typing import Any

from . import hooks
from .loop import EventLoop, new_event_loop

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _Base: Any = getattr(asyncio, "DefaultEventLoopPolicy", object)


class EventLoopPolicy(_Base):  # type: ignore[misc]
    """A policy whose loops are aiozc's; making one also gives asyncio.StreamWriter its zc_* methods."""

    def __init__(self) -> None:
        if _Base is object:
            raise RuntimeError(
                f"Python {sys.version_info.major}.{sys.version_info.minor} has no event loop "
                "policies; use aiozc.run(main()) or loop_factory=aiozc.new_event_loop"
            )
        super().__init__()
        hooks.patch_stream_writer()

    def _loop_factory(self) -> EventLoop:
        return new_event_loop()


def install() -> None:
    """Make aiozc's loop the one that asyncio makes. RuntimeError where Python has no policies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.set_event_loop_policy(EventLoopPolicy())
