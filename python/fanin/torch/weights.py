# SPDX-License-Identifier: Apache-2.0
"""WeightServer: all weights of a model, published from where they are trained."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import re
import secrets
import sys
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch

from fanin._options import option, takes
from fanin._quantization import is_fit
from fanin._records import DELTAS
from fanin._served import size_of
from fanin._tensors import Shard
from fanin.errors import FaninError, RequestError, StateError
from fanin.server import publication_of
from fanin.torch._blocks8 import shared_blocks
from fanin.torch._config import model_config
from fanin.torch._formats import format_of
from fanin.torch._meeting import Meeting
from fanin.torch._merge import Merge
from fanin.torch._names import WRAPPERS, NamesFunction
from fanin.torch._parameters import Change, Parameters
from fanin.torch._proof import Proof, layouts_of
from fanin.torch._publisher import (
    OneRun,
    Publisher,
    RankOptions,
    Run,
    Source,
    cause_of,
    first_device,
    refuse_uncallable,
)
from fanin.torch._quantized import Quantizer
from fanin.torch._replicas import At, Replicas, refuse_parts, replicas_of
from fanin.torch._state import State
from fanin.torch._transform import Cut, Transform
from fanin.torch._tree import BUFFER, Item, root_of
from fanin.torch._union import (
    Entry,
    Table,
    Told,
    Whole,
    compress,
    entry_of,
    ranks_text,
    replicated,
    table_of,
    unite,
)
from fanin.torch._weights import checkpoint_names, find_weights, lost_ties, refuse_lost_tie
from fanin.torch._world import raise_first

_log = logging.getLogger("fanin.torch")

_REFRESH = (
    "call refresh() on every rank, also on those where nothing has changed, and publish the next "
    "step"
)


def full_publication(run: Run) -> str:
    """The publication of a whole model: ``"full:0"`` for ``0``, ``"0"`` and ``"full:0"``.

    Raises:
        RequestError: no name of a run, or the name of an adapter's publication.
    """
    if isinstance(run, str) and run.startswith("lora:"):
        raise RequestError.make(
            f"{run!r} is an adapter's publication", "name the run alone, or full:<run>"
        )
    return "full:" + publication_of(run).partition(":")[2]


class _What(NamedTuple):
    """What a run is to publish: the arguments of that name."""

    model: Any
    names: NamesFunction | None
    config: Any
    merge: bool
    transform: Transform | None
    quantize: Any
    skip_modules: Any


def _source(run: Run, what: _What, deltas: int) -> Source:
    model, transform = what.model, what.transform
    form = format_of(what.quantize, what.skip_modules)
    if not isinstance(model, torch.nn.Module):
        raise RequestError.make(
            f"the model is a {type(model).__name__}", "give the torch.nn.Module that is trained"
        )
    publication = full_publication(run)
    if not isinstance(what.merge, bool):
        raise RequestError.make(
            f"merge is {what.merge!r}",
            "give True: the model's active adapter is merged, see set_adapter()",
            key="merge",
        )
    refuse_uncallable(transform=transform, names=what.names)
    quantizer = None if form is None else Quantizer(form)
    # What is rounded needs memory for a part at a time: of whole blocks, and of 64 rows as PEFT's
    # products are computed.
    cut = None if form is None else Cut(math.lcm(64, form.block[0] if form.block else 1))
    merge = Merge(model, transform, cut) if what.merge else None
    if merge is not None:
        model, transform = merge.root, merge
    find = functools.partial(find_weights, merge=merge, computed=transform is not None)
    names = what.names or checkpoint_names(model, find, transform)
    parameters = Parameters(
        model, find, names, transform=transform, batch=merge, quantizer=quantizer
    )

    change = parameters.look()
    places = {-1 if shard.device is None else shard.device for shard in change.shards}
    if deltas and len(places) > 1:
        _log.warning(
            "deltas=%d of %s has no effect: it lies in memory of several kinds, of whose copies "
            "there are no patches (%s). Engines read the whole of each step",
            deltas,
            publication,
            ", ".join("the host" if one < 0 else f"CUDA device {one}" for one in sorted(places)),
        )
        deltas = 0

    def describe() -> dict[str, str]:
        text = model_config(model, what.config, unpacked=what.merge)
        told = {"format": "pt"} if text is None else {"config": text, "format": "pt"}
        return {**told, DELTAS: str(deltas)} if deltas else told

    metadata = describe()
    kept = kept_in_f32(model, metadata.get("config"), change.states)
    ties = tuple(lost_ties(parameters.root, change.items or ()))
    told = (publication, parameters, change, metadata, describe)
    return Source(*told, kept=kept, ties=ties, deltas=deltas)


class Answer(NamedTuple):
    """What a rank tells the others of a run."""

    error: FaninError | None
    told: Told
    metadata: dict[str, str]
    token: str
    kept: frozenset[str]
    contract: str | None = None
    """Of the rounding to fp8, None: there is none."""
    unfit: frozenset[str] = frozenset()
    """Of ``skip_modules``, what fits no module of this rank's."""
    cuda: bool = False
    """It holds some on a CUDA device."""
    computes: bool = False
    """By ``merge=`` or ``transform=``."""


class Agreed(NamedTuple):
    """What all ranks of a run know."""

    wholes: list[Whole]
    metadata: dict[str, str]
    kept: frozenset[str]


@dataclass(frozen=True)
class WeightOptions(RankOptions):
    """What :class:`WeightServer` is told.

    Args:
        model: The module that is trained. A model with an adapter of PEFT's is refused without
            *merge*: :class:`fanin.torch.AdapterServer` publishes the adapter alone.
        run: The publication is ``full:<run>``.
        name: Engines that demand a name of servers must demand this one.
        cast: "BF16" or "F16": snapshots of F32 tensors are converted. Needs *snapshot*. A mapping
            gives exceptions by patterns of published names, and the first that fits decides:
            ``cast={"*.mlp.gate.weight": None, "*": "BF16"}``. F32 that the model keeps stays F32:
            transformers' ``_keep_in_fp32_modules`` and its ``_strict``, and persistent buffers. A
            pattern that names one of them rounds it, and a warning says so.
        config: The model's configuration for engines: transformers', a dict or JSON. Default:
            ``model.config``, if any rank has one.
        merge: Publishes the base of a PEFT model with its LoRA adapter merged, bit for bit what
            ``merge_and_unload()`` makes. Base and adapter stay as they are. A base that
            bitsandbytes packs in 4 bits is published dequantized.
        transform: Publishes computed values in place of stored ones, see
            :data:`fanin.torch.Transform`.
        quantize: What engines get as E4M3 with scales, see docs/reference/quantization.md. "fp8":
            blocks of 128 x 128. Or the keys of Hugging Face's ``quantization_config``. The results
            take half of the memory that BF16 takes.
        skip_modules: Modules that *quantize* leaves as they are, beside embeddings, heads and
            routers: whole dotted parts of their names, or patterns for the whole name.
    """

    _: KW_ONLY
    run: Run = option("0")
    name: str = option("weight_param_server")
    config: Any = option(None)
    merge: bool = option(False)
    transform: Transform | None = option(None)
    quantize: Any = option(None)
    skip_modules: Any = option(None)


class WeightServer(Publisher):
    """Publishes all weights of a model by reference: workers read the trainer's own memory.

    Make it on every rank, at the same time, after the model is sharded. The server publishes every
    parameter and persistent buffer under the name of its checkpoint. It drops what FSDP, DDP,
    torch.compile and activation checkpointing put into names. A tied parameter is there once.

    With ``quantize="fp8"`` ranks round their parts at each step, and readers get the bytes of the
    whole matrices, rounded. See docs/reference/quantization.md.

    Parameters are plain tensors or DTensors, in host memory or on CUDA devices. A DTensor has any
    mesh and any placements but Partial. Each rank lends the part that it holds. That part may be
    some of the layers (pipeline parallelism) or some of the experts. ::

        server = WeightServer(model, base_port=6000)
        server.publish(0)
        ...
        with server.updating(step):
            optimizer.step()

    The constructor blocks until all ranks have come here. The ranks tell each other which tensors
    they hold, and refuse a tensor of which no rank holds some element. If one rank fails, all ranks
    raise an error that names it.

    At each publish only the ranks that hold the same box wait for each other. Their copies must be
    equal, bit for bit. The first publish compares all of them. A later publish compares a sample,
    which takes 1 % of the time between two. Where replicas differ, RequestError names the tensor
    and two ranks, and none of them publishes.

    Only :meth:`refresh` changes the set of tensors. A rank whose names, dtypes, shapes or parts are
    not those agreed on raises StateError, and its step is not readable. The error comes at the next
    :meth:`publish`, or at the end of :meth:`updating`. Storage that merely moves is registered
    anew.

    Use it from one thread at a time. Registered storage is kept allocated until it is replaced. The
    server is a context manager, and is also closed at exit, before or after the process group is
    destroyed. In a forked child it raises ProcessError and touches nothing.

    Raises:
        RequestError: there is nothing to publish, or no rank holds some elements of a tensor. Or
            ranks contradict each other in dtype or shape. Or tensors cannot be published (Partial
            placements, FSDP1, meta, sparse, quantized, packed). Or other hosts cannot reach the
            addresses, or there is no allow-list.
        StateError: parameters are unsharded or offloaded now.
        TypeError: an argument that neither this class nor :class:`fanin.Server` takes.
        FaninError: what :class:`fanin.Server` raises (a port in use, limits, memory).
    """

    _publication = staticmethod(full_publication)

    @takes(WeightOptions)
    def __init__(self, options: WeightOptions) -> None:
        #: What this rank has told the others.
        self._tables: dict[str, Table] = {}
        #: The proof that replicas are replicas.
        self._replicas: dict[str, Replicas | None] = {}
        #: Where ranks meet before they compute, None: they compute alone.
        self._meetings: dict[str, Meeting | None] = {}
        self._told_of_ties: set[str] = set()
        #: Runs of which the library has not taken all that was told.
        self._unsettled: set[str] = set()
        what = _What(*(getattr(options, name) for name in _What._fields))
        super().__init__(options, options.name, lambda: _source(options.run, what, self._deltas))

    def refresh(self, run: Run | None = None) -> None:
        """Tells the ranks anew what this one holds: on every rank, after the set has changed.

        Call it after parameters were added, removed, converted to another dtype or sharded in
        another way, on one rank or on all. Call it inside :meth:`updating` when experts have
        changed places: the server asks ``names`` again. The configuration is the model's present
        one.

        If nothing differs, nothing else is needed. If anything differs, the run is unreadable until
        the next :meth:`publish`, or until the end of :meth:`updating`. Blocks until all ranks have
        come here. If one rank fails, all ranks raise an error that names it.

        Args:
            run: the run that has changed; None: all runs.

        Raises:
            NotFoundError: no such run.
            RequestError: the constructor's reasons.
            StateError: the run is paused; parameters are unsharded or offloaded; they were written
                outside of :meth:`updating`, and the step is withdrawn: refresh again.
        """
        for one in self._named(run):
            self._refresh(one)

    def add_run(
        self,
        run: Run,
        model: Any,
        *,
        names: NamesFunction | None = None,
        config: Any = None,
        merge: bool = False,
        transform: Transform | None = None,
        quantize: Any = None,
        skip_modules: Any = None,
        deltas: int | None = None,
    ) -> None:
        """Publishes another model as well, a draft model for example; on every rank.

        Or the same model in another precision: engines that compute with BF16 read one run, those
        that compute with fp8 the other. Both are written by ``updating({"0": step, "0-fp8":
        step})``. Of runs that publish the same memory by reference, an embedding for example,
        :meth:`updating` and :meth:`pause` of one alone raise StateError.

        The run is readable from its first :meth:`publish` or :meth:`updating` on, which then want
        ``{run: step}``. Blocks until all ranks have come here. If one rank fails, all ranks raise
        an error that names it.

        Args:
            run: the publication is ``full:<run>``.
            model: the module that is trained.
            names, config, merge, transform, quantize, skip_modules: as the constructor's.
            deltas: as the constructor's; None: what the constructor was told.

        Raises:
            RequestError: the run is there already; the constructor's reasons.
            StateError: the server is closed; the process group was destroyed.
        """
        source, error, publication = None, None, ""
        try:
            publication = full_publication(run)
            self._refuse_known(publication)
            what = _What(model, names, config, merge, transform, quantize, skip_modules)
            kept_steps = self._deltas if deltas is None else self._checked_deltas(deltas)
            source = _source(run, what, kept_steps)
        except Exception as caught:
            error = cause_of(caught)
        table = table_of(source.change.shards) if source is not None else {}
        metadata, kept = (source.metadata, source.kept) if source is not None else ({}, frozenset())
        parameters = None if source is None else source.parameters
        agreed = self._united(publication, table, metadata, kept, parameters, error)
        assert source is not None
        self._register(self._server, _united_source(source, agreed, table))
        self._tables[source.publication] = table

    def remove_run(self, run: Run) -> None:
        """Takes a run's weights back: on return nobody reads its memory any more.

        Call it on every rank. Blocks until the run's readers are done, at most ``lease`` seconds. A
        run that is added under the same name must go on above the last step.

        Args:
            run: the run to remove.

        Raises:
            NotFoundError: no such run.
        """
        super().remove_run(run)
        self._tables.pop(full_publication(run), None)
        self._replicas.pop(full_publication(run), None)
        self._meetings.pop(full_publication(run), None)
        self._unsettled.discard(full_publication(run))

    # -- inside -----------------------------------------------------------------------------

    def _united(
        self,
        publication: str,
        table: Table,
        metadata: dict[str, str],
        kept: frozenset[str],
        parameters: Parameters | None,
        error: FaninError | None,
    ) -> Agreed:
        """What all ranks hold together; the metadata are of the first that has a configuration."""
        ranks = self._ranks
        ranks.refuse_gone(error)
        told, text = compress(table)
        quantizer = None if parameters is None else parameters.quantizer
        mine = Answer(error, told, metadata, secrets.token_hex(8), kept)
        if parameters is not None:
            mine = mine._replace(computes=parameters.transform is not None)
        if parameters is not None and quantizer is not None:
            mine = mine._replace(
                contract=quantizer.form.contract(),
                unfit=frozenset(_unfit(parameters.root, quantizer.form.skip)),
                cuda=first_device(parameters.root) is not None,
            )
        answers: list[Answer] = ranks.gather(mine)
        raise_first([answer.error for answer in answers], ranks.rank, "describe its parameters")
        texts: dict[bytes, bytes] = {}
        for rank, answer in enumerate(answers):
            if answer.told.digest not in texts:
                shared = ranks.share(text if rank == ranks.rank else None, rank)
                texts[answer.told.digest] = shared
        everyone = [answer.told for answer in answers]
        _refuse_other_contract(answers)
        wholes = unite(everyone, texts)
        all_metadata = [answer.metadata for answer in answers]
        agreed = next((one for one in all_metadata if "config" in one), all_metadata[0])
        refuse_parts(wholes, agreed, ranks.size)
        meets = any(answer.computes for answer in answers)
        if quantizer is not None:
            quantizer.form.refuse(wholes, frozenset.intersection(*(a.unfit for a in answers)))
            agreed = quantizer.form.described(agreed, wholes)
            home = ranks.home("cuda" if any(answer.cuda for answer in answers) else "cpu")
            plan = shared_blocks(everyone, texts, quantizer.form)
            quantizer.agree(plan, home, ranks.maximum)
            meets = meets or plan.size > 0
        token, store = answers[0].token, ranks.store() if meets else None
        self._meetings[publication] = None
        if store is not None:
            place = f"fanin/{token}/meeting"
            self._meetings[publication] = Meeting(store, place, publication, ranks.rank, ranks.size)
        self._replicas[publication] = replicas_of(
            *(ranks, token, publication), replicated(everyone, texts, ranks.rank)
        )
        everywhere = frozenset().union(*(answer.kept for answer in answers))
        everywhere -= self._casting.believed(everywhere)
        if everywhere:
            agreed = {**agreed, KEEP_F32: "\n".join(sorted(everywhere))}
        layouts = layouts_of(table)
        sizes = ranks.gather(size_of(layouts))
        self._proofs[publication] = Proof(publication, ranks.rank, layouts, sizes)
        self._unproven.add(publication)
        return Agreed(wholes, agreed, everywhere)

    def _agreed(self, source: Source) -> Source:
        table = table_of(source.change.shards)
        told = (source.metadata, source.kept, source.parameters)
        agreed = self._united(source.publication, table, *told, None)
        self._tables[source.publication] = table
        return _united_source(source, agreed, table)

    def _resolved(self, run: OneRun) -> Change:
        change = run.parameters.look()
        table = self._tables[run.publication]
        if run.publication in self._unsettled:
            raise StateError.make(
                f"refresh() of {run.publication} has not come to its end",
                _REFRESH,
                key=run.publication,
            )
        for shard in change.shards:
            if table.get(shard.name) != entry_of(shard):
                raise _changed(run, shard.name, table.get(shard.name), entry_of(shard))
        for name in change.removed:
            raise _changed(run, name, table.get(name), None)
        return change

    def _prove(self, run: OneRun) -> None:
        for pair in run.ties:
            first, second = ((name, run.parameters.part_of(name)) for name in pair)
            if first[1] is not None and second[1] is not None:
                refuse_lost_tie(run.publication, first, second)
                self._warn_of_tie(run, *pair)
        if (replicas := self._replicas.get(run.publication)) is not None:
            replicas.check(run.at, run.parameters.values, run.whole)

    def _warn_of_tie(self, run: OneRun, name: str, other: str) -> None:
        if run.publication not in self._told_of_ties:
            self._told_of_ties.add(run.publication)
            _log.warning(
                "the configuration ties '%s' to '%s', and %s holds two tensors, which are equal so "
                "far: engines that tie them refuse both. Call model.tie_weights() before "
                "fully_shard()",
                *(other, name, run.publication),
            )

    def _meet(self, run: OneRun) -> None:
        if (meeting := self._meetings.get(run.publication)) is not None:
            meeting.come(run.at)

    def _unpublished(self, run: OneRun, error: BaseException, at: At) -> None:
        for others in (self._meetings, self._replicas):
            if (one := others.get(run.publication)) is not None:
                one.fail(f"{type(error).__name__}: {error}"[:400], at)

    def _refresh(self, run: OneRun) -> None:
        merge = run.parameters.transform
        with merge.choosing() if isinstance(merge, Merge) else contextlib.nullcontext():
            change, table, agreed = self._agree_anew(run)
        self._tables[run.publication] = table
        self._unsettled.add(run.publication)
        run.kept, run.ties = agreed.kept, tuple(lost_ties(run.parameters.root, change.items or ()))
        self._tell(run, change._replace(metadata=agreed.metadata))
        others = self._casting.marked(_others(agreed.wholes, table), run.kept)
        self._server.put(run.publication, others, replace=True)
        for name in set(self._server.names(run.publication)) - {one.name for one in agreed.wholes}:
            self._server.remove(run.publication, name)
        self._unsettled.discard(run.publication)

    def _agree_anew(self, run: OneRun) -> tuple[Change, Table, Agreed]:
        """What this rank holds now, and what all do."""
        change, error = None, None
        table: Table = {}
        metadata: dict[str, str] = {}
        kept: frozenset[str] = frozenset()
        try:
            if run.paused:
                raise StateError.make(
                    f"{run.publication} is paused", "resume(run) it before", key=run.publication
                )
            self._refuse_written([run])
            change, metadata = run.parameters.look(anew=True), run.describe()
            kept = kept_in_f32(run.parameters.root, metadata.get("config"), change.states)
            table = dict(self._tables[run.publication])
            table.update(table_of(change.shards))
            for name in change.removed:
                table.pop(name, None)
        except Exception as caught:
            error = cause_of(caught)
        agreed = self._united(run.publication, table, metadata, kept, run.parameters, error)
        assert change is not None
        return change, table, agreed


def _unfit(root: Any, entries: Iterable[str]) -> set[str]:
    """The entries of a list of modules that fit none of *root*, by the names that it has."""
    names = [
        ".".join(part for part in path.split(".") if part not in WRAPPERS)
        for path, _ in root.named_modules(remove_duplicate=False)
    ]
    return {entry for entry in entries if not any(is_fit(entry, name) for name in names)}


def _refuse_other_contract(answers: list[Answer]) -> None:
    first = answers[0].contract
    others = [rank for rank, one in enumerate(answers) if one.contract != first]
    if others:
        raise RequestError.make(
            f"rank 0 publishes with quantize {first}, and {ranks_text(others)} with "
            f"{answers[others[0]].contract}",
            "give quantize= and skip_modules= the same on all ranks",
        )


def _united_source(source: Source, agreed: Agreed, table: Table) -> Source:
    others = _others(agreed.wholes, table)
    return source._replace(metadata=agreed.metadata, others=others, kept=agreed.kept)


def _others(wholes: list[Whole], table: Table) -> tuple[Shard, ...]:
    """The tensors of which this rank, which holds those of *table*, has nothing."""
    return tuple(Shard(*one, (), -1) for one in wholes if one.name not in table)


def _changed(run: OneRun, name: str, before: Entry | None, now: Entry | None) -> StateError:
    def told(entry: Entry) -> str:
        return f"{entry.dtype} {list(entry.shape)}"

    if before is None or now is None:
        what = "has joined" if before is None else "has left"
        text = f"'{name}' {what} the weights of {run.publication} on this rank"
    elif before[:2] != now[:2]:
        text = f"'{name}' is {told(now)} on this rank now, and was {told(before)}"
    else:
        text = f"this rank holds other parts of '{name}' than those that the ranks agreed on"
    return StateError.make(text, _REFRESH, key=name)


# ----------------------------------------------------------------------------------- kept in F32


KEEP_F32 = "keep_f32"
"""The pair of a publication's metadata that names them, one a line."""

_ATTRIBUTES = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def kept_in_f32(
    model: Any, config: str | None, states: Iterable[tuple[Item, State]]
) -> frozenset[str]:
    """Published names of the F32 tensors among *states* that the model keeps in F32.

    config: JSON of its configuration. Where the model is no class of transformers (Megatron's),
    the class that the configuration names tells, if transformers is loaded.
    """
    patterns = _patterns(root_of(model), config)
    told = re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in sorted(patterns)))
    kept = set()
    for item, state in states:
        if state.dtype is not torch.float32:
            continue
        for part in state.slices:
            named = patterns and any(told.search(name) for name in (item.path, item.name, part.key))
            if named or item.kind == BUFFER:
                kept.add(part.key)
    return frozenset(kept)


def _patterns(root: Any, config: str | None) -> set[str]:
    owners = [*root.modules()]
    transformers = sys.modules.get("transformers")
    for name in json.loads(config or "{}").get("architectures") or ():
        owners.append(getattr(transformers, str(name), None))
    return {
        str(one)
        for owner in owners
        for attribute in _ATTRIBUTES
        for one in getattr(owner, attribute, None) or ()
        if one
    }
