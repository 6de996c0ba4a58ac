# SPDX-License-Identifier: Apache-2.0
"""Slices that are parts of a published tensor, and the functions of fanin.torch.names: no PyTorch.

A stored tensor has its element's number at each place; what is published is compared element by
element.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
from fanin._tensors import Box
from fanin.torch import Slice, chain, slot
from fanin.torch._blocks import slice_boxes
from fanin.torch._names import published_shape, slices_of
from fanin.torch.names import experts, gate_up, megatron, vocabulary


def numbers(box):
    """Where each element of a box lies in the published tensor, and its number."""
    for at in itertools.product(*map(range, box.extent)):
        place = tuple(first + i for first, i in zip(box.offset, at, strict=True))
        yield place, box.address + sum(i * s for i, s in zip(at, box.stride, strict=True))


def published(names, shape, name="w"):
    """What is published of a stored tensor: {key: (shape, {place: number})}."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    stored = Box((0,) * len(shape), shape, strides, 0)
    out = {}
    for part in slices_of(names, name, shape):
        whole = published_shape(part, shape)
        known, places = out.setdefault(part.key, (whole, {}))
        assert known == whole
        for box in slice_boxes([stored], shape, part.index, part.at):
            for place, number in numbers(box):
                assert place not in places, f"{part.key}{place} twice"
                assert all(0 <= i < size for i, size in zip(place, whole, strict=True))
                places[place] = number
    return out


def rows(out, key):
    """The numbers of the first elements of the rows of a published tensor that are there."""
    shape, places = out[key]
    return [places.get((row, *(0 for _ in shape[1:]))) for row in range(shape[0])]


# ---------------------------------------------------------------------------------------- slices


def test_parts_of_one_published_tensor():
    halves = [
        Slice("w", (slice(0, 2),), (2, 0), (4, 3)),
        Slice("w", (slice(2, 4),), (0, 0), (4, 3)),
    ]
    out = published(lambda name, shape: halves, (4, 3))
    assert rows(out, "w") == [6, 9, 0, 3]


def test_places_that_do_not_fit_are_refused():
    for part in (
        Slice("w", (), (1, 0), (4, 3)),
        Slice("w", (), (-1, 0), (9, 3)),
        Slice("w", (), (0,), (4, 3)),
        Slice("w", (0,), (0, 0), (4, 3)),
        Slice("w", (), (0, 0)),
    ):
        with pytest.raises(ValueError):
            published_shape(part, (4, 3))
    assert published_shape(Slice("w", (), (0, 0), (4, 3)), (4, 3)) == (4, 3)
    assert published_shape(Slice("w", (0,), None, (9,)), (4, 3)) == (9,)


@pytest.mark.parametrize("seed", range(60))
def test_chains_of_parts_are_parts_of_parts(seed):
    """Of random cuts of random cuts each element is where the two say that it is."""
    draw = random.Random(seed)

    def cuts(shape):
        """Blocks of a grid, shuffled into a tensor of the same shape, some of them left out."""
        edges = [sorted({0, size, *(draw.randint(0, size) for _ in range(2))}) for size in shape]
        grid = itertools.product(*(zip(e, e[1:], strict=False) for e in edges))
        return [
            Slice(
                "w",
                tuple(slice(*part) for part in block),
                tuple(first for first, _ in block),
                shape,
            )
            for block in grid
            if draw.random() < 0.8
        ]

    shape = (draw.randint(1, 6), draw.randint(1, 6))
    first, window = cuts(shape), slice(*sorted(draw.randint(0, shape[0]) for _ in range(2)))
    single = draw.randrange(shape[1])

    def second(name, shape):
        return [Slice("a", (window,)), Slice("b", (slice(None), single)), *cuts_of_it]

    cuts_of_it = cuts(shape)
    one = published(lambda name, shape: first, shape)
    both = published(chain(lambda name, shape: first, second), shape)
    kept = one.get("w", (shape, {}))[1]
    for part in slices_of(second, "w", shape):
        wanted = {
            place: kept[at]
            for box in slice_boxes(
                [Box((0, 0), shape, (shape[1], 1), 0)], shape, part.index, part.at
            )
            for place, number in numbers(box)
            if (at := divmod(number, shape[1])) in kept
        }
        got = both.get(part.key, ((), {}))[1]
        assert wanted.items() <= got.items()
    assert sum(len(places) for _, places in both.values()) == len(
        [1 for at in kept if window.start <= at[0] < window.stop]
        + [1 for at in kept if at[1] == single]
        + [
            1
            for part in cuts_of_it
            for at in kept
            if all(s.start <= i < s.stop for s, i in zip(part.index, at, strict=True))
        ]
    )


# ------------------------------------------------------------------------------- stacked experts


def test_experts():
    out = published(experts(first=8), (2, 4, 3), "model.layers.1.mlp.experts.gate_up_proj")
    path = "model.layers.1.mlp.experts"
    assert list(out) == [
        f"{path}.{e}.{name}_proj.weight" for e in (8, 9) for name in ("gate", "up")
    ]
    assert out[f"{path}.9.up_proj.weight"][0] == (2, 3)
    assert rows(out, f"{path}.9.up_proj.weight") == [18, 21]
    for leaf, name in (("w2", "down"), ("w3", "up"), ("w1.weight", "gate"), ("down_proj", "down")):
        out = published(experts(), (2, 4, 3), f"{path}.{leaf}")
        assert list(out) == [f"{path}.{e}.{name}_proj.weight" for e in (0, 1)]
    for name, shape in (
        ("mlp.experts.0.gate_proj.weight", (4, 3)),
        ("mlp.gate.weight", (4, 3)),
        ("mlp.experts.gate_up_proj", (4, 3)),
        ("mlp.experts.bias", (4, 3, 2)),
    ):
        assert slices_of(experts(), name, shape) == (Slice(name),)
    with pytest.raises(ValueError, match="not 2 equal parts"):
        experts()("mlp.experts.gate_up_proj", (2, 5, 3))


def test_gate_up():
    out = published(gate_up, (4, 3), "l.mlp.gate_up_proj.weight")
    assert rows(out, "l.mlp.gate_proj.weight") == [0, 3]
    assert rows(out, "l.mlp.up_proj.weight") == [6, 9]
    assert rows(published(gate_up, (4,), "gate_up_proj.bias"), "up_proj.bias") == [2, 3]
    assert slices_of(gate_up, "o_proj.weight", (4, 3)) == (Slice("o_proj.weight"),)


def test_vocabulary():
    out = published(vocabulary(5), (8, 2), "model.embed_tokens.weight")
    assert rows(out, "model.embed_tokens.weight") == [0, 2, 4, 6, 8]
    assert slices_of(vocabulary(5), "lm_head.weight", (5, 2)) == (Slice("lm_head.weight"),)
    assert slices_of(vocabulary(5), "mlp.weight", (8, 2)) == (Slice("mlp.weight"),)
    with pytest.raises(ValueError, match="has 4 rows"):
        vocabulary(5)("lm_head.weight", (4, 2))
    out = published(chain(slot(1, size=8), vocabulary(5)), (16, 2), "lm_head.weight")
    assert rows(out, "lm_head.weight") == [16, 18, 20, 22, 24]


# --------------------------------------------------------------------------------------- Megatron

CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 16,
    "head_dim": 3,
    "vocab_size": 10,
}
MOE = {**CONFIG, "moe_intermediate_size": 2}
LAYER = "decoder.layers.0"


def of_ranks(name, shape, size=2, **more):
    """What all tensor-parallel ranks publish: (rank, number) of the first element of each row."""
    found = {}
    for rank in range(size):
        names = megatron(CONFIG, tp_rank=rank, tp_size=size, **more)
        for key, (whole, places) in published(names, shape, name).items():
            known, all_places = found.setdefault(key, (whole, {}))
            assert known == whole
            assert not all_places.keys() & places.keys()
            all_places.update({place: (rank, number) for place, number in places.items()})
    for key, (whole, places) in found.items():
        assert len(places) == math.prod(whole), f"{key} is not whole"
    return {key: rows(found, key) for key in found}


def test_interleaved_queries_keys_and_values():
    """A rank has 2 groups of 2 query heads, a key and a value: rows qqkv qqkv of 3 each."""
    out = of_ranks(f"{LAYER}.self_attention.linear_qkv.weight", (24, 1), first_layer=5)
    path = "model.layers.5.self_attn"
    assert list(out) == [f"{path}.{name}_proj.weight" for name in "qkv"]
    ranks = (0, 1)
    assert out[f"{path}.q_proj.weight"] == [
        (r, row) for r in ranks for row in (*range(6), *range(12, 18))
    ]
    assert out[f"{path}.k_proj.weight"] == [(r, i) for r in ranks for i in (6, 7, 8, 18, 19, 20)]
    assert out[f"{path}.v_proj.weight"] == [(r, i) for r in ranks for i in (9, 10, 11, 21, 22, 23)]
    out = of_ranks(f"{LAYER}.self_attention.linear_qkv.bias", (48,), size=1)
    assert [number for _, number in out["model.layers.0.self_attn.k_proj.bias"]] == [
        12 * group + 6 + i for group in range(4) for i in range(3)
    ]


def test_projections_of_megatron():
    out = of_ranks(f"{LAYER}.mlp.linear_fc1.weight", (4, 1))
    assert out == {
        "model.layers.0.mlp.gate_proj.weight": [(0, 0), (0, 1), (1, 0), (1, 1)],
        "model.layers.0.mlp.up_proj.weight": [(0, 2), (0, 3), (1, 2), (1, 3)],
    }
    assert of_ranks(f"{LAYER}.mlp.linear_fc2.weight", (2, 3)) == {
        "model.layers.0.mlp.down_proj.weight": [(0, 0), (0, 3)]
    }
    assert of_ranks(f"{LAYER}.self_attention.linear_proj.weight", (2, 3)) == {
        "model.layers.0.self_attn.o_proj.weight": [(0, 0), (0, 3)]
    }
    for name in ("experts.linear_fc1.weight3", "experts.local_experts.3.linear_fc1.weight"):
        names = megatron(MOE, tp_rank=1, tp_size=2, first_expert=8)
        out = published(names, (4, 1), f"{LAYER}.mlp.{name}")
        assert list(out) == [
            f"model.layers.0.mlp.experts.11.{name}_proj.weight" for name in ("gate", "up")
        ]
        assert rows(out, "model.layers.0.mlp.experts.11.up_proj.weight") == [2, 3]


@pytest.mark.parametrize("config", [CONFIG, {**CONFIG, "moe_intermediate_size": 4}])
@pytest.mark.parametrize("name", ["experts.{}.weight3", "experts.local_experts.3.{}.weight"])
def test_experts_of_megatron_that_are_tensor_parallel(config, name):
    """In groups of their own: of four ranks that share a layer two share an expert."""
    expert = "model.layers.0.mlp.experts.3"

    def of(leaf, shape):
        parts = [
            published(
                megatron(config, tp_rank=2 + r, tp_size=4, expert_tp_rank=r, expert_tp_size=2),
                shape,
                f"{LAYER}.mlp.{name.format(leaf)}",
            )
            for r in (0, 1)
        ]
        for key in parts[0]:
            one, other = parts[0][key], parts[1][key]
            assert one[0] == other[0] and not one[1].keys() & other[1].keys()
            assert len(one[1]) + len(other[1]) == math.prod(one[0])
        return parts

    first, second = of("linear_fc1", (4, 1))
    assert list(first) == [f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"]
    assert rows(first, f"{expert}.up_proj.weight") == [2, 3, None, None]
    assert rows(second, f"{expert}.gate_proj.weight") == [None, None, 0, 1]
    first, second = of("linear_fc2", (2, 2))
    assert first[f"{expert}.down_proj.weight"][0] == (2, 4)
    assert second[f"{expert}.down_proj.weight"][1] == {(0, 2): 0, (0, 3): 1, (1, 2): 2, (1, 3): 3}


def test_experts_of_megatron_that_may_be_parts_are_refused():
    fc1, fc2 = (f"{LAYER}.mlp.experts.linear_fc{which}.weight0" for which in (1, 2))
    for size in (1, 2):  # Megatron's default is that experts are shared as all else is
        names = megatron(MOE | {"moe_intermediate_size": 4}, tp_size=size)
        for name, shape in ((fc1, (4, 1)), (fc2, (1, 2))):
            with pytest.raises(ValueError, match="has 2 of .* 4, .*expert_tp_rank and") as caught:
                names(name, shape)
            assert name in str(caught.value)
        with pytest.raises(ValueError, match="cannot be told: give moe_intermediate_size .* or"):
            megatron(CONFIG, tp_size=size)(fc1, (4, 1))
    with pytest.raises(ValueError, match="which 4 such parts do not make"):
        megatron(MOE, expert_tp_rank=0, expert_tp_size=4)(fc2, (1, 2))
    for more in ({"expert_tp_rank": 1}, {"expert_tp_size": 2}):
        with pytest.raises(ValueError, match="both"):
            megatron(MOE, **more)


def test_padded_vocabularies_of_megatron():
    """10 rows, padded to 16 over four ranks: the last one has padding only."""
    out = of_ranks("embedding.word_embeddings.weight", (4, 1), size=4)
    assert out["model.embed_tokens.weight"] == [divmod(row, 4) for row in range(10)]
    assert list(of_ranks("output_layer.weight", (16, 1), size=1)) == ["lm_head.weight"]
    with pytest.raises(ValueError, match="fewer than 10"):
        megatron(CONFIG, tp_size=2)("output_layer.weight", (4, 1))


def test_what_megatron_does_not_tell():
    names = megatron(CONFIG)
    for name in ("decoder.layers.0.mlp.experts.weight1", "decoder.layers.0.new.weight", "w"):
        with pytest.raises(ValueError, match="does not know"):
            names(name, (4, 4))
    with pytest.raises(ValueError, match="has 47 rows; 4 groups of 2 query heads of 3 have 48"):
        names(f"{LAYER}.self_attention.linear_qkv.weight", (47, 1))
    with pytest.raises(ValueError, match="4 groups of heads are not 3 equal parts"):
        megatron(CONFIG, tp_size=3)
    with pytest.raises(ValueError, match="no vocab_size"):
        megatron({"num_attention_heads": 2, "hidden_size": 4})
