# SPDX-License-Identifier: Apache-2.0
"""In which format weights are published as fp8, and which modules keep theirs. No torch in here.

The keys are those of Hugging Face's ``quantization_config``, which engines read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fanin._quantization import LISTS, QUANTIZATION, SCALES, WEIGHT, is_fit
from fanin.errors import RequestError
from fanin.torch._union import Whole

F8 = "F8_E4M3"
SOURCES = ("BF16", "F32", "F16")
"""What is rounded to fp8: to BF16 first."""

_LEFT = ("lm_head", "embed_out", "score", "classifier", "gate", "router", "shared_expert_gate")
"""Ends of modules' names that keep their weights unless told: heads and routers."""
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_a", "in_proj_b"),
)
"""What engines hold as one matrix, of which there is one precision."""
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_GROUP = {
    "targets": ["Linear"],
    "weights": {**_FLOAT, "strategy": "channel", "dynamic": False},
    "input_activations": {**_FLOAT, "strategy": "token", "dynamic": True},
}
_EXAMPLES = (
    'give quantize="fp8", {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": '
    '"ue8m0"} or {"quant_method": "compressed-tensors"} (one scale per output channel)'
)


@dataclass(frozen=True)
class Format:
    """What ``quantize=`` and ``skip_modules=`` say."""

    #: Rows and columns that share a scale, None: each row has one.
    block: tuple[int, int] | None
    #: Scales are powers of two.
    powers: bool
    #: Of modules that keep their weights beside those that do by default.
    skip: tuple[str, ...]
    #: Of the ``quantization_config``, without the list of modules.
    keys: Mapping[str, Any]
    #: Under which the list of modules is published.
    list_key: str

    def scale_name(self, name: str) -> str:
        """The published name of the scales of the tensor *name*."""
        return name + ("_scale" if self.block is None else "_scale_inv")

    def block_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a block in a tensor of that shape."""
        return self.block or (1, shape[1])

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        rows, columns = self.block_of(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def takes(self, name: str, dtype: str, shape: Sequence[int]) -> bool:
        """Whether the tensor that would be published so is published as fp8."""
        if not name.endswith(WEIGHT) or dtype not in SOURCES or len(shape) != 2 or 0 in shape:
            return False
        *before, last = name.removesuffix(WEIGHT).rsplit(".", 2)
        left = last in _LEFT or "embed" in last or (before and before[-1] in ("gate", "router"))
        return not left and not any(is_fit(entry, name) for entry in self.skip)

    def contract(self) -> str:
        """What all ranks have to say alike."""
        return json.dumps({**self.keys, "skip": self.skip}, sort_keys=True)

    def described(self, metadata: Mapping[str, str], wholes: Sequence[Whole]) -> dict[str, str]:
        """The publication's metadata: the ``quantization_config`` with the full names of all
        modules that keep their weights, which is also the model's configuration's."""
        told = {**self.keys, self.list_key: _left_modules(wholes)}
        out = {**metadata, QUANTIZATION: json.dumps(told, sort_keys=True)}
        if "config" in metadata:
            config = {**json.loads(metadata["config"]), "quantization_config": told}
            out["config"] = json.dumps(config, sort_keys=True)
        return out

    def refuse(self, wholes: Sequence[Whole], unfit: Iterable[str]) -> None:
        """RequestError: nothing is published as fp8, an entry of the list fits nothing, or engines
        hold as one what is published in two precisions.

        unfit: entries that fit no module on any rank either.
        """
        names = [one.name for one in wholes]
        for entry in unfit:
            if not any(is_fit(entry, name) for name in names):
                raise RequestError.make(
                    f"skip_modules has '{entry}', which fits no module",
                    "give whole parts of published names (lm_head, mlp.gate, model.layers.0), or a "
                    'pattern for the whole name ("*.shared_expert.*")',
                    key=entry,
                )
        rounded = {whole.name for whole in wholes if whole.dtype == F8}
        if not scales_among(names):
            raise RequestError.make(
                "quantize is given, and there is no weight to publish as fp8",
                "leave quantize= out, or shorten skip_modules=",
            )
        _refuse_parted(wholes, rounded)


def scales_among(names: Iterable[str]) -> set[str]:
    """Those of the names that are of scales of other ones among them."""
    known = set(names)
    return {
        name + end
        for name in known
        if name.endswith(WEIGHT)
        for end in SCALES
        if name + end in known
    }


def _left_modules(wholes: Sequence[Whole]) -> list[str]:
    left = []
    if not any(name.endswith("lm_head.weight") for name, _, _ in wholes):
        left.append("lm_head")  # tied to the embedding, and no readers' business to round
    for name, dtype, shape in wholes:
        module, _, last = name.rpartition(".")
        stacked = len(shape) > 2 and module.endswith(".experts")
        if dtype != F8 and len(shape) > 1 and (last == "weight" or stacked):
            left.append(module)
    return sorted(set(left))


def _refuse_parted(wholes: Sequence[Whole], rounded: set[str]) -> None:
    seen: dict[str, str] = {}
    for name, _, shape in wholes:
        if len(shape) != 2 or not name.endswith(WEIGHT):
            continue
        module = name.removesuffix(WEIGHT)
        parent, _, last = module.rpartition(".")
        expert = module.partition(".experts.")
        among = next((one for one in _TOGETHER if last in one), None)
        group = expert[0] + expert[1] if expert[1] else f"{parent}.{among}" if among else module
        first = seen.setdefault(group, name)
        if (first in rounded) is not (name in rounded):
            one, other = (first, name) if first in rounded else (name, first)
            raise RequestError.make(
                f"'{one}' would be published as fp8 and '{other}' not, and engines hold the two in "
                "one tensor",
                "put all of them into skip_modules= or none: q, k and v; gate and up; all experts "
                "of a layer",
                key=other,
            )


def format_of(quantize: Any, skip_modules: Any = None) -> Format | None:
    """What the two arguments say; None: nothing is rounded.

    RequestError: a format that is not published, unknown keys, a list that makes no sense.
    """
    if quantize is None:
        if skip_modules:
            raise RequestError.make(
                "skip_modules is given without quantize", _EXAMPLES, key="skip_modules"
            )
        return None
    if isinstance(quantize, str) and quantize == "fp8":
        quantize = {"quant_method": "fp8"}
    if hasattr(quantize, "to_dict"):
        quantize = quantize.to_dict()
    if not isinstance(quantize, Mapping):
        raise RequestError.make(f"quantize is {quantize!r}", _EXAMPLES, key="quantize")
    keys = {str(key): value for key, value in quantize.items()}
    skip = _list_of(keys, skip_modules)
    method = keys.pop("quant_method", "fp8")
    if method == "fp8":
        return _of_fp8(keys, skip)
    if method == "compressed-tensors":
        return _of_channels(keys, skip)
    raise _refusal("quant_method", method)


def _refusal(key: str, value: Any) -> RequestError:
    return RequestError.make(
        f"quantize has {key} {json.dumps(value, default=str)}, which fanin does not make",
        _EXAMPLES,
        key="quantize",
    )


def _list_of(keys: dict[str, Any], skip_modules: Any) -> tuple[str, ...]:
    given = {key: keys.pop(key) for key in LISTS if key in keys} | {"skip_modules": skip_modules}
    named = {key: _names_of(key, told) for key, told in given.items() if told is not None}
    lists = {key: told for key, told in named.items() if told}
    if len({frozenset(told) for told in lists.values()}) > 1:
        raise RequestError.make(
            " and ".join(f"{key} {told}" for key, told in lists.items()) + " contradict",
            "give one list",
        )
    return tuple(sorted(set(next(iter(lists.values()), ()))))


def _names_of(key: str, told: Any) -> list[str]:
    """Each looked at once: an iterator gives them no second time."""
    is_list = isinstance(told, Iterable) and not isinstance(told, (str, bytes, Mapping))
    names = list(told) if is_list else []
    if not is_list or not all(isinstance(one, str) and one for one in names):
        raise RequestError.make(f"{key} is {told!r}", 'give a list of names: ["lm_head"]', key=key)
    if (regular := next((one for one in names if one.startswith("re:")), None)) is not None:
        raise RequestError.make(
            f"{key} has '{regular}', and engines read regular expressions differently",
            'give whole parts of names ("mlp.gate") or a pattern ("*.mlp.gate")',
            key=key,
        )
    return names


def _of_fp8(keys: dict[str, Any], skip: tuple[str, ...]) -> Format:
    allowed: dict[str, tuple[Any, ...]] = {
        "activation_scheme": ("dynamic",),
        "fmt": ("e4m3", None),
        "scale_fmt": ("float", "ue8m0", None),
        "dequantize": (False,),
    }
    block = keys.pop("weight_block_size", [128, 128])
    for key, value in keys.items():
        if key not in allowed or value not in allowed[key]:
            raise _refusal(key, value)
    sizes = list(block) if isinstance(block, Sequence) and not isinstance(block, str) else []
    if len(sizes) != 2 or not all(type(one) is int and one > 0 for one in sizes):
        raise _refusal("weight_block_size", block)
    powers = keys.get("scale_fmt") == "ue8m0"
    told = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": sizes,
        **({"scale_fmt": "ue8m0"} if powers else {}),
    }
    return Format((sizes[0], sizes[1]), powers, skip, told, "modules_to_not_convert")


def _of_channels(keys: dict[str, Any], skip: tuple[str, ...]) -> Format:
    allowed: dict[str, tuple[Any, ...]] = {
        "format": ("float-quantized",),
        "quantization_status": ("compressed",),
        "kv_cache_scheme": (None,),
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
        "global_compression_ratio": (None,),
    }
    groups = keys.pop("config_groups", {"group_0": _GROUP})
    keys.pop("version", None)
    for key, value in keys.items():
        if key not in allowed or value not in allowed[key]:
            raise _refusal(key, value)
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refusal("config_groups", groups)
    (group,) = groups.values()
    for part, wanted in _GROUP.items():
        told = group.get(part) if isinstance(group, Mapping) else None
        differs = (
            any(told.get(key) != value for key, value in wanted.items())
            if isinstance(wanted, dict) and isinstance(told, Mapping)
            else told != wanted
        )
        if differs:
            raise _refusal(f"config_groups {part}", told)
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": _GROUP},
    }
    return Format(None, False, skip, config, "ignore")
