# SPDX-License-Identifier: Apache-2.0
"""The trainer is asked first: a rank that is behind is waited for, one that is gone is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fanin.fleet.steps as trainer_module
import pytest
from fanin.errors import FaninError, PullTimeoutError, StaleError, UnreachableError
from fanin.info import write_info
from fanin.sync import Registry, wait_for_step
from fleet import FakeVLLM, WholeTrainer

SOON = 60.0
"""Seconds within which what needs two is over on a busy machine; timeouts here are far longer."""


@pytest.fixture
def trainer() -> Iterator[WholeTrainer]:
    with WholeTrainer(3) as result:
        result.commit(1)
        yield result


def lost(trainer: WholeTrainer, step: int | None = 2) -> tuple[FaninError, float]:
    began = time.monotonic()
    with pytest.raises(FaninError) as caught:
        wait_for_step(trainer.info, "0", step, timeout=120)
    return caught.value, time.monotonic() - began


@pytest.mark.parametrize("step", [1, 2, None])
def test_a_rank_that_ended_before_the_sync_is_named_at_once(
    trainer: WholeTrainer, step: int | None
) -> None:
    trainer.servers[1].close(drain=0)
    error, took = lost(trainer, step)
    assert isinstance(error, UnreachableError) and took < SOON
    assert error.rank == 1 and "rank 1 of the trainer is gone" in str(error)
    assert error.address == trainer.info.addresses[1] and "refused" in str(error)


def test_all_ranks_ended(trainer: WholeTrainer) -> None:
    for server in trainer.servers:
        server.close(drain=0)
    error, took = lost(trainer)
    assert isinstance(error, UnreachableError) and took < SOON
    assert "127.0.0.1" in str(error)


def test_a_rank_that_ends_while_its_step_is_waited_for(trainer: WholeTrainer) -> None:
    trainer.commit(2, ranks=[0, 2])
    caught: list[FaninError] = []

    def wait() -> None:
        with pytest.raises(FaninError) as error:
            wait_for_step(trainer.info, "0", 2, timeout=120)
        caught.append(error.value)

    thread = threading.Thread(target=wait)
    thread.start()
    trainer.servers[1].close(drain=0)
    thread.join(60)
    assert isinstance(caught[0], UnreachableError) and caught[0].rank == 1


def test_a_rank_that_is_behind_is_waited_for_all_the_time(trainer: WholeTrainer) -> None:
    trainer.commit(2, ranks=[0, 2])
    began = time.monotonic()
    with pytest.raises(PullTimeoutError, match="rank 1 is at 1"):
        wait_for_step(trainer.info, "0", 2, timeout=4)
    assert time.monotonic() - began >= 4


def test_a_trainer_that_is_started_again_meanwhile(
    trainer: WholeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was asked for will not come: its new launch begins anew."""
    write_info(tmp_path, trainer.info)
    caught: list[FaninError] = []
    asked, pause = threading.Event(), trainer_module._pause

    def told(seconds: float, stop: threading.Event | None) -> None:
        asked.set()
        pause(seconds, stop)

    def wait() -> None:
        with pytest.raises(FaninError) as error:
            wait_for_step(tmp_path, "0", 2, timeout=120)
        caught.append(error.value)

    monkeypatch.setattr(trainer_module, "_pause", told)
    thread = threading.Thread(target=wait)
    thread.start()
    assert asked.wait(60)
    with WholeTrainer(3, world=bytes(range(2, 18))) as second:
        second.commit(1)
        write_info(tmp_path, second.info)
        trainer.__exit__()
        thread.join(60)
        assert isinstance(caught[0], StaleError) and "started again" in str(caught[0])
        assert wait_for_step(tmp_path, "0", 1, timeout=60)[1] == second.info.world_id


def test_nothing_is_paused_for_a_rank_that_is_gone(trainer: WholeTrainer) -> None:
    trainer.servers[2].close(drain=0)
    with FakeVLLM() as engine:
        registry = Registry(trainer.info, timeout=120)
        registry.add(engine.url)
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="rank 2"):
            registry.sync(1)
        assert time.monotonic() - began < SOON and engine.paths == []
