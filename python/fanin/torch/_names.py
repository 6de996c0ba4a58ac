# SPDX-License-Identifier: Apache-2.0
"""Names of parameters: in memory, in an adapter's file, and of slices of one stored tensor.

No torch in here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fanin.errors import RequestError
from fanin.torch import _blocks

PREFIX = "base_model.model."
WRAPPERS = frozenset(("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"))

# The component that says what a tensor is to a LoRA layer. Experts' projections may stand before
# it in the same component: `w1_lora_A` is lora_A of `w1`.
_PART = re.compile(
    r"^(?:(?P<stem>.+?)_)?"
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|lora_diag)$"
)
_WITH_LEAF = ("lora_A", "lora_B")
_LEAVES = ("weight", "bias")
# PEFT saves them, and nothing but training computes with them: VeLoRA's and MonteCLoRA's.
_OF_TRAINING = ("lora_velora_embed", "lora_monteclora_sampler")


class Parameter(NamedTuple):
    """A parameter's name taken apart."""

    name: str
    """PEFT's name on disk."""
    adapter: str | None
    """PEFT's name of the adapter, which the name on disk lacks; None: the name has none."""
    part: str
    """The component that told: "lora_A", "modules_to_save", ..., "bias" for a trained bias."""


def _components(path: str) -> list[str]:
    parts = [part for part in path.split(".") if part not in WRAPPERS]
    # DistributedDataParallel and the like around the whole, between other wrappers or not.
    inner = list(itertools.dropwhile("module".__eq__, parts))
    return inner if _with_prefix(inner) == ".".join(inner) else parts


def _with_prefix(parts: Sequence[str]) -> str:
    name = ".".join(parts)
    return name if name.startswith(PREFIX) else PREFIX + name


def parse(path: str) -> Parameter | None:
    """What the parameter at ``path`` in a module tree is to an adapter; None: no part of one.

    Wrappers' components (FSDP, DDP, torch.compile, activation checkpointing) are dropped.
    """
    if "lora_" not in path and "modules_to_save" not in path and "trainable_tokens" not in path:
        return None
    parts = _components(path)
    for at in range(len(parts) - 1, -1, -1):
        component, rest = parts[at], parts[at + 1 :]
        if component == "modules_to_save" and len(rest) >= 2:
            return Parameter(_with_prefix(parts[:at] + rest[1:]), rest[0], component)
        if component == "trainable_tokens_delta" and len(rest) <= 1:
            return Parameter(_with_prefix(parts[: at + 1]), rest[0] if rest else None, component)
        match = _PART.match(component)
        if match is None or len(rest) > 2:
            continue
        part = match["part"]
        module = parts[:at] + ([match["stem"]] if match["stem"] else [])
        leaf = rest[-1] if rest and rest[-1] in _LEAVES else None
        named = rest[:-1] if leaf else rest
        if len(named) > 1:
            continue
        ending = [leaf or "weight"] if part in _WITH_LEAF else []
        return Parameter(_with_prefix([*module, part, *ending]), named[0] if named else None, part)
    return None


def unknown_part(path: str, adapter: str | None) -> str | None:
    """The component that makes a tensor the adapter's although :func:`parse` does not know it."""
    if "lora_" not in path:
        return None
    for part, owner in itertools.pairwise(_components(path)):
        if owner == adapter and part.startswith("lora_") and part not in _OF_TRAINING:
            return part
    return None


def on_disk(path: str) -> str:
    """PEFT's name on disk of the parameter at ``path``: wrappers and adapter name dropped."""
    found = parse(path)
    return found.name if found is not None else _with_prefix(_components(path))


@dataclass(frozen=True)
class Slice:
    """A part of a stored tensor that is published under a name of its own, without a copy.

    ``index`` has an int or a slice of step 1 for each of the first dimensions. An int drops its
    dimension. Dimensions behind the last index are whole. ``Slice("q", (3, slice(0, 8)))`` of ``t``
    is ``t[3, 0:8]``.

    With ``shape`` the slice is a part of a published tensor of that shape, whose element ``at``
    (default: the first) is the slice's first one. The other parts are slices with the same key, of
    the same stored tensor or of other ranks' tensors.
    """

    key: str
    index: tuple[int | slice, ...] = ()
    at: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it differs from the whole stored tensor."""
        return bool(self.index) or self.at is not None or self.shape is not None


def published_shape(part: Slice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the published tensor that *part* of a stored tensor of *shape* belongs to.

    ValueError: the index does not fit the stored tensor, or the slice its place.
    """
    if not part.is_cut:
        return shape
    extent = _blocks.sliced_shape(shape, part.index)
    if part.shape is None:
        if part.at is not None:
            raise ValueError("at needs the shape of the published tensor")
        return extent
    at = (0,) * len(extent) if part.at is None else part.at
    if not len(part.shape) == len(at) == len(extent) or any(
        first < 0 or first + length > size
        for first, length, size in zip(at, extent, part.shape, strict=True)
    ):
        raise ValueError(
            f"{list(extent)} elements at {list(at)} do not lie inside {list(part.shape)}"
        )
    return part.shape


Published = str | Slice | Sequence[Slice] | None
NamesFunction = Callable[[str, tuple[int, ...]], Published]
"""What is published of a parameter: called with its name on disk and its global shape, returns a
name, None for nothing, or slices. Ranks whose tensors are parts of one by the trainer's own doing,
not as DTensors, say so by ``Slice.at`` and ``Slice.shape``; otherwise all must answer alike."""


def slices_of(names: NamesFunction, name: str, shape: tuple[int, ...]) -> tuple[Slice, ...]:
    """The answer of ``names``, as slices. RequestError: it is of another kind."""
    answer = names(name, shape)
    if answer is None:
        return ()
    if isinstance(answer, str):
        return (Slice(answer),)
    if isinstance(answer, Slice):
        return (answer,)
    out = tuple(answer) if isinstance(answer, Iterable) else (answer,)
    if not all(isinstance(item, Slice) for item in out):
        raise RequestError.make(
            f"names() returned {answer!r} for '{name}'",
            "return a name, None, fanin.torch.Slice or several of these",
            key=name,
        )
    return out


EXPERT_NAMES: Mapping[str, str] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""How many trainers call the projections of an expert, and how engines do."""


def per_expert(
    name: str, shape: tuple[int, ...], *, projections: Mapping[str, str] = EXPERT_NAMES
) -> Published:
    """Stacked experts to one name an expert; to be given as ``names=per_expert``.

    ``...experts.w1.lora_A.weight`` of [E, r, in] becomes ``...experts.<e>.gate_proj.lora_A.weight``
    of [r, in] for e < E, and lora_B of [E, out, r] likewise. Other names, and tensors of fewer than
    three dimensions, stay as they are but for the projections' names.

    Args:
        name: the parameter's name on disk.
        shape: its global shape.
        projections: the engines' name of each of the trainer's projections.

    Returns:
        A name, or a slice for each expert.
    """
    head, found, tail = name.rpartition(".experts.")
    if not found:
        return name
    parts = [projections.get(part, part) for part in tail.split(".")]
    if len(shape) < 3 or parts[0].isdigit():
        return head + found + ".".join(parts)
    return [
        Slice(f"{head}{found}{expert}.{'.'.join(parts)}", (expert,)) for expert in range(shape[0])
    ]


def renamed(components: Mapping[str, str]) -> NamesFunction:
    """A function for ``names=`` that exchanges components of names.

    Args:
        components: the new component of each old one, ``{"w1": "gate_proj"}``. Others stay.

    Returns:
        The function.
    """

    def rename(name: str, shape: tuple[int, ...]) -> str:
        return ".".join(components.get(part, part) for part in name.split("."))

    return rename


def slot(index: int, *, dim: int = 0, size: int | None = None, pattern: str = "") -> NamesFunction:
    """A function for ``names=`` that publishes one run's part of stacked tensors.

    Args:
        index: the run's place, from 0 on.
        dim: the dimension in which the runs lie.
        size: None: dimension *dim* counts the runs and is dropped: [runs, r, in] to [r, in]. Else
            the runs lie one behind the other: elements ``index * size`` up to ``(index + 1) *
            size``.
        pattern: a regular expression that tells which names are stacked (searched for; default:
            all). The others are published whole.

    Returns:
        The function. It raises ValueError for a tensor that has no such slot.
    """
    at = index if size is None else slice(index * size, (index + 1) * size)

    def choose(name: str, shape: tuple[int, ...]) -> Published:
        if not re.search(pattern, name):
            return name
        extent = shape[dim] if 0 <= dim < len(shape) else 0
        if not 0 <= index or extent < (index + 1) * (size or 1):
            raise ValueError(f"{name} has {extent} elements in dimension {dim}, no slot {index}")
        return Slice(name, (slice(None),) * dim + (at,))

    return choose


def _composed(outer: Slice, shape: tuple[int, ...], inner: Slice) -> Slice | None:
    """The slice ``inner`` of the tensor that the slice ``outer`` of a tensor of ``shape`` is a part
    of, as far as that part has it; None: nothing of it."""
    whole = published_shape(outer, shape)
    published_shape(inner, whole)
    places = iter(outer.at or (0,) * len(whole))
    wanted = iter(_blocks.normal_index(inner.index, whole))
    inner_at = iter(inner.at or (0,) * len(whole))
    index: list[int | slice] = []
    at: list[int] = []
    for start, stop, dropped in _blocks.normal_index(outer.index, shape):
        if dropped:
            index.append(start)
            continue
        place, (first, last, drop) = next(places), next(wanted)
        begin, end = max(place, first), min(place + stop - start, last)
        if first == last:
            begin = end = place = first  # nothing is wanted, which every part has
        elif begin >= end:
            return None
        index.append(
            start + begin - place if drop else slice(start + begin - place, start + end - place)
        )
        if not drop:
            at.append(next(inner_at) + begin - first)
    if outer.shape is None and inner.shape is None:
        return Slice(inner.key, tuple(index))
    return Slice(inner.key, tuple(index), tuple(at), published_shape(inner, whole))


def chain(*functions: NamesFunction) -> NamesFunction:
    """A function for ``names=``: each function is asked about what those before it published.

    ``chain(slot(2), per_expert)`` publishes one expert after the other of the third run of [runs,
    E, r, in].

    Args:
        functions: in the order in which they are asked.

    Returns:
        The function.
    """

    def answer(name: str, shape: tuple[int, ...]) -> list[Slice]:
        slices = [Slice(name)]
        for function in functions:
            slices = [
                part
                for outer in slices
                for inner in slices_of(function, outer.key, published_shape(outer, shape))
                if (part := _composed(outer, shape, inner)) is not None
            ]
        return slices

    return answer
