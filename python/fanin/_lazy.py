# SPDX-License-Identifier: Apache-2.0
"""Names of a package whose modules are imported when the names are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of *package*. places: the module in it of each name."""

    def find(name: str) -> Any:
        if name in places:
            return getattr(import_module(f"{package}.{places[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
