# SPDX-License-Identifier: Apache-2.0
"""Adds an adapter's products to tensors on GPUs in one pass, where that gives PEFT's bytes.

PEFT writes the product, a scaled one and a rounded one, and reads each again: six times what has to
be moved. A kernel does the same operations in the same order. Only the order within a matrix
product is the library's own. So the first tensor of each kind and shape is computed in both ways,
from random factors, and a kind whose bytes differ stays with PEFT's functions.

Tensors of one kind go through one launch, by a table of their addresses. Python takes longer for a
launch than a GPU for the tensor.
"""

from __future__ import annotations

import copy
import functools
import logging
import struct
from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from fanin.torch._again import Again
from fanin.torch._factors import Found, Group, Place
from fanin.torch._state import Columns, State, lies_now
from fanin.torch._tree import PARAMETER

_log = logging.getLogger("fanin.torch")
_ROWS, _COLUMNS, _WARPS = 64, 128, 4
_ALIGNMENT = 16
_MANY = 1 << 30
"""Bytes of results that wait for a launch: a GPU is not to wait for all that Python prepares. What
was gathered is freed behind its launch, so what was gathered next launches what waits, too."""
_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_proven: dict[Hashable, bool] = {}
_kinds: dict[Any, Any] = {}
_is_told = False


Row = tuple[int, ...]
"""Addresses of base, result, left and right, and the bits of the scale. Factors that travel have
addresses in the memory that they get at each step."""


class _Kind(NamedTuple):
    """What the sums of one launch have in common."""

    device: Any
    dtype: Any
    factors: Any
    rank: int
    is_rounded: bool
    extent: tuple[int, ...]
    """Experts, rows, columns."""
    steps: tuple[int, ...]
    """Elements between neighbours: of base, out, left and right."""


class Plan(NamedTuple):
    """All of a sum that is the same at each step."""

    kind: _Kind
    sides: tuple[tuple[str, int], ...]
    """Of left and right the factor, and the bytes before it in the factor's memory."""
    size: int
    """Bytes of the result."""


def planned(
    base: Any, factors: dict[str, Found], sides: dict[str, Any], is_rounded: bool, extent: Any
) -> Plan:
    """Of ``base + scale * left.T @ right``.

    base: of [experts, rows, columns], which is *extent*, or of the last two. sides: the left one
    and the right one as views of the *factors*, under whose names they are: [experts, rank, rows or
    columns]. is_rounded: what is added, to the base's type, before.
    """
    _, rows, columns = extent
    steps = (*base.view(extent).stride(), rows * columns, columns)
    places = []
    for which, side in sides.items():
        first = side.storage_offset() - factors[which].memory.storage_offset()
        places.append((which, first * side.element_size()))
        steps += side.stride()
    some = next(iter(sides.values()))
    size = base.numel() * base.element_size()
    kind = _Kind(base.device, base.dtype, some.dtype, some.shape[1], is_rounded, extent, steps)
    kind = _kinds.setdefault(kind, kind)  # one object, which is found sooner than an equal one
    return Plan(kind, tuple(places), size)


def can_fuse(base: Any, factors: dict[str, Found]) -> bool:
    """Whether the kernel is for tensors of these types and places."""
    first = factors["A"].memory
    if not base.is_cuda or base.dtype not in _KINDS or first.dtype not in _KINDS:
        return False
    if torch.cuda.get_device_capability(base.device) < (8, 0):
        return False
    if first.dtype is torch.float32 and is_tf32():
        _tell_tf32()
        return False
    return all(
        (one.memory.dtype, one.memory.device) == (first.dtype, base.device)
        and one.memory.is_contiguous()
        for one in factors.values()
    )


def is_tf32() -> bool:
    """Whether PyTorch rounds the factors of F32 products."""
    matmul = torch.backends.cuda.matmul
    told = getattr(matmul, "fp32_precision", None)  # of newer PyTorch, where the other may raise
    return bool(matmul.allow_tf32) if told is None else told == "tf32"


def _tell_tf32() -> None:
    global _is_told
    if not _is_told:
        _log.warning(
            "fanin: merging takes longer, by PEFT's functions: PyTorch rounds products of F32 to "
            "TF32 (torch.set_float32_matmul_precision), which no other kernel does alike"
        )
    _is_told = True


def is_proven(base: Any, left: Any, key: Hashable, both: Callable[[], tuple[Any, Any]]) -> bool:
    """Whether the kernel gives PEFT's bytes for tensors of a kind.

    key: of the kind. both: computes what PEFT gives, and what the kernel does, where that is not
    known yet.
    """
    key = (key, base.dtype, base.device, left.dtype)
    if key not in _proven:
        try:
            wanted, got = (one.view(torch.uint8) for one in both())
            _proven[key] = torch.equal(wanted, got)
            why = "" if _proven[key] else "PEFT's bytes are others there"
        except Exception as error:
            _proven[key], why = False, f"{type(error).__name__}: {error}"
        if why:
            _log.warning("fanin: merging %s takes longer, without a fused kernel: %s", key, why)
    return _proven[key]


def noise_like(tensor: Any) -> Any:
    """Random values of that shape and type, some of them zeros of either sign."""
    source = torch.Generator(tensor.device).manual_seed(tensor.numel())
    out = torch.randn(tensor.shape, generator=source, device=tensor.device)
    out[::4], out[::8] = 0.0, -0.0
    return out.to(tensor.dtype)


class Launch:
    """Sums of one kind, to be made again while only contents change."""

    def __init__(self, kind: _Kind, is_aligned: bool, groups: tuple[Group | None, ...]) -> None:
        """groups: with which left and right travel, None: they stay."""
        self.kind, self.is_aligned, self.groups = kind, is_aligned, groups
        self.rows: list[Row] = []
        self._table: tuple[int, Any] | None = None

    def make(self, gathered: dict[Any, Any]) -> None:
        """On the current stream. gathered: memory by groups."""
        left, right = (0 if one is None else gathered[one].data_ptr() for one in self.groups)
        device = self.kind.device
        is_cuda = device.type == "cuda"
        # Nothing waits for the upload but the stream that it is on.
        stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
        if self._table is None or self._table[0] != stream:
            table = torch.tensor(self.rows, pin_memory=is_cuda)
            self._table = stream, table.to(device, non_blocking=True)
        is_aligned = self.is_aligned and (left | right) % _ALIGNMENT == 0
        _launch(self.kind, is_aligned, self._table[1], left, right)


class Sums:
    """Sums that wait for a launch."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Launch] = {}
        self._gathered: dict[Any, Any] = {}
        self._kept: list[Any] = []
        self._bytes = 0
        #: As it is in this step: asked once, as it takes longer than a sum.
        self.is_tf32 = is_tf32()
        #: Gets each launch, unless it is None.
        self.log: list[Any] | None = None

    def add(self, plan: Plan, factors: dict[str, Found], base: Any, out: Any, scale: float) -> None:
        """*out*, which is contiguous, is computed behind the next :meth:`launch`, or before it."""
        sides = [factors[which] for which, _ in plan.sides]
        groups = tuple(factor.group for factor in sides)
        if self._bytes > _MANY or not self._gathered.keys() >= {*groups} - {None}:
            self.launch()
        addresses = [base.data_ptr(), out.data_ptr()]
        for (_, first), factor in zip(plan.sides, sides, strict=True):
            addresses.append(first + (factor.memory.data_ptr() if factor.group is None else 0))
        is_aligned = all(address % _ALIGNMENT == 0 for address in addresses)
        one = self._waiting.setdefault(
            (id(plan.kind), is_aligned, groups), Launch(plan.kind, is_aligned, groups)
        )
        one.rows.append((*addresses, _bits(scale)))
        self._kept += (base, out)
        self._kept += (factor.memory for factor in sides if factor.group is None)
        self._gathered.update((one.group, one.memory) for one in sides if one.group is not None)
        self._bytes += plan.size

    def launch(self) -> None:
        """On the current streams, all that waits."""
        waiting, gathered, kept = self._waiting, self._gathered, self._kept
        self._waiting, self._gathered, self._kept, self._bytes = {}, {}, [], 0
        for one in waiting.values():
            one.make(gathered)
            if self.log is not None:
                self.log.append(one)
        kept.clear()


@functools.lru_cache(1024)
def _bits(scale: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def _launch(kind: _Kind, is_aligned: bool, table: Any, left: int, right: int) -> None:
    """left, right: where the memory of factors that travel is."""
    sizes = _ROWS, _COLUMNS, _WARPS
    _again(kind, is_aligned, len(table), sizes)(table, left, right)


@functools.lru_cache(256)
def _again(kind: _Kind, is_aligned: bool, tensors: int, sizes: tuple[int, int, int]) -> Again:
    import triton.language as tl

    from fanin.torch._kernels import added

    experts, down, along = kind.extent
    rows, columns, warps = sizes
    types = (getattr(tl, _KINDS[one]) for one in (kind.dtype, kind.factors))
    same = (down, along, *kind.steps, *types, kind.rank, kind.is_rounded, is_aligned, rows, columns)
    grid = -(-down // rows) * -(-along // columns), experts, tensors
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
    return Again(added, grid, kind.device, same, **options)


# ----------------------------------------------------------- steps that differ in contents alone
# Python takes longer for a tensor than a GPU. So what was asked for tensor by tensor is kept: which
# factors were gathered, and what was launched. A later step looks at everything whose change the
# first one would find, without Python for each tensor, and does the same again.
#
# ``Merge.repeat`` begins a :class:`Step`, into whose events groups, launches and calls are written.
# ``Merge.finish`` makes a :class:`Steady` of it if the kernel has made all. The next
# ``Merge.repeat`` asks whether it ``stands``, and replays it: nothing but the memory of what was
# gathered is new. States are compared as objects, as ``Merge.look`` makes new ones of what has
# changed.


_merged, _disabled = attrgetter("merged_adapters"), attrgetter("disable_adapters")
_active, _scaling = attrgetter("active_adapters"), attrgetter("scaling")
_chosen = attrgetter("_active_adapter")
"""What PEFT makes active_adapters of: a name or a list. A property takes Python longer."""


class Step:
    """What a step is made of."""

    def __init__(self, states: list[State], adapter: str, others: list[Any]) -> None:
        """others: PEFT's layers that the adapter does not touch."""
        self.states, self.adapter, self.others = states, adapter, others
        #: What was gathered, launched and called, in that order.
        self.events: list[Group | Launch | Callable[[], None]] = []
        self.bases: list[Place] = []
        self.factors: list[Place] = []
        #: PEFT's layers that are merged.
        self.layers: list[Any] = []

    def note(self, base: Place, layers: Iterable[Any]) -> None:
        """The kernel has added *layers* to the tensor at *base*."""
        self.bases.append(base)
        for one in layers:
            self.layers.append(one.layer)
            self.factors += one.places.values()

    @property
    def is_whole(self) -> bool:
        """Whether the kernel has made all: else the rest would stay as it was."""
        return len(self.bases) == len(self.states)


class Steady:
    """A step that can be repeated."""

    def __init__(self, step: Step, sums: Sums) -> None:
        self._step = step
        groups = [one for one in step.events if isinstance(one, Group)]
        #: Groups as late as they are needed: GPUs begin sooner, and hold less.
        self._events = _late(step.events)
        self._moves = {group: group.moves() for group in groups}
        gathered = [asked.place for one in groups for asked in one.asked]
        places = dict.fromkeys([*step.bases, *step.factors, *gathered])
        lies = [lies_now(*place) for place in places]
        alike = [(False, [one for one in lies if one.spec is None])]
        alike.append((True, [one for one in lies if one.spec is not None]))
        self._columns = [Columns(some, how, PARAMETER, False) for how, some in alike if some]
        self._is_tf32 = sums.is_tf32
        has_chosen = all(hasattr(one, "_active_adapter") for one in step.layers)
        self._active = _chosen if has_chosen else _active
        self._actives = copy.deepcopy(list(map(self._active, step.layers)))
        self._scales = self._scales_now()
        #: The last launch that reads what was gathered so, after which it is freed.
        self._last = {
            group: at
            for at, event in enumerate(self._events)
            if isinstance(event, Launch)
            for group in event.groups
        }

    def _scales_now(self) -> list[float]:
        return [one[self._step.adapter] for one in map(_scaling, self._step.layers)]

    def stands(self, states: list[State]) -> bool:
        """Whether nothing but contents has changed. *states*: of what is to be computed."""
        step = self._step
        return (
            len(states) == len(step.states)
            and all(map(is_, states, step.states))
            and not any(map(_merged, step.others))
            and not any(map(_merged, step.layers))
            and not any(map(_disabled, step.layers))
            and list(map(self._active, step.layers)) == self._actives
            and self._scales_now() == self._scales
            and is_tf32() == self._is_tf32
            and all(one.stand() for one in self._columns)
        )

    def repeat(self) -> None:
        """For callers under torch.no_grad(). All is gathered also if a launch raises, as other
        ranks wait for it."""
        gathered: dict[Any, Any] = {}
        failed: Exception | None = None
        for at, event in enumerate(self._events):
            try:
                if isinstance(event, Group):
                    gathered[event] = event.gather(self._moves[event])
                elif isinstance(event, Launch):
                    event.make(gathered)
                elif failed is None:
                    event()
            except Exception as error:
                failed = failed or error
            for group in [one for one in gathered if self._last.get(one, -1) <= at]:
                del gathered[group]
        if failed is not None:
            raise failed


def _late(events: list[Any]) -> list[Any]:
    """The same events, each group right before the first launch of it. Their order stays among
    groups, as other ranks have it, and among the others."""
    groups = [one for one in events if isinstance(one, Group)]
    out: list[Any] = []
    for event in events:
        if isinstance(event, Group):
            continue
        if isinstance(event, Launch):
            while not {*out} >= {*event.groups} - {None}:
                out.append(groups.pop(0))
        out.append(event)
    return out + groups
