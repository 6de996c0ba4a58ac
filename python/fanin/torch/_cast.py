# SPDX-License-Identifier: Apache-2.0
"""Which of the published tensors a snapshot converts. No torch in here."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import translate

from fanin._dtypes import NARROWED, torch_dtype
from fanin._quantization import SCALES, WEIGHT
from fanin._tensors import Shard
from fanin.errors import RequestError, first_of

Cast = str | Mapping[str, str | None]
"""A dtype for every F32 tensor, or by patterns of published names: the first that fits decides,
None leaves the tensor as it is, and so does no pattern that fits. All name the same dtype. What
the model keeps in F32 stays so, unless a pattern other than ``"*"`` fits it."""

_SCALES = tuple(WEIGHT + end for end in SCALES)
"""Ends of the names of what fp8 weights are multiplied by: nobody rounds that."""

_log = logging.getLogger("fanin.torch")


def _named(dtype: object) -> str:
    """safetensors' name of what snapshots can be converted to. RequestError: it is none."""
    name = torch_dtype(dtype) or str(dtype).upper()
    if name not in NARROWED:
        raise RequestError.make(f"cast is {dtype!r}", 'give "BF16" or "F16"', key="cast")
    return name


class Casting:
    """What ``cast=`` says."""

    def __init__(self, cast: Cast | None, snapshot: bool) -> None:
        """RequestError: it makes no sense."""
        given = dict(cast) if isinstance(cast, Mapping) else {"*": cast}
        told = {one: None if dtype is None else _named(dtype) for one, dtype in given.items()}
        dtypes = sorted({dtype for dtype in told.values() if dtype is not None})
        if len(dtypes) > 1 or (cast is not None and not dtypes):
            raise RequestError.make(
                f"cast names {' and '.join(dtypes) or 'no dtype'}",
                'give one for all: cast={"*.mlp.gate.weight": None, "*": "BF16"}',
            )
        #: What F32 is converted to, None: nothing is.
        self.dtype: str | None = dtypes[0] if dtypes else None
        if self.dtype is not None and not snapshot:
            raise RequestError.make(
                f"cast is {cast!r} without snapshot", "give snapshot=True as well"
            )
        self._patterns = [(one, re.compile(translate(one)), told[one]) for one in told]

    def keeps(self, name: str, kept: Collection[str] = ()) -> bool:
        """Whether the tensor of that name stays as it is; kept: names of what the model keeps."""
        if name.endswith(_SCALES):
            return True
        for text, pattern, dtype in self._patterns:
            if pattern.match(name):
                return dtype is None or (name in kept and not text.strip("*"))
        return True

    def believed(self, kept: Collection[str]) -> set[str]:
        """What the model keeps in F32 and a pattern rounds by name, which is logged."""
        rounded = {name for name in kept if self.dtype and not self.keeps(name, kept)}
        if rounded:
            _log.warning(
                "cast= rounds to %s what the model keeps in F32: %s. Leave its pattern out "
                "unless engines want it so",
                self.dtype,
                first_of(sorted(rounded)),
            )
        return rounded

    def marked(self, shards: Iterable[Shard], kept: Collection[str] = ()) -> list[Shard]:
        """The shards as the library is to be told of them."""
        return [
            replace(one, keep=True)
            if self.dtype is not None and one.dtype == "F32" and self.keeps(one.name, kept)
            else one
            for one in shards
        ]
