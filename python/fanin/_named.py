# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors by name, described by the C library at each call.

A loop of Python's over tens of thousands of tensors takes longer than the pull that it is for. What
a client keeps of them for the next call is found by what they are then: names, and a digest of
dtypes, shapes, strides, devices and addresses. So nothing that happens to a tensor between two
calls can be missed, and no tensor is kept.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from . import _ffi
from ._tensors import BOX_SIZE, TENSOR_SIZE, Described, address_of

__all__ = ["Named", "NamedTensors"]

#: What several runs, or two buffers in turn, are pulled into.
KEPT = 4
#: To find tensors that stay as they are for a moment.
TRIES = 3
_CAPSULE = b"dlpack_exchange_api"


class _ExchangeApi(ctypes.Structure):
    """``DLPackExchangeAPI``"""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
    ]


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_list_item = ctypes.cast(ctypes.pythonapi.PyList_GetItem, ctypes.c_void_p).value


def _reader(values: list[Any]) -> int | None:
    """PyTorch's function that reads all of *values*; None: it has none, or not for these."""
    torch = sys.modules.get("torch")
    capsule = getattr(getattr(torch, "Tensor", None), "__dlpack_c_exchange_api__", None)
    if torch is None or capsule is None:
        return None
    for kind in set(map(type, values)):
        # DTensors have placements, and another shape than their memory.
        if not issubclass(kind, torch.Tensor) or hasattr(kind, "placements"):
            return None
    api = _ExchangeApi.from_address(_capsule_pointer(capsule, _CAPSULE))
    return api.read if api.major == 1 else None


class NamedTensors(Described):
    """Tensors by name, as they were when they were read. Keeps no memory of theirs alive."""

    __slots__ = ("digest", "names")

    def __init__(
        self, names: list[str], found: _ffi.Objects, address: int, buffers: tuple[Any, ...]
    ) -> None:
        devices = (n for n in range(64) if found.devices >> n & 1)
        super().__init__(len(names), devices, address, buffers)
        self.names = names
        self.digest = bytes(found.digest)

    def is_prepared(self) -> None:
        self._buffers = ()


class Named:
    """What a client has pulled into by name lately."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._kept: tuple[NamedTensors, ...] = ()

    def hold(self, names: list[str], values: list[Any]) -> tuple[NamedTensors, list[Any]] | None:
        """As they are now, and their storages: another thread may give a tensor other memory while
        this one is written. None: they are to be described one by one."""
        for _ in range(TRIES):
            found = self.find(names, values)
            if found is None:
                return None
            storages = [value.untyped_storage() for value in values]
            if self.find(names, values) is found:  # so these are what was described
                return found, storages
        return None

    def find(self, names: list[str], values: list[Any]) -> NamedTensors | None:
        """As they are now. None: they are to be described one by one, which tells what is wrong."""
        read = _reader(values) if values else None
        if read is None:
            return None
        found = self._read(values, read, None, None, None)
        if found is None:
            return None
        digest = bytes(found.digest)
        for known in self._kept:
            if known.digest == digest and known.names == names:
                break
        else:
            made = self._describe(names, values, read)
            if made is None:
                return None
            known = made
        # One assignment, as other threads may come, and be refused only later.
        others = [one for one in self._kept if one is not known]
        self._kept = (known, *others[: KEPT - 1])
        return known

    def _describe(self, names: list[str], values: list[Any], read: int) -> NamedTensors | None:
        try:
            joined = bytearray("\0".join(names).encode() + b"\0")
        except (TypeError, UnicodeEncodeError):
            return None
        if joined.count(b"\0") != len(names):
            return None
        tensors, boxes = bytearray(TENSOR_SIZE * len(names)), bytearray(BOX_SIZE * len(names))
        name_address, name_view = address_of(joined)
        tensor_address, tensor_view = address_of(tensors)
        box_address, box_view = address_of(boxes)
        found = self._read(values, read, tensor_address, box_address, name_address)
        if found is None:
            return None
        buffers = (joined, name_view, tensors, tensor_view, boxes, box_view)
        return NamedTensors(names, found, tensor_address, buffers)

    def _read(
        self,
        values: list[Any],
        read: int,
        tensors: int | None,
        boxes: int | None,
        names: int | None,
    ) -> _ffi.Objects | None:
        doubtful = (ctypes.c_uint32 * len(values))()
        objects = _ffi.Objects(
            struct_size=ctypes.sizeof(_ffi.Objects),
            list=id(values),
            count=len(values),
            item=_list_item,
            read=read,
            doubtful=ctypes.addressof(doubtful),
        )
        try:
            if not self._library.fanin_describe_objects(
                ctypes.byref(objects), tensors, boxes, names
            ):
                return None
        except Exception:  # what PyTorch has raised: the description of that tensor says it, too
            return None
        if any(values[index].is_neg() for index in doubtful[: objects.n_doubtful]):
            return None
        return objects
