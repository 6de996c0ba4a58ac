# SPDX-License-Identifier: Apache-2.0
"""The plugin for vLLM: an adapter by name, and whole models, pulled from the trainer.

Two entry points, both named ``fanin`` so that ``VLLM_PLUGINS=fanin`` loads the two of them:

* ``vllm.general_plugins`` -> :func:`register`, run by vLLM in each of its processes: a LoRA
  resolver for names ``<prefix>-run<run>-step<step>``, the methods that workers on other
  hosts are called by, and the weight transfer backend ``fanin`` (:mod:`fanin.vllm.weights`);
* ``vllm.endpoint_plugins`` -> :func:`endpoint_plugin`, run in the API server: the routes
  ``/load_lora_adapter_nixl``, ``/init_nixl_client`` and ``/nixl/status``.

Importing this package imports neither vLLM nor libfanin.

What is configured: see :func:`fanin.config.inference_config`. Adapters lie in
``<cache_dir>/<world id>/<run>/<prefix>-step<step>``, a new directory for each step, and are
retired when ``keep`` newer ones of the run are there and no request needs them any more (see
:mod:`fanin.engine.retire`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

__all__ = ["endpoint_plugin", "register"]

# Below vLLM's logger, so that its handlers and its level show these lines.
_log = logging.getLogger("vllm.fanin")
logging.getLogger("fanin").getChild("engine").parent = _log


def register() -> None:
    """Registers the resolver, the workers' methods and the weight transfer backend in this process.

    Called by vLLM, in the API server, the engine core and each worker, maybe more than once in
    one process; a second call changes nothing. Does not block, touches no network and does not
    load libfanin. Raises ImportError if this vLLM has no LoRA resolvers.
    """
    from vllm.lora.resolver import LoRAResolverRegistry

    from fanin.vllm import patches
    from fanin.vllm.state import RESOLVER_NAME, make_resolver

    methods = patches.install()
    if RESOLVER_NAME not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(RESOLVER_NAME, make_resolver())
        _log.info(
            "fanin: LoRA resolver registered in process %d; workers' methods: %s",
            os.getpid(),
            ", ".join(methods) or "none (this vLLM has no vllm.v1 workers)",
        )
    _register_backend()


def _register_backend() -> None:
    """The backend of ``--weight-transfer-config``, where this vLLM has such engines; once."""
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        return
    names = ("WeightTransferEngineFactory", "weights", "Engine")
    trainers = ("WeightTransferTrainerFactory", "weights_trainer", "TrainerEngine")
    # By name: the module loads when an engine is made. A name that is there already raises
    # ValueError, and only register() gives this one.
    for registry, module, engine in (names, trainers):
        with contextlib.suppress(ValueError, AttributeError):
            getattr(factory, registry).register_engine("fanin", f"fanin.vllm.{module}", engine)


def endpoint_plugin() -> Any:
    """The object that vLLM attaches routes with; see :class:`fanin.vllm.routes.EndpointPlugin`.

    Does not block.
    """
    from fanin.vllm.routes import EndpointPlugin

    return EndpointPlugin()
