# SPDX-License-Identifier: Apache-2.0
"""The parameters that a run publishes: found once in the module tree, resolved at every commit.

What the library has registered is compared with what is there now.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor as _DTensor

from fanin._cover import Part
from fanin._dtypes import torch_dtype
from fanin._tensors import Box, Shard
from fanin.errors import RequestError, StateError
from fanin.torch._blocks import layout, normal_index, place, slice_boxes
from fanin.torch._fsdp import UNSHARDED, is_unsharded
from fanin.torch._names import NamesFunction, Slice, published_shape, slices_of
from fanin.torch._quantized import Derived, Quantizer, Source
from fanin.torch._segments import count_segments
from fanin.torch._state import (
    Columns,
    Layout,
    Lies,
    State,
    blocks_of,
    is_registered,
    is_same,
    layout_of,
    local_of,
    order_of,
    part_now,
    refuse_kind,
    registered,
    view_of,
)
from fanin.torch._transform import (
    Batch,
    Computing,
    Maker,
    Stages,
    Transform,
    boxes_of,
    computed,
    one_by_one,
    placed,
    values_of,
)
from fanin.torch._tree import PARAMETER, FindFunction, Item, Tree, root_of

OFFLOADED = (
    "pause(run) the run before its memory is offloaded, put to sleep or loaded from a checkpoint, "
    "and resume(run) it afterwards"
)

_editions = itertools.count()
_part = attrgetter("part")
_counter = attrgetter("counter")
_version = attrgetter("_version")


class Lent(NamedTuple):
    """A tensor of this rank that readers may be reading."""

    path: str
    param: Any
    counter: Any
    """Has the count of *param*'s writes, also when another tensor was swapped into it since."""
    part: Any
    """Has the count of writes of this rank's part: a DTensor's local tensor, else *counter*."""


Bounds = tuple[tuple[int, int, bool], ...]
"""Of a slice, as :func:`normal_index` has them."""


def _meet(one: Bounds, other: Bounds) -> bool:
    """Whether two slices of a tensor have elements in common."""
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))


def _lent_of(item: Item, state: State) -> Lent:
    with torch._C._DisableTorchDispatch():  # a DTensor's own detach() takes 50 times as long
        counter = state.param.detach()
    part = counter if state.spec is None else state.param._local_tensor
    return Lent(item.path, state.param, counter, part)


class Change(NamedTuple):
    """What has to be told to the library before the next commit."""

    shards: list[Shard]
    removed: list[str]
    states: list[tuple[Item, State]]
    items: list[Item] | None
    """The items that take the place of all, when the module tree has changed."""
    tree: Tree
    metadata: dict[str, str] | None = None
    """The publication's, None: as it was."""
    derived: Derived | None = None
    """What is published of what the items hold, None: that itself."""


def _is_left(item: Item) -> bool:
    """Whether it stays as it is, whatever its name."""
    return item.kind != PARAMETER or isinstance(item.owner, torch.nn.Embedding)


def _source(alike: list[tuple[Shard, State, Maker | None]], left: bool) -> Source:
    """A published tensor, of which these are the parts that are made one by one."""
    boxes = [(box, state, maker) for shard, state, maker in alike for box in shard.boxes]
    whole = replace(alike[0][0], boxes=tuple(box for box, _, _ in boxes))
    makers = [maker for _, _, maker in boxes]

    def views() -> list[Any]:
        return [view_of(state, box) for box, state, _ in boxes]

    return Source(whole, views, left, makers)


def _is_sharded(item: Item) -> bool:
    return item.state is not None and item.state.spec is not None


def _is_computed(item: Item) -> bool:
    return item.state is not None and item.state.values is not None


def _is_temporary(item: Item, spec: Any) -> bool:
    """Whether FSDP shows its unsharded buffer: a plain tensor, or a DTensor on fewer of the mesh's
    dimensions than its shard."""
    if spec is None:
        return item.sharded
    told = is_unsharded(item.record)
    if told is not None:
        return told
    # FSDP2 keeps its records further outside than the module that is published. It wants names of
    # dimensions, by which its buffer and a parameter that was put on another mesh are told apart.
    if item.state is None or item.state.spec is None:
        return False
    known, now = item.state.spec.mesh.mesh_dim_names, spec.mesh.mesh_dim_names
    return bool(known and now) and set(now) < set(known)


class Parameters:
    """The parameters of one run. Not for several threads at once."""

    def __init__(
        self,
        model: Any,
        find: FindFunction,
        names: NamesFunction | None,
        base: bool = False,
        transform: Transform | None = None,
        batch: Batch | None = None,
        quantizer: Quantizer | None = None,
    ) -> None:
        """base: beside what is published there may be a model, as around an adapter.

        batch: what *transform* says is computed together, None: one after the other.

        quantizer: rounds what would be published, None: nothing does.
        """
        self._root = root_of(model)
        self._find = find
        self._names = names
        self.transform = transform
        self._base = base
        self._items: list[Item] = []
        self._tree = Tree()
        self._walked = False
        self._by_name: dict[str, Item] = {}
        """By the names under which they are published."""
        self._layouts: dict[Any, Layout] = {}
        self._columns: list[Columns] = []
        #: CUDA devices that hold registered shards, sorted.
        self.devices: list[int] = []
        self._lent: list[Lent] = []
        self._by_param: dict[int, Any] = {}
        self._versions: list[tuple[int, int]] = []
        #: What is lent, and of which run: another number when it changes.
        self._edition = next(_editions)
        self._met: tuple[int, int, list[tuple[int, str, bool]]] = (-1, -1, [])
        """What :meth:`_common` found last, of which editions."""
        self.quantizer = quantizer
        self._batch = batch or Batch()
        #: What makes values that no parameter holds, at each step.
        self.stages = self._stages()

    def _stages(self) -> Stages:
        quantizer, batch, every = self.quantizer, self._batch, lambda: self._items
        if quantizer is None:
            return Stages([] if self.transform is None else [Computing(every, batch)])
        if self.transform is None:
            return Stages([quantizer], quantizer.ahead, quantizer.flag_unusable)
        # Computed values that are rounded have memory until the next ones are computed. Those of
        # blocks that ranks share are computed once more when the ranks have found the maxima.
        first = Computing(every, batch, quantizer.take)
        again = Computing(self._shared, batch, quantizer.retake)
        return Stages([first, quantizer, again], quantizer.ahead, quantizer.flag_unusable)

    def _shared(self) -> Iterator[Item]:
        """What is computed and rounded, as far as ranks share blocks of it: the same on all of
        them."""
        assert self.quantizer is not None
        for item in self._items:
            state = item.state
            if state is not None and state.values is not None:
                shares = any(self.quantizer.shares(part.key) for part in state.slices)
                if shares and self._is_derived(state):
                    yield item

    @contextlib.contextmanager
    def walked(self) -> Iterator[None]:
        """Around an update: all modules are looked at before it. For :meth:`look` inside, during
        which readers wait, those that hold items or are on the way to one are enough. A parameter
        that joins elsewhere meanwhile, without the configuration telling it, is found by the next
        look.
        """
        self._walked = self._base and self._tree.is_whole()
        try:
            yield
        finally:
            self._walked = False

    def look(self, anew: bool = False) -> Change:
        """Resolves every parameter and says what differs from what is registered.

        anew: also where the module tree seems to be as it was; ``names`` is asked again.

        Does not block and changes nothing: see :meth:`accept`. Errors: RequestError (a kind of
        tensor that cannot be published), StateError (a temporary unsharded buffer, memory that
        is offloaded).
        """
        stands = bool(self._items) and not anew and self._tree.stands(self._walked)
        if stands and self._columns and all(c.stand() for c in self._columns):
            return Change([], [], [], None, self._tree)
        items, tree = None, self._tree
        rekeyed = not stands
        if rekeyed:
            found = self._find(self._root)
            items, tree = found.items, Tree(self._root, found, self._base)
            known = {item.name: item for item in self._items}
            for item in items:
                if item.name in known:
                    item.state = known[item.name].state
                    item.sharded = item.sharded or known[item.name].sharded
        told: list[tuple[Item, State]] = []
        states: list[tuple[Item, State]] = []
        asked = anew or (rekeyed and self.transform is not None)
        for item in self._items if items is None else items:
            param, old = item.now(), item.state
            if asked or old is None or param is not old.param or not is_same(param, old):
                states.append((item, self._resolve(item, param, anew)))
        states = placed(states, self._passes, self._batch.place_of)
        for item, new in states:
            old = item.state
            if old is None or not is_registered(new, old):
                told.append((item, new))
            rekeyed = rekeyed or old is None or new.slices != old.slices
        removed: list[str] = []
        if rekeyed:
            new_states = {id(item): state for item, state in states}
            removed = self._removed(self._items if items is None else items, new_states)
        sources = [source for one in told for source in self._sources(*one)]
        if self.quantizer is None:
            return Change([one.shard for one in sources], removed, states, items, tree)
        derived = self.quantizer.derive(sources, self._by_name)
        removed += [
            self.quantizer.form.scale_name(name) for name in removed if name in self.quantizer
        ]
        removed += derived.dropped
        return Change(derived.shards, removed, states, items, tree, derived=derived)

    def accept(self, change: Change) -> None:
        """To be called when the library has taken what :meth:`look` told."""
        if change.items is not None:
            self._items, self._tree = change.items, change.tree
        if self.quantizer is not None and change.derived is not None:
            self.quantizer.accept(change.derived, change.removed)
        for item, state in change.states:
            item.state = state
            item.sharded = item.sharded or state.spec is not None
        if change.items is not None or change.states:
            self._by_name = {
                part.key: item
                for item in self._items
                if item.state is not None
                for part in item.state.slices
            }
            alike: dict[tuple[bool, str, bool], list[Lies]] = {}
            for item in self._items:
                which = (_is_sharded(item), item.kind, _is_computed(item))
                if item.state is not None:
                    alike.setdefault(which, []).append(registered(item, item.state))
            self._columns = [Columns(lies, *which) for which, lies in alike.items()]
            self.take_back()
            self._lent = [
                _lent_of(item, item.state)
                for item in self._items
                if item.state is not None
                and item.state.values is None  # a copy: writes hurt nobody
                and not local_of(item.state).is_inference()  # counts no writes
                and not self._is_derived(item.state)
            ]
            self._by_param = {id(lent.param): lent.part for lent in self._lent}
            self._edition = next(_editions)
            held = {item.state.device for item in self._items if item.state is not None}
            self.devices = sorted(device for device in held if device >= 0)

    def lend(self) -> None:
        """To be called when a step is published by reference: from now on writes are counted."""
        self._versions = self._counted()

    def _counted(self) -> list[tuple[int, int]]:
        """How often each parameter and its part were written: operations on a DTensor count in
        it, those on its part and optimizers (see :mod:`fanin.torch._writes`) there."""
        counters, parts = map(_counter, self._lent), map(_part, self._lent)
        return list(zip(map(_version, counters), map(_version, parts), strict=True))

    def lent(self, param: Any) -> Any:
        """The tensor that counts writes of *param*'s part while it is published by reference now,
        None: it is not."""
        return self._by_param.get(id(param)) if self._versions else None

    def written(self) -> list[str]:
        """Paths of the parameters whose published memory may have been written since :meth:`lend`.

        Only writes that PyTorch counts: those by its operations and optimizers, not through
        ``.data``, NumPy or kernels that are given a pointer. A tensor counts on when it is given
        other memory (``p.data = ...``), and does not tell which of them a write went to.
        """
        if not self._versions:
            return []
        return [
            lent.path
            for lent, before, now in zip(self._lent, self._versions, self._counted(), strict=True)
            if before != now
        ]

    def gone(self) -> bool:
        """Whether memory that readers may be reading was given back (offloaded)."""
        return bool(self._versions) and any(
            lent.part.numel() > 0 and lent.part.untyped_storage().nbytes() == 0
            for lent in self._lent
        )

    def counts(self, other: Parameters) -> dict[int, tuple[int, int]]:
        """How often the tensors that this run has in common with *other* were written so far.

        Runs have tensors in common where each publishes a slot of them. What both publish is not
        among them: see :meth:`shared`.
        """
        common = {at for at, _, meet in self._common(other) if not meet}
        if not common:
            return {}
        return {
            id(lent.param): count
            for lent, count in zip(self._lent, self._counted(), strict=True)
            if id(lent.param) in common
        }

    def shared(self, other: Parameters) -> str | None:
        """The path of a parameter of which both publish the same elements, and which readers of
        *other* may be reading now; None: there is none."""
        if not other._versions:
            return None
        return next((path for _, path, meet in self._common(other) if meet), None)

    def _common(self, other: Parameters) -> list[tuple[int, str, bool]]:
        """Of the tensors of which both lend some the id and path, and whether they lend the same
        elements."""
        if self._met[:2] != (self._edition, other._edition):
            both = self._by_param.keys() & other._by_param.keys()
            mine, theirs = self._slots(both), other._slots(both)
            found = [
                (at, lent.path, any(_meet(one, two) for one in mine[at] for two in theirs[at]))
                for lent in self._lent
                if (at := id(lent.param)) in both
            ]
            self._met = (self._edition, other._edition, found)
        return self._met[2]

    def _slots(self, among: set[int]) -> dict[int, list[Bounds]]:
        """What is published of each of these parameters."""
        return {
            id(item.state.param): [
                normal_index(part.index, tuple(item.state.param.shape))
                for part in item.state.slices
            ]
            for item in self._items
            if item.state is not None
            and item.state.values is None
            and id(item.state.param) in among
        }

    def allow(self, before: dict[int, tuple[int, int]]) -> None:
        """Writes since :meth:`counts` gave *before* belong to another run's update."""
        if self._versions:
            for i, (lent, now) in enumerate(zip(self._lent, self._counted(), strict=True)):
                then, lawful = before.get(id(lent.param), now), self._versions[i]
                self._versions[i] = (lawful[0] + now[0] - then[0], lawful[1] + now[1] - then[1])

    def take_back(self) -> None:
        """Nobody reads the memory any more: writes do not matter."""
        self._versions = []

    def release(self) -> None:
        """Releases all storage, so that offloading frees it; the next look registers it again."""
        self.take_back()
        self.stages.release()
        self._columns, self._lent, self._by_param = [], [], {}
        self._edition = next(_editions)
        for item in self._items:
            if item.state is not None:
                item.state = item.state._replace(param=None, pointer=-1, storage=None)

    def part_of(self, name: str) -> Any:
        """This rank's part of the stored tensor that has *name* in the model's checkpoint; None:
        there is none."""
        states = [item.state for item in self._items if item.name == name]
        return local_of(states[0]) if states and states[0] is not None else None

    def values(self, name: str, part: Part) -> Any:
        """The memory of a box that is published under *name*, as a tensor."""
        if self.quantizer is not None and (made := self.quantizer.result(name, part)) is not None:
            return made
        item = self._by_name[name]
        assert item.state is not None
        (shard,) = self._shards(item, item.state, name)
        (box,) = [one for one in shard.boxes if (one.offset, one.extent) == part]
        return view_of(item.state, box)

    def tensors(self) -> Iterator[tuple[str, Shard, list[Any]]]:
        """Every published tensor as the model has it now: the path of its parameter, which boxes
        this rank holds, and their elements, where they lie. Raises as :meth:`look`."""
        for item in self._items:
            state = item.state
            if state is None or state.values is None:
                state = self._resolve(item, item.now(), False)
            for shard in self._shards(item, state):
                if self.quantizer is not None and shard.name in self.quantizer:
                    for one, values in self.quantizer.held(shard.name):
                        yield item.path, one, values
                else:
                    yield item.path, shard, [view_of(state, box) for box in shard.boxes]

    def _sources(self, item: Item, state: State) -> list[Source]:
        passes = state.values is not None and self._passes(item, state)
        found: dict[str, list[tuple[Shard, State, Maker | None]]] = {}
        for number, one in enumerate(one_by_one(state)):
            for shard in self._shards(item, one):
                maker = (item.name, number) if passes else None
                found.setdefault(shard.name, []).append((shard, one, maker))
        return [_source(alike, _is_left(item)) for alike in found.values()]

    def _passes(self, item: Item, state: State) -> bool:
        """Whether all that is published of an item is rounded."""
        quantizer, left = self.quantizer, _is_left(item)
        return quantizer is not None and all(
            quantizer.takes(shard, left) for shard in self._shards(item, state)
        )

    def _is_derived(self, state: State) -> bool:
        """Whether readers read none of a parameter's own memory."""
        return self.quantizer is not None and all(
            part.key in self.quantizer for part in state.slices
        )

    def held(self) -> Iterator[tuple[Shard, Box, Any]]:
        """The boxes of :meth:`tensors`, one after the other."""
        for _, shard, boxes in self.tensors():
            for box, values in zip(shard.boxes, boxes, strict=True):
                yield shard, box, values

    def segments(self) -> int:
        """How many allocations on CUDA devices hold what is registered: workers map each."""
        on_devices = [
            (item.state.device, item.state.pointer)
            for item in self._items
            if item.state is not None
            and item.state.device >= 0
            and item.state.pointer
            and not self._is_derived(item.state)
        ]
        if self.quantizer is not None:
            on_devices += self.quantizer.places()
        return count_segments(on_devices)

    @property
    def root(self) -> Any:
        """Of the module tree."""
        return self._root

    def __len__(self) -> int:
        return len(self._items)

    def _removed(self, items: list[Item], new: dict[int, State]) -> list[str]:
        """Keys that are registered and will not be there any more. RequestError: a key twice."""
        owners: dict[str, str] = {}
        for item in items:
            state = new.get(id(item), item.state)
            for part in state.slices if state is not None else ():
                if owners.get(part.key, item.path) != item.path:
                    raise RequestError.make(
                        f"names() publishes '{part.key}' of '{owners[part.key]}' and again of "
                        f"'{item.path}'",
                        "give every slice a key of its own",
                        key=part.key,
                    )
                owners[part.key] = item.path
        return [key for key in self._by_name if key not in owners]

    def _resolve(self, item: Item, param: Any, anew: bool) -> State:
        if param is None:
            raise RequestError.make(
                f"'{item.path}' is not there any more",
                "tell the server what the model holds now: a WeightServer by refresh() on every "
                "rank, an AdapterServer by remove_run() and add_run()",
                key=item.name,
            )
        spec = param._spec if isinstance(param, _DTensor) else None
        if _is_temporary(item, spec):
            raise StateError.make(
                f"the parameter '{item.path}' is FSDP's temporary unsharded buffer now",
                UNSHARDED,
                key=item.name,
            )
        local = part_now(param)
        values = values_of(item, self.transform, param)
        if values is None:
            refuse_kind(item, local)
        storage = local.untyped_storage()
        if local.numel() > 0 and storage.nbytes() == 0:
            raise StateError.make(
                f"trainer memory offloaded: the storage of '{item.path}' has no bytes",
                OFFLOADED,
                key=item.name,
            )
        shape = tuple(param.shape if values is None else values.shape)
        state = item.state
        if state is not None and state.shape == shape and not anew:
            slices = state.slices
        else:
            slices = self._slices(item, shape)
        if values is not None:
            return computed(state, param, local, values, slices)
        size, steps = local.element_size(), tuple(local.stride())
        return State(
            param=param,
            spec=spec,
            pointer=local.data_ptr(),
            dtype=local.dtype,
            local_shape=tuple(local.shape),
            steps=steps,
            stride=tuple(step * size for step in steps),
            device=local.device.index if local.is_cuda else -1,
            storage=storage,
            shape=shape,
            slices=slices,
        )

    def _slices(self, item: Item, shape: tuple[int, ...]) -> tuple[Slice, ...]:
        if self._names is None:
            return (Slice(item.name),)
        shapes: dict[str, tuple[int, ...]] = {}
        key = item.name
        try:
            slices = slices_of(self._names, item.name, shape)
            for part in slices:
                key, whole = part.key, published_shape(part, shape)
                if key in shapes and (part.shape is None or whole != shapes[key]):
                    raise ValueError("several parts of one tensor need its shape, the same in all")
                shapes[key] = whole
        except ValueError as error:
            raise RequestError.make(
                f"names() slices '{item.name}' of shape {list(shape)} as '{key}': {error}", key=key
            ) from None
        return slices

    def _boxes(self, item: Item, state: State) -> tuple[Box, ...]:
        """Of the stored tensor, or of what is computed of it."""
        if state.values is not None:
            return boxes_of(state)
        if state.spec is None:
            blocks = layout(state.shape, (), (), (), state.local_shape)
            assert blocks is not None
        else:
            told = self._layout(item, state.spec)
            blocks = blocks_of(item, state.spec, told, state.shape, state.local_shape)
        return place(blocks, state.stride, state.pointer)

    def _shards(self, item: Item, state: State, name: str | None = None) -> list[Shard]:
        """Of all that *item* is published as, or of what is published under *name*."""
        dtype, shape = torch_dtype(state.dtype), state.shape
        if dtype is None:
            raise RequestError.make(
                f"'{item.path}' has elements of {state.dtype}, which safetensors does not know",
                "publish parameters of a floating-point type",
                key=item.name,
            )
        boxes = self._boxes(item, state)
        pieces: dict[str, list[Box]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for part in state.slices:
            if name not in (None, part.key):
                continue
            shapes[part.key] = published_shape(part, shape)
            mine = slice_boxes(boxes, shape, part.index, part.at) if part.is_cut else boxes
            pieces.setdefault(part.key, []).extend(mine)
        return [
            Shard(key, dtype, whole, tuple(pieces[key]), state.device)
            for key, whole in shapes.items()
        ]

    def _layout(self, item: Item, spec: Any) -> Layout:
        key = (spec.mesh, spec.placements, order_of(spec))
        if key not in self._layouts:
            self._layouts[key] = layout_of(item, spec)
        return self._layouts[key]
