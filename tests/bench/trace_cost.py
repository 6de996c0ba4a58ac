#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""trace_cost.py [--pairs N] [--pulls N] [--shape NAME] [--world-size N]

What a trace costs pulls into memory: blocks of pulls without and with one take turns. A block's
time holds all that the trace does, the writing of its file too. Medians of a pull's mean CPU time
(wall clock says little of it beside others), the median ratio of neighbours and its quartiles.
Needs the package and nixl-fetch, whose ranks serve the tensors.
"""

from __future__ import annotations

import argparse
import contextlib
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


def block(client: fanin.Client, into: fanin.PackedTensors, pulls: int, trace: Path | None) -> float:
    """Seconds of CPU time a pull."""
    begin = time.process_time()
    with fanin.trace(trace) if trace else contextlib.nullcontext():
        for _ in range(pulls):
            client.pull_into(0, into)
    return (time.process_time() - begin) / pulls


def measure(addresses: tuple[str, ...], options: argparse.Namespace, folder: Path) -> None:
    off, on = [], []
    with fanin.Client(addresses) as client:
        into = fanin.pack(
            fanin.shard_of(e.name, np.empty(e.shape, np.uint16), dtype="BF16")
            for e in client.catalog(0)
        )
        block(client, into, options.pulls, None)
        for pair in range(options.pairs):
            files = [(None, off), (folder / f"{pair}.json", on)]
            for trace, times in files if pair % 2 else files[::-1]:
                times.append(block(client, into, options.pulls, trace))
    ratios = [b / a for a, b in zip(off, on, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    spans = (folder / "0.json").read_text().count('"ph":"X"') / options.pulls
    print(
        f"without {statistics.median(off) * 1e6:.1f} us, with {statistics.median(on) * 1e6:.1f} us"
    )
    print(f"ratio {quartiles[1]:.4f}, quartiles {quartiles[0]:.4f} to {quartiles[2]:.4f}")
    print(f"{spans:.0f} spans a pull, load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--pulls", type=int, default=200)
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
