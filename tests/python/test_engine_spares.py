# SPDX-License-Identifier: Apache-2.0
"""Which pulls into directories have the next one's file made beforehand."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from fake_trainer import ADDRESS, FakeTrainer, Run
from fanin.engine import spares
from fanin.engine.checks import EngineFacts
from fanin.engine.clients import ClientPool, Source
from fanin.engine.directories import Places
from fanin.engine.pulls import PullService, Wanted
from fanin.engine.spares import Spares, has_room, memory_left
from local_world import addresses, publish, servers, until, weights
from safetensors import safe_open


class Bench:
    def __init__(self, root: Path, wanted: bool = True) -> None:
        self.trainer = FakeTrainer()
        self.pool = ClientPool(self.trainer.client)
        facts = EngineFacts(max_lora_rank=16)
        self.spares = Spares(wanted)
        self.service = PullService(Places(root), self.pool, lambda: facts, self.spares)
        self.source = Source.of([ADDRESS])

    def pull(self, step: int, run: str = "0") -> bool:
        """Whether the pull has left a spare file."""
        name = f"policy-run{run}-step{step}"
        self.service.pull(Wanted(name, run, step, "policy", self.source, timeout=10.0))
        return bool(self.trainer.spares[-1])

    def steps(self, run: str = "0") -> list[bool]:
        told = []
        for step in range(1, 4):
            self.trainer.commit(step, run)
            told.append(self.pull(step, run))
        return told


def test_from_the_second_step_of_a_run_on(tmp_path: Path) -> None:
    assert Bench(tmp_path / "a").steps() == [False, True, True]
    assert Bench(tmp_path / "b", wanted=False).steps() == [False, False, False]


def test_runs_in_turn_have_a_client_each(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.trainer.runs["1"] = Run(step=0)
    target = bench.source.resolve()
    world = bench.trainer.world
    # Two clients are idle, neither of which has pulled.
    with bench.pool.borrow(target, world, 1e12), bench.pool.borrow(target, world, 1e12):
        pass
    for step in range(1, 4):
        for run in ("0", "1"):
            bench.trainer.commit(step, run)
            bench.pull(step, run)
    by = bench.trainer.pulled_by
    assert by[0] is by[2] is by[4] and by[1] is by[3] is by[5] and by[0] is not by[1]
    assert bench.trainer.spares == [False, False, True, True, True, True]


def test_not_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    assert bench.steps() == [False, True, True]
    monkeypatch.setattr(spares, "memory_left", lambda: iter([10**12, 299]))
    bench.trainer.commit(4)
    assert not bench.pull(4), "three adapters of 100 bytes do not fit into 299"
    monkeypatch.setattr(spares, "memory_left", lambda: iter([300]))
    bench.trainer.commit(5)
    assert bench.pull(5)


def test_what_is_left(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    proc.mkdir()
    group.mkdir(parents=True)
    assert list(memory_left(tmp_path)) == []
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    7 kB\n")
    (group / "memory.current").write_text("400\n")
    (group / "memory.stat").write_text("anon 70\ninactive_file 20\nactive_file 3\nshmem 90\n")
    (group / "memory.max").write_text("max\n")
    assert list(memory_left(tmp_path)) == [7 * 1024]
    (group / "memory.max").write_text("1000\n")
    assert list(memory_left(tmp_path)) == [7 * 1024, 623], "files' pages are given back"
    (group / "memory.stat").unlink()
    assert list(memory_left(tmp_path)) == [7 * 1024]
    assert has_room(tmp_path, 1) and not has_room(tmp_path / "none", 1)
    found = os.statvfs(tmp_path)
    assert not has_room(tmp_path, (found.f_bavail + 1) * found.f_frsize)


def nameless(folder: Path) -> list[str]:
    """The files without a name in *folder* that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(f"{folder}/") and target.endswith(" (deleted)"):
                found.append(target)
    return found


def test_the_library_has_one_file_ready(tmp_path: Path) -> None:
    """None before the second step, one from then on, and none when the engine goes."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600))
    except OSError:
        pytest.skip("the file system has no nameless files")
    service = PullService(Places(tmp_path), ClientPool(), spares=Spares(True))
    with servers() as ranks:
        source = Source.of(addresses(ranks))
        for step in range(1, 5):
            publish(ranks, step)
            wanted = Wanted(f"a-run0-step{step}", "0", step, "a", source, 20.0)
            adapter = service.pull(wanted)
            with safe_open(adapter.path / "adapter_model.safetensors", "numpy") as file:
                here = {name: file.get_tensor(name) for name in file.keys()}
            for name, value in weights(step).items():
                assert (here[name] == value).all()
            wished = int(step > 1)
            until(lambda wished=wished: len(nameless(tmp_path)) == wished)  # a thread makes it
            shown = {one.name for one in adapter.path.parent.iterdir() if one.is_dir()}
            assert shown == {f"a-step{i}" for i in range(1, step + 1)}
        # Another engine has brought the next step: this one lets its file go.
        other = PullService(Places(tmp_path), ClientPool(), spares=Spares(True))
        publish(ranks, 5)
        wanted = Wanted("a-run0-step5", "0", 5, "a", source, 20.0)
        assert not other.pull(wanted).reused and service.pull(wanted).reused
        until(lambda: not nameless(tmp_path))
        other.close()
        for step in (6, 7):
            publish(ranks, step)
            service.pull(Wanted(f"a-run0-step{step}", "0", step, "a", source, 20.0))
        until(lambda: len(nameless(tmp_path)) == 1)
        service.close()
    assert nameless(tmp_path) == []
