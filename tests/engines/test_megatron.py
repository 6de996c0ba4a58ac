# SPDX-License-Identifier: Apache-2.0
"""names=megatron(...) against the names and shapes of Megatron-Core's own GPTModel, on the CPU.

Skipped where megatron-core is not installed.
"""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fanin.torch._names import slices_of
from fanin.torch._parameters import Parameters
from fanin.torch._union import Told, compress, table_of, unite
from fanin.torch._weights import find_weights
from fanin.torch.names import checkpoint, megatron
from full_models import config_of
from transformers import AutoModelForCausalLM

try:
    THERE = importlib.util.find_spec("megatron.core") is not None
except ModuleNotFoundError:
    THERE = False
pytestmark = pytest.mark.skipif(not THERE, reason="megatron-core is not installed")


def gpt_model(config: Any, tp_size: int, expert_size: int | None) -> Any:
    """Megatron's model of that configuration, as this tensor-parallel rank has it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = getattr(config, "num_experts", None)
    moe: dict[str, Any] = {}
    if experts:
        moe = {
            "num_moe_experts": experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
        }
    transformer = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        tensor_model_parallel_size=tp_size,
        expert_tensor_parallel_size=expert_size,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **moe,
    )
    return GPTModel(
        transformer,
        get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=config.vocab_size,
        max_sequence_length=128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def tell(rank: int, size: int, kind: str, expert_size: int | None, folder: str) -> None:
    """In a process of its own: what that rank tells the others of its part."""
    from megatron.core import parallel_state

    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(size, expert_tensor_parallel_size=expert_size)
    config = config_of(kind, False)
    model = gpt_model(config, size, expert_size)
    share = {
        "expert_tp_rank": parallel_state.get_expert_tensor_parallel_rank(),
        "expert_tp_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    if share["expert_tp_size"] == 1:
        share = {}
    names = megatron(config, tp_rank=rank, tp_size=size, **share)
    shards = Parameters(model, find_weights, names).look().shards
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(compress(table_of(shards))))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "expert_size"),
    [("qwen3", None), ("qwen3-moe", 1), ("qwen3-moe", None)],  # None: Megatron's default
)
@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_megatrons_own_model_are_the_checkpoint(
    kind: str, expert_size: int | None, size: int, tmp_path: Path
) -> None:
    torch.multiprocessing.spawn(tell, (size, kind, expert_size, str(tmp_path)), nprocs=size)
    answers: list[tuple[Told, bytes]] = [
        pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(size)
    ]
    texts = {told.digest: text for told, text in answers}
    published = {one.name: one.shape for one in unite([told for told, _ in answers], texts)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(kind, False))
    stored = checkpoint(model)
    assert published == {
        part.key: tuple(value[part.index].shape)
        for name, value in model.state_dict().items()
        for part in slices_of(stored, name, tuple(value.shape))
    }
