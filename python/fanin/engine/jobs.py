# SPDX-License-Identifier: Apache-2.0
"""Pulls in a worker's process: one call gives a thread its work, others look how far it is."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fanin.engine.faults import to_wire
from fanin.engine.pulls import Wanted, phases_of
from fanin.engine.threads import Hands
from fanin.errors import HostError, NotFoundError

_log = logging.getLogger("fanin.engine")

_pulls, _deletions = Hands("fanin-pull"), Hands("fanin-delete")

Progress = Callable[[int, int], None]


_TOLD = ("bytes", "reused", "transport", "path", "world", "is_3d", "phases", "ranks")


class Held(Protocol):
    """What an adapter lies in."""

    def release(self, *, delete: bool) -> bool:
        """Gives it up; see :meth:`fanin.engine.directories.Lease.release`."""
        ...


@dataclass
class Done:
    """What a job's thread brings home."""

    path: str
    world: str
    step: int
    lease: Held
    bytes: int = 0
    reused: bool = False
    transport: str = ""
    is_3d: bool = False
    wanted: Wanted | None = None
    phases: dict[str, float] = field(default_factory=dict)
    ranks: int = 0

    @classmethod
    def of(
        cls, job: dict[str, Any], lease: Held, result: Any = None, *, reused: bool = False
    ) -> Done:
        """What a planned pull has brought. result: the client's, None: no byte was read."""
        done = cls(job["path"], job["world"], int(job["step"]), lease, reused=reused)
        done.is_3d = bool(job.get("is_3d", False))
        if result is not None:
            done.bytes, done.transport = int(result.bytes), str(result.path)
            done.phases, done.ranks = phases_of(result), len(result.ranks)
        return done


class _Job:
    def __init__(self, name: str, before: list[Done]) -> None:
        self.name = name
        self.before = before  # of the same name; the engine may have them loaded
        self.started = time.monotonic()
        self.done_bytes = 0
        self.total = 0
        self.result: Done | None = None
        self.error: BaseException | None = None
        self.unwanted = False

    def gain(self) -> list[Done]:
        """What this job alone brought: not what was there before and stands."""
        if self.result is None or any(self.result is one for one in self.before):
            return []
        return [self.result]


class Jobs:
    """Pulls of one process that run or have run, by a name that the caller gives. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}

    def start(self, name: str, work: Callable[[Progress], Done], *, again: bool = False) -> None:
        """Runs *work* in a thread, unless a job of that name runs or has succeeded.

        again: also if it has succeeded. The worker keeps the result until the job is dropped.
        """
        with self._lock:
            old = self._jobs.get(name)
            if old is not None and old.error is None and (old.result is None or not again):
                return
            before = [] if old is None else [*old.before, *old.gain()]
            job = self._jobs[name] = _Job(name, before)
        _pulls.give(functools.partial(self._run, job, work))

    def _run(self, job: _Job, work: Callable[[Progress], Done]) -> None:
        def progress(done: int, total: int) -> None:
            job.done_bytes, job.total = done, total

        result: Done | None = None
        error: BaseException | None = None
        try:
            result = work(progress)
        except BaseException as caught:
            error = caught
            _log.warning("fanin: pull %s failed: %s", job.name, caught)
        with self._lock:
            job.result, job.error = result, error
            unwanted = job.gain() if job.unwanted else []
        for one in unwanted:
            _release(one)

    def knows(self, name: str) -> bool:
        """Whether a job of that name was started and not dropped."""
        with self._lock:
            return name in self._jobs

    def poll(self, name: str) -> dict[str, Any]:
        """How far the job is: state "running", "done" or "failed", and what belongs to it."""
        with self._lock:
            job = self._jobs.get(name)
            report: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
            report |= {"state": "running", "bytes": 0, "total": 0, "reused": False, "transport": ""}
            if job is None:
                missing = NotFoundError.make(f"no pull {name} was started here", "start it")
                return {**report, "state": "failed", "error": to_wire(missing)}
            report["bytes"], report["total"] = job.done_bytes, job.total
            report["seconds"] = time.monotonic() - job.started
            if job.error is not None:
                return {**report, "state": "failed", "error": to_wire(job.error)}
            if job.result is None:
                return report
            told = {name: getattr(job.result, name) for name in _TOLD}
            return {**report, "state": "done", **told, "step": str(job.result.step)}

    def result(self, name: str) -> Done | None:
        """What the job of that name brought, if it is done."""
        with self._lock:
            job = self._jobs.get(name)
            return None if job is None else job.result

    def drop(self, *, name: str = "", path: str = "") -> None:
        """Forgets the job and gives its directory up, by its name or its path; does not wait."""
        with self._lock:
            found = [
                key
                for key, job in self._jobs.items()
                if key == name or (path and job.result is not None and job.result.path == path)
            ]
            jobs = [self._jobs.pop(key) for key in found]
            for job in jobs:
                job.unwanted = True
            results = [result for job in jobs for result in (*job.gain(), *job.before)]
        _release_all(results)

    def undo(self, name: str) -> None:
        """Gives up what the last start of that job brought; what earlier ones did stays."""
        with self._lock:
            job = self._jobs.pop(name, None)
            if job is None:
                return
            job.unwanted = True
            if job.before:
                old = self._jobs[name] = _Job(name, job.before[:-1])
                old.result = job.before[-1]
            results = job.gain()
        _release_all(results)


def _release_all(results: list[Done]) -> None:
    for result in results:
        # Deleting gigabytes takes a while, and the engine stands still meanwhile.
        _deletions.give(functools.partial(_release, result))


def _release(done: Done) -> None:
    try:
        done.lease.release(delete=True)
    except HostError as error:
        _log.error("fanin: %s", error)
