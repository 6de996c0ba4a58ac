# SPDX-License-Identifier: Apache-2.0
"""Runs a model's own loader without weights, and makes a mapping of what it would have written."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from fanin._cover import Parts, uncovered
from fanin._dtypes import NARROWED, torch_dtype, torch_types
from fanin.errors import RequestError
from fanin.mapping import _boxes
from fanin.mapping._boxes import Block, Part
from fanin.mapping._errors import MappingError, Refusal
from fanin.mapping._mapping import About, Fill, Leaf, Module, Piece, Source
from fanin.mapping._mapping import Mapping as ModelMapping
from fanin.mapping._recorder import Copied, Filled, Place, ReadsDataError, Recorder, Spot
from fanin.mapping._state import ModelState

_TYPES = torch_types()


class Described(Protocol):
    """What is published: an entry of ``Client.catalog``, or a shard."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Target(NamedTuple):
    """A parameter or buffer of a module that may be filled."""

    #: Of the module, ``""``: the model itself.
    module: str
    leaf: str
    #: The module's class.
    kind: str
    #: ``"parameter"``, ``"buffer"`` or ``"volatile"`` (a buffer that no checkpoint has).
    role: str
    tensor: Any

    @property
    def path(self) -> str:
        """The module's path and the tensor's name in it, with a dot."""
        return f"{self.module}.{self.leaf}" if self.module else self.leaf


#: Why nothing published has to fill a tensor, None if it has to be filled.
Owned = Callable[[Target], "str | None"]


def key_digest(published: Iterable[Described]) -> str:
    """Of names, dtypes and shapes of all published tensors, in order of the names' bytes:
    ``sha256:`` and the digest of lines "name, NUL, dtype, NUL, extents with commas, LF"."""
    lines = sorted(
        f"{p.name}\0{p.dtype}\0{','.join(map(str, p.shape))}\n".encode() for p in published
    )
    return f"sha256:{hashlib.sha256(b''.join(lines)).hexdigest()}"


def record(
    published: Iterable[Described],
    load: Callable[[Iterator[tuple[str, Any]]], object],
    model: Any,
    *,
    own: Owned | None = None,
    ties: Mapping[str, str] | None = None,
    about: About | None = None,
) -> Recording:
    """Runs *load* over tensors without memory, and remembers what it would have written where.

    Nothing is written to the model, and afterwards it has the modules, parameters, buffers,
    attributes and memory that it had, whatever *load* did. Threads that *load* starts are not
    watched. Blocks as long as *load* takes; not for two threads at once on one model.

    Args:
        published: every tensor of the publication, also those that this rank does not want.
        load: the model's own ``load_weights``. It gets names and tensors of the type
            ``torch.Tensor`` on the device "meta". Each name comes once, in the order of
            *published*.
        model: the ``torch.nn.Module`` whose parameters and buffers are filled. They must have the
            shapes that *load* expects, and may be without memory themselves.
        own: tells which tensors are the engine's own, and why. Buffers that are not persistent need
            not be told.
        ties: paths of tensors that another one fills, by path: ``{"lm_head.weight":
            "model.embed_tokens.weight"}``.
        about: engine, model and ranks, for the mapping's fingerprint.

    Raises:
        RequestError: a published dtype that PyTorch has not, a name twice, a parameter that has no
            shape yet.
    """
    tensors = list(published)
    targets = _targets(model)
    _check_published(tensors)
    recorder = Recorder([Place(t.module, t.leaf, t.tensor) for t in targets])
    state = ModelState(model)
    start = time.perf_counter()
    lent = [(t.name, recorder.lend(t.name, _TYPES[t.dtype], t.shape)) for t in tensors]
    given, failed = "", False

    def lend() -> Iterator[tuple[str, Any]]:
        nonlocal given
        for name, tensor in lent:
            given = name
            yield name, tensor

    try:
        with torch.no_grad(), recorder:
            load(lend())
    except Exception as error:
        recorder.refusals.append(_failure(error, recorder.last, given))
        failed = _by_itself(error)
    finally:
        changed = state.restore()
    recorder.refusals += [_replaced(path, targets) for path in changed]
    # What comes in the place of a tensor is not looked at: it may have all elements.
    recorder.written += [
        Spot(index, 0, tuple(target.tensor.shape), target.tensor.stride())
        for index, target in enumerate(targets)
        if target.path in changed
    ]
    return Recording(
        tuple(tensors),
        tuple(targets),
        tuple(recorder.copies),
        tuple(recorder.fills),
        tuple(recorder.refusals),
        tuple(recorder.written),
        time.perf_counter() - start,
        about or About(),
        own,
        dict(ties or {}),
        failed,
    )


def _failure(error: Exception, used: str, given: str) -> Refusal:
    if isinstance(error, ReadsDataError):
        return Refusal("", "", used or given, str(error))
    near = f" (after it had used '{used}')" if used and used != given else ""
    return Refusal("", "", given, f"the loader failed with {type(error).__name__}: {error}{near}")


def _by_itself(error: Exception) -> bool:
    """Whether a loader that has failed would fail with values, too: it misses a name, or a shape is
    another one."""
    shapes = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
    misfits = shapes or isinstance(error, (LookupError, ValueError, AssertionError))
    return misfits and "meta" not in str(error)


def _replaced(path: str, targets: Sequence[Target]) -> Refusal:
    why = "the loader replaces it, or its memory, instead of writing to it"
    for target in targets:
        if target.path == path:
            return Refusal(target.module, target.leaf, "", why)
    module, _, leaf = path.rpartition(".")
    return Refusal(module, leaf, "", why)


def _check_published(tensors: Sequence[Described]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise RequestError.make(
                "the tensor is published twice", "give each once", key=tensor.name
            )
        seen.add(tensor.name)
        if tensor.dtype not in _TYPES:
            raise RequestError.make(
                f"this PyTorch has no type for {tensor.dtype}, so that no loader can be asked "
                "where it goes",
                "publish it as another type",
                key=tensor.name,
            )


def _targets(model: Any) -> list[Target]:
    found = []
    for path, module in model.named_modules():
        own = module.__dict__
        volatile = own["_non_persistent_buffers_set"]
        for table in ("_parameters", "_buffers"):
            for leaf, tensor in own[table].items():
                if tensor is None:
                    continue
                role = "parameter" if table == "_parameters" else "buffer"
                if leaf in volatile:
                    role = "volatile"
                target = Target(path, leaf, type(module).__name__, role, tensor)
                if torch.nn.parameter.is_lazy(tensor):
                    raise RequestError.make(
                        f"'{target.path}' has no shape before it is loaded",
                        "load the model once first",
                        phase="mapping",
                    )
                found.append(target)
    return found


# ------------------------------------------------------------------------------ the checks


@dataclass(frozen=True)
class Recording:
    """What a loader did with a publication. Nothing is checked yet: see :meth:`mapping`."""

    published: tuple[Described, ...]
    targets: tuple[Target, ...]
    copies: tuple[Copied, ...]
    fills: tuple[Filled, ...]
    #: What the loader did that no copy says.
    refusals: tuple[Refusal, ...]
    #: Where it wrote by that.
    written: tuple[Spot, ...]
    #: How long the loader ran.
    seconds: float
    about: About
    own: Owned | None
    ties: dict[str, str]
    #: Whether the loader failed, and values would not have helped it.
    failed: bool = False

    def mapping(self, *, fallback: bool = False) -> ModelMapping:
        """The checked mapping.

        Each element of a parameter or buffer comes from exactly one of three sources. One published
        element fills it, or the loader with one value (padding), or it is the engine's own for a
        reason.

        Args:
            fallback: modules that fail the checks are no error. They are in the mapping with the
                reason in :attr:`Module.fallback <fanin.mapping.Module>` and the published tensors
                that the loader gave them. So the loader itself can be run for them.

        Raises:
            MappingError: something fails the checks; all of it is in ``refusals``. With *fallback*
                it names only failures that belong to no module, and elements that nothing fills.
                The loader has no values for these elements, either.
        """
        return _Checker(self).mapping(fallback)

    def only_computes(self, error: MappingError) -> bool:
        """Whether the loader may be run itself, despite *error* of :meth:`mapping`.

        It may if *error* names nothing but tensors whose values the loader computes.
        """
        computed = {(r.module, r.leaf) for r in self.refusals if r.tensor and r.leaf}
        return all(not r.unfilled and (r.module, r.leaf) in computed for r in error.refusals)

    @property
    def whole(self) -> bool:
        """Whether the loader ran to its end: else what it takes and fills is not known."""
        return all(r.module or r.leaf for r in self.refusals)

    @property
    def unfilled(self) -> tuple[Refusal, ...]:
        """Parameters and buffers of which elements are filled by nothing: neither by what is
        published, nor by what the loader computes of it."""
        return tuple(refusal for refusal in _Checker(self).refusals() if refusal.unfilled)

    def into(self, paths: Container[str]) -> tuple[str, ...]:
        """Names of published tensors of which something goes into these parameters and buffers."""
        names = [copy.name for copy in self.copies if self.targets[copy.to.place].path in paths]
        names += [refusal.tensor for refusal in self.refusals if refusal.path in paths]
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def touched(self) -> frozenset[str]:
        """Paths of the parameters and buffers that the loader writes, as far as it ran."""
        spots = [*(copy.to for copy in self.copies), *(fill.to for fill in self.fills)]
        return frozenset(self.targets[spot.place].path for spot in [*spots, *self.written])

    @property
    def unwanted(self) -> tuple[str, ...]:
        """Names of published tensors of which this rank takes nothing."""
        wanted = {copy.name for copy in self.copies}
        wanted.update(refusal.tensor for refusal in self.refusals)
        return tuple(p.name for p in self.published if p.name not in wanted)

    def tie_conflicts(self) -> list[Refusal]:
        """Tied tensors whose one memory several published tensors fill: the last one would stay."""
        names: dict[str, str] = {}
        for copy in self.copies:
            names.setdefault(self.targets[copy.to.place].path, copy.name)
        return [
            Refusal(
                *path.rpartition(".")[::2],
                names[path],
                f"it is tied to '{other}', which '{names[other]}' fills: the engine has one memory "
                "for two published tensors",
            )
            for path, other in self.ties.items()
            if path in names and other in names and names[path] != names[other]
        ]

    def taken(self) -> dict[str, Parts]:
        """Of each published tensor of which this rank does not take all the blocks that it takes;
        none: nothing. Tensors that the loader computes with count as taken.
        """
        whole = {refusal.tensor for refusal in self.refusals}
        parts: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        published = {p.name: p for p in self.published}
        for copy in self.copies:
            shape = tuple(published[copy.name].shape)
            try:
                found = _boxes.parts_of(
                    shape, copy.first, copy.to.extent, copy.stride, copy.to.stride
                )
            except _boxes.TooManyBoxesError:
                whole.add(copy.name)
                continue
            parts.setdefault(copy.name, set()).update((one.offset, one.extent) for one in found)
        out = {}
        for entry in self.published:
            if entry.name not in whole:
                of_it = tuple(sorted(parts.get(entry.name, ())))
                if uncovered(tuple(entry.shape), of_it) is not None:
                    out[entry.name] = of_it
        return out


@dataclass
class _Gathered:
    """What goes into one target."""

    sources: dict[str, list[Piece]] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    #: Of the copy, for each block.
    numbers: list[int] = field(default_factory=list)
    fills: list[tuple[Fill, list[Block], int]] = field(default_factory=list)
    #: What the loader writes in a way that boxes cannot say.
    written: list[Block] = field(default_factory=list)


class _Checker:
    def __init__(self, recording: Recording) -> None:
        self._r = recording
        self._refusals = [*recording.refusals, *recording.tie_conflicts()]
        self._published = {p.name: p for p in recording.published}
        self._memory = [
            _boxes.memory_of(t.tensor.shape, t.tensor.stride()) for t in recording.targets
        ]
        self._into = [_Gathered() for _ in recording.targets]
        self._first = self._first_of_memory()

    def _first_of_memory(self) -> dict[int, str]:
        """Of targets that are another one's memory: the path of that one."""
        seen: dict[tuple[Any, ...], str] = {}
        found = {}
        for index, target in enumerate(self._r.targets):
            t = target.tensor
            key = (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride())
            if t.numel() and seen.setdefault(key, target.path) != target.path:
                found[index] = seen[key]
        return found

    def refusals(self) -> list[Refusal]:
        """All that is wrong; first, what no loader can repair. To be called once."""
        for number, copy in enumerate(self._r.copies):
            self._copied(number, copy)
        for fill in self._r.fills:
            self._filled(fill)
        for spot in self._r.written:
            self._written(spot)
        self._reasons = [self._covered(index) for index in range(len(self._r.targets))]
        return sorted(self._refusals, key=lambda r: (bool(r.module or r.leaf), not r.unfilled))

    def mapping(self, fallback: bool) -> ModelMapping:
        refusals = self.refusals()
        hard = any(r.unfilled or not (r.module or r.leaf) for r in refusals)
        if refusals and (not fallback or hard):
            raise MappingError.of(refusals, _REMEDY)
        return ModelMapping(
            about=self._r.about,
            keys=len(self._r.published),
            digest=key_digest(self._r.published),
            modules=self._modules(self._reasons),
            unwanted=self._r.unwanted,
        )

    # -------------------------------------------------------------- copies and fills

    def _refuse(self, index: int, name: str, why: str, unfilled: int = 0) -> None:
        target = self._r.targets[index]
        self._refusals.append(Refusal(target.module, target.leaf, name, why, unfilled))

    def _copied(self, number: int, copy: Copied) -> None:
        index, entry = copy.to.place, self._published[copy.name]
        target = self._r.targets[index]
        why = _types(entry.dtype, target.tensor.dtype, copy.dtypes)
        if why:
            self._refuse(index, copy.name, why)
            self._written(copy.to)
            return
        try:
            parts = _boxes.parts_of(
                tuple(entry.shape), copy.first, copy.to.extent, copy.stride, copy.to.stride
            )
            blocks = self._blocks(index, copy.to)
        except _boxes.TooManyBoxesError as error:
            self._refuse(index, copy.name, f"too ragged for boxes: {error}")
            self._written(copy.to)
            return
        into, size = self._into[index], target.tensor.element_size()
        into.sources.setdefault(copy.name, []).extend(
            _piece(part, copy.to.first, size) for part in parts
        )
        for block in blocks:
            into.blocks.append(block)
            into.names.append(copy.name)
            into.numbers.append(number)

    def _blocks(self, index: int, spot: Spot) -> list[Block]:
        memory = self._memory[index]
        return memory.blocks(spot.first, spot.extent, spot.stride) if memory.dense else []

    def _filled(self, fill: Filled) -> None:
        index = fill.to.place
        size = self._r.targets[index].tensor.element_size()
        try:
            blocks = self._blocks(index, fill.to)
        except _boxes.TooManyBoxesError as error:
            self._refuse(index, "", f"padding too ragged for boxes: {error}")
            self._written(fill.to)
            return
        spot = fill.to
        made = Fill(
            fill.value, spot.first * size, spot.extent, tuple(s * size for s in spot.stride)
        )
        self._into[index].fills.append((made, blocks, fill.after))

    def _written(self, spot: Spot) -> None:
        """Counts as filled: only the loader can do that, and it does."""
        shape = self._memory[spot.place].shape
        try:
            blocks = self._blocks(spot.place, spot)
        except _boxes.TooManyBoxesError:
            blocks = [Block((0,) * len(shape), shape)]  # which ones cannot be said
        self._into[spot.place].written += blocks

    # -------------------------------------------------------------- coverage

    def _covered(self, index: int) -> str:
        """Why a target need not be filled, ``""`` if it is; what is wrong is refused."""
        target, into = self._r.targets[index], self._into[index]
        memory = self._memory[index]
        if not (into.sources or into.fills or into.written):
            return self._untouched(index)
        if not memory.dense:
            self._refuse(index, "", "its memory has gaps or shares elements")
            return ""
        self._check_arrival(index)
        self._check_fills(index)
        padding = [block for _, blocks, _ in into.fills for block in blocks] + into.written
        found = _boxes.coverage(memory.shape, into.blocks, padding)
        if found.twice:
            both = _names_at(found.first_twice, into)
            self._refuse(
                index,
                both[0],
                f"{found.twice} of {target.tensor.numel()} elements are filled twice, the first at "
                f"{self._where(index, found.first_twice)} by {' and '.join(map(repr, both))}",
            )
        if found.unfilled:
            self._refuse(
                index,
                "",
                f"{found.unfilled} of {target.tensor.numel()} elements are filled by no published "
                f"tensor, the first at {self._where(index, found.first_unfilled)}",
                found.unfilled,
            )
        return ""

    def _check_arrival(self, index: int) -> None:
        """What is widened after it has landed has to land in one type."""
        into, wide = self._into[index], self._r.targets[index].tensor.dtype == torch.float32
        first = next(iter(into.sources), "")
        for name in into.sources if wide else ():
            a, b = self._published[first].dtype, self._published[name].dtype
            if a != b:
                self._refuse(index, name, f"it is published as {b}, and '{first}' as {a}")

    def _check_fills(self, index: int) -> None:
        """Padding is set before what is published lands; a loader may not do it over that."""
        into, shape = self._into[index], self._memory[index].shape
        for _, blocks, after in into.fills:
            earlier = [b for b, n in zip(into.blocks, into.numbers, strict=True) if n < after]
            if not earlier:
                continue
            alone = _boxes.coverage(shape, earlier).twice + _boxes.coverage(shape, blocks).twice
            if _boxes.coverage(shape, earlier + blocks).twice > alone:
                self._refuse(
                    index, into.names[0], "the loader fills elements that it had copied before"
                )

    def _untouched(self, index: int) -> str:
        target = self._r.targets[index]
        if not target.tensor.numel():
            return "it has no elements"
        if index in self._first:
            return f"the memory of {self._first[index]}"
        if target.path in self._r.ties:
            return f"tied to {self._r.ties[target.path]}"
        reason = self._r.own(target) if self._r.own is not None else None
        if reason is None and target.role == "volatile":
            reason = "a buffer that no checkpoint has"
        refused = any((r.module, r.leaf) == (target.module, target.leaf) for r in self._refusals)
        if reason is None and not refused:
            self._refuse(index, "", "no published tensor fills it", target.tensor.numel())
        return reason or ""

    def _where(self, index: int, block: Block | None) -> list[int]:
        return [] if block is None else self._memory[index].place(block)

    # -------------------------------------------------------------- the mapping

    def _modules(self, reasons: Sequence[str]) -> tuple[Module, ...]:
        bad: dict[str, list[Refusal]] = {}
        for refusal in self._refusals:
            bad.setdefault(refusal.module, []).append(refusal)
        order: dict[str, list[int]] = {}
        for index, target in enumerate(self._r.targets):
            order.setdefault(target.module, []).append(index)
        return tuple(
            Module(
                path,
                self._r.targets[indexes[0]].kind,
                tuple(self._leaf(index, reasons[index]) for index in indexes),
                "; ".join(str(refusal) for refusal in bad.get(path, ())),
                self._taken(indexes, bad[path]) if path in bad else (),
            )
            for path, indexes in order.items()
        )

    def _taken(self, indexes: Sequence[int], refusals: Sequence[Refusal]) -> tuple[str, ...]:
        names = [name for index in indexes for name in self._into[index].sources]
        names += [refusal.tensor for refusal in refusals if refusal.tensor]
        return tuple(dict.fromkeys(names))

    def _leaf(self, index: int, reason: str) -> Leaf:
        target, into = self._r.targets[index], self._into[index]
        tensor = target.tensor
        size = tensor.element_size()
        sources = []
        for name, pieces in into.sources.items():
            entry = self._published[name]
            sources.append(Source(name, entry.dtype, tuple(entry.shape), tuple(pieces)))
        return Leaf(
            target.leaf,
            target.role,
            torch_dtype(tensor.dtype) or str(tensor.dtype),
            tuple(tensor.shape),
            tuple(step * size for step in tensor.stride()),
            tuple(sources),
            tuple(fill for fill, _, _ in into.fills),
            reason,
        )


_REMEDY = (
    "publish the model that the engine serves, whole and under the names of its checkpoint; a "
    "loader that computes cannot be filled in place"
)


def _types(published: str, target: Any, views: tuple[Any, Any]) -> str:
    """What is wrong with a copy's types, ``""`` if nothing is."""
    source, wanted = _TYPES[published], torch_dtype(target)
    if wanted is None:
        return f"its type {target} has no name in safetensors"
    if views != (source, target):
        same = views[0] == views[1] and published == wanted
        if not same or views[0].itemsize != source.itemsize:
            return f"the loader copies it as {views[0]} to {views[1]}, and it is {published}"
    if published == wanted:
        return ""
    if {published, wanted} in ({"F32", narrower} for narrower in NARROWED):
        return ""
    return f"it is published as {published} and wanted as {wanted}"


def _piece(part: Part, first: int, size: int) -> Piece:
    return Piece(
        part.offset, part.extent, (first + part.at) * size, tuple(s * size for s in part.stride)
    )


def _names_at(block: Block | None, into: _Gathered) -> list[str]:
    """The published tensors whose boxes have a block's first element."""
    assert block is not None
    names = [
        name
        for name, (offset, extent) in zip(into.names, into.blocks, strict=True)
        if all(
            a <= b < a + n
            for a, b, n in zip(offset or (0,), block.offset, extent or (1,), strict=True)
        )
    ]
    return list(dict.fromkeys(names))
