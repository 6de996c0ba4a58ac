# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine and its list of models, as the API server has them.

What the list does not tell is heard here: who asked when, what was unloaded, what did not load. An
adapter that lies in the layout of the workers' slots is added here: vLLM numbers an adapter, and
calls ``add_lora`` of all workers. Of their answers it reads those up to the first failure, and
takes what it has left for answers to its next call; so such adapters are added by a call that fails
nowhere.

Workers are called without that the core waits for them. ``collective_rpc`` waits for the workers'
answers between two steps, and the requests that run wait with it. A call from here goes into the
workers' queue ahead of the next step, which the core begins to schedule meanwhile; its answer is
taken together with the step's. So methods that are called this way have to be short all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

from fanin.engine.checks import EngineFacts
from fanin.engine.faults import from_wire
from fanin.engine.pulls import Adapter
from fanin.engine.threads import in_thread
from fanin.errors import FaninError, StateError
from fanin.vllm import patches

_log = logging.getLogger("vllm.fanin")

_asked: ContextVar[float | None] = ContextVar("fanin_asked", default=None)

Call: TypeAlias = Callable[..., Awaitable[list[Any]]]


# ------------------------------------------------------------------------ the list of models


def asked_at() -> float | None:
    """When the request that runs now asked for its adapter (time.monotonic); None: unknown.

    vLLM lets the requests for one name in one after the other, so that may be long ago.
    """
    return _asked.get()


class Names(dict[str, Any]):
    """vLLM's adapters by name, in which a request finds the one that it was let in for.

    vLLM looks a name up twice: when it lets a request in, and, having prepared the prompt, when it
    runs it. A name that is taken away between the two would be a 404 without a reason. So the task
    that was told that the name is there gets that adapter once more. Until then the task counts as
    a user of the adapter, and no other task sees the name. Used in the event loop's thread.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names)
        self._let_in: dict[asyncio.Task[Any], Any] = {}

    def let_in(self, request: Any) -> None:
        """The task that runs now may use *request*, a LoRARequest, once."""
        task = _current_task()
        if task is not None:
            if task not in self._let_in:
                task.add_done_callback(lambda done: self._let_in.pop(done, None))
            self._let_in[task] = request

    def forget(self) -> None:
        """The task that runs now is let in for nothing: it asks what is there."""
        task = _current_task()
        if task is not None:
            self._let_in.pop(task, None)

    def __contains__(self, name: object) -> bool:
        there = super().get(name)  # type: ignore[call-overload]
        if there is not None:
            self.let_in(there)
            return True
        task = _current_task()
        known = None if task is None else self._let_in.get(task)
        return known is not None and known.lora_name == name

    def __getitem__(self, name: str) -> Any:
        task = _current_task()
        known = None if task is None else self._let_in.pop(task, None)
        there = super().get(name)
        if there is None and known is not None and known.lora_name == name:
            return known
        return super().__getitem__(name)


def _current_task() -> asyncio.Task[Any] | None:
    with contextlib.suppress(RuntimeError):  # no loop runs in this thread
        return asyncio.current_task()
    return None


class Listener:
    """Who asked one list of models (OpenAIServingModels) when, what left it and what did not load.

    Args:
        models: vLLM's list of models. Its ``lora_requests`` becomes :class:`Names`.
        unloading: called with a name that a caller is about to take from the list.
        unloaded: called with a name that was in the list and is gone.
        not_loaded: called with a name that is not in the list when all who asked for it have their
            answer.
    """

    def __init__(
        self,
        models: Any,
        unloading: Callable[[str], None],
        unloaded: Callable[[str], None],
        not_loaded: Callable[[str], None],
    ) -> None:
        self.names = Names(models.lora_requests)
        self._asking: Counter[str] = Counter()
        self._unloading, self._unloaded, self._not_loaded = unloading, unloaded, not_loaded
        patches.put(models, "OpenAIServingModels", self, must=False)

    async def resolve(self, original: Any, lora_name: str) -> Any:
        self.names.forget()
        token = _asked.set(time.monotonic())
        self._asking[lora_name] += 1
        try:
            answer = await original(lora_name)
            if answer is not None and self.names.get(lora_name) is answer:
                self.names.let_in(answer)
            return answer
        finally:
            _asked.reset(token)
            self._asking[lora_name] -= 1
            # One who leaves the line says nothing of what is loaded for the others.
            if not self._asking[lora_name]:
                del self._asking[lora_name]
                if self.names.get(lora_name) is None:
                    self._not_loaded(lora_name)

    async def load(self, original: Any, *arguments: Any, **options: Any) -> Any:
        self.names.forget()
        return await original(*arguments, **options)

    async def unload(self, original: Any, request: Any) -> Any:
        self.names.forget()
        name = request.lora_name
        self._unloading(name)
        answer = await original(request)
        # A refusal is an object. Whether the name was there before does not matter: vLLM waits
        # for whoever loads it.
        if isinstance(answer, str) and self.names.get(name) is None:
            self._unloaded(name)
        return answer


# --------------------------------------------------------------- adapters that lie in slots


class Adds:
    """vLLM's ``add_lora`` for one engine. Used in the event loop's thread.

    find: the adapter that is at a path in the slots' layout, or None. call: a method of all
    workers.
    """

    def __init__(self, models: Any, find: Callable[[str], Adapter | None], call: Call) -> None:
        self._find, self._call = find, call
        self._client = models.engine_client
        patches.put(self._client, "EngineClient", self, must=False)

    async def add_lora(self, original: Any, request: Any) -> bool:
        """As vLLM's *original*. Raises FaninError if a worker has not added it: then none has."""
        adapter = self._find(request.lora_path)
        if adapter is None:
            return bool(await original(request))
        number = int(request.lora_int_id)
        wanted = {"adapter": request.lora_name, "number": number, "path": request.lora_path}
        answers = await self._call("fanin_add_lora", {**wanted, "is_3d": adapter.is_3d})
        failed = [answer["error"] for answer in answers if answer["error"] is not None]
        if failed:
            await self._client.remove_lora(number)
            error: FaninError = from_wire(failed[0])
            raise error
        return True


# ------------------------------------------------------- calls for which no core waits


async def call_one(client: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Calls *method* of the workers of *client*'s engine (an EngineClient); their answers."""
    call = getattr(getattr(client, "engine_core", None), "call_utility_async", None)
    if call is None or not patches.installed():
        return list(await client.collective_rpc(method, args=arguments))
    return list(await call("fanin_call", method, arguments))


async def call_all(core: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """As :func:`call_one`, of all engines that *core*, a client of several, has."""
    call: tuple[Any, ...] = ("fanin_call", method, arguments)
    if not patches.installed():
        call = ("collective_rpc", method, None, arguments, None)
    answers = await core.call_utility_all_async(*call)
    return [answer for of_engine in answers for answer in of_engine]


# ---------------------------------------------------------------------------- the engine


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
        self._probe: asyncio.Task[None] | None = None
        self._mute = False

    # ------------------------------------------------------------------ facts

    def facts(self) -> EngineFacts:
        """How it was started. Any thread."""
        if self.config is None:
            return EngineFacts()
        return EngineFacts.of(getattr(self.config, "lora_config", None), self.fused_model)

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
        """What each worker holds of the adapter; see :func:`fanin.vllm.slots.held`. Raises the
        first error of a worker, StateError if vLLM has not been asked for the adapter."""
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
            return await call_all(core, method, args)
        return await call_one(self.client, method, args)

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
