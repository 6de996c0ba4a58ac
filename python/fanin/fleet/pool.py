# SPDX-License-Identifier: Apache-2.0
"""A step of an adapter, posted to every engine of a pool; see :mod:`fanin.pool`."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fanin._http import FAILURES, Reply, base_url, checked_key, post_json
from fanin._options import handed_on
from fanin._otel import carry, span
from fanin.client import Client
from fanin.errors import CancelledError, FaninError, RequestError, UnreachableError
from fanin.info import Target, TrainerInfo, addresses_of, path_of, split_address, wait_stable
from fanin.names import AdapterName, check_run, check_step, parse

from .driver import CODES
from .steps import newest_step

LOAD_PATH = "/load_lora_adapter_nixl"
INIT_PATH = "/init_nixl_client"
_AGAIN = frozenset((429, 502, 503, 504))
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_CANCELLED = "the update was cancelled"
# An answer may still arrive so long after the deadline that the engines were given.
_GRACE = 0.5


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
        codes = [CODES[f.code] for f in failures.values() if f.code in CODES]
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


# ------------------------------------------------------------------ one post


@dataclass(frozen=True, eq=False, slots=True)
class _Goal:
    """What all engines are to be posted now."""

    path: str
    body: Mapping[str, Any]
    name: AdapterName | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How it ended with one engine. world: the trainer's launch whose step it has, as it says."""

    failure: EngineFailure | None
    at: float
    world: str = ""
    final: bool = False

    @property
    def passed(self) -> bool:
        """Whether the engine waits to be told a newer step."""
        failure = self.failure
        return not self.final and failure is not None and failure.code == "FANIN_ERR_SUPERSEDED"


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
    told = f"{type(error).__name__} in {at.name}, {at.filename}:{at.lineno}"
    remedy = "this is a bug of fanin: report it"
    return EngineFailure(engine, None, "FANIN_ERR_INTERNAL", told, remedy)


def _refusal(engine: str, reply: Reply, attempts: int) -> EngineFailure:
    told = reply.told()
    if reply.status == 404 and not reply.code and not told.get("remedy"):
        told["remedy"] = "start the engine with fanin's plugin: VLLM_PLUGINS=fanin"
    said = {"attempts": attempts, **told}
    return EngineFailure(engine, reply.status, reply.code, reply.reason, **said)


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
        at = path_of(trainer) or _pairs(addresses_of(trainer))
        name = {} if self.server_name is None else {"server_name": self.server_name}
        body: dict[str, Any] = {"trainer_addresses": at, **name}
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        update = _Update(self, _Goal(INIT_PATH, body), deadline, threading.Event())
        update.run()
        failures = update.failures()
        if failures:
            loaded = [engine for engine in self.engines if engine not in failures]
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
            result = _AdapterUpdate(self, info, name, deadline, stop).update(started, stragglers)
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

    def _goal(self, name: AdapterName, info: TrainerInfo) -> _Goal:
        number = name.run.isdigit() and str(int(name.run)) == name.run
        body: dict[str, Any] = {
            "lora_name": str(name),
            "run_idx": int(name.run) if number else name.run,
            "trainer_addresses": _pairs(info.addresses),
            "step": name.step,
            "lora_alpha": self.lora_alpha,
            "server_name": self.server_name or info.server_name,
        }
        said = {field: value for field, value in body.items() if value is not None}
        return _Goal(LOAD_PATH, said, name)


def _check_loaded(
    engine: str, reply: Reply, name: AdapterName, world: str | None, attempts: int
) -> EngineFailure | None:
    body, code = reply.json(), ""
    if not isinstance(body, dict) or body.get("status") != "ok":
        told, remedy = f"unexpected answer: {reply.reason}", "check what runs there"
    elif body.get("step", name.step) != name.step:
        code, told = "FANIN_ERR_MISMATCH", f"loaded step {body['step']} under the name {name}"
        remedy = "let pool and engine run the same version of fanin"
    elif world is not None and (loaded := body.get("world", world)) != world:
        code = "FANIN_ERR_WORLD"
        told = f"loaded {name} from world {loaded}, but the trainer's file is of world {world}"
        remedy = "give the directory that the running trainer has written"
    else:
        return None
    return EngineFailure(engine, 200, code, told, remedy, attempts)


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
    path = path_of(weight_dir)
    if path is not None:
        return wait_stable(path, timeout, rest=rest)
    return TrainerInfo(addresses_of(weight_dir))


class _Update:
    """One goal for all engines of a pool, which may move on: a thread for each engine posts it."""

    def __init__(
        self,
        pool: EnginePool,
        goal: _Goal,
        deadline: float,
        stop: threading.Event,
        world: str | None = None,
    ) -> None:
        self.pool, self.goal, self.deadline, self.stop = pool, goal, deadline, stop
        self.world = world
        self.done: dict[str, _Outcome] = {}
        #: Why engines that are asked again do not have it yet.
        self.last: dict[str, EngineFailure] = {}
        self._changed = threading.Condition()

    def run(self, stragglers: float | None = None) -> None:
        """Blocks until all have ended, or nobody is waited for any longer."""
        try:
            for engine in self.pool.engines:
                drive = carry(partial(self._drive, engine))
                # Daemons: a name server or an engine that hangs must not hold up the process's end.
                name = f"fanin-pool {engine}"
                threading.Thread(target=drive, name=name, daemon=True).start()
            while True:
                with self._changed:
                    # Looks up every 0.1 s whether the caller has gone.
                    left = min(0.1, max(self._end(stragglers) - time.monotonic(), 0))
                    self._changed.wait_for(self._settled, left)
                    if self.stop.is_set():
                        raise CancelledError.make(_CANCELLED)
                    passed = [one for one, outcome in self.done.items() if outcome.passed]
                    late = time.monotonic() >= self._end(stragglers)
                    if not passed and (late or self._settled()):
                        return
                if passed:
                    self.advance(passed[0])
        finally:
            with self._changed:  # what comes later changes no book
                self.stop.set()
                self._changed.notify_all()

    def advance(self, engine: str) -> None:
        """Another goal, for *engine* says that this one has passed."""
        raise NotImplementedError

    def turn_to(self, goal: _Goal) -> None:
        """All engines are posted *goal*."""
        with self._changed:
            self.goal = goal
            self.done.clear()
            self._changed.notify_all()

    def failures(self) -> dict[str, EngineFailure]:
        """Of every engine that does not have it."""
        found = {}
        for engine in self.pool.engines:
            outcome = self.done.get(engine)
            if outcome is None:
                late = self.last.get(engine) or _no_answer(engine, TimeoutError(), 1)
                found[engine] = late
            elif outcome.failure is not None:
                found[engine] = outcome.failure
        return found

    def _settled(self) -> bool:
        passed = any(outcome.passed for outcome in self.done.values())
        return passed or len(self.done) == len(self.pool.engines)

    def _end(self, stragglers: float | None) -> float:
        """When nobody is waited for any longer."""
        end = self.deadline + _GRACE
        loaded = [outcome.at for outcome in self.done.values() if outcome.failure is None]
        return end if stragglers is None or not loaded else min(end, min(loaded) + stragglers)

    def _wanted(self, goal: _Goal | None, seconds: float) -> bool:
        """Waits; whether *goal* is still the goal, and somebody waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self.goal is not goal or self.stop.is_set(), seconds)
            return self.goal is goal and not self.stop.is_set()

    def _drive(self, engine: str) -> None:
        goal: _Goal | None = None
        left = 0.0
        while not self._wanted(goal, left) and not self.stop.is_set():
            goal = self.goal
            try:
                outcome = self._told(engine, goal)
            except BaseException as error:  # a bug must not look like an engine that hangs
                outcome = _Outcome(_bug(engine, error), time.monotonic())
            with self._changed:
                if self.goal is goal and not self.stop.is_set():
                    self.done[engine] = outcome
                    self._changed.notify_all()
            left = max(self.deadline + _GRACE - time.monotonic(), 0)

    def _told(self, engine: str, goal: _Goal) -> _Outcome:
        """:meth:`_persist`, as a span."""
        with span("fanin.post", "client", engine=engine, route=goal.path) as told:
            if (name := goal.name) is not None:
                told.set(run=name.run, step=name.step, lora_name=str(name))
            outcome = self._persist(engine, goal)
            if (failure := outcome.failure) is not None:
                told.set(attempts=failure.attempts, status=failure.status)
                told.fail(failure.code or "no code", str(failure))
            return outcome

    def _persist(self, engine: str, goal: _Goal) -> _Outcome:
        """Posts until it succeeds, is refused, is not wanted any more, or the deadline is near."""
        attempts, pause = 0, _FIRST_PAUSE
        while True:
            attempts += 1
            wait = pause
            share = _engines_share(self.deadline - time.monotonic())
            try:
                reply = post_json(
                    engine,
                    goal.path,
                    {**goal.body, "timeout": share},
                    deadline=self.deadline + _GRACE / 2,
                    api_key=self.pool._api_key,
                )
            except FAILURES as error:
                failure = _no_answer(engine, error, attempts)
                final = isinstance(error, ssl.SSLCertVerificationError)
            else:
                if reply.status == 200:
                    return self._judge(engine, reply, goal.name, attempts)
                failure = _refusal(engine, reply, attempts)
                final = reply.status not in _AGAIN or reply.code == "FANIN_ERR_SUPERSEDED"
                wait = max(pause, reply.retry_after or 0.0)
            retries = self.pool.retries
            final = final or (retries is not None and attempts > retries)
            if not final and time.monotonic() + wait < self.deadline:
                self.last[engine] = failure
                if self._wanted(goal, wait):
                    pause = min(pause * 2, _LONGEST_PAUSE)
                    continue
            return _Outcome(failure, time.monotonic())

    def _judge(
        self, engine: str, reply: Reply, name: AdapterName | None, attempts: int
    ) -> _Outcome:
        """Whether an answer of status 200 says that what was asked for was done."""
        if name is None:
            return _Outcome(None, time.monotonic())
        failure = _check_loaded(engine, reply, name, self.world, attempts)
        world = "" if failure is not None else str(reply.json().get("world") or "")
        return _Outcome(failure, time.monotonic(), world)


class _AdapterUpdate(_Update):
    """A step of an adapter for all engines, or the newest step once it has passed."""

    def __init__(
        self,
        pool: EnginePool,
        info: TrainerInfo,
        name: AdapterName,
        deadline: float,
        stop: threading.Event,
    ) -> None:
        super().__init__(pool, pool._goal(name, info), deadline, stop, info.world_id)
        self.info, self.name, self.asked = info, name, name

    def advance(self, engine: str) -> None:
        try:
            step = newest_step(
                self.info,
                self.name.run,
                beyond=self.name.step,
                timeout=max(self.deadline - time.monotonic(), 0),
                server_name=self.pool.server_name or self.info.server_name,
                world_id=self.info.world_id,
                stop=self.stop,
                **self.pool._client,
            )
        except CancelledError:
            raise
        except FaninError as error:
            told = f"step {self.name.step} is superseded, and the newest is not known: {error}"
            with self._changed:
                before = self.done[engine]
                assert before.failure is not None
                failure = replace(before.failure, message=told, remedy="")
                self.done[engine] = replace(before, failure=failure, final=True)
            return
        self.name = self.name.at(step)
        self.turn_to(self.pool._goal(self.name, self.info))

    def update(self, started: float, stragglers: float | None) -> UpdateResult:
        """Raises PoolError if an engine failed that was to be waited for."""
        self.run(stragglers)
        engines, name = self.pool.engines, self.name
        failures = self.failures()
        failures.update(self._of_several_launches(failures))
        loaded = [engine for engine in engines if engine not in failures]
        if failures and (stragglers is None or not loaded):
            raise PoolError.of(failures, loaded, f"did not load {name}", str(name), name.step)
        seconds = {engine: self.done[engine].at - started for engine in loaded}
        return UpdateResult(name.step, str(name), name != self.asked, seconds, failures)

    def _of_several_launches(self, failed: Mapping[str, EngineFailure]) -> dict[str, EngineFailure]:
        """Of engines that have the step of different launches: all, for which launch is the
        trainer's now is not known here."""
        worlds = {e: one.world for e, one in self.done.items() if e not in failed and one.world}
        told = (
            "loaded {} from world {}, and other engines from another one: the trainer was started"
            " again"
        )
        return {
            engine: EngineFailure(
                engine, 200, "FANIN_ERR_WORLD", told.format(self.name, world), "update again"
            )
            for engine, world in worlds.items()
            if len(set(worlds.values())) > 1
        }
