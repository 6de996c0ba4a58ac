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
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time


def adapter_shapes(tool, shape):
    """(bytes of a row, rows) of every tensor, as the tool's own stand-in trainer serves them."""
    with subprocess.Popen(
        [
            tool,
            "serve",
            "--adapter-shape",
            shape,
            "--world-size",
            "1",
            "--base-port",
            "0",
            "--json",
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            ready = json.loads(server.stdout.readline())
            listed = subprocess.run(
                [tool, "list", ready["target"], "--run", "0", "--json"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        finally:
            server.terminate()
    keys = json.loads(listed)["keys"]
    return [(k["bytes"] // k["shape"][0], k["shape"][0]) for k in keys]


def shard_sizes(shapes, world, rank):
    """Bytes this rank holds of each tensor (torch.chunk on dimension 0), empty ones left out."""
    sizes = []
    for row, rows in shapes:
        chunk = -(-rows // world)
        held = min(rank * chunk + chunk, rows) - min(rank * chunk, rows)
        if held:
            sizes.append(held * row)
    return sizes


def place(gpus, rank, world):
    """PyTorch's device of a rank; rank None: of the worker."""
    if not gpus:
        return "cpu"
    return f"cuda:{gpus - 1 if rank is None else rank * (gpus - 1) // world}"


def serve(shapes, world, rank, gpus, pipe):
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    sizes = shard_sizes(shapes, world, rank)
    device = place(gpus, rank, world)
    arena = torch.full((sum(sizes),), rank + 1, dtype=torch.uint8, device=device)
    if gpus:
        torch.cuda.synchronize(device)
    agent = nixl_agent(f"rank{rank}", nixl_agent_config(True, False, 0))
    agent.register_memory(arena)
    at, table = arena.data_ptr(), []
    for size in sizes:
        table.append((at, size))
        at += size
    pipe.send((agent.get_agent_metadata(), arena.get_device() if gpus else 0, table))
    pipe.recv()


def prepare(pipes, gpus):
    """One prepared READ a rank; returns a function that runs them all and gives seconds."""
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("worker", nixl_agent_config(True, False, 0))
    ranks = [pipe.recv() for pipe in pipes]
    total = sum(size for *_, table in ranks for _, size in table)
    arena = torch.zeros(total, dtype=torch.uint8, device=place(gpus, None, len(ranks)))
    kind, own = ("VRAM", arena.get_device()) if gpus else ("DRAM", 0)
    agent.register_memory(arena)
    handles, at = [], arena.data_ptr()
    for metadata, device, table in ranks:
        peer = agent.add_remote_agent(metadata)
        here = []
        for _, size in table:
            here.append((at, size, own))
            at += size
        there = [(address, size, device) for address, size in table]
        handles.append(
            agent.initialize_xfer(
                "READ", agent.get_xfer_descs(here, kind), agent.get_xfer_descs(there, kind), peer
            )
        )

    def pull():
        start = time.perf_counter()
        for handle in handles:
            agent.transfer(handle)
        left = handles
        while left:
            left = [h for h in left if agent.check_xfer_state(h) == "PROC"]
        return time.perf_counter() - start

    def proven():
        return bool((arena > 0).all())

    return pull, proven, total


def nixl_round(shapes, world, gpus, result):
    """In a process of its own, which ends with NIXL's busy threads before anything else runs."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=serve, args=(shapes, world, r, gpus, pairs[r][1]))
        for r in range(world)
    ]
    for process in processes:
        process.start()
    pull, proven, total = prepare([a for a, _ in pairs], gpus)
    pull()
    seconds = [pull() for _ in range(5)]
    result.send((seconds, total, proven()))
    for process in processes:
        process.kill()
        process.join()
    os._exit(0)  # NIXL's threads may outlive the interpreter's patience


def over_nixl(shapes, world, gpus):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=nixl_round, args=(shapes, world, gpus, there))
    process.start()
    seconds, total, proven = here.recv()
    process.join()
    if not proven:
        sys.exit("NIXL's bytes did not arrive")
    return seconds, total


def ours(tool, shape, world, gpus, path):
    where = []
    if gpus:
        where = ["--device", ",".join(map(str, range(gpus - 1))), "--dest", f"device:{gpus - 1}"]
    out = subprocess.run(
        [
            tool,
            "bench",
            "--adapter-shape",
            shape,
            "--world-size",
            str(world),
            "--path",
            path,
            *where,
            "--iterations",
            "11",
            "--json",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return json.loads(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nixl-fetch", required=True)
    parser.add_argument("--shape", default="dense")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--paths", help="default: stream,cma; with --gpus cuda_ipc")
    options = parser.parse_args()

    paths = (options.paths or ("cuda_ipc" if options.gpus else "stream,cma")).split(",")
    shapes = adapter_shapes(options.nixl_fetch, options.shape)
    times, total = {"nixl": []}, 0
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
