# SPDX-License-Identifier: Apache-2.0
"""Which adapters go into slots and which by a directory, and what is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import OTHER_WORLD, FakeTrainer, until
from fanin import errors
from fanin.config import inference_config
from fanin.engine.clients import ClientPool
from fanin.engine.faults import to_wire
from fanin.engine.metrics import Metrics
from fanin.engine.pulls import Adapter, Wanted
from fanin.vllm.state import State
from test_shared_pulls import FakeEngine


class Workers(FakeEngine):
    """An engine of two workers, which say what a test says."""

    def __init__(self, no_slots: str = "") -> None:
        super().__init__()
        self.no_slots = no_slots
        self.places: dict[str, Any] | None = None
        self.learning: asyncio.Event | None = None  # learning ends when it is set
        self.learn_fails: list[Exception] = []
        self.pull_fails: list[Exception] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.dropped: list[tuple[str, str]] = []
        self.forgotten: list[int] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        await asyncio.sleep(0)
        if method == "fanin_model_facts":
            known = {"is_3d_moe_weight": None}
            return [{**known, "no_slots": why} for why in ("", self.no_slots)]
        if method == "fanin_lora_places":
            return [self.places, self.places]
        if method == "fanin_start_pull":
            self.jobs[args[0]["id"]] = args[0]
            return [{"state": "running"}] * 2
        if method == "fanin_poll_pull":
            return [self._report(args[0], worker) for worker in (0, 1)]
        assert method == "fanin_drop_adapter"
        self.dropped.append((args[0], args[1]))
        self.forgotten += args[2] if len(args) > 2 else []
        return [True, True]

    def _report(self, number: str, worker: int) -> dict[str, Any]:
        job = self.jobs[number]
        report: dict[str, Any] = {
            "host": "h",
            "state": "running",
            "bytes": 50,
            "total": 50,
            "reused": False,
            "transport": "stream",
        }
        failures = self.learn_fails if job["learn"] else self.pull_fails
        if failures and worker == 1:
            return {**report, "state": "failed", "error": to_wire(failures.pop())}
        if not job["learn"] or self.learning is None or self.learning.is_set():
            phases = {"read": 0.001, "end": 0.002} if worker else {"read": 0.004}
            report |= {"state": "done", "phases": phases, "ranks": 2}
        return report

    @property
    def landed(self) -> list[int]:
        """Steps of the jobs that pulled into slots."""
        return [int(job["step"]) for job in self.jobs.values() if not job["learn"]]


class Bench:
    def __init__(self, root: Path, **variables: str) -> None:
        self.trainer = FakeTrainer()
        environment = {"FANIN_TRAINER": "h:1", "NIXL_LORA_CACHE_DIR": str(root / "c"), **variables}
        pool = ClientPool(self.trainer.client)
        self.state = State(inference_config(environment), pool=pool, counters=Metrics())
        self.engine = Workers()

    async def fetch(self, step: int, **more: Any) -> Adapter:
        self.trainer.commit(step)
        source = self.state.source
        assert source is not None
        wanted = Wanted(f"policy-run0-step{step}", "0", step, "policy", source, 10.0, **more)
        adapter = await self.state.pulls.fetch(wanted)
        adapter.pins -= 1
        return adapter

    async def learnt(self) -> None:
        await until(lambda: self.slots["learning"] == 0)

    @property
    def slots(self) -> dict[str, Any]:
        return self.state.pulls.slots()

    @property
    def directories(self) -> list[int]:
        return [step for _, step, _ in self.trainer.pulls]


@pytest.fixture(autouse=True)
def own_metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("fanin.engine.metrics._make", lambda registry: None)
    yield


async def test_the_first_by_a_directory_the_next_into_slots(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.state.attach(bench.engine)
    first = await bench.fetch(1)
    assert first.landing == "directory" and "first" in first.landing_why
    await bench.learnt()
    (job,) = bench.engine.jobs.values()
    assert job["learn"] and job["path"] == str(first.path)

    second = await bench.fetch(2)
    assert (second.landing, second.landing_why) == ("slot", "")
    assert second.bytes == 100 and second.transport == "stream", "two workers' parts"
    assert (second.phases, second.ranks) == ({"read": 0.004}, 2), "of the slower one"
    assert bench.engine.landed == [2] and bench.directories == [1]
    counts = bench.state.counters.snapshot()
    assert (counts["landed_slot"], counts["landed_directory"], counts["pulls_ok"]) == (1, 1, 2)
    shown = bench.state.keeper.status()["adapters"]
    assert [one["landing"] for one in shown] == ["directory", "slot"]

    await bench.state.keeper.settled()
    bench.engine.request(second, 12)
    bench.engine.request(second, 13)
    await bench.fetch(3)
    await bench.fetch(4)
    await bench.state.keeper.settled()
    assert (str(second.path), "") in bench.engine.dropped, "its memory is given up"
    assert bench.engine.forgotten == [12, 13], "by the same call"
    assert not [event for event in bench.engine.events if event.startswith("remove 1")]


async def test_who_asks_while_it_is_learnt(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.engine.learning = asyncio.Event()
    await bench.state.attach(bench.engine)
    await bench.fetch(1)
    second = await bench.fetch(2)
    assert second.landing == "directory" and "still learning" in second.landing_why
    bench.engine.learning.set()
    await bench.learnt()
    assert (await bench.fetch(3)).landing == "slot"
    assert sum(job["learn"] for job in bench.engine.jobs.values()) == 1


@pytest.mark.parametrize(
    ("what", "again"),
    [
        ("alpha", True),
        ("shape", True),
        ("launch", False),
        ("version", False),
    ],
)
async def test_another_layout_is_learnt_anew(tmp_path: Path, what: str, again: bool) -> None:
    bench = Bench(tmp_path)
    await bench.state.attach(bench.engine)
    await bench.fetch(1)
    await bench.learnt()
    run = bench.trainer.runs["0"]
    run.catalog_version += 1
    if what == "alpha":
        run.config["lora_alpha"] += 1
    if what == "shape":
        run.entries[0].shape = (8, 65)
    if what == "launch":
        bench.trainer.restart(OTHER_WORLD, 1)
    adapter = await bench.fetch(2)
    assert adapter.landing == ("directory" if again else "slot")
    await bench.learnt()
    assert bench.slots["layouts"] == 1 + again


async def test_what_does_not_fit_goes_by_directories(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.engine.learn_fails = [errors.RequestError.make("scaled differently", phase="slots")]
    await bench.state.attach(bench.engine)
    await bench.fetch(1)
    await bench.learnt()
    for step in (2, 3):
        adapter = await bench.fetch(step)
        assert adapter.landing == "directory" and "scaled differently" in adapter.landing_why
    assert bench.engine.landed == [] and len(bench.engine.jobs) == 1
    assert "scaled differently" in bench.slots["refused"][0]


async def test_learning_that_failed_for_the_moment_is_tried_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.engine.learn_fails = [errors.CancelledError.make("the directory has been retired")]
    await bench.state.attach(bench.engine)
    for step in (1, 2):
        assert (await bench.fetch(step)).landing == "directory"
        await bench.learnt()
    assert (await bench.fetch(3)).landing == "slot"


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (errors.RequestError.make("another shape"), ["directory", "slot"]),  # learnt anew
        (errors.PeerError.make("another dtype"), ["directory", "slot"]),
        (errors.HostError.make("no memory"), ["slot", "slot"]),
        (ValueError("a bug"), ["directory", "directory"]),
    ],
)
async def test_a_pull_that_does_not_fit_goes_by_a_directory(
    tmp_path: Path, error: Exception, then: list[str]
) -> None:
    bench = Bench(tmp_path)
    await bench.state.attach(bench.engine)
    await bench.fetch(1)
    await bench.learnt()
    bench.engine.pull_fails = [error]
    adapter = await bench.fetch(2)
    assert adapter.landing == "directory" and str(error).split(":")[0] in adapter.landing_why
    failed = next(job for job in bench.engine.jobs.values() if not job["learn"])
    assert ("", failed["id"]) in bench.engine.dropped
    for step, landing in enumerate(then, 3):
        assert (await bench.fetch(step)).landing == landing
        await bench.learnt()


@pytest.mark.parametrize(
    "error",
    [errors.SupersededError, errors.PausedError, errors.StaleError, errors.UnreachableError],
)
async def test_a_pulls_own_errors_are_those_of_a_directorys(tmp_path: Path, error: Any) -> None:
    bench = Bench(tmp_path)
    await bench.state.attach(bench.engine)
    await bench.fetch(1)
    await bench.learnt()
    bench.engine.pull_fails = [error.make("not now")]
    with pytest.raises(error, match="not now"):
        await bench.fetch(2)
    assert bench.directories == [1]
    assert (await bench.fetch(3)).landing == "slot"


async def test_directories_where_they_are_wanted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FANIN_LANDING="directory")
    await bench.state.attach(bench.engine)
    adapter = await bench.fetch(1)
    assert "FANIN_LANDING" in adapter.landing_why and not bench.engine.jobs

    other = Bench(tmp_path / "other")
    await other.state.attach(other.engine)
    await other.fetch(1)
    await other.learnt()
    adapter = await other.fetch(2, landing="directory")
    assert adapter.landing == "directory" and "asked for" in adapter.landing_why


async def test_one_worker_that_cannot_is_enough(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.engine.no_slots = "pipeline parallelism"
    await bench.state.attach(bench.engine)
    for step in (1, 2):
        adapter = await bench.fetch(step)
        assert (adapter.landing, adapter.landing_why) == ("directory", "pipeline parallelism")
    assert bench.slots["why_not"] == "pipeline parallelism" and not bench.engine.jobs
