"""`as_buffer`: the memory of a tensor or an array, as bytes that every send method takes.

Owns: where the memory of an object is found, and what to do where it cannot be sent as it lies. Called by
users. Knows tensors and arrays by what they have, not by their packages; numpy is imported for DLPack alone.
Never: copies, moves between devices, or returns memory that its owner may free first.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from . import _fast
from ._reactor_c import ffi
from .buffers import Frozen

_DLPACK_HOST = (1, 3, 11)  # CPU, and memory of the host that CUDA or ROCm has pinned


def as_buffer(obj: Any) -> memoryview:
    """The memory of `obj` as a flat memoryview of bytes, without copying; it keeps `obj` alive.

    obj: what has a buffer (bytes, bytearray, mmap, numpy and Arrow), a CPU tensor of any dtype (PyTorch and
    what looks like it; bfloat16 and the like too), or what has `__array_interface__` or DLPack. The view is
    read-only where `obj` is. A tensor's memory must not be resized (`resize_`, `set_`) before what is sent
    from it is released: unlike a buffer's, its size cannot be locked.

    TypeError: no memory can be had of it. BufferError: on another device, strided, sparse, or not what the
    memory says (lazily conjugated); each message names the call that makes one that can be sent.
    """
    if type(obj) is Frozen:
        obj = obj.obj
    if _is_tensor(obj):
        return _of_tensor(obj)
    try:
        view = memoryview(obj)
    except TypeError:
        view = None
    except (BufferError, ValueError) as exc:
        # numpy cannot describe dates; a sequence of buffers, or a device array, refuses itself.
        if not hasattr(obj, "__array_interface__"):
            raise BufferError(f"the buffer of {type(obj).__name__!r} cannot be had: {exc}") from exc
        view = None
    if view is not None:
        return _flat(view, obj)
    if hasattr(obj, "__array_interface__"):
        return _of_interface(obj, obj.__array_interface__)
    if hasattr(obj, "__dlpack__"):
        return _of_dlpack(obj)
    raise TypeError(
        f"a buffer, a tensor or an array is needed, not {type(obj).__name__!r}; "
        "encode text with .encode(), or serialize the object first"
    )


def _flat(view: memoryview, obj: Any) -> memoryview:
    if "O" in re.sub(
        ":[^:]*:", "", view.format
    ):  # fields of records have their names between colons
        raise _objects()
    if not view.c_contiguous:
        raise _strided(obj, view)
    if not view.nbytes:
        return memoryview(b"")
    try:
        return view.cast("B")
    except TypeError:
        # A format that Python does not know (records, another byte order): the bytes are the same.
        whole = memoryview(ffi.buffer(ffi.from_buffer(view)))
        return whole.toreadonly() if view.readonly else whole


def _objects() -> TypeError:
    return TypeError("an array of Python objects holds addresses, not data; serialize it first")


def _strided(obj: Any, view: memoryview | None = None) -> BufferError:
    kind = type(obj).__name__
    if isinstance(obj, memoryview):
        remedy = "pass bytes(view)"
    elif view is not None and view.contiguous:
        remedy = f"its memory is in Fortran's order: pass {kind}.T, or numpy.ascontiguousarray(...)"
    else:
        remedy = "pass numpy.ascontiguousarray(...) of it"
    return BufferError(f"this {kind} is not C-contiguous, and as_buffer never copies; {remedy}")


# -- tensors --


def _is_tensor(obj: Any) -> bool:
    return all(hasattr(obj, name) for name in ("detach", "is_contiguous", "device", "numpy"))


def _of_tensor(tensor: Any) -> memoryview:
    device = getattr(tensor.device, "type", None) or str(tensor.device)
    if device == "meta":
        raise BufferError("a tensor on the device 'meta' has no data; load it first")
    if device != "cpu":
        raise BufferError(
            f"the tensor is on {tensor.device}, where the kernel cannot send from; pass tensor.cpu()"
        )
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if not layout.endswith("strided"):
        raise BufferError(f"the tensor's layout is {layout}; pass tensor.to_dense()")
    for lazy in ("conj", "neg"):
        if getattr(tensor, f"is_{lazy}", bool)():
            raise BufferError(
                f"the tensor is a lazy view (is_{lazy}), its memory has other values; "
                f"pass tensor.resolve_{lazy}()"
            )
    if not tensor.is_contiguous():
        raise BufferError(
            "the tensor is not contiguous, and as_buffer never copies; pass tensor.contiguous()"
        )
    plain = tensor.detach()  # a view, without the graph
    if not plain.numel():
        return memoryview(b"")
    # Not every dtype has a counterpart in numpy (bfloat16, float8): as bytes all of them have one.
    # `reshape` of what is contiguous is a view, and makes the scalar one element.
    package = sys.modules[type(tensor).__module__.partition(".")[0]]
    uint8 = getattr(package, "uint8", None) or sys.modules["torch"].uint8
    return memoryview(plain.reshape(-1).view(uint8).numpy()).cast("B")


# -- arrays without a buffer --


def _of_interface(obj: Any, interface: dict[str, Any]) -> memoryview:
    """numpy's protocol: an address, a shape, strides, and the type as `<f4`."""
    shape: tuple[int, ...] = interface["shape"]
    item = _item_size(str(interface["typestr"]))
    strides = interface.get("strides")
    nbytes = item
    packed = []  # the strides of a C-contiguous array, last first
    for n in reversed(shape):
        packed.append(nbytes)
        nbytes *= n
    if nbytes and strides is not None and tuple(strides) != tuple(reversed(packed)):
        raise _strided(obj)
    data = interface.get("data")
    if not nbytes:
        return memoryview(b"")
    if not isinstance(data, tuple):  # a buffer (None: its own), from an offset on
        start = int(interface.get("offset", 0))
        return as_buffer(data if data is not None else obj)[start : start + nbytes]
    address, readonly = data
    view = memoryview(_fast.Slot(int(address), nbytes, _Keeper(obj, interface)))
    return view.toreadonly() if readonly else view


class _Keeper:
    """What a view of an address refers to, so that the memory there lives as long as the view."""

    __slots__ = ("owners",)

    def __init__(self, *owners: Any) -> None:
        self.owners = owners

    def __call__(self) -> None:
        """The last view is gone."""
        self.owners = ()


def _item_size(typestr: str) -> int:
    """Of `<f4`, `|V12`, `<M8[ns]`: the number, but for unicode, where it counts characters of 4 bytes."""
    kind, number = typestr[1], typestr[2:].partition("[")[0]
    if kind == "O":
        raise _objects()
    return int(number) * (4 if kind == "U" else 1)


def _of_dlpack(obj: Any) -> memoryview:
    kind, number = obj.__dlpack_device__()
    if int(kind) not in _DLPACK_HOST:
        raise BufferError(
            f"this {type(obj).__name__} is on a device (DLPack type {int(kind)}, number {number}); copy it to "
            "the host first (jax.device_get(...), cupy.asnumpy(...))"
        )
    try:
        import numpy
    except ImportError:
        raise TypeError(
            f"the memory of {type(obj).__name__!r} comes by DLPack, which numpy reads: pip install numpy"
        ) from None
    try:
        array = numpy.from_dlpack(obj)
    except (RuntimeError, BufferError, TypeError) as exc:
        raise BufferError(
            f"DLPack of this {type(obj).__name__} cannot be read ({exc}); pass a view of it as uint8"
        ) from exc
    return as_buffer(array)
