#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_model.py DIRECTORY --like DIRECTORY [--max-file-bytes N]

Proves a pulled model's directory right without any code of fanin's: read by the safetensors package
through the index as Transformers reads it, every tensor is that of the other directory, every file
the bytes that the package writes for its tensors, config.json the other's, and fanin.json has the
true digests. The last line starts with "ok:".
"""
import argparse
import json
import pathlib
import sys

import safetensors
import safetensors.numpy
import xxhash

INDEX = "model.safetensors.index.json"
PIECE = 4 << 20


class Wrong(Exception):
    pass


def need(condition, text):
    if not condition:
        raise Wrong(text)


def weight_map(directory):
    """As Transformers finds files: one of that name, else those of the index."""
    single = directory / "model.safetensors"
    if single.exists():
        with safetensors.safe_open(single, "numpy") as file:
            return dict.fromkeys(file.keys(), single.name)
    return json.loads((directory / INDEX).read_text())["weight_map"]


def load(directory):
    found, files = {}, weight_map(directory)
    for name in sorted(set(files.values())):
        with safetensors.safe_open(directory / name, "numpy") as file:
            for key in file.keys():
                need(files.get(key) == name, f"{key} is in {name}, which the index does not say")
                found[key] = file.get_tensor(key)
    need(sorted(found) == sorted(files), "the index names what no file has")
    return found, files


def digest_of_pieces(raw):
    digests = (xxhash.xxh3_128_digest(raw[at : at + PIECE]) for at in range(0, len(raw), PIECE))
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def check_files(directory, tensors, files, most):
    names = sorted(set(files.values()))
    for number, name in enumerate(names, 1):
        here = {key: value for key, value in tensors.items() if files[key] == name}
        wanted = safetensors.numpy.save(here, metadata={"format": "pt"})
        need((directory / name).read_bytes() == wanted, f"{name} is not what safetensors writes")
        need(len(names) == 1 or name == f"model-{number:05}-of-{len(names):05}.safetensors",
             f"a file is called {name}")
        size = sum(value.nbytes for value in here.values())
        need(most is None or size <= most or len(here) == 1, f"{name} has {size} bytes of tensors")
    if len(names) > 1:
        metadata = json.loads((directory / INDEX).read_text())["metadata"]
        need(metadata["total_size"] == sum(t.nbytes for t in tensors.values()), "total_size is wrong")


def check_identity(directory, names):
    said = json.loads((directory / "fanin.json").read_text())
    there = {path.name for path in directory.iterdir()} - {"fanin.json"}
    need(set(said["files"]) == there, f"fanin.json names {sorted(said['files'])}")
    for name, record in said["files"].items():
        raw = (directory / name).read_bytes()
        need(record["bytes"] == len(raw), f"fanin.json names another size of {name}")
        if name in names:
            need(record["xxh3_128_of_4mib_pieces"] == digest_of_pieces(raw), f"digest of {name}")
        else:
            need(record["xxh3_128"] == xxhash.xxh3_128_hexdigest(raw), f"digest of {name}")
    return said


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--like", type=pathlib.Path, required=True)
    parser.add_argument("--max-file-bytes", type=int)
    options = parser.parse_args()
    directory = options.directory
    try:
        tensors, files = load(directory)
        wanted, _ = load(options.like)
        need(sorted(tensors) == sorted(wanted), "there are other tensors")
        for name, value in wanted.items():
            got = tensors[name]
            need((got.dtype, got.shape) == (value.dtype, value.shape), f"{name} is {got.dtype}")
            need(got.tobytes() == value.tobytes(), f"{name} has other bytes")
        check_files(directory, tensors, files, options.max_file_bytes)
        said = check_identity(directory, set(files.values()))
        need((directory / "config.json").read_bytes() == (options.like / "config.json").read_bytes(),
             "config.json is another one")
    except Wrong as wrong:
        sys.exit(f"check_model: {directory}: {wrong}")
    print(f"ok: {len(tensors)} tensors in {len(set(files.values()))} files of {said['publication']}")


main()
