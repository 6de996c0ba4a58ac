# SPDX-License-Identifier: Apache-2.0
"""Digests of what a rank trains, published beside the weights for :func:`fanin.check.served`.

They are made of the model's tensors as they are, not of what was registered of them. A rank begins
their update before their step is readable: who sees the step knows whether digests of it come.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fanin._digest import box_digests, digest_sum
from fanin._dtypes import NARROWED
from fanin._served import Held, Layout, digests_of, publication_for, room_for, scaled
from fanin._tensors import Box, Shard, shard_of
from fanin.errors import FaninError, NotFoundError, StateError
from fanin.server import Server
from fanin.torch._parameters import Parameters
from fanin.torch._union import Table

_log = logging.getLogger("fanin.torch")
_SHARE = 0.01
"""Of the time between two steps, that digests may take which nobody has asked for."""
_NEVER = 1e12  # seconds
_ROUNDED = 1 << 20
"""Elements that are rounded at a time."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def layouts_of(table: Table) -> list[Layout]:
    """What a rank holds, in the order in which it tells digests of it."""
    return [
        Layout(name, entry.dtype, tuple(entry.shape), tuple(sorted(entry.parts)))
        for name, entry in sorted(table.items())
    ]


class Proof:
    """One run's digests of this rank. Not for several threads at once."""

    def __init__(
        self, publication: str, rank: int, layouts: list[Layout], sizes: list[int]
    ) -> None:
        """sizes: of every rank's digests in bytes, which all ranks register."""
        self.publication = publication_for(publication)
        self._rank = rank
        self._layouts = layouts
        self._make_room(sizes)
        self._steps, self._last, self._took = 0, time.monotonic(), 0.0

    def _make_room(self, sizes: list[int]) -> None:
        self._bytes = torch.zeros(sizes[self._rank], dtype=torch.uint8)
        self._shards = [
            shard_of(_name(at), self._bytes)
            if at == self._rank
            else Shard(_name(at), "U8", (n,), (), -1)
            for at, n in enumerate(sizes)
        ]

    def due(self) -> bool:
        """Whether digests of the step that comes now take little time. Counts steps.

        Each rank decides alone, and by powers of two: what the slowest digests all others do.
        """
        now = time.monotonic()
        passed, self._last = max(now - self._last, 1e-6), now
        self._steps += 1
        every = 1
        while self._took > _SHARE * passed * every:
            every *= 2
        return self._steps % every == 0

    def begin(self, server: Server) -> None:
        """Digests will follow the step that comes now. Readers of the last ones start again: a
        step does not wait for them, as an update would."""
        with contextlib.suppress(NotFoundError, StateError):  # there are none
            server.withdraw(self.publication)
        server.begin_update(self.publication)

    def abort(self, server: Server) -> None:
        """They do not follow."""
        with contextlib.suppress(FaninError):
            server.abort_update(self.publication)

    def fail(self, server: Server) -> None:
        """They could not be made, for want of memory perhaps: nobody tries again unasked."""
        self._took = _NEVER
        self.abort(server)

    def publish(self, server: Server, parameters: Parameters, step: int) -> None:
        """Digests the parameters as they are; readers find them under the same step.

        Reads all that this rank holds once, and waits for CUDA.
        """
        for device in parameters.devices:  # what trains is no cost of digests
            torch.cuda.current_stream(device).synchronize()
        start = time.monotonic()
        told = self._told(parameters, step)
        server.begin_update(self.publication)
        self._bytes[: len(told)].copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))
        server.put(self.publication, self._shards, replace=True)
        server.commit(self.publication, step)
        self._took = time.monotonic() - start
        _log.info("fanin: digests of step %d for %s: %.3f s", step, self.publication, self._took)

    def _told(self, parameters: Parameters, step: int) -> bytes:
        try:
            return digests_of(self._layouts, step, _held(parameters))
        except KeyError as error:
            raise StateError.make(
                f"the model holds other parts than those that the ranks agreed on: {error}",
                "call refresh() on every rank",
            ) from error


class AdapterProof(Proof):
    """One adapter's digests of this rank, also of what engines make of it.

    They multiply some tensors by a scale in their own type, which nobody can undo: so does this.
    """

    def __init__(
        self, publication: str, rank: int, ranks: int, scale_of: Callable[[str], float]
    ) -> None:
        """scale_of: by the path of a parameter."""
        super().__init__(publication, rank, [], [0] * ranks)
        self._ranks, self._scale_of = ranks, scale_of

    def due(self) -> bool:
        """Nobody digests adapters unasked: runs come and go, and a reader lists publications."""
        return False

    def _told(self, parameters: Parameters, step: int) -> bytes:
        layouts: list[Layout] = []
        boxes: list[tuple[Layout, Box, Any, str]] = []
        for path, shard, values in parameters.tensors():
            places = tuple((box.offset, box.extent) for box in shard.boxes)
            scale = self._scale_of(path)
            layout = Layout(shard.name, shard.dtype, tuple(shard.shape), places, scale)
            layouts.append(layout)
            for box, one in zip(shard.boxes, values, strict=True):
                boxes += [(layout, box, one, kind) for kind in layout.kinds()]
        digests = box_digests(
            (_served_as(one, kind, layout.scale), box.offset) for layout, box, one, kind in boxes
        )
        held: dict[tuple[Any, ...], dict[str, int]] = {}
        for (layout, box, _, kind), digest in zip(boxes, digests, strict=True):
            place = held.setdefault((layout.name, box.offset, box.extent), {})
            place[scaled(kind, layout.scale)] = digest
        told = digests_of(
            layouts, step, (Held(name, at, n, one) for (name, at, n), one in held.items())
        )
        room = room_for((one.name, one.shape) for one in layouts)
        if len(told) > room:
            raise StateError.make("this rank holds too many boxes of its adapter to digest them")
        if room != len(self._bytes):
            self._make_room([room] * self._ranks)
        return told


def _served_as(values: Any, kind: str, scale: float | None) -> Any:
    """What an engine that holds that type makes of an adapter's values."""
    typed = values.to(_DTYPES[kind]) if kind in _DTYPES else values
    return typed if scale in (None, 1) else typed * scale


def _name(rank: int) -> str:
    return f"rank{rank}"


def _held(parameters: Parameters) -> Iterator[Held]:
    boxes = list(parameters.held())
    native = box_digests((values, box.offset) for _, box, values in boxes)
    told = [{shard.dtype: one} for (shard, _, _), one in zip(boxes, native, strict=True)]
    for narrow in NARROWED:
        of: list[int] = []
        for at, one in zip(of, box_digests(_rounded(boxes, _DTYPES[narrow], of)), strict=True):
            told[at][narrow] = digest_sum([told[at].get(narrow, 0), one])
    for (shard, box, _), digests in zip(boxes, told, strict=True):
        yield Held(shard.name, box.offset, box.extent, digests)


def _rounded(
    boxes: list[tuple[Shard, Box, Any]], dtype: Any, of: list[int]
) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """What is F32 in a narrower type, of which there is never much at a time; of: gets the numbers
    of the boxes that the pieces are of."""
    for number, (shard, box, values) in enumerate(boxes):
        if shard.dtype != "F32":
            continue
        rows = max(values.shape[0], 1) if values.dim() else 1
        most = max(1, _ROUNDED * rows // max(values.numel(), 1))
        for at in range(0, rows, most):
            of.append(number)
            if values.dim():
                offset = (box.offset[0] + at, *box.offset[1:])
                yield values[at : at + most].to(dtype), offset
            else:
                yield values.to(dtype), ()
