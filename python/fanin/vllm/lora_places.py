# SPDX-License-Identifier: Apache-2.0
"""What adapters may name in the model of a vLLM worker, with its widths.

Modules are named by vLLM's own parser and compared with the modules that vLLM has wrapped. Nothing
here imports vLLM or PyTorch before a worker calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fanin.engine.lora_places import FUSED, Parse, Width, judge, of_one, of_packed, sizes_of

__all__ = ["places_in", "widths_of"]


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
        tensors,
        _parser(manager),
        widths,
        unwrapped,
        lambda module: f"{module}.".startswith(away),
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
