# SPDX-License-Identifier: Apache-2.0
"""SGLang's real model classes, in small and without its server: what `fanin.sglang.load` puts in
place is what their own loaders put in place.

A program: `sglang_families.py NAME...`, one line of JSON for each family, layout and rank. One
process plays every rank in turn. Kernels are not needed to load. The name "pairs" stands for
trainers and engines that quantize otherwise than each other, "rows" for a scale for each row.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib
import json
import os
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
from families import FAMILIES, Entry, Layout, checkpoint, served, values
from full_models import random_model
from quantized import CHANNEL, FIELDS, random_tensors, whole_in_fp8

MODULES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3_moe",
    "glm4": "glm4",
    "glm4-moe": "glm4_moe",
    "glm4-moe-lite": "glm4_moe_lite",
    "deepseek-v2": "deepseek_v2",
    "deepseek-v3": "deepseek_v2",
    "qwen3-fp8": "qwen3",
    "qwen3-moe-fp8": "qwen3_moe",
}
POISON = 7.0
# SGLang's rotary embedding of MLA on the CPU is one that stretches.
ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "rope_theta": 10000.0,
}


def configuration(name: str) -> Any:
    made = FAMILIES[name].configuration()
    if "kv_lora_rank" in FAMILIES[name].options:
        made.rope_scaling = dict(ROPE)  # SGLang changes it
        made.moe_layer_freq = 1
        made.rope_theta = 10000.0
        made.scoring_func = getattr(made, "scoring_func", "softmax")
        made.n_group, made.topk_group = made.n_group or 1, made.topk_group or 1
    return made


def _group(rank: int, size: int) -> Any:
    return types.SimpleNamespace(
        rank_in_group=rank,
        world_size=size,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        cpu_group=None,
        device_group=None,
    )


@contextlib.contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[None]:
    """This process is one rank of the layout."""
    from sglang.srt.runtime_context import get_context, get_parallel

    size = layout.size
    experts, rows = (size, 1) if layout.experts else (1, size)
    alone = _group(0, 1)
    whole = _group(rank, size)
    with (
        get_context().override_server_args(device="cpu"),
        get_parallel().override(
            tp_rank=rank,
            tp_size=size,
            tp_group=whole,
            attn_tp_rank=rank,
            attn_tp_size=size,
            attn_tp_group=whole,
            attn_dp_rank=0,
            attn_dp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            pp_rank=0,
            pp_size=1,
            pp_group=alone,
            moe_ep_rank=rank % experts,
            moe_ep_size=experts,
            moe_ep_group=whole if layout.experts else alone,
            moe_tp_rank=rank % rows,
            moe_tp_size=rows,
            moe_tp_group=alone if layout.experts else whole,
        ),
    ):
        yield


def poisoned(kind: Any, config: Any) -> Any:
    from sglang.srt.layers.quantization import get_quantization_config

    how = getattr(config, "quantization_config", None)
    method = how and get_quantization_config(how["quant_method"]).from_config(how)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = kind(config, quant_config=method).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(POISON)
    return model


def tensors_of(model: Any) -> dict[str, Any]:
    """Parameters, buffers, and what attention has made of them."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        for name in ("w_kc", "w_vc"):
            made = getattr(module, name, None)
            if isinstance(made, torch.Tensor):
                found[f"{path}.{name}"] = made
    return found


def differences(one: Any, other: Any) -> list[str]:
    mine, others = tensors_of(one), tensors_of(other)
    wrong = sorted(mine.keys() ^ others.keys())
    both = mine.keys() & others.keys()
    wrong += [name for name in both if not torch.equal(bits(mine[name]), bits(others[name]))]
    return wrong


def bits(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def run(name: str) -> Iterator[dict[str, Any]]:
    import fanin.sglang.weights as weights
    from fanin.mapping._checks import config_differences, missed
    from fanin.sglang import Request, load
    from fanin.sglang.guard import standing
    from fanin.sglang.request import encode

    family, config = FAMILIES[name], configuration(name)
    kind = getattr(
        importlib.import_module(f"sglang.srt.models.{MODULES[name]}"), family.architecture
    )
    content = values(checkpoint(config))
    # Nobody to agree with: the other ranks are this process, later.
    weights._parallel = lambda: None
    weights.refuse_missed = lambda *_: None
    as_trained = json.loads(config.to_json_string())
    layouts = [Layout(1), Layout(2), *([Layout(2, experts=True)] if family.experts else [])]
    with served(content) as addresses:
        request = Request(trainer=addresses, step=1, timeout=120)
        tensors = pickle.loads(base64.b64decode(encode(request)))
        for layout in layouts:
            told = []
            for rank in range(layout.size):
                with rank_of(layout, rank):
                    by_loader, pulled = poisoned(kind, config), poisoned(kind, config)
                    with torch.no_grad():
                        by_loader.load_weights(iter(content.items()))
                    standing.begin()
                    load(pulled, tensors)
                    live = weights._models[pulled]
                    told.append(live.taken)
                    alone = missed(live.shapes, told[-1:])
                    yield {
                        "family": name,
                        "layout": str(layout),
                        "rank": rank,
                        "failure": standing.failure,
                        "different": [] if standing.failure else differences(by_loader, pulled),
                        "tensors": len(tensors_of(pulled)),
                        "published": len(content),
                        "through_loader": list(live.by_loader),
                        "alone": len(alone),
                        "together": [str(one) for one in missed(live.shapes, told)],
                        "config": config_differences(as_trained, pulled.config),
                    }


DOWN = "model.layers.1.mlp.down_proj"


def pairs() -> Iterator[dict[str, Any]]:
    """What each engine says of each trainer, whether the trainer tells how it quantizes or not."""
    from fanin.sglang import Request, load
    from fanin.sglang.guard import standing
    from fanin.sglang.request import encode
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM

    fp8 = configuration("qwen3-fp8")
    plain, skips, small = (copy.deepcopy(fp8) for _ in range(3))
    del plain.quantization_config
    skips.quantization_config["modules_to_not_convert"].append(DOWN)
    small.quantization_config["weight_block_size"] = [64, 64]
    quantized = checkpoint(fp8)
    some = [one for one in quantized if not one.name.startswith(DOWN)]
    some.append(Entry(f"{DOWN}.weight", "BF16", (256, 512)))
    for case, trains, content, serves in (
        ("plain engine", fp8, quantized, plain),
        ("plain trainer", plain, checkpoint(plain), fp8),
        ("other blocks", fp8, quantized, small),
        ("trainer skips", skips, some, fp8),
        ("engine skips", fp8, quantized, skips),
    ):
        how = getattr(trains, "quantization_config", None)
        for told in ({"quantization": json.dumps(how)} if how else {}, {}):
            with served(values(content), metadata=told) as addresses, rank_of(Layout(1), 0):
                request = Request(trainer=addresses, step=1, timeout=120)
                standing.begin()
                load(
                    poisoned(Qwen3ForCausalLM, serves),
                    pickle.loads(base64.b64decode(encode(request))),
                )
                yield {
                    "family": "pairs",
                    "case": case,
                    "told": bool(told),
                    "failure": standing.failure,
                }


def rows() -> Iterator[dict[str, Any]]:
    """An update of an engine that SGLang has started: it has laid out the weights anew."""
    from fanin.sglang import Request, load
    from fanin.sglang.guard import standing
    from fanin.sglang.request import encode
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # SGLang asks on a CPU too
    config = random_model("qwen3", **FIELDS).config
    config.quantization_config = copy.deepcopy(CHANNEL)
    content = whole_in_fp8(random_tensors(), end="_scale", block=None)
    told = {"quantization": json.dumps(CHANNEL)}
    with served(content, metadata=told) as addresses, rank_of(Layout(1), 0):
        request = Request(trainer=addresses, step=1, timeout=120)
        model = poisoned(Qwen3ForCausalLM, config)
        with torch.no_grad():
            model.load_weights(iter(content.items()))
        DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
        before = {name: bits(one).clone() for name, one in tensors_of(model).items()}
        DefaultModelLoader.restore_weights_before_loading(model, torch.device("cpu"))
        standing.begin()
        load(model, pickle.loads(base64.b64decode(encode(request))))
        after = tensors_of(model)
        yield {
            "family": "rows",
            "failure": standing.failure,
            "written": [name for name in after if not torch.equal(bits(after[name]), before[name])],
        }


if __name__ == "__main__":
    others = {"pairs": pairs, "rows": rows}
    for chosen in sys.argv[1:]:
        for line in others[chosen]() if chosen in others else run(chosen):
            print(json.dumps(line), flush=True)
