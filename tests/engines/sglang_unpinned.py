# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang's for tests: its LoRA layers pin host memory, which PyTorch cannot without an
NVIDIA driver. Here they get memory that is not pinned."""

from __future__ import annotations

from typing import Any


def register() -> None:
    import torch

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment, method-assign]


def _unpinned(real: Any) -> Any:
    def made(*arguments: Any, **more: Any) -> Any:
        more.pop("pin_memory", None)
        return real(*arguments, **more)

    return made
