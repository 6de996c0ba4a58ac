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

import functools
import logging
import struct
from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from fanin.torch._factors import Found, Group, Place
from fanin.torch._state import Columns, State, lies_now
from fanin.torch._tree import PARAMETER

_log = logging.getLogger("fanin.torch")
_ROWS, _COLUMNS, _WARPS = 64, 128, 4
_ALIGNMENT = 16
_FEW, _HELD = 64 << 20, 24 << 20
"""Bytes of results that wait for a step's first launch, as a GPU is not to wait for all that Python
prepares; each later one takes _MORE times as much as those before it. And bytes of factors that
wait, as what was gathered is freed behind the launch."""
_MORE = 7
_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_proven: dict[Hashable, bool] = {}
_kinds: dict[Any, Any] = {}
_is_told = False


Row = tuple[int, ...]
"""Addresses of base, result, left and right, and the bits of the scale."""


class _Side(NamedTuple):
    """Where one of the products' two sides lies in a factor: [experts, rank, rows or columns]."""

    which: str
    size: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int
    width: int
    """Bytes of an element."""
    is_copied: bool
    """Its neighbours are too far from each other: it is copied first."""

    def place(self, memory: Any, first: int, kept: list[Any]) -> int:
        """Its address, of a factor that begins there. kept: gets what has to stay until the
        launch."""
        first += self.offset
        if self.is_copied:
            first += memory.storage_offset()
            memory, first = memory.as_strided(self.size, self.steps, first).contiguous(), 0
        kept.append(memory)
        return int(memory.data_ptr()) + first * self.width


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
    sides: tuple[_Side, _Side]
    size: int
    """Bytes of the result."""
    held: int
    """Bytes of factors that were gathered and of copies."""


def planned(
    base: Any, factors: dict[str, Any], sides: dict[str, Any], is_rounded: bool, extent: Any
) -> Plan:
    """Of ``base + scale * left.T @ right``.

    base: of [experts, rows, columns], which is *extent*, or of the last two. sides: the left one
    and the right one as views of the *factors*, under whose names they are. is_rounded: what is
    added, to the base's type, before.
    """
    found = []
    for which, side in sides.items():
        offset = side.storage_offset() - factors[which].storage_offset()
        is_copied = 1 not in side.stride()[1:]  # or it lies expert by expert in the last dimension
        width = side.element_size()
        found.append(_Side(which, tuple(side.shape), side.stride(), offset, width, is_copied))
    left, right = found
    experts, rows, columns = extent
    steps = base.view(extent).stride()
    steps += (rows * columns, columns)
    for side in found:
        _, rank, length = side.size
        steps += (rank * length, length, 1) if side.is_copied else side.steps
    some = factors[left.which]
    size = base.numel() * base.element_size()
    held = sum(
        one.numel() * one.element_size() * (side.is_copied + (type(one) is torch.Tensor))
        for side, one in ((side, factors[side.which]) for side in found)
    )
    kind = _Kind(base.device, base.dtype, some.dtype, left.size[1], is_rounded, extent, steps)
    kind = _kinds.setdefault(kind, kind)  # one object, which is found sooner than an equal one
    return Plan(kind, (left, right), size, held)


def can_fuse(base: Any, factors: dict[str, Any]) -> bool:
    """Whether the kernel is for tensors of these types and places."""
    first = factors["A"]
    if not base.is_cuda or base.dtype not in _KINDS or first.dtype not in _KINDS:
        return False
    if torch.cuda.get_device_capability(base.device) < (8, 0):
        return False
    if first.dtype is torch.float32 and is_tf32():
        _tell_tf32()
        return False
    return all(
        one.dtype is first.dtype and one.device == base.device and one.is_contiguous()
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


class Launch(NamedTuple):
    """Sums of one kind, to be made again while only contents change."""

    kind: _Kind
    which: tuple[bool, Hashable, int]
    """Whether all addresses are aligned; whose step it is, and bytes of results that it has
    launched before."""
    rows: list[Row]
    moving: list[tuple[int, list[tuple[_Side, Any, int]]]]
    """Rows whose factors are gathered or copied at each step: of each its two sides, whose memory
    it is (a parameter, or the :class:`Way` by which it was gathered), and where they begin."""


class Sums:
    """Sums that wait for a launch."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, bool], tuple[_Kind, list[Row], list[Any]]] = {}
        self._kept: list[Any] = []
        self._bytes = self._held = self._launched = 0
        #: As it is in this step: asked once, as it takes longer than a sum.
        self.is_tf32 = is_tf32()
        self._tables: dict[Hashable, tuple[list[Row], Any]] = {}
        #: Tells one's steps from those of others.
        self.whose: Hashable = None
        #: Gets a :class:`Launch` for each, unless it is None.
        self.log: list[Any] | None = None

    def add(self, plan: Plan, factors: dict[str, Found], base: Any, out: Any, scale: float) -> None:
        """*out*, which is contiguous, is computed behind the next :meth:`launch`, or before it."""
        kept = self._kept
        kept += (base, out)
        one, other = ((side, factors[side.which]) for side in plan.sides)
        left, right = (side.place(here.memory, here.first, kept) for side, here in (one, other))
        source, target = base.data_ptr(), out.data_ptr()
        which = id(plan.kind), (source | target | left | right) % _ALIGNMENT == 0
        if which not in self._waiting:
            self._waiting[which] = plan.kind, [], []
        _, rows, moving = self._waiting[which]
        if self.log is not None and any(_moves(*pair) for pair in (one, other)):
            sides = [(side, here.whose, here.first) for side, here in (one, other)]
            moving.append((len(rows), sides))
        rows.append((source, target, left, right, _bits(scale)))
        self._bytes += plan.size
        self._held += plan.held
        if self._bytes > max(_FEW, _MORE * self._launched) or self._held > _HELD:
            self.launch()

    def launch(self) -> None:
        """On the current streams, all that waits."""
        waiting, kept, launched = self._waiting, self._kept, self._launched
        self._launched += self._bytes
        self._waiting, self._kept, self._bytes, self._held = {}, [], 0, 0
        for (_, is_aligned), (kind, rows, moving) in waiting.items():
            which = is_aligned, self.whose, launched
            _launch(kind, is_aligned, self._table(kind, which, rows))
            if self.log is not None:
                self.log.append(Launch(kind, which, rows, moving))
        kept.clear()

    def repeat(self, one: Launch, gathered: dict[Any, Any]) -> None:
        """Makes the sums of a launch of before, on the current stream. gathered: memory by ways."""
        rows, together = one.rows, 0
        kept: list[Any] = []
        if one.moving:
            rows = list(rows)
        for at, sides in one.moving:
            left, right = [
                side.place(gathered.get(whose, whose), first, kept) for side, whose, first in sides
            ]
            source, target, _, _, scale = rows[at]
            rows[at] = source, target, left, right, scale
            together |= left | right
        is_aligned = one.which[0] and together % _ALIGNMENT == 0
        _launch(one.kind, is_aligned, self._table(one.kind, one.which, rows))

    def _table(self, kind: _Kind, which: Hashable, rows: list[Row]) -> Any:
        """On the device: that of the step before, where nothing has moved."""
        device = kind.device
        is_cuda = device.type == "cuda"
        # Nothing waits for the upload but the stream that it is on.
        stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
        key = id(kind), which, stream
        known = self._tables.get(key)
        if known is None or known[0] != rows:
            table = torch.tensor(rows, pin_memory=is_cuda)
            known = self._tables[key] = rows, table.to(device, non_blocking=True)
        return known[1]

    def finish(self) -> None:
        """The step's last launch."""
        try:
            self.launch()
        finally:
            self._launched = 0


def _moves(side: _Side, factor: Found) -> bool:
    """Whether its address is another one at each step."""
    return side.is_copied or factor.is_gathered


@functools.lru_cache(1024)
def _bits(scale: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def _launch(kind: _Kind, is_aligned: bool, table: Any) -> None:
    import triton.language as tl

    from fanin.torch._kernels import added

    experts, down, along = kind.extent
    tiles = -(-down // _ROWS) * -(-along // _COLUMNS)
    with torch.cuda.device(kind.device if kind.device.type == "cuda" else -1):
        added[(tiles, experts, len(table))](
            *(table, down, along, *kind.steps),
            KIND=getattr(tl, _KINDS[kind.dtype]),
            FACTORS=getattr(tl, _KINDS[kind.factors]),
            RANK=kind.rank,
            ROUNDED=kind.is_rounded,
            ALIGNED=is_aligned,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
            num_stages=1,
            enable_fp_fusion=False,
        )


# ----------------------------------------------------------- steps that differ in contents alone
# Python takes longer for a tensor than a GPU. So what was asked for tensor by tensor is kept: which
# factors were gathered, and what was launched. A later step looks at everything whose change the
# first one would find, without Python for each tensor, and does the same again.
#
# ``Merge.repeat`` begins a :class:`Step`, into whose events groups, launches and calls are written.
# ``Merge.finish`` makes a :class:`Steady` of it if the kernel has made all. The next
# ``Merge.repeat`` asks whether it ``stands``, and replays it: only rows that are moving get new
# addresses. States are compared as objects, as ``Merge.look`` makes new ones of what has changed.


_merged, _disabled = attrgetter("merged_adapters"), attrgetter("disable_adapters")
_active, _scaling = attrgetter("active_adapters"), attrgetter("scaling")


class Step:
    """What a step is made of."""

    def __init__(
        self, whose: Hashable, states: list[State], adapter: str, others: list[Any]
    ) -> None:
        """others: PEFT's layers that the adapter does not touch."""
        self.whose, self.states, self.adapter, self.others = whose, states, adapter, others
        #: What was gathered, launched and called, in that order: groups of factors, launches.
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
        self._step, self._sums = step, sums
        gathered = [place for one in step.events if isinstance(one, Group) for place in one.places]
        places = dict.fromkeys([*step.bases, *step.factors, *gathered])
        lies = [lies_now(*place) for place in places]
        alike = [(False, [one for one in lies if one.spec is None])]
        alike.append((True, [one for one in lies if one.spec is not None]))
        self._columns = [Columns(some, how, PARAMETER, False) for how, some in alike if some]
        self._is_tf32 = sums.is_tf32
        self._actives = [[step.adapter]] * len(step.layers)
        self._scales = self._scales_now()
        #: The last launch that reads what was gathered so, after which it is freed.
        self._last = {
            whose: at
            for at, event in enumerate(step.events)
            if isinstance(event, Launch)
            for _, sides in event.moving
            for _, whose, _ in sides
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
            and list(map(_active, step.layers)) == self._actives
            and self._scales_now() == self._scales
            and is_tf32() == self._is_tf32
            and all(one.stand() for one in self._columns)
        )

    def repeat(self) -> None:
        """For callers under torch.no_grad(). All is gathered also if a launch raises, as other
        ranks wait for it."""
        gathered: dict[Any, Any] = {}
        failed: Exception | None = None
        for at, event in enumerate(self._step.events):
            try:
                if isinstance(event, Group):
                    way, memory = event.gather()
                    if way in self._last:
                        gathered[way] = memory
                elif isinstance(event, Launch):
                    self._sums.repeat(event, gathered)
                    for way in [one for one in gathered if self._last[one] <= at]:
                        del gathered[way]
                elif failed is None:
                    event()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
