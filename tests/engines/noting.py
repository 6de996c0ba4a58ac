# SPDX-License-Identifier: Apache-2.0
"""When a worker of vLLM ran each step, and what held it up: `--worker-extension-cls`."""

from __future__ import annotations

import gc
import resource
import time
from typing import Any


class Notes:
    """Of each step: when it began (time.monotonic), and until then the seconds that Python's
    collector had run and the pages that the process had waited for to come from files.

    Not what its thread waited for a processor: vLLM's worker looks for the next step by
    sched_yield(), all of which the kernel counts as such."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, int]] = []
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
        self.steps.append((time.monotonic(), self._collected, faults))


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

    def noted(self) -> list[tuple[float, float, int]]:
        """What was noted since the last call."""
        steps, self.notes.steps = self.notes.steps, []
        return steps
