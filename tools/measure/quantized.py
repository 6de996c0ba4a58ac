#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""quantized.py [--model NAME] [--layers N] [--divide N] [--ranks N] [--workers N] [--turns N]
               [--apart] [--device cuda|cpu] [--json FILE]

One step of a model from trainer ranks in BF16 by reference, and in fp8: the same WeightServer
publishes both, under FSDP2. Each turn is, alternated, a step of one run and a pull of it: from the
ranks' `publish()` to the last worker's last byte. In fp8 the ranks round their parts first.
Workers take every N-th tensor each. Medians in ms, beside a copy of what crosses between GPUs (with
one GPU, or none: of all) by all workers at once; their ratio, bytes, and what the results take of
the ranks' memory. Ranks and workers lie round robin on the GPUs; results are compared with
PyTorch's rounding of the whole matrices after the last turn.

Experts are stacked by layer, as transformers keeps them. With --apart each is a parameter of its
own: ranks then share its blocks, and reduce them over Gloo. GPUs need the memory of three models
and 20 GB.

Needs PyTorch, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77 without
GPUs, unless --device cpu.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import full_weights as whole
from full_weights import MODELS, SLOWEST, settle, torch
from worlds import Child, Control

HERE = pathlib.Path(__file__).resolve()
RUNS = {"bench": "bf16", "fp8": "fp8"}
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
BAR = 0.85
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
        self.server = WeightServer(self.tree, run="bench", base_port=0, names=experts())
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
        start = time.perf_counter()
        self.server.publish({run: self.number})
        return {"seconds": time.perf_counter() - start}


class Worker(whole.Member):
    """An engine's worker: every N-th tensor of both runs, as they are published."""

    def __init__(self, control: Control, options: dict[str, Any]):
        self.number, self.count = options["worker"], options["workers"]
        super().__init__(control, options, self.number)

    def connect(self, addresses: list[str]) -> None:
        import fanin

        self.client, self.packed, self.tensors = fanin.Client(addresses), {}, {}
        for run in RUNS:
            made = {}
            for one in self.client.catalog(f"full:{run}")[self.number :: self.count]:
                dtype = {"BF16": torch.bfloat16, "F32": torch.float32}.get(
                    one.dtype, torch.float8_e4m3fn
                )
                made[one.name] = torch.zeros(one.shape, dtype=dtype, device=self.device)
            self.tensors[run] = made
            self.packed[run] = fanin.pack(
                fanin.shard_of(name, value, writable=True) for name, value in made.items()
            )
        settle(self.device)

    def pull(self, run: str) -> dict[str, Any]:
        start = time.perf_counter()
        result = self.client.pull_into(f"full:{run}", self.packed[run], timeout=SLOWEST)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "bytes": result.bytes, "path": result.path}

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


def ask(children: list[Child], what: str, **fields: Any) -> list[dict[str, Any]]:
    for one in children:
        one.tell(what, **fields)
    return [one.expect("done", SLOWEST) for one in children]


def measure(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    common = {key: getattr(options, key) for key in ("device", "model", "layers", "divide")}
    common |= {"ranks": options.ranks, "workers": options.workers, "apart": options.apart}
    common |= {"compact": True, "served": True}
    common["rendezvous"] = f"file://{folder}/rendezvous"
    ranks = [
        Child(f"rank{rank}", str(HERE), {**common, "rank": rank}, folder, RANK=str(rank))
        for rank in range(options.ranks)
    ]
    workers = [
        Child(f"worker{number}", str(HERE), {**common, "worker": number}, folder)
        for number in range(options.workers)
    ]
    try:
        for one in (*ranks, *workers):
            one.expect("here", SLOWEST)
        told = ask(ranks, "serve", world="")
        ask(workers, "connect", addresses=[one["address"] for one in told])
        times: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        gpus = torch.cuda.device_count() if options.device == "cuda" else 0
        for turn in range(options.turns + 2):
            for run, kind in RUNS.items():
                start = time.perf_counter()
                stepped = ask(ranks, "step", run=run)
                pulled = ask(workers, "pull", run=run)
                whole_step = time.perf_counter() - start
                crossing = max(one["bytes"] for one in pulled)
                crossing = crossing * (gpus - 1) // gpus if gpus > 1 else crossing
                copied = ask(workers, "copy", crossing=crossing)
                if turn >= 2:  # the first warm up
                    times.setdefault(kind, []).append(whole_step)
                    for what, answers in (
                        ("publish", stepped),
                        ("pull", pulled),
                        ("copy", copied),
                    ):
                        slowest = max(one["seconds"] for one in answers)
                        times.setdefault(f"{kind}, {what}", []).append(slowest)
                sizes[kind] = sum(one["bytes"] for one in pulled)
        wrong = [one for one in ask(workers, "compare") if one["count"]]
        if wrong:
            sys.exit(f"{wrong[0]['count']} tensors differ, the first: {wrong[0]['wrong']}")
        medians = {name: 1e3 * statistics.median(each) for name, each in times.items()}
        return {
            "medians_ms": medians,
            "ms": {name: [1e3 * one for one in each] for name, each in times.items()},
            "bytes": sizes,
            "path": pulled[0]["path"],
            "gpus": gpus,
            "memory": sum(one["memory"] for one in told),
        }
    finally:
        for one in (*workers, *ranks):
            one.close()


def report(options: argparse.Namespace, told: dict[str, Any]) -> None:
    name = f"{options.model}, {options.layers or MODELS[options.model].layers} layers"
    print(f"{name}, {options.ranks} ranks, {options.workers} workers, by {told['path']}")
    limits = ["copies in the host's memory", "copies within one GPU, which no link bounds"]
    beside = [*limits, f"copies between {told['gpus']} GPUs of what crosses"][min(told["gpus"], 2)]
    print(f"limit: {beside}")
    times, sizes = told["medians_ms"], told["bytes"]
    for what, figure in times.items():
        print(f"  {what:14} {figure:9.2f} ms")
    share = sizes["fp8"] / sizes["bf16"]
    print(f"  a step, fp8 / bf16                {times['fp8'] / times['bf16']:.3f}")
    print(f"  a step of fp8 / a pull of bf16    {times['fp8'] / times['bf16, pull']:.3f}")
    print(f"  bytes, fp8 / bf16                 {share:.3f} of {sizes['bf16'] / 1e9:.2f} GB")
    if share < BAR:
        # rest + share * bytes / speed <= BAR * bytes / speed
        rest = (times["fp8"] - times["fp8, pull"]) / 1e3
        speed = (BAR - share) * sizes["bf16"] / rest / 1e9
        print(f"  the second is {BAR} where all workers read {speed:.0f} GB/s together")
    print(f"  results' memory                   {told['memory'] / sizes['bf16']:.3f} of all")


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        control, role = Control(), json.loads(sys.argv[1])
        (Worker if "worker" in role else Rank)(control, role).run()
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
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    with tempfile.TemporaryDirectory(prefix="quantized-") as folder:
        told = measure(options, pathlib.Path(folder))
    report(options, told)
    if options.json:
        record = {"options": vars(options), **told}
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
