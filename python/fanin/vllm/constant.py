# SPDX-License-Identifier: Apache-2.0
"""Whether a piece of code, run again, can come to another result: which tensors it looks at."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Watch"]

# They write all of their first argument, and do not read it.
_OVERWRITE = frozenset({"aten::fill_", "aten::zero_", "aten::copy_"})
# What Python's numbers become.
_FROM_PYTHON = "aten::lift_fresh"


class Watch(TorchDispatchMode):
    """Watches code that runs within it, which may write to tensors that were there before.

    The flag :attr:`depends` says that the code has read such a tensor, or has made memory that it
    may have filled unseen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depends = False
        # Kept: the number of one that is gone would be another's.
        self._made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        read = tree_leaves((args[1:] if name in _OVERWRITE else args, kwargs))
        result = func(*args, **(kwargs or {}))
        if name != _FROM_PYTHON:
            tensors = [one for one in read if isinstance(one, torch.Tensor)]
            self.depends |= "empty" in name or any(id(t) not in self._made for t in tensors)
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if name not in _OVERWRITE:
            self._made.update((id(tensor), tensor) for tensor in made)
        return result
