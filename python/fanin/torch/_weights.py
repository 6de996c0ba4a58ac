# SPDX-License-Identifier: Apache-2.0
"""Finds every parameter and persistent buffer of a model, under the name of its checkpoint."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from fanin._digest import box_digests
from fanin.errors import RequestError
from fanin.torch._config import kinds_of
from fanin.torch._fsdp import refuse_fsdp1, sharding_of
from fanin.torch._merge import Merge
from fanin.torch._names import WRAPPERS, NamesFunction, Published, Slice, parse
from fanin.torch._packed4 import is_packed4
from fanin.torch._transform import Transform, values_of
from fanin.torch._tree import (
    BUFFER,
    PARAMETER,
    Alias,
    FindFunction,
    Found,
    Item,
    root_of,
    walk,
    walk_buffers,
)

# Classes whose only child "module" is no part of a checkpoint's names.
_AROUND = ("DistributedDataParallel", "DataParallel", "Float16Module", "DeepSpeedEngine")
_PACKED = "bitsandbytes"
# Where PEFT has the classes of its layers and of what it puts around a model.
_PEFT = (("peft.tuners.tuners_utils", "BaseTunerLayer"), ("peft.peft_model", "PeftModel"))


def _transparent(root: Any) -> set[str]:
    """Paths of modules that wrappers hold and checkpoints do not name."""
    return {
        f"{prefix}.module" if prefix else "module"
        for prefix, module in root.named_modules(remove_duplicate=False)
        if any(kind.__name__ in _AROUND for kind in type(module).__mro__)
    }


def _checkpoint_name(path: str, transparent: set[str]) -> str:
    parts = path.split(".")
    return ".".join(
        part
        for at, part in enumerate(parts)
        if part not in WRAPPERS and ".".join(parts[: at + 1]) not in transparent
    )


def _told_by(root: Any, attribute: str, transparent: set[str]) -> Iterator[tuple[str, Any]]:
    """Prefix and value of what transformers' models say of their names."""
    for path, module in root.named_modules():
        value = getattr(module, attribute, None)
        if isinstance(value, (list, tuple, set, frozenset, dict)) and value:
            prefix = _checkpoint_name(path, transparent)
            yield f"{prefix}." if prefix else "", value


class _Names:
    """What transformers' models say of names: which are not saved, and which are another's."""

    def __init__(self, root: Any, transparent: set[str]) -> None:
        self._unsaved = {
            prefix + key
            for prefix, keys in _told_by(root, "_keys_to_ignore_on_save", transparent)
            for key in keys
        }
        tied: Iterable[tuple[str, Any]] = _told_by(root, "_tied_weights_keys", transparent)
        self._tied = [(prefix, re.compile(key)) for prefix, keys in tied for key in keys]

    def is_saved(self, name: str) -> bool:
        return name not in self._unsaved

    def first(self, names: list[str]) -> int:
        """Which of the names of one tensor is the one in checkpoints."""
        for at, name in enumerate(names):
            if not any(
                name.startswith(prefix) and pattern.search(name, len(prefix))
                for prefix, pattern in self._tied
            ):
                return at
        return 0


def lost_ties(root: Any, items: Iterable[Item]) -> list[tuple[str, str]]:
    """Names of tensors that the configuration ties and torch holds apart, two and two.

    That happens after ``to_empty()``, when a head was cloned, and where FSDP2 shards the two
    separately. Each then has a gradient of its own, and transformers and engines load one of them.
    """
    transparent = _transparent(root)
    held = {item.name: item.now() for item in items}
    names = {id(tensor): name for name, tensor in held.items()}
    pairs: list[tuple[str, str]] = []
    for path, module in root.named_modules():
        config = getattr(module, "config", None)
        if hasattr(module, "get_expanded_tied_weights_keys"):  # transformers 5; config may change
            prefix = _checkpoint_name(path, transparent)
            prefix = f"{prefix}." if prefix else ""
            ties = module.get_expanded_tied_weights_keys(all_submodels=False)
            pairs += [(prefix + kept, prefix + tied) for tied, kept in ties.items()]
        elif getattr(config, "tie_word_embeddings", False):
            ends = [
                getattr(getattr(module, which, lambda: None)(), "weight", None)
                for which in ("get_input_embeddings", "get_output_embeddings")
            ]
            if all(id(end) in names for end in ends):
                pairs.append((names[id(ends[0])], names[id(ends[1])]))
    return sorted({p for p in pairs if all(n in held for n in p) and held[p[0]] is not held[p[1]]})


def refuse_lost_tie(run: str, first: tuple[str, Any], second: tuple[str, Any]) -> None:
    """RequestError: the two hold different values on this rank. Tensors are this rank's parts."""
    (name, one), (other, two) = first, second
    alike = one.shape == two.shape and one.dtype == two.dtype
    if not alike or len(set(box_digests([(one, ()), (two, ())]))) > 1:
        raise RequestError.make(
            f"the configuration ties '{other}' to '{name}', and {run} holds two tensors with "
            "different values: engines load one of them, and compute with it in both places",
            "call model.tie_weights() after the model is materialised (to_empty, a load) and "
            "before fully_shard(), and shard the two in one group; or train with "
            "config.tie_word_embeddings = False, and start engines with such a configuration",
            key=other,
        )


def _parts_of_adapters(root: Any, computed: bool) -> Iterator[str]:
    """Paths of LoRA's parameters, whoever made them, and of modules of PEFT's. computed: of PEFT's
    alone."""
    yield from (path for _, _, _, path in walk(root) if not computed and parse(path) is not None)
    for where, name in _PEFT:
        kind = getattr(sys.modules.get(where), name, ())
        yield from (path or name for path, one in root.named_modules() if isinstance(one, kind))


def _refuse_adapter(root: Any, computed: bool) -> None:
    path = next(_parts_of_adapters(root, computed), None)
    if path is not None:
        kinds = kinds_of(root)
        raise RequestError.make(
            f"'{path}' belongs to an adapter" + (f" ({', '.join(kinds)})" if kinds else "") + ": "
            "the weights that engines want are the base's and the adapter's together, which lie in "
            "no memory",
            "publish a LoRA adapter by fanin.torch.AdapterServer, or merged into its base by "
            "WeightServer(model, merge=True); of other adapters what merge_and_unload() makes",
            key=path,
        )


def _is_packing(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _PACKED and (
        "bit" in kind.__name__ or issubclass(kind, torch.Tensor)
    )


def _refuse_packed(owner: Any, tensor: Any, path: str) -> None:
    unpacking = owner if isinstance(owner, ParametrizationList) else ()
    for kind in (kind for part in (owner, tensor, *unpacking) for kind in type(part).__mro__):
        if _is_packing(kind):
            raise RequestError.make(
                f"'{path}' is a weight of bitsandbytes' {kind.__name__}, which packs its values",
                "dequantize the model; or train a LoRA adapter of a model in 4 bits, and publish "
                "both together by WeightServer(model, merge=True), or the adapter by "
                "fanin.torch.AdapterServer",
                key=path,
            )


def find_weights(root: Any, merge: Merge | None = None, computed: bool = False) -> Found:
    """Every parameter and persistent buffer once, in the order of the tree.

    merge: takes the adapter, whose tensors are not among them. computed: ``transform=`` says what
    is published of tensors, and takes adapters that are not PEFT's.

    RequestError: an adapter's are among them, or weights that are packed; two tensors would have
    one name.
    """
    refuse_fsdp1(root)
    if merge is not None:
        merge.look()
    else:
        _refuse_adapter(root, computed)
    record_of = sharding_of(root)
    transparent = _transparent(root) | (merge.transparent if merge is not None else set())
    told = _Names(root, transparent)
    places: dict[int, list[tuple[Any, str, str, str, str]]] = {}
    for kind, all_of in ((PARAMETER, walk(root)), (BUFFER, walk_buffers(root))):
        for owner, attribute, tensor, path in all_of:
            name = _checkpoint_name(path, transparent)
            if not told.is_saved(name) or (merge is not None and not merge.is_kept(path)):
                continue
            if kind == PARAMETER and not (merge is not None and is_packed4(owner, attribute)):
                _refuse_packed(owner, tensor, path)
            places.setdefault(id(tensor), []).append((owner, attribute, kind, path, name))
    items: list[Item] = []
    aliases: list[Alias] = []
    for names in places.values():
        if merge is not None:
            merge.refuse_tied([place[:2] for place in names], [place[-1] for place in names])
        chosen = told.first([place[-1] for place in names])
        owner, attribute, kind, path, name = names[chosen]
        record = record_of(owner, attribute) if kind == PARAMETER else None
        items.append(Item(path, name, owner, attribute, record, kind))
        aliases += [Alias(place[0], place[1], place[2], items[-1]) for place in names]
    _refuse_same_names(items)
    return Found(items, [one for one in aliases if _is_other(one)])


def _is_other(alias: Alias) -> bool:
    return alias.owner is not alias.item.owner or alias.attribute != alias.item.attribute


def _refuse_same_names(items: list[Item]) -> None:
    paths: dict[str, str] = {}
    for item in items:
        if item.name in paths:
            raise RequestError.make(
                f"'{paths[item.name]}' and '{item.path}' would both be published as '{item.name}'",
                "give the innermost model, whose names are those of its checkpoint",
                key=item.name,
            )
        paths[item.name] = item.path


def checkpoint_names(
    model: Any, find: FindFunction = find_weights, transform: Transform | None = None
) -> NamesFunction | None:
    """What transformers saves of *model*; None: what is stored, under the names that it has.

    Only where a wrapper at most is around transformers' model: its names begin at the root.
    """
    root = root_of(model)
    if not converts(root):
        return None

    def shape_of(item: Item) -> tuple[int, ...]:
        values = values_of(item, transform, item.now())
        return tuple(item.now().shape if values is None else values.shape)

    def shapes() -> dict[str, tuple[int, ...]]:
        return {item.name: shape_of(item) for item in find(root).items}

    return CheckpointNames(root, shapes)


# -------------------------------------------------------------------- what transformers would write
# Found out by its own conversion. From version 5 on transformers keeps some tensors otherwise than
# checkpoints do (the experts of a layer in one), and converts them when it saves. That conversion
# is run here over tensors without memory: what is a view of a stored tensor is a slice of it.


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class _NoCopies(TorchFunctionMode):
    """Copies that only make memory contiguous are left out: they say nothing of names."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _conversion() -> Callable[..., dict[str, Any]] | None:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    return revert_weight_conversion


def converts(model: Any) -> bool:
    """Whether *model* is one that transformers converts when it saves it."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(model, PreTrainedModel) and _conversion() is not None


def slices_by_name(model: Any, shapes: Shapes) -> dict[str, list[Slice]]:
    """What is saved of each of the model's tensors, by the names and shapes that they have in it.

    RequestError: transformers computes what it would save.
    """
    convert = _conversion()
    assert convert is not None
    stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {one.untyped_storage()._cdata: name for name, one in stored.items()}
    with _NoCopies():
        saved = convert(model, dict(stored))
    out: dict[str, list[Slice]] = {name: [] for name in shapes}
    for key, view in saved.items():
        name = names.get(view.untyped_storage()._cdata)
        index = None if name is None else _index_of(shapes[name], view)
        if name is None or index is None:
            raise RequestError.make(
                f"'{key}' of the checkpoint is no part of one stored tensor: transformers computes "
                "it when it saves",
                "give names= that says what is published of each stored tensor",
                key=key,
            )
        out[name].append(Slice(key, index))
    for name, slices in out.items():
        _refuse_some_experts(model, name, shapes[name], slices)
    return out


def _refuse_some_experts(model: Any, name: str, shape: Shape, slices: list[Slice]) -> None:
    """transformers counts experts from 0, also those of a plain tensor that has a rank's only."""
    if len(slices) < 2 or ".experts." not in name:
        return
    config = model.config.get_text_config()
    told = (getattr(config, field, None) for field in _EXPERTS)
    counts = {count for count in told if isinstance(count, int)}
    if counts and shape[0] not in counts:
        raise RequestError.make(
            f"'{name}' has {shape[0]} experts, and the model's configuration says "
            + " or ".join(map(str, sorted(counts))),
            "give names=fanin.torch.names.experts(first=...), the number of this rank's first one, "
            "or make the experts a DTensor",
            key=name,
        )


def _index_of(shape: Shape, view: Any) -> tuple[int | slice, ...] | None:
    """The index of a packed tensor of *shape* that gives *view*, None: no such index does."""
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if tuple(view.shape) == shape and tuple(view.stride()) == tuple(steps):
        return ()
    offset = int(view.storage_offset())
    index: list[int | slice] = []
    left = list(zip(view.shape, view.stride(), strict=True))
    for size, step in zip(shape, steps, strict=True):
        start, offset = divmod(offset, step) if step else (0, offset)
        if left and left[0][1] == step and start + left[0][0] <= size:
            index.append(slice(start, start + left.pop(0)[0]))
        else:
            index.append(start)
    return None if left or offset else tuple(index)


class CheckpointNames:
    """A function for ``names=``: what transformers saves of *model*, under the names it saves."""

    def __init__(self, model: Any, shapes: Callable[[], Shapes]) -> None:
        """shapes: gives the names and shapes of all that is stored now."""
        self._model = model
        self._shapes = shapes
        self._known: dict[tuple[str, Shape], list[Slice]] = {}

    def __call__(self, name: str, shape: Shape) -> Published:
        if (name, shape) not in self._known:
            shapes = {**self._shapes(), name: shape}
            slices = slices_by_name(self._model, shapes)
            self._known = {(one, shapes[one]): parts for one, parts in slices.items()}
        return self._known[name, shape]
