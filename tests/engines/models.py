# SPDX-License-Identifier: Apache-2.0
"""Small random base models, adapters on them, and models of real shape without memory."""

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]

WEIGHTS = "adapter_model.safetensors"


def sizes(hidden, width, layers, heads, kv, **more):
    """The vocabulary has no part in an adapter."""
    return {
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": False,
        **more,
    }


def experts(count, chosen, width, head):
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "head_dim": head,
        "decoder_sparse_step": 1,
    }


TINY = {
    "qwen2": Qwen2Config(**sizes(64, 160, 2, 4, 2)),
    "llama": LlamaConfig(**sizes(64, 160, 2, 4, 4)),
    "qwen3-moe": Qwen3MoeConfig(**sizes(64, 160, 2, 4, 2), **experts(4, 2, 48, 16)),
}
# Shapes of public models.
REAL = {
    "llama-3.1-8b": LlamaConfig(**sizes(4096, 14336, 32, 32, 8)),
    "qwen3-30b-a3b": Qwen3MoeConfig(**sizes(2048, 6144, 48, 32, 4), **experts(128, 8, 768, 128)),
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


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same_tensors(found, expected):
    for name in sorted(found.keys() ^ expected.keys()):
        raise AssertionError(f"{name} is {'unexpected' if name in found else 'missing'}")
    for name, tensor in expected.items():
        other = found[name]
        assert other.dtype == tensor.dtype, f"{name} has dtype {other.dtype}, not {tensor.dtype}"
        assert other.shape == tensor.shape, f"{name} has another shape"
        assert torch.equal(bits(other), bits(tensor)), f"{name} has other values"


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
