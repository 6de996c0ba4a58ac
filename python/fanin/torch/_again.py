# SPDX-License-Identifier: Apache-2.0
"""Launches of a Triton kernel that differ in addresses alone, step after step.

Triton looks at each argument of each launch, to find the code that it has compiled for such ones.
That takes Python several times longer than the launch. So the code is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ALIGNMENT = 16
"""Triton has code of its own for numbers that are multiples of it."""


class Again:
    """A kernel whose arguments are a table, addresses, and what is the same at each launch."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], device: Any, same: tuple[Any, ...], **options: Any
    ) -> None:
        """same: all arguments behind the addresses, in their order. options: of Triton."""
        self._kernel, self._same, self._options = kernel, same, options
        self._grid = (*grid, 1, 1)[:3]
        self._device = device if device.type == "cuda" else -1
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, table: Any, *addresses: int) -> None:
        """On the current stream. addresses: 0, or of memory."""
        kind = tuple([(bool(one), one % _ALIGNMENT == 0) for one in addresses])
        arguments = (table, *addresses, *self._same)
        with torch.cuda.device(self._device):
            launch = self._compiled.get(kind)
            if launch is not None:
                try:
                    launch(*arguments)
                    return
                except TypeError:  # this Triton's launcher takes others
                    self._compiled[kind] = self._slowly
            code = self._kernel[self._grid](*arguments, **self._options)
            if code is not None and launch is None:  # the interpreter has none
                self._compiled[kind] = code[self._grid]

    def _slowly(self, *arguments: Any) -> None:
        self._kernel[self._grid](*arguments, **self._options)
