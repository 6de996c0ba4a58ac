# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks for tests: in this process, and one a process."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest

PYTHON = Path(fanin.__file__).resolve().parents[1]  # that these tests use: the tree's, or installed
PUBLICATION = "lora:0"
#: How much longer than elsewhere all takes here: tools/check-aarch64 says so of emulation.
SLOWNESS = float(os.environ.get("FANIN_TEST_SLOWNESS", "1"))
PATIENCE = 30.0 * SLOWNESS  # seconds: what only a failure takes

#: Rows of "...q_proj.lora_A" that ranks 0 to 2 hold: uneven, and nothing.
ROWS = ((0, 2), (2, 3), (3, 3))
CONFIG = {
    "peft_config": '{"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], '
    '"base_model_name_or_path": "base"}'
}
A_NAME = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
B_NAME = "base_model.model.layers.0.self_attn.q_proj.lora_B.weight"


def weights(step: int) -> dict[str, np.ndarray]:
    """The whole adapter at *step*: [3, 8] and [8, 3]."""
    a = np.arange(24, dtype=np.float32).reshape(3, 8) + 1000 * step
    return {A_NAME: a, B_NAME: -a.T.copy()}


def shards_of(rank: int, step: int, world: int = len(ROWS)) -> list[fanin.Shard]:
    """Rank *rank*'s rows of A, and its columns of B, which lie apart in memory."""
    first, last = ROWS[rank] if world > 1 else (0, 3)
    whole = weights(step)
    return [
        fanin.shard_of(A_NAME, whole[A_NAME][first:last].copy(), shape=(3, 8), offset=(first, 0)),
        fanin.shard_of(B_NAME, whole[B_NAME][:, first:last], shape=(8, 3), offset=(0, first)),
    ]


def empty() -> dict[str, np.ndarray]:
    """Arrays for the whole adapter."""
    return {name: np.zeros_like(value) for name, value in weights(1).items()}


def packed(got: dict[str, np.ndarray]) -> fanin.PackedTensors:
    return fanin.pack(fanin.shard_of(name, got[name], writable=True) for name in got)


def assert_step(got: dict[str, np.ndarray], step: int) -> None:
    for name, value in weights(step).items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def nixl_fetch() -> str:
    """The command of this build, or the installed one."""
    tool = os.environ.get("NIXL_FETCH", "")
    if not tool and "FANIN_LIBRARY" in os.environ:
        tool = str(Path(os.environ["FANIN_LIBRARY"]).parent / "tools" / "nixl-fetch")
    tool = tool or shutil.which("nixl-fetch") or ""
    if not os.access(tool, os.X_OK):
        pytest.skip("no nixl-fetch: set NIXL_FETCH")
    return tool


@contextmanager
def servers(world: int = len(ROWS), **options: Any) -> Iterator[list[fanin.Server]]:
    """A trainer of *world* ranks in this process; nothing is put."""
    world_id = options.pop("world_id", None) or os.urandom(16)
    options.setdefault("use_ucx", False)
    made: list[fanin.Server] = []
    try:
        for rank in range(world):
            made.append(fanin.Server(world_id=world_id, rank=rank, world_size=world, **options))
        yield made
    finally:
        for server in made:
            server.close()


def publish(ranks: list[fanin.Server], step: int) -> None:
    """Replaces all shards by those of *step* and commits it."""
    for server in ranks:
        publish_rank(server, step)


def publish_rank(server: fanin.Server, step: int) -> None:
    if server.publications():
        server.begin_update(PUBLICATION)
    server.put(PUBLICATION, shards_of(server.rank, step, server.world_size), replace=True)
    server.set_metadata(PUBLICATION, CONFIG)
    server.commit(PUBLICATION, step)


def addresses(ranks: list[fanin.Server]) -> list[str]:
    return [f"127.0.0.1:{server.port}" for server in ranks]


def client_of(ranks: list[fanin.Server], **options: Any) -> fanin.Client:
    """By streams, which notice at once what a rank takes back."""
    options.setdefault("use_ucx", False)
    options.setdefault("path", "stream")
    return fanin.Client(addresses(ranks), **options)


# ---------------------------------------------------------------------------------- processes


def _serve(
    world_id: bytes, rank: int, use_ucx: bool, pipe: multiprocessing.connection.Connection
) -> None:
    """One rank in a process of its own: publishes each step it is sent, until None comes."""
    with fanin.Server(
        world_id=world_id, rank=rank, world_size=len(ROWS), use_ucx=use_ucx
    ) as server:
        pipe.send(server.port)
        while (step := pipe.recv()) is not None:
            publish_rank(server, step)
            pipe.send(step)


class Processes:
    """A trainer whose ranks are processes."""

    def __init__(self, use_ucx: bool) -> None:
        context = multiprocessing.get_context("spawn")
        world_id = os.urandom(16)
        self.pipes = []
        self.processes = []
        for rank in range(len(ROWS)):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(world_id, rank, use_ucx, there))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.addresses = [f"127.0.0.1:{self.receive(pipe)}" for pipe in self.pipes]

    @staticmethod
    def receive(pipe: multiprocessing.connection.Connection) -> Any:
        assert pipe.poll(PATIENCE), "a rank says nothing"
        return pipe.recv()

    def publish(self, step: int) -> None:
        for pipe in self.pipes:
            pipe.send(step)
        for pipe in self.pipes:
            assert self.receive(pipe) == step

    def close(self) -> list[int | None]:
        """Exit codes of the ranks."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(PATIENCE)
        return [process.exitcode for process in self.processes]


@contextmanager
def served(world: int) -> Iterator[tuple[str, list[int]]]:
    """*world* ranks of `nixl-fetch serve`: their target, their processes."""
    serve = subprocess.Popen(
        [nixl_fetch(), "serve", "--adapter-shape", "small", "--world-size", str(world)]
        + ["--keep-going"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serve.stdout is not None
        ready = serve.stdout.readline()
        children = subprocess.run(
            ["pgrep", "-P", str(serve.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        by_name = {Path(f"/proc/{pid}/comm").read_text().strip(): int(pid) for pid in children}
        yield (
            ready.split("target ")[1].strip(),
            [by_name[f"nixl-rank-{rank}"] for rank in range(world)],
        )
    finally:
        serve.terminate()
        serve.wait(PATIENCE)


# ---------------------------------------------------------------------------------- scripts


def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs *code* in a fresh interpreter that finds fanin and this module."""
    path = os.pathsep.join((str(PYTHON), str(Path(__file__).parent)))
    return subprocess.run(
        [
            sys.executable,
            "-X",
            "faulthandler",
            "-W",
            "default::ResourceWarning",
            "-c",
            code,
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )


def until(condition: Callable[[], object]) -> None:
    """Waits for *condition*, which another thread or process makes true."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, "the condition never came true"
        time.sleep(0.001)


def stop(pid: int) -> None:
    """SIGSTOP, and back when every thread stands: kill() may return before that."""

    def stands() -> bool:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks
        )

    os.kill(pid, signal.SIGSTOP)
    until(stands)
