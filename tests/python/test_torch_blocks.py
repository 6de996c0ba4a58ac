# SPDX-License-Identifier: Apache-2.0
"""Boxes from placements, names on disk and slices: pure Python, no PyTorch."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import subprocess
import sys

import pytest
from fanin._library import library
from fanin._tensors import Box
from fanin.errors import RequestError
from fanin.torch import Slice, chain, on_disk, per_expert, renamed, slot
from fanin.torch._blocks import (
    Split,
    chunk,
    cut,
    decode_order,
    layout,
    normal_index,
    place,
    slice_boxes,
    sliced_shape,
    split_runs,
)
from fanin.torch._names import parse, slices_of


def test_pytorch_is_not_imported():
    code = "import sys, fanin.torch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------- splitting


@pytest.mark.parametrize(
    "size, pieces, lengths",
    [
        (10, 4, [3, 3, 3, 1]),
        (5, 4, [2, 2, 1, 0]),
        (8, 16, [1] * 8 + [0] * 8),
        (3, 4, [1, 1, 1, 0]),
        (4, 4, [1, 1, 1, 1]),
        (9, 4, [3, 3, 3, 0]),
        (0, 3, [0, 0, 0]),
        (7, 1, [7]),
    ],
)
def test_chunk_is_torch_chunk(size, pieces, lengths):
    parts = [chunk(size, pieces, index) for index in range(pieces)]
    assert [length for _, length in parts] == lengths
    assert [start for start, length in parts if length] == [
        sum(lengths[:index]) for index in range(pieces) if lengths[index]
    ]


def test_cut_takes_pieces_of_several_runs():
    runs = [(0, 3), (10, 2), (20, 4)]
    indices = [first + i for first, length in runs for i in range(length)]
    for start, count in itertools.product(range(10), range(10)):
        got = [first + i for first, length in cut(runs, start, count) for i in range(length)]
        assert got == indices[start : start + count]


def naive(indices, pieces, index, factor):
    """The definition, on lists: cut into `factor` chunks, chunk each, put the index-th together."""

    def chunks(values, k):
        step = -(-len(values) // k)
        return [values[step * i : step * (i + 1)] if step else [] for i in range(k)]

    return [value for part in chunks(indices, factor) for value in chunks(part, pieces)[index]]


def test_strided_split_of_the_documented_example():
    assert split_runs([(0, 9)], 4, 0, factor=2) == [(0, 2), (5, 1)]


@pytest.mark.parametrize("seed", range(200))
def test_split_runs_is_the_definition(seed):
    rng = random.Random(seed)
    runs, at = [], 0
    for _ in range(rng.randint(0, 4)):
        at += rng.randint(0, 5)
        length = rng.randint(1, 9)
        runs.append((at, length))
        at += length
    indices = [first + i for first, length in runs for i in range(length)]
    pieces, factor = rng.randint(1, 6), rng.randint(1, 4)
    for index in range(pieces):
        got = split_runs(runs, pieces, index, factor)
        assert [first + i for first, length in got for i in range(length)] == naive(
            indices, pieces, index, factor
        )
        assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(got)), "runs are merged"


def cells(blocks):
    return [
        tuple(o + i for o, i in zip(block.offset, at, strict=True))
        for block in blocks
        for at in itertools.product(*(range(n) for n in block.extent))
    ]


@pytest.mark.parametrize("seed", range(150))
def test_ranks_cover_the_tensor(seed):
    """All meshes and placements: each element is held as often as the replicas say."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
    mesh = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    placements = tuple(
        rng.choice([None, Split(rng.randrange(len(shape)))]) for _ in range(len(mesh))
    )
    replicas = math.prod(n for n, p in zip(mesh, placements, strict=True) if p is None)
    held = []
    for coordinate in itertools.product(*(range(n) for n in mesh)):
        sizes = list(shape)
        for dim, placement in enumerate(placements):
            if placement is not None:
                sizes[placement.dim] = chunk(sizes[placement.dim], mesh[dim], coordinate[dim])[1]
        blocks = layout(shape, placements, mesh, coordinate, tuple(sizes))
        assert sum(math.prod(block.extent) for block in blocks) == math.prod(sizes)
        held += cells(blocks)
    everything = list(itertools.product(*(range(n) for n in shape)))
    assert sorted(held) == sorted(everything * replicas)


def fsdp_over_tp(rows, dp, tp):
    """What FSDP over tensor parallelism holds: rows chunked by tp, each piece by dp."""
    out = {}
    for j in range(tp):
        start, count = chunk(rows, tp, j)
        for i in range(dp):
            inner, length = chunk(count, dp, i)
            out[i, j] = list(range(start + inner, start + inner + length))
    return out


@pytest.mark.parametrize("rows", range(1, 20))
@pytest.mark.parametrize("dp, tp", [(2, 2), (4, 2), (2, 4), (3, 2), (2, 3)])
def test_strided_shard_is_fsdp_over_tensor_parallelism(rows, dp, tp):
    placements = (Split(0, tp), Split(0))
    for coordinate, held in fsdp_over_tp(rows, dp, tp).items():
        blocks = layout((rows, 5), placements, (dp, tp), coordinate, (len(held), 5))
        assert blocks is not None
        assert cells(blocks) == [(row, column) for row in held for column in range(5)]


def test_strided_shard_of_its_own_has_several_blocks():
    # No mesh dimension to the right explains the factor: the pieces stay apart.
    blocks = layout((9, 2), (Split(0, 2),), (4,), (0,), (3, 2))
    assert [(b.offset, b.extent, b.local) for b in blocks] == [
        ((0, 0), (2, 2), (0, 0)),
        ((5, 0), (1, 2), (2, 0)),
    ]
    boxes = place(blocks, (8, 4), 1000)
    assert [box.address for box in boxes] == [1000, 1016]


def test_an_order_that_is_known_is_followed():
    # Mesh dimension 1 splits first: the rank at (1, 0) has the second half of the first half.
    order = ((0, (1, 0)),)
    blocks = layout((8,), (Split(0), Split(0)), (2, 2), (1, 0), (2,), order)
    assert cells(blocks) == [(2,), (3,)]
    assert cells(layout((8,), (Split(0), Split(0)), (2, 2), (1, 0), (2,))) == [(4,), (5,)]


def test_decode_order():
    mesh = (4, 3, 2)
    assert decode_order((Split(0, 2), Split(0, 2), Split(0)), mesh) == ((0, (2, 0, 1)),)
    assert decode_order((Split(0), None, Split(1)), mesh) == ((0, (0,)), (1, (2,)))
    assert decode_order((Split(0, 5), Split(0), Split(0)), mesh) is None


def test_a_local_shape_that_contradicts_is_seen():
    assert layout((10, 4), (Split(0),), (4,), (0,), (4, 4)) is None
    assert layout((10, 4), (Split(0),), (4,), None, (0,)) == ()
    assert layout((3, 4), (Split(0),), (8,), (5,), (0, 4)) == ()
    assert layout((), (), (), (), ()) == (((), (), ()),)


# ---------------------------------------------------------------------------------------- slices


def contents(boxes, memory):
    """{offset: value} of boxes over a bytes-like memory of 4-byte elements at address 0."""
    out = {}
    for box in boxes:
        for at in itertools.product(*(range(n) for n in box.extent)):
            address = box.address + sum(i * s for i, s in zip(at, box.stride, strict=True))
            offset = tuple(o + i for o, i in zip(box.offset, at, strict=True))
            assert offset not in out
            out[offset] = memory[address // 4]
    return out


@pytest.mark.parametrize("seed", range(150))
def test_slices_of_sharded_tensors(seed):
    """A slice of a sharded tensor holds what indexing the whole tensor gives."""
    rng = random.Random(1000 + seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    values = {at: 10_000 + i for i, at in enumerate(itertools.product(*map(range, shape)))}
    index = []
    for size in shape[: rng.randint(0, len(shape))]:
        if rng.random() < 0.4:
            index.append(rng.randrange(-size, size))
        else:
            start = rng.randint(0, size)
            index.append(slice(start, rng.randint(start, size)))
    index = tuple(index)
    bounds = normal_index(index, shape)
    wanted = {
        tuple(x - b[0] for x, b in zip(at, bounds, strict=True) if not b[2]): value
        for at, value in values.items()
        if all(b[0] <= x < b[1] for x, b in zip(at, bounds, strict=True))
    }
    pieces, dim = rng.randint(1, 4), rng.randrange(len(shape))
    found = {}
    for rank in range(pieces):
        start, count = chunk(shape[dim], pieces, rank)
        local = list(shape)
        local[dim] = count
        # Rows are padded by one element: strides tell where elements are, sizes do not.
        steps, size = [0] * len(shape), 1
        for d in reversed(range(len(shape))):
            steps[d] = size
            size *= local[d] + 1
        memory = [None] * max(size, 1)
        for at, value in values.items():
            if start <= at[dim] < start + count:
                where = [x - (start if d == dim else 0) for d, x in enumerate(at)]
                memory[sum(x * s for x, s in zip(where, steps, strict=True))] = value
        blocks = layout(shape, (Split(dim),), (pieces,), (rank,), tuple(local))
        boxes = place(blocks, tuple(4 * s for s in steps), 0)
        part = contents(slice_boxes(boxes, shape, index), memory)
        assert not part.keys() & found.keys()
        found |= part
    assert found == wanted
    new_shape = sliced_shape(shape, index)
    assert all(x < n for at in found for x, n in zip(at, new_shape, strict=True))
    assert len(new_shape) == len(shape) - sum(1 for b in bounds if b[2])


def test_indices_that_cannot_be_published():
    with pytest.raises(ValueError, match="step 2"):
        normal_index((slice(0, 4, 2),), (8,))
    with pytest.raises(ValueError, match="out of range"):
        normal_index((8,), (8,))
    with pytest.raises(ValueError, match="2 indices"):
        normal_index((0, 0), (8,))


def test_a_scalar_slice():
    boxes = (Box((0,), (3,), (4,), 100),)
    assert slice_boxes(boxes, (3,), (-1,)) == (Box((), (), (), 108),)


# ----------------------------------------------------------------------------------------- names

PATHS = [
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.run1.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.run1.bias",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    "model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "module.base_model.model.x.lora_A.default.weight",
    "module.model.x.lora_A.default.weight",
    "module.m.embed.lora_embedding_A.a",
    "base_model.model.embed.lora_embedding_A.default",
    "base_model.model.embed.lora_embedding_B",
    "base_model.model.x.lora_magnitude_vector.default.weight",
    "base_model.model.x.lora_magnitude_vector.default",
    "base_model.model.lm_head.modules_to_save.default.weight",
    "base_model.model.score.modules_to_save.default.0.weight",
    "base_model.model.x.base_layer.bias",
    "_fsdp_wrapped_module.base_model.model.layers.0._checkpoint_wrapped_module.q.lora_A.d.weight",
    "_orig_mod.base_model.model.layers.0._orig_mod.q.lora_B.d.weight",
    "base_model.model.experts.base_layer.lora_A.default.weight",
    "base_model.model.embed.token_adapter.trainable_tokens_delta.default",
    "m.q.lora_B.weight.weight",
    "m.e.lora_embedding_A.run1",
    "m.s.modules_to_save.a.dense.bias",
    "m.lora_Ax.weight",
    "m.q.lora_A.a.b.weight",
    "lora_A.weight",
    "..",
]


@pytest.mark.parametrize("path", PATHS)
def test_names_are_those_that_a_worker_makes_of_the_path(path):
    out = ctypes.create_string_buffer(600)
    library().fanin_adapter_name.restype = ctypes.c_bool
    assert library().fanin_adapter_name(path.encode(), out, ctypes.c_size_t(600))
    assert on_disk(path) == out.value.decode()
    # And a worker leaves them as they are.
    assert library().fanin_adapter_name(on_disk(path).encode(), out, ctypes.c_size_t(600))
    assert on_disk(path) == out.value.decode()


@pytest.mark.parametrize(
    "path, name, adapter",
    [
        ("x.lora_A.default.weight", "base_model.model.x.lora_A.weight", "default"),
        ("x.lora_A.3", "base_model.model.x.lora_A.weight", "3"),
        ("x.lora_A", "base_model.model.x.lora_A.weight", None),
        ("m.experts.w1_lora_A.3", "base_model.model.m.experts.w1.lora_A.weight", "3"),
        ("m.experts.w1_lora_B", "base_model.model.m.experts.w1.lora_B.weight", None),
        ("e.lora_embedding_A.run1", "base_model.model.e.lora_embedding_A", "run1"),
        ("x.lora_diag.run1", "base_model.model.x.lora_diag", "run1"),
        ("h.modules_to_save.a.weight", "base_model.model.h.weight", "a"),
        ("_orig_mod.module.base_model.model.x.lora_A.d", "base_model.model.x.lora_A.weight", "d"),
        ("module._orig_mod.base_model.model.x.lora_A.d", "base_model.model.x.lora_A.weight", "d"),
        ("module.x.lora_A.d.weight", "base_model.model.module.x.lora_A.weight", "d"),
    ],
)
def test_parse(path, name, adapter):
    found = parse(path)
    assert (found.name, found.adapter) == (name, adapter)


@pytest.mark.parametrize(
    "path", ["model.embed_tokens.weight", "x.lora_dropout.p", "x.base_layer.weight", "x.bias"]
)
def test_what_is_no_part_of_an_adapter(path):
    assert parse(path) is None


def keys(function, name, shape):
    return [(part.key, part.index) for part in slices_of(function, name, shape)]


def test_per_expert():
    stacked = "base_model.model.l.0.mlp.experts.w1.lora_A.weight"
    assert keys(per_expert, stacked, (3, 8, 64)) == [
        (f"base_model.model.l.0.mlp.experts.{e}.gate_proj.lora_A.weight", (e,)) for e in range(3)
    ]
    one = "base_model.model.l.0.mlp.experts.2.w2.lora_B.weight"
    assert keys(per_expert, one, (64, 8)) == [
        ("base_model.model.l.0.mlp.experts.2.down_proj.lora_B.weight", ())
    ]
    other = "base_model.model.l.0.self_attn.w1.lora_A.weight"
    assert keys(per_expert, other, (8, 64)) == [(other, ())]


def test_renamed_and_slot():
    rename = renamed({"w3": "up_proj"})
    assert keys(rename, "a.w3.lora_A.weight", (2, 2)) == [("a.up_proj.lora_A.weight", ())]
    assert keys(slot(2), "k", (4, 8, 3)) == [("k", (2,))]
    assert keys(slot(1, dim=1, size=8), "k", (5, 16)) == [("k", (slice(None), slice(8, 16)))]
    assert keys(slot(2, pattern="lora"), "bias", (4,)) == [("bias", ())]
    for choose in (slot(2, size=8), slot(-1, size=8), slot(-1), slot(16), slot(0, dim=2)):
        with pytest.raises(ValueError, match="no slot"):
            choose("k", (16, 3))


def test_chain_slices_slices():
    function = chain(slot(2), per_expert)
    name = "m.experts.w3.lora_A.weight"
    assert keys(function, name, (4, 2, 8, 64)) == [
        (f"m.experts.{e}.up_proj.lora_A.weight", (2, e, slice(0, 8), slice(0, 64)))
        for e in range(2)
    ]
    first = chain(lambda n, s: Slice("a", (slice(2, 6),)), lambda n, s: Slice("b", (slice(1, 3),)))
    assert keys(first, "x", (8,)) == [("b", (slice(3, 5),))]
    assert keys(chain(lambda n, s: None, per_expert), "x", (8,)) == []


def test_answers_of_names_functions():
    assert slices_of(lambda n, s: None, "x", (1,)) == ()
    assert slices_of(lambda n, s: Slice("y"), "x", (1,)) == (Slice("y"),)
    with pytest.raises(RequestError, match="names\\(\\) returned"):
        slices_of(lambda n, s: ["y"], "x", (1,))
