# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers of two workers each: workers of one rank take from each other."""

from __future__ import annotations

from pathlib import Path

from relay_fleet import Fleet

STEPS, WORKERS = 2, 2


def test_equal_ranks_share_and_the_trainer_gives_one_model(tmp_path: Path) -> None:
    """Each sync also proves by the ranks' digests what is served."""
    fleet = Fleet(tmp_path, ("one", "two"), "--tensor-parallel-size", str(WORKERS))
    try:
        models, origin, relayed = [], 0, 0
        for _ in range(STEPS):
            step = fleet.step()
            fleet.sync_all(step)  # both at the same time
            with_relays = fleet.answers()
            assert with_relays[0] == with_relays[1]
            told = fleet.relays(step)
            assert len(told) == 2 * WORKERS
            given = sum(one["bytes_origin"] for one in told) - origin
            taken = sum(one["bytes_relays"] for one in told) - relayed
            origin, relayed = origin + given, relayed + taken
            models.append(2 * given / (given + taken))  # that have left the trainer
            fleet.registry.sync(step, prefetch=False, again=True)
            assert fleet.answers() == with_relays
        # Without relays two. A busy machine brings some of it twice.
        assert min(models) < 1.3, models
    finally:
        fleet.close()
