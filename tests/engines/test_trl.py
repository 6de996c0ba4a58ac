# SPDX-License-Identifier: Apache-2.0
"""fanin.trl: TRL's own trainers, whose real vLLM pulls what they train.

TRL says itself whether vLLM had the trainer's weights: the log probabilities that vLLM gave its
completions are compared with the trainer's for the same tokens, at every step.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fanin
import fanin.check
import pytest
from fanin.info import addresses_of
from merged import pulled, same
from models import WEIGHTS, same_tensors
from quantized import CHANNEL, whole_in_fp8
from safetensors.torch import load_file
from vllm_server import VllmServer, free_ports, save_model
from worlds import Child, World, child

pytest.importorskip("trl")

STEPS = 4
RATE = 0.05  # an AdamW step of which changes what the model says
EQUAL = 1e-4  # of a log probability; float32 on both sides gives some 1e-6
OTHER = 1e-2  # what a step of that size changes at least
DIFFERENCE = "sampling/sampling_logp_difference/max"
PATIENCE = 240.0


class Place:
    """The model, and maybe a vLLM that serves it."""

    def __init__(self, scratch: pathlib.Path, *arguments: str, lora: bool = True) -> None:
        self.scratch = scratch
        self.lora = lora
        self.model = save_model(scratch / "model")
        self._arguments = arguments
        self.engine: VllmServer | None = None

    def serve(self, stack: contextlib.ExitStack) -> Place:
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # TRL asks /server_info
            "FANIN_ALLOW_TRAINERS": "127.0.0.1",
            "NIXL_LORA_CACHE_DIR": str(self.scratch / "cache"),
        }
        engine = VllmServer(
            self.model,
            self.scratch,
            *("--logprobs-mode", "processed_logprobs"),
            *self._arguments,
            environment=environment,
            adapters=self.lora,
        )
        self.engine = stack.enter_context(engine).wait_ready()
        return self

    def options(self, name: str, **more: Any) -> dict[str, Any]:
        scratch = self.scratch / name
        scratch.mkdir()
        fixed = {"model": str(self.model), "scratch": str(scratch), "lora": self.lora}
        if self.engine is not None:
            fixed["engine"] = self.engine.url
        return fixed | {"trainer": "grpo", "steps": STEPS, "rate": RATE} | more

    def trial(self, name: str, **more: Any) -> contextlib.AbstractContextManager[Child]:
        return child(name, "trl_trainer.py", self.options(name, **more), self.scratch)


@pytest.fixture(scope="class")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With a vLLM for adapters. One vLLM runs at a time: it ends with its class of tests."""
    with contextlib.ExitStack() as stack:
        scratch = tmp_path_factory.mktemp("lora")
        yield Place(scratch, "--max-loras", "2", "--max-cpu-loras", "4").serve(stack)


@pytest.fixture(scope="class")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With a vLLM for whole models."""
    with contextlib.ExitStack() as stack:
        scratch = tmp_path_factory.mktemp("full")
        backend = ("--weight-transfer-config", '{"backend": "fanin"}')
        yield Place(scratch, *backend, lora=False).serve(stack)


def differences(trained: dict[str, Any]) -> list[float]:
    """Of each step, how far vLLM's log probabilities were from the trainer's."""
    return [line[DIFFERENCE] for line in trained["logs"] if DIFFERENCE in line]


def steps_until(one: Child, last: int) -> None:
    for step in range(1, last + 1):
        told = one.expect("step", PATIENCE)
        assert (told["step"], told["published"]) == (step, step)


# ------------------------------------------------------------------------------ adapters


class TestAdapters:
    def test_grpo_generates_with_each_step_of_the_adapter(self, place: Place) -> None:
        with place.trial("each") as one:
            one.expect("ready", PATIENCE)
            steps_until(one, STEPS)
            trained = one.expect("trained")
            assert len(differences(trained)) == STEPS
            assert max(differences(trained)) < EQUAL
            names = [name for name in place.engine.names() if name != place.engine.base]
            # The last completions were made before the last step.
            assert f"policy-run0-step{STEPS - 1}" in names
            assert f"policy-run0-step{STEPS}" not in names
            one.tell("exit")
            assert one.wait() == 0

    def test_grpo_on_two_ranks(self, place: Place) -> None:
        options = place.options("two", steps=2, port=free_ports())
        with World(2, options, place.scratch / "two", "trl_trainer.py") as world:
            world.expect("ready", PATIENCE)
            for _ in range(2):
                world.expect("step", PATIENCE)
            trained = world.expect("trained")[0]
            assert len(trained["addresses"]) == 2
            assert len(differences(trained)) == 2
            assert max(differences(trained)) < EQUAL
            world.tell("exit")
            assert world.wait() == [0, 0]

    def test_weights_that_were_not_synced_are_not_generated_with(self, place: Place) -> None:
        with place.trial("stale", driven=True) as one:
            one.expect("ready", PATIENCE)
            one.expect("step", PATIENCE)
            one.tell("forget")
            one.expect("done")
            one.tell("go")
            failed = one.expect("failed", PATIENCE)
            assert failed["kind"] == "StateError"
            assert (
                "the trainer is at step 1, and the engine has the weights of step 0"
                in (failed["message"])
            )

    def test_a_lag_that_is_asked_for_is_allowed_and_shows(self, place: Place) -> None:
        with place.trial("lag", driven=True, steps=2, mixin={"max_lag": 1}) as one:
            one.expect("ready", PATIENCE)
            one.expect("step", PATIENCE)
            one.tell("forget")
            one.expect("done")
            one.tell("go")
            one.expect("step", PATIENCE)
            one.tell("go")
            first, second = differences(one.expect("trained", PATIENCE))
            assert first < EQUAL
            assert second > OTHER  # so the other tests would see it

    def test_an_adapter_that_the_engine_refuses_ends_the_training(self, place: Place) -> None:
        with place.trial("refused", rank=4 * 8) as one:
            one.expect("ready", PATIENCE)
            failed = one.expect("failed", PATIENCE)
            assert failed["kind"] == "PoolError"
            assert "--max-lora-rank" in failed["message"]

    def test_an_engine_that_dies_ends_the_training_on_every_rank(self, place: Place) -> None:
        # The last of the class: the engine is gone afterwards.
        mixin = {"max_lag": 1}
        options = place.options("dies", driven=True, mixin=mixin, port=free_ports())
        with World(2, options, place.scratch / "dies", "trl_trainer.py") as world:
            world.expect("ready", PATIENCE)
            world.expect("step", PATIENCE)
            world.do("forget")  # no sync before the next completions
            assert place.engine is not None
            place.engine.stop()
            world.tell("go")
            main, other = world.expect("failed", PATIENCE)
            assert main["kind"] == "ConnectionError"
            assert other["kind"] == "UnreachableError"
            assert place.engine.url.removeprefix("http://").partition(":")[0] in other["message"]


# --------------------------------------------------------------------------- whole models


class TestWholeModels:
    def test_grpo_generates_with_each_step(self, whole: Place) -> None:
        with whole.trial("each") as one:
            one.expect("ready", PATIENCE)
            steps_until(one, STEPS)
            trained = one.expect("trained")
            assert len(differences(trained)) == STEPS
            assert max(differences(trained)) < EQUAL
            assert whole.engine is not None
            version = whole.engine.ask("GET", "/weight_info")["weight_version"]
            assert version == f"step-{STEPS - 1}"
            one.tell("exit")
            assert one.wait() == 0


def test_grpo_generates_with_a_merged_adapter_in_fp8(tmp_path: pathlib.Path) -> None:
    """Each step is the rule applied to what PEFT merges of the live model; vLLM runs it, which
    began with random values."""
    info = tmp_path / "fp8" / "info"
    told = json.dumps({"quantization_config": CHANNEL})
    engine = ("--hf-overrides", told, "--load-format", "dummy")
    backend = ("--weight-transfer-config", '{"backend": "fanin"}')
    publish = {"weights": "full", "merge": True, "quantize": CHANNEL}
    options = {"lora": True, "driven": True, "info": str(info), "publish": publish}
    with contextlib.ExitStack() as stack:
        place = Place(tmp_path, *engine, *backend, lora=False).serve(stack)
        one = stack.enter_context(place.trial("fp8", **options))
        one.expect("ready", PATIENCE)
        for step in range(1, STEPS + 1):
            assert one.expect("step", PATIENCE)["published"] == step
            saved = tmp_path / f"saved-{step}"
            one.tell("save", directory=str(saved))
            one.expect("done")
            merged = load_file(saved / "model.safetensors")
            trainer = SimpleNamespace(addresses=addresses_of(info))
            same(pulled(trainer), whole_in_fp8(merged, "_scale", block=None))
            one.tell("go")
        one.expect("trained", PATIENCE)
        assert place.engine is not None
        # The last completions were made before the last step. The judge compares with the last.
        version = place.engine.ask("GET", "/weight_info")["weight_version"]
        assert version == f"step-{STEPS - 1}"
        for path, body in (
            ("/pause?mode=keep", None),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"step": STEPS}}),
            ("/finish_weight_update", {"weight_version": f"step-{STEPS}"}),
            ("/resume", None),
        ):
            place.engine.ask("POST", path, body, 120)
        report = fanin.check.weights(place.engine.url, STEPS)
        assert report.modules and not report.unseen
        one.tell("exit")
        assert one.wait() == 0


# ---------------------------------------------------------------- trainers that only train


@pytest.mark.parametrize("snapshot", [False, True])
def test_sft_publishes_each_step(tmp_path: pathlib.Path, snapshot: bool) -> None:
    place, name = Place(tmp_path), "sft"
    info = place.scratch / name / "info"
    with place.trial(
        name, trainer="sft", steps=2, driven=True, info=str(info), publish={"snapshot": snapshot}
    ) as one:
        one.expect("ready", PATIENCE)
        for step in (1, 2):
            assert one.expect("step", PATIENCE)["published"] == step
            saved = place.scratch / name / f"saved-{step}"
            one.tell("save", directory=str(saved))
            one.expect("done")
            pulled = place.scratch / name / f"pulled-{step}"
            with fanin.Client(addresses_of(info)) as client:
                assert client.pull_adapter("0", pulled, step=step).step == step
            same_tensors(load_file(pulled / WEIGHTS), load_file(saved / WEIGHTS))
            one.tell("go")
        one.expect("trained", PATIENCE)
        one.tell("exit")
        assert one.wait() == 0
