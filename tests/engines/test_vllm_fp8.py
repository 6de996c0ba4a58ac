# SPDX-License-Identifier: Apache-2.0
"""A real vLLM that runs fp8, filled with what a trainer has quantized itself, or fanin of it.

The judge is a vLLM that loads the same tensors from a file: equal tokens, and log probabilities
equal to the last bit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fanin
import pytest
from full_models import random_model, save_full_model
from full_trainer import FullTrainer
from quantized import (
    BLOCK,
    CHANNEL,
    FIELDS,
    publishing,
    quantized,
    random_tensors,
    save,
    whole_in_fp8,
)
from safetensors.torch import load_file
from vllm_server import TREE, HttpServer, VllmServer, free_ports, plugin_path, save_tokenizer
from weights_engine import COUNT, FP8_KERNEL, PROMPTS, Engine, Judge
from worlds import World

STEPS = (1, 2, 3)
TRAINED, SEEN = 20, 5
"""Steps that are trained, and every which is compared."""
DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("block", ""), ("block", "requantizes"), ("channel", ""), ("online", "")],
)
def test_what_the_trainer_has_quantized(kind: str, kernel: str, tmp_path: Path) -> None:
    """online: the engine quantizes what is published in BF16."""
    config = {"block": BLOCK, "channel": CHANNEL, "online": None}[kind]
    options: dict[str, Any] = {"quantization": "fp8_per_block"} if kind == "online" else {}
    environment = {FP8_KERNEL: kernel}
    states = [random_tensors(seed=step) for step in STEPS]
    if config is not None:
        states = [quantized(state, config) for state in states]
    files = [
        save(tmp_path / str(step), state, config) for step, state in zip(STEPS, states, strict=True)
    ]
    with (
        publishing(states[0], config) as (server, holder),
        Engine(files[2], tmp_path / "engine", environment=environment, **options) as engine,
    ):
        assert not engine.wait_ready().init(server.addresses)
        outputs = []
        for step, state in zip(STEPS, states, strict=True):
            if step > 1:
                with server.updating(step, digests=True):
                    holder.set(state)
            if step == 3:  # read ahead
                engine.good("start_weight_update")
                engine.good("update_weights", {"update_info": {"step": 3, "prefetch": True}})
                engine.good("update_weights", {"update_info": {"step": 3}})
                engine.good("finish_weight_update", "step-3")
            else:
                engine.pull(step)
            outputs.append(engine.output())
        report = engine.check(3)
        assert "error" not in report and report["unseen"] == [], report
        assert engine.output() == outputs[2]
        served = engine.served(server.addresses)
        assert "error" not in served and served["tensors"] == len(states[0]), served
        scale = "weight_scale" if kind == "channel" else "weight_scale_inv"
        changed = f"{DOWN}.{'weight' if kernel else scale}"
        engine.scribble(changed)
        assert changed in engine.check(3, poison=False)["error"]
    with Judge(tmp_path / "judge", environment=environment) as judge:
        judge.wait_ready()
        assert outputs == [judge.output_of(file, **options) for file in files]
    assert outputs[0] != outputs[1] != outputs[2]


@pytest.mark.parametrize("quantize", ["fp8", {"quant_method": "compressed-tensors"}], ids=str)
def test_an_engine_without_an_fp8_checkpoint(quantize: Any, tmp_path: Path) -> None:
    """FSDP2 ranks quantize what AdamW makes; vLLM is told how by the trainer, and begins with
    random values. Each step is also pulled into a directory, which the judge loads."""
    model = save_full_model(tmp_path / "model", "qwen3", **FIELDS)
    environment = {FP8_KERNEL: ""}
    pulled, outputs = [], []
    trainer = {"world_size": 2, "digests": True, "server": {"quantize": quantize}}
    with FullTrainer(model, tmp_path / "run", **trainer) as one:
        with fanin.Client(one.wait_ready().addresses) as client:
            told = json.loads(client.metadata("full:0")["quantization"])
        options = {"load_format": "dummy", "hf_overrides": {"quantization_config": told}}
        with Engine(model, tmp_path / "engine", environment=environment, **options) as engine:
            assert not engine.wait_ready().init(str(one.info))
            for _ in STEPS:
                step = int(one.step()["step"])
                engine.pull(step)
                outputs.append(engine.output())
                pulled.append(tmp_path / f"step-{step}")
                command = [os.environ["NIXL_FETCH"], "pull", str(one.info), "full:0"]
                subprocess.run([*command, str(pulled[-1])], check=True, timeout=60)
            report = engine.served(one.addresses)
            assert "error" not in report and report["unseen"] == [], report
            report = engine.check(step)
            assert "error" not in report and report["unseen"] == [], report
    with Judge(tmp_path / "judge", environment=environment) as judge:
        judge.wait_ready()
        for directory in pulled:
            save_tokenizer(directory)
        assert outputs == [judge.output_of(directory) for directory in pulled]
    assert outputs[0] != outputs[1] != outputs[2]


PAGE = TREE / "docs" / "how-to" / "fp8.md"


def test_the_page_of_fp8_engines(tmp_path: Path) -> None:
    """Its commands, in order. By rows, since vLLM's build for CPUs has a kernel of its own then."""
    port = free_ports()
    rows = '{"quant_method": "compressed-tensors"}'
    page = PAGE.read_text().replace(
        'base_port=6000, quantize="fp8"', f"base_port=0, quantize={rows}"
    )
    page = page.replace("/shared/run", str(tmp_path)).replace(":8000", f":{port}")
    # The package of that build has no name under which the command finds itself.
    serving = f"python -m vllm.entrypoints.openai.api_server --model MODEL --port {port}"
    page = page.replace("vllm serve MODEL", f"{serving} --max-model-len 128 --enforce-eager")
    pieces = re.findall(r"^```(?:sh|python)\n(.*?)^```", page, re.M | re.S)
    publish, serve, sync, pull = pieces
    save_full_model(tmp_path / "MODEL", "qwen3", **FIELDS)
    tools = [Path(sys.executable).parent, Path(os.environ["NIXL_FETCH"]).parent]
    path = [*plugin_path(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {
        "PATH": os.pathsep.join([*map(str, tools), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    scope: dict[str, Any] = {"model": random_model("qwen3", seed=2, **FIELDS)}
    exec(compile(publish, PAGE, "exec"), scope)
    with scope["server"]:
        with HttpServer("vllm", ["bash", "-ec", serve], variables, tmp_path, port) as engine:
            engine.wait_ready(480.0)
            body = VllmServer.completion("MODEL", list(PROMPTS[0]), COUNT)
            assert engine.request("POST", "/v1/completions", body)[0] == 503
            exec(compile(sync, PAGE, "exec"), scope)
            answer = engine.ask("POST", "/v1/completions", body)
        subprocess.run(["bash", "-ec", pull], env=variables, cwd=tmp_path, check=True, timeout=60)
    with Judge(tmp_path / "judge") as judge:
        tokens, _ = judge.wait_ready().output_of(tmp_path / "model-fp8")[0]
        assert answer["choices"][0]["token_ids"] == tokens


@pytest.mark.parametrize("kind", ["channel", "block", "powers"])
def test_what_fanin_quantizes_of_a_trainer_in_bf16(kind: str, tmp_path: Path) -> None:
    """FSDP2 ranks under AdamW; the judge loads the gathered whole, quantized by NumPy alone."""
    config = (
        CHANNEL
        if kind == "channel"
        else BLOCK | ({"scale_fmt": "ue8m0"} if kind != "block" else {})
    )
    rule: dict[str, Any] = {"block": None} if kind == "channel" else {"powers": kind == "powers"}
    rule |= {"end": "_scale" if kind == "channel" else "_scale_inv"}
    plain = save(tmp_path / "plain", random_tensors(), None)
    start = save(
        tmp_path / "0", whole_in_fp8(load_file(plain / "model.safetensors"), **rule), config
    )
    environment = {FP8_KERNEL: ""}
    files, outputs = [], []
    with World(3, {}, tmp_path / "ranks", "quantize_ranks.py") as ranks:
        ranks.expect("ready")
        options = {"quantize": config, "snapshot": kind == "powers"}
        (answer, *_) = ranks.do("load", model=str(plain), **options)
        with Engine(start, tmp_path / "engine", environment=environment) as engine:
            assert not engine.wait_ready().init(answer["addresses"])
            for step in range(1, TRAINED + 1):
                file = tmp_path / f"{step}.safetensors" if step % SEEN == 0 else ""
                ranks.do("train", number=step, file=str(file))
                engine.pull(step)
                if file:
                    whole = whole_in_fp8(load_file(file), **rule)
                    files.append(save(tmp_path / str(step), whole, config))
                    outputs.append(engine.output())
            report = engine.check(TRAINED)
            assert "error" not in report and report["unseen"] == [], report
        ranks.tell("exit")
        assert ranks.wait() == [0, 0, 0]
    with Judge(tmp_path / "judge", environment=environment) as judge:
        judge.wait_ready()
        assert outputs == [judge.output_of(file) for file in files]
    assert all(outputs[at] != outputs[at + 1] for at in range(len(outputs) - 1))
