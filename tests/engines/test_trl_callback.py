# SPDX-License-Identifier: Apache-2.0
"""PublishCallback in a trainer of transformers, and what PullMixin refuses: no engine is needed."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin
import pytest
import torch

pytest.importorskip("trl")

from fanin.trl import PublishCallback, PullMixin
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    """One layer, whose loss every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index + 1))}


class Notes(TrainerCallback):
    """What a reader gets of each step while the trainer is behind it."""

    def __init__(self, publish: PublishCallback) -> None:
        self.publish = publish
        self.same: dict[int, bool] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = kwargs["model"].layer.weight.detach()
        self.same[state.global_step] = torch.equal(pulled(self.publish, state.global_step), weight)


def pulled(publish: PublishCallback, step: int, timeout: float = 5.0) -> torch.Tensor:
    into = torch.zeros(4, 4)
    with fanin.Client(publish.trainer().addresses) as client:
        found = client.pull_into("full:0", {"layer.weight": into}, step=step, timeout=timeout)
        assert found.step == step
    return into


def trainer(where: Path, *callbacks: Any, model: Any = None, **more: Any) -> Trainer:
    fixed = {"max_steps": 3, "save_strategy": "no", "learning_rate": 0.1}
    fixed |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(where), **(fixed | more))
    return Trainer(model or Model(), arguments, train_dataset=Rows(), callbacks=list(callbacks))


@pytest.fixture
def publish() -> Iterator[PublishCallback]:
    one = PublishCallback(base_port=0)
    yield one
    one.close()


def test_each_step_is_what_the_trainer_has(tmp_path: Path, publish: PublishCallback) -> None:
    notes = Notes(publish)
    trainer(tmp_path, publish, notes, gradient_accumulation_steps=2).train()
    assert notes.same == {1: True, 2: True, 3: True}
    assert publish.step == 3


class Merged(Notes):
    """The same of what PEFT makes of a copy of the model."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        whole = copy.deepcopy(kwargs["model"]).merge_and_unload()
        super().on_step_end(args, state, control, model=whole)


@pytest.mark.parametrize("weights", ["full", None])
def test_an_adapter_is_published_as_a_whole_model(tmp_path: Path, weights: str | None) -> None:
    """In place of TRL's merge around each sync: the base is as it was."""
    config = LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False)
    model = get_peft_model(Model(), config)
    base = model.base_model.model.layer.base_layer.weight
    before = base.detach().clone()
    publish = PublishCallback(weights=weights, merge=True, base_port=0)
    notes = Merged(publish)
    try:
        trainer(tmp_path, publish, notes, model=model).train()
        assert notes.same == {1: True, 2: True, 3: True} and not publish.adapter
        assert torch.equal(base, before)
    finally:
        publish.close()


def test_a_training_that_begins_again_is_another_world(
    tmp_path: Path, publish: PublishCallback
) -> None:
    one = trainer(tmp_path, publish)
    one.train()
    first = publish.trainer().world_id
    one.train()
    assert publish.trainer().world_id != first
    assert publish.step == 3


def test_a_training_that_is_resumed_goes_on_at_its_step(
    tmp_path: Path, publish: PublishCallback
) -> None:
    trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    notes = Notes(publish)
    one = trainer(tmp_path, publish, notes, max_steps=4)
    begun: list[int | None] = []

    class Begun(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(publish.step)

    one.add_callback(Begun())
    one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert begun == [2, 3]
    assert notes.same == {3: True, 4: True}


def test_a_step_that_raises_cannot_be_read(tmp_path: Path, publish: PublishCallback) -> None:
    one = trainer(tmp_path, publish)
    one.create_optimizer()
    step = one.optimizer.step

    def break_off(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        if one.state.global_step == 1:
            raise RuntimeError("broken")

    one.optimizer.step = break_off
    with pytest.raises(RuntimeError, match="broken"):
        one.train()
    assert publish.step is None
    with pytest.raises(fanin.FaninError):
        pulled(publish, 2, timeout=0.5)
    publish.close()
    with pytest.raises(fanin.StateError, match="nothing is published"):
        publish.trainer()


def test_writes_beside_the_optimizer_step_are_found(
    tmp_path: Path, publish: PublishCallback
) -> None:
    class Writer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                kwargs["model"].layer.weight.add_(1)

    with pytest.raises(fanin.StateError, match=r"written outside of updating\(\)"):
        trainer(tmp_path, publish, Writer()).train()


def test_closed_in_the_middle(tmp_path: Path, publish: PublishCallback) -> None:
    class Closer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            publish.close()

    with pytest.raises(fanin.StateError, match="nothing is published"):
        trainer(tmp_path, publish, Closer()).train()


# ------------------------------------------------------------------------------ refused


def arguments(**more: Any) -> Any:
    return types.SimpleNamespace(deepspeed_plugin=None, load_best_model_at_end=False, **more)


def begin(publish: PublishCallback, args: Any, model: Any = None) -> None:
    state = types.SimpleNamespace(global_step=0)
    publish.on_train_begin(args, state, None, model=Model() if model is None else model)


@pytest.mark.parametrize(
    ("stage", "snapshot", "told"),
    [(3, True, "ZeRO-3"), (2, False, "inside of backward")],
)
def test_deepspeed(stage: int, snapshot: bool, told: str) -> None:
    args = arguments()
    args.deepspeed_plugin = types.SimpleNamespace(zero_stage=stage)
    with pytest.raises(fanin.RequestError, match=told):
        begin(PublishCallback(base_port=0, snapshot=snapshot), args)


def test_a_trainer_that_loads_its_best_model() -> None:
    args = arguments()
    args.load_best_model_at_end = True
    with pytest.raises(fanin.RequestError, match="load_best_model_at_end"):
        begin(PublishCallback(base_port=0), args)
    copies = PublishCallback(base_port=0, snapshot=True)
    begin(copies, args)
    assert copies.step == 0
    copies.close()


def test_all_weights_of_a_model_with_an_adapter() -> None:
    model = Model()
    model.peft_config = {"default": None}
    with pytest.raises(fanin.RequestError, match="its base and its adapter"):
        begin(PublishCallback(base_port=0, weights="full"), arguments(), model)


def test_what_is_no_kind_and_no_run() -> None:
    with pytest.raises(fanin.RequestError, match="'lora', 'full'"):
        PublishCallback(weights="all")
    with pytest.raises(fanin.RequestError, match="run"):
        PublishCallback(run="a/b")


class Mixed(PullMixin, Trainer):
    """A trainer that does not generate."""


def test_the_mixin_of_a_trainer_that_does_not_generate(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(fanin.RequestError, match="does not generate by TRL's VLLMGeneration"):
        Mixed(Model(), args)


@pytest.mark.parametrize(
    ("wrong", "told"), [({"max_lag": -1}, "max_lag"), ({"lora_name": "a b"}, "name")]
)
def test_the_mixins_arguments(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(fanin.RequestError, match=told):
        Mixed(Model(), None, **wrong)


def test_the_engine_inside_of_the_trainer() -> None:
    from trl.generation import vllm_generation
    from trl.trainer import grpo_trainer

    class Makes:
        """As a trainer of TRL does it in its constructor."""

        def __init__(self, model: Any, accelerator: Any) -> None:
            self.vllm_generation = vllm_generation.VLLMGeneration(model, accelerator, None)

        def add_callback(self, callback: Any) -> None:
            self.callback = callback

    class Colocates(PullMixin, Makes):
        pass

    original = vllm_generation.VLLMGeneration
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    )
    with pytest.raises(fanin.RequestError, match="vllm_mode='server'"):
        Colocates(Model(), accelerator)
    # TRL's own names are put back, whatever happened.
    assert vllm_generation.VLLMGeneration is original is grpo_trainer.VLLMGeneration
