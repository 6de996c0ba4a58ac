# SPDX-License-Identifier: Apache-2.0
"""An adapter lives as long as the launch of the trainer that it is of has no successor."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_trainer import ADDRESS, OTHER_WORLD, WORLD, FakeClient, Run, until
from fanin import errors
from fanin.engine.clients import Source
from fanin.engine.pulls import Adapter
from fanin.info import TrainerInfo, write_info
from test_shared_pulls import Bench, Request, run

NAME = "policy-run0-step12"
NEW = "policy-run0-step1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanin.engine.metrics._make", lambda registry: None)
    monkeypatch.setattr("fanin.engine.trainer_watch._EVERY", 0.01)


@pytest.fixture(params=["by name", "by route"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Whether vLLM asks for names that it does not know, or not."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", str(int(request.param == "by name")))
    return Bench(tmp_path)


@pytest.fixture
def by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    return Bench(tmp_path)


async def loaded(bench: Bench, step: int = 12, **more: Any) -> Adapter:
    """An adapter that was pulled by its name, whose trainer is watched."""
    await bench.state.attach(bench.engine)
    adapter = await bench.fetch(step, **more)
    await until(lambda: bench.trainer.watching > 0)
    return adapter


# ---------------------------------------------------------------------------- successors


async def test_another_launch_with_the_same_step(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asks, and no route is used."""
    old = await loaded(bench)
    bench.trainer.restart(OTHER_WORLD, 12)
    await until(lambda: bench.keeper.get(NAME) is None)
    assert NAME not in bench.engine.lora_requests
    await bench.keeper.settled()
    assert not old.path.exists()
    new = await bench.fetch(12)
    assert (old.world, new.world) == (WORLD, OTHER_WORLD)
    counts = bench.state.counters.snapshot()
    assert (counts["worlds_ended"], counts["retired"], counts["worlds_silent"]) == (1, 1, 0)
    told = [r.getMessage() for r in caplog.records if "has ended" in r.getMessage()]
    assert len(told) == 1 and WORLD in told[0] and OTHER_WORLD in told[0] and NAME in told[0]


async def test_whoever_asks_at_that_moment_is_not_answered_by_the_old(by_name: Bench) -> None:
    """The engine knows that the connection was lost, and nothing else yet."""
    await loaded(by_name)
    by_name.trainer.end()
    await until(lambda: by_name.engine.lora_requests.get(NAME) is None)
    by_name.trainer.restart(OTHER_WORLD, 12)
    assert (await by_name.state.pulls.fetch(by_name.wanted(12))).world == OTHER_WORLD


async def test_ranks_that_go_one_after_the_other(by_name: Bench) -> None:
    """While some of them are there the world lives, and its end is near."""
    await loaded(by_name)
    by_name.trainer.all_ranks = False
    by_name.trainer.hang_up()
    await until(lambda: by_name.state.watch.status() == [WORLD])
    assert NAME not in by_name.engine.lora_requests
    by_name.trainer.restart(OTHER_WORLD, 12)
    assert (await by_name.state.pulls.fetch(by_name.wanted(12))).world == OTHER_WORLD


def test_a_launch_that_the_file_names_while_the_old_one_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are stopped keep who asks them waiting; the file need not wait for that. The
    adapter that was asked for last came from addresses, which tell of no successor."""
    info = tmp_path / "info"
    info.mkdir()
    write_info(info, TrainerInfo((ADDRESS,), world_id=WORLD))
    bench = Bench(tmp_path, FANIN_TRAINER=str(info / "nixl_info.json"))
    asked, goes_on = threading.Event(), threading.Event()

    def stopped(self: FakeClient, timeout: float) -> list[Any]:
        asked.set()
        goes_on.wait(60)
        raise errors.PullTimeoutError.make("rank 0 does not answer")

    async def work() -> None:
        await loaded(bench)
        await bench.fetch(13, source=Source.of([ADDRESS]))
        monkeypatch.setattr(FakeClient, "publications", stopped)
        await until(asked.is_set)
        write_info(info, TrainerInfo(("10.0.0.9:1",), world_id=OTHER_WORLD))
        await until(lambda: bench.keeper.status()["adapters"] == [])
        assert bench.engine.lora_requests == {}

    try:
        run(work())
    finally:
        goes_on.set()


async def test_an_adapter_that_comes_when_the_last_one_has_gone(bench: Bench) -> None:
    """Its world is followed anew, whatever the order of things in one turn of the loop."""
    old = await loaded(bench)
    lookout = bench.state.watch
    task = lookout._tasks[WORLD]
    bench.keeper.unloaded(NAME)
    while not task.done():
        await asyncio.sleep(0)
    bench.keeper.add(replace(old, requests=[]))
    lookout.follow(WORLD)
    bench.trainer.restart(OTHER_WORLD, 12)
    await until(lambda: bench.keeper.get(NAME) is None)


async def test_trouble_of_this_process_does_not_end_the_lookout(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await loaded(bench)
    looks = []

    def broken(*arguments: Any) -> Any:
        looks.append(1)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        for method in ("runs_now", "successor", "lost"):
            patch.setattr(bench.state.service, method, broken)
        await until(lambda: len(looks) > 5)
        assert bench.keeper.get(NAME) is old and NAME in bench.engine.lora_requests
    bench.trainer.restart(OTHER_WORLD, 12)
    await until(lambda: bench.keeper.get(NAME) is None)


async def test_adapters_of_the_world_from_wherever_they_came(bench: Bench) -> None:
    bench.trainer.runs["1"] = Run()
    await loaded(bench)
    same = Source.of(["localhost:6000"])
    await bench.fetch(1, run="1", source=same)
    bench.trainer.restart(OTHER_WORLD, 3)
    await until(lambda: bench.keeper.status()["adapters"] == [])
    assert bench.engine.lora_requests == {}
    assert bench.state.counters.snapshot()["worlds_ended"] == 1


async def test_a_pull_that_meets_another_world_at_its_address(bench: Bench) -> None:
    await bench.state.attach(bench.engine)
    old = await bench.fetch(12)
    bench.keeper.met("a file", [ADDRESS], WORLD)
    assert bench.keeper.get(NAME) is old
    bench.keeper.met("a file", ["10.0.0.1:1"], OTHER_WORLD)
    assert bench.keeper.get(NAME) is old
    bench.keeper.met("a file", ["10.0.0.1:1", ADDRESS], OTHER_WORLD)
    assert bench.keeper.get(NAME) is None


async def test_some_ranks_are_of_another_world_already(bench: Bench) -> None:
    await loaded(bench)
    bench.trainer.mixed = True
    bench.trainer.hang_up()
    await until(lambda: bench.keeper.get(NAME) is None)


@pytest.fixture
def unwatched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Only whoever asks can notice: the next look is far away, and no connection is lost."""
    monkeypatch.setattr("fanin.engine.trainer_watch._EVERY", 1000.0)
    return bench


async def test_an_engine_that_ends_watches_nobody(unwatched: Bench) -> None:
    await loaded(unwatched)
    unwatched.state.close()
    await until(lambda: unwatched.trainer.watching == 0)


async def test_a_pull_that_meets_another_world_ends_the_old_one_itself(unwatched: Bench) -> None:
    old = await loaded(unwatched)
    unwatched.trainer.world, unwatched.trainer.runs = OTHER_WORLD, {"0": Run(step=13)}
    new = await unwatched.state.pulls.fetch(unwatched.wanted(13))
    assert new.world == OTHER_WORLD
    assert unwatched.keeper.get(old.name) is None and NAME not in unwatched.engine.lora_requests


async def test_a_name_is_not_answered_while_ranks_are_of_two_worlds(unwatched: Bench) -> None:
    await loaded(unwatched)
    unwatched.trainer.mixed = True
    with pytest.raises(errors.PeerError):
        await unwatched.state.pulls.fetch(unwatched.wanted(12))
    assert unwatched.keeper.get(NAME) is None


async def test_an_adapter_that_leaves_while_its_world_is_asked(
    unwatched: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await loaded(unwatched)
    loop, gone = asyncio.get_running_loop(), threading.Event()

    def world_now(source: Source, timeout: float, _: Adapter) -> str:
        loop.call_soon_threadsafe(
            lambda: (unwatched.keeper.retire(old, "it was unloaded", "unloaded"), gone.set())
        )
        assert gone.wait(10)
        return WORLD

    monkeypatch.setattr(unwatched.state.service, "world_now", world_now)
    assert await unwatched.state.pulls.fetch(unwatched.wanted(12)) is not old


async def test_a_pull_whose_world_ends_meanwhile(bench: Bench) -> None:
    """It brings what is not served any more."""
    await bench.state.attach(bench.engine)
    bench.trainer.before_pull = lambda: bench.keeper.end_world(WORLD, "of something")
    with pytest.raises(errors.CancelledError, match="of something"):
        await bench.state.pulls.fetch(bench.wanted(1))
    assert not list(bench.state.places.root.glob("*/*/policy*"))
    bench.trainer.before_pull = lambda: None
    assert (await bench.state.pulls.fetch(bench.wanted(1))).step == 1


async def test_a_pull_that_ends_after_the_engine_was_pointed_elsewhere(bench: Bench) -> None:
    await bench.state.attach(bench.engine)
    asked = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(2)))
    await until(lambda: bench.trainer.waits > 0)
    bench.keeper.point_at(OTHER_WORLD, "so told")
    bench.trainer.commit(2)
    with pytest.raises(errors.CancelledError, match="pointed at another"):
        await asked
    assert bench.keeper.status()["adapters"] == []


# -------------------------------------------------------------------------------- silence


async def test_a_trainer_that_has_ended_leaves_its_adapters(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    old = await loaded(bench)
    bench.trainer.end()
    await until(lambda: bench.state.counters.snapshot()["worlds_silent"] == 1)
    assert bench.state.watch.status() == [WORLD]
    again = await bench.state.pulls.fetch(bench.wanted(12))
    assert again is old and old.path.exists() and len(bench.trainer.pulls) == 1
    bench.engine.request(old, 2)
    old.suspended = False
    # Served until another launch is there.
    bench.trainer.restart(OTHER_WORLD, 12)
    await until(lambda: bench.keeper.get(NAME) is None)
    assert NAME not in bench.engine.lora_requests
    assert bench.state.counters.snapshot()["worlds_silent"] == 0
    assert sum("does not answer" in r.getMessage() for r in caplog.records) == 1


async def test_names_that_nobody_would_bring_back_stay_while_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0")
    bench = Bench(tmp_path)
    await loaded(bench)
    bench.trainer.end()
    await until(lambda: bench.state.counters.snapshot()["worlds_silent"] == 1)
    assert NAME in bench.engine.lora_requests


async def test_a_connection_that_breaks_ends_nothing(bench: Bench) -> None:
    old = await loaded(bench)
    request = bench.engine.lora_requests[NAME]
    connected = len(bench.trainer.clients)
    bench.trainer.hang_up()
    await until(lambda: len(bench.trainer.clients) > connected + 1)
    await until(lambda: bench.engine.lora_requests.get(NAME) is request)
    assert bench.keeper.get(NAME) is old and not old.suspended


async def test_ranks_that_are_stopped_end_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known but that they are silent."""
    looks = []

    def silent(self: FakeClient, timeout: float) -> list[Any]:
        looks.append(timeout)
        raise errors.PullTimeoutError.make("rank 0 does not answer")

    old = await loaded(bench)
    monkeypatch.setattr(FakeClient, "publications", silent)
    await until(lambda: len(looks) > 3)
    assert bench.keeper.get(NAME) is old and NAME in bench.engine.lora_requests


async def test_pulls_that_use_all_connections_are_no_trouble(bench: Bench) -> None:
    old = await loaded(bench)
    monkeypatched = bench.state.service.runs_now
    looks = []

    def busy(*arguments: Any) -> set[str] | None:
        looks.append(1)
        raise errors.ConnectionFailedError.make("all are busy", code=-302)

    bench.state.service.runs_now = busy  # type: ignore[method-assign]
    await until(lambda: len(looks) > 3)
    bench.state.service.runs_now = monkeypatched  # type: ignore[method-assign]
    assert bench.keeper.get(NAME) is old and NAME in bench.engine.lora_requests


# ----------------------------------------------------------------------------- runs, names


async def test_a_run_that_is_over(bench: Bench) -> None:
    bench.trainer.runs["1"] = Run()
    stays = await loaded(bench)
    over = await bench.fetch(3, run="1")
    del bench.trainer.runs["1"]
    await until(lambda: bench.keeper.get(over.name) is None)
    await bench.keeper.settled()
    assert not over.path.exists() and over.name not in bench.engine.lora_requests
    assert bench.keeper.get(NAME) is stays and stays.path.exists()


async def test_runs_are_over_only_if_all_ranks_say_so(bench: Bench) -> None:
    old = await loaded(bench)
    bench.trainer.all_ranks = False
    run0 = bench.trainer.runs.pop("0")
    looked = bench.trainer.looks
    await until(lambda: bench.trainer.looks > looked + 3)
    assert bench.keeper.get(NAME) is old
    bench.trainer.runs["0"] = run0


async def test_a_request_that_was_let_in_before_its_name_was_taken_away(by_name: Bench) -> None:
    """vLLM looks the name up again when it has prepared the prompt, and nobody else may."""
    models = await Models.of(by_name)
    await asyncio.create_task(models.resolve_lora(NEW))
    let_in, taken = asyncio.Event(), asyncio.Event()

    async def request(*, resolve: bool) -> Any:
        assert resolve or NEW in models.lora_requests
        if resolve:
            await models.resolve_lora(NEW)
        let_in.set()
        await taken.wait()
        assert NEW in models.lora_requests
        found = models.lora_requests[NEW]
        with pytest.raises(KeyError):
            models.lora_requests[NEW]
        assert NEW not in models.lora_requests
        return found.lora_path

    running = [asyncio.create_task(request(resolve=one)) for one in (False, True)]
    await let_in.wait()
    await asyncio.sleep(0)
    by_name.keeper.end_world(WORLD, "of something")
    assert models.lora_requests == {}
    old = by_name.keeper.status()["retiring"][0]["path"]
    for _ in range(50):  # retirement looks each millisecond
        await asyncio.sleep(0.001)
    assert Path(old).exists(), "deleted under a request that was let in"
    taken.set()
    assert await asyncio.gather(*running) == [old, old]
    await by_name.keeper.settled()
    assert not Path(old).exists()


class Models:
    """vLLM's list of models, as far as it locks and forgets."""

    def __init__(self, by_name: Bench) -> None:
        self.by_name = by_name
        self.lora_requests = by_name.engine.lora_requests
        self.engine_client = by_name.engine
        self.lock = asyncio.Lock()
        self.loads = True
        self.number = 100
        self.adding = asyncio.Event()
        self.may_add = asyncio.Event()
        self.may_add.set()

    @classmethod
    async def of(cls, bench: Bench) -> Models:
        """Attached to the bench."""
        models = cls(bench)
        await bench.state.attach(models)
        return models

    async def add_lora(self) -> None:
        """The engine loads it."""
        self.adding.set()
        await self.may_add.wait()

    async def resolve_lora(self, lora_name: str) -> Any:
        async with self.lock:
            if lora_name in self.lora_requests:
                return self.lora_requests[lora_name]
            step = int(lora_name.rpartition("step")[2])
            wanted = self.by_name.wanted(step, timeout=self.by_name.state.config.timeout)
            adapter = await self.by_name.state.pulls.fetch(wanted, self.by_name.state.asked())
            self.number += 1
            request = Request(lora_name, str(adapter.path), self.number)
            adapter.requests.append(request)
            adapter.suspended = False
            adapter.pins -= 1
            await self.add_lora()
            if self.loads:
                self.lora_requests[lora_name] = request
            return request if self.loads else None

    async def unload_lora_adapter(self, request: Any) -> Any:
        async with self.lock:
            if self.lora_requests.pop(request.lora_name, None) is None:
                return SimpleNamespace(error="cannot be found")
            return "Success"


async def test_what_was_unloaded_is_pulled_anew(by_name: Bench) -> None:
    models = await Models.of(by_name)
    first = await models.resolve_lora("policy-run0-step1")
    path = Path(first.lora_path)
    del first
    await models.unload_lora_adapter(SimpleNamespace(lora_name="policy-run0-step1"))
    await by_name.keeper.settled()
    assert not path.exists()
    again = await models.resolve_lora("policy-run0-step1")
    assert again.lora_path != str(path) and len(by_name.trainer.pulls) == 2
    await models.unload_lora_adapter(SimpleNamespace(lora_name="policy-run0-step1"))
    by_name.trainer.commit(2)
    with pytest.raises(errors.SupersededError):
        await models.resolve_lora("policy-run0-step1")


async def test_what_is_unloaded_while_it_is_loaded(by_name: Bench) -> None:
    models = Models(by_name)
    models.may_add.clear()
    await by_name.state.attach(models)
    name = SimpleNamespace(lora_name="policy-run0-step1")
    first = asyncio.create_task(models.resolve_lora(name.lora_name))
    await models.adding.wait()
    unload = asyncio.create_task(models.unload_lora_adapter(name))
    await asyncio.sleep(0)
    models.may_add.set()
    await first
    assert await unload == "Success"
    assert by_name.keeper.get(name.lora_name) is None


async def test_a_name_that_is_not_there_ends_nothing(by_name: Bench) -> None:
    models = await Models.of(by_name)
    adapter = await by_name.state.pulls.fetch(by_name.wanted(1))  # a route is about to load it
    answer = await models.unload_lora_adapter(SimpleNamespace(lora_name=adapter.name))
    assert answer.error and by_name.keeper.get(adapter.name) is adapter


async def test_what_is_unloaded_while_nobody_answers(by_name: Bench) -> None:
    models = await Models.of(by_name)
    path = Path((await models.resolve_lora(NAME.replace("12", "1"))).lora_path)
    by_name.trainer.end()
    await until(lambda: by_name.state.counters.snapshot()["worlds_silent"] == 1)
    assert not models.lora_requests
    name = SimpleNamespace(lora_name=NAME.replace("12", "1"))
    assert await models.unload_lora_adapter(name) == "Success"
    await by_name.keeper.settled()
    assert not path.exists()


async def test_who_leaves_the_line_ends_nothing(by_name: Bench) -> None:
    """The engine still loads what the first in line is to get."""
    models = Models(by_name)
    models.may_add.clear()
    await by_name.state.attach(models)
    name = "policy-run0-step1"
    first, second = (asyncio.create_task(models.resolve_lora(name)) for _ in range(2))
    await models.adding.wait()
    second.cancel()
    await asyncio.wait({second})
    models.may_add.set()
    assert (await first).lora_name == name
    assert by_name.keeper.get(name) is not None
    assert by_name.state.counters.snapshot()["retired"] == 0


async def test_what_did_not_load_does_not_stay(by_name: Bench) -> None:
    models = await Models.of(by_name)
    models.loads = False
    assert await models.resolve_lora("policy-run0-step1") is None
    await by_name.keeper.settled()
    assert not list(by_name.state.places.root.glob("*/*/policy*"))


async def test_the_next_in_line_get_the_answer_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lets those who ask for one name in one after the other."""
    bench = Bench(tmp_path, FANIN_PULL_TIMEOUT="0.3")
    models = await Models.of(bench)
    asked = [models.resolve_lora("policy-run0-step2") for _ in range(5)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in answers] == [errors.PullTimeoutError] * 5
    assert len({str(one) for one in answers}) == 1
    assert bench.state.counters.snapshot()["pulls_failed"] == 1
    # Who asks afterwards is not answered by what is over.
    bench.trainer.commit(2)
    assert (await models.resolve_lora("policy-run0-step2")).lora_name == "policy-run0-step2"


async def test_those_in_line_before_the_engine_was_known(tmp_path: Path) -> None:
    """Without the endpoint plugin the first request is the one that makes it known."""
    bench = Bench(tmp_path, FANIN_PULL_TIMEOUT="0.3")
    models = Models(bench)
    plain = models.resolve_lora

    async def first() -> Any:
        return await plain("policy-run0-step2")

    asked = [asyncio.create_task(first()) for _ in range(3)]
    await until(lambda: bool(bench.state.pulls.status()))
    await bench.state.attach(models)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in answers] == [errors.PullTimeoutError] * 3
    assert bench.state.counters.snapshot()["pulls_failed"] == 1
