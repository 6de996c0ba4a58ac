# SPDX-License-Identifier: Apache-2.0
"""The rule of docs/reference/quantization.md once more, for whole tensors and in NumPy alone.

Nothing here is shared with the package: rounding goes through a table of all E4M3 values.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


TABLE = np.array([_value(code) for code in range(127)])
BETWEEN = (TABLE[1:] + TABLE[:-1]) / 2


def bf16(values: Any) -> Any:
    """F32 rounded to BF16, ties to even, as F32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    kept = np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC00000), kept)
    return kept.view(np.float32)


def e4m3(values: Any) -> Any:
    """The bytes of F32 values of at most 464, ties to even."""
    size = np.abs(values.astype(np.float64))
    code = np.searchsorted(BETWEEN, size, side="left")
    tie = (code < 126) & (size == BETWEEN[np.minimum(code, 125)])
    code = code + (tie & (code % 2 == 1))
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def rounded(
    values: Any, block: tuple[int, int] | None = (128, 128), powers: bool = False
) -> tuple[Any, Any]:
    """Bytes and scales of a whole matrix of F32; block None: a row has a scale."""
    x = bf16(values)
    rows, columns = x.shape
    down, along = block or (1, columns)
    out = np.empty(x.shape, np.uint8)
    scales = np.empty((-(-rows // down), -(-columns // along)), np.float32)
    one = np.float32(1)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * down : (i + 1) * down, j * along : (j + 1) * along]
            tile = x[part]
            if not np.isfinite(tile).all():
                scales[i, j], out[part] = np.nan, 0x7F
                continue
            scale = np.maximum(np.abs(tile).max(), np.float32(1e-4)) * (one / np.float32(448))
            if powers:
                fraction, exponent = np.frexp(scale)
                scale = np.float32(2.0 ** (exponent - (fraction == 0.5)))
            scales[i, j] = scale
            out[part] = e4m3(tile * (one / scale))
    return out, scales
