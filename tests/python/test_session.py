# SPDX-License-Identifier: Apache-2.0
"""Pulls of several reads."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import fanin
import local_world
import numpy as np
import pytest
from limits import limits
from local_world import A_NAME, B_NAME, client_of, publish, servers


@pytest.fixture
def client(ranks: list[fanin.Server]) -> Iterator[fanin.Client]:
    with client_of(ranks) as made:
        yield made


@pytest.fixture
def got() -> dict[str, np.ndarray]:
    return {name: np.zeros_like(value) for name, value in local_world.weights(1).items()}


def packed(got: dict[str, np.ndarray]) -> fanin.PackedTensors:
    return fanin.pack(fanin.shard_of(name, got[name], writable=True) for name in (A_NAME, B_NAME))


def assert_step(got: dict[str, np.ndarray], step: int) -> None:
    for name, value in local_world.weights(step).items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_one_step_over_several_reads(
    ranks: list[fanin.Server], client: fanin.Client, got: dict[str, np.ndarray]
) -> None:
    tensors = packed(got)
    for step in (1, 2):
        if step == 2:
            publish(ranks, 2)
        with client.begin(0, tensors, step=step, verify=True) as session:
            assert (session.step, len(session), session.closed) == (step, 2, False)
            session.read(1, 1)
            assert step > 1 or not got[A_NAME].any()
            session.read(0)
            result = session.end()
        assert_step(got, step)
        assert session.closed and session.step == step
        # The second tensor was read twice.
        assert (result.step, result.tensors, result.bytes) == (step, 3, 3 * 24 * 4)
        assert result.verified and result.path == "stream" and len(result.ranks) == 3
    client.pull_into(0, got)


def test_what_an_update_overtakes_is_stale(
    ranks: list[fanin.Server], client: fanin.Client, got: dict[str, np.ndarray]
) -> None:
    with client.begin(0, got) as session:
        session.read()
        publish(ranks, 2)
        with pytest.raises(fanin.StaleError, match="rank"):
            session.end()
        assert session.closed
    with client.begin("lora:0", got, at_least=2) as session:
        session.read()
        session.end()
    assert_step(got, 2)


def test_a_stale_read_ends_the_session(
    ranks: list[fanin.Server], client: fanin.Client, got: dict[str, np.ndarray]
) -> None:
    session = client.begin(0, got)
    publish(ranks, 2)
    with pytest.raises(fanin.StaleError):
        session.read(0, 1)
    with pytest.raises(fanin.StaleError):
        session.read(1, 1)
    with pytest.raises(fanin.StaleError):
        session.end()
    with pytest.raises(fanin.StateError, match="has ended"):
        session.end()
    with pytest.raises(fanin.StateError, match="has ended"):
        session.read()


def test_a_block_without_end_gives_the_leases_back(got: dict[str, np.ndarray]) -> None:
    with servers(1, lease=60.0) as ranks:
        publish(ranks, 1)
        with client_of(ranks) as client:
            with pytest.raises(ZeroDivisionError), client.begin(0, got) as session:
                session.read(0, 1)
                assert ranks[0].stats()["leases"] == 1
                raise ZeroDivisionError
            publish(ranks, 2)  # or it would wait for a minute
            client.pull_into(0, got)
    assert_step(got, 2)


def test_other_calls_have_to_wait(client: fanin.Client, got: dict[str, np.ndarray]) -> None:
    with client.begin(0, got) as session:
        for call in (client.ranks, lambda: client.pull_into(0, got), lambda: client.begin(0, got)):
            with pytest.raises(fanin.StateError, match="session"):
                call()
        session.read()
        session.end()
    assert len(client.ranks()) == 3


@pytest.mark.parametrize(("first", "count"), [(0, 3), (3, 0), (-1, 1), (0, -1), ("a", 1), (0, 0.5)])
def test_wrong_numbers_are_the_calls_fault(
    client: fanin.Client, got: dict[str, np.ndarray], first: int, count: int
) -> None:
    with client.begin(0, got) as session:
        with pytest.raises(fanin.RequestError):
            session.read(first, count)
        session.read()
        session.end()
    assert_step(got, 1)


def test_cancel_ends_it(client: fanin.Client, got: dict[str, np.ndarray]) -> None:
    session = client.begin(0, got)
    client.cancel()
    with pytest.raises(fanin.CancelledError):
        session.read()
    with pytest.raises(fanin.CancelledError):
        session.end()
    with client.begin(0, got) as session:
        session.read()
        session.end()
    assert_step(got, 1)


def test_each_rank_is_told_of_over_all_its_reads(
    client: fanin.Client, got: dict[str, np.ndarray]
) -> None:
    told: list[fanin.PullProgress] = []
    with client.begin(0, packed(got), rank_progress=told.append) as session:
        for number in range(len(session)):
            told.clear()
            threading.Event().wait(0.1)  # longer than callbacks are apart
            session.read(number, 1)
            assert {one.bytes_total for one in told} == {192}
        session.end()
    assert sum(rank.bytes_done for rank in told[0].ranks) == told[0].bytes_done > 0


def test_what_progress_raises_abandons_it(client: fanin.Client, got: dict[str, np.ndarray]) -> None:
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        raise ZeroDivisionError

    session = client.begin(0, got, progress=progress)
    with pytest.raises(ZeroDivisionError):
        session.read()
    assert seen == [(0, 2 * 24 * 4)]
    with pytest.raises(fanin.StateError, match="has ended"):
        session.end()
    client.pull_into(0, got)
    assert_step(got, 1)


def test_a_closed_client_leaves_a_session_that_can_only_end(
    ranks: list[fanin.Server], got: dict[str, np.ndarray]
) -> None:
    client = client_of(ranks)
    session = client.begin(0, got)
    client.disconnect()
    with pytest.raises(fanin.StateError, match="disconnected"):
        session.read()
    with pytest.raises(fanin.StateError):
        session.end()
    client.connect([f"127.0.0.1:{server.port}" for server in ranks])
    session = client.begin(0, got)
    client.close()
    with pytest.raises(fanin.StateError, match="closed"):
        session.read()
    session.abandon()
    session.abandon()
    assert session.closed


def test_a_session_that_is_forgotten_is_given_up(
    client: fanin.Client, got: dict[str, np.ndarray]
) -> None:
    session = client.begin(0, got)
    with pytest.warns(ResourceWarning, match="not ended"):
        del session
        gc.collect()
    client.pull_into(0, got)


def test_a_child_has_no_part_in_it(client: fanin.Client, got: dict[str, np.ndarray]) -> None:
    with client.begin(0, got) as session:
        child = os.fork()
        if child == 0:
            try:
                session.read()
            except fanin.ProcessError:
                session.abandon()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        session.read()
        session.end()
    assert_step(got, 1)


def test_a_stopped_rank_is_named(got: dict[str, np.ndarray]) -> None:
    world = local_world.Processes(use_ucx=False)
    try:
        world.publish(1)
        with (
            limits(lost_ms=500),
            fanin.Client(world.addresses, use_ucx=False, path="stream") as client,
        ):
            session = client.begin(0, got, timeout=local_world.PATIENCE)
            local_world.stop(world.processes[1].pid or 0)
            with pytest.raises(fanin.ConnectionFailedError) as caught:
                session.read()
            assert caught.value.rank == 1 and "silent" in caught.value.message
            with pytest.raises(fanin.ConnectionFailedError, match="rank 1"):
                session.end()
    finally:
        os.kill(world.processes[1].pid or 0, signal.SIGCONT)
        assert world.close() == [0, 0, 0]


def test_threads_may_take_turns(client: fanin.Client, got: dict[str, np.ndarray]) -> None:
    session = client.begin(0, got)
    for index in range(2):
        thread = threading.Thread(target=session.read, args=(index, 1))
        thread.start()
        thread.join()
    session.end()
    assert_step(got, 1)
