# SPDX-License-Identifier: Apache-2.0
"""Formats of fp8 weights, lists of modules and shared blocks: pure Python, no PyTorch."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from fanin._quantization import is_fit
from fanin._tensors import Box, Shard
from fanin.errors import RequestError
from fanin.torch._blocks8 import begun, partial, shared_blocks, touched
from fanin.torch._formats import format_of, scales_among
from fanin.torch._union import Whole, compress, table_of


def whole(name, dtype="F8_E4M3", shape=(256, 256)):
    return Whole(name, dtype, shape)


def rounded(*names):
    return [one for name in names for one in (whole(name), whole(name + "_scale_inv", "F32"))]


# ------------------------------------------------------------------------------------------ lists


@pytest.mark.parametrize(
    ("entry", "name", "fits"),
    [
        ("lm_head", "lm_head.weight", True),
        ("mlp.gate", "model.layers.3.mlp.gate.weight", True),
        ("gate", "model.layers.3.mlp.gate_proj.weight", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj.weight", False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj.weight", False),
        ("*.mlp.gate.weight", "model.layers.3.mlp.gate.weight", True),
        ("*.mlp.gate", "model.layers.3.mlp.gate.weight", True),
        ("model.layers.[12].*", "model.layers.2.mlp.up_proj.weight", True),
    ],
)
def test_what_an_entry_fits(entry, name, fits):
    assert is_fit(entry, name) is fits


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "taken"),
    [
        ("model.layers.0.mlp.up_proj.weight", "BF16", (8, 8), True),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "F16", (8, 8), True),
        ("model.layers.0.mlp.gate.weight", "BF16", (8, 8), False),
        ("model.layers.0.mlp.gate.wg.weight", "F32", (8, 8), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", "BF16", (1, 8), False),
        ("model.embed_tokens.weight", "BF16", (8, 8), False),
        ("lm_head.weight", "BF16", (8, 8), False),
        ("model.norm.weight", "BF16", (8,), False),
        ("model.layers.0.mlp.up_proj.bias", "BF16", (8, 8), False),
        ("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (8, 8), False),
        ("model.layers.0.mlp.up_proj.weight", "BF16", (0, 8), False),
        ("visual.proj.weight", "BF16", (8, 8), False),
    ],
)
def test_which_tensors_are_taken(name, dtype, shape, taken):
    form = format_of("fp8", ["visual"])
    assert bool(form.takes(name, dtype, shape)) is taken


def test_the_list_that_is_published():
    wholes = [
        *rounded("layers.0.mlp.down_proj.weight"),
        whole("layers.0.mlp.gate.weight", "BF16"),
        whole("layers.0.mlp.experts.gate_up_proj", "BF16", (4, 8, 8)),
        whole("layers.0.norm.weight", "BF16", (8,)),
        whole("layers.0.table", "BF16", (8, 8)),
        whole("lm_head.weight", "BF16"),
    ]
    metadata = format_of("fp8").described({"config": '{"a": 1}', "format": "pt"}, wholes)
    told = json.loads(metadata["quantization"])
    assert told["modules_to_not_convert"] == [
        "layers.0.mlp.experts",
        "layers.0.mlp.gate",
        "lm_head",
    ]
    assert json.loads(metadata["config"]) == {"a": 1, "quantization_config": told}
    assert format_of(told) == format_of("fp8", told["modules_to_not_convert"])


@pytest.mark.parametrize(
    "together",
    [
        ("a.q_proj", "a.k_proj"),
        ("a.q_proj", "a.v_proj"),
        ("a.gate_proj", "a.up_proj"),
        ("a.q_a_proj", "a.kv_a_proj_with_mqa"),
        ("a.experts.0.down_proj", "a.experts.5.up_proj"),
    ],
)
def test_engines_hold_them_as_one(together):
    form = format_of("fp8")
    names = [f"{one}.weight" for one in together]
    form.refuse(rounded(*names), [])
    for left, kept in (names, names[::-1]):
        with pytest.raises(RequestError, match="hold the two in one tensor") as caught:
            form.refuse([*rounded(kept), whole(left, "BF16")], [])
        assert (caught.value.key, f"'{kept}' would" in str(caught.value)) == (left, True)
    apart = [*rounded("a.q_proj.weight"), whole("b.k_proj.weight", "BF16")]
    form.refuse(apart, [])


def test_an_entry_that_fits_nothing():
    form = format_of("fp8", ["a", "b"])
    form.refuse(rounded("x.a.weight", "b.weight"), ["a", "b"])
    with pytest.raises(RequestError, match="'b', which fits no module"):
        form.refuse(rounded("x.a.weight"), ["a", "b"])
    with pytest.raises(RequestError, match="no weight to publish as fp8"):
        form.refuse([whole("a.weight", "BF16"), whole("b.weight", "BF16")], [])


def test_scales_by_name():
    names = ["a.weight", "a.weight_scale_inv", "b.weight_scale", "c.weight", "c.weight_scale"]
    assert scales_among(names) == {"a.weight_scale_inv", "c.weight_scale"}


# ---------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("told", "names"),
    [
        ("FP8", "quantize is 'FP8'"),
        (8, "quantize is 8"),
        ({"quant_method": "gptq"}, 'quant_method "gptq"'),
        ({"activation_scheme": "static"}, 'activation_scheme "static"'),
        ({"weight_block_size": None}, "weight_block_size null"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128.0, 128]}, "weight_block_size"),
        ({"scale_fmt": "mx"}, 'scale_fmt "mx"'),
        ({"no_such_key": 1}, "no_such_key 1"),
        ({"modules_to_not_convert": "lm_head"}, "give a list of names"),
        ({"modules_to_not_convert": ["re:.*"]}, "regular expressions"),
        ({"ignored_layers": 5}, "ignored_layers is 5"),
        ({"ignored_layers": {"lm_head": True}}, "give a list of names"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "int-quantized"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
            },
            "config_groups weights",
        ),
    ],
)
def test_formats_that_are_refused(told, names):
    with pytest.raises(RequestError) as caught:
        format_of(told)
    assert names in str(caught.value)
    assert caught.value.remedy and caught.value.key


def test_a_list_that_is_given_once():
    assert format_of("fp8", (name for name in ("b", "a"))).skip == ("a", "b")
    assert format_of({"ignored_layers": iter(["a"])}, iter(["a"])).skip == ("a",)


def test_two_lists():
    told = {"quant_method": "fp8", "modules_to_not_convert": ["a", "b"]}
    assert format_of(told, ["b", "a"]).skip == ("a", "b")
    with pytest.raises(RequestError, match="contradict"):
        format_of(told, ["a"])
    with pytest.raises(RequestError, match="without quantize"):
        format_of(None, ["a"])
    assert format_of(None) is None and format_of(None, []) is None


def test_blocks_and_names():
    form = format_of({"weight_block_size": [64, 32], "scale_fmt": "ue8m0"})
    assert (form.powers, form.scale_shape((65, 64))) == (True, (2, 2))
    assert form.scale_name("a.weight") == "a.weight_scale_inv"
    rows = format_of({"quant_method": "compressed-tensors", "version": "0.9"})
    assert rows.scale_shape((65, 64)) == (65, 1)
    assert rows.scale_name("a.weight") == "a.weight_scale"


# ----------------------------------------------------------------------------------------- blocks


def test_shared_blocks_by_counting():
    """As elements tell: a block of which a part of some box's, and not the whole, is there."""
    draw = random.Random(3)
    for _ in range(200):
        shape = (draw.randint(1, 9), draw.randint(1, 9))
        block = (draw.randint(1, 4), draw.randint(1, 4))
        first = [draw.randrange(size) for size in shape]
        part = (
            tuple(first),
            tuple(draw.randint(0, size - at) for size, at in zip(shape, first, strict=True)),
        )
        across = -(-shape[1] // block[1])
        inside, every = {}, {}
        for row, column in itertools.product(*map(range, shape)):
            number = row // block[0] * across + column // block[1]
            every[number] = every.get(number, 0) + 1
            if all(at <= here < at + n for here, at, n in zip((row, column), *part, strict=True)):
                inside[number] = inside.get(number, 0) + 1
        wanted = {number for number, count in inside.items() if count < every[number]}
        assert partial(part, shape, block) == wanted
        rows = touched(part[0][0], part[1][0], block[0])
        if 0 not in part[1]:
            assert {number // across for number in inside} == set(rows)
        owned = [
            n for n in range(-(-shape[0] // block[0])) if 0 <= n * block[0] - first[0] < part[1][0]
        ]
        assert list(begun(first[0], part[1][0], block[0])) == owned


def test_all_ranks_find_the_same_places():
    form = format_of({"weight_block_size": [4, 4]})

    def shard(name, shape, dtype, *parts):
        return Shard(name, dtype, shape, tuple(Box(at, size, (0, 0), 1) for at, size in parts))

    def rank(first, rows):
        return [
            shard("a.weight", (8, 8), "F8_E4M3", ((first, 0), (rows, 8))),
            shard("a.weight_scale_inv", (2, 2), "F32"),
            shard("b.weight", (8, 8), "F8_E4M3", ((0, 0), (8, 8))),
            shard("b.weight_scale_inv", (2, 2), "F32"),
            shard("c.weight", (8, 8), "F8_E4M3", ((first, 0), (rows, 8))),  # another's
            shard("d.weight", (8, 8), "BF16", ((first, 0), (rows, 8))),
        ]

    told, texts = [], {}
    for shards in (rank(0, 6), rank(6, 2)):
        one, text = compress(table_of(shards))
        told.append(one)
        texts[one.digest] = text
    assert shared_blocks(told, texts, form) == (2, {"a.weight": (0, (2, 3))})
