# SPDX-License-Identifier: Apache-2.0
"""Whether blocks of a tensor cover all of it. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable

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
