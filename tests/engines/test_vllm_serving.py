# SPDX-License-Identifier: Apache-2.0
"""A real vLLM that pulls its adapters from live FSDP2 trainers, over HTTP.

One server for the file: it takes most of a minute to start. The tests run in order, each on what
the earlier ones left: the trainers' step only grows, and what an engine keeps is a short list.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import moe_engine
import pytest
from live_trainer import LiveTrainer
from models import same_tensors
from vllm_server import (
    RANK,
    Oracle,
    Refused,
    TokenStream,
    VllmServer,
    free_ports,
    save_model,
)

PROMPT = [5, 9, 13, 17, 21]
COUNT = 16
KEEP = 3
SLOTS = 2  # of vLLM's own cache: fewer than are kept, so that it goes back to the directories
TIMEOUT = 8.0  # seconds that a pull by name waits for its step
PATIENCE = 60.0


class Place:
    """The model, its trainers, the engine, and PEFT to say what is right.

    What it starts ends with the stack.
    """

    def __init__(self, scratch: Path, stack: contextlib.ExitStack) -> None:
        self.scratch = scratch
        self.model = save_model(scratch / "model")
        self.oracle = Oracle(self.model)
        self.cache = scratch / "cache"
        self._stack = stack
        self.engine = stack.enter_context(
            VllmServer(
                self.model,
                scratch,
                *("--max-loras", str(SLOTS), "--max-cpu-loras", str(SLOTS)),
                *("--worker-extension-cls", "fanin.vllm.worker.WorkerExtension"),
                environment={
                    "FANIN_TRAINER": str(scratch / "trainer" / "nixl_info.json"),
                    "FANIN_ALLOW_TRAINERS": f"127.0.0.1,::1,localhost,{scratch}",
                    "FANIN_PULL_TIMEOUT": str(TIMEOUT),
                    "FANIN_KEEP_ADAPTERS": str(KEEP),
                    "NIXL_LORA_CACHE_DIR": str(self.cache),
                    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
                },
            )
        )
        self.trainer = self.launch(step=0, seed=1)
        self.engine.wait_ready()
        self.base_tokens = self.oracle.tokens(None, PROMPT, COUNT)

    def launch(self, step: int, seed: int) -> LiveTrainer:
        """A new launch of trainers, whose nixl_info.json takes the place of an earlier one's."""
        trainer = LiveTrainer(self.model, self.scratch / "trainer", step=step, seed=seed)
        return self._stack.enter_context(trainer).wait_ready()

    def pulled(self, name: str) -> list[int]:
        return self.engine.tokens(name, PROMPT, COUNT)

    def expected(self, step: int) -> list[int]:
        return self.oracle.tokens(self.trainer.record(step), PROMPT, COUNT)

    def next_step(self) -> int:
        return int(self.trainer.step()["step"])

    def load(self, name: str, **fields: Any) -> Any:
        """The plugin's own route; `Refused` unless it loaded the adapter."""
        body = {"lora_name": name, **fields}
        return self.engine.ask("POST", "/load_lora_adapter_nixl", body, PATIENCE + 60)

    def point_at(self, **fields: Any) -> Any:
        return self.engine.ask("POST", "/init_nixl_client", fields)

    def status(self) -> dict[str, Any]:
        return dict(self.engine.ask("GET", "/nixl/status"))

    def pulling(self) -> bool:
        """Whether a pull is under way in the engine's process."""
        return bool(self.status()["pulling"])

    def pulls(self, result: str = "ok") -> float:
        """Pulls that have ended so."""
        return self.engine.metric("fanin_pulls_total", result=result)

    def still_serves(self) -> None:
        """The base model and the newest adapter give what PEFT gives."""
        assert self.engine.tokens("base", PROMPT, COUNT) == self.base_tokens
        step = self.next_step()
        assert self.pulled(f"alive-run0-step{step}") == self.expected(step)

    @property
    def step(self) -> int:
        """The trainers' newest."""
        return self.trainer.published

    def kept(self) -> set[Path]:
        """Of all adapters that the engine has or is giving up."""
        status = self.status()
        return {Path(one["path"]) for one in (*status["adapters"], *status["retiring"])}

    def directories(self, prefix: str) -> set[Kept]:
        """Of adapters whose names begin so, all runs and launches, on disk or in slots' layout."""
        here = {config.parent for config in self.cache.rglob("adapter_config.json")} | self.kept()
        return {Kept(self, path) for path in here if path.name.startswith(f"{prefix}-")}

    def learnt(self) -> bool:
        """Whether the workers know where adapters go, and are learning nothing."""
        slots = self.status()["slots"]
        assert not slots["why_not"] and not slots["refused"], slots
        return slots["layouts"] > 0 and slots["learning"] == 0


@dataclasses.dataclass(frozen=True)
class Kept:
    """Where an adapter lies: a directory, or memory that goes by its name."""

    place: Place = dataclasses.field(compare=False, repr=False)
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def exists(self) -> bool:
        return self.path.exists() or self.path in self.place.kept()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[Place]:
    with contextlib.ExitStack() as stack:
        yield Place(tmp_path_factory.mktemp("vllm"), stack)


def until(condition: collections.abc.Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.02)


@contextlib.contextmanager
def meanwhile() -> collections.abc.Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


# ------------------------------------------------------------------------------- by its name


def test_a_name_pulls_its_step_from_the_live_trainers(place: Place) -> None:
    answers = [place.engine.tokens("base", PROMPT, COUNT)]
    assert answers[0] == place.base_tokens
    for _ in range(3):
        step = place.next_step()
        answers.append(place.pulled(f"policy-run0-step{step}"))
        assert answers[-1] == place.expected(step)
    assert len({tuple(tokens) for tokens in answers}) == 4, "steps that cannot be told apart"
    assert place.pulls() == 3


def test_later_adapters_go_straight_into_slots(place: Place) -> None:
    """The first one of a layout is what the workers learn it from."""
    first = place.status()["adapters"][0]
    assert first["landing"] == "directory" and "first" in first["landing_why"]
    until(place.learnt, "the layout")
    landed = place.engine.metric("fanin_landings_total", landing="slot")
    for _ in range(4):
        step = place.next_step()
        answer = place.load(f"slot-run0-step{step}")
        assert (answer["landing"], answer["landing_why"]) == ("slot", "")
        assert not Path(answer["path"]).exists() and answer["bytes"] > 0
        assert place.pulled(f"slot-run0-step{step}") == place.expected(step)
    assert place.engine.metric("fanin_landings_total", landing="slot") == landed + 4
    step = place.next_step()
    answer = place.load(f"filed-run0-step{step}", landing="directory")
    assert answer["landing"] == "directory" and Path(answer["path"]).is_dir()
    assert place.pulled(f"filed-run0-step{step}") == place.expected(step)


def test_a_pull_that_waits_for_its_step_holds_nothing_up(place: Place) -> None:
    loaded = place.step
    assert place.pulled(f"shared-run0-step{loaded}") == place.expected(loaded)
    with meanwhile() as pool:
        waiting = pool.submit(place.load, f"later-run0-step{loaded + 1}", timeout=PATIENCE)
        until(place.pulling, "a pull")
        for _ in range(3):
            assert place.engine.request("GET", "/health")[0] == 200
            assert place.engine.tokens("base", PROMPT, COUNT) == place.base_tokens
            assert place.pulled(f"shared-run0-step{loaded}") == place.expected(loaded)
        assert place.pulling() and not waiting.done()
        step = place.next_step()
        waiting.result(PATIENCE)
    assert place.pulled(f"later-run0-step{step}") == place.expected(step)


# ------------------------------------------------------------------------- what cannot be had


def refused(place: Place, name: str) -> Refused:
    with pytest.raises(Refused) as caught:
        place.pulled(name)
    return caught.value


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("no-such-model", 404, "does not exist"),  # left to others
        ("policy-run0-step01", 404, "does not exist"),
        ("policy-run7-step1", 404, "7"),
        ("late-run0-step{passed}", 404, "{passed}"),
        ("early-run0-step{never}", 504, "{never}"),
        ("paused-run0-step{step}", 503, "offloaded"),
    ],
)
def test_what_cannot_be_had(place: Place, name: str, status: int, said: str) -> None:
    numbers = {"passed": place.step, "never": place.step + 1000, "step": place.next_step()}
    if "paused" in name:
        place.trainer.pause()
    error = refused(place, name.format(**numbers))
    assert error.status == status and said.format(**numbers) in error.message
    if "paused" in name:
        place.trainer.resume()
    place.still_serves()


def test_what_vllm_does_not_take_is_refused_before_bytes_move(place: Place) -> None:
    import torch

    shape = moe_engine.Shape(rank=2 * RANK)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.zeros(shape.rank, 128),
        f"{module}.lora_B.weight": torch.zeros(128, shape.rank),
    }
    config = moe_engine.configuration(shape, {"target_modules": ["q_proj"]})
    moved = place.engine.metric("fanin_pull_bytes_total")
    with moe_engine.ranks_of(tensors, config) as addresses:
        with pytest.raises(Refused) as caught:
            place.load("refused-run0-step1", trainer_addresses=addresses)
    assert caught.value.status == 400
    assert "max-lora-rank" in caught.value.message
    assert place.engine.metric("fanin_pull_bytes_total") == moved
    place.still_serves()


@contextlib.contextmanager
def placeless() -> collections.abc.Iterator[list[str]]:
    """An adapter of two modules, one of which is narrower than the engine's."""
    import torch

    tensors = {}
    for module, out in (("layers.1.mlp.gate_proj", 128), ("layers.0.mlp.up_proj", 256)):
        tensors[f"base_model.model.model.{module}.lora_A.weight"] = torch.ones(4, 128)
        tensors[f"base_model.model.model.{module}.lora_B.weight"] = torch.ones(out, 4)
    config = moe_engine.configuration(moe_engine.Shape(rank=4), {"target_modules": ["q_proj"]})
    with moe_engine.ranks_of(tensors, config) as addresses:
        yield addresses


def test_an_adapter_without_a_place_is_refused(place: Place) -> None:
    with placeless() as addresses:
        moved = place.engine.metric("fanin_pull_bytes_total")
        with pytest.raises(Refused, match="gives 256") as caught:
            place.load("placeless-run0-step1", trainer_addresses=addresses)
    assert caught.value.status == 400 and "layers.1.mlp.gate_proj" in caught.value.message
    assert place.engine.metric("fanin_pull_bytes_total") == moved
    assert "placeless-run0-step1" not in place.engine.names()


# ------------------------------------------------------------------------------- retirement


def test_retired_adapters_leave_no_trap(place: Place) -> None:
    steps = [place.next_step()]
    old = f"retired-run0-step{steps[0]}"
    place.pulled(old)
    first = place.directories("retired")
    assert len(first) == 1
    for _ in range(KEEP):
        steps.append(place.next_step())
        name = f"retired-run0-step{steps[-1]}"
        assert place.pulled(name) == place.expected(steps[-1])
    until(lambda: not first & place.directories("retired"), "retirement")
    assert len(place.directories("retired")) == KEEP
    assert old not in place.engine.names()

    error = refused(place, old)
    assert error.status == 404 and str(steps[-1]) in error.message

    # The engine's own cache holds fewer adapters than are used now: it reads them again.
    other = {"lora_name": "by-file", "lora_path": str(place.trainer.record(steps[0]))}
    place.engine.ask("POST", "/v1/load_lora_adapter", other)
    for _ in range(2):
        for step in steps[1:]:
            assert place.pulled(f"retired-run0-step{step}") == place.expected(step)
        assert place.pulled("by-file") == place.expected(steps[0])
    place.engine.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "by-file"}, PATIENCE)
    place.still_serves()


def test_an_adapter_in_use_is_not_deleted(place: Place) -> None:
    """A request of a name that is retired while it runs goes on with the same weights."""
    step = place.next_step()
    name = f"busy-run0-step{step}"
    with TokenStream(place.engine, name, PROMPT, 60000) as stream:
        stream.wait_for(1)
        (directory,) = place.directories("busy")
        for _ in range(KEEP):
            newer = place.next_step()
            assert place.pulled(f"busy-run0-step{newer}") == place.expected(newer)
        until(lambda: name not in place.engine.names(), "retirement's beginning")
        stream.wait_for(len(stream.tokens) + 32)
        assert stream.running and directory.exists()
        told = stream.tokens[:100]
    assert told == place.oracle.tokens(place.trainer.record(step), PROMPT, len(told))
    until(lambda: not directory.exists(), "retirement")
    place.still_serves()


# ----------------------------------------------------------------------------- other trainers


def test_dead_trainers(place: Place) -> None:
    step = place.next_step()
    kept = f"kept-run0-step{step}"
    assert place.pulled(kept) == place.expected(step)
    expected = place.expected(step)
    place.trainer.kill()
    for name in ("dead", "still-dead"):  # on an old connection, and on a new one
        error = refused(place, f"{name}-run0-step{step + 1}")
        assert error.status == 503
        assert any(address in error.message for address in place.trainer.addresses)
    assert place.engine.tokens("base", PROMPT, COUNT) == place.base_tokens
    assert place.pulled(kept) == expected

    place.trainer.close()
    place.trainer = place.launch(step, seed=2)
    place.still_serves()


@contextlib.contextmanager
def launch_of(
    place: Place, weights: int, step: int, base_port: int = 0
) -> collections.abc.Iterator[list[str]]:
    """Another launch, in this process, whose *step* is what the live trainers had at *weights*."""
    from safetensors.torch import load_file

    record = place.trainer.record(weights)
    config = json.loads((record / "adapter_config.json").read_text())
    tensors = load_file(record / "adapter_model.safetensors")
    with moe_engine.ranks_of(tensors, config, step=step, base_port=base_port) as addresses:
        yield addresses


@contextlib.contextmanager
def elsewhere(place: Place) -> collections.abc.Iterator[tuple[int, int]]:
    """Two steps that answer differently; afterwards the engine is at its own trainers again."""
    one, two = place.next_step(), place.next_step()
    while place.expected(one) == place.expected(two):
        two = place.next_step()
    try:
        yield one, two
    finally:
        place.point_at(trainer_addresses=str(place.trainer.info))
    place.still_serves()


def test_a_name_asked_for_all_the_time_while_launches_follow_each_other(place: Place) -> None:
    """No answer of a launch after one of its successor, and no refusal without a reason."""
    name = "always-run0-step12"
    port = free_ports(2)
    over = threading.Event()

    def ask(answers: list[list[int]], refusals: list[str]) -> None:
        while not over.is_set():
            try:
                answers.append(place.pulled(name))
            except Refused as error:
                refusals.append(error.message)

    with elsewhere(place) as (one, two), meanwhile() as pool:
        launches = (one, two, one, two)
        expected = {step: place.expected(step) for step in (one, two)}
        told: list[tuple[list[list[int]], list[str]]] = [([], []) for _ in range(3)]
        try:
            for number, step in enumerate(launches):
                with launch_of(place, step, 12, port) as addresses:
                    if number == 0:
                        place.point_at(trainer_addresses=addresses)
                        asking = [pool.submit(ask, *thread) for thread in told]
                    for answers, _ in told:
                        until(lambda a=answers, s=step: a[-1:] == [expected[s]], "its answer")
        finally:
            over.set()
        for thread in asking:
            thread.result(PATIENCE)
        for answers, refusals in told:
            seen = [tokens for tokens, _ in itertools.groupby(answers)]
            assert seen == [expected[step] for step in launches]
            assert not [why for why in refusals if "does not exist" in why]


# ------------------------------------------------------------------- without plugin's routes


def test_the_worker_extension_loads_an_adapter(place: Place) -> None:
    """What an engine without endpoint plugins has: short calls of its workers."""
    from safetensors.torch import load_file

    def call(method: str, *arguments: Any) -> Any:
        body = {"method": method, "args": list(arguments), "timeout": PATIENCE}
        (result,) = place.engine.ask("POST", "/collective_rpc", body)["results"]
        return result

    with placeless() as addresses:
        other = "placeless-run0-step1"
        call("load_lora_from_nixl", other, "0", addresses, PATIENCE)
        until(lambda: call("poll_lora_from_nixl", other)["state"] != "running", "the refusal")
        refused = call("poll_lora_from_nixl", other)
        assert refused["state"] == "failed" and "gives 256" in refused["error"]["message"]
    step = place.step + 1
    name, number = f"extension-run0-step{step}", 1_000_000
    call("load_lora_from_nixl", name, "0", None, PATIENCE)
    assert call("poll_lora_from_nixl", name)["state"] == "running"
    assert place.engine.tokens("base", PROMPT, COUNT) == place.base_tokens
    place.next_step()
    until(lambda: call("poll_lora_from_nixl", name)["state"] != "running", "the pull")
    report = call("poll_lora_from_nixl", name)
    assert report["state"] == "done" and report["world"] == place.trainer.world_id, report
    directory = Path(report["path"])
    file = "adapter_model.safetensors"
    same_tensors(load_file(directory / file), load_file(place.trainer.record(step) / file))
    call("add_lora_from_nixl", name, number)
    assert number in call("list_loras")
    call("drop_lora_from_nixl", name, number)
    assert number not in call("list_loras")
    until(lambda: not directory.exists(), "retirement")
    place.still_serves()


# --------------------------------------------------------------------------- what it tells


def test_status_and_metrics(place: Place) -> None:
    step = place.next_step()
    place.pulled(f"told-run0-step{step}")
    status = place.status()
    assert f"told-run0-step{step}" in json.dumps(status)
    assert place.trainer.world_id in json.dumps(status)
    for name in ("fanin_pulls_total", "fanin_pull_bytes_total", "fanin_pull_seconds_count"):
        assert place.engine.metric(name) > 0, name
    assert place.pulls() > 0
    for error in ("SUPERSEDED", "TIMEOUT", "NOT_FOUND", "UNREACHABLE", "PAUSED", "ARGUMENT"):
        assert place.pulls(f"FANIN_ERR_{error}") > 0, error


def test_the_engine_never_died_and_said_what_was_wrong(place: Place) -> None:
    log = place.engine.log_text()
    assert "max_cpu_loras" in log and f"--max-cpu-loras {KEEP}" in log
    assert "EngineDeadError" not in log and "Traceback" not in log
