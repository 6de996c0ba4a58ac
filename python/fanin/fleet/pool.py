# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's side: every engine of a pool gets the same step of an adapter.

::

    pool = EnginePool(["http://10.0.0.7:8000", "http://10.0.0.8:8000"], lora_alpha=32.0)
    result = pool.update_weights("/shared/run", "policy", step=120)
    # ask the engines for model=result.lora_name from now on

Steps may pass while engines pull: a trainer that serves its parameters by reference has only the
newest. When an engine says that a step is superseded, this module asks the trainer's ranks which
step all of them hold, and posts that one, under its own name, to all engines. An engine never
decides what is newest, so two engines never serve different steps under one name.
"""

from __future__ import annotations

import asyncio
import os
import queue
import ssl
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fanin._http import FAILURES, Reply, base_url, checked_key, post_json
from fanin._options import handed_on
from fanin._otel import carry, span
from fanin.errors import (
    CancelledError,
    FaninError,
    PullTimeoutError,
    RequestError,
    SupersededError,
    UnreachableError,
    status_name,
)
from fanin.info import (
    Target,
    TrainerInfo,
    addresses_of,
    client_arguments,
    is_path,
    split_address,
    wait_stable,
)
from fanin.names import AdapterName, check_run, check_step, parse

__all__ = ["EngineFailure", "EnginePool", "PoolError", "UpdateResult", "newest_step"]

LOAD_PATH = "/load_lora_adapter_nixl"
INIT_PATH = "/init_nixl_client"
_AGAIN = frozenset((429, 502, 503, 504))
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_CANCELLED = "the update was cancelled"
# An answer may still arrive so long after the deadline that the engines were given.
_GRACE = 0.5
_CODES = {status_name(code): code for code in range(-699, -99)}


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Why one engine does not have the step; ``str()`` says it in one sentence.

    Args:
        status: of HTTP, None if no answer came.
        code: "FANIN_ERR_..." as the engine's fanin route gave it, "" if it gave none.
        attempts: requests that were made.
        rank, address, key: what the engine's error is about, as its client was told.
    """

    engine: str
    status: int | None
    code: str
    message: str
    remedy: str = ""
    attempts: int = 1
    rank: int | None = None
    address: str = ""
    key: str = ""

    def __str__(self) -> str:
        told = self.message
        if self.status is not None:
            told = f"HTTP {self.status}" + (f" {self.code}" if self.code else "") + f": {told}"
        if self.attempts > 1:
            told += f" (after {self.attempts} attempts)"
        return told + (f"; remedy: {self.remedy}" if self.remedy else "")


class PoolError(FaninError):
    """Some engines did not get the step.

    Args:
        failures: EngineFailure by URL, of every engine that failed.
        loaded: URLs of the engines that have the adapter *lora_name* of *step*; they keep it, so
            the same update may be made again. The code is that of the first failure that has one.
    """

    failures: dict[str, EngineFailure]
    loaded: tuple[str, ...]
    lora_name: str
    step: int | None

    @classmethod
    def of(
        cls,
        failures: Mapping[str, EngineFailure],
        loaded: Sequence[str],
        what: str,
        lora_name: str = "",
        step: int | None = None,
    ) -> PoolError:
        """The error that names each of *failures*."""
        codes = [_CODES[f.code] for f in failures.values() if f.code in _CODES]
        told = "; ".join(f"{engine}: {failure}" for engine, failure in failures.items())
        error = cls.make(
            f"{len(failures)} of {len(failures) + len(loaded)} engines {what}: {told}",
            code=codes[0] if codes else UnreachableError.default_code,
        )
        error.failures = dict(failures)
        error.loaded = tuple(loaded)
        error.lora_name = lora_name
        error.step = step
        return error


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What all engines serve now, or with *stragglers* those in ``seconds``.

    Args:
        step, lora_name: of the adapter; not those that were asked for if *superseded*.
        seconds: by engine's URL, from the call until that engine had it.
        failures: by URL, why the others do not have it; those that were not waited for may still
            load it.
    """

    step: int
    lora_name: str
    superseded: bool
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, EngineFailure] = field(default_factory=dict)


# ----------------------------------------------------------- the newest step


def newest_step(
    trainer: Target,
    run: str | int,
    *,
    beyond: int | None = None,
    timeout: float = 5.0,
    server_name: str | None = None,
    world_id: str | None = None,
    stop: threading.Event | None = None,
    **client: Any,
) -> int:
    """The newest step of *run* that every rank of *trainer* has committed.

    Blocks at most *timeout*; any thread.

    Args:
        beyond: wait for one above this.
        timeout: seconds.
        world_id: 32 hex digits; None: any.
        stop: once it is set, the wait ends.
        client: what else fanin.Client takes, such as secret_file, tls_cert, tls_key, tls_ca.
            Without a secret or certificate: the secret that *trainer*'s nixl_info.json names.

    Raises:
        PullTimeoutError: says how far the ranks are.
        CancelledError: *stop* is set.
        TypeError: names an argument that fanin.Client does not take.
        FaninError: errors of fanin.Client.connect that do not pass by themselves.
    """
    from fanin.client import Client

    addresses = addresses_of(trainer)
    publication = "lora:" + check_run(run)
    deadline = time.monotonic() + timeout
    pause = 0.005
    told = "no rank has answered"
    more = handed_on("newest_step", Client, client)
    with Client(
        server_name=server_name, world_id=world_id, **client_arguments(trainer, more)
    ) as asked:
        connected = False
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                if not connected:
                    asked.connect(addresses, timeout=remaining)
                    connected = True
                steps = {
                    info.rank: info.step
                    for info in asked.publications(timeout=remaining)
                    if info.name == publication and info.state != "unpublished"
                }
                newest = min(steps.values(), default=0)
                if len(steps) == len(addresses) and (beyond is None or newest > beyond):
                    return newest
                told = f"{len(steps)} of {len(addresses)} ranks publish it, the last at {newest}"
            except FaninError as error:
                if not error.retryable:
                    raise
                connected = False
                asked.disconnect()
                told = str(error)
            if stop is None:
                time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            elif stop.wait(min(pause, max(deadline - time.monotonic(), 0))):
                raise CancelledError.make(_CANCELLED)
            pause = min(pause * 2, 0.25)
    wanted = "" if beyond is None else f" above {beyond}"
    raise PullTimeoutError.make(
        f"no step{wanted} of {publication} on all ranks within {timeout:g} s: {told}",
        "check that all ranks of the trainer run and commit",
        key=publication,
    )


# ------------------------------------------------------------------ one post


class _Flight:
    """One update: the name that engines are to get now, and who stops waiting for it."""

    def __init__(self, deadline: float, stop: threading.Event, world: str | None = None) -> None:
        self.deadline = deadline
        self.stop = stop
        self.world = world
        #: Why the engines that are asked again do not have it yet.
        self.last: dict[str, EngineFailure] = {}
        #: The trainer's launch whose step an engine says that it has.
        self.loaded: dict[str, str] = {}
        self._changed = threading.Condition()
        self._name: AdapterName | None = None

    @property
    def name(self) -> AdapterName | None:
        with self._changed:
            return self._name

    def set(self, name: AdapterName | None) -> None:
        with self._changed:
            self._name = name
            self._changed.notify_all()

    def pause(self, seconds: float, name: AdapterName | None) -> bool:
        """Waits; False if *name* is not wanted any more or nothing is."""
        with self._changed:
            self._changed.wait_for(lambda: self._name != name or self.stop.is_set(), seconds)
            return self._name == name and not self.stop.is_set()

    def judge(
        self, engine: str, reply: Reply, name: AdapterName | None, attempts: int
    ) -> EngineFailure | None:
        """Whether an answer of status 200 says that what was asked for was done."""
        if name is None:
            return None
        failure = _check_loaded(engine, reply, name, self.world, attempts)
        if failure is None:
            self.loaded[engine] = str(reply.json().get("world") or "")
        return failure

    def end(self) -> None:
        self.stop.set()
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Outcome:
    engine: str
    name: AdapterName | None
    failure: EngineFailure | None
    at: float

    @property
    def superseded(self) -> bool:
        return self.failure is not None and self.failure.code == "FANIN_ERR_SUPERSEDED"


def _no_answer(engine: str, error: BaseException, attempts: int) -> EngineFailure:
    message = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        message = "no answer in time"
    return EngineFailure(
        engine, None, "", f"cannot be reached: {message}", "check that the engine runs", attempts
    )


def _bug(engine: str, error: BaseException) -> EngineFailure:
    """Without the error's text: http.client's quotes the header that it does not take."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return EngineFailure(
        engine,
        None,
        "FANIN_ERR_INTERNAL",
        f"{type(error).__name__} in {at.name}, {at.filename}:{at.lineno}",
        "this is a bug of fanin: report it",
    )


def _refusal(engine: str, reply: Reply, attempts: int) -> EngineFailure:
    told = reply.error()
    remedy, rank, address, key = (told.get(name) for name in ("remedy", "rank", "address", "key"))
    if reply.status == 404 and not reply.code and not remedy:
        remedy = "start the engine with fanin's plugin: VLLM_PLUGINS=fanin"
    return EngineFailure(
        engine,
        reply.status,
        reply.code,
        reply.reason,
        remedy if isinstance(remedy, str) else "",
        attempts,
        rank=rank if isinstance(rank, int) else None,
        address=address if isinstance(address, str) else "",
        key=key if isinstance(key, str) else "",
    )


class EnginePool:
    """Engines that serve the same adapters.

    Objects are immutable; any thread may use one, several updates at once. Raises RequestError
    for malformed or repeated URLs and for a key that no header can have, TypeError naming an
    argument that fanin.Client does not take.

    Args:
        engines: URLs ``http://host:port``; a final ``/v1`` is dropped.
        api_key: sent as bearer token.
        timeout: seconds for a whole update.
        retries: how often a request to one engine is repeated when the engine cannot be reached or
            answers 429, 502, 503 or 504; None: until the timeout.
        run: the trainer's run, None: the one that the adapter's name or nixl_info.json tells, else
            0.
        lora_alpha: PEFT's alpha; engines refuse an adapter that was trained with another; None: not
            checked.
        server_name: demand this job's ranks, None: those that nixl_info.json names, if any.
        client: what else fanin.Client takes, for asking the trainer: secret_file, or tls_cert,
            tls_key and tls_ca; without any the environment's, else the secret that nixl_info.json
            names. Engines have their own.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: int | None = None,
        run: str | int | None = None,
        lora_alpha: float | None = None,
        server_name: str | None = None,
        **client: Any,
    ) -> None:
        from fanin.client import Client

        self._client = handed_on("EnginePool", Client, client, "world_id")
        if isinstance(engines, str):
            raise RequestError.make("engines is one text", "give a list of URLs")
        self.engines = tuple(base_url(engine) for engine in engines)
        for engine in self.engines:
            if self.engines.count(engine) > 1:
                raise RequestError.make(f"{engine} is given twice", "name every engine once")
        if not self.engines:
            raise RequestError.make("the pool has no engine", "give the engines' URLs")
        if not timeout > 0:
            raise RequestError.make(f"timeout {timeout!r} is not above 0", "give seconds")
        self.timeout = timeout
        self.retries = retries
        self.run = None if run is None else check_run(run)
        self.lora_alpha = lora_alpha
        self.server_name = server_name
        self._api_key = checked_key(api_key)

    # -------------------------------------------------------------- public

    def update_weights(
        self,
        weight_dir: Target,
        lora_name: str | None,
        step: int,
        *,
        timeout: float | None = None,
        stragglers: float | None = None,
    ) -> UpdateResult:
        """Makes every engine load *step* of the adapter, or the newest step if it has passed.

        Posts to all engines at once. Asks an engine that cannot be reached or is not ready again,
        until the timeout. Does not ask one again that refuses. If an engine says that the step is
        superseded, all engines get the newest step that all ranks have committed, under its own
        name. That repeats as often as needed.

        Blocks at most *timeout* and a little; any thread.

        Args:
            weight_dir: the step's directory: waits for its marker STABLE, then reads
                nixl_info.json. Or addresses, as fanin.info.addresses_of takes them.
            lora_name: either the whole name ``<prefix>-run<r>-step<s>``, whose step must be *step*,
                or the prefix.
            timeout: seconds; None: the pool's.
            stragglers: seconds to wait for the other engines after the first one has the step. So a
                dead engine does not cost the whole timeout. With it, if one engine has the step,
                the result names engines that failed or refuse in ``failures`` instead of an error.
                None: wait for all.

        Raises:
            PoolError: names every engine that failed and why. The others have the adapter:
                ``error.loaded``. It names all engines if they have the step of different launches
                of the trainer.
            PullTimeoutError: the marker does not come.
            RequestError: names contradict each other.
            FaninError: as fanin.info.read_info.
        """
        stop = threading.Event()
        try:
            return self._update(weight_dir, lora_name, step, timeout, stragglers, stop)
        finally:
            stop.set()

    async def aupdate_weights(
        self,
        weight_dir: Target,
        lora_name: str | None,
        step: int,
        *,
        timeout: float | None = None,
        stragglers: float | None = None,
    ) -> UpdateResult:
        """:meth:`update_weights` for asyncio: runs in a thread, does not block the loop.

        A cancelled task makes no further request, also while it waits for the marker. Requests that
        are under way go on, so engines may or may not have the adapter.
        """
        stop = threading.Event()
        try:
            return await asyncio.to_thread(
                self._update, weight_dir, lora_name, step, timeout, stragglers, stop
            )
        finally:
            stop.set()

    def init_engines(self, trainer: Target, *, timeout: float | None = None) -> None:
        """Tells every engine where the trainer is, for adapters that are asked for by name only.

        Blocks at most *timeout* and a little; any thread. Raises PoolError naming every engine that
        failed.

        Args:
            trainer: as fanin.info.addresses_of takes it. The pool passes a path on as a path, and
                the engines read it at each pull. It must mean the same file on their hosts.
            timeout: seconds, None: the pool's. Retries as :meth:`update_weights`.
        """
        body: dict[str, Any]
        if isinstance(trainer, os.PathLike) or (isinstance(trainer, str) and is_path(trainer)):
            body = {"trainer_addresses": os.path.abspath(trainer)}
        else:
            body = {"trainer_addresses": _pairs(addresses_of(trainer))}
        if self.server_name is not None:
            body["server_name"] = self.server_name
        seconds = self.timeout if timeout is None else timeout
        flight = _Flight(time.monotonic() + seconds, threading.Event())

        def body_at(deadline: float) -> dict[str, Any]:
            return {**body, "timeout": _engines_share(deadline - time.monotonic())}

        results: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        for engine in self.engines:
            self._start(engine, INIT_PATH, body_at, None, flight, results)
        failures: dict[str, EngineFailure] = {}
        waiting = set(self.engines)
        while waiting:
            outcome = _next(results, flight.deadline + _GRACE)
            if outcome is None:
                failures.update({e: _no_answer(e, TimeoutError(), 1) for e in waiting})
                break
            waiting.discard(outcome.engine)
            if outcome.failure is not None:
                failures[outcome.engine] = outcome.failure
        flight.end()
        if failures:
            loaded = [e for e in self.engines if e not in failures]
            raise PoolError.of(failures, loaded, "did not take the trainer's address")

    # ------------------------------------------------------------- the work

    def _update(
        self,
        weight_dir: Target,
        lora_name: str | None,
        step: int,
        timeout: float | None,
        stragglers: float | None,
        stop: threading.Event,
    ) -> UpdateResult:
        started = time.monotonic()
        timeout = self.timeout if timeout is None else timeout
        deadline = started + timeout
        if stragglers is not None and not stragglers >= 0:
            raise RequestError.make(
                f"stragglers {stragglers!r} is not 0 or above", "give seconds, or None"
            )
        wanted = self._parse(lora_name, step)
        with span("fanin.update", step=step, engines=len(self.engines)) as told:
            info = _trainer(weight_dir, timeout, stop)
            name = self._name(wanted, lora_name, step, info)
            told.set(run=name.run, lora_name=str(name))
            flight = _Flight(deadline, stop, info.world_id)
            flight.set(name)
            try:
                result = _Update(self, info, flight, name, started, stragglers).run()
            finally:
                flight.end()
            told.set(step=result.step, lora_name=result.lora_name, superseded=result.superseded)
            told.set(loaded=len(result.seconds), failed=len(result.failures))
            return result

    def _parse(self, lora_name: str | None, step: int) -> AdapterName | None:
        """Finds what is wrong with the arguments before anything is waited for."""
        check_step(step)
        if not isinstance(lora_name, str) or not lora_name:
            raise RequestError.make("the adapter has no name", "give lora_name, such as 'policy'")
        name = parse(lora_name)
        if name is None:
            AdapterName(lora_name, self.run or "0", step)
            return None
        if name.step != step:
            raise RequestError.make(
                f"adapter name {lora_name!r} says step {name.step}, the call says {step}",
                "give the prefix alone, or equal steps",
            )
        if self.run is not None and name.run != self.run:
            raise RequestError.make(
                f"adapter name {lora_name!r} says run {name.run}, the pool is for run {self.run}",
                "give the prefix alone, or make a pool for that run",
            )
        return name

    def _name(
        self, name: AdapterName | None, lora_name: str | None, step: int, info: TrainerInfo
    ) -> AdapterName:
        run = name.run if name is not None else self.run
        if run is not None and info.run is not None and run != info.run:
            raise RequestError.make(
                f"the update is of run {run}, but the trainer's file is of run {info.run}",
                "give the directory of that run",
            )
        if name is not None:
            return name
        return AdapterName(lora_name or "", run or info.run or "0", step)

    def _body(self, name: AdapterName, info: TrainerInfo, deadline: float) -> dict[str, Any]:
        remaining = deadline - time.monotonic()
        number = name.run.isdigit() and str(int(name.run)) == name.run
        body: dict[str, Any] = {
            "lora_name": str(name),
            "run_idx": int(name.run) if number else name.run,
            "trainer_addresses": _pairs(info.addresses),
            "timeout": _engines_share(remaining),
            "step": name.step,
        }
        if self.lora_alpha is not None:
            body["lora_alpha"] = self.lora_alpha
        server_name = self.server_name or info.server_name
        if server_name is not None:
            body["server_name"] = server_name
        return body

    def _start(
        self,
        engine: str,
        path: str,
        body: Any,
        name: AdapterName | None,
        flight: _Flight,
        results: queue.SimpleQueue[_Outcome],
    ) -> None:
        def drive() -> None:
            failure: EngineFailure | None
            try:
                failure = self._told(engine, path, body, name, flight)
            except BaseException as error:  # a bug must not look like an engine that hangs
                failure = _bug(engine, error)
            results.put(_Outcome(engine, name, failure, time.monotonic()))

        # Daemons: a name server or an engine that hangs must not hold up the process's end.
        threading.Thread(target=carry(drive), name=f"fanin-pool {engine}", daemon=True).start()

    def _told(
        self, engine: str, path: str, body: Any, name: AdapterName | None, flight: _Flight
    ) -> EngineFailure | None:
        """:meth:`_persist`, as a span."""
        with span("fanin.post", "client", engine=engine, route=path) as told:
            if name is not None:
                told.set(run=name.run, step=name.step, lora_name=str(name))
            failure = self._persist(engine, path, body, name, flight)
            if failure is not None:
                told.set(attempts=failure.attempts, status=failure.status)
                told.fail(failure.code or "no code", str(failure))
            return failure

    def _persist(
        self, engine: str, path: str, body: Any, name: AdapterName | None, flight: _Flight
    ) -> EngineFailure | None:
        """Posts until it succeeds, is refused, or the deadline is near. None: success."""
        attempts = 0
        pause = _FIRST_PAUSE
        while True:
            if flight.stop.is_set():
                return EngineFailure(engine, None, "", _CANCELLED, attempts=attempts)
            attempts += 1
            wait = pause
            try:
                reply = post_json(
                    engine,
                    path,
                    body(flight.deadline),
                    deadline=flight.deadline + _GRACE / 2,
                    api_key=self._api_key,
                )
            except FAILURES as error:
                failure = _no_answer(engine, error, attempts)
                final = isinstance(error, ssl.SSLCertVerificationError)
            else:
                if reply.status == 200:
                    return flight.judge(engine, reply, name, attempts)
                failure = _refusal(engine, reply, attempts)
                final = reply.status not in _AGAIN or reply.code == "FANIN_ERR_SUPERSEDED"
                wait = max(pause, reply.retry_after or 0.0)
            late = time.monotonic() + wait >= flight.deadline
            if final or late or (self.retries is not None and attempts > self.retries):
                return failure
            flight.last[engine] = failure
            if not flight.pause(wait, name):
                return failure
            pause = min(pause * 2, _LONGEST_PAUSE)


def _check_loaded(
    engine: str, reply: Reply, name: AdapterName, world: str | None, attempts: int
) -> EngineFailure | None:
    body = reply.json()
    if not isinstance(body, dict) or body.get("status") != "ok":
        return EngineFailure(
            engine, 200, "", f"unexpected answer: {reply.reason}", "check what runs there", attempts
        )
    if body.get("step", name.step) != name.step:
        return EngineFailure(
            engine,
            200,
            "FANIN_ERR_MISMATCH",
            f"loaded step {body['step']} under the name {name}",
            "let pool and engine run the same version of fanin",
            attempts,
        )
    loaded = body.get("world", world)
    if world is not None and loaded != world:
        return EngineFailure(
            engine,
            200,
            "FANIN_ERR_WORLD",
            f"loaded {name} from world {loaded}, but the trainer's file is of world {world}",
            "give the directory that the running trainer has written",
            attempts,
        )
    return None


def _next(results: queue.SimpleQueue[_Outcome], until: float) -> _Outcome | None:
    try:
        return results.get(timeout=max(until - time.monotonic(), 0.0))
    except queue.Empty:
        return None


def _engines_share(seconds: float) -> float:
    """The timeout that an engine is given: a little less, so that its reason still arrives."""
    return max(seconds - min(1.0, seconds / 10), 0.01)


def _pairs(addresses: Sequence[str]) -> list[list[Any]]:
    return [list(split_address(address)) for address in addresses]


def _trainer(weight_dir: Target, timeout: float, stop: threading.Event) -> TrainerInfo:
    def rest(seconds: float) -> None:
        if stop.wait(seconds):
            raise CancelledError.make(_CANCELLED)

    if isinstance(weight_dir, TrainerInfo):
        return weight_dir
    if isinstance(weight_dir, os.PathLike) or (
        isinstance(weight_dir, str) and weight_dir and is_path(weight_dir)
    ):
        return wait_stable(weight_dir, timeout, rest=rest)
    return TrainerInfo(addresses_of(weight_dir))


class _Update:
    """The thread of one update_weights: decides what is posted, collects what comes back."""

    def __init__(
        self,
        pool: EnginePool,
        info: TrainerInfo,
        flight: _Flight,
        name: AdapterName,
        started: float,
        stragglers: float | None,
    ) -> None:
        self.pool = pool
        self.stragglers = stragglers
        self.info = info
        self.flight = flight
        self.name = name
        self.started = started
        self.superseded = False
        self.results: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self.busy: set[str] = set()
        self.done: dict[str, _Outcome] = {}

    def run(self) -> UpdateResult:
        self._post()
        while len(self.done) < len(self.pool.engines):
            outcome = _next(self.results, self._until())
            if self.flight.stop.is_set():
                raise CancelledError.make(_CANCELLED)
            if outcome is None:
                if time.monotonic() < self._end():
                    continue
                break
            self.busy.discard(outcome.engine)
            if outcome.name == self.name and not outcome.superseded:
                self.done[outcome.engine] = outcome
            elif outcome.name != self.name or self._advance(outcome):
                self._post()
        return self._result()

    def _until(self) -> float:
        """Looks up every 0.1 s whether the caller has gone."""
        return min(time.monotonic() + 0.1, self._end())

    def _end(self) -> float:
        """When nobody is waited for any longer."""
        end = self.flight.deadline + _GRACE
        loaded = [outcome.at for outcome in self.done.values() if outcome.failure is None]
        if self.stragglers is None or not loaded:
            return end
        return min(end, min(loaded) + self.stragglers)

    def _post(self) -> None:
        name, info, pool = self.name, self.info, self.pool
        for engine in pool.engines:
            if engine not in self.busy and engine not in self.done:
                self.busy.add(engine)
                pool._start(
                    engine,
                    LOAD_PATH,
                    lambda deadline: pool._body(name, info, deadline),
                    name,
                    self.flight,
                    self.results,
                )

    def _advance(self, outcome: _Outcome) -> bool:
        """Makes the newest step the name for all; False: what it is cannot be found out."""
        try:
            step = newest_step(
                self.info,
                self.name.run,
                beyond=self.name.step,
                timeout=max(self.flight.deadline - time.monotonic(), 0),
                server_name=self.pool.server_name or self.info.server_name,
                world_id=self.info.world_id,
                stop=self.flight.stop,
                **self.pool._client,
            )
        except CancelledError:
            raise
        except FaninError as error:
            failure = EngineFailure(
                outcome.engine,
                None if outcome.failure is None else outcome.failure.status,
                SupersededError.make("").name,
                f"step {self.name.step} is superseded, and the newest is not known: {error}",
            )
            self.done[outcome.engine] = replace(outcome, failure=failure)
            return False
        self.name = self.name.at(step)
        self.superseded = True
        self.done.clear()
        self.flight.set(self.name)
        return True

    def _of_several_launches(self, failed: Mapping[str, EngineFailure]) -> dict[str, EngineFailure]:
        """Of engines that have the step of different launches: all, for which launch is the
        trainer's now is not known here."""
        worlds = {
            engine: world
            for engine in self.pool.engines
            if engine not in failed and (world := self.flight.loaded.get(engine))
        }
        if len(set(worlds.values())) < 2:
            return {}
        return {
            engine: EngineFailure(
                engine,
                200,
                "FANIN_ERR_WORLD",
                f"loaded {self.name} from world {world}, and other engines from another one: the"
                " trainer was started again",
                "update again",
            )
            for engine, world in worlds.items()
        }

    def _result(self) -> UpdateResult:
        failures: dict[str, EngineFailure] = {}
        for engine in self.pool.engines:
            outcome = self.done.get(engine)
            if outcome is None:
                failures[engine] = self.flight.last.get(engine) or _no_answer(
                    engine, TimeoutError(), 1
                )
            elif outcome.failure is not None:
                failures[engine] = outcome.failure
        failures.update(self._of_several_launches(failures))
        loaded = [engine for engine in self.pool.engines if engine not in failures]
        if failures and (self.stragglers is None or not loaded):
            raise PoolError.of(
                failures,
                loaded,
                f"did not load {self.name}",
                str(self.name),
                self.name.step,
            )
        return UpdateResult(
            self.name.step,
            str(self.name),
            self.superseded,
            {engine: self.done[engine].at - self.started for engine in loaded},
            failures,
        )
