# SPDX-License-Identifier: Apache-2.0
"""What the plugin knows in an API server: its configuration, its pulls, and the engine.

There is one :class:`State` a process, made when it is first needed; the LoRA resolver asks it. The
engine comes to it by the endpoint plugin, at start, or, if only the resolver is loaded, with the
first name that is resolved.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from http import HTTPStatus
from typing import Any

from fanin.config import ConfigError, InferenceConfig, inference_config
from fanin.engine.checks import EngineFacts
from fanin.engine.clients import ClientPool, Source
from fanin.engine.directories import Places
from fanin.engine.faults import says, status_of
from fanin.engine.metrics import Metrics, metrics
from fanin.engine.pulls import Adapter, PullService, Wanted
from fanin.engine.retire import Keeper
from fanin.engine.shared_pulls import SharedPulls
from fanin.engine.slots_way import SlotWay
from fanin.engine.spares import Spares
from fanin.engine.trainer_watch import TrainerWatch
from fanin.errors import ConnectionFailedError, FaninError, HostError, StateError
from fanin.names import parse
from fanin.vllm.models import Adds, Engine, Listener, asked_at
from fanin.vllm.patches import calling_models

RESOLVER_NAME = "fanin"

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
        self.watch = TrainerWatch(self.service, self.keeper, self.counters)
        self.pulls = SharedPulls(self.service, self.keeper, self.watch, self.counters)
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
        Listener(models, keeper.unloading, keeper.unloaded, keeper.not_loaded)
        self.keeper.attach(engine)
        parallel = getattr(engine.config, "parallel_config", None)
        if parallel is not None and has_distant_workers(parallel):
            self.pulls.use_workers(engine.call_workers)
            _log.info("fanin: workers may be on other hosts: each host pulls for itself")
        self._warn_of_small_cache(engine.facts())
        threading.Thread(target=self._sweep, name="fanin-sweep", daemon=True).start()
        await engine.probe()
        way = SlotWay(self._no_slots(engine))
        self.pulls.use_slots(way, engine.call_workers)
        if not way.why:
            Adds(models, keeper.in_slots, engine.call_workers)
        return engine

    def _no_slots(self, engine: Engine) -> str:
        """Why nothing goes straight into the engine's slots, "" if it does."""
        if self.config.landing == "directory":
            return "FANIN_LANDING is directory"
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


# ------------------------------------------------------------------ the LoRA resolver
# A request for ``<prefix>-run<run>-step<step>`` makes the engine pull it. vLLM asks it for model
# names that it does not know, if VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. A name stands for one step for
# ever: the resolver returns exactly that one or fails and says why. There is no name for "the
# newest": vLLM would never ask for it again.


# vLLM replaces it; it only has to be none that vLLM counts up to.
_PLACEHOLDER_ID = 1 << 30


def wanted_by_name(here: State, lora_name: str) -> Wanted | None:
    """What *lora_name* asks for; None if the name is not of our form or not our prefix.

    Does not block. Raises ConnectionFailedError if nobody has said where the trainer is.
    """
    name = parse(lora_name)
    if name is None or (here.config.prefix is not None and name.prefix != here.config.prefix):
        return None
    if here.source is None:
        raise ConnectionFailedError.make(
            f"adapter {lora_name}: this engine has not been told where the trainer is",
            "set FANIN_TRAINER, or POST /init_nixl_client with trainer_addresses",
        )
    return Wanted.by(here.config, here.source, lora_name, str(name.run), name.step, name.prefix)


def make_resolver() -> Any:
    """A vllm.lora.resolver.LoRAResolver. Raises ImportError without vLLM."""
    from vllm.exceptions import GracefulHTTPError
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver

    class FaninResolver(LoRAResolver):
        """Resolves one step's name; see the module."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            """The adapter of that name, pulled unless it is here; None: not a name of ours.

            Waits at most about FANIN_PULL_TIMEOUT without blocking the event loop; a caller
            that goes away leaves the pull running. Raises GracefulHTTPError with the status of
            :func:`fanin.engine.faults.status_of` and the reason.
            """
            if parse(lora_name) is None:
                return None
            try:
                return await self._resolve(base_model_name, lora_name, calling_models())
            except ConfigError as error:
                raise GracefulHTTPError(says(error), HTTPStatus.INTERNAL_SERVER_ERROR) from None
            except FaninError as error:
                raise GracefulHTTPError(says(error), HTTPStatus(status_of(error))) from None

        async def _resolve(
            self, base_model_name: str, lora_name: str, models: Any
        ) -> LoRARequest | None:
            here = state()
            wanted = wanted_by_name(here, lora_name)
            if wanted is None:
                return None
            if models is not None:
                await here.attach(models)
            adapter = await here.pulls.fetch(wanted, here.asked())
            try:
                here.service.warn_of_base_model(adapter, base_model_name)
                request = LoRARequest(
                    lora_name=lora_name,
                    lora_int_id=_PLACEHOLDER_ID,
                    lora_path=str(adapter.path),
                    is_3d_lora_weight=adapter.is_3d,
                )
                adapter.requests.append(request)
                adapter.suspended = False  # vLLM registers the name when this returns
                return request
            finally:
                adapter.pins -= 1

    return FaninResolver()
