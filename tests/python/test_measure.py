# SPDX-License-Identifier: Apache-2.0
"""Mappings that tools/measure/layout.py makes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MAPPINGS = Path(__file__).parents[1] / "support" / "mappings"
LAYOUT = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "tools" / "measure" / "layout.py"))
)


def boxes(mapping: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Where each box of a tensor goes."""
    return {
        (source["name"], *box["offset"], *box["extent"], box["at"])
        for module in mapping["modules"]
        for tensor in module["tensors"]
        for source in tensor.get("sources", ())
        for box in source["boxes"]
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layout_is_what_an_engines_loader_recorded(rank: int) -> None:
    tensors = LAYOUT.tensors_of(json.loads((MAPPINGS / "qwen3-small.json").read_text()))
    recorded = json.loads((MAPPINGS / f"qwen3-small-pp2-{rank}.json").read_text())
    ours = LAYOUT.mapping(tensors, LAYOUT.Shape(pp=2), rank)
    assert boxes(ours) == boxes(recorded)
    assert set(ours["published"]["unwanted"]) == set(recorded["published"]["unwanted"])


def published(**shapes: list[int]) -> Any:
    named = [(name.replace("__", "."), shape) for name, shape in shapes.items()]
    return LAYOUT.tensors_of(
        [{"name": name, "dtype": "BF16", "shape": shape} for name, shape in named]
    )


EXPERTS = published(
    **{f"model__layers__0__mlp__experts__{i}__gate_proj__weight": [6, 8] for i in range(4)},
    **{f"model__layers__0__mlp__experts__{i}__up_proj__weight": [6, 8] for i in range(4)},
    **{f"model__layers__0__mlp__experts__{i}__down_proj__weight": [8, 6] for i in range(4)},
)


def test_experts_are_shared_out_or_cut() -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    shared = boxes(LAYOUT.mapping(EXPERTS, LAYOUT.Shape(ep=2), 1))
    assert len(shared) == 6 and (name, 0, 0, 6, 8, 3 * 96) in shared
    cut = boxes(LAYOUT.mapping(EXPERTS, LAYOUT.Shape(tp=2), 1))
    assert len(cut) == 12 and (name, 3, 0, 3, 8, 7 * 48) in cut
    assert (name.replace("up", "down"), 0, 3, 8, 3, 3 * 48) in cut


def test_words_are_padded_and_heads_are_shared() -> None:
    tensors = published(lm_head__weight=[500, 8], a__k_proj__weight=[16, 8])
    ranks = [LAYOUT.mapping(tensors, LAYOUT.Shape(tp=4, heads=2), rank) for rank in range(4)]
    of = {"lm_head.weight": [], "a.k_proj.weight": []}
    for name, *place in sorted(box for rank in ranks for box in boxes(rank)):
        of[name].append(place)
    assert of["lm_head.weight"] == [[128 * i, 0, 128 if i < 3 else 116, 8, 0] for i in range(4)]
    assert of["a.k_proj.weight"] == [[0, 0, 8, 8, 0]] * 2 + [[8, 0, 8, 8, 0]] * 2
    (lm_head,) = (one for one in ranks[3]["modules"][0]["tensors"] if one["name"][:2] == "lm")
    assert lm_head["shape"] == [128 * 8]
