# SPDX-License-Identifier: Apache-2.0
"""Pulls of several reads that are used in every wrong way, by trainers that do what they like."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import Counter

import fanin
import local_world
import numpy as np
import pytest
from limits import limits
from local_world import (
    A_NAME,
    B_NAME,
    PATIENCE,
    PUBLICATION,
    client_of,
    publish,
    run_script,
    servers,
)

NAMES = (A_NAME, B_NAME)


def empty() -> dict[str, np.ndarray]:
    return {name: np.zeros_like(value) for name, value in local_world.weights(1).items()}


def packed(got: dict[str, np.ndarray]) -> fanin.PackedTensors:
    return fanin.pack(fanin.shard_of(name, got[name], writable=True) for name in NAMES)


def assert_step(got: dict[str, np.ndarray], step: int) -> None:
    for name, value in local_world.weights(step).items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
def test_a_step_between_any_two_calls(ranks: list[fanin.Server], unix: bool) -> None:
    """Whatever ends well is one step, whole; whatever does not says that it was overtaken."""
    chance, ends, step = random.Random(5), Counter[str](), 1
    with client_of(ranks, use_unix=unix) as client:
        for _ in range(60):
            got, commit_at = empty(), chance.randrange(6)
            with client.begin(0, packed(got), timeout=PATIENCE) as session:
                begun = session.step
                try:
                    for number, index in enumerate((1, 0, 1, 0)):
                        if number == commit_at:
                            publish(ranks, step := step + 1)
                        session.read(index, 1)
                    if commit_at == 4:
                        publish(ranks, step := step + 1)
                    assert session.end().step == begun
                    ends["good"] += 1
                    assert_step(got, begun)
                    assert commit_at == 5
                except fanin.StaleError:
                    ends["overtaken"] += 1
                    assert commit_at < 5
        assert ends["good"] > 0 and ends["overtaken"] > 0


def test_one_rank_is_a_step_ahead_when_it_ends(ranks: list[fanin.Server]) -> None:
    """It is named, though the others have still what was read."""
    got = empty()
    with client_of(ranks) as client, client.begin(0, got) as session:
        session.read()
        publish(ranks[1:2], 2)
        with pytest.raises(fanin.StaleError) as caught:
            session.end()
        assert caught.value.rank == 1


def test_paused_between_two_reads(ranks: list[fanin.Server]) -> None:
    """Memory of a paused run is its owner's: nothing that was begun before ends well."""
    with client_of(ranks) as client:
        got = empty()
        session = client.begin(0, got)
        session.read(0, 1)
        for server in ranks:
            server.pause(PUBLICATION, "offloaded")
        for server in ranks:
            server.resume(PUBLICATION)
        with pytest.raises(fanin.StaleError, match="rank"):
            session.read(1, 1)
            session.end()
        session.abandon()
        for server in ranks:
            server.pause(PUBLICATION, "offloaded")
        with pytest.raises(fanin.PausedError, match="offloaded"):
            client.begin(0, got)
        for server in ranks:
            server.resume(PUBLICATION)
        client.pull_into(0, got)
        assert_step(got, 1)


def test_another_launch_between_two_reads() -> None:
    """The same addresses and the same step, and still not what was begun."""
    got = empty()
    with servers() as old:
        publish(old, 1)
        ports = [server.port for server in old]
        with limits(lost_ms=1000):
            client = client_of(old)
        session = client.begin(0, got, timeout=PATIENCE)
        session.read(0, 1)
    world = os.urandom(16)
    new = [
        fanin.Server(world_id=world, rank=r, world_size=3, base_port=port - r, use_ucx=False)
        for r, port in enumerate(ports)
    ]
    with client:
        publish(new, 1)
        with pytest.raises(fanin.ConnectionFailedError, match="rank"):
            session.read(1, 1)
        with pytest.raises(fanin.ConnectionFailedError, match="rank"):
            session.end()
        with client.begin(0, got, timeout=PATIENCE) as again:
            again.read()
            again.end()
        assert_step(got, 1)
    for server in new:
        server.close()


def test_a_removed_run_between_two_reads(ranks: list[fanin.Server]) -> None:
    with client_of(ranks) as client:
        session = client.begin(0, empty())
        session.read(0, 1)
        for server in ranks:
            server.remove(PUBLICATION)
        with pytest.raises(fanin.FaninError, match="rank"):
            session.read(1, 1)
        with pytest.raises(fanin.FaninError):
            session.end()
        publish(ranks, 7)
        got = empty()
        client.pull_into(0, got)
        assert_step(got, 7)


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


SET_UP = """
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
    done = run_script(SET_UP + end)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
