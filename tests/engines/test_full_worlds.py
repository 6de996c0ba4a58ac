# SPDX-License-Identifier: Apache-2.0
"""Trainers of whole models in real worlds, pulled by the client and compared byte for byte.

What is pulled after each step must be what transformers saves of the state that torch gathered
after that step: the same names, dtypes, shapes and bytes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import fanin
import fanin.check
import pytest
import torch
from fanin._digest import box_digest
from fanin._served import Held, compare, join
from fanin.errors import PausedError
from full_models import save_full_model
from full_trainer import FullTrainer
from models import same_tensors
from safetensors.torch import load_file

DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16}


class Engine:
    """A client that keeps its connections over all steps, and fills tensors of its own."""

    def __init__(self, addresses: list[str], run: str = "full:0", **options: Any) -> None:
        self.client = fanin.Client(addresses, **options)
        self.run = run
        self.tensors: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def pull(self, **which: Any) -> int:
        for entry in self.client.catalog(self.run):
            if entry.name not in self.tensors:
                self.tensors[entry.name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        result = self.client.pull_into(self.run, self.tensors, **{"timeout": 60, **which})
        return int(result.step)


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@dataclasses.dataclass
class Case:
    name: str
    size: int
    layout: str = "fsdp"
    kind: str = "qwen2"
    tied: bool = False
    dtype: str = "bfloat16"
    server: dict[str, Any] = dataclasses.field(default_factory=dict)
    client: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 2


CASES = [
    Case("one-rank", 1, "plain", tied=True),
    Case("two-ranks-20-steps", 2, kind="qwen3", tied=True, steps=20),
    Case("three-ranks-uneven", 3, dtype="float32"),
    Case("hsdp-2x2", 4, "hsdp", kind="qwen3"),
    Case("fsdp-tp-2x2", 4, "fsdp+tp", tied=True),
    Case(
        "snapshot-cast",
        2,
        "fsdp+tp",
        dtype="float32",
        server={"snapshot": True, "cast": "BF16"},
        client={"path": "stream", "use_unix": False},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_step_is_what_torch_gathers(case: Case, tmp_path: Path) -> None:
    model = save_full_model(tmp_path / "model", case.kind, case.tied, dtype=case.dtype)
    options = {"layout": case.layout, "dtype": case.dtype, "server": case.server}
    with FullTrainer(
        model, tmp_path / "run", world_size=case.size, record=True, **options
    ) as trainer:
        trainer.wait_ready()
        with Engine(trainer.addresses, **case.client) as engine:
            before: dict[str, torch.Tensor] = {}
            for step in range(case.steps + 1):
                if step:
                    trainer.step()
                assert engine.pull(step=step) == step
                wanted = saved(trainer.record(step))
                if "cast" in case.server:
                    wanted = {name: value.bfloat16() for name, value in wanted.items()}
                same_tensors(engine.tensors, wanted)
                assert all(not torch.equal(wanted[name], value) for name, value in before.items())
                before = wanted
            metadata = engine.client.metadata("full:0")
        assert trainer.exit() == [0] * case.size
    assert metadata["format"] == "pt"
    config = json.loads(metadata["config"])
    written = json.loads((trainer.record(0) / "config.json").read_text())
    assert config["architectures"] == written["architectures"]
    assert {k: v for k, v in config.items() if k in written} == {
        k: v for k, v in written.items() if k in config
    }


def test_what_may_happen_to_a_trainer(tmp_path: Path) -> None:
    """In one world: mistakes that are told, pauses, other dtypes, a rank behind, a dead one."""
    model = save_full_model(tmp_path / "model", "qwen3", tied=True)
    with FullTrainer(model, tmp_path / "run", world_size=2, run="7") as trainer:
        trainer.wait_ready()
        with Engine(trainer.addresses, "full:7") as engine:
            assert engine.pull() == 0
            for error in trainer.refused("publish_between", step=1):
                assert error["type"] == "StateError"
                assert "FSDP's temporary unsharded buffer" in error["text"]
            assert engine.pull() == 0  # as it was

            trainer.write_outside()
            for error in trainer.refused("publish", step=1):
                assert "was written outside of updating()" in error["text"]
            with pytest.raises(fanin.FaninError):
                engine.pull(timeout=0.5)
            trainer.publish(1)
            gathered(trainer, engine, tmp_path / "after-write")

            trainer.pause()
            with pytest.raises(PausedError):
                engine.pull(timeout=10)
            trainer.resume()
            assert engine.pull() == 1

            trainer.step()
            gathered(trainer, engine, tmp_path / "after-step")
            trainer.do("convert", dtype="float32")
            for error in trainer.refused("publish", step=3):
                assert "is F32" in error["text"] and "and was BF16" in error["text"]
            trainer.do("refresh")
            trainer.publish(3)
            engine.tensors.clear()
            gathered(trainer, engine, tmp_path / "after-convert")

            trainer.step_on(1)  # rank 0 stays behind
            with pytest.raises(fanin.FaninError) as caught:
                engine.pull(step=4, timeout=1)
            assert caught.value.rank == 0
            trainer.kill_rank(0)
            with pytest.raises(fanin.FaninError) as caught:
                engine.pull(step=4, timeout=10)
            assert caught.value.rank == 0


def gathered(trainer: FullTrainer, engine: Engine, directory: Path) -> None:
    """What is pulled is what torch gathers now."""
    engine.pull(step=trainer.published)
    trainer.gather(directory)
    same_tensors(engine.tensors, saved(directory))


def test_no_rank_needs_more_memory_than_the_others(tmp_path: Path) -> None:
    """Nothing is gathered: not on rank 0 either, when all of 100 MB is read from two ranks."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    model = save_full_model(tmp_path / "model", "qwen3", **sizes)
    bytes_of_all = sum(one.nbytes for one in saved(model).values())
    with FullTrainer(model, tmp_path / "run", world_size=2) as trainer:
        trainer.wait_ready()
        trainer.step()  # the optimizer's state is there, and FSDP2's buffers
        trainer.do("forget_peak")
        with Engine(trainer.addresses, path="stream") as engine:
            for step in (1, 2, 3):
                if step > 1:
                    trainer.publish(step)
                assert engine.pull(step=step) == step
        first, second = trainer.growth()
    assert bytes_of_all > 100e6
    assert max(first, second) < bytes_of_all / 4, (first, second)


@pytest.mark.parametrize("layout", ["hsdp", "fsdp+tp"])
def test_the_ranks_digests_are_those_of_what_is_pulled(layout: str, tmp_path: Path) -> None:
    model = save_full_model(tmp_path / "model", "qwen3", tied=True)
    with FullTrainer(model, tmp_path / "run", world_size=4, layout=layout) as trainer:
        trainer.wait_ready()
        with Engine(trainer.addresses) as engine:
            step = engine.pull()
            told, ranks = fanin.check.trained(trainer.addresses, "full:0", 60.0, {})
            held = [
                Held(name, (0,) * one.dim(), tuple(one.shape), {"BF16": box_digest(one)})
                for name, one in engine.tensors.items()
            ]
        assert told == step and len(ranks) == 4
        assert compare(join(ranks), [held]) == ([], len(held))
