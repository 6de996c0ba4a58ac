# SPDX-License-Identifier: Apache-2.0
"""The adapter's configuration: found in the model, or given, and made into metadata."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Mapping
from typing import Any

from fanin.errors import RequestError

_BASE = "base_model_name_or_path"
_LORA = "LORA"
_REQUIRED = ("lora_alpha", "r", _BASE)


def holder_of(model: Any) -> Any | None:
    """The outermost module that has PEFT's configurations by adapter name, None without PEFT."""
    for module in model.modules():
        if isinstance(getattr(module, "peft_config", None), Mapping):
            return module
    return None


def active_adapters(holder: Any | None) -> list[str]:
    """The adapters that PEFT says are active; empty if it does not say."""
    for attribute in ("active_adapters", "active_adapter"):
        try:
            value = getattr(holder, attribute, None)
            value = value() if callable(value) else value
        except (ValueError, AttributeError, ImportError):
            continue  # transformers' model without an adapter of its own
        if isinstance(value, str):
            return [value]
        if isinstance(value, (list, tuple)) and value:
            return [str(name) for name in value]
    return []


def config_of(model: Any, adapter: str | None, given: Any) -> Mapping[str, Any] | None:
    """The configuration as a mapping: what is given (a PEFT configuration or a mapping), else that
    of the model's adapter; None if there is none.

    RequestError: what is given is neither, or another kind of adapter's.
    """
    if given is None:
        configs = getattr(holder_of(model), "peft_config", {})
        given = configs.get(adapter) if adapter is not None else None
        if given is None and len(configs) == 1:
            given = next(iter(configs.values()))
        if given is None:
            return None
    if not isinstance(given, Mapping) and not hasattr(given, "to_dict"):
        raise RequestError.make(
            f"config is a {type(given).__name__}",
            "give PEFT's configuration or a dict",
            key="config",
        )
    fields = dict(given if isinstance(given, Mapping) else given.to_dict())
    kind = _plain(fields.get("peft_type") or _LORA)
    if kind != _LORA:
        raise RequestError.make(
            f"the adapter is of peft_type {kind}, which is not published",
            "train the adapter that LoraConfig makes, or give fanin.torch.WeightServer what "
            "merge_and_unload() makes",
        )
    return fields


def kinds_of(model: Any) -> list[str]:
    """The ``peft_type`` of the model's adapters, sorted."""
    configs = getattr(holder_of(model), "peft_config", {})
    return sorted({str(_plain(getattr(one, "peft_type", None))) for one in configs.values()})


def bias_of(config: Mapping[str, Any] | None) -> str:
    """Which biases PEFT trains: "none", "all" or "lora_only"."""
    bias = (config or {}).get("bias", "none")
    return bias if isinstance(bias, str) else "none"


def _plain(value: Any) -> Any:
    """JSON's types, as PEFT writes them; sets are sorted, so that all ranks say the same."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _base_model(model: Any) -> str | None:
    """The name that transformers gave the base model."""
    base = getattr(holder_of(model), "base_model", model)
    for place in (getattr(base, "model", None), base, model):
        for owner in (place, getattr(place, "config", None)):
            name = getattr(owner, "name_or_path", None)
            if isinstance(name, str) and name:
                return name
    return None


def metadata_of(model: Any, config: Mapping[str, Any] | None) -> dict[str, str]:
    """The metadata pairs of a publication.

    A configuration of PEFT's (it has ``peft_type``) goes whole as ``peft_config``; another
    mapping becomes pairs. RequestError: lora_alpha, r or the base model's name is not known.
    """
    if config is None:
        raise RequestError.make(
            "the model has no PEFT configuration",
            "give config=, PEFT's configuration or a dict with lora_alpha, r and " + _BASE,
        )
    fields = _plain(config)
    if not fields.get(_BASE):
        fields[_BASE] = _base_model(model)
    missing = [name for name in _REQUIRED if fields.get(name) in (None, "")]
    if missing == [_BASE]:
        raise RequestError.make(
            "the adapter's configuration does not name its base model",
            f"set {_BASE} in the PEFT configuration, or give config= with it",
        )
    if missing:
        raise RequestError.make(
            f"the adapter's configuration lacks {', '.join(missing)}",
            f"give config= with {', '.join(_REQUIRED)}",
        )
    if "peft_type" not in fields:
        return {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in fields.items()
            if value is not None
        }
    fields["inference_mode"] = True
    # Sorted on the outside only: of the patterns inside of a field the first that matches wins.
    ordered = {name: fields[name] for name in sorted(fields)}
    return {"peft_config": json.dumps(ordered), _BASE: fields[_BASE]}


def model_config(model: Any, given: Any, unpacked: bool = False) -> str | None:
    """The configuration of a whole model as JSON, as transformers' ``config.json`` has it.

    unpacked: what bitsandbytes packs is published as it is without.

    given: transformers' configuration, a mapping or JSON; None: the model's own. None if it has
    none. RequestError: what is given is none of these.
    """
    holder = None
    if given is None:
        holder = next(
            (m for m in model.modules() if hasattr(getattr(m, "config", None), "to_json_string")),
            None,
        )
        given = getattr(holder, "config", None)
        if given is None:
            return None
    fields = None
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            fields = json.loads(given)
    elif hasattr(given, "to_json_string"):
        fields = json.loads(given.to_json_string())
    else:
        fields = _plain(given)
    if not isinstance(fields, dict):
        raise RequestError.make(
            f"config is a {type(given).__name__}",
            "give transformers' configuration, a dict or JSON of one",
            key="config",
        )
    if unpacked and (fields.get("quantization_config") or {}).get("quant_method") == "bitsandbytes":
        del fields["quantization_config"]
    if holder is not None and not fields.get("architectures"):
        # As transformers writes it when it saves; fully_shard() puts FSDP before a class's name.
        fields["architectures"] = [type(holder).__name__.removeprefix("FSDP")]
    return json.dumps(fields, sort_keys=True)
