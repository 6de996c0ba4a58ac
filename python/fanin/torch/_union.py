# SPDX-License-Identifier: Apache-2.0
"""What all ranks hold together: one table of tensors, of which every element is somebody's.

No torch in here. Ranks mostly hold alike: they tell which tensors by a digest, and where their
parts lie as a few geometries, which many tensors share. One rank of those with the same digest
tells the tensors themselves.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fanin._cover import Gap, Part, Parts, gap_text, uncovered
from fanin._tensors import Shard
from fanin.errors import RequestError


class Entry(NamedTuple):
    """What a rank tells of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    parts: Parts
    """What it holds."""


Table = dict[str, Entry]


def entry_of(shard: Shard) -> Entry:
    return Entry(shard.dtype, shard.shape, tuple((box.offset, box.extent) for box in shard.boxes))


def table_of(shards: Iterable[Shard]) -> Table:
    """What a rank that publishes *shards* tells of them."""
    return {shard.name: entry_of(shard) for shard in shards}


class Told(NamedTuple):
    """A rank's table in few bytes, for every other rank."""

    digest: bytes
    """Of the text that :func:`compress` gives."""
    geometries: tuple[Parts, ...]
    """The parts, in the order in which that text counts them."""


def compress(table: Mapping[str, Entry]) -> tuple[Told, bytes]:
    """The table as what every rank is told, and the text that one of those that hold alike tells.

    The text has name, dtype, shape and number of the geometry of each tensor, ordered by name.
    """
    numbers: dict[tuple[tuple[int, ...], Parts], int] = {}
    lines = [
        (name, entry.dtype, entry.shape, numbers.setdefault(entry[1:], len(numbers)))
        for name, entry in sorted(table.items())
    ]
    text = zlib.compress(json.dumps(lines, separators=(",", ":")).encode(), 1)
    return Told(hashlib.sha256(text).digest(), tuple(parts for _, parts in numbers)), text


class Whole(NamedTuple):
    """A published tensor, of which all ranks together hold every element."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Kind = tuple[str, tuple[int, ...]]


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return f"rank {runs[0][0]}"
    listed = (str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return "ranks " + ", ".join(listed)


def unite(told: Sequence[Told], texts: Mapping[bytes, bytes]) -> list[Whole]:
    """The tensors that all ranks together hold, ordered by name.

    Args:
        told: of each rank.
        texts: by digest.

    Raises:
        RequestError: there are no tensors, ranks contradict each other in dtype or shape, or no
            rank holds some elements. Every rank that asks raises the same.
    """
    members: dict[bytes, list[int]] = {}
    for rank, one in enumerate(told):
        members.setdefault(one.digest, []).append(rank)
    kinds: dict[str, dict[Kind, list[tuple[bytes, int]]]] = {}
    for digest in members:
        for name, dtype, shape, number in json.loads(zlib.decompress(texts[digest])):
            alike = kinds.setdefault(name, {})
            alike.setdefault((dtype, tuple(shape)), []).append((digest, number))
    if not kinds:
        raise RequestError.make(
            "no rank has a tensor to publish",
            "give the module that is trained; names= must not answer None for everything",
        )
    gaps: dict[tuple[tuple[int, ...], tuple[tuple[bytes, int], ...]], Gap | None] = {}
    out = []
    for name, alike in sorted(kinds.items()):
        if len(alike) > 1:
            raise _contradiction(name, alike, members)
        (((dtype, shape), holders),) = alike.items()
        at = (shape, tuple(holders))
        if at not in gaps:
            parts = (told[r].geometries[number] for d, number in holders for r in members[d])
            gaps[at] = uncovered(shape, [part for held in parts for part in held])
        if (gap := gaps[at]) is not None:
            holding = [r for d, number in holders for r in members[d] if told[r].geometries[number]]
            raise _incomplete(Whole(name, dtype, shape), gap, holding)
        out.append(Whole(name, dtype, shape))
    return out


class Replicated(NamedTuple):
    """Boxes that several ranks hold."""

    ranks: tuple[int, ...]
    boxes: tuple[tuple[str, Part], ...]
    """Published name and block; the same, in the same order, on all of these ranks."""


def replicated(told: Sequence[Told], texts: Mapping[bytes, bytes], rank: int) -> list[Replicated]:
    """The boxes that *rank* holds and others as well, by the ranks that hold them.

    told, texts: as for :func:`unite`. Boxes that merely overlap are left out.
    """
    members: dict[bytes, list[int]] = {}
    for at, one in enumerate(told):
        members.setdefault(one.digest, []).append(at)
    numbers: dict[str, list[tuple[bytes, int]]] = {}
    for digest in members:
        for name, _, _, number in json.loads(zlib.decompress(texts[digest])):
            numbers.setdefault(name, []).append((digest, number))
    known: dict[tuple[tuple[bytes, int], ...], dict[Part, tuple[int, ...]]] = {}
    out: dict[tuple[int, ...], list[tuple[str, Part]]] = {}
    for name, holders in sorted(numbers.items()):
        alike = tuple(holders)
        if alike not in known:
            of_part: dict[Part, list[int]] = {}
            for digest, number in alike:
                for at in members[digest]:
                    for part in told[at].geometries[number]:
                        of_part.setdefault(part, []).append(at)
            known[alike] = {
                part: tuple(sorted(ranks))
                for part, ranks in of_part.items()
                if rank in ranks and len(ranks) > 1 and 0 not in part[1]
            }
        for part, ranks in sorted(known[alike].items()):
            out.setdefault(ranks, []).append((name, part))
    return [Replicated(ranks, tuple(boxes)) for ranks, boxes in sorted(out.items())]


def _contradiction(
    name: str,
    alike: Mapping[Kind, Sequence[tuple[bytes, int]]],
    members: Mapping[bytes, Sequence[int]],
) -> RequestError:
    told = " and ".join(
        f"{dtype} {list(shape)} on {ranks_text(r for d, _ in holders for r in members[d])}"
        for (dtype, shape), holders in alike.items()
    )
    return RequestError.make(
        f"'{name}' is {told}",
        "give all ranks the same model; parts that are no DTensors need names= that tells of which "
        "tensor they are parts (fanin.torch.Slice)",
        key=name,
    )


def _incomplete(tensor: Whole, gap: Gap, holding: Sequence[int]) -> RequestError:
    held = f"{ranks_text(holding)} hold{'s' if len(holding) == 1 else ''} parts of it"
    return RequestError.make(
        f"elements {gap_text(gap)} of '{tensor.name}' ({tensor.dtype} {list(tensor.shape)}) are "
        f"held by no rank; {held if holding else 'no rank holds any of it'}",
        "make the server on every rank that holds parts of the model; group= is the process group "
        "of all of them",
        key=tensor.name,
    )
