#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_quantize.py [MATRICES]

Weights rounded to fp8 on a GPU: the kernels' bytes and scales are those of the same weights on the
CPU, for every format, dtype and odd shape, blocks with NaN among them. Then how long it takes: one
launch over MATRICES (default 768) of 1024 x 2048, beside a device copy of the same bytes.

Needs PyTorch with CUDA, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77
without a GPU. A line for each format and time, and last "N passed, N failed".
"""

from __future__ import annotations

import sys
import time
from typing import Any

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FORMATS: dict[str, Any] = {
    "block": "fp8",
    "powers of two": {**BLOCK, "scale_fmt": "ue8m0"},
    "64 x 32": {**BLOCK, "weight_block_size": [64, 32]},
    "96 x 40": {**BLOCK, "weight_block_size": [96, 40]},
    "channel": {"quant_method": "compressed-tensors"},
}
SHAPES = ((1, 1), (127, 129), (128, 128), (130, 513), (300, 200), (1024, 2048), (2048, 96))
NAN = 127, 128  # sizes of a matrix with one


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    root = torch.nn.Module()
    for name, value in tensors.items():
        child = torch.nn.Module()
        child.register_parameter("weight", torch.nn.Parameter(value))
        root.add_module(name, child)
    return root


def weights() -> dict[str, torch.Tensor]:
    out = {}
    for at, shape in enumerate(SHAPES):
        spread = 10 ** torch.randn(shape[0], 1)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            out[f"m{at}{str(dtype)[-2:]}"] = (torch.randn(shape) * 0.02 * spread).to(dtype)
    levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    levels = levels[levels.isfinite()]
    middles = (levels[:126] + levels[1:127]) / 2
    ties = torch.cat([levels, middles, -middles]).repeat(64)[: 128 * 128].view(128, 128)
    out["ties"] = torch.cat([ties * 2.0**-at for at in range(6)]).bfloat16()
    out["zero"], out["small"] = torch.zeros(200, 200), torch.full((128, 128), -1e-40)
    out["nan"], out["inf"] = torch.randn(NAN), torch.randn(NAN).bfloat16()
    out["nan"][3, 7], out["inf"][100, 127] = float("nan"), float("-inf")
    return out


def published(tensors: dict[str, torch.Tensor], device: str, quantize: Any) -> dict[str, Any]:
    """What a server of these publishes, by name, as it lies in its results."""
    from fanin.torch import WeightServer

    model = module_of({name: one.to(device) for name, one in tensors.items()})
    with WeightServer(model, base_port=0, quantize=quantize) as server:
        server.publish(0)
        parameters = server._runs["full:0"].parameters
        boxes = [(path, shard.name, values) for path, shard, values in parameters.tensors()]
        return {name: values[0].cpu().view(torch.uint8) for _, name, values in boxes}


def compare(quantize: Any) -> str:
    """What differs, or ""."""
    torch.manual_seed(0)
    tensors = weights()
    wanted, got = (published(tensors, one, quantize) for one in ("cpu", "cuda"))
    bad = [
        f"{name}: {int((got[name] != one).sum())} of {one.numel()} bytes"
        for name, one in wanted.items()
        if not torch.equal(got[name], one)
    ]
    return f"of {len(wanted)} tensors {len(bad)} differ: {', '.join(bad[:3])}" if bad else ""


def timed(work: Any, turns: int = 20) -> float:
    """Seconds of one turn."""
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(turns):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / turns


def times(count: int, quantize: Any) -> str:
    """How long the step takes, beside a copy that reads and writes as many bytes."""
    from fanin.torch import WeightServer

    whole = torch.empty(count, 1024, 2048, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    model = module_of({f"m{at}": whole[at] for at in range(count)})
    with WeightServer(model, base_port=0, quantize=quantize) as server:
        server.publish(0)
        stages = server._runs["full:0"].parameters.stages

        def step() -> None:
            stages.ahead()
            stages.fill()

        elements = whole.numel()
        halves = torch.empty(2, elements * 3 // 2, dtype=torch.uint8, device="cuda")
        took, copied = [], []
        for _ in range(5):  # by turns
            took.append(timed(step))
            copied.append(timed(lambda: halves[0].copy_(halves[1])))
        took.sort(), copied.sort()
        start = time.perf_counter()
        step()
        asked = time.perf_counter() - start
        return (
            f"{took[2] * 1e12 / elements:.3f} ms per 1e9 elements, "
            f"{elements * 3 / took[2] / 1e9:.0f} GB/s; a copy {elements * 3 / copied[2] / 1e9:.0f} "
            f"GB/s: {copied[2] / took[2]:.2f} of it; the CPU is held for {asked * 1e3:.2f} ms"
        )


def main() -> int:
    """Runs all of them."""
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 768
    failed = 0
    for name, quantize in FORMATS.items():
        why = compare(quantize)
        failed += bool(why)
        print(f"{'failed' if why else 'passed'}  {name}  {why}".rstrip(), flush=True)
    for name in ("block", "powers of two", "channel"):
        print(f"time    {name}: {times(count, FORMATS[name])}", flush=True)
    print(f"{len(FORMATS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
