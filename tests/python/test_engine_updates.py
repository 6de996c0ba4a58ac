# SPDX-License-Identifier: Apache-2.0
"""Weights that are not whole are never called whole, in whatever order the calls come."""

from __future__ import annotations

from typing import Any

import pytest
from fanin.engine.updates import Updates, check_step, check_timeout, full_run
from fanin.errors import PeerError, RequestError, StateError

WORKER = "worker 1 of 4"


def pulled(updates: Updates, step: int) -> None:
    with updates.pull(step):
        updates.writing(step)


def failed(updates: Updates, step: int, *, written: bool) -> None:
    with pytest.raises(PeerError), updates.pull(step):
        if written:
            updates.writing(step)
        raise PeerError.make("rank 3 said nonsense", "fix it", rank=3)


def test_an_update_in_order() -> None:
    updates = Updates(WORKER)
    assert updates.step is None
    for step in (3, 4):
        updates.start()
        pulled(updates, step)
        assert not updates.dirty
        assert updates.finish() == updates.step == step
        assert not updates.open


def test_the_last_of_several_pulls_counts() -> None:
    updates = Updates(WORKER)
    updates.start()
    pulled(updates, 3)
    pulled(updates, 5)
    assert updates.finish() == 5


def test_calls_in_the_wrong_order() -> None:
    updates = Updates(WORKER)
    with pytest.raises(StateError, match=f"{WORKER}.*without start_weight_update"):
        pulled(updates, 1)
    with pytest.raises(StateError, match=f"{WORKER}.*finish_weight_update without"):
        updates.finish()
    updates.start()
    with pytest.raises(StateError, match=f"{WORKER}.*under way"):
        updates.start()
    with pytest.raises(StateError, match="nothing was pulled"):
        updates.finish()
    pulled(updates, 1)  # what was refused has ended nothing
    assert updates.finish() == 1


def test_a_failure_before_the_first_byte_leaves_the_weights_whole() -> None:
    updates = Updates(WORKER)
    updates.start()
    failed(updates, 2, written=False)
    assert not updates.dirty
    assert not updates.open


def test_a_failure_makes_dirty_until_a_whole_pull() -> None:
    updates = Updates(WORKER)
    updates.start()
    pulled(updates, 1)
    updates.finish()
    updates.start()
    failed(updates, 2, written=True)
    assert "rank 3 said nonsense" in updates.dirty
    updates.start()
    with pytest.raises(StateError, match="not whole.*step 2 failed: rank 3 said nonsense.*remedy"):
        updates.finish()
    failed(updates, 3, written=False)  # which makes nothing better
    assert updates.dirty
    updates.start()
    pulled(updates, 4)
    assert not updates.dirty
    assert updates.finish() == 4


def test_a_good_pull_does_not_cover_a_later_bad_one() -> None:
    updates = Updates(WORKER)
    updates.start()
    pulled(updates, 1)
    failed(updates, 2, written=True)
    updates.start()
    with pytest.raises(StateError, match="not whole"):
        updates.finish()
    assert updates.step is None


def test_what_is_left_in_the_middle_stays_dirty() -> None:
    updates = Updates(WORKER)
    updates.start()
    updates.writing(7)
    updates.leave()
    assert "step 7" in updates.dirty
    assert not updates.open


def test_weights_that_are_lost_are_dirty_until_a_whole_pull() -> None:
    updates = Updates(WORKER)
    updates.start()
    pulled(updates, 1)
    updates.lost("given up")
    with pytest.raises(StateError, match="not whole: given up"):
        updates.finish()
    failed(updates, 2, written=False)
    assert updates.dirty and updates.holds()["dirty"]
    updates.start()
    pulled(updates, 2)
    assert updates.finish() == 2 and not updates.dirty


def test_the_launch_that_the_weights_are_of() -> None:
    updates = Updates(WORKER)
    for world in ("a" * 32, "b" * 32):
        updates.start()
        with updates.pull(3):
            updates.writing(3)
            updates.came_from(world, {})
        updates.finish()
        assert (updates.holds()["step"], updates.holds()["world"]) == (3, world)
    updates.start()
    failed(updates, 4, written=False)
    assert updates.holds()["world"] == "b" * 32
    updates.reloaded()
    assert (updates.holds()["step"], updates.holds()["world"]) == (None, "")


@pytest.mark.parametrize("step", [None, "7", 7.0, True, -1, 1 << 64, [7], {}])
def test_what_is_no_step(step: Any) -> None:
    with pytest.raises(RequestError, match="update_info's step") as caught:
        check_step(step)
    assert caught.value.key == "step"


@pytest.mark.parametrize("timeout", [None, "120", 0, -1, True, float("nan"), float("inf"), [1]])
def test_what_is_no_timeout(timeout: Any) -> None:
    with pytest.raises(RequestError, match="init_info's timeout"):
        check_timeout(timeout)


def test_runs() -> None:
    assert full_run(0) == full_run("0") == full_run("full:0") == "full:0"
    assert full_run("policy.v2") == "full:policy.v2"
    for run in (None, True, 1.5, "", "lora:0", "full:", "full:a b", "x" * 65, ["0"]):
        with pytest.raises(RequestError, match="init_info's run"):
            full_run(run)
