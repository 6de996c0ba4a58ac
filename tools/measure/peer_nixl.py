#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The same adapter over NIXL, as its most careful user would do it, for comparison.

One agent a rank in a process of its own, each rank's shards registered as one arena, one READ
with all descriptors a rank, prepared once, the destination registered once; what is timed is
a warm pull of everything. Run it in one go with `nixl-fetch bench`, alternating:

    pip install nixl nixl-cu13            # in an environment of its own
    python tools/measure/peer_nixl.py --nixl-fetch build/tools/nixl-fetch \
        --shape moe --world-size 8 --rounds 3

With --gpus N the worker is on the last of N GPUs, and the ranks on the others.
Needs PyTorch and the package (PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
from typing import Any

from full_weights import Agent, ask, child, torch
from worlds import Child

HERE = pathlib.Path(__file__).resolve()


def shapes_of(tool: str, shape: str) -> list[tuple[int, int]]:
    """Bytes of a row and rows of every tensor, as the tool's own stand-in trainer serves them."""
    words = ["serve", "--adapter-shape", shape, "--world-size", "1", "--base-port", "0", "--json"]
    with subprocess.Popen([tool, *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            target = json.loads(server.stdout.readline())["target"]
            listed = told(tool, "list", target, "--run", "0")
        finally:
            server.terminate()
    return [(key["bytes"] // key["shape"][0], key["shape"][0]) for key in listed["keys"]]


def told(*words: str) -> Any:
    return json.loads(subprocess.run([*words, "--json"], check=True, stdout=subprocess.PIPE).stdout)


def shard_sizes(shapes: list[tuple[int, int]], world: int, rank: int) -> list[int]:
    """Bytes this rank holds of each tensor (torch.chunk on dimension 0), empty ones left out."""
    sizes = []
    for row, rows in shapes:
        chunk = -(-rows // world)
        held = min(rank * chunk + chunk, rows) - min(rank * chunk, rows)
        if held:
            sizes.append(held * row)
    return sizes


class Member:
    """A rank or the worker: an arena, and NIXL's agent."""

    def __init__(self, options: dict[str, Any]) -> None:
        gpus, world, self.rank = options["gpus"], options["world"], options.get("rank", -1)
        place = "cpu"
        if gpus:
            place = f"cuda:{gpus - 1 if self.rank < 0 else self.rank * (gpus - 1) // world}"
        self.world, self.device = world, torch.device(place)
        self.agent = Agent(f"member{self.rank}", self.device)

    def make(self, size: int) -> int:
        """The arena; its address."""
        self.arena = torch.full((size,), self.rank + 1, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.agent.register([self.arena])
        return int(self.arena.data_ptr())


class Rank(Member):
    def serve(self, shapes: list[tuple[int, int]]) -> dict[str, Any]:
        sizes = shard_sizes(shapes, self.world, self.rank)
        at, table = self.make(sum(sizes)), []
        for size in sizes:
            table.append((at, size))
            at += size
        return self.agent.told(table)


class Worker(Member):
    def prepare(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        total = sum(size for rank in ranks for _, size in rank["table"])
        at = self.make(total)
        for rank in ranks:
            pairs = []
            for address, size in rank["table"]:
                pairs.append((at, address, size))
                at += size
            self.agent.prepare(rank, pairs)
        self.agent.read()
        return {"bytes": total}

    def pull(self) -> dict[str, Any]:
        return self.agent.read()

    def proven(self) -> dict[str, Any]:
        return {"proven": bool((self.arena > 0).all())}


def over_nixl(shapes: list[tuple[int, int]], world: int, gpus: int) -> tuple[list[float], int]:
    """Seconds of five pulls, and bytes. In processes that end, with NIXL's busy threads, before
    anything else runs."""
    common = {"world": world, "gpus": gpus}
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="peer-nixl-") as folder:
        try:
            for role in [{"rank": rank} for rank in range(world)] + [{"worker": 0}]:
                name = "".join(map(str, *role.items()))
                children.append(Child(name, str(HERE), common | role, pathlib.Path(folder)))
            for one in children:
                one.expect("here")
            total = ask(children[-1:], "prepare", ranks=ask(children[:-1], "serve", shapes=shapes))
            seconds = [children[-1].do("pull")["seconds"] for _ in range(5)]
            if not children[-1].do("proven")["proven"]:
                raise SystemExit("NIXL's bytes did not arrive")
        finally:
            for one in children:
                one.close()
    return seconds, total[0]["bytes"]


def ours(tool: str, shape: str, world: int, gpus: int, path: str) -> Any:
    words = ["--adapter-shape", shape, "--world-size", str(world), "--path", path]
    if gpus:
        words += ["--device", ",".join(map(str, range(gpus - 1))), "--dest", f"device:{gpus - 1}"]
    return told(tool, "bench", *words, "--iterations", "11")


def main() -> None:
    if child(Rank, Worker):
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nixl-fetch", required=True)
    parser.add_argument("--shape", default="dense")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--paths", help="default: stream,cma; with --gpus cuda_ipc")
    options = parser.parse_args()

    paths = (options.paths or ("cuda_ipc" if options.gpus else "stream,cma")).split(",")
    shapes = shapes_of(options.nixl_fetch, options.shape)
    times: dict[str, list[float]] = {"nixl": []}
    total = 0
    for _ in range(options.rounds):
        seconds, total = over_nixl(shapes, options.world_size, options.gpus)
        times["nixl"] += seconds
        for path in paths:
            result = ours(options.nixl_fetch, options.shape, options.world_size, options.gpus, path)
            times.setdefault(path, []).append(result["phases"]["total"]["median_ns"] / 1e9)
            for limit in result["limits"]:
                if limit["problem"] is None and limit["pieces"] == 1:
                    times.setdefault(limit["name"], []).append(limit["median_ns"] / 1e9)
    peer = statistics.median(times["nixl"])
    for name, values in times.items():
        median = statistics.median(values)
        print(
            f"{options.shape} {options.world_size} ranks {name:12} median "
            f"{median * 1e3:8.1f} ms  {total / median / 1e9:5.2f} GB/s  "
            f"{peer / median:5.1f} x NIXL",
            flush=True,
        )


if __name__ == "__main__":
    main()
