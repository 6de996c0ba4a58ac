# SPDX-License-Identifier: Apache-2.0
"""Whether a model holds what is published: overwrite it, pull, then compare every byte.

The expected bytes are read once more, beside the model, and proven by digests that the trainer's
ranks make of their own memory. What processing hides from tensors (a packed copy on the CPU) is
asked by one-hot inputs, whose products are the weight's elements.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from fanin.engine.trainers import Trainer, left
from fanin.vllm import reload
from fanin.vllm.mapped import MappedLanding, span

__all__ = ["Comparison", "Module", "compare", "poison"]

_BLOCK = 256


@dataclass
class Comparison:
    """What a worker's model holds, beside what is published."""

    step: int
    #: That hold what is published.
    modules: int = 0
    tensors: int = 0
    bytes: int = 0
    #: Paths of parameters and buffers that hold something else.
    different: list[str] = field(default_factory=list)
    #: Modules of which nothing shows what their kernels use.
    unseen: list[str] = field(default_factory=list)
    #: Parameters that no update fills, by ``keep``.
    kept: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For the way between processes."""
        return asdict(self)


def poison(landing: MappedLanding) -> None:
    """Overwrites everything that a pull fills. The engine's own tensors stay."""
    for path, leaf in sorted(landing.filled):
        tensor = reload.Skeleton(path, landing.module(path)).live(leaf)
        if tensor is not None and tensor.numel():
            tensor.data.fill_(math.nan if tensor.is_floating_point() else 90)
    filled = {path for path, _ in landing.filled}
    direct = sorted(path for path in filled if not landing.staged(path))
    landing.mapping.fill(lambda path, leaf: getattr(landing.module(path), leaf), direct)


def compare(landing: MappedLanding, trainer: Trainer, step: int, deadline: float) -> Comparison:
    """Reads *step* beside the model, a module at a time, and compares.

    Takes the memory of the largest module twice. Blocks until *deadline* at most; raises what a
    pull raises.
    """
    import torch

    found = Comparison(step)
    with torch.no_grad():
        for module in landing.mapping.modules:
            if module.filled and not module.fallback:
                Module(landing, module.path).compare(trainer, step, deadline, found)
    return found


class Module:
    """One module of the model, and memory of its own for what it should hold."""

    def __init__(self, landing: MappedLanding, path: str) -> None:
        import torch

        self._landing, self._path = landing, path
        self._skeleton = reload.Skeleton(path, landing.module(path))
        #: What was read, before processing.
        self.tensors: dict[str, Any] = {}
        for leaf, layout in self._skeleton.leaves.items():
            room = torch.empty(span(layout), dtype=layout.dtype, device=landing.device)
            self.tensors[leaf] = room.as_strided(layout.shape, layout.stride())
            live = self._skeleton.live(leaf)
            own = (path, leaf) not in landing.filled
            if own and live is not None and live.shape == layout.shape:
                self.tensors[leaf].copy_(live)
        for place, leaf in landing.filled:
            if place == path and leaf not in self.tensors:  # never a skeleton: a bias
                self.tensors[leaf] = torch.empty_like(self._skeleton.live(leaf))

    def compare(self, trainer: Trainer, step: int, deadline: float, found: Comparison) -> None:
        landing, path = self._landing, self._path

        def lookup(_: str, leaf: str) -> Any:
            return self.tensors[leaf]

        landing.mapping.fill(lookup, [path])
        packed = landing.mapping.pack(lookup, [path])
        result = trainer.client.pull_into(
            trainer.run,
            packed.tensors,
            step=step,
            timeout=left(deadline),
            dtype=packed.dtype,
            verify=True,
        )
        packed.settle()
        found.bytes += result.bytes
        found.tensors += result.tensors
        module = landing.module(path)
        wanted = {
            leaf: reload.as_loaded(module, leaf, tensor) for leaf, tensor in self.tensors.items()
        }
        if landing.staged(path):
            own = {leaf: self.tensors[leaf].clone() for leaf in self._skeleton.leaves}
            wanted.update(self._skeleton.result_of(own))
        different = []
        for leaf, tensor in wanted.items():
            live = self._skeleton.live(leaf)
            if tensor is not None and live is not None and not reload.same_bytes(live, tensor):
                different.append(f"{path}.{leaf}")
        seen = not landing.hidden(path) or self._asked(different)
        found.different += dict.fromkeys(different)
        if not seen:
            found.unseen.append(path)
        elif not different:
            found.modules += 1

    def _asked(self, different: list[str]) -> bool:
        """Whether the module could be asked by one-hot inputs: what differs is in *different*."""
        import torch

        weight = self.tensors.get("weight")
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            return False
        width = weight.shape[1]
        for first in range(0, width, _BLOCK):
            count = min(_BLOCK, width - first)
            inputs = torch.zeros(count, width, dtype=weight.dtype, device=weight.device)
            inputs[torch.arange(count), first + torch.arange(count)] = 1
            made = self._skeleton.rows_of(inputs).to(weight.dtype)
            if not torch.equal(made, weight[:, first : first + count].t()):
                different.append(f"{self._path}.weight")
                break
        return True
