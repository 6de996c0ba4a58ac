# SPDX-License-Identifier: Apache-2.0
"""Steps of merging that differ from the one before in contents alone.

Python takes longer for a tensor than a GPU. So what was asked for tensor by tensor is kept: which
factors were gathered, and what was launched. A later step looks at everything whose change the
first one would find, without Python for each tensor, and does the same again.

``Merge.repeat`` begins a :class:`Step`, into whose events groups, launches and calls are written.
``Merge.finish`` makes a :class:`Steady` of it if the kernel has made all. The next
``Merge.repeat`` asks whether it ``stands``, and replays it: only rows that are moving get new
addresses. States are compared as objects, as ``Merge.look`` makes new ones of what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter, is_
from typing import Any

from fanin.torch._factors import Group, Place
from fanin.torch._fused import Launch, Sums, is_tf32
from fanin.torch._state import Columns, State, lies_now
from fanin.torch._tree import PARAMETER

__all__ = ["Steady", "Step"]

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
