# SPDX-License-Identifier: Apache-2.0
"""A real vLLM that serves something else than what was trained: fanin.check.served notices.

Each case takes out the one guard that would refuse it: the check alone has to say which tensor it
is, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fanin.errors import RequestError
from fanin.torch import WeightServer, weights
from full_models import random_model, save_full_model
from weights_engine import Engine
from worlds import World

NORM = "model.norm.weight"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
GATE = "model.layers.1.mlp.gate.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def saved(scratch: Path) -> Path:
    return save_full_model(scratch / "model", "qwen3")


@pytest.fixture(scope="module")
def engine(saved: Path, scratch: Path) -> Iterator[Engine]:
    with Engine(saved, scratch) as one:
        yield one.wait_ready()


def given(engine: Engine, addresses: list[str], step: int, guard: str = "", **info: Any) -> Any:
    """What the check says when the engine has this step, though a guard is out."""
    engine.take_out(guard)
    failure = engine.init(",".join(addresses), **info)
    assert not failure, failure
    engine.pull(step)
    return engine.served(addresses)


def reasons(report: Any) -> dict[str, str]:
    """What differs, by name; without the modules in which workers have seen it as well."""
    told = (one.partition(": ") for one in report["different"])
    return {name: why for name, _, why in told if not name.startswith("worker ")}


def good(report: Any) -> Any:
    assert "error" not in report, report
    assert not report["unseen"] and report["tensors"] > 0
    return report


def test_what_is_trained_is_served(engine: Engine) -> None:
    model = random_model("qwen3", seed=4)
    with WeightServer(model, base_port=0) as server:
        server.publish(1)
        report = good(given(engine, server.addresses, 1))
        assert report["tensors"] == len(list(model.parameters())) and report["step"] == 1
        # Written behind the back of everybody: the engine has step 1 of something else.
        engine.scribble(NORM)
        report = engine.served(server.addresses)
        assert list(reasons(report)) == [NORM]
        with server.updating(2, digests=False), torch.no_grad():
            model.model.norm.weight.mul_(2)
        engine.pull(2)
        assert "not whole at 1" in engine.served(server.addresses)["error"]
        with server.updating(3, digests=True):
            pass
        engine.pull(3)
        good(engine.served(server.addresses))


def test_a_larger_tensor_is_a_cut(engine: Engine) -> None:
    with WeightServer(random_model("qwen3", num_attention_heads=8), base_port=0) as server:
        server.publish(1)
        assert "num_attention_heads" in engine.init(",".join(server.addresses))
        found = reasons(given(engine, server.addresses, 1, "coverage", config="ignore"))
        assert len(found) == 4 and all("self_attn." in name for name in found)  # q_proj, o_proj
        assert all("cut: 16384 of 32768 elements" in why for why in found.values()), found


def test_a_draft_model_too(tmp_path: Path) -> None:
    saved = save_full_model(tmp_path / "model", "qwen3")
    spec = {"model": str(saved), "num_speculative_tokens": 2, "method": "draft_model"}
    model, draft = (random_model("qwen3", seed=seed) for seed in (4, 5))
    with (
        WeightServer(model, base_port=0) as server,
        Engine(saved, tmp_path / "engine", speculative_config=spec) as engine,
    ):
        engine.wait_ready()
        server.add_run("draft", draft)
        server.publish({"0": 1, "draft": 1})
        assert not engine.init(",".join(server.addresses), draft_run="draft")
        engine.pull(1)
        assert "holds nothing of full:draft" in engine.served(server.addresses, "draft")["error"]
        engine.good("start_draft_weight_update")
        assert not engine.update(1)
        engine.good("finish_weight_update")
        for run, one in (("0", model), ("draft", draft)):
            report = engine.served(server.addresses, run)
            assert "error" not in report, report
            assert report["tensors"] + len(report["unused"]) == len(list(one.parameters()))
            assert not report["unseen"]
        engine.scribble("model.norm.weight", draft=True)
        assert "error" not in engine.served(server.addresses)
        report = engine.served(server.addresses, "draft")
        assert [one.partition(":")[0] for one in report["different"]] == ["model.norm.weight"]


def test_another_configuration_is_not_seen_by_weights(engine: Engine) -> None:
    """The comparison of configurations alone tells."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    with WeightServer(random_model("qwen3", rope_parameters=rope), base_port=0) as server:
        server.publish(1)
        assert "rope_theta" in engine.init(",".join(server.addresses))
        good(given(engine, server.addresses, 1, config="ignore"))


def test_a_smaller_model(engine: Engine) -> None:
    """What nothing fills is the engine's own checkpoint, or whatever was there before."""
    with WeightServer(random_model("qwen3", num_hidden_layers=1), base_port=0) as server:
        server.publish(1)
        said = engine.init(",".join(server.addresses), config="ignore")
        assert "'model.layers.1.self_attn.qkv_proj.weight': no published tensor fills it" in said
        report = given(engine, server.addresses, 1, "unfilled", config="ignore")
        found = report["different"]
        assert len(found) == 8 and all("worker 0: model.layers.1." in one for one in found), found
        assert "down_proj.weight: 32768 of 32768 elements are filled by nothing" in str(found)


def test_stale_replicas(engine: Engine, saved: Path, tmp_path: Path) -> None:
    """Two ranks, each a step behind in the half that is the other's."""
    with World(2, {}, tmp_path, "parts_trainer.py") as ranks:
        ranks.expect("ready")
        made = ranks.do("stale", model=str(saved))
        assert all(one["error"] is None for one in made), made
        report = given(engine, made[0]["result"], 2)
        found = reasons(report)
        names = {name for name, _ in random_model("qwen3").named_parameters()}
        assert report["tensors"] == 0 and names <= found.keys()
        assert all("rank 0 and rank 1 hold other values" in found[name] for name in names), found


def test_a_lost_tie(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and engine have a guard each, and each of them is enough."""
    tied = save_full_model(scratch / "tied", "qwen3", tied=True)
    lost = random_model("qwen3", tied=True)
    lost.lm_head.weight = torch.nn.Parameter(lost.lm_head.weight.detach() * 2)
    with Engine(tied, scratch / "tied-engine") as engine:
        engine.wait_ready()
        with WeightServer(lost, base_port=0) as server:
            with pytest.raises(RequestError, match="holds two tensors with different values"):
                server.publish(1)
            monkeypatch.setattr(weights, "refuse_lost_tie", lambda *_: None)
            server.publish(1)
            said = engine.init(",".join(server.addresses))
            assert f"'{EMBEDDINGS}' fills: the engine has one memory for two" in said
            found = reasons(given(engine, server.addresses, 1, "ties"))
            assert list(found) == [EMBEDDINGS], found
            assert f"the values of '{HEAD}' in its place" in found[EMBEDDINGS]
        monkeypatch.undo()
        # A trainer that ties nothing has lost nothing: the engine's guard alone is in the way.
        with WeightServer(random_model("qwen3"), base_port=0) as server:
            server.publish(1)
            found = reasons(given(engine, server.addresses, 1, "ties", config="ignore"))
            assert list(found) == [EMBEDDINGS], found


def test_what_was_rounded_on_the_way(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's bias, which models keep in F32. What the engine itself holds narrower is right."""
    model = save_full_model(scratch / "glm", "glm4-moe")
    trained = random_model("glm4-moe", seed=6, dtype="float32")
    cast: Any = {GATE: None, "*": "BF16"}
    with Engine(model, scratch / "glm-engine") as engine:
        engine.wait_ready()
        with WeightServer(trained, base_port=0, snapshot=True, cast=cast) as server:
            server.publish(1)
            good(given(engine, server.addresses, 1))
        with monkeypatch.context() as patched:
            patched.setattr(weights, "kept_in_f32", lambda *_: frozenset())
            with WeightServer(trained, base_port=0, snapshot=True, cast=cast) as server:
                server.publish(1)
                found = reasons(given(engine, server.addresses, 1))
                assert list(found) == [BIAS] and "rounded to BF16" in found[BIAS], found
        with WeightServer(trained, base_port=0) as server:
            server.publish(1)
            good(given(engine, server.addresses, 1))
            engine.narrow(BIAS)
            good(given(engine, server.addresses, 1))
