# SPDX-License-Identifier: Apache-2.0
"""Models of the FSDP2 tests: a small transformer with PEFT's LoRA, sharded in several ways."""

from __future__ import annotations

from typing import Any

import torch
from models import ATTENTION, MLP, TINY
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

TOKENS = 32


def base_model(kind: str) -> Any:
    """The frozen model: random, the same in every process."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(TINY[kind], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    model.name_or_path = kind  # PEFT writes it into the adapter's configuration
    return model.eval()


def lora_config(options: dict[str, Any]) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options["r"],
        lora_alpha=2 * options["r"],
        target_modules=options.get("targets", ATTENTION + MLP),
    )


def adapted(options: dict[str, Any]) -> PeftModel:
    """The model with an adapter of which every element matters."""
    adapter = options.get("adapter", "default")
    config = lora_config(options)
    model = get_peft_model(
        base_model(options["kind"]), config, adapter_name=adapter, autocast_adapter_dtype=False
    )
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.normal_(0, 0.2)
    return model


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def decoder_layers(model: PeftModel) -> Any:
    return model.base_model.model.model.layers


def split_tensors(model: PeftModel, mesh: DeviceMesh) -> None:
    """Tensor parallelism: of a layer split by outputs lora_B is split, by inputs lora_A is."""
    by_outputs = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    by_outputs += ["mlp.gate_proj", "mlp.up_proj"]
    plan: dict[str, Any] = {}
    for name in by_outputs:
        plan[f"{name}.base_layer"] = ColwiseParallel()
        plan[f"{name}.lora_B.default"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"{name}.base_layer"] = RowwiseParallel()
        plan[f"{name}.lora_A.default"] = RowwiseParallel()
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh, plan)


def sharded(model: PeftModel, layout: str, world_size: int, **options: Any) -> PeftModel:
    """The model cut over the world: 'fsdp', 'hsdp' (2 x n) or 'fsdp+tp' (n x 2)."""
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replica", "shard"))
    else:
        whole = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
        split_tensors(model, whole["tensor"])
        mesh = whole["data"]
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(1, TOKENS + 1).reshape(1, TOKENS)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens).logits
    return found
