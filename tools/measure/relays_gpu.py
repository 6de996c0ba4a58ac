#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""relays_gpu.py [--workers N] [--gib N] [--tensors N] [--turns N] [--device cuda|cpu] [--json FILE]

N workers want each step of a trainer rank whose tensors lie on the first GPU; they lie round robin
on the others, or on the first where there is no other. Ways take turns, each turn a new step:

  one     the first worker alone
  direct  all workers, from the rank
  relay   all workers by fanin.Relay, which hand on to each other what they have
  again   the same, while they still hand on the step before: nothing is planned or mapped anew

The first turns are not counted: 8 workers map the memory of one another for a second in all. Told
are medians from the first worker's start to the last one's end, as multiples of "one", and the
models that left the rank. Each worker compares all bytes after each step. Without a GPU exit status
77, unless --device cpu.
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

from full_weights import SLOWEST, ask, check, child, given, on, settle, torch
from worlds import Child

HERE = pathlib.Path(__file__).resolve()
RUN, WAYS = "full:0", ("one", "direct", "relay", "again")
WARM = 4  # turns


class Member:
    """The rank, or a worker: the tensors, and what the parent asks for."""

    def __init__(self, options: dict[str, Any]) -> None:
        others = max(torch.cuda.device_count() - 1, 1)
        self.device = device = on(
            options, 1 + options["worker"] % others if "worker" in options else 0
        )
        words = options["bytes"] // options["tensors"] // 4
        self.tensors = {
            f"layers.{number:05}.weight": torch.zeros(words, dtype=torch.int32, device=device)
            for number in range(options["tensors"])
        }
        self.words = torch.arange(words, dtype=torch.int32, device=device) * 40503

    def value(self, number: int, step: int) -> torch.Tensor:
        return self.words + (number * 7919 + step * 104729)


class Rank(Member):
    def serve(self) -> dict[str, Any]:
        import fanin

        self.server = fanin.Server(world_id=b"\1" * 16, rank=0, world_size=1)
        self.server.put(RUN, [fanin.shard_of(*one) for one in self.tensors.items()])
        return {"address": f"127.0.0.1:{self.server.port}"}

    def step(self, number: int) -> None:
        self.server.begin_update(RUN)
        for at, tensor in enumerate(self.tensors.values()):
            tensor.copy_(self.value(at, number))
        settle(self.device)
        self.server.commit(RUN, number)


class Worker(Member):
    def connect(self, address: str) -> None:
        import fanin

        self.client, self.relay = fanin.Client([address]), fanin.Relay([address])
        self.packed = fanin.pack(
            fanin.shard_of(name, tensor, writable=True) for name, tensor in self.tensors.items()
        )
        settle(self.device)

    def pull(self, way: str, step: int) -> dict[str, Any]:
        relays = way in ("relay", "again")
        reader = self.relay if relays else self.client
        if way != "again":  # the memory is the worker's again
            self.relay.release()
        before = self.relay.stats()["bytes_from_origin"]
        start = time.monotonic()
        result = reader.pull_into(RUN, self.packed, step=step, timeout=SLOWEST)
        end = time.monotonic()
        taken = result.bytes
        if relays:
            taken = self.relay.stats()["bytes_from_origin"] - before
        return {"start": start, "end": end, "taken": taken, "path": result.path}

    def compare(self, step: int) -> dict[str, Any]:
        """With what the rank has."""
        wrong = [
            name
            for at, (name, tensor) in enumerate(self.tensors.items())
            if not torch.equal(tensor, self.value(at, step))
        ]
        return {"wrong": wrong[:3], "count": len(wrong)}


def measure(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    size = int(options.gib * 2**30)
    common = {"device": options.device, "tensors": options.tensors, "bytes": size}
    rank = Child("rank", str(HERE), common, folder)
    workers = [
        Child(f"worker{number}", str(HERE), {**common, "worker": number}, folder)
        for number in range(options.workers)
    ]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    models: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        for one in (rank, *workers):
            one.expect("here", SLOWEST)
        ask(workers, "connect", address=ask([rank], "serve")[0]["address"])
        step = 0
        for turn in range(options.turns + WARM):
            for way in WAYS:
                step += 1
                ask([rank], "step", number=step)
                readers = workers[:1] if way == "one" else workers
                pulled = ask(readers, "pull", way=way, step=step)
                check(readers, f"{way}: ", step=step)
                if turn >= WARM:
                    first = min(one["start"] for one in pulled)
                    times[way].append(1e3 * (max(one["end"] for one in pulled) - first))
                    models[way].append(sum(one["taken"] for one in pulled) / size)
        return {"ms": times, "models": models, "path": pulled[0]["path"]}
    finally:
        for one in (*workers, rank):
            one.close()


def main() -> int:
    if child(Rank, Worker):
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--turns", type=int, default=10)
    options = given(parser)
    with tempfile.TemporaryDirectory(prefix="relays-") as folder:
        told = measure(options, pathlib.Path(folder))
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    print(f"{options.workers} workers, {gpus} GPUs, {options.gib:g} GiB, by {told['path']}")
    one = statistics.median(told["ms"]["one"])
    for way, times in told["ms"].items():
        middle, left = statistics.median(times), statistics.median(told["models"][way])
        print(
            f"  {way:6} {middle:8.2f} ms ({min(times):.2f} to {max(times):.2f})"
            f"  {middle / one:5.2f} x  models {left:.2f}"
        )
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"options": vars(options), **told}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
