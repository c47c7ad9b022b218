"""What may be sent, and how it is held.

Owns: the rules by which a buffer is taken by reference, locked or refused. Called by the transports.
Never: copies (the native side does), or holds anything itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    except TypeError:
        raise TypeError(
            f"a bytes-like object is needed, not {type(obj).__name__!r}; "
            "encode text with .encode(), or pass memoryview(obj)"
        ) from None
    except (BufferError, ValueError) as exc:
        raise BufferError(
            f"the buffer of {type(obj).__name__!r} cannot be sent as it lies in memory ({exc}); "
            "pass a C-contiguous copy, such as bytes(obj) or numpy.ascontiguousarray(obj)"
        ) from None


def exported(data: Any) -> tuple[Any, Any, int]:
    """Lock a buffer, or a list or tuple of buffers: what keeps the lock, an `azc_iov[]` of the parts (None
    for one buffer), and the number of bytes. The array lives apart: it is read by azc_submit only."""
    if type(data) is not list and type(data) is not tuple:
        keep = export(data)
        return keep, None, len(keep)
    keep = [export(part) for part in data]
    sizes = [len(part) for part in keep]
    return keep, ffi.new("azc_iov[]", list(zip(keep, sizes, strict=True))), sum(sizes)


def immutable(obj: memoryview) -> bool:
    """Whether a view's bytes can be changed by nobody: read-only, and rooted in exact `bytes`."""
    return obj.readonly and type(obj.obj) is bytes
