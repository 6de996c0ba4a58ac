# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server that loads adapters by SGLangEngine, and computes with them as PEFT does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fanin.errors import RequestError
from fanin.sglang import SGLangEngine
from fanin.torch import AdapterServer
from full_models import save_full_model
from models import ATTENTION, MLP
from peft import LoraConfig, get_peft_model
from sglang_server import SGLangServer, generation, needs_sglang
from transformers import AutoModelForCausalLM
from vllm_server import Refused

pytestmark = needs_sglang

PROMPT = [5, 9, 13, 17, 21]
COUNT = 8
NEAR = 0.2  # SGLang computes in another order and type than the model that is trained


class Place:
    """A trainer of two runs, an engine, and where its adapters land."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.path = scratch, save_full_model(scratch / "model", "qwen2")
        plugin = scratch / "fanin_tests-0.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: fanin-tests\nVersion: 0\n")
        entry = "[sglang.srt.plugins]\nfanin_tests = sglang_unpinned:register\n"
        (plugin / "entry_points.txt").write_text(entry)
        lora = ["--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8"]
        lora += ["--lora-target-modules", *ATTENTION, *MLP]
        self.engine = SGLangServer(self.path, scratch, *lora, paths=(str(scratch),))

    def model(self, *adapters: str, **more: Any) -> Any:
        torch.manual_seed(7)
        base = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        config = LoraConfig(
            **{"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP]} | more,
            base_model_name_or_path=str(self.path),
        )
        model = get_peft_model(base, config, adapter_name=adapters[0])
        for one in adapters[1:]:
            model.add_adapter(one, config)
        change(model)
        return model

    def generate(self, adapter: str | None = None, count: int = COUNT) -> tuple[list[int], Any]:
        body = generation(PROMPT, count) | ({"lora_path": adapter} if adapter else {})
        answer = self.engine.ask("POST", "/generate", body, 120.0)
        told = [one[0] for one in answer["meta_info"]["output_token_logprobs"]]
        return answer["output_ids"], torch.tensor(told)

    def loader(self, server: AdapterServer) -> SGLangEngine:
        cache = self.scratch / "cache"
        return SGLangEngine(self.engine.url, trainer=server.addresses, cache_dir=cache, timeout=120)


def change(model: Any) -> None:
    """A step: every LoRA parameter gets other values."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(0, 0.2)


def computed(model: Any, adapter: str, tokens: list[int]) -> Any:
    """PEFT's log probabilities of those tokens after the prompt."""
    model.set_adapter(adapter)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0]
    rows = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    one = Place(tmp_path_factory.mktemp("sglang-lora"))
    try:
        one.engine.wait_ready()
        yield one
        print(one.engine.log_end())
    finally:
        one.engine.stop()


def test_each_step_of_two_runs_computes_what_peft_does(place: Place) -> None:
    model = place.model("math", "code")
    runs = {"0": "math", "1": "code"}
    with AdapterServer(model, run="0", adapter="math", base_port=0) as server:
        server.add_run("1", adapter="code")
        server.publish({"0": 1, "1": 1})
        loader = place.loader(server)
        for step in (1, 2, 3):
            if step > 1:
                with server.updating({"0": step, "1": step}):
                    change(model)
            for run, adapter in runs.items():
                tokens, told = place.generate(loader.load(run, step).name)
                other = runs["1" if run == "0" else "0"]
                assert torch.allclose(computed(model, adapter, tokens), told, atol=NEAR)
                assert not torch.allclose(computed(model, other, tokens), told, atol=NEAR)
        old = next(one for one in loader.loaded if one.name == "policy-run0-step1")
        before = loader.loaded
        gone = loader.retire("0", keep=1)
        assert gone == ["policy-run0-step1", "policy-run0-step2"] and not old.directory.exists()
        with pytest.raises(Refused):
            place.generate(gone[0])
        left = [one for one in before if one.name not in gone]
        assert loader.loaded == left and all(one.directory.is_dir() for one in left)
        place.generate("policy-run0-step3")
        for one in left:
            loader.unload(one.name)


def test_unload_waits_for_requests_under_way(place: Place) -> None:
    model = place.model("math")
    with AdapterServer(model, base_port=0) as server, ThreadPoolExecutor(1) as pool:
        server.publish(1)
        loader = place.loader(server)
        adapter = loader.load(0, 1)
        with place.engine.streaming(PROMPT, 200, lora_path=adapter.name) as events:
            next(events)
            unloaded = pool.submit(loader.unload, adapter.name)
            *_, last = events
            assert last["meta_info"]["completion_tokens"] == 200
        unloaded.result(timeout=120)
        assert not adapter.directory.exists() and loader.loaded == []


def test_an_adapter_that_does_not_fit_leaves_nothing(place: Place) -> None:
    for wrong, why in (({"use_rslora": True}, "use_rslora"), ({"r": 16}, "HTTP 400")):
        with AdapterServer(place.model("math", **wrong), base_port=0) as server:
            server.publish(1)
            loader = place.loader(server)
            with pytest.raises(RequestError, match=why):
                loader.load(0, 1)
            assert loader.loaded == []
            assert not list((place.scratch / "cache").rglob("adapter_model.safetensors"))
