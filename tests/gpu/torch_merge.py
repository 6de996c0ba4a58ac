#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_merge.py [LAYERS]

A LoRA adapter merged into its base on a GPU: the bytes are those of PEFT's merge_and_unload() on
the same GPU, for linear layers and stacked experts, BF16 and F32. Then how long it takes: LAYERS
(default 8) of what one of eight ranks holds of Qwen3-30B-A3B, rank 16, beside a device copy of what
is written.

Needs PyTorch with CUDA, PEFT, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status
77 without. A line for each kind and time, and last "N passed, N failed".
"""

from __future__ import annotations

import copy
import sys
from typing import Any

try:
    import peft
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

RANKS = 8
LINEAR = {"q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096)}
EXPERTS = {"gate_up": (128 // RANKS, 1536, 2048), "down": (128 // RANKS, 2048, 768)}


class Experts(torch.nn.Module):
    """Stacked, as transformers keeps them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) * 0.02))


class Layer(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        for name, (out, inside) in LINEAR.items():
            self.add_module(name, torch.nn.Linear(inside, out // rows, bias=False))
        self.experts = Experts(EXPERTS)


def adapted(layers: int, dtype: torch.dtype, targets: list[str], parameters: list[str]) -> Any:
    """A PEFT model of what one of the ranks holds."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        base = torch.nn.ModuleDict({f"l{at}": Layer(RANKS) for at in range(layers)}).to(dtype)
        config = peft.LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=targets or None,
            target_parameters=parameters or None,
        )
        model = peft.get_peft_model(base, config)
        with torch.no_grad():
            for path, param in model.named_parameters():
                if "lora_" in path:
                    param.normal_(0, 0.05)
    return model.cuda()


def served(model: Any) -> Any:
    from fanin.torch import WeightServer

    server = WeightServer(model, base_port=0, merge=True)
    server.publish(0)
    return server


def differing(dtype: torch.dtype) -> list[str]:
    """Names of the tensors that are not PEFT's, bit for bit."""
    model = adapted(1, dtype, list(LINEAR), [f"experts.{name}" for name in EXPERTS])
    wanted = copy.deepcopy(model).merge_and_unload().state_dict()
    with served(model) as server:
        held = {shard.name: values for shard, _, values in server._runs["full:0"].parameters.held()}
        torch.cuda.synchronize()
        if held.keys() != wanted.keys():
            return sorted(held.keys() ^ wanted.keys())
        return [name for name in wanted if not torch.equal(held[name], wanted[name])]


def milliseconds(call: Any, repeats: int = 10) -> float:
    """The median, on the GPU's clock."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[repeats // 2]


def timed(layers: int, what: str, targets: list[str], parameters: list[str]) -> None:
    model = adapted(layers, torch.bfloat16, targets, parameters)
    with served(model) as server:
        run = server._runs["full:0"].parameters
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        merge = milliseconds(run.stages.fill)
        peak = torch.cuda.max_memory_allocated() - before
        own = {param.data_ptr() for param in model.parameters()}
        made = [values for _, _, values in run.held() if values.data_ptr() not in own]
        size = sum(values.numel() * values.element_size() for values in made)
        source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        copied = milliseconds(lambda: target.copy_(source))
    print(
        f"time {what}, {layers} layers: merged {size / 1e6:.0f} MB in {merge:.2f} ms, "
        f"{merge / copied:.1f} x a device copy ({copied:.2f} ms); temporary {peak / 1e6:.0f} MB"
    )


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        sys.exit(77)
    failed = 0
    for dtype in (torch.bfloat16, torch.float32):
        wrong = differing(dtype)
        failed += bool(wrong)
        print(f"{'not ' if wrong else ''}ok {dtype}: {', '.join(wrong) or 'bytes of PEFT'}")
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    timed(layers, "attention", list(LINEAR), [])
    timed(layers, "experts", [], [f"experts.{name}" for name in EXPERTS])
    print(f"{2 - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
