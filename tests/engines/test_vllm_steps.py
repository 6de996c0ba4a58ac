# SPDX-License-Identifier: Apache-2.0
"""Eight steps of live FSDP2 trainers into a real vLLM of one worker, some into one of two (TP2).

Each step goes straight into the slots, and by a directory under another name; what both answer is
what PEFT answers with what the trainers gathered. The tests of an engine run in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_trainer import LiveTrainer
from vllm_server import Oracle, Refused, VllmServer, save_model

PROMPTS = ([5, 9, 13, 17, 21], [200, 3, 77, 4, 151, 9, 40])
COUNT = 16
STEPS = {1: 8, 2: 4}  # by workers
KEEP = 6  # three by slots, three by directories
PATIENCE = 60.0


@dataclasses.dataclass
class Place:
    """One engine of *size* workers, its trainers, and PEFT to say what is right."""

    size: int
    oracle: Oracle
    trainer: LiveTrainer
    engine: VllmServer

    def load(self, name: str, landing: str = "auto") -> Any:
        body = {"lora_name": name, "landing": landing}
        return self.engine.ask("POST", "/load_lora_adapter_nixl", body, PATIENCE)

    def answers(self, name: str) -> list[list[int]]:
        return [self.engine.tokens(name, prompt, COUNT) for prompt in PROMPTS]

    def expected(self, step: int) -> list[list[int]]:
        directory = self.trainer.record(step)
        return [self.oracle.tokens(directory, prompt, COUNT) for prompt in PROMPTS]

    def slots(self) -> dict[str, Any]:
        return dict(self.engine.ask("GET", "/nixl/status")["slots"])

    def newest(self) -> int:
        """vLLM's number of the adapter that it has added last."""
        return max(number for there in self.call_workers("adapters") for number in there)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """A method of all workers; what is no list is answered as text."""
        body = {"method": method, "args": list(args)}
        return list(self.engine.ask("POST", "/collective_rpc", body)["results"])


@pytest.fixture(scope="module", params=[1, 2], ids=["TP1", "TP2"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    scratch = tmp_path_factory.mktemp(f"tp{request.param}")
    model = save_model(scratch / "model")
    environment = {
        "FANIN_TRAINER": str(scratch / "trainer" / "nixl_info.json"),
        "FANIN_KEEP_ADAPTERS": str(KEEP),
        "NIXL_LORA_CACHE_DIR": str(scratch / "cache"),
        "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
        # Two workers of one machine without as many memory nodes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    arguments = ["--max-loras", "2", "--max-cpu-loras", "2"]
    arguments += ["--tensor-parallel-size", str(request.param)]
    arguments += ["--worker-extension-cls", "hurting_slots.HurtingSlots"]
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            VllmServer(model, scratch, *arguments, environment=environment)
        )
        trainer = stack.enter_context(LiveTrainer(model, scratch / "trainer")).wait_ready()
        engine.wait_ready()
        yield Place(request.param, Oracle(model), trainer, engine)


def test_the_workers_learn_from_the_first_step(place: Place) -> None:
    step = place.trainer.step()["step"]
    answer = place.load(f"slot-run0-step{step}")
    assert answer["landing"] == "directory" and "first" in answer["landing_why"]
    assert place.answers(f"slot-run0-step{step}") == place.expected(step)
    deadline = time.monotonic() + PATIENCE
    while place.slots()["layouts"] == 0:
        assert not place.slots()["refused"] and not place.slots()["why_not"]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_step_answers_as_by_a_directory_and_as_peft(place: Place) -> None:
    seen = set()
    for _ in range(STEPS[place.size]):
        step = place.trainer.step()["step"]
        landed = place.load(f"slot-run0-step{step}")
        assert (landed["landing"], landed["landing_why"]) == ("slot", "")
        number = place.newest()
        assert all(number in there for there in place.call_workers("adapters")), "added"
        by_directory = place.load(f"file-run0-step{step}", "directory")
        assert by_directory["landing"] == "directory"
        expected = place.expected(step)
        assert place.answers(f"slot-run0-step{step}") == expected, step
        assert place.answers(f"file-run0-step{step}") == expected, step
        seen.add(str(expected))
    assert len(seen) > STEPS[place.size] / 2, "steps that cannot be told apart"
    # vLLM has two slots and two adapters in host memory: the third comes back from the image.
    here = [one for one in place.engine.names() if one.startswith("slot-")]
    for name in (*here, *here):
        assert place.answers(name) == place.expected(int(name.rpartition("step")[2])), name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["take", "put"])
def test_a_worker_that_fails_leaves_no_adapter_anywhere(place: Place, what: str, rank: int) -> None:
    """While it pulls: all go by a directory then. As its slot is filled: the caller is told."""
    if rank >= place.size:
        pytest.skip("one worker")
    before = place.call_workers("adapters")
    step = place.trainer.step()["step"]
    name = f"hurt-run0-step{step}"
    assert sorted(place.call_workers("hurt", rank, what)) == sorted(
        str(rank == other) for other in range(place.size)
    )
    if what == "put":
        with pytest.raises(Refused, match="no memory in put"):
            place.load(name)
        for was, now in zip(before, place.call_workers("adapters"), strict=True):
            assert set(now) <= set(was), "one may have left for what failed"
        assert place.load(name)["landing"] == "slot"
    else:
        answer = place.load(name)
        assert answer["landing"] == "directory" and "no memory in take" in answer["landing_why"]
    assert place.answers(name) == place.expected(step)
    for was, now in zip(before, place.call_workers("adapters"), strict=True):
        assert len(set(now) - set(was)) == 1, "one, and nothing of what failed"
    step = place.trainer.step()["step"]
    assert place.load(f"after-run0-step{step}")["landing"] == "slot"
    assert place.answers(f"after-run0-step{step}") == place.expected(step)


def test_a_worker_that_fails_under_vllms_own_number(place: Place) -> None:
    """As where two ask for an adapter at once: it is added once more, and that fails in one."""
    step = place.trainer.step()["step"]
    name = f"twice-run0-step{step}"
    path = place.load(name)["path"]
    place.call_workers("hurt", place.size - 1, "load")
    body = {"lora_name": "alias", "lora_path": path}
    with pytest.raises(Refused, match="no memory in load_adapter"):
        place.engine.ask("POST", "/v1/load_lora_adapter", body)
    place.engine.ask("POST", "/v1/load_lora_adapter", body)
    assert place.answers("alias") == place.answers(name) == place.expected(step)
    place.engine.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "alias"})
