# SPDX-License-Identifier: Apache-2.0
"""Nothing is answered with weights that are not the whole of one step, of whatever engine.

vLLM's classes are stood for by small ones that keep its habits: an executor that reads the answers
of its workers up to the first failure, and takes the others for answers of its next call.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fanin.engine.updates import Updates
from fanin.errors import FaninError, HostError, PeerError, StateError
from fanin.vllm import guard, patches

FANIN = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="fanin"))


class Output(SimpleNamespace):
    def __init__(self, request_id: str, new_token_ids: list[int], **fields: Any) -> None:
        super().__init__(request_id=request_id, new_token_ids=new_token_ids, **fields)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of vLLM a core uses to answer requests."""
    engine = ModuleType("vllm.v1.engine")
    engine.EngineCoreOutput = Output  # type: ignore[attr-defined]
    engine.EngineCoreOutputs = SimpleNamespace  # type: ignore[attr-defined]
    engine.FinishReason = SimpleNamespace(ERROR="error")  # type: ignore[attr-defined]
    request = ModuleType("vllm.v1.request")
    request.RequestStatus = SimpleNamespace(FINISHED_ERROR="failed")  # type: ignore[attr-defined]
    dead = ModuleType("vllm.v1.engine.exceptions")
    dead.EngineDeadError = Dead  # type: ignore[attr-defined]
    refusals = ModuleType("vllm.exceptions")
    refusals.GracefulHTTPError = Refusal  # type: ignore[attr-defined]
    for module in (engine, request, dead, refusals):
        monkeypatch.setitem(sys.modules, module.__name__, module)


class Transfer:
    """The backend of one worker. fails: before or after the first byte was written. draft: of its
    draft model, which updates are of as long as *of_draft* says so. world: of the trainer."""

    def __init__(self, name: str) -> None:
        self.main, self.draft = Updates(name), Updates(f"{name}, draft")
        self.fails, self.world, self.of_draft, self.drafts = "", "a" * 32, False, False
        self.incarnation, self.rank = "c" * 32, "3"

    @property
    def updates(self) -> Updates:
        return self.draft if self.of_draft else self.main

    def holds(self) -> list[dict[str, Any]]:
        return [one.holds() for one in self._models()]

    def lost(self, why: str, kept: frozenset[str]) -> None:
        self.main.lost(why)
        if "draft.norm" not in kept:
            self.draft.lost(why)

    def disown(self, why: str) -> None:
        self.main.lost(why)

    def _models(self) -> list[Updates]:
        return [self.main, self.draft] if self.drafts else [self.main]

    def reset_weight_update_target(self) -> None:
        self.updates.leave()
        self.of_draft = False

    def reloaded(self) -> None:
        self.main.reloaded()


class Worker:
    """As vLLM's: an update that fails is over in this worker, and in no other one."""

    def __init__(self, name: str) -> None:
        self.weight_transfer_engine = Transfer(name)
        self._weight_update_active = False

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("a weight update is already active")
        self.weight_transfer_engine.updates.start()
        self._weight_update_active = True

    def start_draft_weight_update(self) -> None:
        self.weight_transfer_engine.of_draft = True
        self.start_weight_update()

    def update_weights(self, step: Any, prefetch: bool = False) -> None:
        transfer = self.weight_transfer_engine
        step = step["step"] if isinstance(step, dict) else step
        if prefetch:
            return  # a thread of its own reads it, beside the model
        try:
            with transfer.updates.pull(step):
                if transfer.fails != "before":
                    transfer.updates.writing(step)
                if transfer.fails:
                    raise PeerError.make(f"{transfer.fails} the first byte", "mend it", rank=3)
                transfer.updates.came_from(transfer.world, {transfer.rank: transfer.incarnation})
        except BaseException:
            self._weight_update_active = False
            transfer.reset_weight_update_target()
            raise

    def finish_weight_update(self) -> int:
        step = self.weight_transfer_engine.updates.finish()
        self._weight_update_active = self.weight_transfer_engine.of_draft = False
        return step

    def reload_weights(self) -> None:
        if self.weight_transfer_engine.fails:
            raise FileNotFoundError("no such checkpoint")


patches.put(Worker, "WorkerBase")


class Scheduler:
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def finish_requests(self, which: None, status: str) -> list[Any]:
        assert which is None and status == "failed"
        ended, self.requests = self.requests, []
        return ended


def engine(size: int = 2, **more: Any) -> Any:
    """A core of its own class, guarded, with *size* workers."""

    class Core:
        def __init__(self) -> None:
            self.vllm_config, self.scheduler = FANIN, Scheduler()
            self.workers = [Worker(f"worker {rank} of {size}") for rank in range(size)]
            self.answers: list[deque[Any]] = [deque() for _ in range(size)]
            self.paused, self.resumed, self.slept = False, 0, "slept"
            self.dropped, self.drops = [], True
            self.version = "default"
            self.output_queue: queue.Queue[Any] = queue.Queue()
            vars(self).update(more)

        def collective_rpc(
            self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> list[Any]:
            for worker, answers in zip(self.workers, self.answers, strict=True):
                try:
                    answers.append((True, getattr(worker, method)(*args, **(kwargs or {}))))
                except Exception as error:
                    answers.append((False, str(error)))
            found = []
            for answers in self.answers:
                good, answer = answers.popleft()
                if not good:
                    raise RuntimeError(f"Worker failed with error {answer}")
                found.append(answer)
            return found

        def is_scheduler_paused(self) -> bool:
            return self.paused

        def reset_prefix_cache(
            self, reset_running_requests: bool = False, reset_connector: bool = False
        ) -> bool:
            assert reset_running_requests and reset_connector
            self.dropped.append("prefixes")
            return self.drops

        def reset_encoder_cache(self) -> None:
            self.dropped.append("encoders")

        def get_weight_version(self) -> str:
            return self.version

        def set_weight_version(self, version: str) -> None:
            self.version = version

        def resume_scheduler(self) -> None:
            self.paused = False
            self.resumed += 1

        def add_request(self, request: Any, request_wave: int = 0) -> None:
            self.scheduler.requests.append(request)

        def sleep(self, level: int = 1, mode: str = "abort") -> Any:
            return self.slept

    patches.put(Core, "EngineCore")
    patches.put(Core, "EngineCore")  # as vLLM registers plugins, more than once in a process
    return Core()


def request(name: str, client: int = 0) -> Any:
    return SimpleNamespace(request_id=name, client_index=client)


def pulled(core: Any, step: Any, start: str = "start_weight_update") -> None:
    core.collective_rpc(start)
    core.collective_rpc("update_weights", None, (step,))


def update(core: Any, step: int) -> None:
    pulled(core, step)
    assert core.collective_rpc("finish_weight_update") == [step] * len(core.workers)


def launched_again(core: Any) -> None:
    """The trainer; its steps have the same numbers."""
    for worker in core.workers:
        worker.weight_transfer_engine.world = "b" * 32


def failing(core: Any, step: int, **fails: str) -> FaninError:
    """An update that fails in the workers w0, w1 so named."""
    core.collective_rpc("start_weight_update")
    for name, when in fails.items():
        core.workers[int(name[1:])].weight_transfer_engine.fails = when
    with pytest.raises(FaninError) as caught:
        core.collective_rpc("update_weights", None, (step,))
    for worker in core.workers:
        worker.weight_transfer_engine.fails = ""
    return caught.value


def refused(core: Any) -> str:
    with pytest.raises(StateError) as caught:
        core.resume_scheduler()
    return str(caught.value)


def test_an_update_that_ends_well() -> None:
    core = engine()
    update(core, 3)
    core.resume_scheduler()
    core.add_request(request("a"))
    assert core.resumed == 1 and len(core.scheduler.requests) == 1
    assert core.fanin_not_whole() == ""


def test_caches_of_the_old_weights_are_dropped() -> None:
    """By every update that ends well, and by a load from disk; but for one that says otherwise."""
    core = engine()
    update(core, 3)
    assert core.dropped == ["prefixes", "encoders"]
    pulled(core, {"step": 4, "keep_caches": True})
    core.collective_rpc("finish_weight_update")
    assert len(core.dropped) == 2
    update(core, 5)
    core.collective_rpc("reload_weights")
    assert len(core.dropped) == 6
    failing(core, 6, w0="after")
    assert len(core.dropped) == 6
    core.drops = False
    with pytest.raises(HostError, match="caches of the old ones stay"):
        update(core, 7)


def test_a_checkpoint_is_called_so() -> None:
    core = engine()
    assert core.get_weight_version() == "checkpoint"
    update(core, 3)
    core.set_weight_version("step-3")
    core.collective_rpc("reload_weights")
    assert core.get_weight_version() == "checkpoint"


def test_no_answer_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that is told so: it has been started, or has loaded its checkpoint again."""
    monkeypatch.setenv("FANIN_REQUIRE_STEP", "1")
    core = engine()
    core.add_request(request("a"))
    _, answer = core.output_queue.get_nowait()
    (one,) = answer.outputs
    assert "no step was pulled since the engine started" in one.stop_reason
    assert "FANIN_REQUIRE_STEP" in core.fanin_not_whole()
    failing(core, 3, w0="before", w1="before")
    assert "no step was pulled" in refused(core)
    update(core, 3)
    core.resume_scheduler()
    core.add_request(request("b"))
    assert [one.request_id for one in core.scheduler.requests] == ["b"]
    core.collective_rpc("reload_weights")
    assert "no step was pulled" in refused(core)


@pytest.mark.parametrize(
    "fails", [{"w0": "after"}, {"w1": "after"}, {"w0": "after", "w1": "after"}]
)
def test_a_dirty_engine_is_not_resumed(fails: dict[str, str]) -> None:
    core = engine()
    update(core, 3)
    core.paused = True
    error = failing(core, 4, **fails)
    assert isinstance(error, PeerError) and error.rank == 3
    said = refused(core)
    assert f"worker {min(fails)[1]} of 2" in said and "step 4 failed" in said
    assert "start an update" in said and core.paused and core.resumed == 0
    update(core, 5)  # which no worker takes for one that is under way
    core.resume_scheduler()
    assert core.resumed == 1


def test_workers_of_two_steps_are_not_resumed() -> None:
    """Each worker's bytes are whole, and the engine's are not."""
    core = engine()
    failing(core, 4, w1="before")
    said = refused(core)
    assert (
        f"worker 0 of 2 has step 4 of launch {'a' * 32}, worker 1 of 2 has the weights that it was"
        " started with" in said
    )
    assert "before the first byte" in said
    update(core, 5)
    core.resume_scheduler()


def test_workers_of_two_launches_are_not_resumed() -> None:
    """A step of the same number has other weights in another launch of the trainer."""
    core = engine(paused=True)
    update(core, 7)
    launched_again(core)
    failing(core, 7, w1="before")
    said = refused(core)
    assert f"worker 0 of 2 has step 7 of launch {'b' * 32}" in said
    assert f"worker 1 of 2 has step 7 of launch {'a' * 32}: " in said
    assert "before the first byte" in said and core.fanin_not_whole()
    update(core, 7)
    core.resume_scheduler()
    assert core.resumed == 1 and core.fanin_step() == (7, "b" * 32, {"3": "c" * 32})


def test_workers_of_two_lives_of_a_rank_are_not_resumed() -> None:
    """It may have other bytes under the number of the step, in the same launch."""
    core = engine(paused=True)
    transfer = core.workers[1].weight_transfer_engine
    transfer.incarnation = "d" * 32
    update(core, 7)
    said = refused(core)
    assert "rank 3 of the trainer was started again between the pulls of worker 0 of 2" in said
    assert "worker 1 of 2" in said
    transfer.incarnation = "c" * 32
    update(core, 7)
    core.resume_scheduler()
    assert core.resumed == 1


def test_workers_that_have_not_met_all_ranks() -> None:
    """One read while the rank was not there, and the two others before it ended and after."""
    models = [[one.holds()] for one in (Updates("a"), Updates("b"), Updates("c"))]
    for (one,), lives in zip(models, ({}, {"3": "c" * 32}, {"3": "d" * 32}), strict=True):
        one["incarnations"] = lives
    said = "rank 3 of the trainer was started again between the pulls of b and c"
    assert guard.not_whole(models) == said
    assert guard.not_whole(models[:2]) == ""


def test_a_failure_before_the_first_byte_changes_nothing() -> None:
    core = engine()
    update(core, 3)
    failing(core, 4, w0="before", w1="before")
    core.resume_scheduler()
    core.add_request(request("a"))
    assert len(core.scheduler.requests) == 1


def test_answers_are_never_those_of_the_call_before() -> None:
    """Of two workers that fail vLLM alone would read one, and be one answer behind ever after."""
    core = engine()
    error = failing(core, 4, w0="before", w1="before")
    assert not any(core.answers)
    assert str(error).count("before the first byte") == 1  # the same of both is said once
    said = str(failing(core, 4, w0="before", w1="after"))
    assert "before the first byte" in said and "after the first byte" in said
    assert not any(core.answers)
    with pytest.raises(FaninError, match="without an update"):
        core.collective_rpc("finish_weight_update")
    update(core, 5)


def test_requests_of_a_dirty_engine_fail() -> None:
    core = engine()
    for name, client in (("a", 0), ("b", 1)):
        core.add_request(request(name, client))
    failing(core, 4, w1="after")
    core.add_request(request("c", 1))
    answers = [core.output_queue.get_nowait() for _ in range(3)]
    assert core.output_queue.empty() and core.scheduler.requests == []
    assert [(client, one.outputs[0].request_id) for client, one in answers] == [
        (0, "a"),
        (1, "b"),
        (1, "c"),
    ]
    for _, one in answers:
        assert one.outputs[0].finish_reason == "error" and one.outputs[0].new_token_ids == []
        assert "worker 1 of 2: the pull of step 4 failed" in one.outputs[0].stop_reason
    update(core, 5)
    core.add_request(request("d"))
    assert len(core.scheduler.requests) == 1


def test_requests_of_a_paused_engine_wait() -> None:
    core = engine(paused=True)
    core.add_request(request("a"))
    failing(core, 4, w1="after")
    core.add_request(request("b"))
    assert len(core.scheduler.requests) == 2 and core.output_queue.empty()
    refused(core)
    update(core, 5)
    core.resume_scheduler()
    assert len(core.scheduler.requests) == 2


def test_workers_begin_and_end_together() -> None:
    core = engine()
    core.workers[1]._weight_update_active = True  # whatever has brought it there
    with pytest.raises(FaninError, match="already active"):
        core.collective_rpc("start_weight_update")
    update(core, 3)
    pulled(core, 4)
    core.workers[1].weight_transfer_engine.updates.leave()
    with pytest.raises(FaninError, match="without an update"):
        core.collective_rpc("finish_weight_update")
    update(core, 5)


def test_a_second_start_does_not_end_the_first() -> None:
    core = engine()
    core.collective_rpc("start_weight_update")
    with pytest.raises(FaninError, match="already active"):
        core.collective_rpc("start_weight_update")
    core.collective_rpc("update_weights", None, (4,))
    with pytest.raises(FaninError, match="already active"):
        core.collective_rpc("start_weight_update")
    assert core.collective_rpc("finish_weight_update") == [4, 4]


def test_weights_that_sleep_has_given_up() -> None:
    core = engine()
    assert core.sleep(1) == "slept"
    core.resume_scheduler()
    assert core.sleep(level=2) == "slept"
    assert "sleep at level 2" in refused(core)
    core.collective_rpc("start_weight_update")  # which brings nothing yet
    assert "sleep at level 2" in refused(core)
    core.collective_rpc("update_weights", None, (4,))
    core.resume_scheduler()
    core.sleep(2)
    core.collective_rpc("reload_weights")
    core.resume_scheduler()


def test_weights_that_are_not_what_was_trained() -> None:
    core = engine()
    update(core, 4)
    core.collective_rpc("fanin_disown_weights", None, ("step 4 is not served: w: cut",))
    assert "worker 0 of 2: step 4 is not served: w: cut" in refused(core)
    core.collective_rpc("start_weight_update")
    assert "w: cut" in refused(core)
    core.collective_rpc("update_weights", None, (5,))
    core.resume_scheduler()


@pytest.mark.parametrize("error", [None, RuntimeError("a worker could not sleep")])
def test_weights_that_a_sleep_gives_up_later(error: Exception | None) -> None:
    """vLLM waits for requests under way, and answers other calls meanwhile. A sleep that failed in
    one worker may have ended well in another."""
    later: Future[None] = Future()
    core = engine(paused=True, slept=later)
    update(core, 3)
    assert core.sleep(2, "wait") is later
    update(core, 4)
    assert core.fanin_not_whole() == ""  # nothing is given up yet
    told: list[str] = []
    later.add_done_callback(lambda _: told.append(core.fanin_not_whole()))
    if error is None:
        later.set_result(None)
    else:
        later.set_exception(error)
    assert "sleep at level 2" in told[0]  # before whoever waits for the sleep is answered
    refused(core)
    update(core, 5)
    core.resume_scheduler()
    assert core.resumed == 1


def test_an_engine_that_was_resumed_before_it_slept() -> None:
    later: Future[None] = Future()
    core = engine(paused=True, slept=later)
    core.sleep(2, "wait")
    core.resume_scheduler()
    core.add_request(request("a"))
    later.set_result(None)
    assert core.scheduler.requests == []
    client, answer = core.output_queue.get_nowait()
    assert "sleep at level 2" in answer.outputs[0].stop_reason


def test_reading_ahead_brings_nothing_yet() -> None:
    core = engine(paused=True)
    core.sleep(level=2)
    core.collective_rpc("start_weight_update")
    core.collective_rpc("update_weights", None, (4, True))
    assert "sleep at level 2" in refused(core)
    with pytest.raises(StateError, match="not whole.*sleep at level 2"):
        core.collective_rpc("finish_weight_update")
    core.collective_rpc("update_weights", None, (4,))
    core.resume_scheduler()


def test_an_update_under_way_is_lost_in_a_sleep() -> None:
    core = engine(paused=True)
    pulled(core, 4)
    core.sleep(level=2)
    with pytest.raises(StateError, match="not whole.*sleep at level 2"):
        core.collective_rpc("finish_weight_update")
    refused(core)


def test_each_model_that_sleep_has_given_up_is_pulled() -> None:
    core = engine(paused=True)
    for worker in core.workers:
        worker.weight_transfer_engine.drafts = True
    core.sleep(level=2)
    pulled(core, 4, "start_draft_weight_update")
    core.collective_rpc("finish_weight_update")
    assert "worker 0 of 2: the weights were given up" in refused(core)
    core.sleep(level=2)
    update(core, 4)
    core.collective_rpc("reload_weights")  # which loads the main model alone
    said = refused(core)
    assert "worker 0 of 2, draft: the weights were given up" in said
    assert "start_draft_weight_update" in said
    pulled(core, 4, "start_draft_weight_update")
    core.resume_scheduler()
    assert core.resumed == 1


def test_a_draft_that_vllm_keeps_is_not_pulled_again() -> None:
    core = engine(paused=True)
    for worker in core.workers:
        worker.weight_transfer_engine.drafts = True
        worker._sleep_saved_parameters = {"draft.norm": "its bytes"}
    core.sleep(level=2)
    refused(core)
    update(core, 4)
    core.resume_scheduler()
    assert core.resumed == 1


def test_weights_that_are_loaded_from_disk_are_whole() -> None:
    core = engine()
    failing(core, 4, w1="after")
    core.workers[0].weight_transfer_engine.fails = "yes"
    with pytest.raises(FaninError, match="no such checkpoint"):
        core.collective_rpc("reload_weights")
    assert "step 4" in refused(core)
    core.workers[0].weight_transfer_engine.fails = ""
    core.collective_rpc("reload_weights")
    core.resume_scheduler()
    update(core, 5)


def test_a_worker_that_does_not_answer() -> None:
    core = engine()
    core.collective_rpc("start_weight_update")
    del core.answers[1], core.workers[1]
    core.workers.append(SimpleNamespace())
    core.answers.append(deque())
    with pytest.raises(RuntimeError):
        core.collective_rpc("update_weights", None, (4,))
    assert "a worker has not answered" in refused(core)


def test_a_worker_that_is_killed_is_named() -> None:
    codes = {"VllmWorker-0": -15, "VllmWorker-1": -9, "VllmWorker-2": 0, "VllmWorker-3": None}
    processes = [SimpleNamespace(name=name, exitcode=code) for name, code in codes.items()]
    workers = [SimpleNamespace(proc=process) for process in processes]
    core = engine(model_executor=SimpleNamespace(workers=workers))
    core.collective_rpc("start_weight_update")
    core.workers[1] = SimpleNamespace()
    with pytest.raises(
        HostError, match="VllmWorker-1 .exit status -9. ended .* update_weights"
    ) as e:
        core.collective_rpc("update_weights", None, (4,))
    assert "VllmWorker-0" not in str(e.value)
    refused(core)


def test_other_calls_and_other_backends_are_left_alone() -> None:
    core = engine(vllm_config=SimpleNamespace(weight_transfer_config=None))
    with pytest.raises(RuntimeError, match="Worker failed with error"):
        core.collective_rpc("finish_weight_update")
    core.resume_scheduler()
    core.add_request(request("a"))
    assert core.resumed == 1


# ---------------------------------------------------------- replicas that share experts


def test_replicas_that_share_experts_pause_first() -> None:
    core = engine(dp_group="group")
    with pytest.raises(StateError, match="pause before"):
        core.collective_rpc("start_weight_update")
    core.paused = True
    update(core, 3)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([False, 3, -3, 0], ""),
        ([True, 3, -3, 0], "another replica"),
        ([False, 4, -4, 0], "different steps"),
        ([False, 2, -2, 0], "different steps"),
    ],
)
def test_replicas_that_share_experts_agree(
    monkeypatch: pytest.MonkeyPatch, other: list[int], said: str
) -> None:
    """Whoever is refused is refused everywhere: vLLM would wait in there for the others."""
    core = engine(dp_group="group", paused=True)
    for worker in core.workers:
        worker.weight_transfer_engine.world = "0" * 32  # so that the step is all that is compared
    update(core, 3)

    def highest(group: str, mine: list[int]) -> list[int]:
        assert group == "group"
        if len(mine) > len(other):  # lives of ranks, which it has not met
            return mine
        return [max(pair) for pair in zip(mine, other, strict=True)]

    monkeypatch.setattr(guard, "_highest", highest)
    if said:
        assert said in refused(core)
    else:
        core.resume_scheduler()
    assert core.resumed == (not said)


@pytest.mark.parametrize("step", [7, 8])
def test_replicas_that_share_experts_agree_on_the_launch(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    one, other = (engine(dp_group="group", paused=True) for _ in range(2))
    update(one, 7)
    launched_again(other)
    update(other, step)
    assert all("different launches" in said for said in together(monkeypatch, one, other))


@pytest.mark.parametrize("rank", ["3", "4"])
def test_replicas_that_share_experts_agree_on_the_lives_of_ranks(
    monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """A rank that was started again in a launch may have other bytes under a step's number."""
    one, other = (engine(dp_group="group", paused=True) for _ in range(2))
    for worker in other.workers:
        worker.weight_transfer_engine.incarnation = "d" * 32
        worker.weight_transfer_engine.rank = rank
    update(one, 7)
    update(other, 7)
    said = together(monkeypatch, one, other)
    if rank == "3":
        assert all("rank 3 of the trainer was started again" in text for text in said)
    else:  # each has read a rank that the other one has not
        assert said == ["", ""] and one.resumed == other.resumed == 1


def together(monkeypatch: pytest.MonkeyPatch, *cores: Any) -> list[str]:
    """What these replicas say when all of them are resumed; "": nothing."""
    barrier = threading.Barrier(len(cores), timeout=60)
    brought: dict[int, list[int]] = {}

    def highest(group: str, mine: list[int]) -> list[int]:
        brought[threading.get_ident()] = mine
        barrier.wait()
        found = [max(numbers) for numbers in zip(*brought.values(), strict=True)]
        barrier.wait()
        return found

    def resume(core: Any) -> str:
        try:
            core.resume_scheduler()
        except StateError as error:
            return str(error)
        return ""

    monkeypatch.setattr(guard, "_highest", highest)
    with ThreadPoolExecutor(len(cores)) as pool:
        return list(pool.map(resume, cores))


# ------------------------------------------------------------------- where requests come in


class Refusal(Exception):
    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        assert status == 503


class Dead(Exception):
    """As vLLM's own, which names nobody."""


THREE = (3, "a" * 32, {"0": "c" * 32})


def server(*said: str, held: tuple[Any, ...] = (THREE, THREE)) -> Any:
    class Server:
        def __init__(self) -> None:
            self.vllm_config, self.engine_core = FANIN, self
            self.calls: list[Any] = []

        async def call_utility_all_async(self, method: str, *arguments: Any) -> list[Any]:
            self.calls.append((method, *arguments))
            return list(held if method == "fanin_step" else said)

        async def resume_generation(self) -> None:
            self.calls.append("resumed")

        async def add_request(self) -> None:
            raise Dead

        async def update_weights(self, fails: bool) -> None:
            if fails:
                raise RuntimeError("replica 1 has failed")

    patches.put(Server, "AsyncLLM")
    return Server()


def test_no_replica_is_resumed_if_one_is_dirty() -> None:
    one = server("", "worker 0 of 1, replica 1: not whole")
    with pytest.raises(Refusal, match="replica 1"):
        asyncio.run(one.resume_generation())
    assert "resumed" not in one.calls
    good = server("", "")
    asyncio.run(good.resume_generation())
    assert good.calls[-1] == "resumed"


@pytest.mark.parametrize(
    ("held", "says"),
    [
        # One has failed before its first byte was written: both are whole.
        (((4, "", {}), (None, "", {})), "different steps: step 4, the weights that it was started"),
        (
            (THREE, (3, "b" * 32, {})),
            f"step 3 of launch {'a' * 32}, step 3 of launch {'b' * 32}",
        ),
        ((THREE, (*THREE[:2], {"0": "d" * 32})), "rank 0 of the trainer was started again"),
        (
            ((*THREE[:2], {}), THREE, (*THREE[:2], {"0": "d" * 32})),
            "rank 0 of the trainer was started again",
        ),
    ],
)
def test_replicas_of_different_steps_are_not_resumed(held: Any, says: str) -> None:
    one = server("", "", held=held)
    with pytest.raises(Refusal, match=says):
        asyncio.run(one.resume_generation())
    assert "resumed" not in one.calls


def test_a_request_to_a_core_that_is_dead_is_told_so() -> None:
    with pytest.raises(Dead, match="engine core has ended.*start the engine again"):
        asyncio.run(server().add_request())


def test_an_update_that_fails_in_one_replica_is_over_in_all() -> None:
    one = server("", "")
    with pytest.raises(RuntimeError, match="replica 1 has failed"):
        asyncio.run(one.update_weights(True))
    assert one.calls == [("collective_rpc", "fanin_leave_update")]
    asyncio.run(one.update_weights(False))
    assert len(one.calls) == 1


@pytest.mark.parametrize("text", [True, False])
def test_a_request_is_told_why(text: bool) -> None:
    class Processor:
        def __init__(self) -> None:
            self.put: list[Exception] = []
            state = SimpleNamespace(
                queue=SimpleNamespace(put=self.put.append), detokenizer=object() if text else None
            )
            self.request_states = {"a": state, "b": state}

        def process_outputs(self, outputs: list[Any]) -> int:
            return len(outputs)

    if not text:
        pytest.importorskip("torch")
    patches.put(Processor, "OutputProcessor")
    processor: Any = Processor()
    outputs = [
        Output("a", [], finish_reason="error", stop_reason="fanin: worker 0 of 1"),
        Output("b", [], finish_reason="stop", stop_reason="fanin: a stop string"),
        Output("b", [], finish_reason="error", stop_reason=None),
        Output("gone", [], finish_reason="error", stop_reason="fanin: worker 0 of 1"),
    ]
    assert processor.process_outputs(outputs) == 4
    assert [str(one) for one in processor.put] == ["worker 0 of 1"]


def offline(client: Any, reload: Any = lambda: None) -> Any:
    class Offline:
        def __init__(self) -> None:
            self.vllm_config, self.engine_core = FANIN, client
            self.output_processor = SimpleNamespace(request_states={"under way": 1})
            self.added: list[str] = []

        def collective_rpc(
            self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> Any:
            if method == "update_weights":
                raise RuntimeError("rank 3 is gone")
            if method == "reload_weights":
                reload()

        def add_request(self, name: str) -> None:
            self.added.append(name)

        def abort_request(self, names: list[str], internal: bool) -> None:
            assert internal
            for name in names:
                del self.output_processor.request_states[name]

    patches.put(Offline, "LLMEngine")
    return Offline()


@pytest.mark.parametrize("apart", [True, False])
def test_offline_requests_are_refused(apart: bool) -> None:
    said = ["worker 0 of 1: the pull of step 4 failed"]
    if apart:
        client: Any = SimpleNamespace(call_utility=lambda method: said[0])
    else:
        client = SimpleNamespace(engine_core=SimpleNamespace(fanin_not_whole=lambda: said[0]))
    one = offline(client)
    one.add_request("a")
    with pytest.raises(RuntimeError, match="rank 3 is gone"):
        one.collective_rpc("update_weights")
    assert one.output_processor.request_states == {}  # nobody waits for its answer
    with pytest.raises(StateError, match="step 4 failed"):
        one.add_request("b")
    said[0] = ""
    one.collective_rpc("finish_weight_update")
    one.add_request("c")
    assert one.added == ["a", "c"]


def test_offline_requests_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_REQUIRE_STEP", "1")
    said = ["no step was pulled"]
    one = offline(SimpleNamespace(call_utility=lambda _: said[0]))
    with pytest.raises(StateError, match="no step was pulled"):
        one.add_request("a")
    said[0] = ""
    one.collective_rpc("finish_weight_update")
    one.add_request("b")
    assert one.added == ["b"]


def test_an_engine_that_does_not_say_is_not_asked_for_tokens() -> None:
    one = offline(SimpleNamespace())
    one.collective_rpc("finish_weight_update")
    with pytest.raises(StateError, match="does not say"):
        one.add_request("a")


def test_a_core_that_is_dead_already_is_named() -> None:
    """vLLM's client knows it by then, and says nothing of use."""

    def dead(*_: Any) -> str:
        raise Dead("see the stack trace above")

    process = SimpleNamespace(name="EngineCore", exitcode=-9, pid=0)
    manager = SimpleNamespace(processes=[process])
    one = offline(
        SimpleNamespace(call_utility=dead, resources=SimpleNamespace(engine_manager=manager)), dead
    )
    with pytest.raises(HostError, match="EngineCore .exit status -9.*start the engine again"):
        one.collective_rpc("reload_weights")
    with pytest.raises(StateError, match="EngineCore .exit status -9"):
        one.add_request("a")


def test_a_core_that_dies_in_a_call_is_not_waited_for() -> None:
    """vLLM's client waits for the answer of the call, and for that of the question after it."""
    over = threading.Event()
    client = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))

    def hangs(*_: Any) -> str:
        client.resources.engine_dead = True
        over.wait(60)
        return ""

    client.call_utility = hangs
    one = offline(client, hangs)
    try:
        with pytest.raises(HostError, match="engine core has ended"):
            one.collective_rpc("reload_weights")
        with pytest.raises(StateError, match="engine core has ended"):
            one.add_request("a")
    finally:
        over.set()
