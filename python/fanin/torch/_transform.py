# SPDX-License-Identifier: Apache-2.0
"""Parameters whose published values are computed: what ``transform=`` says of them.

Whole adapters that are merged, and weights that are packed in 4 bits, are published this way too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
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


Maker = tuple[str, int]
"""Whose values are made: an item's name, and the number of a part if they are computed one by
one."""

Transform = Callable[[str, Any, str, Any], Values | None]
"""For ``transform=``: given a parameter's name, the module that owns it, the attribute and the
tensor that is there, as ``model.named_parameters()`` has it (persistent buffers too). Returns what
is published in its place; None: the tensor as it is. ``names=`` is then asked of the name and of
the shape in :class:`Values`. It is asked at the start, and again when the tensor is replaced or
the modules have changed."""


@dataclass(frozen=True)
class Parted(Values):
    """Values whose parts can be computed one by one, each in the memory of the one before.

    Args:
        begin: Called at each publish. It gives what computes one part, by its number, into a
            tensor. Collectives and refusals come before that.
    """

    begin: Callable[[], Callable[[int, Any], None]] = field(kw_only=True)


def parted(
    shape: tuple[int, ...],
    dtype: Any,
    parts: tuple[Part, ...],
    begin: Callable[[], Callable[[int, Any], None]],
) -> Parted:
    def fill(outs: list[Any]) -> None:
        compute = begin()
        for number, out in enumerate(outs):
            compute(number, out)

    return Parted(shape, dtype, parts, fill, begin=begin)


class Cut(NamedTuple):
    """How large parts are cut that are computed one by one."""

    grain: int
    """Cuts are between rows of matrices, at multiples of it."""
    most: int = 32 << 20
    """Bytes."""

    def of(self, part: Part, width: int) -> list[Part]:
        """Parts of a part; width: bytes of an element."""
        (offset, extent), most = part, self.most // width
        if math.prod(extent) <= most or len(extent) < 2:
            return [part]
        dim = next((at for at, n in enumerate(extent[:-2]) if n > 1), len(extent) - 2)
        grain = self.grain if dim == len(extent) - 2 else 1
        step = max(1, most // math.prod(extent[dim + 1 :]) // grain) * grain
        first, end, out = offset[dim], offset[dim] + extent[dim], []
        while first < end:
            stop = min((first // step + 1) * step, end)
            where = (*offset[:dim], first, *offset[dim + 1 :])
            size = (*extent[:dim], stop - first, *extent[dim + 1 :])
            out += [(where, size)] if dim == len(extent) - 2 else self.of((where, size), width)
            first = stop
        return out


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
            state = state._replace(pointer=old.pointer, storage=old.storage, overlaid=old.overlaid)
    return state


def boxes_of(state: State) -> tuple[Box, ...]:
    """Where the parts lie: one behind the other, or all in one place, each contiguous."""
    assert state.values is not None
    size, at = state.dtype.itemsize, state.pointer
    out = []
    for offset, extent in state.values.parts:
        stride, step = [], size
        for n in reversed(extent):
            stride.append(step)
            step *= n
        out.append(Box(tuple(offset), tuple(extent), tuple(reversed(stride)), at))
        at += 0 if state.overlaid else math.prod(extent) * size
    return tuple(out)


def one_by_one(state: State) -> list[State]:
    """The state, as if each of the parts that are computed one by one was all that there is."""
    values = state.values
    if values is None or not state.overlaid or not values.parts:
        return [state]
    return [state._replace(values=replace(values, parts=(part,))) for part in values.parts]


def placed(
    states: list[tuple[Item, State]], passes: Callable[[Item, State], bool]
) -> list[tuple[Item, State]]:
    """The states, those of computed values with memory where they have none.

    passes: whether values are wanted only until the next ones are computed. Such ones lie in the
    same memory of their device, and so do their parts if these are computed one by one.
    """
    new = [
        at for at, (_, one) in enumerate(states) if one.values is not None and one.storage is None
    ]
    passing = {at for at in new if passes(*states[at])}
    sizes: dict[Any, int] = {}
    wanted = []
    out = list(states)
    for at in new:
        item, state = states[at]
        device = torch.device("cpu" if state.device < 0 else f"cuda:{state.device}")
        if at in passing:
            state = state._replace(overlaid=isinstance(state.values, Parted))
            out[at] = item, state
            size = (
                max((math.prod(one) for one in _extents(state)), default=0) * state.dtype.itemsize
            )
            sizes[device] = max(size, sizes.get(device, 0))
        else:
            wanted.append(Want(device, state.dtype, state.local_shape))
    lasting = iter(allocate(wanted))
    rooms = {
        device: torch.empty(n, dtype=torch.uint8, device=device) for device, n in sizes.items()
    }
    for at in new:
        item, state = out[at]
        device = torch.device("cpu" if state.device < 0 else f"cuda:{state.device}")
        memory = rooms[device] if at in passing else next(lasting)
        lies = state._replace(pointer=memory.data_ptr(), storage=memory.untyped_storage())
        out[at] = (item, lies)
    return out


def _extents(state: State) -> list[tuple[int, ...]]:
    """Of what lies in memory at a time."""
    if state.overlaid and state.values is not None:
        return [extent for _, extent in state.values.parts]
    return [state.local_shape]


class Batch:
    """What computes several items together. This one does not: nothing waits."""

    def settle(self) -> None:
        """What was asked for so far is computed on the current streams."""

    def finish(self) -> None:
        """All that the step wants was asked for."""

    def repeat(self, states: list[State]) -> bool:
        """Computes all of *states* as at the step before, if only contents have changed since.
        False: it did nothing, and is asked for each of them. For callers under torch.no_grad()."""
        return False

    def release(self) -> None:
        """Holds no parameter any more."""


class Computing:
    """The stage that computes what is published in place of stored tensors."""

    def __init__(
        self,
        items: Callable[[], Iterable[Item]],
        batch: Batch,
        take: Callable[[Maker], None] | None = None,
    ) -> None:
        """take: called when an item's values are computed, or some of its parts."""
        self._items = items
        self._batch = batch
        self._take = take
        self._outs: dict[int, tuple[State, list[Any]]] = {}
        """Where results lie, by items: views take longer to make than to fill."""

    def fill(self) -> None:
        """All are computed also if one raises, as other ranks wait for it in a collective."""
        if self._take is None and self._repeats():
            return
        known, self._outs = self._outs, {}

        def outs(item: Item, state: State) -> list[Any]:
            held = known.get(id(item))
            if held is None or held[0] is not state:
                held = state, [view_of(state, box) for box in boxes_of(state)]
            self._outs[id(item)] = held
            return held[1]

        def take(maker: Maker) -> None:
            if self._take is not None:
                self._batch.settle()
                self._take(maker)

        self._each(outs, take)

    def _repeats(self) -> bool:
        states = [item.state for item in self._items() if item.state is not None]
        with torch.no_grad():
            return self._batch.repeat([one for one in states if one.values is not None])

    def miss(self) -> None:
        """Computes nothing that is read: readers may have the last step's results yet."""
        with contextlib.suppress(Exception):
            self._each(_scratch, lambda maker: self._batch.settle())

    def release(self) -> None:
        """The results' memory goes with the states."""
        self._outs = {}
        self._batch.release()

    def _each(
        self, memory: Callable[[Item, State], list[Any]], take: Callable[[Maker], None]
    ) -> None:
        failed: Exception | None = None
        try:
            with torch.no_grad():
                for item in self._items():
                    state = item.state
                    if state is None or state.values is None:
                        continue
                    try:
                        _fill(item.name, state, memory(item, state), take)
                    except Exception as error:
                        failed = failed or error
        finally:
            self._batch.finish()
        if failed is not None:
            raise failed


def _fill(name: str, state: State, outs: list[Any], take: Callable[[Maker], None]) -> None:
    if not isinstance(state.values, Parted) or not state.overlaid:
        assert state.values is not None
        state.values.fill(outs)
        take((name, 0))
        return
    compute = state.values.begin()
    for number, out in enumerate(outs):
        compute(number, out)
        take((name, number))


def _scratch(item: Item, state: State) -> list[Any]:
    assert state.values is not None
    device = "cpu" if state.device < 0 else f"cuda:{state.device}"
    if state.overlaid:
        sizes = [math.prod(extent) for _, extent in state.values.parts]
        room = torch.empty(max(sizes, default=0), dtype=state.dtype, device=device)
        return [room[: math.prod(extent)].view(extent) for _, extent in state.values.parts]
    return [
        torch.empty(extent, dtype=state.dtype, device=device) for _, extent in state.values.parts
    ]
