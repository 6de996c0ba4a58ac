# SPDX-License-Identifier: Apache-2.0
"""What a step's trainer holds, asked once for all engines of a sync that are to be proven."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fanin import check
from fanin.errors import FaninError

from .driver import Driver

__all__ = ["Trained", "compare"]


class Trained:
    """The digests of one step, which the first caller waits for. Any thread."""

    def __init__(self, ask: Callable[[], check.Ranks]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._found: check.Ranks | FaninError | None = None

    def ranks(self) -> check.Ranks:
        """Raises what asking the trainer has raised: NotFoundError if it has no digests."""
        with self._lock:
            if self._found is None:
                try:
                    self._found = self._ask()
                except FaninError as error:
                    self._found = error
        if isinstance(self._found, FaninError):
            raise self._found
        return self._found


def compare(driver: Driver, trained: Trained, run: str, step: int, deadline: float) -> check.Served:
    """What the engine of *driver* holds at *step*, beside what was trained.

    Raises as :func:`fanin.check.served`: HostError with ``report`` if something differs, whatever
    else if that cannot be found out.
    """
    ranks = trained.ranks()
    left = max(deadline - time.monotonic(), 0.0)
    held = check.held_by(driver.wire.url, run, step, left, driver.wire.api_key)
    return check.compared(step, ranks, *held)
