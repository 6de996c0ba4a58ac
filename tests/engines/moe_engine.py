# SPDX-License-Identifier: Apache-2.0
"""Adapters of mixtures of experts: trainer ranks that hold them, vLLM's code that loads them.

vLLM's CPU build cannot run a mixture of experts. Its loading of an adapter (names, configuration,
layout, packing per layer) is plain Python, which runs here as it stands, on an adapter manager that
has everything but the model.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BASE = "a-mixture-of-experts"
PROJECTIONS = ["gate_proj", "down_proj", "up_proj"]  # w1, w2, w3, as vLLM packs them


@dataclass(frozen=True)
class Shape:
    """How large a mixture of experts and its adapter are."""

    layers: int = 2
    experts: int = 4
    hidden: int = 64
    width: int = 48
    rank: int = 4
    alpha: int = 12

    def features(self, projection: str) -> tuple[int, int]:
        """(in, out) of one expert's projection."""
        if projection == "down_proj":
            return self.width, self.hidden
        return self.hidden, self.width

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


Tensors = dict[str, torch.Tensor]


def expert_module(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def per_expert(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensors, dict[str, Any]]:
    """An adapter with a pair of matrices for each expert's projection, and PEFT's configuration."""
    torch.manual_seed(3)
    tensors: Tensors = {}
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            for projection in PROJECTIONS:
                inputs, outputs = shape.features(projection)
                path = f"base_model.model.{expert_module(layer)}.{expert}.{projection}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(shape.rank, inputs, dtype=dtype)
                tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, shape.rank, dtype=dtype)
    return tensors, configuration(shape, {"target_modules": sorted(PROJECTIONS)})


def fused(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensors, dict[str, Any]]:
    """An adapter in PEFT's layout for experts that lie in one parameter, with its configuration."""
    torch.manual_seed(4)
    tensors: Tensors = {}
    rows = shape.rank * shape.experts
    for layer in range(shape.layers):
        path = f"base_model.model.{expert_module(layer)}"
        for name, inputs, outputs in (
            (f"{path}.base_layer", shape.hidden, 2 * shape.width),
            (path, shape.width, shape.hidden),
        ):
            tensors[f"{name}.lora_A.weight"] = torch.randn(rows, inputs, dtype=dtype)
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rows, dtype=dtype)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return tensors, configuration(shape, {"target_modules": [], "target_parameters": targets})


def configuration(shape: Shape, fields: dict[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig

    config = LoraConfig(r=shape.rank, lora_alpha=shape.alpha, task_type="CAUSAL_LM").to_dict()
    config |= {"base_model_name_or_path": BASE, **fields}
    return {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }


# ------------------------------------------------------------------------- the trainers' side


@contextlib.contextmanager
def ranks_of(
    tensors: Tensors,
    config: dict[str, Any],
    *,
    run: str = "0",
    step: int = 1,
    world_size: int = 2,
    base_port: int = 0,
) -> Iterator[list[str]]:
    """Servers in this process, each with its rows of every tensor; yields their addresses."""
    import fanin

    publication = fanin.publication_of(run)
    world_id = os.urandom(16)
    with contextlib.ExitStack() as stack:
        addresses = []
        for rank in range(world_size):
            server = stack.enter_context(
                fanin.Server(
                    world_id=world_id, rank=rank, world_size=world_size, base_port=base_port
                )
            )
            server.put(publication, [_rows(n, t, rank, world_size) for n, t in tensors.items()])
            server.set_metadata(publication, {"peft_config": json.dumps(config)})
            server.commit(publication, step)
            addresses.append(f"127.0.0.1:{server.port}")
        yield addresses


def _rows(name: str, value: torch.Tensor, rank: int, world_size: int) -> Any:
    from fanin import _tensors

    first = rank * value.shape[0] // world_size
    last = (rank + 1) * value.shape[0] // world_size
    offset = (first, *[0] * (value.dim() - 1))
    return _tensors.shard_of(name, value[first:last], shape=tuple(value.shape), offset=offset)


# ------------------------------------------------------------------------------ vLLM's side


def worker(shape: Shape, *, is_3d_model: bool = False, mixed: bool = False) -> Any:
    """vLLM's worker-side LoRA manager for a model of this shape, ready to load adapters."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import WorkerLoRAManager

    kind = FusedMoE3DWithLoRA if is_3d_model and not mixed else FusedMoEWithLoRA
    manager = LoRAModelManager.__new__(LoRAModelManager)
    manager.model = SimpleNamespace(
        config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
    )
    manager.modules = {
        expert_module(layer): _expert_layer(kind, shape) for layer in range(shape.layers)
    }
    manager.is_pooling_model = False
    manager._is_moe = True
    manager._is_3d_moe_model = is_3d_model and not mixed
    manager._is_non_gated_moe = False
    manager._enable_mixed_moe_lora_format = mixed
    manager._enable_moe_shared_loras = False
    manager._pooling_task = None
    manager._classification_head = None
    manager.moe_ep_load_spec = None
    manager.supported_lora_modules = ["experts"]
    manager.packed_modules_mapping = {}
    if kind is FusedMoEWithLoRA:
        manager.packed_modules_mapping["experts"] = expert_names(shape.experts)
    manager.lora_config = LoRAConfig(
        max_lora_rank=8, max_loras=1, lora_dtype=torch.float32, enable_mixed_moe_lora_format=mixed
    )
    return loader_of(WorkerLoRAManager, manager, 256)


def expert_names(experts: int) -> list[str]:
    """What vLLM packs into one layer of so many experts, in its order."""
    return [
        f"experts.{expert}.{projection}" for expert in range(experts) for projection in PROJECTIONS
    ]


def loader_of(kind: Any, manager: Any, vocabulary: int) -> Any:
    """vLLM's worker-side manager, of this class, above an adapter manager that knows its layers."""
    from vllm.lora.lora_model import LoRAModel

    manager.packed_modules = {}
    for name in manager.modules:
        manager._register_packed_modules(name)
    loader = kind.__new__(kind)
    loader._adapter_manager = manager
    loader._lora_model_cls = LoRAModel
    loader.lora_config = manager.lora_config
    loader.max_position_embeddings = 1024
    loader.vocab_size = vocabulary
    return loader


def _expert_layer(kind: Any, shape: Shape) -> Any:
    """A layer of this class without its weights: packing asks it only how many experts it has."""
    known = {
        "local_num_experts": shape.experts,
        "global_num_experts": shape.experts,
        "ep_rank": 0,
        "use_ep": False,
    }
    # The class' properties of these names look into the base layer, which is not there.
    subclass: Any = type(kind.__name__, (kind,), known)
    layer = subclass.__new__(subclass)
    torch.nn.Module.__init__(layer)
    layer.w13_lora_a_stacked = (torch.empty(1, shape.experts, 0),)
    return layer


def load(loader: Any, directory: Path, *, is_3d: bool = False) -> Any:
    """The adapter as vLLM has it after reading and packing, just before it goes onto a device."""
    lora = read(loader, directory, is_3d=is_3d)
    pack(loader, lora)
    return lora


def read(loader: Any, directory: Path, *, is_3d: bool = False) -> Any:
    """vLLM's reading and checking of an adapter directory; `is_3d` is the request's flag."""
    from vllm.lora.request import LoRARequest

    request = LoRARequest("pulled", 1, str(directory), is_3d_lora_weight=is_3d)
    return loader._load_adapter(request)


def pack(loader: Any, lora: Any) -> None:
    """vLLM's packing of what was read, layer by layer, in place."""
    loader._adapter_manager._create_merged_loras_inplace(lora)
