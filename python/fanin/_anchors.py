# SPDX-License-Identifier: Apache-2.0
"""The few storages that many tensors lie in, held without asking each tensor for its own.

As long as a storage is held and has the same memory, whatever lies in that memory is kept, no
matter which tensor it was described for. So a description whose addresses have been found inside
of some storages is safe to write to while these are held, and still are where they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Anchors"]

#: More storages than one for that many tensors are held one by one.
_TENSORS_EACH = 16


class _Anchor(NamedTuple):
    storage: weakref.ref[Any]
    begin: int
    size: int


class Anchors:
    """Of one description. Keeps no memory alive."""

    __slots__ = ("_all",)

    def __init__(self, anchors: list[_Anchor]) -> None:
        self._all = anchors

    @classmethod
    def of(cls, storages: list[Any], addresses: Iterable[int]) -> Anchors | None:
        """Of tensors with these storages and first elements (0: it has none). None: they are too
        many, or an address is in none of them."""
        distinct = {id(storage): storage for storage in storages}.values()
        if len(distinct) * _TENSORS_EACH > len(storages):
            return None
        made = [_Anchor(weakref.ref(s), s.data_ptr(), s.nbytes()) for s in distinct]
        made.sort(key=lambda anchor: anchor.begin)
        rest = iter(made)
        begin = end = 0
        for address in sorted(addresses):
            while address >= end and address:
                one = next(rest, None)
                if one is None:
                    return None
                begin, end = one.begin, one.begin + one.size
            if address < begin and address:
                return None
        return cls(made)

    def hold(self) -> list[Any] | None:
        """The storages, if all are there and where they were."""
        held = []
        for anchor in self._all:
            storage = anchor.storage()
            if storage is None or storage.nbytes() != anchor.size:
                return None
            held.append(storage)
            if storage.data_ptr() != anchor.begin:
                return None
        return held
