#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pattern of `nixl-fetch serve`, written a second time.

    pattern.py bytes KEY STEP OFFSET SIZE    those bytes of that tensor, as hexadecimal digits
    pattern.py check DIRECTORY               compares a pulled directory; "ok: ..." or exit 1

Needs the packages numpy and xxhash.
"""
import json
import pathlib
import sys

import numpy
import xxhash

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def words(start, first, count):
    """Words `first` and following of a tensor whose word 0 is made of `start`."""
    x = numpy.arange(count, dtype=numpy.uint64) + numpy.uint64((start + first) & MASK)
    x = x + numpy.uint64(GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> numpy.uint64(shift))) * numpy.uint64(factor)
    return x ^ (x >> numpy.uint64(31))


def pattern(key, step, offset, size):
    start = (xxhash.xxh3_64_intdigest(key.encode()) + step * GOLDEN) & MASK
    first = offset // 8
    last = (offset + size + 7) // 8
    raw = words(start, first, last - first).astype("<u8").tobytes()
    return raw[offset - 8 * first :][:size]


def check(directory):
    identity = json.loads((directory / "fanin.json").read_text())
    raw = (directory / "adapter_model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = (8 + size + o for o in entry["data_offsets"])
        key = f'{identity["publication"]}:{name}'
        if raw[begin:end] != pattern(key, identity["step"], 0, end - begin):
            sys.exit(f'{key} is not the pattern of step {identity["step"]}')
    print(f'ok: {len(header)} tensors of step {identity["step"]}')


def main(words_given):
    if len(words_given) == 5 and words_given[0] == "bytes":
        key, step, offset, size = words_given[1], *map(int, words_given[2:])
        print(pattern(key, step, offset, size).hex())
    elif len(words_given) == 2 and words_given[0] == "check":
        check(pathlib.Path(words_given[1]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
