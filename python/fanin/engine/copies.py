# SPDX-License-Identifier: Apache-2.0
"""Many tensors copied with few calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Copies"]

# One kernel copies many tensors of so few bytes; larger ones go as fast one by one.
_SMALL = 1 << 20


class Copies:
    """Copies of tensors into others that do not move, with few calls: an engine waits for them.

    pairs: (to, of) of one shape each.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._large: list[tuple[Any, Any]] = []
        self._small: dict[Any, tuple[list[Any], list[Any]]] = {}
        for to, of in pairs:
            # As plain tensors: vLLM's classes of parameters go through Python at each call.
            to, of = to.detach(), of.detach()
            if to.nbytes > _SMALL:
                self._large.append((to, of))
                continue
            into, out_of = self._small.setdefault((to.dtype, of.dtype), ([], []))
            into.append(to)
            out_of.append(of)

    def make(self) -> None:
        """On the current stream; the large ones first, while which the others are asked for."""
        import torch

        for to, of in self._large:
            to.copy_(of, non_blocking=True)
        for into, out_of in self._small.values():
            torch._foreach_copy_(into, out_of, non_blocking=True)
