# SPDX-License-Identifier: Apache-2.0
"""A model's tensors beside the model: a step that is read ahead, and what the model should hold.

What stalls an engine is a copy within its device then, not the way from the trainer. The memory of
a step is as much as the worker's part of the model: on its device if there is room, in pinned host
memory otherwise.

Whether a model holds what is published is found by reading it once more beside the model, proven by
digests that the trainer's ranks make of their own memory. What processing makes of the tensors
(other scales, another layout) is made again and compared. What processing makes beside the tensors
(a packed copy on the CPU) is asked by one-hot inputs, whose products are the weight's elements. Of
digests for :mod:`fanin.check` a mapping says the way back: which elements of which published tensor
lie where. What processing has made into something else has no way back, and is compared so, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from fanin.engine.copies import laid_out, room_of, span
from fanin.engine.deltas import Asking
from fanin.engine.landing import Progress
from fanin.engine.trainers import Trainer, left
from fanin.engine.weights_state import require_host_room
from fanin.mapping import PackedMapping
from fanin.mapping._held import Told, held_of
from fanin.vllm import reload
from fanin.vllm.landings import MappedLanding

_BLOCK = 256
_PINNED = "pinned host memory"
# Of the device's free memory, for what else is allocated meanwhile.
_SPARE = 1.1
# Types whose elements are values by themselves.
_ASKED = ("torch.bfloat16", "torch.float16", "torch.float32")


class Shadow:
    """Memory for one step of a mapped model. Nothing but pulls writes it.

    Args:
        workers: of this engine, who take as much each.
        asking: for what has changed alone, or not; None: for the whole.

    Raises HostError if the host has not so much.
    """

    def __init__(
        self, landing: MappedLanding, workers: int = 1, asking: Asking | None = None
    ) -> None:
        self._landing = landing
        layouts: dict[tuple[str, str], Any] = {}
        for module in landing.mapping.modules:
            if not module.filled:
                continue
            leaves = dict(reload.Skeleton(module.path, landing.module(module.path)).leaves)
            if not landing.staged(module.path):
                leaves = {}
            for place, leaf in landing.filled:
                if place == module.path and leaf not in leaves:
                    leaves[leaf] = getattr(landing.module(module.path), leaf)
            layouts.update({(module.path, leaf): tensor for leaf, tensor in leaves.items()})
        self._tensors = self._lay_out(layouts, workers)
        self._packed: PackedMapping = landing.mapping.pack(self._lookup)
        self._asking = asking if self._packed.dtype is None else None
        self.asked = False
        self._installing = landing.installation(self._tensors)

    def _lay_out(
        self, layouts: dict[tuple[str, str], Any], workers: int
    ) -> dict[tuple[str, str], Any]:
        import torch

        self.bytes = room_of(layouts.values())
        device, pinned = self._landing.device, False
        if device.type == "cuda":
            pinned = torch.cuda.mem_get_info(device)[0] < self.bytes * _SPARE
            device = torch.device("cpu") if pinned else device
        if device.type == "cpu":
            require_host_room(self.bytes, workers)
        self.place = _PINNED if pinned else str(device)
        room = torch.empty(self.bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        return laid_out(room, layouts)

    def _lookup(self, path: str, leaf: str) -> Any:
        return self._tensors[path, leaf]

    def on_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """What another thread has to be in when it fills: the stream that this one installs on.

        PyTorch gave the shadow memory in the order of that stream. Until the work that is on the
        stream now has ended, that work may write to it.
        """
        if self._landing.device.type != "cuda":
            return nullcontext
        import torch

        stream = torch.cuda.current_stream(self._landing.device)
        return lambda: torch.cuda.stream(stream)

    def fill(self, trainer: Trainer, step: int, deadline: float, progress: Progress) -> Any:
        """Reads *step*, proven; the pull's result. Blocks until *deadline* at most."""
        self._landing.mapping.fill(self._lookup)
        how: dict[str, Any] = {"verify": self._landing.verify}
        asking = self._asking
        if asking is not None and not asking.asks(trainer.published):
            asking = None
        self.asked = asking is not None
        if asking is not None:
            how = asking.options()
        result = trainer.reader.pull_into(
            trainer.run,
            self._packed.tensors,
            step=step,
            timeout=left(deadline),
            dtype=self._packed.dtype,
            rank_progress=progress,
            **how,
        )
        if asking is not None:
            asking.came(result)
        self._packed.settle()
        return result

    def install(self) -> None:
        """Copies what was read into the model, and processes what has to be."""
        self._installing()

    def touched(self) -> None:
        self._packed.tensors.touched()


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
            made = self._skeleton.result_of(own)
            wanted.update((leaf, made[leaf]) for leaf in made if leaf in own or leaf not in wanted)
        different = []
        for leaf, tensor in wanted.items():
            live = self._skeleton.live(leaf)
            if tensor is not None and live is not None and not reload.same_bytes(live, tensor):
                different.append(f"{path}.{leaf}")
        seen = not landing.derives(path) or self._asked(different)
        found.different += dict.fromkeys(different)
        if not seen:
            found.unseen.append(path)
        elif not different:
            found.modules += 1

    def _asked(self, different: list[str]) -> bool:
        """Whether the module could be asked by one-hot inputs: what differs is in *different*.

        Products of a quantized weight are no elements of it.
        """
        import torch

        weight, live = self.tensors.get("weight"), self._skeleton.live("weight")
        if weight is None or weight.dim() != 2 or str(weight.dtype) not in _ASKED:
            return False
        if live is not None and live.numel() and live.dtype != weight.dtype:
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
