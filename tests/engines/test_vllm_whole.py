# SPDX-License-Identifier: Apache-2.0
"""A real vLLM refuses trainers of another model, and keeps what nobody trains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fanin
import pytest
from full_models import random_model, save_full_model
from weights_engine import Engine, Judge


@contextmanager
def trainer(without: str = "-", **fields: Any) -> Iterator[str]:
    """Publishes another model of the kind, and no configuration: shapes alone tell."""
    model = random_model("qwen3", seed=2, **fields)
    tensors = {name: one for name, one in model.state_dict().items() if without not in name}
    with fanin.Server(world_id=os.urandom(16), rank=0, world_size=1) as server:
        server.put("full:0", [fanin.shard_of(name, one) for name, one in tensors.items()])
        server.commit("full:0", 1)
        yield f"127.0.0.1:{server.port}"


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engine]:
    scratch: Path = tmp_path_factory.mktemp("whole")
    model = save_full_model(scratch / "model", "qwen3")
    options = {"tensor_parallel_size": request.param} if request.param > 1 else {}
    with Engine(model, scratch, alone=request.param == 1, **options) as one:
        yield one.wait_ready()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"intermediate_size": 512}, "of model.layers.0.mlp.down_proj.weight [128, 512]"),
        ({"num_key_value_heads": 4}, "of model.layers.0.self_attn.k_proj.weight [128, 128]"),
        ({"num_attention_heads": 8}, "of model.layers.0.self_attn.o_proj.weight [128, 256]"),
        ({"num_hidden_layers": 3}, "layers.2."),
        ({"intermediate_size": 128}, "model.layers.0.mlp"),
        ({"vocab_size": 1024}, "the loader failed with AssertionError"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
    ],
    ids=str,
)
def test_a_trainer_of_other_shapes(engine: Engine, fields: dict[str, int], says: str) -> None:
    with trainer(**fields) as address:
        for mode in ("auto", "loader"):
            assert says in engine.init(address, mode=mode), mode


@pytest.mark.parametrize("mode", ["auto", "loader"])
def test_what_nobody_trains_stays(engine: Engine, tmp_path: Path, mode: str) -> None:
    """Layer 1 is frozen: what is generated is of both."""
    keep = ["model.layers.1.*"]
    engine.good("collective_rpc", "reload_weights")
    with trainer(".layers.1.") as address:
        assert '{"keep": ["<pattern>"]}' in engine.init(address, mode=mode)
        assert "keep names 'mtp.*'" in engine.init(address, mode=mode, keep=[*keep, "mtp.*"])
        assert not engine.init(address, mode=mode, keep=keep)
        engine.pull(1)
        found = engine.output()
        if mode == "auto":
            report = engine.check(1)
            assert len(report["kept"]) > 5, report
            assert engine.output() == found
    with trainer() as address:
        assert "keep names what 'model.layers.1" in engine.init(address, mode=mode, keep=keep)
    model = save_full_model(tmp_path / "mixed", "qwen3")
    mixed, old = random_model("qwen3", seed=2), random_model("qwen3")
    mixed.model.layers[1].load_state_dict(old.model.layers[1].state_dict())
    mixed.save_pretrained(model)
    with Judge(tmp_path) as judge:
        expected = judge.wait_ready().output_of(model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
