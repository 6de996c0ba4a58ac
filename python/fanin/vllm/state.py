# SPDX-License-Identifier: Apache-2.0
"""What the plugin knows in an API server: its configuration, its pulls, and the engine.

There is one :class:`State` a process, made when it is first needed. The engine comes to it by the
endpoint plugin, at start, or, if only the resolver is loaded, with the first name that is
resolved.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from fanin.config import InferenceConfig, inference_config
from fanin.engine.checks import EngineFacts
from fanin.engine.clients import ClientPool, Source
from fanin.engine.directories import Places
from fanin.engine.faults import from_wire
from fanin.engine.metrics import Metrics, metrics
from fanin.engine.pulls import Adapter, PullService
from fanin.engine.retire import Keeper
from fanin.engine.shared_pulls import Flights
from fanin.engine.slots_way import SlotWay
from fanin.engine.spares import Spares
from fanin.engine.threads import in_thread
from fanin.engine.trainer_watch import Lookout
from fanin.errors import HostError, StateError
from fanin.names import parse
from fanin.vllm import beside
from fanin.vllm.adds import Adds
from fanin.vllm.hooks import asked_at, hook

__all__ = ["Engine", "State", "has_distant_workers", "names_are_resolved", "state"]

_log = logging.getLogger("vllm.fanin")


def names_are_resolved() -> bool:
    """Whether vLLM asks resolvers for names that it does not know."""
    return os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower() in ("1", "true")


def has_distant_workers(parallel: Any) -> bool:
    """Whether workers of this engine may run on other hosts than the API server.

    parallel: vLLM's ParallelConfig. With Ray nobody but Ray knows, so the answer is yes.
    """
    if getattr(parallel, "nnodes", 1) > 1:
        return True
    if getattr(parallel, "use_ray", False):
        return True
    if getattr(parallel, "distributed_executor_backend", None) == "ray":
        return True
    if getattr(parallel, "local_engines_only", False):
        return False
    size = getattr(parallel, "data_parallel_size", 1)
    return bool(getattr(parallel, "data_parallel_size_local", size) < size)


class Engine:
    """vLLM's engine, as the API server reaches it. Used in the event loop's thread.

    models: OpenAIServingModels. client: its EngineClient. resolves: whether a request for the
    adapter's name, if vLLM does not know it, would be for that adapter.
    """

    def __init__(self, models: Any, client: Any, resolves: Callable[[Adapter], bool]) -> None:
        self.models = models
        self.client = client
        self.resolves = resolves
        self.config = getattr(client, "vllm_config", None)
        self.fused_model: bool | None = None
        self.no_slots = "the workers do not say whether their slots can be filled"
        self.slots_on_gpu = False
        self._probe: asyncio.Task[None] | None = None
        self._mute = False

    # ------------------------------------------------------------------ facts

    def facts(self) -> EngineFacts:
        """How it was started. Any thread."""
        lora = getattr(self.config, "lora_config", None)
        if self.config is None:
            return EngineFacts()
        return EngineFacts(
            lora_enabled=lora is not None,
            max_lora_rank=getattr(lora, "max_lora_rank", None),
            max_cpu_loras=getattr(lora, "max_cpu_loras", None),
            mixed_moe=bool(getattr(lora, "enable_mixed_moe_lora_format", False)),
            shared_moe=bool(getattr(lora, "enable_moe_shared_loras", False)),
            fused_model=self.fused_model,
        )

    async def probe(self) -> None:
        """Asks the workers, once, which layout of experts the model takes, and whether their slots
        can be filled; waits for the answer."""
        if self._probe is None:
            self._probe = asyncio.get_running_loop().create_task(self._ask())
        # The first of several callers may go away; the others still want to know.
        await asyncio.wait({self._probe})

    async def _ask(self) -> None:
        try:
            answers = await self.call_workers("fanin_model_facts")
        except Exception as error:
            _log.warning("fanin: the workers do not say which experts the model takes: %s", error)
            return
        for answer in answers:
            if isinstance(answer, dict) and answer.get("is_3d_moe_weight") is not None:
                self.fused_model = bool(answer["is_3d_moe_weight"])
        told = [a["no_slots"] for a in answers if isinstance(a, dict) and "no_slots" in a]
        if told and len(told) == len(answers):
            self.no_slots = next((str(why) for why in told if why), "")
        self.slots_on_gpu = any(bool(a.get("slots_on_gpu")) for a in answers if isinstance(a, dict))

    async def places_in(self, tensors: Any, is_3d: bool) -> list[Any] | None:
        """What the workers say of an adapter's tensors; None: not all of them say."""
        answers = await self.call_workers("fanin_lora_places", tensors, is_3d)
        if answers and all(isinstance(answer, dict) for answer in answers):
            return answers
        if not self._mute:
            self._mute = True
            _log.warning(
                "fanin: not known which modules of this engine have LoRA: an adapter of"
                " another model is not noticed"
            )
        return None

    async def served(self, adapter: Adapter) -> list[dict[str, Any]]:
        """What each worker holds of the adapter; see :mod:`fanin.vllm.lora_held`. Raises the first
        error of a worker, StateError if vLLM has not been asked for the adapter."""
        if not adapter.requests:
            raise StateError.make(
                f"vLLM has not been asked for {adapter.name} yet",
                "send it a request, and ask again",
                key=adapter.name,
            )
        told = {"number": adapter.requests[-1].lora_int_id, "is_3d": adapter.is_3d}
        told |= {"tensors": adapter.facts.tensors, "config": dict(adapter.facts.config)}
        answers = await self.call_workers("fanin_served_adapter", told)
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            raise from_wire(failed[0])
        return answers

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Calls *method* of every worker of every engine; all answers."""
        # With data parallelism collective_rpc calls all engines and answers for the first one.
        core = getattr(self.client, "engine_core", None)
        parallel = getattr(self.config, "parallel_config", None)
        several = getattr(parallel, "data_parallel_size", 1) > 1
        if several and hasattr(core, "call_utility_all_async"):
            return await beside.call_all(core, method, args)
        return await beside.call_one(self.client, method, args)

    # ------------------------------------------------------------- retirement

    def unregister(self, adapter: Adapter) -> None:
        """See :class:`fanin.engine.retire.EngineLink`."""
        # By hand rather than by unload_lora_adapter(): no other request can come between.
        here = self.models.lora_requests.get(adapter.name)
        if here is not None and any(here is request for request in adapter.requests):
            del self.models.lora_requests[adapter.name]

    def register(self, adapter: Adapter) -> None:
        """See :class:`fanin.engine.retire.EngineLink`."""
        if adapter.requests:
            self.models.lora_requests.setdefault(adapter.name, adapter.requests[-1])

    def users(self, adapter: Adapter) -> int:
        """See :class:`fanin.engine.retire.EngineLink`."""
        processor = getattr(self.client, "output_processor", None)
        states = getattr(processor, "request_states", None) or {}
        mine = {id(request) for request in adapter.requests}
        requests = [getattr(state, "lora_request", None) for state in states.values()]
        return sum(id(request) in mine for request in requests)

    async def forget(self, lora_int_id: int) -> None:
        """See :class:`fanin.engine.retire.EngineLink`."""
        await self.client.remove_lora(lora_int_id)

    async def drop(self, adapter: Adapter) -> None:
        """See :class:`fanin.engine.retire.EngineLink`."""
        lease = adapter.lease
        if lease is None:
            told: list[Any] = [str(adapter.path), ""]
            if adapter.landing == "slot":
                told.append([request.lora_int_id for request in adapter.requests])
            await self.call_workers("fanin_drop_adapter", *told)
            return
        try:
            await in_thread(lambda: lease.release(delete=True))
        except RuntimeError:  # no thread can be had
            lease.postpone()
            raise


class State:
    """All of it. Used in the event loop's thread; made without blocking.

    config: of this engine. pool: for tests. Raises ConfigError, if the trainer is malformed.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        pool: ClientPool | None = None,
        counters: Metrics | None = None,
    ) -> None:
        self.config = config
        self.source: Source | None = None
        if config.trainer is not None:
            self.source = Source.of(config.trainer, config.server_name)
        self.engine: Engine | None = None
        self.adds: Adds | None = None
        self.places = Places(config.cache_dir)
        self.counters = metrics() if counters is None else counters
        self.service = PullService(
            self.places,
            ClientPool(path=config.path, credentials=config.credentials) if pool is None else pool,
            self.facts,
            Spares(config.spare_file),
            self.places_in,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.keeper = Keeper(config.keep, self.counters)
        self.lookout = Lookout(self.service, self.keeper, self.counters)
        self.flights = Flights(self.service, self.keeper, self.lookout, self.counters)
        self._attached = 0.0

    def facts(self) -> EngineFacts:
        """How the engine was started, as far as it is known. Any thread."""
        return EngineFacts() if self.engine is None else self.engine.facts()

    def places_in(self, tensors: Any, is_3d: bool, seconds: float) -> list[Any] | None:
        """See :meth:`Engine.places_in`. In any thread but the event loop's; waits so long.

        Raises HostError if the workers do not answer.
        """
        engine, loop = self.engine, self._loop
        if engine is None or loop is None:
            return None
        answers = asyncio.run_coroutine_threadsafe(engine.places_in(tensors, is_3d), loop)
        try:
            return answers.result(seconds)
        except Exception as error:
            answers.cancel()
            late = isinstance(error, FutureTimeoutError)
            raise HostError.make(
                "the engine's workers do not say which modules have LoRA: "
                + ("no answer in time" if late else f"{type(error).__name__}: {error}"),
                "see the engine's log, then ask again",
            ) from error

    def asked(self) -> float:
        """When the request that runs now asked for its adapter (time.monotonic).

        Those that asked before the engine was known did not say.
        """
        when = asked_at()
        return self._attached if when is None else when

    def resolves(self, adapter: Adapter) -> bool:
        """Whether a request for a name that vLLM does not know would be for *adapter*."""
        if not names_are_resolved() or os.environ.get("VLLM_SKIP_MODEL_NAME_VALIDATION"):
            return False
        name = parse(adapter.name)
        if name is None or self.config.prefix not in (None, name.prefix):
            return False
        how = self.config.dtype, self.config.trust_config
        return adapter.source == self.source and adapter.content == (name.run, name.step, *how)

    async def attach(self, models: Any) -> Engine:
        """Takes the engine behind *models* (OpenAIServingModels); again: does nothing.

        Raises StateError if another engine was attached.
        """
        if self.engine is not None:
            if self.engine.models is not models:
                raise StateError.make(
                    "two engines in one process cannot share this plugin", "start two processes"
                )
            await self.engine.probe()
            return self.engine
        engine = self.engine = Engine(models, models.engine_client, self.resolves)
        self._attached = time.monotonic()
        self._loop = asyncio.get_running_loop()
        keeper = self.keeper
        hook(models, keeper.unloading, keeper.unloaded, keeper.not_loaded)
        self.keeper.attach(engine)
        parallel = getattr(engine.config, "parallel_config", None)
        if parallel is not None and has_distant_workers(parallel):
            self.flights.use_workers(engine.call_workers)
            _log.info("fanin: workers may be on other hosts: each host pulls for itself")
        self._warn_of_small_cache(engine.facts())
        threading.Thread(target=self._sweep, name="fanin-sweep", daemon=True).start()
        await engine.probe()
        way = SlotWay(self._no_slots(engine))
        self.flights.use_slots(way, engine.call_workers)
        if not way.why:
            self.adds = Adds(models, keeper.in_slots, engine.call_workers)
        return engine

    def _no_slots(self, engine: Engine) -> str:
        """Why nothing goes straight into the engine's slots, "" if it does."""
        if self.config.landing == "directory":
            return "FANIN_LANDING is directory"
        if self.config.landing == "auto" and engine.slots_on_gpu:
            return "slots on a GPU: no whole engine was seen to run so; FANIN_LANDING=slot does it"
        return engine.no_slots

    def _warn_of_small_cache(self, facts: EngineFacts) -> None:
        size = facts.max_cpu_loras
        if facts.lora_enabled and size is not None and size < self.config.keep:
            _log.warning(
                "fanin: %d adapters of a run are kept, and the engine caches max_cpu_loras=%d:"
                " it will read adapters from disk again and again; start it with"
                " --max-cpu-loras %d or more (and as many for each further run)",
                self.config.keep,
                size,
                self.config.keep,
            )

    def _sweep(self) -> None:
        for path in self.places.sweep():
            _log.info("fanin: removed %s, which a process that is gone had left", path)

    def use_source(self, source: Source) -> None:
        """From now on names are resolved by the trainer at *source*."""
        self.source = source

    def close(self) -> None:
        """Cancels pulls and closes connections; adapters stay for the engine. Any thread."""
        self.service.close()


_state: State | None = None
_lock = threading.Lock()


def state() -> State:
    """This process' state, made from file and environment at the first call.

    Raises :class:`fanin.config.ConfigError`.
    """
    global _state
    with _lock:
        if _state is None:
            _state = State(inference_config(os.environ))
            atexit.register(_state.close)
        return _state
