# SPDX-License-Identifier: Apache-2.0
"""What vLLM would refuse is refused by its name, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_trainer import Entry
from fanin import errors
from fanin.engine.checks import EngineFacts, check_adapter, check_alpha, read_facts
from fanin.engine.faults import body_of, from_wire, says, status_of, to_wire

LAYER = "base_model.model.model.layers.0"
FUSED = [
    Entry(f"{LAYER}.mlp.experts.base_layer.lora_A.weight", (32, 64)),
    Entry(f"{LAYER}.mlp.experts.lora_A.default.weight", (32, 64)),
]
PER_EXPERT = [Entry(f"{LAYER}.mlp.experts.3.up_proj.lora_A.weight", (4, 64))]
PLAIN = [
    Entry(f"{LAYER}.q_proj.lora_A.run1.weight", (8, 64)),
    Entry(f"{LAYER}.q_proj.lora_B.run1.weight", (64, 8)),
    Entry("model.embed_tokens.lora_embedding_A.run1", (8, 100)),
]


def facts(entries: list[Entry] = PLAIN, **config: Any) -> Any:
    whole = {"r": 8, "lora_alpha": 16, **config}
    return read_facts(entries, {"peft_config": json.dumps(whole)})


def check(entries: list[Entry] = PLAIN, engine: EngineFacts | None = None, **config: Any) -> bool:
    engine = EngineFacts(max_lora_rank=16) if engine is None else engine
    return check_adapter(facts(entries, **config), engine, "0")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bias": "none", "use_dora": False, "modules_to_save": None, "lora_bias": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "EVA"},
        {"init_lora_weights": True, "rank_pattern": {"q_proj": 16}},
        {"init_lora_weights": "mica"},
        {"modules_to_save": ["score"]},
        {"peft_type": "lora", "kasa_config": None, "trainable_token_indices": []},
        # PEFT computes with these as without them, except in training.
        {"velora_config": {"num_groups": 4}, "monteclora_config": {"num_samples": 2}},
    ],
)
def test_what_vllm_loads(config: dict[str, Any]) -> None:
    assert check(**config) is False


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"init_lora_weights": "loftq"}, "loftq"),
        ({"init_lora_weights": "lora_ga"}, "lora_ga"),
        ({"peft_type": "ADALORA"}, "not ADALORA"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config"),
        ({"kasa_config": {}}, "kasa_config"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config"),
        ({"trainable_token_indices": [1, 5]}, "trainable_token_indices"),
        ({"modules_to_save": "lm_head"}, "lm_head"),
        ({"modules_to_save": 5}, "modules_to_save"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"rank_pattern": {"q_proj": 32}}, "--max-lora-rank 32"),
        ({"r": 17}, "--max-lora-rank 32"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_bdlora": {"a": 1}}, "use_bdlora"),
        ({"use_qalora": True}, "use_qalora"),
    ],
)
def test_what_vllm_refuses_by_the_configuration(config: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        check(**config)
    assert named in str(caught.value) and caught.value.remedy
    assert status_of(caught.value) == 400


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        (f"{LAYER}.q_proj.lora_magnitude_vector.default.weight", (64,), "DoRA"),
        (f"{LAYER}.q_proj.lora_B.default.bias", (64,), "lora_bias"),
        (f"{LAYER}.q_proj.bias", (64,), "q_proj.bias"),
        (f"{LAYER}.v_proj.lora_A.default.weight", (64, 64), "--max-lora-rank 64"),
    ],
)
def test_what_vllm_refuses_by_the_tensors(name: str, shape: tuple[int, ...], named: str) -> None:
    with pytest.raises(errors.RequestError, match=named):
        check([*PLAIN, Entry(name, shape)])


def test_saved_modules_hide_no_other_tensor() -> None:
    saved = Entry("base_model.model.score.modules_to_save.default.weight", (2, 64))
    assert check([*PLAIN, saved], modules_to_save=["score"]) is False
    token = Entry("model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 64))
    with pytest.raises(errors.RequestError, match="trainable_tokens_delta"):
        check([*PLAIN, saved, token], modules_to_save=["score"])


def test_an_engine_without_lora() -> None:
    with pytest.raises(errors.RequestError, match="--enable-lora"):
        check(engine=EngineFacts(lora_enabled=False))


@pytest.mark.parametrize(
    ("entries", "engine", "is_3d"),
    [
        (FUSED, EngineFacts(fused_model=True), True),
        (FUSED, EngineFacts(fused_model=False, mixed_moe=True), True),
        (FUSED, EngineFacts(fused_model=None), True),
        (PER_EXPERT, EngineFacts(fused_model=False), False),
        (PER_EXPERT, EngineFacts(fused_model=True, mixed_moe=True), False),
        (PLAIN, EngineFacts(fused_model=True), False),
    ],
)
def test_the_layout_of_experts(entries: list[Entry], engine: EngineFacts, is_3d: bool) -> None:
    assert check(entries, engine) is is_3d


@pytest.mark.parametrize(
    ("entries", "fused_model"), [(FUSED, False), (PER_EXPERT, True), (FUSED + PER_EXPERT, True)]
)
def test_experts_that_the_model_does_not_take(entries: list[Entry], fused_model: bool) -> None:
    with pytest.raises(errors.RequestError) as caught:
        check(entries, EngineFacts(fused_model=fused_model))
    if entries != FUSED + PER_EXPERT:
        assert "--enable-mixed-moe-lora-format" in caught.value.remedy


def test_rows_of_fused_experts_are_no_rank() -> None:
    assert facts(FUSED).max_rank == 8


def test_alpha() -> None:
    check_alpha(None, facts())
    check_alpha(16.0, facts())
    check_alpha(3.0, read_facts(PLAIN, {}))
    with pytest.raises(errors.RequestError, match=r"32 .* 16"):
        check_alpha(32.0, facts())


def test_metadata_without_a_configuration() -> None:
    found = read_facts(
        PLAIN, {"lora_alpha": "32", "base_model_name_or_path": "org/m", "use_dora": "true"}
    )
    assert (found.alpha, found.base_model, found.max_rank) == (32.0, "org/m", 8)
    with pytest.raises(errors.RequestError, match="DoRA"):
        check_adapter(found, EngineFacts(), "0")


def test_a_configuration_that_is_none() -> None:
    for text in ("[1]", "{", "nonsense"):
        with pytest.raises(errors.PeerError):
            read_facts(PLAIN, {"peft_config": text})


# ----------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.NotFoundError.make("x"), 404),
        (errors.SupersededError.make("x"), 404),
        (errors.UnreachableError.make("x"), 503),
        (errors.ConnectionFailedError.make("x", code=-302), 503),
        (errors.PausedError.make("x"), 503),
        (errors.PeerError.make("x"), 503),
        (errors.CancelledError.make("x"), 503),
        (errors.PullTimeoutError.make("x"), 504),
        (errors.StaleError.make("x"), 504),
        (errors.RequestError.make("x"), 400),
        (errors.HostError.make("x"), 500),
        (errors.ProcessError.make("x"), 500),
        (ValueError("x"), 500),
    ],
)
def test_status_of_errors(error: Exception, status: int) -> None:
    assert status_of(error) == status
    body = body_of(error)["error"]
    assert body["code"].startswith("FANIN_ERR_") and "x" in body["message"]


def test_errors_between_processes() -> None:
    sent = errors.SupersededError.make("gone", "ask for 7", rank=3, key="k", address="h:1")
    got = from_wire(json.loads(json.dumps(to_wire(sent))))
    assert type(got) is errors.SupersededError
    assert (says(got), got.code, got.rank, got.key) == (says(sent), sent.code, 3, "k")
    assert type(from_wire(to_wire(OSError("disk")))) is errors.ProcessError
    assert type(from_wire({"class": "os", "message": "m"})) is errors.FaninError
