# SPDX-License-Identifier: Apache-2.0
"""What vLLM's list of models does not tell: who asked when, what was unloaded, what did not load.

The two methods of it that matter are wrapped, on the one object that the API server has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

__all__ = ["asked_at", "hook"]

_asked: ContextVar[float | None] = ContextVar("fanin_asked", default=None)


def asked_at() -> float | None:
    """When the request that runs now asked for its adapter (time.monotonic); None: unknown.

    vLLM lets the requests for one name in one after the other, so that may be long ago.
    """
    return _asked.get()


def hook(models: Any, unloaded: Callable[[str], None], not_loaded: Callable[[str], None]) -> None:
    """Wraps ``resolve_lora`` and ``unload_lora_adapter`` of *models* (OpenAIServingModels).

    unloaded: called with the name of an adapter that somebody has taken from the list.
    not_loaded: with a name that was asked for and is not in the list afterwards. Methods that this
    vLLM does not have are left out. Does not block.
    """
    resolve = getattr(models, "resolve_lora", None)
    if resolve is not None:

        async def resolve_lora(lora_name: str) -> Any:
            token = _asked.set(time.monotonic())
            try:
                return await resolve(lora_name)
            finally:
                _asked.reset(token)
                if lora_name not in models.lora_requests:
                    not_loaded(lora_name)

        models.resolve_lora = resolve_lora

    unload = getattr(models, "unload_lora_adapter", None)
    if unload is not None:

        async def unload_lora_adapter(request: Any) -> Any:
            name = request.lora_name
            there = name in models.lora_requests
            answer = await unload(request)
            if there and name not in models.lora_requests:
                unloaded(name)
            return answer

        models.unload_lora_adapter = unload_lora_adapter
