#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adapters pulled by nixl-fetch, judged by PEFT and transformers.

Each case makes a small model and an adapter, or lets the stand-in trainer make one, serves it
cut over several ranks, pulls it, and loads what was pulled. NIXL_FETCH names the tool.
"""
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen3MoeConfig,
)

FETCH = os.environ["NIXL_FETCH"]


def free_ports(count):
    """The first of count neighbouring ports on which nobody listens."""
    for base in range(21000, 30000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    listener = stack.enter_context(socket.socket())
                    listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise RuntimeError("no free ports between 21000 and 30000")


@contextlib.contextmanager
def ranks(world_size, *arguments):
    """Trainer ranks that hold an adapter; yields the tool's arguments that name them."""
    port = free_ports(world_size)
    target = [f"127.0.0.1:{port}", "--world-size", str(world_size)]
    server = subprocess.Popen(
        [FETCH, "serve", "--base-port", str(port), "--world-size", str(world_size), *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while subprocess.run([FETCH, "ping", *target], capture_output=True).returncode != 0:
            if server.poll() is not None:
                raise RuntimeError("serve ended: " + server.stderr.read())
            if time.monotonic() > deadline:
                raise RuntimeError("the ranks do not answer")
            time.sleep(0.1)
        yield target
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def pull(target, directory, *arguments):
    subprocess.run(
        [FETCH, "pull", *target, "--run", "0", "--out", str(directory), *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def qwen2(**changes):
    options = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    options.update(changes)
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(Qwen2Config(**options), dtype=torch.bfloat16).eval()


def qwen3_moe():
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def trained(model, config, name="default"):
    """The model with an adapter whose weights all matter."""
    adapted = get_peft_model(model, config, adapter_name=name).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.2)
    return adapted


def logits(model):
    tokens = torch.arange(1, 33).reshape(1, 32)
    with torch.no_grad():
        return model(input_ids=tokens).logits


def round_trip(make_model, config, world_size, scratch):
    """PEFT saves, ranks serve, the pulled directory loads and computes the same."""
    saved, pulled = scratch / "saved", scratch / "pulled"
    original = trained(make_model(), config)
    original.save_pretrained(saved)
    with ranks(world_size, "--adapter", str(saved)) as target:
        pull(target, pulled)

    expected = load_file(saved / "adapter_model.safetensors")
    found = load_file(pulled / "adapter_model.safetensors")
    assert sorted(found) == sorted(expected), "other keys"
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), f"other values of {key}"

    ours, theirs = (PeftConfig.from_pretrained(d).to_dict() for d in (pulled, saved))
    for field in theirs:
        if field != "inference_mode":
            assert ours[field] == theirs[field], f"{field}: {ours[field]} != {theirs[field]}"

    base = make_model()
    before = logits(base)
    loaded = PeftModel.from_pretrained(base, pulled).eval()
    after = logits(loaded)
    assert torch.equal(after, logits(original)), "other logits than the trainer's model"
    assert not torch.equal(after, before), "the adapter changes nothing"


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def dense_adapter(scratch):
    round_trip(qwen2, LoraConfig(r=8, lora_alpha=16, target_modules=ATTENTION + MLP), 4, scratch)


def fewer_rows_than_ranks(scratch):
    round_trip(qwen2, LoraConfig(r=3, lora_alpha=5, target_modules=ATTENTION), 8, scratch)


def patterns_and_rslora(scratch):
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=ATTENTION,
        rank_pattern={"q_proj": 4},
        alpha_pattern={"q_proj": 6},
        use_rslora=True,
        lora_dropout=0.1,
    )
    round_trip(qwen2, config, 2, scratch)


def saved_module_and_embedding(scratch):
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=ATTENTION + ["embed_tokens"], modules_to_save=["lm_head"]
    )
    round_trip(qwen2, config, 4, scratch)


def fused_experts(scratch):
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    round_trip(qwen3_moe, config, 4, scratch)


def derived_configuration(scratch):
    """Without a configuration of the trainer's: what the tool derives, PEFT accepts."""
    pulled = scratch / "pulled"
    with ranks(4, "--model", "qwen2.5-0.5b", "--r", "8") as target:
        pull(target, pulled, "--check-pattern")
    config = PeftConfig.from_pretrained(pulled)
    assert config.r == 8 and config.lora_alpha == 16
    assert sorted(config.target_modules) == sorted(ATTENTION + MLP)
    assert config.base_model_name_or_path, "no base model is named"

    base = qwen2(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    )
    loaded = PeftModel.from_pretrained(base, pulled, autocast_adapter_dtype=False)
    found = load_file(pulled / "adapter_model.safetensors")
    parameters = {
        key.replace(".default.", "."): value
        for key, value in loaded.named_parameters()
        if "lora_" in key
    }
    assert sorted(parameters) == sorted(found), "PEFT has other tensors than the file"
    for key, tensor in found.items():
        loaded_bits = parameters[key].detach().contiguous().view(torch.uint8)
        assert torch.equal(loaded_bits, tensor.view(torch.uint8)), f"PEFT changed {key}"


CASES = [
    dense_adapter,
    fewer_rows_than_ranks,
    patterns_and_rslora,
    saved_module_and_embedding,
    fused_experts,
    derived_configuration,
]


def main():
    failed = 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                case(pathlib.Path(scratch))
                print(f"ok      {case.__name__}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED  {case.__name__}", flush=True)
                traceback.print_exc()
    print(f"{len(CASES) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
