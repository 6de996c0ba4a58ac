# SPDX-License-Identifier: Apache-2.0
"""What ranks hold together: pure Python, no PyTorch."""

from __future__ import annotations

import itertools
import random

import pytest
from fanin._cover import uncovered
from fanin._tensors import Box, Shard
from fanin.errors import RequestError
from fanin.torch._blocks import Split, layout
from fanin.torch._union import (
    Whole,
    compress,
    ranks_text,
    replicated,
    table_of,
    unite,
)


def shard(name, shape, *parts, dtype="BF16"):
    zeros = (0,) * len(shape)
    return Shard(name, dtype, shape, tuple(Box(at, size, zeros, 1) for at, size in parts))


def united(*ranks):
    """The tensors of ranks that each hold a list of shards."""
    told, texts = [], {}
    for shards in ranks:
        one, text = compress(table_of(shards))
        told.append(one)
        texts[one.digest] = text
    return unite(told, texts)


def whole(name, shape, **more):
    return shard(name, shape, ((0,) * len(shape), shape), **more)


# -------------------------------------------------------------------------------- what is covered


@pytest.mark.parametrize("seed", range(60))
def test_a_gap_is_a_block_that_nobody_has(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
    parts = []
    for _ in range(draw.randint(0, 12)):
        at = tuple(draw.randrange(size) for size in shape)
        parts.append((at, tuple(draw.randint(0, s - a) for s, a in zip(shape, at, strict=True))))
    held = {
        index
        for at, size in parts
        for index in itertools.product(*(range(a, a + n) for a, n in zip(at, size, strict=True)))
    }
    everything = set(itertools.product(*map(range, shape)))
    gap = uncovered(shape, parts)
    if gap is None:
        assert held == everything
    else:
        missing = set(itertools.product(*(range(first, end) for first, end in gap)))
        assert missing and missing <= everything - held


@pytest.mark.parametrize("shape", [(7, 5), (16, 3), (2, 9)])
@pytest.mark.parametrize(
    "placements, mesh",
    [
        ((Split(0),), (4,)),
        ((None, Split(0)), (2, 3)),
        ((Split(0, 2), Split(0)), (2, 2)),
        ((Split(0), Split(1)), (4, 2)),
    ],
)
def test_all_ranks_of_a_mesh_have_everything_and_one_less_has_not(shape, placements, mesh):
    ranks = list(itertools.product(*map(range, mesh)))

    def parts(coordinate):
        for local in itertools.product(*(range(size + 1) for size in shape)):
            blocks = layout(shape, placements, mesh, coordinate, local)
            if blocks:
                return [(block.offset, block.extent) for block in blocks]
        return []

    held = {rank: parts(rank) for rank in ranks}
    assert uncovered(shape, [part for one in held.values() for part in one]) is None
    for lost in ranks:
        kept = [part for rank, one in held.items() if rank != lost for part in one]
        replicated = not set(held[lost]) - set(kept)
        assert (uncovered(shape, kept) is None) == replicated


def test_scalars_and_empty_tensors():
    assert uncovered((), [((), ())]) is None
    assert uncovered((), []) == ()
    assert uncovered((0, 4), []) is None
    assert uncovered((2, 4), [((0, 0), (0, 4))]) == ((0, 2), (0, 4))


def test_many_ranks_are_no_work():
    """Rows of 4096 ranks, each of which 8 replicas hold."""
    parts = [((row, 0), (1, 64)) for row in range(4096)] * 8
    assert uncovered((4096, 64), parts) is None
    assert uncovered((4097, 64), parts) == ((4096, 4097), (0, 64))


# ---------------------------------------------------------------------------- what ranks agree on


def test_tensors_of_all_ranks_are_united():
    first = [whole("b", (2,)), shard("a", (4, 2), ((0, 0), (2, 2))), shard("c", (3,))]
    second = [shard("a", (4, 2), ((2, 0), (2, 2))), whole("c", (3,)), whole("n", (), dtype="I64")]
    assert united(first, second) == [
        Whole("a", "BF16", (4, 2)),
        Whole("b", "BF16", (2,)),
        Whole("c", "BF16", (3,)),
        Whole("n", "I64", ()),
    ]


def test_ranks_that_hold_alike_tell_one_text():
    """Whatever parts they hold: rows of the same tensors."""
    told = [
        compress(table_of(shard(f"layer.{i}", (8, 4), ((2 * rank, 0), (2, 4))) for i in range(500)))
        for rank in range(4)
    ]
    assert len({one.digest for one, _ in told}) == 1
    assert all(len(one.geometries) == 1 for one, _ in told)


def test_what_is_missing_is_named():
    rows = [[shard("w", (6, 4), ((at, 0), (2, 4)))] for at in (0, 2, 4)]
    assert united(*rows) == [Whole("w", "BF16", (6, 4))]
    with pytest.raises(RequestError) as caught:
        united(rows[0], rows[2], [shard("w", (6, 4))])
    assert caught.value.key == "w"
    assert (
        "elements [2:4, 0:4] of 'w' (BF16 [6, 4]) are held by no rank; ranks 0-1 hold parts of it"
    ) in str(caught.value)
    with pytest.raises(RequestError, match="no rank holds any of it"):
        united([shard("w", (6, 4))])


def test_a_rank_may_have_nothing_but_not_all():
    assert united([], [whole("w", (2,))]) == [Whole("w", "BF16", (2,))]
    with pytest.raises(RequestError, match="no rank has a tensor to publish"):
        united([], [])


@pytest.mark.parametrize(
    "other, told",
    [
        (whole("w", (2, 4), dtype="F32"), "F32 [2, 4] on rank 3"),
        (whole("w", (4, 2)), "BF16 [4, 2] on rank 3"),
        (whole("w", (8,)), "BF16 [8] on rank 3"),
    ],
)
def test_contradictions_are_named(other, told):
    ours = [whole("w", (2, 4))]
    with pytest.raises(RequestError) as caught:
        united(ours, ours, ours, [other], ours)
    assert f"'w' is BF16 [2, 4] on ranks 0-2, 4 and {told}" in str(caught.value)
    assert caught.value.key == "w"


def test_ranks_text():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([2, 0, 1, 7, 5, 6]) == "ranks 0-2, 5-7"
    assert ranks_text([0, 2]) == "ranks 0, 2"


# ------------------------------------------------------------------------------ what several hold


def shared(rank, *ranks):
    """Who else holds what that rank does: {ranks: names}."""
    told, texts = [], {}
    for shards in ranks:
        one, text = compress(table_of(shards))
        told.append(one)
        texts[one.digest] = text
    return {one.ranks: [name for name, _ in one.boxes] for one in replicated(told, texts, rank)}


def test_boxes_of_several_ranks():
    first, second = ((0, 0), (2, 4)), ((2, 0), (2, 4))
    ranks = [
        [whole("norm", (4,)), shard("w", (4, 4), first)],
        [whole("norm", (4,)), shard("w", (4, 4), second)],
        [whole("norm", (4,)), shard("w", (4, 4), first)],
        [whole("norm", (4,)), shard("w", (4, 4), second), whole("own", (1,))],
    ]
    assert shared(0, *ranks) == {(0, 1, 2, 3): ["norm"], (0, 2): ["w"]}
    assert shared(3, *ranks) == {(0, 1, 2, 3): ["norm"], (1, 3): ["w"]}
    assert shared(0, ranks[0], ranks[1][1:]) == {}


def test_what_nobody_holds_is_nobodys_replica():
    empty = shard("w", (4, 4), ((0, 0), (0, 4)))
    assert shared(0, [empty, whole("a", ())], [empty, whole("a", ())]) == {(0, 1): ["a"]}
