# SPDX-License-Identifier: Apache-2.0
"""Calls of a client: which one is under way, and how the main thread's can be interrupted."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Use:
    """A call of a client that is under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads = {threading.get_ident()}
        self.done = threading.Event()
        #: It was cancelled for what it raises itself.
        self.cancelled = False
        #: What a callback raised.
        self.failure: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.name}()"


class Work:
    """A call that a helper thread makes for the main thread."""

    def __init__(self, call: Callable[[], int]) -> None:
        self._call = call
        # Taken by the helper before it begins, or by the main thread so that it never does.
        self._permit = [True]
        self._ended = threading.Lock()
        self._ended.acquire()
        self.finished = False
        self.status = 0
        self.failure: BaseException | None = None

    def begin(self, use: Use) -> None:
        """Has a helper thread make the call."""
        try:
            jobs = _idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            _thread.start_new_thread(_help, (jobs,))
        jobs.put((self, use))

    def run(self, use: Use) -> None:
        """In the helper."""
        try:
            self._permit.pop()
        except IndexError:
            return
        use.threads.add(threading.get_ident())
        try:
            self.status = self._call()
        except BaseException as error:
            self.failure = error
        self.finished = True

    def tell(self) -> None:
        """In the helper: the main thread may go on."""
        self._ended.release()

    def wait(self) -> None:
        """Until the call has ended. KeyboardInterrupt gets out of this wait."""
        # A signal that comes after Python's last look for one, and before the lock begins to
        # sleep, does not wake it: it is seen when this short sleep is over.
        while not self._ended.acquire(timeout=0.1):
            continue

    def forbid(self) -> bool:
        """True: the helper has not begun and never will."""
        try:
            self._permit.pop()
        except IndexError:
            return False
        return True

    def end(self, cancel: Callable[[], None]) -> None:
        """Cancels the call and waits for its end, whatever else is interrupted meanwhile."""
        while not self.finished:
            try:
                cancel()
                self._ended.acquire(timeout=1.0)
            except KeyboardInterrupt:
                continue


# Helpers that wait for work. They are kept: until a new thread runs, milliseconds pass on some
# machines, which is longer than most pulls take.
_idle: list[SimpleQueue[tuple[Work, Use]]] = []
os.register_at_fork(after_in_child=_idle.clear)


def _help(jobs: SimpleQueue[tuple[Work, Use]]) -> None:
    while True:
        work, use = jobs.get()
        work.run(use)
        _idle.append(jobs)
        work.tell()
        del work, use
