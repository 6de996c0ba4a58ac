# SPDX-License-Identifier: Apache-2.0
"""Which rank is lost: from the library to who asked an engine for it."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from pathlib import Path

import fanin
import pytest
from fanin.engine import faults
from fanin.info import TrainerInfo
from fanin.pool import EnginePool, PoolError
from http_engine import Engine
from local_world import addresses, publish, servers


def told_of(error: fanin.FaninError) -> tuple[object, ...]:
    return error.name, error.message, error.remedy, error.rank, error.address, error.key


def lost(tmp_path: Path) -> fanin.FaninError:
    """What a pull says that waits for a step when rank 1 has gone."""
    with servers(2) as made:
        publish(made, 1)
        with fanin.Client(addresses(made)) as client:
            made[1].close()
            with pytest.raises(fanin.FaninError) as caught:
                client.pull_adapter("0", tmp_path / "adapter", step=2, timeout=20.0)
    error = caught.value
    assert isinstance(error, fanin.UnreachableError | fanin.ConnectionFailedError)
    assert (error.rank, error.address) == (1, f"127.0.0.1:{made[1].port}")
    assert f"rank 1 at {error.address}" in error.message
    return error


def test_a_lost_rank_is_named_all_the_way(tmp_path: Path) -> None:
    error = lost(tmp_path)
    assert told_of(pickle.loads(pickle.dumps(error))) == told_of(error)
    assert told_of(faults.from_wire(faults.to_wire(error))) == told_of(error)
    body = faults.body_of(error)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine([(400, body)]))
        with pytest.raises(PoolError) as caught:
            EnginePool([engine.url], timeout=20.0).update_weights(
                TrainerInfo((error.address,)), "p", 2
            )
    failure = caught.value.failures[engine.url]
    assert error.message in failure.message
    said = failure.code, failure.rank, failure.address, failure.key
    assert said == (error.name, error.rank, error.address, error.key)
