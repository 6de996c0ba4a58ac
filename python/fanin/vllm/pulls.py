# SPDX-License-Identifier: Apache-2.0
"""One adapter from a trainer into a directory, in the calling thread.

Nothing here knows vLLM or asyncio: the API server calls it in threads of its own
(:mod:`fanin.vllm.flights`), workers on other hosts likewise (:mod:`fanin.vllm.worker`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fanin.errors import FaninError, PeerError, RequestError
from fanin.names import check_step, parse, run_of
from fanin.vllm import checks
from fanin.vllm.checks import AdapterFacts, EngineFacts
from fanin.vllm.clients import ClientPool, Source, Target, remaining
from fanin.vllm.directories import Lease, Places

__all__ = ["Adapter", "Plan", "PullService", "Wanted", "which"]

_log = logging.getLogger("vllm.fanin")

Progress: TypeAlias = Callable[[int, int], None]

_WORLD = "FANIN_ERR_WORLD"
_CLOSED = "FANIN_ERR_CLOSED"
_TRIES = 5
_LABEL = "lora"


@dataclass(frozen=True)
class Wanted:
    """One adapter that somebody asked for.

    name: as engines know it. label: begins the directory's name. timeout: seconds for all of it.
    lora_alpha: what the caller believes it to be, None: nothing.
    """

    name: str
    run: str
    step: int
    label: str
    source: Source
    timeout: float = 60.0
    lora_alpha: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Two requests with one key are served by one pull."""
        return self.name, self.run, self.step, self.source, self.lora_alpha


def which(lora_name: Any, run_idx: Any, step: Any) -> tuple[str, int, str]:
    """The run, the step and the directory's label that a request means.

    lora_name: ``<prefix>-run<run>-step<step>``, which says run and step, or any name, if *run_idx*
    and *step* do. Does not block. Raises RequestError naming the field if something is missing,
    malformed or contradicts the name.
    """
    if not isinstance(lora_name, str) or not lora_name:
        raise RequestError.make("lora_name is missing", "name the adapter", key="lora_name")
    name = parse(lora_name)
    if name is None:
        for key, value in (("run_idx", run_idx), ("step", step)):
            if value is None:
                raise RequestError.make(
                    f"{key} is missing, and {lora_name!r} is not <prefix>-run<run>-step<step>",
                    "give run_idx and step, or a name that says them: which step is the newest is"
                    " decided by whoever asks, so that all engines get the same one",
                    key=key,
                )
        return run_of(run_idx), check_step(step), _LABEL
    run = str(name.run) if run_idx is None else run_of(run_idx)
    step = name.step if step is None else check_step(step)
    if (str(name.run), name.step) != (run, step):
        raise RequestError.make(
            f"{lora_name!r} names run {name.run}, step {name.step}, but the request asks for run"
            f" {run}, step {step}",
            "leave run_idx and step out, or name the adapter otherwise",
            key="lora_name",
        )
    return run, step, name.prefix


@dataclass(frozen=True)
class Plan:
    """What a pull will do: known to be loadable by the engine, nothing of it read yet."""

    target: Target
    world: str
    path: Path
    facts: AdapterFacts
    is_3d: bool


@dataclass(eq=False)
class Adapter:
    """An adapter that is here.

    path: the directory, which is there until the lease is released. bytes, seconds: what the pull
    moved and took; reused: another engine of this host had pulled it, nothing moved. lease: None
    if it was pulled by workers on other hosts. requests: vLLM's requests that name the path.
    pins: callers that have been given it and have made no request of it yet.
    """

    name: str
    run: str
    step: int
    label: str
    source: str
    world: str
    path: Path
    facts: AdapterFacts
    is_3d: bool
    bytes: int = 0
    seconds: float = 0.0
    reused: bool = False
    transport: str = ""
    lease: Lease | None = None
    requests: list[Any] = field(default_factory=list)
    pins: int = 0


class PullService:
    """Pulls adapters below one root directory. Any thread; calls block.

    limits: how the engine was started, asked anew for each pull.
    """

    def __init__(
        self,
        places: Places,
        pool: ClientPool,
        limits: Callable[[], EngineFacts] = EngineFacts,
    ) -> None:
        self.places = places
        self.pool = pool
        self._limits = limits
        self._lock = threading.Lock()
        self._facts: dict[tuple[str, str], tuple[Any, AdapterFacts]] = {}
        self._worlds: dict[str, str] = {}
        self._warned: set[tuple[str, str]] = set()

    def world_now(self, source: Source, timeout: float) -> str:
        """The world that answers at *source* now. Blocks for connecting, at most *timeout*."""
        deadline = time.monotonic() + timeout
        target = source.resolve()
        world = self.pool.discover(target, deadline)
        if target.world_id is not None and target.world_id != world:
            raise self._stale_file(source, target, world)
        self._note_world(source, world)
        return world

    def last_world(self, source: str) -> str | None:
        """The world that was last met at *source* (its text); None: none yet. Does not block."""
        with self._lock:
            return self._worlds.get(source)

    def _note_world(self, source: Source, world: str) -> None:
        with self._lock:
            self._worlds[source.text] = world

    @staticmethod
    def _stale_file(source: Source, target: Target, world: str) -> PeerError:
        return PeerError.make(
            f"{source.path} names world {target.world_id}, but {target.addresses[0]} is of world"
            f" {world}",
            "the file is older than the trainer: let the trainer write it again",
            address=target.addresses[0],
        )

    def plan(self, wanted: Wanted) -> Plan:
        """Connects and finds out whether the engine could load the adapter; reads no weights.

        Blocks at most wanted.timeout. Raises as :meth:`pull`.
        """
        deadline = time.monotonic() + wanted.timeout
        return self._retry(wanted, deadline, lambda client, plan: plan)

    def pull(self, wanted: Wanted, progress: Progress | None = None) -> Adapter:
        """Pulls exactly wanted.step, waiting for it if it has not come yet.

        Blocks at most wanted.timeout. The adapter's directory is held by its lease. A trainer
        that was started again meanwhile is pulled from anew.

        Raises NotFoundError (no such run), SupersededError (the step has passed),
        PullTimeoutError (it did not come), UnreachableError and ConnectionFailedError, PeerError,
        PausedError, StaleError, RequestError (this engine cannot load such an adapter, or the
        alpha is another), HostError.
        """
        started = time.monotonic()
        deadline = started + wanted.timeout

        def transfer(client: Any, plan: Plan) -> Adapter:
            return self._transfer(client, plan, wanted, deadline, progress)

        adapter = self._retry(wanted, deadline, transfer)
        adapter.seconds = time.monotonic() - started
        return adapter

    def _retry(self, wanted: Wanted, deadline: float, work: Callable[[Any, Plan], Any]) -> Any:
        """Runs *work* with a client of the trainer's present world."""
        hung_up = False
        for attempt in range(_TRIES):
            target = wanted.source.resolve()
            world = self.pool.world_of(target, deadline)
            try:
                with self.pool.borrow(target, world, deadline) as client:
                    plan = self._checked(client, wanted, target, world, deadline)
                    return work(client, plan)
            except FaninError as error:
                # A kept connection tells only now that its trainer has gone: another may be there.
                if error.name == _CLOSED and not hung_up:
                    hung_up = True
                    self.pool.forget(target)
                    continue
                if error.name != _WORLD or attempt == _TRIES - 1:
                    raise
                self.pool.forget(target)
                if target.world_id is not None and wanted.source.resolve() == target:
                    now = self.pool.discover(target, deadline)
                    if now != target.world_id:
                        raise self._stale_file(wanted.source, target, now) from error
                _log.info(
                    "fanin: the trainer at %s is no longer world %s; asking again",
                    wanted.source.text,
                    world,
                )
        raise AssertionError("unreachable")

    def _checked(
        self, client: Any, wanted: Wanted, target: Target, world: str, deadline: float
    ) -> Plan:
        facts = self._read_facts(client, wanted.run, world, deadline)
        # Only now has the world answered: before, it was what somebody remembered.
        self._note_world(wanted.source, world)
        checks.check_alpha(wanted.lora_alpha, facts)
        is_3d = checks.check_adapter(facts, self._limits(), wanted.run)
        path = self.places.choose(world, wanted.run, wanted.label, wanted.step)
        return Plan(target, world, path, facts, is_3d)

    def _read_facts(self, client: Any, run: str, world: str, deadline: float) -> AdapterFacts:
        """The publication's facts, read once for each version of its catalog."""
        version = self._version(client, run, deadline)
        with self._lock:
            known = self._facts.get((world, run))
        if known is not None and version is not None and known[0] == version:
            return known[1]
        metadata = client.metadata(run, timeout=remaining(deadline))
        entries = client.catalog(run, timeout=remaining(deadline))
        facts = checks.read_facts(entries, metadata)
        with self._lock:
            # Of one world only: a trainer that is gone does not come back as the same one.
            self._facts = {key: value for key, value in self._facts.items() if key[0] == world}
            self._facts[(world, run)] = (version, facts)
        return facts

    @staticmethod
    def _version(client: Any, run: str, deadline: float) -> Any:
        """What changes with catalog or metadata; None if nothing is committed yet."""
        found = [
            (info.rank, info.catalog_version, info.key_digest)
            for info in client.publications(timeout=remaining(deadline))
            if info.name == f"lora:{run}"
        ]
        if not found or any(version == 0 for _, version, _ in found):
            return None
        return sorted(found)

    def _transfer(
        self,
        client: Any,
        plan: Plan,
        wanted: Wanted,
        deadline: float,
        progress: Progress | None,
    ) -> Adapter:
        lease = self.places.lease(plan.path, deadline)
        try:
            result = client.pull_adapter(
                wanted.run,
                str(plan.path),
                step=wanted.step,
                timeout=remaining(deadline),
                progress=progress,
            )
        except BaseException:
            lease.release(delete=True)
            raise
        return self.arrived(
            wanted,
            plan,
            bytes=int(result.bytes),
            reused=bool(result.reused),
            transport=str(result.path),
            lease=lease,
        )

    def arrived(self, wanted: Wanted, plan: Plan, **pulled: Any) -> Adapter:
        """The adapter of a pull that has succeeded; *pulled* are fields of it. Does not block."""
        self.places.spend(plan.path, plan.world, wanted.run, wanted.label, wanted.step)
        return Adapter(
            name=wanted.name,
            run=wanted.run,
            step=wanted.step,
            label=wanted.label,
            source=wanted.source.text,
            world=plan.world,
            path=plan.path,
            facts=plan.facts,
            is_3d=plan.is_3d,
            **pulled,
        )

    def pull_to(self, job: dict[str, Any], progress: Progress | None = None) -> tuple[Any, Lease]:
        """The pull that another process has planned, into the path that it chose.

        job: plain values, see :class:`fanin.vllm.flights.Job`. Blocks at most job["timeout"].
        The result of the pull, and the lease that keeps the directory. Raises as :meth:`pull`.
        """
        deadline = time.monotonic() + float(job["timeout"])
        target = Target(tuple(job["addresses"]), job["server_name"], job["world"])
        path = Path(job["path"])
        lease = self.places.lease(path, deadline)
        try:
            with self.pool.borrow(target, job["world"], deadline) as client:
                result = client.pull_adapter(
                    job["run"],
                    str(path),
                    step=int(job["step"]),
                    timeout=remaining(deadline),
                    progress=progress,
                )
        except BaseException:
            lease.release(delete=True)
            raise
        return result, lease

    def warn_of_base_model(self, adapter: Adapter, served: str) -> None:
        """Logs once a run and world if the adapter was trained on another model than is served."""
        base = adapter.facts.base_model
        if not base or not served or Path(base).name == Path(served).name:
            return
        with self._lock:
            if (adapter.world, adapter.run) in self._warned:
                return
            self._warned.add((adapter.world, adapter.run))
        _log.warning(
            "fanin: run %s was trained on %s, and this engine serves %s",
            adapter.run,
            base,
            served,
        )

    def close(self) -> None:
        """Cancels running pulls and closes all connections. Any thread."""
        self.pool.close()
