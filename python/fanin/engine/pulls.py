# SPDX-License-Identifier: Apache-2.0
"""One adapter from a trainer into a directory, in the calling thread.

Nothing here knows vLLM or asyncio: the API server calls it in threads of its own
(:mod:`fanin.engine.shared_pulls`), workers on other hosts likewise (:mod:`fanin.vllm.worker`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fanin.engine import checks
from fanin.engine.checks import AdapterFacts, EngineFacts
from fanin.engine.clients import ClientPool, Source, Target, incarnations_of, is_outlived, remaining
from fanin.engine.directories import Lease, Places
from fanin.engine.faults import refused_as_too_large
from fanin.engine.spares import Spares
from fanin.engine.waits import Waits
from fanin.errors import (
    ConnectionFailedError,
    FaninError,
    PeerError,
    PullTimeoutError,
    RequestError,
)
from fanin.names import check_step, parse, run_of

_log = logging.getLogger("fanin.engine")

Progress: TypeAlias = Callable[[int, int], None]
PlacesIn: TypeAlias = Callable[[Any, bool, float], list[Mapping[str, Any]] | None]

_WORLD = "FANIN_ERR_WORLD"
_CLOSED = "FANIN_ERR_CLOSED"
_TRIES = 5
_LAST_LOOK = 0.5
_ROLL_CALL = 1.0
_LAYOUTS = 64  # of adapters that fit, remembered
_LABEL = "lora"
# Of a pull one after the other; "scatter" is a part of "read", by several threads at once.
_PHASES = ("connect", "catalog", "plan", "wait", "begin", "read", "end", "write")
_TOO_LARGE = (
    "raise FANIN_MAX_BYTES (or max_bytes of the request); a larger file system to keep adapters in:"
    " docker run --shm-size, or another NIXL_LORA_CACHE_DIR"
)


@dataclass(frozen=True)
class Wanted:
    """One adapter that a caller asked for.

    Args:
        name: as engines know it.
        label: begins the directory's name.
        timeout: seconds for all of it.
        lora_alpha: what the caller believes it to be; None: nothing.
        dtype, trust_config, max_bytes: as :meth:`fanin.Client.pull_adapter` takes them.
        landing: "auto", or "directory" where the caller wants that.
    """

    name: str
    run: str
    step: int
    label: str
    source: Source
    timeout: float = 60.0
    lora_alpha: float | None = None
    dtype: str | None = None
    trust_config: bool = False
    max_bytes: int | None = None
    landing: str = "auto"

    @classmethod
    def by(
        cls, config: Any, source: Source, name: str, run: str, step: int, label: str, **said: Any
    ) -> Wanted:
        """As the engine is configured, but for what the caller has *said*."""
        fields = ("timeout", "dtype", "trust_config", "max_bytes", "landing")
        own = {field: getattr(config, field) for field in fields}
        return cls(name, run, step, label, source, **{**own, **said})

    @property
    def key(self) -> tuple[Any, ...]:
        """Two requests with one key are served by one pull."""
        return self.name, self.content, self.source, self.lora_alpha, self.max_bytes

    @property
    def content(self) -> tuple[Any, ...]:
        """What the files depend on, beside the world."""
        return self.run, self.step, self.dtype, self.trust_config

    @property
    def place(self) -> tuple[str, str, int]:
        """What :meth:`Places.choose` makes a path of: other files are another directory."""
        parts = [self.label]
        if self.dtype is not None:
            parts.append(self.dtype.lower())
        if self.trust_config:
            parts.append("trusted")
        return self.run, "-".join(parts), self.step

    @property
    def how(self) -> dict[str, Any]:
        """Those arguments of :meth:`fanin.Client.pull_adapter`, as plain values."""
        return {name: getattr(self, name) for name in ("dtype", "trust_config", "max_bytes")}


class StepToCome(Exception):
    """No rank has committed the step yet. *future* is done when it is worth while to look again,
    and holds the error of waiting for it, if there is one."""

    def __init__(self, target: Target, world: str, future: Future[None]) -> None:
        super().__init__("the step has not come")
        self.target, self.world, self.future = target, world, future


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
                    "give run_idx and step, or a name that says them: the caller decides which step"
                    " is the newest, so that all engines get the same one",
                    key=key,
                )
        return _run_of(run_idx), _step_of(step), _LABEL
    run = str(name.run) if run_idx is None else _run_of(run_idx)
    step = name.step if step is None else _step_of(step)
    if (str(name.run), name.step) != (run, step):
        raise RequestError.make(
            f"{lora_name!r} names run {name.run}, step {name.step}, but the request asks for run"
            f" {run}, step {step}",
            "leave run_idx and step out, or name the adapter otherwise",
            key="lora_name",
        )
    return run, step, name.prefix


def _run_of(run_idx: Any) -> str:
    try:
        return run_of(run_idx)
    except RequestError as error:
        raise RequestError.make(
            f"run_idx {run_idx!r} is no run", f"{error.remedy}: {error.message}", key="run_idx"
        ) from None


def _step_of(step: Any) -> int:
    try:
        return check_step(step)
    except RequestError as error:
        error.key = "step"
        raise


@dataclass(frozen=True)
class Plan:
    """What a pull will do: known to be loadable by the engine, nothing of it read yet.

    digest: of the catalog and the metadata. version: another one may have another digest; "": it
    is not known. incarnations: of the ranks.
    """

    target: Target
    world: str
    path: Path
    facts: AdapterFacts
    is_3d: bool
    digest: str = ""
    version: str = ""
    incarnations: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Adapter:
    """An adapter that is here.

    Args:
        source: where its trainer was found.
        addresses: of the ranks.
        path: the directory, which stays until the lease is released.
        bytes: that the pull moved.
        seconds: that the pull took.
        reused: another engine of this host had pulled it; nothing moved.
        phases: seconds of the pull's parts; of several workers, those of the slowest.
        ranks: how many were read; of several workers, by the slowest.
        shown: the secret or certificate for ranks over a network.
        lease: None if workers on other hosts pulled it.
        requests: vLLM's requests that name the path.
        pins: callers that were given it and have made no request of it yet.
        suspended: its name was taken away until its trainer's fate is known.
        outlived: its trainer's ranks were started again, and may have other bytes of its step.
        incarnations: of the ranks, by one life of their processes each.
    """

    name: str
    run: str
    step: int
    label: str
    source: Source
    addresses: tuple[str, ...]
    world: str
    path: Path
    facts: AdapterFacts
    is_3d: bool
    dtype: str | None = None
    trust_config: bool = False
    bytes: int = 0
    seconds: float = 0.0
    reused: bool = False
    transport: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    ranks: int = 0
    shown: str = ""
    lease: Lease | None = None
    requests: list[Any] = field(default_factory=list)
    pins: int = 0
    suspended: bool = False
    outlived: bool = False
    landing: str = "directory"
    landing_why: str = ""
    incarnations: Mapping[str, str] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """What is told of it, as plain values."""
        same = "run step world dtype trust_config bytes reused landing landing_why".split()
        return {**{one: getattr(self, one) for one in same}, "path": str(self.path)}

    @property
    def content(self) -> tuple[Any, ...]:
        """See :attr:`Wanted.content`."""
        return self.run, self.step, self.dtype, self.trust_config


class PullService:
    """Pulls adapters below one root directory. Any thread; calls block.

    limits: how the engine was started, asked anew for each pull. spares: when a client keeps a
    spare file; None: never. places_in: what the engine's workers say of an adapter's tensors, see
    :func:`fanin.engine.lora_places.judge`; by its tensors, is_3d and seconds to wait; None: they
    do not say.
    """

    def __init__(
        self,
        places: Places,
        pool: ClientPool,
        limits: Callable[[], EngineFacts] = EngineFacts,
        spares: Spares | None = None,
        places_in: PlacesIn | None = None,
    ) -> None:
        self.places = places
        self.pool = pool
        self.spares = Spares() if spares is None else spares
        self.waits = Waits(pool)
        self._limits = limits
        self._places_in = places_in
        self._placed: set[tuple[str, bool]] = set()
        self._lock = threading.Lock()
        self._facts: dict[tuple[str, str], tuple[str, AdapterFacts, str]] = {}
        self._met: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._warned: set[tuple[str, str]] = set()

    def world_now(self, source: Source, timeout: float, adapter: Adapter | None = None) -> str:
        """The world that answers at *source* now. Blocks for connecting, at most *timeout*.

        adapter: one that is here: notes whether that world has other bytes of its step by now.
        """
        deadline = time.monotonic() + timeout
        target = source.resolve()
        with self.pool.meet(target, deadline) as (client, world):
            self._note_world(source, target, world)
            if adapter is not None and adapter.world == world and not adapter.outlived:
                then = adapter.incarnations
                adapter.outlived = is_outlived(client, adapter.run, then, deadline)
        if target.world_id is not None and target.world_id != world:
            raise self._stale_file(source, target, world)
        return world

    def last_met(self, source: Source) -> tuple[str, tuple[str, ...]] | None:
        """The world last met at *source*, and its addresses; None: none yet. Does not block."""
        with self._lock:
            return self._met.get(source.text)

    def _note_world(self, source: Source, target: Target, world: str) -> None:
        with self._lock:
            self._met[source.text] = world, target.addresses

    # -------------------------------------------------------- what becomes of a world

    def runs_now(self, source: Source, world: str, timeout: float) -> set[str] | None:
        """The runs that *world* publishes; None: not all of its ranks say.

        Blocks at most about *timeout*. Raises PeerError if *source* names another world or
        another one answers there, ConnectionFailedError, PullTimeoutError, and what reading
        *source* raises.
        """
        deadline = time.monotonic() + timeout
        target = source.resolve()
        if target.world_id not in (None, world):
            raise PeerError.make(f"{source.path} names world {target.world_id}", code=-402)
        with self.pool.borrow(target, world, deadline) as client:
            found = client.publications(timeout=remaining(deadline))
            ranks = client.ranks()
        if not all(info.connected for info in ranks):
            return None
        return {info.name.removeprefix("lora:") for info in found}

    def named(self, sources: Iterable[Source], world: str) -> tuple[Source, str] | None:
        """That of *sources* whose file names another world than *world*, and that one; None: none.

        Blocks for reading the files; one that cannot be read names none.
        """
        for source in sources:
            with contextlib.suppress(FaninError):
                found = source.resolve().world_id
                if found not in (None, world):
                    return source, str(found)
        return None

    def successor(self, source: Source, world: str, timeout: float) -> str | None:
        """Who has taken the place of *world* at *source*: the other world, ``"another"`` if it is
        several; None if it is *world* still, whole.

        Blocks at most about *timeout*. Raises FaninError if nobody says, or not all ranks: they may
        be going one after the other.
        """
        target = source.resolve()
        if target.world_id not in (None, world):
            return target.world_id  # the file tells of it, whether it has come up or not
        try:
            with self.pool.meet(target, time.monotonic() + timeout) as (client, now):
                client.publications(timeout=min(_ROLL_CALL, timeout))
                whole = all(one.connected for one in client.ranks())
        except FaninError as error:
            if error.name != _WORLD:
                raise
            return "another"
        self._note_world(source, target, now)
        if now == world and not whole:
            raise ConnectionFailedError.make(
                f"not all ranks of world {world} are there", address=target.addresses[0]
            )
        return None if now == world else now

    def lost(self, source: Source, world: str, run: str) -> Future[None]:
        """See :meth:`Waits.lost`. Blocks for reading *source*, and raises what that raises."""
        return self.waits.lost(source.resolve(), world, run)

    @staticmethod
    def _stale_file(source: Source, target: Target, world: str) -> PeerError:
        return PeerError.make(
            f"{source.path} names world {target.world_id}, but {target.addresses[0]} is of world"
            f" {world}",
            "the file is older than the trainer: let the trainer write it again",
            address=target.addresses[0],
        )

    def plan(self, wanted: Wanted, deadline: float) -> Plan:
        """Connects and finds out whether the engine could load the adapter; reads no weights.

        Blocks until *deadline*. Raises as :meth:`pull_now`.
        """
        return self._retry(wanted, deadline, lambda client, plan: plan)

    def pull_now(
        self, wanted: Wanted, deadline: float, progress: Progress | None = None
    ) -> Adapter:
        """Pulls exactly wanted.step.

        Blocks until *deadline* (of time.monotonic). The adapter's directory is held by its lease. A
        trainer that was started again meanwhile is pulled from anew.

        Raises:
            StepToCome: at once: the step has not come.
            NotFoundError: no such run.
            SupersededError: the step has passed.
            RequestError: this engine cannot load such an adapter, or the alpha is another.
            FaninError: as :meth:`fanin.Client.pull_adapter`.
        """
        started = time.monotonic()

        def transfer(client: Any, plan: Plan) -> Adapter:
            return self._transfer(client, plan, wanted, deadline, progress)

        adapter: Adapter = self._retry(wanted, deadline, transfer)
        adapter.seconds = time.monotonic() - started
        return adapter

    def pull(self, wanted: Wanted, progress: Progress | None = None) -> Adapter:
        """As :meth:`pull_now`, but waits for the step; blocks at most wanted.timeout."""
        started = time.monotonic()
        deadline = started + wanted.timeout
        while True:
            try:
                adapter = self.pull_now(wanted, deadline, progress)
            except StepToCome as to_come:
                self._await(wanted, to_come, deadline)
                continue
            adapter.seconds = time.monotonic() - started
            return adapter

    def _await(self, wanted: Wanted, to_come: StepToCome, deadline: float) -> None:
        try:
            to_come.future.result(deadline - time.monotonic())
        except FaninError as error:
            if not moved_on(error):
                raise
        except FutureTimeoutError:
            to_come.future.cancel()
            raise self.overdue(wanted, to_come) from None

    def overdue(self, wanted: Wanted, to_come: StepToCome) -> PullTimeoutError:
        """The error of a step that has not come in time; names ranks that are behind, if they say.

        Blocks for some tenths of a second.
        """
        more = ""
        try:
            deadline = time.monotonic() + _LAST_LOOK
            with self.pool.borrow(to_come.target, to_come.world, deadline) as client:
                client.wait(wanted.run, step=wanted.step, timeout=_LAST_LOOK / 10)
        except PullTimeoutError as error:
            more = f": {error.message}"
        except FaninError as error:
            more = f": {error}"
        return PullTimeoutError.make(
            f"step {wanted.step} of run {wanted.run} did not come within"
            f" {wanted.timeout:g} s{more}",
            "is the trainer stuck, or further behind than this request may wait?",
            key=f"lora:{wanted.run}",
            address=to_come.target.addresses[0],
        )

    def newest(self, source: Source, run: str, deadline: float) -> int:
        """The newest step of *run* that all ranks hold. Blocks until *deadline*.

        Raises as :meth:`pull`; PullTimeoutError if there is none in time.
        """
        for attempt in range(_TRIES):
            target = source.resolve()
            world = self.pool.world_of(target, deadline)
            try:
                with self.pool.borrow(target, world, deadline) as client:
                    step = int(client.wait(run, timeout=remaining(deadline)))
                self._note_world(source, target, world)
                return step
            except FaninError as error:
                if not moved_on(error) or attempt == _TRIES - 1:
                    raise
                self.pool.forget(target)
        raise AssertionError("unreachable")

    def _retry(self, wanted: Wanted, deadline: float, work: Callable[[Any, Plan], Any]) -> Any:
        """Runs *work* with a client of the trainer's present world."""
        hung_up = False
        for attempt in range(_TRIES):
            target = wanted.source.resolve()
            world = self.pool.world_of(target, deadline)
            folder = self.places.choose(world, *wanted.place).parent
            try:
                with self._borrow(target, world, deadline, folder) as client:
                    plan = self._checked(client, wanted, target, world, deadline)
                    if plan is not None:
                        return work(client, plan)
                future = self.waits.expect(target, world, wanted.run, wanted.step)
                raise StepToCome(target, world, future)
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
                    self._note_world(wanted.source, target, now)
                    if now != target.world_id:
                        raise self._stale_file(wanted.source, target, now) from error
                _log.info(
                    "fanin: the trainer at %s is no longer world %s; asking again",
                    wanted.source.text,
                    world,
                )
        raise AssertionError("unreachable")

    def _borrow(
        self, target: Target, world: str, deadline: float, folder: Path
    ) -> contextlib.AbstractContextManager[Any]:
        """A client of the pool's: the one that pulled into *folder* last, if it is idle."""
        return self.pool.borrow(
            target, world, deadline, lambda client: self.spares.knows(client, folder)
        )

    def _bring(
        self,
        client: Any,
        run: str,
        path: Path,
        step: int,
        deadline: float,
        progress: Progress | None,
        how: dict[str, Any],
    ) -> tuple[Any, Lease]:
        """One pull, and what is remembered of it for the next. *path* stays if it succeeds."""
        lease = self.places.lease(path, deadline)
        try:
            how = {**how, "spare_file": self.spares.may(client, path.parent), "progress": progress}
            left = remaining(deadline)
            result = client.pull_adapter(run, str(path), step=step, timeout=left, **how)
        except BaseException as error:
            lease.release(delete=True)
            if isinstance(error, FaninError):
                raise refused_as_too_large(error, _TOO_LARGE) from None
            raise
        self.spares.pulled(client, path.parent, int(result.bytes))
        return result, lease

    def _checked(
        self, client: Any, wanted: Wanted, target: Target, world: str, deadline: float
    ) -> Plan | None:
        """What to do; None: the step has not come."""
        found = [
            info
            for info in client.publications(timeout=remaining(deadline))
            if info.name == f"lora:{wanted.run}"
        ]
        # Only now has the world answered: before, it was what somebody remembered.
        self._note_world(wanted.source, target, world)
        if is_to_come(found, wanted.step):
            return None
        version = version_of(found, wanted.run)
        facts, digest = self._read_facts(client, wanted.run, world, deadline, version)
        checks.check_alpha(wanted.lora_alpha, facts)
        is_3d = checks.check_adapter(facts, self._limits(), wanted.run)
        self._check_places(facts, is_3d, digest, wanted.run, deadline)
        path = self.places.choose(
            world, *wanted.place, lambda then: is_outlived(client, wanted.run, then, deadline)
        )
        ranks = incarnations_of(client)
        return Plan(target, world, path, facts, is_3d, digest, version, ranks)

    def _read_facts(
        self, client: Any, run: str, world: str, deadline: float, version: str
    ) -> tuple[AdapterFacts, str]:
        """The publication's facts and digest, read once for each version of its catalog."""
        with self._lock:
            known = self._facts.get((world, run))
        if known is not None and version and known[0] == version:
            return known[1:]
        metadata = client.metadata(run, timeout=remaining(deadline))
        entries = client.catalog(run, timeout=remaining(deadline))
        facts, digest = checks.read_facts(entries, metadata), catalog_digest(entries, metadata)
        with self._lock:
            # Of one world only: a trainer that is gone does not come back as the same one.
            self._facts = {key: value for key, value in self._facts.items() if key[0] == world}
            self._facts[(world, run)] = (version, facts, digest)
        return facts, digest

    def _check_places(
        self, facts: AdapterFacts, is_3d: bool, digest: str, run: str, deadline: float
    ) -> None:
        """Asks the engine's workers once for each layout; what has no place is refused anew."""
        if self._places_in is None or (digest, is_3d) in self._placed:
            return
        answers = self._places_in(facts.tensors, is_3d, remaining(deadline))
        if answers is None:
            return
        checks.check_places(facts, answers, run)
        with self._lock:
            if len(self._placed) >= _LAYOUTS:
                self._placed.clear()
            self._placed.add((digest, is_3d))

    def _transfer(
        self, client: Any, plan: Plan, wanted: Wanted, deadline: float, progress: Progress | None
    ) -> Adapter:
        what = client, wanted.run, plan.path, wanted.step
        result, lease = self._bring(*what, deadline, progress, wanted.how)
        return self.arrived(
            wanted,
            plan,
            bytes=int(result.bytes),
            reused=bool(result.reused),
            transport=str(result.path),
            phases=phases_of(result),
            ranks=len(result.ranks),
            lease=lease,
        )

    def arrived(self, wanted: Wanted, plan: Plan, **pulled: Any) -> Adapter:
        """The adapter of a pull that has succeeded; *pulled* are fields of it. Does not block."""
        self.places.spend(plan.path, plan.world, *wanted.place)
        asked = "name run step label source dtype trust_config".split()
        found = "world path facts is_3d incarnations".split()
        return Adapter(
            **{one: getattr(wanted, one) for one in asked},
            **{one: getattr(plan, one) for one in found},
            addresses=plan.target.addresses,
            shown=self.pool.shown(plan.target),
            **pulled,
        )

    def pull_to(self, job: dict[str, Any], progress: Progress | None = None) -> tuple[Any, Lease]:
        """The pull that another process has planned, into the path that it chose.

        job: plain values, as :mod:`fanin.engine.shared_pulls` makes them. Blocks at most
        job["timeout"]. The result of the pull, and the lease that keeps the directory. Raises as
        :meth:`pull`.
        """
        deadline = time.monotonic() + float(job["timeout"])
        path = Path(job["path"])
        with self.connected(job, deadline, path.parent) as client:
            what = client, job["run"], path, int(job["step"])
            return self._bring(*what, deadline, progress, job["how"])

    def connected(
        self, job: dict[str, Any], deadline: float, folder: Path | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A client of the trainer from which another process has planned a pull."""
        addresses, world = tuple(job["addresses"]), job["world"]
        target = Target(addresses, job["server_name"], world, job.get("secret_file"))
        if folder is None:
            return self.pool.borrow(target, world, deadline)
        return self._borrow(target, world, deadline, folder)

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
            "fanin: run %s was trained on %s, and this engine serves %s", adapter.run, base, served
        )

    def close(self) -> None:
        """Cancels running pulls and closes all connections. Any thread."""
        self.waits.close()
        self.pool.close()


def phases_of(result: Any) -> dict[str, float]:
    """Seconds of the parts of a pull that follow each other; *result*: what the client says."""
    return {name: float(getattr(result, name)) for name in _PHASES}


def moved_on(error: FaninError) -> bool:
    """Whether *error* says that the trainer has gone, and that another may be there."""
    return error.name in (_WORLD, _CLOSED)


def is_to_come(found: Iterable[Any], step: int) -> bool:
    """Whether no rank has come to *step* yet, as far as they say; *found* is of one run.

    If one has, or one is paused, the pull itself knows how long to wait for the others.
    """
    infos = list(found)
    return bool(infos) and all(
        info.state != "paused" and (info.state == "unpublished" or info.step < step)
        for info in infos
    )


def version_of(found: Iterable[Any], run: str) -> str:
    """What changes with a run's catalog or metadata; "" if nothing is committed yet.

    found: what :meth:`fanin.Client.publications` says.
    """
    name = f"lora:{run}"
    versions = [
        (info.rank, info.catalog_version, str(info.key_digest))
        for info in found
        if info.name == name
    ]
    if not versions or any(version == 0 for _, version, _ in versions):
        return ""
    return json.dumps(sorted(versions))


def catalog_digest(entries: Iterable[Any], metadata: Mapping[str, str]) -> str:
    """Of all that says how an adapter's tensors are loaded, beside their values."""
    sums = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for entry in sorted(entries, key=lambda one: str(one.name)):
        sums.update(f"{entry.name}\0{entry.dtype}\0{tuple(entry.shape)}\n".encode())
    return sums.hexdigest()
