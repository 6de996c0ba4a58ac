#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""quantized.py [--model NAME] [--layers N] [--divide N] [--ranks N] [--workers N] [--turns N]
               [--apart] [--links GBITS,...] [--device cuda|cpu] [--json FILE]

One step of a model from trainer ranks in BF16 by reference, and in fp8: the same WeightServer
publishes both, under FSDP2. Each turn is, alternated, a step of one run and a pull of it: from the
ranks' `publish()` to the last worker's last byte. In fp8 the ranks round their parts first.
Workers take every N-th tensor each. Medians in ms, beside a copy of what crosses between GPUs (with
one GPU, or none: of all) by all workers at once, and the CPU time of the rank whose publishing took
most; their ratios, bytes, and what the results take of the ranks' memory. Ranks and workers lie
round robin on the GPUs; results are compared with PyTorch's rounding of the whole matrices after
the last turn.

Experts are stacked by layer, as transformers keeps them. With --apart each is a parameter of its
own: ranks then share its blocks, and reduce them over Gloo. GPUs need the memory of three models
and 20 GB.

With --links ranks and workers are in two network namespaces, and workers read by TCP over a veth
pair that carries so many Gb/s, one after the other. The limit is then what the link takes for the
bytes. This needs ip, tc, unshare, and root or namespaces of users, else the exit status is 77.

Needs PyTorch, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77 without
GPUs, unless --device cpu.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import full_weights as whole
import network
from full_weights import MODELS, SLOWEST, ask, check, child, given, rendezvous, settle, torch
from worlds import Child

HERE = pathlib.Path(__file__).resolve()
RUNS = {"bench": "bf16", "fp8": "fp8"}
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
BAR = 0.85
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
bits = whole.pattern


def pattern(number: int, shape: tuple[int, ...], first: int, device: Any) -> torch.Tensor:
    """As full_weights.py has it, but finite: less than 2."""
    return (bits(number, shape, first, device).view(torch.int16) & ~0x4000).view(torch.bfloat16)


whole.pattern = pattern  # what ranks have


class Rank(whole.Rank):
    """A rank whose model is published twice."""

    def wholes(self) -> Iterator[tuple[str, torch.Tensor]]:
        numbers = {name: number for number, name in enumerate(self.shapes)}

        def whole_of(name: str) -> torch.Tensor:
            return pattern(numbers[name], self.shapes[name], 0, self.device)

        for name in self.shapes:
            head, stacked, rest = name.partition(".experts.")
            if not stacked or self.options["apart"]:
                yield name, whole_of(name)
            elif rest == "0.gate_proj.weight":
                for leaf, parts in STACKED.items():
                    names = [
                        [f"{head}.experts.{expert}.{part}.weight" for part in parts]
                        for expert in range(self.model.experts)
                    ]
                    whole = torch.stack([torch.cat([*map(whole_of, each)]) for each in names])
                    yield f"{head}.experts.{leaf}", whole

    def serve(self, world: str) -> dict[str, Any]:
        from fanin.torch import WeightServer
        from fanin.torch.names import experts

        before = self._memory()
        linked = {"bind": network.RANK, "allow": network.NETWORK, "insecure": True}
        self.server = WeightServer(
            self.tree,
            run="bench",
            base_port=0,
            names=experts(),
            **linked if self.options["linked"] else {},
        )
        self.server.add_run("fp8", self.tree, names=experts(), quantize="fp8")
        self.server.publish(dict.fromkeys(RUNS, 1))
        self.number = 1
        settle(self.device)
        return {"address": self.server.addresses[self.rank], "memory": self._memory() - before}

    def _memory(self) -> int:
        cuda = self.device.type == "cuda"
        return torch.cuda.memory_allocated(self.device) if cuda else 0

    def step(self, run: str) -> dict[str, Any]:
        self.number += 1
        start, used = time.perf_counter(), time.process_time()
        self.server.publish({run: self.number})
        seconds = time.perf_counter() - start
        return {"begun": start, "seconds": seconds, "cpu": time.process_time() - used}


class Worker(whole.Member):
    """An engine's worker: every N-th tensor of both runs, as they are published. They lie in few
    allocations, as an engine's fused parameters do."""

    def __init__(self, options: dict[str, Any]):
        self.number, self.count = options["worker"], options["workers"]
        super().__init__(options, self.number)

    def connect(self, addresses: list[str]) -> None:
        import fanin
        from fanin.torch._transform import Want, allocate

        path = "stream" if self.options["linked"] else "auto"
        self.client, self.packed, self.tensors = fanin.Client(addresses, path=path), {}, {}
        for run in RUNS:
            mine = self.client.catalog(f"full:{run}")[self.number :: self.count]
            wanted = [
                Want(self.device, DTYPES.get(one.dtype, torch.float8_e4m3fn), one.shape)
                for one in mine
            ]
            made = dict(zip((one.name for one in mine), allocate(wanted), strict=True))
            self.tensors[run] = made
            self.packed[run] = fanin.pack(
                fanin.shard_of(name, value, writable=True) for name, value in made.items()
            )
        settle(self.device)

    def pull(self, run: str) -> dict[str, Any]:
        start = time.perf_counter()
        result = self.client.pull_into(f"full:{run}", self.packed[run], timeout=SLOWEST)
        end = time.perf_counter()
        return {
            "ended": end,
            "seconds": end - start,
            "bytes": result.bytes,
            "path": result.path,
        }

    def compare(self) -> dict[str, Any]:
        """With the whole matrices, rounded by PyTorch."""
        numbers, wrong = {name: number for number, name in enumerate(self.shapes)}, []
        made = self.tensors["fp8"]
        for name, value in made.items():
            if name not in numbers:
                continue  # a scale
            right = pattern(numbers[name], self.shapes[name], 0, self.device)
            if value.dtype == torch.float8_e4m3fn:
                right = rounded(right)
            if not torch.equal(right.view(torch.uint8), value.view(torch.uint8)):
                wrong.append(name)
        return {"wrong": wrong[:3], "count": len(wrong)}


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """The rule of docs/reference/quantization.md in blocks of 128 x 128."""
    rows, columns = matrix.shape
    filled = torch.nn.functional.pad(matrix.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = filled.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    one = torch.ones((), device=matrix.device)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) * (one / 448)
    codes = (blocks * (one / scale)).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns]


class Run:
    """The ranks and the workers, which serve and are connected; ended with the stack."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack):
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quantized-")))
        names = ("device", "model", "layers", "divide", "ranks", "workers", "apart")
        common = {name: getattr(options, name) for name in names}
        common |= {"compact": True, "served": True, "rendezvous": rendezvous()}
        common["linked"] = bool(options.links)
        self.link = network.Link(stack, loopback=not options.links)

        def start(kind: str, at: int, side: int) -> Child:
            own, inside = {**common, kind: at}, self.link.inside(side)
            one = Child(f"{kind}{at}", str(HERE), own, folder, inside, RANK=str(at))
            stack.callback(one.close)
            return one

        self.ranks = [start("rank", at, 0) for at in range(options.ranks)]
        self.workers = [start("worker", at, 1) for at in range(options.workers)]
        for one in (*self.ranks, *self.workers):
            one.expect("here", SLOWEST)
        told = ask(self.ranks, "serve", world="")
        ask(self.workers, "connect", addresses=[one["address"] for one in told])
        self.memory = sum(one["memory"] for one in told)
        self.gpus = torch.cuda.device_count() if options.device == "cuda" else 0

    def turns(self, count: int, gbits: float | None) -> dict[str, Any]:
        times: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        for turn in range(count + 2):
            for run, kind in RUNS.items():
                published = ask(self.ranks, "step", run=run)
                pulled = ask(self.workers, "pull", run=run)
                # By the processes' clock, which is one: messages to and from them do not count.
                seconds = max(one["ended"] for one in pulled)
                seconds -= min(one["begun"] for one in published)
                sizes[kind] = sum(one["bytes"] for one in pulled)
                found = {kind: seconds, f"{kind}, limit": self.limit(pulled, gbits)}
                for what, answers in (("publish", published), ("pull", pulled)):
                    found[f"{kind}, {what}"] = max(one["seconds"] for one in answers)
                found[f"{kind}, its CPU"] = max(one["cpu"] for one in published)
                if turn >= 2:  # the first warm up
                    for name, one in found.items():
                        times.setdefault(name, []).append(one)
        return {
            "gbits": gbits,
            "medians_ms": {name: 1e3 * statistics.median(each) for name, each in times.items()},
            "ms": {name: [1e3 * one for one in each] for name, each in times.items()},
            "bytes": sizes,
            "path": pulled[0]["path"],
        }

    def limit(self, pulled: list[dict[str, Any]], gbits: float | None) -> float:
        """Seconds of the link, or of copies by all workers at once."""
        if gbits:
            return float(sum(one["bytes"] for one in pulled) * 8 / (gbits * 1e9))
        crossing = max(one["bytes"] for one in pulled)
        if self.gpus > 1:
            crossing = crossing * (self.gpus - 1) // self.gpus
        return max(one["seconds"] for one in ask(self.workers, "copy", crossing=crossing))


def report(told: dict[str, Any], run: Run) -> None:
    limits = ["copies in the host's memory", "copies within one GPU, which no link bounds"]
    limits.append(f"copies between {run.gpus} GPUs of what crosses")
    limit = limits[min(run.gpus, 2)]
    if told["gbits"]:
        limit = f"a link of {told['gbits']:g} Gb/s"
    print(f"by {told['path']}; limit: {limit}")
    times, sizes = told["medians_ms"], told["bytes"]
    for what, figure in times.items():
        print(f"  {what:14} {figure:9.2f} ms")
    share = sizes["fp8"] / sizes["bf16"]
    print(f"  a step, fp8 / bf16                {times['fp8'] / times['bf16']:.3f}")
    print(f"  a pull, fp8 / bf16                {times['fp8, pull'] / times['bf16, pull']:.3f}")
    print(f"  a step of fp8 / a pull of bf16    {times['fp8'] / times['bf16, pull']:.3f}")
    print(f"  bytes, fp8 / bf16                 {share:.3f} of {sizes['bf16'] / 1e9:.2f} GB")
    if share < BAR and not told["gbits"]:
        # rest + share * bytes / speed <= BAR * bytes / speed
        rest = (times["fp8"] - times["fp8, pull"]) / 1e3
        speed = (BAR - share) * sizes["bf16"] / rest / 1e9
        print(f"  the third is {BAR} where all workers read {speed:.1f} GB/s together")
    if run.gpus:
        print(f"  results' memory                   {run.memory / sizes['bf16']:.3f} of all")


def main() -> int:
    if child(Rank, Worker):
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--divide", type=int, default=1, help="divide the widths by 2, 4, 8 or 16")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--apart", action="store_true", help="each expert is a parameter")
    parser.add_argument("--links", type=network.numbers_of, default=[], help="Gb/s, 1,10")
    options = given(parser)
    if options.links:
        for program in ("ip", "tc", "unshare"):
            if shutil.which(program) is None:
                network.skip(f"there is no {program}")
        network.have_namespaces()
    layers = options.layers or MODELS[options.model].layers
    with contextlib.ExitStack() as stack:
        run = Run(options, stack)
        print(f"{options.model}, {layers} layers, {options.ranks} ranks, {options.workers} workers")
        told = []
        for gbits in options.links or [None]:
            if gbits:
                run.link.shape(gbits)
            told.append(run.turns(options.turns, gbits))
            report(told[-1], run)
        check(run.workers)
    if options.json:
        record = {"options": vars(options), "memory": run.memory, "runs": told}
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
