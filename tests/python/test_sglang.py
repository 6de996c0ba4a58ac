# SPDX-License-Identifier: Apache-2.0
"""The SGLang helper: refusals before bytes move, and directories that outlive their adapter."""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin
import pytest
from fanin.errors import (
    ConnectionFailedError,
    NotFoundError,
    RequestError,
    SupersededError,
    UnreachableError,
)
from fanin.info import write_info
from fanin.sglang import SGLangEngine
from http_engine import Answer, Engine, Request, Trainer

PEFT = {
    "peft_type": "LORA",
    "base_model_name_or_path": "base",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
}


class SGLang:
    """What SGLang's routes do: reads the directory at load, knows adapters by name."""

    def __init__(self) -> None:
        self.adapters: dict[str, float] = {}
        self.seen_at_unload: list[bool] = []
        self.paths: dict[str, Path] = {}

    def __call__(self, request: Request) -> Answer | None:
        name = request.body["lora_name"]
        if request.path == "/load_lora_adapter":
            if name in self.adapters:
                return 400, {"success": False, "error_message": f"{name} is already loaded"}
            path = Path(request.body["lora_path"])
            content = (path / "adapter_model.safetensors").read_bytes()
            (length,) = struct.unpack("<Q", content[:8])
            assert "lora_A" in content[8 : 8 + length].decode()
            self.adapters[name] = struct.unpack("<f", content[8 + length : 12 + length])[0]
            self.paths[name] = path
            return 200, {"success": True, "loaded_adapters": list(self.adapters)}
        assert request.path == "/unload_lora_adapter"
        if name not in self.adapters:
            return 400, {"success": False, "error_message": f"LoRA adapters not loaded: {name}"}
        self.seen_at_unload.append(self.paths[name].is_dir())
        del self.adapters[name]
        return 200, {"success": True}


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer(peft_config=json.dumps(PEFT)) as result:
        result.commit(3)
        yield result


def test_load_and_unload(tmp_path: Path, trainer: Trainer) -> None:
    sglang = SGLang()
    with Engine(sglang) as http:
        write_info(tmp_path / "weights", trainer.info)
        engine = SGLangEngine(
            http.url + "/v1",
            trainer=tmp_path / "weights",
            cache_dir=tmp_path / "cache",
            api_key="k\n",  # as a file has it
            server_name="job",
        )
        adapter = engine.load(0, 3, pinned=True)
        assert adapter.name == "policy-run0-step3"
        world = trainer.world.hex()
        assert adapter.directory == tmp_path / "cache" / world / "0" / "policy-step3"
        assert adapter.pull.step == 3 and adapter.load_seconds > 0
        assert http.requests[0].headers["Authorization"] == "Bearer k"
        assert http.bodies == [
            {"lora_name": adapter.name, "lora_path": str(adapter.directory), "pinned": True}
        ]
        assert sglang.adapters == {adapter.name: 3.0}
        # Asked for again, it is there.
        assert engine.load("lora:0", 3) == adapter and len(http.requests) == 1

        engine.unload(adapter.name)
        assert sglang.seen_at_unload == [True]
        assert not adapter.directory.exists() and engine.loaded == []
        with pytest.raises(NotFoundError, match="was not loaded here"):
            engine.unload(adapter.name)

        # The same step again goes to another directory.
        again = engine.load(0, 3)
        assert again.directory == adapter.directory.with_name("policy-step3-2")
        engine.unload(again.name)


@pytest.mark.parametrize("told", ["file", "address"])
def test_a_trainer_that_was_started_again(tmp_path: Path, told: str) -> None:
    """The same step of another launch is another adapter, also if its world id is the same."""
    sglang, addresses = SGLang(), list[str]()
    where: Any = tmp_path / "weights" if told == "file" else addresses
    with Engine(sglang) as http:
        engine = SGLangEngine(http.url, trainer=where, cache_dir=tmp_path / "cache")
        for world, value in ((b"a" * 16, 3), (b"b" * 16, 4), (b"b" * 16, 6)):
            with Trainer(world=world, peft_config=json.dumps(PEFT)) as trainer:
                write_info(tmp_path / "weights", trainer.info)
                addresses[:] = trainer.addresses
                trainer.commit(5, value=value)
                adapter = engine.load(0, 5)
                assert engine.load(0, 5) is adapter
                assert adapter.pull.world_id == world.hex()
                assert sglang.adapters == {adapter.name: float(value)}
                assert engine.loaded == [adapter]
        assert sglang.seen_at_unload == [True, True]
        # Nobody there: the last ones of a training that is over stay.
        assert engine.load(0, 5) is adapter


def test_an_adapter_that_is_too_large(tmp_path: Path, trainer: Trainer) -> None:
    with Engine(SGLang()) as http:
        engine = SGLangEngine(
            http.url, trainer=trainer.info, cache_dir=tmp_path / "cache", max_bytes=100
        )
        with pytest.raises(RequestError, match="max_bytes.*--shm-size.*cache_dir") as caught:
            engine.load(0, 3)
        assert caught.value.name == "FANIN_ERR_LIMIT" and http.requests == []
        assert not list((tmp_path / "cache").rglob("*step3*"))


def test_a_configuration_that_is_trusted(tmp_path: Path) -> None:
    told = json.dumps({**PEFT, "custom_code": "x"})
    with Trainer(peft_config=told) as trainer, Engine(SGLang()) as http:
        trainer.commit(3)
        for trust in (False, True):
            engine = SGLangEngine(
                http.url, trainer=trainer.info, cache_dir=tmp_path / str(trust), trust_config=trust
            )
            adapter = engine.load(0, 3)
            config = json.loads((adapter.directory / "adapter_config.json").read_text())
            assert ("custom_code" in config) is trust
            engine.unload(adapter.name)


def test_steps_and_retirement(tmp_path: Path, trainer: Trainer) -> None:
    sglang = SGLang()
    with Engine(sglang) as http:
        engine = SGLangEngine(
            http.url, trainer=trainer.addresses, cache_dir=tmp_path, prefix="p", path="stream"
        )
        for step in (3, 4, 5):
            if step > 3:
                trainer.commit(step)
            engine.load(0, step)
        assert sglang.adapters == {"p-run0-step3": 3, "p-run0-step4": 4, "p-run0-step5": 5}
        with pytest.raises(SupersededError):
            engine.load(0, 2)
        with pytest.raises(NotFoundError):
            engine.load(7, 2)
        assert engine.retire(0, 1) == ["p-run0-step3", "p-run0-step4"]
        assert engine.retire(1, 0) == []
        assert list(sglang.adapters) == ["p-run0-step5"]
        (left,) = (tmp_path / trainer.world.hex() / "0").glob("[!.]*")
        assert left.name == "p-step5"
        assert {request.path for request in http.requests} == {
            "/load_lora_adapter",
            "/unload_lora_adapter",
        }


REFUSED = [
    ({"use_rslora": True}, "lora_alpha / sqrt"),
    ({"use_dora": True}, "DoRA"),
    ({"target_modules": ".*q_proj"}, "takes no pattern"),
    ({"target_modules": None}, "which modules"),
    ({"target_modules": []}, "which modules"),
    ({"bias": "all"}, "biases"),
    ({"lora_bias": True}, "biases"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save|whole modules"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"rank_pattern": {"k_proj": 4}}, "scales all layers alike, and rank_pattern"),
    ({"alpha_pattern": {"q_proj": 8}}, "scales all layers alike, and alpha_pattern"),
    ({"peft_type": "LOHA"}, "not LOHA"),
    ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
    ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
    ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"use_qalora": True}, "QALoRA"),
    ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA"),
    ({"arrow_config": {"top_k": 2}}, "Arrow"),
    ({"trainable_token_indices": [1, 5]}, "trainable_token_indices"),
    ({"ensure_weight_tying": True}, "ensure_weight_tying"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_refused_before_bytes_move(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = json.dumps({**PEFT, **changes})
    with Trainer(peft_config=config) as trainer, Engine([(200, {})]) as http:
        trainer.commit(1)
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        with pytest.raises(RequestError, match=words) as caught:
            engine.load(0, 1)
        assert caught.value.key and caught.value.remedy
        assert not http.requests
        assert all(server.stats()["begins_granted"] == 0 for server in trainer.servers)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["all-linear", "all", ["q_proj"]])
def test_targets_that_sglang_takes(tmp_path: Path, target: Any) -> None:
    config = {**PEFT, "target_modules": target, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {}}
    with Trainer(peft_config=json.dumps(config)) as trainer, Engine(SGLang()) as http:
        trainer.commit(1)
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        engine.unload(engine.load(0, 1).name)


def test_a_configuration_that_leaves_the_targets_open(tmp_path: Path) -> None:
    config = {key: value for key, value in PEFT.items() if key != "target_modules"}
    with Trainer(peft_config=json.dumps(config)) as trainer, Engine(SGLang()) as http:
        trainer.commit(1)
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        with pytest.raises(fanin.FaninError, match="target_modules|which modules"):
            engine.load(0, 1)
        assert not http.requests and not list(tmp_path.iterdir())


def test_a_configuration_by_pairs(tmp_path: Path) -> None:
    """Without the trainer's file the targets are derived from the tensors."""
    with Trainer() as trainer, Engine(SGLang()) as http:
        trainer.commit(1)
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        config = json.loads((engine.load(0, 1).directory / "adapter_config.json").read_text())
        assert config["target_modules"] == ["q_proj"]
    with Trainer(use_rslora="true") as trainer, Engine(SGLang()) as http:
        trainer.commit(1)
        with pytest.raises(RequestError, match="lora_alpha / sqrt"):
            SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path).load(0, 1)
        assert not http.requests


BY_TENSORS = [
    ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
    ("model.layers.0.self_attn.q_proj.lora_diag", r"no LoRA layer .*q_proj\.lora_diag"),
    ("model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_tokens_delta"),
]


@pytest.mark.parametrize(("name", "words"), BY_TENSORS)
def test_refused_by_the_tensors(tmp_path: Path, name: str, words: str) -> None:
    import numpy as np

    with Trainer() as trainer, Engine(SGLang()) as http:
        for server in trainer.servers:
            shard = fanin.shard_of(name, np.ones(8, np.float32))
            server.put(trainer.publication, [shard])
        trainer.commit(1)
        with pytest.raises(RequestError, match=words):
            SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path).load(0, 1)


def test_the_engine_refuses(tmp_path: Path, trainer: Trainer) -> None:
    answer = 400, {"success": False, "error_message": "rank 8 is above --max-lora-rank 4"}
    with Engine([answer, (200, {"success": False, "error_message": "no"}), (404, b"x")]) as http:
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        with pytest.raises(RequestError, match="HTTP 400: rank 8 is above") as caught:
            engine.load(0, 3)
        assert "--max-lora-rank" in caught.value.remedy and caught.value.address == http.url
        with pytest.raises(RequestError, match="HTTP 200: no"):
            engine.load(0, 3)
        with pytest.raises(RequestError) as caught:
            engine.load(0, 3)
        assert "check the URL" in caught.value.remedy
        assert not list(tmp_path.iterdir()) and engine.loaded == []


@pytest.mark.parametrize("failure", [None, (503, {"error": {"message": "starting"}})])
def test_an_answer_that_is_lost(tmp_path: Path, trainer: Trainer, failure: Any) -> None:
    """The engine may have loaded it: the directory stays until it is known to have forgotten it."""
    sglang = SGLang()
    calls = []

    def flaky(request: Request) -> Answer | None:
        calls.append(request.path)
        answer = sglang(request)
        return failure if len(calls) == 1 else answer

    with Engine(flaky) as http:
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        with pytest.raises((UnreachableError, ConnectionFailedError)):
            engine.load(0, 3)
        first = sglang.paths["policy-run0-step3"]
        assert first.is_dir() and engine.loaded == []
        adapter = engine.load(0, 3)
        assert calls == ["/load_lora_adapter", "/unload_lora_adapter", "/load_lora_adapter"]
        assert sglang.seen_at_unload == [True]
        assert not first.exists() and adapter.directory.is_dir()


def test_doubt_ends_by_unload(tmp_path: Path, trainer: Trainer) -> None:
    with Engine([None, (200, {"success": True})]) as http:
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        with pytest.raises(UnreachableError):
            engine.load(0, 3)
        assert list(tmp_path.iterdir())
        engine.unload("policy-run0-step3")
        assert not list(tmp_path.iterdir())


def test_unload_that_fails_keeps_the_directory(tmp_path: Path, trainer: Trainer) -> None:
    sglang = SGLang()
    stuck = threading.Event()

    def answer(request: Request) -> Answer | None:
        if request.path == "/unload_lora_adapter" and not stuck.is_set():
            return 400, {"success": False, "error_message": "busy"}
        return sglang(request)

    with Engine(answer) as http:
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        adapter = engine.load(0, 3)
        with pytest.raises(RequestError, match="did not unload"):
            engine.unload(adapter.name)
        assert adapter.directory.is_dir() and engine.loaded == [adapter]
        # An engine that was started again has forgotten its adapters.
        sglang.adapters.clear()
        stuck.set()
        engine.unload(adapter.name)
        assert not adapter.directory.exists()


def test_what_cannot_be_deleted_fails_nothing_and_goes_with_the_next(
    tmp_path: Path,
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def none_left(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with Engine(SGLang()) as http:
        engine = SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
        first = engine.load(0, 3)
        with monkeypatch.context() as patch:
            patch.setattr("fanin.engine.directories.shutil.rmtree", none_left)
            engine.unload(first.name)
        assert engine.loaded == [] and list(tmp_path.iterdir())
        assert f"{first.directory} cannot be deleted" in caplog.text
        trainer.commit(4)
        engine.unload(engine.load(0, 4).name)
        assert not list(tmp_path.iterdir())


def test_one_engine_does_not_delete_what_another_uses(tmp_path: Path, trainer: Trainer) -> None:
    with Engine(SGLang()) as one, Engine(SGLang()) as two:
        first, second = (
            SGLangEngine(http.url, trainer=trainer.addresses, cache_dir=tmp_path)
            for http in (one, two)
        )
        a, b = first.load(0, 3), second.load(0, 3)
        assert a.directory == b.directory and b.pull.reused
        first.unload(a.name)
        assert b.directory.is_dir()
        second.unload(b.name)
        assert not b.directory.exists()


def test_arguments(tmp_path: Path) -> None:
    for bad in (
        {"url": "host:1"},
        {"prefix": "a b"},
        {"cache_dir": "relative"},
        {"path": "tcp"},
        {"api_key": "k\0"},
    ):
        with pytest.raises(RequestError):
            SGLangEngine(**{"url": "http://a:1", "trainer": "a:1", **bad})  # type: ignore[arg-type]
    engine = SGLangEngine("http://127.0.0.1:1", trainer=tmp_path / "x", cache_dir=tmp_path)
    with pytest.raises(NotFoundError):
        engine.load(0, 1)
    with pytest.raises(RequestError):
        engine.load("a/b", 1)
