# SPDX-License-Identifier: Apache-2.0
"""Ranks that each hold a part of a model: layers, experts, Megatron's parts; and ranks that differ.

What is pulled must be, byte for byte, what transformers saved of the model that was taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin
import fanin.check
import pytest
import torch
from fanin._digest import box_digest
from fanin._served import Held, compare, join
from full_models import save_full_model
from models import same_tensors
from parts_trainer import fp8_values
from test_full_worlds import Engine, saved
from vllm_server import free_ports
from worlds import World

NORM = "model.norm.weight"


def world(size: int, folder: Path, **options: Any) -> World:
    ranks = World(size, options, folder, "parts_trainer.py")
    try:
        ranks.expect("ready")
    except BaseException:
        ranks.close()
        raise
    return ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks
        ranks.tell("exit")
        assert ranks.wait() == [0, 0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_full_model(folder / kind, kind) for kind in ("qwen3", "qwen3-moe")}


def after(tensors: dict[str, torch.Tensor], steps: int) -> dict[str, torch.Tensor]:
    return {name: value * (-2) ** steps for name, value in tensors.items()}


def good(answers: list[dict[str, Any]]) -> Any:
    """What the ranks answered, which must be alike."""
    assert all(answer == {**answers[0], "event": "done"} for answer in answers), answers
    assert answers[0]["error"] is None, answers
    return answers[0]["result"]


def digests(tensors: dict[str, torch.Tensor]) -> list[Held]:
    """What a worker tells that holds all of these, whole."""
    return [
        Held(name, (0,) * one.dim(), tuple(one.shape), {"BF16": box_digest(one)})
        for name, one in tensors.items()
    ]


def errors(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(answer["error"] is not None for answer in answers), answers
    return [answer["error"] for answer in answers]


def check(ranks: World, addresses: list[str], whole: dict[str, torch.Tensor]) -> None:
    with Engine(addresses) as engine:
        for step in range(3):
            if step:
                good(ranks.do("step"))
            assert engine.pull(step=step) == step
            same_tensors(engine.tensors, after(whole, step))
            if not step:
                held = digests(engine.tensors)
                told, tables = fanin.check.trained(addresses, "full:0", 60.0, {}, step)
                assert told == step and compare(join(tables), [held]) == ([], len(held))
        assert "config" in engine.client.metadata("full:0")


PARTS = [
    ("pp", "qwen3"),
    ("pp", "qwen3-moe"),
    ("ep", "qwen3-moe"),
    ("megatron", "qwen3"),
    ("ddp", "qwen3"),
]


@pytest.mark.parametrize("kind, model", PARTS)
@pytest.mark.parametrize("snapshot", [False, True])
def test_parts_make_the_checkpoint(
    two: World, models: dict[str, Path], kind: str, model: str, snapshot: bool
) -> None:
    made = two.do("make", model=str(models[model]), kind=kind, snapshot=snapshot)
    check(two, good(made), saved(models[model]))


def test_experts_as_dtensors_under_fsdp_and_a_group_of_some_ranks(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with world(4, tmp_path) as ranks:
        made = ranks.do("make", model=str(models["qwen3-moe"]), kind="ep+fsdp")
        check(ranks, good(made), saved(models["qwen3-moe"]))
        # Two of them are a trainer of its own: ranks 0 and 1 of their group.
        made = ranks.do("make", model=str(models["qwen3"]), kind="pp", ranks=[2, 3])
        assert [len(one["result"]) for one in made] == [0, 0, 2, 2], made
        with Engine(made[2]["result"]) as engine:
            assert engine.pull() == 0
            same_tensors(engine.tensors, saved(models["qwen3"]))


# --------------------------------------------------------------------------- ranks that differ


def test_what_no_rank_holds_is_named_on_all(two: World, models: dict[str, Path]) -> None:
    good(two.do("make", model=str(models["qwen3-moe"]), kind="ep"))
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    for error in errors(two.do("lose", key=lost, rows=[5, 9])):
        assert error["type"] == "RequestError" and error["key"] == lost
        assert (
            f"elements [5:9, 0:128] of '{lost}' (BF16 [96, 128]) are held by no rank"
            in (error["text"])
        )
        assert "rank 1 holds parts of it" in error["text"]


def test_a_rank_that_cannot_be_published_is_named_on_all(two: World) -> None:
    for error in errors(two.do("partial", where=1)):
        assert (error["type"], error["key"], error["rank"]) == ("RequestError", "weight", 1)
        assert "rank 1 could not describe its parameters" in error["text"]
        assert "its ranks hold summands" in error["text"]
    good(two.do("replicated"))
    for error in errors(two.do("packed")):
        assert "'weight' is a Float8Tensor, whose values do not lie in it" in error["text"]
        assert "dequantize" in error["remedy"]


def test_fp8_and_its_scales_under_fsdp_are_bytes_like_any_other(two: World) -> None:
    """Values of four bits, which lie two in a byte, are not."""
    addresses = good(two.do("fp8"))
    wanted = fp8_values()
    got = {name: torch.empty_like(value) for name, value in wanted.items()}
    with fanin.Client(addresses) as client:
        kinds = {one.name: one.dtype for one in client.catalog("full:0")}
        client.pull_into("full:0", got, timeout=60)
    assert kinds == {"weight": "F8_E4M3", "weight_scale_inv": "F32"}
    same_tensors(got, wanted)
    for error in errors(two.do("packed_four_bit")):
        assert error["key"] == "0.weight"
        assert "is a weight of bitsandbytes' Linear4bit, which packs its values" in error["text"]


def test_local_experts_without_their_number_are_refused(
    two: World, models: dict[str, Path]
) -> None:
    for error in errors(two.do("make", model=str(models["qwen3-moe"]), kind="ep", names=None)):
        assert "gate_up_proj' has 2 experts, and the model's configuration says 4" in error["text"]
        assert "fanin.torch.names.experts(first=...)" in error["remedy"]


@pytest.mark.parametrize(
    "kind, model, names",
    [
        ("unnamed-rows", "qwen3", ["gate_proj", "up_proj", "down_proj"]),
        ("unnamed-experts", "qwen3-moe", ["gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_parts_that_nobody_tells_are_no_replicas(
    two: World, models: dict[str, Path], kind: str, model: str, names: list[str]
) -> None:
    for answer in two.do("mistake", model=str(models[model]), kind=kind):
        for text in answer["result"]:
            key, peer, *_ = text.split(" ")
            assert key.split(".")[-2] in names and peer == "1", text
            assert "has other values on rank 0 than on rank 1" in text
            assert "names=" in text and "fanin.torch.Slice" in text


def test_rows_of_the_vocabulary_are_not_all(two: World, models: dict[str, Path]) -> None:
    made = two.do("make", model=str(models["qwen3"]), kind="unnamed-vocabulary")
    for error in errors(made):
        assert error["key"] in ("lm_head.weight", "model.embed_tokens.weight")
        assert "has 128 rows on each of 2 ranks" in error["text"]
        assert "says vocab_size 256, 2 times as many" in error["text"]


def test_a_set_that_changes_on_one_rank(two: World, models: dict[str, Path]) -> None:
    """That rank says so and publishes nothing; after refresh() on all they go on."""
    addresses = good(two.do("make", model=str(models["qwen3"]), kind="pp"))
    whole = saved(models["qwen3"])
    with Engine(addresses) as engine:
        assert engine.pull() == 0
        good([two.do("convert", name=NORM, dtype="float32", where=1)[1]])
        first, second = two.do("step")
        assert first["error"] is None
        assert second["error"]["type"] == "StateError" and second["error"]["key"] == NORM
        assert (
            f"'{NORM}' is F32 [128] on this rank now, and was BF16 [128]"
            in (second["error"]["text"])
        )
        assert "refresh() on every rank" in second["error"]["remedy"]
        with pytest.raises(fanin.FaninError):
            engine.pull(step=1, timeout=1)
        # It may be called whenever one is in doubt.
        for _ in range(2):
            good(two.do("call", method="refresh"))
        good(two.do("step"))
        engine.tensors.clear()
        assert engine.pull(step=2) == 2
        same_tensors(engine.tensors, after(whole, 2) | {NORM: after(whole, 2)[NORM].float()})
        # What leaves one rank leaves all; what joins one joins all.
        good([two.do("drop", name="model.layers.1.self_attn.q_norm.weight", where=1)[1]])
        good([two.do("add", name="model.extra", where=0)[0]])
        for answer in two.do("call", method="publish", arguments=[3]):
            assert answer["error"]["type"] == "StateError", answer
        good(two.do("call", method="refresh"))
        good(two.do("call", method="publish", arguments=[3]))
        names = {entry.name for entry in engine.client.catalog("full:0")}
        wanted = whole.keys() | {"model.extra"}
        assert names == wanted - {"model.layers.1.self_attn.q_norm.weight"}


def test_experts_that_move_between_ranks(two: World, models: dict[str, Path]) -> None:
    """Into the memory of others: nothing of the tensors is another one but what they are."""
    addresses = good(two.do("make_moving", model=str(models["qwen3-moe"])))
    whole = saved(models["qwen3-moe"])
    with Engine(addresses) as engine:
        assert engine.pull() == 0
        same_tensors(engine.tensors, whole)
        good(two.do("step"))
        good(two.do("move_experts", model=str(models["qwen3-moe"])))
        assert engine.pull(step=2) == 2
        same_tensors(engine.tensors, after(whole, 2))
        good(two.do("step"))
        assert engine.pull(step=3) == 3
        same_tensors(engine.tensors, after(whole, 3))


def test_one_rank_that_cannot_refresh_stops_all(two: World, models: dict[str, Path]) -> None:
    addresses = good(two.do("make", model=str(models["qwen3"]), kind="pp"))
    good([two.do("call", method="pause", where=1)[1]])
    for error in errors(two.do("call", method="refresh")):
        assert error["type"] == "StateError" and error["rank"] == 1
        assert "full:0 is paused" in error["text"]
    with Engine(addresses) as engine:
        with pytest.raises(fanin.FaninError, match="trainer memory offloaded"):
            engine.pull(timeout=10)
        good([two.do("call", method="resume", where=1)[1]])
        assert engine.pull() == 0


def test_ranks_that_die_and_come_back(models: dict[str, Path], tmp_path: Path) -> None:
    """Pulls fail with the dead rank's name, and go on with the next launch by themselves."""
    port, whole = free_ports(2), saved(models["qwen3"])
    with world(2, tmp_path / "one", base_port=port) as ranks:
        addresses = good(ranks.do("make", model=str(models["qwen3"]), kind="pp"))
        with Engine(addresses) as engine:
            assert engine.pull() == 0
            ranks.ranks[1].kill()
            with pytest.raises(fanin.FaninError) as caught:
                engine.pull(timeout=10)
            assert caught.value.rank == 1
            ranks.close()
            with world(2, tmp_path / "two", base_port=port) as again:
                assert good(again.do("make", model=str(models["qwen3"]), kind="pp")) == addresses
                good(again.do("step"))
                assert engine.pull(step=1) == 1
                same_tensors(engine.tensors, after(whole, 1))
