# SPDX-License-Identifier: Apache-2.0
"""Mappings on disk: JSON of the format "fanin-mapping/1", every field checked when read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fanin import _ffi
from fanin._dtypes import DTYPES, NARROWED, dtype_bits
from fanin._files import unique_fields, write_whole
from fanin.errors import RequestError
from fanin.mapping._boxes import TooManyBoxesError, coverage, memory_of
from fanin.mapping._mapping import About, Fill, Leaf, Mapping, Module, Piece, Source

FORMAT = "fanin-mapping/1"
_ROLES = ("parameter", "buffer", "volatile", "slot")
_T = TypeVar("_T")


def encoded(mapping: Mapping) -> bytes:
    """The file's bytes; the same for equal mappings."""
    about = mapping.about
    document = {
        "format": FORMAT,
        "engine": {"name": about.engine, "version": about.version},
        "model": about.model,
        "ranks": {
            kind: {"rank": rank, "size": size} for kind, (rank, size) in sorted(about.ranks.items())
        },
        "published": {
            "count": mapping.keys,
            "digest": mapping.digest,
            "unwanted": list(mapping.unwanted),
        },
        "modules": [_module(module) for module in mapping.modules],
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _module(module: Module) -> dict[str, Any]:
    made: dict[str, Any] = {
        "path": module.path,
        "class": module.kind,
        "tensors": [_leaf(leaf) for leaf in module.leaves],
    }
    if module.fallback:
        made["fallback"] = {"why": module.fallback, "taken": list(module.taken)}
    return made


def _leaf(leaf: Leaf) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": leaf.name,
        "role": leaf.role,
        "dtype": leaf.dtype,
        "shape": leaf.shape,
        "stride": leaf.stride,
    }
    if leaf.own:
        made["own"] = leaf.own
    if leaf.fills:
        made["fills"] = [fill._asdict() for fill in leaf.fills]
    if leaf.sources:
        made["sources"] = [
            {
                "name": source.name,
                "dtype": source.dtype,
                "shape": source.shape,
                "boxes": [piece._asdict() for piece in source.pieces],
            }
            for source in leaf.sources
        ]
    return made


def save(mapping: Mapping, path: str | os.PathLike[str]) -> None:
    """See :meth:`Mapping.save`."""
    write_whole(Path(path), encoded(mapping))


def load(path: str | os.PathLike[str]) -> Mapping:
    """Reads a mapping that :meth:`Mapping.save` wrote.

    Every field is checked: no box of what is returned lies outside of its tensors. Fields that are
    not known are left alone; one that is there twice is refused.

    Raises:
        OSError: the file cannot be read.
        RequestError: it is no mapping, or one of another format; names the field.
    """
    data = Path(path).read_bytes()
    try:
        document = json.loads(data, object_pairs_hook=unique_fields)
    except (ValueError, RecursionError) as error:
        raise RequestError.make(
            f"{path} is no mapping: {error}", "save the mapping again", phase="mapping"
        ) from None
    return _Field(str(path), "", document).mapping()


class _Field:
    """A value of the document and where it stands, so that what is wrong can be named."""

    __slots__ = ("_file", "_value", "_where")

    def __init__(self, file: str, where: str, value: Any) -> None:
        self._file, self._where, self._value = file, where, value

    def wrong(self, what: str) -> NoReturn:
        raise RequestError.make(
            f"{self._file}: {self._where or 'the document'} {what}",
            "save the mapping again",
            phase="mapping",
        )

    def __getitem__(self, name: str) -> _Field:
        found = self.get(name)
        if found is None:
            self.wrong(f"has no '{name}'")
        return found

    def get(self, name: str) -> _Field | None:
        if not isinstance(self._value, dict):
            self.wrong("is no object")
        if name not in self._value:
            return None
        return _Field(self._file, f"{self._where}.{name}".lstrip("."), self._value[name])

    def each(self, make: Callable[[_Field], _T]) -> tuple[_T, ...]:
        if not isinstance(self._value, list):
            self.wrong("is no list")
        return tuple(
            make(_Field(self._file, f"{self._where}[{i}]", value))
            for i, value in enumerate(self._value)
        )

    def items(self) -> list[tuple[str, _Field]]:
        if not isinstance(self._value, dict):
            self.wrong("is no object")
        return [(name, self[name]) for name in self._value]

    def text(self, among: Sequence[str] | None = None) -> str:
        if not isinstance(self._value, str):
            self.wrong("is no string")
        if among is not None and self._value not in among:
            self.wrong(f"is {self._value!r}, not one of {', '.join(among)}")
        return self._value

    def integer(self, low: int = 0) -> int:
        if type(self._value) is not int or not low <= self._value < 1 << 62:
            self.wrong(f"is {self._value!r}, no integer from {low} on")
        return self._value

    def number(self) -> float | int | bool:
        if not isinstance(self._value, (int, float)):
            self.wrong("is no number")
        return self._value

    def texts(self) -> tuple[str, ...]:
        return self.each(lambda f: f.text())

    def integers(self, count: int | None = None) -> tuple[int, ...]:
        found = self._value
        if not isinstance(found, list) or not all(
            type(n) is int and 0 <= n < 1 << 62 for n in found
        ):
            self.wrong("is no list of integers from 0 on")
        if count is not None and len(found) != count:
            self.wrong(f"has {len(found)} numbers, not one for each of {count} dimensions")
        return tuple(found)

    def unique(self, names: Sequence[str]) -> None:
        if len(set(names)) != len(names):
            double = next(name for name in names if names.count(name) > 1)
            self.wrong(f"has {double!r} twice")

    # ------------------------------------------------------------------ the parts

    def mapping(self) -> Mapping:
        kind = self["format"]
        if kind.text() != FORMAT:
            kind.wrong(f"is {kind.text()!r}, and this version reads {FORMAT!r}")
        published = self["published"]
        modules = self["modules"].each(lambda f: f.module())
        self["modules"].unique([module.path for module in modules])
        return Mapping(
            About(
                self["engine"]["name"].text(),
                self["engine"]["version"].text(),
                self["model"].text(),
                {name: field.rank() for name, field in self["ranks"].items()},
            ),
            published["count"].integer(),
            published["digest"].text(),
            modules,
            published["unwanted"].texts(),
        )

    def rank(self) -> tuple[int, int]:
        rank, size = self["rank"].integer(), self["size"].integer(1)
        if rank >= size:
            self["rank"].wrong(f"is {rank} of {size}")
        return rank, size

    def module(self) -> Module:
        fallback = self.get("fallback")
        leaves = self["tensors"].each(lambda f: f.leaf(fallback is not None))
        self["tensors"].unique([leaf.name for leaf in leaves])
        return Module(
            self["path"].text(),
            self["class"].text(),
            leaves,
            "" if fallback is None else fallback["why"].text(),
            () if fallback is None else fallback["taken"].texts(),
        )

    def leaf(self, fallback: bool) -> Leaf:
        shape = self["shape"].integers()
        if len(shape) > _ffi.MAX_DIMS:
            self["shape"].wrong(f"has more than {_ffi.MAX_DIMS} dimensions")
        dtype = self["dtype"].text(tuple(DTYPES))
        stride = self["stride"].integers(len(shape))
        room = _span(shape, stride, dtype)
        sources, fills, own = self.get("sources"), self.get("fills"), self.get("own")
        leaf = Leaf(
            self["name"].text(),
            self["role"].text(_ROLES),
            dtype,
            shape,
            stride,
            () if sources is None else sources.each(lambda f: f.source(dtype, room)),
            () if fills is None else fills.each(lambda f: f.fill(dtype, room)),
            "" if own is None else own.text(),
        )
        if sources is not None:
            sources.unique([source.name for source in leaf.sources])
            if dtype == "F32" and len({source.dtype for source in leaf.sources}) > 1:
                sources.wrong("has several types that would have to become F32")
        if not fallback:
            self._check_volume(leaf)
        return leaf

    def _check_volume(self, leaf: Leaf) -> None:
        want = math.prod(leaf.shape)
        have = sum(math.prod(p.extent) for s in leaf.sources for p in s.pieces)
        padding = sum(math.prod(fill.extent) for fill in leaf.fills)
        if leaf.own:
            if have:
                self.wrong("is the engine's own and has sources")
        elif have > want or have + padding < want:
            self.wrong(f"has boxes of {have} elements and padding of {padding}, not of {want}")
        else:
            self._check_coverage(leaf)

    def _check_coverage(self, leaf: Leaf) -> None:
        size = max(dtype_bits(leaf.dtype), 8) // 8

        def steps(stride: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(step // size for step in stride)

        memory = memory_of(leaf.shape, steps(leaf.stride))
        if not memory.dense:
            self["stride"].wrong("leaves gaps or shares elements")
        try:
            blocks, padding = (
                [b for at, n, step in views for b in memory.blocks(at // size, n, steps(step))]
                for views in (
                    [(p.at, p.extent, p.stride) for s in leaf.sources for p in s.pieces],
                    [(fill.at, fill.extent, fill.stride) for fill in leaf.fills],
                )
            )
        except TooManyBoxesError as error:
            self.wrong(f"is too ragged: {error}")
        found = coverage(memory.shape, blocks, padding, first=True)
        if found.first_twice is not None:
            self.wrong(f"fills element {memory.place(found.first_twice)} twice")
        if found.first_unfilled is not None:
            self.wrong(f"does not fill element {memory.place(found.first_unfilled)}")

    def source(self, wanted: str, room: int) -> Source:
        shape = self["shape"].integers()
        dtype = self["dtype"].text(tuple(DTYPES))
        if dtype != wanted and not any({dtype, wanted} == {"F32", n} for n in NARROWED):
            self["dtype"].wrong(f"is {dtype}, which does not become {wanted}")
        pieces = self["boxes"].each(lambda f: f.piece(shape, wanted, room))
        if not pieces:
            self["boxes"].wrong("is empty")
        return Source(self["name"].text(), dtype, shape, pieces)

    def piece(self, shape: tuple[int, ...], dtype: str, room: int) -> Piece:
        dims = len(shape)
        offset = self["offset"].integers(dims)
        extent = self["extent"].integers(dims)
        if any(b + n > limit or n < 1 for b, n, limit in zip(offset, extent, shape, strict=True)):
            self.wrong(f"is not inside of shape {list(shape)}")
        piece = Piece(offset, extent, self["at"].integer(), self["stride"].integers(dims))
        self._check_room(piece.at, extent, piece.stride, dtype, room)
        return piece

    def fill(self, dtype: str, room: int) -> Fill:
        extent = self["extent"].integers()
        stride = self["stride"].integers(len(extent))
        fill = Fill(self["value"].number(), self["at"].integer(), extent, stride)
        self._check_room(fill.at, extent, stride, dtype, room)
        return fill

    def _check_room(
        self, at: int, extent: tuple[int, ...], stride: tuple[int, ...], dtype: str, room: int
    ) -> None:
        if at + _span(extent, stride, dtype) > room:
            self.wrong(f"ends {at + _span(extent, stride, dtype) - room} bytes after its tensor")
        size = max(dtype_bits(dtype), 8) // 8
        if at % size or any(step % size for step in stride):
            self.wrong(f"does not lie on whole elements of {dtype}")
        if any(n > 1 and step == 0 for n, step in zip(extent, stride, strict=True)):
            self.wrong("writes elements over each other (a stride is 0)")


def _span(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> int:
    """Bytes from the first element's first to the last element's last."""
    if 0 in shape:
        return 0
    reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return reach + max(dtype_bits(dtype), 8) // 8
