# SPDX-License-Identifier: Apache-2.0
"""Pulled adapters of mixtures of experts, both layouts, through vLLM's own loading code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_engine
import pytest
from moe_engine import Shape, Tensors, expert_module, load, worker

SHAPE = Shape()
Layout = Callable[[Shape], tuple[Tensors, dict[str, Any]]]


@pytest.mark.parametrize("is_3d_model", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("layout", [moe_engine.per_expert, moe_engine.fused])
def test_the_plugin_decides_as_vllm_would(
    tmp_path: Path, layout: Layout, mixed: bool, is_3d_model: bool
) -> None:
    """By the catalog alone: refused, or loaded by vLLM with the flag that the plugin sets."""
    import fanin
    from fanin.engine.checks import EngineFacts, check_adapter, read_facts

    engine = EngineFacts(max_lora_rank=8, mixed_moe=mixed, fused_model=is_3d_model)
    with moe_engine.ranks_of(*layout(SHAPE)) as addresses:
        with fanin.Client(addresses) as client:
            facts = read_facts(client.catalog("0"), client.metadata("0"))
            client.pull_adapter("0", tmp_path / "pulled", step=1)
    is_fused = layout is moe_engine.fused
    loader = worker(SHAPE, is_3d_model=is_3d_model, mixed=mixed)
    if is_fused == is_3d_model or mixed:
        is_3d = check_adapter(facts, engine, "0")
        assert is_3d == is_fused
        packed = load(loader, tmp_path / "pulled", is_3d=is_3d)
        experts = packed.get_lora(expert_module(0))
        assert isinstance(experts.lora_a, list), "vLLM has not seen the experts"
        return
    with pytest.raises(fanin.errors.RequestError, match="--enable-mixed-moe-lora-format"):
        check_adapter(facts, engine, "0")
    if is_fused:
        with pytest.raises(ValueError, match="enable_mixed_moe_lora_format|target modules"):
            load(loader, tmp_path / "pulled")
