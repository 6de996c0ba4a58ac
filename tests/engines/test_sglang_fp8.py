# SPDX-License-Identifier: Apache-2.0
"""A real SGLang in block fp8, filled with what fanin quantizes of a trainer in BF16.

The judge is an SGLang that loads the same tensors from files: equal tokens, log probabilities and
checksums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fanin
from fanin.sync import Registry
from quantized import random_tensors, save, whole_in_fp8
from safetensors.torch import load_file
from sglang_server import SGLangServer, needs_sglang, plugin_of
from worlds import World

pytestmark = needs_sglang

PROMPTS = ([5, 9, 13, 17, 21], [200, 3, 77])
COUNT = 8
STEPS = 20


def test_twenty_steps_of_adamw(tmp_path: Path) -> None:
    """The engine begins without an fp8 checkpoint, with the override that the run tells. The judge
    loads what PyTorch gathers of the FSDP2 ranks, quantized by NumPy alone."""
    plain = save(tmp_path / "plain", random_tensors(), None)
    paths = (plugin_of(tmp_path, "sglang_block_fp8"),)
    seen: list[Any] = []
    with World(3, {}, tmp_path / "ranks", "quantize_ranks.py") as ranks:
        ranks.expect("ready")
        (answer, *_) = ranks.do("load", model=str(plain), quantize="fp8")
        with fanin.Client(answer["addresses"]) as client:
            how = json.loads(client.metadata("full:0")["quantization"])
        override = json.dumps({"quantization_config": how})
        arguments = ("--load-format", "dummy", "--json-model-override-args", override)
        with SGLangServer(plain, tmp_path, *arguments, paths=paths) as engine:
            registry = Registry(answer["addresses"], timeout=120)
            registry.add(engine.wait_ready().url)
            for step in range(1, STEPS + 1):
                ranks.do("train", number=step, file=str(tmp_path / f"{step}.safetensors"))
                (entry,) = registry.sync(step).results.values()
                assert entry.step == step and "load_weights" not in entry.how, entry
                seen.append(engine.seen(PROMPTS, COUNT))
        ranks.tell("exit")
        assert ranks.wait() == [0, 0, 0]
    assert len({str(tokens) for tokens, _ in seen}) == STEPS

    files = []
    for step in range(1, STEPS + 1):
        whole = whole_in_fp8(load_file(tmp_path / f"{step}.safetensors"), end="_scale_inv")
        files.append(save(tmp_path / str(step), whole, how))
    with SGLangServer(files[-1], tmp_path / "ranks", paths=paths) as judge:
        assert judge.wait_ready().seen(PROMPTS, COUNT) == seen[-1]
        for file, found in zip(files[:-1], seen[:-1], strict=True):
            assert judge.post("/update_weights_from_disk", model_path=str(file))["success"]
            assert judge.seen(PROMPTS, COUNT) == found, file
