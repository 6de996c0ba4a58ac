# SPDX-License-Identifier: Apache-2.0
"""An adapter that has no place in SGLang's model is refused when it is loaded.

SGLang finds a tensor's module by a layer's number and a part of its name, leaves out what matches
none, and compares shapes only when a request wants the adapter, in the scheduler. So the plugin
(:mod:`fanin.sglang.guard`) stands around the load: of a directory that fanin has pulled the names
and shapes in the file are compared with the modules that have LoRA. ``/load_lora_adapter`` then
answers 400, and the adapter is not registered.

Nothing here imports SGLang or PyTorch.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fanin.engine.checks import AdapterFacts, check_places
from fanin.engine.lora_places import Width, judge, of_one, of_packed
from fanin.errors import RequestError

_OURS = "fanin.json"  # in each directory that fanin has pulled
_LAYER = re.compile(r"layers\.(\d+)\..*")
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: SGLang fuses others in ways of single models, and experts in several: those are its own to judge.
_KNOWN = {
    "o_proj",
    "down_proj",
    *_PACKED,
    *(leaf for leaves in _PACKED.values() for leaf in leaves),
}
_HEADS = {"embed_tokens": "embed_tokens", "lm_head": "lm_head", "unembed_tokens": "lm_head"}


def load(original: Callable[..., Any], manager: Any, ref: Any) -> Any:
    """Around ``LoRAManager.load_lora_adapter``."""
    directory = Path(str(ref.lora_path))
    if getattr(manager, "lora_modules", None) is not None and (directory / _OURS).is_file():
        try:
            _check(manager, directory)
        except RequestError as error:
            return manager.create_lora_update_result(success=False, error_message=f"fanin: {error}")
    return original(manager, ref)


def _check(manager: Any, directory: Path) -> None:
    with (directory / "adapter_model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = tuple((name, tuple(told["shape"])) for name, told in header.items())
    base = {_key(name) for name, _ in manager.base_model.named_modules()}
    answer = judge(
        tensors,
        _parse,
        widths_of(manager),
        lambda module: module in base or any(name in base for name in _parents(module)),
        lambda module: _is_sglangs(manager, module),
    )
    run = directory.parent.name
    check_places(AdapterFacts({}, None, None, 0, "", tensors=tensors), [answer], run)


def _key(module: str) -> str:
    """What SGLang keeps of a module's name: from the layer's number on; or which head it is."""
    found = _LAYER.search(module)
    if found is not None:
        return found.group()
    leaf = module.rpartition(".")[2]
    return _HEADS.get(leaf, module)


def _parse(name: str) -> tuple[str, bool]:
    parts = name.removeprefix("base_model.model.").split(".")
    if parts[-1].startswith("lora_embedding_"):
        return _key(".".join(parts[:-1])), parts[-1].endswith("A")
    if parts[-1] == "weight" and parts[-2] in ("lora_A", "lora_B"):
        return _key(".".join(parts[:-2])), parts[-2] == "lora_A"
    raise ValueError(name)


def _parents(module: str) -> Iterator[str]:
    prefix, _, leaf = module.rpartition(".")
    yield from (f"{prefix}.{parent}" for parent, leaves in _PACKED.items() if leaf in leaves)


def _is_sglangs(manager: Any, module: str) -> bool:
    """Whether the module is of another stage of the pipeline, or of a kind that is not compared."""
    found = _LAYER.match(module)
    if found is None:
        return False
    number = int(found.group(1))
    if number >= len(manager.lora_modules):
        return False
    here = {_key(name) for name in manager.lora_modules[number]}
    if not here:
        return True
    if ".experts" in module:
        return any(".experts" in name for name in here)
    prefix, _, leaf = module.rpartition(".")
    beside = {name.rpartition(".")[2] for name in here if name.rpartition(".")[0] == prefix}
    if not beside <= _KNOWN | {"experts"}:
        return True
    return leaf not in _KNOWN and any(target in module for target in manager.target_modules)


def widths_of(manager: Any) -> dict[str, Width]:
    """What adapters may name in SGLang's model (its LoRAManager), with its widths."""
    found: dict[str, Width] = {}
    for layer in manager.lora_modules:
        for name, module in layer.items():
            key = _key(name)
            prefix, _, leaf = key.rpartition(".")
            if ".experts" in key or leaf not in _KNOWN:
                continue
            found[key] = of_one(module)
            children = _PACKED.get(leaf, ())
            widths = of_packed(module, len(children)) if children else []
            found.update((f"{prefix}.{c}", w) for c, w in zip(children, widths, strict=True))
    embedding = getattr(manager, "embed_tokens_module", None)
    if embedding is not None:
        found["embed_tokens"] = of_one(embedding)
    head = getattr(manager, "lm_head_module", None)
    if head is not None:
        turned = of_one(head)
        found["lm_head"] = Width(turned.out, turned.into)
    return found
