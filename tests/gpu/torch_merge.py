#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_merge.py [LAYERS]

A LoRA adapter merged into its base on a GPU: the bytes are those of PEFT's merge_and_unload() on
the same GPU, for linear layers, an embedding and stacked experts; bases of BF16 and F32, factors of
both, and products that are rounded to TF32. "fused" says how many kinds of tensors the kernel made
with PEFT's bytes; the others were made by PEFT's functions. Then how long it takes: LAYERS (default
8) of what one of eight ranks holds of Qwen3-30B-A3B, rank 16, beside a device copy of what is
written. "PEFT" is the same without the kernel. Last the kernel alone by sizes of its tiles, beside
the product alone.

Needs PyTorch with CUDA, PEFT, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status
77 without. A line for each kind and time, and last "N passed, N failed".
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

try:
    import peft
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

RANKS = 8
WORDS = 8192
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
        self.words = torch.nn.Embedding(WORDS // rows, 2048)


def adapted(
    layers: int,
    dtype: torch.dtype,
    targets: list[str],
    parameters: list[str],
    wide: bool = True,
) -> Any:
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
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=wide)
        with torch.no_grad():
            for path, param in model.named_parameters():
                if "lora_" in path:
                    param.normal_(0, 0.05)
    return model.cuda()


def served(model: Any, quantize: str | None = None) -> Any:
    from fanin.torch import Slice, WeightServer

    def names(name: str, shape: tuple[int, ...]) -> Any:
        """Experts one by one, which are rounded to fp8 as matrices."""
        if len(shape) < 3 or quantize is None:
            return name
        return [Slice(f"{name}.{at}.weight", (at,)) for at in range(shape[0])]

    server = WeightServer(model, base_port=0, merge=True, quantize=quantize, names=names)
    server.publish(0)
    return server


def differing(dtype: torch.dtype, wide: bool) -> list[str]:
    """Names of the tensors that are not PEFT's, bit for bit."""
    stacks = [f"experts.{name}" for name in EXPERTS]
    model = adapted(1, dtype, [*LINEAR, "words"], stacks, wide)
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


def timed(
    layers: int, what: str, targets: list[str], parameters: list[str], quantize: str | None = None
) -> None:
    from fanin.torch import _merge

    model = adapted(layers, torch.bfloat16, targets, parameters)
    alone = torch.cuda.memory_allocated()
    with served(model, quantize) as server:
        run = server._runs["full:0"].parameters
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - alone
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        merge = milliseconds(run.stages.fill)
        peak = torch.cuda.max_memory_allocated() - before
        began = time.perf_counter()
        run.stages.fill()
        held = 1e3 * (time.perf_counter() - began)
        can_fuse = _merge.can_fuse
        _merge.can_fuse = lambda base, left, right: False
        followed = milliseconds(run.stages.fill)
        _merge.can_fuse = can_fuse
        own = {param.data_ptr() for param in model.parameters()}
        made = [values for _, _, values in run.held() if values.data_ptr() not in own]
        size = sum(values.numel() * values.element_size() for values in made)
        source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        copied = milliseconds(lambda: target.copy_(source))
    print(
        f"time {what}, {layers} layers: merged {size / 1e6:.0f} MB in {merge:.2f} ms, "
        f"{merge / copied:.1f} x a device copy ({copied:.2f} ms); the CPU was held {held:.2f} ms; "
        f"PEFT {followed:.2f} ms; memory kept {kept / 1e6:.0f} MB, temporary {peak / 1e6:.0f} MB"
    )


def kernels(what: str, experts: int, rows: int, columns: int, rank: int = 16) -> None:
    """The kernel alone by its tiles, beside the product alone and a copy."""
    from fanin.torch import _fused

    base = torch.randn(experts, rows, columns, device="cuda").bfloat16()
    left, right = (torch.randn(experts, rank, n, device="cuda") for n in (rows, columns))
    left = left.transpose(1, 2).contiguous().transpose(1, 2) if experts == 1 else left
    out, product = torch.empty_like(base), torch.empty(experts, rows, columns, device="cuda")
    copied = milliseconds(lambda: out.copy_(base))
    turned = left.transpose(1, 2)
    times = {"product": milliseconds(lambda: torch.bmm(turned, right, out=product))}
    kept = _fused._ROWS, _fused._COLUMNS, _fused._WARPS
    for tile in ((64, 128, 4), (64, 64, 4), (32, 128, 4), (128, 128, 8), (64, 256, 8)):
        _fused._ROWS, _fused._COLUMNS, _fused._WARPS = tile
        times[str(tile)] = milliseconds(lambda: _fused.fuse(base, left, right, 2.0, True, out))
    _fused._ROWS, _fused._COLUMNS, _fused._WARPS = kept
    told = ", ".join(f"{name} {one:.3f} ms ({one / copied:.1f} x)" for name, one in times.items())
    print(f"kernel {what}: copy {copied:.3f} ms, {told}")


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        sys.exit(77)
    from fanin.torch import _fused

    failed, kinds = 0, 0
    for dtype in (torch.bfloat16, torch.float32):
        for wide in (True, False):
            for tf32 in (False, True):
                torch.backends.cuda.matmul.allow_tf32 = tf32
                _fused._proven.clear()
                wrong = differing(dtype, wide)
                failed, kinds = failed + bool(wrong), kinds + 1
                fused = list(_fused._proven.values())
                print(
                    f"{'not ' if wrong else ''}ok {dtype}, factors of "
                    f"{'F32' if wide else 'the same'}{', TF32' if tf32 else ''}: "
                    f"{', '.join(wrong) or 'bytes of PEFT'}; fused {sum(fused)} of {len(fused)}"
                )
    torch.backends.cuda.matmul.allow_tf32 = False
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    timed(layers, "attention", list(LINEAR), [])
    stacks = [f"experts.{name}" for name in EXPERTS]
    timed(layers, "experts", [], stacks)
    timed(layers, "attention and experts", list(LINEAR), stacks)
    timed(layers, "attention and experts, then fp8", list(LINEAR), stacks, "fp8")
    kernels("gate_up", *EXPERTS["gate_up"])
    kernels("q", 1, *LINEAR["q"])
    print(f"{kinds - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
