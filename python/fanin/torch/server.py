# SPDX-License-Identifier: Apache-2.0
"""AdapterServer: a model's LoRA adapters, published from where they are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fanin.errors import RequestError
from fanin.server import Server, publication_of
from fanin.torch._adapters import choose_adapter, find_adapter
from fanin.torch._cast import Cast
from fanin.torch._common import Common
from fanin.torch._config import active_adapters, bias_of, config_of, holder_of, metadata_of
from fanin.torch._names import NamesFunction
from fanin.torch._parameters import Change, Parameters
from fanin.torch._publisher import OneRun, Publisher, Run, Serving, Source
from fanin.torch._scales import Scales
from fanin.torch._tree import Found
from fanin.torch._union import ranks_text

__all__ = ["AdapterServer"]


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


class AdapterServer(Publisher):
    """Publishes the LoRA adapters of a model by reference: workers read the trainer's own memory.

    To be made on every rank, at the same time, after the model is sharded. Parameters are plain
    tensors or DTensors of any mesh and placements but Partial, in host memory or on CUDA devices;
    each rank lends the part that it holds. ::

        server = AdapterServer(model, base_port=6000)
        server.publish(0)
        ...
        with server.updating(step):
            optimizer.step()

    :param model: the module that PEFT made, or one that holds parameters named like PEFT's.
    :param run: the run whose adapter this is; None: no run yet, see :meth:`add_run`. If only some
        ranks name a run, the others never have one.
    :param base_port: rank r listens on ``base_port + r``, or on ``base_port`` plus its rank on
        its host with ``port_by="local"``; 0: any free port.
    :param name: engines must ask for servers of this name.
    :param group: the process group whose ranks make up the trainer; default: all, or this process
        alone where torch.distributed is not initialised. Two small objects are gathered.
    :param bind: numeric address to listen on. Default: 127.0.0.1 on one host, unless ``allow``
        is given; else ``advertise``, or this host's address on the way to MASTER_ADDR.
    :param advertise: the address that engines are told; default: ``bind``.
    :param allow: the networks that may read, "10.0.0.0/8,fd00::/8". Needed to listen on anything
        but 127.x.
    :param trusted_network: also offer RDMA to who has the secret or a certificate in the networks
        allowed; its remote keys permit writing.
    :param lease: seconds that readers can delay an update, at most.
    :param data_threads: threads that each rank sends tensors to readers with, 1 to 16, so many
        readers of a rank at the same time; None: a quarter of its CPUs, at most 4.
    :param stranger_share: seconds of a minute that one network peer may hold updates up, own_share:
        that this user may, nice: of the threads that serve; see :class:`fanin.Server`.
    :param more: what else :class:`fanin.Server` takes, for every rank's: ``secret_file``, or
        ``tls_cert``, ``tls_key`` and ``tls_ca``; ``insecure``, ``trust_containers``, ``peer_cpu``,
        ``stranger_cpu``, ``max_sessions``, ``max_memory``, ``idle``. :meth:`write_info` names the
        secret's file.
    :param snapshot: publish copies, so that readers never delay training and long reads are not
        overtaken; costs twice the adapter's memory.
    :param cast: "BF16" or "F16": snapshots of F32 tensors are converted. With exceptions by
        patterns of published names, of which the first that fits decides:
        ``cast={"*.mlp.gate.weight": None, "*": "BF16"}``. Needs ``snapshot``.
    :param names: what is published of each parameter, see :data:`fanin.torch.NamesFunction`.
    :param adapter: PEFT's name of the adapter; default: the active one, or the only one.
    :param config: PEFT's configuration or a dict; default: the model's own. A dict without
        ``peft_type`` needs lora_alpha, r and base_model_name_or_path.
    :param use_ucx: False: never load UCX; the stream path, and CUDA IPC, only.

    Blocks until all ranks have come here. If one rank fails, all raise, naming it.

    All ranks publish the same runs and steps. At a run's first publish, and when its tensors have
    other names or shapes, all ranks wait for each other and tell which boxes they hold. At every
    publish the ranks that hold the same box compare it as those of
    :class:`fanin.torch.WeightServer` do. Where replicas differ, RequestError names the tensor and
    two ranks, and none of them publishes. Each wait ends after ten minutes, with a StateError that
    names the rank; after ten seconds the log names it. Ranks that have no part in an adapter are
    left out by ``group``, or make the server with ``run=None`` while others name a run.

    What else PEFT saves with the LoRA parameters is published too: trained biases, parameters and
    persistent buffers of ``modules_to_save``, trained tokens, and its configuration as it is at
    each commit. Embeddings of the base model are not, though PEFT saves them once they are resized.

    :raises RequestError: no LoRA parameters, an adapter of another kind, parts of it that are not
        known, several adapters, tensors that cannot be published (Partial placements, FSDP1, meta,
        sparse, quantized), no configuration or one that gives other scales than PEFT computes
        with, addresses that other hosts cannot reach, no allow-list.
    :raises StateError: parameters are unsharded or offloaded now.
    :raises TypeError: an argument that neither this class nor :class:`fanin.Server` takes.
    :raises FaninError: what :class:`fanin.Server` raises (a port in use, limits, memory).

    Use one run from one thread at a time. Registered storage is kept allocated until it is
    replaced. A context manager; also closed at exit, before or after the process group is
    destroyed. In a forked child it raises ProcessError and touches nothing.
    """

    def __init__(
        self,
        model: Any,
        *,
        run: Run | None = "0",
        base_port: int = 6000,
        name: str = "lora_param_server",
        group: Any = None,
        bind: str | None = None,
        advertise: str | None = None,
        port_by: str = "global",
        allow: str | None = None,
        trusted_network: bool = False,
        lease: float = 1.0,
        data_threads: int | None = None,
        stranger_share: float = 2.0,
        own_share: float = 60.0,
        nice: int = 0,
        snapshot: bool = False,
        cast: Cast | None = None,
        names: NamesFunction | None = None,
        adapter: str | None = None,
        config: Any = None,
        use_ucx: bool = True,
        **more: Any,
    ) -> None:
        #: The proof that replicas are replicas; empty: there is one rank.
        self._common: dict[str, Common] = {}
        serving = Serving(
            base_port,
            name,
            bind,
            advertise,
            port_by,
            allow,
            trusted_network,
            lease,
            data_threads,
            stranger_share,
            own_share,
            nice,
            snapshot,
            cast,
            use_ucx,
            more,
        )
        super().__init__(
            model,
            group,
            serving,
            lambda: None if run is None else _source(run, model, adapter, names, config),
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

        ``model`` is any module that holds them, default the one that the server was made for; the
        other arguments are those of the constructor. Readable from the run's first
        :meth:`publish` or :meth:`updating` on. Does not block: the first publish waits for ranks
        that have not added the run yet.

        :raises RequestError: the run is there already; the constructor's reasons.
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

    def _unpublished(self, run: OneRun, error: BaseException) -> None:
        if (common := self._common.get(run.publication)) is not None:
            common.fail(f"{type(error).__name__}: {error}"[:400], run.at)

    def _resolved(self, run: OneRun) -> Change:
        change, metadata = super()._resolved(run), run.describe()
        if metadata != run.metadata:  # which says what biases are the adapter's
            change = run.parameters.look(anew=True)
        return change._replace(metadata=metadata)
