# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of an engine together take every element that is published.

A model's own loader cuts what is larger than its parameters (more heads, wider layers) and leaves
out layers that it does not have. The engine would then compute with a part of what was trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fanin._cover import Gap, Parts, gap_text, uncovered
from fanin.errors import PeerError, StateError, first_of

Taken = tuple[tuple[Parts, tuple[str, ...]], ...]
"""Blocks, and the published tensors of which a rank takes these and no more; alike for many."""


class Missed(NamedTuple):
    """Published elements that no rank takes."""

    name: str
    shape: tuple[int, ...]
    #: The first block of them, None: all of the tensor.
    gap: Gap | None

    def __str__(self) -> str:
        if self.gap is None:
            return self.name
        return f"elements {gap_text(self.gap)} of {self.name} {list(self.shape)}"


def taken_of(parts: Mapping[str, Parts]) -> Taken:
    """What a rank tells of :meth:`Recording.taken <fanin.mapping.Recording.taken>`."""
    names: dict[Parts, list[str]] = {}
    for name, of_it in parts.items():
        names.setdefault(of_it, []).append(name)
    return tuple((of_it, tuple(alike)) for of_it, alike in names.items())


def missed(shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[Taken]) -> list[Missed]:
    """What no rank of an engine takes.

    Args:
        shapes: of all that is published, by name.
        ranks: what each rank does not take all of.

    Raises StateError: they have read different publications.
    """
    told: dict[str, list[Parts]] = {}
    for taken in ranks:
        for parts, names in taken:
            for name in names:
                told.setdefault(name, []).append(parts)
    known: dict[tuple[tuple[int, ...], tuple[Parts, ...]], Gap | None] = {}
    out = []
    for name, lists in told.items():
        if name not in shapes:
            raise StateError.make(
                f"another worker was told of '{name}', and this one was not: the trainer has "
                "published something else meanwhile",
                "init again, as the next sync of a Registry does",
                key=name,
            )
        if len(lists) < len(ranks):
            continue  # another rank takes all of it
        at = (shapes[name], tuple(lists))
        if at not in known:
            known[at] = uncovered(shapes[name], [part for parts in lists for part in parts])
        if (gap := known[at]) is not None:
            out.append(Missed(name, shapes[name], gap if any(lists) else None))
    return out


def refuse_missed(found: Iterable[Missed], remedy: str) -> None:
    """Raises PeerError for published elements that go nowhere."""
    listed = sorted(found, key=lambda one: (one.gap is not None, one.name))
    if not listed:
        return
    what = f"published, and the model takes nothing of it: {first_of(listed, 3)}"
    raise PeerError.make(what, remedy, key=listed[0].name)
