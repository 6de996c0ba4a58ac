# SPDX-License-Identifier: Apache-2.0
"""A program: fanin's plugin in SGLang's real classes of one scheduler, without server and kernels.

What is real: the registry of hooks, the manager of updates, the model runner's updater, its
unpickler, and the scheduler's method that goes on after a pause. The model is a stand-in. Prints
one line of JSON for each thing that was asked.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from families import Layout
from fanin.sglang import LOADER, Request, guard
from fanin.sglang.request import encode
from sglang_families import rank_of
from sglang_model import StandIn


def say(what: str, answer: Any, scheduler: Any) -> None:
    line = {
        "what": what,
        "success": answer.success,
        "message": answer.message,
        "paused": scheduler._engine_paused,
    }
    print(json.dumps(line), flush=True)


def manager_of(model: Any, scheduler: Any) -> Any:
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils import MultiprocessingSerializer

    updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={LOADER: None},
        get_model=lambda: model,
        update_model_fields=lambda **_: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
    worker = SimpleNamespace(
        weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=updater))],
        deserialize_own_rank=lambda sent: MultiprocessingSerializer.deserialize(sent[0]),
    )
    return SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
        scheduler=scheduler,
    )


def main(addresses: list[str]) -> None:
    guard.register()
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    assert set(guard.HOOKS) <= HookRegistry._patched
    model = StandIn()
    scheduler = SimpleNamespace(
        _engine_paused=True,
        record_weight_version_change=lambda new_version: None,
        disaggregation_mode=None,
        _pause_started_at=None,
    )
    manager = manager_of(model, scheduler)

    def update(step: int) -> Any:
        payload = encode(Request(trainer=addresses, step=step, timeout=20))
        return manager.update_weights_from_tensor(
            io_struct.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[base64.b64decode(payload)],
                load_format=LOADER,
                flush_cache=False,
            )
        )

    def end() -> Any:
        return manager.end_weight_update(io_struct.EndWeightUpdateReqInput())

    def go_on() -> Any:
        asked = io_struct.ContinueGenerationReqInput(torch_empty_cache=False)
        Scheduler.continue_generation(scheduler, asked)
        return SimpleNamespace(success=True, message="")

    opened = manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput())
    say("begin", opened, scheduler)
    say("passed", update(0), scheduler)
    say("pull", update(1), scheduler)
    model.post_load_weights = lambda: 1 / 0
    say("torn", update(1), scheduler)
    say("end of torn", end(), scheduler)
    say("go on torn", go_on(), scheduler)
    del model.post_load_weights
    say("again", update(1), scheduler)
    say("end", end(), scheduler)
    say("go on", go_on(), scheduler)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with rank_of(Layout(1), 0):
        main(sys.argv[1:])
