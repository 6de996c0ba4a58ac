# SPDX-License-Identifier: Apache-2.0
"""Whether blocks of a tensor cover all of it, and without an element twice. No torch in here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and elements of a block."""
Parts = tuple[Part, ...]
Gap = tuple[tuple[int, int], ...]
"""Of each dimension the first element that nobody holds, and the one behind the last."""


def gap_text(gap: Gap) -> str:
    """``[0:8, 64:128]``."""
    return "[" + ", ".join(f"{first}:{end}" for first, end in gap) + "]"


def uncovered(shape: tuple[int, ...], parts: Iterable[Part]) -> Gap | None:
    """A block of a tensor of *shape* that no part has, None: there is none."""
    if 0 in shape:
        return None
    kept = {part for part in parts if 0 not in part[1]}
    return _gap(shape, [tuple(zip(*part, strict=True)) for part in sorted(kept)])


def _gap(shape: tuple[int, ...], blocks: list[tuple[tuple[int, int], ...]]) -> Gap | None:
    """Of blocks of (first, length) in each dimension; all dimensions but the first are left to the
    blocks between two cuts of that one."""
    if not blocks:
        return tuple((0, size) for size in shape)
    if not shape:
        return None
    cuts = {0, shape[0]}
    for (first, length), *_ in blocks:
        cuts.update((first, first + length))
    places = sorted(cuts)
    waiting = sorted(blocks, reverse=True)  # the next one that begins is the last
    here: list[tuple[tuple[int, int], ...]] = []
    known: dict[frozenset[tuple[tuple[int, int], ...]], Gap | None] = {}
    for start, stop in zip(places, places[1:], strict=False):
        here = [block for block in here if sum(block[0]) > start]
        while waiting and waiting[-1][0][0] == start:
            here.append(waiting.pop())
        rest = frozenset(block[1:] for block in here)
        if rest not in known:
            known[rest] = _gap(shape[1:], list(rest))
        if (gap := known[rest]) is not None:
            return ((start, stop), *gap)
    return None


# -------------------------------------------------------------- which boxes make up all of a tensor


_MOST = 20_000
"""Boxes that are tried, of one tensor."""


def are_apart(boxes: Sequence[Part]) -> bool:
    """Whether no two boxes overlap."""
    open_: list[Part] = []
    for box in sorted(boxes):
        open_ = [o for o in open_ if box[0] and o[0][0] + o[1][0] > box[0][0]]
        if any(_meet(box, other) for other in open_):
            return False
        open_.append(box)
    return True


def tilings(shape: tuple[int, ...], boxes: Sequence[Part]) -> tuple[list[list[int]], int]:
    """Sets of boxes that make up the tensor, by their numbers, and the elements that are in none.

    Each box is in one of the sets, if there is a set for it that is soon found.
    """
    cuts = [
        sorted({0, size, *(edge for o, e in boxes for edge in (o[d], o[d] + e[d]))})
        for d, size in enumerate(shape)
    ]
    cells = list(itertools.product(*(itertools.pairwise(one) for one in cuts)))
    numbers = {tuple(first for first, _ in cell): at for at, cell in enumerate(cells)}
    masks = [_mask(box, cuts, numbers) for box in boxes]
    missing = (1 << len(cells)) - 1
    for mask in masks:
        missing &= ~mask
    if missing:
        gaps = (cell for at, cell in enumerate(cells) if missing >> at & 1)
        return [], sum(math.prod(end - first for first, end in cell) for cell in gaps)
    search = _Search(masks, len(cells))
    found: list[list[int]] = []
    for at in range(len(boxes)):
        if not any(at in one for one in found) and (made := search.around(at)):
            found.append(made)
    return found, 0


class _Search:
    """Boxes as sets of cells, which are numbered in the order of their first elements."""

    def __init__(self, masks: Sequence[int], cells: int) -> None:
        self._masks, self._all = masks, (1 << cells) - 1
        self._sizes = [mask.bit_count() for mask in masks]
        #: By the first of their cells.
        self._by_first: dict[int, list[int]] = {}
        for at, mask in enumerate(masks):
            self._by_first.setdefault(mask & -mask, []).append(at)
        self._left = _MOST

    def around(self, start: int) -> list[int]:
        """A tiling with this box, ``[]`` if none is found."""
        chosen, covered = [start], [self._masks[start]]
        size = self._sizes[start]
        choices = [self._next(covered[0], size)]
        while choices:
            if covered[-1] == self._all:
                return sorted(chosen)
            if choices[-1] and self._left:
                self._left -= 1
                at = choices[-1].pop(0)
                chosen.append(at)
                covered.append(covered[-1] | self._masks[at])
                choices.append(self._next(covered[-1], size))
            else:
                for one in (chosen, covered, choices):
                    one.pop()
        return []

    def _next(self, covered: int, size: int) -> list[int]:
        """Boxes that may have the first cell that is not covered: it is their first one, too. Those
        of about this size come first, which are of one rank's layout mostly."""
        free = ~covered & self._all
        fitting = self._by_first.get(free & -free, ())
        fitting = [at for at in fitting if not self._masks[at] & covered]
        return sorted(fitting, key=lambda at: abs(self._sizes[at] - size))


def _mask(box: Part, cuts: Sequence[Sequence[int]], numbers: dict[tuple[int, ...], int]) -> int:
    spans = [
        [edge for edge in one if first <= edge < first + length]
        for one, first, length in zip(cuts, *box, strict=True)
    ]
    return sum(1 << numbers[cell] for cell in itertools.product(*spans))


def _meet(one: Part, other: Part) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(*one, *other, strict=True))
