# SPDX-License-Identifier: Apache-2.0
"""Whether the machine stands: a thread on each CPU, which notices when it was not run for a second.

A virtual machine's CPU may lose its timer, or its host, for a minute. Who runs or sleeps there is
late then, which is not the fault of what is tested.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

BEAT = 0.2  # s
STALL = 10**9  # ns


class Pulse:
    def __init__(self) -> None:
        self._stalls: list[tuple[int, int]] = []
        self._last: dict[int, int] = {}

    def start(self) -> None:
        for cpu in os.sched_getaffinity(0):
            threading.Thread(target=self._watch, args=(cpu,), daemon=True).start()

    def _watch(self, cpu: int) -> None:
        with contextlib.suppress(OSError):  # it may have gone
            os.sched_setaffinity(0, {cpu})  # this thread's
        while True:
            self.beat(cpu, time.monotonic_ns())
            time.sleep(BEAT)

    def beat(self, cpu: int, now: int) -> None:
        last = self._last.get(cpu, now)
        if now - last > STALL:
            self._stalls.append((last, now))
        self._last[cpu] = now

    def stood(self, begin: int, end: int) -> int:
        """Nanoseconds between two times of time.monotonic_ns() in which a CPU stood."""
        under_way = [(last, end) for last in list(self._last.values()) if end - last > STALL]
        total, seen = 0, begin
        for first, last in sorted(self._stalls + under_way):
            first, last = max(first, seen), min(last, end)
            total += max(0, last - first)
            seen = max(seen, last)
        return total

    def told(self) -> str:
        longest = max((last - first for first, last in self._stalls), default=0)
        return f"the machine stood {len(self._stalls)} times, {longest // 10**6} ms at most"
