# SPDX-License-Identifier: Apache-2.0
"""What is still open when the process ends is closed in order."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .errors import StateError

Handle = TypeVar("Handle")


class OpenHandles(Generic[Handle]):
    """The open handles of one kind, each held weakly. *close* is called for each at exit."""

    def __init__(self, close: Callable[[Handle], None]) -> None:
        self._close = close
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._registered = False

    def add(self, handle: Handle) -> None:
        """To be called when the log has registered itself at exit: it ends after the handles do."""
        self._handles.add(handle)
        if not self._registered:
            self._registered = True
            atexit.register(self._close_all)

    def discard(self, handle: Handle) -> None:
        """It is closed."""
        self._handles.discard(handle)

    def __iter__(self) -> Iterator[Handle]:
        return iter(list(self._handles))

    def _close_all(self) -> None:
        for handle in self:
            try:
                self._close(handle)
            except StateError:
                pass  # the process ends: what hangs is left to hang
