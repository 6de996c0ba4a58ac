# SPDX-License-Identifier: Apache-2.0
"""Every function and value of vLLM in whose place fanin puts something, in one table.

Nothing else in :mod:`fanin.vllm` assigns to vLLM's classes or to what callers find in its objects.
:func:`install` puts what is of a class in each process of vLLM; :func:`put` what is of one object,
when that is known. A target that is another one than the table knows is not touched: the error
names it, and the backend of whole models refuses to start.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from fanin.errors import FaninError, RequestError
from fanin.vllm import guard, guard_front, worker

_log = logging.getLogger("vllm.fanin")

#: Versions of vLLM whose inside is known.
SUPPORTED = ((0, 32),)
#: The target is fanin's own, of a name that vLLM does not have.
ADDED = "added"
#: The target is no function.
VALUE = "value"


class Patch(NamedTuple):
    """One row. replacement: given what was there and who asks, what is put in its place; None:
    nothing."""

    #: Module, class and name.
    target: str
    #: The parameters that vLLM's function has, behind "*" any more; or ADDED, or VALUE.
    takes: str
    replacement: Callable[[Any, Any], Any]
    why: str
    #: A test of what it is there for.
    test: str

    @property
    def owner(self) -> str:
        return self.target.partition(":")[2].partition(".")[0]

    @property
    def name(self) -> str:
        return self.target.rpartition(".")[2]


def _of(method: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda _, __: method


def _by(name: str) -> Callable[[Any, Any], Any]:
    """The method *name* of who asks, which is given what was there first."""
    return lambda original, asks: (
        functools.partial(getattr(asks, name), original) if hasattr(asks, name) else None
    )


_caller: ContextVar[Any] = ContextVar("fanin_calling_models", default=None)


def calling_models() -> Any:
    """The OpenAIServingModels that asks its resolvers for an adapter now, or None."""
    return _caller.get()


def _resolving(original: Any, asks: Any) -> Any:
    """Of the class: vLLM hands a resolver no engine, and without the endpoint plugin only who calls
    it leads to the list of models, without which no adapter could ever be retired."""
    if asks is not None:
        return _by("resolve")(original, asks)

    async def resolve_lora(self: Any, lora_name: str) -> Any:
        token = _caller.set(self)
        try:
            return await original(self, lora_name)
        finally:
            _caller.reset(token)

    return resolve_lora


def _unpinned(method: Any, _: Any) -> Any:
    """A bound method that leaves tensors where they are."""
    function = method.__func__
    known = {**function.__globals__, "PIN_MEMORY": False}
    code, name, closure = function.__code__, function.__name__, function.__closure__
    made = FunctionType(code, known, name, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return MethodType(made, method.__self__)


_CORE = "vllm.v1.engine.core:EngineCore."
_CLIENT = "vllm.v1.engine.core_client:AsyncMPClient."
_SERVER = "vllm.v1.engine.async_llm:AsyncLLM."
_OFFLINE = "vllm.v1.engine.llm_engine:LLMEngine."
_MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels."
_WORKER = "vllm.v1.worker.worker_base:WorkerBase."
_LOADER = "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager."
_MANAGER = "vllm.lora.model_manager:LRUCacheLoRAModelManager."
_RPC = "method timeout args kwargs"

_GUARD = "tests/python/test_vllm_guard.py::"
_ALIVE = "tests/python/test_vllm_alive.py::"
_WORLDS = "tests/python/test_engine_worlds.py::"
_SLOTS = "tests/engines/test_vllm_slots.py::"

# fmt: off
TABLE: tuple[Patch, ...] = (
    # ---------------------------------------------------------------------- the engine core
    Patch(_CORE + "collective_rpc", _RPC, guard.calling,
          "the core learns what the workers hold; one failure ends an update in all of them",
          _GUARD + "test_answers_are_never_those_of_the_call_before"),
    Patch(_CORE + "resume_scheduler", "", guard.resuming,
          "an engine that is not whole is not resumed",
          _GUARD + "test_a_dirty_engine_is_not_resumed"),
    Patch(_CORE + "add_request", "request request_wave", guard.adding,
          "an engine that is not whole takes no request",
          _GUARD + "test_requests_of_a_dirty_engine_fail"),
    Patch(_CORE + "sleep", "level mode", guard.sleeping,
          "weights that a sleep has given up are not whole",
          _GUARD + "test_weights_that_sleep_has_given_up"),
    Patch(_CORE + "get_weight_version", "", guard.telling,
          "a checkpoint is called so, before the first update",
          _GUARD + "test_a_checkpoint_is_called_so"),
    Patch(_CORE + "fanin_not_whole", ADDED, _of(guard.fanin_not_whole),
          "an API server asks why the weights are not whole",
          _GUARD + "test_no_answer_before_the_first_step"),
    Patch(_CORE + "fanin_step", ADDED, _of(guard.fanin_step),
          "an API server compares the steps of its replicas",
          _GUARD + "test_workers_of_two_launches_are_not_resumed"),
    Patch(_CORE + "fanin_call", ADDED, _of(worker.fanin_call),
          "workers are called, and no request waits for their answers",
          "tests/python/test_vllm_beside.py::test_a_step_brings_the_answers_of_calls_before_it"),
    # -------------------------------------------------------- in front of the engine core
    Patch(_CLIENT + "_call_utility_async", "method *args engine", guard_front.asking,
          "no call waits for a core that has died or stands still",
          _ALIVE + "test_a_core_that_dies_is_named"),
    Patch(_CLIENT + "get_output_async", "", guard_front.bringing,
          "requests under way are told which process has died",
          _ALIVE + "test_a_core_that_is_dead_is_named"),
    Patch(_SERVER + "resume_generation", "", guard_front.resuming,
          "no replica is resumed if one of them is not whole",
          _GUARD + "test_no_replica_is_resumed_if_one_is_dirty"),
    Patch(_SERVER + "update_weights", "request", guard_front.updating,
          "an update that fails in one replica is over in all",
          _GUARD + "test_an_update_that_fails_in_one_replica_is_over_in_all"),
    Patch(_SERVER + "add_request", "*", guard_front.adding,
          "a new request is told which process has died",
          _GUARD + "test_a_request_to_a_core_that_is_dead_is_told_so"),
    Patch("vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
          "engine_core_outputs *", guard_front.telling,
          "a request that was refused says why, not 'internal error'",
          _GUARD + "test_a_request_is_told_why"),
    Patch(_OFFLINE + "collective_rpc", _RPC, guard_front.calling_offline,
          "LLM.collective_rpc does not wait for a dead core, and knows what the weights are",
          _GUARD + "test_offline_requests_are_refused"),
    Patch(_OFFLINE + "add_request", "*", guard_front.adding_offline,
          "LLM.generate raises while the weights are not whole",
          _GUARD + "test_offline_requests_are_refused"),
    # ------------------------------------------------------------------------- the workers
    *(
        Patch(
            _WORKER + method.__name__,
            ADDED,
            _of(method),
            str(method.__doc__).partition("\n")[0],
            test,
        )
        for method, test in worker.METHODS
    ),
    # ---------------------------------------------------------------------- the API server
    Patch(_MODELS + "resolve_lora", "lora_name", _resolving,
          "a resolver learns the list of models; the list tells what did not load",
          "tests/python/test_vllm_routes.py::test_the_models_that_ask"),
    Patch(_MODELS + "load_lora_adapter", "request *", _by("load"),
          "the task that loads a name is let in for nothing before",
          _WORLDS + "test_a_request_that_was_let_in_before_its_name_was_taken_away"),
    Patch(_MODELS + "unload_lora_adapter", "request", _by("unload"),
          "what a caller unloads is retired",
          _WORLDS + "test_a_request_that_was_let_in_before_its_name_was_taken_away"),
    Patch(_MODELS + "lora_requests", VALUE, lambda _, asks: getattr(asks, "names", None),
          "a request finds the adapter that it was let in for",
          _WORLDS + "test_a_request_that_was_let_in_before_its_name_was_taken_away"),
    Patch("vllm.engine.protocol:EngineClient.add_lora", "lora_request", _by("add_lora"),
          "an adapter in slots is added by a call that fails nowhere",
          "tests/python/test_vllm_adds.py::test_of_an_adapter_in_slots_the_workers_are_asked"),
    # ---------------------------------------------------------------------- a worker's slots
    Patch(_LOADER + "_load_adapter", "lora_request", _by("load_adapter"),
          "vLLM is given an image in the place of a directory",
          _SLOTS + "test_an_adapter_that_left_its_slot_and_vllms_cache_comes_back"),
    Patch(_MANAGER + "_create_merged_loras_inplace", "lora_model", _by("create_merged"),
          "an image is packed already",
          _SLOTS + "test_an_adapter_that_left_its_slot_and_vllms_cache_comes_back"),
    Patch(_MANAGER + "activate_adapter", "lora_id", _by("activate_adapter"),
          "an image is copied into the slot that vLLM chooses",
          _SLOTS + "test_a_slot_is_what_vllm_loads"),
    # These two are called by fanin alone, and not put anywhere: see unpinned().
    Patch("vllm.lora.lora_model:LoRAModel.from_lora_tensors",
          "lora_model_id tensors peft_helper *", _unpinned,
          "numbers need no pinned memory, which the driver makes the engine wait for",
          _SLOTS + "test_a_slot_is_what_vllm_loads"),
    Patch("vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace",
          "lora_model", _unpinned,
          "numbers need no pinned memory, which the driver makes the engine wait for",
          _SLOTS + "test_a_slot_is_what_vllm_loads"),
)
# fmt: on

#: Classes that are changed in every process of vLLM.
_CLASSES = ("EngineCore", "AsyncMPClient", "AsyncLLM", "OutputProcessor", "LLMEngine")
_installed = False
_failure: FaninError | None = None


def _require(row: Patch, original: Any) -> None:
    """Raises RequestError if vLLM's function takes others than it did."""
    if not str(getattr(original, "__module__", "")).startswith("vllm."):
        return  # another plugin's, which hands on what it takes
    found = [
        f"*{one.name}" if one.kind is one.VAR_POSITIONAL else one.name
        for one in inspect.signature(original).parameters.values()
        if one.name != "self"
    ]
    wanted = row.takes.split()
    if wanted[-1:] == ["*"]:
        wanted = wanted[:-1]
        found = found[: len(wanted)]
    if found != wanted:
        raise RequestError.make(
            f"vLLM's {row.target} takes ({', '.join(found)}), and fanin knows it with"
            f" ({', '.join(wanted)})",
            "install a vLLM that it knows, or a newer fanin",
            key=row.target,
            code=-404,
        )


def put(owner: Any, kind: str, asks: Any = None, *, must: bool = True) -> None:
    """Puts the rows of the class *kind* into *owner*, a class or an object; into a class once.

    Args:
        asks: whose methods and values stand in for an object's; a row for which it has none is
            left out.
        must: False: what this vLLM has otherwise stays as it is, and the log names it.

    Raises:
        RequestError: a target is another one than the table knows; it is named.
    """
    for row in TABLE:
        original: Any = getattr(owner, row.name, None) if row.owner == kind else None
        if row.owner != kind or (original is None and row.takes != ADDED):
            continue
        if isinstance(owner, type) and hasattr(original, "fanin_wraps"):
            continue
        made: Any = row.replacement(original, asks)
        if made is None:
            continue
        if row.takes not in (ADDED, VALUE):
            try:
                _require(row, original)
            except RequestError as error:
                if must:
                    raise
                _log.error("fanin: %s", error)
                continue
            functools.update_wrapper(made, original)
            made.fanin_wraps = original
        setattr(owner, row.name, made)


def unpinned(method: Any) -> Any:
    """A copy of a bound method of vLLM's of which the table says so."""
    row = next(row for row in TABLE if row.target.endswith(f":{method.__func__.__qualname__}"))
    _require(row, method)
    return row.replacement(method, None)


def require_version() -> str:
    """vLLM's version.

    Raises:
        RequestError: it is not one that is known.
    """
    from vllm import __version__ as version

    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers not in SUPPORTED:
        known = ", ".join(".".join(map(str, v)) for v in SUPPORTED)
        raise RequestError.make(
            f"the inside of vLLM {version} is not known to this version of fanin, which knows "
            f"{known}",
            "install a vLLM that it knows, or a newer fanin",
            code=-404,
        )
    return str(version)


def _owner_of(row: Patch) -> Any:
    module, _, path = row.target.partition(":")
    return getattr(importlib.import_module(module), path.partition(".")[0])


def changed() -> Iterator[str]:
    """What of the table is not in this vLLM as the table says."""
    for row in TABLE:
        owner = _owner_of(row)
        original = getattr(owner, row.name, None)
        original = getattr(original, "fanin_wraps", original)
        if row.takes == ADDED:
            if not str(getattr(original, "__module__", "fanin.")).startswith("fanin."):
                yield f"{row.target} is vLLM's own"
        elif row.takes != VALUE and original is None:
            yield f"there is no {row.target}"
        elif row.takes != VALUE:
            try:
                _require(row, original)
            except RequestError as error:
                yield error.message


def install() -> list[str]:
    """Changes this process' vLLM; again: does nothing. The names of the workers' new methods.

    An engine of another version of vLLM has its workers' methods alone: the backend of whole models
    refuses to start in it, and adapters come by directories.
    """
    global _installed, _failure
    for kind in ("WorkerBase", "OpenAIServingModels"):
        try:
            put(_owner_of(_first(kind)), kind, must=False)
        except (ImportError, AttributeError):
            if kind == "WorkerBase":
                return []
    try:
        require_version()
        if lacks := list(changed()):
            raise RequestError.make("; ".join(lacks), "install a vLLM that fanin knows", code=-404)
        for kind in _CLASSES:
            put(_owner_of(_first(kind)), kind)
        _installed = True
    except (FaninError, ImportError, AttributeError) as error:
        _failure = error if isinstance(error, FaninError) else RequestError.make(str(error))
        _log.warning("fanin: no whole models into this vLLM: %s", error)
    return [row.name for row in TABLE if row.owner == "WorkerBase"]


def _first(kind: str) -> Patch:
    return next(row for row in TABLE if row.owner == kind)


def installed() -> bool:
    """Whether the engine core has what the table says; its process has the same vLLM."""
    return _installed


def require() -> None:
    """Raises the error of a target that was another one, by which the guard is not whole."""
    if _failure is not None:
        raise _failure
