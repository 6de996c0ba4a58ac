# SPDX-License-Identifier: Apache-2.0
"""Small random base models, adapters on them, and models of real shape without memory."""

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]

TINY = {
    "qwen2": Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    ),
    "llama": LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "qwen3-moe": Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    ),
}

# Shapes of public models; the vocabulary has no part in an adapter.
REAL = {
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=256,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    ),
    "llama-3.1-8b": LlamaConfig(
        vocab_size=256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    ),
}


class Bases:
    """Base models, saved once so that each has a path as its name and can be made again."""

    def __init__(self, scratch):
        self.scratch = scratch

    def path(self, kind):
        path = self.scratch / kind
        if not path.exists():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(TINY[kind], dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, 0.1)
            model.save_pretrained(path)
        return str(path)

    def make(self, kind, dtype=torch.float32):
        return AutoModelForCausalLM.from_pretrained(self.path(kind), dtype=dtype).eval()


def trained(model, config, name="default"):
    """The model with an adapter of which every tensor matters."""
    adapted = get_peft_model(model, config, adapter_name=name, autocast_adapter_dtype=False)
    torch.manual_seed(2)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if not parameter.requires_grad:
                continue
            if "magnitude" in key:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.normal_(0, 0.2)
    return adapted.eval()


def logits(model):
    tokens = torch.arange(1, 33).reshape(1, 32)
    with torch.no_grad():
        return model(input_ids=tokens).logits


def without_memory(kind):
    """A model of real shape whose parameters have no storage."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(REAL[kind], dtype=torch.bfloat16)


def linear_skeleton(shapes):
    """Nothing but linear layers without storage: {path: (in, out)}."""
    root = torch.nn.Module()
    for path, (inputs, outputs) in shapes.items():
        *parents, leaf = path.split(".")
        module = root
        for name in parents:
            if not hasattr(module, name):
                module.add_module(name, torch.nn.Module())
            module = getattr(module, name)
        layer = torch.nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)
        module.add_module(leaf, layer)
    return root


def expert_layers(config):
    """The linear layers of a mixture of experts in which each expert has its own."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes = {}
    for layer in range(config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn."
        shapes[attention + "q_proj"] = (hidden, heads)
        shapes[attention + "k_proj"] = (hidden, kv)
        shapes[attention + "v_proj"] = (hidden, kv)
        shapes[attention + "o_proj"] = (heads, hidden)
        for expert in range(config.num_experts):
            path = f"model.layers.{layer}.mlp.experts.{expert}."
            shapes[path + "gate_proj"] = (hidden, width)
            shapes[path + "up_proj"] = (hidden, width)
            shapes[path + "down_proj"] = (width, hidden)
    return shapes
