# SPDX-License-Identifier: Apache-2.0
"""What a model's loader does that a mapping cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fanin.errors import RequestError, first_of


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that keeps a module from being filled by boxes."""

    #: Path of the module, ``""`` if none is known.
    module: str
    #: Name of its parameter or buffer, ``""`` if none is known.
    leaf: str
    #: Name of the published tensor, ``""`` if none is known.
    tensor: str
    #: One sentence.
    why: str
    #: Elements of the parameter or buffer that nothing fills, not even what the loader computes:
    #: whoever loads it, they are not of the publication.
    unfilled: int = 0

    @property
    def path(self) -> str:
        """Of the parameter or buffer, or of the module."""
        return ".".join(part for part in (self.module, self.leaf) if part)

    def __str__(self) -> str:
        named = [f"tensor '{self.tensor}'"] if self.tensor else []
        named += [f"into '{self.path}'"] if self.path else []
        return f"{' '.join(named)}: {self.why}" if named else self.why


class MappingError(RequestError):
    """A model's weights cannot be filled by boxes of what is published."""

    default_code = -404

    #: All that was found.
    refusals: tuple[Refusal, ...]

    @classmethod
    def of(cls, refusals: Sequence[Refusal], remedy: str = "") -> MappingError:
        """One error for everything that was found; it names the first few."""
        shown = first_of(refusals, 5, "; ")
        error = cls.make(shown, remedy, key=refusals[0].tensor, phase="mapping")
        error.refusals = tuple(refusals)
        return error
