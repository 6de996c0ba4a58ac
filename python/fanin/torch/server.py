# SPDX-License-Identifier: Apache-2.0
"""AdapterServer: a model's LoRA adapters, published from where they are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from fanin._options import option, takes
from fanin.errors import RequestError
from fanin.server import Server, publication_of
from fanin.torch._adapters import choose_adapter, find_adapter
from fanin.torch._common import Common
from fanin.torch._config import active_adapters, bias_of, config_of, holder_of, metadata_of
from fanin.torch._names import NamesFunction
from fanin.torch._parameters import Change, Parameters
from fanin.torch._publisher import OneRun, Publisher, RankOptions, Run, Source
from fanin.torch._replicas import At
from fanin.torch._scales import Scales
from fanin.torch._tree import Found
from fanin.torch._union import ranks_text


def _source(
    run: Run, model: Any, adapter: str | None, names: NamesFunction | None, config: Any
) -> Source:
    if not isinstance(model, torch.nn.Module):
        raise RequestError.make(
            f"the model is a {type(model).__name__}", "give the torch.nn.Module that PEFT made"
        )
    publication = publication_of(run)
    chosen = choose_adapter(model, adapter, active_adapters(holder_of(model)))

    def fields() -> Mapping[str, Any] | None:
        return config_of(model, chosen, config)

    scales = Scales(chosen)

    def find(root: Any) -> Found:
        found = find_adapter(root, chosen, bias_of(fields()))
        scales.look(root)
        return found

    def describe() -> dict[str, str]:
        told = fields()
        metadata = metadata_of(model, told)
        scales.check(told or {})
        return metadata

    parameters = Parameters(model, find, names, base=True)
    return Source(
        publication,
        parameters,
        parameters.look(),
        describe(),
        describe,
        scale_of=lambda path: scales.of(path, fields),
    )


@dataclass(frozen=True)
class AdapterOptions(RankOptions):
    """What :class:`AdapterServer` is told.

    Args:
        model: The module that PEFT made, or one that holds parameters named like PEFT's.
        run: The run whose adapter this is; None: no run yet, see :meth:`AdapterServer.add_run`. If
            only some ranks name a run, the others never have one.
        name: Engines that demand a name of servers must demand this one.
        adapter: PEFT's name of the adapter; default: the active one, or the only one.
        config: PEFT's configuration or a dict; default: the model's own. A dict without
            ``peft_type`` needs lora_alpha, r and base_model_name_or_path.
    """

    _: KW_ONLY
    run: Run | None = option("0")
    name: str = option("lora_param_server")
    adapter: str | None = option(None)
    config: Any = option(None)


class AdapterServer(Publisher):
    """Publishes the LoRA adapters of a model by reference: workers read the trainer's own memory.

    Make it on every rank, at the same time, after the model is sharded. Parameters are plain
    tensors or DTensors, in host memory or on CUDA devices. A DTensor has any mesh and any
    placements but Partial. Each rank lends the part that it holds. ::

        server = AdapterServer(model, base_port=6000)
        server.publish(0)
        ...
        with server.updating(step):
            optimizer.step()

    The constructor blocks until all ranks have come here. If one rank fails, all ranks raise an
    error that names it.

    All ranks publish the same runs and steps. All ranks wait for each other at a run's first
    publish, and when a rank has removed it or changed its tensors' names or shapes. They then tell
    which boxes they hold.
    At every publish the ranks that hold the same box compare it as those of
    :class:`fanin.torch.WeightServer` do. Where replicas differ, RequestError names the tensor and
    two ranks, and none of them publishes. After ten seconds of such a wait the log names the
    missing rank. After ten minutes the wait ends with a StateError that names the rank.

    Some ranks may have no part in an adapter. Leave them out by *group*, or make their servers with
    ``run=None`` while others name a run.

    The server also publishes what else PEFT saves with the LoRA parameters: trained biases,
    parameters and persistent buffers of ``modules_to_save``, and trained tokens. It publishes
    PEFT's configuration as it is at each commit. It does not publish embeddings of the base model,
    though PEFT saves them once they are resized.

    Use one run from one thread at a time. Registered storage is kept allocated until it is
    replaced. The server is a context manager, and is also closed at exit, before or after the
    process group is destroyed. In a forked child it raises ProcessError and touches nothing.

    Raises:
        RequestError: *model* has no LoRA parameters, several adapters, an adapter of another kind
            or one with unknown parts. Or tensors cannot be published (Partial placements, FSDP1,
            meta, sparse, quantized). Or there is no configuration, or it gives other scales than
            PEFT computes with. Or other hosts cannot reach the addresses, or there is no
            allow-list.
        StateError: parameters are unsharded or offloaded now.
        TypeError: an argument that neither this class nor :class:`fanin.Server` takes.
        FaninError: what :class:`fanin.Server` raises (a port in use, limits, memory).
    """

    @takes(AdapterOptions)
    def __init__(self, options: AdapterOptions) -> None:
        #: The proof that replicas are replicas; empty: there is one rank.
        self._common: dict[str, Common] = {}
        run, model, names, config = options.run, options.model, options.names, options.config
        super().__init__(
            options,
            options.name,
            lambda: None if run is None else _source(run, model, options.adapter, names, config),
        )

    def add_run(
        self,
        run: Run,
        model: Any = None,
        *,
        adapter: str | None = None,
        names: NamesFunction | None = None,
        config: Any = None,
    ) -> None:
        """The hook for a run that is created: registers its parameters, on every rank.

        The run is readable from its first :meth:`publish` or :meth:`updating` on. Does not block:
        the first publish waits for ranks that have not added the run yet.

        Args:
            run: the run whose adapter this is.
            model: any module that holds its parameters; None: the one that the server was made for.
            adapter: as the constructor's.
            names: as the constructor's.
            config: as the constructor's.

        Raises:
            RequestError: the run is there already; the constructor's reasons.
        """
        source = _source(run, self._model if model is None else model, adapter, names, config)
        self._refuse_known(source.publication)
        if self._rank not in self._publishing:
            raise RequestError.make(
                f"this rank {self._rank} made the server without a run, and "
                f"{ranks_text(self._publishing)} with one: only ranks that begin with a run have "
                "more of them",
                "give run= on every rank that has an adapter, or run=None on all",
                key=source.publication,
                rank=self._rank,
            )
        self._register(self._server, source)

    def remove_run(self, run: Run) -> None:
        """As :meth:`Publisher.remove_run`."""
        super().remove_run(run)
        if (common := self._common.pop(self._publication(run), None)) is not None:
            common.close()

    # -- inside -----------------------------------------------------------------------------

    def _register(self, server: Server, source: Source) -> OneRun:
        run = super()._register(server, source)
        if (store := self._ranks.store()) is not None:
            common = self._common[run.publication] = Common(
                store, f"fanin/{self._world_id}", run.publication, self._rank, self._publishing
            )
            common.tell(source.change.shards)
        return run

    def _tell(self, run: OneRun, change: Change) -> None:
        super()._tell(run, change)
        if (common := self._common.get(run.publication)) is not None:
            common.tell(change.shards, change.removed)

    def _prove(self, run: OneRun) -> None:
        if (common := self._common.get(run.publication)) is not None:
            common.check(run.at, run.parameters.values, run.whole)

    def _unpublished(self, run: OneRun, error: BaseException, at: At) -> None:
        if (common := self._common.get(run.publication)) is not None:
            common.fail(f"{type(error).__name__}: {error}"[:400], at)

    def _resolved(self, run: OneRun) -> Change:
        change, metadata = super()._resolved(run), run.describe()
        if metadata != run.metadata:  # which says what biases are the adapter's
            change = run.parameters.look(anew=True)
        return change._replace(metadata=metadata)
