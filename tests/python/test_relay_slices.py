# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel workers that take their slices of a host's cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import fanin
import numpy as np
import pytest
from local_world import PATIENCE, nixl_fetch

RUN, TENSORS, SIZE, WORKERS = "full:0", 8, 1024, 2


class Ranks:
    """Two ranks with half of the rows each of 8 MiB."""

    def __init__(self, stack: ExitStack) -> None:
        self.memory = [np.zeros((SIZE, SIZE), np.uint8) for _ in range(TENSORS)]
        self.random = np.random.default_rng(1)
        self.servers = []
        world = os.urandom(16)
        for rank in range(2):
            server = stack.enter_context(fanin.Server(world_id=world, rank=rank, world_size=2))
            first, end = rank * SIZE // 2, (rank + 1) * SIZE // 2
            server.put(
                RUN,
                [
                    fanin.shard_of(f"t{i}", v[first:end], shape=v.shape, offset=(first, 0))
                    for i, v in enumerate(self.memory)
                ],
            )
            self.servers.append(server)
        self.addresses = [f"127.0.0.1:{server.port}" for server in self.servers]

    def commit(self, step: int) -> None:
        for server in self.servers:
            server.begin_update(RUN)
        for tensor in self.memory:
            tensor[:] = self.random.integers(0, 256, tensor.shape, np.uint8)
        for server in self.servers:
            server.commit(RUN, step)


class Cache:
    def __init__(self, ranks: Ranks) -> None:
        command = [nixl_fetch(), "relay", ",".join(ranks.addresses), RUN, "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_for(self, step: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if json.loads(line).get("step") == step:
                return
        raise AssertionError(f"the cache has ended without step {step}")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Worker:
    """Columns of every other tensor, rows of the rest."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self.ranks = ranks
        self.relay = fanin.Relay(ranks.addresses)
        half = slice(number * SIZE // WORKERS, (number + 1) * SIZE // WORKERS)
        self.cuts = [(half, slice(None)) if i % 2 else (slice(None), half) for i in range(TENSORS)]
        self.values = [
            np.zeros_like(v[cut]) for v, cut in zip(ranks.memory, self.cuts, strict=True)
        ]

    def pull(self, step: int, **more: Any) -> float:
        """The share that came from others; all bytes are compared."""
        for value in self.values:
            value[:] = 0
        before = self.relay.stats()
        shards = [
            fanin.shard_of(
                f"t{i}", value, shape=(SIZE, SIZE), offset=[cut.start or 0 for cut in self.cuts[i]]
            )
            for i, value in enumerate(self.values)
        ]
        self.relay.pull_into(RUN, shards, step=step, timeout=PATIENCE, **more)
        for memory, cut, value in zip(self.ranks.memory, self.cuts, self.values, strict=True):
            assert (memory[cut] == value).all()
        now = self.relay.stats()
        relayed, origin = (
            now[key] - before[key] for key in ("bytes_from_relays", "bytes_from_origin")
        )
        return relayed / (relayed + origin)


@pytest.fixture
def ranks(stack: ExitStack) -> Ranks:
    return Ranks(stack)


@pytest.fixture
def cache(ranks: Ranks) -> Iterator[Cache]:
    one = Cache(ranks)
    yield one
    one.close()


def open_workers(ranks: Ranks, stack: ExitStack) -> list[Worker]:
    workers = [Worker(ranks, number) for number in range(WORKERS)]
    for worker in workers:
        stack.enter_context(worker.relay)
    return workers


def test_workers_take_their_slices_of_the_cache(
    ranks: Ranks, cache: Cache, stack: ExitStack
) -> None:
    """By far the most of it, unless a busy machine makes the cache late."""
    workers, shares = open_workers(ranks, stack), []
    for step in range(1, 9):
        ranks.commit(step)
        cache.wait_for(step)
        shares.append(min(worker.pull(step, verify=step == 1) for worker in workers))
        if shares[-1] > 0.9 and step > 2:
            return
    raise AssertionError(f"of the cache came {shares}")


def test_a_cache_that_stops_or_dies_meanwhile_is_done_without(
    ranks: Ranks, cache: Cache, stack: ExitStack
) -> None:
    workers = open_workers(ranks, stack)
    for step, what in enumerate((signal.SIGSTOP, signal.SIGKILL), 1):
        ranks.commit(step)
        cache.wait_for(step)

        def strike(done: int, total: int, what: signal.Signals = what) -> None:
            if done > 0:
                cache.process.send_signal(what)

        workers[0].pull(step, progress=strike)
        workers[1].pull(step)
        cache.process.send_signal(signal.SIGCONT)
