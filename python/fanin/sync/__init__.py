# SPDX-License-Identifier: Apache-2.0
"""One call for a fleet: a step of a trainer's whole model on every engine.

::

    registry = Registry("/shared/run")                   # where the trainer wrote nixl_info.json
    registry.add("http://10.0.0.7:8000")                 # vLLM or SGLang; it is asked which
    registry.add("http://10.0.0.8:8000", group="eval")
    registry.sync(120)                                   # pause, update, resume: all at once

Nothing is sent here: every engine's workers pull from the trainer's ranks. The same as HTTP routes:
:class:`Service`, :class:`SyncServer`, ``python -m fanin.sync``; called by :class:`SyncClient`.
:class:`TransportBackend` is for code that hands tensors to a transport bucket by bucket. The code
is in ``fanin.fleet``.
"""

from __future__ import annotations

from fanin.fleet.client import SyncClient
from fanin.fleet.endpoints import Endpoint, EndpointResult, SyncError, SyncResult
from fanin.fleet.registry import Registry
from fanin.fleet.service import Service, SyncServer, asgi_app
from fanin.fleet.steps import wait_for_step
from fanin.fleet.transport import TransportBackend

__all__ = [
    "Endpoint",
    "EndpointResult",
    "Registry",
    "Service",
    "SyncClient",
    "SyncError",
    "SyncResult",
    "SyncServer",
    "TransportBackend",
    "asgi_app",
    "wait_for_step",
]
