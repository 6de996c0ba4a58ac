# SPDX-License-Identifier: Apache-2.0
"""A sync brings the run that the trainer quantizes as callers want it, and quantizes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import fanin
import pytest
from fanin.sync import Registry, Service, SyncClient, SyncServer
from fleet import FakeVLLM, WholeTrainer, registry_of

BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CHANNEL = {"quant_method": "compressed-tensors", "format": "float-quantized"}
LEFT = {"modules_to_not_convert": ["lm_head"]}


def publish(trainer: WholeTrainer, run: str, quantization: Any, *, committed: bool = True) -> None:
    """Another run of the trainer's, of two matrices."""
    publication = f"full:{run}"
    for server in trainer.servers:
        values = memoryview(bytearray(32)).cast("B", (4, 8))
        shape, offset = (8, 8), (4 * server.rank, 0)
        server.put(
            publication,
            [
                fanin.shard_of(f"{name}.weight", values, dtype=dtype, shape=shape, offset=offset)
                for name, dtype in (("model.layers.0.mlp.up_proj", "F8_E4M3"), ("lm_head", "U8"))
            ],
        )
        server.set_metadata(publication, {"quantization": json.dumps({**quantization, **LEFT})})
        if committed:
            server.commit(publication, 1)


@pytest.fixture
def trainer() -> Iterator[WholeTrainer]:
    with WholeTrainer() as one:
        one.commit(1)
        publish(one, "0-fp8", BLOCK)
        publish(one, "0-rows", CHANNEL)
        publish(one, "00", {"quant_method": "fp8"})  # of another model
        yield one


@pytest.fixture
def registry(trainer: WholeTrainer, engine: FakeVLLM) -> Registry:
    return registry_of(engine, trainer=trainer.info, verify_served=False)


def run_of(engine: FakeVLLM) -> str:
    assert engine.initialised is not None
    return str(engine.initialised["run"])


@pytest.mark.parametrize(
    ("said", "skip", "run"),
    [
        (None, None, "0"),
        ("bf16", None, "0"),
        ({"quant_method": "BF16"}, None, "0"),
        ("fp8", None, "0-fp8"),
        ("fp8", ["lm_head"], "0-fp8"),
        ({"quantization": "fp8", "skip_modules": ["*_head"]}, None, "0-fp8"),
        ({"quantization": None}, None, "0"),
        ({**BLOCK, "fmt": "e4m3", **LEFT, "scale_fmt": None}, None, "0-fp8"),
        ({"quant_method": "compressed_tensors"}, None, "0-rows"),
    ],
)
def test_the_run_that_is_published_so(
    registry: Registry, engine: FakeVLLM, said: Any, skip: Any, run: str
) -> None:
    """It stays the one of later syncs; one sync alone may bring another."""
    chosen = registry.set_quantization(said, skip)
    assert chosen.name == run
    for _ in range(2):
        result = registry.sync(1)
        assert run_of(engine) == result.run == run
    other, its_run = ("fp8", "0-fp8") if run != "0-fp8" else ("bf16", "0")
    assert registry.sync(1, quantization=other).run == run_of(engine) == its_run
    assert registry.sync(1).run == run_of(engine) == run
    registry.set_quantization(None)
    assert registry.sync(1).run == "0"


@pytest.mark.parametrize(
    ("said", "skip", "says"),
    [
        ("int4", None, ("as {", "full:0 is not quantized", "full:0-fp8 is {", "ask for what is")),
        ({**BLOCK, "weight_block_size": [64, 64]}, None, ("[64, 64]", "[128, 128]")),
        ({**BLOCK, "scale_fmt": "ue8m0"}, None, ("ue8m0", 'add_run("0-fp8-2", model, quantize={')),
        ({**BLOCK, "activation_scheme": "static"}, None, ("static", "dynamic")),
        (
            *("fp8", ["layers.0"]),
            ("full:0-fp8 quantizes model.layers.0.mlp.up_proj", "skip_modules=['layers.0']"),
        ),
        ({"quantization": "fp8", "skip_modules": ["*.up_proj"]}, None, ("up_proj",)),
        ({"quantization": "fp8", "skip": []}, None, ("unknown",)),
        ("fp8", [1], ("no list of texts",)),
    ],
)
def test_none_is_published_so(
    registry: Registry, engine: FakeVLLM, said: Any, skip: Any, says: tuple[str, ...]
) -> None:
    """The error has what is published, and the line that publishes what is wanted."""
    service = Service(registry)
    for route in ("set_sync_quantization", "sync_inference_weights"):
        body = json.dumps({"quantization": said, "skip_modules": skip}).encode()
        status, reply = service.answer("POST", f"/{route}", body)
        assert status == 400, reply
        assert not [one for one in says if one not in reply["detail"]], reply["detail"]
    assert not engine.paths
    assert registry.sync(1).run == "0"


def test_the_name_that_is_proposed_is_free(trainer: WholeTrainer, engine: FakeVLLM) -> None:
    """Also one of another model is taken, as that of a draft."""
    publish(trainer, "0-fp8-2", CHANNEL)
    registry = registry_of(engine, trainer=trainer.info, init={"draft_run": "0-fp8"})
    with pytest.raises(fanin.RequestError) as caught:
        registry.set_quantization({**BLOCK, "scale_fmt": "ue8m0"})
    assert 'add_run("0-fp8-3", ' in caught.value.remedy


def test_several_are_published_so(registry: Registry, trainer: WholeTrainer) -> None:
    publish(trainer, "0-small", {**BLOCK, "weight_block_size": [64, 64]})
    with pytest.raises(fanin.RequestError, match="full:0-fp8, full:0-small") as caught:
        registry.set_quantization("fp8")
    assert "weight_block_size" in caught.value.remedy
    small = registry.set_quantization({"quant_method": "fp8", "weight_block_size": [64, 64]})
    assert small.name == "0-small"


def test_a_run_that_has_no_step_yet_is_waited_for(
    trainer: WholeTrainer, registry: Registry
) -> None:
    powers = {**BLOCK, "scale_fmt": "ue8m0"}
    publish(trainer, "0-powers", powers, committed=False)
    assert registry.set_quantization(BLOCK).name == "0-fp8"  # nothing else is waited for
    with pytest.raises(fanin.FaninError, match="full:0-powers has no step yet"):
        registry.set_quantization(powers, timeout=1)
    for server in trainer.servers:
        server.commit("full:0-powers", 1)
    assert registry.set_quantization(powers).name == "0-powers"


def test_an_engine_that_was_started_again_gets_its_run(
    registry: Registry, engine: FakeVLLM, stack: ExitStack
) -> None:
    """Also if other engines have another one."""
    other = stack.enter_context(FakeVLLM())
    registry.add(other.url, group="bf16")
    registry.set_quantization("fp8")
    registry.sync(1, "default")
    registry.sync(1, "bf16", quantization="bf16")
    for one in (engine, other):
        one.restart()
    registry._restarts.look(registry)
    assert run_of(engine) == "0-fp8" and run_of(other) == "0"
    assert engine.model == other.model == "weights of step 1"
    assert registry.healthy() == {engine.url, other.url}


def test_what_is_served_is_compared_with_that_run(trainer: WholeTrainer, engine: FakeVLLM) -> None:
    """Again when the weights were given up, as by a sleep. Digests are no runs of their own."""
    for server in trainer.servers:
        for publication in ("full:0", "full:0-fp8"):
            trainer.digest(1, server.rank, publication)
    registry = registry_of(engine, trainer=trainer.info)
    registry.set_quantization("fp8")
    registry.sync(1)
    engine.basis = "slept"
    registry.sync(1, again=True)
    assert engine.compared_runs == ["full:0-fp8"] * 2
    registry.sync(1, quantization="bf16")
    assert engine.compared_runs[2:] == ["full:0"]


def test_over_http(registry: Registry, engine: FakeVLLM) -> None:
    with SyncServer(Service(registry), port=0) as server:
        client = SyncClient(server.url)
        told = client.set_quantization("fp8", ["lm_head"])
        assert told["run"] == "0-fp8" and told["quantization"] == {**BLOCK, **LEFT}
        assert "quantizes nothing" in told["notices"][0]
        assert client.sync_weights(1)["run"] == run_of(engine) == "0-fp8"
        reply = client.sync_weights(1, quantization="bf16")
        assert reply["run"] == run_of(engine) == "0"
        assert "quantizes nothing" in reply["notices"][0]
        with pytest.raises(fanin.RequestError, match="full:0-rows"):
            client.set_quantization({"quant_method": "int8"})
