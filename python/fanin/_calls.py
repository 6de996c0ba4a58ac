# SPDX-License-Identifier: Apache-2.0
"""Calls of a client: which one is under way, and how the main thread's can be interrupted."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

_T = TypeVar("_T")
# Handlers that raise one right after the other, before the next step of Python's is done.
_AT_ONCE = 8


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


class Work(Generic[_T]):
    """A call that a helper thread makes for the main thread.

    An exception of a signal's handler may come anywhere in the main thread, and again at once. It
    never comes in a helper: so what a call takes and gives back, the helper takes and gives back.
    """

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call: Callable[[], _T] | None = call
        # Whether the helper has begun it. Who asks first decides: dict.setdefault cannot be
        # interrupted half-way.
        self._begun: dict[str, bool] = {}
        self.ended: list[bool] = []
        self.wake = threading.Lock()
        self.wake.acquire()
        self._result: Any = None
        self._failure: BaseException | None = None

    def begin(self) -> None:
        """Has a helper thread make the call."""
        try:
            jobs = _idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            _thread.start_new_thread(_help, (jobs,))
        jobs.put(self)

    def run(self) -> None:
        """In the helper."""
        if not self._begun.setdefault("begun", True):
            return
        assert self._call is not None
        try:
            self._result = self._call()
        except BaseException as error:
            self._failure = error
        self._call = None  # what it holds is not to outlive the call

    def wait(self) -> None:
        """Until the call has ended. An exception of a signal's handler gets out of this wait."""
        # A signal that comes after Python's last look for one, and before the lock begins to
        # sleep, does not wake it: it is seen when this short sleep is over.
        while not self.wake.acquire(timeout=0.1):
            continue

    def end(self, cancel: Callable[[], None]) -> None:
        """Cancels the call, if it has not ended, and waits for its end, which a cancelled call
        comes to soon. An exception meanwhile waits too; the last one is raised.
        """
        raised: BaseException | None = None
        while True:
            try:
                if self.ended:
                    break
                if not self._begun.setdefault("begun", False):
                    self._call = None  # the helper, which may look at it yet, does not hold it
                    break
                cancel()
                self.wake.acquire(timeout=0.1)
            except BaseException as error:
                raised = error
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # it refers to this frame

    def result(self) -> _T:
        """What the call has returned. Raises what it has raised."""
        try:
            if self._failure is not None:
                raise self._failure
        finally:
            self._failure = None  # raised, it refers to this frame
        return cast(_T, self._result)

    def forget(self) -> None:
        """Nobody asks for what came of it: what was raised refers to frames, they to the call's
        tensors and to this."""
        self._result = self._failure = None


def by_helper(call: Callable[[], _T], cancel: Callable[[], None]) -> _T:
    """What *call* returns or raises, made by a helper thread while the main thread waits.

    An exception of a signal's handler cancels it by *cancel*, and is raised when it has ended.
    """
    work = Work(call)
    try:
        _wait(work, cancel, _AT_ONCE)
    except BaseException:
        work.forget()
        raise
    return work.result()


def _wait(work: Work[Any], cancel: Callable[[], None], more: int) -> None:
    # A handler may raise on the way into end(), which the one around this one makes good.
    try:
        if more:
            _wait(work, cancel, more - 1)
        else:
            work.begin()
            work.wait()
    finally:
        work.end(cancel)


# Helpers that wait for work. They are kept: until a new thread runs, milliseconds pass on some
# machines, which is longer than most pulls take.
_idle: list[SimpleQueue[Work[Any]]] = []
os.register_at_fork(after_in_child=_idle.clear)


def _help(jobs: SimpleQueue[Work[Any]]) -> None:
    while True:
        work = jobs.get()
        work.run()
        _idle.append(jobs)
        ended, wake = work.ended, work.wake
        del work  # nothing that the call has left may end here while the main thread goes on
        ended.append(True)
        wake.release()
