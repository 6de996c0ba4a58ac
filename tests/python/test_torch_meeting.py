# SPDX-License-Identifier: Apache-2.0
"""Ranks meet before they compute what a step publishes: ranks as threads, no PyTorch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from fanin.errors import StateError
from fanin.torch import _meeting, _replicas
from fanin.torch._meeting import Meeting
from test_torch_replicas import Store


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(_replicas, "_TICK", 0.05)
    return Store()


def ranks_of(store, size=4):
    return [Meeting(store, "fanin/world/meeting", "full:0", rank, size) for rank in range(size)]


def come(ranks, at):
    """What each is told: None, or its error."""

    def one(rank):
        try:
            return rank.come(at)
        except StateError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_all_come_and_leave_nothing_behind(store):
    ranks = ranks_of(store)
    for step in range(50):
        assert come(ranks, (step, 0)) == [None] * 4
    assert len(store.held) <= 4 + 4  # where each rank is, and the last two meetings


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_fails_is_named_at_once(store, is_late):
    first, *others = ranks_of(store)
    with ThreadPoolExecutor() as threads:
        if is_late:
            told = threads.submit(come, others, (3, 0))
            store.wait(["fanin/world/meeting/3.0/count"], timedelta(seconds=30))
        first.fail("ValueError: the loss is NaN", (3, 0))
        if not is_late:
            told = threads.submit(come, others, (3, 0))
        for error in told.result(60):
            assert "rank 0 does not publish step 3 of full:0: ValueError: the loss" in str(error)
            assert (error.rank, error.key) == (0, "full:0")
    assert come([first, *others], (3, 1)) == [None] * 4


def test_a_failure_after_all_have_met_is_nobodys(store):
    ranks = ranks_of(store)
    assert come(ranks, (1, 0)) == [None] * 4
    ranks[2].fail("too late", (1, 0))
    assert come(ranks, (2, 0)) == [None] * 4


def test_a_rank_that_does_not_come(store, monkeypatch, caplog):
    ranks = ranks_of(store)
    come(ranks, (0, 0))
    monkeypatch.setattr(_meeting, "_WAIT", 0.5)
    monkeypatch.setattr(_replicas, "QUIET", 0.01)
    (error,) = come(ranks[:1], (1, 0))
    assert "ranks 1-3 did not come to compute step 1 of full:0" in str(error)
    assert error.rank == 1
    assert "waits for ranks 1-3 to compute full:0" in caplog.text


def test_a_store_that_is_gone(store, monkeypatch):
    (alone,) = ranks_of(store, 1)

    def gone(key, value):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(store, "set", gone)
    with pytest.raises(StateError, match="store does not answer: Connection reset"):
        alone.come((0, 0))
