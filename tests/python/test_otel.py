# SPDX-License-Identifier: Apache-2.0
"""Spans of OpenTelemetry: one trace from the pool to the pull; none without."""

from __future__ import annotations

import asyncio
import builtins
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fanin
import pytest
from fanin import _otel, errors
from fanin.engine import pulls
from fanin.engine.threads import in_thread
from fanin.pool import EnginePool, PoolError
from fanin.sync import Registry, Service, SyncClient, SyncError, SyncServer
from fanin.vllm import worker
from fanin.vllm.routes import EndpointPlugin
from http_engine import OK, SUPERSEDED, Answer, Engine, Request, Trainer, refusal
from local_world import PUBLICATION, client_of
from test_vllm_routes import NAME, Desk, stand_ins  # noqa: F401

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="tools/setup test installs the SDK")
TRAINER = ["10.0.0.1:6000"]


class Kept:
    """The spans that have ended."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        provider = sdk.TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.api = _otel._load(provider)

    def all(self, name: str) -> list[Any]:
        return [one for one in self._exporter.get_finished_spans() if one.name == name]

    def one(self, name: str) -> Any:
        (found,) = self.all(name)
        return found


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    made = Kept()
    monkeypatch.setattr(_otel, "_api", lambda: made.api)
    return made


def below(child: Any, parent: Any) -> bool:
    same = child.context.trace_id == parent.context.trace_id
    return same and child.parent is not None and child.parent.span_id == parent.context.span_id


def failed(span: Any) -> str:
    """The code of a span that failed, "" of one that did not."""
    assert span.status.is_ok == ("error.type" not in span.attributes)
    return str(span.attributes.get("error.type", ""))


# ------------------------------------------------------------------- the pull


def test_a_pull(kept: Kept, ranks: list[fanin.Server], tmp_path: Path) -> None:
    with client_of(ranks) as client:
        result = client.pull_adapter(0, tmp_path / "a", step=1)
        with pytest.raises(errors.SupersededError):
            for server in ranks:
                server.begin_update(PUBLICATION)
                server.commit(PUBLICATION, 2)
            client.pull_adapter(0, tmp_path / "b", step=1)
    good, bad = kept.all("fanin.pull")
    told = good.attributes
    assert (told["fanin.run"], told["fanin.step"], told["fanin.ranks"]) == ("0", 1, 3)
    assert (told["fanin.bytes"], told["fanin.path"]) == (result.bytes, "stream")
    assert (told["fanin.stale"], told["fanin.restarts"]) == (0, 0)
    assert told["fanin.read_ms"] == pytest.approx(1e3 * result.read)
    assert failed(good) == "" and failed(bad) == "FANIN_ERR_SUPERSEDED"
    assert bad.events[0].name == "exception" and bad.attributes["fanin.step"] == 1
    assert "fanin.bytes" not in bad.attributes


def test_a_step_of_64_bits(kept: Kept) -> None:
    with _otel.span("big", step=(1 << 64) - 1, small=(1 << 63) - 1, none=None):
        pass
    told = dict(kept.one("big").attributes)
    assert told == {"fanin.step": str((1 << 64) - 1), "fanin.small": (1 << 63) - 1}


# ------------------------------------------------------------------- the pool


def test_every_engine_is_below_the_update(kept: Kept) -> None:
    with Trainer() as trainer, Engine([SUPERSEDED, OK]) as one:
        trainer.commit(4)
        EnginePool([one.url], timeout=20.0).update_weights(trainer.info, "p", 1)
    update, posts = kept.one("fanin.update"), kept.all("fanin.post")
    assert [failed(post) for post in posts] == ["FANIN_ERR_SUPERSEDED", ""]
    assert all(below(post, update) for post in posts)
    assert [post.attributes["fanin.step"] for post in posts] == [1, 4]
    assert update.attributes["fanin.superseded"] and update.attributes["fanin.step"] == 4
    for post, request in zip(posts, one.requests, strict=True):
        ids = f"{post.context.trace_id:032x}-{post.context.span_id:016x}"
        assert request.headers["traceparent"].startswith(f"00-{ids}-")


def test_a_refused_update(kept: Kept) -> None:
    with Engine([refusal(400, "FANIN_ERR_ARGUMENT")]) as one, pytest.raises(PoolError):
        EnginePool([one.url], timeout=20.0).update_weights(TRAINER, "p", 1)
    assert failed(kept.one("fanin.update")) == failed(kept.one("fanin.post"))
    assert kept.one("fanin.post").attributes["fanin.status"] == 400


# ----------------------------------------------------------------- the engine


class App:
    """FastAPI, as far as the plugin uses it: a POST is a call."""

    def __init__(self) -> None:
        self.endpoints: dict[str, Any] = {}
        self.routes: list[Any] = []  # vLLM's

    def add_api_route(self, path: str, endpoint: Any, **_: Any) -> None:
        self.endpoints[path] = endpoint


def response(body: Any, status_code: int = 200) -> Any:
    return status_code, body


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    for name in ("fastapi", "fastapi.responses"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fastapi"].Request = object  # type: ignore[attr-defined]
    sys.modules["fastapi.responses"].JSONResponse = response  # type: ignore[attr-defined]
    return App()


async def of_engine(desk: Desk, app: App, monkeypatch: pytest.MonkeyPatch, **args: Any) -> Any:
    """What answers (path, body, headers) as the engine of *desk* does."""
    monkeypatch.setattr("fanin.vllm.routes.state", lambda: desk.state)
    plugin = EndpointPlugin()
    plugin.attach_router(app)
    here = SimpleNamespace(openai_serving_models=desk.models)
    await plugin.init_state(desk.models, here, SimpleNamespace(**args))

    async def ask(path: str, body: Any, headers: dict[str, str]) -> Any:
        async def json() -> Any:
            return body

        url = SimpleNamespace(path=path)
        request = SimpleNamespace(method="POST", headers=headers, json=json, url=url)
        return await app.endpoints[path](request)

    return ask


async def test_from_the_pool_to_the_pull(
    kept: Kept, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    ask = await of_engine(desk, app, monkeypatch)
    loop = asyncio.get_running_loop()
    pull = desk.trainer.client

    def spanned(*arguments: Any, **options: Any) -> Any:
        """The trainer's stand-in says that it pulls as fanin.Client does."""
        made = pull(*arguments, **options)
        real = made.pull_adapter

        def pull_adapter(*inner: Any, **how: Any) -> Any:
            with _otel.span("fanin.pull"):
                return real(*inner, **how)

        made.pull_adapter = pull_adapter
        return made

    desk.state.service.pool._factory = spanned

    def serve(request: Request) -> Answer:
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = asyncio.run_coroutine_threadsafe(ask(request.path, request.body, headers), loop)
        answer: Answer = asked.result(20)
        return answer

    with Engine(serve) as engine:
        pool = EnginePool([engine.url], timeout=20.0)
        await pool.aupdate_weights(["127.0.0.1:6000"], NAME, 1)
    way = [kept.one(f"fanin.{name}") for name in ("update", "post", "route", "fetch", "pull")]
    for parent, child in zip(way, way[1:], strict=False):
        assert below(child, parent), child.name
    assert way[3].attributes["fanin.landing"] == "directory"
    assert [failed(span) for span in way] == [""] * 5


async def test_what_a_route_refuses(
    kept: Kept, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = await of_engine(Desk(tmp_path), app, monkeypatch, api_key=["key"])
    load, lies = "/load_lora_adapter_nixl", {"traceparent": "00-lies-lies-lies"}
    assert (await ask(load, {}, lies))[0] == 401
    assert kept.all("fanin.route") == [], "who has not got the key makes spans"
    assert (await ask(load, {}, {**lies, "authorization": "Bearer key"}))[0] == 400
    refused = kept.one("fanin.route")
    assert refused.parent is None and failed(refused).startswith("FANIN_ERR_")


def test_a_worker_is_below_the_job(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was started by a call from another process, whose context is none of ours."""
    result = SimpleNamespace(bytes=0, reused=False, path="", ranks=[])
    result.__dict__.update(dict.fromkeys(pulls._PHASES, 0.0))
    lease = SimpleNamespace(release=lambda **_: True)

    def pull_to(*_: Any) -> Any:
        with _otel.span("fanin.pull"):
            return result, lease

    monkeypatch.setattr(worker, "_service", lambda *_: SimpleNamespace(pull_to=pull_to))
    with _otel.span("asked"):
        trace = _otel.carried()
    job = {"id": "otel", "root": "", "path": "", "world": "", "step": "1", "trace": trace}
    worker.fanin_start_pull(None, job)
    deadline = time.monotonic() + 60
    while worker._jobs.poll("otel")["state"] != "done":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    worker._jobs.drop(name="otel")
    assert below(kept.one("fanin.pull"), kept.one("asked"))


async def test_threads_have_the_context_of_who_asks(kept: Kept) -> None:
    def work() -> None:
        with _otel.span("inner"):
            pass

    with _otel.span("outer"):
        await in_thread(work)
        with _otel.within({"traceparent": f"00-{1:032x}-{1:016x}-01"}):  # one is current
            work()
    assert len(kept.all("inner")) == 2
    assert all(below(inner, kept.one("outer")) for inner in kept.all("inner"))


# ------------------------------------------------------------------ fanin.sync


def test_phases_of_a_sync(kept: Kept) -> None:
    with Engine([refusal(400, "FANIN_ERR_ARGUMENT")]) as engine:
        registry = Registry(TRAINER, ask_trainer=False)
        registry.add(engine.url, kind="vllm")
        with pytest.raises(SyncError):
            registry.sync(3)
        sync, health = kept.one("fanin.sync"), kept.one("fanin.sync.health")
    assert below(health, sync) and failed(health) and failed(sync)
    assert (sync.attributes["fanin.step"], health.attributes["fanin.engine"]) == (3, engine.url)


def test_a_sync_of_another_process(kept: Kept) -> None:
    service = Service(Registry(TRAINER, ask_trainer=False))
    with SyncServer(service) as server, Engine([(500, {})]) as engine:
        service.registry.add(engine.url, kind="vllm")
        with pytest.raises(errors.FaninError), _otel.span("caller"):
            SyncClient(server.url, timeout=20).sync_weights(3)
    assert below(kept.one("fanin.sync"), kept.one("caller"))


# --------------------------------------------------------------------- without


def test_a_program_that_has_not_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _otel._api() is not None, "the SDK has imported it"
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert _otel._api() is None and _otel.carried() == {}


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    api = _otel._load()
    assert api is None
    monkeypatch.setattr(_otel, "_api", lambda: api)
    with _otel.span("one", "client", step=1) as told:
        told.set(step=2)
        told.fail("FANIN_ERR_ARGUMENT", "because")
        assert not told.recording and _otel.carried() == {}
    with _otel.within({"traceparent": "x"}), pytest.raises(KeyError), _otel.span("two"):
        raise KeyError
    assert _otel.carry(missing) is missing
