# SPDX-License-Identifier: Apache-2.0
"""One engine's way through the phases of one sync, and what is known of the engine between two."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fanin import check
from fanin._otel import span
from fanin.errors import (
    FaninError,
    HostError,
    PeerError,
    PullTimeoutError,
    StateError,
    SupersededError,
    UnreachableError,
    first_of,
)

from .driver import CHECKPOINT, Driver, InitInfo, Options, Pulled, Wire
from .endpoints import DONE, Endpoint, EndpointResult

if TYPE_CHECKING:
    from .registry import Registry

_log = logging.getLogger("fanin.sync")

# An engine that has its weights is not left paused for want of a second.
_RESUME_AT_LEAST = 5.0
GRACE = _RESUME_AT_LEAST + 1.0
"""Threads see their deadline by themselves; what is waited for them beyond it."""
SAY_EVERY = 5.0
_SAID = 20  # tensors that differ, in the log

_Result = TypeVar("_Result")


class Trained:
    """The digests of one step, which the first caller waits for. Any thread."""

    def __init__(self, ask: Callable[[], check.Ranks]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._found: check.Ranks | FaninError | None = None

    def ranks(self) -> check.Ranks:
        """Raises what asking the trainer has raised: NotFoundError if it has no digests."""
        with self._lock:
            if self._found is None:
                try:
                    self._found = self._ask()
                except FaninError as error:
                    self._found = error
        if isinstance(self._found, FaninError):
            raise self._found
        return self._found


@dataclass(frozen=True, slots=True)
class Order:
    """What a sync is to bring, or the last one that ended well has brought. step: None: the newest.
    version: what the engines call it then; None: ``step-<s>``."""

    run: str
    step: int | None
    version: str | None
    options: Options


@dataclass(slots=True)
class Record:
    """What is known of an engine. Registry's lock held, but the driver is its sync's."""

    endpoint: Endpoint
    wire: Wire
    driver: Driver | None = None  # None: its kind is not known yet
    told: InitInfo | None = None  # the last init that it took
    step: int | None = None  # of its weights; None: not known
    run: str = ""  # that the weights are of
    world: str = ""  # the launch of the trainer that the weights are of
    incarnations: Mapping[str, str] = field(default_factory=dict)  # of its ranks then
    version: str | None = None  # what it was told to call its weights; None: not known
    had: Order | None = None  # by the last sync that ended well
    taken: object | None = None  # by which call of the registry
    sync: EngineSync | None = None  # the one whose thread is working on it
    before: Record | None = None  # its record until it was removed and added again
    paused: bool = False  # this service may have left it paused
    open: bool = False  # an update may be open in it
    dirty: bool = False  # its weights may be of two steps
    external: bool = False  # KV of its old weights may lie outside of it
    removed: bool = False  # it was taken out of the registry
    proven: str | None = None
    """Basis of the weights (see Pulled) and launch of the trainer that were found equal."""

    @property
    def busy(self) -> bool:
        """Whether a sync is at it, also one whose caller was interrupted."""
        return self.taken is not None or self.asked

    @property
    def asked(self) -> bool:
        """Whether a thread may ask something of the engine: none does past its deadline."""
        here = self.sync is not None and not (self.removed and self.sync.late)
        return here or (self.before is not None and self.before.asked)


class LeaveAlone(Exception):
    """The endpoint was removed, or nobody waits for it any more."""


@dataclass(slots=True)
class Plan:
    """What one sync wants of every engine."""

    step: int
    version: str  # what the engines call their weights then
    info: InitInfo
    options: Options
    world: str  # of the trainer; "": the sync did not ask
    deadline: float  # of time.monotonic()
    again: bool  # also update engines that have the step
    incarnations: Mapping[str, str] = field(default_factory=dict)  # of the ranks that have the step
    outlived: Sequence[Mapping[str, str]] = ()  # those whose step may have had other bytes
    held: str = ""  # world of the weights, as the first engine that has them says
    draft_run: str | None = None  # of the engines' draft models; None: they stay
    trained: Mapping[str, Trained] = field(default_factory=dict)  # by run, of those with digests
    syncs: Sequence[EngineSync] = ()  # of all engines that are well


@dataclass(slots=True)
class EngineSync:
    """One engine's way through the phases. Its own thread runs :meth:`drive`."""

    record: Record
    plan: Plan
    lock: threading.Condition  # the registry's; guards what other threads look at
    driver: Driver | None = None  # the one that the health check has found
    phase: str = ""  # the current one; DONE at the end
    since: float = 0.0  # when *phase* began, of time.monotonic()
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    result: EndpointResult | None = None  # None until it has ended
    over: bool = False  # nobody waits for it any more
    has_step: bool = False
    initialised: bool = False  # this sync told the engine where the trainer is
    skipped: bool = False  # the engine had the step already
    ahead: bool = False  # the step was read before the pause
    note: str = ""
    paused_at: float | None = None  # of time.monotonic(); None: not paused
    pulled: Pulled | None = None
    seen: str | None = None  # the version that the engine's health check told
    verified: int | None = None  # tensors that are served as trained; None: not compared

    @property
    def url(self) -> str:
        """Of the engine."""
        return self.record.endpoint.url

    @property
    def strange(self) -> bool:
        """Whether this service did not set its version: another process did, or the engine was
        started again.
        """
        return self.record.version is None or self.seen != self.record.version

    @property
    def unproven(self) -> bool:
        """Whether it is known before the update that what this brings is to be compared."""
        record, verify = self.record, self.plan.options.verify
        return verify is True or self.strange or record.dirty or record.proven is None

    @property
    def late(self) -> bool:
        """Whether its thread has no request under way any more, even if it has not ended."""
        return time.monotonic() > self.plan.deadline + GRACE

    def run(self, name: str, call: Callable[[], _Result]) -> _Result:
        """One phase; its seconds are added up. Raises what *call* raises, and LeaveAlone."""
        with self.lock:
            if self.over or self.record.removed:
                raise LeaveAlone
            began = time.monotonic()
            if self.phase != name:
                self.phase, self.since = name, began
        try:
            with span(f"fanin.sync.{name}", "client", engine=self.url, step=self.plan.step):
                result = call()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
        with self.lock:
            if self.over:
                raise LeaveAlone
        return result

    def drive(self) -> None:
        """All phases after the health check. Raises what the driver raises, and LeaveAlone."""
        record, plan, driver = self.record, self.plan, self.driver
        assert driver is not None
        if not plan.again and self._has_it(driver):
            self.skipped = True
        else:
            self._update(driver)
        with self.lock:
            self.has_step = True
            self.lock.notify_all()
        if record.external and record.paused:
            self.run("resume", self._after_others)
        if record.paused or not self.skipped:
            until = max(plan.deadline, time.monotonic() + _RESUME_AT_LEAST)
            try:
                self.run("resume", lambda: driver.resume(until))
            except FaninError:
                if self.skipped:  # of replicas one that was not asked may refuse, for its weights
                    record.version = None
                raise
            record.paused = False
        stall = None if self.paused_at is None else time.monotonic() - self.paused_at
        with self.lock:
            self.phase = DONE
            record.had = Order(plan.info.run, plan.step, plan.version, plan.options)
            self.result = self.telling(version=plan.version, step=plan.step, stall=stall)
        _log.info("fanin.sync: %s", _line(self.result))

    def telling(self, **more: Any) -> EndpointResult:
        """A result with all that is known here."""
        pulled = self.pulled
        return EndpointResult(
            self.record.endpoint,
            self.phase or "health",
            skipped=self.skipped,
            initialised=self.initialised,
            seconds=dict(self.seconds),
            bytes=None if pulled is None else pulled.bytes,
            read=None if pulled is None else pulled.seconds,
            how="" if pulled is None else pulled.way(),
            ahead=self.ahead,
            note=self.note,
            verified=self.verified,
            **more,
        )

    def _after_others(self) -> None:
        """Waits until every engine of the sync has the step: one that has not may still put what
        its old weights compute into a store that this one reads. Raises StateError if one has
        failed; the next sync then drops this engine's again."""
        others = [one for one in self.plan.syncs if one is not self]

        def settled() -> bool:
            away = self.over or self.record.removed
            return away or all(
                one.has_step or one.result is not None or one.record.removed for one in others
            )

        with self.lock:
            self.lock.wait_for(settled, max(self.plan.deadline - time.monotonic(), 0))
            without = [one.url for one in others if not (one.has_step or one.record.removed)]
        if without:
            self.record.version = None
            raise StateError.make(
                f"{self.url} keeps KV outside of itself, and engines that may share it have not got"
                f" the step: {', '.join(without)}",
                "sync again, or remove them",
            )

    def _has_it(self, driver: Driver) -> bool:
        """Whether these very weights are there: step, launch and ranks of the trainer, by all
        accounts."""
        record, plan = self.record, self.plan
        known = (record.step, record.run, record.world, record.version)
        wanted = (plan.step, plan.info.run, plan.world, plan.version)
        whole = not record.dirty and not record.open and bool(plan.world)
        whole = whole and record.incarnations not in plan.outlived
        if not whole or known != wanted or self.seen != plan.version:
            return False
        # Another service, of another trainer, calls its weights the same.
        if self.run("health", lambda: driver.holds(plan.step, plan.world, plan.deadline)):
            return True
        record.version = None
        return False

    def _tell(self, driver: Driver) -> None:
        record, plan = self.record, self.plan
        record.told = record.proven = None
        self.run("init", lambda: driver.init(plan.info, plan.deadline))
        record.told = plan.info
        self.initialised = True

    def _start(self, driver: Driver, phase: str) -> None:
        record, plan = self.record, self.plan
        may_be_open, record.open = record.open, True

        def start() -> None:
            driver.start(may_be_open, plan.deadline)

        try:
            self.run(phase, start)
        except (UnreachableError, PullTimeoutError):
            raise
        except FaninError as error:
            if self.initialised:
                raise
            # It may have lost what it was told: started again, or told of another trainer.
            _log.info("%s; it is told anew where the trainer is", error)
            self._tell(driver)
            self.run(phase, start)

    def _update(self, driver: Driver) -> None:
        record, plan = self.record, self.plan
        # While it still generates: what an init refuses leaves the engine as it was.
        if self.strange or record.dirty or record.told != plan.info:
            self._tell(driver)
        if driver.reads_ahead and plan.options.prefetch:
            self._read_ahead(driver)
        record.paused = True  # unless it says that it is not, it may be
        self.paused_at = time.monotonic()
        self.run("pause", lambda: driver.pause(plan.options, plan.deadline))
        if not self.ahead:
            self._start(driver, "start")
        record.dirty, record.step, record.version = True, None, None
        self.run("update", lambda: driver.update(plan.info, plan.step, plan.options, plan.deadline))
        self.pulled = self.run(
            "finish", lambda: driver.finish(plan.step, plan.version, plan.options, plan.deadline)
        )
        self._same_launch(self.pulled)
        self._count(self.pulled)
        if self.pulled.drafts and plan.draft_run is not None:
            drafts = partial(driver.update_draft, plan.step, plan.version, plan.options)
            self.run("finish", lambda: drafts(plan.deadline))
        elif self.pulled.drafts:
            self._add_note(
                "its draft model stays as the engine has loaded it:"
                ' Registry(init={"draft_run": ...}) updates it'
            )
        self._verify(driver, self.pulled)
        record.external = self.pulled.external
        record.open = record.dirty = False
        record.step, record.world, record.version = plan.step, plan.world, plan.version
        record.run, record.incarnations = plan.info.run, plan.incarnations

    def _verify(self, driver: Driver, pulled: Pulled) -> None:
        """Compares what is served with what is trained, if it is to be. Raises HostError if that
        differs; the engine answers nobody with it."""
        record, plan = self.record, self.plan
        basis, verify = f"{pulled.basis} {plan.world}", plan.options.verify
        if not plan.trained or (verify is not True and record.proven == basis):
            return
        runs = [run for run in plan.trained if run == plan.info.run or pulled.drafts]
        try:
            verified = 0
            for run in runs:
                verified += self._compared(partial(self._compare, driver, run))
        except FaninError as error:
            differs = getattr(error, "report", None)
            if differs is not None:
                for line in differs.different[:_SAID]:
                    _log.warning("fanin.sync: %s: step %d: %s", self.url, plan.step, line)
                with suppress(FaninError):  # it stays paused
                    driver.disown(error.message, time.monotonic() + _RESUME_AT_LEAST)
            if differs is not None or verify is True:
                raise
            # A warning once for all weights that come from where these do.
            level = logging.WARNING if self.initialised else logging.INFO
            self._add_note(f"not verified: {error}", level)
            return
        self.verified, record.proven = verified, basis

    def _compare(self, driver: Driver, run: str) -> check.Served:
        """Raises as :func:`fanin.check.served`: HostError with ``report`` if something differs,
        whatever else if that cannot be found out."""
        plan, wire = self.plan, driver.wire
        ranks = plan.trained[run].ranks()
        left = max(plan.deadline - time.monotonic(), 0.0)
        held = check.held_by(wire.url, run, plan.step, left, wire.api_key)
        return check.compared(plan.step, ranks, *held)

    def _compared(self, ask: Callable[[], check.Served]) -> int:
        """How many tensors are served as they are trained. What an explicit cast of the trainer's
        rounds is an error only of a sync that demands the proof."""
        try:
            return self.run("verify", ask).tensors
        except HostError as error:
            report = getattr(error, "report", None)
            if report is None or not report.only_rounded or self.plan.options.verify is True:
                raise
            self._add_note(first_of(report.different, 1))
            return int(report.tensors)

    def _same_launch(self, pulled: Pulled) -> None:
        """Raises PeerError unless it is the launch that has said that it has the step; where the
        trainer was not asked, the one that the sync's other engines have."""
        plan = self.plan
        world = next(iter(pulled.worlds), "")
        with self.lock:
            plan.held = plan.world or plan.held or world
        if world not in ("", plan.held):
            whose = "the one that was asked is" if plan.world else "other engines of this sync have"
            raise PeerError.make(
                f"{self.url}: its workers hold step {plan.step} of the launch {world} of the"
                f" trainer, and {whose} {plan.held}",
                "sync again; if they still differ, see that nixl_info.json is the same file on the"
                " engine's host",
            )

    def _count(self, pulled: Pulled) -> None:
        """Notes that not all workers have told, where it was said how many there are."""
        size = self.record.endpoint.world_size
        if size is None or pulled.workers is None or pulled.workers >= size:
            return
        told = (
            f"{pulled.workers} of {size} workers say what they hold: of data parallel replicas vLLM"
            " tells what the first one says"
        )
        self._add_note(told)

    def _add_note(self, told: str, level: int = logging.WARNING) -> None:
        self.note = f"{self.note}; {told}" if self.note else told
        _log.log(level, "fanin.sync: %s: %s", self.url, told)

    def _read_ahead(self, driver: Driver) -> None:
        """While it generates: what fails here leaves the engine as it was."""
        plan = self.plan
        progress = _Progress(self)
        try:
            self._start(driver, "ahead")
        except (UnreachableError, PullTimeoutError):
            raise
        except FaninError as error:
            self.record.open, why = False, error.message
            if self.phase == "init":
                raise  # the pause would not end
            # Replicas that share experts must be paused before.
        else:
            why = self.run("ahead", lambda: driver.ahead(plan.step, plan.deadline, progress))
        self.ahead = not why
        if not why:
            return
        self.note = why
        if plan.options.prefetch is True:
            raise StateError.make(
                f"{self.url}: step {plan.step} was not read ahead: {why}",
                'sync with prefetch "auto" to update all the same, with a longer pause',
            )
        _log.info("fanin.sync: %s: not read ahead, it is paused longer: %s", self.url, why)


class _Progress:
    """Says in the log how far the reading of one engine is; ends it if nobody waits any more."""

    def __init__(self, sync: EngineSync) -> None:
        self._sync = sync
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        sync, now = self._sync, time.monotonic()
        if sync.over or sync.record.removed:
            raise LeaveAlone
        if now - self._said < SAY_EVERY:
            return
        self._said = now
        rate = done / (now - self._began)
        _log.info(
            "fanin.sync: %s: step %d: %.0f of %.0f MB read ahead, %.2f GB/s%s",
            sync.url,
            sync.plan.step,
            done / 1e6,
            total / 1e6,
            rate / 1e9,
            f", {max(total - done, 0) / rate:.0f} s to go" if rate else "",
        )


def _line(result: EndpointResult) -> str:
    """What became of an engine, for the log."""
    if result.skipped:
        return f"{result.endpoint.url} has step {result.step} already"
    parts = [f"{result.endpoint.url} has step {result.step}"]
    if result.bytes is not None:
        rate = "" if result.rate is None else f" ({result.rate / 1e9:.2f} GB/s)"
        parts.append(f"{result.bytes / 1e6:.1f} MB by {result.how}{rate}")
    if result.stall is not None:
        parts.append(f"stood still for {result.stall:.3f} s")
    if result.verified is not None:
        parts.append(f"{result.verified} tensors are served as they are trained")
    parts.append(", ".join(f"{name} {took:.3f}" for name, took in result.seconds.items()))
    return "; ".join(parts)


def failure(sync: EngineSync, error: BaseException) -> EndpointResult:
    """The result of an engine that failed in its present phase."""
    record = sync.record
    told = str(error) or type(error).__name__
    if not isinstance(error, FaninError):
        told = f"{type(error).__name__}: {told}"
    if sync.url not in told:
        told = f"{sync.url}: {told}"
    if record.paused and sync.phase == "pause":
        told += " (it may be paused)"
    elif record.paused:
        told += f" (failed in {sync.phase}; it stays paused until a sync succeeds)"
    code = error.name if isinstance(error, FaninError) else "FANIN_ERR_INTERNAL"
    version = record.version if record.dirty else record.version or sync.seen
    return sync.telling(error=told, paused=record.paused, version=version, code=code)


# --------------------------------------------------------------- engines that were started again


_EVERY = 2.0  # seconds between two looks
_AGAIN = 30.0  # after one that failed


@dataclass(slots=True)
class Restarts:
    """Looks at the engines of a registry, in a thread that ends with it. One thread.

    Args:
        every: seconds between two looks.
        token: what engines are taken by that are given a step here.
    """

    registry: weakref.ref[Registry]
    every: float = _EVERY
    token: object = field(default_factory=object)
    _later: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        """Raises RuntimeError if the process gets no thread."""
        threading.Thread(target=self._watch, name="fanin-restarts", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(self.every)
            registry = self.registry()
            if registry is None:
                return
            try:
                self.look(registry)
            except Exception:  # a bug must not end the watch
                _log.exception("fanin.sync: looking for restarted engines")
            del registry

    def look(self, registry: Registry) -> None:
        """Once: asks all engines that have got a step, and brings it to those that have lost it."""
        lost: dict[Order, list[str]] = defaultdict(list)
        for url, had, version in registry._versions():
            if version == CHECKPOINT and time.monotonic() >= self._later.get(url, 0.0):
                lost[had].append(url)
        for had, urls in lost.items():
            self._bring(registry, had, urls)

    def _bring(self, registry: Registry, had: Order, urls: Sequence[str]) -> None:
        _log.warning("fanin.sync: started again, gets %s: %s", had.version, ", ".join(urls))
        deadline = time.monotonic() + registry.timeout
        rest = registry._choose(None, urls), self.token
        try:
            try:
                registry._bring(*rest, had, deadline)
            except SupersededError:
                registry._bring(*rest, replace(had, step=None, version=None), deadline)
        except FaninError as error:
            self._later.update(dict.fromkeys(urls, time.monotonic() + _AGAIN))
            _log.warning("fanin.sync: tried again in %.0f s: %s", _AGAIN, error)
