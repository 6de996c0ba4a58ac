# SPDX-License-Identifier: Apache-2.0
"""Two trainers, at different addresses, whose adapters have the same names in one engine."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import ADDRESS, OTHER_WORLD, WORLD, FakeClient, FakeTrainer, Run, until
from fanin import errors
from fanin.config import inference_config
from fanin.engine.clients import ClientPool, Source
from fanin.engine.metrics import Metrics
from fanin.engine.pulls import Adapter
from fanin.vllm.state import State
from test_shared_pulls import Bench

NAME = "policy-run0-step12"
OTHER_ADDRESS = "127.0.0.1:7000"
OTHER = Source.of([OTHER_ADDRESS])


class TwoTrainers(Bench):
    """``trainer`` is the engine's own, ``other`` is named by requests."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.other = FakeTrainer()
        self.other.world = OTHER_WORLD
        self.state = State(
            inference_config({"FANIN_TRAINER": ADDRESS, "NIXL_LORA_CACHE_DIR": str(root)}),
            pool=ClientPool(self._client),
            counters=Metrics(),
        )
        self.keeper = self.state.keeper
        self.keeper._poll = 0.001

    def _client(self, addresses: list[str], **options: Any) -> FakeClient:
        at = self.other if addresses == [OTHER_ADDRESS] else self.trainer
        return at.client(addresses, **options)

    async def ask_other(self, step: int = 12, **more: Any) -> Adapter:
        """What the other trainer's client gets."""
        self.other.commit(step)
        wanted = dataclasses.replace(self.wanted(step, source=OTHER), **more)
        adapter = await self.state.pulls.fetch(wanted)
        adapter.pins -= 1
        return adapter

    @property
    def ended(self) -> int:
        return int(self.state.counters.snapshot()["worlds_ended"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanin.engine.metrics._make", lambda registry: None)
    monkeypatch.setattr("fanin.engine.trainer_watch._EVERY", 0.01)


@pytest.fixture
def bench(tmp_path: Path) -> TwoTrainers:
    return TwoTrainers(tmp_path)


async def loaded(bench: TwoTrainers) -> list[Adapter]:
    """Adapters of two runs, whose trainer is watched."""
    await bench.state.attach(bench.engine)
    bench.trainer.runs["1"] = Run()
    adapters = [await bench.fetch(12), await bench.fetch(3, run="1")]
    await until(lambda: bench.trainer.watching > 0)
    return adapters


async def test_a_name_stays_with_the_trainer_that_answers(bench: TwoTrainers) -> None:
    mine = await loaded(bench)
    with pytest.raises(errors.RequestError) as refused:
        await bench.ask_other()
    told = str(refused.value)
    assert all(one in told for one in (NAME, WORLD, ADDRESS, OTHER_WORLD, OTHER_ADDRESS, "prefix"))
    assert refused.value.key == "lora_name"
    assert bench.other.pulls == [] and bench.ended == 0
    assert [bench.keeper.get(one.name) for one in mine] == mine
    assert {one.name for one in mine} == set(bench.engine.lora_requests)
    # Under a name of its own it is served beside them.
    assert (await bench.ask_other(name="theirs")).world == OTHER_WORLD


async def test_a_pull_under_way_is_not_lost(bench: TwoTrainers) -> None:
    await loaded(bench)
    under_way = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(4, run="1")))
    await until(lambda: bench.trainer.waits > 0)
    with pytest.raises(errors.RequestError):
        await bench.ask_other()
    bench.trainer.commit(4, "1")
    assert (await under_way).world == WORLD


async def test_another_step_of_another_trainer_does_not_take_the_name(bench: TwoTrainers) -> None:
    """A name that says no step is loaded again at each."""
    await bench.state.attach(bench.engine)
    bench.trainer.commit(12)
    mine = await bench.state.pulls.fetch(dataclasses.replace(bench.wanted(12), name="policy"))
    with pytest.raises(errors.RequestError, match="'policy'"):
        await bench.ask_other(13, name="policy")
    assert bench.keeper.get("policy") is mine and bench.other.pulls == []


async def test_of_two_at_once_the_first_has_the_name(bench: TwoTrainers) -> None:
    await bench.state.attach(bench.engine)
    second = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(12, source=OTHER)))
    await until(lambda: bench.other.waits > 0)
    mine = await bench.fetch(12)
    bench.other.commit(12)
    with pytest.raises(errors.RequestError, match=NAME):
        await second
    assert bench.keeper.get(NAME) is mine and bench.ended == 0
    assert not list(bench.state.places.root.glob(f"{OTHER_WORLD}/*/*"))


async def test_nobody_gets_the_adapter_of_a_trainer_that_was_not_named(bench: TwoTrainers) -> None:
    mine = await loaded(bench)
    bench.other.end()
    with pytest.raises(errors.UnreachableError):
        await bench.state.pulls.fetch(bench.wanted(12, source=OTHER))
    bench.other.alive, bench.other.mixed = True, True
    with pytest.raises(errors.PeerError):
        await bench.state.pulls.fetch(bench.wanted(12, source=OTHER))
    assert bench.keeper.get(NAME) is mine[0] and bench.ended == 0


async def test_a_launch_elsewhere_has_the_name_when_the_old_one_is_silent(
    bench: TwoTrainers,
) -> None:
    """What it names is its own; the rest of the old one stays, as after every training."""
    old, rest = await loaded(bench)
    bench.trainer.end()
    await until(lambda: bench.state.watch.status() == [WORLD])
    new = await bench.ask_other()
    assert new.world == OTHER_WORLD and bench.keeper.get(NAME) is new
    assert bench.keeper.get(rest.name) is rest and bench.ended == 0
    await bench.keeper.settled()
    assert not old.path.exists() and rest.path.exists()


async def test_a_launch_elsewhere_has_the_name_when_the_old_one_has_a_successor(
    bench: TwoTrainers,
) -> None:
    await loaded(bench)
    with pytest.raises(errors.RequestError):
        await bench.ask_other()
    bench.trainer.restart("a" * 32, 1)
    await until(lambda: bench.ended == 1)
    assert (await bench.ask_other()).world == OTHER_WORLD
