# SPDX-License-Identifier: Apache-2.0
"""Pulls into directories: worlds, checks before bytes, connections kept and shared."""

from __future__ import annotations

import importlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import ADDRESS, OTHER_WORLD, WORLD, Entry, FakeTrainer, Run
from fanin import errors
from fanin._options import Credentials
from fanin.config import inference_config
from fanin.engine.checks import AdapterFacts, EngineFacts
from fanin.engine.clients import ClientPool, Source, Target
from fanin.engine.directories import Places
from fanin.engine.faults import status_of
from fanin.engine.pull_log import PullLog
from fanin.engine.pulls import Adapter, PullService, Wanted
from fanin.engine.trainers import Trainer
from fanin.engine.waits import Waits
from fanin.info import TrainerInfo, write_info
from local_world import CONFIG, PATIENCE, PUBLICATION, addresses, publish, servers, until


class Bench:
    def __init__(self, root: Path, limit: int = 8) -> None:
        self.trainer = FakeTrainer()
        self.pool = ClientPool(self.trainer.client, limit=limit)
        self.facts = EngineFacts(max_lora_rank=16)
        self.service = PullService(Places(root), self.pool, lambda: self.facts)
        self.source = Source.of([ADDRESS])

    def wanted(self, step: int, run: str = "0", **more: Any) -> Wanted:
        source = more.pop("source", self.source)
        fields = {"timeout": 10.0, **more}
        return Wanted(f"policy-run{run}-step{step}", run, step, "policy", source, **fields)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "cache")


def test_a_pull(bench: Bench, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    adapter = bench.service.pull(bench.wanted(1), lambda *state: seen.append(state))
    assert adapter.path == tmp_path / "cache" / WORLD / "0" / "policy-step1"
    assert adapter.path.exists() and adapter.world == WORLD
    assert (adapter.bytes, adapter.reused, seen) == (100, False, [(100, 100)])
    assert bench.service.last_met(bench.source) == (WORLD, (ADDRESS,))
    # One client is kept; the one that found the world out is closed.
    assert bench.trainer.connected == 1 == bench.pool.stats()["idle"]
    assert adapter.lease is not None and adapter.lease.release(delete=True)
    again = bench.service.pull(bench.wanted(1))
    assert again.path.name == "policy-step1-2"
    assert bench.trainer.catalogs == 1, "the catalog is read again though it is the same"


def test_the_file_tells_of_a_successor_that_has_not_come_up(bench: Bench, tmp_path: Path) -> None:
    write_info(tmp_path, TrainerInfo((ADDRESS,), world_id=OTHER_WORLD))
    source = Source.of(str(tmp_path))
    bench.trainer.end()
    assert bench.service.successor(source, WORLD, 1.0) == OTHER_WORLD
    with pytest.raises(errors.UnreachableError):
        bench.service.successor(source, OTHER_WORLD, 1.0)


def test_a_new_catalog_is_read(bench: Bench) -> None:
    bench.service.pull(bench.wanted(1))
    run = bench.trainer.runs["0"]
    run.entries, run.catalog_version, run.step = [Entry("x.lora_A.weight", (32, 8))], 2, 2
    with pytest.raises(errors.RequestError, match="--max-lora-rank 32"):
        bench.service.pull(bench.wanted(2))
    assert [step for _, step, _ in bench.trainer.pulls] == [1]


def test_errors_leave_nothing(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(errors.NotFoundError):
        bench.service.pull(bench.wanted(1, run="9"))
    bench.trainer.commit(5)
    with pytest.raises(errors.SupersededError):
        bench.service.pull(bench.wanted(4))
    with pytest.raises(errors.PullTimeoutError):
        bench.service.pull(bench.wanted(6, timeout=0.05))
    with pytest.raises(errors.RequestError, match="alpha"):
        bench.service.pull(bench.wanted(5, lora_alpha=3.0))
    bench.trainer.alive = False
    with pytest.raises(errors.UnreachableError):
        bench.service.pull(bench.wanted(5))
    assert bench.trainer.connected == 0
    assert [path for path in (tmp_path / "cache").rglob("*")] == []


def test_a_trainer_that_was_started_again(bench: Bench) -> None:
    first = bench.service.pull(bench.wanted(1))
    bench.trainer.restart(OTHER_WORLD, 1)
    second = bench.service.pull(bench.wanted(1))
    assert (first.world, second.world) == (WORLD, OTHER_WORLD)
    assert first.path != second.path and first.path.exists() and second.path.exists()
    assert second.path.name == "policy-step1"


def test_a_trainer_that_is_started_again_during_the_pull(bench: Bench) -> None:
    def restart() -> None:
        bench.trainer.before_pull = lambda: None
        bench.trainer.restart(OTHER_WORLD, 1)

    bench.trainer.before_pull = restart
    adapter = bench.service.pull(bench.wanted(1))
    assert adapter.world == OTHER_WORLD and OTHER_WORLD in str(adapter.path)
    assert OTHER_WORLD in (adapter.path / "fanin.json").read_text()


def test_the_file_is_read_at_each_pull(bench: Bench, tmp_path: Path) -> None:
    info = tmp_path / "info"
    info.mkdir()
    source = Source.of(str(info))
    with pytest.raises(errors.NotFoundError):
        bench.service.pull(bench.wanted(1, source=source))
    write_info(info, TrainerInfo(("10.0.0.1:6000",), world_id=WORLD))
    assert bench.service.pull(bench.wanted(1, source=source)).world == WORLD
    assert bench.trainer.clients[-1].addresses == ["10.0.0.1:6000"]
    assert bench.trainer.clients[-1].demanded == WORLD
    bench.trainer.restart(OTHER_WORLD, 2)
    with pytest.raises(errors.PeerError, match=f"{WORLD}.*{OTHER_WORLD}"):
        bench.service.pull(bench.wanted(2, source=source))
    write_info(info, TrainerInfo(("10.0.0.2:6000",), world_id=OTHER_WORLD))
    assert bench.service.pull(bench.wanted(2, source=source)).world == OTHER_WORLD
    assert bench.trainer.clients[-1].addresses == ["10.0.0.2:6000"]


def test_world_now(bench: Bench, tmp_path: Path) -> None:
    assert bench.service.world_now(bench.source, 5.0) == WORLD
    write_info(tmp_path, TrainerInfo((ADDRESS,), world_id=OTHER_WORLD))
    with pytest.raises(errors.PeerError, match="older than the trainer"):
        bench.service.world_now(Source.of(str(tmp_path)), 5.0)


def test_a_pull_that_waits_holds_up_no_other(bench: Bench) -> None:
    bench.trainer.runs["1"] = Run()
    got: list[Any] = []
    waiter = threading.Thread(
        target=lambda: got.append(bench.service.pull(bench.wanted(2, timeout=30.0)))
    )
    waiter.start()
    assert bench.service.pull(bench.wanted(1, run="1")).run == "1"
    assert not got
    bench.trainer.commit(2)
    waiter.join(10)
    assert got[0].step == 2


def test_connections_are_few(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit=1)
    target = bench.source.resolve()
    deadline = time.monotonic() + 10
    with bench.pool.borrow(target, WORLD, deadline):
        with pytest.raises(errors.ConnectionFailedError, match="busy"):
            with bench.pool.borrow(target, WORLD, time.monotonic() + 0.05):
                raise AssertionError
    with bench.pool.borrow(target, WORLD, deadline) as first:
        pass
    # Another trainer has its own; of idle ones the longest unused goes.
    with bench.pool.borrow(target, WORLD, deadline) as again:
        assert again is first
        with bench.pool.borrow(Target(("10.0.0.9:1",)), WORLD, deadline) as second:
            pass
    assert second.closed and not first.closed
    bench.pool.forget(target)
    assert first.closed and bench.pool.stats() == {"busy": 0, "idle": 0}


def test_a_client_that_could_not_connect_counts_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit=1)
    bench.trainer.alive = False
    for _ in range(3):
        with pytest.raises(errors.UnreachableError):
            bench.service.pull(bench.wanted(1))
    bench.trainer.alive = True
    assert bench.service.pull(bench.wanted(1)).step == 1


def test_closing_cancels(bench: Bench) -> None:
    failed: list[BaseException] = []

    def pull() -> None:
        try:
            bench.service.pull(bench.wanted(2, timeout=60.0))
        except errors.FaninError as error:
            failed.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    until(lambda: bench.trainer.waits)
    bench.service.close()
    thread.join(10)
    assert isinstance(failed[0], errors.CancelledError)
    assert bench.trainer.connected == 0
    with pytest.raises(errors.CancelledError):
        bench.service.pull(bench.wanted(1))


def test_another_base_model_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    adapter = bench.service.pull(bench.wanted(1))
    with caplog.at_level("WARNING", "fanin.engine"):
        bench.service.warn_of_base_model(adapter, "/models/base")
        assert not caplog.records
        for _ in range(2):
            bench.service.warn_of_base_model(adapter, "org/another")
    (record,) = caplog.records
    assert "org/base" in record.getMessage() and "org/another" in record.getMessage()


@pytest.mark.parametrize("trainer", [7, None, {}, "", [], ["nonsense"], [["h"]]])
def test_what_is_no_trainer(trainer: Any) -> None:
    with pytest.raises(errors.RequestError):
        Source.of(trainer)


def test_sources() -> None:
    assert Source.of("h:1,h:2") == Source.of(["h:1", ["h", 2]])
    assert Source.of("/x/nixl_info.json").path == "/x/nixl_info.json"


# -------------------------------------------------------------------- with the library


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[PullService, Wanted]]:
    """Pulls from trainers of this process, and what they have."""
    with servers() as ranks:
        publish(ranks, 1)
        service = PullService(Places(tmp_path / "cache"), ClientPool())
        source = Source.of(addresses(ranks))
        yield service, Wanted("policy-run0-step1", "0", 1, "policy", source, 10.0)
        service.close()


def test_an_adapter_that_is_too_large(real: tuple[PullService, Wanted], tmp_path: Path) -> None:
    """Nobody asks again: the settings have to be others."""
    service, wanted = real
    with pytest.raises(errors.RequestError) as caught:
        service.pull(replace(wanted, max_bytes=100))
    assert (caught.value.name, caught.value.key) == ("FANIN_ERR_LIMIT", "max_bytes")
    assert status_of(caught.value) == 400
    for remedy in ("FANIN_MAX_BYTES", "--shm-size", "NIXL_LORA_CACHE_DIR"):
        assert remedy in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*step1*"))
    assert service.pool.stats() == {"busy": 0, "idle": 1}, "the connections are sound"

    plan = service.plan(wanted, time.monotonic() + 10)
    job: dict[str, Any] = {
        **{"path": str(plan.path), "addresses": plan.target.addresses, "server_name": None},
        **{"world": plan.world, "run": "0", "step": "1", "timeout": 10.0},
    }
    with pytest.raises(errors.RequestError, match="FANIN_MAX_BYTES"):
        service.pull_to({**job, "how": {**wanted.how, "max_bytes": 100}})
    result, lease = service.pull_to({**job, "how": {**wanted.how, "max_bytes": 10000}})
    assert result.bytes > 100 and lease.release(delete=True)


def test_a_configuration_that_is_trusted(tmp_path: Path) -> None:
    with servers() as ranks:
        publish(ranks, 1)
        config = {**json.loads(CONFIG["peft_config"]), "custom_code": "x"}
        for server in ranks:
            server.begin_update(PUBLICATION)
            server.set_metadata(PUBLICATION, {"peft_config": json.dumps(config)})
            server.commit(PUBLICATION, 2)
        service = PullService(Places(tmp_path / "cache"), ClientPool())
        wanted = Wanted("policy-run0-step2", "0", 2, "policy", Source.of(addresses(ranks)), 10.0)
        filtered = service.pull(wanted)
        whole = service.pull(replace(wanted, trust_config=True))
        service.close()
    kept = [
        "custom_code" in json.loads((one.path / "adapter_config.json").read_text())
        for one in (filtered, whole)
    ]
    assert kept == [False, True] and filtered.path != whole.path


def unreachable(given: list[dict[str, Any]]) -> Callable[..., Any]:
    """A factory of clients of nobody. given: gets the options of each."""

    def factory(addresses: list[str], **options: Any) -> Any:
        given.append(options)
        raise errors.UnreachableError.make("nobody is there")

    return factory


def test_a_trainers_file_names_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANIN_SECRET_FILE", raising=False)
    write_info(tmp_path, TrainerInfo(("h:1",), secret_file="/run/secret/launch"))
    given: list[dict[str, Any]] = []
    factory = unreachable(given)
    source = Source.of(str(tmp_path))
    for use in (
        lambda: ClientPool(factory).connect(source.resolve(), None, time.monotonic() + 5),
        lambda: Trainer(source, "0", factory).ready(time.monotonic() + 5),
    ):
        with pytest.raises(errors.UnreachableError):
            use()
    monkeypatch.setenv("FANIN_SECRET_FILE", "/own")  # which the library reads
    with pytest.raises(errors.UnreachableError):
        ClientPool(factory).connect(source.resolve(), None, time.monotonic() + 5)
    assert [one.get("secret_file") for one in given] == [*["/run/secret/launch"] * 2, None]


def test_an_engines_own_certificate_goes_before_a_trainers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FANIN_SECRET_FILE", raising=False)
    tls = {name: f"/run/{name}" for name in ("tls_cert", "tls_key", "tls_ca")}
    lines = [f'{name} = "{path}"' for name, path in tls.items()]
    config = tmp_path / "inference.toml"
    config.write_text("\n".join(("[weight_broadcast]", 'type = "nixl"', *lines)))
    monkeypatch.setenv("FANIN_CONFIG", str(config))
    write_info(tmp_path, TrainerInfo(("h:1",), secret_file="/run/secret/launch"))
    given: list[dict[str, Any]] = []
    factory = unreachable(given)
    source = Source.of(str(tmp_path))
    pool = ClientPool(factory, credentials=inference_config().credentials)
    for use in (
        lambda: pool.connect(source.resolve(), None, time.monotonic() + 5),
        lambda: Trainer(source, "0", factory).ready(time.monotonic() + 5),
    ):
        with pytest.raises(errors.UnreachableError):
            use()
    assert len(given) == 2
    for one in given:
        assert "secret_file" not in one and one.items() >= tls.items()


def test_a_real_pull_says_what_took_how_long(real: tuple[PullService, Wanted]) -> None:
    service, wanted = real
    adapter = service.pull(wanted)
    assert adapter.ranks == 3 and adapter.phases["read"] > 0
    assert 0 < sum(adapter.phases.values()) <= adapter.seconds


def a_pull(step: int, **more: Any) -> Adapter:
    facts = AdapterFacts({}, None, None, 0, "")
    place = (Source.of([ADDRESS]), (ADDRESS, "h:2"), WORLD, Path("/c/1"), facts, False)
    return Adapter(f"p-run0-step{step}", "0", step, "p", *place, **more)


def test_a_pull_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    lines = PullLog(logging.getLogger("fanin.engine"))
    spent = {"connect": 0.0, "read": 0.012, "end": 0.00123}
    how: dict[str, Any] = {"phases": spent, "ranks": 2, "shown": "the secret /run/s"}
    with caplog.at_level("INFO", "fanin.engine"):
        lines.tell(a_pull(7, bytes=1000, seconds=0.02, transport="stream", **how))
        lines.tell(a_pull(8, bytes=9, reused=True, landing="slot", landing_why="why"))
    assert [record.getMessage() for record in caplog.records] == [
        "fanin: adapter p-run0-step7 pulled: run 0, step 7, 1000 bytes in 20.0 ms (read 12.0,"
        f" end 1.2, rest 6.8) by stream, into a directory, from 2 ranks of world {WORLD} at"
        f" {ADDRESS}, with the secret /run/s",
        "fanin: adapter p-run0-step8 pulled: run 0, step 8, 9 bytes in 0.0 ms by ? (was here),"
        f" into a slot (why), from ranks of world {WORLD} at {ADDRESS}",
    ]


def test_vllm_shows_these_lines() -> None:
    """vLLM gives handlers to no logger but its own."""
    importlib.import_module("fanin.vllm")
    lines = logging.getLogger("fanin.engine")
    assert lines.parent is logging.getLogger("vllm.fanin")
    assert logging.getLogger("fanin").parent is logging.root


def test_lines_of_pulls_are_few(caplog: pytest.LogCaptureFixture) -> None:
    now = [5.0]
    lines = PullLog(logging.getLogger("fanin.engine"), lambda: now[0])
    with caplog.at_level("INFO", "fanin.engine"):
        for step in range(30):
            lines.tell(a_pull(step))
        assert len(caplog.records) == 20
        now[0] += 0.5  # time for one
        lines.tell(a_pull(30))
        lines.tell(a_pull(31))
    assert len(caplog.records) == 21
    assert "step30 " in caplog.messages[-1]
    assert caplog.messages[-1].endswith("; lines of 10 pulls were left out")
    with caplog.at_level("DEBUG", "fanin.engine"):
        lines.tell(a_pull(32))
    assert caplog.records[-1].levelname == "DEBUG" and "step32 " in caplog.messages[-1]


def test_a_client_that_showed_nothing_is_not_lent_for_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FANIN_SECRET_FILE", raising=False)
    trainer = FakeTrainer()
    given: list[str | None] = []

    def factory(addresses: list[str], secret_file: str | None = None, **options: Any) -> Any:
        given.append(secret_file)
        return trainer.client(addresses, **options)

    write_info(tmp_path, TrainerInfo((ADDRESS,), secret_file="/run/secret/launch"))
    plain, named = Source.of([ADDRESS]).resolve(), Source.of(str(tmp_path)).resolve()
    pool, deadline = ClientPool(factory, limit=2), time.monotonic() + 10
    with pool.borrow(plain, WORLD, deadline) as showed_nothing:
        pass
    with pool.borrow(named, WORLD, deadline) as showed_it:
        assert showed_it is not showed_nothing
    assert given == [None, "/run/secret/launch"]
    # Neither is the world that somebody else told.
    assert pool.discover(plain, deadline) == WORLD
    trainer.restart(OTHER_WORLD, 1)
    assert pool.world_of(named, deadline) == OTHER_WORLD
    assert pool.world_of(plain, deadline) == WORLD
    pool.forget(plain)
    assert showed_nothing.closed and not showed_it.closed
    assert pool.world_of(plain, deadline) == OTHER_WORLD
    # Together they are no more of a trainer than the limit says.
    with pool.borrow(plain, OTHER_WORLD, deadline), pool.borrow(plain, OTHER_WORLD, deadline):
        with pytest.raises(errors.ConnectionFailedError, match="busy"):
            with pool.borrow(named, OTHER_WORLD, time.monotonic() + 0.05):
                raise AssertionError
    pool.close()


def test_who_waits_with_a_secret_waits_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What became of a wait that showed nothing is not told to who shows a secret."""
    monkeypatch.delenv("FANIN_SECRET_FILE", raising=False)
    write_info(tmp_path, TrainerInfo((ADDRESS,), secret_file="/run/secret/launch"))
    named = Source.of(str(tmp_path)).resolve()
    waiting: list[str | None] = []

    class Waiting:
        def __init__(self, secret_file: str | None) -> None:
            self.secret_file = secret_file
            self.cancelled = threading.Event()

        def wait(self, *_: Any, **__: Any) -> int:
            waiting.append(self.secret_file)
            assert self.cancelled.wait(PATIENCE)
            raise errors.CancelledError.make("cancelled")

        def cancel(self) -> None:
            self.cancelled.set()

        def close(self) -> None:
            pass

    def factory(*_: Any, secret_file: str | None = None, **__: Any) -> Any:
        return Waiting(secret_file)

    waits = Waits(ClientPool(factory))
    futures = [waits.expect(one, WORLD, "0", 1) for one in (Source.of([ADDRESS]).resolve(), named)]
    until(lambda: len(waiting) == 2)
    assert set(waiting) == {None, "/run/secret/launch"}
    waits.close()
    for future in futures:
        with pytest.raises(errors.CancelledError):
            future.result(PATIENCE)


def test_what_ranks_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANIN_SECRET_FILE", raising=False)
    named, silent = Target(("h:1",), secret_file="/named"), Target(("h:1",))
    own = ClientPool(credentials=Credentials(tls_cert="/c", tls_key="/k", tls_ca="/a"))
    assert [ClientPool().shown(one) for one in (named, silent)] == ["the secret /named", ""]
    assert own.shown(named) == "the certificate /c"
