# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers that fanin.sync keeps at the same step of a sharded trainer.

One fleet for the file. The tests run in order, each on what the earlier ones left.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fanin.sync import Registry, SyncError
from full_models import save_full_model
from full_trainer import FullTrainer
from vllm_server import VllmServer

BACKEND = ("--weight-transfer-config", '{"backend": "fanin"}', "--dtype", "bfloat16")
PROMPT = [5, 9, 13, 17, 21]


class Fleet:
    def __init__(self, scratch: Path) -> None:
        self.model = save_full_model(scratch / "model", "qwen3", tied=True)
        self.trainer = FullTrainer(self.model, scratch / "run", world_size=2)
        self.engines = []
        for name in ("one", "two"):
            place = scratch / name
            place.mkdir()
            self.engines.append(
                VllmServer(
                    self.model,
                    place,
                    *BACKEND,
                    environment={"VLLM_SERVER_DEV_MODE": "1"},
                    adapters=False,
                )
            )
        self.trainer.wait_ready()
        for engine in self.engines:
            engine.wait_ready()
        self.registry = Registry(str(self.trainer.info), timeout=120)
        for engine in self.engines:
            self.registry.add(engine.url)

    def step(self) -> int:
        return int(self.trainer.step()["step"])

    def versions(self) -> list[str]:
        return [str(e.ask("GET", "/weight_info")["weight_version"]) for e in self.engines]

    def checksums(self) -> list[Any]:
        body = {"action": "checksum"}
        return [e.ask("POST", "/weight_checker", body)["checksums"] for e in self.engines]

    def paused(self, index: int) -> bool:
        return bool(self.engines[index].ask("GET", "/is_paused")["is_paused"])

    def signal(self, index: int, number: int) -> None:
        """To the whole process group of an engine."""
        os.killpg(self.engines[index]._process.pid, number)

    def close(self) -> None:
        for index, engine in enumerate(self.engines):
            self.signal(index, signal.SIGCONT)
            engine.stop()
        self.trainer.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = Fleet(tmp_path_factory.mktemp("fleet"))
    yield one
    one.close()


def test_both_have_each_step(fleet: Fleet) -> None:
    seen = []
    for count in range(3):
        step = fleet.step()
        result = fleet.registry.sync(step)
        assert result.ok and fleet.versions() == [f"step-{step}"] * 2
        assert [entry.initialised for entry in result.results.values()] == [count == 0] * 2
        one, two = fleet.checksums()
        assert one == two
        answers = [engine.tokens("base", PROMPT) for engine in fleet.engines]
        assert answers[0] == answers[1]
        seen.append(one)
    assert seen[0] != seen[1] != seen[2]
    again = fleet.registry.sync()  # the newest is there
    assert all(entry.skipped for entry in again.results.values())


def test_they_read_ahead(fleet: Fleet) -> None:
    """And are paused for the installation only; the figures are in the output of pytest -s."""
    for prefetch in (True, False) * 3:
        step = fleet.step()
        result = fleet.registry.sync(step, prefetch=prefetch, verify_served=False)
        assert fleet.versions() == [f"step-{step}"] * 2
        for entry in result.results.values():
            assert entry.ahead is prefetch and entry.note == "" and entry.step == step
            assert entry.bytes is not None and entry.bytes > 0 and entry.stall is not None
            assert ("read ahead into" in entry.how) is prefetch
            print(f"prefetch={prefetch}: {entry.to_json()}")
        one, two = fleet.checksums()
        assert one == two


def test_what_the_page_says(fleet: Fleet) -> None:
    """The lines of docs/how-to/fleet.md, as they stand there but for the places and the step."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "fleet.md").read_text()
    lines = page.partition("```python\n")[2].partition("```")[0]
    step = fleet.step()
    for stands, real in (
        ("/shared/run", str(fleet.trainer.info)),
        ("http://10.0.0.7:8000", fleet.engines[0].url),
        ("http://10.0.0.8:8000", fleet.engines[1].url),
        ("sync(120)", f"sync({step})"),
    ):
        assert stands in lines
        lines = lines.replace(stands, real)
    names: dict[str, Any] = {}
    exec(compile(lines, "fleet.md", "exec"), names)
    assert fleet.versions() == [f"step-{step}"] * 2
    assert [one.group for one in names["registry"].endpoints()] == ["default", "eval"]
    assert not fleet.paused(0) and not fleet.paused(1)
    fleet.registry.sync(again=True)  # it knows of nobody else


def test_one_that_stands_still_stays_paused_and_is_mended(fleet: Fleet) -> None:
    fleet.registry.sync(again=True)
    step = fleet.step()
    fleet.signal(1, signal.SIGSTOP)
    with pytest.raises(SyncError) as caught:
        fleet.registry.sync(step, timeout=12, skip_dead=True)
    fleet.signal(1, signal.SIGCONT)
    failed = caught.value.result.results[fleet.engines[1].url]
    assert failed.phase == "health" and "no answer in time" in failed.error
    assert fleet.versions()[0] == f"step-{step}" and not fleet.paused(0)
    assert fleet.registry.sync(step).ok
    one, two = fleet.checksums()
    assert one == two and fleet.versions() == [f"step-{step}"] * 2


def test_a_trainer_that_dies_in_the_midst(fleet: Fleet) -> None:
    """Its ranks are asked first, so that nothing is paused for a step that will not come."""
    before = fleet.versions()
    fleet.trainer.kill()
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        fleet.registry.sync(fleet.trainer.published + 1, timeout=5)
    assert not fleet.paused(0) and not fleet.paused(1) and fleet.versions() == before
    # Without asking, the engines find out, name the rank, and go on with what they have.
    blind = Registry(str(fleet.trainer.info), timeout=20, ask_trainer=False)
    for engine in fleet.engines:
        blind.add(engine.url)
    with pytest.raises(SyncError) as caught:
        blind.sync(fleet.trainer.published + 1)
    for index, entry in enumerate(caught.value.result.results.values()):
        assert entry.phase == "init" and "127.0.0.1" in entry.error, entry
        assert not entry.paused and not fleet.paused(index)
    assert fleet.versions() == before
