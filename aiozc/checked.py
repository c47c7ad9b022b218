"""Catches what the export lock cannot: memory that is written to while the kernel may still read it.

Owns: the check sums of one operation's buffers, and where in the program it was submitted. `Checked` stands
for the locked buffers in the operation (in `reactor.held` for a plain write of aiozc.frozen) and is called
when they are released. Made by Reactor.checked where a loop is in debug mode or has the setting `zc_check`.
Called by the native side (fast/operation.c, fast/turn.c), in the loop's thread.
Never: keeps a view of the memory; changes when it is released.
"""

from __future__ import annotations

import asyncio.streams
import contextvars
import os
import sys
import traceback
import zlib
from typing import TYPE_CHECKING, Any

from . import _fast

if TYPE_CHECKING:
    from .operation import Operation

_DEPTH = 10  # frames, as asyncio's debug mode keeps
_BETWEEN = os.path.dirname(__file__) + os.sep, asyncio.streams.__file__  # us, and who writes by us

# A sum of 32 bits, since this looks for accidents and not for forgery: one in 4e9 goes unseen. Two sums a
# byte are what debug mode costs (tests/test_checked.py prints crc32 beside blake2b).
_sum = zlib.crc32


def wanted(loop: asyncio.AbstractEventLoop, setting: bool | None) -> bool:
    """`setting`: zc_check; None: as the loop's debug mode is now."""
    return bool(loop.get_debug()) if setting is None else setting


def watch() -> None:
    """From now on the native side asks `Reactor.checked` at every zc_write. For good."""
    _fast.check_by(Checked)


class Checked:
    """Locked buffers with their check sums at the call."""

    __slots__ = ("_keep", "_loop", "_sums", "_where")

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: _fast.Parts) -> None:
        self._loop = loop
        self._keep = keep
        self._sums = _sums(keep)
        self._where = _callers()

    def __call__(self, op: Operation | None = None) -> None:
        """The memory is free. `op` is None for a plain write, whose release nobody is told of."""
        now = _sums(self._keep)
        changed = [i for i, (a, b) in enumerate(zip(self._sums, now, strict=True)) if a != b]
        if not changed:
            return
        what = "an operation" if op is not None else "aiozc.frozen(...), given to write(),"
        parts = ", ".join(map(str, changed[:8])) + (", ..." if len(changed) > 8 else "")
        where = f"part {parts} of {len(now)}, counted from 0" if len(now) > 1 else "its only part"
        context: dict[str, Any] = {
            "message": f"aiozc: the memory of {what} was changed before it was released ({where}): the peer "
            "may have got the old contents, the new, or some of each. Await op.released (or "
            "writer.zc_send) before the memory is used again, or send a copy",
            "source_traceback": self._where,
        }
        if op is not None:
            context["operation"] = op
        if op is None and self._loop.is_running():
            # Not from where plain writes are released: the handler may raise, and the turn goes on.
            self._loop.call_soon(
                self._loop.call_exception_handler, context, context=contextvars.Context()
            )
        else:
            self._loop.call_exception_handler(context)


def _sums(keep: _fast.Parts) -> list[int]:
    return keep.each(_sum)


def _callers() -> traceback.StackSummary:
    """The stack as asyncio's source_traceback has it, up to the caller of the library."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    stack = traceback.StackSummary.extract(
        traceback.walk_stack(frame), limit=_DEPTH, lookup_lines=False
    )
    stack.reverse()
    return stack
