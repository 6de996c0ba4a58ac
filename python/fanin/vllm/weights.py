# SPDX-License-Identifier: Apache-2.0
"""The weight transfer engine ``fanin`` of vLLM: a trainer's whole model into one worker.

``--weight-transfer-config '{"backend": "fanin"}'``. vLLM makes one :class:`Engine` in each worker
and calls it by ``collective_rpc``: nothing generates meanwhile. The user's page is
docs/how-to/vllm-weights.md.
"""

from __future__ import annotations

import glob
import logging
import os
import secrets
import time
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from fanin._allowed import check_by_config
from fanin._options import relay
from fanin.config import inference_setting
from fanin.engine.clients import Source
from fanin.engine.deltas import Asking, check_deltas, counts
from fanin.engine.landing import Landing, Summary
from fanin.engine.trainers import Published, Trainer, without
from fanin.engine.updates import DEFAULT_TIMEOUT, check_step, check_timeout, full_run
from fanin.errors import FaninError, HostError, PeerError, RequestError, StateError
from fanin.mapping import Mapping, MappingError, Recording
from fanin.mapping._checks import (
    KEEP,
    check_patterns,
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
from fanin.vllm import beside, guard, patches, reload
from fanin.vllm.beside import Prefetch, ServedModel
from fanin.vllm.landings import LoaderLanding, MappedLanding, with_neighbours
from fanin.vllm.reload import record_model

_log = logging.getLogger("vllm.fanin")


_UNUSED = 'init with {"unused": ["<pattern>"]} for what the model does not have'
_BY_LOADER = 'init with {"mode": "loader"}, which fills such a model'
_ALL_OF_IT = (
    "publish the model that the engine serves, with its layers, heads and widths, or " + _UNUSED
)


_START = 'start vLLM with hf_overrides={"quantization_config": %s} and load_format="dummy"'
_MODES = ("auto", "loader")
_CONFIGS = ("check", "ignore")
_EXTERNAL_KV = ("drop", "keep")
_EITHER = "give true or false"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What ``/init_weight_transfer_engine`` takes.

    Args:
        trainer: the path of a nixl_info.json or of its directory, or the ranks' addresses.
        run: the trainer's run.
        timeout: seconds for a whole update.
        draft_run: the run that fills a draft model.
        mode: "auto", or "loader" for vLLM's own `load_weights` with any model.
        unused: patterns of published names that the model does not have.
        keep: patterns of the model's own parameters that no rank publishes. They stay as vLLM has
            loaded them (``visual.*``).
        config: "check" that the trainer's configuration is the engine's, or "ignore".
        external_kv: "drop" what a connector has kept outside of the engine, and refuse a connector
            that cannot; or "keep".
        verify: compare each step with digests that the ranks make. None: if it may be brought by
            deltas.
        deltas: read what has changed since the last step. "auto": of ranks that keep patches, when
            a step is read ahead. True: always; where the model's own memory cannot be patched,
            each step is read into memory beside it.
        relay: hand on what is read ahead: True or "host" to engines of this host, "10.0.0.0/8" to
            engines in that network. None: as FANIN_RELAY says.
        ring: layers of skeletons, at least 1.
        save: a directory that each worker writes its mapping to, for `nixl-fetch map`.
    """

    trainer: Any
    run: Any = "0"
    timeout: Any = DEFAULT_TIMEOUT
    draft_run: Any = None
    mode: Any = "auto"
    unused: Any = ()
    keep: Any = ()
    config: Any = "check"
    external_kv: Any = "drop"
    verify: Any = None
    deltas: Any = "auto"
    relay: Any = None
    ring: Any = 2
    save: Any = None

    def asking(self) -> Asking:
        """For pulls into one memory."""
        return Asking(self.deltas, self.verify, self.relay)

    def checked(self) -> InitInfo:
        """All as it is meant; the trainer is a Source. Raises RequestError, naming the field."""
        whole = type(self.ring) is int and 1 <= self.ring <= 64
        for name, good, remedy in (
            ("mode", self.mode in _MODES, f"give one of {_MODES}"),
            ("config", self.config in _CONFIGS, f"give one of {_CONFIGS}"),
            ("external_kv", self.external_kv in _EXTERNAL_KV, f"give one of {_EXTERNAL_KV}"),
            ("verify", self.verify is None or isinstance(self.verify, bool), _EITHER),
            ("ring", whole, "give 1 to 64, or leave it out"),
            ("save", self.save is None or isinstance(self.save, str), "give a directory"),
        ):
            if not good:
                said = f"init_info's {name} is {getattr(self, name)!r}"
                raise RequestError.make(said, remedy, key=name)
        source = Source.of(self.trainer)
        check_by_config(source.text, source.path, source.addresses)
        handed_on = _relay_of(self.relay)
        check_deltas(self.deltas, handed_on, self.mode)
        return replace(
            self,
            relay=handed_on,
            trainer=source,
            run=full_run(self.run),
            timeout=check_timeout(self.timeout),
            draft_run=None if self.draft_run is None else full_run(self.draft_run),
            unused=check_patterns("init_info's unused", self.unused, key="unused"),
            keep=check_patterns("init_info's keep", self.keep, key="keep"),
        )


def _relay_of(value: Any) -> str | None:
    """Whom a worker hands on to. Raises RequestError."""
    if value is None or value is True:
        said: str | None = inference_setting("relay")
        return said or ("host" if value else None)
    try:
        return None if value is False else relay(value)
    except ValueError as error:
        said = f"init_info's relay is {value!r}"
        raise RequestError.make(said, f"give true, false, {error}", key="relay") from None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``/update_weights`` takes.

    Args:
        step: this very step of the trainer.
        prefetch: only read the step, beside the model, and return at once. Another update of that
            step, under pause, installs it.
        keep_caches: leave what was computed with the old weights (prefixes, encoders' outputs).
            Answers may then use it.
    """

    step: Any
    prefetch: Any = False
    keep_caches: Any = False

    def checked(self) -> int:
        """The step. Raises RequestError, naming the field."""
        for name in ("prefetch", "keep_caches"):
            said = getattr(self, name)
            if not isinstance(said, bool):
                raise RequestError.make(
                    f"update_info's {name} is {said!r}", "give true or false", key=name
                )
        return check_step(self.step)


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's side of an update. Called by one thread, the worker's.

    Every method raises a :class:`fanin.FaninError` that names the worker, the rank or the tensor
    and the remedy; the worker lives on.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        patches.require()
        guard.requires_step()  # of what cannot be read, at start and not with the first request
        _refuse_what_moves(vllm_config)
        self._worker = _named(vllm_config)
        self._main = ServedModel(self._worker, model, self.model_config)
        self._draft: ServedModel | None = None
        self._info: InitInfo | None = None
        #: For steps beside the model, which deltas need.
        self._no_room = False
        self._anew()

    def _anew(self) -> None:
        """What is known of the weights ends here: the next update is proven again."""
        self._basis = secrets.token_hex(8)
        for target in (self._main, self._draft):
            if target is not None:
                target.touched()

    def _target(self) -> ServedModel:
        """Of the model that vLLM has chosen for this update."""
        if self.model is self._main.model:
            return self._main
        if self._draft is None or self._draft.model is not self.model:
            self._draft = ServedModel(f"{self._worker}, draft", self.model, self.model_config)
        return self._draft

    def holds(self) -> list[dict[str, Any]]:
        """What this worker's models are now; see :meth:`fanin.engine.updates.Updates.holds`."""
        targets = (self._main, self._draft)
        return [target.updates.holds() for target in targets if target is not None]

    def reloaded(self) -> None:
        """vLLM has loaded the model from disk, as it was started with."""
        self._anew()
        self._main.updates.reloaded()
        self._main.given_up = None

    def lost(self, why: str, kept: frozenset[str]) -> None:
        """The weights are gone: the main model's until they are pulled, or loaded from disk, the
        draft's until they are pulled.

        kept: the parameters that vLLM puts back, by its names for them. A draft is as it was if
        they are all that it does not share. The main model is lost all the same: what processing
        makes beside parameters (MLA) is not put back. A draft's lack of that changes no answer.
        why: "" if vLLM puts all of it back.
        """
        self._anew()
        if not why:
            return
        self._main.updates.lost(why)
        self._main.given_up = (why, kept)
        draft = self._draft
        if draft is not None:
            own = {name for name, _ in draft.model.named_parameters()}
            own -= reload.shared(draft.model, self._main.model)
            if not kept.issuperset(f"draft.{name}" for name in own):
                draft.updates.lost(why)

    def disown(self, why: str) -> None:
        """Somebody has found that the model's weights are not what was trained."""
        self._main.touched()
        if self._main.shadow is not None:
            self._main.shadow.touched()  # where the next step would be made of the same bytes
        self._main.updates.lost(why)

    # ------------------------------------------------------------------------------ vLLM's calls

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Finds the trainer and what it publishes, and works out where that belongs.

        Again: forgets the trainer of before. Blocks at most the timeout of *init_info*.
        """
        init = init_info.checked()
        if init.external_kv == "drop":
            refuse_what_stays(self.vllm_config)
        self._info, self._no_room = None, False
        self._main.close()
        if self._draft is not None:
            self._draft.close()
        trainer, failure = Trainer(init.trainer, init.run, relay=init.relay), None
        deadline = time.monotonic() + init.timeout
        try:
            published = trainer.ready(deadline)
            self._prepare(self._main, init, published)
        except Exception as error:
            # The other workers wait for this one's word, whatever it has met.
            failure = self._mine(error)
        try:
            self._agree(self._main, failure)
        except FaninError:
            trainer.close()
            self._main.close()
            raise
        self._main.trainer = trainer
        self._info = init
        self._reach(deadline)

    def _reach(self, deadline: float) -> None:
        assert self._main.trainer is not None and self._main.landing is not None
        start = time.monotonic()
        try:
            self._main.landing.reach(self._main.trainer, deadline)
        except FaninError as error:  # an update says it again, if it is so then
            _log.info("fanin: %s: nothing is made ready ahead: %s", self._worker, error)
            return
        _log.info("fanin: %s: reached in %.3f s", self._worker, time.monotonic() - start)

    def _agree(self, target: ServedModel, failure: FaninError | None) -> None:
        """Raises *failure*, or what another worker of this engine has met, or names what is
        published and used by none."""
        mine = (None if failure is None else str(failure), target.taken, target.idle)
        brought = reload.of_all_workers(mine, self.vllm_config)
        if failure is not None:
            raise failure
        for number, (text, _, _) in enumerate(brought):
            if text is not None:
                raise PeerError.make(f"worker {number} cannot be filled: {text}")
        refuse_idle(frozenset.intersection(*(idle for _, _, idle in brought)))
        told = [taken for _, taken, _ in brought if taken is not None]
        if len(told) == len(brought):
            refuse_missed(missed(target.shapes, told), _ALL_OF_IT)

    def start_weight_update(self) -> None:
        """Nothing is written yet; of a draft model, its trainer is looked for the first time."""
        if self._info is None:
            raise StateError.make(
                f"{self._worker}: start_weight_update before init_weight_transfer_engine",
                'init it with {"trainer": ..., "run": ...} first',
            )
        target = self._target()
        if target.trainer is None:
            self._find_draft(target, self._info)
        target.updates.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base's, which would also wait for an accelerator that a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Pulls one step and installs it; when this returns, all of it is in place."""
        step = update_info.checked()
        target = self._target()
        if update_info.prefetch:
            self._prefetch(target, step)
            return
        try:
            with target.updates.pull(step):
                self._bring(target, step)
        except Exception as error:
            mine = self._mine(error)
            raise mine from mine.__cause__

    def _mine(self, error: Exception) -> FaninError:
        """The error, which says whose it is: one of several workers may fail alone."""
        if not isinstance(error, FaninError):
            mine = HostError.make(f"{self._worker}: {type(error).__name__}: {error}")
            mine.__cause__ = error
            return mine
        if not error.message.startswith(self._worker):
            error.message = f"{self._worker}: {error.message}"
        return error

    def finish_weight_update(self) -> None:
        """Refused unless a whole pull has succeeded since the start."""
        step = self._target().updates.finish()
        self._target().give_up_prefetch()
        _log.info("fanin: %s: the weights are those of step %d", self._worker, step)

    def check(self, step: int, poison: bool = True) -> dict[str, Any]:
        """Whether the model holds *step* as it is published; see :mod:`fanin.check`.

        With *poison* everything that a pull fills is overwritten first, and pulled. Raises
        StateError during an update, before init, and in mode "loader".
        """
        check_step(step)
        target = self._main
        landing, trainer = self._checked(target)
        if poison:
            target.updates.start()
            with target.updates.pull(step), set_current_vllm_config(self.vllm_config):
                target.writing(step)
                target.touched()
                beside.poison(landing)
                self._bring(target, step)
            target.updates.finish()
        assert self._info is not None
        deadline = time.monotonic() + self._info.timeout
        trainer.ready(deadline, step)  # connects, where an update has failed
        with set_current_vllm_config(self.vllm_config):
            found = beside.compare(landing, trainer, step, deadline)
        found.unseen += landing.by_loader
        found.kept += sorted(target.kept)
        return asdict(found)

    def holds_of(self, step: int, publication: str) -> dict[str, Any]:
        """Digests of what the model, or its draft, holds of *publication*; see
        :func:`fanin.check.served`.

        Raises StateError if that is not at *step* now, before init, and in mode "loader".
        """
        check_step(step)
        both = (self._main, self._draft)
        targets = [one for one in both if one is not None and one.fills(publication)]
        if not targets:
            raise StateError.make(
                f"{self._worker} holds nothing of {publication}",
                "name the run of the model, or that of its draft once that was updated",
                key=publication,
            )
        fields = ("held", "different", "unseen", "untold", "kept")
        found: dict[str, list[Any]] = {field: [] for field in fields}
        for target in targets:
            landing, trainer = self._checked(target)
            target.require_at(step)
            assert self._info is not None
            deadline = time.monotonic() + self._info.timeout
            trainer.ready(deadline, step)
            with set_current_vllm_config(self.vllm_config):
                told, compared = beside.held(landing, trainer, step, deadline)
            whose = "" if target is self._main else "draft: "
            found["held"] += told
            found["different"] += (whose + path for path in compared.different)
            found["unseen"] += (whose + path for path in (*compared.unseen, *landing.by_loader))
            found["kept"] += (whose + path for path in sorted(target.kept))
            for module in landing.mapping.modules:
                found["untold"] += module.taken
        return {**found, "unused": sorted(frozenset.intersection(*(one.unused for one in targets)))}

    def _checked(self, target: ServedModel) -> tuple[MappedLanding, Trainer]:
        """How a model is filled, and by whom. Raises StateError if that cannot be seen."""
        landing, trainer = target.landing, target.trainer
        if trainer is None or not isinstance(landing, MappedLanding):
            raise StateError.make(
                f"{self._worker} was not pointed at a trainer, or loads by vLLM's own loader",
                'init it, without {"mode": "loader"}',
            )
        return landing, trainer

    def state(self) -> dict[str, Any]:
        """See :func:`fanin.engine.weights_state.fanin_weights_state`."""
        target = self._main
        return {
            "step": target.updates.step,
            "dirty": target.updates.dirty,
            "ahead": None if target.prefetch is None else target.prefetch.state(),
            "last": None if target.last is None else target.last.as_dict(),
            "kept": sorted(target.kept),
            "external_kv": has_some(self.vllm_config),
            "draft_step": None if self._draft is None else self._draft.updates.step,
            "basis": self._basis,
            "deltas": counts.told(),
        }

    def reset_weight_update_target(self) -> None:
        """vLLM says here that an update is over, well or not."""
        self._target().updates.leave()
        self._target().give_up_prefetch()
        super().reset_weight_update_target()

    def shutdown(self) -> None:
        """Closes connections and frees what updates need; the next init makes them anew."""
        self._main.close()
        if self._draft is not None:
            self._draft.close()
        self._info = None

    # ------------------------------------------------------------------------------ behind them

    def _find_draft(self, target: ServedModel, info: InitInfo) -> None:
        if info.draft_run is None:
            raise StateError.make(
                f"{self._worker}: init_info named no run for the draft model",
                'init it with {"draft_run": ...} as well',
                key="draft_run",
            )
        trainer = Trainer(info.trainer, info.draft_run, relay=info.relay)
        try:
            published = trainer.ready(time.monotonic() + info.timeout)
            self._prepare(target, info, published)
        except BaseException:
            trainer.close()
            raise
        target.trainer = trainer

    def _prepare(self, target: ServedModel, info: InitInfo, published: Published) -> None:
        start = time.monotonic()
        self._anew()
        if target.landing is not None:
            target.landing.close()
        if target.trainer is not None:
            target.trainer.release()
        target.shadow = target.landing = target.published = None
        target.landing = self._landing(target, info, published)
        target.published = published
        _log.info(
            "fanin: %s: %d published tensors, %s; prepared in %.3f s",
            self._worker,
            len(published.entries),
            target.landing,
            time.monotonic() - start,
        )

    def _landing(self, target: ServedModel, info: InitInfo, published: Published) -> Landing:
        target.taken, others, names = None, frozenset[str](), published.names()
        if target is self._main:
            if info.config == "check":
                refuse_other_config(published.config, self.model_config.hf_config)
                refuse_other_quantization(*self._quantizations(published), _START)
            published = without(published, info.unused)
            target.kept, target.idle = kept_paths(target.model, info.keep)
            self._check_kept(target)
            others = target.kept
        else:
            others = reload.shared(target.model, self._main.model)
        recording = self._recorded(target, published, others)
        if target is self._main:
            refuse_published(recording, others)
        elif others:
            published, recording = self._but_shared(target, published, recording, others)
        target.unused = names.difference(entry.name for entry in recording.published)
        if conflicts := recording.tie_conflicts():
            raise MappingError.of(
                conflicts, "train with tied weights, or start vLLM with a model that does not tie"
            )
        if info.mode == "loader":
            self._check_loader(target, info, recording)
            _refuse_part(target.kept, {path.rpartition(".")[0] for path in recording.touched})
            model = (target.model, target.model_config, self.device)
            return LoaderLanding(*model, published, others, verify=bool(info.verify))
        try:
            mapping, computes = recording.mapping(), ""
        except MappingError as error:
            if not recording.only_computes(error):
                error.remedy += "; or " + _way_out(recording, target.model)
                raise
            mapping, computes = with_neighbours(recording.mapping(fallback=True)), str(error)
        self._keep_taken(target, info, recording)
        if info.save is not None:
            self._save(mapping, target, info.save)
        made = (target.model, target.model_config, self.device)
        verify = bool(info.verify)
        with set_current_vllm_config(self.vllm_config):
            loader = None
            if computes:
                loader = LoaderLanding(*made, published, fallback=mapping, verify=verify)
            asking = info.asking() if info.deltas is True else None
            mapped = MappedLanding(
                *made, mapping, loader, ring=info.ring, verify=verify, asking=asking
            )
        _refuse_part(target.kept, {*mapped.whole, *mapped.by_loader})
        if not computes:
            return mapped
        _log.warning(
            "fanin: %s: these go through vLLM's own load_weights in every step, slower and "
            "with more memory: %s; no mapping can say what it does: %s",
            self._worker,
            ", ".join(mapped.by_loader),
            computes,
        )
        return mapped

    def _quantizations(self, published: Published) -> tuple[Any, Any]:
        """How the trainer quantizes, and this engine."""
        mine = quantization_of(self.model_config.hf_config, self.model_config.quantization)
        return read_quantization(published.quantization), mine

    def _recorded(
        self, target: ServedModel, published: Published, others: frozenset[str]
    ) -> Recording:
        """Raises RequestError if trainer and engine quantize other modules."""

        def record(entries: Iterable[Any]) -> Recording:
            return record_model(entries, target.model, self.vllm_config, others)

        recording = record(published.entries)
        refuse_other_modules(recording, record, *self._quantizations(published), _START)
        return recording

    def _check_kept(self, target: ServedModel) -> None:
        """Raises RequestError, StateError if what is kept is not what a checkpoint has."""
        load = getattr(self.vllm_config, "load_config", None)
        if target.kept and getattr(load, "load_format", "") == "dummy":
            raise RequestError.make(
                f"keep names '{min(target.kept)}', which vLLM has filled at random",
                "start vLLM without --load-format dummy",
                key="keep",
            )
        target.require_kept()
        refuse_torn(target.kept, target.intact, target.updates.dirty)

    def _but_shared(
        self,
        target: ServedModel,
        published: Published,
        recording: Recording,
        shared: frozenset[str],
    ) -> tuple[Published, Recording]:
        """Without what would go into tensors of the draft model that are the main model's, whose
        run fills them. Raises RequestError if the loader could write to them all the same."""
        names = recording.into(shared)
        if names:
            _log.warning(
                "fanin: %s, draft: not used, since vLLM shares what they would fill with the main"
                " model, whose run fills it: %s",
                self._worker,
                ", ".join(names),
            )
            published = without(published, [glob.escape(name) for name in names])
            recording = record_model(published.entries, target.model, self.vllm_config, shared)
        if recording.whole and not recording.touched & shared:
            return published, recording
        unknown = [str(one) for one in recording.refusals if not one.path or one.path in shared]
        raise RequestError.make(
            f"the draft model shares {', '.join(sorted(shared))} with the main model, and its"
            f" loader may write there: {'; '.join(unknown) or 'it fills them by itself'}",
            "init without draft_run",
            key="draft_run",
        )

    def _check_loader(self, target: ServedModel, info: InitInfo, recording: Recording) -> None:
        """Raises MappingError for what vLLM's loader fills with nothing, before the first step."""
        if recording.failed:
            why = [one for one in recording.refusals if not (one.module or one.leaf)]
            raise MappingError.of(why, _ALL_OF_IT)
        if not recording.whole:
            # It needs values: what is lacking is an error at the end of each step, and no sooner.
            _log.info(
                "fanin: %s: vLLM's loader cannot be run without weights: %s",
                self._worker,
                "; ".join(str(one) for one in recording.refusals if not (one.module or one.leaf)),
            )
            return
        lacking = reload.lacking(recording, target.model)
        if lacking:
            raise MappingError.of(
                lacking, "publish the whole model under the names of its checkpoint, or " + KEEP
            )
        self._keep_taken(target, info, recording)

    def _keep_taken(self, target: ServedModel, info: InitInfo, recording: Recording) -> None:
        """Keeps what this worker does not take all of. One alone knows that nobody does."""
        remedy, parallel = _ALL_OF_IT, self.parallel_config
        # Experts of other replicas are not known here: these are not asked.
        apart = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
        if target is not self._main:
            remedy = "publish in this run what the draft model has, and no more"
            if info.draft_run == info.run:
                return  # the rest is the main model's
        target.shapes = {
            entry.name: tuple(entry.shape)
            for entry in recording.published
            if not (apart and "experts." in entry.name)
        }
        taken = recording.taken()
        target.taken = taken_of({name: taken[name] for name in taken if name in target.shapes})
        if parallel.world_size == 1:
            refuse_missed(missed(target.shapes, [target.taken]), remedy)

    def _save(self, mapping: Mapping, target: ServedModel, directory: str) -> None:
        parallel = self.vllm_config.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        name = f"{'rank' if target is self._main else 'draft'}{number}.json"
        try:
            os.makedirs(directory, exist_ok=True)
            mapping.save(os.path.join(directory, name))
        except OSError as error:
            raise HostError.make(
                f"{self._worker} cannot write its mapping to {directory}: {error}",
                "give a directory that it may write to",
                key="save",
            ) from error

    def _prefetch(self, target: ServedModel, step: int) -> None:
        if not target.updates.open:
            raise StateError.make(
                f"{self._worker}: prefetch without start_weight_update", "start the update first"
            )
        landing = target.landing
        if not isinstance(landing, MappedLanding) or landing.by_loader or not target.trainer:
            raise StateError.make(
                f"{self._worker} loads by vLLM's own loader, which cannot read ahead",
                "leave prefetch out",
                key="prefetch",
            )
        target.give_up_prefetch()
        info, told = self._info, target.published
        assert info is not None and told is not None
        if target.shadow is None:
            workers = self.parallel_config.world_size
            target.shadow = beside.Shadow(landing, workers, info.asking())
            _log.info(
                "fanin: %s: %.1f MB of %s to read ahead into",
                self._worker,
                target.shadow.bytes / 1e6,
                target.shadow.place,
            )
        target.prefetch = Prefetch(target.shadow, target.trainer, step, told, info.timeout)

    def _by_shadow(self, target: ServedModel) -> bool:
        """Whether a step that was not read ahead is to be read beside the model all the same: only
        there it can be made of the last one."""
        landing = target.landing
        if self._info is None or self._info.deltas is not True or self._no_room:
            return False
        return isinstance(landing, MappedLanding) and not (landing.by_loader or landing.holds_steps)

    def _read_beside(self, target: ServedModel, step: int) -> Prefetch | None:
        """None: the host has no room for it."""
        try:
            self._prefetch(target, step)
        except HostError as error:
            self._no_room = True
            _log.warning("fanin: %s: no deltas, steps are read whole: %s", self._worker, error)
        ahead, target.prefetch = target.prefetch, None
        return ahead

    def _bring(self, target: ServedModel, step: int) -> None:
        assert target.trainer is not None and self._info is not None
        deadline = time.monotonic() + self._info.timeout
        target.require_kept()
        ahead, target.prefetch = target.prefetch, None
        if ahead is None and self._by_shadow(target):
            ahead = self._read_beside(target, step)
        if ahead is not None and ahead.step != step:
            ahead.cancel()
        elif ahead is not None and ahead.wait(deadline):
            target.touched()
            summary = ahead.install(lambda: target.writing(step))
            self._did(target, step, summary)
            return
        begun = time.monotonic()
        published = target.trainer.ready(deadline, step)
        if target.published is None or not published.same_model(target.published):
            self._require_agreed(target, published)
            self._prepare(target, self._info, published)
        assert target.landing is not None
        found = time.monotonic() - begun
        summary = target.landing.pull(target.trainer, step, deadline, lambda: target.writing(step))
        summary.ready += found
        self._did(target, step, summary)

    def _require_agreed(self, target: ServedModel, published: Published) -> None:
        """Raises StateError for names and shapes of which the workers have not said together that
        they take all; one that has failed meanwhile would let the others wait."""
        known = target.published
        if target is not self._main or self.parallel_config.world_size == 1 or known is None:
            return
        if target.taken is not None and published.layout() != known.layout():
            raise StateError.make(
                "other names, types or shapes are published than at init",
                "init again, as the next sync of a Registry does",
            )

    def _did(self, target: ServedModel, step: int, summary: Summary) -> None:
        target.last = summary
        target.updates.came_from(", ".join(sorted(summary.worlds)), summary.incarnations)
        _log.info("fanin: %s: step %d: %s", self._worker, step, summary)


def _way_out(recording: Recording, model: Any) -> str:
    """What helps where a loader does not fill the model by boxes."""
    if recording.failed:
        return _UNUSED
    lacks = recording.whole and reload.lacking(recording, model)
    return KEEP if lacks else _BY_LOADER


def _refuse_part(kept: Iterable[str], whole: Container[str]) -> None:
    """Raises RequestError if a part of a module is kept that can only be filled as a whole."""
    for path in sorted(kept):
        module, _, leaf = path.rpartition(".")
        if module in whole:
            raise RequestError.make(
                f"keep names '{leaf}' of module '{module}', and the trainer fills the rest of it:"
                " vLLM processes such a module as a whole",
                "publish all of the module, or keep all of it",
                key="keep",
            )


def _named(vllm_config: Any) -> str:
    parallel = vllm_config.parallel_config
    rank, size = int(getattr(parallel, "rank", 0)), int(getattr(parallel, "world_size", 1))
    name = f"worker {rank} of {size}"
    # Replicas that share nothing know their own number, and not how many there are.
    replica = int(getattr(parallel, "data_parallel_index", 0))
    if replica or int(getattr(parallel, "data_parallel_size", 1)) > 1:
        name += f", replica {replica}"
    return name


def _refuse_what_moves(vllm_config: Any) -> None:
    """Raises StateError for configurations in which parameters are not, or do not stay, where
    they were loaded."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_eplb", False):
        raise StateError.make(
            "experts are moved between workers (EPLB), and what was recorded of them is then void",
            "start vLLM without --enable-eplb",
        )
    offload = getattr(vllm_config, "offload_config", None)
    uva = getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0)
    prefetch = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    old = getattr(getattr(vllm_config, "cache_config", None), "cpu_offload_gb", 0)
    if any(isinstance(amount, (int, float)) and amount > 0 for amount in (uva, prefetch, old)):
        raise StateError.make(
            "parameters are offloaded to the CPU and do not stay where they are",
            "start vLLM without offloading",
        )


# ------------------------------------------------- what was computed with the old weights
# Connectors find KV of a prompt, and outputs of encoders, by its tokens, whatever the weights were.
# The end of an update drops what a connector can drop. What it cannot drop would answer with the
# new weights, so an engine that has such a connector is refused.


_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")


def refuse_what_stays(vllm_config: Any) -> None:
    """Raises RequestError if the engine keeps something outside that no update drops."""
    stays = what_stays(vllm_config)
    if stays:
        raise RequestError.make(
            "the engine keeps outside of itself what the weights of before have computed, and"
            f" nothing drops it at an update: {'; '.join(stays)}",
            'start vLLM without it, or init with {"external_kv": "keep"} (Registry: init=) if you'
            " empty it before the engine goes on, or if answers may use it",
            key="external_kv",
        )


def what_stays(vllm_config: Any) -> list[str]:
    """What of the engine's connectors a reset leaves, [] if it leaves nothing."""
    found = []
    if _connector(vllm_config, "kv") is not None:
        found += _of_connector(vllm_config.kv_transfer_config)
    encoders = _connector(vllm_config, "ec")
    if encoders is not None:
        found.append(f"{encoders} cannot drop outputs of encoders")
    return found


def has_some(vllm_config: Any) -> bool:
    """Whether the engine has a connector: what lies there may be other engines', too."""
    return any(_connector(vllm_config, kind) is not None for kind in ("kv", "ec"))


def _connector(vllm_config: Any, kind: str) -> Any:
    """The connector of KV, or of encoders' outputs; None: there is none."""
    transfer = getattr(vllm_config, f"{kind}_transfer_config", None)
    return getattr(transfer, f"{kind}_connector", None)


def _of_connector(transfer: Any) -> list[str]:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    name, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    if name == "MultiConnector":  # takes the answer None of one that drops nothing for success
        children = [
            KVTransferConfig(**{"engine_id": transfer.engine_id, **child})
            for child in extra.get("connectors", [])
        ]
        return [text for child in children for text in _of_connector(child)]
    kind = KVConnectorFactory.get_connector_class(transfer)
    if getattr(kind, "reset_cache", None) in (None, KVConnectorBase_V1.reset_cache):
        return [f"{name} does not implement reset_cache"]
    if name == "OffloadingConnector":
        spec = extra.get("spec_name", _SPECS[0])
        if spec not in _SPECS:
            return [f"{name} may leave what {spec} keeps"]
        if extra.get("secondary_tiers"):
            return [f"{name} leaves its secondary tiers"]
    return []
