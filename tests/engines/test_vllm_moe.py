# SPDX-License-Identifier: Apache-2.0
"""Pulled adapters of mixtures of experts, both layouts, through vLLM's own loading code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_engine
import pytest
import torch
from moe_engine import PROJECTIONS, Shape, Tensors, expert_module, load, worker

SHAPE = Shape()
Layout = Callable[[Shape], tuple[Tensors, dict[str, Any]]]
Pull = Callable[[Tensors, dict[str, Any]], Path]


@pytest.fixture
def pull(tmp_path: Path) -> Pull:
    """Lends an adapter to ranks and pulls it into a new directory."""
    import fanin

    def pulled(tensors: Tensors, config: dict[str, Any]) -> Path:
        directory = tmp_path / "pulled"
        with moe_engine.ranks_of(tensors, config) as addresses:
            with fanin.Client(addresses) as client:
                assert client.pull_adapter("0", directory, step=1).step == 1
        return directory

    return pulled


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_per_expert_adapter_is_packed_as_trained(pull: Pull) -> None:
    tensors, config = moe_engine.per_expert(SHAPE)
    lora = load(worker(SHAPE), pull(tensors, config))
    assert lora.rank == SHAPE.rank
    assert sorted(lora.loras) == [expert_module(layer) for layer in range(SHAPE.layers)]
    for layer in range(SHAPE.layers):
        packed = lora.get_lora(expert_module(layer))
        for place, projection in enumerate(PROJECTIONS):
            paths = [
                f"base_model.model.{expert_module(layer)}.{expert}.{projection}"
                for expert in range(SHAPE.experts)
            ]
            same(packed.lora_a[place], torch.stack([tensors[f"{p}.lora_A.weight"] for p in paths]))
            trained = torch.stack([tensors[f"{p}.lora_B.weight"] for p in paths])
            same(packed.lora_b[place], trained * SHAPE.scaling)


def fused_expected(tensors: Tensors, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One fused pair as (experts, rank, in) and (experts, out, rank), the latter scaled."""
    a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    whole_a = a.reshape(SHAPE.experts, SHAPE.rank, -1)
    whole_b = b.reshape(b.shape[0], SHAPE.rank, SHAPE.experts).permute(2, 0, 1)
    return whole_a, whole_b * SHAPE.scaling


def test_fused_adapter_on_a_model_of_fused_experts(pull: Pull) -> None:
    tensors, config = moe_engine.fused(SHAPE)
    lora = load(worker(SHAPE, is_3d_model=True), pull(tensors, config), is_3d=True)
    assert lora.is_3d_lora_weight
    for layer in range(SHAPE.layers):
        path = f"base_model.model.{expert_module(layer)}"
        packed = lora.get_lora(expert_module(layer))
        for place, name in enumerate((f"{path}.base_layer", path)):
            a, b = fused_expected(tensors, name)
            same(packed.lora_a[place], a)
            same(packed.lora_b[place], b)


def test_fused_adapter_on_a_two_dimensional_model_of_mixed_formats(pull: Pull) -> None:
    tensors, config = moe_engine.fused(SHAPE)
    lora = load(worker(SHAPE, mixed=True), pull(tensors, config), is_3d=True)
    for layer in range(SHAPE.layers):
        path = f"base_model.model.{expert_module(layer)}"
        packed = lora.get_lora(expert_module(layer))
        gate_up_a, gate_up_b = fused_expected(tensors, f"{path}.base_layer")
        down_a, down_b = fused_expected(tensors, path)
        gate_b, up_b = gate_up_b[:, : SHAPE.width], gate_up_b[:, SHAPE.width :]
        for place, (a, b) in enumerate([(gate_up_a, gate_b), (down_a, down_b), (gate_up_a, up_b)]):
            same(packed.lora_a[place], a)
            same(packed.lora_b[place], b)


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
