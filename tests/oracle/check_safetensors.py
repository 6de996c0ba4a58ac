#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_safetensors.py WRITE_ADAPTER [CASES]

Adapter files against the safetensors package: random names, dtypes and shapes are written by
WRITE_ADAPTER and by the package, and must be equal byte for byte; the package must read what was
written. fanin.json's digest is computed anew. Exit status 77: a package is missing.
"""
import ctypes
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

python = os.environ.get("FANIN_TEST_PYTHON", sys.executable)
try:
    import numpy
    import xxhash
    from safetensors import TensorSpec, safe_open, serialize
    from safetensors.numpy import load_file, save
except ImportError as missing:
    if os.environ.get("CHECK_SAFETENSORS_AGAIN") or python == sys.executable:
        print(f"skipped: {missing}; tools/setup installs the packages")
        sys.exit(77)
    os.environ["CHECK_SAFETENSORS_AGAIN"] = "1"
    os.execv(python, [python, *sys.argv])

# What the package calls a dtype; bits of one element.
DTYPES = {
    "BOOL": ("bool", 8), "F4": ("float4_e2m1fn_x2", 4), "U8": ("uint8", 8), "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "I16": ("int16", 16), "U16": ("uint16", 16),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "I32": ("int32", 32),
    "U32": ("uint32", 32), "F32": ("float32", 32), "C64": ("complex64", 64),
    "F64": ("float64", 64), "I64": ("int64", 64), "U64": ("uint64", 64),
}
NUMPY = {name: numpy.dtype(package) for name, (package, _) in DTYPES.items()
         if name not in ("F4", "BF16") and not name.startswith("F8")}
PREFIX = "base_model.model."
PIECE = 4 << 20
LETTERS = 'abcXYZ019_-/ "\\\b\f\n\r\t\x01\x1f\x7f\u00e9\u00df\u0416\u4e2d\u2028\ufffd\U0001f600'


def random_name(rng):
    parts = ["".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, 8)))
             for _ in range(rng.randrange(1, 5))]
    return PREFIX + ".".join(parts)


def random_shape(rng, dtype):
    shape = [rng.choice((0, 1, 2, 3, 5, 8, 17)) if rng.random() < 0.9 else 301
             for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 4, 8)))]
    while numpy.prod(shape, dtype=float) > 300_000:
        shape[shape.index(max(shape))] = 2
    if dtype == "F4":
        shape = shape or [2]
        shape[-1] *= 2
    return shape


def make_case(rng):
    """Tensors as {name: (dtype, shape, bytes)}."""
    tensors = {}
    for _ in range(rng.choice((0, 1, 2, 5, 40, 200))):
        dtype = rng.choice(list(DTYPES) if rng.random() < 0.7 else ["BF16"])
        shape = random_shape(rng, dtype)
        size = int(numpy.prod(shape, dtype=numpy.int64)) * DTYPES[dtype][1] // 8
        tensors[random_name(rng)] = (dtype, shape, rng.randbytes(size))
    return tensors


def with_package(tensors):
    specs, alive = {}, []
    for name, (dtype, shape, data) in tensors.items():
        block = ctypes.create_string_buffer(data, max(len(data), 1))
        alive.append(block)
        if dtype == "F4":  # the package counts bytes in the last dimension
            shape = shape[:-1] + [shape[-1] // 2]
        specs[name] = TensorSpec(dtype=DTYPES[dtype][0], shape=shape,
                                 data_ptr=ctypes.addressof(block), data_len=len(data))
    return serialize(specs, metadata={"format": "pt"})


def write(program, scratch, names, tensors, metadata):
    """Writes with names[i] instead of the i-th name; returns the directory."""
    description = {"publication": "lora:0", "step": 3, "metadata": metadata,
                   "tensors": [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape, _)
                               in zip(names, tensors.values())]}
    (scratch / "description").write_text(json.dumps(description))
    (scratch / "data").write_bytes(b"".join(data for _, _, data in tensors.values()))
    place = scratch / "adapter"
    subprocess.run([program, scratch / "description", scratch / "data", place], check=True)
    return place


def check_identity(place):
    file = (place / "adapter_model.safetensors").read_bytes()
    identity = json.loads((place / "fanin.json").read_text())
    pieces = b"".join(xxhash.xxh3_128_digest(file[at:at + PIECE]) for at in range(0, len(file), PIECE))
    record = identity["files"]["adapter_model.safetensors"]
    assert record["xxh3_128_of_4mib_pieces"] == xxhash.xxh3_128_hexdigest(pieces), "digest"
    assert record["bytes"] == len(file)
    assert identity["files"]["adapter_config.json"]["bytes"] == \
        (place / "adapter_config.json").stat().st_size
    assert (identity["publication"], identity["step"]) == ("lora:0", 3)


def check_equal(place, tensors, label):
    got, wanted = (place / "adapter_model.safetensors").read_bytes(), with_package(tensors)
    if got != wanted:
        at = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
        sys.exit(f"{label}: {len(got)} bytes, the package writes {len(wanted)}; first difference at {at}: "
                 f"{got[max(at - 40, 0):at + 40]!r} instead of {wanted[max(at - 40, 0):at + 40]!r}")
    with safe_open(place / "adapter_model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(tensors)


def check_random(program, cases):
    config = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "m", "r": 8})
    for seed in range(cases):
        tensors = make_case(random.Random(seed))
        with tempfile.TemporaryDirectory() as scratch:
            place = write(program, pathlib.Path(scratch), list(tensors), tensors, {"peft_config": config})
            check_equal(place, tensors, f"case {seed}")
            check_identity(place)
    return cases


def check_adapter(program, layers, experts):
    """An adapter under its names in memory, read back by numpy."""
    rng = random.Random(1)
    tensors, names = {}, []
    modules = [f"model.layers.{layer}.self_attn.{m}_proj" for layer in range(layers) for m in "qkvo"]
    modules += [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in range(layers) for e in range(experts)]
    for module in modules:
        for part, shape in (("A", [8, 48]), ("B", [32, 8])):
            data = rng.randbytes(4 * shape[0] * shape[1])
            tensors[f"{PREFIX}{module}.lora_{part}.weight"] = ("F32", shape, data)
            names.append(f"_fsdp_wrapped_module.{module}.lora_{part}.run1.weight")
    metadata = {"base_model_name_or_path": "m", "lora_alpha": "16"}
    with tempfile.TemporaryDirectory() as scratch:
        place = write(program, pathlib.Path(scratch), names, tensors, metadata)
        check_equal(place, tensors, "adapter")
        check_identity(place)
        arrays = {name: numpy.frombuffer(data, NUMPY[dtype]).reshape(shape)
                  for name, (dtype, shape, data) in tensors.items()}
        for name, array in load_file(place / "adapter_model.safetensors").items():
            assert array.tobytes() == arrays[name].tobytes() and array.shape == arrays[name].shape
        assert (place / "adapter_model.safetensors").read_bytes() == save(arrays, {"format": "pt"})
        config = json.loads((place / "adapter_config.json").read_text())
        assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert (config["r"], config["lora_alpha"]) == (8, 16)
    return len(tensors)


def main():
    program = sys.argv[1]
    cases = check_random(program, int(sys.argv[2]) if len(sys.argv) > 2 else 60)
    count = check_adapter(program, 4, 300)
    print(f"ok: {cases} random files and an adapter of {count} tensors are equal to the package's")


main()
