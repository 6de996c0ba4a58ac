# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks for the engine checks: nixl-fetch's stand-in, and servers in this process.

The servers in this process lend torch tensors to the library as a trainer does: by reference,
under the names that the parameters have in memory, each rank its chunk of dimension 0. The
environment names the tool (NIXL_FETCH).
"""

import contextlib
import os
import select
import subprocess
import tempfile

import fanin

FETCH = os.environ["NIXL_FETCH"]


def shard(name, value, rank, world_size):
    """The rows that torch.chunk gives this rank; the last ranks may get none."""
    rows = value.chunk(world_size)
    first = sum(part.shape[0] for part in rows[:rank])
    part = rows[rank] if rank < len(rows) else value[:0]
    return fanin.shard_of(name, part, shape=value.shape, offset=(first,) + (0,) * (value.dim() - 1))


def start_rank(rank, world_size, world_id, tensors, metadata):
    server = fanin.Server(world_id=world_id, rank=rank, world_size=world_size)
    server.put("lora:0", [shard(name, t, rank, world_size) for name, t in tensors.items()])
    server.set_metadata("lora:0", metadata)
    server.commit("lora:0", 1)
    return server


@contextlib.contextmanager
def ranks_of(tensors, metadata, world_size=4):
    """Ranks in this process that hold these tensors; yields the tool's arguments that name them."""
    tensors = {name: value.detach() for name, value in tensors.items()}
    world_id, servers = os.urandom(16), []
    try:
        for rank in range(world_size):
            servers.append(start_rank(rank, world_size, world_id, tensors, metadata))
        yield [",".join(f"127.0.0.1:{server.port}" for server in servers)]
    finally:
        for server in servers:
            server.close()


@contextlib.contextmanager
def serve(world_size, *arguments):
    """The tool's own ranks, on ephemeral ports; yields the tool's arguments that name them."""
    with tempfile.TemporaryDirectory() as scratch:
        info = os.path.join(scratch, "nixl_info.json")
        process = subprocess.Popen(
            [FETCH, "serve", "--quiet", "-n", str(world_size), "--info", info, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            line = ""
            if select.select([process.stdout], [], [], 120)[0]:
                line = process.stdout.readline()
            if not line.startswith("ready:"):
                raise RuntimeError("the ranks did not get ready")
            yield [info]
        finally:
            process.terminate()
            process.wait(timeout=60)
            process.stdout.close()


def pull(target, directory, *arguments):
    """The directory, with what nixl-fetch pulled into it."""
    command = [FETCH, "pull", *target, "--run", "0", "--timeout", "120s", "--quiet"]
    done = subprocess.run(
        [*command, "--out", str(directory), *arguments], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"the pull failed: {done.stderr.strip()}")
    return directory
