# SPDX-License-Identifier: Apache-2.0
"""A fleet is synced: what each engine is asked, what is left of one that fails, and who is told."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fanin
import fanin.fleet.registry as registry_module
import pytest
from fanin._http import FAILURES, ask_json
from fanin.errors import (
    NotFoundError,
    PausedError,
    PullTimeoutError,
    RequestError,
    StateError,
    SupersededError,
    UnreachableError,
)
from fanin.fleet.driver import Wire
from fanin.fleet.engine_sync import EngineSync
from fanin.fleet.steps import look
from fanin.info import write_info
from fanin.sync import EndpointResult, Registry, SyncError
from fleet import (
    HANG_UP,
    TRAINER,
    FakeEngine,
    FakeSGLang,
    FakeVLLM,
    WholeTrainer,
    failure,
    registry_of,
)
from http_engine import Request
from local_world import until

WAY = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
INIT = "/init_weight_transfer_engine"
SGLANG_WAY = [
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/flush_cache",
    "/update_weight_version",
    "/continue_generation",
]


def fleet(stack: ExitStack, count: int = 2) -> list[FakeVLLM]:
    return [stack.enter_context(FakeVLLM()) for _ in range(count)]


def way_of(engine: FakeEngine, way: list[str]) -> list[str]:
    return [path for path in engine.paths if path in way]


# ------------------------------------------------------------------ the way of it


def test_each_phase_once_in_order(stack: ExitStack) -> None:
    engines = fleet(stack, 3)
    result = registry_of(*engines).sync(7)
    assert result.ok and result.version == "step-7" and len(result.results) == 3
    for engine in engines:
        assert way_of(engine, [INIT, *WAY]) == [INIT, *WAY]
        assert engine.model == "weights of step 7" and engine.version == "step-7"
        assert not engine.paused
        told = engine.initialised
        assert told is not None
        assert told["trainer"] == ["10.0.0.1:6000", "10.0.0.2:6000"] and told["run"] == "0"
        assert set(told) == {"trainer", "run", "timeout"} and told["timeout"] < 30
        assert engine.bodies["/update_weights"] == {"update_info": {"step": 7}}


def test_what_init_is_to_have_besides(stack: ExitStack) -> None:
    (engine,) = fleet(stack, 1)
    registry_of(engine, init={"unused": ["mtp.*"]}).sync(1)
    assert engine.initialised is not None and engine.initialised["unused"] == ["mtp.*"]
    with pytest.raises(RequestError, match="'run'"):
        registry_of(engine, init={"run": "1"})
    with pytest.raises(fanin.RequestError, match=r"init is '\{.*give"):
        registry_of(engine, init='{"mode": "loader"}')


def test_what_an_engine_was_started_with_is_no_version(stack: ExitStack) -> None:
    """It is the same word for every engine: a restart would not be seen."""
    engines = fleet(stack, 1)[0], stack.enter_context(FakeSGLang())
    registry = registry_of(*engines)
    for engine in engines:
        engine.refuse("/begin_weight_update", 400, "no")
        engine.refuse("/start_weight_update", 500, "no")
    with pytest.raises(SyncError) as caught:
        registry.sync(1)
    assert {one.version for one in caught.value.result.results.values()} == {"checkpoint"}
    for name in ("default", "checkpoint"):
        with pytest.raises(RequestError, match=f"'{name}' is what engines call"):
            registry.sync(1, version=name)


def test_init_is_told_once_and_to_one_that_was_started_again(stack: ExitStack) -> None:
    engines = fleet(stack)
    registry = registry_of(*engines)
    registry.sync(1)
    registry.sync(2)
    engines[0].restart()
    result = registry.sync(3)
    assert [engine.count(INIT) for engine in engines] == [2, 1]
    assert [result.results[engine.url].initialised for engine in engines] == [True, False]
    assert engines[1].count("/update_weights") == 3


def test_an_engine_that_has_forgotten_the_trainer_is_told_anew(stack: ExitStack) -> None:
    """Another driver's init has failed there: its version is what it was."""
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine)
    registry.sync(1)
    engine.initialised = None
    result = registry.sync(2)
    assert result.results[engine.url].initialised and engine.count(INIT) == 2
    assert engine.model == "weights of step 2"
    # One that refuses to start for another reason is not asked for ever.
    engine.refuse("/start_weight_update", 500, "no")
    with pytest.raises(SyncError):
        registry.sync(3)
    assert engine.count(INIT) == 3 and engine.count("/start_weight_update") == 5


def test_all_at_once(stack: ExitStack) -> None:
    engines = fleet(stack, 4)
    everybody = threading.Barrier(4)

    def meet(_: Any) -> None:
        everybody.wait(30)

    for engine in engines:
        engine.hooks["/update_weights"] = meet
    assert registry_of(*engines).sync(1).ok


def test_sglang_beside_vllm(stack: ExitStack) -> None:
    (vllm,) = fleet(stack, 1)
    sglang = stack.enter_context(FakeSGLang(ranks=2))
    registry = registry_of(vllm, sglang)
    result = registry.sync(5)
    assert {e.url: e.kind for e in registry.endpoints()} == {
        vllm.url: "vllm",
        sglang.url: "sglang",
    }
    assert result.results[sglang.url].ok and sglang.version == "step-5" and not sglang.paused
    first = sglang.paths.index(SGLANG_WAY[0])
    asked = [path for path in sglang.paths[first:] if path in SGLANG_WAY]
    assert asked == SGLANG_WAY
    assert [request["step"] for request in sglang.sent] == [5]
    assert sglang.sent[0]["trainer"] == ["10.0.0.1:6000", "10.0.0.2:6000"]


@pytest.mark.parametrize(
    ("mode", "query", "keeps"),
    [
        ("retract", "mode=keep&clear_cache=true", False),
        ("keep", "mode=keep&clear_cache=false", True),
        ("wait", "mode=wait&clear_cache=true", False),
        ("abort", "mode=abort&clear_cache=true", False),
    ],
)
def test_pause_modes(stack: ExitStack, mode: str, query: str, keeps: bool) -> None:
    """Caches of the old weights are dropped by the plugin, unless it is told to leave them."""
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine)
    registry.sync(1, pause_mode=mode)
    asked = dict(zip(engine.paths, engine.queries, strict=True))
    assert asked["/pause"] == query
    told = engine.bodies["/update_weights"]["update_info"]
    assert told == {"step": 1, "keep_caches": True} if keeps else {"step": 1}
    registry.sync(2, pause_mode=mode, keep_caches=True)
    assert engine.bodies["/update_weights"]["update_info"]["keep_caches"] is True


# ------------------------------------------------------------------ the registry


def test_added_twice_is_one(stack: ExitStack) -> None:
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine)
    again = registry.add(engine.url + "/v1/", group="eval")
    assert again.group == "eval" and len(registry.endpoints()) == 1
    registry.sync(1)
    assert engine.count("/update_weights") == 1
    with pytest.raises(RequestError, match="known as vllm"):
        registry.add(engine.url, kind="sglang")


def test_groups(stack: ExitStack) -> None:
    engines = fleet(stack, 3)
    registry = registry_of()
    for engine, group in zip(engines, ("a", "b", "b"), strict=True):
        registry.add(engine.url, group=group)
    assert len(registry.sync(1, "b").results) == 2
    assert len(registry.endpoints("a")) == 1
    assert [engine.model for engine in engines] == ["old", *["weights of step 1"] * 2]
    assert len(registry.sync(2, ["a", "b"]).results) == 3
    with pytest.raises(NotFoundError, match="group 'c'"):
        registry.sync(3, "c")
    with pytest.raises(NotFoundError, match="no engine"):
        Registry(TRAINER, ask_trainer=False).sync(1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: r.add("ftp://x"), "no engine's URL"),
        (lambda r: r.add("http://x:1", kind="tgi"), "kind 'tgi'"),
        (lambda r: r.add("http://x:1", world_size=0), "world_size 0"),
        (lambda r: r.add("http://x:1", group=""), "group ''"),
        (lambda r: r.sync(-1), "step -1"),
        (lambda r: r.sync(1, pause_mode="stop"), "pause_mode 'stop'"),
        (lambda r: r.sync(1, timeout=0), "timeout 0"),
        (lambda r: r.sync(1, version=""), "version ''"),
        (lambda r: r.sync(), "which step"),
        (lambda r: r.sync(1, pause_mode="keep", keep_caches=False), "gone on with"),
    ],
)
def test_wrong_arguments(stack: ExitStack, call: Callable[[Registry], Any], says: str) -> None:
    (engine,) = fleet(stack, 1)
    with pytest.raises(RequestError, match=says):
        call(registry_of(engine))
    assert not engine.count("/pause")


# ------------------------------------------------------------------ one that fails


def test_a_dead_one_stops_all_before_anything_is_paused(stack: ExitStack) -> None:
    engines = fleet(stack, 3)
    registry = registry_of(*engines)
    engines[1].__exit__(None, None, None)
    with pytest.raises(SyncError, match="nothing was paused") as caught:
        registry.sync(1)
    assert failure(caught, engines[1]).phase == "health"
    assert not any(engine.count("/pause") for engine in engines)
    assert registry.remove(engines[1].url)
    assert registry.sync(1).ok


def test_a_dead_one_can_be_left_out(stack: ExitStack) -> None:
    engines = fleet(stack, 3)
    registry = registry_of(*engines)
    engines[1].__exit__(None, None, None)
    with pytest.raises(SyncError) as caught:
        registry.sync(1, skip_dead=True)
    assert list(caught.value.result.failed) == [engines[1].url]
    assert engines[0].version == engines[2].version == "step-1" and not engines[2].paused


PLACES = {
    "/pause": "pause",
    INIT: "init",
    "/start_weight_update": "start",
    "/update_weights": "update",
    "/finish_weight_update": "finish",
    "/resume": "resume",
}


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("how", ["refuses", "hangs up"])
def test_one_fails_in_any_phase(stack: ExitStack, path: str, how: str) -> None:
    engines = fleet(stack, 3)
    registry = registry_of(*engines)
    bad = engines[1]
    if how == "refuses":
        bad.refuse(path, 500, "rank 3 is gone; remedy: start it")
    else:
        bad.hooks[path] = lambda _: HANG_UP
    with pytest.raises(SyncError) as caught:
        registry.sync(4)
    told = failure(caught, bad)
    assert how != "refuses" or "rank 3 is gone" in told.error
    check_failed_in(path, bad, told)
    for good in (engines[0], engines[2]):
        assert caught.value.result.results[good.url].ok
        assert good.version == "step-4" and not good.paused
    # The next one tries it again; after it all is well.
    del bad.hooks[path]
    assert registry.sync(4).ok
    assert bad.version == "step-4" and not bad.paused and bad.model == "weights of step 4"


def test_one_hangs_in_each_phase(stack: ExitStack) -> None:
    engines = fleet(stack, len(PLACES) + 1)
    registry = registry_of(*engines)
    *bad, good = engines
    for engine, path in zip(bad, PLACES, strict=True):
        engine.hang(path)
    with pytest.raises(SyncError) as caught:
        registry.sync(4, timeout=8)
    assert list(caught.value.result.failed) == [engine.url for engine in bad]
    for engine, path in zip(bad, PLACES, strict=True):
        told = failure(caught, engine)
        assert told.code == "FANIN_ERR_TIMEOUT" and "no answer in time" in told.error
        check_failed_in(path, engine, told)
        del engine.hooks[path]
    assert good.version == "step-4" and not good.paused
    assert registry.sync(4).ok
    for engine in engines:
        assert not engine.paused and engine.model == "weights of step 4"


def engine_may_stand(engine: FakeEngine) -> bool:
    return engine.count("/pause") > 0


def check_failed_in(path: str, engine: FakeEngine, told: EndpointResult) -> None:
    assert told.phase == PLACES[path] and path in told.error
    assert told.paused == (path != INIT) == engine_may_stand(engine)
    if told.paused:
        assert ("may be paused" if path == "/pause" else "stays paused") in told.error
    assert path == "/resume" or not engine.count("/resume")


def test_an_update_that_was_left_open_is_gone_on_with(stack: ExitStack) -> None:
    """Of several workers one may fail alone; the others then refuse a new start."""
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine)
    engine.refuse("/update_weights", 500, "rank 1 of the trainer is silent")
    with pytest.raises(SyncError):
        registry.sync(1)
    assert engine.active
    del engine.hooks["/update_weights"]
    assert registry.sync(2).ok and engine.model == "weights of step 2"
    # Also one that another driver left.
    engine.active, engine.pulled = True, None
    assert registry_of(engine).sync(3).ok and engine.model == "weights of step 3"


PULLED = 'fanin has pulled: {"step": 9, "bytes": 1, "seconds": 1, "how": ""}'
LIES = {"success": True, "message": PULLED}
LOADER = {"custom_weight_loader": ["fanin.sglang.load"]}
NO_VERSION = "does not say a weight_version"


@pytest.mark.parametrize(
    ("path", "answer", "says", "phase"),
    [
        ("/weight_info", (404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1", "health"),
        *(
            ("/weight_info", (200, body), NO_VERSION, "health")
            for body in (b"<html>", b'{"weight_version": 3}', b"[]", b"")
        ),
        ("/pause", (200, {"status": "paused"}), "does not say that it is", "pause"),
        (WAY[3], (200, {"message": "done"}), "says that its weights are 'checkpoint'", "finish"),
        ("/server_info", (200, {"custom_weight_loader": []}), "--custom-weight-loader", "init"),
        ("/server_info", (200, {**LOADER, "dp_size": 2}), "data parallelism", "init"),
        ("/server_info", (200, {**LOADER, "pp_size": 2}), "pipeline parallelism", "init"),
        # Somebody else has updated it between the pull and the end.
        ("/end_weight_update", (200, LIES), "they hold step 9, after step 1 was", "finish"),
    ],
)
def test_an_answer_that_is_not_taken_for_well(
    stack: ExitStack, path: str, answer: Any, says: str, phase: str
) -> None:
    kind = FakeVLLM if path in ("/weight_info", *WAY) else FakeSGLang
    engine, other = stack.enter_context(kind()), fleet(stack, 1)[0]
    engine.hooks[path] = lambda _: answer
    with pytest.raises(SyncError, match=says) as caught:
        registry_of(engine, other).sync(1)
    assert failure(caught, engine).phase == phase
    assert (engine.paused, other.count("/pause")) == (phase == "finish", phase != "health")
    assert engine.version in ("checkpoint", "default") and not engine.count("/resume")
    assert phase == "finish" or not way_of(engine, ["/start_weight_update", "/begin_weight_update"])


def test_vllm_that_has_another_step_in_the_end(stack: ExitStack) -> None:
    (engine,) = fleet(stack, 1)
    engine.hooks["/finish_weight_update"] = lambda _: setattr(engine, "pulled", 9)
    with pytest.raises(SyncError, match="they hold step 9, after step 1 was") as caught:
        registry_of(engine).sync(1)
    assert failure(caught, engine).phase == "finish" and engine.paused


@pytest.mark.parametrize(
    ("init", "how", "says"),
    [
        ({}, {"pause_mode": "wait"}, "cannot pause with mode 'wait'"),
        ({"draft_run": "draft"}, {}, "SGLang's draft models are not updated.*leave draft_run"),
    ],
)
def test_what_sglang_cannot(
    stack: ExitStack, init: dict[str, Any], how: dict[str, Any], says: str
) -> None:
    sglang = stack.enter_context(FakeSGLang())
    with pytest.raises(SyncError, match=says):
        registry_of(sglang, init=init).sync(1, **how)
    assert not sglang.count("/pause_generation")


def test_the_wrong_key(stack: ExitStack) -> None:
    (engine,) = fleet(stack, 1)
    engine.hooks["/weight_info"] = lambda r: (
        None if r.headers.get("Authorization") == "Bearer k" else (401, {"error": "Unauthorized"})
    )
    with pytest.raises(SyncError, match="give the engine's api_key"):
        registry_of(engine).sync(1)
    assert registry_of(engine, api_key="k").sync(1).ok


def test_a_key_that_no_header_may_have_is_told_to_nobody(stack: ExitStack) -> None:
    """http.client says the whole header."""
    (engine,) = fleet(stack, 1)
    for key in ("hidden\n", "hidden\u20ac"):
        with pytest.raises(FAILURES, match="look at the URL and the api_key") as caught:
            ask_json("GET", engine.url, "/health", deadline=time.monotonic() + 30, api_key=key)
        assert "hidden" not in "".join(traceback.format_exception(caught.value))
    assert not engine.paths


@pytest.mark.parametrize("host", ["a" * 70, "..x"])
def test_a_host_that_is_no_name(host: str) -> None:
    wire = Wire(f"http://{host}:80")
    with pytest.raises(UnreachableError, match="look at the URL"):
        wire.get("/health", time.monotonic() + 30)


def test_resume_of_one_whose_weights_are_whole(stack: ExitStack) -> None:
    engines = fleet(stack)
    registry = registry_of(*engines)
    engines[0].refuse(INIT, 400, "no such run")
    engines[1].refuse("/update_weights", 500, "torn")
    with pytest.raises(SyncError):
        registry.sync(1)
    assert not engines[0].paused  # it was not even paused
    engines[0].paused = True
    registry.resume(engines[0].url)
    assert not engines[0].paused
    with pytest.raises(StateError, match="two steps"):
        registry.resume(engines[1].url)
    assert engines[1].paused
    with pytest.raises(NotFoundError):
        registry.resume("http://127.0.0.1:1")


def test_one_that_was_left_paused_is_told_of_as_such(stack: ExitStack) -> None:
    """Also by a sync that did not come as far as to pause."""
    bad, other = fleet(stack)
    registry = registry_of(bad, other)
    bad.refuse("/update_weights", 500, "torn")
    with pytest.raises(SyncError):
        registry.sync(1)
    for unwell in (bad, other):
        bad.hooks.clear()
        unwell.refuse("/health", 500, "busy")
        with pytest.raises(SyncError, match="nothing was paused") as caught:
            registry.sync(1)
        assert failure(caught, unwell).phase == "health"
        results = caught.value.result.results
        assert results[bad.url].paused and not results[other.url].paused
        assert ("stays paused" in results[bad.url].error) == (unwell is bad)
    other.hooks.clear()
    assert not registry.sync(1).results[bad.url].paused and not bad.paused


# ------------------------------------------------------------------ SGLang's own


def test_sglang_tells_why_a_pull_failed(stack: ExitStack) -> None:
    sglang = stack.enter_context(FakeSGLang())
    registry = registry_of(sglang)
    sglang.failure = "fanin: rank 1 is not there; remedy: start it"
    with pytest.raises(SyncError, match="rank 1 is not there") as caught:
        registry.sync(1)
    assert failure(caught, sglang).phase == "update"
    assert sglang.paused and sglang.version == "default"
    assert not sglang.count("/end_weight_update")
    sglang.failure = ""
    assert registry.sync(1).ok and sglang.version == "step-1"


def test_sglang_whose_success_says_nothing(stack: ExitStack) -> None:
    """SGLang takes a loader's return for success: only fanin's plugin knows better."""
    sglang = stack.enter_context(FakeSGLang())
    sglang.plugin = False
    registry = registry_of(sglang)
    with pytest.raises(SyncError, match="and not what was pulled.*SGLANG_PLUGINS") as caught:
        registry.sync(1)
    assert failure(caught, sglang).phase == "update" and sglang.version == "default"
    assert not sglang.count("/end_weight_update") and sglang.paused
    sglang.plugin = True
    assert registry.sync(1).ok


@pytest.mark.parametrize("path", SGLANG_WAY)
def test_sglang_fails_in_any_phase(stack: ExitStack, path: str) -> None:
    sglang = stack.enter_context(FakeSGLang())
    registry = registry_of(sglang)
    sglang.hooks[path] = lambda _: (400, {"success": False, "message": "not now"})
    with pytest.raises(SyncError, match="not now") as caught:
        registry.sync(1)
    assert path in failure(caught, sglang).error
    assert sglang.paused or path == "/pause_generation"
    del sglang.hooks[path]
    assert registry.sync(1).ok and not sglang.paused


# ------------------------------------------------------------------ at the same time


def test_two_syncs_of_the_same_engine(stack: ExitStack) -> None:
    engines = fleet(stack)
    registry = registry_of()
    registry.add(engines[0].url, group="a")
    registry.add(engines[1].url, group="b")
    hold = engines[0].hang("/update_weights")
    first = threading.Thread(target=registry.sync, args=(1, "a"))
    first.start()
    assert engines[0].at["/update_weights"].wait(30)
    for group in ("a", None):
        with pytest.raises(StateError, match="in another sync"):
            registry.sync(2, group)
    assert registry.sync(2, "b").ok
    hold.set()
    first.join()
    assert engines[0].version == "step-1" and registry.sync(3).ok


def test_interrupted_it_is_in_that_sync_until_its_phase_has_ended(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = fleet(stack)
    registry = registry_of(*engines)
    hold = engines[0].hang("/update_weights")

    def ctrl_c(_: Any) -> None:
        if engines[0].at["/update_weights"].is_set() and engines[1].version == "step-1":
            raise KeyboardInterrupt

    monkeypatch.setattr(registry_module, "_SAY_WAITING", 0.01)
    monkeypatch.setattr(registry_module, "_say_waiting", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        registry.sync(1)
    monkeypatch.undo()
    until(lambda: registry.busy() == [engines[0].url])
    with pytest.raises(StateError, match="in another sync"):
        registry.sync(2)
    assert engines[0].count("/health") == 1
    hold.set()
    until(lambda: not registry.busy())
    assert engines[0].paused and not engines[0].count("/finish_weight_update")
    assert registry.sync(2).ok and engines[0].model == "weights of step 2" and not engines[0].paused


@pytest.mark.parametrize("call", [lambda r, _: r.sync(1), lambda r, url: r.resume(url)])
def test_interrupted_when_all_were_taken(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, call: Callable[[Registry, str], Any]
) -> None:
    """Before anything was asked of them: they are free."""
    engines = fleet(stack)
    registry = registry_of(*engines)
    take = registry._take

    def ctrl_c(*arguments: Any) -> None:
        take(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "_take", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        call(registry, engines[0].url)
    monkeypatch.undo()
    assert not registry.busy() and registry.sync(1).ok


def test_no_thread_can_be_had_for_one_of_them(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = fleet(stack)
    registry = registry_of(*engines)
    hold = engines[0].hang("/health")
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if engines[1].url in thread.name:
            assert engines[0].at["/health"].wait(30)
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        registry.sync(1)
    monkeypatch.undo()
    assert registry.busy() == [engines[0].url]
    with pytest.raises(StateError, match="in another sync"):
        registry.sync(1)
    hold.set()
    until(lambda: not registry.busy())
    assert registry.sync(1).ok and engines[0].count(INIT) == 1


def test_one_whose_name_is_looked_up_for_ever_holds_up_no_other_sync(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its deadline its thread asks nothing of the engine; its end is not the next one's."""
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine)
    asked, found = threading.Event(), threading.Event()

    def look_up(*arguments: Any) -> Any:
        asked.set()
        assert found.wait(30)
        raise UnreachableError.make("no such host")

    wait = registry._wait

    def out_of_time(flights: Any, pending: Any, until: float) -> None:
        assert asked.wait(30)  # however late its thread runs
        wait(flights, pending, time.monotonic())

    monkeypatch.setattr(registry_module, "driver_of", look_up)
    monkeypatch.setattr(registry, "_wait", out_of_time)
    with pytest.raises(SyncError, match="no answer in time"):
        registry.sync(1)
    monkeypatch.undo()
    (slow,) = (t for t in threading.enumerate() if t.name == f"fanin-sync {engine.url}")
    assert not registry.busy()
    hold = engine.hang("/update_weights")
    second = threading.Thread(target=registry.sync, args=(2,))
    second.start()
    assert engine.at["/update_weights"].wait(30)
    found.set()
    slow.join(30)
    assert not slow.is_alive() and registry.busy() == [engine.url]
    hold.set()
    second.join()
    assert not registry.busy() and engine.version == "step-2"


def failing_sync(registry: Registry) -> tuple[threading.Thread, list[SyncError]]:
    """Of step 1, in a thread that has begun; when that has ended, what it raised is in the list."""
    caught: list[SyncError] = []

    def run() -> None:
        with pytest.raises(SyncError) as error:
            registry.sync(1)
        caught.append(error.value)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught


def test_removed_during_a_sync(stack: ExitStack) -> None:
    engines = fleet(stack)
    registry = registry_of(*engines)
    hold = engines[0].hang("/update_weights")
    thread, caught = failing_sync(registry)
    assert engines[0].at["/update_weights"].wait(30)
    assert registry.remove(engines[0].url)
    thread.join()  # it waits for the removed one no longer
    result = caught[0].result
    assert "was removed during the sync" in result.results[engines[0].url].error
    assert result.results[engines[1].url].ok and engines[1].version == "step-1"
    hold.set()
    assert not registry.remove(engines[0].url)
    assert len(registry.sync(2).results) == 1
    assert not engines[0].count("/finish_weight_update") and not engines[0].count("/resume")


@pytest.mark.parametrize("times", [1, 2])
def test_removed_and_added_it_is_in_that_sync_until_its_phase_has_ended(
    stack: ExitStack, times: int
) -> None:
    """Else a late resume would come in the midst of the next update."""
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine)
    hold = engine.hang("/resume")
    thread, caught = failing_sync(registry)
    assert engine.at["/resume"].wait(30)
    for _ in range(times):
        assert registry.remove(engine.url)
        registry.add(engine.url)
    thread.join()
    assert "was removed during the sync" in str(caught[0])
    assert registry.busy() == [engine.url]
    with pytest.raises(StateError, match="in another sync"):
        registry.sync(2)
    hold.set()
    until(lambda: not registry.busy())
    assert registry.sync(2).ok and engine.model == "weights of step 2" and not engine.paused


def test_removed_and_added_past_the_deadline_it_is_free(stack: ExitStack) -> None:
    """Of a thread that looks up a name for ever nothing comes any more."""
    plan = SimpleNamespace(deadline=time.monotonic() - 60)
    registry = registry_of()
    registry.add("http://127.0.0.1:9")
    (record,) = registry._records.values()
    sync = record.sync = EngineSync(record, plan, threading.Condition())  # type: ignore[arg-type]
    assert registry.busy()
    registry.remove("http://127.0.0.1:9")
    registry.add("http://127.0.0.1:9")
    assert not registry.busy() and record.sync is sync


def test_added_with_another_key_during_a_sync(stack: ExitStack) -> None:
    """The sync goes on with the one that its engine was found well with."""
    engines = fleet(stack)
    registry = registry_of(*engines)
    hold = engines[1].hang("/health")

    def add(_: Any) -> None:
        registry.add(engines[0].url, api_key="other")
        hold.set()

    engines[0].hooks["/weight_info"] = add
    assert registry.sync(1).ok
    sent = {r.path: r.headers.get("Authorization") for r in engines[0].http.requests}
    assert sent["/resume"] is None
    assert registry.sync(2).ok
    assert engines[0].http.requests[-1].headers.get("Authorization") == "Bearer other"


def test_added_during_a_sync_is_not_part_of_it(stack: ExitStack) -> None:
    engines = fleet(stack)
    registry = registry_of(engines[0])
    engines[0].hooks["/update_weights"] = lambda _: registry.add(engines[1].url) and None
    assert list(registry.sync(1).results) == [engines[0].url]
    assert len(registry.sync(2).results) == 2


# ------------------------------------------------------------------ the trainer is asked first


@pytest.fixture
def trainer(stack: ExitStack) -> WholeTrainer:
    return stack.enter_context(WholeTrainer())


def test_the_newest_step(stack: ExitStack, trainer: WholeTrainer) -> None:
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine, trainer=trainer.info)
    trainer.commit(12)
    assert registry.sync().step == 12 and engine.version == "step-12"


def test_what_is_there_is_left_alone(stack: ExitStack, trainer: WholeTrainer) -> None:
    engines = fleet(stack)
    registry = registry_of(*engines, trainer=trainer.info)
    trainer.commit(1)
    engines[0].refuse("/update_weights", 500, "no")
    with pytest.raises(SyncError):
        registry.sync(1)
    del engines[0].hooks["/update_weights"]
    result = registry.sync(1)
    assert result.ok and result.results[engines[1].url].skipped
    assert not result.results[engines[0].url].skipped
    assert engines[1].count("/pause") == 1  # it was not even paused
    engines[1].restart()  # says another version than it was given
    assert not registry.sync(1).results[engines[1].url].skipped
    assert not registry.sync(1, again=True).results[engines[1].url].skipped
    # A failed resume is made good without another pull.
    engines[0].refuse("/resume", 500, "no")
    trainer.commit(2)
    with pytest.raises(SyncError):
        registry.sync(2)
    del engines[0].hooks["/resume"]
    pulls = engines[0].count("/update_weights")
    assert registry.sync(2).results[engines[0].url].skipped and not engines[0].paused
    assert engines[0].count("/update_weights") == pulls


@pytest.mark.parametrize("world", [{}, {"world": bytes(range(2, 18))}], ids=["ranks", "world"])
def test_the_same_step_of_another_launch_is_not_the_same(
    stack: ExitStack, trainer: WholeTrainer, tmp_path: Path, world: dict[str, bytes]
) -> None:
    """Nor that of ranks that were started again with the launch's id."""
    (engine,) = fleet(stack, 1)
    write_info(tmp_path, trainer.info)
    registry = registry_of(engine, trainer=tmp_path)
    trainer.commit(1)
    registry.sync(1)
    assert registry.sync(1).results[engine.url].skipped
    with WholeTrainer(**world) as second:
        second.commit(1)
        write_info(tmp_path, second.info)
        trainer.__exit__()
        assert not registry.sync(1).results[engine.url].skipped
    assert engine.count("/update_weights") == 2


class Replicas(WholeTrainer):
    """Each rank has all of it."""

    def rows(self, rank: int, name: str) -> fanin.Shard:
        return fanin.shard_of(name, self.weights[rank])

    def restart(self, rank: int) -> None:
        self.servers[rank].close()
        self.servers[rank] = fanin.Server(
            world_id=self.world, rank=rank, world_size=2, name="job", use_ucx=False
        )
        self.put(self.servers[rank], {})
        self.servers[rank].commit(self.publication, 1)


def test_a_replica_that_is_started_again_changes_nothing(stack: ExitStack, tmp_path: Path) -> None:
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine, trainer=tmp_path)
    with Replicas() as trainer:

        def is_there() -> bool:
            write_info(tmp_path, trainer.info)
            return registry.sync(1).results[engine.url].skipped

        trainer.commit(1)
        assert not is_there() and is_there()
        trainer.restart(1)
        assert is_there()
        trainer.restart(0)  # now nobody is there who had the step then
        assert not is_there()
        trainer.restart(0)
        assert is_there()


def test_ranks_that_are_started_again_amid_a_sync(
    stack: ExitStack, trainer: WholeTrainer, tmp_path: Path
) -> None:
    """After the registry has asked them, and before the engine pulls from them."""
    (engine,) = fleet(stack, 1)
    write_info(tmp_path, trainer.info)
    registry = registry_of(engine, trainer=tmp_path)
    trainer.commit(1)

    def restart(_: Request) -> None:
        del engine.hooks["/pause"]
        trainer.__exit__()
        second = stack.enter_context(WholeTrainer())
        second.commit(1)
        write_info(tmp_path, second.info)

    engine.hooks["/pause"] = restart
    assert registry.sync(1).ok
    assert not registry.sync(1).results[engine.url].skipped
    assert registry.sync(1).results[engine.url].skipped
    assert engine.count("/update_weights") == 2


def test_a_step_that_has_passed(stack: ExitStack, trainer: WholeTrainer) -> None:
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine, trainer=trainer.info)
    trainer.commit(5)
    with pytest.raises(SupersededError, match="rank . is at 5"):
        registry.sync(4)
    assert not engine.paths


def test_nothing_is_paused_while_the_trainer_is_not_there(
    stack: ExitStack, trainer: WholeTrainer
) -> None:
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine, trainer=trainer.info, timeout=3)
    trainer.commit(1)
    trainer.commit(2, ranks=[0])
    with pytest.raises(PullTimeoutError, match="rank 1 is at 1"):
        registry.sync(2)
    trainer.__exit__()
    with pytest.raises((UnreachableError, PullTimeoutError)):
        registry.sync(2)
    assert not engine.paths


class Ranks:
    """A client whose ranks say what a test gives: (rank, state, step)."""

    def __init__(self, *said: tuple[int, str, int], publication: str = "full:0") -> None:
        self._said = said
        self._publication = publication

    def publications(self, timeout: float) -> list[Any]:
        return [
            SimpleNamespace(name=self._publication, rank=rank, state=state, step=step)
            for rank, state, step in self._said
        ]

    def ranks(self) -> list[Any]:
        here = SimpleNamespace(connected=True, world_id="ab", rank=0, incarnation="cd")
        return [SimpleNamespace(connected=False), here]


@pytest.mark.parametrize(
    ("ranks", "step", "kind", "says"),
    [
        (Ranks(), 1, NotFoundError, "no rank of the trainer that answers"),
        (Ranks((0, "stable", 1), publication="full:1"), 1, NotFoundError, "full:0"),
        (Ranks((0, "stable", 2), (1, "stable", 1)), 2, PullTimeoutError, "rank 1 is at 1"),
        (Ranks((0, "stable", 2)), 2, PullTimeoutError, "1 of 2 ranks publish it"),
        (Ranks((0, "stable", 2), (1, "unpublished", 0)), 2, PullTimeoutError, "1 of 2 ranks"),
        (Ranks((0, "stable", 2), (1, "stable", 1)), None, PullTimeoutError, "rank 1 is at 1"),
        (Ranks((0, "stable", 2), (1, "paused", 2)), 2, PausedError, "rank 1 has paused"),
    ],
)
def test_what_is_said_of_a_trainer_that_is_not_ready(
    ranks: Any, step: int | None, kind: type[Exception], says: str
) -> None:
    found = look(ranks, "full:0", 2, step, 1.0)
    assert isinstance(found, kind) and says in str(found)


def test_a_trainer_that_is_ready() -> None:
    ready = Ranks((0, "stable", 2), (1, "writing", 2))
    for step in (2, None):
        assert look(ready, "full:0", 2, step, 1.0) == (2, "ab", {"0": "cd"}, ())
    with pytest.raises(SupersededError, match="rank 0 is at 2"):
        look(ready, "full:0", 2, 1, 1.0)


def test_a_step_that_is_still_to_come_is_waited_for(
    stack: ExitStack, trainer: WholeTrainer
) -> None:
    (engine,) = fleet(stack, 1)
    registry = registry_of(engine, trainer=trainer.info)
    trainer.commit(1)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(registry.sync(2)))
    thread.start()
    trainer.commit(2)
    thread.join()
    assert results[0].ok and engine.version == "step-2"


# ------------------------------------------------------------ draft models


def test_draft_models_are_updated_in_each_sync(stack: ExitStack) -> None:
    engines = fleet(stack, 3)
    for engine in engines[:2]:
        engine.drafts = True
    registry = registry_of(*engines, init={"draft_run": "draft"})
    for step in (1, 2):
        assert registry.sync(step).ok
        assert [engine.draft_held for engine in engines] == [step, step, None]
    assert engines[0].initialised is not None and engines[0].initialised["draft_run"] == "draft"
    assert engines[2].count("/start_draft_weight_update") == 0
    # A draft that stays behind is a failure: the next sync does it again.
    engines[1].refuse("/start_draft_weight_update", 500, "no")
    with pytest.raises(SyncError) as caught:
        registry.sync(3)
    assert failure(caught, engines[1]).paused and engines[0].draft_held == 3
    engines[1].hooks.clear()
    registry.sync(3)
    assert engines[1].draft_held == 3 and not engines[1].paused


def test_a_draft_model_that_stays_as_it_is_is_noted(stack: ExitStack) -> None:
    (engine,) = fleet(stack, 1)
    engine.drafts = True
    result = registry_of(engine).sync(1)
    assert '{"draft_run": ...}' in result.results[engine.url].note and engine.draft_held is None


def test_the_draft_run_is_waited_for_before_anything_is_paused(stack: ExitStack) -> None:
    (engine,) = fleet(stack, 1)
    with WholeTrainer() as trainer:
        trainer.commit(1)
        registry = registry_of(
            engine, trainer=trainer.info, timeout=1.0, init={"draft_run": "draft"}
        )
        with pytest.raises(NotFoundError, match="draft"):
            registry.sync(1)
    assert engine.count("/pause") == 0


# ------------------------------------------------------------ a store that engines share


def test_engines_that_keep_kv_outside_go_on_when_all_have_the_step(stack: ExitStack) -> None:
    engines = fleet(stack, 3)
    for engine in engines[:2]:
        engine.external = True
    fast, slow, alone = engines
    hold = slow.hang("/update_weights")
    registry = registry_of(*engines)
    thread = threading.Thread(target=registry.sync, args=(7,))
    thread.start()
    until(lambda: fast.version == alone.version == "step-7" and not alone.paused)
    assert slow.at["/update_weights"].wait(10)
    time.sleep(0.1)
    assert fast.paused and fast.count("/resume") == 0
    hold.set()
    thread.join()
    assert not fast.paused and not slow.paused and fast.count("/resume") == 1


def test_one_that_fails_leaves_those_paused_that_may_share_its_store(stack: ExitStack) -> None:
    engines = fleet(stack)
    for engine in engines:
        engine.external = True
    engines[1].refuse(INIT, 500, "no")  # it goes on generating, with its old weights
    registry = registry_of(*engines)
    with pytest.raises(SyncError) as caught:
        registry.sync(7)
    failed = failure(caught, engines[0])
    assert failed.paused and failed.phase == "resume" and engines[1].url in failed.error
    assert engines[0].paused and not engines[1].paused
    engines[1].hooks.clear()
    registry.sync(7)
    # What the other one has put there since is dropped by another end of an update.
    assert engines[0].count("/finish_weight_update") == 2
    assert not engines[0].paused and engines[1].version == "step-7"
