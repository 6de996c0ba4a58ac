# SPDX-License-Identifier: Apache-2.0
"""fanin's plugin in SGLang's own classes: an engine whose pull failed says so in that very call,
and does nothing more before it has the whole of a step."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from families import served
from sglang_model import published
from sglang_server import SGLANG, needs_sglang, sglang_environment
from worlds import HERE

pytestmark = needs_sglang


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    import torch

    with served({name: torch.ones(shape) for name, shape in published()}) as addresses:
        done = subprocess.run(
            [str(SGLANG), "-B", str(HERE / "sglang_guard.py"), *addresses],
            env=sglang_environment(FANIN_REQUIRE_STEP="1"),
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    return {line["what"]: line for line in lines}


def test_the_answer_is_that_of_the_pull(said: dict[str, Any]) -> None:
    assert said["begin"]["success"]
    assert not said["passed"]["success"] and "has passed" in said["passed"]["message"]
    assert said["pull"]["success"]
    assert 'fanin has pulled: {"step": 1' in said["pull"]["message"]


def test_torn_weights_are_not_served(said: dict[str, Any]) -> None:
    assert not said["torn"]["success"] and "ZeroDivisionError" in said["torn"]["message"]
    assert not said["end of torn"]["success"]
    assert "the weights are not whole" in said["end of torn"]["message"]
    assert said["torn"]["paused"] and said["end of torn"]["paused"] and said["go on torn"]["paused"]


def test_a_whole_pull_heals(said: dict[str, Any]) -> None:
    assert said["again"]["success"] and said["end"]["success"]
    assert '"step": 1' in said["end"]["message"]
    assert not said["go on"]["paused"]


def test_requests_wait_for_a_first_step(said: dict[str, Any]) -> None:
    for what in ("asked first", "asked within"):
        assert not said[what]["success"] and "only its checkpoint" in said[what]["message"]
    assert said["health"]["success"] and said["asked at last"]["success"]


def test_adapters_without_a_place_are_not_loaded(said: dict[str, Any]) -> None:
    whys = {
        "layer": "there is no layers.98",
        "unwrapped": "o_proj is without LoRA",
        "narrower": "the module gives",
        "wider": "the module takes",
    }
    for what, why in whys.items():
        answer = said[f"adapter: {what}"]
        assert not answer["success"] and why in answer["message"]
        assert answer["message"].startswith("fanin: run ")
    for what in ("fits", "fits in a row"):  # the rest is SGLang's own
        assert "fanin" not in said[f"adapter: {what}"]["message"]
