# SPDX-License-Identifier: Apache-2.0
"""Replicas (DDP, HSDP) of which each has a whole step, and not the same one."""

from __future__ import annotations

from typing import Any

import fanin
import numpy as np
import pytest
from fanin.errors import FaninError, PullTimeoutError, SupersededError
from local_world import PATIENCE, servers

RUN = "full:0"
SHAPE = (4, 8)


def commit(ranks: list[fanin.Server], which: list[int], step: int, halves: int) -> None:
    """These ranks have all of *step*: replica r of rank r // halves, of which each has a part."""
    rows = SHAPE[0] // halves
    for rank in which:
        first = rank % halves * rows
        part = np.full((rows, SHAPE[1]), float(step), np.float32)
        ranks[rank].put(
            RUN, [fanin.shard_of("w", part, shape=SHAPE, offset=(first, 0))], replace=True
        )
        ranks[rank].commit(RUN, step)


def pulled(client: fanin.Client, timeout: float = PATIENCE, **wanted: Any) -> float:
    target = np.zeros(SHAPE, np.float32)
    client.pull_into(RUN, {"w": target}, timeout=timeout, **wanted)
    assert target.min() == target.max()
    return float(target[0, 0])


@pytest.mark.parametrize("halves", [1, 2])
def test_a_pull_has_one_step_or_an_error_that_names_a_rank(halves: int) -> None:
    """Every element of either step could be had from the replica that is at it."""
    old, new = list(range(halves)), list(range(halves, 2 * halves))
    with servers(2 * halves) as ranks:
        commit(ranks, old, 5, halves)
        commit(ranks, new, 6, halves)
        addresses = [f"127.0.0.1:{rank.port}" for rank in ranks]
        with fanin.Client(addresses) as client:
            with pytest.raises(SupersededError) as caught:
                pulled(client, step=5)
            assert caught.value.rank in new and f"rank {caught.value.rank}" in str(caught.value)
            with pytest.raises(PullTimeoutError, match="rank 0"):
                pulled(client, 1.0, step=7)
            # The furthest one is never mixed with the others' step.
            for wanted in ({"step": 6}, {"at_least": 5}, {}):
                assert pulled(client, **wanted) == 6
            commit(ranks, old, 6, halves)
            assert pulled(client) == 6


def test_of_two_replicas_with_halves_of_two_steps_none_is_had() -> None:
    """Each half is whole and of another step, and the other replica has the reverse."""
    with servers(4) as ranks:
        commit(ranks, [0, 3], 5, 2)
        commit(ranks, [1], 6, 2)
        ranks[2].put(RUN, [fanin.shard_of("w", np.zeros((0, 8), np.float32), shape=SHAPE)])
        ranks[2].commit(RUN, 6)
        with fanin.Client([f"127.0.0.1:{rank.port}" for rank in ranks]) as client:
            with pytest.raises(FaninError, match="rank 0"):
                pulled(client, 1.0)
            commit(ranks, [0, 3], 6, 2)
            assert pulled(client) == 6
