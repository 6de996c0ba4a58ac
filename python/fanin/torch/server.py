# SPDX-License-Identifier: Apache-2.0
"""AdapterServer: a model's LoRA adapters, published from where they are trained."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from fanin._options import option, takes
from fanin.errors import RequestError
from fanin.server import Server, publication_of
from fanin.torch._common import Common
from fanin.torch._config import active_adapters, bias_of, config_of, holder_of, metadata_of
from fanin.torch._fsdp import refuse_fsdp1, sharding_of
from fanin.torch._names import PREFIX, NamesFunction, on_disk, parse, unknown_part
from fanin.torch._parameters import Change, Parameters
from fanin.torch._publisher import (
    OneRun,
    Publisher,
    RankOptions,
    Run,
    Source,
    refuse_uncallable,
)
from fanin.torch._replicas import At
from fanin.torch._tree import BUFFER, PARAMETER, Found, Item, root_of, walk, walk_buffers
from fanin.torch._union import ranks_text


def _source(
    run: Run, model: Any, adapter: str | None, names: NamesFunction | None, config: Any
) -> Source:
    if not isinstance(model, torch.nn.Module):
        raise RequestError.make(
            f"the model is a {type(model).__name__}", "give the torch.nn.Module that PEFT made"
        )
    publication = publication_of(run)
    refuse_uncallable(names=names)
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


# ------------------------------------------------------------------------------------------- scales
# Whether PEFT's layers compute with the scales that engines will take from the configuration.


_SCALED = re.compile(r"(.*)\.lora_(?:embedding_)?B(?:\.|$)")


def _scale(alpha: Any, rank: Any, config: Mapping[str, Any]) -> float:
    return float(alpha) / (math.sqrt(float(rank)) if config.get("use_rslora") else float(rank))


def _of_layer(config: Mapping[str, Any], pattern: str, default: str, name: str) -> Any:
    """As PEFT does: of the patterns the first that fits the end of the layer's name."""
    for key, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return config[default]


def _told(path: str, config: Mapping[str, Any]) -> float:
    """The scale of the layer of that path by the configuration."""
    name = on_disk(path).removeprefix(PREFIX)
    alpha = _of_layer(config, "alpha_pattern", "lora_alpha", name)
    return _scale(alpha, _of_layer(config, "rank_pattern", "r", name), config)


class Scales:
    """The scales of an adapter's layers."""

    def __init__(self, adapter: str | None) -> None:
        self._adapter = adapter
        self._layers: list[tuple[str, Any]] = []
        self._passed: tuple[list[float], Mapping[str, Any]] | None = None

    def look(self, root: Any) -> None:
        """Finds the layers: those of PEFT's that have a scale for the adapter."""
        self._passed = None
        self._layers = [
            (path, module)
            for path, module in root.named_modules()
            if all(
                isinstance(told := getattr(module, name, None), Mapping) and self._adapter in told
                for name in ("scaling", "r", "lora_alpha")
            )
        ]

    def of(self, path: str, config: Callable[[], Mapping[str, Any] | None]) -> float:
        """What the parameter of that path is multiplied by: lora_B by its layer's scale, of PEFT's
        layers as they compute, of others as *config* tells."""
        found = _SCALED.match(path)
        if found is None:
            return 1.0
        layers = dict(self._layers)
        if found[1] in layers:
            return float(layers[found[1]].scaling[self._adapter])
        return _told(found[1], config() or {})

    def check(self, config: Mapping[str, Any]) -> None:
        """RequestError: a layer was given a scale that *config* does not tell (by ``set_scale()``,
        or by ``hotswap_adapter()``, which leaves the model's configuration as it was).

        A ``lora_alpha`` that was changed by hand, under layers that are as they were made, is taken
        at its word.
        """
        # Tensors where PEFT prepared them for compiled swaps. Readers wait for what is done here.
        scales = [float(layer.scaling[self._adapter]) for _, layer in self._layers]
        if (scales, config) == self._passed:
            return
        ranks = {config.get("r"), *(config.get("rank_pattern") or {}).values()}
        for (path, layer), scale in zip(self._layers, scales, strict=True):
            rank = layer.r[self._adapter]
            made = _scale(layer.lora_alpha[self._adapter], rank, config)
            # PEFT pads ranks, and raises the configuration's, without a word to the layer.
            if rank not in ranks or not math.isclose(scale, made, rel_tol=1e-6):
                _refuse_other(path, scale, config)
        self._passed = scales, config


def _refuse_other(path: str, scale: float, config: Mapping[str, Any]) -> None:
    told = _told(path, config)
    if not math.isclose(scale, told, rel_tol=1e-6):
        raise RequestError.make(
            f"PEFT computes '{path}' with the scale {scale:g}, and the adapter's configuration "
            f"gives {told:g}",
            "undo set_scale() or scale_layer(), or set lora_alpha in the model's peft_config, "
            "which hotswap_adapter() leaves as it was",
            key=path,
        )


# -------------------------------------------------------------------------------------- adapters


def adapters_of(model: Any) -> list[str]:
    """PEFT's names of the adapters that the module tree holds, sorted."""
    found = set()
    for _, _, _, path in walk(root_of(model)):
        parsed = parse(path)
        if parsed is not None and parsed.adapter is not None:
            found.add(parsed.adapter)
    return sorted(found)


def choose_adapter(model: Any, wanted: str | None, active: list[str]) -> str | None:
    """The adapter to publish; None if parameters carry no adapter's name.

    ``active`` are the adapters that PEFT says are active. RequestError: there is no adapter of
    that name, or nothing tells which one of several.
    """
    found = adapters_of(model)
    listed = ", ".join(repr(name) for name in found)
    if wanted is not None:
        if found and wanted not in found:
            raise RequestError.make(
                f"the model has no adapter {wanted!r}", f"its adapters are: {listed}"
            )
        return wanted if found else None
    if len(found) <= 1:
        return found[0] if found else None
    current = [name for name in active if name in found]
    if len(current) == 1:
        return current[0]
    raise RequestError.make(
        f"the model has several adapters: {listed}", "say which one by adapter="
    )


def _is_trained_bias(path: str, bias: str, layers: set[str]) -> bool:
    if bias == "none" or not path.endswith("bias") or ".original_module." in path:
        return False
    if bias == "all":
        return path == "bias" or path.endswith(".bias")
    return path.removesuffix(".base_layer.bias") in layers


def _refuse_unknown(path: str, adapter: str | None) -> None:
    part = unknown_part(path, adapter)
    if part is not None:
        raise RequestError.make(
            f"'{path}' belongs to the adapter, and what it is to it is not known ({part})",
            "train without the option of LoraConfig that adds it, for engines would compute "
            "without it",
            key=path,
        )


def _is_tied(root: Any, path: str) -> bool:
    """Whether it is the trained tokens of another layer, which PEFT saves there only."""
    layer = root.get_submodule(path.rpartition("trainable_tokens_delta")[0].removesuffix("."))
    return getattr(layer, "tied_adapter", None) is not None


def find_adapter(root: Any, adapter: str | None, bias: str) -> Found:
    """The adapter's parameters, the biases that PEFT trains with it, and the persistent buffers of
    modules that it saves whole."""
    refuse_fsdp1(root)
    record_of = sharding_of(root)
    items: list[Item] = []
    biases: list[tuple[Any, str, str]] = []
    layers: set[str] = set()
    names: dict[str, str] = {}

    def add(owner: Any, attribute: str, path: str, name: str, kind: str = PARAMETER) -> None:
        if name in names:
            raise RequestError.make(
                f"'{names[name]}' and '{path}' would both be published as '{name}'",
                "give the AdapterServer the model that holds the adapter once",
            )
        names[name] = path
        record = record_of(owner, attribute) if kind == PARAMETER else None
        items.append(Item(path, name, owner, attribute, record, kind))

    for owner, attribute, _, path in walk(root):
        parsed = parse(path)
        if parsed is None:
            _refuse_unknown(path, adapter)
            if bias != "none" and attribute == "bias":
                biases.append((owner, attribute, path))
        elif parsed.part == "trainable_tokens_delta" and _is_tied(root, path):
            continue
        elif parsed.adapter is None or parsed.adapter == adapter:
            add(owner, attribute, path, parsed.name)
            layers.add(path[: path.rfind(f".{parsed.part}")])
    for owner, attribute, _, path in walk_buffers(root):
        parsed = parse(path)
        if parsed is None:
            _refuse_unknown(path, adapter)
        elif parsed.part == "modules_to_save" and parsed.adapter == adapter:
            add(owner, attribute, path, parsed.name, BUFFER)
    for owner, attribute, path in biases:
        if _is_trained_bias(path, bias, layers):
            add(owner, attribute, path, on_disk(path))
    if not items:
        raise RequestError.make(
            f"no LoRA parameters in {type(root).__name__}"
            + (f" for adapter {adapter!r}" if adapter else ""),
            "give the model that PEFT made; parameters are found by names as "
            "'...lora_A.<adapter>.weight'",
        )
    return Found(items, [])
