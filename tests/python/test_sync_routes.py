# SPDX-License-Identifier: Apache-2.0
"""The routes of fanin.sync: what callers send, what is refused, and who may call."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fanin.fleet.registry as registry_module
import pytest
from fanin.errors import (
    ConnectionFailedError,
    FaninError,
    PeerError,
    RequestError,
    UnreachableError,
)
from fanin.fleet.driver import Wire
from fanin.sync import Registry, Service, SyncClient, SyncServer, asgi_app
from fanin.sync.__main__ import main
from fleet import FakeSGLang, FakeVLLM, WholeTrainer
from http_engine import Answer, Engine, Request


def place(url: str) -> dict[str, Any]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return {"host": host, "port": int(port)}


@pytest.fixture
def service() -> Service:
    return Service(Registry("10.0.0.1:6000", timeout=30, ask_trainer=False))


def call(service: Service, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    content = b"" if body is None else json.dumps(body).encode()
    status, reply = service.answer(method, path, content)
    return status, json.loads(json.dumps(reply))


# What a user of NCCL weight synchronisation sends today.
def test_what_users_send(service: Service, engine: FakeVLLM) -> None:
    add = {**place(engine.url), "world_size": 2}
    status, reply = call(service, "/add_inference_endpoint", add)
    assert status == 200 and reply["success"] and reply["endpoint"]["world_size"] == 2
    status, reply = call(service, "/api/v1/add_inference_endpoint", add)
    assert status == 200 and reply["success"] and "already" in reply["message"]
    sync = {
        "step": 9,
        "model_id": "default",
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "group_name": "weight_sync_group",
        "buffer_size_mb": 1024,
        "flush_cache": True,
        "cache_invalidation_mode": "auto",
        "pause_mode": "retract",
        "weight_version": "opd-9",
        "quantization": None,
        "pools": None,
    }
    for path in ("/api/v1/sync_inference_weights", "/sync_inference_weights"):
        status, reply = call(service, path, sync)
        assert status == 200 and reply["success"], reply
        assert reply["weight_version"] == engine.version == "opd-9"
        (told,) = reply["endpoints_synced"]
        assert told["success"] and told["port"] == add["port"]
        notices = " ".join(reply["notices"])
        for name in ("master_address", "master_port", "group_name", "buffer_size_mb"):
            assert f"{name} is not needed" in notices
    status, reply = call(service, "/api/v1/list_inference_endpoints", method="GET")
    assert status == 200 and reply["count"] == 1 and reply["endpoints"][0]["healthy"]
    status, reply = call(service, "/remove_inference_endpoint", place(engine.url))
    assert status == 200 and reply["success"]
    status, reply = call(service, "/remove_inference_endpoint", place(engine.url))
    assert status == 200 and not reply["success"]
    assert call(service, "/list_inference_endpoints", method="GET")[1]["count"] == 0


@pytest.mark.parametrize("nothing", [None, "bf16", "none", {"quant_method": "bf16"}])
def test_no_quantization(service: Service, nothing: Any) -> None:
    status, reply = call(service, "/api/v1/set_sync_quantization", {"quantization": nothing})
    assert status == 200 and reply["quantization"] is None


@pytest.mark.parametrize(
    ("what", "says"), [("fp8", "does not ask"), ({}, "unknown"), (8, "unknown"), ([1], "unknown")]
)
def test_quantization_is_refused_with_what_is_supported(
    service: Service, engine: FakeVLLM, what: Any, says: str
) -> None:
    call(service, "/add_inference_endpoint", place(engine.url))
    for path, body in (
        ("/api/v1/set_sync_quantization", {"quantization": what}),
        ("/sync_inference_weights", {"step": 1, "quantization": what}),
    ):
        status, reply = call(service, path, body)
        assert status == 400 and says in reply["detail"] and reply["error"]["remedy"]
    assert not engine.count("/pause")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/sync_inference_weights", {"stpe": 1}, "'stpe' is unknown"),
        ("/sync_inference_weights", {"step": "1"}, "step '1' is not an integer"),
        ("/sync_inference_weights", {"step": True}, "step True is not an integer"),
        ("/sync_inference_weights", {"step": 1, "pause_mode": "stop"}, "pause_mode 'stop'"),
        ("/sync_inference_weights", {"step": 1, "pools": "a"}, "pools 'a'"),
        ("/sync_inference_weights", {"step": 1, "flush_cache": 1}, "flush_cache 1"),
        ("/sync_inference_weights", {"step": 1, "model_id": "x"}, "model_id 'x'"),
        ("/sync_inference_weights", {"step": 1, "cache_invalidation_mode": "x"}, "'x' is unknown"),
        ("/sync_inference_weights", [1], "no JSON object"),
        ("/add_inference_endpoint", {"host": "h"}, "port is missing"),
        ("/add_inference_endpoint", {"port": 1}, "host is missing"),
        ("/add_inference_endpoint", {"host": "h", "port": 70000}, "make no address"),
        ("/add_inference_endpoint", {"host": "h/x", "port": 1}, "make no address"),
        ("/add_inference_endpoint", {"url": "http://h:1", "host": "h"}, "url is given"),
        ("/add_inference_endpoint", {"host": "a" * 70, "port": 1}, "no engine's URL"),
        ("/add_inference_endpoint", {"url": "http://..x:1"}, "no engine's URL"),
        ("/sync_inference_weights", {"step": 1, "timeout": float("inf")}, "is not below 1000000"),
        ("/sync_inference_weights", {"step": 1, "timeout": 1e11}, "is not below 1000000"),
        ("/sync_inference_weights", {"step": 1, "timeout": 10**400}, "is not below 1000000"),
        ("/sync_inference_weights", {"step": 1, "timeout": float("nan")}, "is not above 0"),
        ("/add_inference_endpoint", {"url": "http://a b:1"}, "no engine's URL"),
        ("/add_inference_endpoint", {"url": "http://h:1/\u00fc"}, "no engine's URL"),
        ("/add_inference_endpoint", {"host": "h", "port": 1, "api_key": ""}, "api_key is empty"),
        ("/add_inference_endpoint", {"host": "h", "port": 1, "sync_weights": 1}, "sync_weights 1"),
        (
            "/add_inference_endpoint",
            {"host": "h", "port": 1, "receiver_kv_cache_dtype": "fp8"},
            "cannot be checked",
        ),
        ("/remove_inference_endpoint", {"host": "h", "port": 1, "force": True}, "'force'"),
        ("/set_sync_quantization", {"quant": None}, "'quant' is unknown"),
        ("/set_sync_quantization", {"skip_modules": ["a"]}, "and no quantization"),
        ("/set_sync_quantization", {"quantization": "fp8", "skip_modules": "a"}, "skip_modules"),
    ],
)
def test_refused(service: Service, path: str, body: Any, says: str) -> None:
    status, reply = call(service, path, body)
    assert status == 400 and says in reply["detail"] and reply["success"] is False
    assert not service.registry.endpoints()


def test_no_route_and_no_json(service: Service) -> None:
    assert service.answer("POST", "/sync")[0] == 404
    assert service.answer("GET", "/sync_inference_weights")[0] == 405
    assert service.answer("POST", "/sync_inference_weights", b"{")[0] == 400
    assert service.answer("POST", "/sync_inference_weights", b"[" * 100_000)[0] == 400
    assert call(service, "/sync_inference_weights", {"step": 1})[0] == 404  # nobody to sync
    assert call(service, "/health", method="GET") == (200, {"status": "healthy"})


def test_a_dead_endpoint_is_not_added(service: Service, engine: FakeVLLM) -> None:
    engine.__exit__(None, None, None)
    status, reply = call(service, "/add_inference_endpoint", place(engine.url))
    assert status == 503 and engine.url in reply["detail"]
    assert not service.registry.endpoints()


def test_one_whose_check_meets_a_fault_is_not_added(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def driver_of(*_: Any) -> Any:
        raise ValueError("a fault of the program's own")

    monkeypatch.setattr(registry_module, "driver_of", driver_of)
    assert call(service, "/add_inference_endpoint", {"host": "h", "port": 1})[0] == 500
    assert not service.registry.endpoints()


def test_one_that_dies_later_is_listed_as_unwell(service: Service, engine: FakeVLLM) -> None:
    call(service, "/add_inference_endpoint", place(engine.url))
    engine.__exit__(None, None, None)
    (listed,) = call(service, "/list_inference_endpoints", method="GET")[1]["endpoints"]
    assert not listed["healthy"]
    status, reply = call(service, "/sync_inference_weights", {"step": 1})
    assert status == 502 and reply["success"] is False
    assert engine.url in reply["endpoints_synced"][0]["message"]
    assert call(service, "/remove_inference_endpoint", place(engine.url))[1]["success"]


def test_a_failed_sync_is_no_200(service: Service, engine: FakeVLLM) -> None:
    call(service, "/add_inference_endpoint", place(engine.url))
    engine.refuse("/update_weights", 500, "rank 2 is gone")
    status, reply = call(service, "/sync_inference_weights", {"step": 1})
    assert status == 502 and not reply["success"] and "rank 2 is gone" in reply["message"]
    assert reply["endpoints_synced"][0]["paused"]
    engine.hang("/update_weights")
    status, reply = call(service, "/sync_inference_weights", {"step": 1, "timeout": 0.5})
    assert status == 504


def test_one_of_a_group_and_added_with_a_sync(engine: FakeVLLM) -> None:
    with WholeTrainer() as trainer, FakeSGLang() as sglang:
        trainer.commit(3)
        service = Service(Registry(trainer.info, timeout=30))
        add = {**place(engine.url), "pool": "eval", "sync_weights": True}
        reply = call(service, "/add_inference_endpoint", add)[1]
        assert reply["weights_synced"] and engine.version == "step-3"
        call(service, "/add_inference_endpoint", place(sglang.url))
        body = {"pools": ["default"], "pause_mode": "in_place"}
        reply = call(service, "/sync_inference_weights", body)[1]
        assert (
            reply["step"] == 3 and not reply["flush_cache"] and len(reply["endpoints_synced"]) == 1
        )
        assert sglang.bodies["/pause_generation"] == {"mode": "in_place"}
        assert not sglang.count("/flush_cache")


# ------------------------------------------------------------------ servers and their client


def test_server_and_client(service: Service, engine: FakeVLLM) -> None:
    with SyncServer(service) as server:
        client = SyncClient(server.url, timeout=30)
        assert client.add(**place(engine.url))["endpoint"]["kind"] == "vllm"
        assert client.sync_weights(4)["step"] == 4 and engine.version == "step-4"
        assert [entry["healthy"] for entry in client.list()] == [True]
        engine.refuse("/update_weights", 500, "rank 1 is gone")
        with pytest.raises(ConnectionFailedError, match="rank 1 is gone"):
            client.sync_weights(5)
        with pytest.raises(RequestError, match="pause_mode 'x'"):
            client.sync_weights(5, pause_mode="x")
        assert client.remove(**place(engine.url)) and not client.remove(**place(engine.url))
    with pytest.raises(UnreachableError):
        client.list()
    with Engine([(200, b"hello")]) as other, pytest.raises(PeerError, match="not fanin.sync"):
        SyncClient(other.url).list()


def test_a_key(engine: FakeVLLM) -> None:
    service = Service(Registry("h:1", timeout=30, ask_trainer=False), api_key="secret")
    with SyncServer(service) as server:
        for key in (None, "wrong"):
            with pytest.raises(RequestError, match="unauthorized"):
                SyncClient(server.url, api_key=key).add(**place(engine.url))
        assert SyncClient(server.url, api_key="secret").add(**place(engine.url))["success"]
        assert service.answer("GET", "/health")[0] == 401


TAKES_A_KEY: dict[str, Callable[[str], Any]] = {
    "Service": lambda key: Service(Registry("h:1"), api_key=key),
    "SyncClient": lambda key: SyncClient("http://h:1", api_key=key),
    "Registry": lambda key: Registry("h:1", api_key=key),
    "Registry.add": lambda key: Registry("h:1").add("http://h:1", api_key=key),
    "SyncClient.add": lambda key: SyncClient("http://h:1").add("h", 1, api_key=key),
    "Wire": lambda key: Wire("http://h:1", key),
}


@pytest.mark.parametrize("what", TAKES_A_KEY)
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "the api_key is empty; remedy: give a key"),
        (" \n", "the api_key is empty"),
        ("hidden\nkey", "a character that no HTTP header may have"),
        ("hidden-s\u00e9same", "a character that no HTTP header may have"),
        (b"hidden", "the api_key is no text"),
    ],
)
def test_what_is_no_key(what: str, key: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        TAKES_A_KEY[what](key)
    assert caught.value.key == "api_key" and "hidden" not in str(caught.value)


def test_whitespace_around_a_key_is_no_part_of_it(engine: FakeVLLM) -> None:
    """As a mounted secret has it."""
    service = Service(Registry("h:1", ask_trainer=False, api_key="engines\n"), api_key="secret\n")
    with SyncServer(service) as server:
        assert SyncClient(server.url, api_key=" secret\r\n").add(**place(engine.url))["success"]
    assert keys_sent(engine) == {"Bearer engines"}


def keys_sent(engine: FakeVLLM) -> set[str | None]:
    """What the requests since the last look had as Authorization."""
    requests, engine.http.requests = engine.http.requests, []
    return {request.headers.get("Authorization") for request in requests}


def test_who_need_not_know_a_key_has_no_use_of_the_engines(engine: FakeVLLM) -> None:
    """Any user of the host may add a listener of their own."""
    registry = Registry("h:1", ask_trainer=False, api_key="engines")
    add = place(engine.url)
    everybody = Service(registry)
    assert call(everybody, "/add_inference_endpoint", add)[0] == 200
    assert call(everybody, "/add_inference_endpoint", add)[0] == 200
    assert call(everybody, "/sync_inference_weights", {"step": 1})[0] == 200
    assert keys_sent(engine) == {None}
    with SyncServer(everybody) as server:
        SyncClient(server.url).add(**add, api_key="own\n")
    assert keys_sent(engine) == {"Bearer own"}
    call(everybody, "/remove_inference_endpoint", add)

    engine.hooks["/health"] = lambda r: (
        (401, {"error": "Unauthorized"}) if r.headers.get("Authorization") is None else None
    )
    status, reply = call(everybody, "/add_inference_endpoint", add)
    assert status == 400 and "give the engine's api_key with the request" in reply["detail"]
    assert "not sent to engines that they add" in reply["detail"]
    assert keys_sent(engine) == {None}


def test_the_engines_key_is_sent_where_it_was_meant(engine: FakeVLLM) -> None:
    add = place(engine.url)
    registry = Registry("h:1", ask_trainer=False, api_key="engines")
    everybody, knowing = Service(registry), Service(registry, api_key="secret")

    # By who knows the service's key.
    with SyncServer(knowing) as server:
        SyncClient(server.url, api_key="secret").add(**add)
    assert keys_sent(engine) == {"Bearer engines"}
    # Added in the process, also after somebody has added it; then it keeps what it has.
    registry.remove(engine.url)
    call(everybody, "/add_inference_endpoint", add)
    assert keys_sent(engine) == {None}
    registry.add(engine.url)
    call(everybody, "/add_inference_endpoint", add)
    assert keys_sent(engine) == {"Bearer engines"}


def test_a_key_that_is_refused_is_not_kept(engine: FakeVLLM) -> None:
    """Nor is anything else of the request."""

    def guard(request: Request) -> Answer | None:
        known = request.headers.get("Authorization") == "Bearer right"
        return None if known else (401, {"error": "Unauthorized"})

    engine.hooks["/health"] = guard
    registry = Registry("h:1", timeout=30, ask_trainer=False, api_key="right")
    registry.add(engine.url)
    assert registry.sync(1).ok
    before = registry.endpoints()
    add = {**place(engine.url), "pool": "eval", "world_size": 7}
    status, reply = call(Service(registry), "/add_inference_endpoint", {**add, "api_key": "wrong"})
    assert status == 400 and "give the engine's api_key" in reply["detail"]
    assert registry.endpoints() == before and registry.sync(2).ok
    add["api_key"] = "right"
    assert call(Service(registry), "/add_inference_endpoint", add)[0] == 200
    assert [entry.group for entry in registry.endpoints()] == ["eval"] and registry.sync(3).ok


@pytest.mark.parametrize(
    "url",
    ["http://user:hidden@h:1", "http://:hidden@h:1", "http://user:hid[den@h:1", "//u:hidden@h"],
)
def test_a_password_in_a_url_is_told_to_nobody(service: Service, url: str) -> None:
    status, reply = call(service, "/add_inference_endpoint", {"url": url})
    assert status == 400 and "a user or a password" in reply["detail"]
    assert "hid" not in json.dumps(reply) and not service.registry.endpoints()
    with pytest.raises(RequestError) as caught:
        SyncClient(url)
    assert "hid" not in str(caught.value)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), 1e11, 10**400, "5", True])
def test_what_is_no_timeout(service: Service, timeout: Any) -> None:
    for make in (
        lambda: Registry("h:1", timeout=timeout),
        lambda: Registry("h:1", pull_timeout=timeout),
        lambda: service.registry.sync(1, timeout=timeout),
        lambda: SyncClient("http://h:1", timeout=timeout),
        lambda: SyncClient("http://h:1").sync_weights(timeout=timeout),
    ):
        with pytest.raises(RequestError, match="timeout"):
            make()


def test_others_can_reach_it_only_with_a_key(service: Service) -> None:
    with pytest.raises(RequestError, match="can be reached by others"):
        SyncServer(service, bind="0.0.0.0")


def test_a_body_that_is_too_large(service: Service) -> None:
    import http.client

    with SyncServer(service) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.putrequest("POST", "/sync_inference_weights")
        connection.putheader("Content-Length", str(1 << 30))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


async def test_mounted_in_an_application(service: Service, engine: FakeVLLM) -> None:
    app = asgi_app(service)

    async def ask(path: str, body: Any, root: str = "") -> tuple[int, Any]:
        pieces = [json.dumps(body).encode(), b""]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            body = pieces.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(pieces)}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "root_path": root}
        await app(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    assert (await ask("/add_inference_endpoint", place(engine.url)))[0] == 200
    status, reply = await ask("/weights/api/v1/sync_inference_weights", {"step": 2}, "/weights")
    assert status == 200 and reply["success"] and engine.version == "step-2"
    assert (await ask("/add_inference_endpoint", {"x": "y" * (1 << 20)}))[0] == 413
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    done: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        done.append(message["type"])

    await asyncio.wait_for(app({"type": "lifespan"}, receive, send), 30)
    assert done == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_mounted_and_the_peer_goes(service: Service, engine: FakeVLLM) -> None:
    """Before its request has come: no sync of all engines."""
    call(service, "/add_inference_endpoint", place(engine.url))
    scope = {"type": "http", "method": "POST", "path": "/sync_inference_weights", "headers": []}
    gone = {"type": "http.disconnect"}
    for messages in ([gone], [{"type": "http.request", "body": b"", "more_body": True}, gone]):

        async def receive(messages: list[Any] = messages) -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            raise AssertionError(message)

        await asyncio.wait_for(asgi_app(service)(scope, receive, send), 30)
    assert not engine.count("/pause")


def test_a_server_of_its_own(engine: FakeVLLM) -> None:
    with WholeTrainer() as trainer:
        trainer.commit(6)
        command = [sys.executable, "-m", "fanin.sync", ",".join(trainer.info.addresses), engine.url]
        process = subprocess.Popen(
            [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            assert SyncClient(url, timeout=30).sync_weights()["step"] == 6
            assert engine.version == "step-6"
        finally:
            process.terminate()
            process.communicate(timeout=30)


@contextmanager
def served(
    engine: FakeVLLM, trainer: WholeTrainer, *more: str, key: str | None = None
) -> Iterator[tuple[Any, SyncClient]]:
    """Options stand between the trainer and the engine, as they may."""
    command = [sys.executable, "-m", "fanin.sync", ",".join(trainer.info.addresses)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--prefetch", "no", *more, engine.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, SyncClient(process.stdout.readline().split()[-1], timeout=60, api_key=key)
    finally:
        process.kill()
        process.communicate(timeout=30)


def in_a_sync(engine: FakeVLLM, client: SyncClient) -> threading.Thread:
    def call() -> None:
        with contextlib.suppress(FaninError):
            client.sync_weights(1)

    thread = threading.Thread(target=call)
    thread.start()
    assert engine.at["/update_weights"].wait(60)
    return thread


def test_keys_from_files(engine: FakeVLLM, tmp_path: Path) -> None:
    """So that no user of the host reads them in the command line; they outdo the variables."""
    mine, engines = tmp_path / "mine", tmp_path / "engines"
    mine.write_text("sesame\n")
    engines.write_text("theirs\n")
    with WholeTrainer() as trainer, pytest.MonkeyPatch.context() as patched:
        trainer.commit(1)
        patched.setenv("FANIN_SYNC_API_KEY", "variable")
        patched.setenv("FANIN_ENGINE_API_KEY", "variable")
        more = ["--api-key-file", str(mine), "--engine-api-key-file", str(engines)]
        with served(engine, trainer, *more, key="sesame") as (process, client):
            assert client.sync_weights(1)["success"]
            with pytest.raises(RequestError, match="unauthorized"):
                SyncClient(client.url, api_key="variable").list()
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            assert b"sesame" not in line and b"theirs" not in line
    assert keys_sent(engine) == {"Bearer theirs"}


def command(*arguments: str) -> SimpleNamespace:
    """The program, in this process: how it ends, and what it says."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        sys.exit(main(list(arguments)))
    code = ended.value.code
    return SimpleNamespace(returncode=code or 0, stdout=out.getvalue(), stderr=err.getvalue())


@pytest.mark.parametrize("option", ["--api-key", "--engine-api-key"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read {path}: No such file"),
        (b"\xff\xfehidden", "cannot read {path}: it is no text"),
        (b" \n", "the api_key is empty"),
        (b"hidden\nkey\n", "the api_key has a character that no HTTP header may have"),
    ],
)
def test_a_file_that_has_no_key(
    tmp_path: Path, option: str, content: bytes | None, says: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    done = command("h:1", f"{option}-file", str(path))
    assert done.returncode == 2 and "hidden" not in done.stderr
    assert f"argument {option}-file: {says.format(path=path)}" in done.stderr


def test_a_key_by_both_ways(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k")
    done = command("h:1", "--api-key", "k", "--api-key-file", str(tmp_path / "key"))
    assert done.returncode == 2 and "not allowed with argument --api-key" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_sync_waits_for_its_end(engine: FakeVLLM, number: int) -> None:
    """No engine is left paused."""
    with WholeTrainer() as trainer:
        trainer.commit(1)
        hold = engine.hang("/update_weights")
        with served(engine, trainer) as (process, client):
            thread = in_a_sync(engine, client)
            process.send_signal(number)
            said = ""
            while "is waited for" not in said:
                said += process.stderr.readline()
                assert process.poll() is None
            assert engine.url in said
            hold.set()
            assert process.wait(60) == 0
            thread.join()
    assert engine.version == "step-1" and not engine.paused


def test_a_second_signal_ends_it_with_a_word(engine: FakeVLLM) -> None:
    with WholeTrainer() as trainer:
        trainer.commit(1)
        engine.hang("/update_weights")
        with served(engine, trainer) as (process, client):
            thread = in_a_sync(engine, client)
            process.terminate()
            said = ""
            while "is waited for" not in said:
                said += process.stderr.readline()
            process.terminate()
            assert process.wait(60) == 1
            assert f"{engine.url}, which may be paused" in said + process.stderr.read()
            thread.join()


def test_a_caller_whose_key_is_no_ascii() -> None:
    service = Service(Registry("h:1", timeout=30, ask_trainer=False), api_key="sesame")
    assert service.answer("GET", "/health", b"", "Bearer sésam\xff")[0] == 401
    assert service.answer("GET", "/health", b"", "Bearer sesame")[0] == 200


OPEN = ["h:1", "--bind", "0.0.0.0", "--port", "0"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "trainer"),
        (["h:1", "--port", "x"], 2, "invalid int"),
        (["h:1", "--prefetch", "x"], 2, "invalid choice"),
        (["h:1", "--api-key", ""], 2, "argument --api-key: the api_key is empty"),
        (["h:1", "--engine-api-key", ""], 2, "argument --engine-api-key: the api_key is empty"),
        (["h:1", "--speed", "9", "http://h:1"], 2, "unrecognized arguments: --speed"),
        (OPEN, 1, "give an api_key"),
        (["h:x"], 1, "no HOST:PORT"),
    ],
)
def test_wrong_arguments(arguments: list[str], code: int, says: str) -> None:
    done = command(*arguments)
    assert done.returncode == code and says in done.stderr


def test_help() -> None:
    done = command("--help")
    assert done.returncode == 0
    for option in ("--run", "--bind", "--port", "--timeout", "--prefetch", "--verify-served"):
        assert option in done.stdout


def test_a_variable_that_is_empty_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """With which a service would look guarded, and let everybody in."""
    monkeypatch.setenv("FANIN_SYNC_API_KEY", "")
    monkeypatch.setenv("FANIN_ENGINE_API_KEY", "")
    done = command(*OPEN)
    assert done.returncode == 1 and "can be reached by others" in done.stderr
