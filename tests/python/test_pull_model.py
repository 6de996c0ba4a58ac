# SPDX-License-Identifier: Apache-2.0
"""A whole model pulled into a directory: files, index and configuration as Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fanin
import local_world
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

RUN = "full:0"
CONFIG = {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-06}
WORLD = 3


def weights(step: int) -> dict[str, np.ndarray]:
    """Twelve layers of two matrices, a norm, an embedding."""
    rng = np.random.default_rng(step)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    made = {"model.embed_tokens.weight": matrix(50, 16), "model.norm.weight": matrix(16)}
    for layer in range(12):
        made[f"model.layers.{layer}.self_attn.q_proj.weight"] = matrix(16, 16)
        made[f"model.layers.{layer}.mlp.down_proj.weight"] = matrix(16, 40)
    return made


def publish(ranks: list[fanin.Server], step: int, metadata: dict[str, str]) -> None:
    """Rows of every tensor on every rank."""
    for server in ranks:
        shards = []
        for name, value in weights(step).items():
            rows = np.array_split(np.arange(len(value)), WORLD)[server.rank]
            part = np.ascontiguousarray(value[rows])
            offset = (int(rows[0]) if len(rows) else 0,) + (0,) * (value.ndim - 1)
            shards.append(fanin.shard_of(name, part, shape=value.shape, offset=offset))
        if RUN in server.publications():
            server.begin_update(RUN)
        server.put(RUN, shards, replace=True)
        server.set_metadata(RUN, metadata)
        server.commit(RUN, step)


@pytest.fixture
def ranks() -> Iterator[list[fanin.Server]]:
    with local_world.servers() as made:
        publish(made, 1, {"config": json.dumps(CONFIG), "format": "pt"})
        yield made


@pytest.fixture
def client(ranks: list[fanin.Server]) -> Iterator[fanin.Client]:
    with local_world.client_of(ranks) as made:
        yield made


def assert_model(directory: Path, step: int) -> None:
    """Read as Transformers reads it, and every file the bytes that safetensors writes."""
    expected = weights(step)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in expected.values())
    assert sorted(index["weight_map"]) == sorted(expected)
    files = sorted(set(index["weight_map"].values()))
    there = sorted(path.name for path in directory.iterdir())
    assert there == sorted([*files, "config.json", "fanin.json", "model.safetensors.index.json"])
    for number, name in enumerate(files, 1):
        assert name == f"model-{number:05}-of-{len(files):05}.safetensors"
        here = {key: expected[key] for key, file in index["weight_map"].items() if file == name}
        assert (directory / name).read_bytes() == save(here, metadata={"format": "pt"})
    for key, name in index["weight_map"].items():
        with safe_open(directory / name, "numpy") as file:
            np.testing.assert_array_equal(file.get_tensor(key), expected[key])


def test_a_model_of_several_files(client: fanin.Client, tmp_path: Path) -> None:
    result = client.pull_model(RUN, tmp_path / "m", max_file_bytes=8000)
    assert (result.step, result.reused) == (1, False)
    assert_model(tmp_path / "m", 1)
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == CONFIG
    said = json.loads((tmp_path / "m" / "fanin.json").read_text())
    assert (said["publication"], said["step"]) == (RUN, 1)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    order = [index["weight_map"][f"model.layers.{i}.mlp.down_proj.weight"] for i in range(12)]
    assert order == sorted(order) and len(set(order)) > 3
    assert client.pull_model(0, tmp_path / "m", max_file_bytes=8000).reused
    with pytest.raises(fanin.RequestError, match="max_file_bytes") as caught:
        client.pull_model(0, tmp_path / "m", max_file_bytes=20000)
    assert caught.value.name == "FANIN_ERR_EXISTS"


def test_a_model_that_fits_into_one_file(
    ranks: list[fanin.Server], client: fanin.Client, tmp_path: Path
) -> None:
    client.pull_model("0", tmp_path / "m")
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert names == ["config.json", "fanin.json", "model.safetensors"]
    for name, value in load_file(tmp_path / "m" / "model.safetensors").items():
        np.testing.assert_array_equal(value, weights(1)[name])
    publish(ranks, 2, {})
    client.pull_model(RUN, tmp_path / "without", step=2)
    names = sorted(path.name for path in (tmp_path / "without").iterdir())
    assert names == ["fanin.json", "model.safetensors"]


def test_it_is_rounded_and_verified(client: fanin.Client, tmp_path: Path) -> None:
    result = client.pull_model(RUN, tmp_path / "m", dtype="BF16", verify=True)
    assert result.verified
    with safe_open(tmp_path / "m" / "model.safetensors", "numpy") as file:
        assert file.get_slice("model.norm.weight").get_dtype() == "BF16"
    assert json.loads((tmp_path / "m" / "fanin.json").read_text())["dtype"] == "BF16"


def test_what_the_trainer_keeps_in_f32_is_not_rounded(tmp_path: Path) -> None:
    """Names that nobody publishes, and long ones, are no one's."""
    kept = ["model.norm.weight", "model.layers.3.mlp.down_proj.weight"]
    names = "\n".join([*kept, "nobody", "x" * 4000, ""])
    with local_world.servers() as made:
        publish(made, 1, {"keep_f32": names})
        with fanin.Client([f"127.0.0.1:{one.port}" for one in made]) as client:
            client.pull_model(RUN, tmp_path / "m", dtype="BF16", verify=True)
    wanted = weights(1)
    with safe_open(tmp_path / "m" / "model.safetensors", "np") as file:
        for name in wanted:
            assert file.get_slice(name).get_dtype() == ("F32" if name in kept else "BF16")
        assert all(np.array_equal(file.get_tensor(name), wanted[name]) for name in kept)


def test_code_of_the_trainer_is_left_out(
    ranks: list[fanin.Server], client: fanin.Client, tmp_path: Path
) -> None:
    code = {**CONFIG, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    publish(ranks, 2, {"config": json.dumps(code)})
    for trusted, expected in ((False, CONFIG), (True, code)):
        client.pull_model(RUN, tmp_path / str(trusted), trust_config=trusted)
        assert json.loads((tmp_path / str(trusted) / "config.json").read_text()) == expected
    publish(ranks, 3, {"config": "no object"})
    with pytest.raises(fanin.PeerError, match="no JSON object") as caught:
        client.pull_model(RUN, tmp_path / "wrong")
    assert caught.value.name == "FANIN_ERR_MISMATCH" and not (tmp_path / "wrong").exists()


def test_what_is_asked_for_wrongly(client: fanin.Client, tmp_path: Path) -> None:
    with pytest.raises(fanin.RequestError, match="pull_adapter"):
        client.pull_model("lora:0", tmp_path / "m")
    with pytest.raises(fanin.RequestError, match="pull_model"):
        client.pull_adapter(RUN, tmp_path / "m")
    with pytest.raises(fanin.NotFoundError):
        client.pull_model("full:other", tmp_path / "m")
    for wrong in (0, -1, 1 << 64):
        with pytest.raises(fanin.RequestError, match="max_file_bytes"):
            client.pull_model(RUN, tmp_path / "m", max_file_bytes=wrong)
    with pytest.raises(fanin.ConnectionFailedError, match="max_bytes"):
        client.pull_model(RUN, tmp_path / "m", max_bytes=100)
    assert list(tmp_path.iterdir()) == []
