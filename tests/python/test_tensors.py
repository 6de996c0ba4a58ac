# SPDX-License-Identifier: Apache-2.0
"""How memory is described: shard_of() and pack()."""

from __future__ import annotations

import array
import ctypes
import gc
import math
import weakref
from types import SimpleNamespace

import fanin
import local_world
import numpy as np
import pytest
from fanin import _dtypes, _ffi, _tensors
from fanin._library import dtype_code, library


def unpacked(packed: fanin.PackedTensors) -> list[_ffi.Tensor]:
    return list((_ffi.Tensor * len(packed)).from_address(packed.address))


def read(shard: fanin.Shard) -> list[bytes]:
    """The elements of the shard's one box, in order, read as the library would."""
    (box,) = shard.boxes
    size = _dtypes.dtype_bits(shard.dtype) // 8
    stride = box.stride
    if not any(stride):
        stride = tuple(size * math.prod(box.extent[d + 1 :]) for d in range(len(box.extent)))
    elements = []
    for index in np.ndindex(*box.extent):
        at = box.address + sum(i * s for i, s in zip(index, stride, strict=True))
        elements.append(ctypes.string_at(at, size))
    return elements


# ---------------------------------------------------------------------------------- layout


def test_structs_have_the_layout_of_the_c_structures() -> None:
    for dims in range(_ffi.MAX_DIMS + 1):
        assert _tensors.BOX_STRUCTS[dims].size == ctypes.sizeof(_ffi.Box)
        assert _tensors.TENSOR_STRUCTS[dims].size == ctypes.sizeof(_ffi.Tensor)
        numbers = list(range(1, 3 * dims + 2))
        raw = bytearray(_tensors.BOX_STRUCTS[dims].pack(*numbers))
        box = _ffi.Box.from_buffer(raw)
        got = [*box.offset[:dims], *box.extent[:dims], *box.stride[:dims], box.address]
        assert got == numbers
        assert not any(box.offset[dims:]) and not any(box.stride[dims:])


def test_packed_tensors_are_what_was_described() -> None:
    boxes = (
        fanin.Box((0, 1, 2), (1, 2, 3), (-24, 12, 4), 4096),
        fanin.Box((1, 1, 2), (1, 2, 3), (0, 0, 0), 8192),
    )
    shards = [
        fanin.Shard("a.weight", "BF16", (), (fanin.Box((), (), (), 64),)),
        fanin.Shard("ä", "F8_E4M3", (2, 3, 5), boxes, device=3),
        fanin.Shard("empty", "I64", (7, 0), (), device=-1),
    ]
    packed = fanin.pack(shards)
    first, second, third = unpacked(packed)
    assert first.struct_size == second.struct_size == ctypes.sizeof(_ffi.Tensor)
    assert (first.name, first.dtype, first.n_dims, first.n_boxes) == (b"a.weight", 15, 0, 1)
    assert (first.memory.kind, first.memory.device) == (_ffi.MEMORY_DETECT, -1)
    assert first.boxes[0].address == 64
    assert (second.name.decode(), second.n_dims, second.n_boxes) == ("ä", 3, 2)
    assert second.shape[:4] == [2, 3, 5, 0]
    assert (second.memory.kind, second.memory.device) == (_ffi.MEMORY_CUDA, 3)
    assert second.boxes[0].offset[:3] == [0, 1, 2]
    assert second.boxes[0].extent[:3] == [1, 2, 3]
    assert second.boxes[0].stride[:3] == [-24, 12, 4]
    assert second.boxes[1].address == 8192
    assert (third.n_boxes, third.memory.kind) == (0, _ffi.MEMORY_HOST)


def test_dtypes_are_the_librarys() -> None:
    lib = library()
    for name, code in _dtypes.DTYPES.items():
        assert lib.fanin_dtype_from_name(name.encode()) == code
        assert lib.fanin_dtype_bits(code) == _dtypes.dtype_bits(name), name
    assert lib.fanin_dtype_name(max(_dtypes.DTYPES.values()) + 1) is None


@pytest.mark.parametrize("name", ["BF16", "bf16", "bfloat16", "torch.bfloat16"])
def test_dtypes_of_calls_have_several_names(name: str) -> None:
    assert dtype_code(name, "cast") == _dtypes.DTYPES["BF16"]


def test_an_empty_pack_is_empty() -> None:
    packed = fanin.pack([])
    assert len(packed) == 0 and packed.address == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "a\0b"}, "NUL"),
        ({"name": "\ud800"}, "UTF-8"),
        ({"name": 7}, "int, not str"),
        ({"dtype": "bfloat16"}, "no dtype"),
        ({"shape": (1,) * 9}, "9 dimensions"),
        ({"shape": (-1, 8)}, "shape"),
        ({"shape": (4, 8.0)}, "shape"),
        ({"shape": (4, 8, 1)}, "3 dimensions"),
        ({"boxes": (fanin.Box((0, 0), (4, -8), (0, 0), 64),)}, "extent"),
        ({"boxes": (fanin.Box((0, 0), (4, 8), (0,), 64),)}, "2 dimensions"),
        ({"boxes": (fanin.Box((0, 0), (4, 8), (1 << 63, 0), 64),)}, "stride"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_pack_says_what_is_wrong(change: dict[str, object], said: str) -> None:
    box = fanin.Box((0, 0), (4, 8), (0, 0), 64)
    good: dict[str, object] = {"name": "x", "dtype": "F32", "shape": (4, 8), "boxes": (box,)}
    fine = fanin.Shard(**good)  # type: ignore[arg-type]
    with pytest.raises(fanin.RequestError, match=said):
        fanin.pack([fine, fanin.Shard(**{**good, **change})])  # type: ignore[arg-type]


def test_pack_refuses_what_is_no_shard() -> None:
    with pytest.raises(fanin.RequestError, match="shard_of"):
        fanin.pack([np.zeros(3)])  # type: ignore[list-item]


# ---------------------------------------------------------------------------------- NumPy


@pytest.mark.parametrize(
    "value",
    [
        np.arange(24, dtype=np.int32).reshape(4, 6),
        np.arange(24, dtype=np.int32).reshape(4, 6).T,
        np.arange(24, dtype=np.int32).reshape(4, 6)[::-1, ::2],
        np.arange(24, dtype=np.int32).reshape(2, 3, 4)[:, ::-1, 1:3],
        np.arange(24, dtype=np.float16)[5:6],
        np.array(7, dtype=np.int64),
        np.zeros((1, 3), dtype=np.complex64)[:, :1],
    ],
)
def test_arrays_of_any_strides_are_described(value: np.ndarray) -> None:
    shard = fanin.shard_of("x", value)
    assert shard.shape == value.shape and shard.device is None
    assert b"".join(read(shard)) == value.tobytes()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("?", "BOOL"), ("u1", "U8"), ("i2", "I16"), ("f2", "F16"), ("f8", "F64"), ("c8", "C64")],
)
def test_numpy_dtypes(dtype: str, name: str) -> None:
    assert fanin.shard_of("x", np.zeros(2, dtype)).dtype == name


def test_bits_of_a_dtype_that_numpy_lacks() -> None:
    assert fanin.shard_of("x", np.zeros(4, np.uint16), dtype="BF16").dtype == "BF16"
    with pytest.raises(fanin.RequestError, match="4 bytes"):
        fanin.shard_of("x", np.zeros(4, np.float32), dtype="BF16")
    with pytest.raises(fanin.RequestError, match="no dtype"):
        fanin.shard_of("x", np.zeros(4, np.float32), dtype="float32")


def test_elements_smaller_than_a_byte_are_counted() -> None:
    shard = fanin.shard_of(
        "x", np.zeros((2, 6), np.uint8), dtype="F4", shape=(4, 12), offset=(2, 0)
    )
    assert shard.boxes[0].extent == (2, 12) and shard.boxes[0].stride == (0, 0)
    assert fanin.shard_of("x", np.zeros((2, 6), np.uint8), dtype="F6_E2M3").shape == (2, 8)
    with pytest.raises(fanin.RequestError, match="whole number"):
        fanin.shard_of("x", np.zeros((2, 5), np.uint8), dtype="F6_E2M3")
    with pytest.raises(fanin.RequestError, match="packed"):
        fanin.shard_of("x", np.zeros((2, 6), np.uint8)[:, ::2], dtype="F4")


def test_a_part_is_placed_in_the_whole() -> None:
    part = np.ones((2, 3), np.float32)
    shard = fanin.shard_of("x", part, shape=[5, 6], offset=[3, 3])
    assert shard.shape == (5, 6)
    assert (shard.boxes[0].offset, shard.boxes[0].extent) == ((3, 3), (2, 3))
    for shape, offset in [((5, 6), (4, 3)), ((5, 6), (-1, 0)), ((5, 6, 1), (0, 0)), ((1, 1), None)]:
        with pytest.raises(fanin.RequestError, match="shape"):
            fanin.shard_of("x", part, shape=shape, offset=offset)
    with pytest.raises(fanin.RequestError, match="offset"):
        fanin.shard_of("x", part, offset=(0, 0))


def test_an_empty_part_has_no_box() -> None:
    shard = fanin.shard_of("x", np.zeros((0, 3), np.float32), shape=(2, 3), offset=(2, 0))
    assert shard.shape == (2, 3) and shard.boxes == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.broadcast_to(np.zeros(1), (3,)), "stride is 0"),
        (np.zeros((1,) * 9), "9 dimensions"),
        (np.zeros(3, ">f4"), "other order"),
        (np.zeros(3, "U4"), "no dtype"),
        (np.zeros(3, object), "no dtype"),
        ([1.0, 2.0], "list is no array"),
        (None, "NoneType is no array"),
    ],
)
def test_what_cannot_be_described_is_refused(value: object, said: str) -> None:
    with pytest.raises(fanin.RequestError, match=said) as caught:
        fanin.shard_of("the.key", value)
    assert caught.value.key == "the.key" and "the.key" in str(caught.value)


def test_destinations_must_be_writable() -> None:
    value = np.zeros(3, np.float32)
    assert fanin.shard_of("x", value, writable=True).boxes
    value.flags.writeable = False
    assert fanin.shard_of("x", value).boxes
    for read_only in (value, b"1234", memoryview(bytearray(4)).toreadonly()):
        with pytest.raises(fanin.RequestError, match="read-only"):
            fanin.shard_of("x", read_only, writable=True)


def test_a_shard_keeps_its_array() -> None:
    value = np.zeros(3, np.float32)
    alive = weakref.ref(value)
    shard = fanin.shard_of("x", value)
    del value
    gc.collect()
    assert alive() is not None
    packed = fanin.pack([shard])
    del shard
    gc.collect()
    assert alive() is not None
    del packed
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------------------------- buffers


def test_buffers_are_described() -> None:
    raw = bytearray(range(24))
    for value in (
        raw,
        bytes(raw),
        memoryview(raw)[3:9],
        memoryview(raw)[::-2],
        memoryview(raw).cast("H"),
        memoryview(raw).cast("B", (4, 6)),
        array.array("d", [1.0, 2.0]),
    ):
        shard = fanin.shard_of("x", value)
        assert b"".join(read(shard)) == memoryview(value).tobytes()
    assert fanin.shard_of("x", array.array("f", [1])).dtype == "F32"
    assert fanin.shard_of("x", memoryview(raw).cast("?")).dtype == "BOOL"
    assert fanin.shard_of("x", memoryview(raw).cast("q")).dtype == "I64"


def test_a_bytearray_keeps_its_memory_while_a_shard_needs_it() -> None:
    raw = bytearray(8)
    shard = fanin.shard_of("x", raw)
    with pytest.raises(BufferError):
        raw.extend(b"more")
    del shard
    raw.extend(b"more")


# ---------------------------------------------------------------------------------- PyTorch


class FakeTensor:
    """What is used of a torch.Tensor."""

    def __init__(self, device: str = "cpu", index: int | None = None, dtype: str = "bfloat16"):
        self.memory = np.arange(24, dtype=np.uint16).reshape(4, 6)
        self.shape = (6, 4)
        self.dtype = f"torch.{dtype}"
        self.layout = "torch.strided"
        self.device = SimpleNamespace(type=device, index=index)
        self.storage = object()
        self.conjugate = False

    def data_ptr(self) -> int:
        return self.memory.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return (1, 6)

    def is_contiguous(self) -> bool:
        return False

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> object:
        return self.storage

    def is_conj(self) -> bool:
        return self.conjugate

    def is_neg(self) -> bool:
        return False


def test_tensors_are_described_by_what_they_can_do() -> None:
    tensor = FakeTensor()
    shard = fanin.shard_of("x", tensor)
    assert (shard.dtype, shard.shape, shard.device) == ("BF16", (6, 4), -1)
    assert shard.owner is tensor.storage
    assert b"".join(read(shard)) == tensor.memory.T.tobytes()
    assert fanin.shard_of("x", FakeTensor("cuda", 2)).device == 2


def test_tensors_without_plain_memory_are_refused() -> None:
    for change, said in [
        ({"layout": "torch.sparse_coo"}, "layout"),
        ({"device": SimpleNamespace(type="meta", index=None)}, "device"),
        ({"conjugate": True}, "conjugate"),
        ({"placements": ()}, "DTensor"),
        ({"dtype": "torch.qint8"}, "no dtype"),
    ]:
        tensor = FakeTensor()
        vars(tensor).update(change)
        with pytest.raises(fanin.RequestError, match=said):
            fanin.shard_of("x", tensor)


def test_importing_fanin_loads_no_library_of_others() -> None:
    done = local_world.run_script(
        "import sys, fanin\n"
        "import fanin._library\n"
        "assert fanin._library._library is None\n"
        "print([m for m in ('numpy', 'torch', 'vllm', 'safetensors') if m in sys.modules])"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


# ---------------------------------------------------------------------------------- names


def test_publications_of_runs() -> None:
    assert fanin.publication_of(0) == fanin.publication_of("0") == "lora:0"
    assert fanin.publication_of("lora:my-run_1.x") == "lora:my-run_1.x"
    assert fanin.publication_of("full:0") == "full:0"
    for wrong in ("", "lora:", "other:0", "a b", "a/b", "x" * 65, -1.5, None, True, "0\n"):
        with pytest.raises(fanin.RequestError, match="is no run"):
            fanin.publication_of(wrong)  # type: ignore[arg-type]
