# SPDX-License-Identifier: Apache-2.0
"""Trainer's and engine's configurations: equal ones are equal, and each difference is named."""

from __future__ import annotations

import json
from typing import Any

import fanin
import pytest
import transformers
from fanin.mapping._checks import config_differences, refuse_other_config

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
FAMILIES = (
    *("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Mixtral", "DeepseekV3"),
    *("Gemma2", "Gemma3Text", "Glm4Moe", "GptOss", "Phi3"),
)


def made(family: str, **more: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**{**SMALL, **more})


def told(config: Any) -> dict[str, Any]:
    """config.json, as a trainer publishes it."""
    fields: dict[str, Any] = json.loads(config.to_json_string())
    return fields


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_configurations(family: str) -> None:
    """Also as older versions of transformers wrote them, and with what changes no result."""
    engine = made(family)
    assert config_differences(told(made(family)), engine) == []
    old = told(engine)
    rope = old.pop("rope_parameters", None) or {}
    if "rope_theta" in rope:
        old["rope_theta"] = rope["rope_theta"]
    old |= {"torch_dtype": "float32", "use_cache": False, "transformers_version": "4.1"}
    assert config_differences(old, engine) == []
    refuse_other_config(json.dumps(old), engine)
    refuse_other_config(None, engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", 3e-3), ("rope_theta", 12345.0), ("tie_word_embeddings", None)],
)
def test_other_configurations(family: str, field: str, value: Any) -> None:
    engine = made(family)
    value = not engine.tie_word_embeddings if value is None else value
    found = config_differences(told(made(family, **{field: value})), engine)
    assert any(field in one for one in found)
    assert all("in training and" in one for one in found)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("Qwen3Moe", "num_experts_per_tok", 3),
        ("Qwen3Moe", "norm_topk_prob", True),
        ("DeepseekV3", "routed_scaling_factor", 1.25),
        ("Gemma2", "final_logit_softcapping", 7.0),
        ("Gemma2", "layer_types", ["full_attention", "full_attention"]),
        ("Qwen3", "head_dim", 64),
        ("Llama", "hidden_act", "gelu"),
        ("Mistral", "sliding_window", 7),
    ],
)
def test_what_changes_no_shape(family: str, field: str, value: Any) -> None:
    with pytest.raises(fanin.RequestError, match=field) as caught:
        refuse_other_config(json.dumps(told(made(family, **{field: value}))), made(family))
    assert '{"config": "ignore"}' in caught.value.remedy


def test_a_text_model_of_a_vision_engine() -> None:
    engine = transformers.Qwen2_5_VLConfig(text_config=dict(SMALL))
    text = engine.text_config
    assert config_differences(told(text), engine) == []
    other = {**told(text), "rms_norm_eps": 3e-3}
    assert any("rms_norm_eps" in one for one in config_differences(other, engine))
