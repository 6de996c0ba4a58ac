# SPDX-License-Identifier: Apache-2.0
"""Digests of what a module holds of each published tensor: the way back of a mapping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fanin._digest import box_digest, box_digests
from fanin._dtypes import NARROWED
from fanin.mapping._mapping import Leaf

Told = tuple[str, list[int], list[int], dict[str, int]]
"""Name, offset, extent, digests by type: a :class:`fanin._served.Held` between processes."""
_TORCH = {"BF16": "bfloat16", "F16": "float16"}


def view_of(tensor: Any, piece: Any) -> Any:
    """The elements of a mapping's *piece* in the module's *tensor*, as a view."""
    size = tensor.element_size()
    steps = [step // size for step in piece.stride]
    return tensor.as_strided(piece.extent, steps, tensor.storage_offset() + piece.at // size)


def held_of(leaves: Iterable[tuple[Leaf, Any]]) -> list[Told]:
    """Of leaves and the tensors that they are now, every box of a published tensor."""
    boxes = [
        (source.name, leaf.dtype, piece, view_of(tensor.detach(), piece))
        for leaf, tensor in leaves
        for source in leaf.sources
        for piece in source.pieces
    ]
    digests = box_digests((values, piece.offset) for _, _, piece, values in boxes)
    return [
        (name, list(piece.offset), list(piece.extent), {dtype: one} | _narrow(dtype, piece, values))
        for (name, dtype, piece, values), one in zip(boxes, digests, strict=True)
    ]


def _narrow(dtype: str, piece: Any, values: Any) -> dict[str, int]:
    """What is F32 in the narrower types in which nothing of it is lost."""
    import torch

    found = {}
    for narrow in NARROWED if dtype == "F32" else ():
        rounded = values.to(getattr(torch, _TORCH[narrow]))
        if rounded.to(values.dtype).equal(values):
            found[narrow] = box_digest(rounded, piece.offset)
    return found
