# SPDX-License-Identifier: Apache-2.0
"""Whether what is published fits an engine's model.

All ranks of an engine together have to take every published element. A model's own loader cuts what
is larger than its parameters (more heads, wider layers) and leaves out layers that it does not
have. The engine would then compute with a part of what was trained. Both sides have to compute with
one configuration and quantize alike, too. What is to be kept nobody trains.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from fanin._cover import Gap, Parts, gap_text, uncovered
from fanin._quantization import LISTS, QUANTIZATION, scale_of
from fanin.errors import PeerError, RequestError, StateError, first_of

if TYPE_CHECKING:
    from fanin.mapping._record import Described, Recording, Target

Taken = tuple[tuple[Parts, tuple[str, ...]], ...]
"""Blocks, and the published tensors of which a rank takes these and no more; alike for many."""


class Missed(NamedTuple):
    """Published elements that no rank takes."""

    name: str
    shape: tuple[int, ...]
    #: The first block of them, None: all of the tensor.
    gap: Gap | None

    def __str__(self) -> str:
        if self.gap is None:
            return self.name
        return f"elements {gap_text(self.gap)} of {self.name} {list(self.shape)}"


def taken_of(parts: Mapping[str, Parts]) -> Taken:
    """What a rank tells of :meth:`Recording.taken <fanin.mapping.Recording.taken>`."""
    names: dict[Parts, list[str]] = {}
    for name, of_it in parts.items():
        names.setdefault(of_it, []).append(name)
    return tuple((of_it, tuple(alike)) for of_it, alike in names.items())


def missed(shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[Taken]) -> list[Missed]:
    """What no rank of an engine takes.

    Args:
        shapes: of all that is published, by name.
        ranks: what each rank does not take all of.

    Raises StateError: they have read different publications.
    """
    told: dict[str, list[Parts]] = {}
    for taken in ranks:
        for parts, names in taken:
            for name in names:
                told.setdefault(name, []).append(parts)
    known: dict[tuple[tuple[int, ...], tuple[Parts, ...]], Gap | None] = {}
    out = []
    for name, lists in told.items():
        if name not in shapes:
            raise StateError.make(
                f"another worker was told of '{name}', and this one was not: the trainer has "
                "published something else meanwhile",
                "init again, as the next sync of a Registry does",
                key=name,
            )
        if len(lists) < len(ranks):
            continue  # another rank takes all of it
        at = (shapes[name], tuple(lists))
        if at not in known:
            known[at] = uncovered(shapes[name], [part for parts in lists for part in parts])
        if (gap := known[at]) is not None:
            out.append(Missed(name, shapes[name], gap if any(lists) else None))
    return out


def refuse_missed(found: Iterable[Missed], remedy: str) -> None:
    """Raises PeerError for published elements that go nowhere."""
    listed = sorted(found, key=lambda one: (one.gap is not None, one.name))
    if not listed:
        return
    what = f"published, and the model takes nothing of it: {first_of(listed, 3)}"
    raise PeerError.make(what, remedy, key=listed[0].name)


# ------------------------------------------------------------- what nobody trains, which is kept


KEEP = 'init with {"keep": ["<pattern>"]} for what nobody trains, which then stays as it is'


def check_patterns(what: str, value: Any, key: str) -> tuple[str, ...]:
    """A list of patterns of names. Raises RequestError, naming it."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise RequestError.make(
            f"{what} is {value!r}, not a list of patterns", 'give ["visual.*"]', key=key
        )
    return tuple(value)


def kept_paths(model: Any, patterns: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Paths of the model's parameters and buffers that the patterns name, and unused patterns.

    The paths have all names of a tied one. A pattern may be unused because another pipeline stage
    has the parameter.
    """
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    found: set[int] = set()
    idle: set[str] = set()
    for pattern in patterns:
        named = {id(tensor) for path, tensor in tensors if fnmatchcase(path, pattern)}
        found |= named
        if not named:
            idle.add(pattern)
    return frozenset(path for path, tensor in tensors if id(tensor) in found), frozenset(idle)


def refuse_idle(patterns: Iterable[str]) -> None:
    """Raises RequestError for patterns that name nothing, in no part of the model."""
    for pattern in sorted(patterns):
        raise RequestError.make(
            f"keep names '{pattern}', and the model has no such parameter",
            "keep the engine's own names of what nobody publishes",
            key="keep",
        )


def refuse_torn(kept: frozenset[str], intact: frozenset[str] | None, dirty: str) -> None:
    """Raises StateError if an update that has failed may have written what is to be kept.

    intact: what the last update that wrote has kept, None: none has written. dirty: why the weights
    are not whole, "" if they are.
    """
    if dirty and intact is not None and (gone := sorted(kept - intact)):
        raise StateError.make(
            f"keep names '{gone[0]}', which an update may have written in part: {dirty}",
            "load the checkpoint from disk first, or update once from a trainer that publishes it",
            key="keep",
        )


def refuse_published(recording: Recording, kept: frozenset[str]) -> None:
    """Raises RequestError if something that is published goes into what is kept."""
    names = recording.into(kept)
    if names:
        raise RequestError.make(
            f"keep names what {first_of(map(repr, names), 1)} of the trainer fills",
            "keep what nobody publishes, and no more",
            key="keep",
        )


# Attention's scales and zero points: a checkpoint may have them, else the engine has 1.0 and 0.
_SCALES = frozenset(
    f"{under}{which}_{what}"
    for under in ("", "_")
    for which in ("k", "v", "q", "prob")
    for what in ("scale", "zero_point")
)


def engine_own(target: Target) -> str | None:
    """Why an engine has a tensor's values from elsewhere than a checkpoint, None if it has not."""
    if target.leaf in _SCALES and target.tensor.numel() == 1:
        return "a scale of attention that the checkpoint does not have"
    return None


# ------------------------------------------------------------------------- the configuration


# What is known to change no logit: names, types of memory, tokens' numbers, training, generation.
_IGNORED = re.compile(
    r"_.*|architectures|auto_map|model_type|name_or_path|transformers_version|dtype|torch_dtype"
    r"|.*_token_id|.*_token_index|.*dropout.*|.*drop_rate|initializer.*|init_.*|use_cache|output_.*"
    r"|return_dict|.*aux_loss.*|.*loss_coef|gradient_checkpointing.*|chunk_size_feed_forward"
    r"|problem_type|id2label|label2id|num_labels|is_decoder|is_encoder_decoder|cross_attention.*"
    r"|add_cross_attention|pretraining_tp|tokenizer_class|prefix|task_specific_params|pruned_heads"
    r"|max_position_embeddings|max_sequence_length|model_max_length|use_bfloat16|torchscript"
    r"|tf_legacy_loss|tie_encoder_decoder|finetuning_task|quantization_config|compression_config"
    r"|attn_implementation|experts_implementation"
)

# SGLang pads heads and widths of odd sizes on the CPU, and notes what they were.
_BEFORE = {"num_key_value_heads": "original_total_num_kv_heads"}


def config_differences(published: Mapping[str, Any], engine: Any) -> list[str]:
    """Fields in which a published configuration is not the engine's, one phrase each.

    Args:
        published: the trainer's config.json.
        engine: the engine's configuration, transformers' ``PretrainedConfig``.
    """
    theirs = dict(published)
    for config in (engine, getattr(engine, "text_config", None)):
        if config is None or theirs.get("model_type") != getattr(config, "model_type", None):
            continue
        # Fields that config.json leaves out have the class's defaults; old names become new ones.
        with contextlib.suppress(Exception):
            theirs = type(config)(**published).to_dict()
        engine = config
        break
    mine = engine.to_dict() if hasattr(engine, "to_dict") else dict(engine)
    return list(_differ("", _plain(theirs), _plain(mine)))


def refuse_other_config(text: str | None, engine: Any) -> None:
    """Raises RequestError if the published configuration *text* computes otherwise than *engine*;
    PeerError if it is none.

    Publications without a configuration are believed.
    """
    if not text or engine is None:
        return
    try:
        published = json.loads(text)
    except ValueError:
        published = None
    if not isinstance(published, dict):
        raise PeerError.make(
            "the configuration that the trainer publishes is no JSON object",
            'publish config.json as it is, or init with {"config": "ignore"}',
            key="config",
        )
    found = config_differences(published, engine)
    if found:
        raise RequestError.make(
            f"the trainer's configuration is not the engine's: {first_of(found, 8, '; ')}",
            "start the engine with the configuration that is trained, or init with "
            '{"config": "ignore"} if the difference is meant',
            key=found[0].partition(" ")[0],
            phase="mapping",
        )


def enlarged(engine: Any) -> bool:
    """Whether the engine has made its model larger than its checkpoint's configuration says."""
    mine = vars(engine)
    return any(
        _before(mine, name) not in (None, value)
        for name, value in mine.items()
        if isinstance(value, int) and not _IGNORED.fullmatch(name)
    )


def _before(mine: Mapping[str, Any], name: str) -> Any:
    return mine.get(_BEFORE.get(name, f"original_{name}"))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _differ(path: str, theirs: Any, mine: Any) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in sorted(theirs.keys() & mine.keys()):
            if not _IGNORED.fullmatch(name) and theirs[name] != _before(mine, name):
                yield from _differ(f"{path}.{name}" if path else name, theirs[name], mine[name])
    elif theirs != mine and not _renamed(path, mine):
        yield f"{path} is {_short(theirs)} in training and {_short(mine)} here"


def _renamed(path: str, mine: Any) -> bool:
    """Both engines give the rope of DeepSeek's models names of their own, in the configuration that
    they have read; its other fields stay."""
    return path.endswith("type") and isinstance(mine, str) and mine.startswith("deepseek_")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -------------------------------------------------------------------------- the quantization


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
    theirs, mine = _compared(published), _compared(engine or {"quant_method": "none"})
    names = sorted(name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name))
    if "quant_method" in names:
        names = ["quant_method"]
    if names:
        told = ", ".join(f"{name} {json.dumps(theirs.get(name))}" for name in names)
        here = ", ".join(f"{name} {json.dumps(mine.get(name))}" for name in names)
        raise RequestError.make(
            f"the trainer quantizes with {told}, and this engine with {here}",
            f"{start % _shown(published)}, or let the trainer quantize as the engine does"
            " (WeightServer(quantize=...))",
            key=names[0],
            phase="mapping",
        )


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
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


def refuse_other_modules(
    recording: Recording,
    again: Callable[[list[Described]], Recording],
    published: Mapping[str, Any] | None,
    engine: Mapping[str, Any] | None,
    start: str,
) -> None:
    """Raises RequestError if trainer and engine quantize other modules, as a recording shows.

    Args:
        recording: of all that is published.
        again: records a part of it.
        published, engine, start: as of :func:`refuse_other_quantization`.
    """
    types = {entry.name: entry.dtype for entry in recording.published}
    scaled = {name for name in types if types[name] in _EIGHT and scale_of(name, types)}
    scales = {scale_of(name, types) for name in scaled}
    same = start % ("{...}" if published is None else _shown(published))
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
    if said:
        remedy = "; or ".join([same, *ways])
        key = next(iter({**mine, **theirs}), "")
        raise RequestError.make("; ".join(said), remedy, key=key, phase="mapping")


def _shown(config: Mapping[str, Any]) -> str:
    text = json.dumps(config)
    if len(text) <= _WIDE:
        return text
    return json.dumps({k: "..." if k in LISTS else v for k, v in config.items()})
