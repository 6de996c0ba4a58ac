# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked by fanin.check, without an engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fanin
import fanin.check
import pytest
from fanin import HostError, PeerError, RequestError
from fanin._served import Held, Layout, digests_of
from fanin.check import main

ANSWERS: dict[str, Any] = {
    "/weight_checker": {"checksums": {"a": "1"}},
    "/get_world_size": {"world_size": 1},
    "/collective_rpc": {
        "results": [
            {
                "modules": 1,
                "bytes": 8,
                "different": [],
                "unseen": ["x" * (2 << 20)],
                "kept": [],
            }
        ]
    },
}

REFUSED: dict[str, int] = {}


class _Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.dumps(ANSWERS.get(self.path, {"error": {"message": "no such route"}})).encode()
        self.send_response(REFUSED.get(self.path, 200 if self.path in ANSWERS else 404))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An engine, and an environment whose proxy is not there."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_engine_is_asked_without_the_environments_proxy(engine: str) -> None:
    report = fanin.check.weights(engine, 7)
    assert (report.workers, report.modules, report.bytes) == (1, 1, 8)
    assert fanin.check.replicas([engine, engine + "/"]) == ()


def test_an_engine_without_the_route_is_named(engine: str) -> None:
    with pytest.raises(RequestError, match="status 404: no such route") as caught:
        fanin.check.weights(f"{engine}/elsewhere", 7)
    assert "VLLM_SERVER_DEV_MODE" in caught.value.remedy


def test_a_trainer_without_digests_is_told_what_to_do() -> None:
    with fanin.Server(world_id=bytes(range(16)), rank=0, world_size=1) as server:
        server.put("full:0", [fanin.shard_of("w", bytearray(4), dtype="U8")])
        server.commit("full:0", 1)
        with pytest.raises(fanin.NotFoundError, match="rank 0 .* no digests of full:0") as caught:
            fanin.check.trained([f"127.0.0.1:{server.port}"], 0, 10.0, {})
    assert "digests=True" in caught.value.remedy


def test_digests_on_their_way_are_waited_for() -> None:
    one, two = (
        fanin.Server(world_id=bytes(range(16)), rank=rank, world_size=2) for rank in range(2)
    )
    with one, two:
        layouts = [Layout("w", "U8", (4,), (((0,), (4,)),))]
        told = bytearray(digests_of(layouts, 7, [Held("w", (0,), (4,), {"U8": 5})]))
        sizes = len(told)
        for rank, server in enumerate((one, two)):
            server.put("full:0", [fanin.shard_of("w", bytearray(4), dtype="U8")])
            server.begin_update("full:0.digests")
            server.commit("full:0", 7)
            mine = fanin.shard_of(f"rank{rank}", told, dtype="U8")
            other = fanin.Shard(f"rank{1 - rank}", "U8", (sizes,), (), -1)
            server.put("full:0.digests", [mine, other])
        one.commit("full:0.digests", 7)
        addresses = [f"127.0.0.1:{server.port}" for server in (one, two)]
        timer = threading.Timer(0.3, two.commit, ("full:0.digests", 7))
        timer.start()
        step, ranks = fanin.check.trained(addresses, 0, 30.0, {}, step=7)
        timer.join()
        assert step == 7 and [held[0].digests for _, held in ranks] == [{"U8": 5}] * 2
        # Rank 1 goes on, and digests nothing: nobody waits.
        for server, runs in ((one, ("full:0", "full:0.digests")), (two, ("full:0",))):
            for run in runs:
                server.begin_update(run)
            server.commit("full:0", 8)
        with pytest.raises(fanin.NotFoundError, match="rank 1 .* no digests of step 8 of full:0"):
            fanin.check.trained(addresses, 0, 60.0, {}, step=8)


def test_the_engine_is_asked_first(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may take long to answer."""
    asked: list[str] = []

    def trained(*_: object) -> Any:
        asked.append("trainer")
        raise fanin.NotFoundError.make("no digests")

    monkeypatch.setattr(fanin.check, "trained", trained)
    for wrong in (f"{engine}/elsewhere", "http://127.0.0.1:1", object()):
        with pytest.raises(RequestError, match="elsewhere|127.0.0.1:1|object is no engine"):
            fanin.check.served(wrong, "/shared/run")
    assert not asked
    with pytest.raises(fanin.NotFoundError):
        fanin.check.served(engine, "/shared/run")


def test_an_sglang_is_asked_by_its_own_route(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [["w", [0], [2], {"BF16": 5}]]
    answer = {
        "held": held,
        "different": [],
        "unseen": ["mlp"],
        "untold": ["m"],
        "unused": ["u.v"],
    }
    ranks = [{"checksums": {"fanin.served_digests": json.dumps(answer)}}] * 2
    monkeypatch.setitem(ANSWERS, "/model_info", {"model_path": "m"})
    monkeypatch.setitem(ANSWERS, "/weights_checker", {"success": True, "ranks": ranks})
    layouts = [Layout(name, "BF16", (2,), (((0,), (2,)),)) for name in ("m", "u.v", "w")]
    trained = [Held(name, (0,), (2,), {"BF16": 5}) for name in ("m", "u.v", "w")]
    monkeypatch.setattr(fanin.check, "trained", lambda *_: (7, [(layouts, trained)]))
    report = fanin.check.served(engine, "127.0.0.1:1")
    assert report == fanin.check.Served(
        7, 2, 1, 1, 2, (), ("worker 0: mlp", "worker 1: mlp"), ("u.v",)
    )
    monkeypatch.setitem(ANSWERS, "/weights_checker", {"success": True, "ranks": [{}]})
    with pytest.raises(PeerError, match="knows no digests") as caught:
        fanin.check.served(engine, "127.0.0.1:1")
    assert "plugin" in caught.value.remedy


def test_adapters_are_asked_of_the_plugin(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [Layout("w", "BF16", (2,), (((0,), (2,)),), 2.0)]
    digests = dict.fromkeys(layouts[0].types(), 5)
    trained = (3, [(layouts, [Held("w", (0,), (2,), digests)])])
    monkeypatch.setattr(fanin.check, "trained", lambda *_: trained)

    def served(held: list[Any]) -> fanin.check.Served:
        rest: dict[str, list[Any]] = {"different": [], "unseen": [], "untold": [], "unused": []}
        answers = {"a-run0-step3": [{"held": held, **rest}]}
        monkeypatch.setitem(ANSWERS, "/nixl/served", {"adapters": answers})
        return fanin.check.served(engine, "127.0.0.1:1", "lora:0")

    report = served([["w", [0], [2], {"F16*2": 5}]])
    assert (report.step, report.tensors, report.workers) == (3, 1, 1)
    with pytest.raises(HostError, match=r"a-run0-step3: 1 tensors .* held by nobody"):
        served([["w", [0], [1], {"F16*2": 5}]])
    for told in ({}, {"adapters": {}}, {"adapters": {"a": 1}}, {"adapters": [1]}):
        monkeypatch.setitem(ANSWERS, "/nixl/served", told)
        with pytest.raises(PeerError, match="tells of no adapter") as other:
            fanin.check.served(engine, "127.0.0.1:1", "lora:0")
        assert "the same version" in other.value.remedy
    monkeypatch.setitem(ANSWERS, "/nixl/served", {"adapters": {"a-run0-step3": ["later"]}})
    with pytest.raises(PeerError, match="worker 0 cannot be read"):
        fanin.check.served(engine, "127.0.0.1:1", "lora:0")
    refusal = {"error": {"message": "no adapter of step 3", "remedy": "load that step"}}
    monkeypatch.setitem(ANSWERS, "/nixl/served", refusal)
    monkeypatch.setitem(REFUSED, "/nixl/served", 404)
    with pytest.raises(RequestError, match="status 404: no adapter of step 3") as caught:
        fanin.check.served(engine, "127.0.0.1:1", "lora:0")
    assert caught.value.remedy == "load that step"
    with pytest.raises(RequestError, match="only vLLM's server"):
        fanin.check.served(object(), "127.0.0.1:1", "lora:0")


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit status and lines of each outcome."""
    good = fanin.check.Served(7, 2, 4, 31, 62, (), ("worker 0: mlp",), ())
    bad = fanin.check.Served(7, 2, 4, 30, 62, ("w: cut",), (), ("mtp.x",))
    difference = HostError.make("1 tensors are not served", "", key="w")
    difference.report = bad  # type: ignore[attr-defined]
    silent = fanin.UnreachableError.make("rank 3 is gone", "start it", rank=3)
    outcomes: list[Any] = []
    asked: dict[str, Any] = {}

    def served(engine: str, trainer: str, run: str, **more: Any) -> Any:
        assert (engine, trainer, run) == ("http://e", "/shared/run", "1")
        asked.update(more)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(fanin.check, "served", served)
    monkeypatch.setenv("FANIN_ENGINE_API_KEY", "of the environment")
    told = ["http://e", "/shared/run", "--run", "1", "--timeout", "5"]
    outcomes += [good, difference, RequestError.make("no engine", "give one"), silent]
    assert [main(told) for _ in range(4)] == [0, 14, 11, 13]
    said = capsys.readouterr()
    assert "unseen: worker 0: mlp" in said.out and "differs: w: cut" in said.out
    assert "step 7: 31 tensors of 4 ranks are served by 2 workers as they are trained" in said.out
    assert "fanin.check: no engine" in said.err
    assert asked == {"timeout": 5.0, "api_key": "of the environment"}

    (tmp_path / "key").write_text("of the file\n")
    told += ["--engine-api-key-file", str(tmp_path / "key"), "--secret-file", "s", "--tls-ca", "c"]
    told += ["--world-id", "a" * 32, "--server-name", "job", "--json"]
    outcomes += [difference, silent]
    assert [main(told) for _ in range(2)] == [14, 13]
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["result"] == "differs" and one["different"] == ["w: cut"] and one["schema"] == 1
    assert other["error"]["status"] == "FANIN_ERR_UNREACHABLE" and other["error"]["rank"] == 3
    assert other["error"]["key"] is None
    assert asked["api_key"] == "of the file" and asked["secret_file"] == "s"
    assert asked["world_id"] == "a" * 32 and "tls_cert" not in asked
    with pytest.raises(SystemExit) as caught:
        main(["http://e"])
    assert caught.value.code == 2
    assert main([*told[:2], "--engine-api-key-file", str(tmp_path)]) == 11
