# SPDX-License-Identifier: Apache-2.0
"""A real vLLM whose weights are pulled, step after step, from real trainers.

The judge is another vLLM that loads what torch's own gather has saved: equal tokens, and log
probabilities equal to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from full_models import save_adapter, save_full_model
from full_trainer import FullTrainer
from merged import LINEAR
from weights_engine import COUNT, Engine, Judge

STEPS = 8


def in_place(
    engine: Engine, trainer: FullTrainer, judge: Judge, steps: int, every: int = 0
) -> None:
    """Each step of the trainer is what the engine generates with, and no step is like another.
    every: so many steps, digests of what is trained and of what is served are compared."""
    seen = []
    for _ in range(steps):
        step = int(trainer.step(record=True)["step"])
        engine.pull(step)
        assert engine.version() == f"step-{step}"
        output = engine.output()
        assert output == judge.output_of(trainer.record(step)), f"step {step} is another model"
        assert engine.versions() == [[[f"step-{step}", 0, COUNT]]] * len(output)
        assert output not in seen
        seen.append(output)
        if every and step % every == 0:
            report = engine.served(trainer.addresses)
            assert "error" not in report and report["step"] == step, report


CASES = [
    # kind, tied, layout, ranks, dtype, steps
    ("qwen2", False, "fsdp", 2, "bfloat16", STEPS),
    ("qwen3", True, "hsdp", 4, "bfloat16", 4),
    ("qwen2", False, "fsdp", 2, "float32", 2),  # converted on the way
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Judge(tmp_path_factory.mktemp("judge")) as one:
        yield one.wait_ready()


@pytest.mark.parametrize(("kind", "tied", "layout", "ranks", "dtype", "steps"), CASES)
def test_steps_in_place(
    judge: Judge,
    kind: str,
    tied: bool,
    layout: str,
    ranks: int,
    dtype: str,
    steps: int,
    tmp_path: Path,
) -> None:
    model = save_full_model(tmp_path / "model", kind, tied)
    options = {"world_size": ranks, "layout": layout, "dtype": dtype}
    with (
        FullTrainer(model, tmp_path / "run", digests=True, **options) as trainer,
        Engine(model, tmp_path / "engine") as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        assert not engine.init(str(trainer.info))
        in_place(engine, trainer, judge, steps, every=max(steps // 4, 1))
        log = engine.log()
        assert "modules direct" in log
        assert "WARNING" not in "".join(line for line in log.splitlines() if "fanin" in line)


def test_an_adapter_that_is_merged_on_the_way(judge: Judge, tmp_path: Path) -> None:
    """What the judge loads is what PEFT's merge_and_unload() saved of the gathered model."""
    model = save_full_model(tmp_path / "model", "qwen3")
    options = {"adapter": {"r": 6, "lora_alpha": 12, "target_modules": LINEAR}}
    with (
        FullTrainer(
            model, tmp_path / "run", digests=True, world_size=2, server={"merge": True}, **options
        ) as trainer,
        Engine(model, tmp_path / "engine") as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        assert not engine.init(str(trainer.info))
        in_place(engine, trainer, judge, 4, every=2)


def test_a_loader_that_computes(judge: Judge, tmp_path: Path) -> None:
    """Only the module in question goes through it, which the log names with the tensor."""
    model = save_full_model(tmp_path / "model", "qwen3", tied=True)
    module, name = "model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.gate_proj.weight"
    with (
        FullTrainer(model, tmp_path / "run", world_size=2) as trainer,
        Engine(model, tmp_path / "engine", worker_extension_cls="hurting.Hurting") as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        engine.good("collective_rpc", "compute_in_loader", None, [name])
        assert not engine.init(str(trainer.info), save=str(tmp_path / "mappings"))
        said = [line for line in engine.log().splitlines() if "load_weights" in line]
        assert len(said) == 1 and "WARNING" in said[0]
        assert f": {module};" in said[0] and name in said[0]
        assert "1 modules by loader" in engine.log()
        in_place(engine, trainer, judge, 3)
        assert engine.check(trainer.published)["unseen"] == [f"worker 0: {module}"]
        engine.good("start_weight_update")
        ahead = {"step": trainer.published, "prefetch": True}
        assert "leave prefetch out" in engine.call("update_weights", {"update_info": ahead})
        in_place(engine, trainer, judge, 1)
        assert (tmp_path / "mappings" / "rank0.json").exists()


def test_two_workers_of_one_engine(judge: Judge, tmp_path: Path) -> None:
    """Tensor parallelism: each worker takes its own part, and one that fails fails both."""
    model = save_full_model(tmp_path / "model", "qwen3", tied=True)
    with (
        FullTrainer(model, tmp_path / "run", world_size=2, record=True) as trainer,
        Engine(
            model,
            tmp_path / "engine",
            alone=False,
            tensor_parallel_size=2,
            worker_extension_cls="hurting.Hurting",
        ) as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        assert not engine.init(str(trainer.info))
        seen = []
        for _ in range(2):
            engine.pull(int(trainer.step()["step"]))
            report = engine.check(trainer.published)
            assert report["workers"] == 2 and report["unseen"] == []
            # Sums of two halves are rounded otherwise than one sum: tokens are compared, as far as
            # a vLLM of two workers would have them from the file.
            seen.append(engine.output())
        assert seen[0] != seen[1]
        before = seen[1]
        engine.good("start_weight_update")
        failure = engine.update(0)
        assert "worker 0 of 2: step 0" in failure and "has passed" in failure
        assert "worker 1 of 2: step 0" in failure
        assert engine.output() == before
        step = int(trainer.step()["step"])
        engine.good("collective_rpc", "hurt", None, [3, 1])
        engine.good("start_weight_update")
        assert "worker 1 of 2: " in engine.update(step)
        assert f"worker 1 of 2: the pull of step {step} failed" in engine.refusal()
        engine.pull(step)
        assert engine.check(step, poison=False)["workers"] == 2
        assert engine.output() != before
        # One that is gone in the middle: the call ends, and says so.
        engine.good("collective_rpc", "hurt", None, [3, 1, "die"])
        engine.good("start_weight_update")
        said = engine.update(int(trainer.step()["step"]))
        assert "Worker" in said and "exit status -9" in said and "start the engine" in said, said
        assert engine.refusal()


def test_two_stages_of_one_engine(tmp_path: Path) -> None:
    """Pipeline parallelism: each worker takes the layers that it has. vLLM's build for CPUs holds
    such a model and cannot generate with it (its runner has no intermediate tensors), so bytes are
    compared."""
    model = save_full_model(tmp_path / "model", "qwen3")
    with (
        FullTrainer(model, tmp_path / "run", world_size=2) as trainer,
        Engine(model, tmp_path / "engine", alone=False, pipeline_parallel_size=2) as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        assert not engine.init(str(trainer.info))
        for _ in range(2):
            step = int(trainer.step()["step"])
            engine.pull(step)
            report = engine.check(step, poison=False)
            assert report["workers"] == 2 and report["unseen"] == []
        assert report == engine.check(step)
        assert "of 13 tensors" in engine.log() and "of 12 tensors" in engine.log()
        said = engine.call("start_weight_update") or engine.update(0)
        assert "worker 0 of 2: step 0" in said and "worker 1 of 2: step 0" in said


def test_an_engine_with_adapters(judge: Judge, tmp_path: Path) -> None:
    """The base weights are replaced beneath the adapters, which are there afterwards as before."""
    model = save_full_model(tmp_path / "model", "qwen2")
    adapter = save_adapter(model, tmp_path / "adapter")
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with (
        FullTrainer(model, tmp_path / "run", world_size=2, record=True) as trainer,
        Engine(model, tmp_path / "engine", **lora) as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        assert not engine.init(str(trainer.info))
        seen = [engine.output(adapter)]
        for _ in range(2):
            step = int(trainer.step()["step"])
            engine.pull(step)
            seen.append(engine.output(adapter))
            assert seen[-1] == judge.output_of(trainer.record(step), adapter, **lora)
            plain = engine.output()
            assert plain == judge.output_of(trainer.record(step), None, **lora)
            assert seen[-1] != seen[-2] and seen[-1] != plain
        assert engine.check(step)["unseen"] == []
        assert engine.output(adapter) == seen[-1]


# ------------------------------------------------------------------------------ what goes wrong


class Place:
    """One engine and its trainer; tests run in order, each on what the earlier ones left."""

    def __init__(self, scratch: Path, judge: Judge) -> None:
        self.scratch, self.judge = scratch, judge
        self.model = save_full_model(scratch / "model", "qwen2")
        self.trainer = self.launch("run", 0)
        self.engine = Engine(self.model, scratch / "engine", worker_extension_cls="hurting.Hurting")
        self.engine.wait_ready()

    def launch(self, where: str, step: int, **options: Any) -> FullTrainer:
        trainer = FullTrainer(
            self.model, self.scratch / where, world_size=2, step=step, record=True, **options
        )
        return trainer.wait_ready()

    def close(self) -> None:
        self.engine.__exit__()
        self.trainer.close()

    def init(self, **more: Any) -> None:
        failure = self.engine.init(str(self.trainer.info), **more)
        assert not failure, failure

    def serves(self, step: int) -> None:
        """The engine generates with just this step."""
        assert self.engine.output() == self.judge.output_of(self.trainer.record(step))

    def goes_on(self) -> None:
        """The next step comes into the engine as if nothing had been."""
        step = int(self.trainer.step()["step"])
        self.engine.pull(step)
        self.serves(step)


@pytest.fixture(scope="module")
def place(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = Place(tmp_path_factory.mktemp("weights"), judge)
    yield one
    one.close()


def test_a_good_update(place: Place) -> None:
    place.init()
    place.goes_on()


def test_what_the_engine_holds_is_compared(place: Place) -> None:
    place.goes_on()
    engine, step = place.engine, place.trainer.published
    report = engine.check(step)
    assert report["modules"] == 15 and report["unseen"] == []
    place.serves(step)  # after rubbish and a pull
    engine.scribble("model.layers.1.input_layernorm.weight")
    said = engine.check(step, poison=False)["error"]
    assert "model.layers.1.input_layernorm.weight" in said and f"step {step}" in said
    assert "modules" in engine.check(step)
    place.serves(step)


def test_read_ahead_and_installed_later(place: Place) -> None:
    engine = place.engine
    step = int(place.trainer.step()["step"])
    before = engine.output()
    engine.good("start_weight_update")
    engine.good("update_weights", {"update_info": {"step": step, "prefetch": True}})
    assert engine.output() == before  # it generates meanwhile, with the old weights
    assert "nothing was pulled" in engine.call("finish_weight_update", f"step-{step}")
    engine.good("update_weights", {"update_info": {"step": step}})
    engine.good("finish_weight_update", f"step-{step}")
    assert "read ahead into cpu" in engine.log()
    place.serves(step)


def test_what_was_read_ahead_is_another_step(place: Place) -> None:
    engine = place.engine
    engine.good("start_weight_update")
    engine.good("update_weights", {"update_info": {"step": 10**6, "prefetch": True}})
    step = int(place.trainer.step()["step"])
    assert not engine.update(step)
    engine.good("finish_weight_update", f"step-{step}")
    place.serves(step)


def test_memory_is_short_in_the_middle(place: Place) -> None:
    engine = place.engine
    step = int(place.trainer.step()["step"])
    engine.hurt(5)
    engine.good("start_weight_update")
    assert "no memory for a packed copy" in engine.update(step)
    engine.good("start_weight_update")
    refused = engine.call("finish_weight_update", f"step-{step}")
    assert "not whole" in refused and f"step {step}" in refused and "no memory" in refused
    assert engine.version() != f"step-{step}"
    for _ in range(2):  # it lives, and does not answer with two steps at once
        said = engine.refusal()
        assert "worker 0 of 1" in said and f"step {step} failed" in said and "no memory" in said
        assert "start an update" in said
    assert not engine.update(step)
    engine.good("finish_weight_update", f"step-{step}")
    place.serves(step)


def goes_back(place: Place, said: str, *why: str) -> None:
    """After an update that has failed in the middle, which said *said*: nothing is answered until
    a whole pull has succeeded, and everything then."""
    engine, step = place.engine, place.trainer.published
    assert any(part in said for part in why), said
    refused = engine.refusal()
    assert "worker 0 of 1" in refused and "failed" in refused, refused
    assert "start an update" in refused
    engine.good("start_weight_update")
    assert "not whole" in engine.call("finish_weight_update", f"step-{step}")
    step = int(place.trainer.step()["step"])
    assert not engine.update(step)
    engine.good("finish_weight_update", f"step-{step}")
    place.serves(step)


def test_a_trainer_that_goes_on_in_the_middle(place: Place) -> None:
    """It waits for the reader as long as a lease is, and not longer."""
    step = int(place.trainer.step()["step"])
    place.engine.good("start_weight_update")
    said = place.engine.update_while(step, 3, place.trainer.step)
    goes_back(place, said, "SupersededError")


def test_a_trainer_that_is_stopped_in_the_middle(place: Place) -> None:
    """What is read one-sided needs nothing more of its ranks: the kernel says that their words
    still hold, so the step is whole. By stream it fails in its time."""
    engine = place.engine
    place.init(timeout=6)
    step = int(place.trainer.step()["step"])
    engine.good("start_weight_update")
    said = engine.update_while(step, 3, place.trainer.stop)
    if said:
        place.trainer.cont()
        place.init()
        goes_back(place, said, "rank")
        return
    assert f"step {step}: " in engine.log() and " by cma " in engine.log()
    engine.good("finish_weight_update", f"step-{step}")
    place.trainer.cont()
    place.serves(step)
    place.init()


def test_a_trainer_that_is_killed_in_the_middle(place: Place) -> None:
    engine, old = place.engine, place.trainer
    step = int(old.step()["step"])
    engine.good("start_weight_update")
    failure = engine.update_while(step, 3, old.kill)
    assert "rank" in failure and "127.0.0.1" in failure
    old.close()
    place.trainer = place.launch("run", step + 5, seed=5)
    goes_back(place, failure, "rank")


def test_a_trainer_that_is_killed_between_update_and_finish(place: Place) -> None:
    """The step is whole: nothing that comes after it matters."""
    engine, old = place.engine, place.trainer
    step = int(old.step()["step"])
    engine.good("start_weight_update")
    assert not engine.update(step)
    old.kill()
    engine.good("finish_weight_update", f"step-{step}")
    place.serves(step)
    old.close()
    place.trainer = place.launch("run", step + 5, seed=6)
    place.goes_on()


def test_a_trainer_that_does_not_answer_at_init(place: Place) -> None:
    trainer = place.trainer
    for make, mend in ((trainer.stop, trainer.cont), (trainer.pause, trainer.resume)):
        make()
        said = place.engine.init(str(trainer.info), timeout=4)
        mend()
        assert "worker 0 of 1" in said and "rank" in said, said
        assert "before init" in place.engine.call("start_weight_update")
        place.serves(trainer.published)
    place.init()
    place.goes_on()


# ------------------------------------------------------------------------ what does not fit
