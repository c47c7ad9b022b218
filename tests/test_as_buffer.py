"""`aiozc.as_buffer`: the memory itself, never a copy of it, and errors that name the call that helps.

FakeTensor behaves as torch.Tensor does where as_buffer looks: its values lie in a numpy array of bytes, numpy()
refuses the dtypes that numpy does not have, and so on. The last tests ask the real one, where it is installed.
"""

from __future__ import annotations

import array
import asyncio
import gc
import mmap
import types
import weakref
from typing import Any

import numpy as np
import pytest

import aiozc
from aiozc import as_buffer

SIZES = {"uint8": 1, "float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "complex64": 8, "int64": 8}
uint8 = "uint8"  # the module's attribute that as_buffer looks for beside the tensor's class


class FakeTensor:
    """`values`: bytes in an array of uint8; the strides tell whether every element is used."""

    def __init__(self, values: Any, dtype: str = "float32", shape: Any = None, **more: Any) -> None:
        self.values = values
        self.dtype = dtype
        self.shape = (len(values) // SIZES[dtype],) if shape is None else shape
        self.device = types.SimpleNamespace(type=more.get("device", "cpu"))
        self.layout = more.get("layout", "torch.strided")
        self.contiguous_now = more.get("contiguous", True)
        self.lazy = more.get("lazy")
        self.requires_grad = more.get("requires_grad", False)

    def is_contiguous(self) -> bool:
        return self.contiguous_now

    def is_conj(self) -> bool:
        return self.lazy == "conj"

    def is_neg(self) -> bool:
        return self.lazy == "neg"

    def numel(self) -> int:
        return len(self.values) // SIZES[self.dtype]

    def detach(self) -> FakeTensor:
        return FakeTensor(self.values, self.dtype, self.shape)

    def reshape(self, *shape: int) -> FakeTensor:
        assert shape == (-1,)
        return FakeTensor(self.values, self.dtype)

    def view(self, dtype: str) -> FakeTensor:
        if self.shape == ():
            raise RuntimeError("self.dim() cannot be 0 to view Float as Byte (different sizes)")
        return FakeTensor(self.values, dtype)

    def numpy(self) -> Any:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")
        if self.dtype in ("bfloat16", "float8_e4m3fn"):
            raise TypeError(f"Got unsupported ScalarType {self.dtype}")
        return self.values


def same_memory(view: memoryview, owner: Any) -> bool:
    ours, theirs = np.frombuffer(view, np.uint8), np.frombuffer(owner, np.uint8)
    return bool(ours.ctypes.data == theirs.ctypes.data and ours.nbytes == theirs.nbytes)


# --- what has a buffer ---


@pytest.mark.parametrize(
    "obj",
    [b"abcd", bytearray(b"abcd"), memoryview(b"xabcd")[1:], array.array("i", [1, 2])],
    ids=lambda o: type(o).__name__,
)
def test_a_buffer_is_itself_as_bytes(obj: Any) -> None:
    view = as_buffer(obj)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, memoryview(obj).nbytes)
    assert same_memory(view, obj)
    assert view.readonly == memoryview(obj).readonly


def test_a_view_of_bytes_stays_rooted_in_bytes() -> None:
    """Otherwise write() would have to copy it."""
    assert as_buffer(b"abc" * 100).obj == b"abc" * 100
    assert type(as_buffer(memoryview(b"abc")).obj) is bytes


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "c16", "?", "i8", ">i4", "M8[ns]", "S3", "U2", "f4,i8"]
)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 4)])
def test_an_array_of_any_dtype_and_shape_is_its_own_bytes(dtype: str, shape: Any) -> None:
    owner = np.random.default_rng(1).integers(1, 99, (*shape, np.dtype(dtype).itemsize), np.uint8)
    values = owner.reshape(-1).view(dtype).reshape(shape)
    view = as_buffer(values)
    assert (view.format, view.ndim, view.readonly) == ("B", 1, False)
    assert bytes(view) == owner.tobytes()
    view[0] ^= 0xFF  # the same memory, not a copy
    assert bytes(view[:1]) == owner.tobytes()[:1]


# Fails when: `toreadonly` is left out in `_flat` (records) or `_of_interface` (dates).
@pytest.mark.parametrize("dtype", ["f4", "M8[ns]", "f4,i8"])
def test_what_is_read_only_stays_so(dtype: str) -> None:
    values = np.zeros(4, dtype)
    values.flags.writeable = False
    assert as_buffer(values).readonly


@pytest.mark.parametrize("dtype", ["f4", "M8[ns]"])
def test_an_empty_array_is_an_empty_buffer(dtype: str) -> None:
    assert as_buffer(np.zeros((3, 0), dtype)).nbytes == 0


@pytest.mark.parametrize("dtype", ["f4", "M8[ns]"])
def test_a_strided_array_is_refused_with_the_call_that_helps(dtype: str) -> None:
    with pytest.raises(BufferError, match=r"numpy\.ascontiguousarray"):
        as_buffer(np.zeros((4, 4), dtype)[:, ::2])


def test_a_transposed_array_is_told_apart_from_a_strided_one() -> None:
    with pytest.raises(BufferError, match=r"Fortran.*\.T"):
        as_buffer(np.zeros((4, 3)).T)


def test_a_strided_view_is_refused() -> None:
    with pytest.raises(BufferError, match=r"bytes\(view\)"):
        as_buffer(memoryview(b"abcd")[::2])


def test_a_mapping_is_locked_as_long_as_the_view_lives() -> None:
    mapping = mmap.mmap(-1, 4096)
    view = as_buffer(mapping)
    with pytest.raises(BufferError):
        mapping.close()
    view.release()
    mapping.close()


# Fails when: the view of an address has no `_Keeper`.
@pytest.mark.parametrize("dtype", ["f4", ">i4", "M8[ns]", "f4,i8"])
def test_the_view_keeps_the_memory_alive(dtype: str) -> None:
    class Owner(np.ndarray):
        pass

    values = np.zeros(1000, dtype).view(Owner)
    gone = weakref.ref(values)
    view = as_buffer(values)
    del values
    gc.collect()
    assert gone() is not None
    view.release()
    del view
    gc.collect()
    assert gone() is None


def test_a_frozen_object_is_what_it_holds() -> None:
    data = bytearray(b"abc")
    assert same_memory(as_buffer(aiozc.frozen(data)), data)


@pytest.mark.parametrize("obj", ["text", 7, None, [b"a", b"b"], object()])
def test_what_has_no_memory_to_send_is_refused(obj: Any) -> None:
    with pytest.raises(TypeError, match="is needed, not"):
        as_buffer(obj)


# Fails when: `_flat` does not look for "O" in the format.
@pytest.mark.parametrize("dtype", ["O", [("name", "O"), ("OO", "i8")]])
def test_an_array_of_objects_is_refused(dtype: Any) -> None:
    """Its memory is full of addresses of this process."""
    with pytest.raises(TypeError, match="serialize"):
        as_buffer(np.zeros(1, dtype))


# --- protocols of arrays ---


def test_dlpack_gives_the_same_memory() -> None:
    class Other:
        def __init__(self, values: Any) -> None:
            self.__dlpack__ = values.__dlpack__
            self.__dlpack_device__ = values.__dlpack_device__

    values = np.arange(12.0)
    assert same_memory(as_buffer(Other(values)), values)


def test_dlpack_of_a_device_is_refused_before_anything_is_copied() -> None:
    class OnDevice:
        def __dlpack__(self) -> Any:
            raise AssertionError("asked for its memory")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 1)

    with pytest.raises(BufferError, match="device_get"):
        as_buffer(OnDevice())


def test_an_interface_may_name_a_buffer_and_an_offset() -> None:
    class Window:
        def __init__(self, data: bytes) -> None:
            self.__array_interface__ = {
                **{"shape": (2,), "typestr": "<u2", "version": 3},
                **{"data": data, "offset": 2},
            }

    assert bytes(as_buffer(Window(b"ab1234cd"))) == b"1234"


# --- tensors ---


@pytest.mark.parametrize("dtype", SIZES)
def test_a_tensor_of_any_dtype_is_its_own_bytes(dtype: str) -> None:
    values = np.random.default_rng(2).integers(0, 256, 64, np.uint8)
    view = as_buffer(FakeTensor(values, dtype, requires_grad=True))
    assert (view.format, view.ndim, bytes(view)) == ("B", 1, values.tobytes())
    assert same_memory(view, values)


def test_a_tensor_of_no_dimension_and_one_of_no_elements() -> None:
    values = np.arange(4, dtype=np.uint8)
    assert bytes(as_buffer(FakeTensor(values, shape=()))) == values.tobytes()
    assert as_buffer(FakeTensor(values[:0])).nbytes == 0


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ({"device": "cuda"}, r"tensor\.cpu\(\)"),
        ({"device": "meta"}, "no data"),
        ({"contiguous": False}, r"tensor\.contiguous\(\)"),
        ({"layout": "torch.sparse_coo"}, r"tensor\.to_dense\(\)"),
        ({"lazy": "conj"}, r"tensor\.resolve_conj\(\)"),
        ({"lazy": "neg"}, r"tensor\.resolve_neg\(\)"),
    ],
)
def test_a_tensor_that_cannot_be_sent_names_what_helps(more: Any, remedy: str) -> None:
    with pytest.raises(BufferError, match=remedy):
        as_buffer(FakeTensor(np.zeros(8, np.uint8), **more))


def test_a_tensor_is_sent_from_its_own_memory(run: Any) -> None:
    values = np.random.default_rng(3).integers(0, 256, 1 << 20, np.uint8)

    async def main() -> None:
        got = bytearray()

        async def receive(reader: Any, writer: Any) -> None:
            got.extend(await reader.read(-1))
            writer.close()
            done.set()

        done = asyncio.Event()
        server = await aiozc.start_server(receive, "127.0.0.1", 0)
        _, writer = await aiozc.open_connection(*server.sockets[0].getsockname())
        result = await writer.zc_send(as_buffer(FakeTensor(values, "bfloat16")))
        assert result.nbytes == values.nbytes
        writer.close()
        await done.wait()
        server.close()
        assert got == values.tobytes()

    run(main())


# --- the real ones ---


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "int64", "bool"])
def test_a_tensor_of_pytorch(name: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    dtype = getattr(torch, name)
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    view = as_buffer(tensor)
    assert view.nbytes == 15 * tensor.element_size()
    before = bytes(view)
    tensor.zero_()
    assert any(before) and not any(view)
    with pytest.raises(BufferError, match=r"contiguous\(\)"):
        as_buffer(tensor.T)
    assert as_buffer(torch.nn.Parameter(torch.ones(3))).nbytes == 12
    assert as_buffer(torch.ones(())).nbytes == 4


def test_an_arrow_buffer() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    data = bytes(range(100))
    assert same_memory(as_buffer(pyarrow.py_buffer(data)), data)
