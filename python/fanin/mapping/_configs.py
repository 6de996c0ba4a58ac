# SPDX-License-Identifier: Apache-2.0
"""Whether trainer and engine compute with one configuration.

Weights of one shape give other tokens with another rope_theta, epsilon or list of layer types. So
all fields are compared that both sides have, but those that change no result.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fanin.errors import PeerError, RequestError, first_of

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
