# SPDX-License-Identifier: Apache-2.0
"""A model's module tree: where its tensors are found, and whether it is the one of before.

Training frameworks replace parameter objects, move their storage and show temporary buffers in
their place. So nothing is remembered but the owning module and the attribute's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from fanin.torch._state import State

PARAMETER, BUFFER = "_parameters", "_buffers"
"""Where a module keeps what."""


class Item:
    """One stored parameter or buffer: where it is found, and what is registered of it."""

    __slots__ = ("attribute", "kind", "name", "owner", "path", "record", "sharded", "state")

    def __init__(
        self,
        path: str,
        name: str,
        owner: Any,
        attribute: str,
        record: Any = None,
        kind: str = PARAMETER,
    ) -> None:
        self.path = path
        self.name = name
        self.owner = owner
        self.attribute = attribute
        #: FSDP2's, if it shards the parameter; see sharding_of().
        self.record = record
        #: A plain tensor in its place is not what is to be published.
        self.sharded = record is not None
        self.kind = kind
        self.state: State | None = None

    def now(self) -> Any:
        """The tensor that is there now, None if there is none."""
        return getattr(self.owner, self.kind).get(self.attribute)


class Alias(NamedTuple):
    """Another name of an item's tensor, which is published once."""

    owner: Any
    attribute: str
    kind: str
    item: Item


class Found(NamedTuple):
    """What is to be published of a module tree."""

    items: list[Item]
    aliases: list[Alias]


FindFunction = Callable[[Any], Found]
"""Given the root of a module tree. RequestError: nothing to publish, or what cannot be."""


class _Held:
    """What modules hold: which modules, how many parameters and buffers, and of which there are
    none; which buffers are persistent."""

    def __init__(self, modules: Iterable[Any]) -> None:
        everything = list(modules)
        self._dicts = [
            getattr(module, kind)
            for module in everything
            for kind in (PARAMETER, BUFFER, "_modules")
        ]
        # What has no parameter yet may be replaced by what has: an Identity by a Linear.
        self._kept = [module._modules for module in everything if module._modules]
        self._whole = list(_values(self._kept))
        # Of which buffers are persistent: the sets themselves, and what was in them.
        self._unsaved = [m._non_persistent_buffers_set for m in everything if m._buffers]
        self._were_unsaved = list(map(set, self._unsaved))
        self._sizes = list(map(len, self._dicts))
        unset = [(kept, name) for kept in self._dicts for name in kept if kept[name] is None]
        self._lacking = [kept for kept, _ in unset]
        self._unset = [name for _, name in unset]

    def stands(self) -> bool:
        return (
            list(map(len, self._dicts)) == self._sizes
            and all(map(is_, _values(self._kept), self._whole))
            and self._unsaved == self._were_unsaved
            and all(map(is_, map(dict.get, self._lacking, self._unset), repeat(None)))
        )


class Tree:
    """What of a module tree makes the items be those that were found."""

    def __init__(self, root: Any = None, found: Found | None = None, base: bool = False) -> None:
        """base: there may be modules beside those on the way to items, see :meth:`stands`."""
        links: dict[str, tuple[Any, str, Any]] = {}
        for item in found.items if found is not None else ():
            module, at = root, ""
            for part in item.path.split(".")[:-1]:
                child = module._modules[part]
                at = f"{at}.{part}"
                links[at] = (module, part, child)
                module = child
        self._children = [parent._modules for parent, _, _ in links.values()]
        self._names = [name for _, name, _ in links.values()]
        self._modules = [child for _, _, child in links.values()]
        self._aliases = found.aliases if found is not None else []
        near = {id(module): module for module in (root, *self._modules) if base}
        self._near = _Held(near.values())
        self._all = _Held(root.modules() if found is not None else ())

    def is_whole(self) -> bool:
        """Whether nothing has joined the tree, all of its modules are those of before, and the same
        buffers are persistent."""
        return self._all.stands()

    def stands(self, walked: bool = False) -> bool:
        """Whether the tree is whole.

        The modules on the way to each item are then those found there, and each alias still is one.

        walked: it was whole a moment ago. Only the modules that hold items, or are on the way to
        one, are looked at again: no base model makes it take longer. Not for a tree without *base*.
        """
        return (
            all(map(is_, map(dict.get, self._children, self._names), self._modules))
            and (self._near if walked else self._all).stands()
            and all(
                getattr(alias.owner, alias.kind).get(alias.attribute) is alias.item.now()
                for alias in self._aliases
            )
        )


def _values(dicts: list[Any]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)


def root_of(model: Any) -> Any:
    """The model inside of DistributedDataParallel, torch.compile and the like."""
    while isinstance(model, _PARALLEL) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, _PARALLEL) else model._orig_mod
    return model


def walk(root: Any) -> Iterator[tuple[Any, str, Any, str]]:
    """Owner, attribute, parameter and path of every parameter, under each of its names."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is not None:
                yield module, attribute, param, f"{prefix}.{attribute}" if prefix else attribute


def walk_buffers(root: Any) -> Iterator[tuple[Any, str, Any, str]]:
    """Owner, attribute, buffer and path of every persistent buffer, under each of its names."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                yield module, attribute, buffer, f"{prefix}.{attribute}" if prefix else attribute
