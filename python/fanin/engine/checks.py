# SPDX-License-Identifier: Apache-2.0
"""What vLLM would refuse, refused before any bytes move.

An adapter that an engine cannot load would otherwise be pulled, written and only then rejected,
by a stack trace in the engine's log; some (per-expert names on a model with fused experts) it
would load without the experts and say nothing. What SGLang refuses as well is here for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fanin.errors import PeerError, RequestError, first_of

# What to raise of a field of the configuration, what the engine does with it, and the remedy.
Refuse = Callable[[str, str, str], RequestError]

# Initial weights that leave the base model as it is. vLLM's PEFTHelper accepts lora_ga too, which
# takes the adapter's start out of the base while it is trained, and no engine does.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "true", "false")
# vLLM loads these two as classification heads.
_SAVED_MODULES = ("classifier", "score")
_UNSUPPORTED = {
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "trained-token",
    "use_bdlora": "block-diagonal LoRA (BD-LoRA)",
    "use_qalora": "QALoRA",
}

_FUSED = re.compile(r"\.experts(?:\.base_layer)?\.lora_[AB](?:\.|$)")
_PER_EXPERT = re.compile(r"\.experts\.\d+\.")
_LORA_A = re.compile(r"\.lora_A(?:\.[^.]+)?\.weight$")
_LORA_BIAS = re.compile(r"\.lora_[AB](?:\.[^.]+)?\.bias$")
_MAGNITUDE = re.compile(r"\.lora_magnitude_vector(?:\.|$)")
_LORA = re.compile(r"\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.|$)")

_MIXED_FLAG = "--enable-mixed-moe-lora-format"


class CatalogEntry(Protocol):
    """What is read of :class:`fanin.Entry`."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class EngineFacts:
    """How the engine was started; None where it could not be found out.

    fused_model: whether the model's expert layers take fused (3-D) adapters.
    """

    lora_enabled: bool = True
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    mixed_moe: bool = False
    shared_moe: bool = False
    fused_model: bool | None = None

    @classmethod
    def of(cls, lora: Any, fused_model: bool | None) -> EngineFacts:
        """lora: the engine's configuration of LoRA, None: it was started without."""
        return cls(
            lora_enabled=lora is not None,
            max_lora_rank=getattr(lora, "max_lora_rank", None),
            max_cpu_loras=getattr(lora, "max_cpu_loras", None),
            mixed_moe=bool(getattr(lora, "enable_mixed_moe_lora_format", False)),
            shared_moe=bool(getattr(lora, "enable_moe_shared_loras", False)),
            fused_model=fused_model,
        )


@dataclass(frozen=True)
class AdapterFacts:
    """What catalog and metadata of a publication say of its adapter.

    Args:
        config: the trainer's PEFT configuration, or the metadata pairs that stand for it.
        max_rank: the largest rank of any layer; 0: none is known.
        fused: there are tensors of fused experts.
        per_expert: there are tensors of single experts.
        others: up to three names of neither LoRA's parts nor saved modules.
        tensors: all names and shapes.
    """

    config: Mapping[str, Any]
    alpha: float | None
    base_model: str | None
    max_rank: int
    max_rank_from: str
    fused: bool = False
    per_expert: bool = False
    dora: bool = False
    lora_bias: bool = False
    others: tuple[str, ...] = field(default_factory=tuple)
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False, compare=False)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _config_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get("peft_config")
    if text is None:
        return {key: _json(value) for key, value in metadata.items()}
    config = _json(text)
    if not isinstance(config, dict):
        raise PeerError.make(
            "the publication's peft_config is no JSON object",
            "let the trainer publish its adapter_config.json whole",
            key="peft_config",
        )
    # The pairs beside it win nowhere: it is the file that PEFT would write.
    return config


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def _ranks_of(config: Mapping[str, Any]) -> list[tuple[int, str]]:
    found = []
    if isinstance(config.get("r"), int):
        found.append((int(config["r"]), "r"))
    pattern = config.get("rank_pattern")
    if isinstance(pattern, dict):
        found += [
            (rank, f"rank_pattern of {name}")
            for name, rank in pattern.items()
            if isinstance(rank, int)
        ]
    return found


def _saved_modules(config: Mapping[str, Any]) -> list[str]:
    saved = config.get("modules_to_save") or []
    return [str(name) for name in (saved if isinstance(saved, list) else [saved])]


def read_facts(entries: Iterable[CatalogEntry], metadata: Mapping[str, str]) -> AdapterFacts:
    """Reads a publication's catalog and metadata. Does not block; any thread.

    Raises PeerError if the metadata's configuration is malformed.
    """
    config = _config_of(metadata)
    saved = _saved_modules(config)
    ranks = _ranks_of(config)
    fused = per_expert = dora = lora_bias = False
    others: list[str] = []
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for entry in entries:
        name = entry.name
        tensors.append((name, tuple(entry.shape)))
        is_fused = _FUSED.search(name) is not None
        fused = fused or is_fused
        per_expert = per_expert or _PER_EXPERT.search(name) is not None
        dora = dora or _MAGNITUDE.search(name) is not None
        lora_bias = lora_bias or _LORA_BIAS.search(name) is not None
        if not is_fused and _LORA_A.search(name) and len(entry.shape) == 2:
            ranks.append((int(entry.shape[0]), name))
        known = _LORA.search(name) is not None or any(f".{part}." in f".{name}" for part in saved)
        if not known and len(others) < 3:
            others.append(name)
    rank, where = max(ranks, key=lambda pair: pair[0], default=(0, ""))
    base = config.get("base_model_name_or_path") or metadata.get("base_model_name_or_path")
    return AdapterFacts(
        config=config,
        alpha=_number(config.get("lora_alpha")),
        base_model=base if isinstance(base, str) else None,
        max_rank=rank,
        max_rank_from=where,
        fused=fused,
        per_expert=per_expert,
        dora=dora,
        lora_bias=lora_bias,
        others=tuple(others),
        tensors=tuple(tensors),
    )


def check_alpha(wanted: float | None, facts: AdapterFacts) -> None:
    """Whether *wanted*, the caller's lora_alpha, is the trainer's.

    Raises RequestError naming both, if both are known and differ.
    """
    if wanted is not None and facts.alpha is not None and wanted != facts.alpha:
        raise RequestError.make(
            f"lora_alpha {wanted:g} is asked for, but the trainer's adapter has {facts.alpha:g}",
            "leave lora_alpha out, or give orchestrator and trainer the same one",
            key="lora_alpha",
        )


def check_adapter(facts: AdapterFacts, engine: EngineFacts, run: str) -> bool:
    """Whether this engine can load the adapter; the request's ``is_3d_lora_weight``.

    Does not block; any thread.

    Raises:
        RequestError: names the field of the adapter's configuration, and in its remedy the engine's
            flag that helps, if there is one.
    """
    if not engine.lora_enabled:
        raise RequestError.make("this engine was started without LoRA", "add --enable-lora")
    check_plain(facts, refusing("vLLM", run), _SAVED_MODULES)
    limit = engine.max_lora_rank
    if limit is not None and facts.max_rank > limit:
        raise RequestError.make(
            f"run {run}: rank {facts.max_rank} ({facts.max_rank_from}) is greater than the"
            f" engine's --max-lora-rank {limit}",
            f"start the engine with --max-lora-rank {_next_rank(facts.max_rank)}",
            key="r",
        )
    return _check_experts(facts, engine, run)


def check_places(facts: AdapterFacts, answers: Iterable[Mapping[str, Any]], run: str) -> None:
    """Whether every tensor of the adapter has a place in the engine, and the whole of it.

    answers: of all workers, see :func:`fanin.engine.lora_places.judge`. One worker may have what
    another lacks. Raises RequestError that names the first few tensors and counts the others.
    """
    placed: set[int] = set()
    absent: dict[int, str] = {}
    strange: dict[int, str] = {}
    for answer in answers:
        placed.update(answer["placed"])
        absent.update((int(number), why) for number, why in answer["absent"].items())
        strange.update((int(number), why) for number, why in answer["misfit"].items())
    strange.update((number, why) for number, why in absent.items() if number not in placed)
    if not strange:
        return
    names = [(facts.tensors[number][0], strange[number]) for number in sorted(strange)]
    raise RequestError.make(
        f"run {run}: {len(names)} of {len(facts.tensors)} tensors have no place in this engine: "
        + first_of((f"{name} ({why})" for name, why in names), 3, "; "),
        "serve the adapter's base model; AdapterServer(names=...) publishes under other names, and"
        " --lora-target-modules says which modules have LoRA",
        key=names[0][0],
        phase="places",
    )


def _next_rank(rank: int) -> int:
    allowed = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    return next((value for value in allowed if value >= rank), rank)


def refusing(engine: str, run: str) -> Refuse:
    """Makes the errors of *engine* about *run*."""

    def refuse(key: str, problem: str, remedy: str) -> RequestError:
        return RequestError.make(f"run {run}: {engine} {problem}", remedy, key=key)

    return refuse


def check_plain(facts: AdapterFacts, refuse: Refuse, saved: Sequence[str] = ()) -> None:
    """Whether an engine that knows nothing but lora_A and lora_B computes what PEFT does.

    saved: the modules that it takes whole. Raises what *refuse* makes.
    """
    config = facts.config
    kind = config.get("peft_type") or "LORA"
    if str(kind).upper() != "LORA":
        raise refuse("peft_type", f"loads LoRA adapters only, not {kind}", "train with LoRA")
    for key, name in _UNSUPPORTED.items():
        if config.get(key) not in (None, False, []):  # {}: an option's defaults
            raise refuse(key, f"does not load {name} adapters ({key})", f"train without {key}")
    if facts.dora or config.get("use_dora"):
        raise refuse("use_dora", "does not load DoRA adapters (use_dora)", "train without use_dora")
    if facts.lora_bias or config.get("lora_bias"):
        problem = "does not load biases of LoRA layers (lora_bias)"
        raise refuse("lora_bias", problem, "train without lora_bias")
    if config.get("bias") not in (None, "none"):
        raise refuse(
            "bias",
            f"does not load trained biases (bias={config['bias']!r})",
            "train with bias='none'",
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise refuse(
            "init_lora_weights",
            f"does not change the base model's weights as init_lora_weights={init!r} does",
            "train with init_lora_weights=True, or serve the changed base model and publish"
            " init_lora_weights=True",
        )
    _check_whole(facts, refuse, saved)


def _check_whole(facts: AdapterFacts, refuse: Refuse, saved: Sequence[str]) -> None:
    strange = [name for name in _saved_modules(facts.config) if name not in saved]
    if strange:
        raise refuse(
            "modules_to_save",
            f"does not load whole modules beside the adapter (modules_to_save={strange})",
            "train without modules_to_save",
        )
    if facts.others:
        raise refuse(
            facts.others[0],
            f"does not load tensors that belong to no LoRA layer ({facts.others[0]})",
            "publish the adapter's tensors only",
        )


def _check_experts(facts: AdapterFacts, engine: EngineFacts, run: str) -> bool:
    if facts.fused and facts.per_expert:
        raise RequestError.make(
            f"run {run}: some experts' tensors are fused and some are one an expert",
            "publish all experts in one layout",
        )
    if engine.mixed_moe or engine.fused_model is None:
        return facts.fused
    if facts.fused and not engine.fused_model:
        raise RequestError.make(
            f"run {run}: the adapter's experts are fused (3-D), and this model takes one adapter"
            " an expert (2-D)",
            f"start the engine with {_MIXED_FLAG}, or publish per-expert names",
        )
    # The engine would load such an adapter without its experts and not say so.
    if facts.per_expert and engine.fused_model and not engine.shared_moe:
        raise RequestError.make(
            f"run {run}: the adapter has one adapter an expert (2-D), and this model takes fused"
            " experts (3-D)",
            f"start the engine with {_MIXED_FLAG}, or publish fused experts",
        )
    return facts.fused
