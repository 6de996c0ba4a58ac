# SPDX-License-Identifier: Apache-2.0
"""Rounds to fp8 by the kernels of GPUs, which Triton interprets here (a child of worlds.py).

Blocks are whole, cut and shared, of all three types; a tensor lies in two parts.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch
from fanin.torch import Slice, _quantized
from quantize_ranks import module_of
from test_torch_quantize import FORMATS, check, edges, pulled, served
from triton.runtime import interpreter
from worlds import Control

TYPES = {
    "fp32": (torch.float32, numpy.float32),
    "fp16": (torch.float16, numpy.float16),
    "bf16": (torch.bfloat16, numpy.uint16),
    "fp8e4nv": (torch.float8_e4m3fn, numpy.uint8),
}


def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """As GPUs do it. Triton's interpreter cuts off what does not fit."""
    held, bits = TYPES[str(source)], torch.from_numpy(numpy.ascontiguousarray(values))
    made = bits.view(held[0]).to(TYPES[str(target)][0]).view(torch.uint8).numpy()
    return made.view(TYPES[str(target)][1]).reshape(values.shape)


def names(name: str, shape: tuple[int, ...]) -> Any:
    rows = ((0, 230, 70), (230, 300, 0))
    parts = [Slice("d.weight", (slice(a, b),), (at, 0), (300, 70)) for a, b, at in rows]
    return parts if name == "turned" else name


def main() -> None:
    control = Control()
    interpreter._convert_float = converted
    launched: list[Any] = []
    _quantized.can_launch = lambda job: launched.append(job) or True  # type: ignore[func-returns-value]
    tensors = {
        "a.weight": edges()[:, :2000].bfloat16(),
        "b.weight": edges()[:100, 2000:].contiguous(),
        "c.weight": torch.randn(257, 129).half(),
    }
    tensors["c.weight"][200, 100] = float("nan")
    # Two elements are one number: the largest of a block is the first one of two, and the second.
    tensors["e.weight"] = torch.full((128, 256), 0.01).bfloat16()
    tensors["e.weight"][5, 6], tensors["e.weight"][7, 128 + 9] = 3.0, -5.0
    whole = torch.randn(300, 70)
    for told, rule in FORMATS:
        launched.clear()
        model = module_of({**tensors, "turned": torch.cat([whole[70:], whole[:70]])})
        with served(model, quantize=told, names=names) as server:
            server.publish(0)
            server.publish(1)
            check(pulled(server), {**tensors, "d.weight": whole}, **rule)
        control.say("rounded", boxes=len(launched))


if __name__ == "__main__":
    main()
