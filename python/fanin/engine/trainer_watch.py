# SPDX-License-Identifier: Apache-2.0
"""What becomes of the launches of trainers ("worlds") whose adapters are here.

vLLM never asks again for a name that it knows, so somebody else has to notice that the name means
another adapter now. An adapter lives as long as its world has no successor:

* A connection that does nothing else tells at once when a rank has gone. The adapters' names are
  taken from vLLM's list until it is known what has become of the trainer, if a request for them
  would bring them back; whoever asks meanwhile makes the engine look for itself.
* Every second the world is looked at, because not every connection tells of its end, and the file
  that says where the trainer is, because ranks that are stopped do not tell of a successor.
* Another world at the same place, or in the file that says where the trainer is: it has ended,
  and all its adapters leave.
* The same world, whole: nothing has happened.
* Nobody, or not all of its ranks: it may come back, or training is over and its last adapters are
  to stay. They are served; it is looked for every second, and counted.

A run that the world does not publish any more has ended as well.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import TypeVar

from fanin.engine.clients import Source
from fanin.engine.faults import says
from fanin.engine.metrics import Metrics
from fanin.engine.pulls import Adapter, PullService
from fanin.engine.retire import Keeper
from fanin.engine.threads import in_thread
from fanin.errors import FaninError, PullTimeoutError

_T = TypeVar("_T")

_log = logging.getLogger("fanin.engine")

_EVERY = 1.0
_PATIENCE = 5.0
_SOON = 0.02
_AGAIN = 0.5
# Connections that break all the time must not make names come and go.
_WATCH_AGAIN = 30.0
_LASTING = 5.0
_LIMIT = "FANIN_ERR_LIMIT"


class _NamedAnother(Exception):
    """A file says that another launch has taken the world's place."""

    def __init__(self, source: Source, successor: str) -> None:
        super().__init__(f"another launch {successor} is at {source.text}")


class TrainerWatch:
    """Follows the worlds whose adapters are here. Used in one event loop's thread.

    A world is followed by a task of the loop, until its last adapter leaves.
    """

    def __init__(self, service: PullService, keeper: Keeper, counters: Metrics) -> None:
        self._service = service
        self._keeper = keeper
        self._counters = counters
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._silent: set[str] = set()

    def follow(self, world: str) -> None:
        """Looks after *world* from now on. Does not block; again: does nothing."""
        if world in self._tasks:
            return
        self._tasks[world] = asyncio.get_running_loop().create_task(self._follow(world))

    def _newest(self, world: str) -> Adapter | None:
        here = self._keeper.of(world)
        return here[-1] if here else None

    def _sources(self, world: str) -> list[Source]:
        """Where the trainer of *world* was found, the last first."""
        return list(dict.fromkeys(one.source for one in reversed(self._keeper.of(world))))

    async def _follow(self, world: str) -> None:
        try:
            await self._until_gone(world)
        finally:
            # Not by the task's callback: before it runs an adapter may come, to be followed anew.
            del self._tasks[world]
            self._hear(world)

    async def _until_gone(self, world: str) -> None:
        loop = asyncio.get_running_loop()
        watch_from = loop.time()
        while (adapter := self._newest(world)) is not None:
            began = loop.time()
            try:
                if began >= watch_from:
                    await self._watch(world, adapter)
                else:
                    await asyncio.sleep(_EVERY)
                    await self._look(world, adapter)
            except _NamedAnother as why:
                self._keeper.end_world(world, str(why))
            except Exception as error:
                if began >= watch_from and loop.time() < began + _LASTING:
                    watch_from = began + _WATCH_AGAIN
                await self._find_out(world, error)

    async def _watch(self, world: str, adapter: Adapter) -> None:
        """Looks every second, and at once when a connection is lost; returns when *adapter* goes.

        Raises FaninError when the world may have ended, _NamedAnother when it has.
        """
        lost = asyncio.wrap_future(
            await in_thread(lambda: self._service.lost(adapter.source, world, adapter.run))
        )
        try:
            while self._keeper.get(adapter.name) is adapter:
                done, _ = await asyncio.wait({lost}, timeout=_EVERY)
                if done:
                    lost.result()
                await self._look(world, adapter)
        finally:
            if not lost.cancel():
                lost.exception()

    async def _look(self, world: str, adapter: Adapter) -> None:
        try:
            runs = await self._ask(
                world, lambda: self._service.runs_now(adapter.source, world, _PATIENCE)
            )
        except FaninError as error:
            if error.name == _LIMIT:  # pulls use all connections, and see for themselves
                return
            raise
        self._hear(world)
        if runs is not None:
            self._keeper.runs_are(world, runs)

    async def _ask(self, world: str, work: Callable[[], _T]) -> _T:
        """What *work* says, in a thread, for which ranks that are stopped can take seconds.

        Raises _NamedAnother as soon as a file names another world.
        """
        asked = asyncio.ensure_future(in_thread(work))
        asked.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            while True:
                files = [source for source in self._sources(world) if source.path is not None]
                if files:
                    found = await in_thread(functools.partial(self._service.named, files, world))
                    if found is not None:
                        raise _NamedAnother(*found)
                if (await asyncio.wait({asked}, timeout=_EVERY))[0]:
                    return asked.result()
        finally:
            asked.cancel()

    async def _find_out(self, world: str, error: Exception) -> None:
        """What has become of *world*: returns when it answers, or has no adapters any more."""
        # Silence is not an end: a rank that is stopped goes on as if nothing had been.
        if isinstance(error, FaninError) and not isinstance(error, PullTimeoutError):
            self._keeper.suspend(world)
        delay = _SOON
        while sources := self._sources(world):
            for source in sources:
                if await self._decide(world, source):
                    return
            await asyncio.sleep(delay)
            delay = min(delay * 2, _AGAIN)

    async def _decide(self, world: str, source: Source) -> bool:
        """Ends or resumes *world* by what is at *source* now. False: nobody says."""
        try:
            successor = await self._ask(
                world, lambda: self._service.successor(source, world, _PATIENCE)
            )
        except _NamedAnother as why:
            self._keeper.end_world(world, str(why))
        except Exception as problem:
            self._miss(world, source, problem)
            return False
        else:
            if successor is None:
                self._hear(world)
                self._keeper.resume(world)
            else:
                who = "" if successor == "another" else f" {successor}"
                self._keeper.end_world(world, f"another launch{who} is at {source.text}")
        return True

    # ------------------------------------------------------------------ silence

    def _miss(self, world: str, source: Source, problem: Exception) -> None:
        if world in self._silent:
            return
        self._silent.add(world)
        self._counters.silent(len(self._silent))
        _log.warning(
            "fanin: the trainer at %s, world %s, does not answer (%s): its adapters are served"
            " until another launch takes its place",
            source.text,
            world,
            says(problem),
        )

    def _hear(self, world: str) -> None:
        if world in self._silent:
            self._silent.discard(world)
            self._counters.silent(len(self._silent))

    def status(self) -> list[str]:
        """The worlds that do not answer now and whose adapters are served."""
        return sorted(self._silent)
