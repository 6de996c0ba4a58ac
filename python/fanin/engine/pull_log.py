# SPDX-License-Identifier: Apache-2.0
"""One line in vLLM's log for each pull of an adapter: what, whence, how, and what took how long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fanin.engine.pulls import Adapter

_BURST = 20
_A_SECOND = 2.0
_SHOWN = 50e-6  # seconds; what took less is not named


def slowest(reports: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], int]:
    """The phases and the number of ranks of that one of workers' reports that took longest."""
    last = max(reports, key=lambda one: sum(one["phases"].values()))
    return dict(last["phases"]), int(last["ranks"])


def line_of(adapter: Adapter) -> str:
    """All that is known of a pull that is over, without a line's end.

    "rest" is what the pull's phases do not cover: waiting for the step, the plan, calls of workers.
    """
    rest = adapter.seconds - sum(adapter.phases.values())
    named = {**adapter.phases, "rest": rest} if adapter.phases else {}
    phases = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in named.items() if s >= _SHOWN)
    ranks = f"{adapter.ranks} ranks" if adapter.ranks else "ranks"
    return (
        f"adapter {adapter.name} pulled: run {adapter.run}, step {adapter.step},"
        f" {adapter.bytes} bytes in {1e3 * adapter.seconds:.1f} ms"
        + (f" ({phases})" if phases else "")
        + f" by {adapter.transport or '?'}"
        + (" (was here)" if adapter.reused else "")
        + f", into a {adapter.landing}"
        + (f" ({adapter.landing_why})" if adapter.landing_why else "")
        + f", from {ranks} of world {adapter.world} at {adapter.addresses[0]}"
        + (f", with {adapter.shown}" if adapter.shown else "")
    )


class PullLog:
    """Says so, at INFO: some at once and then two a second, the others at DEBUG. Any thread.

    clock: seconds that only grow.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._left, self._then, self._quiet = float(_BURST), clock(), 0

    def tell(self, adapter: Adapter) -> None:
        """The line of a pull that has brought *adapter*."""
        loud, quiet = self._may()
        if loud and quiet:
            self._log.info("fanin: %s; lines of %d pulls were left out", line_of(adapter), quiet)
        elif loud or self._log.isEnabledFor(logging.DEBUG):
            self._log.log(logging.INFO if loud else logging.DEBUG, "fanin: %s", line_of(adapter))

    def _may(self) -> tuple[bool, int]:
        """Whether the next line is at INFO, and then how many before it were not."""
        with self._lock:
            now = self._clock()
            self._left = min(self._left + _A_SECOND * (now - self._then), float(_BURST))
            self._then = now
            if self._left < 1:
                self._quiet += 1
                return False, 0
            self._left -= 1
            quiet, self._quiet = self._quiet, 0
            return True, quiet
