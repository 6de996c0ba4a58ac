#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_pulled.py DIRECTORY --shape SHAPE | --model MODEL --r R [--fused] | --like DIRECTORY

Proves a pulled adapter directory right without any code of fanin's. Expected are all tensors of
the stand-in trainer's model at the step that fanin.json names, or those of another adapter
directory. The safetensors package writes what is expected; the pulled file must be equal to that,
byte for byte, and be read by it. adapter_config.json must hold what a reader needs of that
adapter, or say the same as the other directory's; fanin.json must name the file's true digest.
The last line starts with "ok:".
"""
import argparse
import json
import mmap
import pathlib
import sys

import numpy
import safetensors
import xxhash

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from pattern import pattern

# layers, hidden, outputs of q, of k and v, inner of the MLP (of each expert), experts
MODELS = {
    "qwen2.5-0.5b": (24, 896, 896, 128, 4864, 0),
    "llama-3.1-8b": (32, 4096, 4096, 1024, 14336, 0),
    "llama-3.3-70b": (80, 8192, 8192, 1024, 28672, 0),
    "qwen3-30b-a3b": (48, 2048, 4096, 512, 768, 128),
}
SHAPES = {"small": ("qwen2.5-0.5b", 8, False), "dense": ("llama-3.1-8b", 16, False),
          "moe": ("qwen3-30b-a3b", 16, False), "moe-fused": ("qwen3-30b-a3b", 16, True)}
DTYPES = {"bf16": ("BF16", "bfloat16", 2), "f16": ("F16", "float16", 2), "f32": ("F32", "float32", 4)}
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]
PIECE = 4 << 20
PATTERN_PIECE = 64 << 10  # fits into a cache
FILE = "adapter_model.safetensors"


class Wrong(Exception):
    pass


def need(condition, text):
    if not condition:
        raise Wrong(text)


def modules(model, r, fused):
    """Names of modules with rows of lora_A, inputs, outputs and columns of lora_B."""
    layers, hidden, q, kv, inner, experts = MODELS[model]
    for layer in range(layers):
        place = f"base_model.model.model.layers.{layer}"
        for name, fan_in, fan_out in (("q_proj", hidden, q), ("k_proj", hidden, kv),
                                      ("v_proj", hidden, kv), ("o_proj", q, hidden)):
            yield f"{place}.self_attn.{name}", r, fan_in, fan_out
        if fused:
            yield f"{place}.mlp.experts.base_layer", 2 * r * experts, hidden, 2 * inner
            yield f"{place}.mlp.experts", r * experts, inner, hidden
            continue
        for folder in [f"experts.{e}." for e in range(experts)] or [""]:
            yield f"{place}.mlp.{folder}gate_proj", r, hidden, inner
            yield f"{place}.mlp.{folder}up_proj", r, hidden, inner
            yield f"{place}.mlp.{folder}down_proj", r, inner, hidden


def pattern_tensors(options, identity):
    """{name: (dtype of the package, shape, place in the buffer, bytes)} and the buffer."""
    _, package, width = DTYPES[options.dtype]
    shapes = {}
    for name, rows, fan_in, fan_out in modules(options.model, options.r, options.fused):
        shapes[f"{name}.lora_A.weight"] = [rows, fan_in]
        shapes[f"{name}.lora_B.weight"] = [fan_out, rows]
    total = sum(a * b * width for a, b in shapes.values())
    buffer = numpy.empty(total, numpy.uint8)
    tensors, at = {}, 0
    for name, shape in shapes.items():
        size = shape[0] * shape[1] * width
        for begin in range(0, size, PATTERN_PIECE):
            raw = pattern(f"lora:{options.run}:{name}", identity["step"], begin,
                          min(PATTERN_PIECE, size - begin))
            buffer[at + begin : at + begin + len(raw)] = numpy.frombuffer(raw, numpy.uint8)
        tensors[name] = (package, shape, at, size)
        at += size
    return tensors, buffer


def file_tensors(path):
    """The same of a file that somebody else wrote."""
    packages = {tag: package for tag, package, _ in DTYPES.values()}
    raw = numpy.fromfile(path, numpy.uint8)
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8:start].tobytes())
    header.pop("__metadata__", None)
    return {name: (packages[e["dtype"]], e["shape"], start + e["data_offsets"][0],
                   e["data_offsets"][1] - e["data_offsets"][0]) for name, e in header.items()}, raw


def as_package_writes(tensors, buffer):
    specs = {name: safetensors.TensorSpec(dtype=dtype, shape=shape, data_len=size,
                                          data_ptr=buffer.ctypes.data + at)
             for name, (dtype, shape, at, size) in tensors.items()}
    return numpy.frombuffer(safetensors.serialize(specs, metadata={"format": "pt"}), numpy.uint8)


def check_file(path, tensors, buffer):
    with open(path, "rb") as file:
        got = numpy.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), numpy.uint8)
    wanted = as_package_writes(tensors, buffer)
    need(len(got) == len(wanted), f"{FILE} has {len(got)} bytes, expected are {len(wanted)}")
    for at in range(0, len(got), PIECE):
        a, b = got[at : at + PIECE], wanted[at : at + PIECE]
        need(numpy.array_equal(a, b), f"{FILE} differs at byte {at + int(numpy.argmax(a != b))}")
    del wanted
    tags = {package: tag for tag, package, _ in DTYPES.values()}
    with safetensors.safe_open(path, "numpy") as file:
        need(file.metadata() == {"format": "pt"}, f"{FILE} has metadata {file.metadata()}")
        need(sorted(file.keys()) == sorted(tensors), f"safetensors reads other names in {FILE}")
        for name in list(tensors)[:: max(1, len(tensors) // 64)]:
            part, (dtype, shape, _, _) = file.get_slice(name), tensors[name]
            need((part.get_dtype(), part.get_shape()) == (tags[dtype], list(shape)),
                 f"safetensors reads {name} as {part.get_dtype()} {part.get_shape()}")
    return got


def check_identity(directory, identity, options, got):
    record = identity["files"][FILE]
    digests = b"".join(xxhash.xxh3_128_digest(got[at : at + PIECE]) for at in range(0, len(got), PIECE))
    need(record["bytes"] == len(got), "fanin.json names another size")
    need(record["xxh3_128_of_4mib_pieces"] == xxhash.xxh3_128_hexdigest(digests),
         "fanin.json names another digest")
    need(identity["publication"] == f"lora:{options.run}", "fanin.json names another publication")
    need(identity["files"]["adapter_config.json"]["bytes"]
         == (directory / "adapter_config.json").stat().st_size, "fanin.json on adapter_config.json")
    need(sorted(p.name for p in directory.iterdir()) == ["adapter_config.json", FILE, "fanin.json"],
         "there are other files")


def check_config(config, options):
    wanted = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": options.r,
              "lora_alpha": 2 * options.r, "base_model_name_or_path": options.model,
              "target_modules": ATTENTION if options.fused else sorted(ATTENTION + MLP),
              "lora_dropout": 0, "bias": "none", "use_rslora": False, "use_dora": False}
    if options.fused:
        wanted["target_parameters"] = ["down_proj", "gate_up_proj"]
        wanted["rank_pattern"] = {".*\\.gate_up_proj": 2 * options.r}
    else:
        wanted.update(modules_to_save=None, rank_pattern={}, alpha_pattern={})
    for name, value in wanted.items():
        need(name in config and config[name] == value,
             f"adapter_config.json says {name} {config.get(name, 'nothing')!r}, expected is {value!r}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--r", type=int)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--like", type=pathlib.Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--run", default="0")
    options = parser.parse_args()
    if options.shape:
        options.model, options.r, options.fused = SHAPES[options.shape]
    directory = options.directory
    try:
        identity = json.loads((directory / "fanin.json").read_text())
        config = json.loads((directory / "adapter_config.json").read_text())
        if options.like:
            source = json.loads((options.like / "adapter_config.json").read_text())
            need(config == source, "adapter_config.json says something else than the source's")
            tensors, buffer = file_tensors(options.like / FILE)
        else:
            check_config(config, options)
            tensors, buffer = pattern_tensors(options, identity)
        got = check_file(directory / FILE, tensors, buffer)
        check_identity(directory, identity, options, got)
    except Wrong as wrong:
        sys.exit(f"check_pulled: {directory}: {wrong}")
    print(f"ok: {len(tensors)} tensors, {len(got)} bytes, as safetensors {safetensors.__version__} "
          f"writes them, at step {identity['step']}")


main()
