# SPDX-License-Identifier: Apache-2.0
"""All contact with the inside of vLLM's layerwise reload.

vLLM keeps, of every module, the shapes, types, attributes and loaders that its tensors had before
they were loaded and processed. Recording where a publication goes needs the model in that state,
with loaders that write at once instead of collecting weights; afterwards everything is as it was.

These functions of vLLM are no interface of its own and move between versions; this file says which
versions it knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from fanin.errors import RequestError, StateError
from fanin.mapping import About, ModelState, Recording, Target, record

__all__ = [
    "SUPPORTED",
    "Skeletons",
    "about",
    "engine_own",
    "record_model",
    "require_version",
    "skeletons",
]

#: Versions of vLLM whose reload this file knows.
SUPPORTED = ((0, 32),)
_WRAPPED = "online_process_loader"
# Attention's scales: a checkpoint may have them, else the engine has 1.0.
_SCALES = frozenset(
    f"{under}{which}_scale" for under in ("", "_") for which in ("k", "v", "q", "prob")
) | {f"_{which}_zero_point" for which in ("k", "v", "q")}


def require_version() -> str:
    """vLLM's version.

    :raises RequestError: it is not one that this file knows.
    """
    from vllm import __version__ as version

    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers not in SUPPORTED:
        known = ", ".join(".".join(map(str, v)) for v in SUPPORTED)
        raise RequestError.make(
            f"the inside of vLLM {version} is not known to this version of fanin, which knows "
            f"{known}",
            "install a vLLM that it knows, or a newer fanin",
            code=-404,
        )
    return str(version)


@dataclass(frozen=True)
class Skeletons:
    """What is known of a model while its tensors are as the loader expects them."""

    #: Paths of tensors that share another one's memory in the live model, by path.
    ties: dict[str, str]


@contextmanager
def skeletons(model: Any, vllm_config: Any = None) -> Iterator[Skeletons]:
    """The model with the tensors that its loader expects, without memory, and its own loaders.

    On leaving, in whatever way, the model has its modules, parameters, buffers, attributes and
    memory again, and the reload's books are closed. The model must not run meanwhile.

    :param vllm_config: made current meanwhile, which some loaders need; None: it is already.
    :raises RequestError: vLLM's version is not known, or it keeps nothing of the model.
    :raises StateError: a weight update of vLLM is under way.
    """
    require_version()
    from vllm.model_executor.model_loader.reload import layerwise

    infos = _infos(model, layerwise)
    ties = _ties(model)
    state = ModelState(model)
    loaders = [(t, dict(t.__dict__)) for info in infos for t in _remembered(info)]
    with ExitStack() as stack:
        if vllm_config is not None:
            from vllm.config import set_current_vllm_config

            stack.enter_context(set_current_vllm_config(vllm_config))
        try:
            layerwise.initialize_layerwise_reload(model)
            _unwrap(model)
            yield Skeletons(ties)
        finally:
            state.restore()
            for tensor, attributes in loaders:
                tensor.__dict__.clear()
                tensor.__dict__.update(attributes)
            for info in infos:
                info.reset()


def _infos(model: Any, layerwise: Any) -> list[Any]:
    """What vLLM keeps of each module."""
    found = []
    for path, module in model.named_modules():
        info = layerwise.LAYERWISE_INFO.get(module)
        if info is None:
            raise RequestError.make(
                f"vLLM keeps no shapes of module '{path}' from before it was loaded",
                "let vLLM's initialize_model make the model",
                code=-404,
            )
        if info.can_load():
            raise StateError.make(
                f"vLLM is in the middle of a weight update of module '{path}'",
                "finish it first",
            )
        found.append(info)
    return found


def _remembered(info: Any) -> Iterator[Any]:
    for table in info.restore_metadata:
        yield from table.values()


def _unwrap(model: Any) -> None:
    """Takes the reload's wrappers off the loaders: they would keep weights until all have come."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                loader: Any = getattr(tensor, "weight_loader", None)
                wrapped = loader
                while getattr(wrapped, "__name__", "") == _WRAPPED:
                    wrapped = wrapped.__wrapped__
                if wrapped is not loader:
                    tensor.weight_loader = wrapped


def _ties(model: Any) -> dict[str, str]:
    """Tensors of several modules that are one."""
    first: dict[int, str] = {}
    found = {}
    for path, module in model.named_modules():
        for leaf, tensor in {**module._parameters, **module._buffers}.items():
            name = f"{path}.{leaf}" if path else leaf
            if tensor is not None and first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found


def engine_own(target: Target) -> str | None:
    """Why vLLM has a tensor's values from elsewhere than a checkpoint, None if it has not."""
    from vllm.model_executor.model_loader.reload import meta

    if target.leaf in _SCALES and target.tensor.numel() == 1:
        return "a scale of attention that the checkpoint does not have"
    if target.leaf in meta.SKIP_LOAD_TENSORS and target.role != "parameter":
        return "a table of vLLM's experts"
    return None


def about(model: Any, vllm_config: Any = None) -> About:
    """Engine, model and ranks, as they are in this process."""
    version = require_version()
    from vllm.distributed import parallel_state

    ranks: dict[str, tuple[int, int]] = {}
    for kind in ("tp", "pp", "ep", "dp"):
        group = getattr(parallel_state, f"_{kind.upper()}", None)
        if group is not None:
            ranks[kind] = (group.rank_in_group, group.world_size)
    if vllm_config is not None and not vllm_config.parallel_config.enable_expert_parallel:
        ranks.pop("ep", None)
    return About("vllm", version, type(model).__name__, ranks)


def record_model(published: Iterable[Any], model: Any, vllm_config: Any = None) -> Recording:
    """Where a publication goes in a model of vLLM, as this process has it.

    :param published: names, dtypes and shapes of all that is published: ``Client.catalog(run)``.
    :raises RequestError, StateError: as :func:`skeletons` and :func:`fanin.mapping.record`.
    """
    known = about(model, vllm_config)
    with skeletons(model, vllm_config) as bare:
        return record(
            published, model.load_weights, model, own=engine_own, ties=bare.ties, about=known
        )
