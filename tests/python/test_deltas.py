# SPDX-License-Identifier: Apache-2.0
"""What has changed since the last step, read instead of the whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import fanin
import local_world
import numpy as np
import pytest
from fanin.config import ConfigError, trainer_config
from fanin.engine.landing import Summary
from fanin.errors import RequestError
from local_world import PATIENCE

RUN = "full:0"
SHAPE = (300, 400)  # of each tensor: two segments of a patch
NAMES = ("a", "b")


class World:
    """Two ranks that publish snapshots, each half of the rows."""

    def __init__(self, ranks: list[fanin.Server]) -> None:
        self.ranks = ranks
        self.random = np.random.default_rng(1)
        made = self.random.integers(0, 1 << 16, (len(NAMES), *SHAPE), np.uint16)
        self.now = dict(zip(NAMES, made, strict=True))
        self.step = 0
        half = SHAPE[0] // 2
        for server in ranks:
            first = server.rank * half
            shards = (
                fanin.shard_of(name, one[first : first + half], shape=SHAPE, offset=(first, 0))
                for name, one in self.now.items()
            )
            server.put(RUN, list(shards))

    def commit(self, share: float = 0.01, **options: Any) -> int:
        """The next step, in which that share of the elements has changed."""
        for one in self.now.values():
            one[self.random.random(SHAPE) < share] += 1
        self.step += 1
        for server in self.ranks:
            if self.step > 1:
                server.begin_update(RUN)
            server.commit(RUN, self.step, snapshot=True, wait=True, **{"deltas": 4, **options})
        return self.step


class Reader:
    """Memory that steps are pulled into, and a client."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.client = local_world.client_of(world.ranks, **options)
        self.got = {name: np.zeros(SHAPE, np.uint16) for name in NAMES}
        self.packed = local_world.packed(self.got)

    def pull(self, **options: Any) -> fanin.PullResult:
        result = self.client.pull_into(
            RUN, self.packed, step=self.world.step, timeout=PATIENCE, **{"deltas": True, **options}
        )
        for name, one in self.world.now.items():
            np.testing.assert_array_equal(self.got[name], one, err_msg=name)
        return result


@pytest.fixture
def world() -> Iterator[World]:
    with local_world.servers(2) as ranks:
        yield World(ranks)


@pytest.fixture
def reader(world: World) -> Iterator[Reader]:
    world.commit()
    one = Reader(world)
    yield one
    one.client.close()


def test_a_step_after_the_other(world: World, reader: Reader) -> None:
    whole = sum(one.nbytes for one in world.now.values())
    first = reader.pull()
    assert (first.base_step, first.patch_bytes, first.bytes) == (0, 0, whole)
    assert "not known" in first.whole_because and first.verified
    for step in range(2, 8):
        world.commit()
        result = reader.pull()
        assert (result.step, result.base_step, result.whole_because) == (step, step - 1, "")
        assert 0 < result.patch_bytes < whole / 10 and result.apply > 0 and result.verified


def test_step_0_once_more_is_told_as_what_it_read(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Of it nothing has changed: neither the step that is held nor the bytes say that it came by
    patches."""
    world.step = -1
    world.commit()
    with caplog.at_level(logging.INFO, "fanin"):
        reader = Reader(world)
        first, again = reader.pull(), reader.pull()
        reader.client.close()
    assert (again.whole_because, again.base_step, again.patch_bytes) == ("", 0, 0)
    whole, patched, plain = Summary(), Summary(), Summary()
    whole.add(first, True)
    patched.add(again, True)
    plain.add(again)
    after_whole = Summary()  # a part that has no place comes whole before the part that has one
    after_whole.add(first)
    after_whole.add(again, True)
    held = first.bytes
    assert after_whole.bytes == held
    assert (whole.bytes, patched.bytes, patched.since, plain.bytes) == (held, 0, 0, held)
    assert ", 0.0 % of 0.48 MB since step 0 in" in str(patched)
    assert ", 0 bytes of patches since step 0, " in caplog.text


def test_what_else_writes_the_memory(world: World, reader: Reader) -> None:
    """What is told is read whole; what is not is found by the ranks' digests."""
    reader.pull()
    world.commit()
    reader.got["a"][0, 0] += 1
    reader.packed.touched()
    assert "not known" in reader.pull().whole_because
    world.commit()
    assert reader.pull().base_step == world.step - 1
    world.commit()
    reader.got["b"][0, 0] += 1  # and nobody says so
    assert reader.pull().whole_because
    world.commit()
    reader.pull(deltas=False)
    world.commit()
    assert "not known" in reader.pull().whole_because


def test_a_session_that_goes_on_after_a_pull(world: World, reader: Reader) -> None:
    """Of another client: what it reads later would be taken for the newer step."""
    reader.pull()
    with local_world.client_of(world.ranks) as other:
        session = other.begin(RUN, reader.packed, timeout=PATIENCE)
        session.read(0, 1)
        world.commit()
        reader.pull(verify=False)
        session.read(1, 1)
        session.abandon()
    world.commit()
    assert "not known" in reader.pull(verify=False).whole_because
    world.commit()
    assert reader.pull(verify=False).base_step == world.step - 1


def test_a_relay_is_something_else(world: World, reader: Reader) -> None:
    reader.pull()
    with fanin.Relay(local_world.addresses(world.ranks), use_ucx=False, path="stream") as relay:
        relay.pull_into(RUN, reader.packed, timeout=PATIENCE)
        relay.release()
        world.commit()
        assert "not known" in reader.pull().whole_because


def test_a_replica_that_was_not_read_before() -> None:
    """Of which the memory holds nothing; it was not started again."""
    now, got = np.ones(SHAPE, np.uint16), np.zeros(SHAPE, np.uint16)
    packed = local_world.packed({"a": got})
    with local_world.servers(2) as ranks:
        for server in ranks:
            server.put(RUN, [fanin.shard_of("a", now)])
            server.commit(RUN, 1, snapshot=True, wait=True, deltas=4)
        read: set[int] = set()
        while len(read) < 2:  # each client chooses by itself
            with local_world.client_of(ranks) as client:
                result = client.pull_into(RUN, packed, timeout=PATIENCE, deltas=True)
            of = {one["rank"] for one in result.ranks if one["bytes"]}
            because = result.whole_because
            read |= of
    assert because == "the destination holds what another plan has brought"


def test_refusals(world: World, reader: Reader) -> None:
    with pytest.raises(RequestError, match="fanin.pack"):
        reader.client.pull_into(RUN, reader.got, deltas=True)
    server = world.ranks[0]
    server.begin_update(RUN)
    with pytest.raises(RequestError, match="deltas"):
        server.commit(RUN, 9, snapshot=True, deltas=17)
    with pytest.raises(RequestError, match="by reference has no deltas"):
        server.commit(RUN, 9, deltas=4)
    with pytest.raises(ConfigError, match="DELTAS: only snapshots") as caught:
        trainer_config(None, {"FANIN_DELTAS": "4"})
    assert "snapshot = true" in caught.value.remedy
    both = {"FANIN_DELTAS": "4", "FANIN_SNAPSHOT": "1"}
    assert trainer_config(None, both).server_arguments()["deltas"] == 4
