# SPDX-License-Identifier: Apache-2.0
"""The factors of an adapter's layers, as far as this rank needs them: some travel at a time.

Factors are small, and there are many of them: those of one mesh and dtype travel together. Of
stacked experts a rank whose part of the base are whole ones gets their factors alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from operator import attrgetter, mul
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as _DTensor

from fanin.torch._moves import Moves, can_move, pieces, turned
from fanin.torch._world import collective

MOST = 16 << 20
"""Bytes that a rank gets at a time, unless one factor has more. Three times as many are held."""

_Lies = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Of a factor in the memory of its group: first element, shape, steps, and first expert."""
_Cut = tuple[Any, int, Any]
"""Mesh, dimension and dtype of tensors whose rows one dimension of their mesh divides."""

_local_tensor = attrgetter("_local_tensor")
# all_gather_into_tensor() warns in newer PyTorch.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Place(NamedTuple):
    """Where a factor is found: parameter objects may be replaced."""

    owner: Any
    attribute: str

    def now(self) -> Any:
        return self.owner._parameters[self.attribute]


class Asked(NamedTuple):
    """A factor that a layer has. Of stacked experts it is wanted as [experts, rank, length]."""

    place: Place
    experts: int = 1
    is_turned: bool = False
    """It is B of stacked experts, whose number counts fastest in the columns."""
    base: Place | None = None
    """The stacked tensor, if what is computed of it is what the ranks hold of it."""


class Found(NamedTuple):
    """A factor as it is now, or the experts of it that this rank needs."""

    memory: Any
    """A tensor, which holds it and others, or is it."""
    first: int
    """Its first element there."""
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    form: Any
    """Equal for as long as type, device, shape and strides are the same."""
    group: Group | None = None
    """With which it travelled: its memory is another one at each step."""
    expert: int = 0
    """The first one that it has."""

    def tensor(self) -> Any:
        first = self.memory.storage_offset() + self.first
        return self.memory.as_strided(self.shape, self.steps, first)


def found_in(tensor: Any, experts: int = 1, expert: int = 0) -> Found:
    """A factor that does not travel; experts: so many are in A of stacked ones."""
    form = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, experts, expert)
    view = tensor if experts == 1 else tensor.view(experts, -1, tensor.shape[-1])
    return Found(tensor, 0, view.shape, view.stride(), form, None, expert)


class Group:
    """Factors that travel at a time."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self.size = 0
        self.asked: list[Asked] = []
        #: As they are now: parameter objects, or DTensors.
        self.tensors: list[Any] = []

    def gather(self, moves: list[Moves] | None = None) -> Any:
        """The memory in which they lie, in the order and at the places of :meth:`laid`.

        moves: of :meth:`moves`, if nothing but contents has changed since.
        """
        raise NotImplementedError

    def moves(self) -> list[Moves] | None:
        """Copies that gather them again and again where they lie now. None: PyTorch's do it."""
        raise NotImplementedError

    def laid(self) -> list[_Lies]:
        """Of each of them. To be called when :attr:`tensors` are all there."""
        raise NotImplementedError


class Whole(Group):
    """Whole factors, of all ranks of a dimension of a mesh."""

    def laid(self) -> list[_Lies]:
        shapes = [tensor.shape for tensor in self.tensors]
        self._cut = _cut_of(self.tensors[0])
        self._ranks = _ranks_of(self._cut)
        self._rooms = [
            -(-shape[0] // self._ranks) * (shape.numel() // max(shape[0], 1)) for shape in shapes
        ]
        ends = list(itertools.accumulate(self._ranks * room for room in self._rooms))
        firsts, forms = [0, *ends[:-1]], map(_form, self.asked, shapes)
        self._turned = [
            (first, shape, one.experts)
            for first, shape, one in zip(firsts, shapes, self.asked, strict=True)
            if one.is_turned
        ]
        return [(first, form, _steps(form), 0) for first, form in zip(firsts, forms, strict=True)]

    def gather(self, moves: list[Moves] | None = None) -> Any:
        whole = self._gathered(moves)
        for first, shape, experts in self._turned:
            one = whole[first : first + shape.numel()]
            one.copy_(one.view(shape[0], -1, experts).permute(2, 1, 0).reshape(-1))
        return whole

    def moves(self) -> list[Moves] | None:
        if self._cut is None or not can_move(local := list(map(_local_tensor, self.tensors))):
            return None
        size, ranks, rooms = local[0].element_size(), self._ranks, self._rooms
        *firsts, total = itertools.accumulate(rooms, initial=0)
        mine = [
            (part.data_ptr(), size * first, part.numel())
            for part, first in zip(local, firsts, strict=True)
        ]
        everyone = [
            (size * (rank * total + first), size * (ranks * first + rank * room), room)
            for first, room in zip(firsts, rooms, strict=True)
            for rank in range(ranks)
        ]
        return [pieces(rows, local[0]) for rows in (mine, everyone)[: min(ranks, 2)]]

    def _gathered(self, moves: list[Moves] | None) -> Any:
        if self._cut is None:
            with collective():
                whole = self.tensors[0].full_tensor()
            return whole.flatten().clone()  # else it may be the parameter's
        ranks, rooms = self._ranks, self._rooms
        mine = self._mine(moves)
        if ranks == 1:
            return mine
        # Before the collective: who lacks memory behind it would gather once more than the others.
        everyone, whole = mine.new_empty(ranks, mine.numel()), mine.new_empty(ranks * mine.numel())
        group = self._cut[0].get_group(self._cut[1])
        with collective():
            _all_gather(everyone.view(-1).view(torch.uint8), mine.view(torch.uint8), group)
        if moves is not None:
            moves[1].make(everyone.data_ptr(), whole.data_ptr())
        else:
            outs = [one.view(ranks, -1) for one in whole.split([ranks * room for room in rooms])]
            torch.split_with_sizes_copy(everyone, rooms, dim=1, out=outs)
        return whole

    def _mine(self, moves: list[Moves] | None) -> Any:
        """What this rank has of them, in as much room as the others'."""
        if moves is not None:
            mine = self.tensors[0]._local_tensor.new_empty(sum(self._rooms))
            moves[0].make(0, mine.data_ptr())
            return mine
        local = list(map(_local_tensor, self.tensors))
        if list(map(torch.Tensor.numel, local)) != self._rooms:
            for at, (part, room) in enumerate(zip(local, self._rooms, strict=True)):
                if part.numel() < room:
                    local[at] = torch.nn.functional.pad(part.reshape(-1), (0, room - part.numel()))
        # A few calls for all of them: Python takes longer for one than a GPU.
        return torch._C._nn.flatten_dense_tensors(local)


class Exchanged(Group):
    """B of this rank's experts, of layers that are alike: each rank has some rows of all."""

    def laid(self) -> list[_Lies]:
        first, count = self.tensors[0], len(self.tensors)
        cut = _cut_of(first)
        self._group = None if cut is None else cut[0].get_group(cut[1])
        self._ranks = _ranks_of(cut)
        at = 0 if cut is None else cut[0].get_local_rank(cut[1])
        all_experts, rank, rows = _form(self.asked[0], first.shape)
        experts = all_experts // self._ranks
        self._split = count, rows // self._ranks, rank, all_experts
        self._turned = all_experts, count, rank, rows // self._ranks
        steps = count * rank * rows, rows, 1
        return [
            (number * rank * rows, (experts, rank, rows), steps, at * experts)
            for number in range(count)
        ]

    def moves(self) -> list[Moves] | None:
        local = self._local()
        return [turned(local, self._turned)] if can_move(local) else None

    def gather(self, moves: list[Moves] | None = None) -> Any:
        # By experts, and so by the ranks that get them.
        if moves is not None:
            mine = self._local()[0].new_empty(self._turned)
            moves[0].make(0, mine.data_ptr())
        else:
            mine = torch.stack(self._local()).view(self._split).permute(3, 0, 2, 1).contiguous()
        if self._ranks == 1:
            return mine
        everyone = torch.empty_like(mine)
        with collective():
            dist.all_to_all_single(everyone, mine, group=self._group)
        each = everyone.view(self._ranks, -1, *everyone.shape[1:]).permute(1, 2, 3, 0, 4)
        return mine.view(each.shape).copy_(each)  # what was sent is not needed any more

    def _local(self) -> list[Any]:
        return list(map(_local_tensor, self.tensors) if self._group is not None else self.tensors)


class Factors:
    """Gathers what is asked for together with what will be asked for next.

    Each rank of a mesh asks for the same factors, in the same order.
    """

    def __init__(self, asked: Iterable[Asked]) -> None:
        """asked: in about the order in which they will be asked for."""
        self._asked = {one.place: one for one in asked}
        self._groups: dict[Place, Group] = {}
        self._lies: dict[Place, Any] = {}
        self._seen: list[Any] | None = None
        self._is_looked = False
        self._held: list[tuple[Group, Any]] = []
        #: Gets what is gathered, unless it is None.
        self.log: list[Any] | None = None

    def whole(self, place: Place) -> Found:
        """For callers under torch.no_grad()."""
        if not self._is_looked:
            self._look()
        if place not in self._groups:
            tensor, one = place.now(), self._asked[place]
            if not isinstance(tensor, _DTensor):
                return found_in(tensor, one.experts)
            mesh, dim, _ = cut = _cut_of(tensor)  # type: ignore[misc]
            experts = one.experts // _ranks_of(cut)
            return found_in(tensor._local_tensor, experts, mesh.get_local_rank(dim) * experts)
        group = self._groups[place]
        memory = next((held for one, held in self._held if one is group), None)
        if memory is None:
            del self._held[:-1]  # Two groups at a time: the order differs within a layer.
            memory = group.gather()
            self._held.append((group, memory))
            if self.log is not None:
                self.log.append(group)
        first, shape, steps, expert = self._lies[place]
        return Found(memory, first, shape, steps, group, group, expert)

    def forget(self) -> None:
        """Frees what was gathered: it is of one step."""
        self._held, self._is_looked = [], False

    def release(self) -> None:
        """Holds no parameter any more."""
        for group in self._groups.values():
            group.tensors = []

    def _look(self) -> None:
        """Finds how they travel now."""
        places = [place for one in self._asked.values() for place in (one.place, one.base) if place]
        seen = [_kind_of(place.now()) for place in places]
        if seen != self._seen:
            self._arrange()
        self._seen, self._is_looked = seen, True
        for group in dict.fromkeys(self._groups.values()):
            group.tensors = [one.place.now() for one in group.asked]

    def _arrange(self) -> None:
        self._groups, self._lies = {}, {}
        last: dict[Hashable, Group] = {}
        for place, one in self._asked.items():
            tensor = place.now()
            group, ranks = _group_of(one, tensor)
            if group is None:
                continue
            size = tensor.numel() * tensor.element_size() // ranks
            if group.key not in last or last[group.key].size + size > MOST:
                last[group.key] = group
            group = self._groups[place] = last[group.key]
            group.size += size
            group.asked.append(one)
            group.tensors.append(tensor)
        for group in dict.fromkeys(self._groups.values()):
            self._lies.update(zip((one.place for one in group.asked), group.laid(), strict=True))


def _kind_of(tensor: Any) -> Any:
    """Equal for as long as a tensor travels in the same way."""
    if isinstance(tensor, _DTensor):
        return tensor._spec, tensor._local_tensor.device
    return tensor.dtype, tensor.shape, tensor.device


def _group_of(one: Asked, tensor: Any) -> tuple[Group | None, int]:
    """A group for a factor, and of how many parts of it this rank gets one. None: this rank has
    what it needs."""
    cut = _cut_of(tensor)
    if isinstance(tensor, _DTensor) and (cut is None or not _has_experts(one, tensor, cut)):
        return Whole(cut or one.place), 1
    key = (cut, tensor.dtype, tensor.device, tensor.shape, one.experts)
    return (Exchanged(key) if one.is_turned else None), _ranks_of(cut)


def _cut_of(tensor: Any) -> _Cut | None:
    """As FSDP cuts tensors; None: it is cut otherwise, or not at all."""
    if not isinstance(tensor, _DTensor):
        return None
    cut = [dim for dim, one in enumerate(tensor.placements) if not one.is_replicate()]
    if len(cut) != 1 or not tensor.placements[cut[0]].is_shard(0):
        return None
    if type(tensor.placements[cut[0]]).__name__ != "Shard":  # strided
        return None
    return tensor.device_mesh, cut[0], tensor.dtype


def _ranks_of(cut: _Cut | None) -> int:
    return 1 if cut is None else int(cut[0].size(cut[1]))


def _has_experts(one: Asked, tensor: Any, cut: _Cut) -> bool:
    """Whether each rank has whole experts of the base, as many as the others, and rows of the
    factor. PEFT's functions want two at least."""
    base, ranks = None if one.base is None else one.base.now(), _ranks_of(cut)
    return (
        isinstance(base, _DTensor)
        and (base.device_mesh, base.placements) == (tensor.device_mesh, tensor.placements)
        and base.shape[0] == one.experts >= 2 * ranks
        and one.experts % ranks == tensor.shape[0] % ranks == 0
    )


def _form(one: Asked, shape: tuple[int, ...]) -> tuple[int, ...]:
    if one.experts == 1:
        return shape
    if one.is_turned:
        return one.experts, shape[1] // one.experts, shape[0]
    return one.experts, shape[0] // one.experts, shape[1]


def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbours, of what is contiguous."""
    return (*itertools.accumulate(shape[:0:-1], mul, initial=1),)[::-1]
