# SPDX-License-Identifier: Apache-2.0
"""An engine whose weights are not the whole of one step answers nobody.

A worker knows whether its own bytes are whole (:mod:`fanin.engine.updates`). Of an engine of
several workers one may have failed alone, and vLLM's engine core, which schedules requests, knows
of neither. So calls that concern weights go through :func:`fanin_weights_call` in the workers, and
the core learns from each answer what every worker holds. While that is not one whole step:

* ``/resume`` and ``wake_up`` are refused;
* requests of an engine that is not paused fail, new ones and those under way; those of a paused
  engine wait, as they do in every pause;
* ``LLM.generate`` raises.

So it is after a sleep that has given the weights up, until each model's are pulled, or the main
model's loaded from disk. A draft that vLLM keeps through the sleep is as it was. So it is when the
orchestrator has found that what is served is not what is trained (:mod:`fanin.check`).

So it is from the start on with ``FANIN_REQUIRE_STEP=1``: an engine that was started again would
answer with its checkpoint.

The text names the worker, what happened to it and the remedy. A whole pull ends all of that.

Everything here is contact with vLLM's engine (``vllm.v1.engine``), for the versions that
:data:`fanin.vllm.patches.SUPPORTED` has; :mod:`fanin.vllm.patches` puts it there.
"""

from __future__ import annotations

import logging
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from fanin.config import inference_setting
from fanin.engine.clients import restarted_between
from fanin.engine.faults import from_wire, to_wire
from fanin.errors import FaninError, HostError, StateError

_log = logging.getLogger("vllm.fanin")

#: After which the engine has other weights, all of them.
_CHANGES = ("finish_weight_update", "reload_weights")
_STARTS = ("start_weight_update", "start_draft_weight_update")
#: Methods of vLLM's workers after which the weights may be others.
WATCHED = frozenset(
    {
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        *_STARTS,
        "update_weights",
        "finish_weight_update",
        "reload_weights",
        "fanin_check_weights",
        "fanin_lose_weights",
        "fanin_disown_weights",
    }
)
REMEDY = (
    "start an update (of a draft: start_draft_weight_update) and pull a step that the trainer has,"
    " or start the engine again"
)
#: How the core tells an API server why a request failed: in front of its stop_reason.
MARK = "fanin: "
#: What vLLM calls weights of which nobody has said a version, and what they are called here.
_UNSAID, CHECKPOINT = "default", "checkpoint"
_NO_STEP = "no step was pulled since the engine started, and FANIN_REQUIRE_STEP is set"
# What replicas have is compared as numbers of 64 bits with a sign.
_MODULUS = 2**61 - 1


# ------------------------------------------------------------------------- in the workers


def fanin_weights_call(
    worker: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Calls *method* of this worker and says what came of it and what the weights are now.

    It raises nothing. For of several workers vLLM reads the answers up to the first failure. It
    takes the answers that remain for answers of its next call.
    """
    answer: dict[str, Any] = {"result": None, "error": None}
    try:
        answer["result"] = getattr(worker, method)(*args, **kwargs)
    except Exception as error:
        _log.warning("fanin: %s failed", method, exc_info=True)
        answer["error"] = to_wire(error)
    engine: Any = getattr(worker, "weight_transfer_engine", None)
    if method == "reload_weights" and answer["error"] is None and hasattr(engine, "reloaded"):
        engine.reloaded()
    answer["weights"] = engine.holds() if hasattr(engine, "holds") else []
    return answer


def fanin_leave_update(worker: Any) -> None:
    """Ends an update that has failed in another worker, without a step."""
    if getattr(worker, "_weight_update_active", False):
        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()


def fanin_lose_weights(worker: Any, why: str) -> None:
    """The weights of this worker's models are gone, but for what vLLM puts back when it wakes.

    why: "" if it puts all of them back.
    """
    engine: Any = getattr(worker, "weight_transfer_engine", None)
    if hasattr(engine, "lost"):
        engine.lost(why, frozenset(getattr(worker, "_sleep_saved_parameters", ())))


def fanin_disown_weights(worker: Any, why: str) -> None:
    """The weights of this worker's model are there, and wrong: nobody is answered with them."""
    engine: Any = getattr(worker, "weight_transfer_engine", None)
    if hasattr(engine, "disown"):
        engine.disown(why)


_TEST = "tests/python/test_vllm_guard.py::"
METHODS: tuple[tuple[Callable[..., Any], str], ...] = (
    (fanin_weights_call, _TEST + "test_answers_are_never_those_of_the_call_before"),
    (fanin_leave_update, _TEST + "test_workers_begin_and_end_together"),
    (fanin_lose_weights, _TEST + "test_weights_that_sleep_has_given_up"),
    (fanin_disown_weights, _TEST + "test_weights_that_are_not_what_was_trained"),
)


# ------------------------------------------------------------------------ in the engine core


def not_whole(workers: list[list[dict[str, Any]]]) -> str:
    """Why the models of an engine's workers are not the whole of one step, "" if they are.

    workers: of each what :meth:`fanin.engine.updates.Updates.holds` says of its models.
    """
    for models in workers:
        for one in models:
            if one["dirty"]:
                return f"{one['worker']}: {one['dirty']}"
    for models in zip(*workers, strict=False):
        first = models[0]
        for one in models:
            if (one["step"], one["world"]) != (first["step"], first["world"]):
                failed = first["failed"] or one["failed"]
                return (
                    f"{first['worker']} has {called(first['step'], first['world'])}, "
                    f"{one['worker']} has {called(one['step'], one['world'])}"
                    + (f": {failed}" if failed else "")
                )
        if again := restarted_between(one["incarnations"] for one in models):
            rank, *two = again
            of = " and ".join(models[number]["worker"] for number in two)
            return f"rank {rank} of the trainer was started again between the pulls of {of}"
    return ""


def called(step: int | None, world: str) -> str:
    """A step, with the launch of the trainer whose it is: another one numbers its own alike."""
    if step is None:
        return "the weights that it was started with"
    return f"step {step}" + (f" of launch {world}" if world else "")


class Gate:
    """What one engine core knows of its workers' weights, and whom it lets in. One thread."""

    def __init__(self, core: Any, required: bool = False) -> None:
        self._core, self._required = core, required
        #: Why the weights are not the whole of one step, or not of any; "" if they are.
        self.reason = _NO_STEP if required else ""
        #: That all workers have, None: the weights that they were started with; and its launch.
        self.step: int | None = None
        self.world = ""
        #: Incarnations of the launch's ranks then, of all that any worker met.
        self.lives: dict[str, str] = {}
        #: Whether the update that is under way leaves what was computed with the old weights.
        self._keep_caches = False

    def call(
        self, ask: Callable[[str, tuple[Any, ...]], list[Any]], method: str, *arguments: Any
    ) -> list[Any]:
        """Calls *method* of all workers; their results.

        Raises the error of the first that failed, which names the others that did. An update that
        failed anywhere is over everywhere, and so is one that some have begun or ended alone.
        """
        if method in _STARTS and hasattr(self._core, "dp_group") and not self._paused():
            raise StateError.make(
                "replicas that share experts use each other's weights at any time",
                "pause before start_weight_update",
            )
        if method in _STARTS:
            self._keep_caches = False
        elif method == "update_weights":
            self._keep_caches = _keeps_caches(*arguments)
        try:
            answers = ask("fanin_weights_call", (method, *arguments))
            failed = [one["error"] for one in answers if one["error"] is not None]
            alone = method in (*_STARTS, "finish_weight_update") and len(failed) < len(answers)
            if failed and (method == "update_weights" or alone):
                answers = ask("fanin_weights_call", ("fanin_leave_update", (), {}))
        except Exception as error:
            self._learn(f"a worker has not answered: {error}")
            workers = getattr(getattr(self._core, "model_executor", None), "workers", None) or []
            gone = ended(worker.proc for worker in workers)
            if gone:
                raise HostError.make(
                    f"{gone} ended in the middle of {method}", "start the engine again"
                ) from error
            raise
        held = [one["weights"] for one in answers]
        mains = [models[0] for models in held if models]
        self.step, self.world = (mains[0]["step"], mains[0]["world"]) if mains else (None, "")
        self.lives = {rank: life for one in mains for rank, life in one["incarnations"].items()}
        lacking = _NO_STEP if self._required and self.step is None else ""
        self._learn(not_whole(held) or lacking)
        if failed:
            raise _error_of(failed)
        if method == "reload_weights":
            self._core.set_weight_version(CHECKPOINT)
        if method in _CHANGES:
            keep, self._keep_caches = self._keep_caches, False
            if not keep:
                self._drop_caches()
        return [one["result"] for one in answers]

    def _drop_caches(self) -> None:
        """What was computed with the old weights answers nothing any more: blocks of prefixes and
        outputs of encoders. Requests that are under way are computed again."""
        try:
            dropped = self._core.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
            self._core.reset_encoder_cache()
        except Exception as error:
            dropped, why = False, f": {error}"
        else:
            why = ""
        if not dropped:
            raise HostError.make(
                f"the weights are the new ones, and the caches of the old ones stay{why}",
                "pause the engine before the update, and finish again; or update with "
                '{"keep_caches": true} if answers may use them',
            )

    def refusal(self) -> StateError:
        if self.reason == _NO_STEP:
            return StateError.make(self.reason, "pull a step that the trainer has")
        return StateError.make(f"the weights are not whole: {self.reason}", REMEDY)

    def may_resume(self, highest: Callable[[Any, list[int]], list[int]]) -> None:
        """Raises StateError if this engine must not generate.

        highest: of each number the highest that any replica of a group has. Replicas that share
        experts wait for each other when they resume: so all of them are refused, or none.
        """
        group = getattr(self._core, "dp_group", None)
        if group is not None:
            # A launch is a random number of 128 bits: no two sums are equal by accident.
            held = (-1 if self.step is None else self.step + int(self.world or "0", 16)) % _MODULUS
            ranks = max((int(rank) + 1 for rank in self.lives), default=0)
            dirty, last, first, ranks = highest(group, [bool(self.reason), held, -held, ranks])
            if dirty and not self.reason:
                raise StateError.make("the weights of another replica are not whole", REMEDY)
            if not dirty and last != -first:
                raise StateError.make(
                    "replicas that share experts have the weights of different steps, or of"
                    " different launches of the trainer",
                    REMEDY,
                )
            if not dirty and ranks:
                self._require_same_lives(lambda lives: highest(group, lives), ranks)
        if self.reason:
            raise self.refusal()

    def _require_same_lives(self, highest: Callable[[list[int]], list[int]], ranks: int) -> None:
        """Raises StateError if another replica has read a rank of the trainer in another life."""
        mine: list[int] = []
        for rank in range(ranks):
            life = self.lives.get(str(rank))
            number = -_MODULUS if life is None else int(life, 16) % _MODULUS
            mine += (number, number if life is None else -number)
        found = highest(mine)
        for rank, last, first in zip(range(ranks), found[::2], found[1::2], strict=True):
            if last not in (-first, -_MODULUS):
                raise StateError.make(
                    f"rank {rank} of the trainer was started again between the pulls of replicas"
                    " that share experts",
                    REMEDY,
                )

    def turn_away(self, request: Any) -> bool:
        """Whether a new request is refused; it has its answer then.

        Raises StateError where answers are not sent: the caller is in this process.
        """
        if not self.reason or self._paused():
            return False
        if not hasattr(self._core, "output_queue"):
            raise self.refusal()
        self._fail([request])
        return True

    def _paused(self) -> bool:
        return bool(self._core.is_scheduler_paused())

    def _learn(self, reason: str) -> None:
        before, self.reason = self.reason, reason
        if reason and reason != before:
            _log.error("fanin: no request is answered until a whole step is pulled: %s", reason)
            if not self._paused():
                from vllm.v1.request import RequestStatus

                status = RequestStatus.FINISHED_ERROR
                self._fail(self._core.scheduler.finish_requests(None, status))
        elif before and not reason:
            _log.info("fanin: the weights are whole again")

    def _fail(self, requests: list[Any]) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        queue = getattr(self._core, "output_queue", None)
        if queue is None:
            return  # the caller is in this process, and ends them
        by_client: dict[int, list[str]] = defaultdict(list)
        for request in requests:
            by_client[request.client_index].append(request.request_id)
        for client, names in by_client.items():
            outputs = [
                EngineCoreOutput(
                    name,
                    [],
                    finish_reason=FinishReason.ERROR,
                    stop_reason=MARK + str(self.refusal()),
                )
                for name in names
            ]
            answer = EngineCoreOutputs(finished_requests=set(names), outputs=outputs)
            queue.put_nowait((client, answer))


def ended(processes: Iterable[Any]) -> str:
    """The processes that something has ended; not those that vLLM ended for that."""
    return ", ".join(
        f"{process.name} (exit status {process.exitcode})"
        for process in processes
        if process.exitcode not in (None, 0, -signal.SIGTERM)
    )


def _keeps_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the ``update_info`` of an update says so."""
    info = kwargs.get("update_info", args[0] if args else None)
    told = info.get("keep_caches") if isinstance(info, dict) else getattr(info, "keep_caches", None)
    return told is True


def _error_of(failed: list[dict[str, Any]]) -> FaninError:
    error = from_wire(failed[0])
    others = list(dict.fromkeys(one["message"] for one in failed[1:]))
    others = [text for text in others if text != error.message]
    if others:
        error.message += f"; {'; '.join(others)}"
    return error


def ours(config: Any) -> bool:
    transfer = getattr(config, "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == "fanin"


def requires_step() -> bool:
    """Whether an engine is to answer nothing before its first whole update. Raises ConfigError."""
    return bool(inference_setting("require_step"))


def watched(method: Any, config: Any) -> bool:
    """Whether weights that are in our care may be others after this *method* of the workers."""
    return isinstance(method, str) and method in WATCHED and ours(config)


def _gate(core: Any) -> Gate:
    gate = core.__dict__.get("_fanin_gate")
    if gate is None:
        gate = core._fanin_gate = Gate(core, requires_step())
        # Not when the core is made: it is what loads plugins.
        if core.get_weight_version() == _UNSAID:
            core.set_weight_version(CHECKPOINT)
    assert isinstance(gate, Gate)
    return gate


def _highest(group: Any, numbers: list[int]) -> list[int]:
    import torch

    found = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    return [int(number) for number in found]


# --------------------------------------------------- what fanin.vllm.patches puts into the core


def calling(original: Any, _: Any) -> Any:
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not watched(method, self.vllm_config):
            return original(self, method, timeout, args, kwargs)

        def ask(name: str, arguments: tuple[Any, ...]) -> list[Any]:
            return list(original(self, name, timeout, arguments, None))

        return _gate(self).call(ask, method, tuple(args), dict(kwargs or {}))

    return collective_rpc


def resuming(original: Any, _: Any) -> Any:
    def resume_scheduler(self: Any) -> Any:
        if ours(self.vllm_config):
            _gate(self).may_resume(_highest)
        return original(self)

    return resume_scheduler


def adding(original: Any, _: Any) -> Any:
    def add_request(self: Any, request: Any, request_wave: int = 0) -> Any:
        if ours(self.vllm_config) and _gate(self).turn_away(request):
            return None
        return original(self, request, request_wave)

    return add_request


def sleeping(original: Any, _: Any) -> Any:
    def sleep(self: Any, level: int = 1, mode: str = "abort") -> Any:
        def lose(_: Any) -> None:
            why = f"the weights were given up by sleep at level {level}" if level > 1 else ""
            self.collective_rpc("fanin_lose_weights", None, (why,))

        done = original(self, level, mode)
        if level >= 1 and ours(self.vllm_config):
            if isinstance(done, Future):
                # It waits for requests under way, and updates may end meanwhile. Callbacks run
                # in the order in which they came: this one before whoever waits is answered.
                done.add_done_callback(lose)
            else:
                lose(done)
        return done

    return sleep


def telling(original: Any, _: Any) -> Any:
    def get_weight_version(self: Any) -> Any:
        if ours(self.vllm_config):
            _gate(self)  # which calls a checkpoint so
        return original(self)

    return get_weight_version


def fanin_not_whole(self: Any) -> str:
    gate = _gate(self)
    return str(gate.refusal()) if gate.reason else ""


def fanin_step(self: Any) -> tuple[int | None, str, dict[str, str]]:
    gate = _gate(self)
    return gate.step, gate.world, gate.lives
