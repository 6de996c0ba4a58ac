# SPDX-License-Identifier: Apache-2.0
"""A tensor of the base and the product of two factors of an adapter, in one pass, by Triton.

``out = base + scale * sum over k of left[k, i] * right[k, j]``, rounded as PEFT's operations round
one after the other. A sum of F32 is a chain of fused multiply-adds in the order of k.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["added"]


@triton.jit
def added(
    base,
    out,
    left,
    right,
    scale,
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
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program a tile of ROWS by COLUMNS, and along the second axis of the grid an expert.

    PRECISION of products of F32: "ieee" or "tf32". ROUNDED: what is added is rounded to the base's
    type first.
    """
    across = tl.cdiv(columns, COLUMNS)
    top = (tl.program_id(0) // across).to(tl.int64) * ROWS
    first = (tl.program_id(0) % across) * COLUMNS
    expert = tl.program_id(1).to(tl.int64)
    i, j = tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    in_rows, in_columns = top + i < rows, j < columns
    mask = in_rows[:, None] & in_columns[None, :]
    left += expert * left_e + top * left_i
    right += expert * right_e
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
        total = tl.dot(x, y, total, input_precision=PRECISION)
    product = total.to(left.dtype.element_ty).to(tl.float32)
    delta = (product * scale).to(left.dtype.element_ty).to(tl.float32)
    if ROUNDED:
        delta = delta.to(out.dtype.element_ty).to(tl.float32)
    base += expert * base_e + top * base_i
    out += expert * out_e + top * out_i
    held = tl.load(base + i[:, None] * base_i + j[None, :] * base_j, mask=mask)
    summed = held.to(tl.float32) + delta
    tl.store(out + i[:, None] * out_i + j[None, :], summed.to(out.dtype.element_ty), mask=mask)
