# SPDX-License-Identifier: Apache-2.0
"""Strided views of packed tensors, said as boxes; and which elements boxes cover. No torch in here.

A view of memory in C order is an offset and strides. It is one box of the tensor if every stride is
a stride of the tensor and no index runs over the end of its dimension; every other view is cut
into several boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

#: A view that would need more is not said in boxes.
MOST_BOXES = 65536
# Cells of a grid that are painted at once.
_CELLS = 1 << 20


class Part(NamedTuple):
    """A box of a packed tensor, and where its elements lie on the other side of a copy."""

    #: First element, in each of the tensor's dimensions.
    offset: tuple[int, ...]
    #: Elements, in each of the tensor's dimensions.
    extent: tuple[int, ...]
    #: Of the first element on the other side, in elements.
    at: int
    #: Between neighbours on the other side, in elements, for each of the tensor's dimensions.
    stride: tuple[int, ...]


class TooManyBoxesError(ValueError):
    """A view that has no description in a sensible number of boxes."""


class _Axis(NamedTuple):
    """A dimension of a view: its steps in both memories, in elements."""

    length: int
    step: int
    other: int


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor in C order, in elements; dimensions of no elements count as one."""
    strides, step = [], 1
    for count in reversed(shape):
        strides.append(step)
        step *= max(count, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def parts_of(
    shape: tuple[int, ...],
    first: int,
    extent: tuple[int, ...],
    step: tuple[int, ...],
    other: tuple[int, ...],
) -> tuple[Part, ...]:
    """A view of a packed tensor of *shape*, cut into boxes of it.

    Args:
        first: the view's first element, counted in the tensor's memory.
        extent: the view's shape.
        step: its strides in the tensor's memory, in elements.
        other: strides of the same dimensions on the other side of the copy, in elements.

    Raises:
        TooManyBoxesError: more than :data:`MOST_BOXES` boxes would be needed.
    """
    if 0 in extent:
        return ()
    axes = tuple(_Axis(*axis) for axis in zip(extent, step, other, strict=True) if axis[0] != 1)
    strides = packed_strides(shape)
    done: list[Part] = []
    todo = [(first, axes, 0)]
    while todo:
        start, axes, at = todo.pop()
        cut = _cut(shape, strides, start, axes)
        if cut is None:
            done.extend(_product(shape, strides, start, axes, at))
        else:
            todo.extend((start + by, rest, at + far) for by, rest, far in cut)
        if len(done) + len(todo) > MOST_BOXES:
            raise TooManyBoxesError(f"a view of shape {extent} and strides {step}")
    return tuple(done)


def _dimension(shape: Sequence[int], strides: Sequence[int], step: int) -> int:
    """The dimension along which a step of *step* elements goes, the innermost that can be."""
    for index in range(len(shape) - 1, -1, -1):
        if shape[index] > 1 and strides[index] <= step < strides[index] * shape[index]:
            return index
    return -1


_Cut = list[tuple[int, tuple[_Axis, ...], int]]


def _cut(
    shape: Sequence[int], strides: Sequence[int], start: int, axes: tuple[_Axis, ...]
) -> _Cut | None:
    """Views that make up this one, if it is not made of boxes as it stands."""
    reach = [start // step % size if size else 0 for step, size in zip(strides, shape, strict=True)]
    for place, axis in enumerate(axes):
        index = _dimension(shape, strides, axis.step)
        if index < 0 or axis.step % strides[index]:
            return _apart(axes, place)
        begin = reach[index]
        reach[index] += (axis.length - 1) * (axis.step // strides[index])
        if reach[index] >= shape[index]:
            if axis.step != strides[index] or begin != start // strides[index] % shape[index]:
                return _apart(axes, place)
            return _wrapped(axes, place, shape[index], begin)
    return None


def _apart(axes: tuple[_Axis, ...], place: int) -> _Cut:
    """One view for each index of an axis."""
    axis = axes[place]
    if axis.length > MOST_BOXES:
        raise TooManyBoxesError(f"{axis.length} steps of {axis.step} elements")
    rest = axes[:place] + axes[place + 1 :]
    return [(i * axis.step, rest, i * axis.other) for i in range(axis.length)]


def _wrapped(axes: tuple[_Axis, ...], place: int, size: int, begin: int) -> _Cut:
    """An axis that runs over its dimension's end: what is left of it, whole rounds, the rest."""
    axis = axes[place]
    head = (size - begin) % size
    rounds, tail = divmod(axis.length - head, size)
    spans: list[tuple[int, tuple[_Axis, ...]]] = []
    if head:
        spans.append((0, (_Axis(head, axis.step, axis.other),)))
    if rounds:
        outer = _Axis(rounds, axis.step * size, axis.other * size)
        inner = _Axis(size, axis.step, axis.other)
        spans.append((head, (outer, inner) if rounds > 1 else (inner,)))
    if tail:
        spans.append((head + rounds * size, (_Axis(tail, axis.step, axis.other),)))
    before, after = axes[:place], axes[place + 1 :]
    return [
        (i * axis.step, (*before, *(a for a in new if a.length > 1), *after), i * axis.other)
        for i, new in spans
    ]


def _product(
    shape: Sequence[int], strides: Sequence[int], start: int, axes: tuple[_Axis, ...], at: int
) -> Iterator[Part]:
    """Boxes of a view of which every axis goes along one dimension and ends within it."""
    extent, stride = [1] * len(shape), [0] * len(shape)
    singly: list[_Axis] = []
    for axis in sorted(axes, key=lambda a: a.step):
        index = _dimension(shape, strides, axis.step)
        times = axis.step // strides[index]
        if times == extent[index] and (times == 1 or axis.other == stride[index] * times):
            stride[index] = stride[index] if times > 1 else axis.other
            extent[index] *= axis.length
        else:
            singly.append(axis)
    shifts = [(0, 0)]
    for axis in reversed(singly):
        if len(shifts) * axis.length > MOST_BOXES:
            raise TooManyBoxesError(f"{len(shifts) * axis.length} boxes")
        shifts = [
            (by + i * axis.step, far + i * axis.other)
            for by, far in shifts
            for i in range(axis.length)
        ]
    for by, far in shifts:
        place = tuple(
            (start + by) // step % size if size else 0
            for step, size in zip(strides, shape, strict=True)
        )
        yield Part(place, tuple(extent), at + far, tuple(stride))


# ----------------------------------------------------------------------------------- coverage


class Block(NamedTuple):
    """A box of a tensor."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]


class Coverage(NamedTuple):
    """What boxes cover of a tensor; examples are blocks of the tensor."""

    #: Elements that no box has.
    unfilled: int
    #: Elements that several boxes have.
    twice: int
    first_unfilled: Block | None
    first_twice: Block | None


def coverage(
    shape: Sequence[int],
    blocks: Sequence[Block],
    padding: Sequence[Block] = (),
    *,
    first: bool = False,
) -> Coverage:
    """Whether *blocks* cover a tensor of *shape*, each element once.

    Works on the grid of the blocks' edges: its cost grows with the blocks, not with the elements.

    Args:
        padding: blocks that may be covered as well, and need not be.
        first: only as far as the first elements that are wrong: for blocks that nobody vouches for,
            whose grid may be huge.
    """
    whole = tuple(shape) or (1,)
    boxes, free = (
        [Block(b.offset or (0,), b.extent or (1,)) for b in some] for some in (blocks, padding)
    )
    total = Coverage(0, 0, None, None)
    for part in _painted(Block((0,) * len(whole), whole), boxes, free):
        total = Coverage(
            total.unfilled + part.unfilled,
            total.twice + part.twice,
            total.first_unfilled or part.first_unfilled,
            total.first_twice or part.first_twice,
        )
        if first and (total.unfilled or total.twice):
            break
    return total


def _painted(whole: Block, blocks: Sequence[Block], padding: Sequence[Block]) -> Iterator[Coverage]:
    """The coverage of parts of a block, each small enough to be painted."""
    bounds = [(low, low + length) for low, length in zip(*whole, strict=True)]
    inside, free = ([b for b in some if _meets(b, bounds)] for some in (blocks, padding))
    both = inside + free
    edges = [sorted({*bound, *_edges(both, i, *bound)}) for i, bound in enumerate(bounds)]
    cells = math.prod(len(line) - 1 for line in edges)
    if cells <= _CELLS:
        if cells:
            yield _paint(edges, inside, free)
        return
    longest = max(range(len(edges)), key=lambda i: len(edges[i]))
    low, high = bounds[longest]
    middle = edges[longest][len(edges[longest]) // 2]
    for start, end in ((low, middle), (middle, high)):
        offset, extent = list(whole.offset), list(whole.extent)
        offset[longest], extent[longest] = start, end - start
        yield from _painted(Block(tuple(offset), tuple(extent)), inside, free)


def _meets(block: Block, bounds: Sequence[tuple[int, int]]) -> bool:
    return all(
        begin < high and begin + length > low
        for begin, length, (low, high) in zip(block.offset, block.extent, bounds, strict=True)
    )


def _edges(blocks: Sequence[Block], index: int, low: int, high: int) -> Iterator[int]:
    for block in blocks:
        begin = block.offset[index]
        yield min(max(begin, low), high)
        yield min(max(begin + block.extent[index], low), high)


def _paint(edges: list[list[int]], blocks: Sequence[Block], padding: Sequence[Block]) -> Coverage:
    steps = packed_strides([len(line) - 1 for line in edges])
    index = [
        {edge: i * step for i, edge in enumerate(line)}
        for line, step in zip(edges, steps, strict=True)
    ]
    count = bytearray(steps[0] * (len(edges[0]) - 1))
    for block in blocks:
        for cell in _cells(edges, index, steps, block):
            count[cell] = min(count[cell] + 1, 2)
    for block in padding:
        for cell in _cells(edges, index, steps, block):
            count[cell] = count[cell] or 1
    return _counted(edges, count)


def _cells(
    edges: list[list[int]], index: list[dict[int, int]], steps: Sequence[int], block: Block
) -> Iterator[int]:
    """The cells of a grid that a block has."""
    lines = [
        range(place[max(begin, line[0])], place[min(begin + length, line[-1])], step)
        for line, place, step, begin, length in zip(
            edges, index, steps, block.offset, block.extent, strict=True
        )
    ]
    return map(sum, product(*lines))


def _counted(edges: list[list[int]], count: bytearray) -> Coverage:
    """What is left of a painted grid: most often nothing."""
    elements = [0, 0]
    example: list[Block | None] = [None, None]
    if len(count) == count.count(1):
        return Coverage(0, 0, None, None)
    sizes = [[b - a for a, b in zip(line, line[1:], strict=False)] for line in edges]
    cells = product(*(range(len(line)) for line in sizes))
    for cell, seen in zip(cells, count, strict=True):
        if seen == 1:
            continue
        extent = tuple(line[i] for line, i in zip(sizes, cell, strict=True))
        which = seen == 2
        elements[which] += math.prod(extent)
        if example[which] is None:
            example[which] = Block(
                tuple(line[i] for line, i in zip(edges, cell, strict=True)), extent
            )
    return Coverage(elements[0], elements[1], example[0], example[1])


# ----------------------------------------------------------------------------------- memory


class Memory(NamedTuple):
    """A tensor's memory as a packed tensor: its dimensions from the widest stride on."""

    order: tuple[int, ...]
    shape: tuple[int, ...]
    #: Without gaps and without elements that share memory.
    dense: bool

    def blocks(self, first: int, extent: tuple[int, ...], stride: tuple[int, ...]) -> list[Block]:
        """A view of it as boxes, in the order of its dimensions here.

        Args:
            first: of the view, in elements from the tensor's first one.
            stride: in elements.

        Raises:
            TooManyBoxesError: more than :data:`MOST_BOXES` would be needed.
        """
        parts = parts_of(self.shape, first, extent, stride, (0,) * len(extent))
        return [Block(part.offset, part.extent) for part in parts]

    def place(self, block: Block) -> list[int]:
        """A block's first element, in the tensor's own order of dimensions."""
        found = [0] * len(self.shape)
        for at, dim in zip(block.offset, self.order, strict=False):
            found[dim] = at
        return found


def memory_of(shape: Sequence[int], stride: Sequence[int]) -> Memory:
    """The memory of a tensor; its strides in elements."""
    order = tuple(sorted(range(len(shape)), key=lambda i: (-stride[i], i)))
    turned = tuple(shape[i] for i in order)
    dense = all(
        n <= 1 or stride[i] == step
        for i, n, step in zip(order, turned, packed_strides(turned), strict=True)
    )
    return Memory(order, turned, dense or 0 in turned)
