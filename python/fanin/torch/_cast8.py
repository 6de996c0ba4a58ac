# SPDX-License-Identifier: Apache-2.0
"""BF16 to E4M3 with a scale a block: the same bytes on every device.

The rule, of IEEE operations on F32 alone: ``s = max(amax, 1e-4) * fl(1/448)``, ``q = rn(x *
rn(1/s))``. ``amax / 448`` would not do, which CUDA computes otherwise than a CPU. F32 and F16 are
rounded to BF16 first, as engines that are given BF16 have them. A block with a NaN or an infinity
is NaN: its scale is, and all of its bytes are 0x7F.

Maxima are the bits of F32 as integers, of which the larger one is the larger number, and NaN the
largest. So a MAX over ranks hands a NaN on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fanin.torch._blocks8 import Grid, touched

FLOOR = 1e-4
RECIPROCAL = 0.0022321429569274187
"""1/448 rounded to F32."""
NAN = 0x7FC00000
_INFINITE = 0x7F800000
_MANTISSA = 0x7FFFFF
_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 22}
"""That are computed with at a time: they stay in a processor's cache, or below 64 MB."""


class Room:
    """Memory that is computed in, kept for the next matrix: a CPU takes longer for pages that are
    new to it than for rounding."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, values: Any, dtype: Any) -> Any:
        """An empty tensor of that shape; on a GPU a new one, as streams may differ."""
        if values.device.type != "cpu":
            return torch.empty(values.shape, dtype=dtype, device=values.device)
        size = values.numel() * dtype.itemsize
        if self._bytes.numel() < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(values.shape)


def _span(first: int, length: int, block: int) -> tuple[int, int, int]:
    """Empty elements before the first one, blocks, and elements of each."""
    count = len(touched(first, length, block))
    return (0, 1, length) if count == 1 else (first % block, count, block)


def _tiles(values: Any, at: Grid, block: Grid) -> Any:
    """BF16 of *values*, which begin at *at*: [blocks, rows, blocks, columns]. Zeros fill up."""
    (rows, columns), x = values.shape, values.to(torch.bfloat16)
    top, down, high = _span(at[0], rows, block[0])
    left, along, wide = _span(at[1], columns, block[1])
    if (down * high, along * wide) != (rows, columns):
        padded = x.new_zeros(down * high, along * wide)
        padded[top : top + rows, left : left + columns] = x
        x = padded
    return x.unflatten(1, (along, wide)).unflatten(0, (down, high))


def _chunks(values: Any, at: Grid, block: Grid) -> Iterator[tuple[slice, Grid, slice]]:
    """Rows of *values* that are computed with at a time, where they begin, and their blocks."""
    rows, columns = values.shape
    wide = len(touched(at[1], columns, block[1])) * min(block[1], columns)
    most = max(1, _ELEMENTS.get(values.device.type, 1 << 19) // (wide * block[0])) * block[0]
    start, zero = 0, at[0] // block[0]
    while start < rows:
        end = min(rows, (at[0] + start) // block[0] * block[0] + most - at[0])
        here = touched(at[0] + start, end - start, block[0])
        yield (
            slice(start, end),
            (at[0] + start, at[1]),
            slice(here.start - zero, here.stop - zero),
        )
        start = end


def maxima(values: Any, at: Grid, block: Grid, room: Room) -> Any:
    """The largest magnitude of each block in a box that begins at *at* of its tensor."""
    rows, columns = values.shape
    grid = (len(touched(at[0], rows, block[0])), len(touched(at[1], columns, block[1])))
    out = torch.empty(grid, dtype=torch.int32, device=values.device)
    for part, begin, blocks in _chunks(values, at, block):
        # As integers: a CPU finds the largest of them several times faster than of numbers.
        tiles = _tiles(values[part], begin, block).view(torch.int16)
        bits = torch.bitwise_and(tiles, 0x7FFF, out=room.of(tiles, torch.int16))
        largest = bits.amax(dim=1).amax(dim=-1).int() << 16
        out[blocks] = torch.where(largest < _INFINITE, largest, NAN)
    return out


def scales_of(largest: Any, powers: bool) -> Any:
    """The scales of blocks with these maxima."""
    amax = largest.view(torch.float32)
    out = amax.clamp(min=FLOOR) * torch.tensor(RECIPROCAL, device=amax.device)
    if powers:
        bits = out.view(torch.int32)
        exponent = (bits >> 23) + ((bits & _MANTISSA) != 0)
        out = torch.where(amax.isnan(), NAN, exponent << 23).view(torch.float32)
    return torch.where(amax.isnan(), NAN, out.view(torch.int32)).view(torch.float32)


def cast(values: Any, at: Grid, block: Grid, scales: Any, out: Any, room: Room) -> None:
    """Writes the values of a box to *out* as E4M3; scales: of the blocks that it touches."""
    inverse, bad = 1.0 / scales, scales.isnan()
    some = values.is_cuda or bool(bad.any())  # CUDA is not waited for
    for part, begin, blocks in _chunks(values, at, block):
        tiles = _tiles(values[part], begin, block)
        product = room.of(tiles, torch.float32).copy_(tiles)
        product.mul_(inverse[blocks, None, :, None])
        if some:
            product.masked_fill_(bad[blocks, None, :, None], torch.nan)
        rows, columns = values[part].shape
        top, left = _span(begin[0], rows, block[0])[0], _span(begin[1], columns, block[1])[0]
        whole = product.flatten(0, 1).flatten(1, 2)
        out[part].copy_(whole[top : top + rows, left : left + columns])
