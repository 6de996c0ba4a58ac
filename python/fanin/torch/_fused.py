# SPDX-License-Identifier: Apache-2.0
"""Adds an adapter's product to a tensor on a GPU in one pass, where that gives PEFT's bytes.

PEFT writes the product, a scaled one and a rounded one, and reads each again: six times what has to
be moved. A kernel does the same operations in the same order. Only the order within a matrix
product is the library's own. So the first tensor of each kind and shape is computed in both ways,
from random factors, and a kind whose bytes differ stays with PEFT's functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

__all__ = ["can_fuse", "fuse", "is_proven", "noise_like"]

_log = logging.getLogger("fanin.torch")
_ROWS, _COLUMNS, _WARPS = 64, 128, 4
_proven: dict[Hashable, bool] = {}


def can_fuse(base: Any, left: Any, right: Any) -> bool:
    """Whether the kernel is for tensors of these types and places."""
    return (
        base.is_cuda
        and left.device == right.device == base.device
        and left.dtype is right.dtype
        and torch.cuda.get_device_capability(base.device) >= (8, 0)
    )


def is_proven(base: Any, left: Any, key: Hashable, both: Callable[[], tuple[Any, Any]]) -> bool:
    """Whether the kernel gives PEFT's bytes for tensors of a kind.

    key: of the kind. both: computes what PEFT gives, and what the kernel does, where that is not
    known yet.
    """
    key = (key, _is_tf32(), base.dtype, base.device, left.dtype)
    if key not in _proven:
        try:
            wanted, got = (one.view(torch.uint8) for one in both())
            _proven[key] = torch.equal(wanted, got)
            why = "" if _proven[key] else "PEFT's bytes are others there"
        except Exception as error:
            _proven[key], why = False, f"{type(error).__name__}: {error}"
        if why:
            _log.warning("fanin: merging %s takes longer, without a fused kernel: %s", key, why)
    return _proven[key]


def noise_like(tensor: Any) -> Any:
    """Random values of that shape and type, some of them zeros of either sign."""
    source = torch.Generator(tensor.device).manual_seed(tensor.numel())
    out = torch.randn(tensor.shape, generator=source, device=tensor.device)
    out[::4], out[::8] = 0.0, -0.0
    return out.to(tensor.dtype)


def fuse(base: Any, left: Any, right: Any, scale: float, is_rounded: bool, out: Any) -> None:
    """*out*, which is contiguous: *base* and ``scale * left.T @ right``, of each expert.

    base: [experts, rows, columns]; left: [experts, rank, rows]; right: [experts, rank, columns].
    is_rounded: to the base's type before it is added.
    """
    from fanin.torch._kernel_merge import added

    experts, rows, columns = base.shape
    tiles = -(-rows // _ROWS) * -(-columns // _COLUMNS)
    with torch.cuda.device(base.device if base.is_cuda else -1):
        added[(tiles, experts)](
            *(base, out, left, right, scale, rows, columns),
            *(*base.stride(), *out.stride()[:2], *left.stride(), *right.stride()),
            RANK=left.shape[1],
            PRECISION="tf32" if _is_tf32() else "ieee",
            ROUNDED=is_rounded,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
            num_stages=1,
            enable_fp_fusion=False,
        )


def _is_tf32() -> bool:
    """Whether PyTorch rounds the factors of F32 products."""
    matmul = torch.backends.cuda.matmul
    told = getattr(matmul, "fp32_precision", None)  # of newer PyTorch, where the other may raise
    return bool(matmul.allow_tf32) if told is None else told == "tf32"
