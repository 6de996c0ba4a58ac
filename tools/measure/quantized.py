#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""quantized.py [--model NAME] [--layers N] [--divide N] [--ranks N] [--workers N] [--turns N]
               [--device cuda|cpu] [--json FILE]

One step of a model from trainer ranks in BF16 by reference, and in fp8: the same WeightServer
publishes both, under FSDP2. Each turn is, alternated, an update of one run and a pull of it: from
the ranks' `updating()` to the last worker's last byte. In fp8 the ranks round their parts first.
Workers take every N-th tensor each. Medians in ms, their ratio, bytes, and what the results take
of the ranks' memory. Ranks and workers lie round robin on the GPUs; results are compared with
PyTorch's rounding of the whole matrices after the last turn.

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
from typing import Any

import full_weights as whole
from full_weights import MODELS, SLOWEST, settle, torch
from worlds import Child, Control

HERE = pathlib.Path(__file__).resolve()
RUNS = {"bench": "bf16", "fp8": "fp8"}
bits = whole.pattern


def pattern(number: int, shape: tuple[int, ...], first: int, device: Any) -> torch.Tensor:
    """As full_weights.py has it, but finite: less than 2."""
    return (bits(number, shape, first, device).view(torch.int16) & ~0x4000).view(torch.bfloat16)


whole.pattern = pattern  # what ranks have


class Rank(whole.Rank):
    """A rank whose model is published twice."""

    def serve(self, world: str) -> dict[str, Any]:
        from fanin.torch import WeightServer

        before = self._memory()
        self.server = WeightServer(self.tree, run="bench", base_port=0)
        self.server.add_run("fp8", self.tree, quantize="fp8")
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
        with self.server.updating({run: self.number}):
            pass
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
    common |= {"ranks": options.ranks, "compact": True, "served": True, "workers": options.workers}
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
        for turn in range(options.turns + 2):
            for run, kind in RUNS.items():
                start = time.perf_counter()
                stepped = ask(ranks, "step", run=run)
                pulled = ask(workers, "pull", run=run)
                if turn >= 2:  # the first warm up
                    times.setdefault(kind, []).append(time.perf_counter() - start)
                    for what, answers in (("update", stepped), ("pull", pulled)):
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
            "memory": sum(one["memory"] for one in told),
        }
    finally:
        for one in (*workers, *ranks):
            one.close()


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
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    with tempfile.TemporaryDirectory(prefix="quantized-") as folder:
        told = measure(options, pathlib.Path(folder))
    print(f"{options.model}, {options.ranks} ranks, {options.workers} workers, by {told['path']}")
    for name, figure in told["medians_ms"].items():
        print(f"  {name:14} {figure:9.2f} ms")
    times, sizes = told["medians_ms"], told["bytes"]
    print(f"  time, fp8 / bf16   {times['fp8'] / times['bf16']:.3f}")
    share = sizes["fp8"] / sizes["bf16"]
    print(f"  bytes, fp8 / bf16  {share:.3f} of {sizes['bf16'] / 1e9:.2f} GB")
    print(f"  results' memory    {told['memory'] / sizes['bf16']:.3f} of the model's bytes")
    if options.json:
        record = {"options": vars(options), **told}
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
