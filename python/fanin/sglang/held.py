# SPDX-License-Identifier: Apache-2.0
"""Digests of what a scheduler's model holds of each published tensor, for :mod:`fanin.check`.

A mapping says which elements of which published tensor landed where. What SGLang's end of an update
has then made into something else is named as unseen.
"""

from __future__ import annotations

import logging
from typing import Any

from fanin.errors import FaninError, StateError
from fanin.mapping._held import held_of

from .asking import text_of
from .guard import standing
from .weights import filled

_log = logging.getLogger("fanin.sglang")

_PLAIN = {
    "NoneType",
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
}
"""Of SGLang's classes of ``quant_method`` those that leave a tensor as it was loaded, or put
another one in its place."""
_WEIGHTS = "weights"  # SGLang's tag of memory


def answer(manager: Any, publication: str, step: int) -> Any:
    """Of all ranks, as SGLang's ``check_weights`` gives it. Every rank comes here; raises
    nothing."""
    from sglang.srt.managers.io_struct import ChecksumInfo, CheckWeightsReqOutput

    try:
        mine: dict[str, Any] = held(manager, publication, step)
    except Exception as error:  # the other ranks wait for this one's word
        known = isinstance(error, FaninError)
        _log.warning(
            "fanin: no digests of step %d of %s: %s", step, publication, error, exc_info=not known
        )
        mine = {"error": str(error) if known else f"{type(error).__name__}: {error}"}
    everybody = _everybody(mine, manager.tp_cpu_group)
    for rank, one in enumerate(everybody):
        if "error" in one:
            message = f"fanin: worker {rank} of {len(everybody)}: {one['error']}"
            return CheckWeightsReqOutput(success=False, message=message)
    payload = [
        ChecksumInfo(checksums=text_of(one), per_gpu_checksum="", parallelism_info=[])
        for one in everybody
    ]
    return CheckWeightsReqOutput(success=True, message="Success.", payload=payload)


def _everybody(mine: dict[str, Any], group: Any) -> list[dict[str, Any]]:
    from torch import distributed

    everybody = [mine] * distributed.get_world_size(group=group)
    if len(everybody) > 1:
        distributed.all_gather_object(everybody, mine, group=group)
    return everybody


def held(manager: Any, publication: str, step: int) -> dict[str, Any]:
    """What this rank's model holds. Raises StateError if that is not *step* of *publication*."""
    import torch

    ((_, runner),) = manager._select_runners("target")
    model = runner.weight_updater.get_model()
    live = filled(model)
    if live is None or live.mapping is None:
        raise StateError.make(
            "this model was not pulled, or goes whole through SGLang's own load_weights",
            "sync first; a model that SGLang's loader computes has no digests",
        )
    _require(manager, live.publication, publication, step)
    found, unfilled, unseen, untold = [], [], [], list(live.by_loader)
    with torch.no_grad():
        for module in live.mapping.modules:
            unfilled += module.unfilled()
            leaves = [
                (leaf, getattr(model.get_submodule(module.path), leaf.name))
                for leaf in module.leaves
                if leaf.sources
            ]
            if module.fallback or not _is_as_pulled(model, module.path, leaves, live.places):
                unseen.append(module.path)
                untold += [source.name for leaf, _ in leaves for source in leaf.sources]
            else:
                found += held_of(leaves)
    return {
        "held": found,
        "different": unfilled,
        "unseen": unseen,
        "untold": untold,
        "unused": sorted(live.unused),
    }


def _require(manager: Any, holds: str, publication: str, step: int) -> None:
    """Raises StateError if the weights are not *step* of *publication*, ready to be served."""
    why = ""
    if standing.torn:
        why = f"the weights are not whole: {standing.torn}"
    elif manager._session is not None:
        why = "an update is under way"
    elif _WEIGHTS in manager.offload_tags:
        why = "SGLang has given up the weights' memory"
    elif holds != publication:
        why = f"the model is filled from {holds}"
    elif standing.pulled.get("step") != step:
        why = f"the model is at step {standing.pulled.get('step', 'none')}"
    if why:
        raise StateError.make(
            f"no digests of step {step} of {publication}: {why}",
            f"sync step {step}, of which the trainer has made digests, and ask again",
            key=publication,
        )


def _is_as_pulled(model: Any, path: str, leaves: Any, places: dict[str, int]) -> bool:
    """Whether the module's tensors are where, and laid out as, a pull fills them."""
    method = getattr(model.get_submodule(path), "quant_method", None)
    if type(method).__name__ not in _PLAIN or getattr(method, "w13_swiglu_interleaved", False):
        return False
    return all(
        tensor.data_ptr() == places.get(f"{path}.{leaf.name}" if path else leaf.name)
        and tuple(tensor.shape) == leaf.shape
        and tuple(step * tensor.element_size() for step in tensor.stride()) == leaf.stride
        for leaf, tensor in leaves
    )
