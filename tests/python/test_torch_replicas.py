# SPDX-License-Identifier: Apache-2.0
"""Replicas are compared before they are published: ranks as threads, no PyTorch."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from fanin.errors import RequestError, StateError
from fanin.torch import _replicas
from fanin.torch._replicas import REFUSED, Replicas
from fanin.torch._union import Replicated


class Store:
    """torch.distributed's, in this process."""

    def __init__(self):
        self.held, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.held[key] = value if isinstance(value, bytes) else value.encode()
            self.changed.notify_all()

    def get(self, key):
        return self.held[key]

    def compare_set(self, key, expected, desired):
        with self.changed:
            if key in self.held and self.held[key] != expected.encode():
                return self.held[key]
            if key not in self.held and expected:
                return expected.encode()
            self.held[key] = desired.encode()
            self.changed.notify_all()
            return self.held[key]

    def add(self, key, amount):
        with self.changed:
            self.held[key] = self.held.get(key, 0) + amount
            return self.held[key]

    def check(self, keys):
        return all(key in self.held for key in keys)

    def wait(self, keys, timeout):
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def delete_key(self, key):
        return self.held.pop(key, None) is not None


class Tensor:
    def __init__(self, array):
        self.array = array

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def __getitem__(self, rows):
        return Tensor(self.array[rows])


def numpys_digests(boxes):
    """Stands for box_digests()."""
    return [hash(values.array.tobytes()) % 2**64 for values, _ in boxes]


@pytest.fixture(autouse=True)
def numpy_digests(monkeypatch):
    monkeypatch.setattr(_replicas, "box_digests", numpys_digests)
    monkeypatch.setattr(_replicas, "_UNIT", 64)
    monkeypatch.setattr(_replicas, "_TICK", 0.05)


class World:
    """Ranks, each with tensors of its own by name; which ranks hold a tensor."""

    def __init__(self, holders, rows=8):
        self.store = Store()
        self.ranks = sorted({rank for held in holders.values() for rank in held})
        self.tensors = {
            rank: {name: np.zeros((rows, 4)) for name, held in holders.items() if rank in held}
            for rank in self.ranks
        }
        part = ((0, 0), (rows, 4))
        groups = {}
        for name, held in sorted(holders.items()):
            groups.setdefault(held, []).append((name, part))
        self.replicas = {
            rank: Replicas(
                self.store,
                "test",
                "full:0",
                rank,
                [
                    Replicated(held, tuple(boxes))
                    for held, boxes in sorted(groups.items())
                    if rank in held
                ],
            )
            for rank in self.ranks
        }

    def publish(self, steps, ranks=None, tried=0, whole=()):
        """What each rank raises, None: nothing; steps: one, or one a rank; whole: who asks for
        everything."""
        raised = {}

        def run(rank):
            step = steps[rank] if isinstance(steps, dict) else steps
            try:
                values = self.tensors[rank]
                self.replicas[rank].check(
                    (step, tried), lambda name, _: Tensor(values[name]), rank in whole
                )
                raised[rank] = None
            except (RequestError, StateError) as error:
                self.replicas[rank].fail(str(error), (step, tried))
                raised[rank] = error

        threads = [threading.Thread(target=run, args=(r,)) for r in ranks or self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [raised[rank] for rank in ranks or self.ranks]


def test_equal_replicas_are_published_and_leave_nothing_behind():
    world = World({"a": (0, 1, 2), "b": (0, 1), "c": (1, 2)})
    for step in range(5):
        assert world.publish(step) == [None] * 3
        assert world.store.held == {}


def test_no_rank_publishes_what_differs():
    world = World({"a": (0, 1, 2), "b": (0, 1)})
    assert world.publish(0) == [None] * 3
    world.tensors[2]["a"][3, 1] = 1e-9
    world.replicas[0]._groups[0].is_first = True
    errors = world.publish(1)
    assert all(isinstance(error, RequestError) for error in errors)
    assert {error.key for error in errors} == {"a"}
    assert all("rank 0 than on rank 2 at step 1" in str(error) for error in errors)
    world.tensors[2]["a"][:] = 0
    assert world.publish(1) == [None] * 3


def test_a_sample_comes_to_every_row(monkeypatch):
    monkeypatch.setattr(_replicas, "_SHARE", 1e-9)  # one unit at a time
    world = World({"a": (0, 1)}, rows=64)
    assert world.publish(0) == [None] * 2
    units = len(world.replicas[0]._groups[0]._units)
    assert units == 32
    world.publish(1)  # chosen before anything was known of the time between steps
    world.tensors[1]["a"][63, 3] = 1
    found = [step for step in range(2, units + 2) if world.publish(step)[0] is not None]
    assert found
    assert world.replicas[0]._groups[0].is_first  # the next one looks at everything
    assert world.publish(99)[0] is not None


@pytest.mark.parametrize("whole", [(0,), (1,), (0, 1)])
def test_everything_is_looked_at_on_request(monkeypatch, whole):
    """Also if one of the ranks asks alone."""
    monkeypatch.setattr(_replicas, "_SHARE", 1e-9)  # one unit of 100 at a time
    world = World({"a": (0, 1)}, rows=200)
    assert world.publish(0) == world.publish(1) == [None] * 2
    world.tensors[1]["a"][150] = 7
    errors = world.publish(2, whole=whole)
    assert all("of 100 parts that were compared differ" in str(one) for one in errors), errors


def test_ranks_that_publish_different_steps():
    world = World({"a": (0, 1)})
    for error in world.publish({0: 3, 1: 4}):
        assert isinstance(error, StateError)
        assert "(rank 0: 3, rank 1: 4)" in str(error)
    assert world.publish(5) == [None] * 2


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_does_not_come(monkeypatch, absent):
    world = World({"a": (0, 1, 2)})
    monkeypatch.setattr(_replicas, "_WAIT", 0.3)
    monkeypatch.setattr(_replicas, "_GRACE", 1.0)
    came = [rank for rank in world.ranks if rank != absent]
    for error in world.publish(1, came):
        assert isinstance(error, StateError)
        assert str(error).startswith(f"rank {absent} did not come"), str(error)
    monkeypatch.setattr(_replicas, "_WAIT", 300.0)
    began = time.monotonic()
    (late,) = world.publish(1, [absent])  # need not wait for those that have given up
    assert isinstance(late, StateError) and "does not publish step 1" in str(late)
    assert time.monotonic() - began < 100
    assert world.publish(2) == [None] * 3
    assert world.store.held == {}


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_fails_is_not_waited_for(failed):
    world = World({"a": (0, 1)})
    assert world.publish(0) == [None] * 2
    world.replicas[failed].fail("ValueError: NaN", (1, 0))
    began = time.monotonic()
    (error,) = world.publish(1, [1 - failed])
    assert time.monotonic() - began < 100
    assert f"rank {failed} does not publish step 1 of full:0: ValueError: NaN" in str(error)
    assert world.publish(1, tried=1) == [None] * 2
    assert world.store.held == {}


@pytest.mark.parametrize("again", [(2, 0), (1, 1)])
def test_ranks_that_failed_together_wait_for_each_other_at_the_next_try(again):
    """At the next step, or at the same one: nobody takes the others' last failure for a new one."""
    world = World({"a": (0, 1)})
    assert world.publish(0) == [None] * 2
    for rank in (0, 1):
        world.replicas[rank].fail("ValueError: NaN", (1, 0))
    step, tried = again
    errors = []
    early = threading.Thread(target=lambda: errors.extend(world.publish(step, [0], tried)))
    early.start()
    time.sleep(10 * _replicas._TICK)  # it looks for failures meanwhile
    assert world.publish(step, [1], tried) == [None]
    early.join(30)
    assert errors == [None]
    assert world.store.held == {}


def refused(world, rank):
    world.replicas[rank].fail("RequestError: step 0 is not above its last step 0", REFUSED)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_called_with_a_step_of_before_is_not_waited_for(monkeypatch, rank):
    monkeypatch.setattr(_replicas, "_GRACE", 0.2)
    world = World({"a": (0, 1, 2)})
    assert world.publish(0) == [None] * 3
    refused(world, rank)
    began = time.monotonic()
    for error in world.publish(5, [one for one in world.ranks if one != rank]):
        assert "does not publish step 5 of full:0: RequestError: step 0 is" in str(error)
        assert error.rank == rank
    assert time.monotonic() - began < 100
    assert world.publish(6) == [None] * 3
    assert world.store.held == {}


def test_a_rank_that_is_called_once_too_often_is_waited_for():
    world = World({"a": (0, 1)})
    assert world.publish(0) == [None] * 2
    refused(world, 1)
    errors = []
    early = threading.Thread(target=lambda: errors.extend(world.publish(1, [0])))
    early.start()
    time.sleep(5 * _replicas._TICK)
    assert world.publish(1, [1]) == [None]
    early.join(30)
    assert errors == [None] and world.store.held == {}


def test_a_store_that_is_gone():
    class Gone(Store):
        def set(self, key, value):
            raise RuntimeError("Broken pipe")

        compare_set = set

    world = World({"a": (0, 1)})
    for replicas in world.replicas.values():
        replicas._groups[0].mailbox._store = Gone()
    for error in world.publish(0):
        assert isinstance(error, StateError)
        assert "store does not answer: Broken pipe. The ranks must publish full:0" in str(error)


def test_a_group_that_fails_is_told_to_the_others():
    world = World({"a": (0, 1), "b": (1, 2)})
    world.tensors[0]["a"][0, 0] = 1
    errors = world.publish(0)
    assert [error.key for error in errors] == ["a", "a", "full:0"]
    assert "rank 1 does not publish step 0" in str(errors[2])


def test_a_part_that_its_rank_takes_back_is_not_waited_for():
    """A rank that hears of a failure takes its part back while the first rank reads."""

    class Racing(Store):
        def check(self, keys):
            found = super().check(keys)
            self.held.pop(keys[0], None)
            return found

    store = Racing()
    mailboxes = (_replicas.Mailbox(store, "p", rank, (0, 1, 2), "full:0") for rank in range(3))
    first, second, third = mailboxes
    first.leave(b"text", (0, 0))
    second.leave(b"text", (0, 0))
    third.fail("no memory", (0, 0))
    first.judge(lambda texts: b"equal 1")


def test_a_part_that_is_taken_back_is_not_judged():
    """All have come; then a rank that wants to tell anew takes its part back."""

    class Racing(Store):
        def wait(self, keys, timeout):
            super().wait(keys, timeout)
            if len(keys) > 1:
                del self.held[keys[1]]

    store = Racing()
    mailboxes = [_replicas.Mailbox(store, "p", rank, (0, 1), "full:0") for rank in (0, 1)]
    word, _ = [one.leave(b"text", (0, 0)) for one in mailboxes]
    mailboxes[0].judge(lambda texts: b"equal 1")
    assert mailboxes[0].verdict(word) == b"absent [1]"
