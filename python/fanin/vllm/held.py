# SPDX-License-Identifier: Apache-2.0
"""Digests of what a worker's model holds of each published tensor, for :mod:`fanin.check`.

A mapping says which elements of which published tensor lie where, so it says the way back as well.
What processing has made into something else has no way back: such a module is read once more beside
the model and processed, and what it gives is compared with the kernels' tensors.
"""

from __future__ import annotations

from typing import Any

from fanin.engine.trainers import Trainer
from fanin.mapping._held import Told, held_of
from fanin.vllm.mapped import MappedLanding
from fanin.vllm.weights_check import Comparison, Module

__all__ = ["held"]


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
            found += held_of(
                (leaf, tensors[leaf.name] if tensors else landing.live(module.path, leaf.name))
                for leaf in module.leaves
                if leaf.sources
            )
    return found, compared
