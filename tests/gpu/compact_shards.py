#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""compact_shards.py [--device cuda|cpu] [--layers N] [--experts N]

fanin.torch.compact() under FSDP2 over NCCL, a GPU a rank: two equal models with a parameter for
each expert are trained side by side, one of them compacted after the first step. Their shards must
be equal to the last bit after each step; the compacted one lies in few allocations, which are
counted in PyTorch's own list; while it moves no more is used than one arena above what it was.

Needs PyTorch and the package (PYTHONPATH, FANIN_LIBRARY); exit status 77 without GPUs. With
--device cpu it runs on gloo, two ranks, in small, and counts nothing. The last line is "ok: ..."
and figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
from fanin.torch import compact
from fanin.torch._segments import count_segments

ARENA = 64 << 20


class Layer(torch.nn.Module):
    """All experts are asked, so that all have gradients."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden, experts, bias=False)
        self.up = torch.nn.ModuleList(
            torch.nn.Linear(hidden, width, bias=False) for _ in range(experts)
        )
        self.down = torch.nn.ModuleList(
            torch.nn.Linear(width, hidden, bias=False) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        out = x
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            out = out + shares[..., number : number + 1] * down(up(x).relu())
        return out


def make(given: argparse.Namespace, device: str, size: int) -> Any:
    torch.manual_seed(5)
    hidden, width = (512, 768) if device == "cuda" else (32, 33)
    layers = [Layer(given.experts, hidden, width).to(device) for _ in range(given.layers)]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    mesh = init_device_mesh(device, (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), hidden


def shards(model: Any) -> list[torch.Tensor]:
    return [one._local_tensor for one in model.parameters()]


def segments(model: Any) -> int:
    held = [one for one in shards(model) if one.is_cuda and one.numel()]
    return count_segments([(one.device.index, one.data_ptr()) for one in held])


def step(model: Any, optimizer: Any, device: str, hidden: int, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(4, hidden, generator=drawn).to(device, torch.bfloat16)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(rank: int, size: int, given: argparse.Namespace, rendezvous: str) -> None:
    device = given.device
    if device == "cuda":
        torch.cuda.set_device(rank)
        # Gradients that are summed in one order only.
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    (plain, hidden), (packed, _) = make(given, device, size), make(given, device, size)
    both = [(one, torch.optim.AdamW(one.parameters(), lr=0.01)) for one in (plain, packed)]
    told: dict[str, Any] = {"ranks": size, "tensors": len(shards(packed))}
    for number in range(4):
        for model, optimizer in both:
            step(model, optimizer, device, hidden, 10 * number + rank)
        for one, other in zip(shards(plain), shards(packed), strict=True):
            assert torch.equal(one, other), f"rank {rank}: another value after step {number}"
        if number == 0:
            for model, _ in both:
                model.reshard()
            if device == "cuda":
                told["segments before"] = segments(packed)
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            begun = time.perf_counter()
            done = compact(packed, arena_bytes=ARENA)
            told["ms"] = round(1000 * (time.perf_counter() - begun))
            told["arenas"], told["MB"] = done.arenas, done.bytes >> 20
            if device == "cuda":
                told["segments after"] = segments(packed)
                more = torch.cuda.max_memory_allocated() - before
                told["MB more meanwhile"] = more >> 20
                assert more <= ARENA + (1 << 20), f"rank {rank}: {more} bytes more"
                assert told["segments after"] <= done.arenas + done.left + 1
    dist.barrier()
    if rank == 0:
        print("ok: " + ", ".join(f"{name} {value}" for name, value in told.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    arguments = parser.parse_args()
    ranks = 2
    if arguments.device == "cuda":
        ranks = torch.cuda.device_count()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if ranks == 0:
        print("skipped: no GPU")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (ranks, arguments, f"{folder}/rendezvous"), nprocs=ranks)
