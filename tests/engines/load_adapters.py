#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""load_adapters.py [CASE...]

Adapters that trainer ranks hold, pulled by nixl-fetch, read by PEFT and loaded onto models.
Each case cuts an adapter over several ranks and pulls it; a model with the pulled adapter must
compute bit for bit what the trainer's computes. The last line is "N passed, N failed".
"""

import json
import pathlib
import shutil
import sys
import tempfile
import time
import traceback

import torch
from judge import (
    WEIGHTS,
    Original,
    check,
    check_config,
    check_model,
    check_shapes,
    check_tensors,
    load_whole,
    same_tensors,
)
from models import (
    ATTENTION,
    MLP,
    REAL,
    TINY,
    Bases,
    expert_layers,
    linear_skeleton,
    logits,
    trained,
    without_memory,
)
from peft import LoraConfig, PeftConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from trainer import pull, ranks_of, serve
from transformers import AutoModelForCausalLM
from transformers.utils import logging

CONFIG = "adapter_config.json"
CASES = []


def case(function):
    CASES.append(function)
    return function


# ------------------------------------------- an adapter that PEFT itself saved, served again


def saved(lab, config, kind="qwen2", dtype=torch.float32):
    """An adapter directory that PEFT wrote, and what it is."""
    directory = lab.scratch / "saved"

    def make_base():
        return lab.bases.make(kind, dtype)

    model = trained(make_base(), LoraConfig(task_type="CAUSAL_LM", **config))
    model.save_pretrained(directory)
    fields = PeftConfig.from_pretrained(directory).to_dict()
    tensors = load_file(directory / WEIGHTS)
    return directory, Original(tensors, fields, make_base, logits(model))


def round_trip(lab, world_size, config, **options):
    directory, original = saved(lab, config, **options)
    with serve(world_size, "--adapter", str(directory)) as target:
        pulled = pull(target, lab.scratch / "pulled")
    check(pulled, original)
    ours, theirs = (json.loads((d / CONFIG).read_text()) for d in (pulled, directory))
    assert ours == theirs, "adapter_config.json is not the trainer's, whole"


@case
def saved_all_linear_layers(lab):
    round_trip(lab, 4, {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP})


@case
def saved_bfloat16_fewer_rows_than_ranks(lab):
    config = {"r": 3, "lora_alpha": 5, "target_modules": ATTENTION}
    round_trip(lab, 8, config, kind="llama", dtype=torch.bfloat16)


@case
def saved_rank_and_alpha_pattern_with_rslora(lab):
    config = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ATTENTION + MLP,
        "rank_pattern": {
            "q_proj": 4,
            r"layers\.1\.mlp\.\w+_proj": 6,
            "^model.layers.0.mlp.up_proj": 2,
        },
        "alpha_pattern": {"q_proj": 6},
        "use_rslora": True,
        "lora_dropout": 0.1,
    }
    round_trip(lab, 3, config)


@case
def saved_dora(lab):
    round_trip(lab, 4, {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "use_dora": True})


@case
def saved_modules_to_save_and_embedding(lab):
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": [*ATTENTION, "embed_tokens"],
        "modules_to_save": ["lm_head"],
    }
    round_trip(lab, 4, config)


@case
def saved_regular_expression_and_lora_bias(lab):
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": r".*\.self_attn\.(q|v)_proj",
        "lora_bias": True,
    }
    round_trip(lab, 2, config)


@case
def saved_trained_biases(lab):
    """Biases of the base model itself, which are no part of a LoRA layer."""
    round_trip(lab, 2, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "lora_only"})


@case
def saved_trainable_tokens(lab):
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "trainable_token_indices": [3, 5, 8],
    }
    round_trip(lab, 2, config)


FUSED = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ATTENTION,
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "rank_pattern": {r".*\.gate_up_proj": 8},
}


@case
def saved_fused_experts(lab):
    round_trip(lab, 4, FUSED, kind="qwen3-moe")


# ------------- parameters of a trainer's process, a few metadata, a configuration derived


def in_memory(
    lab, config, metadata, kind="qwen2", name="default", rename=None, world_size=4, bias="none"
):
    """Lends the model's own parameters to ranks; returns the pulled configuration."""

    def make_base():
        return lab.bases.make(kind)

    model = trained(make_base(), LoraConfig(task_type="CAUSAL_LM", **config), name)
    tensors = {key: value for key, value in model.named_parameters() if value.requires_grad}
    if rename:
        tensors = {rename(key): value for key, value in tensors.items()}
    metadata = {"base_model_name_or_path": lab.bases.path(kind), "lora_alpha": "16", **metadata}
    with ranks_of(tensors, metadata, world_size) as target:
        pulled = pull(target, lab.scratch / "pulled")

    expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lab.bases.path(kind),
        "lora_alpha": 16,
        "bias": bias,
    }
    check(pulled, Original(expected, fields, make_base, logits(model)))
    return PeftConfig.from_pretrained(pulled)


@case
def derived_all_linear_layers(lab):
    config = {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP}
    found = in_memory(lab, config, {"task_type": "CAUSAL_LM", "lora_dropout": "0.05"})
    assert found.r == 8 and not found.rank_pattern
    assert found.lora_dropout == 0.05
    assert found.target_modules == set(ATTENTION + MLP)


@case
def derived_from_names_of_wrapped_modules(lab):
    """Another adapter name, FSDP's and torch.compile's components, no prefix, empty shards."""

    def rename(key):
        key = key.removeprefix("base_model.model.")
        return key.replace("self_attn", "_fsdp_wrapped_module.self_attn._orig_mod")

    config = {"r": 3, "lora_alpha": 16, "target_modules": ATTENTION}
    found = in_memory(lab, config, {}, kind="llama", name="run1", rename=rename, world_size=5)
    assert found.r == 3 and found.target_modules == set(ATTENTION)


@case
def derived_rank_pattern_with_rslora(lab):
    pattern = {"q_proj": 4, "layers.1.mlp.up_proj": 6, "layers.0.mlp.up_proj": 2}
    config = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ATTENTION + MLP,
        "rank_pattern": pattern,
        "alpha_pattern": {"v_proj": 12},
        "use_rslora": True,
    }
    metadata = {"use_rslora": "true", "alpha_pattern": '{"v_proj": 12}'}
    found = in_memory(lab, config, metadata)
    assert found.r == 8 and found.rank_pattern["q_proj"] == 4


@case
def derived_dora_embedding_and_saved_module(lab):
    config = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": [*ATTENTION, "embed_tokens"],
        "modules_to_save": ["lm_head"],
        "use_dora": True,
    }
    found = in_memory(lab, config, {}, name="run1")
    assert found.use_dora and found.modules_to_save == ["lm_head"]
    assert found.target_modules == {*ATTENTION, "embed_tokens"}


@case
def derived_lora_bias(lab):
    config = {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, "lora_bias": True}
    assert in_memory(lab, config, {}).lora_bias


@case
def derived_trained_biases(lab):
    """Biases of the base model, which the metadata have to announce."""
    config = {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, "bias": "lora_only"}
    assert in_memory(lab, config, {"bias": "lora_only"}, bias="lora_only").bias == "lora_only"


@case
def derived_trainable_tokens(lab):
    config = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ATTENTION,
        "trainable_token_indices": [3, 5, 8],
    }
    found = in_memory(lab, config, {"trainable_token_indices": "[3, 5, 8]"}, name="run1")
    assert found.trainable_token_indices == [3, 5, 8]


@case
def given_patterns_keep_their_order(lab):
    """Of PEFT's patterns the first that matches wins."""
    config = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ATTENTION,
        "rank_pattern": {"q_proj": 4, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"v_proj": 12, "layers.1.self_attn.v_proj": 2},
    }
    fields = {**config, "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    found = in_memory(lab, config, {"peft_config": json.dumps(fields)})
    assert list(found.alpha_pattern) == list(config["alpha_pattern"])


@case
def derived_fused_experts(lab):
    """From the number of experts; without target_parameters."""
    config = {**FUSED, "lora_alpha": 16}
    found = in_memory(lab, config, {"num_experts": "4"}, kind="qwen3-moe", name="run1")
    assert found.target_modules == set(ATTENTION)
    assert len(found.target_parameters) == 2


@case
def experts_each_with_own_layers(lab):
    """Names of each expert, which PEFT converts while loading. The reference is the base model
    with the products of the matrices added to its weights."""
    config, r, alpha = TINY["qwen3-moe"], 4, 8
    torch.manual_seed(3)
    tensors = {}
    for path, (inputs, outputs) in expert_layers(config).items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(r, inputs) * 0.2
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(outputs, r) * 0.2
    base = lab.bases.path("qwen3-moe")
    metadata = {"base_model_name_or_path": base, "lora_alpha": str(alpha)}
    with ranks_of(tensors, metadata, 3) as target:
        pulled = pull(target, lab.scratch / "pulled")

    same_tensors(load_file(pulled / WEIGHTS), tensors)
    found = PeftConfig.from_pretrained(pulled)
    assert found.r == r and found.target_modules == set(ATTENTION + MLP)
    model = load_whole(pulled, lab.bases.make("qwen3-moe"))
    merged = lab.bases.make("qwen3-moe")
    before = logits(merged)
    add_products(merged, config, tensors, alpha / r)
    after = logits(merged)
    assert (after - before).abs().max() > 0.1, "the adapter changes nothing"
    difference = (logits(model) - after).abs().max().item()
    assert difference < 1e-3, f"the logits differ by {difference} from the merged model's"


def add_products(model, config, tensors, scale):
    with torch.no_grad():
        for path in expert_layers(config):
            name = f"base_model.model.{path}."
            delta = scale * tensors[name + "lora_B.weight"] @ tensors[name + "lora_A.weight"]
            if "experts" not in path:
                model.get_submodule(path).weight.add_(delta)
                continue
            parent, expert, kind = path.rsplit(".", 2)
            experts, index = model.get_submodule(parent), int(expert)
            if kind == "down_proj":
                experts.down_proj[index].add_(delta)
            else:
                first = 0 if kind == "gate_proj" else config.moe_intermediate_size
                experts.gate_up_proj[index, first : first + delta.shape[0]].add_(delta)


# ----------------------------------------------- the stand-in trainer's adapters of real shape


def stand_in(lab, world_size, *shape):
    with serve(world_size, *shape) as target:
        return pull(target, lab.scratch / "pulled", "--check-pattern")


@case
def real_shape_small_onto_a_model(lab):
    pulled = stand_in(lab, 4, "--adapter-shape", "small")
    config = PeftConfig.from_pretrained(pulled)
    assert config.r == 8 and config.lora_alpha == 16
    assert config.base_model_name_or_path == "qwen2.5-0.5b"
    base = AutoModelForCausalLM.from_config(REAL["qwen2.5-0.5b"], dtype=torch.bfloat16)
    model = load_whole(pulled, base)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    same_tensors(state, load_file(pulled / WEIGHTS))


@case
def real_shape_dense(lab):
    pulled = stand_in(lab, 8, "--adapter-shape", "dense")
    config = check_shapes(pulled, without_memory("llama-3.1-8b"))
    assert config.r == 16 and config.lora_alpha == 32
    assert config.target_modules == set(ATTENTION + MLP)


@case
def real_shape_experts(lab):
    pulled = stand_in(lab, 8, "--adapter-shape", "moe")
    config = check_shapes(pulled, linear_skeleton(expert_layers(REAL["qwen3-30b-a3b"])))
    assert config.r == 16 and config.lora_alpha == 32
    assert config.target_modules == set(ATTENTION + MLP)


@case
def real_shape_fused_experts(lab):
    pulled = stand_in(lab, 8, "--adapter-shape", "moe-fused")
    config = check_shapes(pulled, without_memory("qwen3-30b-a3b"))
    assert config.r == 16 and config.target_modules == set(ATTENTION)
    assert set(config.target_parameters) == {"down_proj", "gate_up_proj"}


# --------------------------------------------------------------- whether the checks can fail


def change_config(**changes):
    def damage(directory):
        path = directory / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def change_tensors(change):
    def damage(directory):
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, {"format": "pt"})

    return damage


def one_value(tensors):
    tensors[DAMAGED][0, 0] += 1


def another_name(tensors):
    tensors[DAMAGED.replace("q_proj", "x_proj")] = tensors.pop(DAMAGED)


def swapped_rows(tensors):
    tensors[DAMAGED] = tensors[DAMAGED].flip(0)


def other_dtype(tensors):
    tensors[DAMAGED] = tensors[DAMAGED].bfloat16()


DAMAGED = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
DAMAGES = {
    "a value": (check_tensors, change_tensors(one_value)),
    "a name": (check_tensors, change_tensors(another_name)),
    "rows": (check_tensors, change_tensors(swapped_rows)),
    "a dtype": (check_tensors, change_tensors(other_dtype)),
    "a tensor gone": (check_tensors, change_tensors(lambda tensors: tensors.pop(DAMAGED))),
    "r": (check_config, change_config(r=4)),
    "lora_alpha": (check_config, change_config(lora_alpha=17)),
    "use_rslora": (check_config, change_config(use_rslora=True)),
    "target_modules": (check_config, change_config(target_modules=["k_proj", "o_proj"])),
}


@case
def damage_is_noticed(lab):
    """Each damage must fail both its comparison and the loading by PEFT."""
    config = {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION}
    directory, original = saved(lab, config)
    with serve(4, "--adapter", str(directory)) as target:
        pulled = pull(target, lab.scratch / "pulled")
    check(pulled, original)
    for number, (what, (comparison, damage)) in enumerate(DAMAGES.items()):
        damaged = lab.scratch / f"damaged-{number}"
        shutil.copytree(pulled, damaged)
        damage(damaged)
        for checked in (comparison, check_model):
            try:
                checked(damaged, original)
            except (AssertionError, RuntimeError):
                continue
            raise AssertionError(f"{checked.__name__} does not notice other {what}")


class Lab:
    def __init__(self, bases, scratch):
        self.bases = bases
        self.scratch = scratch


def run(function, bases, scratch):
    start = time.monotonic()
    try:
        function(Lab(bases, scratch))
    except Exception:
        print(f"  FAILED  {function.__name__}", flush=True)
        traceback.print_exc(file=sys.stdout)
        return False
    print(f"  ok      {function.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
    return True


def main():
    logging.disable_progress_bar()
    wanted = sys.argv[1:]
    names = [function.__name__ for function in CASES]
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        print(f"no case {unknown[0]}; the cases are:", *names, sep="\n  ", file=sys.stderr)
        return 2
    cases = [function for function in CASES if not wanted or function.__name__ in wanted]
    passed = 0
    with tempfile.TemporaryDirectory(prefix="fanin-engines-") as base:
        bases = Bases(pathlib.Path(base))
        for function in cases:
            with tempfile.TemporaryDirectory(prefix="fanin-engines-") as scratch:
                passed += run(function, bases, pathlib.Path(scratch))
    print(f"{passed} passed, {len(cases) - passed} failed")
    return 0 if passed == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
