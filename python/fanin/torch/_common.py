# SPDX-License-Identifier: Apache-2.0
"""Which boxes of a run several ranks hold, told by the ranks when they publish it first.

Each rank adds and removes an adapter's runs by itself, so no rank knows from the start which ranks
hold a run. The ranks tell each other through torch.distributed's store: at the run's first publish
and when a rank asks for it. A rank asks when its boxes have changed, when it removes the run, and
when it comes to tell. An ask holds from a step on, so that a rank that is ahead by a publish does
not disturb those that still compare the step before.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import zlib
from collections.abc import Iterable
from typing import Any

from fanin._cover import Parts
from fanin._tensors import Shard
from fanin.errors import StateError
from fanin.torch._replicas import At, Mailbox, Outdated, Replicas, Values, peek, refusal
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
        self._asks = f"{prefix}/{publication}/asks"
        self._table: Table = {}
        self._replicas: Replicas | None = None
        """None: the ranks have to tell each other."""
        self._token = ""
        """Of the last ask before the ranks told each other."""
        self._step = -1
        """The last that this rank came to publish."""

    def tell(self, shards: Iterable[Shard], removed: Iterable[str] = ()) -> None:
        """This rank publishes *shards*, some of them anew, and *removed* no more."""
        for shard in shards:
            known, now = self._table.get(shard.name), entry_of(shard)
            if known is None or known[1:] != now[1:]:  # also where this rank's part stays
                self._change()
            self._table[shard.name] = now
        for name in removed:
            del self._table[name]
            self._change()

    def check(self, at: At, values: Values, whole: bool = False) -> None:
        """As :meth:`Replicas.check`; at the first publish, and when a rank asks for it, it waits
        for all ranks that publish runs."""
        self._step = at[0]
        self._mailbox.take_back()
        with self._mailbox.answering():
            if self._is_outdated(at[0]):
                self._replicas = None
        while True:
            try:
                if self._replicas is None:
                    self._replicas = self._met(at)
                self._replicas.check(at, values, whole)
                return
            except Outdated:
                self._replicas = None

    def fail(self, message: str, at: At) -> None:
        """As :meth:`Replicas.fail`."""
        if self._replicas is not None:
            self._replicas.fail(message, at)
        self._mailbox.fail(message, at)
        if self._replicas is None:  # the others may have met, and wait elsewhere
            self._ask(at[0])

    def close(self) -> None:
        """The run is removed on this rank."""
        self._mailbox.take_back()
        self._change()

    def _change(self) -> None:
        if self._replicas is not None:
            self._replicas = None
            self._ask(self._step + 1)

    def _ask(self, step: int) -> str:
        """Has the ranks tell each other again when they publish this step, or a later one."""
        token = secrets.token_hex(8)
        with contextlib.suppress(RuntimeError):  # a store that is gone: the next publish says so
            self._store.set(self._asks, f"{token} {step}")
        return token

    def _asked(self) -> tuple[str, int]:
        """The last ask and its step."""
        token, _, step = peek(self._store, self._asks).decode().partition(" ")
        return token, int(step or 0)

    def _is_outdated(self, step: int) -> bool:
        token, since = self._asked()
        return token != self._token and step >= since

    def _met(self, at: At) -> Replicas:
        told, text = compress(self._table)
        token = self._ask(at[0])
        found = [token, told.digest.hex(), told.geometries, base64.b85encode(text).decode()]
        verdict = self._mailbox.exchange(
            json.dumps(found).encode(), at, lambda texts: _united(texts, self._asked()[0])
        )
        kind, _, answer = verdict.partition(b" ")
        if kind == b"absent":
            absent = json.loads(answer)
            error = _absent(absent, self._publication, at[0])
            self._mailbox.fail(error.message, at, absent)
            raise error
        if kind == b"outdated":
            raise Outdated
        if kind != b"told":
            raise refusal(kind, json.loads(answer), self._publication, at[0])
        self._token, boxes = _replicated(answer, self._rank)
        prefix = f"fanin/{self._token}"
        return Replicas(
            self._store, prefix, self._publication, self._rank, boxes, self._is_outdated
        )


def _united(texts: dict[int, bytes], token: str) -> bytes:
    """What every rank told, the tensors of those that hold alike once; and the last ask's token.

    Or ``outdated``: a rank has told, did not hear the answer, and has asked again.
    """
    tables: dict[str, str] = {}
    everyone = []
    asks = set()
    for rank, one in texts.items():
        ask, digest, geometries, text = json.loads(one)
        asks.add(ask)
        tables[digest] = text
        everyone.append((rank, digest, geometries))
    if token not in asks:
        return b"outdated"
    told = json.dumps([token, everyone, tables], separators=(",", ":"))
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
