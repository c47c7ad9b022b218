"""One zero-copy operation: its state, and what can be awaited of it.

State table (the transitions happen in _native/optable.c; this file only reads them):

    state      entered when                            sent        released
    QUEUED     admitted to the transport's queue       pending     pending
    ISSUED     (part of) it is in a request            pending     pending
    SENT       last byte accepted                      resolved    pending
    RELEASED   last notification of every attempt      resolved    resolved
    WITHDRAWN  `withdraw()` while untouched            cancelled   resolved
    FAILED     error, or transport lost                raises      raises, once the pages are free

Owns: the waiters, and with them the export locks of the buffers until release. Made by the transports,
resolved by reactor.py on the loop's thread, never by a user.
Never: gives a lock back before the native side says released.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _fast
from ._reactor_c import ffi, lib

if TYPE_CHECKING:
    from .reactor import Reactor


class OperationState(enum.IntEnum):
    """See the table at the head of this module."""

    QUEUED = lib.AZC_QUEUED
    ISSUED = lib.AZC_ISSUED
    SENT = lib.AZC_SENT
    RELEASED = lib.AZC_RELEASED
    WITHDRAWN = lib.AZC_WITHDRAWN
    FAILED = lib.AZC_FAILED


# The ways between the states. The picture in the documentation is drawn from this and from the table above
# (scripts/figures.py); tests/test_states.py holds both against operations.
TRANSITIONS: tuple[tuple[OperationState, OperationState, str], ...] = (
    (OperationState.QUEUED, OperationState.ISSUED, "a part is in a request"),
    (OperationState.ISSUED, OperationState.SENT, "last byte accepted"),
    (OperationState.SENT, OperationState.RELEASED, "last notification"),
    (OperationState.QUEUED, OperationState.WITHDRAWN, "withdraw()"),
    (OperationState.QUEUED, OperationState.FAILED, "connection lost"),
    (OperationState.ISSUED, OperationState.FAILED, "connection lost"),
    (OperationState.SENT, OperationState.FAILED, "zc_timeout"),
    # A datagram that met a full socket buffer, or goes again by copying.
    (OperationState.ISSUED, OperationState.QUEUED, "datagram: again"),
)

_cast = ffi.cast
_SENT = int(OperationState.SENT)
_WITHDRAWN = int(OperationState.WITHDRAWN)
_STATES = tuple(OperationState)  # by number: calling the enum costs 0.3 us


@dataclass(frozen=True, slots=True)
class Result:
    """What became of an operation.

    nbytes: bytes that the kernel accepted. path: "zero-copy", "copied", "mixed", or "unknown" where the
    kernel's report cannot be trusted (it lies for stacked requests). Not proof of delivery.
    """

    nbytes: int
    path: str


_PATHS = {
    lib.AZC_PATH_ZC: "zero-copy",
    lib.AZC_PATH_COPIED: "copied",
    lib.AZC_PATH_ZC | lib.AZC_PATH_COPIED: "mixed",
}


def path_name(bits: int) -> str:
    """AZC_PATH_* bits in words."""
    return _PATHS.get(bits, "unknown")


Stage = _fast.Stage


class Operation(_fast.Operation):
    """A submitted buffer, or list of buffers, on its way.

    nbytes: bytes submitted. bytes_sent: what the kernel accepted so far; stays readable after a failure.
    Awaiting the operation is awaiting `released`. Cancelling an await never cuts the stream and never
    withdraws. The memory must not be changed before `released`.
    """

    __slots__ = ("__weakref__",)

    # The fields, and what happens to them when it ends, are in _native/fast/operation.c.
    _waiters: list[tuple[bool, Any]] | None  # futures, or what is told like one

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reactor: Reactor | None = None,
        conn: Any = None,
        native: Any = None,
        keep: Any = None,
    ) -> None:
        if native is None:
            self._loop = loop
        else:
            self._start(loop, reactor, conn.address, int(_cast("uintptr_t", native)), keep)

    @classmethod
    def finished(cls, loop: asyncio.AbstractEventLoop, nbytes: int = 0, path: int = 0) -> Operation:
        """An operation that needs no kernel: of no bytes."""
        op = cls(loop)
        op.nbytes = op._sent_bytes = nbytes
        op._path = path
        op._state = OperationState.RELEASED
        op._free = True
        return op

    @classmethod
    def copied(cls, loop: asyncio.AbstractEventLoop, nbytes: int) -> Operation:
        """An operation whose bytes were copied before the call returned; `_settle` ends it."""
        op = cls(loop)
        op.nbytes = nbytes
        op._path = lib.AZC_PATH_COPIED
        return op

    def _settle(self, error: int) -> None:
        """The copies were accepted by the kernel, or will never be (an errno)."""
        self._sent_bytes = 0 if error else self.nbytes
        self._error = error
        self._state = OperationState.FAILED if error else OperationState.RELEASED
        self._free = True
        self._wake(sent_only=False)

    @property
    def state(self) -> OperationState:
        return _STATES[self._state_now]

    @property
    def sent(self) -> Stage:
        """Awaitable: the kernel accepted every byte. Raises the OSError that ended the transport."""
        return Stage(self, True)

    @property
    def released(self) -> Stage:
        """Awaitable: the kernel reads the memory no more. Raises like `sent`, once that is true."""
        return Stage(self, False)

    def withdraw(self) -> bool:
        """Take it out of the queue. True only if no byte of it was issued; nothing of it is sent then."""
        token, reactor = self._token, self._reactor
        if not token or not self._withdraw():
            return False
        reactor.held.pop(token, None)
        self._wake(sent_only=False)
        return True

    def __repr__(self) -> str:
        return f"<aiozc.Operation {self.state.name} {self.bytes_sent}/{self.nbytes} bytes>"

    # -- for broadcast.py and bare.py --

    def tell(self, listener: Any) -> bool:
        """`listener.set_result(None)` is called once the memory is free. False: it is already."""
        if not self._free:
            if self._waiters is None:
                self._waiters = []
            self._waiters.append((False, listener))
        return not self._free

    # -- for _native/fast/stage.c --

    def _waited(self, of_sent: bool) -> Generator[Any, None, Result]:
        """What awaiting a stage is that has not come yet."""
        while not (self._state_now >= _SENT if of_sent else self._free):
            waiter = self._loop.create_future()
            if of_sent:
                self._want_sent()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append((of_sent, waiter))
            yield from waiter
        return self._outcome(of_sent)

    def _outcome(self, of_sent: bool) -> Result:
        if of_sent and self._state_now == _WITHDRAWN:
            raise asyncio.CancelledError("the operation was withdrawn")
        if error := self._error_now:
            raise OSError(error, self._explain(error))
        return Result(self.bytes_sent, path_name(self._path_now))

    def _explain(self, error: int) -> str:
        return f"{os.strerror(error)} (after {self.bytes_sent} bytes)"

    # -- for the reactor --

    def _on_sent(self) -> None:
        """The last byte was accepted, or sending failed with the memory still pinned."""
        self._wake(sent_only=True)

    def _orphan(self) -> None:
        """The loop is gone and the kernel still reads: the locks are kept, for good."""
        self._part_from_native()
        self._waiters = None

    def _wake(self, sent_only: bool) -> None:
        later: list[tuple[bool, Any]] = []
        for is_sent, waiter in self._waiters or ():
            if sent_only and not is_sent:
                later.append((is_sent, waiter))
            elif not waiter.done():
                waiter.set_result(None)
        self._waiters = later or None
