# SPDX-License-Identifier: Apache-2.0
"""Whether the machine stands, or starves one of the campaign's processes.

A CPU of a virtual machine may lose its timer, or its host, for a minute: a thread on each notices
when it was not run for a second. And a kernel that has too much to do may let a process wait for
minutes that wants to run, while others do. Both is not the fault of what is tested.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

BEAT = 0.2  # s
STALL = 10**9  # ns
LOOK = 1.0  # s between two looks at processes
LITTLE = 0.02  # s of CPU in a second, of a process that was ready before and after it


def state_of(pid: int) -> tuple[bool, float]:
    """Whether a thread of it runs, or would if it got a CPU; and the seconds that all have run."""
    ready, ran = False, 0
    with contextlib.suppress(OSError, IndexError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            ready = ready or ") R " in (task / "stat").read_text()
            ran += int((task / "schedstat").read_text().split()[0])
    return ready, ran / 1e9


class Pulse:
    def __init__(self) -> None:
        self._stalls: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._last: dict[int, int] = {}  # by CPU
        self._looks: dict[int, tuple[bool, float, int]] = {}  # of processes

    def start(self, processes: Callable[[], Iterable[int]]) -> None:
        for cpu in os.sched_getaffinity(0):
            threading.Thread(target=self._watch, args=(cpu,), daemon=True).start()
        threading.Thread(target=self._watch_all, args=(processes,), daemon=True).start()

    def _watch_all(self, processes: Callable[[], Iterable[int]]) -> None:
        while True:
            seen = {pid: state_of(pid) for pid in processes()}
            self.look(seen, time.monotonic_ns())
            time.sleep(LOOK)

    def look(self, seen: dict[int, tuple[bool, float]], now: int) -> None:
        """Where *seen* says what state_of() does of each process."""
        starved = []
        for pid, (ready, ran) in seen.items():
            was_ready, had_run, then = self._looks.get(pid, (False, 0.0, now))
            if ready and was_ready and ran - had_run < LITTLE * (now - then) / 1e9:
                starved.append(then)
        if starved:
            self._add(min(starved), now)
        self._looks = {pid: (*state, now) for pid, state in seen.items()}

    def _watch(self, cpu: int) -> None:
        with contextlib.suppress(OSError):  # it may have gone
            os.sched_setaffinity(0, {cpu})  # this thread's
        while True:
            self.beat(cpu, time.monotonic_ns())
            time.sleep(BEAT)

    def beat(self, cpu: int, now: int) -> None:
        last = self._last.get(cpu, now)
        if now - last > STALL:
            self._add(last, now)
        self._last[cpu] = now

    def _add(self, first: int, last: int) -> None:
        with self._lock:
            if self._stalls and self._stalls[-1][1] >= first:
                first = min(first, self._stalls.pop()[0])
            self._stalls.append((first, last))

    def stood(self, begin: int, end: int) -> int:
        """Nanoseconds between two times of time.monotonic_ns() in which it stood or starved."""
        under_way = [(last, end) for last in list(self._last.values()) if end - last > STALL]
        total, seen = 0, begin
        with self._lock:
            stalls = sorted(self._stalls + under_way)
        for first, last in stalls:
            first, last = max(first, seen), min(last, end)
            total += max(0, last - first)
            seen = max(seen, last)
        return total

    def told(self) -> str:
        """Since the beginning."""
        now = time.monotonic_ns()
        return f"the machine stood for {self.stood(0, now) // 10**9} s"
