# SPDX-License-Identifier: Apache-2.0
"""Strided views said as boxes, against every element of them counted out."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from fanin.mapping import _boxes
from fanin.mapping._boxes import (
    MOST_BOXES,
    Block,
    TooManyBoxesError,
    coverage,
    memory_of,
    packed_strides,
    parts_of,
)


def counted(first: int, extent: tuple[int, ...], *steps: tuple[int, ...]) -> list[tuple[int, ...]]:
    """For each element of a view: its place in both memories."""
    starts = (first, 0)
    return [
        tuple(
            start + sum(i * s for i, s in zip(index, step, strict=True))
            for start, step in zip(starts, steps, strict=True)
        )
        for index in itertools.product(*map(range, extent))
    ]


def said(shape: tuple[int, ...], first: int, extent: tuple[int, ...], step, other):
    """The same by boxes; every box has to be inside of the tensor."""
    strides, found = packed_strides(shape), []
    for part in parts_of(shape, first, extent, step, other):
        for begin, length, limit in zip(part.offset, part.extent, shape, strict=True):
            assert 0 <= begin and length > 0 and begin + length <= limit
        start = sum(o * s for o, s in zip(part.offset, strides, strict=True))
        for index in itertools.product(*map(range, part.extent)):
            found.append(
                (
                    start + sum(i * s for i, s in zip(index, strides, strict=True)),
                    part.at + sum(i * s for i, s in zip(index, part.stride, strict=True)),
                )
            )
    return found


def check(shape, first, extent, step, boxes: int | None = None) -> None:
    other = packed_strides(extent)
    assert sorted(said(shape, first, extent, step, other)) == sorted(
        counted(first, extent, step, other)
    )
    if boxes is not None:
        assert len(parts_of(shape, first, extent, step, other)) == boxes


@pytest.mark.parametrize(
    ("shape", "first", "extent", "step", "boxes"),
    [
        ((), 0, (), (), 1),
        ((), 0, (1,), (1,), 1),  # a scalar seen as a vector
        ((1,), 0, (), (), 1),
        ((4, 6), 0, (4, 6), (6, 1), 1),
        ((4, 6), 6, (2, 6), (6, 1), 1),  # rows
        ((4, 6), 2, (4, 3), (6, 1), 1),  # columns
        ((4, 6), 0, (6, 4), (1, 6), 1),  # transposed
        ((4, 6), 0, (24,), (1,), 1),  # flattened
        ((4, 6), 6, (12,), (1,), 1),  # whole rows, flattened
        ((4, 6), 3, (18,), (1,), 3),  # from the middle of a row to the middle of another
        ((4, 6), 0, (2, 2, 6), (12, 6, 1), 1),  # rows, two by two
        ((4, 6), 0, (2, 6), (12, 1), 2),  # every other row
        ((4, 6), 1, (4, 2), (6, 3), 2),  # every third column
        ((4, 4), 0, (4,), (5,), 4),  # the diagonal
        ((12,), 0, (3, 4), (4, 1), 1),
        ((12,), 0, (4, 3), (1, 4), 3),
        ((3, 0), 0, (3, 0), (1, 1), 0),
        ((2, 1, 3), 0, (6,), (1,), 1),
        ((8, 3), 0, (2, 2, 3), (12, 3, 1), 2),  # two of each four rows
    ],
)
def test_a_view(shape, first, extent, step, boxes: int) -> None:
    check(shape, first, extent, step, boxes)


def test_random_views() -> None:
    generator = random.Random(11)
    seen = 0
    for _ in range(4000):
        shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(1, 4)))
        dims = generator.randint(1, 4)
        extent = tuple(generator.randint(1, 5) for _ in range(dims))
        step = tuple(
            generator.choice([*packed_strides(shape), generator.randint(1, 9)]) for _ in extent
        )
        reach = sum((n - 1) * s for n, s in zip(extent, step, strict=True))
        if reach >= math.prod(shape):
            continue
        seen += 1
        check(shape, generator.randint(0, math.prod(shape) - 1 - reach), extent, step)
    assert seen > 500


def test_the_other_side_keeps_its_strides() -> None:
    # Rows of a weight into a transposed destination.
    (part,) = parts_of((8, 6), 12, (4, 6), (6, 1), (1, 4))
    assert part == ((2, 0), (4, 6), 0, (1, 4))


def test_too_many_boxes_are_refused() -> None:
    many = MOST_BOXES + 1
    with pytest.raises(TooManyBoxesError):
        parts_of((2 * many, 2), 0, (many,), (4,), (1,))  # every other row's first element


def test_coverage_of_blocks() -> None:
    whole = [Block((0, 0), (4, 6)), Block((4, 0), (2, 3)), Block((4, 3), (2, 3))]
    assert coverage((6, 6), whole) == (0, 0, None, None)
    assert coverage((6, 6), whole[:2]) == (6, 0, Block((4, 3), (2, 3)), None)
    assert coverage((6, 6), [*whole, Block((3, 2), (2, 2))]).twice == 4
    assert coverage((6, 6), [*whole, Block((3, 2), (2, 2))]).first_twice == Block((3, 2), (1, 1))
    assert coverage((6, 6), []) == (36, 0, Block((0, 0), (6, 6)), None)
    assert coverage((), [Block((), ())]) == (0, 0, None, None)
    assert coverage((), []).unfilled == 1
    assert coverage((0, 6), []) == (0, 0, None, None)


def test_padding_may_be_covered_and_need_not_be() -> None:
    block, rest = Block((0,), (6,)), Block((6,), (4,))
    assert coverage((10,), [block], [rest]) == (0, 0, None, None)
    assert coverage((10,), [block], [Block((0,), (10,))]) == (0, 0, None, None)
    assert coverage((10,), [block], [Block((5,), (4,))]) == (1, 0, Block((9,), (1,)), None)
    assert coverage((10,), [block, block], [Block((0,), (10,))]).twice == 6


def test_a_huge_grid_is_left_at_the_first_fault() -> None:
    # 4 dimensions with 600 edges each: the whole grid has 10^11 cells.
    corners = [Block((i,) * 4, (1,) * 4) for i in range(1, 600)]
    found = coverage((1000,) * 4, corners, first=True)
    assert found.unfilled and found.first_unfilled == Block((0,) * 4, (1,) * 4)


def test_coverage_against_every_element_counted() -> None:
    generator = random.Random(5)
    for _ in range(500):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(1, 3)))
        blocks, count = [], dict.fromkeys(itertools.product(*map(range, shape)), 0)
        for _ in range(generator.randint(0, 6)):
            offset = tuple(generator.randrange(n) for n in shape)
            extent = tuple(generator.randint(1, n - o) for n, o in zip(shape, offset, strict=True))
            blocks.append(Block(offset, extent))
            for index in itertools.product(
                *(range(o, o + n) for o, n in zip(offset, extent, strict=True))
            ):
                count[index] += 1
        found = coverage(shape, blocks)
        assert found.unfilled == sum(n == 0 for n in count.values())
        assert found.twice == sum(n > 1 for n in count.values())
        assert (found.first_twice is None) == (found.twice == 0)


def test_coverage_of_many_experts_works_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_boxes, "_CELLS", 16)
    experts = [Block((e, half * 8, 0), (1, 8, 4)) for e in range(64) for half in range(2)]
    assert coverage((64, 16, 4), experts) == (0, 0, None, None)
    lost = experts.pop(77)
    assert coverage((64, 16, 4), experts) == (32, 0, lost, None)
    assert coverage((64, 16, 4), [*experts, lost, lost]) == (0, 32, None, lost)


def test_memory_is_a_packed_tensor_in_its_own_order() -> None:
    turned = memory_of((4, 6), (1, 4))
    assert turned == ((1, 0), (6, 4), True)
    assert turned.blocks(8, (4, 2), (1, 4)) == [Block((2, 0), (2, 4))]
    assert turned.place(Block((2, 0), (2, 4))) == [0, 2]
    assert not memory_of((4, 6), (7, 1)).dense
    assert not memory_of((4, 6), (0, 1)).dense
    assert memory_of((4, 1), (1, 99)).dense
    assert memory_of((), ()).dense
