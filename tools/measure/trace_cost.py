#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""trace_cost.py [--turns N] [--pulls N] [--shape NAME] [--world-size N]

What a trace costs pulls into memory: short blocks of pulls without (A) and with one (B), in turns
of ABBA, so that what drifts falls on both alike. A block's time holds all that the trace does,
also the thread that writes its file. CPU time, user and system, and wall clock of a pull: medians,
and the mean logarithm of the turns' ratios, a tenth of them cut off at either end, with its
standard error. Needs the package and nixl-fetch, whose ranks serve the tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import fanin
import numpy as np
from fanin.info import addresses_of


def block(
    client: fanin.Client, into: fanin.PackedTensors, pulls: int, trace: Path | None
) -> tuple[float, float]:
    """Seconds of CPU time and of the clock, a pull."""
    cpu, clock = time.process_time(), time.perf_counter()
    with fanin.trace(trace) if trace else contextlib.nullcontext():
        for _ in range(pulls):
            client.pull_into(0, into)
    return (time.process_time() - cpu) / pulls, (time.perf_counter() - clock) / pulls


def tell(what: str, off: list[float], on: list[float]) -> None:
    """*off* and *on*: seconds of each turn's two blocks together."""
    logs = sorted(math.log(b / a) for a, b in zip(off, on, strict=True))
    cut = len(logs) // 10
    kept = logs[cut : len(logs) - cut]
    mean, error = statistics.mean(kept), statistics.stdev(kept) / math.sqrt(len(kept))
    print(
        f"{what}: without {statistics.median(off) * 5e5:.1f} us, with "
        f"{statistics.median(on) * 5e5:.1f} us, ratio {math.exp(mean):.4f} +- {error:.4f}"
    )


def measure(addresses: tuple[str, ...], options: argparse.Namespace, folder: Path) -> None:
    totals: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
    with fanin.Client(addresses) as client:
        into = fanin.pack(
            fanin.shard_of(e.name, np.empty(e.shape, np.uint16), dtype="BF16")
            for e in client.catalog(0)
        )
        block(client, into, options.pulls, None)
        for turn in range(options.turns):
            sums = [[0.0, 0.0], [0.0, 0.0]]
            for number, traced in enumerate((False, True, True, False)):
                file = folder / f"{turn}-{number}.json"
                took = block(client, into, options.pulls, file if traced else None)
                sums[traced] = [a + b for a, b in zip(sums[traced], took, strict=True)]
            for kind, lists in enumerate(totals):
                lists[0].append(sums[False][kind])
                lists[1].append(sums[True][kind])
    spans = (folder / "0-1.json").read_text().count('"ph":"X"') / options.pulls
    tell("CPU", *totals[0])
    tell("clock", *totals[1])
    print(
        f"{options.turns} turns of 4 blocks of {options.pulls} pulls, {spans:.0f} spans a pull, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--pulls", type=int, default=20)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--world-size", type=int, default=8)
    options = parser.parse_args()
    tool = os.environ.get("NIXL_FETCH") or shutil.which("nixl-fetch") or "nixl-fetch"
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        command = [tool, "serve", "--adapter-shape", options.shape, "--run", "0", "--wait-commit"]
        command += ["--world-size", str(options.world_size), "--info", str(folder / "info.json")]
        ranks = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert ranks.stdout is not None
            ranks.stdout.readline()
            measure(addresses_of(folder / "info.json"), options, folder)
        finally:
            ranks.terminate()
            ranks.wait()


if __name__ == "__main__":
    main()
