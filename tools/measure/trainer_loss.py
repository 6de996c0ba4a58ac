#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What readers cost a trainer that works.

A rank repeats the same work between updates, so that the time of a step tells what it cost. Phases
with readers take turns with phases without, and each is compared with the two around it; the row
of 0 readers is the noise. Each reader is a process, which pulls all, then pauses.

The work: *product* of matrices, *sweep* over memory, or *integer*, a chain of operations on one
CPU, whose time varies by little else than what takes that CPU. With --device by PyTorch on a GPU.
Needs the package and numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fanin
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "engines"))

from worlds import Child, Control

RUN = "lora:0"
FOREVER = 3600.0  # seconds


def zeros(options: argparse.Namespace) -> list[Any]:
    """The tensors: numpy's, or PyTorch's on the device."""
    size = (options.megabytes << 20) // (4 * options.tensors)
    if not options.device:
        return [np.zeros(size, np.float32) for _ in range(options.tensors)]
    import torch

    return [torch.zeros(size, device=options.device) for _ in range(options.tensors)]


def host_work(kind: str) -> Callable[[], object]:
    """Some milliseconds of it."""
    if kind == "integer":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread alone
        x, y = np.arange(4096, dtype=np.uint64), np.empty(4096, np.uint64)

        def chain() -> None:
            for _ in range(500):
                np.multiply(x, np.uint64(6364136223846793005), out=x)
                np.right_shift(x, np.uint64(29), out=y)
                np.bitwise_xor(x, y, out=x)

        return chain
    side = 1024 if kind == "product" else 2896
    a, c = np.full((side, side), 0.5, np.float32), np.ones((side, side), np.float32)
    if kind == "product":
        return lambda: np.matmul(a, a, out=c)
    return lambda: np.add(np.multiply(c, 0.5, out=c), a, out=c)


def device_work(kind: str, device: str) -> Callable[[], object]:
    """The same on a GPU, some twenty milliseconds."""
    import torch

    side, times = (4096, 60) if kind == "product" else (16384, 15)
    a = torch.rand(side, side, device=device, dtype=torch.bfloat16)
    c = torch.empty_like(a)

    def work() -> None:
        for _ in range(times):
            if kind == "product":
                torch.mm(a, a, out=c)
            else:
                torch.lerp(c, a, 0.5, out=c)
        torch.cuda.synchronize(device)

    return work


class Trainer:
    """The rank, its work, and what it counts of whole steps."""

    def __init__(self, options: argparse.Namespace, server: fanin.Server) -> None:
        self.server, self.every, self.step = server, options.update_every, 1
        self.snapshot = options.snapshot
        self.tensors = zeros(options)
        server.put(RUN, [fanin.shard_of(f"t{i}", one) for i, one in enumerate(self.tensors)])
        server.commit(RUN, self.step, snapshot=options.snapshot)
        kind, device = options.load, options.device
        self.work = device_work(kind, device) if device else host_work(kind)
        self.device = device
        self.batches = 0  # of work between two updates: to be found out
        self.counts: dict[str, float] = {}

    def begin(self) -> None:
        self.counts = dict.fromkeys(("steps", "batches", "work", "wait"), 0)
        self.started, self.cpu = time.perf_counter(), self.others_cpu()

    def told(self) -> dict[str, float]:
        """Seconds and numbers since begin()."""
        passed = time.perf_counter() - self.started
        return {**self.counts, "time": passed, "cpu": self.others_cpu() - self.cpu}

    @staticmethod
    def others_cpu() -> float:
        """Of all threads but this one."""
        return time.process_time() - time.thread_time()

    def one_step(self) -> None:
        start, done = time.perf_counter(), 0
        while done < self.batches or (
            not self.batches and time.perf_counter() - start < self.every
        ):
            self.work()
            done += 1
        self.batches = self.batches or done
        worked = time.perf_counter()
        self.server.begin_update(RUN)
        waited = time.perf_counter()
        for one in self.tensors:
            one += 1
        if self.device:
            import torch

            torch.cuda.synchronize(self.device)
        self.step += 1
        self.server.commit(RUN, self.step, snapshot=self.snapshot)
        if self.counts:
            passed = {"steps": 1, "batches": done, "work": worked - start, "wait": waited - worked}
            self.counts = {name: self.counts[name] + more for name, more in passed.items()}


def trainer(options: argparse.Namespace, control: Control) -> None:
    """Of what the parent says every other begins a phase; it is told at the end of one."""
    with fanin.Server(
        world_id=bytes(range(16)), rank=0, world_size=1, lease=1.0, use_ucx=False
    ) as server:
        own = Trainer(options, server)
        own.one_step()  # which finds out how much is done in one
        control.say("here", port=server.port)
        while True:
            own.one_step()
            if (own.counts and not own.counts["steps"]) or control.heard() is None:
                continue
            if own.counts:
                control.say("done", **own.told())
                own.counts = {}
            else:
                own.begin()


def reader(options: argparse.Namespace, control: Control) -> None:
    """Pulls from so many seconds after a word until the next, --pause apart; tells how often."""
    options.device = options.dest
    packed = fanin.pack(fanin.shard_of(f"t{i}", one) for i, one in enumerate(zeros(options)))
    with fanin.Client([f"127.0.0.1:{options.port}"], path=options.path, use_ucx=False) as client:
        client.pull_into(RUN, packed)
        control.say("here")
        while True:
            pulls, wait = 0, control.hear(FOREVER)["wait"]
            while control.heard(wait) is None:
                client.pull_into(RUN, packed)
                pulls, wait = pulls + 1, options.pause
            control.say("done", pulls=pulls)


# ---------------------------------------------------------------------------- measuring


def phase(rank: Child, readers: list[Child], options: argparse.Namespace) -> dict[str, float]:
    """What the rank counts, and the number of pulls."""
    for i, one in enumerate(readers):
        one.tell("phase", wait=options.pause * i / len(readers))
    rank.tell("phase")
    time.sleep(options.phase)
    counted = rank.do("phase")
    return {**counted, "pulls": sum(one.do("phase")["pulls"] for one in readers)}


def mean(losses: list[float]) -> tuple[float, float]:
    """And its standard error."""
    off = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    return statistics.fmean(losses), off


Triple = tuple[dict[str, float], dict[str, float], dict[str, float]]
"""A phase with readers between two without."""


def row(triples: list[Triple]) -> dict[str, float]:
    """Shares of the time."""
    pulled = [one for _, one, _ in triples]
    loss = {}
    for name, count in (("time", "steps"), ("work", "batches")):
        each = [[one[name] / one[count] for one in triple] for triple in triples]
        loss[name] = [1 - (before + after) / 2 / one for before, one, after in each]
    (middle, off), (work, work_off) = mean(loss["time"]), mean(loss["work"])
    return {
        "pulls": sum(one["pulls"] for one in pulled),
        "loss": statistics.median(loss["time"]),
        "loss_min": min(loss["time"]),
        "loss_max": max(loss["time"]),
        "loss_mean": middle,
        "loss_error": off,
        "work_loss": work,
        "work_loss_error": work_off,
        "lease_wait": statistics.median(one["wait"] / one["time"] for one in pulled),
        "server_cpu": statistics.median(one["cpu"] / one["time"] for one in pulled),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[int, dict[str, float]]:
    children: list[Child] = []
    threads = str(len(os.sched_getaffinity(0)))  # the work is the host's, not one core's

    def start(**role: Any) -> Child:
        name = f"{role['be']}{len(children)}"
        children.append(
            Child(name, __file__, vars(options) | role, folder, OMP_NUM_THREADS=threads)
        )
        return children[-1]

    try:
        rank = start(be="trainer")
        port = rank.expect("here")["port"]
        readers = [start(be="reader", port=port) for _ in range(max(options.readers))]
        for one in readers:
            one.expect("here")
        phase(rank, [], options)  # to warm up
        idle = phase(rank, [], options)
        found: dict[int, list[Triple]] = {count: [] for count in options.readers}
        for _ in range(options.pairs):
            for count, triples in found.items():
                before, pulled = idle, phase(rank, readers[:count], options)
                idle = phase(rank, [], options)
                triples.append((before, pulled, idle))
    finally:
        for one in children:
            one.close()
    return {count: row(triples) for count, triples in found.items()}


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        role = argparse.Namespace(**json.loads(sys.argv[1]))
        (trainer if role.be == "trainer" else reader)(role, Control())
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", choices=("product", "sweep", "integer"), default="product")
    parser.add_argument("--device", help="of the trainer: cuda:0; default: the host")
    parser.add_argument("--dest", help="of the readers, likewise")
    parser.add_argument("--path", default="auto")
    parser.add_argument("--snapshot", action="store_true")
    parser.add_argument("--tensors", type=int, default=448)
    parser.add_argument("--megabytes", type=int, default=80)
    parser.add_argument("--update-every", type=float, default=0.05, help="seconds of work")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between a reader's pulls")
    parser.add_argument("--phase", type=float, default=1.0, help="seconds")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--readers", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1, 8]
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainer-loss-") as folder:
        found = measure(options, Path(folder))
    if options.json:
        print(json.dumps({"readers": found, "command": sys.argv}))
        return
    print(
        "READERS  PULLS    LOSS   LEAST    MOST             MEAN             WORK   WAITS     CPU"
    )
    for count, one in found.items():
        percent = {name: f"{100 * value:.3f}" for name, value in one.items()}
        print(
            f"{count:7}{one['pulls']:7.0f}{percent['loss']:>8}{percent['loss_min']:>8}"
            f"{percent['loss_max']:>8}{percent['loss_mean']:>9} ±{percent['loss_error']:>6}"
            f"{percent['work_loss']:>9} ±{percent['work_loss_error']:>6}"
            f"{percent['lease_wait']:>8}{percent['server_cpu']:>8}"
        )
    print("percent of the trainer's time")


if __name__ == "__main__":
    main()
