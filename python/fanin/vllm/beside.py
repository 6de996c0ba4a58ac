# SPDX-License-Identifier: Apache-2.0
"""Calls of the workers for which vLLM's core does not wait.

``collective_rpc`` waits for the workers' answers between two steps, and the requests that run wait
with it. A call from here goes into the workers' queue ahead of the next step, which the core begins
to schedule meanwhile; its answer is taken together with the step's. So methods that are called this
way have to be short all the same.

Contact with vLLM's core (``vllm.v1.engine``), for the versions that
:data:`fanin.vllm.reload.SUPPORTED` has; others are called by ``collective_rpc``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from fanin.errors import FaninError

__all__ = ["call_all", "call_one", "give", "install"]

_NAME = "fanin_call"


class _Answers:
    """Those that one core has not taken yet."""

    def __init__(self) -> None:
        self._left: set[Any] = set()

    def add(self, core: Any, future: Any) -> None:
        """*future* is taken when the core has nothing to do, if no step takes it before."""
        self._left.add(future)
        future.add_done_callback(self._left.discard)
        if self.take not in core._idle_state_callbacks:
            core._idle_state_callbacks.append(self.take)

    def take(self, core: Any) -> None:
        for future in list(self._left):
            with contextlib.suppress(Exception):  # the caller gets it
                future.result()


def _call(core: Any, method: str, arguments: Sequence[Any]) -> Any:
    """All workers' answers, or a future of them, for which vLLM lets the caller wait."""
    executor = core.model_executor
    # Only where answers are taken in the order of calls does a step's bring those before it.
    if not hasattr(executor, "futures_queue") or not core.scheduler.has_requests():
        return core.collective_rpc(method, None, tuple(arguments))
    future = executor.collective_rpc(method, args=tuple(arguments), non_block=True)
    answers = core.__dict__.setdefault("fanin_answers", _Answers())
    answers.add(core, future)
    return future


def give(core_class: Any) -> None:
    """Gives the method to a class of cores; again: does nothing new."""

    def fanin_call(self: Any, method: str, arguments: Any) -> Any:
        return _call(self, method, arguments)

    setattr(core_class, _NAME, fanin_call)


def install() -> bool:
    """Gives it to vLLM's cores; whether this vLLM is one whose cores are known."""
    global _known
    try:
        from fanin.vllm import reload

        reload.require_version()
        from vllm.v1.engine.core import EngineCore
    except (FaninError, ImportError):
        return False
    give(EngineCore)
    _known = True
    return True


# ------------------------------------------------------------------ in the API server's process

_known = False  # the core's process has the same vLLM and the same plugins


async def call_one(client: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Calls *method* of the workers of *client*'s engine (an EngineClient); their answers."""
    call = getattr(getattr(client, "engine_core", None), "call_utility_async", None)
    if call is None or not _known:
        return list(await client.collective_rpc(method, args=arguments))
    return list(await call(_NAME, method, arguments))


async def call_all(core: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """As :func:`call_one`, of all engines that *core*, a client of several, has."""
    call: tuple[Any, ...] = (_NAME, method, arguments)
    if not _known:
        call = ("collective_rpc", method, None, arguments, None)
    answers = await core.call_utility_all_async(*call)
    return [answer for of_engine in answers for answer in of_engine]
