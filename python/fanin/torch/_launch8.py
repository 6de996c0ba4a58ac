# SPDX-License-Identifier: Apache-2.0
"""Boxes that a GPU rounds to fp8 in few launches, whatever their number.

The tables say where each block lies. They are made anew when memory has moved, not at each step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fanin.torch._blocks8 import begun, touched

_log = logging.getLogger("fanin.torch")
_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
_MOST = 1 << 15
"""Elements of a block that a kernel holds at once."""
_ALIGNMENT = 16
"""Bytes that a thread reads at once, where rows begin so."""
_BAND = 8
"""Rows that a program works on where each has a scale."""
_ALONG = 1024


class Job(NamedTuple):
    """A box that is rounded, and where its scales go."""

    values: Any
    at: tuple[int, int]
    """Its first element in the whole tensor."""
    block: tuple[int, int]
    out: Any
    scales: Any
    """Those of the blocks that begin in the box."""
    shared: tuple[Any, Any] | None
    """Which of the blocks that it touches are shared, and their places among its tensor's."""
    first: int
    """The place of its tensor's first shared block among all of them."""
    by_row: bool
    """Each row has a scale."""

    @property
    def inside(self) -> tuple[slice, slice]:
        """The blocks of *scales* among those that the box touches."""
        out = []
        for first, length, size in zip(self.at, self.values.shape, self.block, strict=True):
            mine, all_of = begun(first, length, size), touched(first, length, size)
            out.append(slice(mine.start - all_of.start, mine.stop - all_of.start))
        return out[0], out[1]


def can_launch(job: Job) -> bool:
    """Whether the kernels do this; else torch does, with the same bytes."""
    values = job.values
    if (
        not values.is_cuda
        or values.stride(1) != 1
        or torch.cuda.get_device_capability(values.device) < (8, 9)
    ):
        return False
    return (job.by_row or _tile(job.block)[0] * _tile(job.block)[1] <= _MOST) and _has_triton()


def _has_triton() -> bool:
    global _triton
    if _triton is None:
        try:
            import fanin.torch._kernels  # noqa: F401

            _triton = True
        except ImportError as error:
            _log.warning("fanin: fp8 takes longer without Triton: %s", error)
            _triton = False
    return _triton


_triton: bool | None = None


def _tile(block: tuple[int, int]) -> tuple[int, int]:
    """Powers of two, as kernels have them."""
    return 1 << (block[0] - 1).bit_length(), 1 << (block[1] - 1).bit_length()


class Launches:
    """The jobs of one device."""

    def __init__(self, jobs: Sequence[Job], shared: Any, powers: bool) -> None:
        """shared: the maxima of blocks that ranks share, on this device."""
        self._powers, self._shared = powers, shared
        alike: dict[tuple[Any, ...], list[Any]] = {}
        for job, rows in _tables(jobs):
            tile = (_BAND, _ALONG) if job.by_row else _tile(job.block)
            whole = _aligned(rows, job.values.element_size())
            if not job.by_row:
                whole &= (rows[:, 6] == tile[0]) & (rows[:, 7] == tile[1])
            for is_shared in (False, True):
                for masked in (False, True):
                    those = rows[((rows[:, 5] >= 0) == is_shared) & (whole != masked)]
                    key = (is_shared, job.by_row, _KINDS[job.values.dtype], masked, tile)
                    if len(those):
                        alike.setdefault(key, []).append(those)
        self._device = device = jobs[0].values.device
        self._tables = [(key, torch.cat(rows).to(device)) for key, rows in alike.items()]

    def maxima(self) -> None:
        """Of the shared blocks, as far as they are here."""
        self._launch(True, 1)

    def whole(self) -> None:
        """All blocks that are not shared."""
        self._launch(False, 0)

    def rest(self) -> None:
        """The shared blocks, of which the maxima are known now."""
        self._launch(True, 2)

    def _launch(self, is_shared: bool, work: int) -> None:
        from fanin.torch._kernels import bands, blocks

        for (shared, by_row, kind, masked, (rows, along)), table in self._tables:
            if shared is not is_shared:
                continue
            options = {"ROWS": rows, "ALONG": along, "num_warps": 8, "POWERS": self._powers}
            options |= {"KIND": kind, "WORK": work}
            options |= {"ALIGNED": not masked} if by_row else {"MASKED": masked}
            with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
                (bands if by_row else blocks)[len(table),](table, self._shared, **options)


def _ranges(first: int, length: int, block: int) -> tuple[Any, Any]:
    """Where the blocks of these elements begin among them, and how many of them each has."""
    here = touched(first, length, block)
    edges = torch.tensor([*(at * block - first for at in here), length]).clamp(min=0)
    return edges[:-1], edges[1:] - edges[:-1]


def _aligned(rows: Any, size: int) -> Any:
    """Which of a table's rows are read and written by 16 bytes at a time."""
    steps = (rows[:, 0], rows[:, 1] * size, rows[:, 2], rows[:, 3], rows[:, 7])
    return torch.stack([step % _ALIGNMENT for step in steps]).eq(0).all(0)


def _tables(jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
    """The rows of jobs that differ in addresses alone, of which there are thousands; one of them.

    Each row says where things lie from the job's first elements on; no scale and no place are -1.
    """
    alike: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        where = (job.at, job.values.shape, job.block, job.values.dtype, id(job.shared))
        key = (*where, job.values.stride(0), job.out.stride(0), job.scales.shape)
        alike.setdefault(key, []).append(job)
    for those in alike.values():
        job = those[0]
        rows = _bands(job) if job.by_row else _blocks(job)
        firsts = torch.tensor(
            [
                (one.values.data_ptr(), 0, one.out.data_ptr(), 0, one.scales.data_ptr(), one.first)
                for one in those
            ]
        )
        absolute = rows.repeat(len(those), 1, 1)
        absolute[:, :, :6] += firsts[:, None, :]
        for column, nothing in ((4, 0), (5, -1)):
            absolute[:, rows[:, column] < 0, column] = nothing
        yield job, absolute.flatten(0, 1)


def _places(job: Job, blocks: int) -> Any:
    places = torch.full((blocks,), -1)
    if job.shared is not None:
        chosen, known = job.shared
        places[chosen] = known
    return places


def _blocks(job: Job) -> Any:
    """A table's rows, one a block."""
    values, out = job.values, job.out
    top, rows = _ranges(job.at[0], values.shape[0], job.block[0])
    left, columns = _ranges(job.at[1], values.shape[1], job.block[1])
    grid = (len(top), len(left))
    scales = torch.full(grid, -1)
    if job.scales.numel():
        scales[job.inside] = 4 * torch.arange(job.scales.numel()).view(job.scales.shape)
    down, along = top[:, None].expand(grid), left[None, :].expand(grid)
    source = values.element_size() * (down * values.stride(0) + along)
    columns_ = [
        source,
        torch.full(grid, values.stride(0)),
        down * out.stride(0) + along,
        torch.full(grid, out.stride(0)),
        scales,
        _places(job, grid[0] * grid[1]).view(grid),
        rows[:, None].expand(grid),
        columns[None, :].expand(grid),
    ]
    return torch.stack([one.reshape(-1) for one in columns_], 1)


def _bands(job: Job) -> Any:
    """A table's rows, one for some rows of the box."""
    values, out = job.values, job.out
    top = torch.arange(0, values.shape[0], _BAND)
    same = torch.ones_like(top)
    scales = 4 * top if job.scales.numel() else -same
    columns = [
        values.element_size() * values.stride(0) * top,
        values.stride(0) * same,
        out.stride(0) * top,
        out.stride(0) * same,
        scales,
        _places(job, values.shape[0])[top],
        (values.shape[0] - top).clamp(max=_BAND),
        values.shape[1] * same,
    ]
    return torch.stack(columns, 1)
