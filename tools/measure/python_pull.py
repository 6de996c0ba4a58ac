#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""python_pull.py [--tensors N] [--columns N] [--device cuda|cpu] [--pulls N] [--apart]

What Python costs a pull into tensors: wall clock of Client.pull_into() beside the C library's own
time, and processor time of the calling thread, by which a busy machine tells something, too. With
tensors given by name (looked at by the C library at each call, if this PyTorch lets it) and packed
once (fanin.pack), and what it takes to describe them one by one. One rank that is not updated, in
another process; BF16 tensors of 16 rows in one allocation, or with --apart the worker's in one
each; on CUDA from GPU 0 into the last GPU. Medians, the two ways alternated. Needs the package and
PyTorch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import fanin
import torch

ROWS = 16


def names(count: int) -> list[str]:
    return [f"base_model.model.model.layers.{i}.lora_A.weight" for i in range(count)]


def memory(options: argparse.Namespace, device: str, apart: bool = False) -> dict[str, Any]:
    """The tensors, views of one allocation, or of one each."""
    count, size = options.tensors, (ROWS, options.columns)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    if apart:
        return {name: torch.ones(size, **how) for name in names(count)}
    return dict(zip(names(count), torch.ones((count, *size), **how).unbind(), strict=True))


def serve(options: argparse.Namespace) -> None:
    """A rank, until stdin closes."""
    tensors = memory(options, "cuda:0" if options.device == "cuda" else "cpu")
    with fanin.Server(world_id=os.urandom(16), rank=0, world_size=1) as server:
        server.put("lora:0", [fanin.shard_of(name, value) for name, value in tensors.items()])
        server.commit("lora:0", 1)
        print(server.port, flush=True)
        sys.stdin.read()


def measure(options: argparse.Namespace, port: int) -> None:
    last = torch.cuda.device_count() - 1
    device = f"cuda:{last}" if options.device == "cuda" else "cpu"
    tensors = memory(options, device, options.apart)
    start = time.perf_counter()
    packed = fanin.pack(fanin.shard_of(name, value) for name, value in tensors.items())
    described = time.perf_counter() - start
    ways: dict[str, Any] = {"by name": tensors, "packed": packed}
    wall: dict[str, list[float]] = {way: [] for way in ways}
    inside: dict[str, list[float]] = {way: [] for way in ways}
    busy: dict[str, list[float]] = {way: [] for way in ways}
    with fanin.Client([f"127.0.0.1:{port}"]) as client:
        for wanted in (packed, packed, tensors, tensors):  # from the second time on it is kept
            client.pull_into("0", wanted)
        for _ in range(options.pulls):
            for way, wanted in ways.items():
                start, used = time.perf_counter(), time.thread_time()
                result = client.pull_into("0", wanted)
                busy[way].append(time.thread_time() - used)
                wall[way].append(time.perf_counter() - start)
                inside[way].append(result.total)
    print(f"{result.tensors} tensors, {result.bytes / 1e6:.1f} MB, by {result.path}")
    for way in ways:
        ms = [1e3 * statistics.median(of[way]) for of in (wall, inside, busy)]
        print(f"{way:8} {ms[0]:9.3f} ms, of them {ms[1]:.3f} in the library; CPU {ms[2]:.3f} ms")
    print(f"one by one {1e3 * described:7.3f} ms, to describe and pack them, once")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=448)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--pulls", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    rank = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line.strip():
            sys.exit("the rank did not start: its message is above")
        measure(options, int(line))
    finally:
        rank.communicate()


if __name__ == "__main__":
    main()
