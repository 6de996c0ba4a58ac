# SPDX-License-Identifier: Apache-2.0
"""What the routes take and answer, names that are resolved, and the workers' extension."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_trainer import OTHER_WORLD, WORLD, at_rest, until
from fanin import errors
from fanin._allowed import check_by_config
from fanin.config import ConfigError
from fanin.engine import jobs
from fanin.engine.clients import ClientPool
from fanin.engine.faults import status_of, to_wire
from fanin.errors import NotFoundError, RequestError, StateError
from fanin.info import TrainerInfo, write_info
from fanin.vllm import patches, worker
from fanin.vllm.routes import Api, EndpointPlugin, api_processes
from fanin.vllm.state import wanted_by_name
from test_shared_pulls import Bench, FakeEngine, Request, run

NAME = "policy-run0-step1"


class FakeModels(FakeEngine):
    """OpenAIServingModels, as far as the routes use it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model_config = SimpleNamespace(model="org/base")
        self.refuse = ""

    def is_base_model(self, name: str) -> bool:
        return name == "base"

    async def load_lora_adapter(self, request: Any) -> Any:
        await asyncio.sleep(0)
        if self.refuse:
            return SimpleNamespace(error=SimpleNamespace(message=self.refuse))
        if request.lora_name in self.lora_requests:
            return SimpleNamespace(error=SimpleNamespace(message="has already been loaded"))
        self.lora_requests[request.lora_name] = Request(request.lora_name, request.lora_path)
        return "Success"


class Desk(Bench):
    def __init__(self, root: Path, **config: str) -> None:
        self.models = FakeModels()
        super().__init__(root, self.models, **{"FANIN_ALLOW_TRAINERS": "any", **config})
        self.api = Api(self.state)

    async def load(self, **body: Any) -> dict[str, Any]:
        await self.state.attach(self.models)
        return await self.api.load({"lora_name": NAME, "timeout": 5.0, **body})


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only vLLM's request class is needed of it, and each test counts for itself."""
    monkeypatch.setattr("fanin.engine.metrics._make", lambda registry: None)
    parts = "vllm.entrypoints.serve.lora.protocol".split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    protocol: Any = sys.modules["vllm.entrypoints.serve.lora.protocol"]
    protocol.LoadLoRAAdapterRequest = SimpleNamespace


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# --------------------------------------------------------------------- /load


async def test_load(desk: Desk) -> None:
    answer = await desk.load(run_idx=0, lora_alpha=16)
    assert (answer["status"], answer["step"], answer["world"]) == ("ok", 1, WORLD)
    assert desk.models.lora_requests[NAME].lora_path == answer["path"]
    adapter = desk.keeper.get(NAME)
    assert adapter is not None and adapter.pins == 0
    assert adapter.requests == [desk.models.lora_requests[NAME]]
    # Again, and by several at once: the same.
    answers = await asyncio.gather(*(desk.load() for _ in range(3)))
    assert {reply["path"] for reply in answers} == {answer["path"]}
    assert len(desk.trainer.pulls) == 1 and len(adapter.requests) == 1


async def test_load_by_several_at_once(desk: Desk) -> None:
    answers = await asyncio.gather(*(desk.load() for _ in range(3)))
    assert len({answer["path"] for answer in answers}) == 1
    adapter = desk.keeper.get(NAME)
    assert adapter is not None and (len(adapter.requests), adapter.pins) == (1, 0)


async def test_load_under_a_name_of_ones_own(desk: Desk) -> None:
    answer = await desk.load(lora_name="mine", run_idx="0", step=1)
    assert Path(answer["path"]).name == "lora-step1"
    assert "mine" in desk.models.lora_requests
    desk.trainer.commit(2)
    # The same name for another step: nothing of the old one is served under it.
    answer = await desk.load(lora_name="mine", run_idx="0", step=2)
    assert desk.models.lora_requests["mine"].lora_path == answer["path"]
    assert Path(answer["path"]).name == "lora-step2"


async def test_load_after_the_trainer_was_started_again(desk: Desk) -> None:
    first = await desk.load()
    desk.trainer.restart(OTHER_WORLD, 1)
    second = await desk.load()
    assert (first["world"], second["world"]) == (WORLD, OTHER_WORLD)
    assert desk.models.lora_requests[NAME].lora_path == second["path"] != first["path"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": 7}, "lora_name"),
        ({"lora_name": "policy"}, "run_idx"),
        ({"lora_name": "policy", "run_idx": 0}, "step is missing"),
        ({"lora_name": "policy-run0", "run_idx": 0}, "step is missing"),
        ({"step": 2}, "step 2"),
        ({"run_idx": 1}, "run 1"),
        ({"run_idx": "../x"}, "run_idx"),
        ({"run_idx": 1.5}, "run_idx 1.5"),
        ({"run_idx": True}, "run_idx True"),
        ({"run_idx": [0]}, "run_idx"),
        ({"lora_name": "mine", "run_idx": 0, "step": 1.0}, "step 1.0"),
        ({"stepp": 1}, "did you mean 'step'"),
        ({"dtype": "F64"}, "dtype 'F64'"),
        ({"dtype": 16}, "dtype 16"),
        ({"max_bytes": 0}, "max_bytes 0"),
        ({"max_bytes": 1.5}, "max_bytes 1.5"),
        ({"max_bytes": True}, "max_bytes True"),
        ({"max_bytes": 1 << 63}, "to 9223372036854775807"),
        ({"trust_config": 1}, "trust_config 1"),
        ({"trust_config": True}, "start it with FANIN_TRUST_CONFIG=1"),
        ({"trust_conf": True}, "did you mean 'trust_config'"),
        ({"step": -1}, "step"),
        ({"step": "1"}, "step"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "fast"}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 15}, "15 .* 16"),
        ({"trainer_addresses": 5}, "trainer_addresses"),
        ({"trainer_addresses": ["h"]}, "address"),
        ({"trainer_addresses": ["h:1"], "server_name": 4}, "server_name"),
        ({"lora_name": "base", "run_idx": 0, "step": 1}, "base model"),
    ],
)
async def test_what_load_refuses(desk: Desk, body: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.RequestError, match=named):
        await desk.load(**body)
    assert desk.models.lora_requests == {} and desk.trainer.pulls == []


FIELDS = ["run_idx", "step", "dtype", "timeout", "lora_alpha", "max_bytes", "trust_config"]


@pytest.mark.parametrize("field", FIELDS)
async def test_a_refused_field_is_named(desk: Desk, field: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        await desk.load(**{field: {"a": 1}})
    assert caught.value.key == field and field in str(caught.value)


async def test_dtypes(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FANIN_DTYPE="bf16")
    first = await desk.load()
    assert (first["dtype"], Path(first["path"]).name) == ("BF16", "policy-bf16-step1")
    assert (await desk.load(dtype="BF16"))["path"] == first["path"]
    other = await desk.load(dtype="F16")
    assert (other["dtype"], Path(other["path"]).name) == ("F16", "policy-f16-step1")
    assert desk.models.lora_requests[NAME].lora_path == other["path"]
    assert [how["dtype"] for how in desk.trainer.how] == ["BF16", "F16"]
    await desk.keeper.settled()
    assert not Path(first["path"]).exists()
    wanted = wanted_by_name(desk.state, NAME)
    assert wanted is not None and wanted.dtype == "BF16"


async def test_trust_and_most_bytes(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FANIN_TRUST_CONFIG="yes", FANIN_MAX_BYTES="1000")
    first = await desk.load()
    assert first["trust_config"] is True
    assert Path(first["path"]).name == "policy-trusted-step1"
    assert (await desk.load(trust_config=True, max_bytes=5))["path"] == first["path"]
    other = await desk.load(trust_config=False, max_bytes=2000)
    assert other["trust_config"] is False and Path(other["path"]).name == "policy-step1"
    asked = [(how["trust_config"], how["max_bytes"]) for how in desk.trainer.how]
    assert asked == [(True, 1000), (False, 2000)]
    status = desk.api.status()
    assert (status["trust_config"], status["max_bytes"]) == (True, 1000)
    assert [adapter["trust_config"] for adapter in status["adapters"]] == [False]
    wanted = wanted_by_name(desk.state, NAME)
    assert wanted is not None and (wanted.trust_config, wanted.max_bytes) == (True, 1000)
    # A name whose adapter a request would not bring back is not taken away for a moment.
    adapter = desk.keeper.get(NAME)
    assert adapter is not None and not desk.state.resolves(adapter)


async def test_without_a_step(tmp_path: Path) -> None:
    """As other trainers' orchestrators ask."""
    desk = Desk(tmp_path, FANIN_NEWEST="1")
    desk.trainer.commit(7)
    answer = await desk.load(lora_name="policy", run_idx=0)
    assert (answer["lora_name"], answer["step"]) == ("policy", 7)
    old = desk.models.lora_requests["policy"].lora_path
    desk.trainer.commit(9)
    # A step that passes between the question and the pull.
    desk.trainer.before_pull = lambda: desk.trainer.commit(10)
    answer = await desk.load(lora_name="policy", run_idx=0)
    assert (answer["lora_name"], answer["step"]) == ("policy", 10)
    assert desk.models.lora_requests["policy"].lora_path == answer["path"] != old
    desk.trainer.before_pull = lambda: None
    # A name that says its step means that one.
    with pytest.raises(errors.SupersededError):
        await desk.load(lora_name="policy-run0-step9")
    with pytest.raises(errors.RequestError, match="run_idx"):
        await desk.load(lora_name="policy")


async def test_the_old_one_is_served_until_the_new_one_is_there(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first = await desk.load(lora_name="mine", run_idx=0, step=1)
    asked = asyncio.create_task(desk.load(lora_name="mine", run_idx=0, step=2))
    await until(lambda: desk.trainer.waits)
    assert desk.models.lora_requests["mine"].lora_path == first["path"]
    desk.trainer.commit(2)
    second = await asked
    assert desk.models.lora_requests["mine"].lora_path == second["path"]


async def test_a_name_that_is_somebody_elses(desk: Desk) -> None:
    desk.models.lora_requests[NAME] = Request(NAME, "/by/hand")
    with pytest.raises(errors.RequestError, match="/by/hand"):
        await desk.load()
    assert desk.trainer.pulls == []


async def test_an_engine_that_does_not_load_it(desk: Desk) -> None:
    await desk.state.attach(desk.models)
    desk.models.refuse = "expected target modules in ..."
    with pytest.raises(errors.HostError, match="expected target modules"):
        await desk.load()
    adapter = desk.keeper.get(NAME)
    assert adapter is not None and adapter.pins == 0
    desk.models.refuse = ""
    assert (await desk.load())["status"] == "ok"


async def test_before_the_engine_is_up(desk: Desk) -> None:
    with pytest.raises(errors.StateError):
        await desk.api.load({"lora_name": NAME})


# ------------------------------------------------------------- /init, /status


async def test_init(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FANIN_TRAINER="")
    with pytest.raises(errors.RequestError, match="FANIN_TRAINER"):
        await desk.load()
    with pytest.raises(errors.RequestError, match="trainer_addresses"):
        await desk.api.init({})
    desk.trainer.alive = False
    with pytest.raises(errors.UnreachableError):
        await desk.api.init({"trainer_addresses": [["h", 1]]})
    assert desk.state.source is None
    desk.trainer.alive = True
    answer = await desk.api.init({"trainer_addresses": [["h", 1]], "timeout": 3})
    assert answer == {"status": "ok", "trainer": "h:1", "world": WORLD}
    first = await desk.load()
    # The file of another launch.
    desk.trainer.restart(OTHER_WORLD, 1)
    write_info(tmp_path, TrainerInfo(("h:2",), world_id=OTHER_WORLD))
    answer = await desk.api.init({"trainer_addresses": str(tmp_path)})
    assert answer["world"] == OTHER_WORLD
    second = await desk.load()
    assert second["world"] == OTHER_WORLD != first["world"]


async def test_init_retires_every_other_world(desk: Desk) -> None:
    """Names that were asked for before, and never by a route."""
    await desk.state.attach(desk.models)
    old = await desk.fetch(12)
    desk.trainer.restart(OTHER_WORLD, 12)
    answer = await desk.api.init({"trainer_addresses": ["elsewhere:1"]})
    assert answer["world"] == OTHER_WORLD
    assert old.name not in desk.models.lora_requests and desk.keeper.get(old.name) is None
    await desk.keeper.settled()
    assert not old.path.exists()
    new = await desk.fetch(12)
    # The same world by another address.
    await desk.api.init({"trainer_addresses": ["also-elsewhere:1"]})
    assert desk.keeper.get(new.name) is new
    with pytest.raises(errors.RequestError, match="did you mean 'trainer_addresses'"):
        await desk.api.init({"trainer_address": ["h:1"]})


async def test_the_first_trainer_that_is_named_is_the_one_of_names(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FANIN_TRAINER="")
    with pytest.raises(errors.ConnectionFailedError, match="FANIN_TRAINER"):
        wanted_by_name(desk.state, NAME)
    await desk.load(trainer_addresses="h:1")
    wanted = wanted_by_name(desk.state, NAME)
    assert wanted is not None and wanted.source.addresses == ("h:1",)


@pytest.mark.parametrize(
    ("allow", "trainer", "admitted"),
    [
        ("", ["127.0.0.1:6000"], True),  # the one that the engine was told
        ("", ["127.0.0.1:6001"], False),
        ("", "127.0.0.1:6001,127.0.0.1:6002", False),
        ("10.0.0.0/8,fd00::/8", [["10.2.3.4", 1], ["fd00::7", 2]], True),
        ("10.0.0.0/8", ["10.2.3.4:1", "11.0.0.1:1"], False),
        ("10.0.0.0/8", ["::ffff:10.2.3.4:1"], False),  # no address at all
        ("10.0.0.0/8", ["[::ffff:10.2.3.4]:1"], True),
        ("10.0.0.0/8", ["ten:1"], False),
        ("trainer-0", ["Trainer-0:77"], True),
        ("trainer-0:6000", ["trainer-0:6001"], False),
        ("trainer-0:6000", ["trainer-0.evil.example:6000"], False),
        ("any", ["anywhere:1"], True),
    ],
)
async def test_which_trainers_a_request_may_name(
    tmp_path: Path, allow: str, trainer: Any, admitted: bool
) -> None:
    desk = Desk(tmp_path, FANIN_ALLOW_TRAINERS=allow)
    desk.trainer.commit(1)
    for ask in (
        lambda: desk.api.init({"trainer_addresses": trainer, "timeout": 3}),
        lambda: desk.load(trainer_addresses=trainer),
    ):
        if admitted:
            assert (await ask())["status"] == "ok"
            continue
        with pytest.raises(errors.RequestError) as caught:
            await ask()
        if caught.value.name == "FANIN_ERR_AUTH":
            assert status_of(caught.value) == 403
            assert "FANIN_ALLOW_TRAINERS" in caught.value.remedy
            assert "API key" in caught.value.remedy
        else:
            assert caught.value.address or "HOST:PORT" in str(caught.value)
    assert admitted or desk.state.source.text == "127.0.0.1:6000"
    assert admitted or not desk.trainer.pulls


async def test_files_of_this_host_that_a_request_may_name(tmp_path: Path) -> None:
    job, other = tmp_path / "job", tmp_path / "job-other"
    for place in (job, other):
        place.mkdir()
        write_info(place, TrainerInfo(("h:2",), world_id=WORLD))
    (job / "out").symlink_to(other)
    desk = Desk(tmp_path, FANIN_ALLOW_TRAINERS=str(job))
    assert (await desk.api.init({"trainer_addresses": str(job)}))["status"] == "ok"
    info = str(job / "nixl_info.json")
    assert (await desk.api.init({"nixl_info": info}))["status"] == "ok"
    for path in (other, job / ".." / "job-other", job / "out", tmp_path / "nowhere"):
        with pytest.raises(errors.RequestError) as caught:
            await desk.api.init({"trainer_addresses": str(path)})
        assert caught.value.name == "FANIN_ERR_AUTH"


async def test_with_the_key_any_trainer_may_be_named(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FANIN_ALLOW_TRAINERS="")
    api = Api(desk.state, keyed=True)
    assert (await api.init({"trainer_addresses": ["anywhere:1"]}))["status"] == "ok"


@pytest.mark.parametrize("allow", [",", "10.0.0.0/33", "a b", "h:1:2", "10.1.0.0/8"])
def test_a_wrong_list_of_trainers(tmp_path: Path, allow: str) -> None:
    with pytest.raises(ConfigError, match="FANIN_ALLOW_TRAINERS"):
        Desk(tmp_path, FANIN_ALLOW_TRAINERS=allow)


def test_the_list_holds_for_the_routes_of_vllm_too(tmp_path: Path) -> None:
    def named(address: str, **environ: str) -> None:
        check_by_config(address, None, (address,), environ)

    named("h:1")
    named("10.0.0.1:1", FANIN_ALLOW_TRAINERS="10.0.0.0/8")
    with pytest.raises(errors.RequestError, match="takes no trainer h:1"):
        named("h:1", FANIN_ALLOW_TRAINERS="10.0.0.0/8")
    with pytest.raises(ConfigError, match="FANIN_ALLOW_TRAINERS is '10.0.0.0/77'"):
        named("h:1", FANIN_ALLOW_TRAINERS="10.0.0.0/77")
    file = tmp_path / "inference.toml"
    head = '[weight_broadcast]\ntype = "nixl"\n'
    # What else the file says is looked at by who uses it.
    file.write_text(f'enable_lora = false\n{head}allow_trainers = ["10.0.0.0/8"]\nkeep = 0\n')
    by_file = {"FANIN_CONFIG": str(file)}
    named("10.0.0.1:1", **by_file)
    with pytest.raises(errors.RequestError, match="takes no trainer h:1") as caught:
        named("h:1", **by_file)
    assert caught.value.name == "FANIN_ERR_AUTH"
    named("h:1", **by_file, FANIN_ALLOW_TRAINERS="h")  # as everywhere the variable goes first
    with pytest.raises(errors.RequestError, match="takes no trainer 10.0.0.1:1"):
        named("10.0.0.1:1", **by_file, FANIN_ALLOW_TRAINERS="h")
    file.write_text(head)
    named("h:1", **by_file)
    # The engine's own trainer needs no line in the list.
    file.write_text(f'{head}trainer = "t:1, t:2"\nallow_trainers = ["10.0.0.0/8"]\n')
    check_by_config("t:1,t:2", None, ("t:1", "t:2"), by_file)
    for other in ("t:1", "h:1"):
        with pytest.raises(errors.RequestError, match=f"takes no trainer {other}"):
            named(other, **by_file)
    named("h:1", **by_file, FANIN_TRAINER="h:1")
    named("h:1", FANIN_TRAINER="h:1", FANIN_ALLOW_TRAINERS="10.0.0.0/8")
    path = str(tmp_path / "nixl_info.json")
    check_by_config(path, path, (), {**by_file, "FANIN_TRAINER": path})
    named("h:1", FANIN_TRAINER="h:no port")  # where there is no list nobody looks at it
    file.write_text(f"{head}allow_trainers = []\n")
    with pytest.raises(ConfigError, match="inference.toml: weight_broadcast.allow_trainers is"):
        named("h:1", **by_file)
    file.unlink()
    with pytest.raises(ConfigError, match="inference.toml: No such file"):
        named("h:1", **by_file)


async def test_what_the_workers_hold(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.load()
    asked: list[Any] = []
    answers: list[dict[str, Any]] = [{"held": []}, {"held": [["w", [0], [1], {"BF16": 1}]]}]

    async def call_workers(method: str, adapter: dict[str, Any]) -> list[Any]:
        asked.append((method, adapter))
        return answers

    engine = desk.state.engine
    assert engine is not None
    monkeypatch.setattr(engine, "call_workers", call_workers)
    adapter = desk.keeper.get(NAME)
    assert adapter is not None
    for request, number in zip(adapter.requests, (7,), strict=True):
        request.lora_int_id = number
    assert await desk.api.served({"run": "lora:0", "step": 1}) == {"adapters": {NAME: answers}}
    ((method, told),) = asked
    assert method == "fanin_served_adapter" and told["number"] == 7 and not told["is_3d"]
    assert told["tensors"] == adapter.facts.tensors and told["config"] == adapter.facts.config
    answers[1] = {"error": to_wire(StateError.make("this worker has no adapter 7 now"))}
    with pytest.raises(StateError, match="no adapter 7"):
        await desk.api.served({"run": 0, "step": 1})
    with pytest.raises(NotFoundError, match="no adapter of step 2 of lora:0"):
        await desk.api.served({"run": "0", "step": 2})
    for wrong in ({"run": "0"}, {"run": "a/b", "step": 1}):
        with pytest.raises(RequestError):
            await desk.api.served(wrong)
    adapter.requests.clear()
    with pytest.raises(StateError, match="has not been asked for"):
        await desk.api.served({"run": "0", "step": 1})


async def test_status(desk: Desk) -> None:
    await desk.load()
    with pytest.raises(errors.SupersededError):
        desk.trainer.commit(9)
        await desk.load(lora_name="policy-run0-step3")
    status = desk.api.status()
    assert status["world"] == WORLD and status["trainer"] == "127.0.0.1:6000"
    assert [(one["name"], one["step"]) for one in status["adapters"]] == [(NAME, 1)]
    assert status["pulling"] == [] and status["retiring"] == []
    assert "step 3" in status["last_error"]
    assert status["counters"]["pulls_failed"] == 1


# ------------------------------------------------------------------- the plugin


@pytest.mark.parametrize(
    ("args", "config", "count"),
    [
        ({}, {}, 1),
        ({"api_server_count": None}, {"_api_process_count": 1}, 1),
        ({"api_server_count": 4}, {}, 4),
        ({"api_server_count": None}, {"_api_process_count": 2}, 2),
    ],
)
def test_api_processes(args: dict[str, Any], config: dict[str, Any], count: int) -> None:
    told = SimpleNamespace(parallel_config=SimpleNamespace(**config))
    assert api_processes(SimpleNamespace(**args), told) == count


async def test_several_api_servers_are_refused() -> None:
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace()))
    with pytest.raises(errors.StateError, match="--api-server-count 1"):
        await EndpointPlugin().init_state(
            engine, SimpleNamespace(), SimpleNamespace(api_server_count=2)
        )
    await EndpointPlugin().init_state(None, SimpleNamespace(), SimpleNamespace())


async def test_the_engines_key(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanin.vllm.routes.state", lambda: desk.state)
    plugin = EndpointPlugin()
    with pytest.raises(errors.StateError):
        plugin._ready(None)
    state = SimpleNamespace(openai_serving_models=desk.models)
    await plugin.init_state(desk.models, state, SimpleNamespace(api_key=["one", "two"]))
    assert plugin._ready("Bearer two") is not None
    assert plugin._ready("bearer one") is not None
    for wrong in (None, "", "Bearer", "Bearer three", "Basic one", "one", "Bearer ö"):
        assert plugin._ready(wrong) is None
    monkeypatch.setenv("VLLM_API_KEY", "three")
    await plugin.init_state(desk.models, state, SimpleNamespace(api_key=None))
    assert plugin._ready("Bearer three") is not None and plugin._ready("Bearer one") is None
    monkeypatch.delenv("VLLM_API_KEY")
    await plugin.init_state(desk.models, state, SimpleNamespace(api_key=None))
    assert plugin._ready(None) is not None


# --------------------------------------------------------------------- by name


def test_names(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FANIN_ADAPTER_PREFIX="policy", FANIN_PULL_TIMEOUT="7")
    wanted = wanted_by_name(desk.state, "policy-runa.b-step12")
    assert wanted is not None
    assert (wanted.run, wanted.step, wanted.label, wanted.timeout) == ("a.b", 12, "policy", 7.0)
    assert wanted_by_name(desk.state, "other-run0-step1") is None
    assert wanted_by_name(desk.state, "policy-run0") is None


def test_the_models_that_ask(desk: Desk) -> None:
    found: list[Any] = []

    async def resolve() -> None:
        found.append(patches.calling_models())

    class Caller:
        async def resolve_lora(self, lora_name: str) -> None:
            await resolve()

    patches.put(Caller, "OpenAIServingModels")
    caller = Caller()
    run(caller.resolve_lora("a"))
    run(resolve())
    assert found == [caller, None]


# ---------------------------------------------------------------- the extension


class FakeWorker(worker.WorkerExtension):
    lora_config = SimpleNamespace(max_lora_rank=16)

    def __init__(self) -> None:
        self.loras: dict[int, Any] = {}

    def get_model(self) -> Any:
        return SimpleNamespace()

    def add_lora(self, request: Any) -> bool:
        assert Path(request.lora_path, "fanin.json").exists()
        self.loras[request.lora_int_id] = request
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        return self.loras.pop(lora_int_id, None) is not None


class FakeAsyncEngine:
    def __init__(self) -> None:
        self.workers = [FakeWorker()]

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.sleep(0)
        return [getattr(one, method)(*args) for one in self.workers]


@pytest.fixture
def extended(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAsyncEngine:
    monkeypatch.setenv("NIXL_LORA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FANIN_TRAINER", "127.0.0.1:6000")
    monkeypatch.setattr(worker, "_jobs", worker.Jobs())
    monkeypatch.setattr(worker, "_services", {})
    monkeypatch.setattr(worker, "ClientPool", lambda **_: ClientPool(desk.trainer.client))
    monkeypatch.setitem(sys.modules, "vllm.lora", ModuleType("lora"))
    requests: Any = ModuleType("request")
    requests.LoRARequest = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm.lora.request", requests)
    return FakeAsyncEngine()


async def test_the_extension_loads(desk: Desk, extended: FakeAsyncEngine) -> None:
    request = await worker.load_lora(extended, NAME, 0, 5, timeout=10.0)
    assert extended.workers[0].loras[5].lora_path == request.lora_path
    path = Path(request.lora_path)
    assert path.exists()
    await extended.collective_rpc("drop_lora_from_nixl", (NAME, 5))
    assert extended.workers[0].loras == {}
    await until(lambda: not path.exists())


def test_the_extension_does_not_wait_in_a_call(desk: Desk, extended: FakeAsyncEngine) -> None:
    one = extended.workers[0]
    report = one.load_lora_from_nixl("mine", "0", "127.0.0.1:6000", 10.0, 2)
    assert report["state"] == "running"
    with pytest.raises(errors.StateError):
        one.add_lora_from_nixl("mine", 1)
    desk.trainer.commit(2)
    at_rest(jobs._pulls)
    assert one.poll_lora_from_nixl("mine")["state"] == "done"
    assert one.add_lora_from_nixl("mine", 1)


async def test_the_extension_says_what_failed(desk: Desk, extended: FakeAsyncEngine) -> None:
    desk.trainer.commit(9)
    with pytest.raises(errors.SupersededError):
        await worker.load_lora(extended, NAME, 0, 5, timeout=10.0)
    with pytest.raises(errors.RequestError, match="step"):
        await worker.load_lora(extended, "mine", 0, 5)
    FakeWorker.lora_config.max_lora_rank = 4
    try:
        with pytest.raises(errors.RequestError, match="--max-lora-rank 8"):
            await worker.load_lora(extended, "mine", 0, 5, step=9)
    finally:
        FakeWorker.lora_config.max_lora_rank = 16


async def test_the_extension_asks_whether_the_launch_is_the_same(
    desk: Desk, extended: FakeAsyncEngine
) -> None:
    """A name that is here is not of the present trainer for ever."""
    first = await worker.load_lora(extended, NAME, 0, 5, timeout=10.0)
    again = await worker.load_lora(extended, NAME, 0, 6, timeout=10.0)
    assert again.lora_path == first.lora_path and len(desk.trainer.pulls) == 1
    desk.trainer.alive = False
    assert (await worker.load_lora(extended, NAME, 0, 7)).lora_path == first.lora_path
    desk.trainer.restart(OTHER_WORLD, 1)
    second = await worker.load_lora(extended, NAME, 0, 8, timeout=10.0)
    assert OTHER_WORLD in second.lora_path and len(desk.trainer.pulls) == 2
    # The engine may still have the first one loaded.
    assert Path(first.lora_path).exists()
    await extended.collective_rpc("drop_lora_from_nixl", (NAME, 8))
    await until(lambda: not (Path(first.lora_path).exists() or Path(second.lora_path).exists()))


async def test_the_extension_keeps_what_is_loaded_when_a_second_load_fails(
    desk: Desk, extended: FakeAsyncEngine
) -> None:
    """An engine that re-reads a directory which is gone dies."""

    (one,) = extended.workers
    first = Path((await worker.load_lora(extended, NAME, 0, 5, timeout=10.0)).lora_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "add_lora", lambda request: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await worker.load_lora(extended, NAME, 0, 6, timeout=10.0)
        at_rest(jobs._deletions)
        assert first.exists() and set(one.loras) == {5}, "it was the same one"
        desk.trainer.restart(OTHER_WORLD, 1)
        with pytest.raises(ZeroDivisionError):
            await worker.load_lora(extended, NAME, 0, 6, timeout=10.0)
        at_rest(jobs._deletions)
    assert first.exists() and not list(first.parents[2].glob(f"{OTHER_WORLD}/0/policy*"))
    desk.trainer.restart(OTHER_WORLD, 9)
    with pytest.raises(errors.SupersededError):
        await worker.load_lora(extended, NAME, 0, 6, timeout=10.0)
    at_rest(jobs._deletions)
    assert first.exists() and one.add_lora_from_nixl(NAME, 7)
    await extended.collective_rpc("drop_lora_from_nixl", (NAME, 5))
    at_rest(jobs._deletions)
    assert not first.exists()


def test_install() -> None:
    class Base:
        pass

    patches.put(Base, "WorkerBase")
    assert {name for name in vars(Base) if name.startswith("fanin_")} == {
        "fanin_check_weights",
        "fanin_served_digests",
        "fanin_served_adapter",
        "fanin_weights_state",
        "fanin_start_pull",
        "fanin_poll_pull",
        "fanin_add_lora",
        "fanin_drop_adapter",
        "fanin_model_facts",
        "fanin_lora_places",
        "fanin_weights_call",
        "fanin_leave_update",
        "fanin_lose_weights",
        "fanin_disown_weights",
    }
    # vLLM refuses an extension that has a name of the worker's own.
    assert not any(hasattr(worker.WorkerExtension, name) for name in vars(Base) if name[0] != "_")
