# SPDX-License-Identifier: Apache-2.0
"""The pool: every engine gets one step, under its own name, or the caller learns why not."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fanin
import pytest
from fanin.engine.faults import body_of, status_of
from fanin.errors import CancelledError, PullTimeoutError, RequestError
from fanin.info import TrainerInfo, wait_stable, write_info
from fanin.pool import EnginePool, PoolError, UpdateResult, newest_step
from http_engine import OK, SUPERSEDED, Answer, Engine, Request, Trainer, refusal
from local_world import PATIENCE, until

Answers = Callable[[Request], Answer | None]
HERE = TrainerInfo(("10.0.0.1:6000", "[fd00::1]:6001"), run="3")


@pytest.fixture
def hang(stack: ExitStack) -> Answers:
    """An engine that answers when the test is over."""
    release = threading.Event()
    stack.callback(release.set)
    return lambda _: OK if release.wait() else None


def engines(stack: ExitStack, *answers: Any) -> list[Engine]:
    return [stack.enter_context(Engine(answer)) for answer in answers]


def pool_of(made: list[Engine], **options: Any) -> EnginePool:
    return EnginePool([engine.url for engine in made], **{"timeout": 20.0, **options})


# ------------------------------------------------------------------- success


def test_all_engines_get_the_step(tmp_path: Path, stack: ExitStack) -> None:
    made = engines(stack, [OK], [(200, {"status": "ok", "step": 7, "world": "whatever"})])
    pool = EnginePool(
        [made[0].url + "/v1", made[1].url + "/"], api_key="secret", lora_alpha=32.0, timeout=20
    )
    write_info(tmp_path, HERE)
    result = pool.update_weights(tmp_path, "policy", 7)
    assert (result.step, result.lora_name, result.superseded) == (7, "policy-run3-step7", False)
    assert set(result.seconds) == {engine.url for engine in made}
    assert all(0 < seconds < 20 for seconds in result.seconds.values())
    for engine in made:
        (request,) = engine.requests
        assert request.path == "/load_lora_adapter_nixl"
        assert request.headers["Authorization"] == "Bearer secret"
        timeout = request.body.pop("timeout")
        assert 10 < timeout < 19.5
        assert request.body == {
            "lora_name": "policy-run3-step7",
            "run_idx": 3,
            "trainer_addresses": [["10.0.0.1", 6000], ["fd00::1", 6001]],
            "step": 7,
            "lora_alpha": 32.0,
        }


def test_whole_names_runs_and_no_alpha(stack: ExitStack) -> None:
    made = engines(stack, [OK])
    pool = pool_of(made)
    assert pool.update_weights("a:1,b:2", "p-runx.y-step5", 5).lora_name == "p-runx.y-step5"
    assert made[0].bodies[0]["run_idx"] == "x.y"
    assert "lora_alpha" not in made[0].bodies[0]
    assert pool.update_weights([["a", 1]], "p", 0).lora_name == "p-run0-step0"
    assert pool_of(made, run=4).update_weights("a:1", "p", 9).lora_name == "p-run4-step9"
    assert pool_of(made, run="007").update_weights("a:1", "p", 9).lora_name == "p-run007-step9"
    assert made[0].bodies[-1]["run_idx"] == "007"


def test_waits_for_the_marker(tmp_path: Path, stack: ExitStack) -> None:
    made = engines(stack, [OK])
    waiting = threading.Event()
    results: list[UpdateResult] = []

    def update() -> None:
        waiting.set()
        results.append(pool_of(made).update_weights(tmp_path / "step_1", "p", 1))

    thread = threading.Thread(target=update)
    thread.start()
    waiting.wait()
    write_info(tmp_path / "step_1", HERE)
    thread.join()
    assert results[0].step == 1
    with pytest.raises(PullTimeoutError, match=r"step_2 is not there after 0\.05 s"):
        pool_of(made, timeout=0.05).update_weights(tmp_path / "step_2", "p", 2)
    assert len(made[0].requests) == 1


def test_engines_are_asked_at_once(stack: ExitStack) -> None:
    barrier = threading.Barrier(3, timeout=20)

    def together(_: Request) -> Answer:
        barrier.wait()
        return OK

    made = engines(stack, together, together, together)
    assert pool_of(made).update_weights(HERE, "p", 1).step == 1


# ------------------------------------------------------------------- retries


def test_what_passes_is_asked_again(stack: ExitStack) -> None:
    unreachable = refusal(503, "FANIN_ERR_UNREACHABLE")
    made = engines(
        stack,
        [unreachable, None, (502, b"bad gateway"), OK],
        [refusal(504, "FANIN_ERR_STALE"), OK],
        [OK],
    )
    assert pool_of(made).update_weights(HERE, "p", 1).step == 1
    assert [len(engine.requests) for engine in made] == [4, 2, 1]


def test_what_does_not_pass_is_not(stack: ExitStack) -> None:
    wrong = refusal(400, "FANIN_ERR_ARGUMENT", "alpha 32 contradicts 16", "use 16")
    made = engines(stack, [wrong], [OK], [(500, {"detail": "disk full"})], [(404, b"no route")])
    with pytest.raises(PoolError) as caught:
        pool_of(made).update_weights(HERE, "p", 1)
    error = caught.value
    assert [len(engine.requests) for engine in made] == [1, 1, 1, 1]
    assert list(error.failures) == [made[0].url, made[2].url, made[3].url]
    assert error.loaded == (made[1].url,)
    assert (error.lora_name, error.step) == ("p-run3-step1", 1)
    assert error.name == "FANIN_ERR_ARGUMENT"
    text = str(error)
    assert "3 of 4 engines did not load p-run3-step1" in text
    assert f"{made[0].url}: HTTP 400 FANIN_ERR_ARGUMENT: alpha 32 contradicts 16" in text
    assert "remedy: use 16" in text
    assert f"{made[2].url}: HTTP 500: disk full" in text
    assert "no route" in text and "VLLM_PLUGINS=fanin" in text
    again = pickle.loads(pickle.dumps(error))
    assert again.failures == error.failures and str(again) == text


def test_retries_are_counted(stack: ExitStack) -> None:
    made = engines(stack, [refusal(503, "FANIN_ERR_PAUSED", "trainer memory offloaded")])
    with pytest.raises(PoolError, match=r"trainer memory offloaded \(after 3 attempts\)") as caught:
        pool_of(made, retries=2).update_weights(HERE, "p", 1)
    assert len(made[0].requests) == 3
    assert caught.value.name == "FANIN_ERR_PAUSED"


def test_an_engine_that_is_not_there(stack: ExitStack) -> None:
    with Engine([OK]) as gone:
        url = gone.url
    made = engines(stack, [OK])
    pool = EnginePool([url, made[0].url], timeout=1.0)
    with pytest.raises(PoolError, match="1 of 2 engines .* cannot be reached") as caught:
        pool.update_weights(HERE, "p", 1)
    assert caught.value.failures[url].attempts > 1
    assert caught.value.failures[url].status is None
    assert caught.value.loaded == (made[0].url,)
    assert caught.value.name == "FANIN_ERR_UNREACHABLE"


def test_why_an_engine_is_asked_again_is_told(stack: ExitStack, hang: Answers) -> None:
    """By its last refusal, if the others have the step before it has answered once more."""
    asked_again = threading.Event()

    def refuse_twice(request: Request) -> Answer | None:
        if len(made[0].requests) <= 2:
            return refusal(503, "FANIN_ERR_PAUSED", "trainer memory offloaded", "wake it")
        asked_again.set()
        return hang(request)

    made = engines(stack, refuse_twice, lambda _: OK if asked_again.wait(PATIENCE) else None)
    result = pool_of(made, timeout=3600.0).update_weights(HERE, "p", 1, stragglers=0.0)
    assert list(result.seconds) == [made[1].url]
    failure = result.failures[made[0].url]
    assert (failure.status, failure.code, failure.attempts) == (503, "FANIN_ERR_PAUSED", 2)
    assert "trainer memory offloaded" in str(failure) and "wake it" in str(failure)


def test_an_engine_that_hangs(stack: ExitStack, hang: Answers) -> None:
    made = engines(stack, hang, [OK])
    with pytest.raises(PoolError, match="no answer in time") as caught:
        pool_of(made, timeout=1.0).update_weights(HERE, "p", 1)
    assert list(caught.value.failures) == [made[0].url]
    assert caught.value.loaded == (made[1].url,)


def test_stragglers_are_not_waited_for(stack: ExitStack, hang: Answers) -> None:
    """One engine hangs, one is gone, one refuses: the others' step is told as soon as it may be."""
    with Engine([OK]) as gone:
        url = gone.url
    hanging, refusing, good = engines(stack, hang, [refusal(400, "FANIN_ERR_MISMATCH")], [OK])
    urls = [url, hanging.url, refusing.url, good.url]
    # Without stragglers this would take an hour.
    pool = EnginePool(urls, timeout=3600.0)
    result = pool.update_weights(HERE, "p", 1, stragglers=0.05)
    assert result.lora_name == "p-run3-step1" and list(result.seconds) == [good.url]
    assert list(result.failures) == [url, hanging.url, refusing.url]
    assert "cannot be reached" in str(result.failures[url])
    assert "no answer" in str(result.failures[hanging.url])
    assert result.failures[refusing.url].status == 400
    # With nobody who has it there is nothing to return.
    with pytest.raises(PoolError, match="1 of 1"):
        EnginePool([refusing.url]).update_weights(HERE, "p", 1, stragglers=0.0)
    with pytest.raises(RequestError, match="stragglers"):
        pool.update_weights(HERE, "p", 1, stragglers=-1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, b"<html>"), "unexpected answer: <html>"),
        ((200, {"status": "error"}), "unexpected answer"),
        ((200, [1]), "unexpected answer"),
        ((200, {"status": "ok", "step": 2}), "loaded step 2 under the name p-run0-step1"),
        ((200, {"status": "ok", "world": "22" * 16}), "from world 2222"),
        ((200, b"x" * (2 << 20)), "unexpected answer"),
    ],
)
def test_answers_that_are_none(stack: ExitStack, answer: Answer, words: str) -> None:
    made = engines(stack, [answer])
    with pytest.raises(PoolError, match=words):
        pool_of(made).update_weights(TrainerInfo(("a:1",), world_id="11" * 16), "p", 1)


@pytest.mark.parametrize("stragglers", [None, 10.0])
def test_engines_that_have_the_step_of_two_launches(
    stack: ExitStack, stragglers: float | None
) -> None:
    """The trainer is named by addresses: nobody but the engines tells which launch was there."""
    worlds = ("11" * 16, "22" * 16, "22" * 16)
    told = [[(200, {"status": "ok", "step": 1, "world": world})] for world in worlds]
    made = engines(stack, *told)
    with pytest.raises(PoolError, match="started again.*update again") as caught:
        pool_of(made).update_weights("127.0.0.1:1", "p", 1, stragglers=stragglers)
    assert caught.value.name == "FANIN_ERR_WORLD"
    assert caught.value.loaded == ()
    for engine, world in zip(made, worlds, strict=True):
        assert f"loaded p-run0-step1 from world {world}" in str(caught.value.failures[engine.url])


@pytest.mark.parametrize("world", ["11" * 16, None, ["11"]])
def test_engines_that_tell_one_launch_or_none(stack: ExitStack, world: Any) -> None:
    made = engines(stack, [OK], [(200, {"status": "ok", "step": 1, "world": world})])
    result = pool_of(made).update_weights("127.0.0.1:1", "p", 1)
    assert len(result.seconds) == 2 and not result.failures


# ---------------------------------------------------------------- superseded


def test_all_get_the_newest_step_under_its_own_name(stack: ExitStack) -> None:
    """One engine had the old step, one finds it superseded: both end with the newest."""
    with Trainer() as trainer:
        trainer.commit(3)
        made = engines(stack, [OK], [SUPERSEDED, OK], [SUPERSEDED, OK])
        result = pool_of(made, server_name="job").update_weights(trainer.info, "p", 1)
        assert (result.step, result.lora_name, result.superseded) == (3, "p-run0-step3", True)
        for engine in made:
            assert engine.names == ["p-run0-step1", "p-run0-step3"]
            assert engine.bodies[-1]["step"] == 3
            assert engine.bodies[-1]["server_name"] == "job"
        whole = pool_of(made).update_weights(trainer.info, "p-run0-step2", 2)
        assert whole.lora_name == "p-run0-step2" and not whole.superseded


def test_newest_is_what_all_ranks_have(stack: ExitStack) -> None:
    with Trainer(size=3) as trainer:
        trainer.commit(5)
        trainer.commit(6, ranks=[0, 2])
        assert newest_step(trainer.info, 0) == 5
        with pytest.raises(PullTimeoutError, match="no step above 5 of lora:0 on all ranks"):
            newest_step(trainer.info, "0", beyond=5, timeout=1.5)

        def superseded(request: Request) -> Answer:
            if request.body["step"] < 6:
                # The last rank commits only after the engine has said so.
                trainer.commit(6, ranks=[1])
                return SUPERSEDED
            return OK

        made = engines(stack, superseded)
        assert pool_of(made).update_weights(trainer.info, "p", 5).step == 6


def test_superseded_again_and_again(stack: ExitStack) -> None:
    with Trainer() as trainer:
        trainer.commit(2)

        def chase(request: Request) -> Answer:
            if request.body["step"] >= 5:
                return OK
            trainer.commit(request.body["step"] + 2)
            return SUPERSEDED

        made = engines(stack, chase, [OK])
        result = pool_of(made).update_weights(trainer.info, "p", 1)
        assert result.step == 5
        assert made[0].names == ["p-run0-step1", "p-run0-step3", "p-run0-step5"]
        assert made[1].names[-1] == "p-run0-step5"


def test_a_chase_without_end_ends(stack: ExitStack) -> None:
    with Trainer() as trainer:
        trainer.commit(1)

        def chase(request: Request) -> Answer:
            trainer.commit(request.body["step"] + 1)
            return SUPERSEDED

        made = engines(stack, chase)
        with pytest.raises(PoolError, match="superseded") as caught:
            pool_of(made, timeout=1.5).update_weights(trainer.info, "p", 1)
        assert caught.value.name == "FANIN_ERR_SUPERSEDED"
        assert len(made[0].requests) > 2


def test_superseded_does_not_wait_for_a_hanging_engine(stack: ExitStack, hang: Answers) -> None:
    with Trainer() as trainer:
        trainer.commit(4)
        made = engines(stack, hang, [SUPERSEDED, OK], [refusal(503, "FANIN_ERR_CLOSED"), OK])
        with pytest.raises(PoolError) as caught:
            pool_of(made, timeout=3.0).update_weights(trainer.info, "p", 1)
        assert list(caught.value.failures) == [made[0].url]
        assert caught.value.step == 4 and caught.value.loaded == (made[1].url, made[2].url)
        assert made[1].names[-1] == made[2].names[-1] == "p-run0-step4"


def test_a_late_answer_of_the_old_step_does_not_count(stack: ExitStack) -> None:
    """The slow engine loads the old step while the others are already sent the newest."""
    newest = threading.Event()

    def slow(request: Request) -> Answer:
        if request.body["step"] == 1:
            assert newest.wait(20)
        return OK

    def quick(request: Request) -> Answer:
        if request.body["step"] == 1:
            return SUPERSEDED
        newest.set()
        return OK

    with Trainer() as trainer:
        trainer.commit(4)
        made = engines(stack, slow, quick)
        assert pool_of(made).update_weights(trainer.info, "p", 1).step == 4
        assert made[0].names == ["p-run0-step1", "p-run0-step4"]


def test_superseded_and_nobody_knows_the_newest(stack: ExitStack) -> None:
    with Trainer() as trainer:
        info = trainer.info
    made = engines(stack, [SUPERSEDED], [OK])
    with pytest.raises(PoolError, match="superseded, and the newest is not known") as caught:
        pool_of(made, timeout=1.0).update_weights(info, "p", 1)
    assert caught.value.loaded == (made[1].url,)


def test_another_launch_has_no_newest_step(stack: ExitStack) -> None:
    with Trainer(world=bytes([9] * 16)) as trainer:
        trainer.commit(4)
        info = TrainerInfo(trainer.addresses, "11" * 16)
        made = engines(stack, [SUPERSEDED])
        with pytest.raises(PoolError, match="world") as caught:
            pool_of(made).update_weights(info, "p", 1)
        assert made[0].names == ["p-run0-step1"]
        assert caught.value.name == "FANIN_ERR_SUPERSEDED"


def test_engines_that_really_pull(tmp_path: Path, stack: ExitStack) -> None:
    """From nixl_info.json to adapters on disk, with a trainer that has gone on meanwhile."""

    def engine(place: Path) -> Any:
        def pull(request: Request) -> Answer:
            body = request.body
            addresses = [f"{host}:{port}" for host, port in body["trainer_addresses"]]
            try:
                with fanin.Client(addresses, use_ucx=False) as client:
                    done = client.pull_adapter(
                        body["run_idx"],
                        place / body["lora_name"],
                        step=body["step"],
                        timeout=body["timeout"],
                    )
                return 200, {"status": "ok", "step": done.step, "world": done.world_id}
            except fanin.FaninError as error:
                return status_of(error), body_of(error)

        return pull

    with Trainer(run="7") as trainer:
        trainer.commit(1)
        write_info(tmp_path / "step_1", trainer.info)
        made = engines(stack, engine(tmp_path / "a"), engine(tmp_path / "b"))
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        pool = pool_of(made)
        assert pool.update_weights(tmp_path / "step_1", "p", 1).lora_name == "p-run7-step1"
        trainer.commit(2)
        trainer.commit(3)
        result = pool.update_weights(tmp_path / "step_1", "p", 2)
        assert (result.step, result.superseded) == (3, True)
        for place in ("a", "b"):
            assert sorted(p.name for p in (tmp_path / place).iterdir()) == [
                "p-run7-step1",
                "p-run7-step3",
            ]
            told = json.loads((tmp_path / place / "p-run7-step3" / "fanin.json").read_text())
            assert told["step"] == 3
        # A run that is not there is nobody's passing trouble.
        with pytest.raises(PoolError, match="FANIN_ERR_NOT_FOUND"):
            pool.update_weights(trainer.addresses, "p-run8-step1", 1)


# ------------------------------------------------------------------- asyncio


def test_asyncio(stack: ExitStack) -> None:
    made = engines(stack, [OK])
    result = asyncio.run(pool_of(made).aupdate_weights(HERE, "p", 1))
    assert result.lora_name == "p-run3-step1"


def test_a_cancelled_task_asks_nobody_again(stack: ExitStack) -> None:
    made = engines(stack, [refusal(503, "FANIN_ERR_UNREACHABLE")])
    pool = pool_of(made)
    before = threading.active_count()

    async def main() -> None:
        task = asyncio.create_task(pool.aupdate_weights(HERE, "p", 1))
        await asyncio.to_thread(made[0].arrived.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())  # waits for the thread of the update
    until(lambda: threading.active_count() <= before)
    assert len(made[0].requests) <= 2


def test_a_cancelled_task_waits_for_no_marker(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engines(stack, [OK])
    pool = pool_of(made, timeout=2 * PATIENCE)
    looked = threading.Event()

    def look(directory: Any, timeout: float, **rest: Any) -> TrainerInfo:
        looked.set()
        return wait_stable(directory, timeout, **rest)

    monkeypatch.setattr("fanin.fleet.pool.wait_stable", look)

    async def main() -> None:
        task = asyncio.create_task(pool.aupdate_weights(tmp_path / "step_1", "p", 1))
        await asyncio.to_thread(looked.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(main())  # waits for the thread of the update
    assert time.monotonic() - began < PATIENCE
    write_info(tmp_path / "step_1", HERE)
    assert not made[0].requests


@pytest.mark.parametrize("when", ["the marker comes", "the threads start"])
def test_who_has_gone_has_nobody_asked(
    when: str, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engines(stack, [OK])
    stop = threading.Event()
    begun: list[Callable[[], None]] = []

    def come(*_: Any, **__: Any) -> TrainerInfo:
        if when == "the marker comes":
            stop.set()
        return HERE

    def begin(drive: Callable[[], None]) -> Callable[[], None]:
        stop.set()
        begun.append(drive)
        return lambda: None

    monkeypatch.setattr("fanin.fleet.pool.wait_stable", come)
    monkeypatch.setattr("fanin.fleet.pool.carry", begin)
    with pytest.raises(CancelledError):
        pool_of(made)._update(tmp_path, "p", 1, None, None, stop)
    for drive in begun:
        drive()
    assert not made[0].requests


def test_newest_step_can_be_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with Trainer(size=1) as trainer, pytest.raises(CancelledError):
        newest_step(trainer.info, 0, timeout=20, stop=stop)


# ----------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("policy-run1-step4", 5), "says step 4, the call says 5"),
        (("policy-run2-step5", 5), "says run 2, the pool is for run 1"),
        (("", 5), "no name"),
        ((None, 5), "no name"),
        (("two words", 5), "prefix"),
        (("p", -1), "step"),
        (("p", 1.5), "step"),
    ],
)
def test_contradictions(stack: ExitStack, arguments: tuple[Any, int], words: str) -> None:
    made = engines(stack, [OK])
    with pytest.raises(RequestError, match=words):
        pool_of(made, run=1).update_weights("a:1", *arguments)
    assert not made[0].requests


def test_the_file_is_of_another_run(stack: ExitStack) -> None:
    made = engines(stack, [OK])
    with pytest.raises(RequestError, match="of run 1, but the trainer's file is of run 3"):
        pool_of(made).update_weights(HERE, "p-run1-step4", 4)
    assert not made[0].requests


@pytest.mark.parametrize(
    "urls",
    [
        [],
        "http://a:1",
        ["a:1"],
        ["ftp://a"],
        ["http://"],
        ["http://a:x"],
        ["http://u:p@a"],
        ["http://a:1", "http://a:1/v1"],
        [5],
    ],
)
def test_urls(urls: Any) -> None:
    with pytest.raises(RequestError):
        EnginePool(urls)


def test_keys(stack: ExitStack) -> None:
    made = engines(stack, [OK])
    pool_of(made, api_key=" secret\n").update_weights(HERE, "p", 1)
    assert made[0].requests[0].headers["Authorization"] == "Bearer secret"
    for bad in ("s3\ncret", "s3\0cret", "s3€cret", " "):
        with pytest.raises(RequestError, match="api_key") as caught:
            pool_of(made, api_key=bad)
        assert "s3" not in str(caught.value) and "cret" not in str(caught.value)


def test_a_bug_is_told_without_what_was_sent(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engines(stack, [OK])

    def post_json(*_: Any, api_key: str, **__: Any) -> Any:
        raise ValueError(f"Invalid header value b'Bearer {api_key}'")

    monkeypatch.setattr("fanin.fleet.pool.post_json", post_json)
    with pytest.raises(PoolError, match="ValueError in post_json, .*test_pool.py:") as caught:
        pool_of(made, api_key="s3cret").update_weights(HERE, "p", 1)
    assert caught.value.name == "FANIN_ERR_INTERNAL"
    assert "s3cret" not in str(caught.value) and "s3cret" not in repr(caught.value.failures)


def test_a_path_before_v1_stays() -> None:
    assert EnginePool(["https://h/engine/v1/"]).engines == ("https://h/engine",)
    with pytest.raises(RequestError):
        EnginePool(["http://a:1"], timeout=0)


# ---------------------------------------------------------------------- init


def test_init_engines(tmp_path: Path, stack: ExitStack) -> None:
    made = engines(stack, [refusal(503, "FANIN_ERR_UNREACHABLE"), OK], [OK])
    pool = pool_of(made, server_name="job")
    pool.init_engines("10.0.0.1:6000,[::1]:6001")
    pool.init_engines(tmp_path / "weights")
    assert [request.path for request in made[1].requests] == ["/init_nixl_client"] * 2
    assert all(0 < body.pop("timeout") < 20 for body in made[1].bodies)
    assert made[1].bodies == [
        {"trainer_addresses": [["10.0.0.1", 6000], ["::1", 6001]], "server_name": "job"},
        {"trainer_addresses": str(tmp_path / "weights"), "server_name": "job"},
    ]
    assert len(made[0].requests) == 3


def test_init_engines_names_who_failed(stack: ExitStack) -> None:
    made = engines(stack, [OK], [refusal(400, "FANIN_ERR_ARGUMENT", "no")])
    with pytest.raises(PoolError, match="1 of 2 engines did not take the trainer's") as caught:
        pool_of(made).init_engines("a:1")
    assert list(caught.value.failures) == [made[1].url]
