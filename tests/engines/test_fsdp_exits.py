# SPDX-License-Identifier: Apache-2.0
"""How trainers end, and what a worker sees of it: clean ends in every way, and killed ranks."""

from __future__ import annotations

import concurrent.futures
import pathlib
from typing import Any

import fanin
import pytest
from limits import limits
from safetensors.torch import load_file
from worlds import PATIENCE, World, digests

ENDS = {
    "close, destroy": 0,
    "destroy, close": 0,
    "destroy": 0,
    "nothing": 0,
    "exception": 1,
    "exception in an update": 1,
    "exception in with": 1,
    "status 3": 3,
}
CRASHES = ("Fatal Python error", "Segmentation", "terminate called", "double free")


def options_of(folder: pathlib.Path, **more: Any) -> dict[str, Any]:
    record = folder / "record"
    record.mkdir()
    return {"kind": "qwen2", "r": 3, "record": str(record), **more}


@pytest.mark.parametrize("how", ENDS)
def test_trainers_end(how: str, tmp_path: pathlib.Path) -> None:
    """While a worker waits for their next step, which then fails and tells whom it lost."""
    with World(2, options_of(tmp_path), tmp_path / "world") as world:
        with (
            fanin.Client(world.addresses()) as client,
            concurrent.futures.ThreadPoolExecutor(1) as pool,
        ):
            assert client.pull_adapter("0", tmp_path / "first").step == 1
            waiting = pool.submit(
                client.pull_adapter, "0", tmp_path / "never", at_least=1000, timeout=PATIENCE
            )
            world.tell("end", how=how)
            world.expect("ending")
            assert world.wait() == [ENDS[how]] * 2
            with pytest.raises(fanin.FaninError) as failure:
                waiting.result(timeout=PATIENCE)
            ours = (fanin.errors.RequestError, fanin.errors.PullTimeoutError)
            assert not isinstance(failure.value, ours), failure.value
            assert failure.value.rank in (0, 1), failure.value
        for rank in world.ranks:
            log = rank.log.read_text()
            assert not [word for word in CRASHES if word in log], rank.tail()
            assert ("Traceback" in log) == how.startswith("exception"), rank.tail()
    assert not (tmp_path / "never").exists()


# An adapter of some 38 MB, so that a pull lasts long enough to be hit in its middle.
LARGE = {"kind": "qwen2", "r": 4096}


class Killer:
    """Kills a rank at the first sign that bytes arrive; called by the pull, as its progress."""

    def __init__(self, world: World, rank: int):
        self.world, self.rank = world, rank
        self.seen: tuple[int, int] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self.seen is None and total > 0:
            self.seen = (done, total)
            self.world.ranks[self.rank].kill()

    def check(self) -> None:
        assert self.seen is not None, "the pull told no progress"
        assert self.seen[0] < self.seen[1], "the pull was over before the rank was killed"


def end_the_others(world: World, killed: int) -> None:
    for number, rank in enumerate(world.ranks):
        if number != killed:
            rank.tell("end", how="close, destroy")
            rank.expect("ending")
            assert rank.wait() == 0, rank.tail()


@pytest.mark.parametrize("path", ["stream", "auto"])
def test_rank_killed_during_a_pull(path: str, tmp_path: pathlib.Path) -> None:
    with World(2, options_of(tmp_path, **LARGE), tmp_path / "world") as world:
        addresses = world.addresses()
        with limits(max_inflight=1 << 20), fanin.Client(addresses, path=path) as client:
            killer = Killer(world, 1)
            with pytest.raises(fanin.FaninError) as failure:
                client.pull_adapter("0", tmp_path / "torn", timeout=20.0, progress=killer)
            killer.check()
            assert failure.value.rank == 1, failure.value
            assert addresses[1] in str(failure.value), failure.value
            assert not (tmp_path / "torn").exists()
            assert not list(tmp_path.glob(".torn*")), "a part of the adapter was left behind"
        end_the_others(world, 1)


def test_replica_killed_during_a_pull(tmp_path: pathlib.Path) -> None:
    """HSDP: the other replica has the bytes, so the pull succeeds."""
    options = options_of(tmp_path, layout="hsdp", **LARGE)
    with World(4, options, tmp_path / "world") as world:
        with limits(max_inflight=1 << 20), fanin.Client(world.addresses()) as client:
            killer = Killer(world, 3)
            result = client.pull_adapter("0", tmp_path / "out", timeout=60.0, progress=killer)
            killer.check()
            assert result.step == 1
        pulled = load_file(tmp_path / "out" / "adapter_model.safetensors")
        recorded = load_file(tmp_path / "record" / "step-1.safetensors")
        assert digests(pulled) == digests(recorded)
        end_the_others(world, 3)
