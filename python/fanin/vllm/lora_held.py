# SPDX-License-Identifier: Apache-2.0
"""Digests of what a worker holds of an adapter's published tensors, for :mod:`fanin.check`.

vLLM's own naming, packing and slicing are run over numbers (:mod:`fanin.vllm.slots`): what says
where each element goes says the way back as well. Read is the slot that kernels read; of an adapter
that has none now, what vLLM would put into one. The scale is multiplied in and cannot be undone:
the trainer's ranks digest what it makes of theirs. Nothing is read from the trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fanin._digest import box_digests
from fanin._dtypes import dtype_bits, torch_dtype
from fanin._served import scaled
from fanin._tensors import Shard
from fanin.errors import RequestError, StateError
from fanin.mapping._held import Told
from fanin.vllm.images import Image
from fanin.vllm.slot_memory import stacks_of
from fanin.vllm.slots import Layout, Part, twin_of, unfit

__all__ = ["held"]

#: All tensors that a module has of one adapter, by leaf, by the module's path.
Slot = Callable[[str], dict[str, Any]]


def held(
    worker: Any,
    number: int,
    tensors: Sequence[tuple[str, Sequence[int]]],
    config: Mapping[str, Any],
    is_3d: bool,
) -> dict[str, Any]:
    """What *worker* holds of the adapter that vLLM has given that number.

    Args:
        tensors: that are published: names and shapes.
        config: the adapter's PEFT configuration.
        is_3d: of vLLM's request.

    Raises StateError if it has none of that number, RequestError if its slots cannot be read.
    """
    if why := unfit(worker):
        raise RequestError.make(f"no digests of adapters here: {why}")
    loader = worker.model_runner.lora_manager
    manager = loader._adapter_manager
    lora = manager.list_adapters().get(number)
    if lora is None:
        raise StateError.make(
            f"this worker has no adapter {number} now", "send the adapter a request, and ask again"
        )
    # Types are of no matter: what is read is compared in the slots' own.
    published = [Shard(name, "F32", tuple(shape), (), -1) for name, shape in tensors]
    layout = Layout.record(loader, published, config, is_3d=is_3d, partial=True)
    slot = _slot_of(manager, lora, number)
    with torch.no_grad():
        found, filled = _boxes(layout, slot)
        strange = [
            f"{path}.{leaf}: it is not zero where the adapter has nothing"
            for path in manager.modules
            for leaf, tensor in slot(path).items()
            if int(torch.count_nonzero(tensor)) != filled.get((path, leaf), 0)
        ]
    return {"held": found, "different": strange, "unseen": [], "untold": [], "unused": []}


def _slot_of(manager: Any, lora: Any, number: int) -> Slot:
    if number in manager.lora_index_to_id:
        index = manager.lora_index_to_id.index(number)
        return lambda path: {s.leaf: s.tensor[index] for s in stacks_of(manager.modules[path])}
    image: Image | None = getattr(lora, "image", None)  # it came in the layout of the slots

    def made(path: str) -> dict[str, Any]:
        if image is None:
            twin = twin_of(manager, lora, path)
            return {stack.leaf: stack.tensor[0] for stack in stacks_of(twin)}
        return {
            stack.leaf: image.slot_of(path, stack.leaf, stack.tensor[0])
            for stack in stacks_of(manager.modules[path])
        }

    return functools.cache(made)


def _boxes(layout: Layout, slot: Slot) -> tuple[list[Told], dict[tuple[str, str], int]]:
    """Every box of a published tensor, and how many elements of each of the slot's tensors, where
    the adapter fills it, are not zero."""
    boxes, filled = [], {}
    for part, leaf in zip(layout.parts, layout.leaves(), strict=True):
        final = slot(part.path)[part.leaf][tuple(slice(n) for n in leaf.shape)]
        filled[part.path, part.leaf] = int(torch.count_nonzero(final))
        boxes += [(name, piece, part, one) for name, piece, one in _pieces(leaf, final)]
    digests = box_digests((values, piece.offset) for _, piece, _, values in boxes)
    return [
        (name, list(piece.offset), list(piece.extent), {_kind(part): digest})
        for (name, piece, part, _), digest in zip(boxes, digests, strict=True)
    ], filled


def _pieces(leaf: Any, final: Any) -> Iterator[tuple[str, Any, Any]]:
    """The published boxes in a slot's tensor, whose elements lie in another order than they land
    in."""
    size = dtype_bits(leaf.dtype) // 8
    steps = [step // size for step in leaf.stride]
    landed = torch.empty_strided(leaf.shape, steps, dtype=final.dtype, device=final.device)
    landed.copy_(final)
    for source in leaf.sources:
        for piece in source.pieces:
            strides = [step // size for step in piece.stride]
            yield source.name, piece, landed.as_strided(piece.extent, strides, piece.at // size)


def _kind(part: Part) -> str:
    return scaled(str(torch_dtype(part.dtype)), part.scale)
