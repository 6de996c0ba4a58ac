# SPDX-License-Identifier: Apache-2.0
"""An adapter that has no place in the engine is refused by the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from fake_trainer import Entry, FakeTrainer
from fanin import errors
from fanin.engine import checks
from fanin.engine.clients import ClientPool, Source
from fanin.engine.directories import Places
from fanin.engine.faults import status_of
from fanin.engine.lora_places import Width, judge
from fanin.engine.pulls import PullService, Wanted
from fanin.vllm.worker import places_in, widths_of

LAYER = "model.layers.0"


def parse(name: str) -> tuple[str, bool]:
    """As vLLM's own does without a mapping of names."""
    parts = name.removeprefix("base_model.model.").split(".")
    if parts[-1].startswith("lora_embedding_"):
        return ".".join(parts[:-1]), parts[-1].endswith("A")
    if parts[-2] not in ("lora_A", "lora_B"):
        raise ValueError(name)
    return ".".join(parts[:-2]), parts[-2] == "lora_A"


def pair(module: str, into: int, out: int, rank: int = 8) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (f"base_model.model.{module}.lora_A.default.weight", (rank, into)),
        (f"base_model.model.{module}.lora_B.default.weight", (out, rank)),
    ]


def manager(**more: Any) -> Any:
    """One of two shards of a model: the widths of its layers are those of the whole."""
    heads = {"total_num_heads": 4, "total_num_kv_heads": 1, "head_size": 32}
    qkv = Thing(base_layer=Thing(input_size=128, output_size=256, **heads))  # two copies of key
    gate_up = Thing(base_layer=Thing(input_size=128, output_size=512, output_sizes=[256, 256]))
    head = Thing(
        base_layer=Thing(vocab_size=320, org_vocab_size=300),
        sharded_to_full_mapping=None,
        hidden_size=128,
    )
    modules = {
        f"{LAYER}.qkv_proj": qkv,
        f"{LAYER}.gate_up_proj": gate_up,
        f"{LAYER}.down_proj": Thing(base_layer=Thing(input_size=256, output_size=128)),
        "model.embed_tokens": Thing(base_layer=Thing(org_vocab_size=300, embedding_dim=128)),
        "lm_head": head,
    }
    packed = {
        f"{LAYER}.qkv_proj": [f"{LAYER}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")],
        f"{LAYER}.gate_up_proj": [f"{LAYER}.{leaf}" for leaf in ("gate_proj", "up_proj")],
    }
    fields = {"modules": modules, "packed_modules": packed, "is_pooling_model": False}
    return Thing(**{**fields, **more})


def said(
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    widths: dict[str, Width] | None = None,
    unwrapped: str = "-",
    away: str = "-",
) -> Any:
    return judge(
        tensors,
        parse,
        widths_of(manager(), False) if widths is None else widths,
        lambda module: module.endswith(unwrapped),
        lambda module: module.startswith(away),
    )


def test_all_that_fits() -> None:
    fits = [
        *pair(f"{LAYER}.q_proj", 128, 128),
        *pair(f"{LAYER}.k_proj", 128, 32),
        *pair(f"{LAYER}.up_proj", 128, 256, rank=4),
        *pair(f"{LAYER}.down_proj", 256, 128),
        *pair("lm_head", 128, 300),
        ("model.embed_tokens.lora_embedding_A.default", (8, 300)),
        ("model.embed_tokens.lora_embedding_B.default", (128, 8)),
    ]
    assert said(fits) == {"placed": list(range(len(fits))), "absent": {}, "misfit": {}}


@pytest.mark.parametrize(
    ("tensors", "kind", "number", "why"),
    [
        (pair("model.language_model.layers.0.q_proj", 128, 128), "absent", "0", "there is no"),
        (pair("model.layers.98.q_proj", 128, 128), "absent", "1", "there is no model.layers.98"),
        (pair(f"{LAYER}.o_proj", 128, 128), "absent", "0", "o_proj is without LoRA"),
        (pair(f"{LAYER}.qkv_proj", 128, 192), "absent", "0", "qkv_proj"),
        (pair(f"{LAYER}.k_proj", 128, 64), "misfit", "1", "[64, 8], and the module gives 32"),
        (pair(f"{LAYER}.q_proj", 64, 128), "misfit", "0", "[8, 64], and the module takes 128"),
        (pair(f"{LAYER}.down_proj", 512, 128), "misfit", "0", "takes 256"),
        (pair(f"{LAYER}.gate_proj", 128, 128), "misfit", "1", "gives 256"),
        (pair("lm_head", 128, 256), "misfit", "1", "gives 300"),
        (pair(f"{LAYER}.q_proj", 128, 128)[:1], "misfit", "0", "no lora_B with it"),
        ([("model.norm.weight", (128,))], "absent", "0", "no tensor of a LoRA layer"),
        (
            [
                pair(f"{LAYER}.q_proj", 128, 128)[0],
                pair(f"{LAYER}.q_proj", 128, 128, rank=4)[1],
            ],
            "misfit",
            "1",
            "rank 4 is not the 8",
        ),
        (
            [*pair(f"{LAYER}.q_proj", 128, 128), (f"{LAYER}.q_proj.lora_A.two.weight", (8, 128))],
            "misfit",
            "2",
            "another tensor goes there",
        ),
        ([(f"{LAYER}.q_proj.lora_A.x.weight", (2, 8, 128))], "misfit", "0", "not a matrix"),
    ],
)
def test_what_has_no_place(tensors: Any, kind: str, number: str, why: str) -> None:
    assert why in said(tensors, unwrapped="o_proj")[kind][number]


def test_of_another_stage_of_a_pipeline() -> None:
    told = said(pair("model.layers.7.q_proj", 128, 128), away="model.layers.7")
    assert told == {"placed": [], "absent": {}, "misfit": {}}


def experts(**more: Any) -> Any:
    config = Thing(hidden_dim=128, intermediate_size_per_partition=32)
    module = Thing(w13_lora_a_stacked=(), moe_config=config, tp_size=2)
    path = f"{LAYER}.mlp.experts"
    leaves = ("gate_proj", "down_proj", "up_proj")
    names = [f"{path}.{number}.{leaf}" for number in (0, 1) for leaf in leaves]
    return manager(modules={path: module}, packed_modules={path: names}, **more)


def test_experts() -> None:
    path = f"{LAYER}.mlp.experts"
    one_each = widths_of(experts(), False)
    assert one_each[f"{path}.1.down_proj"] == Width((64,), (128,))
    assert one_each[f"{path}.1.up_proj"] == one_each[f"{path}.0.gate_proj"] == Width((128,), (64,))
    fused = widths_of(experts(), True)
    assert fused == {path: Width((64,), (128,)), f"{path}.base_layer": Width((128,), (128,))}
    whole = [*pair(path, 64, 128, rank=16), *pair(f"{path}.base_layer", 128, 128, rank=16)]
    assert len(said(whole, fused)["placed"]) == 4 and not said(whole, fused)["misfit"]
    assert "without down_proj" in said(whole[2:], fused)["misfit"]["1"]
    assert len(widths_of(experts(_enable_moe_shared_loras=True), False)) == 6


def test_pooling_models_and_several_outputs_in_one() -> None:
    found = widths_of(manager(is_pooling_model=True, _classification_head=("score", None)), False)
    assert found["layers.0.down_proj"] == found[f"{LAYER}.down_proj"] and "score" in found
    base = Thing(input_size=128, output_sizes=[8, 8, 16, 4])
    packed = {"m.in": ["m.in_proj_qkv", "m.in_proj_z"]}
    several = manager(modules={"m.in": Thing(base_layer=base)}, packed_modules=packed)
    found = widths_of(several, False)
    assert found == {"m.in_proj_qkv": Width((128,), (32,)), "m.in_proj_z": Width((128,), (4,))}


def test_a_worker_without_adapters_does_not_say() -> None:
    assert places_in(Thing(), [], False) is None


# ------------------------------------------------------------------------ all workers


def facts(count: int = 5) -> Any:
    entries = [Entry(name, shape) for n in range(count) for name, shape in pair(f"m.{n}", 8, 8)]
    return checks.read_facts(entries, {})


def answer(placed: Iterable[int] = (), absent: Any = None, misfit: Any = None) -> dict[str, Any]:
    return {"placed": list(placed), "absent": absent or {}, "misfit": misfit or {}}


def test_one_worker_may_have_what_another_lacks() -> None:
    first = answer(range(5), {"5": "there is no m.2", "6": "there is no m.3"})
    checks.check_places(facts(), [first, answer(range(5, 10))], "0")
    with pytest.raises(errors.RequestError) as caught:
        checks.check_places(facts(), [first, answer([5])], "0")
    assert "1 of 10" in str(caught.value) and "m.3.lora_A" in str(caught.value)
    with pytest.raises(errors.RequestError, match="gives 8"):
        checks.check_places(facts(), [answer(range(10)), answer([], {}, {"3": "gives 8"})], "0")


def test_the_first_are_named_and_the_others_counted() -> None:
    with pytest.raises(errors.RequestError) as caught:
        checks.check_places(facts(), [answer([], {str(n): "none" for n in range(10)})], "7")
    text = caught.value.message
    assert "run 7: 10 of 10 tensors" in text and text.count("lora_") == 3 and "and 7 more" in text
    assert "--lora-target-modules" in caught.value.remedy and status_of(caught.value) == 400


def test_refused_before_any_bytes_move_and_asked_once(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    told: list[Any] = [answer([], {"0": "there is no q_proj"})]
    asked: list[Any] = []

    def ask(tensors: Any, is_3d: bool, seconds: float) -> Any:
        asked.append((tensors, is_3d))
        return told

    service = PullService(Places(tmp_path), ClientPool(trainer.client), places_in=ask)
    source = Source.of("127.0.0.1:6000", None)
    trainer.commit(1)
    for _ in range(2):
        with pytest.raises(errors.RequestError, match="there is no q_proj"):
            service.pull(Wanted("a-run0-step1", "0", 1, "a", source))
    assert len(asked) == 2 and not trainer.pulls
    told[:] = [answer([0])]
    for step in (2, 3):
        trainer.commit(step)
        service.pull(Wanted(f"a-run0-step{step}", "0", step, "a", source))
    assert len(asked) == 3 and len(trainer.pulls) == 2
    name = "base_model.model.model.layers.0.q_proj.lora_A.default.weight"
    assert asked[0] == (((name, (8, 64)),), False)
    service.close()
