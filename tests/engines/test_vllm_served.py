# SPDX-License-Identifier: Apache-2.0
"""A real vLLM that serves something else than what was trained: fanin.check.served notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fanin.torch import WeightServer, weights
from full_models import random_model, save_full_model
from weights_engine import Engine

WITHOUT_GUARDS = {"FANIN_TEST_WITHOUT_GUARDS": "1"}
"""What would refuse these trainers at init is taken out: the check alone has to notice."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    scratch = tmp_path_factory.mktemp("served")
    model = save_full_model(scratch / "model", "qwen3")
    with Engine(model, scratch, environment=WITHOUT_GUARDS) as one:
        yield one.wait_ready()


def given(engine: Engine, server: WeightServer, step: int) -> Any:
    """What the check says when the engine has this step; no guard is asked for its opinion."""
    failure = engine.init(",".join(server.addresses))
    assert not failure, failure
    engine.pull(step)
    return engine.served(server.addresses)


def test_what_is_trained_is_served(engine: Engine) -> None:
    model = random_model("qwen3", seed=4)
    with WeightServer(model, base_port=0) as server:
        server.publish(1)
        report = given(engine, server, 1)
        assert "error" not in report, report
        assert report["tensors"] == len(list(model.parameters())) and report["step"] == 1
        assert not report["unseen"]
        # Written behind the back of everybody: the engine has step 1 of something else.
        engine.scribble("model.norm.weight")
        report = engine.served(server.addresses)
        assert [one.partition(":")[0] for one in report["different"]] == ["model.norm.weight"]
        with server.updating(2), torch.no_grad():
            model.model.norm.weight.mul_(2)
        engine.pull(2)
        assert "not whole at 1" in engine.served(server.addresses)["error"]
        with server.updating(3, digests=True):
            pass
        engine.pull(3)
        assert "error" not in engine.served(server.addresses)


def test_a_larger_tensor_is_a_cut(engine: Engine) -> None:
    model = random_model("qwen3", intermediate_size=512)
    with WeightServer(model, base_port=0, config={}) as server:
        server.publish(1)
        report = given(engine, server, 1)
        names = {one.partition(":")[0].rpartition("mlp.")[2] for one in report["different"]}
        assert names == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
        assert all("cut: 32768 of 65536 elements" in one for one in report["different"])


def test_a_lost_tie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "refuse_lost_tie", lambda *_: None)
    tied = save_full_model(tmp_path / "model", "qwen3", tied=True)
    model = random_model("qwen3", tied=False)
    model.config.tie_word_embeddings = True  # torch holds two tensors all the same
    every = {name: name for name, _ in model.named_parameters()}
    with (
        WeightServer(model, base_port=0, names=lambda name, _: every[name]) as server,
        Engine(tied, tmp_path / "engine", environment=WITHOUT_GUARDS) as engine,
    ):
        engine.wait_ready()
        server.publish(1)
        report = given(engine, server, 1)
        names = {one.partition(":")[0] for one in report["different"]}
        assert "model.embed_tokens.weight" in names, report


def test_what_was_rounded_on_the_way(tmp_path: Path) -> None:
    saved = save_full_model(tmp_path / "model", "qwen3", dtype="float32")
    model = random_model("qwen3", dtype="float32")
    with (
        WeightServer(model, base_port=0, snapshot=True, cast="BF16") as server,
        Engine(saved, tmp_path / "engine", dtype="float32") as engine,
    ):
        engine.wait_ready()
        server.publish(1)
        report = given(engine, server, 1)
        assert len(report["different"]) == len(list(model.parameters()))
        assert all("rounded to BF16" in one for one in report["different"])
