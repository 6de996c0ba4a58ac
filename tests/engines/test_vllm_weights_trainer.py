# SPDX-License-Identifier: Apache-2.0
"""Sharded trainers of several ranks that are written to vLLM's interface for trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import World


@pytest.fixture(params=["fsdp", "plain"])
def world(request: Any, tmp_path: Path) -> Any:
    with World(2, {"layout": request.param}, tmp_path, "theirs_trainer.py") as one:
        one.expect("ready", 240)
        yield one


def sent(world: World) -> list[dict[str, Any]]:
    return world.do("send", 120)


def test_every_rank_sends(world: World) -> None:
    """Each part comes from the rank that has it, and a rank that fails holds up no other one."""
    for step in (11, 12):
        told = sent(world)
        assert [(one["error"], one["step"]) for one in told] == [("", step)] * 2
        assert told[0]["calls"][-3:] == ["start", f"update {step}", f"finish step-{step}"]
    # The engine fails rank 0, which tells the others.
    world.do("lose_engine", lost=True)
    first, second = sent(world)
    assert "the engine is gone" in first["error"]
    assert "PeerError: rank 0 failed" in second["error"]
    assert "the engine is gone" in second["error"]
    world.do("lose_engine", lost=False)
    assert not any(one["error"] for one in sent(world))
    # A rank that cannot publish tells the others, and no engine is asked.
    calls = sent(world)[0]["calls"]
    world.do("exchange", rank=1)
    first, second = world.do("send", write=False)
    assert "rank 1 " in first["error"] and "input_layernorm" in first["error"]
    assert "input_layernorm" in second["error"] and first["calls"] == calls
    world.do("exchange", rank=1)
    told = sent(world)
    assert [one["error"] for one in told] == ["", ""] and told[0]["step"] == told[1]["step"]
    # A rank that is gone: the other one's call ends.
    world.ranks[1].kill()
    world.ranks[0].tell("send", write=False)
    assert world.ranks[0].expect("done", 120)["error"]
