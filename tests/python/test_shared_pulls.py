# SPDX-License-Identifier: Apache-2.0
"""Shared pulls, the workers of other hosts, and the order in which adapters leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_trainer import OTHER_WORLD, WORLD, FakeTrainer, Run, at_rest, until
from fanin import errors
from fanin.config import inference_config
from fanin.engine import jobs
from fanin.engine.checks import EngineFacts
from fanin.engine.clients import MAX_CLIENTS, ClientPool, Target
from fanin.engine.metrics import Metrics
from fanin.engine.pulls import Adapter, Wanted
from fanin.engine.retire import holders
from fanin.engine.shared_pulls import _SharedPull
from fanin.vllm import patches, worker
from fanin.vllm.state import State, has_distant_workers

Job = Callable[..., Coroutine[Any, Any, None]]


class Host:
    """The worker of another host."""

    def get_model(self) -> Any:
        return SimpleNamespace(is_3d_moe_weight=False)


patches.put(Host, "WorkerBase")


@dataclass(eq=False)
class Request:
    """What LoRARequest is to the plugin."""

    lora_name: str
    lora_path: str
    lora_int_id: int = 1


@dataclass
class FakeEngine:
    """vLLM's EngineClient and list of models in one; it notes what is done in which order."""

    parallel: Any = None
    events: list[str] = field(default_factory=list)
    lora_requests: dict[str, Request] = field(default_factory=dict)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    hosts: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        lora = SimpleNamespace(
            max_lora_rank=16,
            max_cpu_loras=1,
            enable_mixed_moe_lora_format=False,
            enable_moe_shared_loras=False,
        )
        self.vllm_config = SimpleNamespace(
            lora_config=lora, parallel_config=self.parallel or SimpleNamespace(nnodes=1)
        )
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_client = self
        self.watched: Path | None = None

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        await asyncio.sleep(0)
        return [getattr(host, method)(*args) for host in self.hosts or [Host()]]

    async def remove_lora(self, lora_int_id: int) -> bool:
        there = self.watched is not None and self.watched.exists()
        self.events.append(f"remove {lora_int_id}, directory {'there' if there else 'gone'}")
        return True

    def request(self, adapter: Adapter, lora_int_id: int = 1) -> Request:
        """What the resolver and vLLM do between them: a request, registered and remembered."""
        request = Request(adapter.name, str(adapter.path), lora_int_id)
        adapter.requests.append(request)
        self.lora_requests[adapter.name] = request
        return request


class Bench:
    def __init__(self, root: Path, engine: FakeEngine | None = None, **config: str) -> None:
        self.trainer = FakeTrainer()
        environment = {
            "FANIN_TRAINER": "127.0.0.1:6000",
            "NIXL_LORA_CACHE_DIR": str(root / "cache"),
            **config,
        }
        self.state = State(
            inference_config(environment),
            pool=ClientPool(self.trainer.client),
            counters=Metrics(),
        )
        self.engine = FakeEngine() if engine is None else engine
        self.keeper = self.state.keeper
        self.keeper._poll = 0.001
        self.attached = True  # by what fetch() pulls

    def wanted(self, step: int, run: str = "0", **more: Any) -> Wanted:
        assert self.state.source is not None
        fields: dict[str, Any] = {
            "timeout": 10.0,
            "label": "policy",
            "source": self.state.source,
            **more,
        }
        name = f"{fields['label']}-run{run}-step{step}"
        return Wanted(name, run, step, **fields)

    async def fetch(self, step: int, **more: Any) -> Adapter:
        """A pull that has been made a request of, and committed for it."""
        if self.attached:
            await self.state.attach(self.engine)
        self.trainer.commit(step, more.get("run", "0"))
        adapter = await self.state.pulls.fetch(self.wanted(step, **more))
        self.engine.request(adapter, step)
        adapter.pins -= 1
        return adapter


@pytest.fixture(autouse=True)
def own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test counts for itself: a registry of prometheus_client takes a name once."""
    monkeypatch.setattr("fanin.engine.metrics._make", lambda registry: None)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


# ------------------------------------------------------------------------ sharing


async def test_one_pull_for_all_who_ask(bench: Bench) -> None:
    await bench.state.attach(bench.engine)
    asked = [asyncio.create_task(bench.state.pulls.fetch(bench.wanted(2))) for _ in range(5)]
    await until(lambda: bench.state.pulls.status() and bench.trainer.connected)
    assert bench.state.counters.snapshot()["inflight"] == 1
    asked[0].cancel()
    bench.trainer.commit(2)
    first = await asked[1]
    others = [await one for one in asked[2:]]
    assert all(one is first for one in others)
    assert first.pins == 4, "the one who left is counted still"
    assert len(bench.trainer.pulls) == 1
    assert bench.state.pulls.status() == []


async def test_all_may_leave(bench: Bench) -> None:
    await bench.state.attach(bench.engine)
    asked = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(2)))
    await until(lambda: bench.trainer.connected)
    asked.cancel()
    bench.trainer.commit(2)
    await until(lambda: not bench.state.pulls.status())
    adapter = bench.keeper.get("policy-run0-step2")
    assert adapter is not None and adapter.pins == 0
    again = await bench.state.pulls.fetch(bench.wanted(2))
    assert again is adapter and len(bench.trainer.pulls) == 1


async def test_an_impatient_caller(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanin.engine.shared_pulls._GRACE", 0.0)
    patient = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(2)))
    await asyncio.sleep(0)
    with pytest.raises(errors.PullTimeoutError):
        await bench.state.pulls.fetch(bench.wanted(2, timeout=0.01))
    bench.trainer.commit(2)
    assert (await patient).pins == 1


async def test_a_failure_reaches_all_and_is_not_kept(bench: Bench) -> None:
    bench.trainer.commit(5)
    failed = await asyncio.gather(
        *(bench.state.pulls.fetch(bench.wanted(4)) for _ in range(3)), return_exceptions=True
    )
    assert [type(error) for error in failed] == [errors.SupersededError] * 3
    assert "step 4" in bench.state.pulls.last_error
    assert (await bench.state.pulls.fetch(bench.wanted(5))).step == 5
    counts = bench.state.counters.snapshot()
    assert (counts["pulls_ok"], counts["pulls_failed"], counts["bytes"]) == (1, 1, 100)


async def test_flights_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanin.engine.shared_pulls._MOST", 2)
    asked = [asyncio.create_task(bench.state.pulls.fetch(bench.wanted(step))) for step in (2, 3)]
    await asyncio.sleep(0)
    with pytest.raises(errors.ConnectionFailedError) as caught:
        await bench.state.pulls.fetch(bench.wanted(4))
    assert caught.value.name == "FANIN_ERR_LIMIT"
    bench.trainer.commit(2)
    await asked[0]
    bench.trainer.commit(3)
    await asked[1]


async def test_names_that_wait_hold_nothing_that_pulls_need(bench: Bench) -> None:
    """Hundreds of them, of many runs: a connection and a thread for each run."""
    fetch = bench.state.pulls.fetch
    runs = [str(number) for number in range(1, 21)]
    for name in runs:
        bench.trainer.runs[name] = Run()
    waiting = [
        asyncio.create_task(fetch(bench.wanted(step, run=name, timeout=60.0)))
        for name in runs
        for step in range(2, 12)
    ]
    await until(lambda: bench.trainer.waits >= len(runs))
    await until(lambda: len(bench.state.pulls.status()) >= 200)
    await until(lambda: not bench.state.service.pool.stats()["busy"])
    assert (await fetch(bench.wanted(1, timeout=30.0))).step == 1
    assert bench.trainer.connected <= len(runs) + MAX_CLIENTS
    await until(lambda: [one.name for one in threading.enumerate()].count("fanin-pull") < len(runs))
    bench.trainer.commit(2, "1")
    assert (await waiting[0]).run == "1"
    bench.trainer.commit(4, "1")
    with pytest.raises(errors.SupersededError):
        await waiting[1]
    assert (await waiting[2]).step == 4
    for one in waiting[3:]:
        one.cancel()


async def test_a_lower_step_is_waited_for_too(bench: Bench) -> None:
    high = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(9)))
    await until(lambda: bench.trainer.waits)
    low = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(5)))
    await until(lambda: bench.trainer.waits >= 2)
    bench.trainer.commit(5)
    assert (await low).step == 5 and not high.done()
    bench.trainer.commit(9)
    assert (await high).step == 9


async def test_more_runs_wait_than_have_connections(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fanin.engine.waits.MAX_RUNS", 1)
    monkeypatch.setattr("fanin.engine.waits._ASK", 0.001)
    bench.trainer.runs["1"] = Run()
    asked = [
        asyncio.create_task(bench.state.pulls.fetch(bench.wanted(2, run=name)))
        for name in ("0", "1")
    ]
    await until(lambda: bench.trainer.looks >= 8 and bench.trainer.waits)
    assert bench.trainer.waits == 1, "the other run is asked for now and then"
    for name in ("1", "0"):
        bench.trainer.commit(2, name)
    assert [(await one).step for one in asked] == [2, 2]


def test_a_thread_that_cannot_be_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits later does not wait for a thread that there never was."""
    waits, target = bench.state.service.waits, Target(("127.0.0.1:6000",))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", refuse)
        waits.expect(target, WORLD, "0", 1)
    waits.expect(target, WORLD, "0", 1).result(10)


async def test_a_launch_that_ends_while_its_step_is_waited_for(bench: Bench) -> None:
    asked = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(5)))
    await until(lambda: bench.trainer.waits)
    bench.trainer.restart(OTHER_WORLD, 4)
    await until(lambda: bench.trainer.waits >= 2)
    bench.trainer.commit(5)
    assert (await asked).world == OTHER_WORLD
    asked = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(6)))
    await until(lambda: bench.trainer.waits >= 3)
    bench.trainer.end()
    with pytest.raises(errors.UnreachableError):
        await asked


async def test_a_trainer_that_is_silent_holds_up_no_other(bench: Bench) -> None:
    """Connections are counted for each trainer."""
    target = Target(("10.0.0.9:1",))
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CLIENTS):
            stack.enter_context(
                bench.state.service.pool.borrow(target, WORLD, time.monotonic() + 9)
            )
        assert (await bench.state.pulls.fetch(bench.wanted(1))).step == 1


async def test_two_alphas_are_two_questions(bench: Bench) -> None:
    await bench.state.attach(bench.engine)
    bench.trainer.commit(2)
    good, bad = await asyncio.gather(
        bench.state.pulls.fetch(bench.wanted(2, lora_alpha=16.0)),
        bench.state.pulls.fetch(bench.wanted(2, lora_alpha=4.0)),
        return_exceptions=True,
    )
    assert isinstance(good, Adapter) and isinstance(bad, errors.RequestError)
    also = await bench.state.pulls.fetch(bench.wanted(2))
    assert also is good
    with pytest.raises(errors.RequestError, match="alpha"):
        await bench.state.pulls.fetch(bench.wanted(2, lora_alpha=4.0))


async def test_what_is_pulled_twice_stays_once(bench: Bench) -> None:
    """Two flights of one name, the second of which chose its place when the first was done."""
    first = await bench.fetch(2)
    twice = dataclasses.replace(first, path=first.path.with_name("policy-step2-2"))
    twice.lease = bench.state.places.lease(twice.path, time.monotonic() + 10)
    twice.path.mkdir()
    assert bench.keeper.add(twice) is first
    await bench.keeper.settled()
    assert not twice.path.exists() and first.path.exists()
    again = dataclasses.replace(first)
    again.lease = bench.state.places.lease(first.path, time.monotonic() + 10)
    assert bench.keeper.add(again) is first
    await bench.keeper.settled()
    assert first.path.exists()


# --------------------------------------------------------------------- retirement


async def test_the_order_of_retirement(bench: Bench) -> None:
    engine = bench.engine
    old = await bench.fetch(1)
    engine.watched = old.path
    engine.output_processor.request_states["r"] = SimpleNamespace(lora_request=old.requests[0])
    await bench.fetch(2)
    assert old.path.exists() and bench.keeper.get(old.name) is old
    await bench.fetch(3)
    # Its name is gone at once; a request of it runs.
    assert old.name not in engine.lora_requests and bench.keeper.get(old.name) is None
    for _ in range(5):
        await asyncio.sleep(0.002)
    assert engine.events == [] and old.path.exists()
    assert bench.keeper.status()["retiring"][0]["name"] == old.name
    engine.output_processor.request_states.clear()
    await bench.keeper.settled()
    assert engine.events == ["remove 1, directory there"] and not old.path.exists()
    assert set(engine.lora_requests) == {"policy-run0-step2", "policy-run0-step3"}


async def test_whoever_holds_the_request_may_still_send_it(bench: Bench) -> None:
    old = await bench.fetch(1)
    held = [bench.engine.lora_requests[old.name]]
    await bench.fetch(2)
    await bench.fetch(3)
    for _ in range(5):
        await asyncio.sleep(0.002)
    assert old.path.exists() and bench.engine.events == []
    held.clear()
    await bench.keeper.settled()
    assert not old.path.exists()


async def test_what_somebody_else_still_loads_did_not_fail(bench: Bench) -> None:
    adapter = await bench.fetch(1)
    adapter.suspended = True  # the name has gone for now, and nobody has tried to load it
    bench.keeper.not_loaded(adapter.name)
    adapter.suspended, adapter.pins = False, 1  # a route is about to
    bench.keeper.not_loaded(adapter.name)
    assert bench.keeper.get(adapter.name) is adapter
    adapter.pins = 0
    bench.keeper.not_loaded(adapter.name)
    assert bench.keeper.get(adapter.name) is None


def test_garbage_holds_nothing_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanin.engine.retire._COLLECT_AFTER", 0.0)
    monkeypatch.setattr("fanin.engine.retire._POLL_SLOW", 0.001)

    async def work() -> None:
        old = await bench.fetch(1)
        cycle: list[Any] = [bench.engine.lora_requests[old.name]]
        cycle.append(cycle)
        del cycle
        await bench.fetch(2)
        await bench.fetch(3)
        await bench.keeper.settled()
        assert not old.path.exists()

    gc.disable()
    try:
        run(work())
    finally:
        gc.enable()


async def test_registered_only_after_it_was_retired(bench: Bench) -> None:
    """vLLM registers what a resolver has returned when the engine has loaded it."""
    await bench.state.attach(bench.engine)
    old = await bench.state.pulls.fetch(bench.wanted(1))
    await bench.fetch(2)
    await bench.fetch(3)
    for _ in range(5):
        await asyncio.sleep(0.002)
    assert old.path.exists(), "deleted while its caller was about to use it"
    bench.engine.request(old)
    old.pins -= 1
    await bench.keeper.settled()
    assert old.name not in bench.engine.lora_requests and not old.path.exists()


async def test_a_name_of_somebody_else_is_left_alone(bench: Bench) -> None:
    old = await bench.fetch(1)
    theirs = Request(old.name, "/somewhere/else", 99)
    bench.engine.lora_requests[old.name] = theirs
    await bench.fetch(2)
    await bench.fetch(3)
    await bench.keeper.settled()
    assert bench.engine.lora_requests[old.name] is theirs


async def test_runs_are_kept_apart(bench: Bench) -> None:
    bench.trainer.runs["1"] = Run()
    here = [await bench.fetch(1, run="1")]
    here += [await bench.fetch(step) for step in (1, 2)]
    await bench.keeper.settled()
    assert all(adapter.path.exists() for adapter in here)
    # A prefix does not make another run.
    await bench.fetch(3, label="eval")
    await bench.keeper.settled()
    assert [adapter.path.exists() for adapter in here] == [True, False, True]


async def test_asked_for_again_is_as_good_as_new(bench: Bench) -> None:
    first, second = await bench.fetch(1), await bench.fetch(2)
    assert await bench.state.pulls.fetch(bench.wanted(1)) is first
    first.pins -= 1
    await bench.fetch(3)
    await bench.keeper.settled()
    assert first.path.exists() and not second.path.exists()


async def test_a_retired_step_comes_back_under_a_new_path(bench: Bench) -> None:
    old = await bench.fetch(1)
    for step in (2, 3):
        await bench.fetch(step)
    await bench.keeper.settled()
    with pytest.raises(errors.SupersededError):
        await bench.state.pulls.fetch(bench.wanted(1))
    again = await bench.fetch(1)
    assert again.path != old.path and again.path.name == "policy-step1-2"


async def test_asked_again_after_a_restart(bench: Bench) -> None:
    """Somebody who asks by the route asks the trainer, although the name is here."""
    old = await bench.fetch(35)
    bench.trainer.restart(OTHER_WORLD, 35)
    new = await bench.state.pulls.fetch(bench.wanted(35))
    assert new is not old and new.world == OTHER_WORLD and new.path != old.path
    await bench.keeper.settled()
    assert not old.path.exists() and new.path.exists()
    bench.trainer.alive = False
    assert await bench.state.pulls.fetch(bench.wanted(35)) is new


async def test_asked_again_after_a_restart_of_the_same_world(bench: Bench) -> None:
    """The step may have other bytes; another engine may still read the old directory."""
    old = await bench.fetch(35)
    assert await bench.state.pulls.fetch(bench.wanted(35)) is old
    bench.trainer.incarnation = "b"
    bench.trainer.restart(WORLD, 35)
    new = await bench.state.pulls.fetch(bench.wanted(35))
    assert new is not old and new.world == WORLD
    assert new.path == old.path.with_name(f"{old.path.name}-2")
    assert await bench.state.pulls.fetch(bench.wanted(35)) is new


async def test_asked_again_after_a_replica_was_started_again(bench: Bench) -> None:
    """The others hold all of the step, and have done so since it was pulled."""
    bench.trainer.replica = "x"
    old = await bench.fetch(35)
    bench.trainer.replica = "y"
    bench.trainer.restart(WORLD, 35)
    assert await bench.state.pulls.fetch(bench.wanted(35)) is old
    assert [step for _, step, _ in bench.trainer.pulls] == [35]
    bench.trainer.incarnation = "b"
    bench.trainer.restart(WORLD, 35)
    assert await bench.state.pulls.fetch(bench.wanted(35)) is not old


async def test_without_an_engine_nothing_is_deleted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.attached = False
    adapters = [await bench.fetch(step) for step in (1, 2, 3, 4)]
    assert all(adapter.path.exists() for adapter in adapters)
    assert sum("VLLM_PLUGINS" in record.getMessage() for record in caplog.records) == 1


async def test_what_no_thread_could_delete_goes_with_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def no_thread(work: Callable[[], Any]) -> None:
        raise RuntimeError("can't start new thread")

    first, second = await bench.fetch(1), await bench.fetch(2)
    with monkeypatch.context() as patch:
        patch.setattr("fanin.vllm.models.in_thread", no_thread)
        bench.keeper.unloaded(first.name)
        await bench.keeper.settled()
    assert first.path.exists() and "stays on disk: can't start new thread" in caplog.text
    bench.keeper.unloaded(second.name)
    await bench.keeper.settled()
    assert not first.path.exists() and not second.path.exists()


async def test_an_engine_that_fails_keeps_the_directory(bench: Bench) -> None:
    async def fail(lora_int_id: int) -> bool:
        raise RuntimeError("engine is dead")

    bench.engine.remove_lora = fail  # type: ignore[method-assign]
    adapters = [await bench.fetch(step) for step in (1, 2, 3)]
    await bench.keeper.settled()
    assert all(adapter.path.exists() for adapter in adapters)


def test_holders_counts_references() -> None:
    requests: list[Any] = [object(), object()]
    assert holders(requests) == 0
    one = requests[0]
    also = [one]
    assert holders(requests) == 2
    del one
    assert holders(requests) == 1
    also.clear()
    assert holders(requests) == 0


def test_warns_of_a_small_cache(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        await bench.state.attach(bench.engine)

    with caplog.at_level("WARNING", "fanin.engine"):
        run(work())
    assert any("--max-cpu-loras 2" in record.getMessage() for record in caplog.records)


async def test_two_engines_in_one_process(bench: Bench) -> None:
    await bench.state.attach(bench.engine)
    await bench.state.attach(bench.engine)
    with pytest.raises(errors.StateError):
        await bench.state.attach(FakeEngine())


# ------------------------------------------------------------------ several hosts


def distant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An engine whose two workers pull with a process' service of their own."""
    bench = Bench(tmp_path, FakeEngine(SimpleNamespace(nnodes=2), hosts=(Host(), Host())))
    monkeypatch.setattr(worker, "_jobs", worker.Jobs())
    monkeypatch.setattr(worker, "_services", {})
    monkeypatch.setattr(worker, "ClientPool", lambda **_: ClientPool(bench.trainer.client))
    return bench


async def test_each_host_pulls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = distant(tmp_path, monkeypatch)
    threads: set[str] = set()
    bench.trainer.before_pull = lambda: threads.add(threading.current_thread().name)
    await bench.state.attach(bench.engine)
    asked = asyncio.create_task(bench.state.pulls.fetch(bench.wanted(2)))
    await until(lambda: bench.trainer.waits)
    assert not asked.done() and not threads, "the workers wait for the step"
    bench.trainer.commit(2)
    adapter = await asked
    assert adapter.lease is None and adapter.path.exists()
    bench.engine.request(adapter, 2)
    adapter.pins -= 1
    assert threads == {"fanin-pull"}, "the pull ran in the workers' own thread"
    started = [args for name, args in bench.engine.calls if name == "fanin_start_pull"]
    assert len(started) == 1
    for step in (3, 4):
        await bench.fetch(step)
    await bench.keeper.settled()
    await until(lambda: not adapter.path.exists())


async def test_a_host_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = distant(tmp_path, monkeypatch)

    def fail() -> None:
        raise errors.HostError.make("disk full", "make room")

    await bench.state.attach(bench.engine)
    bench.trainer.before_pull = fail
    with pytest.raises(errors.HostError, match=r"on host .*disk full"):
        await bench.state.pulls.fetch(bench.wanted(1))
    assert bench.engine.calls[-1][0] == "fanin_drop_adapter"
    bench.trainer.before_pull = lambda: None
    assert (await bench.state.pulls.fetch(bench.wanted(1))).step == 1


async def test_a_pull_that_fails_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests for one adapter, which are two pulls into one place."""
    bench = distant(tmp_path, monkeypatch)
    state = bench.state

    def fail() -> None:
        raise errors.HostError.make("disk full", "make room")

    engine = await state.attach(bench.engine)
    plan = await asyncio.to_thread(state.service.plan, bench.wanted(1), time.monotonic() + 10)
    adapter = await bench.fetch(1)
    monkeypatch.setattr(state.service, "plan", lambda wanted, deadline: plan)
    bench.trainer.before_pull = fail
    flight = _SharedPull(bench.wanted(1, lora_alpha=16.0))
    with pytest.raises(errors.HostError, match="disk full"):
        await state.pulls._pull_on_workers(engine.call_workers, flight)
    at_rest(jobs._deletions)
    assert adapter.path == plan.path and adapter.path.exists()


async def test_refused_before_any_host_pulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = distant(tmp_path, monkeypatch)
    bench.trainer.runs["0"].config["use_dora"] = True
    await bench.state.attach(bench.engine)
    with pytest.raises(errors.RequestError, match="DoRA"):
        await bench.state.pulls.fetch(bench.wanted(1))
    assert [name for name, _ in bench.engine.calls] == ["fanin_model_facts"]


async def test_hosts_notice_a_new_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = distant(tmp_path, monkeypatch)

    def restart() -> None:
        bench.trainer.before_pull = lambda: None
        bench.trainer.restart(OTHER_WORLD, 1)

    await bench.state.attach(bench.engine)
    bench.trainer.before_pull = restart
    assert (await bench.state.pulls.fetch(bench.wanted(1))).world == OTHER_WORLD


def test_a_job_nobody_wants_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = distant(tmp_path, monkeypatch)
    path = tmp_path / "cache" / WORLD / "0" / "policy-step2"
    job = {
        "id": "j",
        "root": str(tmp_path / "cache"),
        "path": str(path),
        "addresses": ["127.0.0.1:6000"],
        "server_name": None,
        "world": WORLD,
        "run": "0",
        "step": "2",
        "how": {"dtype": None, "trust_config": False, "max_bytes": None},
        "timeout": 10.0,
    }
    host: Any = Host()
    host.fanin_start_pull(job)
    host.fanin_start_pull(job)
    assert host.fanin_poll_pull("j")["state"] == "running"
    assert host.fanin_drop_adapter(str(path), "j") is True
    assert host.fanin_poll_pull("j")["state"] == "failed"
    bench.trainer.commit(2)
    at_rest(jobs._pulls, jobs._deletions)
    assert len(bench.trainer.pulls) == 1 and not path.exists()


@pytest.mark.parametrize(
    ("fields", "distant"),
    [
        ({}, False),
        ({"nnodes": 1, "data_parallel_size": 4, "data_parallel_size_local": 4}, False),
        ({"nnodes": 2}, True),
        ({"distributed_executor_backend": "ray"}, True),
        ({"use_ray": True}, True),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, True),
        ({"data_parallel_size": 4, "data_parallel_size_local": 0}, True),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 1,
                "local_engines_only": True,
            },
            False,
        ),
    ],
)
def test_who_may_be_on_other_hosts(fields: dict[str, Any], distant: bool) -> None:
    assert has_distant_workers(SimpleNamespace(**fields)) is distant


async def test_all_engines_of_a_data_parallel_group_are_called(bench: Bench) -> None:
    called: list[Any] = []

    async def call_all(*args: Any) -> list[list[str]]:
        called.append(args)
        return [["a0", "a1"], ["b0", "b1"]]

    bench.engine.vllm_config.parallel_config = SimpleNamespace(data_parallel_size=2)
    bench.engine.engine_core = SimpleNamespace(  # type: ignore[attr-defined]
        call_utility_all_async=call_all
    )
    engine = await bench.state.attach(bench.engine)
    assert await engine.call_workers("m", 1) == ["a0", "a1", "b0", "b1"]
    assert called[-1] == ("collective_rpc", "m", None, (1,), None)


async def test_facts_of_the_engine(bench: Bench) -> None:
    assert bench.state.facts() == EngineFacts()
    await bench.state.attach(bench.engine)
    assert bench.state.facts() == EngineFacts(max_lora_rank=16, max_cpu_loras=1, fused_model=False)
    bench.engine.vllm_config.lora_config = None
    assert not bench.state.facts().lora_enabled
