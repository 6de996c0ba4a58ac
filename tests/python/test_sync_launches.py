# SPDX-License-Identifier: Apache-2.0
"""Of which launch of the trainer an engine's weights are: two of them have other steps 3."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from typing import Any

import fleet
import pytest
from fanin.sync import EndpointResult, Registry, SyncError
from fleet import FakeEngine, FakeSGLang, FakeVLLM, WholeTrainer

UPDATE, STATE = "/update_weights", "/collective_rpc"


@pytest.fixture
def trainer(stack: ExitStack) -> WholeTrainer:
    result = stack.enter_context(WholeTrainer())
    result.commit(3)
    return result


def registry_of(trainer: Any, *engines: FakeEngine, **more: Any) -> Registry:
    return fleet.registry_of(*engines, trainer=trainer, **more)


def failure(caught: pytest.ExceptionInfo[SyncError], engine: FakeEngine) -> EndpointResult:
    result = caught.value.result.results[engine.url]
    assert result.phase == "finish" and result.paused and engine.paused
    assert engine.url in result.error and result.code == "FANIN_ERR_MISMATCH"
    return result


@pytest.mark.parametrize("kind", [FakeVLLM, FakeSGLang])
def test_another_launch_than_the_one_that_was_asked(
    stack: ExitStack, trainer: WholeTrainer, kind: type[FakeEngine]
) -> None:
    engine, good = stack.enter_context(kind()), stack.enter_context(kind())
    engine.worlds = ["b" * 32]
    registry = registry_of(trainer.info, engine, good)
    with pytest.raises(SyncError, match=f"of the launch {'b' * 32} of the trainer") as caught:
        registry.sync(3)
    asked = f"the one that was asked is {trainer.info.world_id}"
    assert asked in failure(caught, engine).error
    assert caught.value.result.results[good.url].ok
    engine.worlds = []
    again = registry.sync(3).results
    assert again[engine.url].initialised and not again[engine.url].skipped
    assert again[good.url].skipped and not engine.paused


def test_engines_of_different_launches_where_the_trainer_is_not_asked(
    stack: ExitStack, engine: FakeVLLM
) -> None:
    """The first one that has the step says which launch it is of."""
    late = stack.enter_context(FakeVLLM())
    engine.worlds, late.worlds = ["a" * 32], ["b" * 32]
    hold = late.hang("/finish_weight_update")
    engine.hooks["/resume"] = lambda _: hold.set()
    registry = registry_of("10.0.0.1:6000", engine, late, ask_trainer=False)
    with pytest.raises(SyncError) as caught:
        registry.sync(3)
    assert f"other engines of this sync have {'a' * 32}" in failure(caught, late).error
    assert caught.value.result.results[engine.url].ok
    engine.worlds = late.worlds = ["b" * 32]
    del late.hooks["/finish_weight_update"]
    assert registry.sync(3).ok  # all of them again


def test_workers_that_name_no_launch(engine: FakeVLLM) -> None:
    worker = {"step": 3, "dirty": "", "ahead": None, "last": {"bytes": 50, "read": 0.5}}
    engine.hooks[STATE] = lambda _: (200, {"results": [worker]})
    registry = registry_of("10.0.0.1:6000", engine, ask_trainer=False)
    with pytest.raises(SyncError, match="do not say of which launch of the trainer") as caught:
        registry.sync(3)
    failure(caught, engine)


@pytest.mark.parametrize(
    ("worlds", "says"),
    [
        ([], "do not say of which launch of the trainer"),
        (["a" * 32, "b" * 32], f"of different launches of the trainer: {'a' * 32}, {'b' * 32}"),
        ("a" * 32, "do not say of which launch"),
    ],
)
def test_an_sglang_that_names_not_one_launch(stack: ExitStack, worlds: Any, says: str) -> None:
    engine = stack.enter_context(FakeSGLang())
    said = {"step": 3, "bytes": 1, "seconds": 1.0, "how": "", "worlds": worlds}
    message = f"fanin has pulled: {json.dumps(said)}"
    engine.hooks["/end_weight_update"] = lambda _: (200, {"success": True, "message": message})
    registry = registry_of("10.0.0.1:6000", engine, ask_trainer=False)
    with pytest.raises(SyncError, match=says) as caught:
        registry.sync(3)
    failure(caught, engine)


def test_another_service_has_brought_its_trainers_step(
    stack: ExitStack, engine: FakeVLLM, trainer: WholeTrainer
) -> None:
    """Its version is the same text."""
    with WholeTrainer(world=bytes(range(2, 18))) as second:
        second.commit(3)
        one, other = registry_of(trainer.info, engine), registry_of(second.info, engine)
        assert one.sync(3).ok and other.sync(3).ok
        pulls = engine.count(UPDATE)
        result = one.sync(3).results[engine.url]
        assert not result.skipped and result.initialised and engine.count(UPDATE) == pulls + 1
        assert engine.initialised is not None
        assert engine.initialised["trainer"] == list(trainer.info.addresses)
        assert one.sync(3).results[engine.url].skipped


def test_what_cannot_be_asked_is_not_taken_for_there(
    engine: FakeVLLM, trainer: WholeTrainer
) -> None:
    registry = registry_of(trainer.info, engine)
    registry.sync(3)
    engine.refuse(STATE, 500, "a worker is gone")
    with pytest.raises(SyncError, match="a worker is gone"):
        registry.sync(3)
    del engine.hooks[STATE]
    assert registry.sync(3).results[engine.url].skipped
    # Torn by whoever else: the version is still that of the last step.
    engine.hooks[STATE] = lambda _: (
        None if engine.paused else (200, {"results": [{"step": 3, "dirty": "torn", "last": None}]})
    )
    assert not registry.sync(3).results[engine.url].skipped


def test_a_resume_that_is_refused_again_is_mended_by_an_update(
    engine: FakeVLLM, trainer: WholeTrainer
) -> None:
    """A replica that does not tell what it has may be why."""
    registry = registry_of(trainer.info, engine)
    engine.refuse("/resume", 500, "the replicas have the weights of different steps")
    for skipped in (False, True):
        with pytest.raises(SyncError, match="the replicas have") as caught:
            registry.sync(3)
        assert caught.value.result.results[engine.url].skipped == skipped
    del engine.hooks["/resume"]
    assert not registry.sync(3).results[engine.url].skipped
    assert engine.count(UPDATE) == 2 and not engine.paused


@pytest.mark.parametrize(("size", "note"), [(None, ""), (2, ""), (4, "2 of 4 workers say")])
def test_replicas_that_do_not_tell(
    engine: FakeVLLM, caplog: pytest.LogCaptureFixture, size: int | None, note: str
) -> None:
    caplog.set_level(logging.WARNING, "fanin.sync")
    registry = registry_of("10.0.0.1:6000", ask_trainer=False)
    registry.add(engine.url, world_size=size)
    result = registry.sync(3).results[engine.url]
    assert result.ok and result.note.startswith(note) and bool(result.note) == bool(note)
    assert (f"{engine.url}: {note}" in caplog.text) == bool(note)
