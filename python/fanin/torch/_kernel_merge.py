# SPDX-License-Identifier: Apache-2.0
"""Tensors of the base and the products of two factors of an adapter, in one pass, by Triton.

``out = base + scale * sum over k of left[k, i] * right[k, j]``, rounded as PEFT's operations round
one after the other. A sum of F32 is a chain of fused multiply-adds in the order of k.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["added"]


@triton.jit
def _address(place, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(place).to(tl.pointer_type(KIND))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def added(
    table,
    rows,
    columns,
    base_e,
    base_i,
    base_j,
    out_e,
    out_i,
    left_e,
    left_k,
    left_i,
    right_e,
    right_k,
    right_j,
    KIND: tl.constexpr,
    FACTORS: tl.constexpr,
    RANK: tl.constexpr,
    ROUNDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program a tile of ROWS by COLUMNS; along the second axis of the grid an expert, along the
    third a row of the table: addresses of base, out, left and right, and bits of the scale.

    KIND: of base and out. FACTORS: of left and right. ROUNDED: what is added is rounded to KIND
    first. ALIGNED: all addresses are multiples of 16.
    """
    row = table + tl.program_id(2) * 5
    base, out = _address(row, KIND, ALIGNED), _address(row + 1, KIND, ALIGNED)
    left, right = _address(row + 2, FACTORS, ALIGNED), _address(row + 3, FACTORS, ALIGNED)
    scale = tl.load(row + 4).to(tl.int32).to(tl.float32, bitcast=True)
    across = tl.cdiv(columns, COLUMNS)
    top = (tl.program_id(0) // across).to(tl.int64) * ROWS
    first = (tl.program_id(0) % across) * COLUMNS
    expert = tl.program_id(1).to(tl.int64)
    i, j = tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    in_rows, in_columns = top + i < rows, j < columns
    mask = in_rows[:, None] & in_columns[None, :]
    base += expert * base_e + top * base_i
    out += expert * out_e + top * out_i
    left += expert * left_e + top * left_i
    right += expert * right_e
    held = tl.load(base + i[:, None] * base_i + j[None, :] * base_j, mask=mask)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for rank in range(0, RANK, 16):
        k = rank + tl.arange(0, 16)
        x = tl.load(
            left + i[:, None] * left_i + k[None, :] * left_k,
            mask=in_rows[:, None] & (k < RANK)[None, :],
            other=0.0,
        )
        y = tl.load(
            right + k[:, None] * right_k + j[None, :] * right_j,
            mask=(k < RANK)[:, None] & in_columns[None, :],
            other=0.0,
        )
        total = tl.dot(x, y, total, input_precision="ieee")
    product = total.to(FACTORS).to(tl.float32)
    delta = (product * scale).to(FACTORS).to(tl.float32)
    if ROUNDED:
        delta = delta.to(KIND).to(tl.float32)
    summed = held.to(tl.float32) + delta
    tl.store(out + i[:, None] * out_i + j[None, :], summed.to(KIND), mask=mask)
