# SPDX-License-Identifier: Apache-2.0
"""One engine's way through the phases of one sync, and what is known of the engine between two."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fanin._otel import span
from fanin.errors import FaninError, PullTimeoutError, StateError, UnreachableError

from .driver import Driver, Pulled
from .endpoints import DONE, Endpoint, EndpointResult
from .wire import InitInfo, Options, Wire

__all__ = ["RESUME_AT_LEAST", "SAY_EVERY", "Flight", "LeaveAlone", "Plan", "Record", "failure"]

_log = logging.getLogger("fanin.sync")

# An engine that has its weights is not left paused for want of a second.
RESUME_AT_LEAST = 5.0
SAY_EVERY = 5.0

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Record:
    """What is known of an engine. Registry's lock held, but the driver is its flight's.

    taken: by a call of the registry. flight: the one whose thread is at it.
    """

    endpoint: Endpoint
    wire: Wire
    driver: Driver | None = None
    told: InitInfo | None = None
    step: int | None = None
    world: str = ""
    version: str | None = None
    taken: bool = False
    flight: Flight | None = None
    paused: bool = False
    open: bool = False
    dirty: bool = False
    removed: bool = False

    @property
    def busy(self) -> bool:
        """Whether a sync is at it, also one whose caller was interrupted."""
        return self.taken or self.flight is not None


class LeaveAlone(Exception):
    """The endpoint was removed, or nobody waits for it any more."""


@dataclass(slots=True)
class Plan:
    """What one sync wants of every engine. world: of the trainer, "" if it was not asked."""

    step: int
    version: str
    info: InitInfo
    options: Options
    world: str
    deadline: float
    again: bool


@dataclass(slots=True)
class Flight:
    """One engine's way through the phases. Its own thread runs :meth:`drive`; lock: the
    registry's, which guards what others look at."""

    record: Record
    plan: Plan
    lock: threading.Condition
    phase: str = ""
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    result: EndpointResult | None = None
    over: bool = False
    initialised: bool = False
    skipped: bool = False
    ahead: bool = False
    note: str = ""
    paused_at: float | None = None
    pulled: Pulled | None = None
    seen: str | None = None

    @property
    def url(self) -> str:
        """Of the engine."""
        return self.record.endpoint.url

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
        record, plan = self.record, self.plan
        driver = record.driver
        assert driver is not None  # the health check has made it
        if not plan.again and self._has_it():
            self.skipped = True
        else:
            self._update(driver)
        if record.paused or not self.skipped:
            until = max(plan.deadline, time.monotonic() + RESUME_AT_LEAST)
            self.run("resume", lambda: driver.resume(until))
            record.paused = False
        stall = None if self.paused_at is None else time.monotonic() - self.paused_at
        with self.lock:
            self.phase = DONE
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
            how="" if pulled is None else pulled.how,
            ahead=self.ahead,
            note=self.note,
            **more,
        )

    def _has_it(self) -> bool:
        """Whether these very weights are there: step and launch of the trainer, by all accounts."""
        record, plan = self.record, self.plan
        known = (record.step, record.world, record.version)
        wanted = (plan.step, plan.world, plan.version)
        whole = not record.dirty and not record.open and bool(plan.world)
        return whole and known == wanted and self.seen == plan.version

    def _tell(self, driver: Driver) -> None:
        record, plan = self.record, self.plan
        record.told = None
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
        # A version that nobody gave it here: the engine was started again, or somebody else's.
        strange = record.version is None or self.seen != record.version
        # While it still generates: what an init refuses leaves the engine as it was.
        if strange or record.dirty or record.told != plan.info:
            self._tell(driver)
        if driver.reads_ahead and plan.options.prefetch:
            self._read_ahead(driver)
        record.paused = True  # unless it says that it is not, it may be
        self.paused_at = time.monotonic()
        self.run("pause", lambda: driver.pause(plan.options, plan.deadline))
        if not self.ahead:
            self._start(driver, "start")
        record.dirty, record.step, record.version = True, None, None
        self.run("update", lambda: driver.update(plan.info, plan.step, plan.deadline))
        self.pulled = self.run(
            "finish", lambda: driver.finish(plan.step, plan.version, plan.options, plan.deadline)
        )
        record.open = record.dirty = False
        record.step, record.world, record.version = plan.step, plan.world, plan.version

    def _read_ahead(self, driver: Driver) -> None:
        """While it generates: what fails here leaves the engine as it was."""
        plan = self.plan
        progress = _Progress(self)
        try:
            self._start(driver, "ahead")
        except (UnreachableError, PullTimeoutError):
            raise
        except FaninError as error:  # replicas that share experts must be paused before
            self.record.open, why = False, error.message
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
                address=self.url,
                phase="ahead",
            )
        _log.info("fanin.sync: %s: not read ahead, it is paused longer: %s", self.url, why)


class _Progress:
    """Says in the log how far the reading of one engine is; ends it if nobody waits any more."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        flight, now = self._flight, time.monotonic()
        if flight.over or flight.record.removed:
            raise LeaveAlone
        if now - self._said < SAY_EVERY:
            return
        self._said = now
        rate = done / (now - self._began)
        _log.info(
            "fanin.sync: %s: step %d: %.0f of %.0f MB read ahead, %.2f GB/s%s",
            flight.url,
            flight.plan.step,
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
    parts.append(", ".join(f"{name} {took:.3f}" for name, took in result.seconds.items()))
    return "; ".join(parts)


def failure(flight: Flight, error: BaseException) -> EndpointResult:
    """What is said of an engine that failed in the phase that it is in."""
    record = flight.record
    told = str(error) or type(error).__name__
    if not isinstance(error, FaninError):
        told = f"{type(error).__name__}: {told}"
    if flight.url not in told:
        told = f"{flight.url}: {told}"
    paused = record.paused and flight.phase != "health"
    if paused and flight.phase == "pause":
        told += " (it may be paused)"
    elif paused:
        told += f" (failed in {flight.phase}; it stays paused until a sync succeeds)"
    code = error.name if isinstance(error, FaninError) else "FANIN_ERR_INTERNAL"
    return flight.telling(error=told, paused=paused, version=record.version, code=code)
