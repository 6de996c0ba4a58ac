# SPDX-License-Identifier: Apache-2.0
"""Merges adapters by the kernel of GPUs, which Triton interprets here (a child of worlds.py).

Factors are whole numbers, whose products are the same in every order; base and scale are not.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from fanin.torch import WeightServer, _fused, _merge
from merged import adapted, pulled, same, saved
from quantize_kernels import converted
from triton.runtime import interpreter
from worlds import Control

KINDS = [
    ("rslora", "bfloat16", True),
    ("embedding", "bfloat16", True),
    ("experts", "bfloat16", True),
    ("experts", "float32", True),
    ("linear", "bfloat16", False),
]


def whole_numbers(tensor: Any) -> Any:
    return (torch.arange(tensor.numel()).view(tensor.shape) * 7 % 5 - 2).to(tensor.dtype)


def model_of(kind: tuple[str, str, bool]) -> Any:
    model = adapted(*kind)
    with torch.no_grad():
        for path, param in model.named_parameters():
            if "lora_" in path:
                param.copy_(whole_numbers(param))
    return model


def check(kind: tuple[str, str, bool]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        WeightServer(model_of(kind), base_port=0, use_ucx=False, merge=True) as server,
    ):
        server.publish(0)
        same(pulled(server), saved(lambda: model_of(kind), Path(folder)))


def main() -> None:
    control = Control()
    interpreter._convert_float = converted
    launched: list[int] = []
    launch = _fused._launch

    def counted(kind: Any, is_aligned: bool, table: Any, *at: int) -> None:
        launched.append(len(table))
        launch(kind, is_aligned, table, *at)

    _fused._launch = counted
    _merge.can_fuse = lambda base, factors: True
    _merge.noise_like = whole_numbers
    for kind in KINDS:
        check(kind)
    control.say("merged", parts=sum(launched), launches=len(launched))
    _fused._proven.clear()
    addresses = torch.arange(5) < 4

    def scaled(kind: Any, is_aligned: bool, table: Any, *at: int) -> None:
        launch(kind, is_aligned, torch.where(addresses, table, 7), *at)

    _fused._launch = scaled
    check(KINDS[0])  # by PEFT, whose bytes are others
    control.say("refused", proven=sum(_fused._proven.values()))


if __name__ == "__main__":
    main()
