# SPDX-License-Identifier: Apache-2.0
"""A whole model, trained by FSDP2, into a running vLLM after each step; one machine or several.

    VLLM_PLUGINS=fanin VLLM_SERVER_DEV_MODE=1 FANIN_ALLOW_TRAINERS=127.0.0.1 \\
        vllm serve Qwen/Qwen3-0.6B --weight-transfer-config '{"backend": "fanin"}'
    torchrun --nproc-per-node 2 weights.py --model Qwen/Qwen3-0.6B --engine http://127.0.0.1:8000

It trains on random tokens, so what the engine says gets worse; that it changes is the point. The
six lines that make a trainer of yours such a trainer are marked.
"""

from __future__ import annotations

import argparse
import json
import urllib.request

import torch
import torch.distributed as dist
from fanin import FaninError
from fanin.sync import Registry  # 1 of 6
from fanin.torch import WeightServer  # 2 of 6
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


def sharded(name: str, device: str) -> torch.nn.Module:
    """The model, cut by FSDP2 over all ranks."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def completion(engine: str, prompt: str | list[int]) -> str:
    """What the engine says now: its text, to token ids their like."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{engine}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    # An engine is in the same cluster: no proxy of the environment is asked.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=60) as answer:
        choice = json.load(answer)["choices"][0]
        return str(choice["text" if isinstance(prompt, str) else "token_ids"])


def train(options: argparse.Namespace, device: str) -> None:
    model = sharded(options.model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    vocabulary = model.config.vocab_size

    server = WeightServer(
        model, run="0", base_port=options.base_port, allow=options.allow
    )  # 3 of 6
    server.publish(0)  # 4 of 6
    # One rank tells the engines; each engine's workers pull from all ranks.
    registry = Registry(server.addresses, run="0") if dist.get_rank() == 0 else None
    for engine in options.engine if registry is not None else ():
        registry.add(engine)

    for step in range(1, options.steps + 1):
        tokens = torch.randint(vocabulary, (2, 32), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        with server.updating(step):  # 5 of 6
            optimizer.step()
        optimizer.zero_grad()
        failed: list[str | None] = [None]
        if registry is not None:
            try:
                took = registry.sync(step).seconds  # 6 of 6: all engines have the step and generate
            except FaninError as error:
                failed[0] = str(error)
            else:
                print(f"step {step}: loss {loss.item():.4f}, engines in {took:.2f} s", flush=True)
                for engine in options.engine:
                    text = completion(engine, options.ids or options.prompt)
                    print(f"  {engine}: {text}", flush=True)
        dist.broadcast_object_list(failed)  # the other ranks wait here, and end with rank 0
        if failed[0]:
            raise SystemExit(f"weights.py: {failed[0]}")
    dist.barrier()  # no rank ends before all engines have read the last step from it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the engine's: a name or a directory")
    parser.add_argument("--engine", action="append", required=True, help="http://HOST:PORT; again")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--ids", type=int, nargs="+", help="a prompt of token ids instead")
    parser.add_argument("--base-port", type=int, default=6000, help="0: any free ports")
    parser.add_argument("--allow", help="networks of engines on other hosts, as 10.0.0.0/8")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    try:
        train(options, device)
    except FaninError as error:  # names the engine or the rank, and what to do
        raise SystemExit(f"weights.py: {error}") from error
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
