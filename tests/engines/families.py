# SPDX-License-Identifier: Apache-2.0
"""Model families in small: their checkpoints, and vLLM's real classes of them for any rank.

One process plays every rank in turn: vLLM's groups say that they are larger than they are, which
is enough to make a rank's modules and to run its loaders. Nothing can run such a model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers

SMALL = {
    "vocab_size": 500,  # no multiple of what vLLM pads to
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 4, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SHARED = {
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# fp8 with a scale for each block of 128 x 128: of parts of two ranks, too.
BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "head_dim": 128}
SIGMOID = {
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


@dataclass(frozen=True)
class Family:
    """A model class of vLLM and a configuration of transformers."""

    architecture: str
    config: str
    options: dict[str, Any]
    quantized: bool = False

    @property
    def experts(self) -> bool:
        return "num_experts_per_tok" in self.options

    def configuration(self) -> Any:
        made = getattr(transformers, self.config)(**{**SMALL, **self.options})
        made.architectures = [self.architecture]
        made.dtype = torch.bfloat16
        if self.quantized:
            gates = [f"model.layers.{n}.mlp.gate" for n in range(made.num_hidden_layers)]
            made.quantization_config = BLOCK | {"modules_to_not_convert": ["lm_head", *gates]}
        return made


FAMILIES = {
    "qwen2": Family(
        "Qwen2ForCausalLM", "Qwen2Config", {"num_hidden_layers": 2, "num_key_value_heads": 4}
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {"num_hidden_layers": 2, **GROUPED}),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_hidden_layers": 2, "num_experts": 4, **GROUPED, **EXPERTS},
    ),
    "glm4": Family("Glm4ForCausalLM", "Glm4Config", {"num_hidden_layers": 2, **GROUPED}),
    "glm4-moe": Family("Glm4MoeForCausalLM", "Glm4MoeConfig", {**GROUPED, **EXPERTS, **SHARED}),
    "glm4-moe-lite": Family(
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {**EXPERTS, **SHARED, **LATENT, "q_lora_rank": 32},
    ),
    "deepseek-v2": Family(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**EXPERTS, **SHARED, **LATENT, "q_lora_rank": None},
    ),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**EXPERTS, **SHARED, **LATENT, **SIGMOID, "q_lora_rank": 32},
    ),
    "qwen3-fp8": Family(
        "Qwen3ForCausalLM", "Qwen3Config", {"num_hidden_layers": 2, **BLOCKS}, quantized=True
    ),
    "qwen3-moe-fp8": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **{"num_hidden_layers": 2, "num_experts": 4, **BLOCKS, **EXPERTS},
            "moe_intermediate_size": 256,
        },
        quantized=True,
    ),
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def checkpoint(configuration: Any) -> list[Entry]:
    """What a checkpoint of the model has: experts one by one, tied tensors once."""
    plain = copy.deepcopy(configuration)
    quantized = plain.__dict__.pop("quantization_config", None) is not None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(plain, dtype=torch.bfloat16)
    seen: set[int] = set()
    found = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found += _on_disk(name, tensor)
    return [part for one in found for part in _in_blocks(one)] if quantized else found


def _in_blocks(entry: Entry) -> list[Entry]:
    stem = entry.name.removesuffix(".weight")
    if len(entry.shape) != 2 or stem.endswith(("lm_head", "embed_tokens", "mlp.gate")):
        return [entry]
    blocks = tuple(-(-size // 128) for size in entry.shape)
    weight = Entry(entry.name, "F8_E4M3", entry.shape)
    return [weight, Entry(f"{entry.name}_scale_inv", "F32", blocks)]


def _on_disk(name: str, tensor: Any) -> Iterator[Entry]:
    stem, _, leaf = name.rpartition(".")
    dtype = "F32" if leaf == "e_score_correction_bias" else "BF16"  # as public checkpoints have it
    if not stem.endswith(".experts"):
        yield Entry(name, dtype, tuple(tensor.shape))
        return
    for expert in range(tensor.shape[0]):
        if leaf == "gate_up_proj":
            half = (tensor.shape[1] // 2, tensor.shape[2])
            yield Entry(f"{stem}.{expert}.gate_proj.weight", dtype, half)
            yield Entry(f"{stem}.{expert}.up_proj.weight", dtype, half)
        else:
            yield Entry(f"{stem}.{expert}.{leaf}.weight", dtype, tuple(tensor.shape[1:]))


def values(entries: list[Entry]) -> dict[str, torch.Tensor]:
    """Random tensors of a checkpoint, the same in every run."""
    generator = torch.Generator().manual_seed(7)
    types = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    return {e.name: torch.randn(e.shape, generator=generator).to(types[e.dtype]) for e in entries}


@contextlib.contextmanager
def served(
    tensors: dict[str, torch.Tensor], ranks: int = 2, metadata: dict[str, str] | None = None
) -> Iterator[list[str]]:
    """Addresses of trainer ranks that have published *tensors* as `full:0`, at step 1, each rank a
    part of the rows of every tensor."""
    import fanin

    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(fanin.Server(world_id="ab" * 16, rank=rank, world_size=ranks))
            for rank in range(ranks)
        ]
        for rank, server in enumerate(servers):
            for name, tensor in tensors.items():
                step = -(-tensor.shape[0] // ranks)
                rows = tensor[rank * step : (rank + 1) * step]
                offset = (min(rank * step, tensor.shape[0]), *[0] * (tensor.dim() - 1))
                shard = fanin.shard_of(name, rows, shape=tensor.shape, offset=offset)
                server.put("full:0", [shard])
            server.set_metadata("full:0", metadata or {})
            server.commit("full:0", 1)
        yield [f"127.0.0.1:{server.port}" for server in servers]


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, and whether experts are theirs as a whole; or they are stages, each
    with some of the layers."""

    size: int = 1
    experts: bool = False
    stages: bool = False

    @property
    def kind(self) -> str:
        return "pp" if self.stages else "tp"

    def __str__(self) -> str:
        return f"{'PP' if self.stages else 'EP' if self.experts else 'TP'}{self.size}"


class Engine:
    """vLLM's configuration for one model, and models of its ranks."""

    def __init__(
        self,
        folder: Path,
        family: Family,
        layout: Layout,
        configuration: Any = None,
        **options: Any,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs

        configuration = configuration or family.configuration()
        configuration.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        assert written["architectures"] == configuration.architectures
        if family.quantized:
            from quantized import install_kernel

            install_kernel()
        self.family = family
        self.layout = layout
        self.config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            load_format="dummy",
            enable_expert_parallel=layout.experts,
            **options,
        ).create_engine_config()

    @contextlib.contextmanager
    def rank(self, rank: int, device: str = "cpu") -> Iterator[Any]:
        """The model of one rank as vLLM makes it, before anything is loaded."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.model_executor.model_loader.utils import initialize_model

        with set_current_vllm_config(self.config):
            _world(self.family.experts)
            split = parallel_state._PP if self.layout.stages else parallel_state._TP
            groups = [split] + [parallel_state._EP] * self.layout.experts
            before = [(g, dict(g.__dict__)) for g in groups if g is not None]
            compilation = self.config.compilation_config
            try:
                for group, _ in before:
                    group.world_size, group.rank_in_group = self.layout.size, rank
                    group.rank, group.ranks = rank, list(range(self.layout.size))
                parallel = self.config.parallel_config
                if self.layout.stages:
                    parallel.pipeline_parallel_size = self.layout.size
                else:
                    parallel.tensor_parallel_size = self.layout.size
                compilation.static_forward_context.clear()
                compilation.static_all_moe_layers.clear()
                torch.set_default_dtype(torch.bfloat16)
                try:
                    with torch.device(device):
                        model = initialize_model(self.config)
                finally:
                    torch.set_default_dtype(torch.float32)
                yield model
            finally:
                for group, attributes in before:
                    group.__dict__.update(attributes)


def _world(experts: bool) -> None:
    """A world of this process alone; vLLM has a group of experts only for models that have any."""
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    if parallel_state._TP is not None and experts and parallel_state._EP is None:
        parallel_state.destroy_model_parallel()
    if parallel_state._TP is None:
        parallel_state.initialize_model_parallel(1, 1)
