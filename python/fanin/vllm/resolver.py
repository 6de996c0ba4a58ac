# SPDX-License-Identifier: Apache-2.0
"""The LoRA resolver: a request for ``<prefix>-run<run>-step<step>`` makes the engine pull it.

vLLM asks it for model names that it does not know, if ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. A
name stands for one step for ever: the resolver returns exactly that one or fails and says why.
There is no name for "the newest": vLLM would never ask for it again.
"""

from __future__ import annotations

import inspect
import logging
from http import HTTPStatus
from typing import Any

from fanin.config import ConfigError
from fanin.engine.faults import says, status_of
from fanin.engine.pulls import Wanted
from fanin.errors import ConnectionFailedError, FaninError
from fanin.names import parse
from fanin.vllm.state import State, state

__all__ = ["RESOLVER_NAME", "make_resolver", "wanted_by_name"]

RESOLVER_NAME = "fanin"

_log = logging.getLogger("vllm.fanin")

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
    return Wanted(
        name=lora_name,
        run=str(name.run),
        step=name.step,
        label=name.prefix,
        source=here.source,
        timeout=here.config.timeout,
        dtype=here.config.dtype,
        trust_config=here.config.trust_config,
        max_bytes=here.config.max_bytes,
        landing=here.config.landing,
    )


def calling_models(frame: Any) -> Any:
    """The OpenAIServingModels whose method is *frame*, or None.

    vLLM hands a resolver no engine. Without the endpoint plugin only the resolver's caller leads to
    the list of models. No adapter could ever be retired without that list.
    """
    caller = None if frame is None else frame.f_locals.get("self")
    if hasattr(caller, "lora_requests") and hasattr(caller, "engine_client"):
        return caller
    return None


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
            frame = inspect.currentframe()
            models = calling_models(None if frame is None else frame.f_back)
            del frame
            try:
                return await self._resolve(base_model_name, lora_name, models)
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
            number = 0 if here.adds is None else here.adds.taken()
            adapter = await here.flights.fetch(wanted, here.asked(), number=number)
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
