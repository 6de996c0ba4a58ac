# SPDX-License-Identifier: Apache-2.0
"""One pull for all who ask for the same adapter at once, without blocking the event loop.

A caller that goes away leaves the pull running: the next one who asks finds it done. While the
step has not come a pull is a future, no thread, and has no connection of its own. On one host
the API server pulls, in a thread, and engine and workers read the directory. If there are workers
on other hosts, each host pulls for itself: a short call starts the pull on every worker, further
short calls ask how far they are, and between them the engine generates. The same calls bring an
adapter straight into the layout of the workers' slots (:mod:`fanin.engine.slots_way`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
import uuid
from collections.abc import Awaitable
from typing import Any, Protocol

from fanin._otel import carried, span
from fanin.engine.checks import check_alpha
from fanin.engine.clients import Source
from fanin.engine.faults import from_wire, says
from fanin.engine.metrics import Metrics
from fanin.engine.pull_log import PullLog, slowest
from fanin.engine.pulls import Adapter, Plan, PullService, StepToCome, Wanted, moved_on
from fanin.engine.retire import Keeper
from fanin.engine.slots_way import ByDirectory, Run, SlotWay, fields
from fanin.engine.threads import in_thread
from fanin.engine.trainer_watch import TrainerWatch
from fanin.errors import (
    CancelledError,
    ConnectionFailedError,
    FaninError,
    HostError,
    PullTimeoutError,
    RequestError,
)

_log = logging.getLogger("fanin.engine")

_MOST = 1024
_GRACE = 5.0
_POLL_FIRST = 0.02
_POLL_SLOTS = 0.002
_POLL_LAST = 0.25
_TRIES = 3
_BREATH = 0.05
_REMEMBERED = 1024  # failures


class WorkerCalls(Protocol):
    """Calls a method of every worker, on all hosts; their answers. Must be short."""

    def __call__(self, method: str, *args: Any) -> Awaitable[list[Any]]: ...


class _SharedPull:
    """One pull, and how many wait for it."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.started = time.monotonic()
        self.deadline = self.started + wanted.timeout
        self.task: asyncio.Task[Adapter] | None = None
        self.adapter: Adapter | None = None
        self.waiters = 0
        self.done_bytes = 0
        self.total_bytes = 0

    def progress(self, done: int, total: int) -> None:
        self.done_bytes, self.total_bytes = done, total

    def finish(self, adapter: Adapter) -> None:
        """Those who wait get the adapter pinned, before anything can retire it."""
        adapter.pins += self.waiters
        self.adapter = adapter

    def leave(self) -> None:
        """One of those who wait goes away."""
        if self.adapter is not None:
            self.adapter.pins -= 1
        else:
            self.waiters -= 1


class SharedPulls:
    """The pulls of this engine. Used in one event loop's thread.

    service: pulls. keeper: what is here already. watch: told of the worlds that it is from.
    counters: where pulls are counted.
    """

    def __init__(
        self, service: PullService, keeper: Keeper, watch: TrainerWatch, counters: Metrics
    ) -> None:
        self._service = service
        self._keeper = keeper
        self._watch = watch
        self._counters = counters
        self._lines = PullLog(_log)
        self._workers: WorkerCalls | None = None
        self._slots = SlotWay("the engine was not found")
        self._slot_calls: WorkerCalls | None = None
        self._under_way: dict[Any, _SharedPull] = {}
        self._failed: dict[Any, tuple[float, Exception]] = {}  # when, and how
        self.last_error = ""

    def use_workers(self, workers: WorkerCalls) -> None:
        """From now on the workers pull, each host for itself."""
        self._workers = workers

    def use_slots(self, way: SlotWay, workers: WorkerCalls) -> None:
        """From now on adapters go straight into the workers' slots where *way* says so."""
        self._slots, self._slot_calls = way, workers

    def slots(self) -> dict[str, Any]:
        """See :meth:`SlotWay.status`."""
        return self._slots.status()

    async def fetch(self, wanted: Wanted, asked: float | None = None) -> Adapter:
        """The adapter, pulled unless it is here, and pinned: the caller must take one from pins.

        vLLM lets callers who ask for one name in one after the other. A caller that asked before
        the last pull failed gets that pull's error. Waits at most about wanted.timeout. Raises as
        :meth:`PullService.pull`.

        Args:
            asked: when the caller was asked (time.monotonic); None: now.
        """
        when, failure = self._failed.get(wanted.key, (0.0, None))
        if failure is not None and asked is not None and asked <= when:
            raise copy.copy(failure)
        shared = self._under_way.get(wanted.key)
        if shared is None:
            if len(self._under_way) >= _MOST:
                raise ConnectionFailedError.make(
                    f"{_MOST} adapters are being pulled already", "ask again", code=-302
                )
            shared = _SharedPull(wanted)
            self._under_way[wanted.key] = shared
            shared.task = asyncio.get_running_loop().create_task(self._fly(shared))
            # Nobody may be waiting any more when it fails.
            shared.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        assert shared.task is not None
        shared.waiters += 1
        try:
            done, _ = await asyncio.wait({shared.task}, timeout=wanted.timeout + _GRACE)
            if not done:
                raise PullTimeoutError.make(
                    f"adapter {wanted.name} is not here within {wanted.timeout:g} s",
                    "give it a longer timeout",
                )
            return shared.task.result()
        except BaseException:
            shared.leave()
            raise

    async def _fly(self, shared: _SharedPull) -> Adapter:
        wanted = shared.wanted
        try:
            adapter = await self._here(wanted)
            if adapter is None:
                adapter = self._keeper.add(await self._counted(shared))
            shared.finish(adapter)
            self._keeper.enforce(adapter)
            self._watch.follow(adapter.world)
            self._failed.pop(wanted.key, None)
            return adapter
        except Exception as error:
            self._note(wanted, error)
            raise
        finally:
            self._under_way.pop(wanted.key, None)
            self._meet(wanted.source)

    def _note(self, wanted: Wanted, error: Exception) -> None:
        self.last_error = f"{wanted.name}: {says(error)}"
        _log.warning("fanin: %s", self.last_error)
        self._failed.pop(wanted.key, None)
        self._failed[wanted.key] = time.monotonic(), error.with_traceback(None)
        while len(self._failed) > _REMEMBERED:
            del self._failed[next(iter(self._failed))]

    async def _here(self, wanted: Wanted) -> Adapter | None:
        """The adapter if it is here and of the trainer's present launch."""
        adapter = self._keeper.get(wanted.name)
        if adapter is None:
            return None
        if adapter.content == wanted.content or not self._was_at(adapter, wanted.source):
            world = await self._present_world(wanted, adapter)
            self._meet(wanted.source)
            here = self._keeper.get(wanted.name) is adapter and not adapter.outlived
            if here and world == adapter.world and adapter.content == wanted.content:
                check_alpha(wanted.lora_alpha, adapter.facts)
                return adapter
            if refusal := self._taken(wanted, world):
                raise refusal
        # Other files under that name replace it when they are here.
        return None

    async def _present_world(self, wanted: Wanted, adapter: Adapter) -> str:
        """The trainer's world; if nobody answers, that of the adapter, which is here and was
        there."""
        try:
            return await in_thread(lambda: self._service.world_now(wanted.source, _GRACE, adapter))
        except FaninError as error:
            if not self._was_at(adapter, wanted.source):
                raise
            met = self._service.last_met(wanted.source)
            if moved_on(error) and not isinstance(error, ConnectionFailedError):
                why = f"other worlds are at {wanted.source.text} now"
                self._keeper.end_world(adapter.world, why)
                raise
            if met is not None and met[0] != adapter.world:
                raise
            _log.info("fanin: adapter %s is here already: %s", adapter.name, says(error))
        return adapter.world

    def _was_at(self, adapter: Adapter, source: Source) -> bool:
        """Whether the adapter's world was found at *source*: no other trainer is meant then."""
        met = self._service.last_met(source)
        addresses = source.addresses if met is None else met[1]
        if met is not None and met[0] == adapter.world:
            return True
        return adapter.world in self._keeper.worlds_at(source.text, addresses)

    def _meet(self, source: Source) -> None:
        """Ends the worlds that another one, met at *source* last, has followed there."""
        met = self._service.last_met(source)
        if met is not None:
            self._keeper.met(source.text, met[1], met[0])

    def _taken(self, wanted: Wanted, world: str) -> RequestError | None:
        """Why *world*'s adapter cannot have the name: one of a trainer elsewhere, which answers,
        has it. None: it can."""
        here = self._keeper.get(wanted.name)
        if here is None or here.world == world or self._was_at(here, wanted.source):
            return None
        if here.world in self._watch.status():
            return None
        return RequestError.make(
            f"{wanted.name!r} is an adapter of the trainer at {here.source.text}, world"
            f" {here.world}, which still answers; the one at {wanted.source.text} is world {world}",
            "give one of the two trainers another prefix, or unload that adapter; the name is free"
            " when the ranks of its trainer do not answer any more, and /init_nixl_client retires"
            " the adapters of all trainers but one",
            key="lora_name",
        )

    async def _counted(self, shared: _SharedPull) -> Adapter:
        started = time.monotonic()
        self._counters.began()
        try:
            with span("fanin.fetch", run=shared.wanted.run, step=shared.wanted.step) as told:
                told.set(lora_name=shared.wanted.name)
                adapter = await self._pull(shared)
                await self._refuse_unwanted(adapter, shared)
                told.set(bytes=adapter.bytes, ranks=adapter.ranks, path=adapter.transport)
                told.set(reused=adapter.reused, landing=adapter.landing)
        except BaseException as error:
            self._counters.ended(time.monotonic() - started, error)
            raise
        self._counters.ended(
            time.monotonic() - started,
            None,
            run=adapter.run,
            step=adapter.step,
            size=0 if adapter.reused else adapter.bytes,
            path=adapter.transport,
            phases=adapter.phases,
        )
        self._counters.landed(adapter.landing)
        self._lines.tell(adapter)
        return adapter

    async def _pull(self, shared: _SharedPull) -> Adapter:
        """Pulls when the step has come."""
        while True:
            try:
                adapter = await self._land(shared)
            except StepToCome as to_come:
                await self._await(shared, to_come)
                continue
            adapter.seconds = time.monotonic() - shared.started
            return adapter

    async def _land(self, shared: _SharedPull) -> Adapter:
        """Into the workers' slots if they know where it goes, else into a directory."""
        wanted, calls, way = shared.wanted, self._slot_calls, self._slots
        plan, why = None, way.why
        if wanted.landing == "directory":
            why = "a directory is asked for"
        elif calls is not None and not why:
            try:
                return await self._pull_on_workers(calls, shared, way)
            except ByDirectory as refusal:
                plan, why = refusal.plan, str(refusal)
        adapter = await self._into_a_directory(shared)
        adapter.landing_why = why
        if plan is not None and calls is not None:
            way.learn(wanted, plan, adapter, self._job_runner(calls, shared, plan))
        return adapter

    async def _into_a_directory(self, shared: _SharedPull) -> Adapter:
        wanted, deadline = shared.wanted, shared.deadline
        if self._workers is not None:
            return await self._pull_on_workers(self._workers, shared)
        return await in_thread(lambda: self._service.pull_now(wanted, deadline, shared.progress))

    async def _await(self, shared: _SharedPull, to_come: StepToCome) -> None:
        left = shared.deadline - time.monotonic()
        try:
            await asyncio.wait_for(asyncio.wrap_future(to_come.future), left)
        except FaninError as error:
            if not moved_on(error):
                raise
            # Another launch, or a rank that is gone for good: the pull itself finds out.
            await asyncio.sleep(_BREATH)
        except asyncio.TimeoutError:
            wanted = shared.wanted
            raise await in_thread(lambda: self._service.overdue(wanted, to_come)) from None

    async def _refuse_unwanted(self, adapter: Adapter, shared: _SharedPull) -> None:
        """Gives the adapter up if, while it was pulled, its world ended for this engine or another
        trainer's adapter got its name."""
        refusal: FaninError | None = self._taken(shared.wanted, adapter.world)
        if why := self._keeper.outlived(adapter.world, shared.started):
            refusal = CancelledError.make(
                f"adapter {adapter.name} was pulled, and is not served: {why}", "ask again"
            )
        if refusal is not None:
            await self._keeper.give_up(adapter)
            raise refusal

    # ------------------------------------------------------------- in the workers

    async def _pull_on_workers(
        self, workers: WorkerCalls, shared: _SharedPull, way: SlotWay | None = None
    ) -> Adapter:
        """By each host for itself; with *way* by each worker, into its slots' layout.

        Raises ByDirectory if that cannot be.
        """
        wanted, deadline = shared.wanted, shared.deadline
        for attempt in range(_TRIES):
            plan = await in_thread(lambda: self._service.plan(wanted, deadline))
            job: dict[str, Any] = {"id": uuid.uuid4().hex, "path": str(plan.path)}
            if way is not None:
                way.check(wanted, plan)
                job |= fields(wanted, plan)
            try:
                left = deadline - time.monotonic()
                reports = await self._job_runner(workers, shared, plan)(job, left)
            except FaninError as error:
                refused = None if way is None else way.refused(wanted, plan, error)
                if refused is not None:
                    raise refused from error
                if not moved_on(error) or attempt == _TRIES - 1:
                    raise
                self._service.pool.forget(plan.target)
                continue
            phases, ranks = slowest(reports)
            return self._service.arrived(
                wanted,
                plan,
                phases=phases,
                ranks=ranks,
                bytes=sum(report["bytes"] for report in reports if not report["reused"]),
                seconds=time.monotonic() - shared.started,
                reused=all(report["reused"] for report in reports),
                transport=str(reports[0]["transport"]),
                landing="directory" if way is None else "slot",
            )
        raise AssertionError("unreachable")

    def _job_runner(self, workers: WorkerCalls, shared: _SharedPull, plan: Plan) -> Run:
        """Runs jobs on all workers: (what is particular to one, its seconds) to their reports."""
        wanted = shared.wanted

        async def run(job: dict[str, Any], left: float) -> list[dict[str, Any]]:
            if left <= 0:
                raise PullTimeoutError.make("the pull's time is over", "give it a longer timeout")
            deadline = time.monotonic() + left
            job = {
                "root": str(self._service.places.root),
                "addresses": list(plan.target.addresses),
                "server_name": plan.target.server_name,
                "secret_file": plan.target.secret_file,
                "world": plan.world,
                "run": wanted.run,
                # As text: message formats on the way end at 63 bits.
                "step": str(wanted.step),
                "how": wanted.how,
                "timeout": left,
                "trace": carried(),
                **job,
            }
            try:
                await workers("fanin_start_pull", job)
                return await self._poll(workers, shared, job, deadline)
            except BaseException:
                with contextlib.suppress(Exception):
                    # By its number alone: another pull may have brought what is in that place.
                    await workers("fanin_drop_adapter", "", job["id"])
                raise

        return run

    async def _poll(
        self, workers: WorkerCalls, shared: _SharedPull, job: dict[str, Any], deadline: float
    ) -> list[dict[str, Any]]:
        delay = _POLL_SLOTS if job.get("layout") and not job["learn"] else _POLL_FIRST
        while True:
            reports = await workers("fanin_poll_pull", job["id"])
            for report in reports:
                if report["state"] == "failed":
                    error = from_wire(report["error"])
                    error.message = f"on host {report['host']}: {error.message}"
                    raise error
            if not reports:
                raise HostError.make("the engine has no workers that answer", "see its log")
            shared.progress(
                min(report["bytes"] for report in reports),
                max(report["total"] for report in reports),
            )
            if all(report["state"] == "done" for report in reports):
                return reports
            if time.monotonic() > deadline + _GRACE:
                hosts = sorted({r["host"] for r in reports if r["state"] != "done"})
                raise PullTimeoutError.make(
                    f"adapter {shared.wanted.name} is not complete on {', '.join(hosts)}",
                    "look at the workers' logs there",
                )
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, _POLL_LAST)

    def status(self) -> list[dict[str, Any]]:
        """The pulls that run, as plain values."""
        return [
            {
                "name": shared.wanted.name,
                "run": shared.wanted.run,
                "step": shared.wanted.step,
                "seconds": round(time.monotonic() - shared.started, 3),
                "bytes_done": shared.done_bytes,
                "bytes_total": shared.total_bytes,
                "waiters": shared.waiters,
            }
            for shared in self._under_way.values()
        ]
