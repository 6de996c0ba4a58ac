# SPDX-License-Identifier: Apache-2.0
"""Tensors of any library, described for the C library.

NumPy arrays and PyTorch tensors are told by what they can do; neither library is imported.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _ffi
from ._dtypes import DTYPES, NUMPY_KINDS, TORCH_DTYPES, dtype_bits, torch_dtype
from .errors import RequestError


@dataclass(frozen=True, slots=True)
class Box:
    """An N-dimensional block of a tensor, and where it lies in memory.

    All tuples have one number for each dimension of the tensor.
    """

    #: First element, counted in the whole tensor.
    offset: tuple[int, ...]
    #: Elements.
    extent: tuple[int, ...]
    #: Bytes between neighbours, may be negative; all 0: packed (C order).
    stride: tuple[int, ...]
    #: Of the first element; 0 only if an extent is 0.
    address: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What a trainer rank holds of a tensor, or what a worker wants filled of it."""

    #: Without the publication, 1 to 512 bytes of UTF-8.
    name: str
    #: safetensors' name of the element type: "BF16".
    dtype: str
    #: Of the whole tensor, elements.
    shape: tuple[int, ...]
    #: None: nothing of the tensor is here (an empty shard).
    boxes: tuple[Box, ...]
    #: Where the boxes are. None: found out; -1: host memory; 0 and above: that CUDA device.
    device: int | None = None
    #: Kept alive as long as the memory is in use.
    owner: object = None
    #: F32 that a commit's cast leaves as it is; the same on all ranks.
    keep: bool = False


_FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"


@dataclass(slots=True)
class _View:
    """What the three kinds of values have in common; strides in bytes."""

    address: int
    extent: tuple[int, ...]
    stride: tuple[int, ...] | None  # None: packed
    itemsize: int
    dtype: str | None  # None: the value does not know
    described: str  # its type, for messages
    device: int | None
    owner: object
    writable: bool


def shard_of(
    name: str,
    value: Any,
    *,
    shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
    dtype: str | None = None,
    writable: bool = False,
) -> Shard:
    """Describes the memory of *value* as one box, without a copy.

    Args:
        name: the tensor's name, without the publication.
        value: a NumPy array, a PyTorch tensor on the CPU or a CUDA device, or a buffer
            (``bytearray``, ``memoryview``, ``array.array``). Any strides, also negative ones;
            elements that share memory (``expand``) are refused. The shard keeps the memory alive:
            the array or buffer itself, or the tensor's storage.
        shape: of the whole tensor, elements; default: *value* is the whole tensor.
        offset: of *value*'s first element in the whole tensor, elements; default: all 0. Needs
            *shape*.
        dtype: safetensors' name, where *value*'s own type says less than it should: NumPy has no
            BF16, so that bits in an array of uint16 are given as ``dtype="BF16"``. As wide as
            *value*'s elements. For F4 and F6 *value* has elements of one byte, packed, and its last
            dimension counts bytes; extents, *shape* and *offset* count elements.
        writable: refuse memory that cannot be written (a destination of a pull).

    Raises:
        RequestError: a type, dtype or layout that cannot be described; a place outside of *shape*;
            read-only memory and *writable*.
    """
    view = _view(name, value)
    if writable and not view.writable:
        raise _refusal(name, f"the memory of this {view.described} is read-only", "copy it first")
    kind = _dtype_of(name, view, dtype)
    extent, stride = _geometry(name, view, kind)
    whole, start = extent, (0,) * len(extent)
    if shape is not None:
        whole = tuple(map(int, shape))
        start = tuple(map(int, offset)) if offset is not None else start
        _check_place(name, whole, start, extent)
    elif offset is not None:
        raise _refusal(name, "an offset is given and no shape", "give the whole tensor's shape")
    boxes: tuple[Box, ...] = ()
    if 0 not in extent:
        boxes = (Box(start, extent, stride, view.address),)
    return Shard(name, kind, whole, boxes, view.device, view.owner)


def _check_place(
    name: str, whole: tuple[int, ...], start: tuple[int, ...], extent: tuple[int, ...]
) -> None:
    if not len(whole) == len(start) == len(extent):
        raise _refusal(
            name, f"shape {whole}, offset {start} and extents {extent} differ in dimensions"
        )
    for begin, length, limit in zip(start, extent, whole, strict=True):
        if begin < 0 or begin + length > limit:
            raise _refusal(
                name, f"extents {extent} at offset {start} do not lie inside shape {whole}"
            )


def _refusal(name: str, why: str, remedy: str = "") -> RequestError:
    return RequestError.make(why, remedy, key=name, phase="describe")


def _view(name: str, value: Any) -> _View:
    if hasattr(value, "data_ptr"):
        return _torch_view(name, value)
    interface = getattr(value, "__array_interface__", None)
    if interface is not None:
        return _numpy_view(name, value, interface)
    return _buffer_view(name, value)


def _torch_view(name: str, value: Any) -> _View:
    if hasattr(value, "placements"):
        raise _refusal(
            name,
            "the tensor is a DTensor: its memory is one rank's part",
            "publish models by fanin.torch, or its to_local() with shape and offset",
        )
    if str(value.layout) != "torch.strided":
        raise _refusal(name, f"a tensor of layout {value.layout} has no plain memory")
    kind = value.device.type
    if kind not in ("cpu", "cuda"):
        raise _refusal(name, f"memory on device {value.device} is not supported", "move the tensor")
    if value.is_conj() or value.is_neg():
        raise _refusal(name, "the tensor is a lazy conjugate or negative", "resolve it first")
    itemsize = value.element_size()
    return _View(
        address=value.data_ptr(),
        extent=tuple(value.shape),
        stride=None if value.is_contiguous() else tuple(s * itemsize for s in value.stride()),
        itemsize=itemsize,
        dtype=torch_dtype(value.dtype),
        described=f"tensor of {value.dtype}",
        device=value.device.index if kind == "cuda" else -1,
        # Not the tensor: assigning to its .data would let go of the memory.
        owner=value.untyped_storage(),
        writable=True,
    )


def _numpy_view(name: str, value: Any, interface: Mapping[str, Any]) -> _View:
    address, read_only = interface["data"]
    extent = tuple(interface["shape"])
    typestr: str = interface["typestr"]
    itemsize = int(typestr[2:] or 0)  # objects have none
    if typestr[0] == _FOREIGN_ORDER and itemsize > 1:
        raise _refusal(name, f"an array of {typestr} has its bytes in the other order")
    kind = NUMPY_KINDS.get(typestr[1:])
    if typestr[1] == "V":
        # Extension types (ml_dtypes) look like raw bytes, and have names.
        kind = TORCH_DTYPES.get(getattr(value.dtype, "name", ""))
    return _View(
        address=address,
        extent=extent,
        stride=interface.get("strides"),
        itemsize=itemsize,
        dtype=kind,
        described=f"array of {typestr}",
        device=None,
        owner=value,
        writable=not read_only,
    )


class _PyBuffer(ctypes.Structure):
    """``Py_buffer``: the only way to the address of a buffer that is read-only or strided."""

    _fields_ = _ffi.fields(
        "void buf obj; i64 len itemsize; i32 readonly ndim; text format; "
        "void shape strides suboffsets internal"
    )


_FULL_READ_ONLY = 0x11C  # PyBUF_FULL_RO


def _buffer_address(view: memoryview) -> int:
    buffer = _PyBuffer()
    api = ctypes.pythonapi
    api.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), _FULL_READ_ONLY)
    address = buffer.buf or 0
    api.PyBuffer_Release(ctypes.byref(buffer))
    return address


def _buffer_view(name: str, value: Any) -> _View:
    try:
        view = memoryview(value)
    except TypeError:
        raise _refusal(
            name,
            f"{type(value).__name__} is no array, tensor or buffer",
            "give a NumPy array, a PyTorch tensor or an object with the buffer protocol",
        ) from None
    if view.suboffsets:
        raise _refusal(name, "a buffer with sub-offsets is not one piece of memory")
    code = view.format
    if code[0] in ">!" and view.itemsize > 1 and sys.byteorder == "little":
        raise _refusal(name, f"a buffer of format '{code}' has its bytes in the other order")
    letter = code.lstrip("@=<>!")
    kind: str | None = None
    if letter == "?":
        kind = "BOOL"
    elif letter in ("e", "f", "d"):
        kind = f"F{8 * view.itemsize}"
    elif letter in ("B", "H", "I", "L", "Q", "N"):
        kind = f"U{8 * view.itemsize}"
    elif letter in ("b", "h", "i", "l", "q", "n"):
        kind = f"I{8 * view.itemsize}"
    return _View(
        address=_buffer_address(view),
        extent=tuple(view.shape or ()),
        stride=tuple(view.strides or ()),
        itemsize=view.itemsize,
        dtype=kind,
        described=f"buffer of format '{code}'",
        device=None,
        owner=view,  # which keeps a bytearray from being resized
        writable=not view.readonly,
    )


def _dtype_of(name: str, view: _View, said: str | None) -> str:
    kind = view.dtype if said is None else said
    if kind is None:
        raise _refusal(
            name, f"the {view.described} has no dtype of safetensors", 'say which: dtype="BF16"'
        )
    if kind not in DTYPES:
        raise _refusal(name, f"{kind!r} is no dtype", f"the dtypes are {', '.join(DTYPES)}")
    bits = dtype_bits(kind)
    if max(bits, 8) != 8 * view.itemsize:
        raise _refusal(
            name,
            f"elements of {kind} do not have the {view.itemsize} bytes of the {view.described}",
        )
    return kind


def _geometry(name: str, view: _View, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents in elements, strides in bytes."""
    extent, stride = view.extent, view.stride
    if len(extent) > _ffi.MAX_DIMS:
        raise _refusal(
            name, f"{len(extent)} dimensions are more than {_ffi.MAX_DIMS}", "reshape the tensor"
        )
    zeros = (0,) * len(extent)  # which the C library reads as "packed"
    packed = stride is None or _is_packed(name, extent, stride, view.itemsize)
    bits = dtype_bits(kind)
    if bits >= 8:
        return extent, zeros if stride is None or packed else stride
    if not packed or not extent:
        raise _refusal(name, f"memory of {kind} must be packed and have a dimension")
    last, rest = divmod(extent[-1] * 8, bits)
    if rest:
        raise _refusal(name, f"{extent[-1]} bytes are no whole number of elements of {kind}")
    return (*extent[:-1], last), zeros


def _is_packed(name: str, extent: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> bool:
    packed, expected = True, itemsize
    for length, step in zip(reversed(extent), reversed(stride), strict=True):
        if length > 1 and step == 0:
            raise _refusal(
                name,
                "elements of the tensor share memory (a stride is 0)",
                "make it contiguous first",
            )
        packed = packed and (length <= 1 or step == expected)
        expected *= max(length, 1)
    return packed


# ------------------------------------------------------------------------------ for the library

TENSOR_SIZE = ctypes.sizeof(_ffi.Tensor)
BOX_SIZE = ctypes.sizeof(_ffi.Box)


def _box_struct(dims: int) -> struct.Struct:
    part = f"{dims}Q{8 * (_ffi.MAX_DIMS - dims)}x"
    return struct.Struct(f"={part}{part}{part.replace('Q', 'q')}Q")


def _tensor_struct(dims: int) -> struct.Struct:
    return struct.Struct(f"=QQiI{dims}Q{8 * (_ffi.MAX_DIMS - dims)}xQQiiI4x")


# By number of dimensions.
BOX_STRUCTS = tuple(_box_struct(dims) for dims in range(_ffi.MAX_DIMS + 1))
TENSOR_STRUCTS = tuple(_tensor_struct(dims) for dims in range(_ffi.MAX_DIMS + 1))


class Described:
    """An array of ``fanin_tensor``, and all that it points to but for the tensors' memory."""

    __slots__ = ("_buffers", "_count", "address", "cuda_devices", "prepared", "used")

    def __init__(
        self, count: int, cuda_devices: Iterable[int], address: int, buffers: tuple[Any, ...]
    ) -> None:
        self._count = count
        #: CUDA devices that they are known to lie on, ascending.
        self.cuda_devices = tuple(sorted(cuda_devices))
        #: Of the array; 0 if it is empty.
        self.address = address
        self._buffers = buffers
        #: Whether there was a pull, and what is kept for others (:mod:`fanin._puller`).
        self.used = False
        self.prepared: Any = None

    def __len__(self) -> int:
        return self._count

    def is_prepared(self) -> None:
        """From now on the C library keeps what it needs for pulls."""


class PackedTensors(Described):
    """Shards as an array of ``fanin_tensor``.

    Made by :func:`pack`; a pull that is repeated may be given one again instead of its shards.
    Immutable. Keeps the owners of the memory alive, and remembers which step pulls with ``deltas``
    have brought there.
    """

    __slots__ = ("shards",)

    def __init__(self, shards: tuple[Shard, ...], address: int, buffers: tuple[Any, ...]) -> None:
        devices = {s.device for s in shards if s.device is not None and s.device >= 0}
        super().__init__(len(shards), devices, address, buffers)
        #: What was packed.
        self.shards = shards

    def touched(self) -> None:
        """Says that something else than pulls into these has written the memory, or will.

        The next pull with ``deltas`` then reads the whole. Call it not while a pull is under way.
        Does not block; any thread.
        """
        if self.prepared is not None:
            self.prepared.touched()


def address_of(buffer: bytearray) -> tuple[int, Any]:
    view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    return ctypes.addressof(view), view


def pack(shards: Iterable[Shard]) -> PackedTensors:
    """Packs *shards* for the C library: some 2 microseconds each.

    Raises:
        RequestError: a name, dtype, shape or box that does not fit into the C structures.
    """
    items = tuple(shards)
    if not items:
        return PackedTensors((), 0, ())
    try:
        names = [shard.name.encode() for shard in items]
    except (AttributeError, UnicodeEncodeError):
        _explain(items)
        raise
    joined = bytearray(b"\0".join(names) + b"\0")
    if joined.count(b"\0") != len(names):
        _explain(items)
    tensors = bytearray(TENSOR_SIZE * len(items))
    boxes = bytearray(BOX_SIZE * max(1, sum(len(shard.boxes) for shard in items)))
    name_address, name_view = address_of(joined)
    tensor_address, tensor_view = address_of(tensors)
    box_address, box_view = address_of(boxes)
    try:
        _fill(items, names, tensors, boxes, name_address, box_address)
    except (struct.error, KeyError, IndexError, AttributeError, TypeError, OverflowError):
        _explain(items)
        raise
    return PackedTensors(
        items, tensor_address, (joined, name_view, tensors, tensor_view, boxes, box_view)
    )


def _fill(
    items: tuple[Shard, ...],
    names: list[bytes],
    tensors: bytearray,
    boxes: bytearray,
    name_address: int,
    box_address: int,
) -> None:
    codes = DTYPES
    at = box_at = 0
    for shard, name in zip(items, names, strict=True):
        shape, device = shard.shape, shard.device
        dims = len(shape)
        first = box_at
        pack_box = BOX_STRUCTS[dims].pack_into
        for box in shard.boxes:
            pack_box(boxes, box_at, *box.offset, *box.extent, *box.stride, box.address)
            box_at += BOX_SIZE
        if device is None:
            kind, device = _ffi.MEMORY_DETECT, -1
        else:
            kind = _ffi.MEMORY_HOST if device < 0 else _ffi.MEMORY_CUDA
        TENSOR_STRUCTS[dims].pack_into(
            tensors,
            at,
            TENSOR_SIZE,
            name_address,
            codes[shard.dtype],
            dims,
            *shape,
            box_address + first,
            (box_at - first) // BOX_SIZE,
            kind,
            device,
            _ffi.TENSOR_KEEP if shard.keep else 0,
        )
        at += TENSOR_SIZE
        name_address += len(name) + 1


def _explain(items: tuple[Shard, ...]) -> None:
    """Raises what is wrong with the first wrong shard. Slow, and only called when one is."""
    for shard in items:
        if not isinstance(shard, Shard):
            raise RequestError.make(
                f"{type(shard).__name__} is no Shard", "make one by fanin.shard_of()"
            )
        if not isinstance(shard.name, str):
            raise RequestError.make(f"a tensor's name is {type(shard.name).__name__}, not str")
        try:
            encoded = shard.name.encode()
        except UnicodeEncodeError as error:
            raise RequestError.make(f"the name {shard.name!r} is not UTF-8: {error}") from error
        name = shard.name
        if b"\0" in encoded:
            raise _refusal(name, "the name contains a NUL character")
        if shard.dtype not in DTYPES:
            raise _refusal(
                name, f"{shard.dtype!r} is no dtype", f"the dtypes are {', '.join(DTYPES)}"
            )
        dims = len(shard.shape)
        if dims > _ffi.MAX_DIMS:
            raise _refusal(name, f"{dims} dimensions are more than {_ffi.MAX_DIMS}")
        if not all(_fits(n, 0, 1 << 64) for n in shard.shape):
            raise _refusal(name, f"shape {shard.shape} is not made of unsigned integers")
        for box in shard.boxes:
            _explain_box(name, dims, box)
        if shard.device is not None and not _fits(shard.device, -(1 << 31), 1 << 31):
            raise _refusal(name, f"{shard.device!r} is no device")


def _explain_box(name: str, dims: int, box: Box) -> None:
    if not len(box.offset) == len(box.extent) == len(box.stride) == dims:
        raise _refusal(
            name,
            f"offset {box.offset}, extent {box.extent} or stride {box.stride} of a box has not "
            f"the {dims} dimensions of the shape",
        )
    if not all(_fits(n, 0, 1 << 64) for n in (*box.offset, *box.extent, box.address)):
        raise _refusal(
            name,
            f"offset {box.offset}, extent {box.extent} or address {box.address!r} of a box is "
            "not made of unsigned integers",
        )
    if not all(_fits(n, -(1 << 63), 1 << 63) for n in box.stride):
        raise _refusal(name, f"stride {box.stride} of a box is not made of integers")


def _fits(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and low <= value < high
