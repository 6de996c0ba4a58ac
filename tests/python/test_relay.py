# SPDX-License-Identifier: Apache-2.0
"""Readers that hand on what they have read."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import fanin
import fanin.relay
import numpy as np
import pytest
from local_world import PATIENCE, nixl_fetch

RUN, TENSORS = "full:0", 8


class Trainer:
    """One rank with 8 MiB."""

    def __init__(self, rows: int = 1024, **options: Any) -> None:
        self.memory = [np.zeros((rows, 1024), np.uint8) for _ in range(TENSORS)]
        self.server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, **options)
        self.server.put(RUN, [fanin.shard_of(f"t{i}", v) for i, v in enumerate(self.memory)])
        self.addresses = [f"127.0.0.1:{self.server.port}"]
        self.random = np.random.default_rng(1)

    def commit(self, step: int) -> None:
        self.server.begin_update(RUN)
        for tensor in self.memory:
            tensor[:] = self.random.integers(0, 256, tensor.shape, np.uint8)
        self.server.commit(RUN, step)

    def empty(self) -> dict[str, np.ndarray]:
        return {f"t{i}": np.zeros_like(value) for i, value in enumerate(self.memory)}

    def holds(self, got: dict[str, np.ndarray]) -> bool:
        return all((got[f"t{i}"] == value).all() for i, value in enumerate(self.memory))


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    with made.server:
        yield made


def pull_all(
    relays: list[fanin.Relay], into: list[dict[str, np.ndarray]], step: int
) -> list[fanin.PullResult]:
    """All at once; raises what one has raised."""
    results: dict[int, Any] = {}

    def one(at: int) -> None:
        try:
            results[at] = relays[at].pull_into(RUN, into[at], step=step, timeout=PATIENCE)
        except BaseException as error:
            results[at] = error

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(relays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[at] for at in range(len(relays))]


def test_a_fleet_has_each_step_and_reads_the_trainer_about_once(
    trainer: Trainer, stack: ExitStack
) -> None:
    relays = [stack.enter_context(fanin.Relay(trainer.addresses)) for _ in range(3)]
    into = [trainer.empty() for _ in relays]
    for step in (1, 2):
        trainer.commit(step)
        results = pull_all(relays, into, step)
        assert [one.step for one in results] == [step] * 3
        assert all(trainer.holds(got) for got in into)
    told = [relay.stats() for relay in relays]
    whole = TENSORS << 20
    assert all(one["units"] == one["landed"] > 1 for one in told)
    assert all(one["bytes_from_origin"] + one["bytes_from_relays"] >= 2 * whole for one in told)
    # Each has found others; a busy machine may bring a unit twice.
    assert sum(one["bytes_from_relays"] for one in told) > whole
    assert all(one["holders"] == 2 for one in told)


def test_the_memory_lives_as_long_as_it_is_lent(trainer: Trainer) -> None:
    trainer.commit(1)
    with fanin.Relay(trainer.addresses) as relay:
        into = trainer.empty()
        seen = weakref.ref(into["t0"])
        relay.pull_into(RUN, into, step=1, timeout=PATIENCE)
        del into
        gc.collect()
        assert seen() is not None
        relay.release()
        gc.collect()
        assert seen() is None


def test_a_refused_call_leaves_lent_what_is_lent(trainer: Trainer, stack: ExitStack) -> None:
    relay = stack.enter_context(fanin.Relay(trainer.addresses))
    trainer.commit(1)
    into = trainer.empty()
    seen = weakref.ref(into["t0"])
    waits, go = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        waits.set()
        go.wait(PATIENCE)

    how: dict[str, Any] = {"timeout": PATIENCE, "progress": hold}
    first = threading.Thread(target=relay.pull_into, args=(RUN, into), kwargs=how)
    first.start()
    assert waits.wait(PATIENCE)
    with pytest.raises(fanin.StateError, match="under way"):
        relay.pull_into(RUN, trainer.empty())
    go.set()
    first.join()
    with pytest.raises(fanin.RequestError):
        relay.pull_into(RUN, trainer.empty(), step=1, at_least=1)
    with pytest.raises(fanin.FaninError):
        relay.pull_into("no such run", trainer.empty())
    del first, into
    gc.collect()
    assert seen() is not None


def test_a_callback_that_raises_at_the_end_leaves_nothing_lent(
    trainer: Trainer, stack: ExitStack
) -> None:
    relay, other = (stack.enter_context(fanin.Relay(trainer.addresses)) for _ in range(2))
    trainer.commit(1)
    into, later = trainer.empty(), trainer.empty()

    def fail(done: int, total: int) -> None:
        if done == total:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        relay.pull_into(RUN, into, step=1, timeout=PATIENCE, progress=fail)
    for value in into.values():
        value[:] = 7
    other.pull_into(RUN, later, step=1, timeout=PATIENCE)
    assert trainer.holds(later)


def test_progress_tells_of_all_bytes(trainer: Trainer, stack: ExitStack) -> None:
    relay = stack.enter_context(fanin.Relay(trainer.addresses))
    trainer.commit(1)
    told: list[tuple[int, int]] = []
    ranks: list[fanin.PullProgress] = []
    relay.pull_into(
        RUN,
        trainer.empty(),
        timeout=PATIENCE,
        progress=lambda *bytes_: told.append(bytes_),
        rank_progress=ranks.append,
    )
    assert told[-1] == (TENSORS << 20, TENSORS << 20)
    assert ranks[-1].bytes_done == TENSORS << 20
    assert ranks[-1].ranks == ()


def test_readers_of_this_host_are_waited_for_as_long_as_is_said() -> None:
    options = fanin.relay.RelayOptions(addresses=["127.0.0.1:6000"], lease=0.0)
    assert fanin.relay._serving(options).lease == 0.0


def test_what_cannot_be(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fanin.RequestError, match="addresses"):
        fanin.Relay([])
    with pytest.raises(fanin.RequestError, match="loopback, where no other host reaches this one"):
        fanin.Relay(trainer.addresses, network="127.0.0.0/8")
    monkeypatch.setattr("fanin.relay.route_address", lambda _: "192.0.2.7")
    with pytest.raises(fanin.RequestError, match="is 192.0.2.7, which is not in the network"):
        fanin.Relay(trainer.addresses, network="10.0.0.0/8")
    with pytest.raises(fanin.RequestError, match="network"):
        fanin.Relay(trainer.addresses, network="everywhere")
    relay = fanin.Relay(trainer.addresses)
    relay.close()
    relay.close()
    with pytest.raises(fanin.StateError, match="the relay is closed"):
        relay.stats()
    with pytest.raises(fanin.StateError, match="the relay is closed"):
        relay.pull_into(RUN, trainer.empty())


def test_a_trainer_that_forbids_relays_is_read_without(stack: ExitStack) -> None:
    trainer = Trainer(relays=False)
    with trainer.server:
        trainer.commit(1)
        relays = [stack.enter_context(fanin.Relay(trainer.addresses)) for _ in range(2)]
        into = [trainer.empty() for _ in relays]
        pull_all(relays, into, 1)
        assert all(trainer.holds(got) for got in into)
        assert all(one.stats()["bytes_from_relays"] == 0 for one in relays)
        assert all(one.stats()["forbidden"] == 1 for one in relays)


def test_a_cache_that_verifies_does_without_a_relay_that_lies(trainer: Trainer) -> None:
    trainer.commit(1)
    command = [nixl_fetch(), "relay", trainer.addresses[0], RUN, "--verify"]
    into = trainer.empty()
    with fanin.Relay(trainer.addresses) as liar, ExitStack() as stack:
        liar.pull_into(RUN, into, step=1, timeout=PATIENCE)
        into["t0"] ^= 1  # which it has promised not to write
        pipe = subprocess.PIPE
        cache = stack.enter_context(subprocess.Popen(command, stdout=pipe, stderr=pipe))
        stack.callback(cache.kill)
        assert cache.stdout is not None and cache.stderr is not None
        assert b"brought other bytes than the trainer holds" in cache.stderr.readline()
        assert b"step 1 " in cache.stdout.readline()
        liar.release()
        got = trainer.empty()
        relay = stack.enter_context(fanin.Relay(trainer.addresses))
        relay.pull_into(RUN, got, step=1, timeout=PATIENCE)
        assert trainer.holds(got)


def test_a_cache_ends_that_nobody_may_take_from() -> None:
    trainer = Trainer(relays=False)
    with trainer.server:
        trainer.commit(1)
        command = [nixl_fetch(), "relay", trainer.addresses[0], RUN]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 14
    assert "the trainer forbids readers to hand on its weights: let the trainer" in ended.stderr


def test_cancel_ends_a_pull(trainer: Trainer, stack: ExitStack) -> None:
    relay = stack.enter_context(fanin.Relay(trainer.addresses))
    trainer.commit(1)
    relay.pull_into(RUN, trainer.empty(), timeout=PATIENCE)
    timer = threading.Timer(0.2, relay.cancel)
    timer.start()
    with pytest.raises(fanin.CancelledError):
        relay.pull_into(RUN, trainer.empty(), step=9, timeout=PATIENCE)
    timer.join()
    trainer.commit(2)
    assert relay.pull_into(RUN, trainer.empty(), timeout=PATIENCE).step == 2


def test_a_child_may_not_use_it(trainer: Trainer, stack: ExitStack) -> None:
    relay = stack.enter_context(fanin.Relay(trainer.addresses))
    child = os.fork()
    if child == 0:
        good = 0
        for call in (relay.release, relay.stats):
            try:
                call()
            except fanin.ProcessError:
                good += 1
        os._exit(0 if good == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("place", ["/", "a/", "a/b/c", "a b", "é", "x" * 64, "a\0"])
def test_what_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(fanin.RequestError, match="place"):
        fanin.Relay(["127.0.0.1:6000"], place=place)


def test_the_environment_says_where_a_reader_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_PLACE", "a//")
    with pytest.raises(fanin.RequestError, match=r"FANIN_PLACE 'a//' is no place"):
        fanin.Relay(["127.0.0.1:6000"])
    fanin.Relay(["127.0.0.1:6000"], place="").close()
    monkeypatch.setenv("FANIN_PLACE", "a/b")
    fanin.Relay(["127.0.0.1:6000"]).close()


# --------------------------------------------------------------------------- a host's cache


class Cache:
    """`nixl-fetch relay` beside a trainer, by the events that it tells."""

    def __init__(self, trainer: Trainer) -> None:
        self.told: list[tuple[str, int]] = []
        words = [nixl_fetch(), "relay", trainer.addresses[0], RUN, "--json"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.heard = threading.Condition()
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            with self.heard:
                self.told.append((event["event"], event.get("step", 0)))
                self.heard.notify_all()

    def expect(self, event: str, step: int) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: (event, step) in self.told, PATIENCE), self.told

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join()


def test_a_cache_drops_what_was_taken_back_and_nothing_else(trainer: Trainer) -> None:
    trainer.commit(1)
    cache = Cache(trainer)
    try:
        cache.expect("step", 1)
        trainer.server.begin_update(RUN)
        trainer.server.abort_update(RUN)
        time.sleep(2.5)  # it looks every two seconds
        trainer.commit(2)
        cache.expect("step", 2)
        assert ("withdrawn", 1) not in cache.told
        trainer.server.withdraw(RUN)
        cache.expect("withdrawn", 2)
        trainer.commit(3)
        cache.expect("step", 3)
    finally:
        cache.end()
