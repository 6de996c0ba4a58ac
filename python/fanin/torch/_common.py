# SPDX-License-Identifier: Apache-2.0
"""Which boxes of a run several ranks hold, told by the ranks when they publish it first.

Each rank adds and removes an adapter's runs by itself, so no rank knows from the start which ranks
hold a run. The ranks tell each other through torch.distributed's store: at the run's first publish
and when the boxes have changed.
"""

from __future__ import annotations

import base64
import json
import secrets
import zlib
from collections.abc import Iterable
from typing import Any

from fanin._cover import Parts
from fanin._tensors import Shard
from fanin.errors import StateError
from fanin.torch._replicas import At, Mailbox, Replicas, Values, refusal
from fanin.torch._union import Replicated, Table, Told, compress, entry_of, ranks_text, replicated


class Common:
    """One run's boxes that other ranks hold too, and the proof that they hold the same."""

    def __init__(
        self, store: Any, prefix: str, publication: str, rank: int, ranks: tuple[int, ...]
    ) -> None:
        """store: of torch.distributed; prefix: the same on all ranks, and no other server's;
        ranks: all that publish runs."""
        self._store = store
        self._publication = publication
        self._rank = rank
        self._ranks = ranks
        self._mailbox = Mailbox(
            store, f"{prefix}/{publication}", rank, ranks, f"agree on the tensors of {publication}"
        )
        self._table: Table = {}
        self._replicas: Replicas | None = None
        """None: the ranks have to tell each other."""

    def tell(self, shards: Iterable[Shard], removed: Iterable[str] = ()) -> None:
        """This rank publishes *shards*, some of them anew, and *removed* no more."""
        for shard in shards:
            known, now = self._table.get(shard.name), entry_of(shard)
            if known is None or known[1:] != now[1:]:  # also where this rank's part stays
                self._replicas = None
            self._table[shard.name] = now
        for name in removed:
            del self._table[name]
            self._replicas = None

    def check(self, at: At, values: Values, whole: bool = False) -> None:
        """As :meth:`Replicas.check`; at the first publish, and when the boxes have changed, it
        waits for all ranks that publish runs."""
        self._mailbox.take_back()
        if self._replicas is None:
            self._replicas = self._met(at)
        self._replicas.check(at, values, whole)

    def fail(self, message: str, at: At) -> None:
        """As :meth:`Replicas.fail`."""
        if self._replicas is not None:
            self._replicas.fail(message, at)
        self._mailbox.fail(message, at)

    def close(self) -> None:
        """The run is removed on this rank."""
        self._mailbox.take_back()

    def _met(self, at: At) -> Replicas:
        told, text = compress(self._table)
        found = [told.digest.hex(), told.geometries, base64.b85encode(text).decode()]
        verdict = self._mailbox.exchange(json.dumps(found).encode(), at, _united)
        kind, _, answer = verdict.partition(b" ")
        if kind == b"absent":
            absent = json.loads(answer)
            error = _absent(absent, self._publication, at[0])
            self._mailbox.fail(error.message, at, absent)
            raise error
        if kind != b"told":
            raise refusal(kind, json.loads(answer), self._publication, at[0])
        token, boxes = _replicated(answer, self._rank)
        return Replicas(self._store, f"fanin/{token}", self._publication, self._rank, boxes)


def _united(texts: dict[int, bytes]) -> bytes:
    """What every rank told, the tensors of those that hold alike once; and a new token."""
    tables: dict[str, str] = {}
    everyone = []
    for rank, one in texts.items():
        digest, geometries, text = json.loads(one)
        tables[digest] = text
        everyone.append((rank, digest, geometries))
    told = json.dumps([secrets.token_hex(8), everyone, tables], separators=(",", ":"))
    return b"told " + zlib.compress(told.encode(), 1)


def _replicated(answer: bytes, rank: int) -> tuple[str, list[Replicated]]:
    token, everyone, tables = json.loads(zlib.decompress(answer))
    nothing, no_text = compress({})
    told = [nothing] * (max(rank for rank, *_ in everyone) + 1)
    for at, digest, geometries in everyone:
        told[at] = Told(bytes.fromhex(digest), tuple(_parts(one) for one in geometries))
    texts = {bytes.fromhex(digest): base64.b85decode(text) for digest, text in tables.items()}
    return token, replicated(told, {**texts, nothing.digest: no_text}, rank)


def _parts(told: list[list[list[int]]]) -> Parts:
    return tuple((tuple(offset), tuple(extent)) for offset, extent in told)


def _absent(ranks: list[int], publication: str, step: int) -> StateError:
    return StateError.make(
        f"{ranks_text(ranks)} did not come to publish step {step} of {publication}, at whose first "
        "publish, and when its tensors have changed, the ranks tell each other what they hold. The "
        "step is not published",
        "add the run, change its tensors and publish it on every rank alike; give group= the ranks "
        "that do where others have no part in it",
        key=publication,
        rank=ranks[0],
    )
