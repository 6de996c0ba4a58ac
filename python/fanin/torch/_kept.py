# SPDX-License-Identifier: Apache-2.0
"""Which weights a model computes with in F32 whatever its type is: those that transformers keeps
so, and buffers. A router's bias that is rounded sends most tokens to other experts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch

from fanin.torch._state import State
from fanin.torch._tree import BUFFER, Item, root_of

KEEP_F32 = "keep_f32"
"""The pair of a publication's metadata that names them, one a line."""

_ATTRIBUTES = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def kept_in_f32(
    model: Any, config: str | None, states: Iterable[tuple[Item, State]]
) -> frozenset[str]:
    """Published names of the F32 tensors among *states* that the model keeps in F32.

    config: JSON of its configuration. Where the model is no class of transformers (Megatron's),
    the class that the configuration names tells, if transformers is loaded.
    """
    patterns = _patterns(root_of(model), config)
    told = re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in sorted(patterns)))
    kept = set()
    for item, state in states:
        if state.dtype is not torch.float32:
            continue
        for part in state.slices:
            named = patterns and any(told.search(name) for name in (item.path, item.name, part.key))
            if named or item.kind == BUFFER:
                kept.add(part.key)
    return frozenset(kept)


def _patterns(root: Any, config: str | None) -> set[str]:
    owners = [*root.modules()]
    transformers = sys.modules.get("transformers")
    for name in json.loads(config or "{}").get("architectures") or ():
        owners.append(getattr(transformers, str(name), None))
    return {
        str(one)
        for owner in owners
        for attribute in _ATTRIBUTES
        for one in getattr(owner, attribute, None) or ()
        if one
    }
