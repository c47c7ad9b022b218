"""What may be sent, and how it is held.

Owns: the rules by which a buffer is taken by reference, locked or refused. Called by the transports.
Many parts at once are locked by `_fast.Parts`, by the same rules.
Never: copies (the native side does), or holds anything itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ._reactor_c import ffi

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]  # 3.12

_from_buffer = ffi.from_buffer


class Frozen:
    """A caller's word that nobody changes `obj` while it is being sent. Made by `frozen`."""

    __slots__ = ("obj",)

    def __init__(self, obj: Buffer) -> None:
        self.obj = obj

    def __len__(self) -> int:
        return memoryview(self.obj).nbytes

    def __repr__(self) -> str:
        return f"aiozc.frozen({self.obj!r:.60})"


def frozen(obj: Buffer) -> Frozen:
    """Declare that nobody changes `obj` until it is sent: `write()` then holds it by reference.

    Accepted by `write`, `writelines` and `zc_*` of aiozc's transports. Changing the object all the
    same sends mixed contents; nothing checks that. TypeError: `obj` has no buffer. BufferError: it
    is not contiguous.
    """
    export(obj)
    return Frozen(obj)


def export(obj: Any) -> Any:
    """Lock the buffer of `obj`: a cffi `char[]` whose life keeps it from being resized or closed.

    TypeError: not a buffer. BufferError: not C-contiguous. The lock does not stop writes into it.
    """
    if type(obj) is Frozen:
        obj = obj.obj
    try:
        # A view of our own over the same memory: the caller may release his at once.
        return _from_buffer(memoryview(obj) if type(obj) is memoryview else obj)
    except (TypeError, BufferError, ValueError) as exc:
        refuse(obj, exc)


def refuse(obj: Any, exc: Exception) -> NoReturn:
    """Say why `obj` cannot be sent, and what to do. `exc`: what taking its buffer raised."""
    if isinstance(exc, TypeError):
        remedy = (
            "encode it with .encode()"
            if isinstance(obj, str)
            else "pass bytes, a bytearray, a memoryview or an array"
        )
        raise TypeError(
            f"a bytes-like object is needed, not {type(obj).__name__!r}; {remedy}"
        ) from None
    if isinstance(exc, (BufferError, ValueError)):
        raise BufferError(
            f"the buffer of {type(obj).__name__!r} cannot be sent as it lies in memory ({exc}); "
            "pass a C-contiguous copy, such as bytes(obj) or numpy.ascontiguousarray(obj)"
        ) from None
    raise exc


def immutable(obj: memoryview) -> bool:
    """Whether a view's bytes can be changed by nobody: read-only, and rooted in exact `bytes`."""
    return obj.readonly and type(obj.obj) is bytes
