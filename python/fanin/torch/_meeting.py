# SPDX-License-Identifier: Apache-2.0
"""All ranks of a run come to compute what a step publishes, or none of them publishes it.

They compute with collectives, in which the others would wait for a rank that has failed before.
So each tells through torch.distributed's store that it comes, or why it does not. No torch in here.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from fanin.errors import StateError
from fanin.torch._replicas import At, answering, await_keys, log_absent, peek
from fanin.torch._union import ranks_text

_WAIT = 600.0
"""Seconds that a rank waits for the others."""
_COME = "come"


class Meeting:
    """Where the ranks of one run meet. A rank asks the store five times, however many there are."""

    def __init__(self, store: Any, prefix: str, publication: str, rank: int, size: int) -> None:
        """prefix: the same on all ranks, and no other run's."""
        self._store = store
        self._prefix = prefix
        self._publication = publication
        self._rank, self._size = rank, size
        self._last = ""

    def come(self, at: At) -> None:
        """Waits for the other ranks, ten minutes at most.

        StateError: one of them has failed, or has not come.
        """
        key = self._key(at)
        purpose = f"compute {self._publication}"

        def tell() -> None:
            log_absent(self._rank, self._absent(key), purpose)

        with answering(purpose, self._publication):
            self._store.set(self._place(self._rank), key)
            if self._store.add(f"{key}/count", 1) == self._size:
                self._store.compare_set(key, "", _COME)
                self._forget()
            self._last = key
            if await_keys(self._store, [key], _WAIT, tell):
                absent = self._absent(key)
                raise self._error(
                    f"{ranks_text(absent)} did not come to compute step {at[0]} of "
                    f"{self._publication} within {_WAIT:.0f} s",
                    "see what that rank does (py-spy dump --pid PID); publish on every rank, the "
                    "same steps in the same order",
                    absent[0],
                )
            found = bytes(self._store.get(key)).decode()
        if found != _COME:
            rank, message = json.loads(found)
            raise self._error(
                f"rank {rank} does not publish step {at[0]} of {self._publication}: {message}. Nor "
                "does this rank, which computes it together with that one",
                "see that rank's error; then publish again on every rank",
                rank,
            )

    def fail(self, message: str, at: At) -> None:
        """This rank does not come. The others need not wait, unless all have met before."""
        with contextlib.suppress(RuntimeError):  # a store that is gone: so are they
            self._store.compare_set(self._key(at), "", json.dumps([self._rank, message]))

    def _key(self, at: At) -> str:
        return f"{self._prefix}/{at[0]}.{at[1]}"

    def _place(self, rank: int) -> str:
        return f"{self._prefix}/rank/{rank}"

    def _absent(self, key: str) -> list[int]:
        come = (peek(self._store, self._place(rank)).decode() for rank in range(self._size))
        return [rank for rank, at in enumerate(come) if at != key] or [self._rank]

    def _forget(self) -> None:
        """All have left the place where they met last."""
        for key in (self._last, f"{self._last}/count") if self._last else ():
            with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can
                self._store.delete_key(key)

    def _error(self, message: str, remedy: str, rank: int) -> StateError:
        return StateError.make(message, remedy, key=self._publication, rank=rank)
