# SPDX-License-Identifier: Apache-2.0
"""Proof that the ranks that publish one box hold the same in it, bit for bit.

Workers read any of a box's replicas. Replicas may differ: Megatron's distributed optimizer leaves a
part of them to the next forward, and a plain tensor does not say that it is a part of a larger one.
So at each publish the ranks of a box digest their memory, and the first of them compares. A step
is published by all of them or by none. The first publish digests everything, later ones a sample
that moves on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

from fanin._cover import Part
from fanin._digest import box_digests
from fanin.errors import RequestError, StateError
from fanin.torch._union import Replicated, Whole, ranks_text

_log = logging.getLogger("fanin.torch")

_WAIT = 600.0
"""Seconds that a rank waits for the others of a box: as long as NCCL's collectives do."""
_GRACE = 10.0
"""Seconds more for the answer of the rank that waits so long for the others."""
_TICK = 1.0
"""Seconds after which a rank that waits looks whether another one has failed."""
QUIET = 10.0
"""Seconds after which a rank that waits logs for whom."""
_SHARE = 0.01
"""Of the time between two publishes, that digests may take."""
_FIRST_STEP = 1.0
"""Seconds that are assumed between the first two publishes."""
_UNIT = 4 << 20
"""Bytes that are digested together, at most, unless a row is longer."""
_NOTHING = "-"
"""No rank leaves this."""
REFUSED = (-1, 0)
"""At which a rank fails that was called with a step that it cannot publish. Others believe it once
they have waited _GRACE: it may have been called once too often, and come yet."""

_PARTS = (
    "if the ranks hold parts, say by names= which (fanin.torch.Slice with at and shape, "
    "fanin.torch.names.megatron or experts), or make them DTensors. "
)
_LATE = (
    "complete the replicas before the step is published: with Megatron's distributed optimizer "
    "call start_param_sync(force_sync=True) of each model chunk inside updating(); then publish "
    "again"
)

Values = Callable[[str, Part], Any]
"""The memory of a box as a tensor."""
At = tuple[int, int]
"""A step that is to be published, and how often this rank has tried it before."""


class Unit(NamedTuple):
    """Rows of a box."""

    name: str
    part: Part
    first: int
    rows: int


@dataclass
class Told:
    """What a rank tells of a group's boxes."""

    step: int
    cursor: int
    """Where its sample begins."""
    count: int
    """Units in it."""
    wanted: int
    """Units that its next sample may have."""
    digests: tuple[int, ...]
    """Of all units together, or of each."""

    def packed(self) -> bytes:
        numbers = (self.step, self.cursor, self.count, self.wanted, *self.digests)
        return struct.pack(f"<{len(numbers)}Q", *numbers)

    @classmethod
    def unpacked(cls, text: bytes) -> Told:
        step, cursor, count, wanted, *digests = struct.unpack(f"<{len(text) // 8}Q", text)
        return cls(step, cursor, count, wanted, tuple(digests))


class Outdated(Exception):
    """A rank that is waited for wants to tell anew what it holds."""


class Mailbox:
    """What the ranks of a group leave for each other in torch.distributed's store."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        ranks: tuple[int, ...],
        purpose: str,
        is_outdated: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """purpose: what the ranks are to do, for the log.

        is_outdated: whether the group is another one at this step; asked while this rank waits.
        """
        self._store = store
        self._is_outdated = is_outdated
        self._purpose = purpose
        self._prefix = f"{prefix}/{blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
        self._rank = rank
        self._ranks = ranks
        self._at = (0, 0)
        self._has_failed = False

    def exchange(self, text: bytes, at: At, verdict: Callable[[dict[int, bytes]], bytes]) -> bytes:
        """The verdict of what all ranks leave, which the first of them makes.

        Or ``absent`` and the ranks that have not come, or ``failed``, the rank and its message, or
        ``outdated``.
        """
        with self.answering():
            word = self.leave(text, at)
            if self._ranks[0] == self._rank:
                self.judge(verdict)
            return self.verdict(word)

    def answering(self) -> contextlib.AbstractContextManager[None]:
        """StateError: the store does not answer."""
        return answering(self._purpose)

    def leave(self, text: bytes, at: At) -> str:
        """Tells this rank's part; returns the word under which the verdict will come."""
        self._at = at
        self.take_back()
        word = secrets.token_hex(8)
        self._store.set(self._part(self._rank), word.encode() + text)
        return word

    def fail(self, message: str, at: At, ranks: Sequence[int] = ()) -> None:
        """Tells the others, or these, that this rank publishes nothing now; takes its part back."""
        text = json.dumps([self._rank, message, at])
        self._remove(self._part(self._rank))
        if at == REFUSED and self._rank != self._ranks[0]:
            ranks = self._ranks[:1]  # who tells the others: all may have been refused
        with contextlib.suppress(RuntimeError):  # a store that is gone: so are they
            for rank in ranks or self._ranks:
                if rank != self._rank:
                    self._store.set(self._failure(rank), text)
            self._has_failed = True

    def take_back(self) -> None:
        """This rank comes again: the others need not know any more that it has failed."""
        if self._has_failed:
            self._has_failed = False
            with contextlib.suppress(RuntimeError):
                for rank in self._ranks:
                    told = self._peek(self._failure(rank))
                    if told and json.loads(told)[0] == self._rank:
                        self._remove(self._failure(rank))

    def judge(self, verdict: Callable[[dict[int, bytes]], bytes]) -> None:
        """For the first rank of the group: waits for all, and tells each the verdict of them."""
        keys = [self._part(rank) for rank in self._ranks]
        found = self._wait(keys, _WAIT, self._ranks)
        texts = {r: text for r in self._ranks if (text := self._peek(self._part(r)))}
        absent = [rank for rank in self._ranks if rank not in texts]
        if found == b"absent" or (absent and not found):  # one has taken its part back
            found = b"absent " + json.dumps(absent).encode()
        elif not found:
            found = verdict({rank: text[16:] for rank, text in texts.items()})
        for rank in texts:  # before anybody is told, who then may leave the next one
            self._remove(self._part(rank))
        for text in texts.values():
            self._store.set(f"{self._prefix}/{text[:16].decode()}", found)

    def verdict(self, word: str) -> bytes:
        """What the first rank of the group says."""
        key = f"{self._prefix}/{word}"
        found = self._wait([key], _WAIT + _GRACE, self._ranks[:1])
        if not found:
            found = bytes(self._store.get(key))
            self._remove(key)
            return found
        self._remove(self._part(self._rank))
        return f"absent [{self._ranks[0]}]".encode() if found == b"absent" else found

    def _part(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _failure(self, rank: int) -> str:
        """Where *rank* is told of one that has failed."""
        return f"{self._prefix}/failed/{rank}"

    def _peek(self, key: str) -> bytes:
        return peek(self._store, key)

    def _remove(self, key: str) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can
            self._store.delete_key(key)

    def _wait(self, keys: list[str], seconds: float, ranks: Sequence[int]) -> bytes:
        """Why the keys are not all there: ``failed`` and who has, ``outdated``, or ``absent``.

        ranks: those without which they are not, for the log.
        """

        def given_up(waited: float) -> bytes:
            text = self._peek(self._failure(self._rank))
            if text and self._believed(tuple(json.loads(text)[2]), waited):
                self._remove(self._failure(self._rank))
                return b"failed " + text
            return b"outdated" if self._is_outdated(self._at[0]) else b""

        return await_keys(self._store, keys, seconds, lambda: self._log_absent(ranks), given_up)

    def _believed(self, at: At, waited: float) -> bool:
        if at == REFUSED:
            return waited > _GRACE
        # Ranks that failed together did not wait: what they told is there at their next try.
        return at >= self._at

    def _log_absent(self, ranks: Sequence[int]) -> None:
        absent = [rank for rank in ranks if not self._peek(self._part(rank))]
        log_absent(self._rank, absent, self._purpose)


@contextlib.contextmanager
def answering(purpose: str, key: str = "") -> Iterator[None]:
    """StateError: the store does not answer. purpose: what the ranks are to do."""
    try:
        yield
    except RuntimeError as error:
        raise StateError.make(
            f"torch.distributed's store does not answer: {error}. The ranks must {purpose}, and "
            "tell each other through it that they do",
            "see why the process that keeps the store (MASTER_ADDR, mostly rank 0) has ended or"
            " stands still",
            key=key,
        ) from error


def log_absent(rank: int, absent: Sequence[int], purpose: str) -> None:
    """Says in the log for whom *rank* waits."""
    if absent:
        _log.warning(
            "fanin: rank %d waits for %s to %s, %.0f s more at most",
            *(rank, ranks_text(absent), purpose, _WAIT - QUIET),
        )


def peek(store: Any, key: str) -> bytes:
    """What is there now, or nothing: get() waits where another rank has removed the key."""
    found = bytes(store.compare_set(key, _NOTHING, _NOTHING))
    return b"" if found == _NOTHING.encode() else found


def await_keys(
    store: Any,
    keys: list[str],
    seconds: float,
    log_absent: Callable[[], None],
    given_up: Callable[[float], bytes] = lambda waited: b"",
) -> bytes:
    """Why the keys are not all there: ``absent``, or why it was given up meanwhile.

    log_absent: says in the log for whom it waits. given_up: of the seconds that it has waited.
    """
    began, is_quiet = time.monotonic(), True
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=_TICK))
        return b""
    while (waited := time.monotonic() - began) < seconds:
        if store.check(keys):  # a wait() in vain is two lines of PyTorch's log
            return b""
        if why := given_up(waited):
            return why
        if is_quiet and waited > QUIET:
            is_quiet = False
            log_absent()
        time.sleep(min(waited / 100, _TICK / 4))
    return b"absent"


class Group:
    """The boxes that the same ranks hold, and which of them are looked at next."""

    def __init__(self, boxes: Replicated, mailbox: Mailbox) -> None:
        self.ranks = boxes.ranks
        self.mailbox = mailbox
        self._boxes = boxes.boxes
        self._units: list[Unit] = []
        self._cursor, self._count = 0, 0
        #: Whether all of it is to be looked at.
        self.is_first = True

    def units(self, values: Values) -> list[Unit]:
        """The sample of this publish."""
        if not self._units:
            self._units = sorted(_units(self._boxes, values), key=_shuffled)
        if self.is_first:
            self._cursor, self._count = 0, len(self._units)
        twice = self._units + self._units
        return twice[self._cursor : self._cursor + self._count]

    def told(self, step: int, share: float, digests: Sequence[int]) -> Told:
        """share: of all units, that the next sample may have."""
        wanted = min(len(self._units), max(1, int(share * len(self._units))))
        return Told(step, self._cursor, self._count, wanted, tuple(digests))

    def go_on(self, count: int) -> None:
        """The sample was equal on all ranks; the next one has *count* units."""
        self._cursor = (self._cursor + self._count) % len(self._units)
        self._count = count
        self.is_first = False


class Replicas:
    """Compares one run's boxes with those of other ranks, before each publish."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        publication: str,
        rank: int,
        boxes: Sequence[Replicated],
        is_outdated: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """store: of torch.distributed; prefix: the same on all ranks, and no other run's.

        is_outdated: whether the ranks hold other boxes at this step.
        """
        self._publication = publication
        self._rank = rank
        purpose = f"publish {publication}"
        self._groups = [
            Group(one, Mailbox(store, prefix, rank, one.ranks, purpose, is_outdated))
            for one in boxes
        ]
        self._waiting = list(self._groups)
        """The groups that have no verdict of the publish that is under way, or comes next."""
        self._began = 0.0
        self._cost = 0.0
        """Seconds for everything."""

    def check(self, at: At, values: Values, whole: bool = False) -> None:
        """Waits for the other ranks of the boxes, ten minutes at most.

        whole: look at everything, and have the other ranks do so.

        RequestError: they hold something else. StateError: they publish another step, or have not
        come. Outdated: one of them wants to tell what it holds. Then none of them publishes the
        step, and the next check looks at everything.
        """
        if not self._groups:
            return
        for group in self._groups:
            group.is_first |= whole
        self._check(at, values)
        self._waiting = list(self._groups)

    def fail(self, message: str, at: At) -> None:
        """To be called when a check has failed, or what is to be checked is not there: the others
        need not wait for this rank."""
        for group in self._groups:
            group.is_first = True
        for group in self._waiting:
            group.mailbox.fail(message, at)
        self._waiting = list(self._groups)

    def _check(self, at: At, values: Values) -> None:
        began = time.monotonic()
        samples = [group.units(values) for group in self._groups]
        digests = iter(_digests([unit for sample in samples for unit in sample], values))
        mine = [[next(digests) for _ in sample] for sample in samples]
        if all(group.is_first for group in self._groups):
            self._cost = time.monotonic() - began
        step_time = began - self._began if self._began else _FIRST_STEP
        self._began = began
        share = _SHARE * step_time / max(self._cost, 1e-6)
        # All ranks take their groups in one order, so that no two wait for each other.
        for group, sample, found in zip(self._groups, samples, mine, strict=True):
            self._compare(group, at, share, sample, found, values)

    def _compare(
        self,
        group: Group,
        at: At,
        share: float,
        sample: list[Unit],
        found: list[int],
        values: Values,
    ) -> None:
        step = at[0]
        told = group.told(step, share, [_mixed(found)])
        verdict = _exchanged(group, at, told, _judge)
        if verdict == b"whole":  # a check has failed on some of the ranks since the last one
            group.is_first = True
            sample = group.units(values)
            found = _digests(sample, values)
            told = group.told(step, share, [_mixed(found)])
            verdict = _exchanged(group, at, told, _judge)
        if verdict == b"unequal":
            verdict = _exchanged(group, at, group.told(step, share, found), _odd)
        self._waiting.remove(group)
        kind, _, text = verdict.partition(b" ")
        if kind == b"equal":
            group.go_on(int(text))
            return
        if kind == b"outdated":
            raise Outdated
        details = json.loads(text or b"[]")
        if kind == b"odd":
            raise _odd_error(details, self._publication, group, sample, step)
        error = refusal(kind, details, self._publication, step)
        if kind == b"absent":  # who comes late need not wait for those that have given up
            group.mailbox.fail(error.message, at, details)
        raise error


def _exchanged(
    group: Group, at: At, told: Told, judge: Callable[[dict[int, Told]], bytes]
) -> bytes:
    def verdict(texts: dict[int, bytes]) -> bytes:
        return judge({rank: Told.unpacked(text) for rank, text in texts.items()})

    return group.mailbox.exchange(told.packed(), at, verdict)


def replicas_of(
    ranks: Any, token: str, publication: str, boxes: Sequence[Replicated]
) -> Replicas | None:
    """None: no box is another rank's too, or the world has no store.

    token: a word that all ranks have, and no other run.
    """
    store = ranks.store()
    if store is None or not boxes:
        return None
    return Replicas(store, f"fanin/{token}", publication, ranks.rank, boxes)


def _units(boxes: Sequence[tuple[str, Part]], values: Values) -> Iterator[Unit]:
    for name, part in boxes:
        rows = part[1][0] if part[1] else 1
        tensor = values(name, part)
        most = max(1, _UNIT * rows // (tensor.numel() * tensor.element_size()))
        for first in range(0, rows, most):
            yield Unit(name, part, first, min(most, rows - first))


def _shuffled(unit: Unit) -> bytes:
    """A place in an order that all ranks have, in which neighbours are of different tensors."""
    return blake2b(f"{unit.name}/{unit.part}/{unit.first}".encode(), digest_size=8).digest()


def _digests(units: Sequence[Unit], values: Values) -> list[int]:
    return box_digests(_read(unit, values) for unit in units)


def _read(unit: Unit, values: Values) -> tuple[Any, tuple[int, ...]]:
    tensor, (offset, extent) = values(unit.name, unit.part), unit.part
    if not extent:
        return tensor, ()
    rows = tensor[unit.first : unit.first + unit.rows]
    return rows, (offset[0] + unit.first, *offset[1:])


def _mixed(digests: Sequence[int]) -> int:
    """One digest of all, in their order."""
    packed = struct.pack(f"<{len(digests)}Q", *digests)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def _judge(told: dict[int, Told]) -> bytes:
    if len({one.step for one in told.values()}) > 1:
        return b"steps " + json.dumps([[rank, one.step] for rank, one in told.items()]).encode()
    if len({(one.cursor, one.count) for one in told.values()}) > 1:
        return b"whole"
    if len({one.digests for one in told.values()}) > 1:
        return b"unequal"
    return b"equal %d" % min(one.wanted for one in told.values())


def _odd(told: dict[int, Told]) -> bytes:
    """The first rank, another one that holds something else, and the units in which they differ."""
    first = min(told)
    for rank, one in told.items():
        pairs = zip(told[first].digests, one.digests, strict=True)
        if units := [i for i, (a, b) in enumerate(pairs) if a != b]:
            return b"odd " + json.dumps([first, rank, units[0], len(units)]).encode()
    return b"steps []"  # they were written meanwhile


def _odd_error(
    told: Any, publication: str, group: Group, sample: list[Unit], step: int
) -> RequestError:
    first, rank, unit, count = told
    name = sample[unit].name
    return RequestError.make(
        f"'{name}' of {publication} has other values on rank {first} than on rank {rank} at "
        f"step {step} ({count} of {len(sample)} parts that were compared differ), and both "
        "publish them: workers would read either. The step is not published",
        (_PARTS if group.is_first else "") + _LATE,
        key=name,
        rank=rank,
    )


def refusal(kind: bytes, told: Any, publication: str, step: int) -> StateError:
    """Why a mailbox's verdict is not the one that was waited for."""
    if kind == b"failed":
        rank, message, _ = told
        return StateError.make(
            f"rank {rank} does not publish step {step} of {publication}: {message}. Nor does this "
            "rank, which holds replicas of what it holds",
            "see that rank's error; then publish again on every rank",
            key=publication,
            rank=rank,
        )
    if kind == b"absent":
        return StateError.make(
            f"{ranks_text(told)} did not come to publish step {step} of {publication} within "
            f"{_WAIT:.0f} s: the replicas that it has in common with this rank are not compared, "
            "and the step is not published",
            "see what that rank does (py-spy dump --pid PID); publish on every rank, the same "
            "steps in the same order",
            key=publication,
            rank=told[0],
        )
    steps = ", ".join(f"rank {rank}: {at}" for rank, at in told[:8]) or "the values change"
    return StateError.make(
        f"the ranks that hold the same tensors of {publication} publish different steps ({steps})",
        "publish the same step on every rank, and write parameters inside updating()",
        key=publication,
    )


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
