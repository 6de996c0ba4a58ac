# SPDX-License-Identifier: Apache-2.0
"""Which parts of a global tensor a rank holds, from placements and mesh. No torch in here.

A placement splits one dimension of what the placements applied before it left over, by the rule
of ``torch.chunk``: pieces of ``ceil(n / k)`` elements, the last ones smaller or empty. The indices
that remain of a dimension are kept as runs of neighbours; the blocks of a rank are the products
of its dimensions' runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from fanin._tensors import Box

Run = tuple[int, int]
"""First index and number of indices."""


class Split(NamedTuple):
    """One mesh dimension splits tensor dimension ``dim``.

    ``factor`` above 1 is DTensor's ``_StridedShard``: ``factor`` equal pieces are split each.
    """

    dim: int
    factor: int = 1


class Block(NamedTuple):
    """An N-dimensional part of the global tensor that lies in one piece of the local one."""

    offset: tuple[int, ...]
    """Elements, in the global tensor."""
    extent: tuple[int, ...]
    """Elements."""
    local: tuple[int, ...]
    """Elements, in the local tensor."""


Order = tuple[tuple[int, tuple[int, ...]], ...]
"""For each split tensor dimension the mesh dimensions that split it, the first one first."""


def chunk(size: int, pieces: int, index: int) -> Run:
    """The part of ``size`` elements that ``torch.chunk`` puts into piece ``index``."""
    step = -(-size // pieces)
    start = min(step * index, size)
    return start, min(step, size - start)


def cut(runs: Sequence[Run], start: int, count: int) -> list[Run]:
    """The runs of ``count`` indices from the ``start``-th on."""
    out: list[Run] = []
    for first, length in runs:
        if count <= 0:
            break
        if start >= length:
            start -= length
            continue
        taken = min(length - start, count)
        out.append((first + start, taken))
        start, count = 0, count - taken
    return out


def _merged(runs: Sequence[Run]) -> list[Run]:
    out: list[Run] = []
    for first, length in runs:
        if out and out[-1][0] + out[-1][1] == first:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((first, length))
    return out


def _total(runs: Sequence[Run]) -> int:
    return sum(length for _, length in runs)


def split_runs(runs: Sequence[Run], pieces: int, index: int, factor: int = 1) -> list[Run]:
    """What is left of ``runs`` for coordinate ``index`` of a mesh dimension of ``pieces`` ranks.

    With a factor the runs are cut into that many parts first, and each part is split.
    """
    size = _total(runs)
    out: list[Run] = []
    for part in range(factor):
        start, count = chunk(size, factor, part)
        inner, length = chunk(count, pieces, index)
        out += cut(runs, start + inner, length)
    return _merged(out)


def decode_order(placements: Sequence[Split | None], mesh_shape: Sequence[int]) -> Order | None:
    """The order in which the mesh dimensions split each tensor dimension.

    A factor says how many pieces the mesh dimensions to the right that are applied earlier have
    made, as FSDP over tensor parallelism does; None if no order gives the factors.
    """
    orders: dict[int, list[int]] = {}
    for mesh_dim in range(len(placements) - 1, -1, -1):
        placement = placements[mesh_dim]
        if placement is None:
            continue
        order = orders.setdefault(placement.dim, [])
        made = 1
        for position in range(len(order) + 1):
            if made == placement.factor:
                order.insert(position, mesh_dim)
                break
            if position < len(order):
                made *= mesh_shape[order[position]]
        else:
            return None
    return tuple((dim, tuple(order)) for dim, order in sorted(orders.items()))


def _runs(
    shape: Sequence[int],
    placements: Sequence[Split | None],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    order: Order,
    strided: bool,
) -> list[list[Run]]:
    runs: list[list[Run]] = [[(0, size)] if size else [] for size in shape]
    for dim, mesh_dims in order:
        for mesh_dim in mesh_dims:
            placement = placements[mesh_dim]
            factor = placement.factor if strided and placement is not None else 1
            runs[dim] = split_runs(runs[dim], mesh_shape[mesh_dim], coordinate[mesh_dim], factor)
    return runs


def _blocks(runs: Sequence[Sequence[Run]]) -> tuple[Block, ...]:
    dims: list[list[tuple[int, int, int]]] = []
    for dim in runs:
        local, pieces = 0, []
        for first, length in dim:
            pieces.append((first, length, local))
            local += length
        dims.append(pieces)
    return tuple(
        Block(
            tuple(piece[0] for piece in pieces),
            tuple(piece[1] for piece in pieces),
            tuple(piece[2] for piece in pieces),
        )
        for pieces in product(*dims)
    )


@lru_cache(maxsize=4096)
def layout(
    shape: tuple[int, ...],
    placements: tuple[Split | None, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    local_shape: tuple[int, ...],
    order: Order | None = None,
) -> tuple[Block, ...] | None:
    """The blocks of ``shape`` that the rank at ``coordinate`` holds in a tensor of ``local_shape``.

    A placement of None replicates; a coordinate of None is a rank outside of the mesh.
    ``order``: in which order the placements of a tensor dimension were applied, where it is
    known (then factors split as they stand). Otherwise factors tell it, and where no order gives
    them, or the local tensor contradicts it, the placements are applied from left to right.

    Returns the blocks, none for a rank that holds nothing, or None if no reading of the
    placements gives the local shape.
    """
    if coordinate is None:
        return ()
    left_to_right: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if placement is not None:
            left_to_right.setdefault(placement.dim, []).append(mesh_dim)
    plain: Order = tuple((dim, tuple(dims)) for dim, dims in sorted(left_to_right.items()))
    readings: list[tuple[Order, bool]] = []
    if order is not None:
        readings.append((order, True))
    else:
        decoded = decode_order(placements, mesh_shape)
        if decoded is not None:
            readings.append((decoded, False))
        readings.append((plain, True))
    for candidate, strided in readings:
        runs = _runs(shape, placements, mesh_shape, coordinate, candidate, strided)
        sizes = tuple(_total(dim) for dim in runs)
        if sizes == local_shape or (0 in sizes and 0 in local_shape):
            return _blocks(runs)
    return None


def place(blocks: Sequence[Block], stride: tuple[int, ...], address: int) -> tuple[Box, ...]:
    """Boxes of blocks in a local tensor with these strides (bytes) at this address."""
    if len(blocks) == 1 and not any(blocks[0].local):
        return (Box(blocks[0].offset, blocks[0].extent, stride, address),)
    return tuple(
        Box(
            block.offset,
            block.extent,
            stride,
            address + sum(at * step for at, step in zip(block.local, stride, strict=True)),
        )
        for block in blocks
    )


Index = tuple[int | slice, ...]


def normal_index(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int, bool], ...]:
    """Per dimension of ``shape``: start, stop, and whether the dimension is dropped.

    ValueError: too many indices, an index out of range, a step that is not 1.
    """
    if len(index) > len(shape):
        raise ValueError(f"{len(index)} indices for a tensor of {len(shape)} dimensions")
    out = []
    for dim, size in enumerate(shape):
        at = index[dim] if dim < len(index) else slice(None)
        if isinstance(at, slice):
            start, stop, step = at.indices(size)
            if step != 1:
                raise ValueError(f"a slice with step {step}; only neighbours can be published")
            out.append((start, max(start, stop), False))
        else:
            if not -size <= at < size:
                raise ValueError(f"index {at} is out of range for dimension {dim} of {size}")
            out.append((at % size, at % size + 1, True))
    return tuple(out)


def sliced_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """The shape of a tensor of ``shape`` that is indexed by ``index``."""
    return tuple(stop - start for start, stop, dropped in normal_index(index, shape) if not dropped)


def slice_boxes(
    boxes: Sequence[Box], shape: tuple[int, ...], index: Index, at: Sequence[int] | None = None
) -> tuple[Box, ...]:
    """The parts of boxes of a tensor of ``shape`` that lie in its slice ``index``.

    Offsets count in the slice, or in a tensor in which the slice's first element lies at ``at``.
    Strides stay, and dimensions with an integer index are dropped.
    """
    bounds = normal_index(index, shape)
    out = []
    for box in boxes:
        offset: list[int] = []
        extent: list[int] = []
        stride: list[int] = []
        address, empty = box.address, False
        for dim, (start, stop, dropped) in enumerate(bounds):
            first = max(start, box.offset[dim])
            last = min(stop, box.offset[dim] + box.extent[dim])
            if last <= first:
                empty = True
                break
            address += (first - box.offset[dim]) * box.stride[dim]
            if not dropped:
                offset.append(first - start + (0 if at is None else at[len(offset)]))
                extent.append(last - first)
                stride.append(box.stride[dim])
        if not empty:
            out.append(Box(tuple(offset), tuple(extent), tuple(stride), address))
    return tuple(out)
