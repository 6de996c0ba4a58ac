# SPDX-License-Identifier: Apache-2.0
"""Parameters whose published values are computed: what ``transform=`` says of them.

Whole adapters that are merged, and weights that are packed in 4 bits, are published this way too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fanin._cover import Part
from fanin._tensors import Box
from fanin.errors import RequestError
from fanin.torch._blocks import layout
from fanin.torch._derived import Want, allocate
from fanin.torch._names import Slice
from fanin.torch._state import State, layout_of, view_of
from fanin.torch._tree import Item

__all__ = [
    "Computing",
    "Transform",
    "Values",
    "boxes_of",
    "computed",
    "parts_of",
    "placed",
    "values_of",
]


@dataclass(frozen=True)
class Values:
    """What is published in place of a stored parameter.

    Args:
        shape: Of the whole tensor, on all ranks together.
        dtype: Torch's.
        parts: What this rank computes: offset and extent of each part, in elements of the whole
            tensor. Empty: nothing.
        fill: Called at each publish, with one contiguous tensor a part, in their order. It writes
            the values of now into them, on the current CUDA stream. It may use collectives if all
            ranks of their group fill the same tensors. A rank without parts is called too.
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[Part, ...]
    fill: Callable[[list[Any]], None]


Transform = Callable[[str, Any, str, Any], Values | None]
"""For ``transform=``: given a parameter's name, the module that owns it, the attribute and the
tensor that is there, as ``model.named_parameters()`` has it (persistent buffers too). Returns what
is published in its place; None: the tensor as it is. ``names=`` is then asked of the name and of
the shape in :class:`Values`. It is asked at the start, and again when the tensor is replaced or
the modules have changed."""


class _Local(NamedTuple):
    """A part of a tensor that this rank holds."""

    offset: tuple[int, ...]
    """In the whole tensor."""
    values: Any
    """The part, as a view of the local tensor."""


def parts_of(tensor: Any, name: str = "tensor") -> list[tuple[tuple[int, ...], Any]]:
    """The parts of *tensor* that this rank holds: of each its offset and a view of its values.

    Args:
        tensor: a DTensor of any placements but Partial, or a plain tensor, which is all there is.
        name: for error messages.

    Returns:
        Pairs of the offset in the whole tensor and the view. Together with the view's shape the
        offset makes a part of :class:`Values`.

    Raises:
        RequestError: the placements give no such parts.
    """
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return [_Local((0,) * tensor.dim(), tensor.detach())]
    local = tensor._local_tensor
    if hasattr(local, "trigger_wait"):
        local = local.trigger_wait()
    told = layout_of(Item(name, name, None, name), spec, getattr(spec, "shard_order", None))
    blocks = layout(
        tuple(tensor.shape),
        told.splits,
        told.mesh_shape,
        told.coordinate,
        tuple(local.shape),
        told.order,
    )
    if blocks is None:
        raise RequestError.make(
            f"'{name}' has a local tensor of shape {list(local.shape)}, which its placements "
            f"{spec.placements} do not give for {list(tensor.shape)}",
            "make the parameter by fully_shard or distribute_tensor",
            key=name,
        )
    local = local.detach()
    out: list[tuple[tuple[int, ...], Any]] = []
    for block in blocks:
        index = tuple(slice(at, at + n) for at, n in zip(block.local, block.extent, strict=True))
        out.append(_Local(block.offset, local[index]))
    return out


def values_of(item: Item, transform: Transform | None, tensor: Any) -> Values | None:
    """The transform's answer. TypeError: of another kind. RequestError: parts that are none."""
    if transform is None:
        return None
    answer = transform(item.name, item.owner, item.attribute, tensor)
    if answer is None:
        return None
    if not isinstance(answer, Values):
        raise TypeError(
            f"transform returned {answer!r} for {item.name}; fanin.torch.Values or None is wanted"
        )
    shape = tuple(answer.shape)
    for offset, extent in answer.parts:
        if not (
            len(offset) == len(extent) == len(shape)
            and all(
                at >= 0 and n >= 0 and at + n <= size
                for at, n, size in zip(offset, extent, shape, strict=True)
            )
        ):
            raise RequestError.make(
                f"transform says that this rank computes the part {list(extent)} at "
                f"{list(offset)} of '{item.name}' of shape {list(shape)}",
                "give offset and extent in elements of the whole tensor",
                key=item.name,
            )
    return answer


def computed(
    old: State | None, param: Any, local: Any, values: Values, slices: tuple[Slice, ...]
) -> State:
    """The state of a parameter of which *values* are published, in the memory of the state before
    if they are as they were. Without memory otherwise, see :func:`placed`."""
    state = State(
        param=param,
        spec=getattr(param, "_spec", None),
        pointer=-1,
        dtype=values.dtype,
        local_shape=(sum(math.prod(extent) for _, extent in values.parts),),
        steps=(1,),
        stride=(values.dtype.itemsize,),
        device=local.device.index if local.is_cuda else -1,
        storage=None,
        shape=tuple(values.shape),
        slices=slices,
        values=values,
    )
    if old is not None and old.storage is not None and old.values is not None:
        if (old.dtype, old.device, old.values.parts) == (state.dtype, state.device, values.parts):
            state = state._replace(pointer=old.pointer, storage=old.storage)
    return state


def boxes_of(state: State) -> tuple[Box, ...]:
    """Where the parts lie: one behind the other, each contiguous."""
    assert state.values is not None
    size, at = state.dtype.itemsize, state.pointer
    out = []
    for offset, extent in state.values.parts:
        stride, step = [], size
        for n in reversed(extent):
            stride.append(step)
            step *= n
        out.append(Box(tuple(offset), tuple(extent), tuple(reversed(stride)), at))
        at += math.prod(extent) * size
    return tuple(out)


def placed(
    states: list[tuple[Item, State]], passes: Callable[[Item, State], bool]
) -> list[tuple[Item, State]]:
    """The states, those of computed values with memory where they have none.

    passes: whether values are wanted only until the next ones are computed. Such ones lie in the
    same memory of their device.
    """
    new = [
        at for at, (_, one) in enumerate(states) if one.values is not None and one.storage is None
    ]
    passing = {at for at in new if passes(*states[at])}
    sizes: dict[Any, int] = {}
    wanted = []
    for at in new:
        state = states[at][1]
        device = torch.device("cpu" if state.device < 0 else f"cuda:{state.device}")
        if at in passing:
            size = state.local_shape[0] * state.dtype.itemsize
            sizes[device] = max(size, sizes.get(device, 0))
        else:
            wanted.append(Want(device, state.dtype, state.local_shape))
    lasting = iter(allocate(wanted))
    rooms = {
        device: torch.empty(n, dtype=torch.uint8, device=device) for device, n in sizes.items()
    }
    out = list(states)
    for at in new:
        item, state = states[at]
        device = torch.device("cpu" if state.device < 0 else f"cuda:{state.device}")
        memory = rooms[device] if at in passing else next(lasting)
        lies = state._replace(pointer=memory.data_ptr(), storage=memory.untyped_storage())
        out[at] = (item, lies)
    return out


class Computing:
    """The stage that computes what is published in place of stored tensors."""

    def __init__(
        self,
        items: Callable[[], Iterable[Item]],
        done: Callable[[], None],
        take: Callable[[Item], None] = lambda item: None,
    ) -> None:
        """done: called when all is computed. take: called when an item's values are."""
        self._items = items
        self._done = done
        self._take = take

    def fill(self) -> None:
        """All are computed also if one raises, as other ranks wait for it in a collective."""
        self._each(lambda state: [view_of(state, box) for box in boxes_of(state)], self._take)

    def miss(self) -> None:
        """Computes nothing that is read: readers may have the last step's results yet."""
        with contextlib.suppress(Exception):
            self._each(_scratch, lambda item: None)

    def release(self) -> None:
        """The results' memory goes with the states."""

    def _each(self, memory: Callable[[State], list[Any]], take: Callable[[Item], None]) -> None:
        failed: Exception | None = None
        try:
            for item in self._items():
                state = item.state
                if state is None or state.values is None:
                    continue
                try:
                    with torch.no_grad():
                        state.values.fill(memory(state))
                    take(item)
                except Exception as error:
                    failed = failed or error
        finally:
            self._done()
        if failed is not None:
            raise failed


def _scratch(state: State) -> list[Any]:
    assert state.values is not None
    device = "cpu" if state.device < 0 else f"cuda:{state.device}"
    parts = state.values.parts
    return [torch.empty(extent, dtype=state.dtype, device=device) for _, extent in parts]
