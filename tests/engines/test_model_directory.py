# SPDX-License-Identifier: Apache-2.0
"""A model's directory that was pulled, read by Transformers, beside one that it wrote itself."""

from __future__ import annotations

import json

import fanin
import pytest
import torch
from fanin.torch import WeightServer
from full_models import random_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

MOST = 200_000  # bytes of tensors in a file
INDEX = "model.safetensors.index.json"


def contents(directory):
    """(tensors by name, the index's metadata), found as Transformers finds them."""
    index, metadata = directory / INDEX, None
    if index.exists():
        said = json.loads(index.read_text())
        files, metadata = said["weight_map"], said["metadata"]
    else:
        with safe_open(directory / "model.safetensors", "pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    found = {}
    for name, file in files.items():
        with safe_open(directory / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found, metadata


@pytest.mark.parametrize("most", [MOST, None], ids=["files", "file"])
@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen2", True), ("qwen3", False), ("qwen3-moe", False)]
)
def test_transformers_reads_what_was_pulled(kind, tied, most, tmp_path):
    model = random_model(kind, tied)
    with WeightServer(model, base_port=0, use_ucx=False) as server:
        server.publish(7)
        with fanin.Client(server.addresses) as client:
            result = client.pull_model(0, tmp_path / "pulled", step=7, max_file_bytes=most)
    assert result.step == 7
    model.save_pretrained(tmp_path / "saved", max_shard_size=most or "5GB")

    pulled, said = contents(tmp_path / "pulled")
    saved, wanted = contents(tmp_path / "saved")
    assert sorted(pulled) == sorted(saved)
    for name, value in saved.items():
        assert pulled[name].dtype == value.dtype and torch.equal(pulled[name], value), name
    assert (said is None) == (most is None) == (wanted is None)
    if said is not None:
        assert said["total_size"] == wanted["total_size"]
        files = sorted(path.name for path in (tmp_path / "pulled").glob("model-*"))
        assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"

    read = AutoModelForCausalLM.from_pretrained(tmp_path / "pulled", dtype="auto")
    state = model.state_dict()
    assert sorted(read.state_dict()) == sorted(state)
    for name, value in read.state_dict().items():
        assert torch.equal(value, state[name]), name
    config = AutoConfig.from_pretrained(tmp_path / "pulled")
    assert config.to_diff_dict() == AutoConfig.from_pretrained(tmp_path / "saved").to_diff_dict()
