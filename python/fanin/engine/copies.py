# SPDX-License-Identifier: Apache-2.0
"""Many tensors copied with few calls, and laid out in one piece of memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_ALIGN = 256

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


def span(tensor: Any) -> int:
    """Elements from the first to the last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def room_of(layouts: Iterable[Any]) -> int:
    """Bytes in which :func:`laid_out` has room for tensors of these layouts."""
    return sum(-(-span(one) * one.element_size() // _ALIGN) * _ALIGN for one in layouts)


def laid_out(room: Any, layouts: Mapping[_Key, Any], at: int = 0) -> dict[_Key, Any]:
    """A tensor of each layout in *room*, a tensor of bytes, from the byte *at* on."""
    found = {}
    for key, one in layouts.items():
        flat = room[at : at + span(one) * one.element_size()].view(one.dtype)
        found[key] = flat.as_strided(one.shape, one.stride())
        at += room_of([one])
    return found
