#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mappings for ``nixl-fetch bench --mapping`` without an engine.

    nixl-fetch list TARGET full:0 --json >keys.json
    layout.py keys.json --tp 2 m          # m0.json and m1.json: what each rank of the engine wants

Parameters are as vLLM and SGLang have them of models with Hugging Face's names: q, k and v one
under the other, gate and up likewise, experts as [E, 2I, H] and [E, H, I]. Rows of these, of q_b,
kv_b, embedding and lm_head are cut over --tp, columns of o and down; with --ep whole experts are
shared out instead. Stages of --pp have consecutive layers. Ranks beyond the heads of k and v
(--heads) have the same ones again; the vocabulary is padded to a multiple of 64 before it is cut.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

WORDS = 64  # the vocabulary's padding
#: By module: the dimension that is cut, the parameter that it is a part of, and which part.
RULES: dict[str, tuple[int | None, str, int]] = {
    "q_proj": (0, "qkv_proj", 0),
    "k_proj": (0, "qkv_proj", 1),
    "v_proj": (0, "qkv_proj", 2),
    "gate_proj": (0, "gate_up_proj", 0),
    "up_proj": (0, "gate_up_proj", 1),
    "q_a_proj": (None, "fused_qkv_a_proj", 0),
    "kv_a_proj_with_mqa": (None, "fused_qkv_a_proj", 1),
    "q_b_proj": (0, "", 0),
    "kv_b_proj": (0, "", 0),
    "o_proj": (1, "", 0),
    "down_proj": (1, "", 0),
    "embed_tokens": (0, "", 0),
    "lm_head": (0, "", 0),
}


class Tensor(NamedTuple):
    """One that is published, and its name's parts."""

    name: str
    dtype: str
    shape: list[int]
    prefix: str
    expert: int | None
    module: str
    leaf: str
    layer: int | None


class Shape(NamedTuple):
    """Of the engine, and heads of k and v, 0: not known."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    heads: int = 0

    @property
    def ranks(self) -> int:
        return max(self.tp, self.ep) * self.pp


class Part(NamedTuple):
    """A box of a tensor, its order in the parameter, and elements of padding behind it."""

    order: tuple[int, int]
    tensor: Tensor
    offset: list[int]
    extent: list[int]
    padding: int


def tensors_of(keys: list[dict[str, Any]]) -> list[Tensor]:
    """What ``nixl-fetch list --json`` tells of a model, or what an engine's recording does."""
    found = []
    for key in keys:
        name = key["name"] if "name" in key else key["key"].split(":", 2)[2]
        parts = re.fullmatch(r"(?:(.*?)(?:\.experts\.(\d+))?\.)??(?:([^.]+)\.)?([^.]+)", name)
        assert parts, name
        layer = re.search(r"\.layers\.(\d+)", name)
        found.append(
            Tensor(
                name,
                key["dtype"],
                key["shape"],
                parts[1] or "",
                int(parts[2]) if parts[2] else None,
                parts[3] or "",
                parts[4],
                int(layer[1]) if layer else None,
            )
        )
    return found


def chunk(size: int, parts: int, number: int) -> tuple[int, int]:
    """Begin and length."""
    each = -(-size // parts)
    begin = min(number * each, size)
    return begin, min(each, size - begin)


def of_stage(tensor: Tensor, tensors: list[Tensor], pp: int, stage: int) -> bool:
    if pp == 1:
        return True
    if tensor.layer is not None:
        layers = 1 + max(one.layer for one in tensors if one.layer is not None)
        sizes = [layers // pp] * pp
        for i in range(layers % pp):  # the later ones but the last
            sizes[pp - 2 - i] += 1
        return sum(sizes[:stage]) <= tensor.layer < sum(sizes[: stage + 1])
    if tensor.module == "embed_tokens":
        tied = all(one.module != "lm_head" for one in tensors)
        return stage == 0 or (stage == pp - 1 and tied)
    return stage == pp - 1


def part_of(tensor: Tensor, shape: Shape, rank: int, experts: int) -> tuple[str, Part] | None:
    """The parameter's name and what this rank holds of it; None: nothing."""
    dim, parameter, slot = RULES.get(tensor.module, (None, "", 0))
    offset, extent, padding = [0] * len(tensor.shape), list(tensor.shape), 0
    expert = tensor.expert if dim is not None else None
    if expert is not None and shape.ep > 1:
        dim = None
        begin, count = chunk(experts, shape.ep, rank % shape.ep)
        if not begin <= expert < begin + count:
            return None
    if dim is not None and dim < len(extent):
        size, tp, number = extent[dim], shape.tp, rank % shape.tp
        if expert is None and tensor.module in ("embed_tokens", "lm_head"):
            each = -(-(-(-size // WORDS) * WORDS) // tp)
            offset[dim] = min(number * each, size)
            extent[dim] = min(each, size - offset[dim])
            padding = (each - extent[dim]) * math.prod(extent[1:])
        elif tensor.module in ("k_proj", "v_proj") and 0 < shape.heads < tp:
            offset[dim], extent[dim] = chunk(size, shape.heads, number * shape.heads // tp)
        else:
            offset[dim], extent[dim] = chunk(size, tp, number)
    if expert is not None:
        parameter = "w2" if tensor.module == "down_proj" else "w13"
        name = f"{tensor.prefix}.experts.{parameter}"
    else:
        name = f"{tensor.prefix}.{parameter}.{tensor.leaf}" if parameter else tensor.name
    if math.prod(extent) == 0:
        return None
    return name, Part((expert or 0, slot), tensor, offset, extent, padding)


def packed(extent: list[int], width: int) -> list[int]:
    return [width * math.prod(extent[i + 1 :]) for i in range(len(extent))]


def mapping(tensors: list[Tensor], shape: Shape, rank: int) -> dict[str, Any]:
    """What that rank of the engine wants: each parameter's parts one after the other."""
    stage, number = divmod(rank, max(shape.tp, shape.ep))
    experts = 1 + max((one.expert for one in tensors if one.expert is not None), default=-1)
    parameters: dict[str, list[Part]] = {}
    for tensor in tensors:
        if of_stage(tensor, tensors, shape.pp, stage) and (
            found := part_of(tensor, shape, number, experts)
        ):
            parameters.setdefault(found[0], []).append(found[1])
    told = []
    for name, parts in parameters.items():
        dtype = parts[0].tensor.dtype
        bits = re.search(r"\d+", dtype)
        width, elements, sources = int(bits[0]) // 8 if bits else 1, 0, []
        for part in sorted(parts, key=lambda one: one.order):
            box = {
                "offset": part.offset,
                "extent": part.extent,
                "at": width * elements,
                "stride": packed(part.extent, width),
            }
            of = {"name": part.tensor.name, "dtype": dtype, "shape": part.tensor.shape}
            sources.append({**of, "boxes": [box]})
            elements += math.prod(part.extent) + part.padding
        whole = {"role": "parameter", "dtype": dtype, "shape": [elements], "stride": [width]}
        told.append({"name": name, **whole, "sources": sources})
    wanted = {source["name"] for one in told for source in one["sources"]}
    unwanted = [one.name for one in tensors if one.name not in wanted]
    return {
        "format": "fanin-mapping/1",
        "engine": {"name": "layout.py", "version": "1"},
        "model": "",
        "ranks": {"of": {"rank": rank, "size": shape.ranks}},
        "published": {"count": len(tensors), "digest": "", "unwanted": unwanted},
        "modules": [{"path": "", "class": "", "tensors": told}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keys", type=Path, help="what nixl-fetch list --json told")
    parser.add_argument("prefix", help="of the files that are written")
    for name in Shape._fields:
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape(), name))
    given = parser.parse_args()
    shape = Shape(given.tp, given.ep, given.pp, given.heads)
    tensors = tensors_of(json.loads(given.keys.read_text())["keys"])
    for rank in range(shape.ranks):
        Path(f"{given.prefix}{rank}.json").write_text(json.dumps(mapping(tensors, shape, rank)))


if __name__ == "__main__":
    main()
