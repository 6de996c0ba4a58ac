# SPDX-License-Identifier: Apache-2.0
"""Published tensors that a loader puts one behind the other (`torch.cat`) before it copies them.

What comes of it has memory of its own, and yet nothing is computed: each of its elements is one of
a published tensor. So a copy of it is several copies, of parts of those tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fanin.mapping._boxes import TooManyBoxesError, parts_of


class Piece(NamedTuple):
    """A box of the joined tensor, and the published tensor's elements that lie there."""

    name: str
    #: Of the published tensor, in elements of its memory.
    first: int
    stride: tuple[int, ...]
    #: Of the box, in elements.
    offset: tuple[int, ...]
    extent: tuple[int, ...]


class _Share(NamedTuple):
    """What a copy of a view of the joined tensor copies of one published tensor."""

    name: str
    first: int
    stride: tuple[int, ...]
    #: Where that goes, counted from the first element of the copy's other side.
    at: int
    extent: tuple[int, ...]
    to: tuple[int, ...]


class Joined(NamedTuple):
    """A tensor in C order that pieces cover, each element once."""

    dtype: Any
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def shares(self, view: Any, to: Sequence[int]) -> list[_Share] | None:
        """A copy of *view* to memory with strides *to*; None if this does not say what it reads."""
        if view.dtype != self.dtype:
            return None
        try:
            parts = parts_of(
                self.shape, view.storage_offset(), tuple(view.shape), view.stride(), tuple(to)
            )
        except TooManyBoxesError:
            return None
        return [share for part in parts for share in self._of(part)]

    def _of(self, part: Any) -> Iterator[_Share]:
        for piece in self.pieces:
            begin = tuple(map(max, part.offset, piece.offset))
            ends = map(min, _end(part), _end(piece))
            extent = tuple(end - start for start, end in zip(begin, ends, strict=True))
            if min(extent, default=1) > 0:
                yield _Share(
                    piece.name,
                    piece.first + _steps(begin, piece.offset, piece.stride),
                    piece.stride,
                    part.at + _steps(begin, part.offset, part.stride),
                    extent,
                    part.stride,
                )


def _end(box: Any) -> Iterator[int]:
    return (start + count for start, count in zip(box.offset, box.extent, strict=True))


def _steps(at: Sequence[int], origin: Sequence[int], stride: Sequence[int]) -> int:
    return sum((a - o) * s for a, o, s in zip(at, origin, stride, strict=True))


def join(
    tensors: Sequence[Any], dimension: int, made: Any, name_of: Callable[[Any], str | None]
) -> Joined | None:
    """What `torch.cat` has *made* of *tensors*; None if one of them is no published one.

    Args:
        name_of: the published tensor of which a tensor is a view.
    """
    dimension %= max(made.dim(), 1)
    pieces, at = [], 0
    for tensor in tensors:
        name = name_of(tensor)
        if name is None or tensor.dtype != made.dtype or tensor.dim() != made.dim():
            return None
        offset = tuple(at if axis == dimension else 0 for axis in range(made.dim()))
        pieces.append(
            Piece(name, tensor.storage_offset(), tensor.stride(), offset, tuple(tensor.shape))
        )
        at += tensor.shape[dimension]
    if not made.is_contiguous():
        return None
    return Joined(made.dtype, tuple(made.shape), tuple(pieces))
