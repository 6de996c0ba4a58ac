# SPDX-License-Identifier: Apache-2.0
"""A real vLLM over HTTP that pulls whole models, as an orchestrator uses it.

One server for the file. The tests run in order, each on what the earlier ones left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fanin
import fanin.check
import pytest
import torch
from full_models import random_model, save_full_model
from full_trainer import FullTrainer
from vllm_server import Refused, TokenStream, VllmServer
from weights_engine import COUNT, PROMPTS, Judge

BACKEND = (
    *("--weight-transfer-config", '{"backend": "fanin"}', "--dtype", "bfloat16"),
    *("--worker-extension-cls", "hurting.Hurting"),
)


class Place:
    def __init__(self, scratch: Path, judge: Judge, *arguments: str) -> None:
        self.scratch, self.judge = scratch, judge
        self.model = save_full_model(scratch / "model", "qwen3", tied=True)
        self.trainer = FullTrainer(self.model, scratch / "run", world_size=2, record=True)
        self.engine = VllmServer(
            self.model,
            scratch,
            *(*BACKEND, *arguments),
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "FANIN_REQUIRE_STEP": "1",
                "FANIN_ALLOW_TRAINERS": f"127.0.0.1,{scratch / 'run'}",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas are more than NUMA nodes
            },
            adapters=False,
        )
        try:
            self.trainer.wait_ready()
            self.engine.wait_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.engine.stop()
        self.trainer.close()

    def post(self, path: str, **body: Any) -> Any:
        return self.engine.ask("POST", path, body or None, 120)

    def init(self) -> None:
        info = {"trainer": str(self.trainer.info), "timeout": 60}
        self.post("/init_weight_transfer_engine", init_info=info)

    def pull(self, step: int) -> None:
        self.post("/pause?mode=keep")
        self.post("/start_weight_update")
        self.post("/update_weights", update_info={"step": step})
        self.post("/finish_weight_update", weight_version=f"step-{step}")
        self.post("/resume")

    def fail(self, step: int, rank: int = 0) -> None:
        """An update in which this rank's worker is out of memory when the half is written."""
        self.post("/collective_rpc", method="hurt", kwargs={"at": 5, "rank": rank})
        self.post("/start_weight_update")
        with pytest.raises(Refused) as caught:
            self.post("/update_weights", update_info={"step": step})
        assert caught.value.status == 500

    def refuses_to_resume(self, said: str) -> None:
        with pytest.raises(Refused) as caught:
            self.post("/resume")
        assert caught.value.status == 500
        assert said in str(caught.value.body) and "start an update" in str(caught.value.body)

    def version(self) -> str:
        return str(self.engine.ask("GET", "/weight_info")["weight_version"])

    def answers(self) -> Any:
        return [self.engine.tokens("base", list(prompt), COUNT) for prompt in PROMPTS]

    def serves(self, model: Path) -> None:
        assert self.answers() == [tokens for tokens, _ in self.judge.output_of(model)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Judge(tmp_path_factory.mktemp("judge")) as one:
        yield one.wait_ready()


@pytest.fixture(scope="module")
def place(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = Place(tmp_path_factory.mktemp("http"), judge)
    yield one
    one.close()


@pytest.mark.parametrize("end", ["", "%0A"])  # vLLM's router takes both for the route
def test_it_takes_no_trainer_that_is_not_listed(place: Place, end: str) -> None:
    own = str(place.trainer.info)
    for info in ({"trainer": ["198.51.100.9:6000"]}, {"trainer": own, "save": str(place.scratch)}):
        with pytest.raises(Refused, match="FANIN_ALLOW_TRAINERS") as caught:
            place.post(f"/init_weight_transfer_engine{end}", init_info=info)
        assert caught.value.status == 403


def test_no_answer_before_the_first_step(place: Place) -> None:
    assert place.version() == "checkpoint"
    with pytest.raises(Refused, match="no step was pulled since the engine started") as caught:
        place.answers()
    assert caught.value.status == 503
    with pytest.raises(Refused, match="FANIN_REQUIRE_STEP"):
        place.post("/resume")
    place.engine.ask("GET", "/health")  # nobody restarts it for that


def test_steps_in_place(place: Place) -> None:
    place.init()
    seen = []
    for _ in range(3):
        step = int(place.trainer.step()["step"])
        place.pull(step)
        assert place.version() == f"step-{step}"
        place.serves(place.trainer.record(step))
        seen.append(place.answers())
    assert len({str(one) for one in seen}) == 3


def test_a_request_lives_through_an_update(place: Place) -> None:
    """It is neither aborted nor begun again: its first tokens are of one step, its last of
    another."""
    count = 120
    step = int(place.trainer.step()["step"])
    with TokenStream(place.engine, "base", list(PROMPTS[0]), count) as stream:
        stream.wait_for(5)
        assert stream.running
        place.pull(step)
        stream.wait_for(count, within=180)
    place.serves(place.trainer.record(step))


def test_a_failure_says_why_and_the_server_lives(place: Place) -> None:
    before, version = place.answers(), place.version()
    place.post("/start_weight_update")
    with pytest.raises(Refused) as caught:
        place.post("/update_weights", update_info={"step": 0})
    assert caught.value.status == 500
    # Of a step that has passed nothing was written, and no end makes a version of it.
    with pytest.raises(Refused):
        place.post("/finish_weight_update", weight_version="step-0")
    assert place.answers() == before
    assert place.version() == version
    assert "SupersededError" in place.engine.log_text()


def test_a_dirty_engine_answers_nothing(place: Place) -> None:
    """Neither requests under way nor new ones get a token of two steps."""
    step = int(place.trainer.step()["step"])
    said = f"worker 0 of 1: the pull of step {step} failed"
    with TokenStream(place.engine, "base", list(PROMPTS[0]), 20000) as stream:
        stream.wait_for(5)
        place.fail(step)
        stream.wait_end()
        assert said in stream.error and len(stream.tokens) < 20000
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            place.answers()
        assert caught.value.status == 503
        assert said in caught.value.message and "start an update" in caught.value.message
    place.refuses_to_resume(said)
    with pytest.raises(Refused):
        place.post("/finish_weight_update", weight_version=f"step-{step}")
    place.pull(step)
    place.serves(place.trainer.record(step))


def test_a_trainer_written_to_vllms_own_interface(place: Place, tmp_path: Path) -> None:
    """`trainer_init` once and `send_weights` after each step, and nothing of fanin by name."""
    from fanin.vllm import register
    from fanin.vllm.weights_trainer import TrainerInit
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    register()
    model = random_model("qwen3", tied=True, seed=11)
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(rank=0, run="theirs", step=100),
        client=HTTPVLLMWeightSyncClient(place.engine.url),
        source=ModuleSource(model),
    )
    try:
        for step in (101, 102):
            with torch.no_grad():  # outside of anything, as optimizers write
                for parameter in model.parameters():
                    parameter.mul_(1.25)
            engine.send_weights()
            assert place.version() == f"step-{step}"
            saved = tmp_path / f"step-{step}"
            model.save_pretrained(saved)
            for file in place.model.glob("*token*"):
                (saved / file.name).write_bytes(file.read_bytes())
            place.serves(saved)
    finally:
        engine.shutdown()


def test_an_engine_is_checked_over_http(place: Place) -> None:
    trainer = place.trainer
    place.init()
    step = int(trainer.step()["step"])
    place.pull(step)
    before = place.post("/weight_checker", action="checksum")["checksums"]
    report = fanin.check.weights(place.engine.url, step)
    assert report.workers == 1 and report.modules == 18 and not report.unseen
    # Rubbish and a pull have led to the very bytes of before, as vLLM's own digests see them.
    assert place.post("/weight_checker", action="compare", baseline=before)["match"]
    place.post("/weight_checker", action="reset")
    with pytest.raises(fanin.HostError, match="do not hold step"):
        fanin.check.weights(place.engine.url, step, poison=False)
    place.pull(step)
    place.serves(trainer.record(step))


def test_two_replicas(judge: Judge, tmp_path: Path) -> None:
    """Data parallelism: one call reaches every replica, and all of them answer with the step."""
    place = Place(tmp_path, judge, "--data-parallel-size", "2", "--api-server-count", "1")
    try:
        place.init()
        for _ in range(2):
            step = int(place.trainer.step()["step"])
            place.pull(step)
            assert fanin.check.weights(place.engine.url, step, poison=False).workers == 2
            for _ in range(3):  # whichever replica it is that answers
                place.serves(place.trainer.record(step))
        place.post("/start_weight_update")
        with pytest.raises(Refused):
            place.post("/update_weights", update_info={"step": 0})
        place.serves(place.trainer.record(step))
        one_dirty_replica(place)
    finally:
        place.close()


def one_dirty_replica(place: Place) -> None:
    """None is resumed, and the next update finds both as if nothing had been."""
    step = int(place.trainer.step()["step"])
    place.post("/pause?mode=keep")
    place.fail(step, rank=1)
    place.refuses_to_resume("worker 0 of 1, replica 1: the pull")
    assert place.engine.ask("GET", "/is_paused")["is_paused"]
    place.pull(step)
    for _ in range(3):
        place.serves(place.trainer.record(step))
