# SPDX-License-Identifier: Apache-2.0
"""Adapters whose base is published with them merged: the models, and what PEFT makes of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fanin
import fp8_rule
import torch
from full_models import random_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("qwen3", {"r": 8, "lora_alpha": 16, "target_modules": LINEAR}),
    "rslora": (
        "qwen3",
        {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": LINEAR},
    ),
    "patterns": (
        "qwen3",
        {
            "r": 6,
            "lora_alpha": 7,
            "rank_pattern": {"q_proj": 3, r"layers\.1\..*down_proj": 10},
            "alpha_pattern": {"k_proj": 11},
            "target_modules": LINEAR,
        },
    ),
    "embedding": (
        "qwen3",
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["embed_tokens", "q_proj"],
            "modules_to_save": ["lm_head"],
        },
    ),
    "dora": ("qwen3", {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": LINEAR}),
    "experts": (
        "qwen3-moe",
        {"r": 4, "lora_alpha": 9, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
}


def adapted(name: str, dtype: str = "bfloat16", wide: bool = True) -> Any:
    """A PEFT model whose factors all matter; wide: the factors are F32, as PEFT has them."""
    kind, fields = ADAPTERS[name]
    return with_adapter(random_model(kind, dtype=dtype), wide=wide, **fields)


def with_adapter(base: Any, *, wide: bool = True, **fields: Any) -> Any:
    model = get_peft_model(base, LoraConfig(**fields), autocast_adapter_dtype=wide)
    torch.manual_seed(5)
    with torch.no_grad():
        for path, param in model.named_parameters():
            if "lora_" in path or "modules_to_save" in path:
                param.normal_(0, 0.1)
    return model


def saved(make: Callable[[], Any], folder: Path) -> dict[str, Any]:
    """What PEFT's merged model saves, as engines load it."""
    make().merge_and_unload().save_pretrained(folder)
    return dict(load_file(folder / "model.safetensors"))


def pulled(server: Any, run: str = "full:0") -> dict[str, Any]:
    with fanin.Client(server.addresses) as client:
        into = {
            one.name: torch.empty(one.shape, dtype=DTYPES[one.dtype]) for one in client.catalog(run)
        }
        client.pull_into(run, into, timeout=60)
    return into


def computed_memory(server: Any) -> int:
    """Bytes that a run keeps beside the model's own."""
    parameters = server._runs["full:0"].parameters
    storages = [one.state.storage for one in parameters._items if one.state.values is not None]
    for entry in parameters.quantizer._entries.values() if parameters.quantizer else ():
        storages += [one.untyped_storage() for one in (*entry.values, *entry.scales)]
        pairs = zip(entry.views, entry.makers, strict=True)
        storages += [view.untyped_storage() for view, maker in pairs if maker is None]
    own = {one.untyped_storage().data_ptr() for one in parameters.root.parameters()}
    return sum(
        {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in own}.values()
    )


def fits_in_half(server: Any, got: dict[str, Any]) -> int:
    """Memory for results is that of what readers read, and of the largest part that is merged at a
    time, whose bytes it gives."""
    read = {name: one for name, one in got.items() if one.dtype is torch.float8_e4m3fn}
    values = sum(one.numel() for one in read.values())
    scales = sum(one.numel() * 4 for name, one in got.items() if name.endswith("_scale_inv"))
    states = [item.state for item in server._runs["full:0"].parameters._items]
    parts = [part for one in states if one.places for part in one.values.parts]
    largest = max(2 * math.prod(extent) for _, extent in parts)
    assert largest < values, "the model is too small to tell"
    assert values < computed_memory(server) <= values + scales + largest + 256 * len(read)
    return largest


def rounded(tensors: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The tensors, those as fp8 that are fp8 in *like*."""
    out = dict(tensors)
    for name, value in tensors.items():
        if like[name].dtype is torch.float8_e4m3fn:
            bytes_, scales = fp8_rule.rounded(value.float().numpy())
            out[name] = torch.from_numpy(bytes_).view(torch.float8_e4m3fn)
            out[f"{name}_scale_inv"] = torch.from_numpy(scales)
    return out


def peak(call: Callable[[], Any]) -> int:
    """The most bytes that PyTorch allocates on a CPU meanwhile, less what it frees."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        call()
    assert told.profiler is not None
    events = told.profiler.kineto_results.events()
    sizes = (one.nbytes() for one in events if one.name() == "[memory]")
    return max(itertools.accumulate(sizes))


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """All bytes."""
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name].view(torch.uint8), value.contiguous().view(torch.uint8)), name


# ------------------------------------------------------------------------------------ 4 bits


def packed(storage: str, kind: str, nested: bool) -> Any:
    """A base whose linear layers bitsandbytes packs."""
    import bitsandbytes as bnb

    model = random_model("qwen3", hidden_size=136, intermediate_size=200)
    how = {
        "compress_statistics": nested,
        "quant_type": kind,
        "quant_storage": getattr(torch, storage),
    }
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if type(linear) is torch.nn.Linear:
                    four = bnb.nn.Linear4bit(
                        linear.in_features,
                        linear.out_features,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                        **how,
                    )
                    four.weight = bnb.nn.Params4bit(
                        linear.weight.detach(), requires_grad=False, module=four, **how
                    ).to("cpu")
                    setattr(parent, name, four)
    model.is_loaded_in_4bit = True
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return model


def four_bits(storage: str = "bfloat16", kind: str = "nf4", nested: bool = True) -> Any:
    """A PEFT model over it. Not all of the packed layers are adapted."""
    fields = {"r": 8, "lora_alpha": 16, "target_modules": [n for n in LINEAR if n != "up_proj"]}
    return with_adapter(packed(storage, kind, nested), **fields)


def unpacked(model: Any) -> dict[str, Any]:
    """What bitsandbytes makes of a whole packed base, and PEFT adds to it: PEFT's own merge would
    pack it again.

    Without the sign of zeros, which bitsandbytes' FP4 on a CPU gives by the shape that it is told.
    """
    from bitsandbytes.functional import dequantize_4bit

    wanted = {}
    for path, param in model.get_base_model().named_parameters():
        if ".lora_" in path:
            continue
        owner, _, attribute = path.rpartition(".")
        value, module = param, model.get_base_model().get_submodule(owner)
        if type(module).__name__ == "Linear4bit":
            value = dequantize_4bit(param.data, param.quant_state)
        if owner.endswith(".base_layer"):
            layer = model.get_base_model().get_submodule(owner.removesuffix(".base_layer"))
            value = (value + layer.get_delta_weight("default")).to(value.dtype)
        wanted[path.replace(".base_layer", "")] = value.detach() + 0
    return wanted
