# SPDX-License-Identifier: Apache-2.0
"""Finds the parameters of an adapter of PEFT's."""

from __future__ import annotations

from typing import Any

from fanin.errors import RequestError
from fanin.torch._fsdp import refuse_fsdp1, sharding_of
from fanin.torch._names import on_disk, parse, unknown_part
from fanin.torch._tree import BUFFER, PARAMETER, Found, Item, root_of, walk, walk_buffers


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
        record = record_of(owner, attribute, path) if kind == PARAMETER else None
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
