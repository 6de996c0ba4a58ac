# SPDX-License-Identifier: Apache-2.0
"""Parameters whose published values are computed: what ``transform=`` says of them.

Whole adapters that are merged, and weights that are packed in 4 bits, are published this way too.
A stage reads what the stage before it, or the model, has at each step. So a transform comes before
the rounding to fp8. Each stage has memory of its own, which readers read by reference.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from fanin._cover import Part
from fanin._tensors import Box
from fanin.errors import RequestError
from fanin.torch._names import Slice
from fanin.torch._state import State, blocks_of, layout_of, part_now, view_of
from fanin.torch._tree import Item

ALIGNMENT = 256


class Want(NamedTuple):
    """A result that has no memory yet."""

    device: Any
    dtype: Any
    shape: tuple[int, ...]


class Stage(Protocol):
    """Makes values of one run. All ranks of the run have the same stages."""

    def fill(self) -> None:
        """Makes the values of the step that comes now, on the devices' current streams.

        All ranks come here together, behind each other's stages. A stage that fails takes part in
        its collectives first.
        """

    def miss(self) -> None:
        """This rank cannot publish: takes part in what the others' :meth:`fill` waits for. Raises
        nothing: why it cannot is told."""

    def release(self) -> None:
        """Releases memory, of the model's and of the results: nobody reads them now."""


class Stages:
    """The stages of one run, in their order."""

    def __init__(
        self,
        stages: Iterable[Stage] = (),
        ahead: Callable[[], None] = lambda: None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """done: called when all have filled."""
        self._stages = list(stages)
        #: Begins a step with what takes no other rank. :meth:`fill` follows when all have come.
        self.ahead = ahead
        self._done = done

    def fill(self) -> None:
        """Makes the values of all stages. If one fails, those behind it miss the step."""
        for at, stage in enumerate(self._stages):
            try:
                stage.fill()
            except Exception:
                for later in self._stages[at + 1 :]:
                    later.miss()
                raise
        self._done()

    def miss(self) -> None:
        """This rank has failed, and the others come to :meth:`fill`."""
        for stage in self._stages:
            stage.miss()

    def release(self) -> None:
        for stage in self._stages:
            stage.release()


def allocate(wanted: Sequence[Want], alignment: int = ALIGNMENT) -> list[Any]:
    """Tensors for results, uninitialised: those of a device lie in one allocation, in their order.

    alignment: bytes, of each tensor's first element; its dtype's size at least.
    """
    places: list[int] = []
    sizes: dict[Any, int] = {}
    for one in wanted:
        start = -(-sizes.get(one.device, 0) // alignment) * alignment
        places.append(start)
        sizes[one.device] = start + prod(one.shape) * one.dtype.itemsize
    arenas = {
        device: torch.empty(size, dtype=torch.uint8, device=device)
        for device, size in sizes.items()
    }
    return [
        arenas[one.device][start : start + prod(one.shape) * one.dtype.itemsize]
        .view(one.dtype)
        .view(one.shape)
        for one, start in zip(wanted, places, strict=True)
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


ROOM = {"cuda": 256 << 20}
"""Bytes of results that wait for what takes them, by kinds of devices: fewer launches take more.
Elsewhere as many as the largest part has."""

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
        step = -(-extent[dim] // -(-extent[dim] // step) // grain) * grain  # parts are alike
        first, end, out = offset[dim], offset[dim] + extent[dim], []
        while first < end:
            stop = min((first // step + 1) * step, end)
            where = (*offset[:dim], first, *offset[dim + 1 :])
            size = (*extent[:dim], stop - first, *extent[dim + 1 :])
            out += [(where, size)] if dim == len(extent) - 2 else self.of((where, size), width)
            first = stop
        return out


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
        return [((0,) * tensor.dim(), tensor.detach())]
    item, local = Item(name, name, None, name), part_now(tensor)
    shapes = tuple(tensor.shape), tuple(local.shape)
    blocks = blocks_of(item, spec, layout_of(item, spec), *shapes)
    local = local.detach()
    out: list[tuple[tuple[int, ...], Any]] = []
    for block in blocks:
        index = tuple(slice(at, at + n) for at, n in zip(block.local, block.extent, strict=True))
        out.append((block.offset, local[index]))
    return out


def values_of(item: Item, transform: Transform | None, tensor: Any) -> Values | None:
    """The transform's answer. RequestError: of another kind, or parts that are none."""
    if transform is None:
        return None
    answer = transform(item.name, item.owner, item.attribute, tensor)
    if answer is None:
        return None
    if not isinstance(answer, Values):
        raise RequestError.make(
            f"transform returned {answer!r} for '{item.name}'",
            "return fanin.torch.Values, or None",
            key=item.name,
        )
    if not isinstance(answer.dtype, torch.dtype):
        raise RequestError.make(
            f"transform gives '{item.name}' the dtype {answer.dtype!r}",
            "give one of torch's, such as torch.bfloat16",
            key=item.name,
        )
    shape = tuple(answer.shape)
    for offset, extent in answer.parts:
        if not (
            len(offset) == len(extent) == len(shape)
            and all(
                isinstance(at, int) and isinstance(n, int) and 0 <= at <= at + n <= size
                for at, n, size in zip(offset, extent, shape, strict=True)
            )
        ):
            raise RequestError.make(
                f"transform says that this rank computes the part {list(extent)} at "
                f"{list(offset)} of '{item.name}' of shape {list(shape)}",
                "give offset and extent in elements of the whole tensor, as Python's integers",
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
            state = state._replace(pointer=old.pointer, storage=old.storage, places=old.places)
    return state


def boxes_of(state: State) -> tuple[Box, ...]:
    """Where the parts lie: one behind the other, or where each has its place; all contiguous."""
    assert state.values is not None
    size, at = state.dtype.itemsize, state.pointer
    out = []
    for number, (offset, extent) in enumerate(state.values.parts):
        stride, step = [], size
        for n in reversed(extent):
            stride.append(step)
            step *= n
        if _is_one_by_one(state):
            at = state.places[number]
        out.append(Box(tuple(offset), tuple(extent), tuple(reversed(stride)), at))
        at += math.prod(extent) * size
    return tuple(out)


def _is_one_by_one(state: State) -> bool:
    """Whether parts have places of their own."""
    return bool(state.places) and isinstance(state.values, Parted)


def one_by_one(state: State) -> list[State]:
    """The state, as if each of the parts that are computed one by one was all that there is."""
    values = state.values
    if values is None or not _is_one_by_one(state):
        return [state]
    return [
        state._replace(values=replace(values, parts=(part,)), places=(at,))
        for part, at in zip(values.parts, state.places, strict=True)
    ]


def placed(
    states: list[tuple[Item, State]],
    passes: Callable[[Item, State], bool],
    place_of: Callable[[Item], int],
) -> list[tuple[Item, State]]:
    """The states, those of computed values with memory where they have none.

    passes: whether values are wanted only until the next ones are computed. Such ones lie in a
    :class:`Room` of their device. place_of: the order in which they are computed.
    """
    new = [
        at for at, (_, one) in enumerate(states) if one.values is not None and one.storage is None
    ]
    passing: dict[int, list[int]] = {}
    places: dict[int, tuple[int, ...]] = {}
    rooms: dict[Any, Room] = {}
    wanted = []
    out = list(states)
    for at in new:
        state, device = states[at][1], _device_of(states[at][1])
        if passes(*states[at]):
            passing[at] = _sizes(state)
            rooms.setdefault(device, Room(device)).add(passing[at])
        else:
            wanted.append(Want(device, state.dtype, state.local_shape))
    for at in sorted(passing, key=lambda at: place_of(states[at][0])):
        room = rooms[_device_of(states[at][1])]
        places[at] = tuple(map(room.place, passing[at]))
    lasting = iter(allocate(wanted))
    for at in new:
        item, state = states[at]
        memory = rooms[_device_of(state)].memory if at in passing else next(lasting)
        where, storage = places.get(at, ()), memory.untyped_storage()
        pointer = where[0] if where else memory.data_ptr()
        out[at] = item, state._replace(pointer=pointer, storage=storage, places=where)
    return out


def _device_of(state: State) -> Any:
    return torch.device("cpu" if state.device < 0 else f"cuda:{state.device}")


def _sizes(state: State) -> list[int]:
    """Bytes of what has a place of its own."""
    extents = [state.local_shape]
    if isinstance(state.values, Parted):
        extents = [extent for _, extent in state.values.parts]
    return [math.prod(extent) * state.dtype.itemsize for extent in extents]


class Room:
    """Memory of a device for results that are wanted until the next ones are computed. They lie one
    behind the other, and from the beginning again where there is no place."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._largest = self._sum = self._at = 0

    def add(self, sizes: Iterable[int]) -> None:
        """Results of so many bytes will lie there."""
        for size in map(_aligned, sizes):
            self._largest, self._sum = max(self._largest, size), self._sum + size

    @functools.cached_property
    def memory(self) -> Any:
        size = max(self._largest, min(self._sum, ROOM.get(self._device.type, 0)))
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def place(self, size: int) -> int:
        """The address of the next one."""
        if self._at + _aligned(size) > self.memory.numel():
            self._at = 0
        first, self._at = self._at, self._at + _aligned(size)
        return int(self.memory.data_ptr()) + first


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Batch:
    """What computes several items together. This one does not: nothing waits."""

    def place_of(self, item: Item) -> int:
        """Where it is in the order in which they are computed, the same on all ranks."""
        return 0

    def then(self, call: Callable[[], None]) -> None:
        """Calls *call* when what was asked for so far is computed on the current streams."""
        call()

    def finish(self) -> None:
        """All that the step wants was asked for."""

    def repeat(self, whose: Hashable, states: list[State]) -> bool:
        """Computes all of *states* and calls, as at *whose* step before, if only contents have
        changed since. False: it did nothing, and is asked for each of them. For callers under
        torch.no_grad()."""
        return False

    def release(self) -> None:
        """Holds no parameter any more."""


class Computing:
    """The stage that computes what is published in place of stored tensors."""

    def __init__(
        self,
        items: Callable[[], Iterable[Item]],
        batch: Batch,
        take: Callable[[tuple[Maker, ...]], None] = lambda makers: None,
    ) -> None:
        """take: called when values in a room are computed, before others take their places."""
        self._items = items
        self._batch = batch
        self._take = take
        self._outs: dict[int, tuple[State, list[Any]]] = {}
        """Where results lie, by items: views take longer to make than to fill."""

    def fill(self) -> None:
        """All are computed also if one raises, as other ranks wait for it in a collective."""
        if self._repeats():
            return
        known, self._outs = self._outs, {}
        waiting: list[Maker] = []
        ends: dict[int, int] = {}
        """Of what waits, by rooms."""

        def outs(item: Item, state: State) -> list[Any]:
            held = known.get(id(item))
            if held is None or held[0] is not state:
                held = state, [view_of(state, box) for box in boxes_of(state)]
            self._outs[id(item)] = held
            return held[1]

        def take() -> None:
            if waiting:
                self._batch.then(functools.partial(self._take, tuple(waiting)))
            waiting.clear()
            ends.clear()

        def begins(maker: Maker, outs: list[Any]) -> None:
            first, room = outs[0].data_ptr(), outs[0].untyped_storage().data_ptr()
            if first < ends.get(room, 0):
                take()
            ends[room] = first + sum(one.nbytes for one in outs)
            waiting.append(maker)

        self._each(outs, begins, take)

    def _repeats(self) -> bool:
        states = [item.state for item in self._items() if item.state is not None]
        with torch.no_grad():
            return self._batch.repeat(self, [one for one in states if one.values is not None])

    def miss(self) -> None:
        """Computes nothing that is read: readers may have the last step's results yet."""

        def settle(*_: Any) -> None:
            self._batch.then(lambda: None)

        with contextlib.suppress(Exception):
            self._each(_scratch, settle, settle)

    def release(self) -> None:
        """The results' memory goes with the states."""
        self._outs = {}
        self._batch.release()

    def _each(
        self,
        memory: Callable[[Item, State], list[Any]],
        begins: Callable[[Maker, list[Any]], None],
        ends: Callable[[], None],
    ) -> None:
        """begins: called before what is in a room is computed. ends: behind all."""
        failed: Exception | None = None
        try:
            with torch.no_grad():
                for item in sorted(self._items(), key=self._batch.place_of):
                    state = item.state
                    if state is None or state.values is None:
                        continue
                    try:
                        _fill(item.name, state, memory(item, state), begins)
                    except Exception as error:
                        failed = failed or error
                if failed is None:
                    ends()
        finally:
            self._batch.finish()
        if failed is not None:
            raise failed


def _fill(
    name: str, state: State, outs: list[Any], begins: Callable[[Maker, list[Any]], None]
) -> None:
    assert state.values is not None
    if isinstance(state.values, Parted) and state.places:
        compute = state.values.begin()
        for number, out in enumerate(outs):
            begins((name, number), [out])
            compute(number, out)
        return
    if state.places and outs:
        begins((name, 0), outs)
    state.values.fill(outs)


def _scratch(item: Item, state: State) -> list[Any]:
    assert state.values is not None
    device = _device_of(state)
    if _is_one_by_one(state):
        sizes = [math.prod(extent) for _, extent in state.values.parts]
        room = torch.empty(max(sizes, default=0), dtype=state.dtype, device=device)
        return [room[: math.prod(extent)].view(extent) for _, extent in state.values.parts]
    return [
        torch.empty(extent, dtype=state.dtype, device=device) for _, extent in state.values.parts
    ]
