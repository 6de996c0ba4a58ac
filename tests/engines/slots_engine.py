# SPDX-License-Identifier: Apache-2.0
"""vLLM's own LoRA managers and layers, small and without a model, of any rank of a parallel engine.

The layers are vLLM's classes with the attributes that their constructors would take from a model's
layers; slicing, packing, caches and copies into slots are vLLM's code as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from fanin.vllm import patches
from moe_engine import Shape, configuration, expert_names, loader_of

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


@dataclass(frozen=True)
class Engine:
    """Which worker of which engine.

    kind: "dense"; "experts", "fused" or "mixed", nothing but experts; "model": experts, each with
    tensors of its own, and attention. device: of the slots; "meta": they take no memory.
    """

    kind: str = "dense"
    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    max_rank: int = 8
    slots: int = 2
    cached: int = 2
    dtype: torch.dtype = torch.float32
    hidden: int = 16
    width: int = 12
    heads: int = 4
    kv_heads: int = 2
    head: int = 4
    vocabulary: int = 24
    experts: int = 4
    depth: int = 2
    device: str = "cpu"

    @property
    def layers(self) -> list[str]:
        return [f"model.layers.{number}" for number in range(self.depth)]


def _layer(kind: Any, **attributes: Any) -> Any:
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def _dirty(e: Engine, *shape: int) -> torch.Tensor:
    """A tensor of all slots, in which some other adapter has been."""
    return torch.full((e.slots, *shape), 7.0, dtype=e.dtype, device=e.device)


def _linear(e: Engine, kind: Any, inputs: int, outputs: list[int], **more: Any) -> Any:
    rank, size = e.tp
    rows = e.max_rank
    return _layer(
        kind,
        tp_size=size,
        tp_rank=rank,
        n_slices=len(outputs),
        input_size=inputs,
        lora_a_stacked=tuple(_dirty(e, 1, rows, inputs) for _ in outputs),
        lora_b_stacked=tuple(_dirty(e, 1, n, e.max_rank) for n in outputs),
        **more,
    )


def _attention(e: Engine, layer: str) -> dict[str, Any]:
    from vllm.lora.layers.column_parallel_linear import MergedQKVParallelLinearWithLoRA
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

    rank, size = e.tp
    q, kv = e.heads * e.head // size, e.kv_heads * e.head // size
    qkv = _linear(
        e,
        MergedQKVParallelLinearWithLoRA,
        e.hidden,
        [q, kv, kv],
        output_slices=(q, kv, kv),
        output_sizes=[n * size for n in (q, kv, kv)],
        output_ids=(rank,) * 3,
    )
    out = _linear(e, RowParallelLinearWithLoRA, q, [e.hidden])
    return {f"{layer}.self_attn.qkv_proj": qkv, f"{layer}.self_attn.o_proj": out}


def _dense(e: Engine) -> dict[str, Any]:
    from vllm.lora.layers.column_parallel_linear import (
        MergedColumnParallelLinearWithLoRA,
    )
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA
    from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA

    rank, size = e.tp
    width = e.width // size
    found: dict[str, Any] = {}
    for layer in e.layers:
        gates = (width, width)
        found |= _attention(e, layer)
        found[f"{layer}.mlp.gate_up_proj"] = _linear(
            e,
            MergedColumnParallelLinearWithLoRA,
            e.hidden,
            list(gates),
            output_slices=gates,
            output_sizes=[e.width, e.width],
            output_ids=(rank,) * 2,
        )
        found[f"{layer}.mlp.down_proj"] = _linear(e, RowParallelLinearWithLoRA, width, [e.hidden])
    found["model.embed_tokens"] = _layer(
        VocabParallelEmbeddingWithLoRA,
        lora_a_stacked=_dirty(e, e.vocabulary, e.max_rank),
        lora_b_stacked=_dirty(e, 1, e.hidden, e.max_rank),
    )
    found["lm_head"] = _layer(
        LogitsProcessorWithLoRA,
        lora_a_stacked=_dirty(e, 1, e.max_rank, e.hidden),
        lora_b_stacked=_dirty(e, 1, e.vocabulary, e.max_rank),
    )
    return found


def _experts(e: Engine) -> dict[str, Any]:
    from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA

    kind: Any = FusedMoE3DWithLoRA if e.kind == "fused" else FusedMoEWithLoRA
    rank, size = e.tp if e.ep[1] == 1 else (0, 1)  # experts of one's own are whole
    local, width = e.experts // e.ep[1], e.width // size
    known = {
        "local_num_experts": local,
        "global_num_experts": e.experts,
        "ep_rank": e.ep[0],
        "use_ep": e.ep[1] > 1,
        "intermediate_size_per_partition": width,
    }
    # The class' properties of these names look into the base layer, which is not there.
    subclass: Any = type(kind.__name__, (kind,), known)
    slices, rows = (1, 2 * width) if e.kind == "fused" else (2, width)
    return {
        f"{layer}.mlp.experts": _layer(
            subclass,
            tp_size=size,
            tp_rank=rank,
            fully_sharded=False,
            _w13_slices=slices,
            _base_model="Qwen3MoeForCausalLM",
            adapter_enabled=torch.zeros(e.slots + 1, dtype=torch.int, device=e.device),
            w13_lora_a_stacked=tuple(_dirty(e, local, e.max_rank, e.hidden) for _ in range(slices)),
            w13_lora_b_stacked=tuple(_dirty(e, local, rows, e.max_rank) for _ in range(slices)),
            w2_lora_a_stacked=(_dirty(e, local, e.max_rank, width),),
            w2_lora_b_stacked=(_dirty(e, local, e.hidden, e.max_rank),),
        )
        for layer in e.layers
    }


def _modules(e: Engine) -> dict[str, Any]:
    """In the model's order."""
    if e.kind == "dense":
        return _dense(e)
    experts = _experts(e)
    if e.kind != "model":
        return experts
    found: dict[str, Any] = {}
    for layer in e.layers:
        found |= _attention(e, layer)
        found[f"{layer}.mlp.experts"] = experts[f"{layer}.mlp.experts"]
    return found


def loader(e: Engine) -> Any:
    """vLLM's worker-side manager of adapters, with its caches, ready to be given requests."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    manager = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
    manager.model = SimpleNamespace(config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]))
    manager.device = torch.device("cpu" if e.device == "meta" else e.device)
    manager.lora_config = LoRAConfig(
        max_lora_rank=e.max_rank,
        max_loras=e.slots,
        max_cpu_loras=e.cached,
        lora_dtype=e.dtype,
        enable_mixed_moe_lora_format=e.kind == "mixed",
    )
    manager._registered_adapters = AdapterLRUCache(e.cached, manager.deactivate_adapter)
    manager._active_adapters = AdapterLRUCache(e.slots, manager._deactivate_adapter)
    manager.lora_index_to_id = [None] * e.slots
    manager.modules = _modules(e)
    manager.is_pooling_model = False
    manager._is_moe = e.kind != "dense"
    manager._is_3d_moe_model = e.kind == "fused"
    manager._is_non_gated_moe = False
    manager._use_ep = e.ep[1] > 1
    manager._enable_mixed_moe_lora_format = e.kind == "mixed"
    manager._enable_moe_shared_loras = False
    manager._pooling_task = None
    manager._classification_head = None
    manager.moe_ep_load_spec = manager._build_moe_ep_load_spec()
    manager.supported_lora_modules = [
        *PACKED,
        "o_proj",
        "down_proj",
        "embed_tokens",
        "lm_head",
    ]
    manager.packed_modules_mapping = dict(PACKED)
    if manager._is_moe:
        names = {"experts": expert_names(e.experts)}
        manager.packed_modules_mapping = {} if e.kind == "fused" else names
        manager.supported_lora_modules = ["experts"]
        if e.kind == "model":
            manager.packed_modules_mapping |= {"qkv_proj": PACKED["qkv_proj"]}
            manager.supported_lora_modules += ["qkv_proj", "o_proj"]
    return loader_of(LRUCacheWorkerLoRAManager, manager, e.vocabulary)


def worker(e: Engine) -> Any:
    """What fanin's methods are given: a worker with that manager, and no request."""
    manager = loader(e)
    runner = SimpleNamespace(lora_manager=manager)
    kind = type("Worker", (SimpleNamespace,), {})
    patches.put(kind, "WorkerBase")
    return kind(model_runner=runner, remove_lora=manager.remove_adapter)


def shapes(e: Engine, rank: int) -> dict[str, tuple[int, ...]]:
    """Of an adapter of all modules of such an engine, by the names in PEFT's file."""
    made: dict[str, tuple[int, ...]] = {}

    def pair(path: str, inputs: int, outputs: int, rows: int = rank) -> None:
        made[f"base_model.model.{path}.lora_A.weight"] = rows, inputs
        made[f"base_model.model.{path}.lora_B.weight"] = outputs, rows

    def gated(path: str) -> None:
        pair(f"{path}.gate_proj", e.hidden, e.width)
        pair(f"{path}.up_proj", e.hidden, e.width)
        pair(f"{path}.down_proj", e.width, e.hidden)

    for layer in e.layers:
        experts = f"{layer}.mlp.experts"
        if e.kind in ("dense", "model"):
            pair(f"{layer}.self_attn.q_proj", e.hidden, e.heads * e.head)
            pair(f"{layer}.self_attn.k_proj", e.hidden, e.kv_heads * e.head)
            pair(f"{layer}.self_attn.v_proj", e.hidden, e.kv_heads * e.head)
            pair(f"{layer}.self_attn.o_proj", e.heads * e.head, e.hidden)
        if e.kind in ("fused", "mixed"):
            pair(f"{experts}.base_layer", e.hidden, 2 * e.width, rank * e.experts)
            pair(experts, e.width, e.hidden, rank * e.experts)
        elif e.kind == "dense":
            gated(f"{layer}.mlp")
        else:
            for expert in range(e.experts):
                gated(f"{experts}.{expert}")
    if e.kind == "dense":
        embedding = "base_model.model.model.embed_tokens.lora_embedding_"
        made[f"{embedding}A"] = rank, e.vocabulary
        made[f"{embedding}B"] = e.hidden, rank
        pair("lm_head", e.hidden, e.vocabulary)
    return made


def peft_config(e: Engine, rank: int) -> dict[str, Any]:
    """PEFT's configuration of that adapter."""
    weights = [name for name in shapes(e, rank) if name.endswith(".weight")]
    targets: dict[str, Any] = {"target_modules": sorted({n.split(".")[-3] for n in weights})}
    if e.kind == "dense":
        targets["target_modules"] += ["embed_tokens", "lm_head"]
    if e.kind in ("fused", "mixed"):
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        targets = {"target_modules": [], "target_parameters": parameters}
    return configuration(Shape(rank=rank, alpha=3 * rank + 1), targets)


def adapter(
    e: Engine, rank: int, seed: int, *, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter of all modules of such an engine, and PEFT's configuration."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randn(*shape, generator=generator).to(dtype)
        for name, shape in shapes(e, rank).items()
    }
    return made, peft_config(e, rank)


def slot_bytes(made: Any, slot: int) -> dict[str, torch.Tensor]:
    """All that vLLM's layers hold of one slot, by name."""
    found: dict[str, torch.Tensor] = {}
    for path, module in made._adapter_manager.modules.items():
        for attribute, value in vars(module).items():
            tensors = [value] if isinstance(value, torch.Tensor) else value
            if attribute.endswith("_stacked") or attribute == "adapter_enabled":
                for index, tensor in enumerate(tensors if tensors is not None else ()):
                    found[f"{path}.{attribute}.{index}"] = tensor[slot].clone()
    return found
