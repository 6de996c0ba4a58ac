#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_adapter.py DIRECTORY    writes an adapter as PEFT and safetensors do: mixed dtypes, a
module of another rank, odd sizes, and configuration fields that
nobody but PEFT knows.
"""
import json
import pathlib
import sys

import numpy
from safetensors.numpy import save_file

FILE = "adapter_model.safetensors"


def make(directory):
    rng = numpy.random.default_rng(20)
    tensors, config = {}, {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base-7b",
        "revision": None, "r": 4, "lora_alpha": 6.5, "lora_dropout": 0.05, "bias": "none",
        "target_modules": ["v_proj", "q_proj"], "rank_pattern": {"layers.1.self_attn.v_proj": 7},
        "alpha_pattern": {}, "use_rslora": True, "use_dora": False, "init_lora_weights": True,
        "fan_in_fan_out": False, "modules_to_save": None, "inference_mode": True,
        "layers_to_transform": None, "loftq_config": {}, "eva_config": None,
        "a_later_field": {"nested": [1, 2.5, "\u00e9", None, True]},
    }
    for layer in range(3):
        for name, rows in (("q_proj", 4), ("v_proj", 7 if layer == 1 else 4)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            dtype = (numpy.float32, numpy.float16)[layer % 2]
            tensors[f"{module}.lora_A.weight"] = rng.standard_normal((rows, 37)).astype(dtype)
            tensors[f"{module}.lora_B.weight"] = rng.standard_normal((53, rows)).astype(dtype)
    directory.mkdir()
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


if len(sys.argv) != 2:
    sys.exit(__doc__)
make(pathlib.Path(sys.argv[1]))
