# SPDX-License-Identifier: Apache-2.0
"""The engines of a fleet, and one call that brings a step of the whole model to all of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fanin._http import checked_key
from fanin._options import handed_on
from fanin._otel import carry, span
from fanin.check import Ranks
from fanin.check import trained as digests_of
from fanin.errors import FaninError, NotFoundError, PullTimeoutError, RequestError, StateError
from fanin.info import Target, addresses_of, path_of
from fanin.names import check_run, check_step
from fanin.sglang.asking import told_by_sglang

from .driver import CHECKPOINT, CODES, UNSAID, Driver, InitInfo, Options, Wire
from .endpoints import (
    PAUSE_MODES,
    PREFETCH,
    Endpoint,
    EndpointResult,
    SyncError,
    SyncResult,
    check_group,
    check_seconds,
    endpoint_of,
)
from .engine_sglang import SGLang
from .engine_sync import (
    GRACE,
    SAY_EVERY,
    EngineSync,
    LeaveAlone,
    Order,
    Plan,
    Record,
    Restarts,
    Trained,
    failure,
)
from .engine_vllm import VLLM
from .steps import Committed, Run, Wanted, committed, run_of, wanted_of

_log = logging.getLogger("fanin.sync")

_HEALTH = 10.0  # seconds
_RESUME = 30.0
_TELLS_ANEW = ("init", "start", "update", "finish", "verify")
# An engine's own reason for a pull that took too long must still arrive.
_PULL_SHARE = 0.9
_SAY_WAITING = 2 * SAY_EVERY


class Registry:
    """Engines that are to have the same model, each in its own process, on whatever host.

    Any thread may call any method. Syncs of different engines may run at once. Nothing here needs
    PyTorch.

    Args:
        trainer: as :func:`fanin.info.addresses_of` takes it. The registry passes a path on as a
            path, and the engines read it at each update. The path must mean the same file on their
            hosts.
        run: of ``full:<run>``.
        timeout: seconds for a whole sync.
        pull_timeout: seconds that an engine is given for its pull; None: nine tenths of *timeout*.
        server_name: demand this job's ranks of the trainer.
        ask_trainer: whether a sync asks the trainer's ranks for the step before it pauses anything;
            False where only the engines can reach them.
        api_key: of engines that are added without one, printable ASCII. Whitespace at its ends is
            dropped.
        init: what vLLM's init_info is to have besides: ``{"unused": [...]}``, ``{"mode":
            "loader"}``. With ``{"draft_run": "draft"}`` each sync also brings the same step of that
            run to draft models.
        prefetch: of syncs that do not say it. "auto": engines that can read a step beside their
            model do so before they are paused, at the price of as much memory; False: none does;
            True: an engine that cannot is an error.
        verify_served: of syncs that do not say it: compares what an engine serves with what the
            ranks train, as :func:`fanin.check.served` does. "auto": in the first update after an
            init, a restart, a sleep or a reload; False: never; True: in every sync, which fails if
            that cannot be done. Without *ask_trainer* nothing is compared.
        resync: a thread asks the engines every two seconds. To an engine that was started again it
            brings the step that the engine had, or the newest if that has passed.
        client: what else :class:`fanin.Client` takes, for asking the trainer: ``secret_file``, or
            ``tls_cert``, ``tls_key`` and ``tls_ca``. Without any: the environment's, else the
            secret that nixl_info.json names. Engines have their own.

    Raises:
        RequestError: an argument is wrong.
        TypeError: an argument that :class:`fanin.Client` does not take.
    """

    def __init__(
        self,
        trainer: Target,
        *,
        run: str | int = "0",
        timeout: float = 300.0,
        pull_timeout: float | None = None,
        server_name: str | None = None,
        ask_trainer: bool = True,
        api_key: str | None = None,
        init: Mapping[str, Any] | None = None,
        prefetch: bool | str = "auto",
        verify_served: bool | str = "auto",
        resync: bool = False,
        **client: Any,
    ) -> None:
        from fanin.client import Client

        self._client = handed_on("Registry", Client, client)
        self.run = check_run(run)
        if not isinstance(init, Mapping | None):
            raise RequestError.make(f"init is {init!r}", 'give {"unused": [...]}', key="init")
        self._init = dict(init or {})
        for name in sorted({"trainer", "run", "timeout"} & self._init.keys()):
            raise RequestError.make(
                f"init has the field {name!r}", "give it as the registry's own argument", key=name
            )
        self.timeout = check_seconds(timeout, "timeout")
        self.pull_timeout = (
            None if pull_timeout is None else check_seconds(pull_timeout, "pull_timeout")
        )
        self.prefetch = _one_of_three("prefetch", prefetch)
        self.verify_served = _one_of_three("verify_served", verify_served)
        self.server_name = server_name
        self.ask_trainer = ask_trainer
        self._trainer = trainer
        self._said = path_of(trainer) or addresses_of(trainer)
        self._api_key = checked_key(api_key)
        #: What the next syncs bring, and as what: see :meth:`set_quantization`.
        self._chosen = self.run
        self._wanted: Wanted | None = None
        self._changed = threading.Condition()
        self._records: dict[str, Record] = {}
        self._leaving: dict[str, Record] = {}  # were removed while a sync was at them
        self._restarts = Restarts(weakref.ref(self))
        if resync:
            self._restarts.start()

    # ------------------------------------------------------------ the engines

    def add(
        self,
        url: str,
        *,
        kind: str = "auto",
        group: str = "default",
        world_size: int | None = None,
        api_key: str | None = None,
        use_key: bool = True,
    ) -> Endpoint:
        """Adds an engine; the same one twice is one engine. Asks nothing of it: does not block.

        An engine that is there already keeps what it is, and goes into *group*. It keeps its key
        too, unless one is given.

        Args:
            url: ``http://host:port`` of the engine's server.
            kind: "vllm" or "sglang"; "auto": asked at its first health check.
            group: a name that syncs can choose by.
            world_size: its workers; None: not said.
            api_key: the engine's; None: the registry's.
            use_key: False: without an *api_key* of its own the engine is sent none, not the
                registry's either. For URLs that callers choose.

        Returns:
            The engine as it is kept.

        Raises:
            RequestError: an argument is wrong; *kind* contradicts what the engine is known as.
        """
        with self._changed:
            return self._keep(self._meant(url, kind, group, world_size, api_key, use_key))

    def add_well(self, url: str, *, timeout: float = _HEALTH, **more: Any) -> Endpoint:
        """Asks an engine whether it is well, and adds it if it is.

        The question goes with the key that the engine would be sent afterwards. If this raises,
        nothing has changed.

        Args:
            url, more: as :meth:`add`.
            timeout: seconds that the call blocks at most.

        Returns:
            The engine as it is kept.

        Raises:
            FaninError: what :meth:`add` and :meth:`check` raise.
        """
        meant = self._meant(url, **more)
        self._health(meant, time.monotonic() + timeout)
        return self._keep(meant)

    def _meant(
        self,
        url: str,
        kind: str = "auto",
        group: str = "default",
        world_size: int | None = None,
        api_key: str | None = None,
        use_key: bool = True,
    ) -> Record:
        """What an engine would be with this, one that is there already or not. Does not block."""
        endpoint = endpoint_of(url, kind, group, world_size)
        withheld = api_key is None and self._api_key is not None and not use_key
        own = self._api_key if api_key is None and use_key else api_key
        wire = Wire(endpoint.url, own, withheld=withheld)
        with self._changed:
            known = self._records.get(endpoint.url)
            if known is None:
                return Record(endpoint, wire)
            if kind not in ("auto", known.endpoint.kind) and known.endpoint.kind != "auto":
                raise RequestError.make(
                    f"{endpoint.url} is known as {known.endpoint.kind}, and added as {kind}",
                    "remove it first",
                    address=endpoint.url,
                )
            endpoint = replace(
                known.endpoint,
                kind=known.endpoint.kind if kind == "auto" else kind,
                group=group,
                world_size=world_size or known.endpoint.world_size,
            )
            if api_key is not None or (known.wire.withheld and not withheld):
                return Record(endpoint, wire)
            return Record(endpoint, known.wire, known.driver)

    def _keep(self, meant: Record) -> Endpoint:
        url = meant.endpoint.url
        with self._changed:
            known = self._records.setdefault(url, meant)
            if known is meant:
                meant.before = self._leaving.pop(url, None)
            known.endpoint, known.wire, known.driver = meant.endpoint, meant.wire, meant.driver
            return known.endpoint

    def remove(self, url: str) -> bool:
        """Forgets an engine, dead or not, also while a sync is under way. Does not block.

        Asks nothing of the engine. A sync that is under way goes on without it. The engine's
        present phase ends, and the sync does not resume the engine. An engine that is added again
        before that is in that sync until then.

        Args:
            url: as it was added.

        Returns:
            False: it was not there.

        Raises:
            RequestError: *url* is no URL of an engine.
        """
        with self._changed:
            record = self._records.pop(endpoint_of(url, "auto", "default", None).url, None)
            if record is None:
                return False
            record.removed = True
            self._leaving = {url: left for url, left in self._leaving.items() if left.asked}
            if record.asked:
                self._leaving[record.endpoint.url] = record
            self._changed.notify_all()
            return True

    def endpoints(self, group: str | None = None) -> Sequence[Endpoint]:
        """The engines, in the order in which they were added; of *group*, if one is given."""
        with self._changed:
            every = [record.endpoint for record in self._records.values()]
        return [endpoint for endpoint in every if group in (None, endpoint.group)]

    def busy(self) -> list[str]:
        """The URLs of engines that are in a sync."""
        with self._changed:
            return [url for url, record in self._records.items() if record.busy]

    def check(self, url: str, *, timeout: float = _HEALTH) -> Endpoint:
        """Asks one engine whether it lives, and what it is.

        Args:
            url: as it was added.
            timeout: seconds that the call blocks at most.

        Returns:
            The engine, with its kind.

        Raises:
            NotFoundError: the engine was not added.
            UnreachableError, PullTimeoutError, RequestError, PeerError: naming the engine.
        """
        record = self._known(url)
        self._health(record, time.monotonic() + timeout)
        with self._changed:
            return record.endpoint

    def healthy(self, *, timeout: float = _HEALTH) -> set[str]:
        """Asks all engines at once which of them are well.

        Args:
            timeout: seconds that the call blocks at most.

        Returns:
            The URLs of those that are.
        """
        with self._changed:
            records = list(self._records.values())
        return set(self._versions_of(records, timeout))

    def _versions(self) -> list[tuple[str, Order, str]]:
        """Of the engines that have got a step, are in no sync and answer: what they have got, and
        the version of their weights."""
        with self._changed:
            had = {url: r for url, r in self._records.items() if r.had is not None and not r.busy}
        found = self._versions_of(had.values(), _HEALTH)
        return [(url, one, found[url]) for url in found if (one := had[url].had) is not None]

    def _versions_of(self, records: Iterable[Record], timeout: float) -> dict[str, str]:
        """Of those that are well, by URL. Blocks at most *timeout* and a little."""
        found: dict[str, str] = {}
        deadline = time.monotonic() + timeout

        def ask(record: Record) -> None:
            with contextlib.suppress(FaninError):
                found[record.endpoint.url] = self._health(record, deadline)[1]

        threads = [threading.Thread(target=ask, args=(one,), daemon=True) for one in records]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline + 1.0 - time.monotonic(), 0))
        return dict(found)

    def resume(self, url: str, *, timeout: float = _RESUME) -> None:
        """Lets an engine generate again that a failed sync left paused, its old weights whole.

        Args:
            url: as it was added.
            timeout: seconds that the call blocks at most.

        Raises:
            StateError: its weights were being written, and only a sync makes them whole; it is in a
                sync.
            NotFoundError: the engine was not added.
            FaninError: what requests to the engine raise.
        """
        record, caller = self._known(url), object()
        try:
            self._take([record], caller)
            if record.dirty:
                raise StateError.make(
                    f"{record.endpoint.url} may have weights of two steps", "sync it", address=url
                )
            deadline = time.monotonic() + timeout
            driver = record.driver or self._health(record, deadline)[0]
            with record.wire.asked("resume"):
                driver.resume(deadline)
            record.paused = False
        finally:
            self._release([record], caller)

    def _known(self, url: str) -> Record:
        wanted = endpoint_of(url, "auto", "default", None).url
        with self._changed:
            record = self._records.get(wanted)
        if record is None:
            raise NotFoundError.make(f"{wanted} was not added", "add it", address=wanted)
        return record

    def _health(self, record: Record, deadline: float) -> tuple[Driver, str]:
        """Its driver, which is kept if it is well, and the version of its weights."""
        with record.wire.asked("health"):
            driver = record.driver or driver_of(record.endpoint.kind, record.wire, deadline)
            version = driver.health(deadline)
        with self._changed:
            if driver.wire is record.wire:  # it has not got another key meanwhile
                record.driver = driver
                record.endpoint = replace(record.endpoint, kind=driver.kind)
        return driver, version

    # ---------------------------------------------------------------- a sync

    def sync(
        self,
        step: int | None = None,
        group: str | Iterable[str] | None = None,
        *,
        urls: Iterable[str] | None = None,
        version: str | None = None,
        timeout: float | None = None,
        pause_mode: str = "retract",
        keep_caches: bool | None = None,
        skip_dead: bool = False,
        again: bool = False,
        prefetch: bool | str | None = None,
        verify_served: bool | str | None = None,
        quantization: Any = None,
        skip_modules: Sequence[str] | None = None,
    ) -> SyncResult:
        """Brings *step* to every engine, or to those of the groups, all at once.

        The sync first waits for the trainer's ranks, then checks the health of all engines. Until
        then it pauses nothing. Each engine then runs its own phases: init (when it is new, was
        started again or failed), reading ahead, pause, start, update, finish, verify, resume. Start
        comes with reading ahead if there is any. An engine that fails from pause on stays paused,
        because it may have weights of two steps. The others go on. The next sync tries the engine
        again.

        An engine that serves something else than what is trained answers nobody, and the error
        names the tensors. If the two cannot be compared, the note says why, and the next sync tries
        again. Either the trainer has no digests of the step, or the engine cannot be asked. For the
        comparison a paused worker reads its model once more. That takes 6 ms a GB on an H200. It
        takes 12 s a GB in vLLM's build for CPUs, whose layers have to be asked by products.

        Blocks at most *timeout* and a little; any thread. A sync that is interrupted
        (KeyboardInterrupt) begins no further phase, and may leave an engine paused. Each engine is
        in that sync until its present phase has ended, at the timeout at the latest. The next sync
        then repairs it.

        Args:
            step: None: the newest that all ranks of the trainer have.
            group: the engines of this group or of these groups only; None: of all.
            urls: these engines only; not with *group*.
            version: what the engines call their weights then; None: ``step-<s>``.
            timeout: seconds for all of it; None: the registry's.
            pause_mode: what becomes of requests that are under way. "retract": computed again with
                the new weights; "keep": gone on with; "wait": waited for; "abort": ended.
            keep_caches: answers may use what was computed with the old weights (prefixes, encoders'
                outputs). None: with "keep" only, which needs them.
            skip_dead: leave out engines that fail the health check, and go on. They are failures
                all the same. False: then nothing is done.
            again: also engines that have this step of this launch of the trainer already. They are
                left alone otherwise.
            prefetch: as the registry's; None: the registry's. If some of the step cannot be read
                ahead, the result's note says what, and that engine is paused while it reads.
            verify_served: as the registry's; None: the registry's. True also has engines that have
                the step pull it again.
            quantization, skip_modules: as :meth:`set_quantization`, for this sync alone; None: as
                that has said.

        Returns:
            What the sync did to each engine.

        Raises:
            SyncError: engines failed: it names every one, and has ``result``.
            StateError: one of the engines is in another sync.
            NotFoundError: there is no engine; one of *urls* was not added.
            RequestError: an argument is wrong.
            RuntimeError: the process gets no thread.
            FaninError: what :func:`wait_for_step` raises of the trainer.
        """
        started = time.monotonic()
        seconds = self.timeout if timeout is None else check_seconds(timeout, "timeout")
        options = _options(
            pause_mode,
            keep_caches,
            self.prefetch if prefetch is None else prefetch,
            self.verify_served if verify_served is None else verify_served,
        )
        again = again or options.verify is True
        if step is not None:
            check_step(step)
        _check_version(version)
        until = started + seconds
        records = self._choose(group, urls)
        order = Order(self._run_for(quantization, skip_modules, until), step, version, options)
        return self._bring(records, object(), order, until, skip_dead, again)

    def set_quantization(
        self,
        quantization: Any,
        skip_modules: Sequence[str] | None = None,
        *,
        timeout: float = _HEALTH,
    ) -> Run:
        """Chooses the run that the next syncs bring: the one that the trainer quantizes so.

        A sync quantizes nothing. Runs of one model are named alike: ``0``, ``0-fp8``.

        Args:
            quantization: None: the registry's run, whatever it is. "bf16": one that is not
                quantized. "fp8"; or a quantization_config, of which the trainer's has each key.
            skip_modules: patterns of modules that the run must not quantize.
            timeout: seconds that the call blocks at most.

        Returns:
            The run, and the quantization_config that it is published with.

        Raises:
            RequestError: no run is published so: it says what is, and how to publish it.
            FaninError: what asking the trainer raises.
        """
        wanted = wanted_of(quantization, skip_modules)
        run = Run(self.run, None)
        if wanted is not None:
            run = self._run_as(wanted, time.monotonic() + timeout)
        with self._changed:
            self._chosen, self._wanted = run.name, wanted
        return run

    def _run_for(self, quantization: Any, skip: Any, deadline: float) -> str:
        """The run that a sync is to bring."""
        with self._changed:
            run, known = self._chosen, self._wanted
        wanted = wanted_of(quantization, skip, known)
        if wanted is None or wanted is known:
            return run
        return self._run_as(wanted, deadline).name

    def _run_as(self, wanted: Wanted, deadline: float) -> Run:
        if not self.ask_trainer and wanted.keys is None:
            return Run(self.run, None)
        if not self.ask_trainer:
            raise RequestError.make(
                f"quantization {wanted} is asked for, and the registry does not ask the trainer",
                "let the registry ask the trainer, or make one of the run that is quantized so",
                key="quantization",
            )
        draft = self._init.get("draft_run")
        return run_of(
            self._trainer,
            self.run,
            wanted,
            without=() if draft is None else {str(draft).removeprefix("full:")},
            timeout=max(deadline - time.monotonic(), 0.001),
            server_name=self.server_name,
            **self._client,
        )

    def _bring(
        self,
        records: Sequence[Record],
        caller: object,
        order: Order,
        deadline: float,
        skip_dead: bool = False,
        again: bool = False,
    ) -> SyncResult:
        started = time.monotonic()
        try:
            self._take(records, caller, deadline)
            with span("fanin.sync", run=order.run, step=order.step, engines=len(records)) as told:
                plan = self._plan(records, order, deadline, again)
                told.set(step=plan.step)
                result = self._run(records, plan, started, skip_dead)
                told.set(bytes=result.bytes)
        finally:
            self._release(records, caller)
        return result

    def _plan(self, records: Sequence[Record], order: Order, deadline: float, again: bool) -> Plan:
        run, step, options = order.run, order.step, order.options
        world, incarnations = "", dict[str, str]()
        outlived: list[Mapping[str, str]] = []
        before: list[Mapping[str, str]] = []
        for record in records:
            if record.incarnations and record.incarnations not in before:
                before.append(record.incarnations)
        if self.ask_trainer:
            step, world, incarnations, found = self._step_of(run, step, deadline, before)
            outlived += found
        elif step is None:
            raise RequestError.make(
                "which step is the newest is not known", "give step, or ask_trainer=True"
            )
        draft = self._init.get("draft_run")
        drafts = [] if draft is None else [check_run(str(draft).removeprefix("full:"))]
        for other in drafts if self.ask_trainer else ():
            outlived += self._step_of(other, step, deadline, before).outlived
        # The registry's, not this call's: another value would have every engine told anew.
        pull = self.pull_timeout or self.timeout * _PULL_SHARE
        info = InitInfo(self._said, run, pull, self.server_name, self._init)
        version = order.version or f"step-{step}"
        trained = self._trained({run, *drafts}, step, world, options, deadline)
        return Plan(
            step,
            version,
            info,
            options,
            world,
            deadline,
            again,
            incarnations=incarnations,
            outlived=outlived,
            draft_run=draft,
            trained=trained,
        )

    def _trained(
        self, runs: Iterable[str], step: int, world: str, options: Options, deadline: float
    ) -> dict[str, Trained]:
        """The ranks' digests of *step*, for later; {}: nothing is compared."""
        if options.verify is False or (options.verify == "auto" and not self.ask_trainer):
            return {}
        if not self.ask_trainer:
            raise RequestError.make(
                "the registry does not ask the trainer, so it cannot compare the served weights",
                'leave verify_served "auto", or let the registry ask the trainer',
                key="verify_served",
            )
        client = {"server_name": self.server_name, "world_id": world or None, **self._client}

        def ask(run: str) -> Ranks:
            left = max(deadline - time.monotonic(), 0.001)
            return digests_of(self._trainer, run, left, client, step)[1]

        return {run: Trained(partial(ask, run)) for run in runs}

    def _step_of(
        self, run: str, step: int | None, deadline: float, before: Sequence[Mapping[str, str]]
    ) -> Committed:
        left, more = deadline - time.monotonic(), dict(self._client)
        return committed(self._trainer, run, step, left, self.server_name, None, more, before)

    def _choose(
        self, group: str | Iterable[str] | None, urls: Iterable[str] | None
    ) -> Sequence[Record]:
        if urls is not None:
            named = {url: self._known(url) for url in urls}
            if group is not None or not named:
                raise RequestError.make("urls and group do not go together", "give one of them")
            return list({record.endpoint.url: record for record in named.values()}.values())
        groups = None
        if group is not None:
            groups = {check_group(g) for g in ([group] if isinstance(group, str) else group)}
        with self._changed:
            records = [
                record
                for record in self._records.values()
                if groups is None or record.endpoint.group in groups
            ]
            known = {record.endpoint.group for record in self._records.values()}
        for name in sorted(groups - known) if groups is not None else ():
            raise NotFoundError.make(f"no engine is in group {name!r}", "add one", key=name)
        if not records:
            raise NotFoundError.make("there is no engine to sync", "add one")
        return records

    def _take(self, records: Sequence[Record], caller: object, deadline: float = 0.0) -> None:
        """Waits for those that are being given back the step that they had."""
        mender = self._restarts.token
        with self._changed:
            if caller is not mender:
                self._changed.wait_for(
                    lambda: all(record.taken is not mender for record in records),
                    max(deadline - time.monotonic(), 0),
                )
            for record in records:
                if record.busy:
                    raise StateError.make(
                        f"{record.endpoint.url} is in another sync",
                        "wait for its end",
                        address=record.endpoint.url,
                    )
            for record in records:
                record.taken = caller

    def _release(self, records: Sequence[Record], caller: object) -> None:
        """Those that *caller* has taken: it may have been interrupted before it had all."""
        with self._changed:
            for record in records:
                if record.taken is caller:
                    record.taken = None
            self._changed.notify_all()

    def _run(
        self, records: Sequence[Record], plan: Plan, started: float, skip_dead: bool
    ) -> SyncResult:
        for record in records:
            if record.driver is not None:
                record.driver.check_options(plan.options)
        syncs = [EngineSync(record, plan, self._changed) for record in records]
        self._all(syncs, self._look, min(plan.deadline, time.monotonic() + _HEALTH))
        dead = [sync for sync in syncs if sync.result is not None]
        if dead and not skip_dead:
            told = "are not well, and nothing was paused"
            return _judged(plan, syncs, started, told)
        well = [sync for sync in syncs if sync.result is None]
        for trained in plan.trained.values() if any(one.unproven for one in well) else ():
            # Before an engine is paused: ranks may take their time to digest what they hold.
            try:
                trained.ranks()
            except FaninError:
                if plan.options.verify is True:
                    raise
        _log.info("fanin.sync: step %d to %d engines", plan.step, len(well))
        plan.syncs = well
        self._all(well, EngineSync.drive, plan.deadline)
        return _judged(plan, syncs, started, f"did not get step {plan.step}")

    def _all(
        self, syncs: Sequence[EngineSync], work: Callable[[EngineSync], None], deadline: float
    ) -> None:
        """Each in a thread of its own, until all have ended, are removed or are out of time."""
        pending: set[int] = set()
        try:
            for number, sync in enumerate(syncs):
                pending.add(number)
                # Daemons: an engine that hangs must not hold up the process's end.
                threading.Thread(
                    target=carry(self._one),
                    args=(sync, work, pending, number),
                    name=f"fanin-sync {sync.record.endpoint.url}",
                    daemon=True,
                ).start()
            self._wait(syncs, pending, deadline + GRACE)
        except BaseException:  # Ctrl-C, or no thread could be had
            with self._changed:
                for sync in syncs:
                    sync.over = True  # its thread ends with its phase, and lets the engine go
            raise

    def _wait(self, syncs: Sequence[EngineSync], pending: set[int], until: float) -> None:
        def settled() -> bool:
            return all(syncs[number].record.removed for number in pending)

        with self._changed:
            while (left := until - time.monotonic()) > 0:
                if self._changed.wait_for(settled, min(left, _SAY_WAITING)):
                    break
                _say_waiting([syncs[number] for number in sorted(pending)])
            for number in pending:
                sync = syncs[number]
                sync.over = True
                # Past its deadline it has no request under way: it looks up a name, or dials.
                if not sync.record.removed:
                    sync.record.sync = None
                self._give_up(sync)

    def _one(
        self, sync: EngineSync, work: Callable[[EngineSync], None], pending: set[int], number: int
    ) -> None:
        error: BaseException | None = None
        left = False
        with self._changed:
            if not sync.over:
                sync.record.sync = sync
        try:
            work(sync)
        except LeaveAlone:
            left = True
        except BaseException as caught:  # a bug must not look like an engine that hangs
            error = caught
        with self._changed:
            if error is not None and sync.phase in _TELLS_ANEW:
                sync.record.told = None  # whatever it was, the next sync tells it again
            if sync.result is None and error is not None:
                sync.result = failure(sync, error)
                _log.warning("%s", sync.result.error)
            if left:  # while others are still at it, nobody else would say so
                self._give_up(sync)
            if sync.record.sync is sync:
                sync.record.sync = None
            pending.discard(number)
            self._changed.notify_all()

    def _give_up(self, sync: EngineSync) -> None:
        """Lock held. The thread of the sync may still be at it; it does nothing more."""
        url = sync.record.endpoint.url
        error: FaninError = PullTimeoutError.make(
            f"{url}: no answer in time", "look into the engine's log, then sync again", address=url
        )
        if sync.record.removed:
            error = StateError.make(f"{url} was removed during the sync", address=url)
        if sync.result is None:
            sync.result = failure(sync, error)

    def _look(self, sync: EngineSync) -> None:
        deadline = min(sync.plan.deadline, time.monotonic() + _HEALTH)
        record = sync.record

        def look() -> str:
            sync.driver, version = self._health(record, deadline)
            sync.driver.check_options(sync.plan.options)
            return version

        sync.seen = sync.run("health", look)


# ------------------------------------------------------------------- helpers

_DRIVERS: dict[str, type[Driver]] = {VLLM.kind: VLLM, SGLang.kind: SGLang}


def driver_of(kind: str, wire: Wire, deadline: float) -> Driver:
    """The driver of an engine of *kind*; "auto": asks the engine what it is. Blocks.

    Its answer need not last: an engine that is being started, or a proxy in front of it, may answer
    so. Raises what requests do, and the refusal of an engine that does not say.
    """
    if kind in _DRIVERS:
        return _DRIVERS[kind](wire)
    reply = wire.get("/model_info", deadline)
    if reply.status == 404:  # vLLM has no such route
        return VLLM(wire)
    if reply.status != 200:
        raise wire.refusal(reply, "/model_info", "look into the engine's log")
    return (SGLang if told_by_sglang(reply) else VLLM)(wire)


def _judged(plan: Plan, syncs: Sequence[EngineSync], started: float, what: str) -> SyncResult:
    """The result. Raises SyncError if an engine has failed."""
    results = {
        sync.record.endpoint.url: sync.result
        or EndpointResult(sync.record.endpoint, "", version=sync.seen, paused=sync.record.paused)
        for sync in syncs
    }
    result = SyncResult(plan.step, plan.version, results, time.monotonic() - started, plan.info.run)
    if any(entry.error for entry in results.values()):
        raise SyncError.of(result, what, CODES)
    return result


def _say_waiting(syncs: Iterable[EngineSync]) -> None:
    """Which engines are still at it."""
    now = time.monotonic()
    told = [f"{sync.url} in {sync.phase} for {now - sync.since:.0f} s" for sync in syncs]
    _log.info("fanin.sync: waits for %s", ", ".join(told))


def _one_of_three(name: str, given: object) -> bool | str:
    """*given* if it is one of PREFETCH, and no 0 or 1 that only equals one."""
    for known in PREFETCH:
        if given == known and type(given) is type(known):
            return known
    raise RequestError.make(f"{name} {given!r} is unknown", 'give True, False or "auto"', key=name)


def _options(
    pause_mode: str, keep_caches: bool | None, prefetch: object, verify: object
) -> Options:
    if pause_mode not in PAUSE_MODES:
        raise RequestError.make(
            f"pause_mode {pause_mode!r} is unknown", "give one of " + ", ".join(PAUSE_MODES)
        )
    if keep_caches is None:
        keep_caches = pause_mode == "keep"
    if pause_mode == "keep" and not keep_caches:
        raise RequestError.make(
            "requests that are gone on with use what was computed with the old weights",
            'leave keep_caches out with pause_mode "keep", or use "retract"',
            key="keep_caches",
        )
    return Options(
        pause_mode,
        bool(keep_caches),
        _one_of_three("prefetch", prefetch),
        _one_of_three("verify_served", verify),
    )


def _check_version(version: str | None) -> None:
    if version is not None and (not isinstance(version, str) or not version):
        raise RequestError.make(f"version {version!r} is no text", "leave it out: step-<s>")
    if version in (CHECKPOINT, UNSAID):
        raise RequestError.make(
            f"version {version!r} is what engines call the weights that they were started with",
            "leave it out: step-<s>",
        )
