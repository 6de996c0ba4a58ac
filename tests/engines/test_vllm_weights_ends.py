# SPDX-License-Identifier: Apache-2.0
"""A real vLLM of which a process dies, or is stopped: every call ends, and says what it was.

An update stands still in a worker, when the half is written, while that is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fanin
import pytest
from fanin.sync import Registry, SyncError
from full_models import save_full_model
from safetensors.torch import load_file
from vllm_server import Refused, TokenStream, VllmServer
from weights_engine import Engine

PROMPT = [5, 9, 13, 17, 21]
WITHIN = 60.0  # seconds, of which vLLM takes up to 15 to end what is left
HURTING = "hurting.Hurting"


class Trainer:
    """One rank in this process, whose steps differ by nothing but their number."""

    def __init__(self, model: Path) -> None:
        self.server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1)
        self.address = f"127.0.0.1:{self.server.port}"
        tensors = load_file(model / "model.safetensors")
        shards = [fanin.shard_of(name, one) for name, one in tensors.items()]
        self.server.put("full:0", shards)
        self.published = 0
        self.server.commit("full:0", 0)

    def step(self) -> int:
        self.published += 1
        self.server.begin_update("full:0")
        self.server.commit("full:0", self.published)
        return self.published


class Place:
    """One vLLM server and its trainer."""

    def __init__(self, scratch: Path, *arguments: str) -> None:
        model = save_full_model(scratch / "model", "qwen3", tied=True)
        self.trainer = Trainer(model)
        self.held = scratch / "held"
        backend = ("--weight-transfer-config", '{"backend": "fanin"}', "--dtype", "bfloat16")
        self.engine = VllmServer(
            model,
            scratch,
            *(*backend, "--worker-extension-cls", HURTING, *arguments),
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HURTING_HELD": str(self.held),
            },
            adapters=False,
        )
        self.pool = ThreadPoolExecutor(8)

    def __enter__(self) -> Place:
        self.engine.wait_ready()
        info = {"trainer": self.trainer.address, "timeout": 60}
        self.post("/init_weight_transfer_engine", init_info=info)
        return self

    def __exit__(self, *_: object) -> None:
        self.held.unlink(missing_ok=True)
        self.engine.stop()
        self.pool.shutdown()
        self.trainer.server.close()

    def post(self, path: str, **body: Any) -> Any:
        return self.engine.ask("POST", path, body or None, WITHIN)

    def hold(self) -> list[int]:
        """The next update will stand still; the workers' processes."""
        found = []
        for rank in range(2):
            kwargs = {"at": 5, "rank": rank, "how": "hold"}
            found = self.post("/collective_rpc", method="hurt", kwargs=kwargs)["results"]
        return [int(pid) for pid in found]

    def begin(self, step: int) -> Future[Any]:
        """An update, which stands still now."""
        self.post("/start_weight_update")
        update = self.pool.submit(self.post, "/update_weights", update_info={"step": step})
        self.wait_held(update)
        return update

    def wait_held(self, update: Future[Any]) -> None:
        deadline = time.monotonic() + 60
        while not self.held.exists():
            assert time.monotonic() < deadline and not update.done(), update
            time.sleep(0.05)

    def goes_on(self) -> None:
        """A sync finds the way, whatever the engine has done of what it was asked meanwhile."""
        self.engine.ask("GET", "/is_paused", None, WITHIN)  # has answered all of that
        registry = Registry(self.trainer.address, timeout=60)
        registry.add(self.engine.url)
        assert registry.sync(self.trainer.step()).ok
        assert self.engine.tokens("base", PROMPT, 4)

    def all_end(self, *said: str, gone: bool = False) -> None:
        """Every route of an update answers with an error that says so; gone: or there is nobody
        any more."""
        paths = ["/pause?mode=keep", "/start_weight_update", "/resume"]
        asked = [self.pool.submit(self.post, path) for path in paths]
        finish = {"weight_version": "step-none"}
        asked.append(self.pool.submit(self.post, "/finish_weight_update", **finish))
        for path in ("/is_paused", "/weight_info"):
            asked.append(self.pool.submit(self.engine.ask, "GET", path, None, WITHIN))
        for one in asked:
            with contextlib.suppress(*((ConnectionError,) if gone else ())):
                refused(one, *said)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def refused(answer: Future[Any], *said: str) -> None:
    with pytest.raises(Refused) as caught:
        answer.result(WITHIN)
    assert caught.value.status in (500, 503)
    for text in said:
        assert text in str(caught.value.body), caught.value.body


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_processes_that_are_stopped_and_a_core_that_is_killed(tmp_path: Path) -> None:
    with Place(tmp_path) as place:
        (worker,) = place.hold()
        core = parent_of(worker)
        update = place.begin(place.trainer.step())
        with stopped(worker):
            refused(update, f"process {worker}", "is stopped", "SIGCONT")
        with stopped(core):
            place.all_end(f"process {core}", "is stopped", "SIGCONT")
        place.held.unlink()
        place.goes_on()
        killed_in_an_update(place)


def killed_in_an_update(place: Place) -> None:
    (worker,) = place.hold()
    dead = ("EngineCore (exit status -9)", "start the engine again")
    with TokenStream(place.engine, "base", PROMPT, 20000) as stream:
        stream.wait_for(5)
        update = place.begin(place.trainer.step())
        os.kill(parent_of(worker), signal.SIGKILL)
        refused(update, *dead)
        stream.wait_end()
        assert all(text in stream.error for text in dead), stream.error
    place.all_end(*dead, gone=True)
    assert place.engine._process.wait(WITHIN) is not None


def test_a_worker_that_is_killed_in_a_sync(tmp_path: Path) -> None:
    with Place(tmp_path, "--tensor-parallel-size", "2") as place:
        registry = Registry(place.trainer.address, timeout=60)
        registry.add(place.engine.url)
        assert registry.sync().ok
        workers = place.hold()
        assert len(set(workers)) == 2
        step = place.trainer.step()
        sync = place.pool.submit(registry.sync, step, prefetch=False)
        place.wait_held(sync)
        os.kill(workers[1], signal.SIGKILL)
        with pytest.raises(SyncError) as caught:
            sync.result(WITHIN)
        said = str(caught.value)
        assert "Worker" in said and "exit status -9" in said and "start the engine" in said, said
        assert place.engine.url in said
        with pytest.raises(SyncError, match=place.engine.url):
            registry.sync(step)


def test_an_offline_engine_whose_core_is_killed(tmp_path: Path) -> None:
    model = save_full_model(tmp_path / "model", "qwen3", tied=True)
    trainer = Trainer(model)
    held = tmp_path / "held"
    with (
        trainer.server,
        Engine(
            model,
            tmp_path / "engine",
            alone=False,
            environment={"HURTING_HELD": str(held)},
            worker_extension_cls=HURTING,
        ) as engine,
    ):
        engine.wait_ready()
        assert not engine.init(trainer.address)
        engine.pull(trainer.step())
        engine.good("collective_rpc", "hurt", None, [3, 0, "hold"])
        engine.good("start_weight_update")
        with ThreadPoolExecutor(1) as pool:
            update = pool.submit(engine.update, trainer.step())
            deadline = time.monotonic() + 60
            while not held.exists():
                assert time.monotonic() < deadline and not update.done()
                time.sleep(0.05)
            os.kill(parent_of(int(held.read_text())), signal.SIGKILL)
            said = update.result(WITHIN)
        assert "EngineCore (exit status -9)" in said and "start the engine again" in said, said
        assert "exit status -9" in engine.call("start_weight_update")
        assert engine.refusal()
