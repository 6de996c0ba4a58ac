# SPDX-License-Identifier: Apache-2.0
"""Pulls in workers' processes, started and asked after by short calls.

While a method runs that ``collective_rpc`` calls, the engine generates nothing; of those that
:mod:`fanin.vllm.models` calls, the workers' part. So no method here waits for the network: one
gives a thread its work, others look how far it is.

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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fanin._otel import within
from fanin.engine.checks import EngineFacts
from fanin.engine.clients import ClientPool, Source
from fanin.engine.directories import Places
from fanin.engine.faults import from_wire, to_wire
from fanin.engine.jobs import Done, Jobs, Progress
from fanin.engine.lora_places import FUSED, Parse, Width, judge, of_one, of_packed, sizes_of
from fanin.engine.pull_log import PullLog
from fanin.engine.pulls import PullService, Wanted, which
from fanin.engine.spares import Spares
from fanin.engine.weights_state import fanin_weights_state
from fanin.errors import FaninError, HostError, NotFoundError, RequestError, StateError
from fanin.vllm import guard

__all__ = ["METHODS", "WorkerExtension", "fanin_call", "load_lora", "places_in", "widths_of"]

_log = logging.getLogger("vllm.fanin")

_LOOK = 5.0

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
    """Starts the pull that the API server has planned; how far it is. Returns at once.

    With a layout it goes into this worker's slots, else into a directory.
    """
    jobs = _jobs
    work: Callable[[Progress], Done] = functools.partial(_into_directory, job)
    if job.get("layout"):
        try:
            if _slots_of(self) is None:
                from fanin.vllm.slots_worker import WorkerSlots

                self.fanin_worker_slots = WorkerSlots(self)
            work = _slots_of(self).begin(job, lambda: _service(job["root"]))
            jobs = _slots_of(self).jobs
        except Exception as error:  # an exception here would be the engine's end
            failure = RequestError.make(f"{type(error).__name__}: {error}", phase="slots")

            def work(progress: Progress) -> Done:
                raise failure

    jobs.start(job["id"], work)
    return jobs.poll(job["id"])


def _into_directory(job: dict[str, Any], progress: Progress) -> Done:
    with within(job.get("trace")):
        result, lease = _service(job["root"]).pull_to(job, progress)
    return Done.of(job, lease, result, reused=bool(result.reused))


def fanin_poll_pull(self: Any, job_id: str) -> dict[str, Any]:
    """How far the pull is; returns at once."""
    slots = _slots_of(self)
    jobs = _jobs if slots is None or not slots.jobs.knows(job_id) else slots.jobs
    return dict(jobs.poll(job_id))


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
        slots.jobs.drop(name=job_id, path=path)
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
    }


def fanin_lora_places(self: Any, tensors: Any, is_3d: bool) -> Any:
    """What of an adapter's tensors has a place here, see :func:`places_in`."""
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
        from fanin.vllm.slots import held

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
    (fanin_add_lora, _SERVED + "slots.py::test_an_adapter_is_added_under_numbers_and_forgotten"),
    (fanin_drop_adapter, _JOB),
    (fanin_model_facts, "tests/python/test_shared_pulls.py::test_facts_of_the_engine"),
    (fanin_lora_places, _SERVED + "serving.py::test_an_adapter_without_a_place_is_refused"),
    (fanin_check_weights, _SERVED + "weights.py::test_what_the_engine_holds_is_compared"),
    (fanin_served_digests, _SERVED + "served.py::test_what_is_trained_is_served"),
    (fanin_served_adapter, _SERVED + "lora_held.py::test_what_is_trained_is_held"),
    (fanin_weights_state, "tests/python/test_sync_ahead.py::test_a_worker_without_fanin"),
    *guard.METHODS,
)


# ------------------------------------------------------- where adapters have a place


def places_in(worker: Any, tensors: Iterable[tuple[str, Sequence[int]]], is_3d: bool) -> Any:
    """See :func:`judge`, of a vLLM worker. Any thread; reads no weights and does not block.

    None: the worker has no LoRA, or vLLM's classes are others, so that it cannot tell.
    """
    manager = getattr(
        getattr(getattr(worker, "model_runner", None), "lora_manager", None),
        "_adapter_manager",
        None,
    )
    if manager is None:
        return None
    widths = widths_of(manager, is_3d)
    modules = {name: type(m).__name__ for name, m in manager.model.named_modules()}
    away = tuple(f"{name}." for name, kind in modules.items() if kind == "PPMissingLayer")
    packed: dict[str, set[str]] = {}
    for parent, children in manager.packed_modules_mapping.items():
        for child in children:
            packed.setdefault(child, set()).add(parent)

    def unwrapped(module: str) -> bool:
        prefix, _, leaf = module.rpartition(".")
        parents = (f"{prefix}.{parent}" for parent in packed.get(leaf, ()))
        return module in modules or any(name in modules for name in parents)

    return judge(
        tensors, _parser(manager), widths, unwrapped, lambda module: f"{module}.".startswith(away)
    )


def _parser(manager: Any) -> Parse:
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    skipped = tuple(getattr(manager.model, "lora_skip_prefixes", None) or ())

    def parse(name: str) -> tuple[str, bool]:
        if any(f".{prefix}" in name or name.startswith(prefix) for prefix in skipped):
            raise ValueError("vLLM skips it")
        found: tuple[str, bool] = parse_fine_tuned_lora_name(name, mapper)
        return found

    return parse


def widths_of(manager: Any, is_3d: bool) -> dict[str, Width]:
    """What adapters may name in a worker's model (vLLM's LoRAModelManager), with its widths.

    is_3d: the request's ``is_3d_lora_weight``.
    """
    found: dict[str, Width] = {}
    for path, module in manager.modules.items():
        children = manager.packed_modules.get(path)
        if hasattr(module, "w13_lora_a_stacked"):
            found.update(_of_experts(manager, path, module, children, is_3d))
        elif children:
            found.update(zip(children, of_packed(module, len(children)), strict=True))
        else:
            found[path] = of_one(module)
    head = getattr(manager, "_classification_head", None)
    for name in ("score", "classifier") if head is not None else ():
        found.setdefault(name, Width())
    if manager.is_pooling_model:  # which vLLM looks up without this prefix, too
        for name in list(found):
            found.setdefault(name.removeprefix("model."), found[name])
    return found


def _of_experts(
    manager: Any, path: str, module: Any, children: list[str] | None, is_3d: bool
) -> Iterator[tuple[str, Width]]:
    config = module.moe_config
    hidden = sizes_of(getattr(config, "hidden_dim_unpadded", None), config.hidden_dim)
    shards = module.tp_size
    part = config.intermediate_size_per_partition
    unpadded = getattr(config, "intermediate_size_per_partition_unpadded", None)
    inner = sizes_of(*(size * shards for size in (unpadded, part) if size is not None))
    if children and getattr(manager, "_enable_moe_shared_loras", False):
        yield from ((child, Width()) for child in children)  # stacks of three dimensions
    elif children and not is_3d:
        up, down = Width(hidden, inner), Width(inner, hidden)
        order = (up, down) if getattr(manager, "_is_non_gated_moe", False) else (up, down, up)
        for number, child in enumerate(children):
            yield child, order[number % len(order)]
    else:
        yield path, Width(inner, hidden)
        yield path + FUSED, Width(hidden, tuple(2 * size for size in inner))


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
        trainer = config.trainer if trainer_addresses is None else trainer_addresses
        if trainer is None:
            raise RequestError.make("trainer_addresses is missing", "give it, or set FANIN_TRAINER")
        run, step, label = which(lora_name, run_idx, step)
        source = Source.of(trainer, config.server_name)
        said = {"timeout": timeout, "lora_alpha": lora_alpha, "landing": "directory"}
        wanted = Wanted.by(config, source, lora_name, run, step, label, **said)
        facts = _facts_of_worker(self)

        def places(tensors: Any, is_3d: bool, seconds: float) -> Any:
            answer = fanin_lora_places(self, tensors, is_3d)
            return None if answer is None else [answer]

        old = _jobs.result(_extension_job(lora_name))

        def work(progress: Progress) -> Done:
            shared = _service(str(config.cache_dir))
            # A service of its own facts: one process may hold workers of several engines.
            service = PullService(shared.places, shared.pool, facts, shared.spares, places)
            if old is not None and _stands(service, old, wanted):
                return old
            adapter = service.pull(wanted, progress)
            assert adapter.lease is not None
            _lines.tell(adapter)
            return Done(
                str(adapter.path),
                adapter.world,
                adapter.step,
                adapter.lease,
                bytes=adapter.bytes,
                reused=adapter.reused,
                transport=adapter.transport,
                is_3d=adapter.is_3d,
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
    fused = fanin_model_facts(worker)["is_3d_moe_weight"]
    lora = getattr(worker, "lora_config", None)
    facts = EngineFacts.of(lora, None if fused is None else bool(fused))
    return lambda: facts


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
