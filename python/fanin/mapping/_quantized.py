# SPDX-License-Identifier: Apache-2.0
"""Whether trainer and engine quantize alike, and what to change where they do not.

What decides is the recording: a tensor goes only where its type and shape fit. The configurations
of both, Hugging Face's ``quantization_config``, say why it does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fanin._quantization import LISTS, QUANTIZATION, scale_of
from fanin.errors import PeerError, RequestError, first_of

if TYPE_CHECKING:
    from fanin.mapping._record import Described, Recording


_EIGHT = ("F8_E4M3", "F8_E5M2")
_SKIPPED = "the trainer's skip_modules"
_WIDE = 600


def read_quantization(text: str | None) -> dict[str, Any] | None:
    """The published quantization_config, None: the trainer does not quantize, or does not say so.

    Raises PeerError if *text* is none.
    """
    try:
        told = json.loads(text) if text else None
    except ValueError:
        told = text
    if told is None or isinstance(told, dict):
        return told
    raise PeerError.make(
        "the quantization that the trainer publishes is no JSON object",
        "publish the quantization_config of config.json as it is",
        key=QUANTIZATION,
    )


def quantization_of(config: Any, method: Any = None) -> dict[str, Any] | None:
    """An engine's own quantization_config, None: it does not quantize.

    Args:
        config: its configuration of the model, transformers'.
        method: how it quantizes what it loads, where its configuration does not say.
    """
    for one in (config, getattr(config, "text_config", None)):
        told: Any = getattr(one, "quantization_config", None)
        told = told.to_dict() if hasattr(told, "to_dict") else told
        if told:
            return dict(told)
    return {"quant_method": str(method)} if method else None


def refuse_other_quantization(
    published: Mapping[str, Any] | None, engine: Mapping[str, Any] | None, start: str
) -> None:
    """Raises RequestError if the engine quantizes otherwise than the trainer says that it does.

    Lists of modules are not compared here: engines read them in ways of their own.

    Args:
        published, engine: quantization_config of both.
        start: how the engine is started with a quantization_config, ``%s`` in its place.
    """
    if published is None:
        return
    theirs, mine = _plain(published), _plain(engine or {"quant_method": "none"})
    names = sorted(name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name))
    if "quant_method" in names:
        names = ["quant_method"]
    if names:
        told = ", ".join(f"{name} {json.dumps(theirs.get(name))}" for name in names)
        here = ", ".join(f"{name} {json.dumps(mine.get(name))}" for name in names)
        raise RequestError.make(
            f"the trainer quantizes with {told}, and this engine with {here}",
            f"{start % _short(published)}, or let the trainer quantize as the engine does"
            " (WeightServer(quantize=...))",
            key=names[0],
            phase="mapping",
        )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """What two configurations have to have in common."""
    method = config.get("quant_method")
    if method == "compressed_tensors":
        method = "compressed-tensors"
    found: dict[str, Any] = {"quant_method": method}
    if method == "fp8":
        found["activation_scheme"] = config.get("activation_scheme", "dynamic")
        found["weight_block_size"] = config.get("weight_block_size")
    for group in (config.get("config_groups") or {}).values():
        for part in ("weights", "input_activations"):
            fields = group.get(part) or {}
            for name in ("num_bits", "type", "strategy", "dynamic", "group_size"):
                found.setdefault(f"{part}.{name}", []).append(fields.get(name))
    return found


def explained(
    recording: Recording,
    again: Callable[[list[Described]], Recording],
    published: Mapping[str, Any] | None,
    engine: Mapping[str, Any] | None,
    start: str,
) -> RequestError | None:
    """What to say where trainer and engine quantize other modules, None: they quantize the same.

    Args:
        recording: of all that is published.
        again: records a part of it.
        published, engine, start: as of :func:`refuse_other_quantization`.
    """
    types = {entry.name: entry.dtype for entry in recording.published}
    scaled = {name for name in types if types[name] in _EIGHT and scale_of(name, types)}
    scales = {scale_of(name, types) for name in scaled}
    same = start % ("{...}" if published is None else _short(published))
    failed = [str(one) for one in recording.refusals if recording.failed and one.tensor in scales]
    if failed:
        # The loader ends at the first scale that it has no place for.
        recording = again([one for one in recording.published if one.name not in scales])
    mine: dict[str, None] = {}
    theirs: dict[str, None] = {}
    for copy in recording.copies:
        eight = str(recording.targets[copy.to.place].tensor.dtype).startswith("torch.float8")
        if eight and types[copy.name] not in _EIGHT:
            mine[copy.name.removesuffix(".weight")] = None
        elif not eight and copy.name in scaled:
            theirs[copy.name.removesuffix(".weight")] = None
    of = next((name for name in LISTS if name in (engine or {})), LISTS[0])
    said, ways = [], []
    if mine:
        said.append(f"this engine quantizes what the trainer leaves as it is: {first_of(mine)}")
        ways.append(f"add them to {of} of the engine, or take them out of {_SKIPPED}")
        if not scaled:
            same = "start the engine without a quantization_config"
            ways = ['let the trainer quantize: WeightServer(quantize="fp8")']
    if theirs:
        said.append(f"the trainer quantizes what this engine leaves as it is: {first_of(theirs)}")
        if engine:
            ways.append(f"take them out of {of} of the engine, or add them to {_SKIPPED}")
    if failed and not said:
        said.append(f"this engine has no such scales as the trainer publishes: {failed[0]}")
    if not said:
        return None
    remedy = "; or ".join([same, *ways])
    key = next(iter({**mine, **theirs}), "")
    return RequestError.make("; ".join(said), remedy, key=key, phase="mapping")


def _short(config: Mapping[str, Any]) -> str:
    text = json.dumps(config)
    if len(text) <= _WIDE:
        return text
    return json.dumps({k: "..." if k in LISTS else v for k, v in config.items()})
