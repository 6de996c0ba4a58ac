# SPDX-License-Identifier: Apache-2.0
"""Which of an adapter's published tensors have a place in the model of an engine's worker.

Engines drop what has none: an adapter for other layers loads without an error, and the base model
answers. Of one that is narrower or wider they copy what their slots hold. So each worker is asked,
before any bytes move, with the names and shapes of the catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fanin.torch import on_disk

FUSED = ".base_layer"

#: The module and whether it is of lora_A, by a name of PEFT's file. Raises ValueError.
Parse = Callable[[str], tuple[str, bool]]


class Width(NamedTuple):
    """Of a whole module, not of one worker's shard: the sizes of its inputs and outputs that fit;
    empty: it is not known which."""

    into: tuple[int, ...] = ()
    out: tuple[int, ...] = ()


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
            module, is_a = parse(on_disk(published))
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
    module: str, pair: dict[bool, tuple[int, Sequence[int]]], all_of_them: dict[str, Any]
) -> Iterator[tuple[int, str]]:
    if len(pair) == 1:
        ((is_a, (number, _)),) = pair.items()
        yield number, f"there is no lora_{'B' if is_a else 'A'} with it"
        return
    (_, a), (number, b) = pair[True], pair[False]
    if len(a) == len(b) == 2 and a[0] != b[1]:
        yield number, f"its rank {b[1]} is not the {a[0]} of lora_A"
    if module.endswith(FUSED) and module.removesuffix(FUSED) not in all_of_them:
        yield number, "experts without down_proj"


# ------------------------------------------------------------------------- a module's widths


def sizes_of(*values: Any) -> tuple[int, ...]:
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
        sizes = sizes_of(getattr(base, "org_vocab_size", None), getattr(base, "vocab_size", None))
        return Width(sizes_of(module.hidden_size), sizes)
    if hasattr(base, "embedding_dim"):
        return Width(sizes_of(base.org_vocab_size), sizes_of(base.embedding_dim))
    heads = _heads(base)
    out = getattr(base, "output_size", None) if heads is None else sum(heads)
    return Width(sizes_of(getattr(base, "input_size", None)), sizes_of(out))


def of_packed(module: Any, count: int) -> list[Width]:
    """Of a wrapped module, for each of the *count* that adapters have in its place."""
    base = module.base_layer
    into = sizes_of(getattr(base, "input_size", None))
    heads = _heads(base)
    sizes = list(getattr(base, "output_sizes", ()) if heads is None else heads)
    if len(sizes) < count:
        return [Width(into)] * count
    first = len(sizes) - count + 1  # where an adapter has several outputs in one, they lead
    return [Width(into, (sum(sizes[:first]),)), *(Width(into, (size,)) for size in sizes[first:])]
