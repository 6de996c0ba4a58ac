# SPDX-License-Identifier: Apache-2.0
"""Finds out where an engine puts published tensors by lending it numbers in their place.

:mod:`fanin.mapping._recorder` watches copies, and refuses a loader that stacks, joins or permutes
what it is given. Here the loader may move elements as it likes: every element that is lent says by
its value which element of which tensor it is, and where the values end up is the mapping. What is
computed is found as well: its values are nobody's elements any more, or not where they belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from fanin._dtypes import NARROWED, TORCH_DTYPES, torch_types
from fanin.errors import RequestError
from fanin.mapping import _boxes
from fanin.mapping._errors import MappingError, Refusal
from fanin.mapping._mapping import About, Leaf, Mapping, Module, Piece, Source
from fanin.mapping._record import Described, key_digest

_MOST = 1 << 53  # integers that float64 tells from their neighbours
_REMEDY = "let the engine load it by itself"


class Trace:
    """A mapping, recorded by where lent values end up::

        trace = fanin.mapping.Trace(client.catalog(run))
        for layer, names in layers:  # as many at once as memory allows
            made = engine_loads({name: trace.lend(name) for name in names})
            trace.found(layer, "QKVLora", "lora_a_stacked.0", made)
        mapping = trace.mapping()

    A lent tensor is float64 on the CPU, eight bytes an element, and trace keeps none of them. The
    engine may do with them what moves values; zero means an element that nothing fills.

    Args:
        published: every tensor of the publication.
        dtype: of the pulls: "BF16" or "F16", what becomes of F32; None: it stays.
        about: engine, model and ranks, for the mapping's fingerprint.
    """

    def __init__(
        self,
        published: Iterable[Described],
        *,
        dtype: str | None = None,
        about: About | None = None,
    ) -> None:
        self._published = list(published)
        self._about = about or About()
        self._dtype = dtype
        self._index = {entry.name: i for i, entry in enumerate(self._published)}
        if len(self._index) != len(self._published):
            raise RequestError.make("a tensor is published twice", "give each once")
        starts, at = [], 1  # zero is nobody's element
        for entry in self._published:
            starts.append(at)
            at += _elements(entry.shape)
        if at > _MOST:
            raise RequestError.make("the publication has too many elements to be numbered")
        self._starts = torch.tensor([*starts, at], dtype=torch.int64)
        self._modules: dict[tuple[str, str], list[Leaf]] = {}
        self._wanted: set[str] = set()

    def lend(self, name: str) -> Any:
        """A new tensor in the place of a published one. Raises KeyError for an unknown name."""
        index = self._index[name]
        shape = self._published[index].shape
        first = int(self._starts[index])
        return torch.arange(first, first + _elements(shape), dtype=torch.float64).reshape(
            tuple(shape)
        )

    def found(self, module: str, kind: str, leaf: str, values: Any) -> Leaf | None:
        """Takes note of what became of lent tensors; None: *values* are zero.

        The filled part must begin at the first element of each dimension and have no holes. The
        leaf has the shape of that part. Its strides follow the order of the elements in the
        published tensors. So they land one behind the other wherever that is possible.

        Args:
            module, kind, leaf: path and class of the module, and the name of its tensor.
            values: a tensor of float64, of any shape.

        Raises:
            MappingError: values that are no lent element, or that boxes cannot say.
        """
        refuse = _Refuser(module, leaf)
        block = _filled(values.detach().to(torch.float64), refuse)
        if block is None:
            return None
        grid = _Grid.of(block, self._starts, refuse)
        made = self._leaf(leaf, tuple(block.shape), grid, refuse)
        self._modules.setdefault((module, kind), []).append(made)
        self._wanted.update(source.name for source in made.sources)
        return made

    def _leaf(self, name: str, shape: tuple[int, ...], grid: _Grid, refuse: _Refuser) -> Leaf:
        strides = grid.strides(shape)
        pieces: dict[int, list[_boxes.Part]] = {}
        for cell in grid.cells():
            index = cell.tensor
            first = cell.first - int(self._starts[index])
            try:
                parts = _boxes.parts_of(
                    tuple(self._published[index].shape), first, cell.extent, cell.step, strides
                )
            except _boxes.TooManyBoxesError as error:
                raise refuse.because(
                    f"too ragged for boxes: {error}", self._published[index].name
                ) from None
            at = sum(a * s for a, s in zip(cell.at, strides, strict=True))
            pieces.setdefault(index, []).extend(part._replace(at=part.at + at) for part in parts)
        dtype = self._landing(list(pieces), refuse)
        size = torch_types()[dtype].itemsize
        sources = tuple(
            Source(
                self._published[index].name,
                self._published[index].dtype,
                tuple(self._published[index].shape),
                tuple(_piece(part, size) for part in parts),
            )
            for index, parts in pieces.items()
        )
        return Leaf(name, "slot", dtype, shape, tuple(s * size for s in strides), sources, (), "")

    def _landing(self, tensors: Sequence[int], refuse: _Refuser) -> str:
        """The type in which all of these arrive."""
        types = {self._published[index].dtype: self._published[index].name for index in tensors}
        if len(types) > 1:
            said = " and ".join(f"'{name}' as {kind}" for kind, name in types.items())
            raise refuse.because(f"of what goes into it, {said} are published")
        (published,) = types
        if published not in TORCH_DTYPES.values():
            raise refuse.because(f"this PyTorch has no type for {published}")
        return self._dtype if published == "F32" and self._dtype in NARROWED else published

    def mapping(self) -> Mapping:
        """The mapping of all that was found, in that order."""
        return Mapping(
            about=self._about,
            keys=len(self._published),
            digest=key_digest(self._published),
            modules=tuple(
                Module(path, kind, tuple(leaves), "", ())
                for (path, kind), leaves in self._modules.items()
            ),
            unwanted=tuple(e.name for e in self._published if e.name not in self._wanted),
        )


class _Refuser(NamedTuple):
    module: str
    leaf: str

    def because(self, why: str, tensor: str = "") -> MappingError:
        return MappingError.of([Refusal(self.module, self.leaf, tensor, why)], _REMEDY)


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _piece(part: _boxes.Part, size: int) -> Piece:
    return Piece(part.offset, part.extent, part.at * size, tuple(s * size for s in part.stride))


def _filled(values: Any, refuse: _Refuser) -> Any | None:
    """The part of a tensor that is not zero, which begins at its first element."""
    values = values.reshape(1) if values.dim() == 0 else values
    there = values != 0
    if not bool(there.any()):
        return None
    for dim in range(values.dim()):
        others = [d for d in range(values.dim()) if d != dim]
        line = there.any(dim=others) if others else there
        end = int(line.nonzero().max()) + 1
        values, there = values.narrow(dim, 0, end), there.narrow(dim, 0, end)
    if not bool(there.all()):
        missing = int((~there).sum())
        raise refuse.because(f"{missing} of {there.numel()} elements within what is filled are not")
    return values


class _Cell(NamedTuple):
    """Elements of one tensor at even steps."""

    tensor: int
    #: Number of its first element.
    first: int
    #: Where it begins in the block.
    at: tuple[int, ...]
    extent: tuple[int, ...]
    #: Between neighbours, in elements of the published tensor.
    step: tuple[int, ...]


class _Grid:
    """A block of numbers cut into cells of even steps."""

    def __init__(self, cuts: list[list[int]], first: Any, owner: Any, steps: list[Any]) -> None:
        self._cuts, self._first, self._owner, self._steps = cuts, first, owner, steps

    @classmethod
    def of(cls, block: Any, starts: Any, refuse: _Refuser) -> _Grid:
        """starts: the numbers at which tensors begin, and the first that is none's."""
        views = [_whole(view, refuse) for view in _views(block)]
        along = [views[min(dim, len(views) - 1)] for dim in range(block.dim())]
        cuts = [_cuts(view, dim) for dim, view in enumerate(along)]
        for view in views:
            _check_even(view, cuts, refuse)
        cuts = [
            sorted({*cut, *_borders(view, starts, cuts, dim)})
            for dim, (cut, view) in enumerate(zip(cuts, along, strict=True))
        ]
        first = _corners(block, cuts).to(torch.int64)
        steps = [_steps(block, first, cuts, dim) for dim in range(block.dim())]
        last = first.clone()
        for dim, step in enumerate(steps):
            shape = [-1 if d == dim else 1 for d in range(block.dim())]
            last += step * (_lengths(cuts[dim]) - 1).reshape(shape)
        owner = torch.searchsorted(starts, first, right=True) - 1
        if not torch.equal(owner, torch.searchsorted(starts, last, right=True) - 1) or not (
            int(first.min()) > 0 and int(last.max()) < int(starts[-1])
        ):
            raise refuse.because("it holds values that are no element of a published tensor")
        return cls(cuts, first, owner, steps)

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a tensor of *shape* whose elements lie in the order of the published ones."""
        widest = [int(step.max()) for step in self._steps]
        # Along a dimension that no cell has two elements of, tensors lie one after the other.
        order = sorted(range(len(shape)), key=lambda dim: (widest[dim] != 0, -widest[dim], dim))
        packed = _boxes.packed_strides([shape[dim] for dim in order])
        strides = [0] * len(shape)
        for dim, step in zip(order, packed, strict=True):
            strides[dim] = step
        return tuple(strides)

    def cells(self) -> Iterable[_Cell]:
        lines = [list(range(len(edges) - 1)) for edges in self._cuts]
        first, owner = self._first.flatten().tolist(), self._owner.flatten().tolist()
        steps = [step.flatten().tolist() for step in self._steps]
        for place, cell in enumerate(product(*lines)):
            edges = [(c[i], c[i + 1]) for c, i in zip(self._cuts, cell, strict=True)]
            yield _Cell(
                owner[place],
                first[place],
                tuple(a for a, _ in edges),
                tuple(b - a for a, b in edges),
                tuple(step[place] for step in steps),
            )


def _views(block: Any) -> list[Any]:
    """Parts of a block that say all of it: most often one expert, and the first of each."""
    if block.dim() > 1 and block.shape[0] > 1:
        firsts = (slice(None), *(slice(1) for _ in range(block.dim() - 1)))
        line = block[firsts]
        if torch.equal(block - line, (block[:1] - line[:1]).expand(block.shape)):
            return [line, block[:1]]
    return [block]


def _whole(view: Any, refuse: _Refuser) -> Any:
    numbers = view.to(torch.int64)
    if not torch.equal(numbers.to(torch.float64), view):
        raise refuse.because("it holds values that are no element of a published tensor")
    return numbers


def _cuts(numbers: Any, dim: int) -> list[int]:
    """Where along *dim* another step begins; the ends are in it."""
    length = numbers.shape[dim]
    if length == 1:
        return [0, 1]
    others = [d for d in range(numbers.dim()) if d != dim]
    step = numbers.diff(dim=dim)
    # A step that is not forward: an element that several get, or elements in reverse.
    apart, uneven = step <= 0, step.diff(dim=dim) != 0
    apart, uneven = (flags.any(dim=others) if others else flags for flags in (apart, uneven))
    suspects = set(apart.nonzero().flatten().tolist())
    turns = set((uneven.nonzero().flatten() + 1).tolist())
    cuts = [0]
    for k in sorted(suspects | turns):  # between k and k + 1
        if k in suspects or k > cuts[-1]:
            cuts.append(k + 1)
    return [*cuts, length]


def _within(view: Any, cuts: list[list[int]]) -> list[list[int]]:
    """The cuts of a view that has one element only of some dimensions."""
    return [[0, 1] if n == 1 else edges for n, edges in zip(view.shape, cuts, strict=True)]


def _check_even(view: Any, cuts: list[list[int]], refuse: _Refuser) -> None:
    cuts = _within(view, cuts)
    first = _corners(view, cuts)
    expected = _spread(first, cuts)
    for dim, edges in enumerate(cuts):
        begins = torch.tensor(edges[:-1]).repeat_interleave(_lengths(edges))
        shape = [-1 if d == dim else 1 for d in range(view.dim())]
        along = (torch.arange(edges[-1]) - begins).reshape(shape)
        expected = expected + _spread(_steps(view, first, cuts, dim), cuts) * along
    if not torch.equal(expected, view):
        raise refuse.because("the elements lie at uneven steps, or were computed")


def _borders(view: Any, starts: Any, cuts: list[list[int]], dim: int) -> list[int]:
    """Where along *dim* another tensor begins although the step goes on.

    Steps are even, so the ends of the cells across it tell.
    """
    ends = view
    for other, edges in enumerate(_within(view, cuts)):
        if other != dim:
            both = sorted({*edges[:-1], *(edge - 1 for edge in edges[1:])})
            ends = ends.index_select(other, torch.tensor(both))
    owner = torch.searchsorted(starts, ends.contiguous(), right=True)
    apart = owner.diff(dim=dim) != 0
    others = [d for d in range(view.dim()) if d != dim]
    line = apart.any(dim=others) if others else apart
    return [int(k) + 1 for k in line.nonzero().flatten().tolist()]


def _steps(block: Any, first: Any, cuts: list[list[int]], dim: int) -> Any:
    """Of each cell, from its first element to the next along *dim*; 0 if there is none."""
    beside = block
    for other, edges in enumerate(cuts):
        place = edges[:-1]
        if other == dim:
            place = [min(a + 1, b - 1) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        beside = beside.index_select(other, torch.tensor(place))
    return beside.to(torch.int64) - first


def _lengths(edges: list[int]) -> Any:
    return torch.tensor(edges).diff()


def _corners(values: Any, cuts: list[list[int]]) -> Any:
    """The first elements of all cells."""
    for dim, edges in enumerate(cuts):
        values = values.index_select(dim, torch.tensor(edges[:-1]))
    return values


def _spread(values: Any, cuts: list[list[int]]) -> Any:
    """One value a cell, for each element of the cells."""
    for dim, edges in enumerate(cuts):
        values = values.repeat_interleave(_lengths(edges), dim=dim)
    return values
