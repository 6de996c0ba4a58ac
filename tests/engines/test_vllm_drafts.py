# SPDX-License-Identifier: Apache-2.0
"""A real vLLM that speculates with a draft model, which each sync keeps at the model's step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import fanin
import torch
from fanin.sync import Registry
from full_models import save_full_model
from safetensors.torch import load_file
from vllm_server import VllmServer

BACKEND = ("--weight-transfer-config", '{"backend": "fanin"}', "--dtype", "bfloat16")
PROMPT = [5, 9, 13, 17, 21]


def accepted(engine: VllmServer) -> tuple[float, float]:
    """Tokens that were drafted, and that were accepted, in an answer."""

    def counts() -> list[float]:
        lines = str(engine.ask("GET", "/metrics")).splitlines()
        names = [f"vllm:spec_decode_num_{what}_tokens_total" for what in ("draft", "accepted")]
        return [
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
            for name in names
        ]

    before = counts()
    engine.tokens("base", PROMPT, 40)
    drafted, took = (now - was for now, was in zip(counts(), before, strict=True))
    return drafted, took


def test_the_draft_has_the_step_of_the_model(tmp_path: Path) -> None:
    """A draft that is the model itself is right in every token; that of another step is not."""
    model = save_full_model(tmp_path / "model", "qwen3")
    tensors = load_file(model / "model.safetensors")
    spec = {"model": str(model), "num_speculative_tokens": 2, "method": "draft_model"}
    with (
        fanin.Server(world_id=os.urandom(16), rank=0, world_size=1) as server,
        VllmServer(
            model,
            tmp_path,
            *(*BACKEND, "--speculative-config", json.dumps(spec)),
            environment={"VLLM_SERVER_DEV_MODE": "1", "FANIN_ALLOW_TRAINERS": "any"},
            adapters=False,
        ) as engine,
    ):
        runs = ("full:0", "full:draft")
        for run in runs:
            server.put(run, [fanin.shard_of(name, one) for name, one in tensors.items()])
            server.commit(run, 1)
        engine.wait_ready()
        registries = {}
        for name, init in (("with", {"draft_run": "draft"}), ("without", {})):
            registries[name] = Registry(f"127.0.0.1:{server.port}", timeout=120, init=init)
            registries[name].add(engine.url)
        step = 1
        for name in ("without", "with"):
            step += 1
            for run in runs:
                server.begin_update(run)
            for tensor in tensors.values():
                if tensor.dim() > 1:
                    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(step))
                    tensor.add_((noise * 0.2).to(tensor.dtype))
            for run in runs:
                server.commit(run, step)
            (result,) = registries[name].sync(step).results.values()
            assert ("draft_run" in result.note) is (name == "without")
            drafted, took = accepted(engine)
            assert drafted > 0 and (took == drafted) is (name == "with")
