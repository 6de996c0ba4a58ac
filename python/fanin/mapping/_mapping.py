# SPDX-License-Identifier: Apache-2.0
"""Where every part of a publication lies in the modules of one rank of an engine. PyTorch is
imported only where a tensor has to be made."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fanin._dtypes import NARROWED, torch_dtype, torch_types
from fanin._tensors import Box, PackedTensors, Shard, pack
from fanin.errors import RequestError


@dataclass(frozen=True, slots=True)
class About:
    """Which model of which engine a mapping is of."""

    #: "vllm".
    engine: str = ""
    #: Of the engine.
    version: str = ""
    #: The model's class.
    model: str = ""
    #: (rank, size) by kind of parallelism: ``{"tp": (0, 2)}``.
    ranks: Dict[str, tuple[int, int]] = field(default_factory=dict)


class Piece(NamedTuple):
    """A box of a published tensor, and where it goes in a tensor of a module."""

    #: First element, counted in the published tensor.
    offset: tuple[int, ...]
    #: Elements.
    extent: tuple[int, ...]
    #: Of the first element, in bytes from the first element of the module's tensor.
    at: int
    #: Bytes between neighbours in the module's tensor, for each dimension of the published one.
    stride: tuple[int, ...]


class Source(NamedTuple):
    """What a tensor of a module takes of one published tensor."""

    #: Of the published tensor.
    name: str
    #: safetensors' name of its type. The module's tensor has the same, or a narrower one than F32,
    #: or F32 where this is narrower.
    dtype: str
    #: Of the whole published tensor.
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Fill(NamedTuple):
    """Elements that the loader sets to one value before published ones land: padding."""

    value: float | int | bool
    #: Bytes from the first element of the module's tensor.
    at: int
    extent: tuple[int, ...]
    #: Bytes.
    stride: tuple[int, ...]


class Leaf(NamedTuple):
    """A parameter or buffer of a module."""

    name: str
    #: "parameter", "buffer", "volatile" (a buffer that no checkpoint has) or "slot" (of LoRA).
    role: str
    #: safetensors' name.
    dtype: str
    shape: tuple[int, ...]
    #: Bytes.
    stride: tuple[int, ...]
    sources: tuple[Source, ...]
    fills: tuple[Fill, ...]
    #: Why nothing published fills it, ``""`` if something does.
    own: str

    @property
    def lands(self) -> str:
        """The type in which its elements arrive: not its own if it is wider than what is
        published."""
        if self.dtype == "F32" and self.sources and self.sources[0].dtype in NARROWED:
            return self.sources[0].dtype
        return self.dtype


class Module(NamedTuple):
    """A module of the model that has parameters or buffers."""

    path: str
    #: Its class.
    kind: str
    leaves: tuple[Leaf, ...]
    #: Why it cannot be filled by boxes, ``""`` if it can: the engine's loader has to.
    fallback: str
    #: Published tensors that its loader takes; only with *fallback*.
    taken: tuple[str, ...]

    @property
    def filled(self) -> bool:
        """Whether anything published goes into it."""
        return bool(self.taken) or any(leaf.sources for leaf in self.leaves)

    def unfilled(self) -> list[str]:
        """Tensors of which elements are neither published nor padding nor the engine's own, one
        phrase each. Of a recording that was checked there are none; of a fallback nothing is known.
        """
        found = []
        for leaf in self.leaves if not self.fallback else ():
            filled = sum(math.prod(p.extent) for s in leaf.sources for p in s.pieces)
            filled += sum(math.prod(fill.extent) for fill in leaf.fills)
            lacking, elements = math.prod(leaf.shape) - filled, math.prod(leaf.shape)
            if not leaf.own and lacking > 0:
                path = f"{self.path}.{leaf.name}" if self.path else leaf.name
                found.append(f"{path}: {lacking} of {elements} elements are filled by nothing")
        return found


#: Gives the tensor of (path of the module, name of the parameter or buffer).
Lookup = Callable[[str, str], Any]


class Bridge(NamedTuple):
    """A tensor that is wider than what is published: a narrow one beside it is where it lands."""

    #: Of the module.
    path: str
    landed: Any
    live: Any

    def settle(self) -> None:
        """Copies what has landed; on CUDA on the current stream."""
        self.live.detach().copy_(self.landed)


@dataclass(frozen=True)
class PackedMapping:
    """Shards of a mapping onto memory, packed for pulls."""

    tensors: PackedTensors
    #: ``dtype`` of the pull: what becomes of F32; None: it stays.
    dtype: str | None
    #: What :meth:`settle` copies.
    bridges: tuple[Bridge, ...] = ()

    def settle(self, modules: Iterable[str] | None = None) -> None:
        """Copies what landed beside tensors that are wider than what is published into them.

        To be called after each pull that ended well; it does nothing for most models. Blocks until
        the copies are done.

        Args:
            modules: paths; only these.
        """
        only = None if modules is None else frozenset(modules)
        for bridge in self.bridges:
            if only is None or bridge.path in only:
                bridge.settle()
                if bridge.live.is_cuda:
                    import torch

                    torch.cuda.current_stream(bridge.live.device).synchronize()


def layer_of(path: str) -> str:
    """A module's path up to the first part that is a number; all of it if none is."""
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return path


@dataclass(frozen=True)
class Mapping:
    """Where a publication goes in the modules of one rank; immutable, without memory.

    Made by :meth:`Recording.mapping <fanin.mapping.Recording.mapping>` or
    :func:`fanin.mapping.load`.
    """

    about: About
    #: How many tensors were published when it was recorded.
    keys: int
    #: Of their names, dtypes and shapes.
    digest: str
    #: In the model's order.
    modules: tuple[Module, ...]
    #: Published tensors of which this rank takes nothing.
    unwanted: tuple[str, ...]

    # ------------------------------------------------------------------ what it is of

    def sources(self) -> Iterator[tuple[Module, Leaf, Source]]:
        """All that is taken, in the model's order; modules of the fallback excepted."""
        for module in self.modules:
            if not module.fallback:
                for leaf in module.leaves:
                    for source in leaf.sources:
                        yield module, leaf, source

    def wanted(self) -> tuple[str, ...]:
        """Names of the published tensors that this rank takes something of."""
        names = dict.fromkeys(
            source.name for m in self.modules for leaf in m.leaves for source in leaf.sources
        )
        names.update(dict.fromkeys(name for m in self.modules for name in m.taken))
        return tuple(names)

    def fingerprint(self) -> str:
        """Of engine, model, ranks, published tensors and all layouts; addresses are not in it."""
        from fanin.mapping._file import encoded

        return f"sha256:{hashlib.sha256(encoded(self)).hexdigest()}"

    # ------------------------------------------------------------------ onto memory

    def shards(
        self, live: Any, modules: Iterable[str] | None = None, bridges: list[Bridge] | None = None
    ) -> list[Shard]:
        """One shard for each parameter or buffer and published tensor, in the model's order.

        Args:
            live: a ``torch.nn.Module`` with the recorded modules. Or a function, or a dictionary,
                that gives the tensor of (path of the module, name of the parameter or buffer). Each
                tensor has to have the recorded dtype, shape and strides.
            modules: paths; only these. Modules of the fallback are left out.
            bridges: gets what has to be settled after each pull, see :class:`Bridge`.

        Raises:
            RequestError: a module or tensor is missing or has another layout; one is wider than
                what is published, and there is no *bridges*.
        """
        made: list[Bridge] = []
        placed = list(self._placed(live, modules, made))
        if made and bridges is None:
            raise RequestError.make(
                f"a tensor of module '{made[0].path}' is wider than what is published",
                "give a list of bridges, and settle() them after each pull",
                phase="mapping",
            )
        if bridges is not None:
            bridges += made
        return placed

    def pack(self, live: Any, modules: Iterable[str] | None = None) -> PackedMapping:
        """Shards onto live memory, packed.

        Each is of one parameter or buffer and one published tensor, in the model's order. A tensor
        that is wider than what is published gets memory beside it, see
        :meth:`PackedMapping.settle`.

        Args:
            live, modules: as in :meth:`shards`.

        Raises:
            RequestError: as :meth:`shards`; a pull cannot make both BF16 and F16 of F32.
        """
        bridges: list[Bridge] = []
        modules = None if modules is None else frozenset(modules)
        packed = pack(self._placed(live, modules, bridges))
        return PackedMapping(packed, self.converts(modules), tuple(bridges))

    def converts(self, modules: Iterable[str] | None = None) -> str | None:
        """What a pull has to make of F32 where it is not wanted as F32 (its ``dtype``), None:
        nowhere.

        Raises:
            RequestError: both BF16 and F16.
        """
        only = None if modules is None else frozenset(modules)
        kinds: dict[str, str] = {}
        for module, leaf, source in self.sources():
            if source.dtype == "F32" and (only is None or module.path in only):
                if leaf.dtype != "F32":
                    kinds.setdefault(leaf.dtype, source.name)
        if len(kinds) > 1:
            said = " and ".join(f"'{name}' as {kind}" for kind, name in kinds.items())
            raise RequestError.make(
                f"of what is published as F32, this rank wants {said}: a pull makes one of it",
                "publish in the types that the engine has",
                phase="mapping",
            )
        return next(iter(kinds), None)

    def _placed(
        self, live: Any, modules: Iterable[str] | None, bridges: list[Bridge]
    ) -> Iterator[Shard]:
        lookup = _lookup(live)
        for path, leaf in self._leaves(modules):
            if leaf.sources:
                tensor = lookup(path, leaf.name)
                check_layout(path, leaf, tensor)
                yield from _leaf_shards(path, leaf, tensor, bridges)

    def _leaves(self, modules: Iterable[str] | None) -> Iterator[tuple[str, Leaf]]:
        """Of these modules (None: of all) that boxes fill: path and each leaf."""
        only = None if modules is None else frozenset(modules)
        for module in self.modules:
            if not module.fallback and (only is None or module.path in only):
                for leaf in module.leaves:
                    yield module.path, leaf

    def allocate(
        self, device: Any = "cpu", modules: Iterable[str] | None = None
    ) -> dict[tuple[str, str], Any]:
        """New tensors, laid out as the recorded ones, of all that is filled, by (path of the
        module, name of the parameter or buffer). Their content is undefined.

        For pulls into a shadow of the engine's tensors, and for measurements: it may be given as
        *live*.

        Args:
            modules: paths; only these. Modules of the fallback are left out.
        """
        import torch

        types = torch_types()
        made = {}
        for path, leaf in self._leaves(modules):
            if leaf.sources:
                dtype = types[leaf.dtype]
                steps = [step // dtype.itemsize for step in leaf.stride]
                made[path, leaf.name] = torch.empty_strided(
                    leaf.shape, steps, dtype=dtype, device=device
                )
        return made

    def fill(self, live: Any, modules: Iterable[str] | None = None) -> None:
        """Sets the padding of tensors that are new: what the loader fills with one value.

        Tensors that the engine has loaded once have it already. To be called before a pull.
        """
        lookup = _lookup(live)
        for path, leaf in self._leaves(modules):
            if leaf.fills:
                tensor = lookup(path, leaf.name)
                check_layout(path, leaf, tensor)
                _pad(tensor, leaf, tensor.element_size())

    # ------------------------------------------------------------------ on disk

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as a file of the format "fanin-mapping/1", atomically.

        Raises:
            OSError: the file cannot be written; an older one is as it was.
        """
        from fanin.mapping._file import save

        save(self, path)


def unwanted(mappings: Iterable[Mapping]) -> tuple[str, ...]:
    """Names of published tensors of which no rank of *mappings* takes anything.

    Raises:
        RequestError: the mappings are not all of one publication, or there are none.
    """
    given = list(mappings)
    if not given:
        raise RequestError.make("no mapping is given", "give those of all ranks", phase="mapping")
    for other in given[1:]:
        if (other.keys, other.digest) != (given[0].keys, given[0].digest):
            raise RequestError.make(
                "the mappings are of different publications: "
                f"{given[0].keys} tensors of digest {given[0].digest} and {other.keys} of "
                f"digest {other.digest}",
                "record them again",
                phase="mapping",
            )
    left = set.intersection(*(set(m.unwanted) for m in given))
    return tuple(name for name in given[0].unwanted if name in left)


def _layout(leaf: Leaf) -> str:
    return f"{leaf.dtype} of shape {list(leaf.shape)} and strides {list(leaf.stride)}"


def _lookup(live: Any) -> Lookup:
    modules: dict[str, Any] = {}
    if hasattr(live, "named_modules"):
        modules = dict(live.named_modules())
    elif callable(live):
        found: Lookup = live
        return found
    elif not isinstance(live, Dict):
        raise RequestError.make(
            f"{type(live).__name__} is no module, function or dictionary of tensors"
        )

    def tensor_of(path: str, leaf: str) -> Any:
        tensor = getattr(modules.get(path), leaf, None) if modules else live.get((path, leaf))
        if tensor is None:
            raise RequestError.make(
                f"the model has no '{path}.{leaf}', which the mapping fills",
                "record the mapping again",
                phase="mapping",
            )
        return tensor

    return tensor_of


def check_layout(path: str, leaf: Leaf, tensor: Any) -> None:
    """Refuses a tensor that is not laid out as the recorded one."""
    dtype = torch_dtype(tensor.dtype)
    size = tensor.element_size()
    shape = tuple(tensor.shape)
    stride = tuple(step * size for step in tensor.stride())
    same = all(n <= 1 or a == b for n, a, b in zip(shape, stride, leaf.stride, strict=False))
    if dtype != leaf.dtype or shape != leaf.shape or not same:
        raise RequestError.make(
            f"'{path}.{leaf.name}' is {dtype or tensor.dtype} of shape {list(shape)} and strides "
            f"{list(stride)}, and was recorded as {_layout(leaf)}",
            "record the mapping again with the ranks that the engine has",
            phase="mapping",
        )


def _leaf_shards(path: str, leaf: Leaf, live: Any, bridges: list[Bridge]) -> Iterator[Shard]:
    if live.device.type not in ("cpu", "cuda") or not live.data_ptr():
        raise RequestError.make(
            f"'{path}.{leaf.name}' has no memory on a CPU or CUDA device: it is on {live.device}",
            phase="mapping",
        )
    tensor, size, wide = live, 1, 1
    if leaf.lands != leaf.dtype:
        tensor = _narrow(live, leaf)
        bridges.append(Bridge(path, tensor, live))
        size, wide = tensor.element_size(), live.element_size()
    address = tensor.data_ptr()
    device = tensor.device.index if tensor.device.type == "cuda" else -1
    owner = tensor.untyped_storage()
    for source in leaf.sources:
        boxes = tuple(
            Box(
                piece.offset,
                piece.extent,
                tuple(step * size // wide for step in piece.stride),
                address + piece.at * size // wide,
            )
            for piece in source.pieces
        )
        yield Shard(source.name, leaf.lands, source.shape, boxes, device, owner)


def _narrow(live: Any, leaf: Leaf) -> Any:
    """A tensor of the type that is published, laid out as a live one."""
    import torch

    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[leaf.lands]
    made = torch.empty_strided(live.shape, live.stride(), dtype=dtype, device=live.device)
    # All of it is copied to the live one, and pulls fill what is published only.
    _pad(made, leaf, live.element_size())
    return made


def _pad(tensor: Any, leaf: Leaf, size: int) -> None:
    """Sets a leaf's padding in a tensor that has its layout; size: of the leaf's elements."""
    for fill in leaf.fills:
        tensor.detach().as_strided(
            fill.extent,
            [step // size for step in fill.stride],
            tensor.storage_offset() + fill.at // size,
        ).fill_(fill.value)
