# SPDX-License-Identifier: Apache-2.0
"""Which blocks of fp8 weights several boxes share, so that their maximum takes all ranks to find.

No torch in here. A block is shared if some box of some rank holds a part of it and not the whole.
All ranks find the same blocks in the same order, from what they told each other.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fanin._cover import Part
from fanin.torch._formats import F8, Format
from fanin.torch._union import Told

Grid = tuple[int, int]
"""Of rows and of columns."""


class Shared(NamedTuple):
    """The shared blocks of all tensors of a run."""

    size: int
    #: By tensor: the place of its first one among all of them, and their numbers, ascending. A
    #: block's number counts along the rows of blocks.
    of: Mapping[str, tuple[int, tuple[int, ...]]]


def touched(first: int, length: int, block: int) -> range:
    """The blocks that hold some of the *length* elements from *first* on."""
    return range(first // block, -(-(first + length) // block)) if length else range(0)


def begun(first: int, length: int, block: int) -> range:
    """Those whose first element is among them."""
    return range(-(-first // block), -(-(first + length) // block)) if length else range(0)


def partial(part: Part, shape: Sequence[int], block: Grid) -> set[int]:
    """The numbers of the blocks of which *part* is a part and not the whole."""
    (row, column), (rows, columns) = part
    if not rows or not columns:
        return set()
    across = -(-shape[1] // block[1])
    down, along = touched(row, rows, block[0]), touched(column, columns, block[1])

    def cut(first: int, length: int, size: int, whole: int) -> set[int]:
        ends = {first // size} if first % size else set()
        last = first + length
        return ends | ({last // size} if last % size and last < whole else set())

    edges = {i * across + j for i in cut(row, rows, block[0], shape[0]) for j in along}
    return edges | {i * across + j for i in down for j in cut(column, columns, block[1], shape[1])}


def shared_blocks(told: Sequence[Told], texts: Mapping[bytes, bytes], form: Format) -> Shared:
    """The shared blocks of what the ranks publish; told, texts: as for :func:`unite`."""
    holders: dict[str, tuple[tuple[int, ...], list[tuple[int, int]]]] = {}
    listed = {digest: json.loads(zlib.decompress(text)) for digest, text in texts.items()}
    for rank, one in enumerate(told):
        lines = listed[one.digest]
        names = {line[0] for line in lines}
        for name, dtype, shape, number in lines:
            if dtype == F8 and form.scale_name(name) in names:
                holders.setdefault(name, (tuple(shape), []))[1].append((rank, number))
    known: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], tuple[int, ...]] = {}
    of: dict[str, tuple[int, tuple[int, ...]]] = {}
    size = 0
    for name, (shape, at) in sorted(holders.items()):
        key = (shape, tuple(at))
        if key not in known:
            block = form.block_of(shape)
            parts = {part for rank, number in at for part in told[rank].geometries[number]}
            cut: set[int] = set().union(*(partial(part, shape, block) for part in parts))
            known[key] = tuple(sorted(cut))
        if known[key]:
            of[name] = (size, known[key])
            size += len(known[key])
    return Shared(size, of)
