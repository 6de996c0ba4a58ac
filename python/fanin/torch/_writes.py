# SPDX-License-Identifier: Apache-2.0
"""Writes of published tensors that PyTorch does not count by itself."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_Owner = TypeVar("_Owner")


_TensorsOf = Callable[[Any, Any], Iterable[Any]]
_lock = threading.Lock()
# Replaced as a whole, so that a step that goes through it meets no change.
_counted: tuple[tuple[weakref.ref[Any], _TensorsOf], ...] = ()


def count_steps(owner: _Owner, tensors_of: Callable[[_Owner, Any], Iterable[Any]]) -> None:
    """From now on each step of an optimizer counts as a write of what *owner* publishes.

    Fused optimizers write without raising a tensor's ``_version``. The hook lasts as long as
    *owner*, which it holds weakly. Any thread.

    Args:
        owner: the publisher.
        tensors_of: gives the tensors, each with a count, in which *owner* publishes a parameter's
            memory.
    """
    global _counted
    with _lock:
        there = (one for one in _counted if one[0]() is not None)
        _counted = (*there, (weakref.ref(owner), tensors_of))


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    for owner, tensors_of in _counted:
        server = owner()
        if server is None:
            continue
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    for tensor in tensors_of(server, param):
                        torch.autograd.graph.increment_version(tensor)


# Once, and never taken back: a step goes through PyTorch's hooks and fails if one comes or goes
# meanwhile, and an owner goes whenever the garbage collector finds it.
register_optimizer_step_post_hook(_stepped)
