#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""record_mapping.py MODEL LAYOUT FOLDER

Records where a whole model goes in vLLM's modules, of real size and without its memory, and saves a
mapping for each rank: FOLDER/MODEL-LAYOUT-RANK.json (see docs/reference/mapping-file.md), and what a trainer
would publish: FOLDER/MODEL.json, a list of names, dtypes and shapes.

MODEL is one of those below (those of tests/engines/families.py in small), or the path of a
config.json or of its folder, after which files are called then; LAYOUT is tp1, tp2, tp4, ..., ep2,
..., pp2, ... Needs vLLM (its CPU build does), PyTorch, transformers, the package (PYTHONPATH) and its library
(FANIN_LIBRARY). Prints one line a rank, with the seconds that the recording took.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import transformers

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "engines"))

from families import FAMILIES, Engine, Family, Layout, checkpoint  # noqa: E402

MODELS = {
    **FAMILIES,
    "qwen3-8b": Family(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-30b-a3b": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
        },
    ),
}


def layout_of(text: str) -> Layout:
    kind, size = text[:2], text[2:]
    if kind not in ("tp", "ep", "pp") or not size.isdigit() or not int(size):
        raise SystemExit(f"{text} is no layout: tp1, tp2, ep2, pp2, ...")
    return Layout(int(size), experts=kind == "ep", stages=kind == "pp")


def model_of(text: str) -> tuple[str, Family, Any]:
    """A model's name, its family and its configuration."""
    if text in MODELS:
        return text, MODELS[text], MODELS[text].configuration()
    path = pathlib.Path(text)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{text} is neither a config.json nor one of {', '.join(MODELS)}")
    configuration = transformers.AutoConfig.from_pretrained(folder)
    options = configuration.to_dict()
    family = Family(options["architectures"][0], type(configuration).__name__, options)
    return folder.resolve().name, family, configuration


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__, "MODEL:", ", ".join(MODELS), file=sys.stderr)
        return 2
    name, family, configuration = model_of(sys.argv[1])
    layout, folder = layout_of(sys.argv[2]), pathlib.Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    published = checkpoint(configuration)
    entries = [dataclasses.asdict(entry) for entry in published]
    (folder / f"{name}.json").write_text(json.dumps(entries))
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(pathlib.Path(scratch), family, layout, configuration)
        for rank in range(layout.size):
            # vLLM counts experts in a tensor of the device; memory that nobody writes costs nothing.
            with engine.rank(rank, device="cpu" if layout.experts else "meta") as model:
                from fanin.vllm.reload import record_model

                start = time.perf_counter()
                recording = record_model(published, model, engine.config)
                recorded = time.perf_counter()
                mapping = recording.mapping()
                checked = time.perf_counter()
                path = folder / f"{name}-{sys.argv[2]}-{rank}.json"
                mapping.save(path)
                print(
                    f"{path}: {len(published)} published, {len(recording.copies)} copies; "
                    f"recorded in {recorded - start:.2f} s (the loader {recording.seconds:.2f}), "
                    f"checked in {checked - recorded:.2f} s, {path.stat().st_size} bytes",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
