# SPDX-License-Identifier: Apache-2.0
"""The factors of an adapter's layers, whole on every rank: gathered some at a time.

Factors are small, and there are many of them: those of one mesh and dtype travel together.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as _DTensor

MOST = 12 << 20
"""Bytes that are gathered at a time, unless one factor has more. Twice as many are held."""

_spec, _local_tensor = attrgetter("_spec"), attrgetter("_local_tensor")


class Place(NamedTuple):
    """Where a factor is found: parameter objects may be replaced."""

    owner: Any
    attribute: str

    def now(self) -> Any:
        return self.owner._parameters[self.attribute]


class Found(NamedTuple):
    """A factor, all of it, as it is now."""

    memory: Any
    """A tensor, which holds it and others, or is it."""
    first: int
    """Its first element there."""
    form: Any
    """Equal for as long as type, device, shape and strides are the same. A :class:`Way`, if it was
    gathered."""
    shape: Any = None
    """None: it is all of the memory."""

    @property
    def is_gathered(self) -> bool:
        return self.shape is not None

    @property
    def whose(self) -> Any:
        """What stays from step to step: the way that it took, or the parameter."""
        return self.form if self.is_gathered else self.memory

    def tensor(self) -> Any:
        if not self.is_gathered:
            return self.memory
        return self.memory[self.first : self.first + self.shape.numel()].view(self.shape)


def found_in(tensor: Any) -> Found:
    return Found(tensor, 0, (tensor.dtype, tensor.shape, tensor.stride(), tensor.device))


class Group:
    """What is gathered at a time."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.places: list[Place] = []
        self.size = 0
        self._way: Way | None = None

    def gather(self) -> tuple[Way, Any]:
        """How the factors lie, and the memory in which they do."""
        tensors = [place.now() for place in self.places]
        if self._way is None or not all(map(is_, map(_spec, tensors), self._way.specs)):
            self._way = Way(tensors)
        return self._way, self._way.gathered(tensors)


class Factors:
    """Gathers what is asked for together with what will be asked for next.

    Each rank of a mesh asks for the same factors, in the same order.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        """places: in about the order in which they will be asked for."""
        self._groups: dict[Place, Group] = {}
        self._whole: dict[Hashable, list[tuple[Group, dict[Place, Found]]]] = {}
        #: Gets what is gathered, unless it is None.
        self.log: list[Any] | None = None
        last: dict[Hashable, Group] = {}
        for place in places:
            tensor = place.now()
            if not isinstance(tensor, _DTensor):
                continue
            key = _key_of(tensor) or place
            size = tensor.numel() * tensor.element_size()
            if key not in last or last[key].size + size > MOST:
                last[key] = Group(key)
            last[key].places.append(place)
            last[key].size += size
            self._groups[place] = last[key]

    def whole(self, place: Place) -> Found:
        """For callers under torch.no_grad()."""
        group = self._groups.get(place) if self._groups else None
        if group is None:
            return found_in(place.now())
        held = self._whole.setdefault(group.key, [])
        for gathered, factors in held:
            if gathered is group:
                return factors[place]
        del held[:-1]  # Two groups of a mesh at a time: the order differs within a layer.
        way, memory = group.gather()
        if self.log is not None:
            self.log.append(group)
        each = zip(group.places, way.firsts, way.shapes, strict=True)
        found = {one: Found(memory, first, way, shape) for one, first, shape in each}
        held.append((group, found))
        return found[place]

    def forget(self) -> None:
        """Frees what was gathered: it is of one step."""
        self._whole = {}


def _key_of(tensor: Any) -> tuple[Any, int, Any] | None:
    """Mesh, dimension and dtype of a tensor whose rows one dimension of its mesh divides, as FSDP
    does; None: it is cut otherwise."""
    cut = [dim for dim, one in enumerate(tensor.placements) if not one.is_replicate()]
    if len(cut) != 1 or not tensor.placements[cut[0]].is_shard(0):
        return None
    if type(tensor.placements[cut[0]]).__name__ != "Shard":  # strided
        return None
    return tensor.device_mesh, cut[0], tensor.dtype


class Way:
    """How the factors of a group travel, until one of them is sharded otherwise."""

    def __init__(self, tensors: list[Any]) -> None:
        self.specs = [tensor._spec for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self._key = _key_of(tensors[0])
        self._ranks = self._key[0].size(self._key[1]) if self._key is not None else 1
        self._rooms = [
            -(-shape[0] // self._ranks) * (shape.numel() // max(shape[0], 1))
            for shape in self.shapes
        ]
        ends = list(itertools.accumulate(self._ranks * room for room in self._rooms))
        self.firsts = [0, *ends[:-1]]

    def gathered(self, tensors: list[Any]) -> Any:
        """One behind the other, each from its place in :attr:`firsts` on."""
        if self._key is None:
            return tensors[0].full_tensor().reshape(-1)
        mesh, dim, _ = self._key
        ranks, rooms = self._ranks, self._rooms
        local = list(map(_local_tensor, tensors))
        if list(map(torch.Tensor.numel, local)) != rooms:
            for at, (part, room) in enumerate(zip(local, rooms, strict=True)):
                if part.numel() < room:
                    local[at] = torch.nn.functional.pad(part.reshape(-1), (0, room - part.numel()))
        # A few calls for all of them: Python takes longer for one than a GPU.
        mine = torch._C._nn.flatten_dense_tensors(local)
        everyone = mine.new_empty(ranks, mine.numel())
        dist.all_gather_into_tensor(
            everyone.view(-1).view(torch.uint8), mine.view(torch.uint8), mesh.get_group(dim)
        )
        if ranks == 1:
            return everyone[0]
        whole = everyone.new_empty(everyone.numel())
        outs = [one.view(ranks, -1) for one in whole.split([ranks * room for room in rooms])]
        torch.split_with_sizes_copy(everyone, rooms, dim=1, out=outs)
        return whole
