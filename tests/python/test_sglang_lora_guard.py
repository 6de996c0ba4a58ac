# SPDX-License-Identifier: Apache-2.0
"""An adapter that has no place in SGLang's model is not loaded, and nothing else is kept out."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from fanin.sglang import lora_guard

LAYER = "model.layers.0"
QKV = {"total_num_heads": 4, "total_num_kv_heads": 1, "head_size": 32, "output_size": 256}


class Manager:
    """SGLang's LoRAManager of a model of two layers, whose second another stage has."""

    def __init__(self) -> None:
        self.target_modules = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
        linear = {"input_size": 128, "output_size": 128}
        first = {
            f"{LAYER}.self_attn.qkv_proj": Thing(base_layer=Thing(input_size=128, **QKV)),
            f"{LAYER}.self_attn.o_proj": Thing(base_layer=Thing(**linear)),
            f"{LAYER}.mlp.experts": Thing(base_layer=Thing()),
            f"{LAYER}.mixer.in_proj": Thing(base_layer=Thing(**linear)),
        }
        self.lora_modules = [first, {}]
        self.lm_head_module = Thing(base_layer=Thing(org_vocab_size=300, embedding_dim=128))
        names = (*first, f"{LAYER}.self_attn.norm", "model.embed_tokens", "lm_head")
        self.base_model = Thing(named_modules=lambda: [(name, None) for name in names])

    def create_lora_update_result(self, success: bool, error_message: str = "") -> Any:
        return Thing(success=success, error_message=error_message)


def load(directory: Path, module: str, into: int, out: int, ours: bool = True) -> Any:
    shapes = {"A": [8, into], "B": [out, 8]}
    names = {f"base_model.model.{module}.lora_{x}.weight": shape for x, shape in shapes.items()}
    header: dict[str, Any] = {name: {"dtype": "F32", "shape": s} for name, s in names.items()}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    if ours:
        (directory / "fanin.json").write_text("{}")
    ref = Thing(lora_path=str(directory))
    return lora_guard.load(lambda manager, ref: Thing(success=True), Manager(), ref)


@pytest.mark.parametrize(
    ("module", "into", "out"),
    [
        (f"{LAYER}.self_attn.q_proj", 128, 128),
        (f"{LAYER}.self_attn.k_proj", 128, 32),
        (f"{LAYER}.self_attn.qkv_proj", 128, 192),
        ("model.language_model.layers.0.self_attn.o_proj", 128, 128),  # SGLang's by its number
        ("model.layers.1.self_attn.q_proj", 999, 128),  # of another stage
        (f"{LAYER}.mlp.experts.3.gate_proj", 7, 7),
        (f"{LAYER}.mixer.gate_proj", 7, 7),
        ("lm_head", 128, 300),
        ("model.unembed_tokens", 128, 300),
    ],
)
def test_what_fits(tmp_path: Path, module: str, into: int, out: int) -> None:
    assert load(tmp_path, module, into, out).success


@pytest.mark.parametrize(
    ("module", "into", "out", "why"),
    [
        ("model.layers.98.self_attn.q_proj", 128, 128, "there is no layers.98"),
        (f"{LAYER}.mlp.down_proj", 128, 128, "there is no layers.0.mlp.down_proj"),
        (f"{LAYER}.self_attn.norm", 128, 128, "is without LoRA"),
        ("model.embed_tokens", 300, 128, "embed_tokens is without LoRA"),
        ("visual.blocks.0.proj", 128, 128, "there is no visual"),
        (f"{LAYER}.self_attn.k_proj", 128, 64, "gives 32"),
        (f"{LAYER}.self_attn.o_proj", 64, 128, "takes 128"),
        ("lm_head", 128, 256, "gives 300"),
    ],
)
def test_what_has_no_place(tmp_path: Path, module: str, into: int, out: int, why: str) -> None:
    answer = load(tmp_path, module, into, out)
    assert not answer.success and why in answer.error_message
    assert "have no place in this engine" in answer.error_message


def test_directories_of_others_are_sglangs_own(tmp_path: Path) -> None:
    assert load(tmp_path, "model.layers.98.q_proj", 1, 1, ours=False).success


def test_before_the_model_has_its_modules(tmp_path: Path) -> None:
    (tmp_path / "fanin.json").write_text("{}")
    ref = Thing(lora_path=str(tmp_path))
    assert lora_guard.load(lambda manager, ref: "loaded", Thing(), ref) == "loaded"
