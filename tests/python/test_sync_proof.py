# SPDX-License-Identifier: Apache-2.0
"""What engines serve is compared with what is trained, before they answer."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import Any

import fanin.fleet.registry as registry_module
import fleet
import pytest
from fanin.check import trained as digests_of
from fanin.errors import NotFoundError, RequestError, StateError
from fanin.fleet.steps import Committed
from fanin.sync import EndpointResult, Registry, Service, SyncClient, SyncError, SyncServer
from fleet import FakeSGLang, FakeVLLM, WholeTrainer

FINISH, RESUME = "/finish_weight_update", "/resume"


@pytest.fixture
def trainer(stack: ExitStack) -> WholeTrainer:
    return stack.enter_context(WholeTrainer())


def registry_of(trainer: WholeTrainer, *engines: Any, **more: Any) -> Registry:
    return fleet.registry_of(*engines, trainer=trainer.info, **{"timeout": 60.0, **more})


def of(result: Any, engine: Any) -> EndpointResult:
    found: EndpointResult = result.results[engine.url]
    return found


def test_the_first_update_is_compared_while_the_engine_is_paused(
    trainer: WholeTrainer, engine: FakeVLLM
) -> None:
    registry = registry_of(trainer, engine)
    trainer.commit(1, digests=True)
    result = of(registry.sync(1), engine)
    assert engine.compared == [(1, True)] and not engine.paused and not engine.disowned
    assert result.verified == 1 and result.seconds["verify"] >= 0 and not result.note
    assert result.to_json()["verified"] == 1
    trainer.commit(2, digests=True)
    assert of(registry.sync(2), engine).verified is None  # it was proven
    assert engine.compared == [(1, True)]
    # On request, of what is there already, too.
    assert of(registry.sync(2, verify_served=True), engine).verified == 1
    assert engine.compared == [(1, True), (2, True)]


@pytest.mark.parametrize("what", ["restart", "basis", "launch"])
def test_weights_that_came_from_elsewhere_are_compared_again(
    trainer: WholeTrainer, engine: FakeVLLM, stack: ExitStack, what: str
) -> None:
    registry = registry_of(trainer, engine)
    trainer.commit(1, digests=True)
    registry.sync(1)
    trainer.commit(2, digests=True)
    if what == "restart":
        engine.restart()
        registry._restarts.look(registry)  # brings step 2, for step 1 has passed
    elif what == "basis":  # it slept, or was loaded from disk
        engine.basis = "b"
        registry.sync(2)
    else:
        second = stack.enter_context(WholeTrainer(world=bytes(range(2, 18))))
        registry._trainer, registry._said = second.info, second.info.addresses
        second.commit(2, digests=True)
        registry.sync(2)
    assert engine.compared == [(1, True), (2, True)]


def test_an_engine_that_serves_something_else_answers_nobody(
    trainer: WholeTrainer, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = (stack.enter_context(FakeVLLM()) for _ in range(2))
    registry = registry_of(trainer, good, bad)
    bad.wrong = 5
    trainer.commit(1, digests=True)
    with pytest.raises(SyncError, match="w: other values than those that are trained") as caught:
        registry.sync(1)
    failed = of(caught.value.result, bad)
    assert failed.phase == "verify" and failed.paused and bad.url in failed.error
    assert failed.version is None and failed.code == "FANIN_ERR_IO"
    assert bad.paused and "w: other values" in bad.disowned[0] and RESUME not in bad.paths
    assert any("step 1: w: other values" in one.getMessage() for one in caplog.records)
    assert of(caught.value.result, good).ok and not good.paused
    with pytest.raises(StateError, match="sync it"):
        registry.resume(bad.url)
    # It is pulled again, told anew where the trainer is, and compared again.
    bad.wrong = 0
    assert of(registry.sync(1), bad).verified == 1
    assert not bad.paused and bad.count("/init_weight_transfer_engine") == 2


def test_what_the_trainers_cast_rounds_is_a_note(
    trainer: WholeTrainer, engine: FakeVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_of(trainer, engine)
    engine.rounded = True
    trainer.commit(1, digests=True)
    result = of(registry.sync(1), engine)
    assert result.ok and result.verified == 0 and "w: rounded to BF16" in result.note
    assert not engine.paused and not engine.disowned and "rounded to BF16" in caplog.text
    with pytest.raises(SyncError, match="w: rounded to BF16"):
        registry.sync(1, verify_served=True)
    assert engine.paused


BOX = ["w", [0, 0], [4, 8], {"F32": 1}]
OTHER_FORMS = [
    {"held": [BOX], "different": []},
    {"held": 1, "different": [], "untold": [], "unused": []},
    {"held": [BOX], "different": [], "untold": [1], "unused": []},
    {"held": [BOX[:3]], "different": [], "untold": [], "unused": []},
    {"held": [["w", [0], [4], {"F32": 1}]], "different": [], "untold": [], "unused": []},
    {"held": [["w", [0, [0]], [4, 8], {"F32": 1}]], "different": [], "untold": [], "unused": []},
    {"held": [[*BOX[:3], {"F32": "1"}]], "different": [], "untold": [], "unused": []},
]


@pytest.mark.parametrize("told", OTHER_FORMS)
def test_digests_of_another_version_are_no_reason_to_stay_paused(
    trainer: WholeTrainer, engine: FakeVLLM, told: dict[str, Any]
) -> None:
    registry = registry_of(trainer, engine)
    engine._digests = lambda _: told  # type: ignore[method-assign]
    trainer.commit(1, digests=True)
    result = of(registry.sync(1), engine)
    assert result.ok and not engine.paused
    assert "not verified: the digests of worker 0 cannot be read" in result.note
    with pytest.raises(SyncError, match="run the same version of fanin"):
        registry.sync(1, verify_served=True)


def test_a_number_of_workers_that_is_none(trainer: WholeTrainer, engine: FakeVLLM) -> None:
    registry = registry_of(trainer, engine)
    engine.hooks["/get_world_size"] = lambda _: (200, {"workers": 2})
    trainer.commit(1, digests=True)
    result = of(registry.sync(1), engine)
    assert result.ok and not engine.paused and "/get_world_size: it says None" in result.note


def test_without_digests_a_note_says_so(
    trainer: WholeTrainer, engine: FakeVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fanin.sync")
    registry = registry_of(trainer, engine)

    def told(step: int) -> list[int]:
        caplog.clear()
        result = of(registry.sync(step), engine)
        assert result.ok and result.verified is None and not engine.paused
        assert f"not verified: rank 0 has published no digests of step {step}" in result.note
        assert "digests=True" in result.note
        return [one.levelno for one in caplog.records if "not verified" in one.getMessage()]

    trainer.commit(1)
    assert told(1) == [logging.WARNING]
    trainer.commit(2)
    assert told(2) == [logging.INFO]  # every step of a trainer that makes none
    trainer.commit(3, digests=True)
    assert of(registry.sync(3), engine).verified == 1
    trainer.commit(4)
    assert not of(registry.sync(4), engine).note
    paths = len(engine.paths)
    with pytest.raises(NotFoundError, match="no digests of step 4"):
        registry.sync(4, verify_served=True)
    assert not {"/pause", "/update_weights"} & set(engine.paths[paths:])


def test_digests_are_waited_for_before_the_pause(trainer: WholeTrainer, engine: FakeVLLM) -> None:
    registry = registry_of(trainer, engine)
    told_by = trainer.servers[1]
    told_by.begin_update("full:0.digests")
    trainer.commit(1)
    trainer.digest(1, 0)
    paused: list[int] = []

    def digest() -> None:
        paused.append(engine.count("/pause"))
        trainer.digest(1, 1)

    timer = threading.Timer(0.5, digest)
    timer.start()
    assert of(registry.sync(1), engine).verified == 1
    timer.join()
    assert paused == [0]


def test_an_engine_that_does_not_say_what_it_holds(
    trainer: WholeTrainer, engine: FakeVLLM, stack: ExitStack
) -> None:
    """An older plugin; replicas of which one is heard."""
    sglang = stack.enter_context(FakeSGLang())
    registry = registry_of(trainer, engine, sglang)
    engine.hooks["/get_world_size"] = lambda _: (200, {"world_size": 4})
    trainer.commit(1, digests=True)
    result = registry.sync(1)
    assert result.ok
    assert "the engine has 4 workers, and 2 have answered" in of(result, engine).note
    assert f"not verified: {sglang.url}" in of(result, sglang).note
    with pytest.raises(SyncError, match="4 workers") as caught:
        registry.sync(1, verify_served=True)
    assert of(caught.value.result, engine).phase == "verify" and engine.paused


def test_the_draft_is_compared_as_well(
    trainer: WholeTrainer, engine: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a run of its own, where the engine has a draft model."""
    told: list[str] = []

    def trained(target: Any, run: str, *more: Any) -> Any:
        told.append(run)
        return digests_of(target, "0", *more)

    monkeypatch.setattr(registry_module, "digests_of", trained)
    monkeypatch.setattr(registry_module, "committed", lambda *_: Committed(1, "", {}))
    trainer.commit(1, digests=True)
    registry = registry_of(trainer, engine, init={"draft_run": "draft"})
    assert of(registry.sync(1), engine).verified == 1 and engine.compared_runs == ["full:0"]
    engine.drafts = True
    assert of(registry.sync(1, verify_served=True), engine).verified == 2
    assert set(engine.compared_runs[1:]) == {"full:0", "full:draft"} == {f"full:{r}" for r in told}


def test_it_can_be_left_out(trainer: WholeTrainer, engine: FakeVLLM) -> None:
    trainer.commit(1, digests=True)
    result = of(registry_of(trainer, engine, verify_served=False).sync(1), engine)
    assert result.ok and not result.note and not engine.compared
    registry = registry_of(trainer, engine)
    assert not of(registry.sync(1, verify_served=False, again=True), engine).note
    assert not engine.compared
    with pytest.raises(RequestError, match="verify_served 1 is unknown"):
        registry.sync(1, verify_served=1)
    with SyncServer(Service(registry_of(trainer, engine))) as server:
        client = SyncClient(server.url, timeout=60)
        reply = client.sync_weights(1, verify_served=True)
        assert reply["endpoints_synced"][0]["verified"] == 1 == len(engine.compared)
        assert reply["timing_breakdown"]["verify_s"] >= 0
        with pytest.raises(RequestError, match="verify_served 'x' is unknown"):
            client.sync_weights(1, verify_served="x")
    alone = registry_of(trainer, engine, ask_trainer=False)
    assert not of(alone.sync(1), engine).note
    with pytest.raises(RequestError, match="the registry does not ask the trainer"):
        alone.sync(1, verify_served=True)
