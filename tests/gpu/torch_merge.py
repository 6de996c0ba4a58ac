#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_merge.py [LAYERS [RANKS]]

A LoRA adapter merged into its base on a GPU: the bytes are those of PEFT's merge_and_unload() on
the same GPU, for linear layers, an embedding and stacked experts; bases of BF16 and F32, factors of
both, and products that are rounded to TF32; at later steps too, when factors, the scale and
addresses are others. "fused" says how many kinds of tensors the kernel made with PEFT's bytes; the
others were made by PEFT's functions.

Then how long it takes: LAYERS (default 8) of what one of RANKS ranks (8) holds of Qwen3-30B-A3B
(48), rank 16, beside a device copy of what is written, in turns; medians and the worst. "GPU" is a
step for which all launches wait already, "Python" what the calls take while the GPU is idle and
while it is busy, "PEFT" the same without the kernel, whose bytes are compared. "FSDP2" is a mesh of
one rank, whose factors are gathered. Last the kernel alone by sizes of its tiles, beside the
product alone. "host" is the host's speed: a million additions in Python.

Under torchrun (RANK, WORLD_SIZE and so on are set) the ranks share a model that is so many times as
large, by FSDP2 over NCCL, a GPU each: the bytes of each are those of the whole model's
merge_and_unload(), and the times are those of rank 0.

Needs PyTorch with CUDA, PEFT, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status
77 without. A line for each kind and time, and last "N passed, N failed".
"""

from __future__ import annotations

import copy
import os
import sys
import time
from typing import Any

try:
    import peft
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

RANKS = int(sys.argv[2]) if len(sys.argv) > 2 else 8
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
SHARE = RANKS // WORLD
"""How many such models are the whole one."""
WORDS = 8192
LINEAR = {"q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096)}
EXPERTS = {"gate_up": (128 // SHARE, 1536, 2048), "down": (128 // SHARE, 2048, 768)}


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
        base = torch.nn.ModuleDict({f"l{at}": Layer(SHARE) for at in range(layers)}).to(dtype)
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


def results(server: Any) -> dict[str, torch.Tensor]:
    """Each published tensor, where it lies."""
    torch.cuda.synchronize()
    return {shard.name: values for shard, _, values in server._runs["full:0"].parameters.held()}


def differing(dtype: torch.dtype, wide: bool) -> list[str]:
    """Names of the tensors that are not PEFT's, bit for bit, of three steps."""
    stacks = [f"experts.{name}" for name in EXPERTS]
    model = adapted(2, dtype, [*LINEAR, "words"], stacks, wide)
    base = {name: param.clone() for name, param in model.named_parameters() if "lora" not in name}
    wrong = []
    with served(model) as server:
        for step in range(3):
            wanted = copy.deepcopy(model).merge_and_unload().state_dict()
            server.publish(step + 1)
            held = results(server)
            if held.keys() != wanted.keys():
                return sorted(held.keys() ^ wanted.keys())
            wrong += [f"{name}@{step}" for name in wanted if not same(held[name], wanted[name])]
            with torch.no_grad():
                for name, param in model.named_parameters():
                    if "lora_" in name and step == 0:
                        param.mul_(-1.5)
                    elif "lora_" in name:
                        param.data = param.data.flip(0).contiguous()
            model.base_model.model.l1.q.set_scale("default", 3.0 + step)
    left = dict(model.named_parameters())
    return wrong + [f"base {name}" for name, one in base.items() if not same(left[name], one)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))


def milliseconds(call: Any, busy: int = 0) -> tuple[float, float]:
    """On the GPU's clock, and on the host's until the call returns; busy: cycles for which the GPU
    does something else first."""
    if WORLD > 1:
        torch.distributed.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(busy)
    started = time.perf_counter()
    begin.record()
    call()
    end.record()
    held = 1e3 * (time.perf_counter() - started)
    end.synchronize()
    return begin.elapsed_time(end), held


def median(call: Any, repeats: int = 10) -> float:
    return sorted(milliseconds(call)[0] for _ in range(repeats + 2))[repeats // 2]


BUSY = 200_000_000  # cycles, 0.1 s


def sharded(model: Any) -> Any:
    """By FSDP2, on all ranks, or on a mesh of one."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized() and WORLD > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    elif not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for layer in model.base_model.model.values():
        fully_shard(layer)
    return fully_shard(model)


def timed(
    layers: int,
    what: str,
    targets: list[str],
    parameters: list[str],
    quantize: str | None = None,
    shard: bool = False,
) -> bool:
    """Whether a step makes PEFT's bytes."""
    from fanin.torch import _merge

    model = adapted(layers, torch.bfloat16, targets, parameters)
    if shard:
        model = sharded(model)
    torch.cuda.synchronize()
    alone = torch.cuda.memory_allocated()
    with served(model, quantize) as server:
        run = server._runs["full:0"].parameters

        def fill() -> None:
            run.stages.ahead()
            run.stages.fill()

        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - alone
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fill()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        own = {getattr(one, "_local_tensor", one).data_ptr() for one in model.parameters()}
        made = {name: one for name, one in results(server).items() if one.data_ptr() not in own}
        size = sum(values.numel() * values.element_size() for values in made.values())
        source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        columns: dict[str, list[float]] = {}
        for turn in range(13):
            step, idle = milliseconds(fill)
            gpu, busy = milliseconds(fill, BUSY)
            copied = milliseconds(lambda: target.copy_(source))[0]
            told = {
                "step": step,
                "GPU": gpu,
                "idle": idle,
                "busy": busy,
                "copy": copied,
            }
            for name, value in told.items() if turn > 2 else ():
                columns.setdefault(name, []).append(value)
        del source, target
        mine = {name: values.clone() for name, values in made.items()}
        can_fuse = _merge.can_fuse
        _merge.can_fuse = lambda base, factors: False
        run.transform.release()
        for layer in (one for those in run.transform._layers.values() for one in those):
            layer._plans.clear()
        followed = median(fill, 4)
        _merge.can_fuse = can_fuse
        torch.cuda.synchronize()
        wrong = [name for name, values in made.items() if not same(mine[name], values)]
    at = {name: sorted(values)[len(values) // 2] for name, values in columns.items()}
    print(
        f"{'not ' if wrong else ''}ok time {what}, {layers} layers: {size / 1e6:.0f} MB written; "
        f"a step {at['step']:.2f} ms, {at['step'] / at['copy']:.2f} x a device copy "
        f"({at['copy']:.3f} ms), the worst {max(columns['step']):.2f} ms; GPU {at['GPU']:.2f} ms, {at['GPU'] / at['copy']:.2f} x; Python "
        f"{at['idle']:.2f} ms, busy GPU {at['busy']:.2f} ms; PEFT {followed:.2f} ms, "
        f"{len(wrong)} of {len(made)} tensors differ from its; memory kept {kept / 1e6:.0f} MB, "
        f"temporary {peak / 1e6:.0f} MB",
        flush=True,
    )
    return not wrong


def kernels(what: str, experts: int, rows: int, columns: int, rank: int = 16) -> None:
    """The kernel alone by its tiles, beside the product alone and a copy."""
    from fanin.torch import _factors, _fused

    base = torch.randn(experts, rows, columns, device="cuda").bfloat16()
    left, right = (torch.randn(experts, rank, n, device="cuda") for n in (rows, columns))
    left = left.transpose(1, 2).contiguous().transpose(1, 2) if experts == 1 else left
    out, product = (
        torch.empty_like(base),
        torch.empty(experts, rows, columns, device="cuda"),
    )
    copied = median(lambda: out.copy_(base))
    turned = left.transpose(1, 2)
    times = {"product": median(lambda: torch.bmm(turned, right, out=product))}
    factors = {
        which: _factors.Found(one, 0, one.shape, one.stride(), None)
        for which, one in (("A", right), ("B", left))
    }
    plan = _fused.planned(base, factors, {"B": left, "A": right}, True, tuple(base.shape))
    scale = 1 << 30  # bits of 2.0
    addresses = (*(one.data_ptr() for one in (base, out, left, right)), scale)
    table = torch.tensor([addresses]).cuda()
    kept = _fused._ROWS, _fused._COLUMNS, _fused._WARPS
    tiles = (
        (64, 128, 4),
        (64, 64, 4),
        (32, 128, 4),
        (128, 128, 8),
        (64, 256, 8),
        (64, 128, 8),
    )
    wanted = None
    for tile in (*tiles, (32, 256, 4), (16, 256, 4)):
        _fused._ROWS, _fused._COLUMNS, _fused._WARPS = tile
        took = median(lambda: _fused._launch(plan.kind, True, table, 0, 0))
        wanted = out.clone() if wanted is None else wanted
        times[f"{tile}{'' if same(out, wanted) else ' (OTHER BYTES)'}"] = took
    _fused._ROWS, _fused._COLUMNS, _fused._WARPS = kept
    told = ", ".join(f"{name} {one:.3f} ms ({one / copied:.1f} x)" for name, one in times.items())
    print(f"kernel {what}: copy {copied:.3f} ms, {told}", flush=True)


def shared(layers: int) -> bool:
    """Among several ranks."""
    stacks = [f"experts.{name}" for name in EXPERTS]
    wrong = []
    for wide in (True, False):
        model = adapted(2, torch.bfloat16, [*LINEAR, "words"], stacks, wide)
        wanted = copy.deepcopy(model).merge_and_unload().state_dict()
        with served(sharded(model)) as server:
            torch.cuda.synchronize()
            for shard, box, values in server._runs["full:0"].parameters.held():
                cut = (slice(at, at + n) for at, n in zip(box.offset, box.extent, strict=True))
                if not same(values, wanted[shard.name][tuple(cut)].contiguous()):
                    wrong.append(shard.name)
        torch.distributed.barrier()
    print(f"{'not ' if wrong else ''}ok rank {RANK} of {WORLD}: {', '.join(wrong) or 'bytes of PEFT'}")
    return timed(layers, f"FSDP2 of {WORLD}", list(LINEAR), stacks, None, True) and not wrong


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        sys.exit(77)
    began = time.perf_counter()
    sum(number for number in range(1_000_000))
    print(f"host: {1e3 * (time.perf_counter() - began):.1f} ms")
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    if WORLD > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        sys.exit(0 if shared(layers) else 1)
    from fanin.torch import _fused

    failed, kinds = 0, 0
    many, _fused._MANY = _fused._MANY, 1 << 20  # so that there are many launches
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
                    f"{', '.join(wrong) or 'bytes of PEFT'}; fused {sum(fused)} of {len(fused)}",
                    flush=True,
                )
    torch.backends.cuda.matmul.allow_tf32 = False
    _fused._MANY = many
    stacks = [f"experts.{name}" for name in EXPERTS]
    wanted: list[tuple[Any, ...]] = [
        ("attention", list(LINEAR), []),
        ("experts", [], stacks),
        ("attention and experts", list(LINEAR), stacks),
        ("attention and experts, then fp8", list(LINEAR), stacks, "fp8"),
        ("attention and experts, FSDP2", list(LINEAR), stacks, None, True),
        ("attention and experts, FSDP2, then fp8", list(LINEAR), stacks, "fp8", True),
    ]
    for one in wanted:
        failed, kinds = failed + (not timed(layers, *one)), kinds + 1
    kernels("gate_up", *EXPERTS["gate_up"])
    kernels("q", 1, *LINEAR["q"])
    print(f"{kinds - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
