# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's side: every engine of a pool gets the same step of an adapter.

::

    pool = EnginePool(["http://10.0.0.7:8000", "http://10.0.0.8:8000"], lora_alpha=32.0)
    result = pool.update_weights("/shared/run", "policy", step=120)
    # ask the engines for model=result.lora_name from now on

Steps may pass while engines pull: a trainer that serves its parameters by reference has only the
newest. When an engine says that a step is superseded, this module asks the trainer's ranks which
step all of them hold, and posts that one, under its own name, to all engines. An engine never
decides what is newest, so two engines never serve different steps under one name. The code is in
``fanin.fleet``.
"""

from __future__ import annotations

from fanin.fleet.pool import EngineFailure, EnginePool, PoolError, UpdateResult
from fanin.fleet.steps import newest_step

__all__ = ["EngineFailure", "EnginePool", "PoolError", "UpdateResult", "newest_step"]
