# SPDX-License-Identifier: Apache-2.0
"""Small whole models of the tests, and the ways in which trainers shard them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from vllm_server import LONGEST, MODULES, VOCABULARY, save_tokenizer

CONFIGS = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3-moe": Qwen3MoeConfig,
    "glm4-moe": Glm4MoeConfig,
}
LAYOUTS = ("plain", "fsdp", "hsdp", "fsdp+tp")


def config_of(kind: str, tied: bool, **more: Any) -> Any:
    """Two layers that vLLM can run on a CPU (its attention wants heads of 32 or more)."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind != "qwen2":
        fields["head_dim"] = 32
    if kind == "qwen3-moe":
        fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    if kind == "glm4-moe":
        fields |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        fields |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    return CONFIGS[kind](**(fields | more))


def random_model(
    kind: str, tied: bool = False, *, seed: int = 1, dtype: str = "bfloat16", **more: Any
) -> Any:
    """A model of which every element matters; the same wherever it is made."""
    torch.manual_seed(seed)
    config = config_of(kind, tied, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1) if parameter.dim() > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.1
            )
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model


def save_full_model(
    directory: Path, kind: str = "qwen2", tied: bool = False, **options: Any
) -> Path:
    """The model of :func:`random_model` and a tokenizer, as vLLM reads them."""
    random_model(kind, tied, **options).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_adapter(model: Path, directory: Path) -> Path:
    """An adapter of rank 8 for the model of this directory, of which every element matters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=MODULES))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(directory)
    return directory


def split_tensors(layers: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism, as vLLM splits layers as well."""
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in layers:
        parallelize_module(layer, mesh, plan)


def shard(model: Any, layout: str, world_size: int, device: str = "cpu", **options: Any) -> Any:
    """The model cut over the world: "plain" (not at all), "fsdp", "hsdp" (2 x n) or "fsdp+tp"
    (n x 2). Worlds of odd sizes make uneven shards. device: the kind, "cpu" or "cuda"."""
    if layout == "plain":
        return model
    if layout == "fsdp":
        mesh = init_device_mesh(device, (world_size,))
    elif layout == "hsdp":
        mesh = init_device_mesh(device, (2, world_size // 2), mesh_dim_names=("replica", "shard"))
    elif layout == "fsdp+tp":
        whole = init_device_mesh(device, (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
        split_tensors(model.model.layers, whole["tensor"])
        mesh = whole["data"]
    else:
        raise ValueError(f"layout {layout!r}; there are {LAYOUTS}")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model
