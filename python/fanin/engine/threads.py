# SPDX-License-Identifier: Apache-2.0
"""Work that blocks, away from the thread that asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from fanin._otel import carry

_log = logging.getLogger("fanin.engine")
_T = TypeVar("_T")
Work: TypeAlias = Callable[[], Any]


class Hands:
    """Threads of one name that stand by for work; as many as there is work at a time.

    A caller that begins a thread waits until it runs. Then the caller waits for the interpreter,
    which a new thread has until it first blocks. In an engine that wait is part of a step. Giving
    work to a thread that is there waits for nothing.

    idle: threads that stay when there is no work.
    """

    def __init__(self, name: str, idle: int = 2) -> None:
        self._name, self._most = name, idle
        self._lock = threading.Lock()
        self._idle = 0  # those that wait, less the work that they have been given
        self._busy = 0
        self._work: SimpleQueue[Work] = SimpleQueue()

    def give(self, work: Work) -> None:
        """Any thread, and at once. The thread logs an exception of *work*. Raises RuntimeError if
        there can be no thread.
        """
        with self._lock:
            there = self._idle > 0
            self._idle -= there
        if not there:
            threading.Thread(target=self._stand, name=self._name, daemon=True).start()
        with self._lock:
            self._busy += 1
        self._work.put(work)

    @property
    def busy(self) -> int:
        """How much work is not done yet."""
        return self._busy

    def _stand(self) -> None:
        while True:
            self._do(self._work.get())
            with self._lock:
                self._busy -= 1
                if self._idle >= self._most:
                    return
                self._idle += 1

    def _do(self, work: Work) -> None:
        try:
            contextvars.Context().run(work)  # as in a new thread: nothing is left to the next
        except Exception:
            _log.exception("fanin: %s", self._name)


_pulls = Hands("fanin-pull")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Runs *work* in a thread of its own and waits for it.

    Not asyncio.to_thread: a pull waits for up to a minute, and the loop's few shared threads are
    vLLM's. A caller that is cancelled leaves the thread running.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.cancelled():
            setter(value)

    def run() -> None:
        setter: Callable[[Any], None]
        try:
            value: Any = work()
            setter = future.set_result
        except BaseException as error:
            value, setter = error, future.set_exception
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, setter, value)

    _pulls.give(carry(run))
    return await future
