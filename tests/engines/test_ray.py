# SPDX-License-Identifier: Apache-2.0
"""Ray's actors as trainer ranks and engines: the example, what happens when one of them dies, and
vLLM's own Ray client of the weight transfer API."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin
import pytest
from vllm_server import greedy, plugin_path, save_model
from worlds import child_environment

ray = pytest.importorskip("ray")

EXAMPLES = Path(__file__).resolve().parents[2] / "python" / "examples"
PATIENCE = 240.0
# Ray's processes write no token into the home directory, and report nothing.
ALONE = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
ALONE |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray of this host for the file: its start takes some twenty seconds."""
    with tempfile.TemporaryDirectory(prefix="ray") as place, pytest.MonkeyPatch.context() as patch:
        for name, value in child_environment(**ALONE).items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(EXAMPLES), os.environ["PYTHONPATH"])))
        ray.init(
            num_cpus=16,  # actors, not cores
            include_dashboard=False,
            object_store_memory=100 << 20,
            _temp_dir=place,
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


def get(*references: Any) -> list[Any]:
    return ray.get(list(references), timeout=PATIENCE)


class Job:
    """The example's trainer and workers."""

    def __init__(self, ranks: int, workers: int, model: str | None) -> None:
        import ray_actors

        self.ranks, self.addresses = ray_actors.start_trainer(ranks, model)
        self.workers = [ray_actors.Worker.remote(self.addresses, model) for _ in range(workers)]

    def step(self, number: int) -> None:
        get(*[rank.step.remote(number) for rank in self.ranks])

    def trained(self) -> str:
        return get(*[rank.digest.remote() for rank in self.ranks])[0]

    def close(self) -> None:
        for actor in [*self.workers, *self.ranks]:
            ray.kill(actor)


@contextlib.contextmanager
def job(ranks: int = 2, workers: int = 2, model: str | None = None) -> Iterator[Job]:
    one = Job(ranks, workers, model)
    try:
        yield one
    finally:
        one.close()


def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / "ray_actors.py"), "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=child_environment(**ALONE),
    )
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
    assert done.stdout.splitlines()[-1] == "weights equal"


@pytest.mark.usefixtures("cluster")
class TestActors:
    def test_a_rank_that_is_killed_is_named_and_a_new_trainer_is_found(self) -> None:
        with job() as one:
            one.step(1)
            get(*[worker.pull.remote(1) for worker in one.workers])
            ray.kill(one.ranks[1])
            with pytest.raises(ray.exceptions.RayActorError):
                get(one.ranks[1].step.remote(2))
            with pytest.raises(fanin.FaninError) as caught:
                get(one.workers[0].pull.remote(2, 5.0))
            # As the worker raised it, through Ray.
            assert caught.value.rank == 1
            assert caught.value.retryable
            ray.kill(one.ranks[0])
            with job(workers=1) as other:
                other.step(1)
                get(other.workers[0].pull.remote(1))
                assert get(other.workers[0].digest.remote()) == [other.trained()]


# ------------------------------------------------- vLLM's own clients of the weight transfer API

PROMPT = [5, 9, 13, 17, 21]
COUNT = 16
BACKEND = {"backend": "fanin"}


class Reference:
    """transformers' greedy generation with the weights that were pulled into its own model."""

    def __init__(self, model: Path, addresses: list[str]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.client = fanin.Client(addresses)

    def tokens(self, step: int) -> list[int]:
        self.client.pull_into("full:0", self.model.state_dict(), step=step)
        return greedy(self.model, PROMPT, COUNT)


def follow(one: Job, reference: Reference, client: Any, tokens: Any, version: Any) -> None:
    """Three steps through one of vLLM's clients; each generates what the reference does."""
    client.init_weight_transfer_engine({"trainer": one.addresses, "run": "0", "timeout": 60.0})
    seen = set()
    for step in (1, 2, 3):
        one.step(step)
        client.start_weight_update()
        client.update_weights({"step": step})
        client.finish_weight_update(f"step-{step}")
        assert version() == f"step-{step}"
        expected = reference.tokens(step)
        assert tokens() == expected
        seen.add(tuple(expected))
    assert len(seen) > 1  # the steps do not say the same


@pytest.mark.usefixtures("cluster")
class TestClients:
    """One vLLM at a time."""

    def test_an_engine_in_an_actor_by_vllms_ray_client(self, tmp_path: Path) -> None:
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient

        model = save_model(tmp_path / "model")
        paths = [*plugin_path(tmp_path), os.environ["PYTHONPATH"]]
        variables = {"VLLM_PLUGINS": "fanin", "PYTHONPATH": os.pathsep.join(paths)}
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with job(workers=0, model=str(model)) as one:
            engine = (
                ray.remote(in_an_actor())
                .options(runtime_env={"env_vars": variables})
                .remote(
                    model=str(model),
                    dtype="float32",
                    enforce_eager=True,
                    max_model_len=4096,
                    weight_transfer_config=BACKEND,
                )
            )
            try:
                reference = Reference(model, one.addresses)
                client = RayVLLMWeightSyncClient(engine)
                follow(
                    one,
                    reference,
                    client,
                    lambda: get(engine.tokens.remote(PROMPT, COUNT))[0],
                    lambda: get(engine.get_weight_version.remote())[0],
                )
                # What the engine refuses comes as the engine said it; it lives on.
                client.start_weight_update()
                with pytest.raises(Exception, match="step 1"):
                    client.update_weights({"step": 1})
                assert get(engine.tokens.remote(PROMPT, COUNT))[0] == reference.tokens(3)
            finally:
                ray.kill(engine)


def in_an_actor() -> Any:
    """vLLM's LLM, with a method of which Ray can carry the arguments and the answer."""
    from vllm import LLM

    class Engine(LLM):
        def tokens(self, prompt: list[int], count: int) -> list[int]:
            from vllm import SamplingParams

            sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            (answer,) = self.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            return list(answer.outputs[0].token_ids)

    return Engine
