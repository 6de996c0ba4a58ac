# SPDX-License-Identifier: Apache-2.0
"""A trainer whose LoRA adapter can be pulled at every step: PyTorch FSDP2, PEFT, fanin.

    torchrun --nproc-per-node 2 trainer.py --info /tmp/demo
    python engine.py /tmp/demo --steps 5                        # in another terminal

Without --model it trains a tiny model with random weights on the CPU. The five lines that make
a trainer of yours such a trainer are marked.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from fanin.torch import AdapterServer  # 1 of 5
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


def base_model(name: str | None) -> torch.nn.Module:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config = AutoConfig.for_model("qwen2", name_or_path="tiny", **tiny, **heads)
    return AutoModelForCausalLM.from_config(config)


def sharded(name: str | None, device: str) -> torch.nn.Module:
    """The model with LoRA, cut by FSDP2 over all ranks."""
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base_model(name), lora).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(options: argparse.Namespace, device: str) -> None:
    model = sharded(options.model, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    vocabulary = model.config.vocab_size

    server = AdapterServer(model, run="0", base_port=options.base_port)  # 2 of 5
    server.publish(0)  # 3 of 5
    if options.info:
        server.write_info(options.info)  # engines may also be told server.addresses

    for step in range(1, options.steps + 1):
        tokens = torch.randint(vocabulary, (4, 32), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        with server.updating(step):  # 4 of 5
            optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        time.sleep(options.pause)
    server.close()  # 5 of 5; at exit it happens by itself


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or directory for transformers; default: a tiny one")
    parser.add_argument(
        "--info", help="directory for nixl_info.json, where engines look for the ranks"
    )
    parser.add_argument("--base-port", type=int, default=6000, help="0: any free ports")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds after each step")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
