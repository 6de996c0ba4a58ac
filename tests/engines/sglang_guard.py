# SPDX-License-Identifier: Apache-2.0
"""A program: fanin's plugin in SGLang's real classes of one scheduler, without server and kernels.

What is real: the registry of hooks, the manager of updates, the model runner's updater, its
unpickler, and the scheduler's method that goes on after a pause. The model is a stand-in. Adapters
are loaded by the real LoRA manager for a real model's layers, which none of its kernels wraps.
Prints one line of JSON for each thing that was asked.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from families import Layout
from fanin.sglang import LOADER, Request, guard
from fanin.sglang.request import encode
from safetensors.torch import save_file
from sglang_families import MODULES, configuration, rank_of
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


def lora_manager() -> Any:
    """Of one of two ranks of a Qwen3, as SGLang has one once the server is up."""
    import importlib

    from sglang.srt.lora.lora_manager import LoRAManager

    made = importlib.import_module(f"sglang.srt.models.{MODULES['qwen3']}")
    model = made.Qwen3ForCausalLM(configuration("qwen3"))
    manager = object.__new__(LoRAManager)
    manager.target_modules = {"qkv_proj", "gate_up_proj", "down_proj"}
    manager.base_model, manager.base_hf_config = model, model.config
    manager.device, manager.loras, manager.lora_refs = torch.device("cpu"), {}, {}
    manager.lora_modules = [{}, {}]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in manager.target_modules:
            layer = int(name.split(".layers.")[1].split(".")[0])
            manager.lora_modules[layer][name] = SimpleNamespace(base_layer=module)
    return manager


def load_adapters() -> None:
    """One that fits, which then fails for SGLang's own reasons here, and some that do not."""
    from sglang.srt.lora.lora_registry import LoRARef

    manager = lora_manager()
    config = manager.base_model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    cases = {
        "fits": ("layers.1.self_attn.k_proj", hidden, keys),
        "fits in a row": ("layers.0.mlp.down_proj", inner, hidden),
        "layer": ("layers.98.self_attn.k_proj", hidden, keys),
        "unwrapped": ("layers.0.self_attn.o_proj", hidden, hidden),
        "narrower": ("layers.0.mlp.gate_proj", hidden, inner // 2),
        "wider": ("layers.0.mlp.down_proj", 2 * inner, hidden),
    }
    for what, (module, into, out) in cases.items():
        with tempfile.TemporaryDirectory() as name:
            full = f"base_model.model.model.{module}"
            tensors = {f"{full}.lora_A.weight": torch.ones(8, into)}
            tensors[f"{full}.lora_B.weight"] = torch.ones(out, 8)
            save_file(tensors, Path(name) / "adapter_model.safetensors")
            (Path(name) / "fanin.json").write_text("{}")
            answer = manager.load_lora_adapter(LoRARef(lora_name="a", lora_path=name))
        told = SimpleNamespace(success=answer.success, message=answer.error_message)
        say(f"adapter: {what}", told, SimpleNamespace(_engine_paused=False))


def main(addresses: list[str]) -> None:
    guard.register()
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
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

    def ask(rid: str) -> Any:
        """success: the scheduler's own method was called."""
        told: list[str] = []
        scheduler.send_abort_output = lambda abort, _: told.append(abort.finished_reason["message"])
        try:
            Scheduler._handle_generate_request(scheduler, SimpleNamespace(rid=rid), None)
        except AttributeError:  # of SGLang's, which has no scheduler
            return SimpleNamespace(success=True, message="")
        return SimpleNamespace(success=False, message=told[0])

    say("asked first", ask("1"), scheduler)
    say("health", ask(f"{HEALTH_CHECK_RID_PREFIX}_1"), scheduler)
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
    say("asked within", ask("2"), scheduler)
    say("end", end(), scheduler)
    say("asked at last", ask("3"), scheduler)
    say("go on", go_on(), scheduler)
    with rank_of(Layout(2), 1):
        load_adapters()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with rank_of(Layout(1), 0):
        main(sys.argv[1:])
