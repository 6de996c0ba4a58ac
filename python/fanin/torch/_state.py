# SPDX-License-Identifier: Apache-2.0
"""What is registered of a parameter: where it lies, and which part of the whole it is."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fanin._tensors import Box
from fanin.errors import RequestError
from fanin.torch._blocks import Block, Order, Split, layout
from fanin.torch._names import Slice
from fanin.torch._tree import Item

if TYPE_CHECKING:
    from fanin.torch._transform import Values

# By name: older PyTorch lacks them.
_PACKED = ("torch.float4_e2m1fn_x2", "torch.bits2x4", "torch.bits4x2", "torch.bits1x8")


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
    values: Values | None = None
    """What is computed of the parameter: then memory, type and shapes are the results'."""
    places: tuple[int, ...] = ()
    """Where results lie that are wanted until the next ones are computed: of each part that is
    computed by itself, or of all together."""


_spec = attrgetter("_spec")
_local_tensor = attrgetter("_local_tensor")
_dtype = attrgetter("dtype")
_shape = attrgetter("shape")


class Lies(NamedTuple):
    """Where a parameter lies."""

    owner: Any
    attribute: str
    param: Any
    spec: Any
    """A DTensor's specification, None for a plain tensor."""
    pointer: int
    dtype: Any
    shape: tuple[int, ...]
    """Of the local tensor, as what follows."""
    steps: tuple[int, ...]


def registered(item: Item, state: State) -> Lies:
    lies = state.pointer, state.dtype, state.local_shape, state.steps
    return Lies(item.owner, item.attribute, state.param, state.spec, *lies)


def lies_now(owner: Any, attribute: str) -> Lies:
    param = owner._parameters[attribute]
    spec = getattr(param, "_spec", None)
    local = param if spec is None else param._local_tensor
    lies = local.data_ptr(), local.dtype, local.shape, local.stride()
    return Lies(owner, attribute, param, spec, *lies)


class Columns:
    """Where many parameters lie, one list an attribute.

    Tens of thousands of parameters are compared at each commit, so no Python runs for each.
    """

    def __init__(self, lies: Iterable[Lies], sharded: bool, kind: str, computed: bool) -> None:
        """computed: results are registered, for which the parameter may lie anywhere."""
        self._sharded = sharded
        self._computed = computed
        self._kept = attrgetter(kind)
        columns = map(list, zip(*lies, strict=True))
        self._owners, self._attributes, self._params, self._specs, *others = columns
        self._pointers, self._dtypes, self._shapes, self._steps = others

    def stand(self) -> bool:
        """Whether every parameter is the object that it was, and lies where it did."""
        now = map(dict.get, map(self._kept, self._owners), self._attributes)
        if not all(map(is_, now, self._params)):
            return False
        local = self._params
        if self._sharded:
            if not all(map(is_, map(_spec, self._params), self._specs)):
                return False
            local = list(map(_local_tensor, self._params))
        return self._computed or (  # lists are compared sooner than each of their elements
            list(map(torch.Tensor.data_ptr, local)) == self._pointers
            and list(map(_dtype, local)) == self._dtypes
            and list(map(_shape, local)) == self._shapes
            and list(map(torch.Tensor.stride, local)) == self._steps
        )


def layout_of(item: Item, spec: Any) -> Layout:
    """RequestError: a placement of a kind that has no such layout."""
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
    coordinate, order = spec.mesh.get_coordinate(), order_of(spec)
    return Layout(
        tuple(splits),
        tuple(spec.mesh.shape),
        None if coordinate is None else tuple(coordinate),
        None
        if order is None
        else tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order),
    )


def order_of(spec: Any) -> Any:
    """In which order the mesh's dimensions split; None: this PyTorch does not say."""
    return getattr(spec, "shard_order", None)


def blocks_of(
    item: Item, spec: Any, told: Layout, shape: tuple[int, ...], local_shape: tuple[int, ...]
) -> tuple[Block, ...]:
    """What of a tensor of *shape* lies in its local one. RequestError: the layout does not say."""
    blocks = layout(shape, *told[:3], local_shape, told.order)
    if blocks is None:
        raise RequestError.make(
            f"the local tensor of '{item.path}' has shape {list(local_shape)}, which placements "
            f"{spec.placements} on mesh {list(told.mesh_shape)} do not give for {list(shape)}",
            "make the parameter by fully_shard or distribute_tensor",
            key=item.name,
        )
    return blocks


def part_now(tensor: Any) -> Any:
    """The tensor that has this rank's part of *tensor* now: of a plain one that itself."""
    if getattr(tensor, "_spec", None) is None:
        return tensor
    local = tensor._local_tensor  # maybe the result of a collective that is still under way
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local


def local_of(state: State) -> Any:
    """The tensor that holds this rank's part; of what is computed, all parts in a row."""
    if state.values is not None:
        return view_of(state, Box((0,), state.local_shape, state.stride, state.pointer))
    return state.param if state.spec is None else state.param._local_tensor


def view_of(state: State, box: Box) -> Any:
    """The memory of *box*, which is a part of *state*'s, as a tensor."""
    size = state.dtype.itemsize
    first = (box.address - state.storage.data_ptr()) // size if 0 not in box.extent else 0
    steps = [step // size for step in box.stride]
    empty = torch.empty(0, dtype=state.dtype, device=state.storage.device)
    return empty.set_(state.storage, first, box.extent, steps)


def is_same(param: Any, state: State) -> bool:
    """Whether a parameter object that is the registered one still lies where it was registered."""
    if state.spec is not None and param._spec is not state.spec:
        return False
    if state.values is not None:
        return True
    local = local_of(state)
    return (
        local.data_ptr() == state.pointer
        and local.dtype is state.dtype
        and local.shape == state.local_shape
        and local.stride() == state.steps
    )


def is_registered(new: State, old: State) -> bool:
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
        and (new.places, _parts(new)) == (old.places, _parts(old))
    )


def _parts(state: State) -> Any:
    return None if state.values is None else state.values.parts


def refuse_kind(item: Item, local: Any) -> None:
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
    for lazily, remedy in (("neg", "resolve_neg()"), ("conj", "resolve_conj()")):
        if getattr(local, f"is_{lazily}")():
            raise refuse(
                f"is a view whose {lazily}() PyTorch computes when it is read, and not in memory",
                f"replace it by what its {remedy} gives",
            )
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
