# SPDX-License-Identifier: Apache-2.0
"""A model's modules and tensors as they are, to be put back."""

from __future__ import annotations

from typing import Any

import torch

_TABLES = ("_parameters", "_buffers", "_modules")


class _Kept:
    """One tensor: its memory and its attributes."""

    __slots__ = ("attributes", "data", "path", "tensor")

    def __init__(self, path: str, tensor: Any) -> None:
        self.path = path
        self.tensor = tensor
        self.data = tensor.detach() if type(tensor) is torch.Tensor else tensor.data
        self.attributes = dict(tensor.__dict__)

    def moved(self) -> bool:
        now, then = self.tensor, self.data
        return bool(
            now.untyped_storage()._cdata != then.untyped_storage()._cdata
            or now.storage_offset() != then.storage_offset()
            or now.shape != then.shape
            or now.stride() != then.stride()
            or now.dtype != then.dtype
        )


class ModelState:
    """Which modules, parameters, buffers and attributes a model has, and their memory.

    Not what the memory holds: who changes that has to keep it. Values of attributes are kept, not
    copied: a list that is changed in place stays changed.
    """

    def __init__(self, model: Any) -> None:
        self._modules: list[tuple[str, Any, dict[str, Any], dict[str, dict[str, Any]], set[str]]]
        self._modules = []
        self._tensors: list[_Kept] = []
        seen: set[int] = set()
        for path, module in model.named_modules():
            own = module.__dict__
            tables = {name: dict(own[name]) for name in _TABLES}
            self._modules.append(
                (path, module, dict(own), tables, set(own["_non_persistent_buffers_set"]))
            )
            for leaf, tensor in {**own["_parameters"], **own["_buffers"]}.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._tensors.append(_Kept(f"{path}.{leaf}" if path else leaf, tensor))

    def restore(self) -> list[str]:
        """Puts everything back. Returns paths of parameters and buffers that were replaced, or
        whose memory was. May be called again."""
        changed = []
        for path, module, own, tables, volatile in self._modules:
            for name in ("_parameters", "_buffers"):
                now, then = module.__dict__[name], tables[name]
                changed += [
                    f"{path}.{leaf}" if path else leaf
                    for leaf in {**then, **now}
                    if now.get(leaf) is not then.get(leaf)
                ]
            _put_back(module.__dict__, own)
            for name, table in tables.items():
                _put_back(own[name], table)
            own["_non_persistent_buffers_set"].clear()
            own["_non_persistent_buffers_set"].update(volatile)
        for kept in self._tensors:
            _put_back(kept.tensor.__dict__, kept.attributes)
            if kept.moved():
                changed.append(kept.path)
                kept.tensor.data = kept.data
        return list(dict.fromkeys(changed))


def _put_back(now: dict[str, Any], then: dict[str, Any]) -> None:
    same = len(now) == len(then) and all(
        a == b and now[a] is then[b] for a, b in zip(now, then, strict=True)
    )
    if not same:  # in the old order, too: modules are walked in it
        now.clear()
        now.update(then)
