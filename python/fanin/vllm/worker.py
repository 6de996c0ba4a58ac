# SPDX-License-Identifier: Apache-2.0
"""Pulls in workers' processes, started and asked after by short calls.

While a method runs that ``collective_rpc`` calls, the engine generates nothing; of those that
:mod:`fanin.vllm.models` calls, the workers' part. So no method here waits for the network (but for
ten milliseconds, where that saves a call and no request runs): one gives a thread its work, others
look how far it is.

The methods of the API server's protocol are in :data:`METHODS`. For engines
without endpoint plugins there is :class:`WorkerExtension`, to be named with
``--worker-extension-cls fanin.vllm.worker.WorkerExtension``, and :func:`load_lora`, which calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fanin._otel import within
from fanin.engine.checks import EngineFacts
from fanin.engine.clients import ClientPool, Source
from fanin.engine.directories import Places
from fanin.engine.faults import from_wire, to_wire
from fanin.engine.pull_log import PullLog
from fanin.engine.pulls import PullService, Wanted, phases_of, which
from fanin.engine.spares import Spares
from fanin.engine.threads import Hands
from fanin.engine.weights_state import fanin_weights_state
from fanin.errors import FaninError, HostError, NotFoundError, RequestError, StateError
from fanin.vllm import guard
from fanin.vllm.lora_places import places_in

__all__ = ["METHODS", "Done", "Jobs", "WorkerExtension", "fanin_call", "load_lora"]

_log = logging.getLogger("vllm.fanin")

_LOOK = 5.0
_LINGER = 0.01
_pulls, _deletions = Hands("fanin-pull"), Hands("fanin-delete")


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
    bytes: int
    reused: bool
    transport: str
    is_3d: bool
    lease: Held
    wanted: Wanted | None = None
    phases: dict[str, float] = field(default_factory=dict)
    ranks: int = 0


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
        self.over = threading.Event()

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

    def start(
        self,
        name: str,
        work: Callable[[Callable[[int, int], None]], Done],
        *,
        again: bool = False,
    ) -> None:
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

    def _run(self, job: _Job, work: Callable[[Callable[[int, int], None]], Done]) -> None:
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
        job.over.set()
        for one in unwanted:
            _release(one)

    def linger(self, name: str, seconds: float) -> dict[str, Any]:
        """As :meth:`poll`, once the job is over or *seconds* have passed."""
        with self._lock:
            job = self._jobs.get(name)
        if job is not None:
            job.over.wait(seconds)
        return self.poll(name)

    def knows(self, name: str) -> bool:
        """Whether a job of that name was started and not dropped."""
        with self._lock:
            return name in self._jobs

    def poll(self, name: str) -> dict[str, Any]:
        """How far the job is: state "running", "done" or "failed", and what belongs to it."""
        with self._lock:
            job = self._jobs.get(name)
            report: dict[str, Any] = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "state": "running",
                "bytes": 0,
                "total": 0,
                "reused": False,
                "transport": "",
            }
            if job is None:
                missing = NotFoundError.make(f"no pull {name} was started here", "start it")
                return {**report, "state": "failed", "error": to_wire(missing)}
            report["bytes"], report["total"] = job.done_bytes, job.total
            report["seconds"] = time.monotonic() - job.started
            if job.error is not None:
                return {**report, "state": "failed", "error": to_wire(job.error)}
            if job.result is not None:
                done = job.result
                return {
                    **report,
                    "state": "done",
                    "bytes": done.bytes,
                    "reused": done.reused,
                    "transport": done.transport,
                    "path": done.path,
                    "world": done.world,
                    "step": str(done.step),
                    "is_3d": done.is_3d,
                    "phases": done.phases,
                    "ranks": done.ranks,
                }
            return report

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


_jobs = Jobs()
_lines = PullLog(_log)
_services: dict[str, PullService] = {}
_services_lock = threading.Lock()


def _service(root: str) -> PullService:
    """This process' service for adapters below *root*; sweeps it when it is made."""
    with _services_lock:
        service = _services.get(root)
        if service is None:
            config = _config()
            pool = ClientPool(path=config.path, credentials=config.credentials)
            service = PullService(Places(root), pool, spares=Spares(config.spare_file))
            _services[root] = service
            threading.Thread(target=service.places.sweep, name="fanin-sweep", daemon=True).start()
        return service


def _config() -> Any:
    from fanin.config import inference_config

    return inference_config(os.environ)


# ---------------------------------------------------- what the API server calls


def _slots_of(worker: Any) -> Any:
    """Its :class:`fanin.vllm.slots_worker.WorkerSlots`, None before the first job for them."""
    return getattr(worker, "fanin_worker_slots", None)


def fanin_start_pull(self: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Starts the pull that the API server has planned; returns at once.

    With a layout it goes into this worker's slots, else into a directory. Small adapters are there
    in less than another call costs, so that one for slots lingers for that long if nobody waits for
    the engine.
    """

    def work(progress: Callable[[int, int], None]) -> Done:
        service = _service(job["root"])
        with within(job.get("trace")):
            result, lease = service.pull_to(job, progress)
        return Done(
            path=job["path"],
            world=job["world"],
            step=int(job["step"]),
            bytes=int(result.bytes),
            reused=bool(result.reused),
            transport=str(result.path),
            is_3d=False,
            lease=lease,
            phases=phases_of(result),
            ranks=len(result.ranks),
        )

    if job.get("layout"):
        return _start_for_slots(self, job)
    _jobs.start(job["id"], work)
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _start_for_slots(worker: Any, job: dict[str, Any]) -> dict[str, Any]:
    try:
        if _slots_of(worker) is None:
            from fanin.vllm.slots_worker import WorkerSlots

            worker.fanin_worker_slots = WorkerSlots(worker)
        _slots_of(worker).start(job, lambda: _service(job["root"]))
        seconds = 0.0 if job["learn"] else _LINGER
        return dict(_slots_of(worker).report(job["id"], seconds))
    except Exception as error:  # an exception here would be the engine's end
        failure = RequestError.make(f"{type(error).__name__}: {error}", phase="slots")

        def fail(progress: Callable[[int, int], None]) -> Done:
            raise failure

        _jobs.start(job["id"], fail)
        return _jobs.poll(job["id"])


def fanin_poll_pull(self: Any, job_id: str) -> dict[str, Any]:
    """How far the pull is; returns at once.

    An adapter that came into the layout of the slots with vLLM's number is added with the answer
    that says so ("added").
    """
    slots = _slots_of(self)
    if slots is not None and slots.jobs.knows(job_id):
        return dict(slots.report(job_id))
    return _jobs.poll(job_id)


def fanin_add_lora(self: Any, adapter: dict[str, Any]) -> dict[str, Any]:
    """vLLM's add_lora for an adapter in the layout of the slots; {"error": None, or of it}.

    It raises nothing: see :func:`fanin.vllm.guard.fanin_weights_call`.
    """
    slots = _slots_of(self)
    if slots is None:
        return {"error": to_wire(NotFoundError.make("nothing was pulled into slots here", ""))}
    return dict(slots.add(adapter))


def fanin_drop_adapter(self: Any, path: str, job_id: str = "", numbers: Sequence[int] = ()) -> bool:
    """Gives the directory up, which is deleted in a thread, or the image; returns at once.

    numbers: vLLM's of the adapter, which forgets them first.
    """
    for number in numbers:
        self.remove_lora(number)
    slots = _slots_of(self)
    if slots is not None:
        slots.drop(path, job_id)
    _jobs.drop(name=job_id, path=path)
    return True


def fanin_model_facts(self: Any) -> dict[str, Any]:
    """What the API server cannot know of the model; returns at once."""
    try:
        model = self.get_model()
    except NotImplementedError:
        model = None
    return {
        "is_3d_moe_weight": getattr(model, "is_3d_moe_weight", None),
        "no_slots": _no_slots(self),
        "slots_on_gpu": getattr(getattr(self, "device", None), "type", "cpu") != "cpu",
    }


def fanin_lora_places(self: Any, tensors: Any, is_3d: bool) -> Any:
    """What of an adapter's tensors has a place here, see :func:`lora_places.places_in`."""
    try:
        return places_in(self, tensors, is_3d)
    except Exception as error:  # other names in another vLLM
        why = f"{type(error).__name__}: {error}"
        _log.warning("fanin: not known which modules have LoRA: %s", why)
        return None


def _no_slots(worker: Any) -> str:
    """Why nothing can be put straight into this worker's slots, ``""`` if it can."""
    try:
        from fanin.vllm.slots import unfit

        return str(unfit(worker))
    except Exception as error:  # other names in another vLLM: it has its directories
        return f"{type(error).__name__}: {error}"


def fanin_check_weights(
    worker: Any, step: int, poison: bool = True, strict: bool = False
) -> dict[str, Any]:
    """Whether this worker's model holds what is published; see :mod:`fanin.check`.

    strict: what differs is raised, for callers that do not hear every worker's answer.
    """
    found: dict[str, Any] = _transfer_engine(worker).check(step, poison)
    if strict and found["different"]:
        raise HostError.make(
            f"{len(found['different'])} tensors do not hold step {step}: "
            + ", ".join(found["different"][:4]),
            "update again",
            key=found["different"][0],
        )
    return found


def fanin_served_digests(worker: Any, step: int, publication: str) -> dict[str, Any]:
    """Digests of what this worker's model holds; see :func:`fanin.check.served`."""
    found: dict[str, Any] = _transfer_engine(worker).holds_of(step, publication)
    return found


def fanin_served_adapter(worker: Any, adapter: dict[str, Any]) -> dict[str, Any]:
    """Digests of what this worker holds of an adapter, or {"error": of it}; it raises nothing.

    adapter: number, vLLM's; tensors, their names and shapes; config, PEFT's; is_3d.
    """
    try:
        from fanin.vllm.lora_held import held

        return held(worker, **adapter)
    except Exception as error:  # an exception here would be the engine's end
        return {"error": to_wire(error)}


def _transfer_engine(worker: Any) -> Any:
    engine = getattr(worker, "weight_transfer_engine", None)
    if engine is None or not hasattr(engine, "check"):
        raise StateError.make(
            "this engine's weights do not come by fanin",
            """start it with --weight-transfer-config '{"backend": "fanin"}'""",
        )
    return engine


_JOB = "tests/python/test_shared_pulls.py::test_a_job_nobody_wants_any_more"
_SERVED = "tests/engines/test_vllm_"
#: Given to vLLM's workers by :mod:`fanin.vllm.patches`, each with a test of it.
METHODS: tuple[tuple[Callable[..., Any], str], ...] = (
    (fanin_start_pull, _JOB),
    (fanin_poll_pull, _JOB),
    (
        fanin_add_lora,
        _SERVED + "slots.py::test_a_numbered_adapter_is_added_with_the_answer",
    ),
    (fanin_drop_adapter, _JOB),
    (fanin_model_facts, _SERVED + "unit.py::test_fused_experts_say_so"),
    (
        fanin_lora_places,
        _SERVED + "serving.py::test_an_adapter_without_a_place_is_refused",
    ),
    (
        fanin_check_weights,
        _SERVED + "weights.py::test_what_the_engine_holds_is_compared",
    ),
    (fanin_served_digests, _SERVED + "served.py::test_what_is_trained_is_served"),
    (fanin_served_adapter, _SERVED + "lora_held.py::test_what_is_trained_is_held"),
    (fanin_weights_state, "tests/python/test_sync_ahead.py::test_a_worker_without_fanin"),
    *guard.METHODS,
)


# ---------------------------------------------------------------- in the engine's core


class _Answers:
    """Those that one core has not taken yet."""

    def __init__(self) -> None:
        self._left: set[Any] = set()

    def add(self, core: Any, future: Any) -> None:
        """*future* is taken when the core has nothing to do, if no step takes it before."""
        self._left.add(future)
        future.add_done_callback(self._left.discard)
        if self.take not in core._idle_state_callbacks:
            core._idle_state_callbacks.append(self.take)

    def take(self, core: Any) -> None:
        for future in list(self._left):
            with contextlib.suppress(Exception):  # the caller gets it
                future.result()


def fanin_call(core: Any, method: str, arguments: Sequence[Any]) -> Any:
    """All workers' answers, or a future of them, for which vLLM lets the caller wait."""
    executor = core.model_executor
    # Only where answers are taken in the order of calls does a step's bring those before it.
    if not hasattr(executor, "futures_queue") or not core.scheduler.has_requests():
        return core.collective_rpc(method, None, tuple(arguments))
    future = executor.collective_rpc(method, args=tuple(arguments), non_block=True)
    answers = core.__dict__.setdefault("fanin_answers", _Answers())
    answers.add(core, future)
    return future


# --------------------------------------------------------------- the extension


class WorkerExtension:
    """Methods for ``--worker-extension-cls``: an adapter into every worker, without any route.

    Call them by ``collective_rpc``, in this order, or let :func:`load_lora` do it:
    ``load_lora_from_nixl`` once, ``poll_lora_from_nixl`` until every worker says "done",
    ``add_lora_from_nixl`` once; ``undo_lora_from_nixl`` if a worker failed. When no request uses
    the adapter any more: ``drop_lora_from_nixl``. None of them waits for the network.
    """

    def load_lora_from_nixl(
        self,
        lora_name: str,
        run_idx: str | int,
        trainer_addresses: Any = None,
        timeout: float = 60.0,
        step: int | None = None,
        lora_alpha: float | None = None,
    ) -> dict[str, Any]:
        """Starts pulling one step of run *run_idx*; returns at once.

        Call it again for a name that is here to ask whether the trainer is the same launch still.
        If it is not, the worker pulls anew. Then the caller loads the adapter under a new number.

        Args:
            lora_name: ``<prefix>-run<run>-step<step>``, or any name if *step* is given.
            run_idx: ``0``, ``"0"`` or ``"lora:0"``.
            trainer_addresses: as :func:`fanin.info.addresses_of` takes them; None: the configured
                one.
            timeout: seconds for the pull.
            step: this very step; None: the name's.
            lora_alpha: what the caller believes the trainer's to be; None: nothing.

        Raises:
            RequestError: malformed arguments. The pull's own errors come with the poll.
        """
        config = _config()
        wanted = _wanted(config, lora_name, run_idx, trainer_addresses, timeout, step, lora_alpha)
        facts = _facts_of_worker(self)

        def places(tensors: Any, is_3d: bool, seconds: float) -> Any:
            answer = fanin_lora_places(self, tensors, is_3d)
            return None if answer is None else [answer]

        old = _jobs.result(_extension_job(lora_name))

        def work(progress: Callable[[int, int], None]) -> Done:
            shared = _service(str(config.cache_dir))
            # A service of its own facts: one process may hold workers of several engines.
            service = PullService(shared.places, shared.pool, facts, shared.spares, places)
            if old is not None and _stands(service, old, wanted):
                return old
            adapter = service.pull(wanted, progress)
            assert adapter.lease is not None
            _lines.tell(adapter)
            return Done(
                path=str(adapter.path),
                world=adapter.world,
                step=adapter.step,
                bytes=adapter.bytes,
                reused=adapter.reused,
                transport=adapter.transport,
                is_3d=adapter.is_3d,
                lease=adapter.lease,
                wanted=wanted,
            )

        _jobs.start(_extension_job(lora_name), work, again=True)
        return _jobs.poll(_extension_job(lora_name))

    def poll_lora_from_nixl(self, lora_name: str) -> dict[str, Any]:
        """How far this worker's pull is: ``{"state": "running" | "done" | "failed", ...}``."""
        return _jobs.poll(_extension_job(lora_name))

    def add_lora_from_nixl(self, lora_name: str, lora_int_id: int) -> bool:
        """Loads the pulled adapter into this worker; requests then name it by *lora_int_id*.

        Takes as long as vLLM needs to load it.

        Raises:
            StateError: the pull is not done.
        """
        from vllm.lora.request import LoRARequest

        done = _jobs.result(_extension_job(lora_name))
        if done is None:
            raise StateError.make(f"adapter {lora_name} is not here", "poll until it is done")
        request = LoRARequest(
            lora_name=lora_name,
            lora_int_id=lora_int_id,
            lora_path=done.path,
            is_3d_lora_weight=done.is_3d,
        )
        return bool(self.add_lora(request))  # type: ignore[attr-defined]

    def undo_lora_from_nixl(self, lora_name: str, lora_int_id: int) -> bool:
        """Takes back a load that did not end well, here or in another worker.

        The results of earlier loads of that name stay: requests may use them, by their numbers.
        """
        self.remove_lora(lora_int_id)  # type: ignore[attr-defined]
        _jobs.undo(_extension_job(lora_name))
        return True

    def drop_lora_from_nixl(self, lora_name: str, lora_int_id: int) -> bool:
        """Unloads the adapter and gives its directory up.

        Only when no request that names it waits or runs: an engine that re-reads a directory
        which is gone dies.
        """
        self.remove_lora(lora_int_id)  # type: ignore[attr-defined]
        _jobs.drop(name=_extension_job(lora_name))
        return True


def _stands(service: PullService, old: Done, wanted: Wanted) -> bool:
    """Whether *old* is what is wanted now: of the trainer's present launch, as far as it says."""
    if old.wanted is None or old.wanted.key != wanted.key:
        return False
    try:
        return service.successor(wanted.source, old.world, _LOOK) is None
    except FaninError as error:
        _log.info("fanin: adapter %s is here already: %s", wanted.name, error)
        return True


def _extension_job(lora_name: str) -> str:
    return f"extension:{lora_name}"


def _facts_of_worker(worker: Any) -> Callable[[], EngineFacts]:
    lora = getattr(worker, "lora_config", None)
    model = fanin_model_facts(worker)["is_3d_moe_weight"]
    facts = EngineFacts(
        lora_enabled=lora is not None,
        max_lora_rank=getattr(lora, "max_lora_rank", None),
        mixed_moe=bool(getattr(lora, "enable_mixed_moe_lora_format", False)),
        shared_moe=bool(getattr(lora, "enable_moe_shared_loras", False)),
        fused_model=None if model is None else bool(model),
    )
    return lambda: facts


def _wanted(
    config: Any,
    lora_name: str,
    run_idx: str | int,
    trainer: Any,
    timeout: float,
    step: int | None,
    lora_alpha: float | None,
) -> Wanted:
    run, step, label = which(lora_name, run_idx, step)
    trainer = config.trainer if trainer is None else trainer
    if trainer is None:
        raise RequestError.make("trainer_addresses is missing", "give it, or set FANIN_TRAINER")
    return Wanted(
        name=lora_name,
        run=run,
        step=step,
        label=label,
        source=Source.of(trainer, config.server_name),
        timeout=timeout,
        lora_alpha=lora_alpha,
        dtype=config.dtype,
        trust_config=config.trust_config,
        max_bytes=config.max_bytes,
    )


async def load_lora(
    engine: Any,
    lora_name: str,
    run_idx: str | int,
    lora_int_id: int,
    trainer_addresses: Any = None,
    *,
    timeout: float = 60.0,
    step: int | None = None,
    lora_alpha: float | None = None,
) -> Any:
    """Pulls an adapter into every worker of *engine* and loads it; the LoRARequest to ask by.

    engine: an AsyncLLM that was started with ``worker_extension_cls=
    "fanin.vllm.worker.WorkerExtension"``. lora_int_id: a number that no other adapter has or had.
    Waits at most about *timeout* seconds without blocking the event loop, and the engine
    generates meanwhile. Raises FaninError of the first worker that failed.
    """
    from vllm.lora.request import LoRARequest

    arguments = (lora_name, run_idx, trainer_addresses, timeout, step, lora_alpha)
    await engine.collective_rpc("load_lora_from_nixl", args=arguments)
    try:
        reports = await _until_done(engine, lora_name, timeout)
        places = {(report["path"], report["world"]) for report in reports}
        if len(places) != 1:
            raise StateError.make(
                f"the workers pulled {lora_name} from different launches of the trainer",
                "load it again",
            )
        await engine.collective_rpc("add_lora_from_nixl", args=(lora_name, lora_int_id))
    except BaseException:
        with contextlib.suppress(Exception):
            await engine.collective_rpc("undo_lora_from_nixl", args=(lora_name, lora_int_id))
        raise
    return LoRARequest(
        lora_name=lora_name,
        lora_int_id=lora_int_id,
        lora_path=reports[0]["path"],
        is_3d_lora_weight=reports[0]["is_3d"],
    )


async def _until_done(engine: Any, lora_name: str, timeout: float) -> list[dict[str, Any]]:
    deadline = time.monotonic() + timeout + 5.0
    delay = 0.02
    while True:
        reports = await engine.collective_rpc("poll_lora_from_nixl", args=(lora_name,))
        for report in reports:
            if report["state"] == "failed":
                error: FaninError = from_wire(report["error"])
                raise error
        if all(report["state"] == "done" for report in reports):
            return list(reports)
        if time.monotonic() > deadline:
            raise HostError.make(f"adapter {lora_name} is not here in time", "see the logs")
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, 0.25)
