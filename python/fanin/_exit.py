# SPDX-License-Identifier: Apache-2.0
"""The end of handles: of a with block, of the last reference, of the process."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from .errors import StateError

Handle = TypeVar("Handle")
_Closable = TypeVar("_Closable", bound="ClosableHandle")


class ClosableHandle(ABC):
    """A handle of the library that this process must close: by close(), or in a with block."""

    _handle: Any
    """None: there is none, or not any more."""
    _pid: int
    """The process that made it."""
    _unclosed = "is not closed"
    """What is said of one that nobody refers to any more."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _abandon(self) -> None:
        """Closes what nobody refers to any more; does not wait."""

    def __enter__(self: _Closable) -> _Closable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Nothing calls it any more; a finalizing interpreter has closed it by atexit.
        if getattr(self, "_handle", None) is None or sys is None or sys.is_finalizing():
            return
        if self._pid == os.getpid():
            message = f"{self!r} {self._unclosed}"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)
            self._abandon()


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
