# SPDX-License-Identifier: Apache-2.0
"""Weights that a run publishes as fp8: what is published of them, and how each step is made.

What is rounded are boxes of published tensors. So a stack of experts, a part that ``names=`` tells
of, and every placement need nothing of their own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fanin._cover import Part
from fanin._tensors import Box, Shard
from fanin.errors import RequestError
from fanin.torch._blocks8 import Shared, begun, touched
from fanin.torch._cast8 import Room, cast, maxima, scales_of
from fanin.torch._formats import F8, Format
from fanin.torch._launch8 import Job, Launches, can_launch
from fanin.torch._transform import Want, allocate

_log = logging.getLogger("fanin.torch")

Reduce = Callable[[Any], Callable[[], None]]
"""Begins the MAX of all ranks' values, in place; what it returns waits for the end."""


class Source(NamedTuple):
    """A tensor that would be published if it was not rounded."""

    shard: Shard
    views: Callable[[], list[Any]]
    """The memory of its boxes, as tensors."""
    left: bool
    """It stays as it is, whatever its name: an embedding, a buffer."""
    makers: Sequence[Hashable] = ()
    """Who gives the values of each box, one after the other, by :meth:`Quantizer.take`; None: they
    stay."""


class Entry(NamedTuple):
    """A tensor that is published as fp8."""

    source: Shard
    views: list[Any]
    """What is rounded, of each box."""
    values: list[Any]
    """The results, of each box."""
    scales: list[Any]
    """The scales of the blocks whose first elements are in the box."""
    published: tuple[Shard, Shard]
    """Values and scales."""
    makers: Sequence[Hashable]
    """As the source's."""


class Work(NamedTuple):
    """The jobs of makers that are done together."""

    launches: list[Launches]
    jobs: list[Job]
    """Those that torch does."""


class Derived(NamedTuple):
    """What is published of sources, and what the quantizer has to know of it once it is."""

    shards: list[Shard]
    entries: dict[str, Entry]
    dropped: list[str]
    """Scales of what is not rounded any more."""


class Quantizer:
    """The stage that rounds to fp8. Not for several threads at once."""

    def __init__(self, form: Format) -> None:
        self.form = form
        self._entries: dict[str, Entry] = {}
        self._shared = Shared(0, {})
        self._reduce: Reduce = lambda values: lambda: None
        self._flat: Any = None
        self._room = Room()
        self._scaled: dict[str, str] = {}
        """By the names of scales, those of the tensors."""
        self._jobs: dict[Hashable, list[Job]] | None = None
        """Of each maker, and under None those on what stays."""
        self._works: dict[tuple[Hashable, ...], Work] = {}
        self._here: dict[Any, Any] = {}
        """The maxima on devices other than that where the ranks reduce."""
        self._known: Any = None
        """Recorded behind the maxima that kernels take, None: they are not the last ones."""
        self._beside: Any = None
        """The stream on which a GPU reduces them."""
        self._arenas: list[Any] = []
        """Of scales."""
        self._flags: list[tuple[Any, Any]] = []

    # -- what is published ------------------------------------------------------------------

    def takes(self, shard: Shard, left: bool) -> bool:
        """Whether a tensor is rounded; left: it stays as it is, whatever its name."""
        return not left and self.form.takes(shard.name, shard.dtype, shard.shape)

    def derive(self, sources: Iterable[Source], taken: Iterable[str]) -> Derived:
        """What is published of *sources*. Changes nothing, see :meth:`accept`.

        taken: names of what is published beside them. RequestError: scales have such a name.
        """
        shards: list[Shard] = []
        rounded: list[Source] = []
        dropped: list[str] = []
        for one in sources:
            shard = one.shard
            if self.takes(shard, one.left):
                rounded.append(one)
            else:
                shards.append(shard)
                if shard.name in self._entries:
                    dropped.append(self.form.scale_name(shard.name))
        others = {*taken, *(shard.name for shard in shards)}
        for one in rounded:
            if (name := self.form.scale_name(one.shard.name)) in others:
                raise RequestError.make(
                    f"the model has '{name}', and quantize= would publish scales under this name",
                    "put the module into skip_modules=, or drop the tensor by names=",
                    key=name,
                )
        entries = self._placed(rounded)
        shards += [shard for entry in entries.values() for shard in entry.published]
        return Derived(shards, entries, dropped)

    def accept(self, derived: Derived, removed: Sequence[str]) -> None:
        """The library has taken what :meth:`derive` told, and *removed* tensors."""
        for name in [*removed, *derived.dropped]:
            self._entries.pop(self._scaled.get(name, name), None)
        self._entries.update(derived.entries)
        if derived.entries or removed or derived.dropped:
            self._jobs = None
            self._arenas = _arenas(self._entries.values())
            self._scaled = {self.form.scale_name(name): name for name in self._entries}

    def agree(self, shared: Shared, home: Any, reduce: Reduce) -> None:
        """The ranks have told each other what they hold; home: the device of the maxima."""
        self._shared, self._reduce, self._jobs, self._here = shared, reduce, None, {}
        self._flat = torch.zeros(shared.size, dtype=torch.int32, device=home)
        if shared.size:
            _log.info("fanin: ranks share %d blocks of fp8 weights", shared.size)

    def __contains__(self, name: str) -> bool:
        """Whether the tensor *name* is published as fp8."""
        return name in self._entries

    def held(self, name: str) -> Iterator[tuple[Shard, list[Any]]]:
        """The values and the scales of the tensor *name*, as they were made last."""
        entry = self._entries[name]
        yield entry.published[0], entry.values
        kept = (one for one in entry.scales if one.numel())
        yield entry.published[1], list(kept)

    def result(self, name: str, part: Part) -> Any:
        """The memory of a box of what was made last: of values or of scales. None: *name* is
        neither."""
        owner = self._scaled.get(name, name)
        for shard, tensors in self.held(owner) if owner in self else ():
            for box, values in zip(shard.boxes, tensors, strict=True):
                if shard.name == name and (box.offset, box.extent) == part:
                    return values
        return None

    def places(self) -> Iterator[tuple[int, int]]:
        """Device and address of results on CUDA devices."""
        for entry in self._entries.values():
            for one in (*entry.values, *entry.scales):
                if one.is_cuda and one.numel():
                    yield one.device.index, one.untyped_storage().data_ptr()

    # -- a step -----------------------------------------------------------------------------

    def take(self, makers: tuple[Hashable, ...]) -> None:
        """Rounds what *makers* have made. Of blocks that ranks share it takes the maxima."""
        with torch.no_grad():
            work = self._work_of(makers)
            self._launch(work)
            self._maxima(work)
            self._whole(work)

    def retake(self, makers: tuple[Hashable, ...]) -> None:
        """Rounds the blocks that ranks share. Their maxima are known, and *makers* have made the
        values again."""
        with torch.no_grad():
            work = self._work_of(makers)
            shared = (job for job in work.jobs if job.shared is not None)
            self._rest(
                work, [(job, maxima(job.values, job.at, job.block, self._room)) for job in shared]
            )

    def shares(self, name: str) -> bool:
        """Whether some rank has a part of a block of the tensor *name*."""
        return name in self._shared.of

    def ahead(self) -> None:
        """Begins a step. GPUs round what takes no other rank, while the ranks meet."""
        self._tell_unusable()
        with torch.no_grad():
            for maxima_ in (self._flat, *self._here.values()):
                maxima_.zero_()
            self._launch(self._work_of((None,)))

    def fill(self) -> None:
        """Rounds the rest of what the sources hold now; a block that ranks share by the maximum of
        all."""
        with torch.no_grad():
            try:
                work = self._work_of((None,))
                first = self._maxima(work)
                for here in self._here.values():
                    torch.maximum(self._flat, here.to(self._flat.device), out=self._flat)
            except Exception:  # the others wait for this rank all the same
                self.miss()
                raise
            wait = self._reduced() if self._shared.size else None
            self._whole(work)
            if wait is not None:
                wait()
            for here in self._here.values():
                here.copy_(self._flat)
            self._rest(work, first)

    def miss(self) -> None:
        if self._shared.size:
            with contextlib.suppress(Exception):
                self._flat.zero_()
                self._reduce(self._flat)()

    def release(self) -> None:
        self._entries, self._scaled, self._jobs, self._works = {}, {}, None, {}
        self._arenas, self._here, self._flags = [], {}, []

    # -- inside -----------------------------------------------------------------------------

    def _launch(self, work: Work) -> None:
        """What kernels do of the blocks that are not shared, and the maxima of those that are."""
        for launches in work.launches:
            launches.maxima()
        self._known = None
        if self._flat.is_cuda and not self._here:
            self._known = torch.cuda.current_stream(self._flat.device).record_event()
        for launches in work.launches:
            launches.whole()

    def _reduced(self) -> Callable[[], None]:
        """Begins the MAX of all ranks, on a GPU beside what it rounds."""
        if self._known is None:
            return self._reduce(self._flat)
        device = self._flat.device
        beside = self._beside = self._beside or torch.cuda.Stream(device)
        with torch.cuda.stream(beside):
            beside.wait_event(self._known)
            wait = self._reduce(self._flat)

        def waited() -> None:
            with torch.cuda.stream(beside):
                wait()
            torch.cuda.current_stream(device).wait_stream(beside)

        return waited

    def _maxima(self, work: Work) -> list[tuple[Job, Any]]:
        """Of shared blocks, by torch. Gives the jobs that have some, and all their maxima."""
        first = []
        for job in work.jobs:
            if job.shared is not None:
                largest = maxima(job.values, job.at, job.block, self._room)
                chosen, places = job.shared
                mine = largest.view(-1)[chosen].to(self._flat.device)
                self._flat[places] = torch.maximum(self._flat[places], mine)
                self._known = None
                first.append((job, largest))
        return first

    def _whole(self, work: Work) -> None:
        """What torch does of the blocks that are not shared."""
        for job in work.jobs:
            if job.shared is None:
                self._cast(job, maxima(job.values, job.at, job.block, self._room))

    def _rest(self, work: Work, first: list[tuple[Job, Any]]) -> None:
        for launches in work.launches:
            launches.rest()
        for job, largest in first:
            assert job.shared is not None
            chosen, places = job.shared
            largest.view(-1)[chosen] = self._flat[places].to(largest.device)
            self._cast(job, largest)

    def _cast(self, job: Job, largest: Any) -> None:
        scales = scales_of(largest, self.form.powers)
        job.scales.copy_(scales[job.inside])
        cast(job.values, job.at, job.block, scales, job.out, self._room)

    def _placed(self, sources: Sequence[Source]) -> dict[str, Entry]:
        """Entries with memory: that of before, where the parts are those of before."""
        missing = [one for one in sources if not self._stands(one.shard)]
        values = iter(_made(missing, torch.float8_e4m3fn, lambda _, box: box.extent, 16))
        scales = iter(_made(missing, torch.float32, self._grids, 4))
        out: dict[str, Entry] = {}
        for one in sources:
            shard = one.shard
            if self._stands(shard):
                known = self._entries[shard.name]
                out[shard.name] = known._replace(source=shard, views=one.views(), makers=one.makers)
                continue
            results = [next(values) for _ in shard.boxes]
            grids = [next(scales) for _ in shard.boxes]
            published = self._published(shard, results, grids)
            out[shard.name] = Entry(*(shard, one.views(), results, grids, published, one.makers))
        return out

    def _stands(self, shard: Shard) -> bool:
        known = self._entries.get(shard.name)
        return known is not None and (
            known.source.shape == shard.shape
            and known.source.device == shard.device
            and _parts(known.source) == _parts(shard)
        )

    def _grids(self, shard: Shard, box: Box) -> tuple[int, ...]:
        block = self.form.block_of(shard.shape)
        return tuple(len(one) for one in _blocks(begun, box, block))

    def _published(self, shard: Shard, values: list[Any], scales: list[Any]) -> tuple[Shard, Shard]:
        block = self.form.block_of(shard.shape)
        starts = [
            tuple(-(-at // size) for at, size in zip(box.offset, block, strict=True))
            for box in shard.boxes
        ]
        offsets = [box.offset for box in shard.boxes]
        name, device = shard.name, shard.device
        shape, grid = shard.shape, self.form.scale_shape(shard.shape)
        return (
            Shard(name, F8, shape, _boxes(offsets, values), device),
            Shard(self.form.scale_name(name), "F32", grid, _boxes(starts, scales, False), device),
        )

    def _work_of(self, makers: tuple[Hashable, ...]) -> Work:
        if self._jobs is None:
            known: dict[Any, Any] = {}
            self._jobs, self._works = {}, {}
            for name, entry in self._entries.items():
                for at, box in enumerate(entry.source.boxes):
                    if 0 not in box.extent:
                        job = self._job(name, entry, at, known)
                        self._jobs.setdefault(entry.makers[at], []).append(job)
        if makers not in self._works:
            jobs = self._jobs
            self._works[makers] = self._work([job for one in makers for job in jobs.get(one, ())])
        return self._works[makers]

    def _work(self, jobs: list[Job]) -> Work:
        on: dict[Any, list[Job]] = {}
        left = []
        for job in jobs:
            if can_launch(job):
                on.setdefault(job.out.device, []).append(job)
            else:
                left.append(self._moved(job))
        powers = self.form.powers
        return Work(
            [Launches(those, self._maxima_on(at), powers) for at, those in on.items()], left
        )

    def _maxima_on(self, device: Any) -> Any:
        """Ranks reduce on a CPU where their group is one of CPUs."""
        if device == self._flat.device:
            return self._flat
        return self._here.setdefault(device, torch.zeros_like(self._flat, device=device))

    def _moved(self, job: Job) -> Job:
        """What torch indexes by lies on the devices where it does so."""
        if job.shared is None:
            return job
        chosen, places = job.shared
        places = (places + job.first).to(self._flat.device)
        return job._replace(shared=(chosen.to(job.out.device), places))

    def _job(self, name: str, entry: Entry, at: int, known: dict[Any, Any]) -> Job:
        """known: of geometries, which many tensors share."""
        box, shape = entry.source.boxes[at], entry.source.shape
        first, numbers = self._shared.of.get(name, (0, ()))
        key = (shape, box.offset, box.extent, id(numbers))
        if key not in known:
            known[key] = self._shared_of(box, shape, numbers)
        out, scales, by_row = entry.values[at], entry.scales[at], self.form.block is None
        where, block = (box.offset[0], box.offset[1]), self.form.block_of(shape)
        return Job(entry.views[at], where, block, out, scales, known[key], first, by_row)

    def _shared_of(self, box: Box, shape: Sequence[int], numbers: Sequence[int]) -> Any:
        """Which of the blocks that *box* touches are among *numbers*, and where; None: none is."""
        down, along = _blocks(touched, box, self.form.block_of(shape))
        places = {number: at for at, number in enumerate(numbers)}
        across = self.form.scale_shape(shape)[1]
        found = [
            (i * len(along) + j, places[row * across + column])
            for i, row in enumerate(down if places else ())
            for j, column in enumerate(along)
            if row * across + column in places
        ]
        return tuple(torch.tensor(found).unbind(1)) if found else None

    def flag_unusable(self) -> None:
        """Notes whether a scale is NaN, where a GPU has to be asked without waiting for it."""
        self._flags = []
        for scales in self._arenas:
            usable = scales.isfinite().all()
            if scales.is_cuda:
                told = torch.empty((), dtype=torch.bool, pin_memory=True)
                told.copy_(usable, non_blocking=True)
                self._flags.append((told, torch.cuda.Event()))
                self._flags[-1][1].record()
            else:
                self._flags.append((usable, None))
        if all(event is None for _, event in self._flags):
            self._tell_unusable()

    def _tell_unusable(self) -> None:
        """Warns of weights with a NaN or an infinity at the step that was made last."""
        found, self._flags = self._flags, []
        for usable, event in found:
            if event is not None:
                event.synchronize()
            if not bool(usable):
                break
        else:
            return
        for name, entry in self._entries.items():
            bad = sum(int((~one.isfinite()).sum()) for one in entry.scales)
            if bad:
                _log.warning(
                    "fanin: '%s' has NaN or infinite values in %d of its blocks, which are "
                    "published as NaN: %s",
                    *(name, bad, "look at the loss, and at the step before"),
                )


def _parts(shard: Shard) -> list[Any]:
    return [(box.offset, box.extent) for box in shard.boxes]


def _blocks(which: Callable[..., range], box: Box, block: tuple[int, int]) -> tuple[range, range]:
    return (
        which(box.offset[0], box.extent[0], block[0]),
        which(box.offset[1], box.extent[1], block[1]),
    )


def _boxes(
    offsets: Sequence[tuple[int, ...]], tensors: Sequence[Any], empty: bool = True
) -> tuple[Box, ...]:
    return tuple(
        Box(
            tuple(offset),
            tuple(one.shape),
            tuple(step * one.element_size() for step in one.stride()),
            one.data_ptr(),
        )
        for offset, one in zip(offsets, tensors, strict=True)
        if empty or one.numel()
    )


def _made(
    sources: Sequence[Source],
    dtype: Any,
    shape_of: Callable[[Shard, Box], tuple[int, ...]],
    alignment: int,
) -> list[Any]:
    """Memory for results of each box of *sources*, where the box lies."""
    wanted = []
    for one in sources:
        at = one.shard.device
        device = torch.device("cpu") if at in (None, -1) else torch.device("cuda", at)
        wanted += [Want(device, dtype, shape_of(one.shard, box)) for box in one.shard.boxes]
    return allocate(wanted, alignment)


def _arenas(entries: Iterable[Entry]) -> list[Any]:
    """All scales, one tensor an allocation."""
    storages = {}
    for entry in entries:
        for one in entry.scales:
            if one.numel():
                storages[one.untyped_storage().data_ptr()] = one
    return [
        torch.empty(0, dtype=one.dtype, device=one.device).set_(one.untyped_storage())
        for one in storages.values()
    ]
