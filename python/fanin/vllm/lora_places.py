# SPDX-License-Identifier: Apache-2.0
"""Which of an adapter's published tensors have a place in the model of a vLLM worker.

vLLM drops what has none: an adapter for other layers loads without an error, and the base model
answers. Of one that is narrower or wider it copies what its slots hold. So each worker is asked,
before any bytes move, with the names and shapes of the catalog: it names modules by vLLM's own
parser and compares with the modules that vLLM has wrapped.

Nothing here imports vLLM or PyTorch before a worker calls it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["Width", "file_name", "judge", "of_one", "of_packed", "places_in", "widths_of"]

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\."
)
_WITH_LEAF = re.compile(r"\.(lora_[AB])\.[^.]+\.(weight|bias)$")
_BARE = re.compile(r"\.(lora_embedding_[AB])\.[^.]+$")
_PREFIX = "base_model.model."
_FUSED = ".base_layer"

#: The module and whether it is of lora_A, by a name of PEFT's file. Raises ValueError.
Parse = Callable[[str], tuple[str, bool]]


class Width(NamedTuple):
    """Of a whole module, not of one worker's shard: the sizes of its inputs and outputs that fit;
    empty: it is not known which."""

    into: tuple[int, ...] = ()
    out: tuple[int, ...] = ()


def file_name(published: str) -> str:
    """The name that a published tensor has in PEFT's file."""
    name = _WRAPPERS.sub("", published).removeprefix("module.")
    name = _BARE.sub(r".\1", _WITH_LEAF.sub(r".\1.\2", name))
    return name if name.startswith(_PREFIX) else _PREFIX + name


# ------------------------------------------------------------------------- the comparison


def judge(
    tensors: Iterable[tuple[str, Sequence[int]]],
    parse: Parse,
    widths: dict[str, Width],
    unwrapped: Callable[[str], bool],
    elsewhere: Callable[[str], bool],
) -> dict[str, Any]:
    """What one worker says of the published tensors, as plain values.

    Args:
        widths: by the name of a module as an adapter says it.
        unwrapped: whether the model has a module of that name without LoRA.
        elsewhere: whether another worker has the module.

    Returns:

    ``{"placed": numbers, "absent": {number: why}, "misfit": {number: why}}``, by the tensors' order
    (as texts: vLLM's processes send those).
    """
    placed: list[int] = []
    absent: dict[str, str] = {}
    misfit: dict[str, str] = {}
    halves: dict[str, dict[bool, tuple[int, Sequence[int]]]] = {}
    for number, (published, shape) in enumerate(tensors):
        try:
            module, is_a = parse(file_name(published))
        except ValueError:
            absent[str(number)] = "no tensor of a LoRA layer"
            continue
        width = widths.get(module)
        if width is None:
            if not elsewhere(module):
                absent[str(number)] = _missing(module, unwrapped(module))
            continue
        placed.append(number)
        pair = halves.setdefault(module, {})
        why = "another tensor goes there too" if is_a in pair else _other(width, is_a, shape)
        if why:
            misfit[str(number)] = why
        pair.setdefault(is_a, (number, shape))
    for module, pair in halves.items():
        for number, why in _halved(module, pair, halves):
            misfit.setdefault(str(number), why)
    return {"placed": placed, "absent": absent, "misfit": misfit}


def _missing(module: str, unwrapped: bool) -> str:
    return f"{module} is without LoRA" if unwrapped else f"there is no {module}"


def _other(width: Width, is_a: bool, shape: Sequence[int]) -> str:
    """Why a tensor of that shape does not fit, ``""`` if it does."""
    fits, at, what = (width.into, 1, "takes") if is_a else (width.out, 0, "gives")
    if not fits:
        return ""
    if len(shape) != 2:
        return f"{list(shape)}, not a matrix"
    if int(shape[at]) in fits:
        return ""
    return f"{list(shape)}, and the module {what} {fits[0]}"


def _halved(
    module: str,
    pair: dict[bool, tuple[int, Sequence[int]]],
    all_of_them: dict[str, Any],
) -> Iterator[tuple[int, str]]:
    if len(pair) == 1:
        ((is_a, (number, _)),) = pair.items()
        yield number, f"there is no lora_{'B' if is_a else 'A'} with it"
        return
    (_, a), (number, b) = pair[True], pair[False]
    if len(a) == len(b) == 2 and a[0] != b[1]:
        yield number, f"its rank {b[1]} is not the {a[0]} of lora_A"
    if module.endswith(_FUSED) and module.removesuffix(_FUSED) not in all_of_them:
        yield number, "experts without down_proj"


# ------------------------------------------------------------------------- vLLM's own classes


def places_in(worker: Any, tensors: Iterable[tuple[str, Sequence[int]]], is_3d: bool) -> Any:
    """See :func:`judge`, of a vLLM worker. Any thread; reads no weights and does not block.

    None: the worker has no LoRA, or vLLM's classes are others, so that it cannot tell.
    """
    manager = getattr(
        getattr(getattr(worker, "model_runner", None), "lora_manager", None),
        "_adapter_manager",
        None,
    )
    if manager is None:
        return None
    widths = widths_of(manager, is_3d)
    modules = {name: type(m).__name__ for name, m in manager.model.named_modules()}
    away = tuple(f"{name}." for name, kind in modules.items() if kind == "PPMissingLayer")
    packed: dict[str, set[str]] = {}
    for parent, children in manager.packed_modules_mapping.items():
        for child in children:
            packed.setdefault(child, set()).add(parent)

    def unwrapped(module: str) -> bool:
        prefix, _, leaf = module.rpartition(".")
        parents = (f"{prefix}.{parent}" for parent in packed.get(leaf, ()))
        return module in modules or any(name in modules for name in parents)

    return judge(
        tensors,
        _parser(manager),
        widths,
        unwrapped,
        lambda module: f"{module}.".startswith(away),
    )


def _parser(manager: Any) -> Parse:
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    skipped = tuple(getattr(manager.model, "lora_skip_prefixes", None) or ())

    def parse(name: str) -> tuple[str, bool]:
        if any(f".{prefix}" in name or name.startswith(prefix) for prefix in skipped):
            raise ValueError("vLLM skips it")
        found: tuple[str, bool] = parse_fine_tuned_lora_name(name, mapper)
        return found

    return parse


def widths_of(manager: Any, is_3d: bool) -> dict[str, Width]:
    """What adapters may name in a worker's model (vLLM's LoRAModelManager), with its widths.

    is_3d: the request's ``is_3d_lora_weight``.
    """
    found: dict[str, Width] = {}
    for path, module in manager.modules.items():
        children = manager.packed_modules.get(path)
        if hasattr(module, "w13_lora_a_stacked"):
            found.update(_of_experts(manager, path, module, children, is_3d))
        elif children:
            found.update(zip(children, of_packed(module, len(children)), strict=True))
        else:
            found[path] = of_one(module)
    head = getattr(manager, "_classification_head", None)
    for name in ("score", "classifier") if head is not None else ():
        found.setdefault(name, Width())
    if manager.is_pooling_model:  # which vLLM looks up without this prefix, too
        for name in list(found):
            found.setdefault(name.removeprefix("model."), found[name])
    return found


def _sizes(*values: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for value in values if isinstance(value, int)))


def _heads(base: Any) -> tuple[int, int, int] | None:
    """Outputs of query, key and value; the layer's own count holds copies for its shards."""
    if not hasattr(base, "total_num_kv_heads"):
        return None
    value = getattr(base, "v_head_size", None) or base.head_size
    queries, keys = base.total_num_heads, base.total_num_kv_heads
    return queries * base.head_size, keys * base.head_size, keys * value


def of_one(module: Any) -> Width:
    """Of a wrapped module that adapters name as it is; also of SGLang's, which has the same."""
    base = module.base_layer
    if hasattr(module, "sharded_to_full_mapping"):  # a head: its base is the logits processor
        sizes = _sizes(getattr(base, "org_vocab_size", None), getattr(base, "vocab_size", None))
        return Width(_sizes(module.hidden_size), sizes)
    if hasattr(base, "embedding_dim"):
        return Width(_sizes(base.org_vocab_size), _sizes(base.embedding_dim))
    heads = _heads(base)
    out = getattr(base, "output_size", None) if heads is None else sum(heads)
    return Width(_sizes(getattr(base, "input_size", None)), _sizes(out))


def of_packed(module: Any, count: int) -> list[Width]:
    """Of a wrapped module, for each of the *count* that adapters have in its place."""
    base = module.base_layer
    into = _sizes(getattr(base, "input_size", None))
    heads = _heads(base)
    sizes = list(getattr(base, "output_sizes", ()) if heads is None else heads)
    if len(sizes) < count:
        return [Width(into)] * count
    first = len(sizes) - count + 1  # where an adapter has several outputs in one, they lead
    return [Width(into, (sum(sizes[:first]),)), *(Width(into, (size,)) for size in sizes[first:])]


def _of_experts(
    manager: Any, path: str, module: Any, children: list[str] | None, is_3d: bool
) -> Iterator[tuple[str, Width]]:
    config = module.moe_config
    hidden = _sizes(getattr(config, "hidden_dim_unpadded", None), config.hidden_dim)
    shards = module.tp_size
    part = config.intermediate_size_per_partition
    unpadded = getattr(config, "intermediate_size_per_partition_unpadded", None)
    inner = _sizes(*(size * shards for size in (unpadded, part) if size is not None))
    if children and getattr(manager, "_enable_moe_shared_loras", False):
        yield from ((child, Width()) for child in children)  # stacks of three dimensions
    elif children and not is_3d:
        up, down = Width(hidden, inner), Width(inner, hidden)
        order = (up, down) if getattr(manager, "_is_non_gated_moe", False) else (up, down, up)
        for number, child in enumerate(children):
            yield child, order[number % len(order)]
    else:
        yield path, Width(inner, hidden)
        yield path + _FUSED, Width(hidden, tuple(2 * size for size in inner))
