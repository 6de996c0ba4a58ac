# SPDX-License-Identifier: Apache-2.0
"""An engine whose weights are not the whole of one step answers nobody.

A worker knows whether its own bytes are whole (:mod:`fanin.vllm.updates`). Of an engine of several
workers one may have failed alone, and vLLM's engine core, which schedules requests, knows of
neither. So calls that concern weights go through :func:`fanin_weights_call` in the workers, and the
core learns from each answer what every worker holds. While that is not one whole step:

* ``/resume`` and ``wake_up`` are refused;
* requests of an engine that is not paused fail, new ones and those under way; those of a paused
  engine wait, as they do in every pause;
* ``LLM.generate`` raises.

So it is after a sleep that has given the weights up, until they are pulled, or loaded from disk.

The text names the worker, what happened to it and the remedy. A whole pull ends all of that.

Everything here is contact with vLLM's engine (``vllm.v1.engine``), for the versions that
:data:`fanin.vllm.reload.SUPPORTED` has.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from http import HTTPStatus
from typing import Any

from fanin.errors import FaninError, HostError, StateError
from fanin.vllm.faults import from_wire, to_wire

__all__ = ["METHODS", "Gate", "install", "not_whole"]

_log = logging.getLogger("vllm.fanin")

_STARTS = ("start_weight_update", "start_draft_weight_update")
#: Methods of vLLM's workers after which the weights may be others.
_WATCHED = frozenset(
    {
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        *_STARTS,
        "update_weights",
        "finish_weight_update",
        "reload_weights",
        "fanin_check_weights",
    }
)
_REMEDY = "start an update and pull a step that the trainer has, or start the engine again"
#: How the core tells an API server why a request failed: in front of its stop_reason.
_MARK = "fanin: "
# Steps are compared as numbers of 64 bits with a sign.
_MODULUS = 2**61 - 1


# ------------------------------------------------------------------------- in the workers


def fanin_weights_call(
    worker: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Calls *method* of this worker and says what came of it and what the weights are now.

    It raises nothing: of several workers vLLM reads the answers up to the first failure, and takes
    those that it has left for answers of its next call.
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


METHODS = (fanin_weights_call, fanin_leave_update)


# ------------------------------------------------------------------------ in the engine core


def not_whole(workers: list[list[dict[str, Any]]]) -> str:
    """Why the models of an engine's workers are not the whole of one step, "" if they are.

    workers: of each what :meth:`fanin.vllm.updates.Updates.holds` says of its models.
    """
    for models in workers:
        for one in models:
            if one["dirty"]:
                return f"{one['worker']}: {one['dirty']}"
    for models in zip(*workers, strict=False):
        first = models[0]
        for one in models:
            if one["step"] != first["step"]:
                failed = first["failed"] or one["failed"]
                return (
                    f"{first['worker']} has {_called(first['step'])}, {one['worker']} has "
                    f"{_called(one['step'])}" + (f": {failed}" if failed else "")
                )
    return ""


def _called(step: int | None) -> str:
    return "the weights that it was started with" if step is None else f"step {step}"


class Gate:
    """What one engine core knows of its workers' weights, and whom it lets in. One thread."""

    def __init__(self, core: Any) -> None:
        self._core = core
        #: Why the weights are not the whole of one step; "" if they are.
        self.reason = ""
        self._lost = ""
        self._step = -1

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
        try:
            answers = ask("fanin_weights_call", (method, *arguments))
            failed = [one["error"] for one in answers if one["error"] is not None]
            alone = method in (*_STARTS, "finish_weight_update") and len(failed) < len(answers)
            if failed and (method == "update_weights" or alone):
                answers = ask("fanin_weights_call", ("fanin_leave_update", (), {}))
        except Exception as error:
            self._learn(f"a worker has not answered: {error}")
            ended = _ended(getattr(self._core, "model_executor", None))
            if ended:
                raise HostError.make(
                    f"{ended} ended in the middle of {method}", "start the engine again"
                ) from error
            raise
        if method in ("update_weights", "reload_weights") and not failed:
            self._lost = ""
        held = [one["weights"] for one in answers]
        self._learn(not_whole(held) or self._lost)
        steps = [models[0]["step"] for models in held if models]
        self._step = -1 if not steps or steps[0] is None else steps[0]
        if failed:
            raise _error_of(failed)
        return [one["result"] for one in answers]

    def lose(self, why: str) -> None:
        """The weights are gone until they are pulled, or loaded from disk."""
        self._lost = why
        self._learn(why)

    def refusal(self) -> StateError:
        return StateError.make(f"the weights are not whole: {self.reason}", _REMEDY)

    def may_resume(self, highest: Callable[[Any, list[int]], list[int]]) -> None:
        """Raises StateError if this engine must not generate.

        highest: of each number the highest that any replica of a group has. Replicas that share
        experts wait for each other when they resume: so all of them are refused, or none.
        """
        group = getattr(self._core, "dp_group", None)
        if group is not None:
            step = self._step % _MODULUS
            dirty, last, first = highest(group, [bool(self.reason), step, -step])
            if dirty and not self.reason:
                raise StateError.make("the weights of another replica are not whole", _REMEDY)
            if not dirty and last != -first:
                raise StateError.make(
                    "replicas that share experts have the weights of different steps", _REMEDY
                )
        if self.reason:
            raise self.refusal()

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
                    stop_reason=_MARK + str(self.refusal()),
                )
                for name in names
            ]
            answer = EngineCoreOutputs(finished_requests=set(names), outputs=outputs)
            queue.put_nowait((client, answer))


def _ended(executor: Any) -> str:
    """The worker processes that something has ended; not those that vLLM ended for that."""
    processes = [worker.proc for worker in getattr(executor, "workers", None) or []]
    return ", ".join(
        f"{process.name} (exit status {process.exitcode})"
        for process in processes
        if process.exitcode not in (None, 0, -signal.SIGTERM)
    )


def _error_of(failed: list[dict[str, Any]]) -> FaninError:
    error = from_wire(failed[0])
    others = list(dict.fromkeys(one["message"] for one in failed[1:]))
    others = [text for text in others if text != error.message]
    if others:
        error.message += f"; {'; '.join(others)}"
    return error


def _ours(config: Any) -> bool:
    transfer = getattr(config, "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == "fanin"


def _gate(core: Any) -> Gate:
    gate = core.__dict__.get("_fanin_gate")
    if gate is None:
        gate = core._fanin_gate = Gate(core)
    assert isinstance(gate, Gate)
    return gate


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Puts *wrapper* around a method of a class, once."""
    original = getattr(owner, name)
    if not hasattr(original, "fanin_wraps"):
        wrapped: Any = functools.wraps(original)(wrapper(original))
        wrapped.fanin_wraps = original
        setattr(owner, name, wrapped)


def _highest(group: Any, numbers: list[int]) -> list[int]:
    import torch

    found = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    return [int(number) for number in found]


def _guard_core(core_class: Any) -> None:
    def calling(original: Any) -> Any:
        def collective_rpc(
            self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not isinstance(method, str) or method not in _WATCHED or not _ours(self.vllm_config):
                return original(self, method, timeout, args, kwargs)

            def ask(name: str, arguments: tuple[Any, ...]) -> list[Any]:
                return list(original(self, name, timeout, arguments, None))

            return _gate(self).call(ask, method, tuple(args), dict(kwargs or {}))

        return collective_rpc

    def resuming(original: Any) -> Any:
        def resume_scheduler(self: Any) -> Any:
            if _ours(self.vllm_config):
                _gate(self).may_resume(_highest)
            return original(self)

        return resume_scheduler

    def adding(original: Any) -> Any:
        def add_request(self: Any, request: Any, request_wave: int = 0) -> Any:
            if _ours(self.vllm_config) and _gate(self).turn_away(request):
                return None
            return original(self, request, request_wave)

        return add_request

    def sleeping(original: Any) -> Any:
        def sleep(self: Any, level: int = 1, mode: str = "abort") -> Any:
            done = original(self, level, mode)
            if level >= 2 and _ours(self.vllm_config):
                _gate(self).lose(f"they were given up by sleep at level {level}")
            return done

        return sleep

    def fanin_not_whole(self: Any) -> str:
        gate = _gate(self)
        return str(gate.refusal()) if gate.reason else ""

    _wrap(core_class, "collective_rpc", calling)
    _wrap(core_class, "resume_scheduler", resuming)
    _wrap(core_class, "add_request", adding)
    _wrap(core_class, "sleep", sleeping)
    core_class.fanin_not_whole = fanin_not_whole


# ------------------------------------------------------------------------ where requests come in


def _guard_server(server_class: Any, refusal: Callable[[str], Any]) -> None:
    """vLLM's asynchronous engine, behind its API servers."""

    async def of_all(engine: Any, method: str, *arguments: Any) -> list[Any]:
        return list(await engine.engine_core.call_utility_all_async(method, *arguments))

    def resuming(original: Any) -> Any:
        async def resume_generation(self: Any) -> Any:
            if _ours(self.vllm_config):
                # Before any is resumed: of several replicas one alone would refuse.
                said = [text for text in await of_all(self, "fanin_not_whole") if text]
                if said:
                    raise refusal(said[0])
            return await original(self)

        return resume_generation

    def updating(original: Any) -> Any:
        async def update_weights(self: Any, request: Any) -> Any:
            try:
                return await original(self, request)
            except Exception:
                if _ours(self.vllm_config):
                    with contextlib.suppress(Exception):  # the error that matters is raised
                        # A replica that has ended well would refuse the next start.
                        await of_all(self, "collective_rpc", "fanin_leave_update")
                raise

        return update_weights

    _wrap(server_class, "resume_generation", resuming)
    _wrap(server_class, "update_weights", updating)


def _tell_why(processor_class: Any, failed: Any, refusal: Callable[[str], Any]) -> None:
    """Requests that the core has refused fail with its text; vLLM's own is "internal error".

    failed: the FinishReason of such.
    """

    def processing(original: Any) -> Any:
        def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            for one in outputs:
                if one.finish_reason == failed and str(one.stop_reason).startswith(_MARK):
                    state = self.request_states.get(one.request_id)
                    if state is not None and state.queue is not None:
                        state.queue.put(refusal(one.stop_reason[len(_MARK) :]))
                    if state is not None and state.detokenizer is None:
                        import torch

                        one.pooling_output = torch.empty(0)  # or vLLM takes it for text
            return original(self, outputs, *args, **kwargs)

        return process_outputs

    _wrap(processor_class, "process_outputs", processing)


def _guard_offline(engine_class: Any) -> None:
    """vLLM's synchronous engine, behind ``LLM``."""

    def calling(original: Any) -> Any:
        def collective_rpc(
            self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not isinstance(method, str) or method not in _WATCHED or not _ours(self.vllm_config):
                return original(self, method, timeout, args, kwargs)
            try:
                return _while_it_lives(
                    self.engine_core, lambda: original(self, method, timeout, args, kwargs)
                )
            finally:
                self._fanin_not_whole = _asked(self.engine_core)
                under_way = list(self.output_processor.request_states)
                if self._fanin_not_whole and under_way:
                    self.abort_request(under_way, internal=True)

        return collective_rpc

    def adding(original: Any) -> Any:
        def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            said = self.__dict__.get("_fanin_not_whole")
            if said:
                raise StateError.make(said)
            return original(self, *args, **kwargs)

        return add_request

    _wrap(engine_class, "collective_rpc", calling)
    _wrap(engine_class, "add_request", adding)


def _asked(client: Any) -> str:
    """What the core behind *client* says; one in this process is an attribute."""
    try:
        if hasattr(client, "call_utility"):
            return str(_while_it_lives(client, lambda: client.call_utility("fanin_not_whole")))
        return str(client.engine_core.fanin_not_whole())
    except Exception as error:
        return f"the engine does not say what its weights are: {error}"


def _while_it_lives(client: Any, call: Callable[[], Any]) -> Any:
    """What *call* returns or raises, which asks the core behind *client*; HostError if that dies.

    vLLM's client waits for ever for the answer of a core that has died.
    """
    if not hasattr(client, "call_utility"):  # it is in this process
        return call()
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="fanin-ask", daemon=True).start()
    while not wait([answer], timeout=0.1).done:
        if getattr(getattr(client, "resources", None), "engine_dead", False):
            raise HostError.make("vLLM's engine core has ended", "start the engine again")
    return answer.result()


def install() -> bool:
    """Guards the engines of this process; again: does nothing. False: of another version of vLLM,
    in whose workers the backend refuses to start."""
    from fanin.vllm import reload

    try:
        reload.require_version()
        from vllm.exceptions import GracefulHTTPError
        from vllm.v1.engine import FinishReason
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.engine.output_processor import OutputProcessor
    except (FaninError, ImportError):
        return False

    def refusal(text: str) -> Exception:
        return GracefulHTTPError(text, HTTPStatus.SERVICE_UNAVAILABLE)

    _guard_core(EngineCore)
    _guard_server(AsyncLLM, refusal)
    _tell_why(OutputProcessor, FinishReason.ERROR, refusal)
    _guard_offline(LLMEngine)
    return True
