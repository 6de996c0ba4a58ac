# SPDX-License-Identifier: Apache-2.0
"""What vLLM's list of models does not tell: who asked when, what was unloaded, what did not load.

The methods of it that matter are wrapped, on the one object that the API server has, and its
dictionary of adapters is one that keeps its word to requests that were let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

__all__ = ["Names", "asked_at", "hook"]

_asked: ContextVar[float | None] = ContextVar("fanin_asked", default=None)


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


def hook(
    models: Any,
    unloading: Callable[[str], None],
    unloaded: Callable[[str], None],
    not_loaded: Callable[[str], None],
) -> None:
    """Wraps ``resolve_lora``, ``load_lora_adapter`` and ``unload_lora_adapter`` of *models*
    (OpenAIServingModels), and makes its ``lora_requests`` :class:`Names`.

    Methods that this vLLM does not have are left out. Does not block.

    Args:
        models: vLLM's list of models.
        unloading: called with a name that a caller is about to take from the list.
        unloaded: called with a name that was in the list and is gone.
        not_loaded: called with a name that is not in the list when all who asked for it have their
            answer.
    """
    asking: Counter[str] = Counter()
    names = models.lora_requests = Names(models.lora_requests)
    resolve = getattr(models, "resolve_lora", None)
    if resolve is not None:

        async def resolve_lora(lora_name: str) -> Any:
            names.forget()
            token = _asked.set(time.monotonic())
            asking[lora_name] += 1
            try:
                answer = await resolve(lora_name)
                if answer is not None and names.get(lora_name) is answer:
                    names.let_in(answer)
                return answer
            finally:
                _asked.reset(token)
                asking[lora_name] -= 1
                # One who leaves the line says nothing of what is loaded for the others.
                if not asking[lora_name]:
                    del asking[lora_name]
                    if names.get(lora_name) is None:
                        not_loaded(lora_name)

        models.resolve_lora = resolve_lora

    load = getattr(models, "load_lora_adapter", None)
    if load is not None:

        async def load_lora_adapter(*arguments: Any, **options: Any) -> Any:
            names.forget()
            return await load(*arguments, **options)

        models.load_lora_adapter = load_lora_adapter

    unload = getattr(models, "unload_lora_adapter", None)
    if unload is not None:

        async def unload_lora_adapter(request: Any) -> Any:
            names.forget()
            name = request.lora_name
            unloading(name)
            answer = await unload(request)
            # A refusal is an object. Whether the name was there before does not matter: vLLM
            # waits for whoever loads it.
            if isinstance(answer, str) and names.get(name) is None:
                unloaded(name)
            return answer

        models.unload_lora_adapter = unload_lora_adapter
