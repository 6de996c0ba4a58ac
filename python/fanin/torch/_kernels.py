# SPDX-License-Identifier: Apache-2.0
"""Triton kernels over tables, one launch for all tensors: the rule of :mod:`fanin.torch._cast8`,
adapters that are merged, and copies.

Of the rule a row of a table is a block, or a band of rows that have a scale each: address and
elements between rows of the source, the same of the results, address of its scales (0: another
rank's), place among the shared ones, rows, columns.

WORK says what a launch does: 0 all of the rule; 1 the maximum alone, into what the ranks share; 2
what follows from that. KIND is of the source: 0 BF16, 1 F32, 2 F16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bf16(address, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr):
    if KIND == 0:
        source = address.to(tl.pointer_type(tl.bfloat16)) + offsets
    elif KIND == 1:
        source = address.to(tl.pointer_type(tl.float32)) + offsets
    else:
        source = address.to(tl.pointer_type(tl.float16)) + offsets
    if ALIGNED:
        source = tl.max_contiguous(tl.multiple_of(source, [1, 16]), [1, 16])
    if MASKED:
        values = tl.load(source, mask=mask, other=0.0)
    else:
        values = tl.load(source)
    if KIND == 2:
        values = values.to(tl.float32)
    return values.to(tl.bfloat16)


@triton.jit
def _magnitude(values):
    """Bits, of which the larger ones are the larger number."""
    return values.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def _finished(largest):
    """F32's bits of a maximum; what is not finite is NaN."""
    return tl.where(largest > 0x7F7F, 0x7FC0, largest) << 16


@triton.jit
def _scale(bits, POWERS: tl.constexpr):
    scale = tl.maximum(bits.to(tl.float32, bitcast=True), 1e-4) * 0.0022321429569274187
    out = scale.to(tl.int32, bitcast=True)
    if POWERS:
        out = ((out >> 23) + ((out & 0x7FFFFF) != 0).to(tl.int32)) << 23
    return tl.where(bits == 0x7FC00000, 0x7FC00000, out).to(tl.float32, bitcast=True)


@triton.jit
def _byte(values, scale, bits):
    product = values.to(tl.float32) * tl.div_rn(1.0, scale)
    out = product.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(bits == 0x7FC00000, 0x7F, out.to(tl.int32)).to(tl.uint8)


@triton.jit
def _pairs(address, stride, ROWS: tl.constexpr, ALONG: tl.constexpr):
    """A block of BF16, two elements a number, which is half of the work. The first one is the lower
    half."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ALONG // 2)[None, :]
    source = address.to(tl.pointer_type(tl.int32)) + i * (stride // 2) + j
    return tl.load(tl.max_contiguous(tl.multiple_of(source, [1, 16]), [1, 4]))


@triton.jit
def _bytes_of(pairs, scale):
    """E4M3 of both elements of each; all are NaN if the scale is."""
    inverse = tl.div_rn(1.0, scale)
    first = (pairs << 16).to(tl.float32, bitcast=True) * inverse
    second = (pairs & -65536).to(tl.float32, bitcast=True) * inverse
    return tl.interleave(first, second).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def blocks(
    table,
    shared,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    WORK: tl.constexpr,
    POWERS: tl.constexpr,
    ROWS: tl.constexpr,
    ALONG: tl.constexpr,
):
    """A program a row of the table: a block of ROWS and ALONG, of which each row begins at a
    multiple of 16 bytes, or any where MASKED."""
    PAIRS: tl.constexpr = KIND == 0 and not MASKED
    row = table + tl.program_id(0) * 8
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ALONG)[None, :]
    source, stride = tl.load(row), tl.load(row + 1)
    mask = (i < tl.load(row + 6)) & (j < tl.load(row + 7))
    if PAIRS:
        values = _pairs(source, stride, ROWS, ALONG)
    else:
        values = _bf16(source, i * stride + j, mask, KIND, MASKED, not MASKED)
    if WORK == 2:
        bits = tl.load(shared + tl.load(row + 5))
    elif PAIRS:
        # Without a shift, of which the result would stay in registers for _bytes_of().
        bits = _finished(tl.maximum(tl.max(values & 0x7FFF7FFF) >> 16, tl.max(values & 0x7FFF)))
    else:
        bits = _finished(tl.max(_magnitude(values)))
    if WORK == 1:
        tl.atomic_max(shared + tl.load(row + 5), bits)
    else:
        scale = _scale(bits, POWERS)
        out = tl.load(row + 2).to(tl.pointer_type(tl.uint8)) + i * tl.load(row + 3) + j
        if MASKED:
            tl.store(out, _byte(values, scale, bits), mask=mask)
        elif PAIRS:
            out = tl.max_contiguous(tl.multiple_of(out, [1, 8]), [1, 8])
            tl.store(out, _bytes_of(values, scale))
        else:
            out = tl.max_contiguous(tl.multiple_of(out, [1, 16]), [1, 16])
            tl.store(out, _byte(values, scale, bits))
        place = tl.load(row + 4)
        tl.store(place.to(tl.pointer_type(tl.float32)), scale, mask=place != 0)


@triton.jit
def bands(
    table,
    shared,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORK: tl.constexpr,
    POWERS: tl.constexpr,
    ROWS: tl.constexpr,
    ALONG: tl.constexpr,
):
    """A program a row of the table: ROWS rows of any length, of which each has a scale. ALIGNED:
    each begins at a multiple of 16 bytes, and has such a number of elements."""
    row = table + tl.program_id(0) * 8
    i = tl.arange(0, ROWS)
    j = tl.arange(0, ALONG)[None, :]
    source, columns = tl.load(row), tl.load(row + 7)
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
    inside = i < tl.load(row + 6)
    starts = i[:, None] * tl.load(row + 1)
    places = shared + tl.load(row + 5) + i
    if WORK == 2:
        bits = tl.load(places, mask=inside, other=0)
    else:
        largest = tl.zeros([ROWS], dtype=tl.int32)
        for first in range(0, columns, ALONG):
            mask = inside[:, None] & (first + j < columns)
            values = _bf16(source, starts + first + j, mask, KIND, True, ALIGNED)
            largest = tl.maximum(largest, tl.max(_magnitude(values), axis=1))
        bits = _finished(largest)
    if WORK == 1:
        tl.atomic_max(places, bits, mask=inside)
    else:
        scale = _scale(bits, POWERS)
        out = tl.load(row + 2).to(tl.pointer_type(tl.uint8)) + i[:, None] * tl.load(row + 3)
        for first in range(0, columns, ALONG):
            mask = inside[:, None] & (first + j < columns)
            values = _bf16(source, starts + first + j, mask, KIND, True, ALIGNED)
            byte = _byte(values, scale[:, None], bits[:, None])
            places8 = out + first + j
            if ALIGNED:
                places8 = tl.max_contiguous(tl.multiple_of(places8, [1, 16]), [1, 16])
            tl.store(places8, byte, mask=mask)
        place = tl.load(row + 4)
        scales = place.to(tl.pointer_type(tl.float32)) + i
        tl.store(scales, scale, mask=inside & (place != 0))


# -------------------------------------------------------------------------- an adapter and its base


@triton.jit
def _address(place, more, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    address = (tl.load(place) + more).to(tl.pointer_type(KIND))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def added(
    table,
    left_at,
    right_at,
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
    third a row of the table: addresses of base, out, left and right, and bits of the scale. Those
    of left and right count from left_at and right_at.

    KIND: of base and out. FACTORS: of left and right. ROUNDED: what is added is rounded to KIND
    first. ALIGNED: all addresses are multiples of 16.
    """
    row = table + tl.program_id(2) * 5
    base, out = _address(row, 0, KIND, ALIGNED), _address(row + 1, 0, KIND, ALIGNED)
    left = _address(row + 2, left_at, FACTORS, ALIGNED)
    right = _address(row + 3, right_at, FACTORS, ALIGNED)
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


# ------------------------------------------------------------------------------------------- copies


@triton.jit
def pieces(table, source_at, target_at, KIND: tl.constexpr, SIZE: tl.constexpr):
    """A program SIZE elements; along the second axis of the grid a row of the table: addresses of
    source and target, counted from source_at and target_at, and how many elements there are.

    KIND: an integer of the elements' size.
    """
    row = table + tl.program_id(1) * 3
    count = tl.load(row + 2)
    first = tl.program_id(0).to(tl.int64) * SIZE
    if first < count:
        i = first + tl.arange(0, SIZE)
        source = _address(row, source_at, KIND, False)
        target = _address(row + 1, target_at, KIND, False)
        tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


@triton.jit
def turned(
    table,
    source_at,
    target_at,
    rows,
    experts,
    source_i,
    target_e,
    target_k,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """B of stacked experts: rows of [rank, experts] become experts of [rank, rows].

    A program a tile of ROWS by EXPERTS; along the second axis of the grid a number below the rank,
    along the third a row of the table as that of pieces(), whose count is not read.
    """
    row = table + tl.program_id(2) * 3
    source = _address(row, source_at, KIND, False)
    target = _address(row + 1, target_at, KIND, False)
    across = tl.cdiv(experts, EXPERTS)
    k = tl.program_id(1).to(tl.int64)
    i = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    e = (tl.program_id(0) % across) * EXPERTS + tl.arange(0, EXPERTS)
    mask = (i < rows)[:, None] & (e < experts)[None, :]
    source += i[:, None].to(tl.int64) * source_i + k * experts + e[None, :]
    places = e[None, :].to(tl.int64) * target_e + k * target_k + i[:, None]
    tl.store(target + places, tl.load(source, mask=mask), mask=mask)
