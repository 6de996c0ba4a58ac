# SPDX-License-Identifier: Apache-2.0
"""When a worker of vLLM ran each step, and what it waited for: `--worker-extension-cls`."""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path
from typing import Any


def run_delay() -> float:
    """Seconds that this thread has waited for a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class Notes:
    """Of each step: when it began (time.monotonic), and until then the seconds that its thread had
    waited for a processor and that Python's collector had run, and the pages that the process had
    waited for to come from files."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float, int]] = []
        self._collecting = self._collected = 0.0
        gc.callbacks.append(self._collect)

    def _collect(self, phase: str, info: Any) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collecting = now
        else:
            self._collected += now - self._collecting

    def note(self) -> None:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self.steps.append((time.monotonic(), run_delay(), self._collected, faults))


class Noting:
    """Methods for `collective_rpc`."""

    def start_noting(self) -> bool:
        notes = self.notes = Notes()
        execute = self.execute_model  # type: ignore[has-type]

        def noted(*args: Any, **options: Any) -> Any:
            notes.note()
            return execute(*args, **options)

        self.execute_model = noted
        return True

    def noted(self) -> list[tuple[float, float, float, int]]:
        """What was noted since the last call."""
        steps, self.notes.steps = self.notes.steps, []
        return steps
