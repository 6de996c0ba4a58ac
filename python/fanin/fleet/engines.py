# SPDX-License-Identifier: Apache-2.0
"""Which driver an engine needs.

What an engine answers is not believed where it can be looked up: after finish it must say the
version that it was given, and which step its workers hold.
"""

from __future__ import annotations

from .driver import Driver
from .engine_sglang import SGLang
from .engine_vllm import VLLM
from .wire import Wire

__all__ = ["driver_of"]

_DRIVERS: dict[str, type[Driver]] = {VLLM.kind: VLLM, SGLang.kind: SGLang}


def driver_of(kind: str, wire: Wire, deadline: float) -> Driver:
    """The driver of an engine of *kind*; "auto": asks the engine what it is. Blocks.

    Its answer need not last: an engine that is being started, or a proxy in front of it, may answer
    so. Raises what requests do, and the refusal of an engine that does not say.
    """
    if kind in _DRIVERS:
        return _DRIVERS[kind](wire)
    reply = wire.get("/model_info", "health", deadline)
    if reply.status == 404:  # vLLM has no such route
        return VLLM(wire)
    if reply.status != 200:
        raise wire.refusal(reply, "/model_info", "health", "look into the engine's log")
    body = reply.json()
    return (SGLang if isinstance(body, dict) and "model_path" in body else VLLM)(wire)
