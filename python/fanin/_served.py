# SPDX-License-Identifier: Apache-2.0
"""What is trained beside what is served: digests of both, and their comparison. No torch in here.

A trainer's rank tells its digests in one tensor of bytes: a header of JSON that says which boxes
it holds, then a number for each box and type.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fanin._cover import are_apart, tilings
from fanin._digest import digest_sum
from fanin._dtypes import NARROWED
from fanin.errors import PeerError

ROUNDED = "rounded to"
"""How a difference begins that a cast of the trainer's makes."""

_MAGIC = b"fanin-digests/1\n"
_START = struct.Struct("<QQ")  # the step, and bytes of the header


def scaled(dtype: str, scale: float | None) -> str:
    """What digests of values in that type are called that were multiplied in it: "BF16*2"."""
    return dtype if scale in (None, 1) else f"{dtype}*{scale:.9g}"


class Held(NamedTuple):
    """A box of a published tensor, as a rank or a worker has it."""

    name: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    #: By safetensors' name of the type. The first is the type in which it is held; the others are
    #: what it is in a narrower one. An engine gives those only where they lose nothing.
    digests: dict[str, int]


class Layout(NamedTuple):
    """Of one tensor, what a rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    #: Of an adapter: what engines multiply the tensor by, in their own type; None: a model's.
    scale: float | None = None

    def kinds(self) -> tuple[str, ...]:
        """The types in which each box is digested: an adapter's in all that engines hold."""
        if self.scale is not None:
            return tuple(dict.fromkeys((self.dtype, "F32", *NARROWED)))
        return (self.dtype, *(NARROWED if self.dtype == "F32" else ()))

    def types(self) -> tuple[str, ...]:
        """What the digests are called."""
        return tuple(scaled(kind, self.scale) for kind in self.kinds())


class Tensor(NamedTuple):
    """One tensor as all ranks together train it."""

    name: str
    shape: tuple[int, ...]
    #: The whole's, by type.
    digests: dict[str, int]
    #: Why there is none, ``""`` if there is.
    wrong: str


@dataclass(frozen=True)
class Difference:
    """A published tensor that is not served as it is trained."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


# ---------------------------------------------------------------------- how a rank tells them


_DIGESTS = ".digests"


def publication_for(publication: str) -> str:
    """Where the digests of a publication are: ``"full:0.digests"``."""
    return f"{publication}{_DIGESTS}"


def tells_digests(publication: str) -> bool:
    """Whether it is what :func:`publication_for` names."""
    return publication.endswith(_DIGESTS)


def size_of(layouts: Sequence[Layout]) -> int:
    """Bytes of what :func:`digests_of` gives."""
    numbers = sum(len(one.boxes) * len(one.types()) for one in layouts)
    return len(_MAGIC) + _START.size + len(_header(layouts)) + 8 * numbers


def room_for(tensors: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Bytes in which any rank can tell its digests of an adapter's tensors, by names and shapes.

    The size is enough for a rank with two boxes of each tensor. So ranks agree on it without
    telling each other what they hold.
    """
    of_each = (128 + len(json.dumps(name)) + 64 * (1 + len(shape)) for name, shape in tensors)
    return len(_MAGIC) + _START.size + 8 + sum(of_each)


def digests_of(layouts: Sequence[Layout], step: int, held: Iterable[Held]) -> bytes:
    """What a rank with these boxes tells. KeyError: it lacks one."""
    found = {(one.name, one.offset, one.extent): one.digests for one in held}
    numbers = [
        found[one.name, box[0], box[1]][dtype]
        for one in layouts
        for box in one.boxes
        for dtype in one.types()
    ]
    header = _header(layouts)
    start = _START.pack(step, len(header))
    return _MAGIC + start + header + struct.pack(f"<{len(numbers)}Q", *numbers)


def _header(layouts: Sequence[Layout]) -> bytes:
    return json.dumps(layouts, separators=(",", ":")).encode()


def _whole(told: bytes, at: int) -> int:
    """Bytes of whole numbers from there on: a rank may have room for more than it tells."""
    return (len(told) - at) // 8 * 8


def read(told: bytes) -> tuple[int, list[Layout], list[Held]]:
    """The step of a rank's digests, and what it holds. PeerError: these are none."""
    try:
        if not told.startswith(_MAGIC):
            raise ValueError("they begin otherwise")
        at = len(_MAGIC)
        step, length = _START.unpack_from(told, at)
        at += _START.size
        layouts = [
            Layout(name, dtype, tuple(shape), tuple((tuple(a), tuple(b)) for a, b in boxes), scale)
            for name, dtype, shape, boxes, scale in json.loads(told[at : at + length])
        ]
        at += length
        numbers = (one for (one,) in struct.iter_unpack("<Q", told[at : at + _whole(told, at)]))
        held = [
            Held(one.name, *box, {dtype: next(numbers) for dtype in one.types()})
            for one in layouts
            for box in one.boxes
        ]
    except (ValueError, TypeError, struct.error, StopIteration, RuntimeError) as error:
        raise PeerError.make(
            f"a rank's digests cannot be read: {error}",
            "run the same version of fanin at the trainer and here",
        ) from error
    return step, layouts, held


# ---------------------------------------------------------------------- what all of them hold


def join(ranks: Sequence[tuple[list[Layout], list[Held]]]) -> list[Tensor]:
    """The tensors as all ranks together train them, in the order of their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[tuple[str, Held]]] = {}
    for rank, (layouts, held) in enumerate(ranks):
        shapes.update((one.name, one.shape) for one in layouts)
        for one in held:
            boxes.setdefault(one.name, []).append((f"rank {rank}", one))
    return [_joined(name, shapes[name], boxes.get(name, [])) for name in sorted(shapes)]


def compare(
    trained: Sequence[Tensor], workers: Sequence[Sequence[Held]]
) -> tuple[list[Difference], int]:
    """What is served otherwise than it is trained, and how many tensors are the same."""
    boxes: dict[str, list[tuple[str, Held]]] = {}
    for number, held in enumerate(workers):
        for one in held:
            boxes.setdefault(one.name, []).append((f"worker {number}", one))
    found, same = [], 0
    names = {(one.shape, *kind): one.name for one in trained for kind in one.digests.items()}
    for tensor in trained:
        parts = boxes.pop(tensor.name, [])
        why = tensor.wrong or _differs(tensor, parts, names)
        if why:
            found.append(Difference(tensor.name, why))
        else:
            same += 1
    found += [Difference(name, "the engine holds it, and no rank trains it") for name in boxes]
    return found, same


_Names = dict[tuple[tuple[int, ...], str, int], str]
"""Of what is trained, by shape, type and digest."""


def _differs(tensor: Tensor, parts: list[tuple[str, Held]], names: _Names) -> str:
    """Why a tensor is not served as it is trained, ``""`` if it is."""
    served = _joined(tensor.name, tensor.shape, parts)
    if served.wrong:
        return served.wrong
    if not served.digests:
        return ""  # it has no elements
    trained, held = next(iter(tensor.digests)), next(iter(served.digests))
    dtype = held if held in tensor.digests else trained
    if dtype not in served.digests:
        return f"the engine holds {held}, which is not what {trained} of the trainer makes"
    if served.digests[dtype] == tensor.digests[dtype]:
        return ""
    for narrow in NARROWED:
        if narrow in served.digests and served.digests[narrow] == tensor.digests.get(narrow):
            return f"{ROUNDED} {narrow} on the way: leave it out of cast=, {held} is held as well"
    for one in served.digests.items():
        if other := names.get((tensor.shape, *one)):
            return f"the engine holds the values of '{other}' in its place: one memory for both?"
    return f"other values than those that are trained ({dtype})"


def _joined(name: str, shape: tuple[int, ...], parts: list[tuple[str, Held]]) -> Tensor:
    """The whole of boxes that tile it; equal boxes have to have equal digests."""
    chosen: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[str, Held]] = {}
    for owner, one in parts:
        first, other = chosen.setdefault((one.offset, one.extent), (owner, one))
        common = one.digests.keys() & other.digests.keys()
        if any(one.digests[dtype] != other.digests[dtype] for dtype in common):
            why = f"{first} and {owner} hold other values of the same elements"
            return Tensor(name, shape, {}, f"{why}, from {list(one.offset)} on")
    parts = [one for one in chosen.values() if math.prod(one[1].extent)]
    boxes = [(one.offset, one.extent) for _, one in parts]
    sets, missing = [list(range(len(parts)))], 0
    elements = math.prod(shape)
    if sum(math.prod(extent) for _, extent in boxes) != elements or not are_apart(boxes):
        sets, missing = tilings(shape, boxes)
    if missing:
        why = f"{missing} of {elements} elements of {list(shape)} are held by nobody"
        return Tensor(name, shape, {}, f"cut: {why}" if parts else why)
    if not sets:
        return Tensor(name, shape, {}, "its parts overlap, and no set of them makes up the whole")
    whole, *others = ([parts[at] for at in one] for one in sets)
    sums = _sums(whole)
    if parts and not sums:
        return Tensor(name, shape, {}, "its parts are held in several types")
    for again in others:
        if any(sums.get(dtype, number) != number for dtype, number in _sums(again).items()):
            first, _ = next(part for part in whole if part not in again)
            owner, box = next(part for part in again if part not in whole)
            why = f"{first} and {owner} hold other values of the same elements"
            return Tensor(name, shape, {}, f"{why}, in parts that overlap, at {list(box.offset)}")
    return Tensor(name, shape, sums, "")


def _sums(parts: Sequence[tuple[str, Held]]) -> dict[str, int]:
    """The digests of parts together, in the types in which all of them are."""
    types = list(parts[0][1].digests) if parts else []
    return {
        dtype: digest_sum(one.digests[dtype] for _, one in parts)
        for dtype in types
        if all(dtype in one.digests for _, one in parts)
    }
