# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers of one host that hand on to each other what they read ahead.

One fleet for the file. The tests run in order, each on what the earlier ones left.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from relay_fleet import RUN, Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = Fleet(tmp_path_factory.mktemp("fleet"))
    yield one
    one.close()


def test_they_answer_as_without_relays(fleet: Fleet) -> None:
    """Each sync also proves by the ranks' digests what is served."""
    shares = []
    for _ in range(3):
        step = fleet.step()
        assert fleet.sync(step, "first") == 0
        shares.append(fleet.sync(step, "second"))
        with_relays = fleet.answers()
        assert with_relays[0] == with_relays[1]
        fleet.registry.sync(step, prefetch=False, again=True)
        assert fleet.answers() == with_relays
    assert max(shares) > 0, "relays have brought nothing"


@contextlib.contextmanager
def cache_with(fleet: Fleet, step: int) -> Iterator[None]:
    """A host's cache, once it has the step."""
    command = [os.environ["NIXL_FETCH"], "relay", str(fleet.trainer.info), RUN, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cache:
        assert cache.stdout is not None
        try:
            while json.loads(cache.stdout.readline())["step"] < step:
                pass
            yield
        finally:
            cache.terminate()
    assert cache.returncode == 0


def test_a_cache_has_the_step_for_who_comes_later(fleet: Fleet) -> None:
    step = fleet.step()
    with cache_with(fleet, step):
        assert fleet.sync(step, "first") > 90


def test_tensor_parallel_workers_take_their_slices_of_a_cache(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, ("workers",), "--tensor-parallel-size", "2")
    try:
        for _ in range(2):  # the second one into memory that was planned for
            step = fleet.step()
            with cache_with(fleet, step):
                assert fleet.sync(step, "first") > 90
    finally:
        fleet.close()
