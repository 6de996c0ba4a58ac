# SPDX-License-Identifier: Apache-2.0
"""Relays beside others: of another run, of a run that was put anew, and readers without relays."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import fanin
import numpy as np
import pytest
from local_world import PATIENCE

Tensors = dict[str, np.ndarray]


def empty() -> Tensors:
    return {f"t{i}": np.zeros((1024, 1024), np.uint8) for i in range(4)}


class Runs:
    """One rank with runs of equal names and shapes, and other bytes."""

    def __init__(self, stack: ExitStack, *names: str) -> None:
        server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1)
        self.server = stack.enter_context(server)
        self.addresses = [f"127.0.0.1:{server.port}"]
        self.random = np.random.default_rng(1)
        self.held = {name: empty() for name in names}
        for name in names:
            self.put(name)

    def put(self, run: str) -> None:
        self.server.put(run, [fanin.shard_of(*one) for one in self.held[run].items()])

    def commit(self, step: int) -> None:
        for run, tensors in self.held.items():
            self.server.begin_update(run)
            for value in tensors.values():
                value[:] = self.random.integers(0, 256, value.shape, np.uint8)
            self.server.commit(run, step)


class Reader:
    def __init__(self, kind: type[fanin.Relay] | type[fanin.Client], runs: Runs, stack: ExitStack):
        self.puller: Any = stack.enter_context(kind(runs.addresses))
        self.runs, self.got = runs, empty()

    def pull(self, run: str, step: int) -> None:
        self.puller.pull_into(run, self.got, step=step, timeout=PATIENCE)

    def holds(self, tensors: Tensors) -> bool:
        return all((self.got[name] == value).all() for name, value in tensors.items())


def pull_all(readers: list[tuple[Reader, str]], step: int) -> None:
    """All at once, each the run that is named beside it."""
    with ThreadPoolExecutor(len(readers)) as threads:
        list(threads.map(lambda one: one[0].pull(one[1], step), readers))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_runs_of_one_trainer_are_told_apart(kind: str, stack: ExitStack) -> None:
    """Adapters may be relayed, too."""
    one, other = f"{kind}:a", f"{kind}:b"
    runs = Runs(stack, one, other)
    readers = [(Reader(fanin.Relay, runs, stack), run) for run in (one, other, one, other)]
    for step in (1, 2, 3):
        runs.commit(step)
        pull_all(readers, step)
        assert all(reader.holds(runs.held[run]) for reader, run in readers)
    reader = readers[0][0]
    reader.pull(other, 3)
    assert reader.holds(runs.held[other])
    assert reader.puller.stats()["holders"] <= 2  # not who holds the run of before


def test_a_run_that_was_put_anew_has_other_bytes(stack: ExitStack) -> None:
    """A relay still holds a step of before it was removed."""
    runs = Runs(stack, "full:0")
    before, after = (Reader(fanin.Relay, runs, stack) for _ in range(2))
    runs.commit(5)
    before.pull("full:0", 5)
    runs.server.remove("full:0")
    runs.put("full:0")
    for value in runs.held["full:0"].values():
        value += 1
    with pytest.raises(fanin.FaninError, match="steps must grow"):
        runs.server.commit("full:0", 5)
    runs.server.commit("full:0", 6)
    for reader in (after, before):
        reader.pull("full:0", 6)
        assert reader.holds(runs.held["full:0"])


def test_readers_without_relays_read_beside_them(stack: ExitStack) -> None:
    runs = Runs(stack, "full:0")
    kinds = (fanin.Relay, fanin.Client, fanin.Relay, fanin.Client)
    readers = [(Reader(kind, runs, stack), "full:0") for kind in kinds]
    for step in (1, 2):
        runs.commit(step)
        pull_all(readers, step)
        assert all(reader.holds(runs.held["full:0"]) for reader, _ in readers)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("left", [0, 2, 4, 8])
def test_a_relay_without_descriptors(left: int, stack: ExitStack) -> None:
    """It reads from whom it can, or says what it lacks; and reads as ever when it has some."""
    runs = Runs(stack, "full:0")
    first, other = (Reader(fanin.Relay, runs, stack) for _ in range(2))
    for step in (1, 2):
        runs.commit(step)
        first.pull("full:0", step)
        try:
            with descriptors_left(left):
                other.pull("full:0", step)
        except (fanin.UnreachableError, fanin.ConnectionFailedError) as error:
            assert left == 0 and "Too many open files" in error.message
            assert "raise ulimit -n" in error.remedy
            other.pull("full:0", step)
        assert other.holds(runs.held["full:0"])
