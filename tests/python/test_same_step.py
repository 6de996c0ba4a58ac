# SPDX-License-Identifier: Apache-2.0
"""A directory that holds a step is not taken for the same step of ranks that were started again:
they may have other bytes under its number."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import fanin
import local_world
import numpy as np
import pytest
from fanin.engine.clients import is_outlived
from fanin.engine.directories import incarnations_in
from fanin.errors import FaninError
from local_world import A_NAME, B_NAME, PATIENCE
from safetensors.numpy import load_file

STEP, WORLD = 5, 3


class Trainer:
    """Ranks that hold thirds of a matrix, or all of it, filled with a number."""

    def __init__(self, run: str, *, replicas: bool = False) -> None:
        self.run, self.replicas, self.world_id = run, replicas, os.urandom(16)
        self.ranks = [self.start(rank, 1) for rank in range(WORLD)]

    def start(self, rank: int, value: float, step: int = STEP) -> fanin.Server:
        """Rank *rank*, of another process."""
        server = fanin.Server(world_id=self.world_id, rank=rank, world_size=WORLD, use_ucx=False)
        first, last = (0, WORLD) if self.replicas else (rank, rank + 1)
        rows = np.full((last - first, 64), value, np.float32)
        columns = np.full((64, last - first), value, np.float32)
        server.put(
            self.run,
            [
                fanin.shard_of(A_NAME, rows, shape=(WORLD, 64), offset=(first, 0)),
                fanin.shard_of(B_NAME, columns, shape=(64, WORLD), offset=(0, first)),
            ],
        )
        if self.run.startswith("lora"):
            server.set_metadata(self.run, local_world.CONFIG)
        server.commit(self.run, step)
        return server

    def restart(self, rank: int, value: float) -> None:
        self.ranks[rank].close()
        self.ranks[rank] = self.start(rank, value)

    def close(self) -> None:
        for server in self.ranks:
            server.close()

    def pull(self, directory: Path) -> bool:
        """As a program that is started for it; whether it found the step there."""
        with local_world.client_of(self.ranks) as client:
            then, end = incarnations_in(directory), time.monotonic() + PATIENCE
            outlived = then is None or is_outlived(client, self.run, then, end)
            call = client.pull_adapter if self.run.startswith("lora") else client.pull_model
            result = call(self.run, directory, timeout=PATIENCE)
        assert result.reused is not outlived  # the engines judge as the library does
        assert sorted(one for one in os.listdir(directory.parent) if one[0] == ".") == []
        return bool(result.reused)

    def command(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        target = ",".join(local_world.addresses(self.ranks))
        return subprocess.run(
            [local_world.nixl_fetch(), "pull", target, self.run, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


@pytest.fixture(params=["full:0", "lora:0"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    made = Trainer(request.param)
    yield made
    made.close()


@pytest.fixture
def replicas() -> Iterator[Trainer]:
    made = Trainer("full:0", replicas=True)
    yield made
    made.close()


def held(directory: Path) -> list[float]:
    """What the ranks' thirds are filled with."""
    (file,) = directory.glob("*.safetensors")
    (rows,) = [one for one in load_file(file).values() if one.shape == (WORLD, 64)]
    assert (rows == rows[:, :1]).all()
    return [float(one) for one in rows[:, 0]]


def test_all_ranks(trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = tmp_path / "it"
    assert not trainer.pull(where)
    assert trainer.pull(where)
    inode = where.stat().st_ino
    for rank in range(WORLD):
        trainer.restart(rank, 2)
    with caplog.at_level(logging.WARNING):
        assert not trainer.pull(where)
    assert "rank 0 was started again since: it is pulled again" in caplog.text
    assert held(where) == [2, 2, 2]
    assert where.stat().st_ino != inode
    assert trainer.pull(where)


def test_one_rank_and_the_command(trainer: Trainer, tmp_path: Path) -> None:
    where = tmp_path / "it"
    assert trainer.command(where).returncode == 0
    trainer.restart(1, 4)
    done = trainer.command(where, "--json")
    assert json.loads(done.stdout)["reused"] is False
    assert (
        f"'{where}' holds step {STEP} of {trainer.run}, but rank 1 was started again since:"
        " it is pulled again" in done.stderr
    )
    assert held(where) == [1, 4, 1]
    assert "was there already" in trainer.command(where, "--verify").stdout


def test_what_is_not_replaced(trainer: Trainer, tmp_path: Path) -> None:
    where = tmp_path / "it"
    trainer.pull(where)
    (where / "tokenizer.json").write_text("mine")
    assert trainer.pull(where)
    trainer.restart(2, 3)
    with pytest.raises(FaninError, match=r"rank 2 was started again.*'tokenizer\.json' in it"):
        trainer.pull(where)
    assert held(where) == [1, 1, 1]
    assert (where / "tokenizer.json").read_text() == "mine"
    (where / "tokenizer.json").unlink()
    assert not trainer.pull(where)
    assert held(where) == [1, 1, 3]


def test_replicas(replicas: Trainer, tmp_path: Path) -> None:
    """Whichever was read: what one has had since then is enough."""
    where = tmp_path / "it"
    assert not replicas.pull(where)
    replicas.ranks[0].close()
    assert replicas.pull(where)
    replicas.ranks[0] = replicas.start(0, 1)
    replicas.restart(1, 1)
    assert replicas.pull(where)
    replicas.restart(2, 1)
    assert not replicas.pull(where)


def test_who_was_behind(replicas: Trainer, tmp_path: Path) -> None:
    """It comes to other bytes of the step, alone: without those who had it first."""
    where = tmp_path / "it"
    replicas.ranks[2].close()
    late = replicas.ranks[2] = replicas.start(2, 7, STEP - 1)
    assert not replicas.pull(where)
    late.begin_update(replicas.run)
    late.commit(replicas.run, STEP)
    assert replicas.pull(where)
    for server in replicas.ranks[:2]:
        server.close()
    assert not replicas.pull(where)
    assert held(where) == [7, 7, 7]
