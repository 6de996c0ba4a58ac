# SPDX-License-Identifier: Apache-2.0
"""The custom weight loader: SGLang calls it in each scheduler process, with the live model.

Between ``/begin_weight_update`` and ``/end_weight_update`` the parameters have the shapes that the
model's own ``load_weights`` writes to. So the same recording as everywhere tells which box of which
published tensor goes where, and the pull lands there; what SGLang makes of the parameters after
loading, its end of the update makes. Modules for which the loader computes get whole tensors
through ``load_weights`` itself, a decoder layer at a time.

SGLang's scheduler does not survive an exception in a custom loader, and takes its return for
success. :mod:`fanin.sglang.guard`, a plugin of SGLang's, puts what came of a pull into SGLang's own
answer. Where it is not there nobody would hear of a failure: nothing is pulled then, and SGLang
refuses every update from the second on, because a module of the model says why by
``_derived_weight_cache_error``.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fanin._allowed import check_by_config
from fanin._records import PullResult
from fanin.config import inference_setting
from fanin.engine.clients import Source, restarted_between
from fanin.engine.deltas import Asking
from fanin.engine.landing import Origin, lend, part_of
from fanin.engine.trainers import Published, Trainer, left, without
from fanin.errors import FaninError, PeerError, RequestError, StaleError
from fanin.mapping import About, Mapping, MappingError, PackedMapping, Recording, record
from fanin.mapping._checks import (
    KEEP,
    Taken,
    engine_own,
    enlarged,
    kept_paths,
    missed,
    quantization_of,
    read_quantization,
    refuse_idle,
    refuse_missed,
    refuse_other_config,
    refuse_other_modules,
    refuse_other_quantization,
    refuse_published,
    refuse_torn,
    taken_of,
)

from .guard import standing
from .request import Request, decode

_log = logging.getLogger("fanin.sglang")

_ALL_OF_IT = (
    "publish the model that the engine serves, with its layers, heads and widths, or sync with "
    'Registry(init={"unused": ["<pattern>"]}) for what the model does not have'
)
_START = (
    """start SGLang with --json-model-override-args '{"quantization_config": %s}' and"""
    " --load-format dummy"
)
_UNHEARD = "_fanin_unheard"
_CACHE_ERROR = "_derived_weight_cache_error"

_models: weakref.WeakKeyDictionary[Any, _Live] = weakref.WeakKeyDictionary()


def load(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Pulls a step of a trainer's whole model into *model*, as the request in *named_tensors* says.

    For SGLang's ``--custom-weight-loader fanin.sglang.load``: called on the thread of the
    scheduler, in each process of a tensor-parallel group alike, while no request is worked on.
    Blocks at most the request's timeout, the first time and what recording takes besides. Raises
    nothing. On all ranks :data:`fanin.sglang.guard.standing` tells what failed on any of them. The
    weights may then be of two steps, and the engine stays paused.
    """
    if not standing.heard:
        _refuse_unheard(model)
        return
    report = _Report()
    live = _models.get(model)
    if live is None:
        live = _models[model] = _Live()
    try:
        request = decode(named_tensors)
        deadline = time.monotonic() + request.timeout
        published = live.prepare(model, request, deadline)
        report.taken = live.taken
    except Exception as error:  # also a bug here, or in SGLang, must not end the engine
        report.fail(error)
    whole = _agreed(report, live.shapes)
    if not whole.failure:
        try:
            live.pull(model, published, request.step, deadline, report)
        except Exception as error:
            report.fail(error)
        whole = _agreed(report, live.shapes)
    if whole.failure:
        standing.fail(id(model), whole.failure, whole.writing)
    else:
        how = "; ".join(report.how)
        standing.succeed(id(model), request.step, whole.bytes, whole.seconds, how, whole.worlds)


@dataclass
class _Report(Origin):
    """What a pull did on one rank, or on all of them. writing: from when on weights are at stake.
    taken: published tensors of which this rank does not take all."""

    failure: str = ""
    writing: bool = False
    bytes: int = 0
    seconds: float = 0.0
    how: list[str] = field(default_factory=list)
    taken: Taken = ()

    def fail(self, error: Exception) -> None:
        known = isinstance(error, FaninError)
        self.failure = str(error) if known else f"{type(error).__name__}: {error}"
        _log.error("fanin: %s", self.failure, exc_info=not known)


# ------------------------------------------------------------------------------ one model


class _Live:
    """What is kept of a model from one update to the next. One thread."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._source: tuple[Source, str] | None = None
        self._layout: tuple[Any, ...] | None = None
        #: Where a pull lands; None: nothing does, all goes through the model's own loader.
        self.mapping: Mapping | None = None
        #: Published tensors that only the model's own loader can place.
        self.by_loader: tuple[str, ...] = ()
        self._packed: PackedMapping | None = None
        self._asking = Asking("auto", None, None)
        #: Addresses of parameters and buffers, when the last pull landed there.
        self.places: dict[str, int] = {}
        #: Names of published tensors that the last request leaves out.
        self.unused: frozenset[str] = frozenset()
        self._kept: frozenset[str] = frozenset()
        #: What the last pull that wrote has kept, None: none has written.
        self._intact: frozenset[str] | None = None
        #: Of all that is published and not unused.
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: What this rank does not take all of.
        self.taken: Taken = ()

    def prepare(self, model: Any, request: Request, deadline: float) -> Published:
        """What is published, and where it goes. Writes nothing."""
        _check_model(model)
        if standing.stays and request.external_kv == "drop":
            raise RequestError.make(
                "the engine keeps outside of itself what the weights of before have computed:"
                f" {standing.stays}",
                'start SGLang without it, or sync with Registry(init={"external_kv": "keep"}) if'
                " you empty it before the engine goes on, or if answers may use it",
                key="external_kv",
            )
        trainer = self._trainer_of(request)
        whole = trainer.ready(deadline, request.step)
        published = without(whole, request.unused)
        self.unused = whole.names() - published.names()
        told = (published.config, published.quantization)
        layout = (published.layout(), told, request.keep, request.config)
        if self._layout != layout:
            if request.config == "check":
                refuse_other_config(published.config, getattr(model, "config", None))
                refuse_other_quantization(*_quantizations(model, published), _START)
            kept, idle = kept_paths(model, request.keep)
            refuse_idle(idle)
            if kept:
                _check_kept(min(kept))
            refuse_torn(kept, self._intact, standing.torn)
            self._record(model, published, kept)
            self._layout, self._kept = layout, kept
        return published

    def pull(
        self, model: Any, published: Published, step: int, deadline: float, report: _Report
    ) -> None:
        """Fills the model."""
        trainer = self._trainer
        assert trainer is not None
        start = time.monotonic()
        _settled(model)
        self._intact = self._kept
        if self.mapping is not None:
            self._by_boxes(model, trainer, step, deadline, report)
        if self.by_loader:
            _by_loader(model, trainer, published, self.by_loader, step, deadline, report)
        _post_load(model)
        _settled(model)
        report.seconds = time.monotonic() - start
        _log.info(
            "fanin: step %d of %s: %.1f MB, %s in %.3f s",
            step,
            trainer.run,
            report.bytes / 1e6,
            ", ".join(report.how),
            report.seconds,
        )

    @property
    def publication(self) -> str:
        """What it is filled from, "" if from nothing yet."""
        return "" if self._source is None else self._source[1]

    def _trainer_of(self, request: Request) -> Trainer:
        trainer = request.trainer if isinstance(request.trainer, str) else list(request.trainer)
        source = Source.of(trainer, request.server_name)
        check_by_config(source.text, source.path, source.addresses)
        wanted = (source, "full:" + request.run)
        if self._trainer is None or self._source != wanted:
            if self._trainer is not None:
                self._trainer.close()
            relay = inference_setting("relay")
            # Who reads here would let the engine stand still longer: it reads the rest elsewhere.
            self._trainer, self._source = Trainer(*wanted, relay=relay, lease=0.0), wanted
        return self._trainer

    def _record(self, model: Any, published: Published, kept: frozenset[str]) -> None:
        self._layout, self.mapping, self._packed, self.by_loader = None, None, None, ()

        def own(target: Any) -> str | None:
            return "kept as the engine has it" if target.path in kept else engine_own(target)

        def recorded(entries: Iterable[Any]) -> Recording:
            return record(entries, _loader(model), model, own=own, about=_about(model))

        recording = recorded(published.entries)
        refuse_other_modules(recording, recorded, *_quantizations(model, published), _START)
        refuse_published(recording, kept)
        _refuse_padding(recording, model)
        self.shapes = {entry.name: tuple(entry.shape) for entry in published.entries}
        self.taken = taken_of(recording.taken())
        try:
            self.mapping = recording.mapping()
        except MappingError as error:
            if not recording.only_computes(error):
                error.remedy += "; or " + KEEP
                raise
            self.mapping = _all_but_computed(recording)
            modules = self.mapping.modules if self.mapping is not None else ()
            names = {name for module in modules for name in module.taken}
            if self.mapping is None:
                names = {entry.name for entry in published.entries}
            self.by_loader = tuple(entry.name for entry in published.entries if entry.name in names)
            _log.warning(
                "fanin: in every step %d tensors go whole through SGLang's own load_weights, which"
                " is slower and takes memory, because no mapping can say what it does: %s",
                len(self.by_loader),
                error,
            )
        _log.info(
            "fanin: %d published tensors, recorded in %.3f s",
            len(published.entries),
            recording.seconds,
        )

    def _by_boxes(
        self, model: Any, trainer: Trainer, step: int, deadline: float, report: _Report
    ) -> None:
        assert self.mapping is not None
        places = _places(model)
        if self._packed is None or places != self.places:
            self._packed = self.mapping.pack(model)
            self.mapping.fill(model)  # padding: it is not published
            self.places = places
        how = {"step": step, "dtype": self._packed.dtype}
        boxes = self._packed.tensors
        # Where SGLang's processing leaves the parameters as they are they hold the step of before,
        # which digests prove.
        asks = (
            trainer.relay is None
            and self._packed.dtype is None
            and next(model.parameters()).device.type == "cpu"
            and self._asking.asks(trainer.published)
        )
        patches = self._asking.options() if asks else {}
        # All is planned and every rank has answered before the first byte is asked for: what fails
        # until then leaves the weights as they were.
        trainer.client.begin(trainer.run, boxes, timeout=left(deadline), **how).abandon()
        report.writing = True
        pulled = _by_relays(trainer, boxes, deadline, how)
        relayed = "" if pulled is None else f" with relays ({pulled.path_reason})"
        if pulled is None:
            pulled = trainer.client.pull_into(
                trainer.run, boxes, timeout=left(deadline), **how, **patches
            )
        read, changed = pulled.bytes, ""
        if asks:
            self._asking.came(pulled)
            if not pulled.whole_because:
                read = pulled.patch_bytes
                changed = part_of(read, pulled.bytes, pulled.base_step)
        self._packed.settle()
        report.bytes += read
        report.came_from(trainer.client, pulled)
        report.how.append(f"{pulled.tensors} tensors by {pulled.path}{relayed}{changed}")


def _by_relays(
    trainer: Trainer, boxes: Any, deadline: float, how: dict[str, Any]
) -> PullResult | None:
    """Pulls from other readers too; None: it cannot, and the trainer is to be read alone.

    What has come is handed on until all is there, and no longer: SGLang goes on to change it.
    """
    if trainer.relay is None:
        return None
    try:
        pulled: PullResult = trainer.reader.pull_into(
            trainer.run, boxes, timeout=left(deadline), **how
        )
    except FaninError as error:
        _log.warning("fanin: relays have not brought the step, the trainer is read: %s", error)
        return None
    trainer.release()
    return pulled


def _by_loader(
    model: Any,
    trainer: Trainer,
    published: Published,
    wanted: tuple[str, ...],
    step: int,
    deadline: float,
    report: _Report,
) -> None:
    """Whole tensors through the model's own loader. All pulls are of the same step exactly; that
    they are of one launch of the trainer is seen when all ranks have ended."""
    import torch

    def came(pulled: PullResult) -> None:
        report.bytes += pulled.bytes
        report.writing = True
        report.came_from(trainer.client, pulled)

    device = next(model.parameters()).device
    with torch.no_grad():
        model.load_weights(lend(trainer, published, wanted, deadline, device, came, step=step))
    report.how.append(f"{len(wanted)} tensors through load_weights")


def _all_but_computed(recording: Recording) -> Mapping | None:
    """The mapping of all modules that have one; None if something belongs to no module."""
    try:
        return recording.mapping(fallback=True)
    except MappingError:
        return None


def _quantizations(model: Any, published: Published) -> tuple[Any, Any]:
    """How the trainer quantizes, and this engine."""
    method: Any = getattr(model, "quant_config", None)
    named = method.get_name() if hasattr(method, "get_name") else None
    mine = quantization_of(getattr(model, "config", None), named)
    return read_quantization(published.quantization), mine


def _refuse_padding(recording: Recording, model: Any) -> None:
    """Raises PeerError for tensors that are smaller than the model's: loaders pad them on the CPU.

    Vocabularies are padded, and whatever SGLang has enlarged itself, which it notes.
    """
    config = getattr(model, "config", None)
    if config is not None and enlarged(config):
        return
    for place in dict.fromkeys(fill.to.place for fill in recording.fills):
        target = recording.targets[place]
        if not hasattr(model.get_submodule(target.module), "org_vocab_size"):
            names = ", ".join(recording.into({target.path}))
            raise PeerError.make(
                f"the published tensor is smaller than '{target.path}' of the model, whose rest"
                f" SGLang would fill with zeros: {names}",
                _ALL_OF_IT,
                key=target.path,
            )


def _loader(model: Any) -> Callable[[Iterator[tuple[str, Any]]], object]:
    def run(weights: Iterator[tuple[str, Any]]) -> None:
        with _without_post_load(model):
            model.load_weights(weights)

    return run


@contextmanager
def _without_post_load(model: Any) -> Iterator[None]:
    """What some loaders end with computes with weights, and none are there in a recording."""
    if not hasattr(model, "post_load_weights"):
        yield
        return
    own = model.__dict__.get("post_load_weights")
    model.__dict__["post_load_weights"] = lambda *_, **__: None
    try:
        yield
    finally:
        del model.__dict__["post_load_weights"]
        if own is not None:
            model.__dict__["post_load_weights"] = own


def _post_load(model: Any) -> None:
    """What the model's own loader ends with: MLA's absorbed weights."""
    import torch

    if hasattr(model, "post_load_weights"):
        with torch.no_grad():
            model.post_load_weights()


def _check_model(model: Any) -> None:
    """Raises RequestError for what SGLang, or this, cannot update online."""
    for module in model.modules():
        reason = getattr(module, _CACHE_ERROR, None)
        if reason is not None:
            raise RequestError.make(str(reason), "start SGLang without it")
    parallel = _parallel()
    size = getattr(parallel, "pp_size", 1) if parallel is not None else 1
    if isinstance(size, int) and size > 1:
        raise RequestError.make(
            f"pipeline parallelism ({size} stages) is not supported",
            "start SGLang with pp-size 1",
            key="pp_size",
        )


def _check_kept(path: str) -> None:
    """Raises RequestError if SGLang's memory does not have what a checkpoint has there."""
    try:
        from sglang.srt.runtime_context import get_server_args

        started = get_server_args()
    except (ImportError, LookupError, ValueError):  # outside of SGLang
        return
    why = remedy = ""
    if getattr(started, "load_format", "") == "dummy":
        why, remedy = "SGLang has filled it at random", "start SGLang without --load-format dummy"
    elif getattr(started, "enable_memory_saver", False) and not getattr(
        started, "enable_weights_cpu_backup", False
    ):
        why = "SGLang may give up its memory"
        remedy = "start SGLang with --enable-weights-cpu-backup"
    if why:
        raise RequestError.make(f"keep names '{path}', and {why}", remedy, key="keep")


def _places(model: Any) -> dict[str, int]:
    """Where the parameters and buffers lie."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: tensor.data_ptr() for name, tensor in (*parameters, *buffers)}


def filled(model: Any) -> _Live | None:
    """What is kept of a model that a request has named, None: none has."""
    return _models.get(model)


def _settled(model: Any) -> None:
    """Waits for what the device is at: kernels that read the weights, or have written them."""
    import torch

    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------ the ranks


def _parallel() -> Any:
    """SGLang's ranks as this process knows them; None outside of SGLang."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return None
    return get_parallel()


def _about(model: Any) -> About:
    parallel = _parallel()
    ranks: dict[str, tuple[int, int]] = {}
    version = ""
    if parallel is not None:
        import sglang

        version = str(getattr(sglang, "__version__", ""))
        ranks["tp"] = (int(parallel.tp_rank), int(parallel.tp_size))
    return About("sglang", version, type(model).__name__, ranks)


def _agreed(mine: _Report, shapes: dict[str, tuple[int, ...]]) -> _Report:
    """Of all ranks: the first one's failure, elements that none of them takes, and the sum of their
    bytes. Every rank calls it before every pull and after it, whatever came."""
    parallel = _parallel()
    size = int(parallel.tp_size) if parallel is not None else 1
    everybody = [mine]
    if size > 1:
        import torch

        everybody = [mine] * size
        torch.distributed.all_gather_object(everybody, mine, group=parallel.tp_group.cpu_group)
    whole = _Report(
        writing=any(one.writing for one in everybody),
        bytes=sum(one.bytes for one in everybody),
        seconds=max(one.seconds for one in everybody),
        worlds=set().union(*(one.worlds for one in everybody)),
    )
    for rank, one in enumerate(everybody):
        if one.failure:
            whole.failure = f"worker {rank} of {size}: {one.failure}"
            return whole
    if len(whole.worlds) > 1:
        whole.failure = _of_several_launches(everybody)
        return whole
    if again := restarted_between(one.incarnations for one in everybody):
        name, first, second = again
        text = (
            f"rank {name} of the trainer was started again between the pulls of worker {first} and"
            f" worker {second}"
        )
        whole.failure = str(StaleError.make(text, "sync again"))
        return whole
    try:
        refuse_missed(missed(shapes, [one.taken for one in everybody]), _ALL_OF_IT)
    except FaninError as error:
        whole.failure = str(error)
    return whole


def _of_several_launches(everybody: list[_Report]) -> str:
    """Why the pulls of all ranks are not one step: launches of one trainer number their steps
    alike, and each pull proves one launch."""
    told = "; ".join(
        f"worker {rank} of {len(everybody)} has pulled from {' and '.join(sorted(one.worlds))}"
        for rank, one in enumerate(everybody)
    )
    text = f"the trainer was started again, and the weights are of several launches: {told}"
    return str(StaleError.make(text, "sync again"))


def _refuse_unheard(model: Any) -> None:
    """Pulls nothing, and has SGLang refuse whatever update follows."""
    import torch

    reason = (
        "fanin: nothing was pulled, because SGLang has not loaded fanin's plugin, without which a"
        " failure is not told; install fanin as a package (SGLANG_PLUGINS, if it is set, must name"
        " fanin), and start SGLang again"
    )
    _log.error("%s", reason)
    if _UNHEARD not in model._modules:
        model._modules[_UNHEARD] = torch.nn.Module()
        setattr(model._modules[_UNHEARD], _CACHE_ERROR, reason)
