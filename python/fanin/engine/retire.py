# SPDX-License-Identifier: Apache-2.0
"""Which adapters are here, and how one leaves.

The newest ``keep`` of each run stay, as long as the launch of the trainer that they are of has no
successor (see :mod:`fanin.engine.trainer_watch`). One that leaves goes in this order, because an
engine that re-reads a directory that is gone dies with all its requests:

1. its name is taken from the API server's list, so that no new request gets it;
2. nothing happens until the last request that holds it is over, however long that takes;
3. the engine forgets it (one that lies in the workers' slots: with the next step's call);
4. its directory is deleted, unless another engine of this host needs it.

A request that passed the name check but has not reached the engine yet is in no list of the
engine's; it holds vLLM's LoRARequest object, though (:class:`fanin.vllm.models.Names`), and so does
each request that waits or runs. So step 2 counts the references to that object: without any,
nobody in this process can send the path to the engine again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from fanin.engine.metrics import Metrics
from fanin.engine.pulls import Adapter

_log = logging.getLogger("fanin.engine")

_POLL = 0.1
_POLL_SLOW = 1.0
_COLLECT_AFTER = 30.0
_WARN_AFTER = 120.0
_WORLDS_KNOWN = 64


class EngineLink(Protocol):
    """What retirement asks of the engine. Called in the event loop's thread."""

    def unregister(self, adapter: Adapter) -> None:
        """Takes the adapter's name from the list, if it still stands for this adapter."""
        ...

    def register(self, adapter: Adapter) -> None:
        """Puts the name back that unregister() took, unless somebody else has it."""
        ...

    def resolves(self, adapter: Adapter) -> bool:
        """Whether a request for a name that is not in the list would be for this adapter."""
        ...

    def users(self, adapter: Adapter) -> int:
        """How many requests of the adapter wait or run in the engine."""
        ...

    async def forget(self, lora_int_id: int) -> None:
        """The engine removes the adapter from all its caches."""
        ...

    async def drop(self, adapter: Adapter) -> None:
        """Releases and deletes the directory, on all hosts that pulled it.

        One in the workers' slots they forget with the same call: requests that run wait for each.
        """
        ...


def _is_same(here: Adapter, adapter: Adapter) -> bool:
    same = (here.world, here.content) == (adapter.world, adapter.content)
    # One path has one content; so have two of the same processes.
    return same and (here.path == adapter.path or here.incarnations == adapter.incarnations)


def _references(box: list[Any], index: int) -> int:
    import sys

    return sys.getrefcount(box[index])


_ALONE = _references([object()], 0)


def holders(requests: list[Any]) -> int:
    """How many references there are to the objects in *requests*, beside the list's own.

    CPython only, which vLLM needs as well. Does not block.
    """
    return sum(_references(requests, index) - _ALONE for index in range(len(requests)))


class Keeper:
    """The adapters of this engine. Used in one event loop's thread.

    keep: adapters of a run that stay. counters: where those that leave are counted. Retirements
    run as tasks of the loop.
    """

    def __init__(self, keep: int, counters: Metrics, *, poll: float = _POLL) -> None:
        self._keep = keep
        self._counters = counters
        self._poll = poll
        self._link: EngineLink | None = None
        self._here: dict[str, Adapter] = {}  # by name, the oldest first
        self._leaving: dict[Adapter, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._told = False
        self._ended: dict[str, tuple[float, str]] = {}  # world: when, and why
        self._pointed: tuple[float, str] = (-1.0, "")  # when, and at which world

    def attach(self, link: EngineLink) -> None:
        """Says how to reach the engine; before, nothing is retired."""
        self._link = link

    def get(self, name: str) -> Adapter | None:
        """The adapter of that name, if it is here and stays."""
        return self._here.get(name)

    def at(self, run: str, step: int) -> list[Adapter]:
        """The adapters of that step that are here and stay: of several names, or types."""
        return [one for one in self._here.values() if (one.run, one.step) == (run, step)]

    def in_slots(self, path: str) -> Adapter | None:
        """The adapter of that path, here or leaving, if it is in the layout of slots."""
        for adapter in (*self._here.values(), *self._leaving):
            if adapter.landing == "slot" and str(adapter.path) == path:
                return adapter
        return None

    def add(self, adapter: Adapter) -> Adapter:
        """Takes a pulled adapter in; what is then here under its name.

        If there is one already (two callers with different alphas, say), that one stays and
        the new one is given up.
        """
        here = self._here.get(adapter.name)
        if here is not None and _is_same(here, adapter):
            if adapter.path != here.path:
                self._start(self.give_up(adapter))
            elif adapter.lease is not None:
                # Beside an image nobody else would delete it.
                adapter.lease.release(delete=here.landing == "slot")
            return here
        if here is not None:
            self.retire(here, "another adapter has its name", "replaced")
        self._here[adapter.name] = adapter
        return adapter

    def enforce(self, just: Adapter) -> None:
        """Retires what *just*, the adapter that was asked for last, leaves no room for."""
        # Asked for again is as good as new.
        if self._here.pop(just.name, None) is not None:
            self._here[just.name] = just
        same = [a for a in self._here.values() if a.run == just.run]
        for old in same[: max(len(same) - self._keep, 0)]:
            if old is not just:
                self.retire(old, f"{self._keep} newer ones of run {old.run} are here", "newer")

    # ----------------------------------------------------------------- worlds

    def of(self, world: str) -> list[Adapter]:
        """The adapters of *world* that stay, the oldest first."""
        return [adapter for adapter in self._here.values() if adapter.world == world]

    def worlds(self) -> set[str]:
        """The worlds of all adapters that stay."""
        return {adapter.world for adapter in self._here.values()}

    def worlds_at(self, source: str, addresses: Iterable[str]) -> set[str]:
        """Those of them that were found at *source* (its text) or one of *addresses*."""
        there = set(addresses)
        return {
            adapter.world
            for adapter in self._here.values()
            if adapter.source.text == source or there & set(adapter.addresses)
        }

    def met(self, source: str, addresses: Iterable[str], world: str) -> None:
        """*world* was met at *source* (its text) and *addresses*: others that were there ended."""
        for one in self.worlds_at(source, addresses) - {world}:
            self.end_world(one, f"the trainer at {source} was started again as world {world}")

    def end_world(self, world: str, why: str) -> None:
        """Retires all adapters of *world*, wherever they came from, and those still on the way."""
        leaving = self.of(world)
        self._ended[world] = time.monotonic(), why
        for old in list(self._ended)[:-_WORLDS_KNOWN]:
            del self._ended[old]
        if leaving and self._link is not None:
            self._counters.world_ended()
            names = ", ".join(adapter.name for adapter in leaving)
            _log.warning("fanin: world %s has ended: %s; retired: %s", world, why, names)
        for adapter in leaving:
            self.retire(adapter, why, "launch")

    def point_at(self, world: str, why: str) -> None:
        """Ends every world but *world*, also for pulls that are under way."""
        self._pointed = time.monotonic(), world
        self._ended.pop(world, None)
        for other in self.worlds() - {world}:
            self.end_world(other, why)

    def outlived(self, world: str, since: float) -> str:
        """Why what a pull of *world* brings that began at *since* is not to be served, or "".

        since: of time.monotonic.
        """
        ended, why = self._ended.get(world, (-1.0, ""))
        if ended >= since:
            return why
        pointed, at = self._pointed
        return (
            "the engine was pointed at another trainer" if pointed >= since and at != world else ""
        )

    def suspend(self, world: str) -> None:
        """Takes the names of *world*'s adapters away that come back when they are asked for."""
        for adapter in self.of(world):
            if self._link is not None and self._link.resolves(adapter):
                adapter.suspended = True  # it may have been already, and registered only now
                self._link.unregister(adapter)

    def resume(self, world: str) -> None:
        """Gives them back."""
        for adapter in self.of(world):
            self._give_back(adapter)

    def _give_back(self, adapter: Adapter) -> None:
        if self._link is not None and adapter.suspended:
            adapter.suspended = False
            self._link.register(adapter)

    def runs_are(self, world: str, runs: set[str]) -> None:
        """Retires the adapters of runs that *world* does not publish any more."""
        for adapter in self.of(world):
            if adapter.run not in runs:
                self.retire(adapter, f"the trainer has no run {adapter.run} any more", "run")

    # ------------------------------------------------------------------ names

    def unloading(self, name: str) -> None:
        """Somebody is about to take the name from the engine's list, where it must be then."""
        adapter = self._here.get(name)
        if adapter is not None:
            self._give_back(adapter)

    def unloaded(self, name: str) -> None:
        """Somebody has taken the name from the engine's list: the adapter goes, too."""
        adapter = self._here.get(name)
        if adapter is not None:
            self.retire(adapter, "it was unloaded by its name", "unloaded")

    def not_loaded(self, name: str) -> None:
        """The engine did not load the adapter that it was given."""
        adapter = self._here.get(name)
        if adapter is not None and adapter.pins == 0 and not adapter.suspended:
            self.retire(adapter, "the engine could not load it", "unloadable")

    # ------------------------------------------------------------- retirement

    def retire(self, adapter: Adapter, why: str, reason: str) -> None:
        """Begins the adapter's way out; its name is free at once. Does not block.

        why: for humans. reason: one word, for counting.
        """
        if self._link is None:
            if not self._told:
                self._told = True
                _log.warning(
                    "fanin: adapters stay on disk for ever: the engine's list of models was not"
                    " found; load the endpoint plugin with VLLM_PLUGINS=fanin"
                )
            return
        if self._here.get(adapter.name) is adapter:
            del self._here[adapter.name]
        if adapter in self._leaving:
            return
        self._leaving[adapter] = why
        self._counters.retired(reason)
        self._link.unregister(adapter)
        self._start(self._leave(self._link, adapter, why))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def give_up(self, adapter: Adapter) -> None:
        """Deletes an adapter that was never here; without an engine its directory stays."""
        try:
            if self._link is not None:
                await self._link.drop(adapter)
        except Exception as error:
            # Until a directory is deleted that leaves after it, or the next process sweeps.
            _log.error("fanin: adapter %s stays on disk: %s", adapter.name, error)

    async def _leave(self, link: EngineLink, adapter: Adapter, why: str) -> None:
        started = time.monotonic()
        try:
            await self._until_unused(link, adapter, started)
            if adapter.landing != "slot":
                for request in adapter.requests:
                    await link.forget(request.lora_int_id)
            await link.drop(adapter)
        except Exception as error:
            # Until a directory is deleted that leaves after it, or the next process sweeps.
            _log.error("fanin: adapter %s stays on disk: %s", adapter.name, error)
        else:
            waited = time.monotonic() - started
            _log.info("fanin: adapter %s retired after %.1f s: %s", adapter.name, waited, why)
        finally:
            self._leaving.pop(adapter, None)

    async def _until_unused(self, link: EngineLink, adapter: Adapter, started: float) -> None:
        collected = warned = False
        while True:
            # Anew each time: the engine may have registered it only now.
            link.unregister(adapter)
            users = link.users(adapter)
            held = holders(adapter.requests)
            if adapter.pins == 0 and users == 0 and held == 0:
                return
            waited = time.monotonic() - started
            if waited > _COLLECT_AFTER and users == 0 and not collected:
                # What holds it may be garbage in a cycle, the frame of a failed request say.
                collected = True
                gc.collect()
            if waited > _WARN_AFTER and not warned:
                warned = True
                _log.warning(
                    "fanin: adapter %s is still used by %d requests (%d references) %.0f s after"
                    " it was to go; its directory stays until they end",
                    adapter.name,
                    users,
                    held,
                    waited,
                )
            await asyncio.sleep(self._poll if waited < _COLLECT_AFTER else _POLL_SLOW)

    async def settled(self) -> None:
        """Waits until all retirements that have begun are over."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def status(self) -> dict[str, Any]:
        """The adapters here and leaving, as plain values."""

        def show(adapter: Adapter) -> dict[str, Any]:
            return {
                "name": adapter.name,
                **adapter.told(),
                "seconds": round(adapter.seconds, 6),
                "transport": adapter.transport,
            }

        return {
            "adapters": [show(adapter) for adapter in self._here.values()],
            "retiring": [{**show(a), "why": why} for a, why in self._leaving.items()],
        }
