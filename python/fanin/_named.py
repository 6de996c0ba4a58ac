# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors by name, described by the C library at each call.

A loop of Python's over tens of thousands of tensors takes longer than the pull that it is for. What
a client keeps of them for the next call is found by what they are then: names, and a digest of
dtypes, shapes, strides, devices and addresses. So nothing that happens to a tensor between two
calls can be missed, and no tensor is kept.

As another thread may give a tensor other memory while this one is written, each call holds the
storages. The library takes each right before it reads the tensor, and no code of Python's runs in
between: so what was found of a tensor lies in the storage that is held.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from . import _ffi
from ._tensors import BOX_SIZE, TENSOR_SIZE, Described, address_of

#: What several runs, or two buffers in turn, are pulled into.
KEPT = 4
_CAPSULE = b"dlpack_exchange_api"


class _ExchangeApi(ctypes.Structure):
    """``DLPackExchangeAPI``"""

    _fields_ = _ffi.fields("u32 major minor; void older allocate from_object to_object read")


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _python(name: str) -> int | None:
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value


_list_item = _python("PyList_GetItem")
_list_set = _python("PyList_SetItem")
_call_one = _python("PyObject_CallOneArg")


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
        self._buffers = ()  # a pull that reads them would still be the client's only one


class Named:
    """What a client has pulled into by name lately."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._kept: tuple[NamedTensors, ...] = ()

    def hold(self, names: list[str], values: list[Any]) -> tuple[NamedTensors, list[Any]] | None:
        """As they are now, and storages that keep their memory. None: they are to be described one
        by one, which tells what is wrong."""
        read = _reader(values) if values else None
        if read is None:
            return None
        storages: list[Any] = [None] * len(values)
        found = self._read(values, read, storages)
        if found is None:
            return None
        digest = bytes(found.digest)
        known = [one for one in self._kept if one.digest == digest and one.names == names]
        held = (known[0], storages) if known else self._describe(names, values, read)
        if held is not None:
            # One assignment, as other threads may come, and be refused only later.
            others = [one for one in self._kept if one is not held[0]]
            self._kept = (held[0], *others[: KEPT - 1])
        return held

    def _describe(
        self, names: list[str], values: list[Any], read: int
    ) -> tuple[NamedTensors, list[Any]] | None:
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
        storages: list[Any] = [None] * len(values)
        out = tensor_address, box_address, name_address
        found = self._read(values, read, storages, out)
        if found is None:
            return None
        buffers = (joined, name_view, tensors, tensor_view, boxes, box_view)
        return NamedTensors(names, found, tensor_address, buffers), storages

    def _read(
        self,
        values: list[Any],
        read: int,
        storages: list[Any],
        out: tuple[int | None, int | None, int | None] = (None, None, None),
    ) -> _ffi.Objects | None:
        """What is found of them; into *storages*, as many, what each lies in. out: addresses of
        tensors, boxes and names."""
        torch = sys.modules["torch"]
        storage_of = torch.Tensor.untyped_storage
        doubtful = (ctypes.c_uint32 * len(values))()
        objects = _ffi.Objects(
            struct_size=ctypes.sizeof(_ffi.Objects),
            list=id(values),
            count=len(values),
            item=_list_item,
            read=read,
            doubtful=ctypes.addressof(doubtful),
            owner=_call_one,
            how=id(storage_of),
            keep=_list_set,
            kept=id(storages),
        )
        try:
            with torch._C.DisableTorchFunction():  # a subclass's own could do anything in between
                if not self._library.fanin_describe_objects(ctypes.byref(objects), *out):
                    return None
        except Exception:  # what PyTorch has raised: the description of that tensor says it, too
            return None
        if any(values[index].is_neg() for index in doubtful[: objects.n_doubtful]):
            return None
        return objects
