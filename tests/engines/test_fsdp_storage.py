# SPDX-License-Identifier: Apache-2.0
"""What trainers do to their parameters between steps, in FSDP2 worlds of two ranks.

Storage that moved is found at the next commit; a commit that would publish temporary memory, or
memory that was given back, is refused with a sentence; an update that fails publishes nothing.
"""

from __future__ import annotations

import collections.abc
import contextlib
import pathlib
from typing import Any

import fanin
import pytest
from models import ATTENTION
from safetensors.torch import load_file
from worlds import World, digests


class Lab:
    """A world, and a worker in this process that checks what can be pulled."""

    def __init__(self, world: World, folder: pathlib.Path, options: dict[str, Any]):
        self.world, self.folder = world, folder
        self.record = pathlib.Path(options["record"])
        self.addresses = world.addresses()
        self.client = fanin.Client(self.addresses)
        self.pulls = 0

    def pull(self, timeout: float = 60.0, **which: int) -> fanin.PullResult:
        self.pulls += 1
        directory = self.folder / f"pull-{self.pulls}"
        result = self.client.pull_adapter("0", directory, timeout=timeout, **which)
        pulled = load_file(directory / "adapter_model.safetensors")
        recorded = load_file(self.record / f"step-{result.step}.safetensors")
        assert digests(pulled) == digests(recorded), f"step {result.step}"
        return result

    def nothing_to_pull(self) -> None:
        with pytest.raises(fanin.errors.PullAgainError):
            self.pull(timeout=1.0)

    def do(self, what: str, **fields: Any) -> None:
        for rank, done in enumerate(self.world.do(what, **fields)):
            assert done["error"] is None, f"rank {rank}, {what}: {done['error']['text']}"

    def refused(self, what: str, *words: str, **fields: Any) -> None:
        """Every rank refuses, and says why."""
        for done in self.world.do(what, **fields):
            assert done["error"] is not None, f"{what} was not refused"
            assert done["error"]["type"] != "Planned"
            for word in words:
                assert word in done["error"]["text"], done["error"]["text"]

    def next_steps_work(self, first: int, last: int) -> None:
        self.do("train", first=first, last=last)
        assert self.pull(at_least=last).step == last


@contextlib.contextmanager
def lab(folder: pathlib.Path, **more: Any) -> collections.abc.Iterator[Lab]:
    record = folder / "record"
    record.mkdir()
    # lm_head belongs to the root's group, whose parameters stay whole after a forward.
    targets = [*ATTENTION, "lm_head"]
    options = {"kind": "qwen2", "r": 3, "targets": targets, "record": str(record), **more}
    with World(2, options, folder / "world") as world:
        one = Lab(world, folder, options)
        with contextlib.closing(one.client):
            yield one
            world.tell("end", how="close, destroy")
            world.expect("ending")
            assert world.wait() == [0, 0]


def test_moved_storage_is_put_again(tmp_path: pathlib.Path) -> None:
    with lab(tmp_path) as here:
        assert here.pull().step == 1
        here.do("assign")
        here.do("publish", step=2)
        assert here.pull(at_least=2).step == 2
        here.next_steps_work(3, 5)
        here.do("load_checkpoint")
        here.refused("publish", "written outside of updating", step=6)
        here.do("publish", step=6)
        assert here.pull(at_least=6).step == 6
        here.do("convert", dtype="bfloat16")
        here.do("publish", step=7)
        assert here.pull(at_least=7).step == 7
        here.do("convert", dtype="float32")
        here.next_steps_work(8, 10)


def test_commit_of_whole_parameters_is_refused(tmp_path: pathlib.Path) -> None:
    with lab(tmp_path) as here:
        here.do("evaluate")
        here.refused("publish", "unsharded", step=2)
        here.do("reshard")
        here.do("publish", step=2)
        assert here.pull(at_least=2).step == 2
        here.refused("commit_between", "unsharded", step=3)
        here.next_steps_work(3, 4)


@pytest.mark.parametrize("snapshot", [False, True], ids=["by-reference", "snapshot"])
def test_update_that_fails_publishes_nothing(tmp_path: pathlib.Path, snapshot: bool) -> None:
    with lab(tmp_path, server={"snapshot": snapshot}) as here:
        here.do("train", first=2, last=3)
        for done in here.world.do("fail", step=4):
            assert done["error"]["type"] == "Planned"
        if snapshot:
            assert here.pull().step == 3
        else:
            here.nothing_to_pull()
        here.next_steps_work(4, 6)


def test_offloaded_memory(tmp_path: pathlib.Path) -> None:
    with lab(tmp_path) as here:
        assert here.pull().step == 1
        here.do("pause")
        here.do("shrink")
        with pytest.raises(fanin.errors.PausedError, match="trainer memory offloaded"):
            here.pull(timeout=30.0)
        here.refused("resume", step=2)
        here.do("grow")
        here.do("resume", step=2)
        assert here.pull(at_least=2).step == 2
        here.next_steps_work(3, 5)


def test_memory_given_back_is_not_published(tmp_path: pathlib.Path) -> None:
    with lab(tmp_path) as here:
        here.do("shrink")
        here.refused("publish", step=2)
        here.nothing_to_pull()
        here.do("grow")
        here.do("publish", step=2)
        assert here.pull(at_least=2).step == 2
