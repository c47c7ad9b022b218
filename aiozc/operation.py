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

from ._reactor_c import lib

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


_RELEASED = OperationState.RELEASED
_STATES = tuple(OperationState)  # by number: calling the enum costs 0.3 us


@dataclass(frozen=True, slots=True)
class Result:
    """What became of an operation.

    nbytes: bytes that the kernel accepted. path: "zero-copy", "copied", "mixed", or "unknown" where the
    kernel's report cannot be trusted (it lies for stacked requests). Not proof of delivery.
    """

    nbytes: int
    path: str


def path_name(bits: int) -> str:
    """AZC_PATH_* bits in words."""
    if bits == lib.AZC_PATH_ZC:
        return "zero-copy"
    if bits == lib.AZC_PATH_COPIED:
        return "copied"
    if bits == lib.AZC_PATH_ZC | lib.AZC_PATH_COPIED:
        return "mixed"
    return "unknown"


class Stage:
    """`op.sent` or `op.released`: any number of tasks may await it; cancelling one touches no other."""

    __slots__ = ("_is_sent", "_op")

    def __init__(self, op: Operation, is_sent: bool) -> None:
        self._op = op
        self._is_sent = is_sent

    def done(self) -> bool:
        """Whether awaiting it would not wait."""
        return self._op._sent_done() if self._is_sent else self._op._free

    def __await__(self) -> Generator[Any, None, Result]:
        op = self._op
        while not self.done():
            waiter = op._loop.create_future()
            if self._is_sent:
                op._want_sent()
            if op._waiters is None:
                op._waiters = []
            op._waiters.append((self._is_sent, waiter))
            yield from waiter
        return op._outcome(self._is_sent)

    def __repr__(self) -> str:
        name = "sent" if self._is_sent else "released"
        return f"<{name} of {self._op!r}: {'done' if self.done() else 'pending'}>"


class Operation:
    """A submitted buffer, or list of buffers, on its way.

    nbytes: bytes submitted. Awaiting the operation is awaiting `released`. Cancelling an await never
    cuts the stream and never withdraws. The memory must not be changed before `released`.
    """

    __slots__ = (
        "__weakref__",
        "_conn",
        "_error",
        "_free",
        "_keep",
        "_loop",
        "_native",
        "_path",
        "_reactor",
        "_sent_bytes",
        "_state",
        "_waiters",
        "nbytes",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reactor: Reactor | None,
        conn: Any,
        native: Any,
        keep: Any,
    ) -> None:
        self._loop = loop
        self._reactor = reactor
        self._conn = conn  # azc_conn *, valid while the operation is QUEUED
        self._native = native  # azc_op *, valid until the event that ends it was handled
        self._keep = keep
        # Futures, or what is told like one; made for the first.
        self._waiters: list[tuple[bool, Any]] | None = None
        self._free = False  # the kernel reads the memory no more
        self.nbytes: int = 0
        # Read only once the native side is gone, and set then: _error, _path, _sent_bytes, _state.
        if native is not None:
            self.nbytes = native.nbytes
        else:
            self._error = self._path = self._sent_bytes = 0
            self._state = OperationState.QUEUED

    @classmethod
    def finished(cls, loop: asyncio.AbstractEventLoop, nbytes: int = 0, path: int = 0) -> Operation:
        """An operation that needs no kernel: of no bytes."""
        op = cls(loop, None, None, None, None)
        op.nbytes = op._sent_bytes = nbytes
        op._path = path
        op._state = OperationState.RELEASED
        op._free = True
        return op

    @classmethod
    def copied(cls, loop: asyncio.AbstractEventLoop, nbytes: int) -> Operation:
        """An operation whose bytes were copied before the call returned; `_settle` ends it."""
        op = cls(loop, None, None, None, None)
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
        return self._state if self._native is None else _STATES[self._native.state]

    @property
    def bytes_sent(self) -> int:
        """Bytes that the kernel accepted so far; stays readable after a failure."""
        return self._sent_bytes if self._native is None else int(self._native.sent)

    @property
    def sent(self) -> Stage:
        """Awaitable: the kernel accepted every byte. Raises the OSError that ended the transport."""
        return Stage(self, True)

    @property
    def released(self) -> Stage:
        """Awaitable: the kernel reads the memory no more. Raises like `sent`, once that is true."""
        return Stage(self, False)

    def __await__(self) -> Generator[Any, None, Result]:
        return self.released.__await__()

    def withdraw(self) -> bool:
        """Take it out of the queue. True only if no byte of it was issued; nothing of it is sent then."""
        if self._native is None or self._reactor is None:
            return False
        if self._native.state != lib.AZC_QUEUED:
            return False
        return self._reactor.withdraw(self)

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

    # -- for Stage --

    def _sent_done(self) -> bool:
        return self.state >= OperationState.SENT

    def _want_sent(self) -> None:
        if self._native is not None:
            self._native.want_sent = 1

    def _outcome(self, of_sent: bool) -> Result:
        state = self.state
        if state is OperationState.WITHDRAWN and of_sent:
            raise asyncio.CancelledError("the operation was withdrawn")
        error = self._error if self._native is None else -int(self._native.error)
        if error:
            raise OSError(error, self._explain(error))
        path = self._path if self._native is None else int(self._native.path)
        return Result(self.bytes_sent, path_name(path))

    def _explain(self, error: int) -> str:
        return f"{os.strerror(error)} (after {self.bytes_sent} bytes)"

    # -- for the reactor --

    def _on_sent(self) -> None:
        """The last byte was accepted, or sending failed with the memory still pinned."""
        self._wake(sent_only=True)

    def _part_from_native(self) -> None:
        """Take over what the native side knows, for its slot goes to somebody else."""
        native = self._native
        self._sent_bytes = int(native.sent)
        self._error = -int(native.error)
        self._path = int(native.path)
        self._state = _STATES[native.state]
        self._native = self._reactor = self._conn = None

    def _finish(self, error: int, path: int) -> None:
        """The memory is free: give the locks back. The event told the errno, or 0, and the path."""
        if error:
            self._part_from_native()
        else:
            self._sent_bytes = self.nbytes
            self._error = 0
            self._path = path
            self._state = _RELEASED
            self._native = self._reactor = self._conn = None
        self._free = True
        self._keep = None
        if self._waiters is not None:
            self._wake(sent_only=False)

    def _withdrawn(self) -> None:
        """It is out of the queue."""
        self._part_from_native()
        self._state = OperationState.WITHDRAWN
        self._free = True
        self._keep = None
        self._wake(sent_only=False)

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
