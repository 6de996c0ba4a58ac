# SPDX-License-Identifier: Apache-2.0
"""The parameters that a run publishes: found once in the module tree, resolved at every commit.

Training frameworks replace parameter objects, move their storage and show temporary buffers in
their place. So nothing is remembered but the owning module and the attribute's name; what the
library has registered is compared with what is there now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import torch

from fanin._tensors import Box, Shard, torch_dtype
from fanin.errors import RequestError, StateError
from fanin.torch._blocks import Order, Split, layout, place, slice_boxes
from fanin.torch._names import NamesFunction, Slice, on_disk, parse, published_shape, slices_of

try:
    from torch.distributed.fsdp import FullyShardedDataParallel as _Fsdp1
    from torch.distributed.tensor import DTensor as _DTensor
except ImportError:  # a PyTorch without distributed
    _Fsdp1 = _DTensor = None

try:
    from torch.distributed.fsdp import FSDPModule as _Fsdp2
except ImportError:
    _Fsdp2 = None

# By name: older PyTorch lacks them.
_PACKED = ("torch.float4_e2m1fn_x2", "torch.bits2x4", "torch.bits4x2", "torch.bits1x8")
OFFLOADED = (
    "pause(run) the run before its memory is offloaded, put to sleep or loaded from a checkpoint, "
    "and resume(run) it afterwards"
)
UNSHARDED = (
    "commit when FSDP has resharded the parameters: right after optimizer.step(), before any "
    "forward; after a forward without backward call module.reshard() first, or shard the root "
    "with reshard_after_forward=True"
)


PARAMETER, BUFFER = "_parameters", "_buffers"
"""Where a module keeps what."""


class Layout(NamedTuple):
    """What a DTensor's placements and mesh say."""

    splits: tuple[Split | None, ...]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    order: Order | None


class State(NamedTuple):
    """What is registered of a parameter."""

    param: Any
    spec: Any
    """A DTensor's specification, None for a plain tensor."""
    pointer: int
    dtype: Any
    local_shape: tuple[int, ...]
    steps: tuple[int, ...]
    """Elements between neighbours of the local tensor."""
    stride: tuple[int, ...]
    """The same in bytes."""
    device: int
    """CUDA device, -1: host memory."""
    storage: Any
    """Keeps the memory allocated for as long as readers may be told of it."""
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


class Item:
    """One stored parameter or buffer: where it is found, and what is registered of it."""

    __slots__ = ("attribute", "kind", "name", "owner", "path", "sharded", "state")

    def __init__(
        self,
        path: str,
        name: str,
        owner: Any,
        attribute: str,
        sharded: bool,
        kind: str = PARAMETER,
    ) -> None:
        self.path = path
        self.name = name
        self.owner = owner
        self.attribute = attribute
        self.sharded = sharded
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
    whole: bool
    """Everything is published: whatever joins the tree makes another one."""


FindFunction = Callable[[Any], Found]
"""Given the root of a module tree. RequestError: nothing to publish, or what cannot be."""


class Tree:
    """What of a module tree makes the items be those that were found."""

    def __init__(self, root: Any = None, found: Found | None = None) -> None:
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
        self._dicts = [
            getattr(module, kind)
            for module in (root.modules() if found is not None and found.whole else ())
            for kind in (PARAMETER, BUFFER, "_modules")
        ]
        self._sizes = list(map(len, self._dicts))
        unset = [(kept, name) for kept in self._dicts for name in kept if kept[name] is None]
        self._lacking = [kept for kept, _ in unset]
        self._unset = [name for _, name in unset]

    def stands(self) -> bool:
        """Whether each module on the way to an item is the one that was found there, nothing has
        joined a tree that is published whole, and each alias still is one."""
        return (
            all(map(is_, map(dict.get, self._children, self._names), self._modules))
            and list(map(len, self._dicts)) == self._sizes
            and all(map(is_, map(dict.get, self._lacking, self._unset), repeat(None)))
            and all(
                getattr(alias.owner, alias.kind).get(alias.attribute) is alias.item.now()
                for alias in self._aliases
            )
        )


_spec = attrgetter("_spec")
_local_tensor = attrgetter("_local_tensor")
_dtype = attrgetter("dtype")
_local = attrgetter("local")
_param = attrgetter("param")
_version = attrgetter("_version")
_shape = attrgetter("shape")


class Columns:
    """What is registered of many items, one list an attribute.

    Tens of thousands of parameters are compared at each commit, so no Python runs for each.
    """

    def __init__(self, items: list[Item], sharded: bool, kind: str) -> None:
        states = [item.state for item in items if item.state is not None]
        self._sharded = sharded
        self._kept = attrgetter(kind)
        self._owners = [item.owner for item in items]
        self._attributes = [item.attribute for item in items]
        self._params = [state.param for state in states]
        self._specs = [state.spec for state in states]
        self._pointers = [state.pointer for state in states]
        self._dtypes = [state.dtype for state in states]
        self._shapes = [state.local_shape for state in states]
        self._steps = [state.steps for state in states]

    def stand(self) -> bool:
        """Whether every parameter is the object that is registered, and lies where it did."""
        now = map(dict.get, map(self._kept, self._owners), self._attributes)
        if not all(map(is_, now, self._params)):
            return False
        local = self._params
        if self._sharded:
            if not all(map(is_, map(_spec, self._params), self._specs)):
                return False
            local = list(map(_local_tensor, self._params))
        return (
            all(map(eq, map(torch.Tensor.data_ptr, local), self._pointers))
            and all(map(is_, map(_dtype, local), self._dtypes))
            and all(map(eq, map(_shape, local), self._shapes))
            and all(map(eq, map(torch.Tensor.stride, local), self._steps))
        )


class Lent(NamedTuple):
    """A tensor of this rank that readers may be reading."""

    path: str
    param: Any
    local: Any
    """The tensor that holds this rank's part: of a DTensor its local one, else *param*."""
    pointer: int
    """Where it lay: writes to memory that it was moved to since do not matter."""

    def holds(self) -> bool:
        """Whether writes of the parameter still are writes of that tensor."""
        return getattr(self.param, "_local_tensor", self.param) is self.local


class Change(NamedTuple):
    """What has to be told to the library before the next commit."""

    shards: list[Shard]
    removed: list[str]
    states: list[tuple[Item, State]]
    items: list[Item] | None
    """The items that take the place of all, when the module tree has changed."""
    tree: Tree


def root_of(model: Any) -> Any:
    """The model inside of DistributedDataParallel and the like."""
    while isinstance(
        model, (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)
    ):
        model = model.module
    return model


def adapters_of(model: Any) -> list[str]:
    """PEFT's names of the adapters that the module tree holds, sorted."""
    found = set()
    for _, _, _, path in walk(root_of(model)):
        parsed = parse(path)
        if parsed is not None and parsed.adapter is not None:
            found.add(parsed.adapter)
    return sorted(found)


def choose_adapter(model: Any, wanted: str | None, active: list[str]) -> str | None:
    """The adapter to publish; None if parameters carry no adapter's name.

    ``active`` are the adapters that PEFT says are active. RequestError: there is no adapter of
    that name, or nothing tells which one of several.
    """
    found = adapters_of(model)
    listed = ", ".join(repr(name) for name in found)
    if wanted is not None:
        if found and wanted not in found:
            raise RequestError.make(
                f"the model has no adapter {wanted!r}", f"its adapters are: {listed}"
            )
        return wanted if found else None
    if len(found) <= 1:
        return found[0] if found else None
    current = [name for name in active if name in found]
    if len(current) == 1:
        return current[0]
    raise RequestError.make(
        f"the model has several adapters: {listed}", "say which one by adapter="
    )


def walk(root: Any) -> Iterator[tuple[Any, str, Any, str]]:
    """Owner, attribute, parameter and path of every parameter, under each of its names."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is not None:
                yield module, attribute, param, f"{prefix}.{attribute}" if prefix else attribute


def refuse_fsdp1(root: Any) -> None:
    for path, module in root.named_modules():
        if _Fsdp1 is not None and isinstance(module, _Fsdp1):
            raise RequestError.make(
                f"module '{path or type(module).__name__}' is sharded by "
                "FullyShardedDataParallel (FSDP1), whose flat parameters have lost their shapes",
                "shard the model by torch.distributed.fsdp.fully_shard (FSDP2)",
            )


def _managed(root: Any) -> set[tuple[int, str]] | None:
    """Owner's id and attribute of all parameters that FSDP2 shards; None: it does not tell."""
    out: set[tuple[int, str]] = set()
    for module in root.modules():
        if _Fsdp2 is None or not isinstance(module, _Fsdp2):
            continue
        try:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group]
            for group in groups:
                for param in group.fsdp_params if group is not None else ():
                    info = param._module_info
                    out.add((id(info.module), info.param_name))
                    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                    out.update((id(owner), name) for owner, name in shared)
        except AttributeError:
            return None
    return out


def _is_trained_bias(path: str, bias: str, layers: set[str]) -> bool:
    if bias == "none" or not path.endswith("bias") or ".original_module." in path:
        return False
    if bias == "all":
        return path == "bias" or path.endswith(".bias")
    return path.removesuffix(".base_layer.bias") in layers


def sharding_of(root: Any) -> Callable[[Any, str, str], bool]:
    """A function that says of owner, attribute and path whether FSDP2 shards that parameter."""
    managed = _managed(root)
    if managed is not None:
        return lambda owner, attribute, path: (id(owner), attribute) in managed
    prefixes = tuple(
        f"{path}." if path else ""
        for path, module in root.named_modules()
        if _Fsdp2 is not None and isinstance(module, _Fsdp2)
    )
    return lambda owner, attribute, path: path.startswith(prefixes)


def find_adapter(root: Any, adapter: str | None, bias: str) -> Found:
    """The adapter's parameters, and the biases that PEFT trains with it."""
    refuse_fsdp1(root)
    is_sharded = sharding_of(root)
    items: list[Item] = []
    biases: list[tuple[Any, str, str]] = []
    layers: set[str] = set()
    names: dict[str, str] = {}

    def add(owner: Any, attribute: str, path: str, name: str) -> None:
        if name in names:
            raise RequestError.make(
                f"the parameters '{names[name]}' and '{path}' would both be published as '{name}'",
                "give the AdapterServer the model that holds the adapter once",
            )
        names[name] = path
        items.append(Item(path, name, owner, attribute, is_sharded(owner, attribute, path)))

    for owner, attribute, _, path in walk(root):
        parsed = parse(path)
        if parsed is None:
            if bias != "none" and attribute == "bias":
                biases.append((owner, attribute, path))
        elif parsed.adapter is None or parsed.adapter == adapter:
            add(owner, attribute, path, parsed.name)
            layers.add(path[: path.rfind(f".{parsed.part}")])
    for owner, attribute, path in biases:
        if _is_trained_bias(path, bias, layers):
            add(owner, attribute, path, on_disk(path))
    if not items:
        raise RequestError.make(
            f"no LoRA parameters in {type(root).__name__}"
            + (f" for adapter {adapter!r}" if adapter else ""),
            "give the model that PEFT made; parameters are found by names as "
            "'...lora_A.<adapter>.weight'",
        )
    return Found(items, [], False)


def _is_sharded(item: Item) -> bool:
    return item.state is not None and item.state.spec is not None


class Parameters:
    """The parameters of one run. Not for several threads at once."""

    def __init__(self, model: Any, find: FindFunction, names: NamesFunction | None) -> None:
        self._root = root_of(model)
        self._find = find
        self._names = names
        self._items: list[Item] = []
        self._tree = Tree()
        self._keys: list[str] = []
        self._layouts: dict[Any, Layout] = {}
        self._columns: list[Columns] = []
        #: CUDA devices that hold registered shards, sorted.
        self.devices: list[int] = []
        self._lent: list[Lent] = []
        self._lent_ids: frozenset[int] = frozenset()
        self._by_param: dict[int, Any] = {}
        self._versions: list[tuple[int, int]] = []

    def look(self, anew: bool = False) -> Change:
        """Resolves every parameter and says what differs from what is registered.

        anew: also where the module tree seems to be as it was.

        Does not block and changes nothing: see :meth:`accept`. Errors: RequestError (a kind of
        tensor that cannot be published), StateError (a temporary unsharded buffer, memory that
        is offloaded).
        """
        stands = bool(self._items) and not anew and self._tree.stands()
        if stands and self._columns and all(c.stand() for c in self._columns):
            return Change([], [], [], None, self._tree)
        items, tree = None, self._tree
        rekeyed = not stands
        if rekeyed:
            found = self._find(self._root)
            items, tree = found.items, Tree(self._root, found)
            known = {item.name: item for item in self._items}
            for item in items:
                if item.name in known:
                    item.state = known[item.name].state
                    item.sharded = item.sharded or known[item.name].sharded
        shards: list[Shard] = []
        states: list[tuple[Item, State]] = []
        for item in self._items if items is None else items:
            param = item.now()
            state = item.state
            if state is not None and param is state.param and _is_same(param, state):
                continue
            new = self._resolve(item, param)
            states.append((item, new))
            if state is None or not _is_registered(new, state):
                shards += self._shards(item, new)
            rekeyed = rekeyed or state is None or new.slices != state.slices
        removed: list[str] = []
        if rekeyed:
            new_states = {id(item): state for item, state in states}
            removed = self._removed(self._items if items is None else items, new_states)
        return Change(shards, removed, states, items, tree)

    def accept(self, change: Change) -> None:
        """To be called when the library has taken what :meth:`look` told."""
        if change.items is not None:
            self._items, self._tree = change.items, change.tree
        for item, state in change.states:
            item.state = state
            item.sharded = item.sharded or state.spec is not None
        if change.items is not None or change.states:
            self._keys = list(
                dict.fromkeys(
                    part.key
                    for item in self._items
                    if item.state is not None
                    for part in item.state.slices
                )
            )
            alike: dict[tuple[bool, str], list[Item]] = {}
            for item in self._items:
                alike.setdefault((_is_sharded(item), item.kind), []).append(item)
            self._columns = [Columns(items, *which) for which, items in alike.items()]
            self.take_back()
            self._lent = [
                Lent(item.path, item.state.param, local, item.state.pointer)
                for item in self._items
                if item.state is not None
                and not (local := _local_of(item.state)).is_inference()  # counts no writes
            ]
            self._lent_ids = frozenset(map(id, map(_local, self._lent)))
            self._by_param = {id(lent.param): lent.local for lent in self._lent}
            held = {item.state.device for item in self._items if item.state is not None}
            self.devices = sorted(device for device in held if device >= 0)

    def lend(self) -> None:
        """To be called when a step is published by reference: from now on writes are counted."""
        self._versions = self._counted()

    def _counted(self) -> list[tuple[int, int]]:
        """How often each parameter and its part were written: operations on a DTensor count in
        it, those on its part and optimizers (see :mod:`fanin.torch._writes`) there."""
        params, parts = map(_param, self._lent), map(_local, self._lent)
        return list(zip(map(_version, params), map(_version, parts), strict=True))

    def lent(self, param: Any) -> Any:
        """The tensor in which *param* is published by reference now, None: it is not."""
        return self._by_param.get(id(param)) if self._versions else None

    def written(self) -> list[str]:
        """Paths of the parameters whose published memory was written since :meth:`lend`.

        Only writes that PyTorch counts: those by its operations and optimizers, not through
        ``.data``, NumPy or kernels that are given a pointer.
        """
        if not self._versions:
            return []
        now = self._counted()
        if now == self._versions:
            return []
        return [
            lent.path
            for lent, before, after in zip(self._lent, self._versions, now, strict=True)
            if (before[1] != after[1] or (before != after and lent.holds()))
            and lent.local.data_ptr() == lent.pointer
        ]

    def gone(self) -> bool:
        """Whether memory that readers may be reading was given back (offloaded)."""
        return bool(self._versions) and any(
            lent.local.numel() > 0 and lent.local.untyped_storage().nbytes() == 0
            for lent in self._lent
        )

    def counts(self, other: Parameters) -> dict[int, tuple[int, int]]:
        """How often the tensors that this run has in common with *other* were written so far.

        Runs have tensors in common where each publishes a slot of them.
        """
        if self._lent_ids.isdisjoint(other._lent_ids):
            return {}
        return {
            id(lent.local): count
            for lent, count in zip(self._lent, self._counted(), strict=True)
            if id(lent.local) in other._lent_ids
        }

    def allow(self, before: dict[int, tuple[int, int]]) -> None:
        """What was written since :meth:`counts` gave *before* belongs to another run's update."""
        if self._versions:
            for i, (lent, now) in enumerate(zip(self._lent, self._counted(), strict=True)):
                then, lawful = before.get(id(lent.local), now), self._versions[i]
                self._versions[i] = (
                    lawful[0] + now[0] - then[0],
                    lawful[1] + now[1] - then[1],
                )

    def take_back(self) -> None:
        """Nobody reads the memory any more: writes do not matter."""
        self._versions = []

    def release(self) -> None:
        """Lets go of all storage, so that offloading it frees it; the next look tells it all."""
        self.take_back()
        self._columns, self._lent, self._lent_ids, self._by_param = [], [], frozenset(), {}
        for item in self._items:
            if item.state is not None:
                item.state = item.state._replace(param=None, pointer=-1, storage=None)

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
        return [key for key in self._keys if key not in owners]

    def _resolve(self, item: Item, param: Any) -> State:
        if param is None:
            raise RequestError.make(
                f"'{item.path}' is not there any more",
                "tell the server what the model holds now: a WeightServer by refresh() on every "
                "rank, an AdapterServer by remove_run() and add_run()",
                key=item.name,
            )
        spec = None
        local = param
        if _DTensor is not None and isinstance(param, _DTensor):
            spec, local = param._spec, param._local_tensor
            if hasattr(local, "trigger_wait"):  # the result of a collective still under way
                local = local.trigger_wait()
        elif item.sharded:
            raise StateError.make(
                f"the parameter '{item.path}' is a plain tensor now, FSDP's temporary unsharded "
                "buffer",
                UNSHARDED,
                key=item.name,
            )
        _refuse_kind(item, local)
        storage = local.untyped_storage()
        if local.numel() > 0 and storage.nbytes() == 0:
            raise StateError.make(
                f"trainer memory offloaded: the storage of '{item.path}' has no bytes",
                OFFLOADED,
                key=item.name,
            )
        shape = tuple(param.shape)
        state = item.state
        if state is not None and state.shape == shape:
            slices = state.slices
        else:
            slices = self._slices(item, shape)
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
        slices = slices_of(self._names, item.name, shape)
        shapes: dict[str, tuple[int, ...]] = {}
        for part in slices:
            try:
                whole = published_shape(part, shape)
                if part.key in shapes and (part.shape is None or whole != shapes[part.key]):
                    raise ValueError("several parts of one tensor need its shape, the same in all")
                shapes[part.key] = whole
            except ValueError as error:
                raise RequestError.make(
                    f"names() slices '{item.name}' of shape {list(shape)} as '{part.key}': {error}",
                    key=part.key,
                ) from None
        return slices

    def _shards(self, item: Item, state: State) -> list[Shard]:
        dtype, shape = torch_dtype(state.dtype), state.shape
        if dtype is None:
            raise RequestError.make(
                f"'{item.path}' has elements of {state.dtype}, which safetensors does not know",
                "publish parameters of a floating-point type",
                key=item.name,
            )
        if state.spec is None:
            blocks = layout(shape, (), (), (), state.local_shape)
        else:
            blocks = layout(shape, *self._layout(item, state))
        if blocks is None:
            raise RequestError.make(
                f"the local tensor of '{item.path}' has shape {list(state.local_shape)}, which "
                f"placements {state.spec.placements} on mesh {list(state.spec.mesh.shape)} do not "
                f"give for {list(shape)}",
                "make the parameter by fully_shard or distribute_tensor",
                key=item.name,
            )
        boxes = place(blocks, state.stride, state.pointer)
        pieces: dict[str, list[Box]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for part in state.slices:
            shapes[part.key] = published_shape(part, shape)
            mine = slice_boxes(boxes, shape, part.index, part.at) if part.is_cut else boxes
            pieces.setdefault(part.key, []).extend(mine)
        return [
            Shard(key, dtype, whole, tuple(pieces[key]), state.device)
            for key, whole in shapes.items()
        ]

    def _layout(
        self, item: Item, state: State
    ) -> tuple[
        tuple[Split | None, ...],
        tuple[int, ...],
        tuple[int, ...] | None,
        tuple[int, ...],
        Order | None,
    ]:
        spec = state.spec
        order = getattr(spec, "shard_order", None)
        key = (spec.mesh, spec.placements, order)
        known = self._layouts.get(key)
        if known is None:
            known = self._layouts[key] = _layout_of(item, spec, order)
        return known.splits, known.mesh_shape, known.coordinate, state.local_shape, known.order


def _layout_of(item: Item, spec: Any, order: Any) -> Layout:
    splits: list[Split | None] = []
    for placement in spec.placements:
        kind = type(placement).__name__
        if kind == "Shard":
            splits.append(Split(placement.dim))
        elif kind == "_StridedShard":
            splits.append(Split(placement.dim, int(placement.split_factor)))
        elif kind == "Replicate":
            splits.append(None)
        elif "Partial" in kind:
            raise RequestError.make(
                f"'{item.path}' has the placement {placement}: its ranks hold summands, "
                "not weights",
                "redistribute the parameter to Replicate() or Shard(dim)",
                key=item.name,
            )
        else:
            raise RequestError.make(
                f"'{item.path}' has a placement of an unknown kind, {placement}",
                "redistribute the parameter to Replicate() or Shard(dim)",
                key=item.name,
            )
    coordinate = spec.mesh.get_coordinate()
    return Layout(
        tuple(splits),
        tuple(spec.mesh.shape),
        None if coordinate is None else tuple(coordinate),
        None
        if order is None
        else tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order),
    )


def _local_of(state: State) -> Any:
    """The tensor that holds this rank's part."""
    return state.param if state.spec is None else state.param._local_tensor


def _is_same(param: Any, state: State) -> bool:
    """Whether a parameter object that is the registered one still lies where it was registered."""
    if state.spec is not None and param._spec is not state.spec:
        return False
    local = _local_of(state)
    return (
        local.data_ptr() == state.pointer
        and local.dtype is state.dtype
        and local.shape == state.local_shape
        and local.stride() == state.steps
    )


def _is_registered(new: State, old: State) -> bool:
    """Whether the library knows all this already, of another object."""
    return (
        new.pointer == old.pointer
        and new.dtype is old.dtype
        and new.shape == old.shape
        and new.local_shape == old.local_shape
        and new.stride == old.stride
        and new.device == old.device
        and new.spec == old.spec
        and new.slices == old.slices
    )


def _refuse_kind(item: Item, local: Any) -> None:
    """RequestError for tensors whose elements do not lie in memory of their own."""

    def refuse(what: str, remedy: str) -> RequestError:
        return RequestError.make(f"'{item.path}' {what}", remedy, key=item.name)

    if local.is_meta:
        raise refuse(
            "is on the meta device and has no values", "materialise the model before (to_empty)"
        )
    if local.layout is not torch.strided:
        raise refuse(f"is sparse ({local.layout})", "make it dense")
    if local.is_quantized:
        raise refuse("is quantized", "publish parameters of a floating-point type")
    if str(local.dtype) in _PACKED:
        raise refuse(
            f"has elements of {local.dtype}, each of which packs several values",
            "publish parameters whose elements are values, or give an engine the packed bytes as "
            "uint8",
        )
    if isinstance(local, torch.nn.parameter.UninitializedTensorMixin):
        raise refuse("is not initialised", "run a first forward of its lazy module before")
    dispatch = getattr(type(local), "__torch_dispatch__", None)
    if dispatch is not torch.Tensor.__torch_dispatch__:
        raise refuse(
            f"is a {type(local).__name__}, whose values do not lie in it as in a plain tensor",
            "publish parameters of plain tensors or DTensors: dequantize what is quantized, and do "
            "without all-gathers in fp8",
        )
    if getattr(local, "ds_id", None) is not None and tuple(
        getattr(local, "ds_shape", local.shape)
    ) != tuple(local.shape):
        raise refuse(
            "is partitioned by DeepSpeed's ZeRO-3, which hides its pieces",
            "use PyTorch's fully_shard, or ZeRO stages below 3",
        )
    if local.device.type not in ("cpu", "cuda"):
        raise refuse(
            f"is on device {local.device}", "publish parameters in host memory or on CUDA devices"
        )
