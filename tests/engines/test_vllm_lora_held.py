# SPDX-License-Identifier: Apache-2.0
"""What workers hold of an adapter, in their slots and beside them: digests of it are the trainer's.

vLLM's own LoRA managers and layers, small and without a model; what the trainer's ranks digest is
made of the tensors here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fanin
import pytest
import slots_engine
from fanin import _served
from fanin._digest import box_digest
from fanin.torch._proof import _served_as
from fanin.vllm.slots import held, stacks_of
from fanin.vllm.slots_worker import Slots
from slots_engine import Engine
from test_vllm_slots import ENGINES, published, request

WORLDS = {
    "dense": ["dense"],
    "dense bf16": ["dense bf16"],
    "dense TP2": ["dense TP2, rank 0", "dense TP2, rank 1"],
    "experts TP2": ["experts TP2, rank 0", "experts TP2, rank 1"],
    "experts EP2": ["experts EP2, rank 0", "experts EP2, rank 1"],
    "fused": ["fused"],
    "mixed TP2": ["mixed TP2, rank 0", "mixed TP2, rank 1"],
}


def trained(tensors: dict[str, Any], scale: float) -> list[_served.Tensor]:
    """Of an adapter whose layers have that scale."""
    found = []
    for name, tensor in tensors.items():
        layout = _served.Layout(name, "F32", (), (), scale if "_B" in name else 1.0)
        digests = {
            _served.scaled(kind, layout.scale): box_digest(_served_as(tensor, kind, layout.scale))
            for kind in layout.kinds()
        }
        found.append(_served.Tensor(name, tuple(tensor.shape), digests, ""))
    return found


def told(worker: Any, e: Engine, rank: int, number: int = 1) -> dict[str, Any]:
    shapes = list(slots_engine.shapes(e, rank).items())
    config = slots_engine.peft_config(e, rank)
    return held(worker, number, shapes, config, e.kind in ("fused", "mixed"))


def differences(tensors: list[_served.Tensor], answers: list[dict[str, Any]]) -> list[str]:
    workers = [
        [_served.Held(name, tuple(at), tuple(n), one) for name, at, n, one in answer["held"]]
        for answer in answers
    ]
    lines = [str(one) for one in _served.compare(tensors, workers)[0]]
    return lines + [line for answer in answers for line in answer["different"]]


@pytest.mark.parametrize("landing", ["directory", "slot"])
@pytest.mark.parametrize("world", WORLDS)
def test_what_is_trained_is_held(tmp_path: Path, world: str, landing: str) -> None:
    """In a slot, and where vLLM keeps an adapter that has left its slot."""
    engines = [ENGINES[name] for name in WORLDS[world]]
    e, rank, workers = engines[0], 4, [slots_engine.worker(one) for one in engines]
    tensors = trained(slots_engine.adapter(e, rank, 1)[0], (3 * rank + 1) / rank)
    with published(e, rank) as trainer:
        path = trainer.directory(tmp_path / "a")
        for worker in workers:
            if landing == "slot":
                slots = Slots(worker)
                image = slots.take(
                    trainer.layout(slots.loader, is_3d=request(1, path, e).is_3d_lora_weight)
                )
                trainer.pull(image)
                slots.hold(str(path), image)
            assert worker.model_runner.lora_manager.add_adapter(request(1, path, e))
    for active in (True, False):
        if not active:
            for worker in workers:
                worker.model_runner.lora_manager._adapter_manager.deactivate_adapter(1)
        answers = [told(worker, one, rank) for worker, one in zip(workers, engines, strict=True)]
        assert differences(tensors, answers) == []
    with pytest.raises(fanin.StateError, match="no adapter 2"):
        told(workers[0], e, rank, number=2)


def first(worker: Any) -> tuple[str, Any]:
    manager = worker.model_runner.lora_manager._adapter_manager
    path = "model.layers.0.mlp.down_proj"
    return path, stacks_of(manager.modules[path])[1].tensor[0]


def write(slot: Any) -> None:
    slot[0, 1, 1] += 1


def clear(slot: Any) -> None:
    slot.zero_()


def spill(slot: Any) -> None:
    slot[0, 1, 7] = 3  # beyond the rank


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (write, "down_proj.lora_B.weight: other values than those that are trained (F32*3.25)"),
        (clear, "down_proj.lora_B.weight: other values than those that are trained (F32*3.25)"),
        (spill, "down_proj.lora_b_stacked.0: it is not zero where the adapter has nothing"),
    ],
)
def test_what_is_held_otherwise(tmp_path: Path, how: Callable[[Any], None], says: str) -> None:
    e, worker = ENGINES["dense"], slots_engine.worker(ENGINES["dense"])
    tensors = slots_engine.adapter(e, 4, 1)[0]
    with published(e, 4) as trainer:
        path = trainer.directory(tmp_path / "a")
        worker.model_runner.lora_manager.add_adapter(request(1, path, e))
    how(first(worker)[1])
    (line,) = differences(trained(tensors, 3.25), [told(worker, e, 4)])
    assert line.endswith(says)
    (line, *others) = differences(trained(tensors, 2.0), [told(worker, e, 4)])
    assert "the engine holds F32*3.25, which is not what F32*2 of the trainer makes" in line + str(
        others
    )


def test_a_module_without_a_place(tmp_path: Path) -> None:
    e, worker = ENGINES["dense"], slots_engine.worker(ENGINES["dense"])
    tensors = slots_engine.adapter(e, 4, 1)[0]
    with published(e, 4) as trainer:
        path = trainer.directory(tmp_path / "a")
        manager = worker.model_runner.lora_manager._adapter_manager
        del manager.modules["model.layers.1.self_attn.o_proj"]
        worker.model_runner.lora_manager.add_adapter(request(1, path, e))
    lines = differences(trained(tensors, 3.25), [told(worker, e, 4)])
    assert len(lines) == 2 and all("o_proj.lora_" in one for one in lines)
    assert all("are held by nobody" in one for one in lines)
