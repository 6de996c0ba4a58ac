# SPDX-License-Identifier: Apache-2.0
"""Engines read a step while they generate, and stand still for its installation only."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from typing import Any

import fanin.fleet.engine_sync as engine_sync
import fleet
import pytest
from fanin.engine.weights_state import require_host_room
from fanin.errors import HostError, RequestError
from fanin.sync import Registry, Service, SyncClient, SyncError, SyncServer
from fanin.vllm import patches
from fleet import HANG_UP, FakeEngine, FakeSGLang, FakeVLLM, failure, internal
from http_engine import Answer, Request

START, UPDATE, STATE = "/start_weight_update", "/update_weights", "/collective_rpc"
WAY = [START, UPDATE, "/pause", UPDATE, "/finish_weight_update", "/resume"]


def reading(done: int) -> dict[str, Any]:
    return {"state": "reading", "bytes": done, "total": 50, "why": ""}


READY = {"state": "ready", "bytes": 50, "total": 50, "why": ""}


def failed(why: str, code: str = "FANIN_ERR_UNREACHABLE") -> dict[str, Any]:
    return {"state": "failed", "bytes": 10, "total": 50, "why": why, "code": code}


registry_of = functools.partial(fleet.registry_of, prefetch="auto")


def way_of(engine: FakeEngine) -> list[str]:
    return [path for path in engine.paths if path in WAY]


def test_it_is_paused_when_all_of_it_is_there(engine: FakeVLLM) -> None:
    engine.workers = 1
    engine.reads = [reading(10), reading(30), READY]
    left: list[int] = []

    def pause(_: Request) -> None:
        left.append(len(engine.reads))

    engine.hooks["/pause"] = pause
    result = registry_of(engine).sync(7).results[engine.url]
    assert way_of(engine) == WAY and left == [1]
    assert engine.updates == [("ahead", False), ("update", True)]
    assert engine.model == "weights of step 7" and not engine.paused
    assert result.ok and result.ahead and result.note == ""


def test_what_each_engine_tells(engine: FakeVLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fanin.sync")
    with FakeSGLang() as sglang:
        registry = registry_of(engine, sglang)
        results = registry.sync(7)
        (one, other) = results.results[engine.url], results.results[sglang.url]
        assert (one.step, one.bytes, one.read, one.rate, one.how) == (7, 100, 0.5, 200, "cma")
        assert (other.bytes, other.rate, other.how) == (100, 200, "4 tensors by cma")
        assert results.bytes == 200
        for result in (one, other):
            assert result.stall is not None and 0 < result.stall <= results.seconds
            body = result.to_json()
            assert (body["step"], body["bytes"], body["bytes_per_s"]) == (7, 100, 200)
            assert set(body["seconds"]) >= {"health", "init", "pause", "update", "finish"}
            assert f"{result.endpoint.url} has step 7; 0.0 MB by" in caplog.text
        assert list(one.seconds) == [
            *("health", "init", "ahead", "pause", "update", "finish", "resume")
        ]
        assert one.ahead and not other.ahead and other.note == ""


def test_by_the_route(engine: FakeVLLM) -> None:
    with SyncServer(Service(registry_of(engine))) as server:
        client = SyncClient(server.url, timeout=30)
        reply = client.sync_weights(7)
        (told,) = reply["endpoints_synced"]
        assert told["ahead"] and told["bytes"] == reply["total_bytes"] == 100
        assert told["stall_s"] == pytest.approx(reply["stall_s"], abs=1e-5)
        assert not client.sync_weights(8, prefetch=False)["endpoints_synced"][0]["ahead"]
        assert engine.updates[2:] == [("update", True)]
        for wrong in (1, "yes", {}):
            with pytest.raises(RequestError, match="prefetch .* is unknown"):
                client.sync_weights(9, prefetch=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1, 0, "yes", None, 1.0])
def test_what_is_no_prefetch(wrong: Any) -> None:
    with pytest.raises(RequestError, match="prefetch .* is unknown"):
        Registry("h:1", prefetch=wrong)


def test_what_could_not_be_read_is_an_ordinary_update(
    engine: FakeVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fanin.sync")
    engine.reads = [reading(10), failed("rank 1 was silent")]
    result = registry_of(engine).sync(7).results[engine.url]
    assert result.ok and not result.ahead and result.note == "rank 1 was silent"
    # What was opened for reading is gone on with: the engine refuses a second start.
    assert engine.updates == [("ahead", False), ("update", True)]
    assert "not read ahead, it is paused longer: rank 1 was silent" in caplog.text


@pytest.mark.parametrize("why", ["12.0 GB for each of 2 workers", "loads by vLLM's own loader"])
def test_an_engine_that_cannot(engine: FakeVLLM, why: str) -> None:
    """Short of memory, or without a mapping: vLLM ends an update that it refuses."""

    def refuse(request: Request) -> Answer | None:
        if not request.body["update_info"].get("prefetch"):
            return None
        engine.active = False
        return internal(f"worker 0 of 2: {why}")

    engine.hooks[UPDATE] = refuse
    registry = registry_of(engine)
    result = registry.sync(7).results[engine.url]
    assert result.ok and why in result.note and engine.version == "step-7"
    assert way_of(engine) == [START, UPDATE, "/pause", *WAY[:2], *WAY[4:]]
    with pytest.raises(SyncError, match="was not read ahead") as caught:
        registry.sync(8, prefetch=True)
    told = failure(caught, engine)
    assert told.phase == "ahead" and not told.paused and why in told.error
    assert engine.version == "step-7" and not engine.paused and engine.count("/pause") == 1
    assert registry.sync(8).ok and engine.version == "step-8"


def test_an_engine_that_must_be_paused_before_it_starts(engine: FakeVLLM) -> None:
    """Replicas that share experts."""

    def refuse(_: Request) -> Answer | None:
        return None if engine.paused else internal("pause before start_weight_update")

    engine.hooks[START] = refuse
    result = registry_of(engine).sync(7).results[engine.url]
    assert result.ok and "pause before" in result.note
    assert engine.updates == [("update", True)] and engine.version == "step-7"


def test_an_init_that_is_refused_while_it_generates(engine: FakeVLLM) -> None:
    """It had forgotten the trainer, and does not get to it."""
    registry = registry_of(engine)
    registry.sync(6)
    engine.initialised = None
    engine.refuse("/init_weight_transfer_engine", 400, "no such run")
    with pytest.raises(SyncError, match="no such run") as caught:
        registry.sync(7)
    told = failure(caught, engine)
    assert told.phase == "init" and not told.paused and not engine.paused
    assert engine.count("/pause") == 1 and engine.model == "weights of step 6"
    engine.hooks.clear()
    assert registry.sync(7).ok and engine.model == "weights of step 7"


def test_a_step_that_has_passed_meanwhile_pauses_nothing(engine: FakeVLLM) -> None:
    engine.reads = [failed("step 7 has passed", "FANIN_ERR_SUPERSEDED")]
    registry = registry_of(engine)
    with pytest.raises(SyncError, match="step 7 has passed") as caught:
        registry.sync(7)
    assert caught.value.name == "FANIN_ERR_SUPERSEDED"
    assert failure(caught, engine).phase == "ahead" and not engine.count("/pause")
    engine.reads = [READY]
    assert registry.sync(8).ok and engine.model == "weights of step 8"


@pytest.mark.parametrize("path", [START, UPDATE, STATE])
def test_it_dies_while_it_reads(engine: FakeVLLM, path: str) -> None:
    registry = registry_of(engine)
    registry.sync(6)
    engine.hooks[path] = lambda _: HANG_UP
    with pytest.raises(SyncError) as caught:
        registry.sync(7)
    told = failure(caught, engine)
    assert told.phase == "ahead" and path in told.error and not told.paused
    del engine.hooks[path]
    engine.restart()
    assert registry.sync(7).ok and engine.model == "weights of step 7"


def test_it_hangs_while_it_reads(engine: FakeVLLM) -> None:
    with FakeVLLM() as good:
        registry = registry_of(engine, good)
        engine.reads = [reading(10)]
        with pytest.raises(SyncError) as caught:
            registry.sync(7, timeout=5)
        told = failure(caught, engine)
        assert told.phase == "ahead" and told.code == "FANIN_ERR_TIMEOUT" and not engine.paused
        assert good.version == "step-7"
        engine.reads = [READY]
        assert registry.sync(7).ok


def test_removed_while_it_reads(engine: FakeVLLM) -> None:
    registry = registry_of(engine)
    engine.reads = [reading(10)]
    reads = threading.Event()
    engine.hooks[STATE] = lambda _: reads.set() if engine.ahead is not None else None
    caught: list[SyncError] = []

    def run() -> None:
        with pytest.raises(SyncError) as error:
            registry.sync(7)
        caught.append(error.value)

    thread = threading.Thread(target=run)
    thread.start()
    assert reads.wait(30)
    assert registry.remove(engine.url)
    thread.join(30)
    assert "was removed" in str(caught[0]) and not engine.count("/pause")


def test_workers_of_two_launches_of_the_trainer(engine: FakeVLLM) -> None:
    """Started again between one worker's pull and another's: the same step, and other weights."""
    registry = registry_of(engine)
    engine.worlds = ["a" * 32, "b" * 32]
    with pytest.raises(SyncError, match=f"different launches.*{'a' * 32}, {'b' * 32}") as caught:
        registry.sync(7)
    told = failure(caught, engine)
    assert told.phase == "finish" and told.paused and engine.paused
    assert "sync again" in told.error
    engine.worlds = ["b" * 32]
    assert registry.sync(7).ok and not engine.paused


def test_the_log_says_how_far_it_is(
    engine: FakeVLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "fanin.sync")
    monkeypatch.setattr(engine_sync, "SAY_EVERY", 0.0)
    engine.workers = 1
    engine.reads = [{**reading(0), "bytes": 20_000_000, "total": 50_000_000}, READY]
    registry_of(engine).sync(7)
    assert f"{engine.url}: step 7: 20 of 50 MB read ahead" in caplog.text
    assert "GB/s" in caplog.text and "s to go" in caplog.text


def test_sglang_cannot_read_ahead(engine: FakeVLLM) -> None:
    with FakeSGLang() as sglang:
        registry = registry_of(engine, sglang, prefetch=True)
        with pytest.raises(SyncError, match="cannot read ahead") as caught:
            registry.sync(7)
        assert failure(caught, sglang).phase == "health"
        assert not engine.count("/pause") and not sglang.count("/pause_generation")
        with pytest.raises(RequestError, match="cannot read ahead"):
            registry.sync(7)  # known by now: it is not even asked
        assert registry.sync(7, prefetch="auto").ok


# ------------------------------------------------------------------ what the worker says


def test_a_worker_without_fanin() -> None:
    kind = type("Worker", (), {})
    patches.put(kind, "WorkerBase")
    assert kind().fanin_weights_state()["ahead"] is None


def test_host_memory_that_is_short(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9\nMemAvailable:  10000 kB\n")
    require_host_room(4_000_000, 2, tmp_path)
    with pytest.raises(HostError, match="for each of 3 workers"):
        require_host_room(4_000_000, 3, tmp_path)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("6000000\n")
    (group / "memory.current").write_text("4000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 500000\nactive_file 500000\n")
    require_host_room(2_000_000, 1, tmp_path)
    with pytest.raises(HostError, match=r"0\.0 GB of host memory"):
        require_host_room(2_000_000, 2, tmp_path)
    (group / "memory.max").write_text("max\n")
    require_host_room(4_000_000, 2, tmp_path)
    require_host_room(1 << 60, 2, tmp_path / "nothing")  # not known
