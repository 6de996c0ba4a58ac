# SPDX-License-Identifier: Apache-2.0
"""Adapters that trainer ranks hold, pulled by nixl-fetch and loaded by PEFT.

A model with the pulled adapter computes bit for bit what the trainer's computes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import warnings

import fanin
import pytest
import torch
from models import (
    ATTENTION,
    MLP,
    REAL,
    WEIGHTS,
    Bases,
    expert_layers,
    linear_skeleton,
    logits,
    same_tensors,
    trained,
    without_memory,
)
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

FETCH = os.environ["NIXL_FETCH"]
ALL = {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP}
ATTENDED = {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION}
FUSED = ATTENDED | {
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "rank_pattern": {r".*\.gate_up_proj": 8},
}
PATTERNS = {
    "rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.\w+_proj": 6, "^model.layers.0.mlp.up_proj": 2},
    "alpha_pattern": {"q_proj": 6},
    "use_rslora": True,
    "lora_dropout": 0.1,
}
EMBEDDED = {"target_modules": [*ATTENTION, "embed_tokens"], "modules_to_save": ["lm_head"]}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return Bases(tmp_path_factory.mktemp("bases"))


@contextlib.contextmanager
def ranks_of(tensors, metadata, size=4):
    """Ranks in this process, each with its chunk of dimension 0; the last ones may have none."""
    world_id = os.urandom(16)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(fanin.Server(world_id=world_id, rank=rank, world_size=size))
            for rank in range(size)
        ]
        for rank, server in enumerate(servers):
            for name, value in tensors.items():
                chunks = value.detach().chunk(size)
                part = chunks[rank] if rank < len(chunks) else value.detach()[:0]
                first = sum(one.shape[0] for one in chunks[:rank])
                place = (first,) + (0,) * (value.dim() - 1)
                server.put("lora:0", [fanin.shard_of(name, part, shape=value.shape, offset=place)])
            server.set_metadata("lora:0", metadata)
            server.commit("lora:0", 1)
        yield ",".join(f"127.0.0.1:{server.port}" for server in servers)


@contextlib.contextmanager
def serve(size, scratch, *arguments):
    """nixl-fetch's own ranks."""
    info = scratch / "nixl_info.json"
    process = subprocess.Popen(
        [FETCH, "serve", "--quiet", "-n", str(size), "--info", str(info), *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert select.select([process.stdout], [], [], 120)[0]
        assert process.stdout.readline().startswith("ready:")
        yield str(info)
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


def pull(target, scratch, *arguments):
    """The directory, with what nixl-fetch pulled into it."""
    directory = scratch / "pulled"
    command = [FETCH, "pull", target, "--run", "0", "--timeout", "120s", "--quiet"]
    done = subprocess.run(
        [*command, "--out", str(directory), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return directory


def load_whole(directory, base):
    """The base model with the adapter; every tensor of the file has a place, and the reverse."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base, directory, autocast_adapter_dtype=False)
    assert not [str(one.message) for one in caught if "adapter keys" in str(one.message)]
    result = model.load_adapter(directory, "default", autocast_adapter_dtype=False)
    assert not result.missing_keys and not result.unexpected_keys
    return model.eval()


def check(directory, tensors, fields, base, wanted):
    """The directory has these tensors and fields, and on *base* it computes the wanted logits."""
    found = load_file(directory / WEIGHTS)
    same_tensors(found, tensors)
    config = PeftConfig.from_pretrained(directory).to_dict()
    assert {name: config[name] for name in fields} == fields
    before = logits(base)
    model = load_whole(directory, base)
    embedding = any("embed_tokens.base_layer" in name for name in tensors)
    same_tensors(get_peft_model_state_dict(model, save_embedding_layers=embedding), found)
    after = logits(model)
    assert torch.isfinite(after).all() and not torch.equal(after, before)
    assert torch.equal(after, wanted)


SAVED = {
    "all linear layers": (4, "qwen2", ALL),
    "fewer rows than ranks": (8, "llama", ATTENDED | {"r": 3, "lora_alpha": 5}),
    "patterns with rslora": (3, "qwen2", ALL | PATTERNS),
    "dora": (4, "qwen2", ATTENDED | {"use_dora": True}),
    "modules to save, embedding": (4, "qwen2", ATTENDED | EMBEDDED),
    "regular expression, lora_bias": (
        *(2, "qwen2"),
        ATTENDED | {"target_modules": r".*\.self_attn\.(q|v)_proj", "lora_bias": True},
    ),
    "trained biases": (2, "qwen2", ATTENDED | {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "trainable tokens": (2, "qwen2", ATTENDED | {"trainable_token_indices": [3, 5, 8]}),
    "fused experts": (4, "qwen3-moe", FUSED | {"lora_alpha": 8}),
}


@pytest.mark.parametrize("case", SAVED)
def test_what_peft_saved_is_served_again(case, bases, tmp_path):
    size, kind, config = SAVED[case]
    dtype = torch.bfloat16 if kind == "llama" else torch.float32
    model = trained(bases.make(kind, dtype), LoraConfig(task_type="CAUSAL_LM", **config))
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    with serve(size, tmp_path, "--adapter", str(saved)) as target:
        pulled = pull(target, tmp_path)
    fields = PeftConfig.from_pretrained(saved).to_dict()
    check(pulled, load_file(saved / WEIGHTS), fields, bases.make(kind, dtype), logits(model))
    ours, theirs = ((one / "adapter_config.json").read_text() for one in (pulled, saved))
    assert json.loads(ours) == json.loads(theirs)


def wrapped(key):
    """FSDP's and torch.compile's components, and no prefix."""
    key = key.removeprefix("base_model.model.")
    return key.replace("self_attn", "_fsdp_wrapped_module.self_attn._orig_mod")


ORDERED = ATTENDED | {
    "r": 8,
    "rank_pattern": {"q_proj": 4, "layers.1.self_attn.q_proj": 2},  # the first that matches wins
    "alpha_pattern": {"v_proj": 12, "layers.1.self_attn.v_proj": 2},
}
RANKED = {"q_proj": 4, "layers.1.mlp.up_proj": 6, "layers.0.mlp.up_proj": 2}
# What PEFT is told, what the trainer says of it, and fields that are found.
DERIVED = {
    "all linear layers": (
        ALL,
        {"task_type": "CAUSAL_LM", "lora_dropout": "0.05"},
        {"r": 8, "rank_pattern": {}, "lora_dropout": 0.05, "target_modules": set(ATTENTION + MLP)},
    ),
    "rank pattern with rslora": (
        ALL | {"rank_pattern": RANKED, "alpha_pattern": {"v_proj": 12}, "use_rslora": True},
        {"use_rslora": "true", "alpha_pattern": '{"v_proj": 12}'},
        {"r": 8, "use_rslora": True},
    ),
    "dora, embedding, saved module": (
        ATTENDED | EMBEDDED | {"use_dora": True},
        {},
        EMBEDDED | {"use_dora": True, "target_modules": {*ATTENTION, "embed_tokens"}},
    ),
    "lora_bias": (ATTENDED | {"lora_bias": True}, {}, {"lora_bias": True}),
    "trained biases": (
        ATTENDED | {"bias": "lora_only"},
        {"bias": "lora_only"},
        {"bias": "lora_only"},
    ),
    "trainable tokens": (
        ATTENDED | {"trainable_token_indices": [3, 5, 8]},
        {"trainable_token_indices": "[3, 5, 8]"},
        {"trainable_token_indices": [3, 5, 8]},
    ),
    "patterns as they are given": (
        ORDERED,
        {"peft_config": json.dumps(ORDERED | {"peft_type": "LORA", "task_type": "CAUSAL_LM"})},
        {"alpha_pattern": ORDERED["alpha_pattern"]},
    ),
    "fused experts": (FUSED, {"num_experts": "4"}, {"target_modules": set(ATTENTION)}),
    "wrapped modules": (
        ATTENDED | {"r": 3},
        {},
        {"r": 3, "target_modules": set(ATTENTION)},
    ),
}


@pytest.mark.parametrize("case", DERIVED)
def test_a_configuration_is_derived_from_the_trainers_own_parameters(case, bases, tmp_path):
    config, metadata, fields = DERIVED[case]
    kind = "qwen3-moe" if config is FUSED else "llama" if case == "wrapped modules" else "qwen2"
    name = "run1" if case == "wrapped modules" or "modules_to_save" in config else "default"
    model = trained(bases.make(kind), LoraConfig(task_type="CAUSAL_LM", **config), name)
    tensors = {key: value for key, value in model.named_parameters() if value.requires_grad}
    if case == "wrapped modules":
        tensors = {wrapped(key): value for key, value in tensors.items()}
    about = {"base_model_name_or_path": bases.path(kind), "lora_alpha": "16"}
    with ranks_of(tensors, about | metadata, 5 if case == "wrapped modules" else 4) as target:
        pulled = pull(target, tmp_path)
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_alpha": 16, "bias": "none"}
    fields = told | {"base_model_name_or_path": bases.path(kind)} | fields
    saved = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    check(pulled, saved, fields, bases.make(kind), logits(model))
    if "alpha_pattern" in fields:
        found = PeftConfig.from_pretrained(pulled).alpha_pattern
        assert list(found) == list(fields["alpha_pattern"])


# ----------------------------------------------------- adapters of real shape, by nixl-fetch serve


@pytest.mark.parametrize(
    ("shape", "model", "targets"),
    [
        ("dense", lambda: without_memory("llama-3.1-8b"), ATTENTION + MLP),
        ("moe", lambda: linear_skeleton(expert_layers(REAL["qwen3-30b-a3b"])), ATTENTION + MLP),
        ("moe-fused", lambda: without_memory("qwen3-30b-a3b"), ATTENTION),
    ],
)
def test_a_real_shape_is_what_peft_makes(shape, model, targets, tmp_path):
    """The layers that PEFT makes from the configuration have the file's names and shapes."""
    with serve(8, tmp_path, "--adapter-shape", shape) as target:
        pulled = pull(target, tmp_path, "--check-pattern")
    config = PeftConfig.from_pretrained(pulled)
    assert config.r == 16 and config.target_modules == set(targets)
    adapted = PeftModel(model(), config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    made = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    with safe_open(pulled / WEIGHTS, "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}
    assert found == {name: list(tensor.shape) for name, tensor in made.items()}
