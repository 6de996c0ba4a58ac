# SPDX-License-Identifier: Apache-2.0
"""Values that a run publishes and no parameter holds: who makes them, and where they lie.

A stage reads what the stage before it, or the model, has at each step. So a transform comes before
the rounding to fp8. Each stage has memory of its own, which readers read by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

ALIGNMENT = 256


class Want(NamedTuple):
    """A result that has no memory yet."""

    device: Any
    dtype: Any
    shape: tuple[int, ...]


class Stage(Protocol):
    """Makes values of one run. All ranks of the run have the same stages."""

    def fill(self) -> None:
        """Makes the values of the step that comes now, on the devices' current streams.

        All ranks come here together, behind each other's stages. A stage that fails takes part in
        its collectives first.
        """

    def miss(self) -> None:
        """This rank cannot publish: takes part in what the others' :meth:`fill` waits for."""

    def release(self) -> None:
        """Releases memory, of the model's and of the results: nobody reads them now."""


class Stages:
    """The stages of one run, in their order."""

    def __init__(
        self, stages: Iterable[Stage] = (), done: Callable[[], None] = lambda: None
    ) -> None:
        """done: called when all have filled."""
        self._stages = list(stages)
        self._done = done

    def fill(self) -> None:
        """Makes the values of all stages. If one fails, those behind it miss the step."""
        for at, stage in enumerate(self._stages):
            try:
                stage.fill()
            except Exception:
                for later in self._stages[at + 1 :]:
                    later.miss()
                raise
        self._done()

    def miss(self) -> None:
        """This rank has failed, and the others come to :meth:`fill`."""
        for stage in self._stages:
            stage.miss()

    def release(self) -> None:
        for stage in self._stages:
            stage.release()


def allocate(wanted: Sequence[Want], alignment: int = ALIGNMENT) -> list[Any]:
    """Tensors for results, uninitialised: those of a device lie in one allocation, in their order.

    alignment: bytes, of each tensor's first element; its dtype's size at least.
    """
    places: list[int] = []
    sizes: dict[Any, int] = {}
    for one in wanted:
        start = -(-sizes.get(one.device, 0) // alignment) * alignment
        places.append(start)
        sizes[one.device] = start + prod(one.shape) * one.dtype.itemsize
    arenas = {
        device: torch.empty(size, dtype=torch.uint8, device=device)
        for device, size in sizes.items()
    }
    return [
        arenas[one.device][start : start + prod(one.shape) * one.dtype.itemsize]
        .view(one.dtype)
        .view(one.shape)
        for one, start in zip(wanted, places, strict=True)
    ]
