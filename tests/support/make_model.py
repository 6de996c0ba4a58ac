#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_model.py DIRECTORY FILES    writes a model as Transformers and safetensors do: so many files
and their index (1: one file, no index), odd sizes, several dtypes, config.json.

make_model.py --flip DIRECTORY NAME    inverts the last byte of that tensor.
"""
import json
import pathlib
import sys

import numpy
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"


def tensors():
    rng = numpy.random.default_rng(21)
    made = {"model.embed_tokens.weight": rng.standard_normal((101, 24)).astype(numpy.float16)}
    for layer in range(12):
        place = f"model.layers.{layer}"
        dtype = (numpy.float32, numpy.float16)[layer % 2]
        made[f"{place}.self_attn.q_proj.weight"] = rng.standard_normal((37, 24)).astype(dtype)
        made[f"{place}.mlp.experts.gate_up"] = rng.standard_normal((3, 7, 5)).astype(dtype)
        made[f"{place}.input_layernorm.weight"] = rng.standard_normal(24).astype(numpy.float32)
        made[f"{place}.steps"] = numpy.array(layer, numpy.int64)
    made["model.empty"] = numpy.zeros((0, 8), numpy.float32)
    made["lm_head.weight"] = rng.standard_normal((101, 24)).astype(numpy.float16)
    return made


def make(directory, count):
    made = tensors()
    directory.mkdir()
    config = {"model_type": "made", "rms_norm_eps": 1e-06, "layers": 12, "name": "\u00e9"}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    names = list(made)
    files = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        here = names[number * len(names) // count : (number + 1) * len(names) // count]
        save_file({name: made[name] for name in here}, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(here, file)
    if count > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in made.values())}, "weight_map": files}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def flip(directory, name):
    index = directory / INDEX
    file = json.loads(index.read_text())["weight_map"][name] if index.exists() else "model.safetensors"
    with open(directory / file, "r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        end = json.loads(opened.read(size))[name]["data_offsets"][1]
        opened.seek(8 + size + end - 1)
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 0xFF]))


if len(sys.argv) == 3:
    make(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
elif len(sys.argv) == 4 and sys.argv[1] == "--flip":
    flip(pathlib.Path(sys.argv[2]), sys.argv[3])
else:
    sys.exit(__doc__)
