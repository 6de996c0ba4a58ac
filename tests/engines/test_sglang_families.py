# SPDX-License-Identifier: Apache-2.0
"""Eight model families in SGLang's real classes, of every rank, in one process."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from sglang_server import SGLANG, needs_sglang, sglang_environment
from worlds import HERE

pytestmark = needs_sglang


def lines_of(chosen: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(SGLANG), "-B", str(HERE / "sglang_families.py"), *chosen],
        env=sglang_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
    assert {line["family"] for line in found} == set(chosen)
    return found


@pytest.fixture(scope="module", params=["dense", "experts", "latent", "fp8"])
def lines(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    chosen = {
        "dense": ["qwen2", "qwen3", "glm4"],
        "experts": ["qwen3-moe", "glm4-moe"],
        "latent": ["glm4-moe-lite", "deepseek-v2", "deepseek-v3"],
        "fp8": ["qwen3-fp8", "qwen3-moe-fp8"],
    }
    return lines_of(chosen[request.param])


def test_what_their_own_loaders_put_in_place(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["failure"] == "" and line["different"] == [], line
        assert line["tensors"] > 10


def test_nothing_goes_through_the_loader(lines: list[dict[str, Any]]) -> None:
    """What these loaders join (the first projections of MLA) is said by boxes, too."""
    for line in lines:
        assert line["through_loader"] == [], line


def test_ranks_take_all_of_it_together(lines: list[dict[str, Any]]) -> None:
    """And the configuration is the trainer's, whatever SGLang has made of it meanwhile."""
    for line in lines:
        size = 1 if line["layout"] == "TP1" else 2
        assert (line["alone"] > 0) == (size > 1), line
        if line["rank"] == size - 1:
            assert line["together"] == [], line
        assert line["config"] == [], line


def test_another_quantization_is_refused() -> None:
    """By the names of what differs, also if the trainer does not tell how it quantizes."""
    leaves, quantizes = "the trainer leaves as it is", "this engine leaves as it is"
    names = {
        "plain engine": ('"fp8"', quantizes),
        "plain trainer": (leaves, leaves),
        "other blocks": ("[64, 64]", "no such scales"),
        "trainer skips": (f"{leaves}: model.layers.1.mlp.down_proj;",) * 2,
        "engine skips": (f"{quantizes}: model.layers.1.mlp.down_proj;",) * 2,
    }
    lines = lines_of(["pairs"])
    assert {line["case"] for line in lines} == set(names)
    for line in lines:
        assert names[line["case"]][not line["told"]] in line["failure"], line
        helps = "quantize=" if line["case"] == "plain trainer" else "--json-model-override-args"
        assert helps in line["failure"], line


def test_scales_of_rows_are_refused() -> None:
    """SGLang turns these weights once it has loaded them, and its own loader does not fit then."""
    (line,) = lines_of(["rows"])
    assert "the loader failed with" in line["failure"], line
    assert "into parameter (torch.Size([384, 256]))" in line["failure"], line
    assert line["written"] == [], line
