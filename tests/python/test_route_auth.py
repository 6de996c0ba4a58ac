# SPDX-License-Identifier: Apache-2.0
"""vLLM's route that names a trainer takes from a request what the configuration admits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fanin.errors import RequestError
from fanin.vllm.routes import Api, EndpointPlugin
from test_shared_pulls import Bench, FakeEngine, run

OWN = ["127.0.0.1:6000"]
OTHER = ["198.51.100.9:6000"]
OURS, THEIRS = (
    SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=name))
    for name in ("fanin", "nccl")
)


class Route:
    """vLLM's, behind the plugin's door: an ASGI application that keeps the bodies it has read."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **config: str) -> None:
        monkeypatch.setattr("fanin.engine.metrics._make", lambda registry: None)
        self.bodies: list[bytes] = []
        self.route = SimpleNamespace(path="/init_weight_transfer_engine", app=self._read)
        self.beside = SimpleNamespace(path="/start_weight_update", app=self._read)
        self.state = Bench(root, FakeEngine(), **config).state
        monkeypatch.setattr("fanin.vllm.routes.state", lambda: self.state)
        self.plugin = EndpointPlugin()
        self.plugin._door.stand_before(SimpleNamespace(routes=[self.route, self.beside]))

    async def _read(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def start(self, *keys: str, config: Any = OURS) -> Route:
        """The engine is up."""
        engine = SimpleNamespace(vllm_config=config)
        models = SimpleNamespace(openai_serving_models=self.state.engine)
        run(self.plugin.init_state(engine, models, SimpleNamespace(api_key=list(keys))))
        return self

    def ask(
        self, content: bytes, authorization: str | None = None, *, size: int = 1 << 16
    ) -> tuple[int, Any]:
        """The answer to these bytes, which come *size* by *size*."""
        headers = [(b"content-type", b"application/json")]
        if authorization is not None:
            headers.append((b"authorization", authorization.encode("latin-1")))
        parts = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
        sent: list[Any] = []

        async def receive() -> Any:
            body = parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(parts)}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            sent.append(message)

        run(self.route.app({"type": "http", "headers": headers}, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])

    def init(self, trainer: Any, authorization: str | None = None, **more: Any) -> Any:
        """The status, and what the error says."""
        info = {"trainer": trainer, "run": "0", **more}
        content = json.dumps({"init_info": info}).encode()
        before = len(self.bodies)
        status, body = self.ask(content, authorization, size=7)
        # Whole, and once; or vLLM has not seen it.
        assert self.bodies[before:] == ([content] if status == 200 else [])
        return status, body.get("error")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def make(**config: str) -> Route:
        one = Route(tmp_path, monkeypatch, **config)
        one.state.engine = FakeEngine()
        one.state.attach = _attached  # type: ignore[method-assign]
        return one

    return make


async def _attached(models: Any) -> Any:
    await asyncio.sleep(0)
    return SimpleNamespace(facts=lambda: SimpleNamespace(lora_enabled=True))


def test_an_engine_with_keys_wants_one(make: Any) -> None:
    route = make().start("one", "two")
    for wrong in (None, "", "Bearer", "Bearer three", "Basic one", "one", "Bearer ö"):
        assert route.init(OWN, wrong) == (401, "Unauthorized")
    assert route.ask(b"{", None)[0] == 401
    assert route.init(OTHER, "Bearer two", save="/anywhere") == (200, None)
    assert route.ask(b" " * (2 << 20), "bearer one")[0] == 200


@pytest.mark.parametrize(
    ("allow", "trainer", "status"),
    [
        ("", OWN, 200),  # the one that the engine was told
        ("", "127.0.0.1:6000", 200),
        ("", OTHER, 403),
        ("", [*OWN, *OTHER], 403),
        ("", "/etc/hostname", 403),
        ("198.51.100.0/24", [["198.51.100.9", 6000]], 200),
        ("198.51.100.0/24", ["203.0.113.1:6000"], 403),
        ("/shared/run", "/shared/run/nixl_info.json", 200),
        ("/shared/run", "/shared/runs/nixl_info.json", 403),
        ("/shared/run", "/shared/run/../other", 403),
        ("/shared/run", "/shared/run/\0", 403),
        ("/shared/run", "/shared/run/\ud800", 403),
        ("any", "/etc/hostname", 200),
        ("any", OTHER, 200),
        ("any", None, 400),
        ("any", {"path": "/etc/hostname"}, 400),
    ],
)
def test_which_trainers_it_takes_without_a_key(
    make: Any, allow: str, trainer: Any, status: int
) -> None:
    answer, error = make(FANIN_ALLOW_TRAINERS=allow).start().init(trainer)
    assert answer == status
    if status == 403:
        assert error["code"] == "FANIN_ERR_AUTH" and "takes no trainer" in error["message"]
        for remedy in ("FANIN_ALLOW_TRAINERS", "'any'", "API key"):
            assert remedy in error["remedy"]


def test_the_trainer_is_named(make: Any) -> None:
    _, error = make().start().init(OTHER)
    assert OTHER[0] in error["message"]
    # The engine's own stays its own when it is pointed at another for adapters.
    route = make(FANIN_ALLOW_TRAINERS="h").start()
    run(Api(route.state).init({"trainer_addresses": ["h:1"], "timeout": 3}))
    assert route.init(OWN)[0] == 200


@pytest.mark.parametrize(
    ("allow", "status"),
    [("", 403), ("10.0.0.0/8", 403), ("/shared/maps", 200), ("/shared/m", 403), ("any", 200)],
)
def test_where_workers_write_without_a_key(make: Any, allow: str, status: int) -> None:
    answer, error = make(FANIN_ALLOW_TRAINERS=allow).start().init(OWN, save="/shared/maps/one")
    assert answer == status
    if status == 403:
        assert error["key"] == "save" and "/shared/maps/one" in error["message"]
        assert "FANIN_ALLOW_TRAINERS" in error["remedy"] and "API key" in error["remedy"]


def test_what_passes_untouched(make: Any) -> None:
    route = make()
    assert route.init(OTHER) == (200, None)  # the engine is not up: vLLM has nothing to begin
    assert route.beside.app == route._read
    assert make().start("key", config=THEIRS).init(OTHER) == (200, None)
    assert make().start(config=THEIRS).ask(b" " * (2 << 20))[0] == 200
    assert make().start(config=SimpleNamespace()).init(OTHER) == (200, None)


def test_what_vllm_refuses_is_left_to_it(make: Any) -> None:
    route = make().start()
    contents = [b"", b"{", b"\xff", b"[]", b'"x"', b"{}", b'{"init_info": "x"}']
    for content in contents:
        assert route.ask(content)[0] == 200
    assert route.bodies == contents


def test_a_body_has_an_end(make: Any) -> None:
    route = make(FANIN_ALLOW_TRAINERS="any").start()
    most = b'{"init_info": {"trainer": "/x"}}'.ljust(1 << 20)
    assert route.ask(most)[0] == 200
    status, body = route.ask(most + b" ")
    assert status == 413 and "1048576 bytes" in body["error"]["message"]
    status, body = route.ask(b'{"init_info":' + b"[" * 200000)
    assert status == 400 and "nested" in body["error"]["message"]
    assert route.bodies == [most]


async def test_a_caller_who_goes_away(make: Any) -> None:
    route = make()
    route.plugin._door.close((), _refuse)

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    await route.route.app({"type": "http", "headers": []}, receive, None)
    assert route.bodies == []


def _refuse(info: Any) -> None:
    raise RequestError.make("no")
