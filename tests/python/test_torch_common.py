# SPDX-License-Identifier: Apache-2.0
"""Ranks tell each other at a run's first publish which boxes they hold: threads, no PyTorch."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
import pytest
from fanin._tensors import Box, Shard
from fanin.errors import FaninError, RequestError, StateError
from fanin.torch import _replicas
from fanin.torch._common import Common
from test_torch_replicas import Store, Tensor, numpys_digests


@pytest.fixture(autouse=True)
def numpy_digests(monkeypatch):
    monkeypatch.setattr(_replicas, "box_digests", numpys_digests)
    monkeypatch.setattr(_replicas, "_TICK", 0.05)


def shard(name, rows, columns=4, all_rows=8):
    """This rank's rows."""
    box = Box((rows[0], 0), (rows[1] - rows[0], columns), (4 * columns, 4), 0)
    return Shard(name, "F32", (all_rows, columns), (box,), -1)


class Rank:
    """One rank's run and the values that it holds."""

    def __init__(self, store, rank, ranks, shards):
        self.number = rank
        self.common = Common(store, "fanin/world", "lora:0", rank, ranks)
        self.values = {}
        self.tries = Counter()
        self.tell(shards)

    def tell(self, shards, removed=()):
        self.common.tell(shards, removed)
        for one in shards:
            for box in one.boxes:
                self.values[one.name, box.offset, box.extent] = np.zeros(box.extent)

    def fail(self, step):
        """Before it comes to check."""
        self.common.fail("ValueError: the loss is NaN", (step, self.tries[step]))
        self.tries[step] += 1

    def publish(self, step):
        """What it raises, None: nothing."""
        at = (step, self.tries[step])
        self.tries[step] += 1
        try:
            self.common.check(at, lambda name, part: Tensor(self.values[(name, *part)]))
        except (FaninError, KeyboardInterrupt) as error:
            self.common.fail(f"{type(error).__name__}: {error}", at)
            return error


def publish(ranks, step):
    """What each raises."""
    raised = {}

    def run(rank):
        raised[rank] = rank.publish(step)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [raised[rank] for rank in ranks]


ALL = (0, 8)
ASKS = "fanin/world/lora:0/asks"
WHOLE = [shard("a", ALL), shard("b", ALL)]


@pytest.fixture
def store():
    return Store()


def two(store, shards=WHOLE):
    return [Rank(store, rank, (0, 1), shards) for rank in range(2)]


def met(rank):
    """The ranks of each of its groups, and the names of what they have in common."""
    return {
        group.ranks: [name for name, _ in group._boxes] for group in rank.common._replicas._groups
    }


def test_ranks_find_what_they_have_in_common(store):
    """a: of 0 and 1; b: rows of 2 and 3, of 0 and 1; c: 3 alone."""
    top, bottom = shard("b", (0, 4)), shard("b", (4, 8))
    held = [[shard("a", ALL), top], [shard("a", ALL), bottom], [top], [bottom, shard("c", ALL)]]
    ranks = [Rank(store, rank, (0, 1, 2, 3), one) for rank, one in enumerate(held)]
    assert publish(ranks, 7) == [None] * 4
    assert met(ranks[0]) == {(0, 1): ["a"], (0, 2): ["b"]}
    assert met(ranks[3]) == {(1, 3): ["b"]}
    assert store.held.keys() == {ASKS}
    ranks[2].values["b", (0, 0), (4, 4)][3, 3] = 1
    error = publish(ranks, 8)[0]
    assert isinstance(error, RequestError) and error.key == "b" and error.rank == 2


def test_ranks_that_have_nothing_in_common_wait_once_only(store):
    ranks = [Rank(store, r, (0, 1), [shard("a", (4 * r, 4 * r + 4))]) for r in range(2)]
    assert publish(ranks, 0) == [None, None]
    assert publish(ranks[:1], 1) == [None]


@pytest.mark.parametrize("numbers", [(1, 3), (0, 2)])
def test_only_ranks_that_publish_runs_are_waited_for(store, numbers):
    ranks = [Rank(store, number, numbers, WHOLE) for number in numbers]
    assert publish(ranks, 0) == [None, None]
    assert met(ranks[0]) == {numbers: ["a", "b"]}


def test_what_differs_at_the_first_publish(store):
    ranks = two(store)
    ranks[1].values["a", (0, 0), (8, 4)][7, 3] = 1
    for error in publish(ranks, 0):
        assert isinstance(error, RequestError)
        assert "'a' of lora:0 has other values on rank 0 than on rank 1" in str(error)
    ranks[1].values["a", (0, 0), (8, 4)][:] = 0
    assert publish(ranks, 0) == [None, None]


@pytest.mark.parametrize("change", ["joins", "leaves", "is resized"])
def test_ranks_tell_anew_what_has_changed(store, change):
    ranks = two(store)
    assert publish(ranks, 0) == [None, None]
    for rank in ranks:
        if change == "leaves":
            rank.tell([], ["b"])
        else:
            rank.tell([shard("c", ALL)] if change == "joins" else [shard("b", ALL, 2)])
    (name, *part), values = list(ranks[1].values.items())[-1]
    values[0] = 1
    errors = publish(ranks, 1)
    if change == "leaves":
        assert errors == [None, None] and met(ranks[0]) == {(0, 1): ["a"]}
    else:
        assert [error.key for error in errors] == [name, name]


def test_memory_that_moves_is_no_change(store):
    ranks = two(store)
    assert publish(ranks, 0) == [None, None]
    before = ranks[0].common._replicas
    ranks[0].tell(WHOLE)
    assert publish(ranks, 1) == [None, None]
    assert ranks[0].common._replicas is before


def test_a_shape_that_changes_one_ranks_part_only(monkeypatch, store):
    monkeypatch.setattr(_replicas, "_WAIT", 10.0)
    monkeypatch.setattr(_replicas, "_GRACE", 1.0)
    first = Rank(store, 0, (0, 1), [shard("x", (0, 1), all_rows=1), shard("b", ALL)])
    second = Rank(store, 1, (0, 1), [Shard("x", "F32", (1, 4), (), -1), shard("b", ALL)])
    assert publish([first, second], 0) == [None, None]
    first.tell([shard("x", (0, 1), all_rows=2)])
    second.tell([shard("x", (1, 2), all_rows=2)])
    assert publish([first, second], 1) == [None, None]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_adds_the_run(monkeypatch, store, absent):
    monkeypatch.setattr(_replicas, "_WAIT", 0.3)
    monkeypatch.setattr(_replicas, "_GRACE", 0.5)
    here, late = Rank(store, 1 - absent, (0, 1), WHOLE), Rank(store, absent, (0, 1), WHOLE)
    (error,) = publish([here], 4)
    assert isinstance(error, StateError)
    assert f"rank {absent} did not come to publish step 4 of lora:0" in str(error)
    assert error.rank == absent and "add the run" in error.remedy
    monkeypatch.setattr(_replicas, "_WAIT", 30.0)
    (error,) = publish([late], 4)  # nor does it wait for who has given up
    assert f"rank {1 - absent} does not publish step 4" in str(error)
    assert publish([here, late], 4) == [None, None]
    assert store.held.keys() == {ASKS}


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_rank_that_fails_is_not_waited_for(store, failed, steps):
    """At a run's first publish, and at one where the other rank's tensors have changed."""
    ranks = two(store)
    for step in range(steps):
        assert publish(ranks, step) == [None, None]
    ranks[failed].fail(steps)
    other = ranks[1 - failed]
    other.tell([shard("c", ALL)])
    (error,) = publish([other], steps)
    assert f"rank {failed} does not publish step {steps} of lora:0: ValueError" in str(error)
    ranks[failed].tell([shard("c", ALL)])
    assert publish(ranks, steps) == [None, None]
    assert all("failed" not in key for key in store.held if "/lora:0/" in key)


def test_a_run_that_is_removed_and_added_again(store):
    ranks = two(store)
    assert publish(ranks, 0) == [None, None]
    for rank in ranks:
        rank.fail(1)
        rank.common.close()
    ranks = two(store, [shard("c", ALL)])
    assert publish(ranks, 9) == [None, None]
    assert met(ranks[1]) == {(0, 1): ["c"]}


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_alone_removes_and_adds_a_run(store, alone):
    """At once, and while the other one waits to compare."""
    ranks = two(store)
    assert publish(ranks, 0) == [None, None]
    ranks[alone].common.close()
    ranks[alone] = Rank(store, alone, (0, 1), WHOLE)
    assert publish(ranks, 1) == [None, None]
    waiting = ranks[1 - alone]
    with ThreadPoolExecutor() as pool:
        found = pool.submit(waiting.publish, 2)
        while not any(key.endswith(f"/{waiting.number}") for key in store.held):
            time.sleep(0.001)
        ranks[alone].common.close()
        ranks[alone] = Rank(store, alone, (0, 1), WHOLE)
        assert ranks[alone].publish(2) is None
        assert found.result(30) is None
    assert met(ranks[0]) == met(ranks[1]) == {(0, 1): ["a", "b"]}


@pytest.mark.parametrize("alone", [0, 1])
def test_a_first_publish_that_is_interrupted_on_one_rank(monkeypatch, store, alone):
    """Both ranks have told, and one of them does not hear the answer."""
    ranks = two(store)

    def interrupted(mailbox, word):
        if mailbox._rank == alone:
            raise KeyboardInterrupt
        return heard(mailbox, word)

    heard = _replicas.Mailbox.verdict
    with monkeypatch.context() as patch:
        patch.setattr(_replicas.Mailbox, "verdict", interrupted)
        errors = publish(ranks, 0)
    assert isinstance(errors[alone], KeyboardInterrupt)
    assert f"rank {alone} does not publish step 0" in str(errors[1 - alone])
    assert "KeyboardInterrupt" in str(errors[1 - alone])
    assert publish(ranks, 0) == [None, None]


def test_a_rank_that_is_ahead_does_not_disturb_who_still_compares(store):
    """Rank 1 has step 1 and adds a tensor, while rank 0 waits for rank 2."""
    held = [[shard("a", ALL), shard("b", ALL)], [shard("a", ALL)], [shard("b", ALL)]]
    ranks = [Rank(store, rank, (0, 1, 2), one) for rank, one in enumerate(held)]
    assert publish(ranks, 0) == [None] * 3
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ranks[0].publish, 1)
        assert ranks[1].publish(1) is None
        ranks[1].tell([shard("c", ALL)])
        with pytest.raises(FutureTimeout):
            first.result(4 * _replicas._TICK)
        assert ranks[2].publish(1) is None and first.result(30) is None
    ranks[0].tell([shard("c", ALL)])
    assert publish(ranks, 2) == [None] * 3
    assert met(ranks[0]) == {(0, 1): ["a", "c"], (0, 2): ["b"]}


def test_the_log_names_who_is_waited_for(monkeypatch, store, caplog):
    monkeypatch.setattr(_replicas, "QUIET", 0.01)
    monkeypatch.setattr(_replicas, "_WAIT", 0.3)
    publish([Rank(store, 0, (0, 1, 2), WHOLE)], 0)
    (line,) = caplog.messages
    assert line.startswith("fanin: rank 0 waits for ranks 1-2 to agree on the tensors of lora:0")
