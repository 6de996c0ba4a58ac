# SPDX-License-Identifier: Apache-2.0
"""Whether the engine core that was asked something still lives, for those who wait for its answer.

vLLM's clients, the synchronous and the asynchronous one, wait without end for the answer of a core
that has died since it was asked, and for that of one that is stopped. Contact with vLLM's
``core_client``, for the versions that :data:`fanin.vllm.reload.SUPPORTED` has.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from typing import Any

from fanin.errors import HostError, PullTimeoutError

__all__ = ["QUESTION", "Watch", "death_of", "ended"]

#: Seconds for an answer that takes no work. A core is at work on one thing at a time.
QUESTION = 30.0
#: A process that is stopped for so long is not waited for.
STANDS = 5.0
_LOOK = 0.1
_LOOK_CLOSELY = 1.0  # of each thread of a core, for its children


def ended(processes: Iterable[Any]) -> str:
    """The processes that something has ended; not those that vLLM ended for that."""
    return ", ".join(
        f"{process.name} (exit status {process.exitcode})"
        for process in processes
        if process.exitcode not in (None, 0, -signal.SIGTERM)
    )


def death_of(client: Any) -> HostError:
    """The error for the end of a core behind *client*, which names it if it is of this host."""
    manager = _manager(client)
    first = getattr(manager, "failed_proc_name", None)  # the others are ended for it
    who = ended(one for one in _processes(client) if first in (None, one.name))
    return HostError.make(
        "vLLM's engine core has ended" + (f": {who}" if who else ""),
        "see its log for the reason, and start the engine again",
    )


class Watch:
    """One wait for an answer of the cores behind a client of vLLM's. One thread.

    what: is waited for, for errors. patience: seconds, None: as long as the core is at work.
    """

    def __init__(self, client: Any, what: str, patience: float | None) -> None:
        self._client, self._what, self._patience = client, what, patience
        self._began = self._ran = time.monotonic()
        self._looked = -math.inf

    def look(self) -> None:
        """Raises HostError if no answer will come, PullTimeoutError if none has come in time."""
        if getattr(getattr(self._client, "resources", None), "engine_dead", False):
            raise death_of(self._client)
        now = time.monotonic()
        if now - self._looked >= min(STANDS, _LOOK_CLOSELY):
            self._looked = now
            self._look_closely(now)
        if self._patience is not None and now - self._began >= self._patience:
            raise PullTimeoutError.make(
                f"vLLM's engine core has not answered {self._what} for {self._patience:.0f} s",
                "see its log: a worker may stand still; if it does, start the engine again",
            )

    def _look_closely(self, now: float) -> None:
        stopped = _stopped(one.pid for one in _processes(self._client))
        if not stopped:
            self._ran = now
        elif now - self._ran >= STANDS:
            raise HostError.make(
                f"vLLM's engine core does not answer {self._what}: {', '.join(stopped)} is stopped",
                "let it go on (SIGCONT): it does then what it was asked; update it once more, "
                "or start the engine again",
            )

    def of(self, call: Callable[[], Any]) -> Any:
        """What *call* returns or raises, in another thread, or what :meth:`look` raises."""
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="fanin-ask", daemon=True).start()
        while not wait([answer], timeout=_LOOK).done:
            self.look()
        return answer.result()

    async def of_async(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What *call* returns or raises, or what :meth:`look` raises."""
        asked = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOK))[0]:
                self.look()
            return asked.result()
        finally:
            asked.cancel()


def _manager(client: Any) -> Any:
    return getattr(getattr(client, "resources", None), "engine_manager", None)


def _processes(client: Any) -> list[Any]:
    """Of cores that *client* has started on this host."""
    return list(getattr(_manager(client), "processes", None) or [])


def _stopped(pids: Iterable[int | None]) -> list[str]:
    """Those of these processes and their children, a core's workers, that a signal has stopped."""
    found = []
    for pid in pids:
        for one in (str(pid), *_children(pid)):
            name, _, rest = _text(f"/proc/{one}/stat").rpartition(")")
            if rest.split()[:1] == ["T"]:
                found.append(f"process {one}{name.removeprefix(one)})")
    return found


def _children(pid: int | None) -> list[str]:
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        return [
            child for one in threads for child in _text(f"/proc/{pid}/task/{one}/children").split()
        ]
    return []


def _text(path: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return file.read()
    return ""
