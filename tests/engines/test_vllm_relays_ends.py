# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers that hand on: relays that forge, and engines that do something else meanwhile.

One fleet for the file. The tests run in order, each on what the earlier ones left.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fanin
import pytest
import torch
from fanin.sync import SyncError
from relay_fleet import PATIENCE, RUN, Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = Fleet(tmp_path_factory.mktemp("fleet"))
    yield one
    one.close()


def as_before(fleet: Fleet, step: int) -> None:
    """All engines answer by that step."""
    fleet.sync_all(step, again=True)
    one, two = fleet.answers()
    assert one == two


# ------------------------------------------------------------------------- forged bytes


@contextmanager
def forging(fleet: Fleet, step: int) -> Iterator[None]:
    """A relay has the step, and one bit of each matrix of its MLPs is another one."""
    memory = fleet.room()
    with fanin.Relay(fleet.addresses) as liar:
        liar.pull_into(RUN, memory, step=step, timeout=PATIENCE)
        for name, tensor in memory.items():
            if ".mlp." in name:
                tensor.view(torch.int16).view(-1)[7] ^= 1
        yield


def test_a_proof_finds_what_a_relay_has_forged(fleet: Fleet) -> None:
    """No engine answers by it, and the next sync heals."""
    fleet.sync_all(fleet.step())
    step = fleet.step()
    with forging(fleet, step), pytest.raises(SyncError) as caught:
        fleet.sync(step, "second")
    said = str(caught.value)
    assert "model.layers.0.mlp." in said
    assert "self_attn" not in said
    assert fleet.engines[1].ask("GET", "/is_paused")["is_paused"]
    as_before(fleet, step)


def test_verify_names_the_relay_that_forges(fleet: Fleet) -> None:
    """It is found before anything is installed; the trainer is read in its place."""
    registry = fleet.registry_of(init={"verify": True})
    step = fleet.step()
    with forging(fleet, step):
        result = registry.sync(step, "second", prefetch="auto", verify_served=True)
    assert result.ok
    (entry,) = result.results.values()
    assert "with relays" not in entry.how
    assert "brought other bytes than the trainer holds" in entry.note
    assert "model.layers.0.mlp." in entry.note
    as_before(fleet, step)


# ----------------------------------------------------- engines that do something else meanwhile


class Reader:
    """Another one that wants what the engine "first" has, pulls it again and again, and compares
    each byte with what the trainer has. Nobody else hands it on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.step = fleet.step()
        fleet.sync(self.step, "first")
        self._wanted = fleet.room()
        with fanin.Client(fleet.addresses) as client:
            client.pull_into(RUN, self._wanted, step=self.step, timeout=PATIENCE)
        self._failure: BaseException | None = None
        self._pulls, self._relayed, self._stop = 0, 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        self.wait_for_relayed()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        assert self._failure is None, self._failure

    def wait_for_pulls(self) -> None:
        """Three more, wherever the bytes come from."""
        before = self._pulls
        self._wait_for(lambda: self._pulls > before + 3)

    def wait_for_relayed(self) -> None:
        """Until the engine has handed something on once more."""
        self.wait_for_pulls()
        before = self._relayed
        self._wait_for(lambda: self._relayed > before)

    def _wait_for(self, what: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._failure or what(), PATIENCE)

    def _run(self) -> None:
        try:
            memory = self._fleet.room()
            with fanin.Relay(self._fleet.addresses) as relay:
                while not self._stop:
                    self._pull(relay, memory)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _pull(self, relay: fanin.Relay, memory: dict[str, Any]) -> None:
        relay.release()
        for tensor in memory.values():
            tensor.zero_()
        relay.pull_into(RUN, memory, step=self.step, timeout=PATIENCE)
        for name, tensor in memory.items():
            assert torch.equal(tensor, self._wanted[name]), name
        with self._changed:
            self._pulls += 1
            self._relayed = relay.stats()["bytes_from_relays"]
            self._changed.notify_all()


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_hands_on(fleet: Fleet, level: int) -> None:
    """vLLM's build for CPUs gives no memory up. At level 2 fanin has the weights lost all the
    same."""
    engine = fleet.engines[0]
    with Reader(fleet) as reader:
        engine.ask("POST", f"/sleep?level={level}", timeout=PATIENCE)
        reader.wait_for_relayed()
        engine.ask("POST", "/wake_up?tags=weights", timeout=PATIENCE)
        reader.wait_for_relayed()
    as_before(fleet, reader.step)
    engine.ask("POST", "/wake_up?tags=kv_cache", timeout=PATIENCE)


def test_an_engine_that_loads_its_checkpoint_hands_on_what_it_has_read(fleet: Fleet) -> None:
    with Reader(fleet) as reader:
        body = {"method": "reload_weights"}
        fleet.engines[0].ask("POST", "/collective_rpc", body, timeout=PATIENCE)
        reader.wait_for_relayed()
    as_before(fleet, reader.step)


def test_an_engine_that_is_pointed_at_a_trainer_anew_lends_nothing(fleet: Fleet) -> None:
    with Reader(fleet) as reader:
        body = {"init_info": {"trainer": str(fleet.trainer.info)}}
        fleet.engines[0].ask("POST", "/init_weight_transfer_engine", body, timeout=PATIENCE)
        reader.wait_for_pulls()
    deadline = time.monotonic() + PATIENCE
    while fleet.relays(reader.step):  # a rank hears of it soon
        assert time.monotonic() < deadline
    as_before(fleet, reader.step)


def test_one_that_stops_or_is_killed_is_read_no_more(fleet: Fleet) -> None:
    group = fleet.engines[0]._process.pid
    with Reader(fleet) as reader:
        os.killpg(group, signal.SIGSTOP)
        reader.wait_for_pulls()
        os.killpg(group, signal.SIGCONT)
        reader.wait_for_relayed()
        os.killpg(group, signal.SIGKILL)
        reader.wait_for_pulls()
    fleet.registry.remove(fleet.engines.pop(0).url)
    assert fleet.sync(fleet.step(), "second") == 0
