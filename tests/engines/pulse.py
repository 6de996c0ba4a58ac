#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether the machine stood still: a process for each CPU that ought to run every two milliseconds.

It runs ahead of all others (SCHED_FIFO; without the right to that at the highest priority that
it may have), so that what it finds missing no process had: the host had taken the CPU. Run as a
program it prints when it was late, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from typing import Self

EVERY = 0.002
LATE = 0.002  # later than this is told


class Pulse:
    """The processes, from entering to leaving; then `stood` says when each CPU stood still."""

    def __init__(self) -> None:
        self.stood: list[tuple[float, float]] = []  # from, to: time.monotonic()

    def __enter__(self) -> Self:
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(cpu)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for cpu in sorted(os.sched_getaffinity(0))
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            told, _unused = process.communicate(timeout=60)
            self.stood += [(begun, ended) for begun, ended in map(json.loads, told.splitlines())]
        self.stood.sort()

    @property
    def longest(self) -> float:
        """Seconds."""
        return max((ended - begun for begun, ended in self.stood), default=0.0)

    def within(self, begun: float, ended: float) -> float:
        """The longest that a CPU stood still of this time, seconds."""
        parts = (min(b, ended) - max(a, begun) for a, b in self.stood)
        return max([0.0, *parts])


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)
    found = []
    last = time.monotonic()
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        now = time.monotonic()
        if now - last > EVERY + LATE:
            found.append((last, now))
        last = now
    for one in found:
        print(json.dumps(one))


if __name__ == "__main__":
    main()
