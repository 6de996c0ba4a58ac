# SPDX-License-Identifier: Apache-2.0
"""The element types: what the library, safetensors, PyTorch and NumPy call each of them.

A new one is a row here, and one in ``common/core/dtype.c``.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class _Dtype(NamedTuple):
    """``bits``: of an element. ``held``: NumPy's kind and bytes of an array that can hold it."""

    number: int
    bits: int
    torch: str = ""
    held: str = ""
    native: bool = True  # NumPy has the type itself, not its bits alone


_ROWS = {
    "BOOL": _Dtype(1, 8, "bool", "b1"),
    "F4": _Dtype(2, 4, "float4_e2m1fn_x2"),
    "F6_E2M3": _Dtype(3, 6),
    "F6_E3M2": _Dtype(4, 6),
    "U8": _Dtype(5, 8, "uint8", "u1"),
    "I8": _Dtype(6, 8, "int8", "i1"),
    "F8_E5M2": _Dtype(7, 8, "float8_e5m2", "u1", False),
    "F8_E4M3": _Dtype(8, 8, "float8_e4m3fn", "u1", False),
    "F8_E8M0": _Dtype(9, 8, "float8_e8m0fnu", "u1", False),
    "F8_E4M3FNUZ": _Dtype(10, 8, "float8_e4m3fnuz", "u1", False),
    "F8_E5M2FNUZ": _Dtype(11, 8, "float8_e5m2fnuz", "u1", False),
    "I16": _Dtype(12, 16, "int16", "i2"),
    "U16": _Dtype(13, 16, "uint16", "u2"),
    "F16": _Dtype(14, 16, "float16", "f2"),
    "BF16": _Dtype(15, 16, "bfloat16", "u2", False),
    "I32": _Dtype(16, 32, "int32", "i4"),
    "U32": _Dtype(17, 32, "uint32", "u4"),
    "F32": _Dtype(18, 32, "float32", "f4"),
    "C64": _Dtype(19, 64, "complex64", "c8"),
    "F64": _Dtype(20, 64, "float64", "f8"),
    "I64": _Dtype(21, 64, "int64", "i8"),
    "U64": _Dtype(22, 64, "uint64", "u8"),
}

DTYPES = {name: row.number for name, row in _ROWS.items()}
"""The library's number of each of safetensors' names."""

NARROWED = ("BF16", "F16")
"""What F32 can be rounded to on the way."""

TORCH_DTYPES = {row.torch: name for name, row in _ROWS.items() if row.torch}
"""torch.dtype without its prefix: safetensors' name."""

NUMPY_KINDS = {row.held: name for name, row in _ROWS.items() if row.held and row.native}
"""array_interface's type string without the byte order: safetensors' name."""


def dtype_bits(dtype: str) -> int:
    """Bits of an element of *dtype* (safetensors' name)."""
    return _ROWS[dtype].bits


def torch_dtype(dtype: object) -> str | None:
    """safetensors' name of a ``torch.dtype``, None if it has none."""
    return TORCH_DTYPES.get(str(dtype).removeprefix("torch."))


def dtype_name(dtype: str) -> str:
    """PyTorch's name of one of safetensors' dtypes; that itself if PyTorch has none."""
    return _ROWS[dtype].torch or dtype if dtype in _ROWS else dtype


def torch_types() -> dict[str, Any]:
    """Each ``torch.dtype`` that this PyTorch has, by safetensors' name."""
    import torch

    return {
        name: getattr(torch, kind) for kind, name in TORCH_DTYPES.items() if hasattr(torch, kind)
    }
