# SPDX-License-Identifier: Apache-2.0
"""The memory in which a vLLM worker has its LoRA slots: which tensors, and how one slot is cleared.

A model has hundreds of such tensors. What each pull asks is answered with one look at each, and a
slot is cleared by few calls: meanwhile the engine's thread cannot have the interpreter.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["SlotMemory", "Stack", "stacks_of"]

_MOE = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
_PLAIN = ("lora_a_stacked", "lora_b_stacked")
_PIECE = 4 << 20  # bytes that are cleared at a time beside the engine


class Stack(NamedTuple):
    """One of a module's tensors that hold all slots; the first dimension is the slot."""

    attribute: str
    place: int | None
    tensor: Any

    @property
    def leaf(self) -> str:
        return self.attribute if self.place is None else f"{self.attribute}.{self.place}"


def _attributes(module: Any) -> tuple[str, ...]:
    return _MOE if hasattr(module, _MOE[0]) else _PLAIN


def stacks_of(module: Any) -> list[Stack]:
    """Of one of vLLM's modules with LoRA; none: it keeps its adapters in an unknown way."""
    found = []
    for attribute in _attributes(module):
        value = getattr(module, attribute, None)
        if isinstance(value, torch.Tensor):
            found.append(Stack(attribute, None, value))
        elif isinstance(value, (tuple, list)):
            found += [Stack(attribute, i, tensor) for i, tensor in enumerate(value)]
    return found


class SlotMemory:
    """All slots of one of vLLM's managers of adapters, as they were when this was made.

    signature: of the memory; where another one is an adapter needs another layout.
    """

    def __init__(self, manager: Any) -> None:
        self._modules = list(manager.modules.values())
        self._holders = [
            (module, attribute, getattr(module, attribute, None))
            for module in self._modules
            for attribute in _attributes(module)
        ]
        stacks = {path: stacks_of(module) for path, module in manager.modules.items()}
        self._tensors = [stack.tensor for of_one in stacks.values() for stack in of_one]
        self._at = [(tensor.shape, tensor.data_ptr()) for tensor in self._tensors]
        self.signature = tuple(
            (path, stack.leaf, tuple(stack.tensor.shape), stack.tensor.dtype)
            for path, of_one in stacks.items()
            for stack in of_one
        )
        self._clearing: dict[int, list[Callable[[], Any]]] = {}

    def stands(self, manager: Any) -> bool:
        """Whether *manager* has its slots there still."""
        now = manager.modules
        return (
            len(now) == len(self._modules)
            and all(map(operator.is_, now.values(), self._modules))
            and all(getattr(module, name, None) is held for module, name, held in self._holders)
            and all(
                tensor.shape == shape and tensor.data_ptr() == at
                for tensor, (shape, at) in zip(self._tensors, self._at, strict=True)
            )
        )

    def clearing(self, slot: int) -> list[Callable[[], Any]]:
        """What clears that slot, as vLLM does, in pieces of some milliseconds; for host memory."""
        known = self._clearing.get(slot)
        if known is None:
            known = self._clearing[slot] = list(map(_zeroing, self._groups(slot)))
        return known

    def _groups(self, slot: int) -> list[list[Any]]:
        switches = [getattr(module, "adapter_enabled", None) for module in self._modules]
        groups: list[list[Any]] = [[switch[slot] for switch in switches if switch is not None]]
        size = _PIECE
        for tensor in self._tensors:
            part = tensor[slot].detach()
            if size + part.nbytes > _PIECE:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part.nbytes
        return [group for group in groups if group]


def _zeroing(tensors: list[Any]) -> Callable[[], Any]:
    return functools.partial(torch._foreach_zero_, tensors)
