# SPDX-License-Identifier: Apache-2.0
"""A real vLLM that runs fp8, filled with what a trainer has quantized itself.

The judge is a vLLM that loads the same tensors from a file: equal tokens, and log probabilities
equal to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantized import BLOCK, CHANNEL, KERNEL, publishing, quantized, random_tensors, save
from weights_engine import Engine, Judge

STEPS = (1, 2, 3)
DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("block", ""), ("block", "requantizes"), ("channel", ""), ("online", "")],
)
def test_what_the_trainer_has_quantized(kind: str, kernel: str, tmp_path: Path) -> None:
    """online: the engine quantizes what is published in BF16."""
    config = {"block": BLOCK, "channel": CHANNEL, "online": None}[kind]
    options: dict[str, Any] = {"quantization": "fp8_per_block"} if kind == "online" else {}
    environment = {KERNEL: kernel}
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
