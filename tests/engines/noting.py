# SPDX-License-Identifier: Apache-2.0
"""When a worker of vLLM ran each step, and what held it up: `--worker-extension-cls`."""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path
from typing import Any

Step = tuple[float, float, float, int]


def run_delay() -> float:
    """Seconds that this thread has waited for a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class Notes:
    """Of each step: when it began (time.monotonic), and until then the seconds that its thread had
    waited for a processor and that Python's collector had run, and the pages that the process had
    waited for to come from files.

    Waiting counts within steps alone: between them vLLM's worker looks for the next one by
    sched_yield(), all of which the kernel counts as well."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._waited = self._collecting = self._collected = 0.0
        gc.callbacks.append(self._collect)

    def _collect(self, phase: str, info: Any) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collecting = now
        else:
            self._collected += now - self._collecting

    def run(self, step: Any) -> Any:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self.steps.append((time.monotonic(), self._waited, self._collected, faults))
        before = run_delay()
        try:
            return step()
        finally:
            self._waited += run_delay() - before


class Noting:
    """Methods for `collective_rpc`."""

    def start_noting(self) -> bool:
        notes = self.notes = Notes()
        execute = self.execute_model  # type: ignore[has-type]

        def noted(*args: Any, **options: Any) -> Any:
            return notes.run(lambda: execute(*args, **options))

        self.execute_model = noted
        return True

    def noted(self) -> list[Step]:
        """What was noted since the last call."""
        steps, self.notes.steps = self.notes.steps, []
        return steps
