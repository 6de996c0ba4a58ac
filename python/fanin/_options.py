# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments that a class hands on to fanin.Server or fanin.Client as they are."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

__all__ = ["handed_on", "names_of"]


def names_of(target: type[Any], *own: str) -> set[str]:
    """The keyword arguments of *target*'s constructor but *own*, which the caller gives itself."""
    parameters = inspect.signature(target).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} - set(own)


def handed_on(owner: str, target: type[Any], given: Mapping[str, Any], *own: str) -> dict[str, Any]:
    """*given*, each of which *target* takes and *owner* does not give it itself (*own*).

    Raises TypeError naming the first that is none, as Python does of functions, and what was meant
    if that is near. Does not block.
    """
    known = names_of(target, *own)
    unknown = sorted(given.keys() - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0.6)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{owner}() got an unexpected keyword argument {unknown[0]!r}{advice}")
    return dict(given)
