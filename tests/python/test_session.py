# SPDX-License-Identifier: Apache-2.0
"""Pulls of several reads, also used in every wrong way and by trainers that do what they like."""

from __future__ import annotations

import gc
import os
import random
import threading

import fanin
import local_world
import numpy as np
import pytest
from local_world import (
    A_NAME,
    B_NAME,
    PATIENCE,
    assert_step,
    client_of,
    empty,
    packed,
    publish,
    run_script,
    servers,
)


@pytest.fixture
def got() -> dict[str, np.ndarray]:
    return empty()


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


def test_the_memory_is_held(ranks: list[fanin.Server]) -> None:
    """A caller that forgets its arrays has them written as long as the session lasts."""
    with client_of(ranks) as client:
        got = empty()
        session = client.begin(0, got)
        keep = got[B_NAME]
        got.clear()
        gc.collect()
        session.read()
        session.end()
        np.testing.assert_array_equal(keep, local_world.weights(1)[B_NAME])


def test_forgotten_while_another_call_is_under_way(ranks: list[fanin.Server]) -> None:
    """A collector comes when it likes; the next call finds a client that can be used."""
    with client_of(ranks) as client:
        session = [client.begin(0, empty())]
        busy, let_go = threading.Event(), threading.Event()

        def occupy() -> None:
            client._alone("ranks", lambda *_: (busy.set(), let_go.wait(PATIENCE)))

        other = threading.Thread(target=occupy)
        other.start()
        assert busy.wait(PATIENCE)
        with pytest.warns(ResourceWarning, match="not ended"):
            session.clear()
            gc.collect()
        let_go.set()
        other.join()
        got = empty()
        client.pull_into(0, got)
        assert_step(got, 1)


def test_many_threads_at_once(ranks: list[fanin.Server]) -> None:
    """Each call does what it says or raises what is fanin's; the client lives on."""
    with client_of(ranks) as client:
        tensors = packed(empty())
        current: list[fanin.PullSession] = []
        wrong: list[BaseException] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(1500):
                session = current[-1] if current else None
                what = chance.randrange(7)
                try:
                    if session is None or what == 0:
                        current.append(client.begin(0, tensors, timeout=PATIENCE))
                    elif what < 4:
                        session.read(chance.randrange(2), 1)
                    elif what == 4:
                        session.end()
                    elif what == 5:
                        session.abandon()
                    else:
                        client.cancel()
                except (fanin.StateError, fanin.CancelledError, fanin.StaleError):
                    pass
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for step in range(2, 12):
            publish(ranks, step)
        for thread in threads:
            thread.join()
        assert not wrong
        for session in current:
            session.abandon()
        with pytest.raises(fanin.CancelledError):  # whatever was left: this is one more
            client.cancel()
            client.pull_into(0, empty())
        got = empty()
        client.pull_into(0, got)
        assert_step(got, 11)


OPEN_SESSION = """
import os, sys, threading
import numpy as np
import fanin
from local_world import client_of, publish, servers, weights

world = servers(lease=0.0)
ranks = world.__enter__()
publish(ranks, 1)
client = client_of(ranks)
got = {name: np.zeros_like(value) for name, value in weights(1).items()}
session = client.begin(0, got)
session.read(0, 1)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("os._exit(0) if os.fork() == 0 else sys.exit(5)", 5),
        ("sys.exit(0) if os.fork() == 0 else (os.wait(), session.read(), session.end(), "
         "sys.exit(6))", 6),
        ("threading.Thread(target=session.read).start(); sys.exit(7)", 7),
    ],
    ids=["exit", "exception", "fork", "fork-exit", "thread"],
)  # fmt: skip
def test_a_process_that_ends_with_an_open_session(end: str, status: int) -> None:
    done = run_script(OPEN_SESSION + end)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
