# SPDX-License-Identifier: Apache-2.0
"""The factors of an adapter's layers, whole on every rank: gathered some at a time.

Factors are small, and there are many of them: those of one mesh and dtype travel together.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch

try:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor as _DTensor
except ImportError:  # a PyTorch without distributed
    _DTensor = None

MOST = 256 << 20
"""Bytes that are gathered at a time, unless one factor has more."""

_Name = tuple[int, str]


class Place(NamedTuple):
    """Where a factor is found: parameter objects may be replaced."""

    owner: Any
    attribute: str

    def now(self) -> Any:
        return self.owner._parameters[self.attribute]

    @property
    def name(self) -> _Name:
        return id(self.owner), self.attribute


class _Group:
    """What is gathered at a time."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.places: list[Place] = []
        self.size = 0


class Factors:
    """Gathers what is asked for together with what will be asked for next.

    Each rank of a mesh asks for the same factors, in the same order.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        """places: in the order in which they will be asked for."""
        self._groups: dict[_Name, _Group] = {}
        self._whole: dict[Hashable, dict[_Name, Any]] = {}
        last: dict[Hashable, _Group] = {}
        for place in places:
            tensor = place.now()
            if _DTensor is None or not isinstance(tensor, _DTensor):
                continue
            key = _key_of(tensor) or place.name
            size = tensor.numel() * tensor.element_size()
            if key not in last or last[key].size + size > MOST:
                last[key] = _Group(key)
            last[key].places.append(place)
            last[key].size += size
            self._groups[place.name] = last[key]

    def whole(self, place: Place) -> Any:
        """The factor as it is now, all of it."""
        group = self._groups.get(place.name)
        if group is None:
            return place.now().detach()
        if place.name not in self._whole.get(group.key, ()):
            self._whole.pop(group.key, None)  # one group of a mesh at a time
            names = [one.name for one in group.places]
            tensors = [one.now().detach() for one in group.places]
            self._whole[group.key] = dict(zip(names, _gathered(tensors), strict=True))
        return self._whole[group.key][place.name]

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


def _gathered(tensors: list[Any]) -> list[Any]:
    key = _key_of(tensors[0])
    if key is None:
        return [tensor.full_tensor() for tensor in tensors]
    mesh, dim, _ = key
    ranks = mesh.size(dim)
    local = [tensor._local_tensor.reshape(-1) for tensor in tensors]
    rooms = [-(-one.shape[0] // ranks) * (one.numel() // max(one.shape[0], 1)) for one in tensors]
    starts = [0, *itertools.accumulate(rooms)]
    mine = local[0].new_zeros(starts[-1])
    for start, part in zip(starts, local, strict=False):
        mine[start : start + part.numel()].copy_(part)
    everyone = mine.new_empty(ranks * starts[-1])
    dist.all_gather_into_tensor(
        everyone.view(torch.uint8), mine.view(torch.uint8), mesh.get_group(dim)
    )
    rows = everyone.view(ranks, starts[-1])
    return [
        rows[:, start : start + room].reshape(-1)[: one.numel()].view(one.shape)
        for one, start, room in zip(tensors, starts, rooms, strict=False)
    ]
