# SPDX-License-Identifier: Apache-2.0
"""Digests of what a worker's model holds of each published tensor, for :mod:`fanin.check`.

A mapping says which elements of which published tensor lie where, so it says the way back as well.
What processing has made into something else has no way back: such a module is read once more beside
the model and processed, and what it gives is compared with the kernels' tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fanin._digest import box_digest
from fanin._served import NARROWED
from fanin.mapping import Leaf
from fanin.vllm.landing import torch_dtype_of
from fanin.vllm.mapped import MappedLanding
from fanin.vllm.trainers import Trainer
from fanin.vllm.weights_check import Comparison, Module

__all__ = ["held"]

Told = tuple[str, list[int], list[int], dict[str, int]]
"""Name, offset, extent, digests by type: a :class:`fanin._served.Held` between processes."""


def held(
    landing: MappedLanding, trainer: Trainer, step: int, deadline: float
) -> tuple[list[Told], Comparison]:
    """What the model holds, and how its processed modules compare with *step*.

    Only processed modules are read from the trainer. Blocks until *deadline* at most; raises what
    a pull raises.
    """
    import torch

    found: list[Told] = []
    compared = Comparison(step)
    with torch.no_grad():
        for module in landing.mapping.modules:
            if module.fallback:
                continue
            compared.different += module.unfilled()
            if not module.filled:
                continue
            tensors: dict[str, Any] | None = None
            if landing.hidden(module.path):
                beside = Module(landing, module.path)
                beside.compare(trainer, step, deadline, compared)
                if landing.staged(module.path):
                    tensors = beside.tensors
            for leaf in module.leaves:
                if leaf.sources:
                    tensor = (
                        landing.live(module.path, leaf.name)
                        if tensors is None
                        else tensors[leaf.name]
                    )
                    found += _of_leaf(leaf, tensor.detach())
    return found, compared


def _of_leaf(leaf: Leaf, tensor: Any) -> Iterator[Told]:
    size = tensor.element_size()
    for source in leaf.sources:
        for piece in source.pieces:
            steps = [step // size for step in piece.stride]
            first = tensor.storage_offset() + piece.at // size
            values = tensor.as_strided(piece.extent, steps, first)
            digests = {leaf.dtype: box_digest(values, piece.offset)}
            for narrow in NARROWED if leaf.dtype == "F32" else ():
                rounded = values.to(torch_dtype_of(narrow))
                if rounded.to(values.dtype).equal(values):
                    digests[narrow] = box_digest(rounded, piece.offset)
            yield source.name, list(piece.offset), list(piece.extent), digests
