# SPDX-License-Identifier: Apache-2.0
"""Engines that were started again get back the step that they had, without another sync."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fanin.errors import FaninError, SupersededError

from .driver import CHECKPOINT
from .engine_sync import Had

if TYPE_CHECKING:
    from .registry import Registry


_log = logging.getLogger("fanin.sync")

_EVERY = 2.0  # seconds between two looks
_AGAIN = 30.0  # after one that failed


@dataclass(slots=True)
class Restarts:
    """Looks at the engines of a registry, in a thread that ends with it. One thread.

    Args:
        every: seconds between two looks.
        token: what engines are taken by that are given a step here.
    """

    registry: weakref.ref[Registry]
    every: float = _EVERY
    token: object = field(default_factory=object)
    _later: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        """Raises RuntimeError if the process gets no thread."""
        threading.Thread(target=self._watch, name="fanin-restarts", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(self.every)
            registry = self.registry()
            if registry is None:
                return
            try:
                self.look(registry)
            except Exception:  # a bug must not end the watch
                _log.exception("fanin.sync: looking for restarted engines")
            del registry

    def look(self, registry: Registry) -> None:
        """Once: asks all engines that have got a step, and brings it to those that have lost it."""
        lost: dict[Had, list[str]] = defaultdict(list)
        for url, had, version in registry._versions():
            if version == CHECKPOINT and time.monotonic() >= self._later.get(url, 0.0):
                lost[had].append(url)
        for had, urls in lost.items():
            self._bring(registry, had, urls)

    def _bring(self, registry: Registry, had: Had, urls: Sequence[str]) -> None:
        _log.warning("fanin.sync: started again, gets %s: %s", had.version, ", ".join(urls))
        deadline = time.monotonic() + registry.timeout
        rest = registry._choose(None, urls), self.token
        try:
            try:
                registry._bring(*rest, had.run, had.step, had.version, had.options, deadline)
            except SupersededError:
                registry._bring(*rest, had.run, None, None, had.options, deadline)
        except FaninError as error:
            self._later.update(dict.fromkeys(urls, time.monotonic() + _AGAIN))
            _log.warning("fanin.sync: tried again in %.0f s: %s", _AGAIN, error)
