# SPDX-License-Identifier: Apache-2.0
"""Watches a model's loader run over tensors without memory, and writes nothing.

Every operation of PyTorch comes by here. Views of a published tensor keep its storage, whatever
they are called, so that storage offset and strides say which elements they are; an operation that
makes a new storage of one computes, and what it computed is remembered by its storage, too.
`torch.cat` is the exception: it makes a storage and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fanin.mapping._boxes import TooManyBoxesError, parts_of
from fanin.mapping._errors import Refusal

_aten = torch.ops.aten


class Place(NamedTuple):
    """A parameter or buffer of a module."""

    module: str
    leaf: str
    tensor: Any


class Spot(NamedTuple):
    """A view of a place's memory, in elements of it, counted from its first element."""

    place: int
    first: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]


class Copied(NamedTuple):
    """A view of a published tensor was copied to a view of a place."""

    name: str
    first: int
    stride: tuple[int, ...]
    to: Spot
    #: Of the views, which may read the memory as another type than the tensors have.
    dtypes: tuple[Any, Any]


class Filled(NamedTuple):
    """A view of a place was filled with one value, after so many copies."""

    to: Spot
    value: float | int | bool
    after: int


class _Derived(NamedTuple):
    """What a tensor was made of: a published one, and the others that went into it; and by what
    operation, "" if they only stand one behind the other."""

    name: str
    operation: str
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.others)

    def joined(self, other: _Derived) -> _Derived:
        more = (name for name in other.names if name not in self.names)
        operation = self.operation or other.operation
        return self._replace(operation=operation, others=(*self.others, *more))


class ReadsDataError(Exception):
    """The loader asks for values of a tensor that has none."""


class _Operation(NamedTuple):
    """What an operation does, by its schema."""

    writes: tuple[int | str, ...]
    views: bool
    tensors: bool  # returns any


_known: dict[Any, _Operation] = {}


def _operation(func: Any) -> _Operation:
    known = _known.get(func)
    if known is None:
        arguments, returns = func._schema.arguments, func._schema.returns
        writes = tuple(
            a.name if a.kwarg_only else i
            for i, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write
        )
        known = _Operation(
            writes,
            not writes and any(r.alias_info is not None for r in returns),
            any("Tensor" in str(r.type) for r in returns),
        )
        _known[func] = known
    return known


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """While entered, nothing is written to *places*, and all that would be is remembered."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__()
        self.copies: list[Copied] = []
        self.fills: list[Filled] = []
        self.refusals: list[Refusal] = []
        #: What is written in a way that no copy or fill says; there is a refusal for each.
        self.written: list[Spot] = []
        #: The published tensor that was last given to an operation.
        self.last = ""
        self._places = places
        self._homes: dict[int, list[int]] = {}
        for index, place in enumerate(places):
            self._homes.setdefault(_storage(place.tensor), []).append(index)
        self._published: dict[int, str] = {}
        self._derived: dict[int, _Derived] = {}
        self._joined: dict[int, Joined] = {}
        self._alive: list[Any] = []  # a storage that is let go of gives its number to another

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by PyTorch: what this does is not compiled, and a wrapper that says so on each call
        costs more than the call."""
        return False

    def lend(self, name: str, dtype: Any, shape: Sequence[int]) -> Any:
        """A tensor without memory that stands for a published one."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._published[_storage(tensor)] = name
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            return self._copy(func, args, kwargs)
        operation = _operation(func)
        if operation.views:
            return func(*args, **kwargs)
        given = _tensors((*args, *kwargs.values()))
        if not given:
            return func(*args, **kwargs)
        if operation.writes:
            return self._write(func, operation, given, args, kwargs)
        return self._make(func, operation, given, args, kwargs)

    # ------------------------------------------------------------------ operations

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        to, source = args[0], args[1]
        name = self._published.get(_storage(source))
        if name is not None:
            self.last = name
        spot = self._spot(to)
        if spot is None:
            return self._copy_elsewhere(func, args, kwargs)
        if not to.numel():
            return to
        origin = self._derived.get(_storage(source))
        if name is not None:
            self._copy_published(name, source, to, spot)
        elif self._copy_joined(source, to, spot):
            pass
        elif origin is not None:
            for part in origin.names:
                how = origin.operation or str(_aten.cat.default)
                self._refuse(spot, part, f"the loader computes it by {how}")
        else:
            self._refuse(spot, "", "the loader writes values that are not published")
        return to

    def _copy_published(self, name: str, source: Any, to: Any, spot: Spot) -> None:
        view = source if source.shape == to.shape else source.expand(to.shape)
        if any(n > 1 and s == 0 for n, s in zip(view.shape, view.stride(), strict=True)):
            self._refuse(spot, name, "the loader copies one element of it to several (broadcast)")
            return
        self.copies.append(
            Copied(name, view.storage_offset(), view.stride(), spot, (source.dtype, to.dtype))
        )

    def _copy_joined(self, source: Any, to: Any, spot: Spot) -> bool:
        """Whether it was a copy of published tensors that stand one behind the other."""
        joined = self._joined.get(_storage(source))
        if joined is None or source.shape != to.shape:
            return False
        shares = joined.shares(source, to.stride())
        for share in shares or ():
            there = spot._replace(first=spot.first + share.at, extent=share.extent, stride=share.to)
            dtypes = (source.dtype, to.dtype)
            self.copies.append(Copied(share.name, share.first, share.stride, there, dtypes))
        return shares is not None

    def _copy_elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Into memory that is not the model's: what lies there is no view any more."""
        to, source = args[0], args[1]
        # Also where it goes to: a published tensor that is written to is not what is published.
        origin = self._origin([to, source])
        if origin is None:
            return func(*args, **kwargs)
        where = "it" if _storage(to) in self._published else "a tensor of its own"
        self._taint(to, origin._replace(operation=f"{func} into {where}"))
        return to

    def _write(
        self, func: Any, operation: _Operation, given: list[Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        written = [
            kwargs.get(at) if isinstance(at, str) else (args[at] if at < len(args) else None)
            for at in operation.writes
        ]
        flat = _tensors(written)
        origin = self._origin(given)
        spots = [spot for spot in map(self._spot, flat) if spot is not None]
        if not spots:
            if origin is None:
                return func(*args, **kwargs)
            for tensor in flat:
                self._taint(tensor, origin._replace(operation=str(func)))
            return self._ran(func, origin, args, kwargs)
        value = _filling(func, args)
        for spot in spots:
            width = self._places[spot.place].tensor.element_size()
            if value is not None and origin is None and flat[0].element_size() == width:
                self.fills.append(Filled(spot, value, len(self.copies)))
            else:
                for name in origin.names if origin is not None else ("",):
                    self._refuse(spot, name, f"the loader writes by {func}, not by copy_")
        return written[0] if len(written) == 1 else tuple(written)

    def _make(
        self, func: Any, operation: _Operation, given: list[Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        origin = self._origin(given)
        if origin is None:
            return func(*args, **kwargs)
        if not operation.tensors:
            raise ReadsDataError(f"the loader reads values of tensor '{origin.name}' by {func}")
        made = self._ran(func, origin, args, kwargs)
        derived = origin._replace(operation=origin.operation or str(func))
        for tensor in _tensors(made if isinstance(made, (list, tuple)) else (made,)):
            if _storage(tensor) not in self._published:
                self._taint(tensor, derived)
        if func is _aten.cat.default:
            self._join(made, *args, **kwargs)
        return made

    def _join(self, made: Any, tensors: Sequence[Any], dim: int = 0) -> None:
        joined = join(tensors, dim, made, lambda one: self._published.get(_storage(one)))
        if joined is not None:
            key = _storage(made)
            self._joined[key] = joined
            self._derived[key] = self._derived[key]._replace(operation="")

    @staticmethod
    def _ran(func: Any, origin: _Derived, args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            raise ReadsDataError(
                f"the loader needs values of tensor '{origin.name}' for {func}: {error}"
            ) from error

    # ------------------------------------------------------------------ what memory is

    def _origin(self, tensors: Sequence[Any]) -> _Derived | None:
        found: _Derived | None = None
        for tensor in tensors:
            key = _storage(tensor)
            name = self._published.get(key)
            derived = self._derived.get(key)
            if name is not None:
                self.last = name
                derived = _Derived(name, "")
            if derived is not None:
                found = derived if found is None else found.joined(derived)
        return found

    def _taint(self, tensor: Any, derived: _Derived) -> None:
        key = _storage(tensor)
        self._published.pop(key, None)
        self._joined.pop(key, None)
        known = self._derived.get(key)
        self._derived[key] = derived if known is None else known.joined(derived)
        if known is None:
            self._alive.append(tensor)

    def _spot(self, tensor: Any) -> Spot | None:
        """Where in the model a view lies, None if it is no memory of the model."""
        homes = self._homes.get(_storage(tensor))
        if homes is None:
            return None
        home, first = homes[0], tensor.storage_offset()
        for index in homes[1:]:
            begin = self._places[index].tensor.storage_offset()
            if self._places[home].tensor.storage_offset() < begin <= first:
                home = index
        place = self._places[home].tensor
        if tensor.element_size() != place.element_size():
            # Its elements are none of the place's: it may have any of those.
            return Spot(home, 0, tuple(place.shape), place.stride())
        first -= place.storage_offset()
        return Spot(home, first, tuple(tensor.shape), tensor.stride())

    def _refuse(self, spot: Spot, name: str, why: str) -> None:
        place = self._places[spot.place]
        self.refusals.append(Refusal(place.module, place.leaf, name, why))
        self.written.append(spot)


def _filling(func: Any, args: tuple[Any, ...]) -> float | int | bool | None:
    """The value that an operation puts into all elements, None if it does something else."""
    if func is _aten.zero_.default:
        return 0
    if func is _aten.fill_.Scalar:
        value = args[1]
        return value if isinstance(value, (int, float)) else None
    if func is _aten.fill_.Tensor and args[1].device.type != "meta":
        number = args[1].item()
        return number if isinstance(number, (int, float)) else None
    return None


# ----------------------------------------------------------------------------------- what is joined
# Published tensors that a loader puts one behind the other (`torch.cat`) before it copies them.
# What comes of it has memory of its own, and yet nothing is computed: each of its elements is one
# of a published tensor. So a copy of it is several copies, of parts of those tensors.


class Piece(NamedTuple):
    """A box of the joined tensor, and the published tensor's elements that lie there."""

    name: str
    #: Of the published tensor, in elements of its memory.
    first: int
    stride: tuple[int, ...]
    #: Of the box, in elements.
    offset: tuple[int, ...]
    extent: tuple[int, ...]


class _Share(NamedTuple):
    """What a copy of a view of the joined tensor copies of one published tensor."""

    name: str
    first: int
    stride: tuple[int, ...]
    #: Where that goes, counted from the first element of the copy's other side.
    at: int
    extent: tuple[int, ...]
    to: tuple[int, ...]


class Joined(NamedTuple):
    """A tensor in C order that pieces cover, each element once."""

    dtype: Any
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def shares(self, view: Any, to: Sequence[int]) -> list[_Share] | None:
        """A copy of *view* to memory with strides *to*; None if this does not say what it reads."""
        if view.dtype != self.dtype:
            return None
        try:
            parts = parts_of(
                self.shape, view.storage_offset(), tuple(view.shape), view.stride(), tuple(to)
            )
        except TooManyBoxesError:
            return None
        return [share for part in parts for share in self._of(part)]

    def _of(self, part: Any) -> Iterator[_Share]:
        for piece in self.pieces:
            begin = tuple(map(max, part.offset, piece.offset))
            ends = map(min, _end(part), _end(piece))
            extent = tuple(end - start for start, end in zip(begin, ends, strict=True))
            if min(extent, default=1) > 0:
                yield _Share(
                    piece.name,
                    piece.first + _steps(begin, piece.offset, piece.stride),
                    piece.stride,
                    part.at + _steps(begin, part.offset, part.stride),
                    extent,
                    part.stride,
                )


def _end(box: Any) -> Iterator[int]:
    return (start + count for start, count in zip(box.offset, box.extent, strict=True))


def _steps(at: Sequence[int], origin: Sequence[int], stride: Sequence[int]) -> int:
    return sum((a - o) * s for a, o, s in zip(at, origin, stride, strict=True))


def join(
    tensors: Sequence[Any], dimension: int, made: Any, name_of: Callable[[Any], str | None]
) -> Joined | None:
    """What `torch.cat` has *made* of *tensors*; None if one of them is no published one.

    Args:
        name_of: the published tensor of which a tensor is a view.
    """
    dimension %= max(made.dim(), 1)
    pieces, at = [], 0
    for tensor in tensors:
        name = name_of(tensor)
        if name is None or tensor.dtype != made.dtype or tensor.dim() != made.dim():
            return None
        offset = tuple(at if axis == dimension else 0 for axis in range(made.dim()))
        pieces.append(
            Piece(name, tensor.storage_offset(), tensor.stride(), offset, tuple(tensor.shape))
        )
        at += tensor.shape[dimension]
    if not made.is_contiguous():
        return None
    return Joined(made.dtype, tuple(made.shape), tuple(pieces))
