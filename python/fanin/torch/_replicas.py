# SPDX-License-Identifier: Apache-2.0
"""Proof that what several ranks publish as the same plain tensor is the same.

A DTensor says which part a rank holds. A plain tensor says nothing: of two ranks that hold
different rows of a matrix, which nobody told fanin, each seems to hold all of it, and workers would
read either. So the ranks compare samples of their values when each of them publishes first. They
leave them in the store of torch.distributed; who comes later finds the other's, and nobody waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fanin.errors import RequestError
from fanin.torch._names import Slice
from fanin.torch._union import Whole

_TENSORS = 128
"""Of which samples are taken: those whose names have the smallest digests."""
_VALUES = 8
"""In each sample."""
_PUBLISHES = 4
"""At which the others' samples are looked for."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RECORD = struct.Struct(f"<8s{_VALUES}f")

Samples = dict[bytes, tuple[float, ...]]
"""By a digest of name, type and shape."""


def peers_of(rank: int, size: int) -> list[int]:
    """The ranks with which one compares: at most some two for each divisor of the world's size.

    Groups of ranks that share a tensor are neighbours or a divisor of the world apart, and one
    pair in each group is enough.
    """
    steps = [step for step in range(1, size) if size % step == 0]
    return sorted({(rank + way * step) % size for step in steps for way in (1, -1)} - {rank})


def differ(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether samples are of unrelated values: replicas that have drifted apart are none."""
    apart = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
    return apart > 0.1 * sum(a * a + b * b for a, b in zip(first, second, strict=True))


class Replicas:
    """Compares one run's plain tensors with those of other ranks, at its first publishes."""

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        """store: of torch.distributed; prefix: the same on all ranks, and no other run's."""
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._waiting = peers_of(rank, size)
        self._left = _PUBLISHES
        self._mine: Samples | None = None
        self._names: dict[bytes, str] = {}

    def check(self, tensors: Iterator[tuple[Any, Slice]]) -> None:
        """To be called before each publish, with plain tensors and what is published of them.

        RequestError: another rank publishes other values as the same tensor.
        """
        if not self._waiting or self._left == 0:
            return
        self._left -= 1
        if self._mine is None:
            self._mine = self._sampled(tensors)
            if not self._mine:
                self._waiting = []
                return
            self._tell(self._mine)
        for peer, text in self._told().items():
            self._compare(peer, text)
            self._waiting.remove(peer)

    def _tell(self, samples: Samples) -> None:
        text = b"".join(_RECORD.pack(key, *values) for key, values in samples.items())
        with contextlib.suppress(RuntimeError):  # a store that is gone is no reason to stop
            self._store.set(f"{self._prefix}/{self._rank}", text)

    def _told(self) -> dict[int, bytes]:
        """What peers that are waited for have told by now."""
        keys = {peer: f"{self._prefix}/{peer}" for peer in self._waiting}
        with contextlib.suppress(RuntimeError):
            return {
                at: self._store.get(key) for at, key in keys.items() if self._store.check([key])
            }
        return {}

    def _sampled(self, tensors: Iterator[tuple[Any, Slice]]) -> Samples:
        keyed: dict[bytes, tuple[Any, Slice]] = {}
        for tensor, part in tensors:
            view = tensor[part.index] if part.index else tensor
            if view.dim() < 2 or view.numel() == 0 or view.dtype not in _FLOATS:
                continue  # vectors (norms, biases) are often alike
            told = f"{part.key}\0{view.dtype}\0{tuple(view.shape)}".encode()
            key = hashlib.blake2b(told, digest_size=8).digest()
            keyed[key] = (view, part)
        chosen = sorted(keyed)[:_TENSORS]
        self._names = {key: keyed[key][1].key for key in chosen}
        with torch.no_grad():
            found = [_values(keyed[key][0], key) for key in chosen]
            return {key: tuple(one.tolist()) for key, one in zip(chosen, found, strict=True)}

    def _compare(self, peer: int, text: bytes) -> None:
        assert self._mine is not None
        for key, *values in _RECORD.iter_unpack(text):
            if key in self._mine and differ(self._mine[key], values):
                raise RequestError.make(
                    f"'{self._names[key]}' has other values on rank {self._rank} than on rank "
                    f"{peer}, and both publish all of it as plain tensors: workers would take them "
                    "for replicas and read either",
                    "if the ranks hold parts, say by names= which (fanin.torch.Slice with at and "
                    "shape, fanin.torch.names.megatron or experts), or make them DTensors; if they "
                    "are replicas, give them the same values before the first publish",
                    key=self._names[key],
                    rank=peer,
                )


def _values(view: Any, key: bytes) -> Any:
    """Elements of *view* at places that follow from *key*."""
    drawn = struct.unpack(f"<{_VALUES}Q", hashlib.blake2b(key, digest_size=8 * _VALUES).digest())
    places: list[list[int]] = [[] for _ in view.shape]
    for number in drawn:
        for dim, size in enumerate(view.shape):
            number, at = divmod(number, size)
            places[dim].append(at)
    index = tuple(torch.tensor(one, device=view.device) for one in places)
    return view.detach()[index].float()


def replicas_of(ranks: Any, prefix: str) -> Replicas | None:
    """None: one rank alone, or a world without a store."""
    store = ranks.store()
    return None if store is None else Replicas(store, prefix, ranks.rank, ranks.size)


_ROWS = re.compile(r"(model\.)?(language_model\.)?(embed_tokens|lm_head)\.weight")


def refuse_parts(wholes: Sequence[Whole], metadata: Mapping[str, str], ranks: int) -> None:
    """RequestError: the configuration says that the vocabulary has several times as many rows."""
    config = json.loads(metadata.get("config", "{}"))
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not isinstance(rows, int):
        return
    for one in wholes:
        held = one.shape[0] if one.shape else 0
        if _ROWS.fullmatch(one.name) and 0 < held < rows and rows % held == 0:
            parts = rows // held
            if parts <= ranks:
                raise RequestError.make(
                    f"'{one.name}' has {held} rows on each of {ranks} ranks, and the configuration "
                    f"says vocab_size {rows}, {parts} times as many: a part is published as all",
                    "say by names= which rows a rank holds (fanin.torch.Slice with at and shape), "
                    "or make it a DTensor",
                    key=one.name,
                )
