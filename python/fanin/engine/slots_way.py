# SPDX-License-Identifier: Apache-2.0
"""Which adapters go straight into the layout of the workers' slots, and which by a directory.

The first adapter of each layout (names, types, shapes, configuration) goes by a directory, and from
that the workers learn where everything belongs; those that follow need no directory. Whatever does
not fit goes by a directory, too, with the reason in status, log and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fanin.engine.faults import says
from fanin.engine.pulls import Adapter, Plan, Wanted, moved_on
from fanin.errors import (
    ConnectionFailedError,
    FaninError,
    HostError,
    PeerError,
    PullAgainError,
    RequestError,
)

_log = logging.getLogger("fanin.engine")

_PATIENCE = 600.0  # for learning a layout
_KNOWN = 64  # layouts
_FIRST = "the first adapter of its layout: the workers learn where it goes"
_LEARNING = "the workers are still learning where it goes"

#: Starts a job on all workers, waits until all have done it, at most some seconds; their reports.
Run = Callable[[dict[str, Any], float], Awaitable[list[dict[str, Any]]]]


class ByDirectory(Exception):
    """Why an adapter goes by a directory. *plan*: of it, if it is the first of its layout."""

    def __init__(self, why: str, plan: Plan | None = None) -> None:
        super().__init__(why)
        self.plan = plan


def fields(wanted: Wanted, plan: Plan, *, learn: bool = False) -> dict[str, Any]:
    """What a job for slots has beside what every pull's has."""
    return {
        "layout": _key(wanted, plan),
        "digest": plan.digest,
        "version": plan.version,
        "is_3d": plan.is_3d,
        "learn": learn,
    }


def _key(wanted: Wanted, plan: Plan) -> str:
    return f"{plan.digest}:{wanted.dtype}:{plan.is_3d}"


class SlotWay:
    """What the workers know. Used in the event loop's thread.

    why: the reason that nothing can go into the slots of this engine, "" if it can.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        self._layouts: dict[str, str] = {}  # "" known, or why not
        self._tasks: set[asyncio.Task[None]] = set()
        if why:
            _log.info("fanin: adapters go by directories: %s", why)

    def check(self, wanted: Wanted, plan: Plan) -> None:
        """Raises ByDirectory unless all workers know where the planned adapter goes."""
        if not plan.version:
            raise ByDirectory("the trainer has committed nothing yet")
        why = self._layouts.get(_key(wanted, plan))
        if why is None:
            raise ByDirectory(_FIRST, plan)
        if why:
            raise ByDirectory(why)

    def refused(self, wanted: Wanted, plan: Plan, error: FaninError) -> ByDirectory | None:
        """What the failure of a pull into slots leads to; None: it is the pull's own error."""
        if moved_on(error) or isinstance(error, (PullAgainError, ConnectionFailedError)):
            return None
        key = _key(wanted, plan)
        if isinstance(error, (RequestError, PeerError)):
            # What is wrong with the trainer or the request a directory's pull says as ever; if it
            # is the layout, the workers learn it anew.
            self._layouts.pop(key, None)
        elif not isinstance(error, HostError):  # a bug, not a lack of memory
            self._layouts[key] = says(error)
        return ByDirectory(says(error))

    def learn(self, wanted: Wanted, plan: Plan, adapter: Adapter, run: Run) -> None:
        """Lets the workers learn *adapter*'s layout from its directory, meanwhile."""
        key = _key(wanted, plan)
        if key in self._layouts or adapter.world != plan.world:
            return
        while len(self._layouts) >= _KNOWN:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[key] = _LEARNING
        task = asyncio.get_running_loop().create_task(self._learn(key, wanted, plan, adapter, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _learn(
        self, key: str, wanted: Wanted, plan: Plan, adapter: Adapter, run: Run
    ) -> None:
        job = {**fields(wanted, plan, learn=True), "id": uuid.uuid4().hex}
        try:
            await run({**job, "path": str(adapter.path)}, _PATIENCE)
            self._layouts[key] = ""
            _log.info("fanin: adapters like %s go straight into slots from now on", adapter.name)
        except Exception as error:
            if isinstance(error, RequestError):
                self._layouts[key] = says(error)
            else:  # of the moment: its directory has gone, say; the next one is tried
                self._layouts.pop(key, None)
            _log.warning("fanin: adapters like %s go by directories: %s", adapter.name, says(error))

    def status(self) -> dict[str, Any]:
        """As plain values: why no adapter goes into slots; what is known of layouts."""
        found = list(self._layouts.values())
        return {
            "why_not": self.why,
            "layouts": sum(not why for why in found),
            "learning": found.count(_LEARNING),
            "refused": sorted({why for why in found if why not in ("", _LEARNING)}),
        }
