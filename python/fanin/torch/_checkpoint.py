# SPDX-License-Identifier: Apache-2.0
"""What transformers would write of a model's tensors: found out by its own conversion.

From version 5 on transformers keeps some tensors otherwise than checkpoints do (the experts of a
layer in one), and converts them when it saves. That conversion is run here over tensors without
memory: what is a view of a stored tensor is a slice of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fanin.errors import RequestError
from fanin.torch._names import Published, Slice

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class _NoCopies(TorchFunctionMode):
    """Copies that only make memory contiguous are left out: they say nothing of names."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _conversion() -> Callable[..., dict[str, Any]] | None:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    return revert_weight_conversion


def converts(model: Any) -> bool:
    """Whether *model* is one that transformers converts when it saves it."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(model, PreTrainedModel) and _conversion() is not None


def slices_by_name(model: Any, shapes: Shapes) -> dict[str, list[Slice]]:
    """What is saved of each of the model's tensors, by the names and shapes that they have in it.

    RequestError: transformers computes what it would save.
    """
    convert = _conversion()
    assert convert is not None
    stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {one.untyped_storage()._cdata: name for name, one in stored.items()}
    with _NoCopies():
        saved = convert(model, dict(stored))
    out: dict[str, list[Slice]] = {name: [] for name in shapes}
    for key, view in saved.items():
        name = names.get(view.untyped_storage()._cdata)
        index = None if name is None else _index_of(shapes[name], view)
        if name is None or index is None:
            raise RequestError.make(
                f"'{key}' of the checkpoint is no part of one stored tensor: transformers computes "
                "it when it saves",
                "give names= that says what is published of each stored tensor",
                key=key,
            )
        out[name].append(Slice(key, index))
    for name, slices in out.items():
        _refuse_some_experts(model, name, shapes[name], slices)
    return out


def _refuse_some_experts(model: Any, name: str, shape: Shape, slices: list[Slice]) -> None:
    """transformers counts experts from 0, also those of a plain tensor that has a rank's only."""
    if len(slices) < 2 or ".experts." not in name:
        return
    config = model.config.get_text_config()
    told = (getattr(config, field, None) for field in _EXPERTS)
    counts = {count for count in told if isinstance(count, int)}
    if counts and shape[0] not in counts:
        raise RequestError.make(
            f"'{name}' has {shape[0]} experts, and the model's configuration says "
            + " or ".join(map(str, sorted(counts))),
            "give names=fanin.torch.names.experts(first=...), the number of this rank's first one, "
            "or make the experts a DTensor",
            key=name,
        )


def _index_of(shape: Shape, view: Any) -> tuple[int | slice, ...] | None:
    """The index of a packed tensor of *shape* that gives *view*, None: no such index does."""
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if tuple(view.shape) == shape and tuple(view.stride()) == tuple(steps):
        return ()
    offset = int(view.storage_offset())
    index: list[int | slice] = []
    left = list(zip(view.shape, view.stride(), strict=True))
    for size, step in zip(shape, steps, strict=True):
        start, offset = divmod(offset, step) if step else (0, offset)
        if left and left[0][1] == step and start + left[0][0] <= size:
            index.append(slice(start, start + left.pop(0)[0]))
        else:
            index.append(start)
    return None if left or offset else tuple(index)


class CheckpointNames:
    """A function for ``names=``: what transformers saves of *model*, under the names it saves."""

    def __init__(self, model: Any, shapes: Callable[[], Shapes]) -> None:
        """shapes: gives the names and shapes of all that is stored now."""
        self._model = model
        self._shapes = shapes
        self._known: dict[tuple[str, Shape], list[Slice]] = {}

    def __call__(self, name: str, shape: Shape) -> Published:
        if (name, shape) not in self._known:
            shapes = {**self._shapes(), name: shape}
            slices = slices_by_name(self._model, shapes)
            self._known = {(one, shapes[one]): parts for one, parts in slices.items()}
        return self._known[name, shape]
