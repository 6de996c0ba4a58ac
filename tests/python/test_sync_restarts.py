# SPDX-License-Identifier: Apache-2.0
"""An engine that was started again gets back the step that it had."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack
from functools import partial

import fanin.fleet.registry as registry_module
import pytest
from fanin.fleet.engine_sync import Restarts
from fanin.sync import Registry
from fleet import FakeSGLang, FakeVLLM, WholeTrainer, registry_of
from local_world import until

UPDATE = "/update_weights"


def look(registry: Registry) -> None:
    registry._restarts.look(registry)


def test_only_engines_that_have_lost_their_step_get_it(stack: ExitStack) -> None:
    engines = [stack.enter_context(FakeVLLM()) for _ in range(3)]
    sglang = stack.enter_context(FakeSGLang())
    registry = registry_of(*engines[:2], sglang)
    registry.sync(7, pause_mode="abort")
    registry.add(engines[2].url)  # nobody has synced it yet
    for engine in (engines[0], sglang):
        engine.restart()
    look(registry)
    look(registry)
    assert engines[0].model == sglang.model == "weights of step 7"
    assert engines[0].version == "step-7" and not engines[0].paused and not sglang.paused
    assert [engine.count(UPDATE) for engine in engines] == [2, 1, 0] and len(sglang.sent) == 2
    assert "mode=abort" in engines[0].queries[-engines[0].paths[::-1].index("/pause") - 1]


def test_one_that_is_not_there_is_looked_at_again(stack: ExitStack) -> None:
    engine = stack.enter_context(FakeVLLM())
    registry = registry_of(engine)
    registry.sync(7)
    engine.restart()
    engine.refuse("/weight_info", 503, "starting")
    look(registry)
    assert engine.count(UPDATE) == 1
    engine.hooks.clear()
    look(registry)
    assert engine.count(UPDATE) == 2


def test_one_that_cannot_be_mended_is_left_in_peace_for_a_while(stack: ExitStack) -> None:
    engine = stack.enter_context(FakeVLLM())
    registry = registry_of(engine)
    registry.sync(7)
    engine.restart()
    engine.refuse("/init_weight_transfer_engine", 500, "no")
    look(registry)
    asked = engine.count("/init_weight_transfer_engine")
    look(registry)
    assert engine.count("/init_weight_transfer_engine") == asked == 2


def test_the_newest_if_the_step_has_passed(stack: ExitStack) -> None:
    engine = stack.enter_context(FakeVLLM())
    trainer = stack.enter_context(WholeTrainer())
    trainer.commit(1)
    registry = registry_of(engine, trainer=trainer.info, ask_trainer=True)
    registry.sync(1)
    trainer.commit(2)
    engine.restart()
    look(registry)
    assert engine.version == "step-2"


def test_a_sync_waits_for_it(stack: ExitStack) -> None:
    """The trainer's next step must not fail for it."""
    engine = stack.enter_context(FakeVLLM())
    registry = registry_of(engine)
    registry.sync(7)
    engine.restart()
    hold = engine.hang(UPDATE)
    mending = threading.Thread(target=look, args=(registry,))
    mending.start()
    assert engine.at[UPDATE].wait(10)
    syncing = threading.Thread(target=registry.sync, args=(8,))
    syncing.start()
    hold.set()
    mending.join()
    syncing.join()
    assert engine.version == "step-8" and engine.count(UPDATE) == 3


def test_a_thread_looks_if_it_is_told_to(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "Restarts", partial(Restarts, every=0.02))
    engine = stack.enter_context(FakeVLLM())
    registry = registry_of(engine, resync=True)
    registry.sync(7)
    engine.restart()
    until(lambda: engine.version == "step-7" and not engine.paused)
    threads = [one for one in threading.enumerate() if one.name == "fanin-restarts"]
    assert len(threads) == 1
    del registry
    gc.collect()
    threads[0].join(10)
    assert not threads[0].is_alive()  # it ends with the registry
