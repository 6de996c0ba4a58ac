# SPDX-License-Identifier: Apache-2.0
"""Copies of many pieces of memory by one launch, whose table is kept: a GPU's, without PyTorch.

Python takes longer for a view of each piece than a GPU for its copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fanin.torch._again import Again

_SIZE, _TILE = 2048, (64, 32)
_KINDS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}

Row = tuple[int, int, int]
"""Addresses of a piece and of where it goes, and its number of elements."""


def can_move(tensors: Iterable[Any]) -> bool:
    """Whether a kernel can copy these, which are whole pieces of memory then."""
    return all(one.is_cuda and one.is_contiguous() for one in tensors) and _has_triton()


def _has_triton() -> bool:
    try:
        import fanin.torch._kernels  # noqa: F401
    except ImportError:
        return False
    return True


class Moves:
    """Pieces that are copied at each step, between the same places of memory that may be other."""

    def __init__(self, rows: list[Row], again: Again, device: Any) -> None:
        self._table, self._again = torch.tensor(rows, dtype=torch.int64).to(device), again

    def make(self, source: int, target: int) -> None:
        """On the current stream. source, target: what the rows' addresses count from."""
        self._again(self._table, source, target)


def pieces(rows: list[Row], like: Any) -> Moves:
    """like: of their dtype and device."""
    import triton.language as tl

    from fanin.torch import _kernels

    kind = getattr(tl, _KINDS[like.element_size()])
    grid = max(1, -(-max(count for *_, count in rows) // _SIZE)), len(rows)
    return Moves(rows, Again(_kernels.pieces, grid, like.device, (kind, _SIZE)), like.device)


def turned(tensors: list[Any], shape: tuple[int, ...]) -> Moves:
    """B of stacked experts, of layers that are alike: [rows, rank * experts] each.

    shape: of what they become, which is contiguous: [experts, layers, rank, rows].
    """
    import triton.language as tl

    from fanin.torch import _kernels

    experts, layers, rank, rows = shape
    first = tensors[0]
    kind, each = getattr(tl, _KINDS[first.element_size()]), rank * rows
    grid = -(-rows // _TILE[0]) * -(-experts // _TILE[1]), rank, layers
    same = (rows, experts, rank * experts, layers * each, rows, kind, *_TILE)
    table = [
        (one.data_ptr(), number * each * first.element_size(), each * experts)
        for number, one in enumerate(tensors)
    ]
    return Moves(table, Again(_kernels.turned, grid, first.device, same), first.device)
