# SPDX-License-Identifier: Apache-2.0
"""Parts of an engine's model that nobody trains: they keep what the engine has loaded."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fanin.errors import RequestError, StateError, first_of

if TYPE_CHECKING:
    from fanin.mapping._record import Recording


KEEP = 'init with {"keep": ["<pattern>"]} for what nobody trains, which then stays as it is'


def check_patterns(what: str, value: Any, key: str) -> tuple[str, ...]:
    """A list of patterns of names. Raises RequestError, naming it."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise RequestError.make(
            f"{what} is {value!r}, not a list of patterns", 'give ["visual.*"]', key=key
        )
    return tuple(value)


def kept_paths(model: Any, patterns: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Paths of the model's parameters and buffers that the patterns name, and unused patterns.

    The paths have all names of a tied one. A pattern may be unused because another pipeline stage
    has the parameter.
    """
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    found: set[int] = set()
    idle: set[str] = set()
    for pattern in patterns:
        named = {id(tensor) for path, tensor in tensors if fnmatchcase(path, pattern)}
        found |= named
        if not named:
            idle.add(pattern)
    return frozenset(path for path, tensor in tensors if id(tensor) in found), frozenset(idle)


def refuse_idle(patterns: Iterable[str]) -> None:
    """Raises RequestError for patterns that name nothing, in no part of the model."""
    for pattern in sorted(patterns):
        raise RequestError.make(
            f"keep names '{pattern}', and the model has no such parameter",
            "keep the engine's own names of what nobody publishes",
            key="keep",
        )


def refuse_torn(kept: frozenset[str], intact: frozenset[str] | None, dirty: str) -> None:
    """Raises StateError if an update that has failed may have written what is to be kept.

    intact: what the last update that wrote has kept, None: none has written. dirty: why the weights
    are not whole, "" if they are.
    """
    if dirty and intact is not None and (gone := sorted(kept - intact)):
        raise StateError.make(
            f"keep names '{gone[0]}', which an update may have written in part: {dirty}",
            "load the checkpoint from disk first, or update once from a trainer that publishes it",
            key="keep",
        )


def refuse_published(recording: Recording, kept: frozenset[str]) -> None:
    """Raises RequestError if something that is published goes into what is kept."""
    names = recording.into(kept)
    if names:
        raise RequestError.make(
            f"keep names what {first_of(map(repr, names), 1)} of the trainer fills",
            "keep what nobody publishes, and no more",
            key="keep",
        )
