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
    """The driver of an engine of *kind*; "auto": asks the engine what it is. Blocks."""
    if kind in _DRIVERS:
        return _DRIVERS[kind](wire)
    reply = wire.get("/model_info", "health", deadline)
    body = reply.json()
    if reply.status == 200 and isinstance(body, dict) and "model_path" in body:
        return SGLang(wire)
    return VLLM(wire)
