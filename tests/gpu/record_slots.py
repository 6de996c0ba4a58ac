#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""record_slots.py LAYOUT FOLDER [--layers N] [--small]

Records where a LoRA adapter of Qwen3-30B-A3B (r 16, BF16, attention and each expert) goes in vLLM's
LoRA slots, by vLLM's own classes, which get no memory, and saves a mapping for each rank:
FOLDER/slots-LAYOUT-RANK.json, and what a trainer would publish: FOLDER/slots.json, a list of names,
dtypes and shapes. tests/gpu/slot_landing.py pulls by them.

LAYOUT is tp1, tp2, ... or ep2, ...; --small: a model of the same modules that any CPU has room for.
Needs vLLM (its CPU build does), PyTorch, PEFT, the package (PYTHONPATH) and its library
(FANIN_LIBRARY). Prints one line a rank, with the seconds that it took.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
import time

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "engines"))

import slots_engine  # noqa: E402
import torch  # noqa: E402

RANK = 16
QWEN3_30B_A3B = slots_engine.Engine(
    "model",
    max_rank=RANK,
    dtype=torch.bfloat16,
    hidden=2048,
    width=768,
    heads=32,
    kv_heads=4,
    head=128,
    experts=128,
    depth=48,
    device="meta",
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Of what a trainer publishes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def engine_of(options: argparse.Namespace) -> tuple[slots_engine.Engine, int]:
    """The first rank's, and how many there are."""
    found = re.fullmatch(r"(tp|ep)([1-9]\d*)", options.layout)
    if found is None:
        raise SystemExit(f"{options.layout} is no layout: tp1, tp2, ep2, ...")
    e = QWEN3_30B_A3B
    if options.small:
        e = dataclasses.replace(e, hidden=64, width=32, heads=4, kv_heads=2, head=16, experts=4)
        e = dataclasses.replace(e, depth=2)
    if options.layers:
        e = dataclasses.replace(e, depth=options.layers)
    return e, int(found[2])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layout")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    first, size = engine_of(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    published = [Entry(n, "BF16", s) for n, s in slots_engine.shapes(first, RANK).items()]
    entries = [dataclasses.asdict(entry) for entry in published]
    (options.folder / "slots.json").write_text(json.dumps(entries))
    kind = options.layout[:2]
    for rank in range(size):
        from fanin.vllm.slots import record_layout

        e = dataclasses.replace(first, **{kind: (rank, size)})
        start = time.perf_counter()
        layout = record_layout(slots_engine.loader(e), published, slots_engine.peft_config(e, RANK))
        path = options.folder / f"slots-{options.layout}-{rank}.json"
        layout.mapping.save(path)
        print(
            f"{path}: {len(published)} published, {len(layout.parts)} parts of a slot; recorded in "
            f"{time.perf_counter() - start:.1f} s, {path.stat().st_size} bytes",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
