# SPDX-License-Identifier: Apache-2.0
"""What SGLang keeps outside of its radix tree is dropped at the end of an update, or refused."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fanin.sglang import guard
from fanin.sglang.external_kv import drop, what_stays
from fanin.sglang.request import TOLD


class Telling:
    """A backend that says whether it has dropped all. says: what it says."""

    def __init__(self, says: bool = True) -> None:
        self.says, self.held = says, ["old"]

    def clear(self) -> bool:
        self.held.clear()
        return self.says


class Silent(Telling):
    def clear(self) -> None:  # type: ignore[override]
        pass


def scheduler_with(storage: Any = None, **more: Any) -> Any:
    """flushed: what the storage held when the tree was emptied."""
    controller = SimpleNamespace(storage_backend=storage)
    flushed: list[list[str]] = []
    return SimpleNamespace(
        tree_cache=SimpleNamespace(
            enable_storage=storage is not None,
            cache_controller=controller,
            clear_storage_backend=lambda: True,
        ),
        flush_cache=lambda: flushed.append(list(storage.held)),
        flushed=flushed,
        **more,
    )


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (SimpleNamespace(), ""),
        (scheduler_with(), ""),
        (scheduler_with(Telling()), ""),
        (scheduler_with(Silent()), "Silent, HiCache's storage, does not say"),
        (scheduler_with(enable_lmcache=True), "LMCache does not say"),
        (scheduler_with(decode_offload_manager=object()), "what a decode server offloads"),
    ],
)
def test_what_nothing_drops(scheduler: Any, said: str) -> None:
    assert what_stays(scheduler).startswith(said) and bool(what_stays(scheduler)) == bool(said)


def test_storage_is_emptied_after_the_tree() -> None:
    scheduler = scheduler_with(Telling())
    assert drop(scheduler) == ""
    assert scheduler.flushed == [["old"]]  # what the tree still writes goes with the rest
    assert scheduler.tree_cache.cache_controller.storage_backend.held == []
    assert "it says no" in drop(scheduler_with(Telling(says=False)))


def test_one_that_cannot_is_left_alone() -> None:
    scheduler = scheduler_with(Silent())
    assert drop(scheduler) == "" and scheduler.flushed == []


def test_the_end_of_an_update_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings of images as well; and an end that could not is a failure."""
    embeddings = {"hash": "old"}
    schedule = ModuleType("sglang.srt.managers.mm_schedule")
    schedule.embedding_cache = embeddings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, schedule.__name__, schedule)
    monkeypatch.setattr(guard, "standing", guard.Standing())
    guard.standing.begin()
    guard.standing.succeed(1, 7, 10, 0.1, "cma", {"a" * 32})

    def end(storage: Any) -> Any:
        manager = SimpleNamespace(scheduler=scheduler_with(storage))
        done = SimpleNamespace(success=True, message="Success")
        return guard.end(lambda *_: done, manager, None)

    ended = end(Telling())
    assert ended.success and embeddings == {}
    told = json.loads(ended.message.removeprefix(TOLD))
    assert told["step"] == 7 and told["external_kv"] is True
    ended = end(Telling(says=False))
    assert not ended.success and "HiCache's storage has not dropped" in ended.message
