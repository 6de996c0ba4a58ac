# SPDX-License-Identifier: Apache-2.0
"""Ranks of a whole model's trainer, and workers, that end, die or stall at the worst time."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin
import pytest
import torch
from fanin.errors import FaninError
from full_models import save_full_model
from full_trainer import FullTrainer
from test_full_worlds import DTYPES, Engine, same, saved
from worlds import child

SOON = 30.0  # far below the timeouts that the waits have


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_full_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Iterator[FullTrainer]:
    with FullTrainer(model, tmp_path / "run", world_size=2, server={"lease": 1.0}) as ranks:
        ranks.wait_ready()
        yield ranks


@pytest.mark.parametrize("how", ["closes", "is killed", "is killed in updating()"])
def test_a_rank_that_ends_while_a_worker_waits(trainer: FullTrainer, how: str) -> None:
    """Named at once, not when the worker's time is over."""
    with (
        Engine(trainer.addresses) as engine,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        assert engine.pull() == 0
        if how == "is killed in updating()":
            trainer.hang_in_update(1)
        begun = time.monotonic()
        waiting = pool.submit(engine.pull, step=1, timeout=120)
        if how == "closes":
            trainer.tell_one(1, "close")
        else:
            trainer.kill_rank(1)
        with pytest.raises(FaninError) as caught:
            waiting.result(timeout=100)
        assert time.monotonic() - begun < SOON
        assert caught.value.rank == 1 and trainer.addresses[1] in str(caught.value)
        # What is in the tensors is the step before, or rubbish that no caller was told is good.
        with pytest.raises(FaninError):
            engine.pull(timeout=5)


def test_a_rank_that_closes_while_a_session_reads(trainer: FullTrainer) -> None:
    """No bytes of memory that the server does not lend any more are taken for good."""
    with fanin.Client(trainer.addresses) as client:
        packed = destinations(client)
        with client.begin("full:0", packed, timeout=60) as session:
            session.read(0, 3)
            trainer.tell_one(1, "close")
            trainer.tell_one(1, "write_outside")
            with pytest.raises(FaninError) as caught:
                session.read()
                session.end()
        assert caught.value.rank == 1, caught.value


def test_a_worker_that_is_stopped_in_mid_read_delays_a_step_by_the_lease(
    trainer: FullTrainer, tmp_path: Path
) -> None:
    options = {"addresses": trainer.addresses, "run": "full:0"}
    with child("worker", "stopped_worker.py", options, tmp_path) as worker:
        worker.expect("reading")
        worker.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.process.pid, os.WSTOPPED)
        began = time.monotonic()
        trainer.step()
        assert time.monotonic() - began < SOON
        worker.process.send_signal(signal.SIGCONT)
        worker.tell("go on")
        told = worker.expect("read")
        # It learns that its bytes are of no step, and gets the next one.
        assert told["ended"] == "StaleError" and told["step"] == 1
    with Engine(trainer.addresses) as engine:
        assert engine.pull() == 1
        same(engine.tensors, saved_now(trainer, tmp_path))


def saved_now(trainer: FullTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.gather(folder / "now")
    return saved(folder / "now")


def destinations(client: fanin.Client) -> Any:
    entries = client.catalog("full:0")
    return fanin.pack(
        fanin.shard_of(one.name, torch.empty(one.shape, dtype=DTYPES[one.dtype])) for one in entries
    )
