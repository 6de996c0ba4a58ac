# SPDX-License-Identifier: Apache-2.0
"""Eight model families in SGLang's real classes, where SGLang is installed: its loaders run without
a GPU, its server does not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import HERE, PYTHON

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
)

# Where the loader computes: the joined projections of MLA.
COMPUTED = ("q_a_proj", "kv_a_proj_with_mqa")


@pytest.fixture(scope="module", params=["dense", "experts", "latent"])
def lines(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    chosen = {
        "dense": ["qwen2", "qwen3", "glm4"],
        "experts": ["qwen3-moe", "glm4-moe"],
        "latent": ["glm4-moe-lite", "deepseek-v2", "deepseek-v3"],
    }[request.param]
    before = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-B", str(Path(HERE) / "sglang_families.py"), *chosen],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PYTHON), str(HERE), before])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
    assert {line["family"] for line in found} == set(chosen)
    return found


def test_what_their_own_loaders_put_in_place(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["failure"] == "" and line["different"] == [], line
        assert line["tensors"] > 10


def test_only_joined_projections_go_through_the_loader(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        joined = line["family"] in ("glm4-moe-lite", "deepseek-v3")
        assert bool(line["through_loader"]) == joined, line
        for name in line["through_loader"]:
            assert name.split(".")[-2] in COMPUTED, line
