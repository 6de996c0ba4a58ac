# SPDX-License-Identifier: Apache-2.0
"""The plugin against vLLM's own classes, without an engine: what they want of it, they get."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from fake_trainer import FakeTrainer
from fanin import errors
from fanin.config import inference_config
from fanin.engine import checks
from fanin.engine.clients import ClientPool
from fanin.engine.faults import to_wire
from fanin.engine.metrics import Metrics
from fanin.vllm import endpoint_plugin, patches, register, worker
from fanin.vllm import routes as routes_module
from fanin.vllm import state as state_module
from fanin.vllm.state import State
from vllm.config.lora import LoRAConfig
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin as PluginProtocol
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult
from vllm.v1.worker.worker_base import WorkerBase


class FakeClient:
    """An EngineClient that notes what the API server sends to the engine."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(model="org/base", max_model_len=64)
        self.renderer = self.input_processor = None
        self.vllm_config = SimpleNamespace(
            lora_config=LoRAConfig(max_lora_rank=16, max_loras=1, max_cpu_loras=4),
            parallel_config=SimpleNamespace(),
        )
        self.output_processor = SimpleNamespace(request_states={})
        self.loaded: dict[int, str] = {}

    async def add_lora(self, request: LoRARequest) -> bool:
        assert Path(request.lora_path).is_dir()
        await asyncio.sleep(0)
        self.loaded[request.lora_int_id] = request.lora_path
        return True

    async def remove_lora(self, lora_int_id: int) -> bool:
        return self.loaded.pop(lora_int_id, None) is not None

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(SimpleNamespace(get_model=lambda: None), *args)]


class Bench:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry()
        self.trainer = FakeTrainer()
        environment = {
            "FANIN_TRAINER": "127.0.0.1:6000",
            "FANIN_ALLOW_TRAINERS": "h",
            "NIXL_LORA_CACHE_DIR": str(root / "c"),
        }
        self.state = State(
            inference_config(environment),
            pool=ClientPool(self.trainer.client),
            counters=Metrics(self.registry),
        )
        monkeypatch.setattr(state_module, "state", lambda: self.state)
        monkeypatch.setattr(routes_module, "state", lambda: self.state)
        register()
        self.client = FakeClient()
        self.models = OpenAIServingModels(self.client, [BaseModelPath("base", "org/base")])  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    before = dict(LoRAResolverRegistry.resolvers)
    LoRAResolverRegistry.resolvers.clear()
    try:
        yield Bench(tmp_path, monkeypatch)
    finally:
        LoRAResolverRegistry.resolvers.clear()
        LoRAResolverRegistry.resolvers.update(before)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


# ------------------------------------------------------------------ registration


def test_registering_again_changes_nothing(bench: Bench) -> None:
    first = LoRAResolverRegistry.get_resolver("fanin")
    register()
    assert LoRAResolverRegistry.get_resolver("fanin") is first
    assert isinstance(first, LoRAResolver)
    assert bench.models.lora_resolvers == [first]


def test_importing_the_plugin_imports_no_vllm() -> None:
    program = """
import sys, fanin.vllm, fanin.vllm.worker
assert "vllm" not in sys.modules and "fastapi" not in sys.modules
assert "libfanin" not in open("/proc/self/maps").read()
"""
    subprocess.run([sys.executable, "-S", "-c", program], check=True, env=_bare())


def _bare() -> dict[str, str]:
    fanin = Path(importlib.import_module("fanin").__file__ or "").parents[1]
    return {**os.environ, "PYTHONPATH": str(fanin)}


def test_extension_and_workers_methods_do_not_collide(bench: Bench) -> None:
    """vLLM ends at once if an extension has a name that its worker has."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    ours = [name for name in dir(worker.WorkerExtension) if not name.startswith("__")]
    assert ours and not [name for name in ours if hasattr(CPUWorker, name)]
    assert all(hasattr(CPUWorker, name) for name in patches.install())
    assert WorkerBase.fanin_start_pull is worker.fanin_start_pull


def test_what_workers_answer_travels(bench: Bench, tmp_path: Path) -> None:
    """Arguments and answers of collective_rpc go through vLLM's MessagePack."""
    jobs = worker.Jobs()
    report = jobs.poll("none")
    assert report["state"] == "failed"
    for sent in (report, {"error": to_wire(errors.StaleError.make("x", rank=2)), "total": 2**62}):
        packed = MsgpackEncoder().encode(UtilityResult([sent]))
        assert MsgpackDecoder(UtilityResult).decode(packed).result == [sent]
    job = {"id": "i", "step": str(2**64 - 1), "addresses": ["h:1"], "timeout": 1.5, "x": None}
    packed = MsgpackEncoder().encode((0, 1, "collective_rpc", ("fanin_start_pull", None, (job,))))
    assert MsgpackDecoder().decode(packed)[3][2][0] == job


# ---------------------------------------------------------------------- resolver


# --------------------------------------------------------- refused as vLLM would


CONFIGS: list[dict[str, Any]] = [
    {},
    {"use_rslora": True},
    {"use_dora": True},
    {"lora_bias": True},
    {"bias": "lora_only"},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["score"]},
    {"r": 17},
    {"rank_pattern": {"q_proj": 16}},
    {"rank_pattern": {"q_proj": 17}},
    {"alora_invocation_tokens": [3]},
    {"layer_replication": [[0, 2]]},
    {"use_bdlora": {"x": 1}},
    {"use_qalora": True},
    *(
        {"init_lora_weights": init}
        for init in (True, False, "gaussian", "Eva", "orthogonal", "mica")
    ),
    *({"init_lora_weights": init} for init in ("pissa", "pissa_niter_2", "olora", "corda")),
]


# vLLM takes these, and computes without what they ask for.
IGNORED: list[dict[str, Any]] = [
    {"init_lora_weights": "lora_ga"},
    {"peft_type": "ADALORA"},
    {"kasa_config": {"beta": 1e-4}},
    {"arrow_config": {"top_k": 2}},
]


def whole(config: dict[str, Any]) -> dict[str, Any]:
    return {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}


def vllm_takes(config: dict[str, Any]) -> bool:
    try:
        PEFTHelper.from_dict(whole(config)).validate_legal(LoRAConfig(max_lora_rank=16))
    except ValueError:
        return False
    return True


def fanin_takes(config: dict[str, Any]) -> bool:
    facts = checks.read_facts([], {"peft_config": json.dumps(whole(config))})
    try:
        checks.check_adapter(facts, checks.EngineFacts(max_lora_rank=16), "0")
    except errors.RequestError:
        return False
    return True


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config) or "plain")
def test_what_vllm_refuses_is_refused(config: dict[str, Any]) -> None:
    assert fanin_takes(config) is vllm_takes(config)


@pytest.mark.parametrize("config", IGNORED, ids=str)
def test_what_vllm_ignores_is_refused(config: dict[str, Any]) -> None:
    assert vllm_takes(config) and not fanin_takes(config)


# ------------------------------------------------------------------------ routes


def app_of(bench: Bench, **args: Any) -> Any:
    from fastapi import FastAPI

    plugin = endpoint_plugin()
    assert isinstance(plugin, PluginProtocol)
    app = FastAPI()
    plugin.attach_router(app)
    app.state.openai_serving_models = bench.models
    app.state.plugin = plugin
    app.state.arguments = Namespace(api_key=None, api_server_count=None, **args)
    return app


async def ask(app: Any, method: str, path: str, **options: Any) -> tuple[int, Any]:
    import httpx

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.request(method, path, **options)
        return answer.status_code, answer.json()


def test_routes_want_the_engines_key(bench: Bench) -> None:
    app = app_of(bench)
    app.state.arguments.api_key = ["secret"]

    async def work() -> None:
        await app.state.plugin.init_state(bench.client, app.state, app.state.arguments)
        paths = [("POST", "/load_lora_adapter_nixl"), ("POST", "/init_nixl_client")]
        for method, path in [*paths, ("GET", "/nixl/status")]:
            assert (await ask(app, method, path))[0] == 401
            wrong = {"Authorization": "Bearer wrong"}
            assert (await ask(app, method, path, headers=wrong))[0] == 401
        right = {"Authorization": "Bearer secret"}
        assert (await ask(app, "GET", "/nixl/status", headers=right))[0] == 200

    run(work())


# ----------------------------------------------------------------------- metrics


def test_metrics_of_several_processes(tmp_path: Path) -> None:
    """With PROMETHEUS_MULTIPROC_DIR vLLM shows what lies in that directory."""
    program = """
from fanin.engine.metrics import metrics
metrics().began()
metrics().ended(0.5, None, run="0", step=7, size=9)
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
text = generate_latest(get_prometheus_registry()).decode()
assert 'fanin_pulls_total{result="ok"} 1.0' in text, text
assert 'fanin_adapter_step{run="0"} 7.0' in text, text
assert 'fanin_pull_inflight 0.0' in text, text
"""
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), **_path()},
    )


def _path() -> dict[str, str]:
    return {"PYTHONPATH": _bare()["PYTHONPATH"]}
