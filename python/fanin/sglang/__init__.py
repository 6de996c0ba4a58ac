# SPDX-License-Identifier: Apache-2.0
"""SGLang: adapters through a directory, whole models into the live parameters.

:class:`SGLangEngine` pulls an adapter and has SGLang load it by its own route. :func:`load` is a
custom weight loader: SGLang, started with ``--custom-weight-loader fanin.sglang.load``, calls it in
each of its scheduler processes when :mod:`fanin.sync` asks for a step of the whole model; the
plugin :mod:`fanin.sglang.guard` tells SGLang's callers what came of it. Importing this loads
neither SGLang nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .adapters import LoadedAdapter, SGLangEngine, check_adapter
from .request import LOADER, Request

__all__ = ["LOADER", "LoadedAdapter", "Request", "SGLangEngine", "check_adapter", "load"]


def load(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """What ``--custom-weight-loader`` names: see :func:`fanin.sglang.weights.load`."""
    from . import weights

    weights.load(model, named_tensors)
