# SPDX-License-Identifier: Apache-2.0
"""A real SGLang of two ranks that serves something else than what was trained:
fanin.check.served notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fanin.check
import pytest
import torch
from fanin.errors import HostError, RequestError
from fanin.sync import Registry, SyncError
from fanin.torch import WeightServer
from full_models import random_model, save_full_model
from sglang_server import SGLangServer, needs_sglang, plugin_of

pytestmark = needs_sglang


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Whose guards are taken out: the check alone has to notice."""
    scratch = tmp_path_factory.mktemp("served")
    paths = (plugin_of(scratch, "sglang_without_guards"),)
    model = save_full_model(scratch / "model", "qwen2")
    one = SGLangServer(model, scratch, ranks=2, paths=paths)
    try:
        yield one.wait_ready()
    finally:
        one.stop()


def given(
    engine: SGLangServer, server: WeightServer, step: int, verify: bool | str = "auto"
) -> int | None:
    """How many tensors fanin.sync has found to be served as they are trained."""
    how = {"timeout": 120, "init": {"config": "ignore"}, "verify_served": verify}
    registry = Registry(server.addresses, **how)
    registry.add(engine.url)
    (result,) = registry.sync(step).results.values()
    return result.verified


def served(engine: SGLangServer, server: WeightServer) -> list[str]:
    """What differs."""
    try:
        report = fanin.check.served(engine.url, server.addresses, timeout=120)
    except HostError as error:
        return list(error.report.different)  # type: ignore[attr-defined]
    assert report.workers == 2 and not report.unseen
    assert report.tensors == len(server.server.names("full:0"))
    return []


def test_what_is_trained_is_served(engine: SGLangServer) -> None:
    model = random_model("qwen2", seed=4)
    with WeightServer(model, base_port=0) as server:
        server.publish(1)
        with pytest.raises(RequestError, match=r"worker 0 of 2: .*was not pulled"):
            served(engine, server)
        assert given(engine, server, 1) == len(server.server.names("full:0"))
        assert served(engine, server) == []
        # Written behind the back of everybody: SGLang's own route makes rubbish of one norm.
        others = ["embed_tokens", "layers", "lm_head"]
        engine.post("/weights_checker", action="reset_tensors", skip_tensor_list=others)
        assert [one.partition(":")[0] for one in served(engine, server)] == ["model.norm.weight"]
        with server.updating(2, digests=True), torch.no_grad():
            model.model.norm.weight.mul_(2)
        with pytest.raises(RequestError, match="is at step 1"):
            served(engine, server)
        given(engine, server, 2)
        assert served(engine, server) == []
        path = str(save_full_model(Path(engine.log).parent / "other", "qwen2"))
        assert engine.post("/update_weights_from_disk", model_path=path)["success"]
        with pytest.raises(RequestError, match="is at step none"):
            served(engine, server)


@pytest.mark.parametrize(("layers", "lost"), [(3, "are held by nobody"), (1, "by nothing")])
def test_layers_that_one_side_does_not_have(engine: SGLangServer, layers: int, lost: str) -> None:
    with WeightServer(random_model("qwen2", num_hidden_layers=layers), base_port=0) as server:
        server.publish(1)
        given(engine, server, 1, verify=False)
        told = served(engine, server)
        odd = f".layers.{min(layers, 2)}."
        assert told and all(odd in one and lost in one for one in told), told


def test_a_larger_tensor_is_a_cut(engine: SGLangServer) -> None:
    model = random_model("qwen2", intermediate_size=512)
    with WeightServer(model, base_port=0, config={}) as server:
        server.publish(1)
        with pytest.raises(SyncError, match="cut: 32768 of 65536 elements.*stays paused"):
            given(engine, server, 1)
        told = served(engine, server)
        names = {one.partition(":")[0].rpartition("mlp.")[2] for one in told}
        assert names == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
        assert all("cut: 32768 of 65536 elements" in one for one in told)
