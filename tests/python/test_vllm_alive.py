# SPDX-License-Identifier: Apache-2.0
"""Nobody waits without end for the answer of an engine core that is dead, or stopped.

vLLM's asynchronous client is stood for by one that waits for ever, as it does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fanin.errors import HostError, PullTimeoutError
from fanin.vllm import guard_front, patches

FANIN = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="fanin"))
WITHIN = 30.0


class Dead(Exception):
    """What the client raises where it knows by itself; it names nobody."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of vLLM its clients raise."""
    dead, clients = (
        ModuleType("vllm.v1.engine.exceptions"),
        ModuleType("vllm.v1.engine.core_client"),
    )
    dead.EngineDeadError = Dead  # type: ignore[attr-defined]
    clients.zmq = SimpleNamespace(ZMQError=Dead)  # type: ignore[attr-defined]
    for module in (dead, clients):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def process(name: str, exitcode: int | None = None, pid: int = 0) -> Any:
    return SimpleNamespace(name=name, exitcode=exitcode, pid=pid)


def client(*processes: Any) -> Any:
    """One that waits for ever for every answer, but for those of the method "quick"."""

    class Client:
        def __init__(self) -> None:
            self.vllm_config = FANIN
            manager = SimpleNamespace(processes=list(processes))
            self.resources = SimpleNamespace(engine_dead=False, engine_manager=manager)
            self.asked: list[Any] = []
            self.fails: Exception | None = None

        async def _call_utility_async(self, method: str, *args: Any, engine: Any) -> Any:
            self.asked.append((method, *args))
            if self.fails is not None:
                raise self.fails
            if method == "quick":
                return engine
            await asyncio.Future()

        async def get_output_async(self) -> Any:
            assert self.fails is not None
            raise self.fails

    patches.put(Client, "AsyncMPClient")
    patches.put(Client, "AsyncMPClient")  # as vLLM registers plugins
    return Client()


def asked(one: Any, method: str, *args: Any, after: Any = None) -> Any:
    """What the call returns or raises; *after* is done when it is under way."""

    async def ask() -> Any:
        call = asyncio.ensure_future(one._call_utility_async(method, *args, engine=b"0"))
        while not one.asked:
            await asyncio.sleep(0.001)
        if after is not None:
            after()
        return await asyncio.wait_for(call, WITHIN)

    return asyncio.run(ask())


@contextmanager
def stopped(*more: str) -> Iterator[int]:
    """A process that is stopped, or whose only child is."""
    code = "import signal, os, sys, subprocess\n" + "\n".join(more)
    code += "\nprint(flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        yield child.pid
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_answers_come_as_they_are() -> None:
    one = client()
    assert asked(one, "quick") == b"0"
    one.fails = ValueError("worker 3 has failed")
    with pytest.raises(ValueError, match="worker 3"):
        asked(one, "quick")


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("fanin_not_whole", ()),
        ("collective_rpc", ("update_weights", None, (), {"update_info": {"step": 1}})),
        ("pause_scheduler", ("keep", True)),
    ],
)
def test_a_core_that_dies_is_named(method: str, args: Any) -> None:
    """Also in calls of vLLM's own: an orchestrator would wait in those as well."""
    one = client(process("EngineCore_DP0", -15), process("EngineCore_DP1", -9))

    def die() -> None:
        one.resources.engine_dead = True

    with pytest.raises(HostError, match=r"EngineCore_DP1 .exit status -9.") as caught:
        asked(one, method, *args, after=die)
    assert "DP0" not in str(caught.value) and "start the engine again" in str(caught.value)


def test_those_that_are_ended_for_it_are_not_named() -> None:
    """vLLM kills the other replicas where they do not end by themselves."""
    one = client(process("EngineCore_DP0", -9), process("EngineCore_DP1", -11))
    one.resources.engine_manager.failed_proc_name = "EngineCore_DP1"
    assert "DP1 (exit status -11)" in str(guard_front.death_of(one))
    assert "DP0" not in str(guard_front.death_of(one))


def test_a_core_that_is_dead_is_named() -> None:
    """vLLM raises its own error then; that of requests under way stays of its kind."""
    one = client(process("EngineCore", -9))
    one.fails = Dead("see stack trace above")
    with pytest.raises(HostError, match=r"EngineCore .exit status -9."):
        asked(one, "quick")
    with pytest.raises(Dead, match=r"EngineCore .exit status -9.*start the engine again"):
        asyncio.run(one.get_output_async())


def test_a_core_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_front, "STANDS", 0.3)
    with stopped() as pid:
        one = client(process("EngineCore", None, os.getppid()), process("EngineCore", None, pid))
        with pytest.raises(HostError, match=rf"process {pid} .*stopped.*SIGCONT"):
            asked(one, "is_scheduler_paused")


def test_a_worker_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a child of the core, which waits for it."""
    monkeypatch.setattr(guard_front, "STANDS", 0.3)
    with stopped() as pid:
        one = client(process("EngineCore", None, os.getpid()))
        with pytest.raises(HostError, match=rf"process {pid} .*stopped"):
            asked(one, "is_scheduler_paused")


def test_one_that_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_front, "STANDS", 0.0)
    with stopped() as pid:
        os.kill(pid, signal.SIGCONT)
        watch = guard_front.Watch(client(process("EngineCore", None, pid)), "pause", None)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        watch.look()


def test_questions_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_front, "QUESTION", 0.2)
    leave = ("collective_rpc", "fanin_leave_update")
    for question in (("fanin_not_whole",), ("fanin_step",), leave):
        with pytest.raises(PullTimeoutError, match=f"not answered {question[-1]} for"):
            asked(client(), *question)


def test_updates_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than twice what init gave; before any init nobody knows."""
    monkeypatch.setattr(guard_front, "_MORE", 0.1)
    one = client()
    with pytest.raises(PullTimeoutError, match="init_weight_transfer_engine"):
        info = {"init_info": {"trainer": "h:1", "timeout": 0.05}}
        asked(one, "collective_rpc", "init_weight_transfer_engine", None, (), info)
    with pytest.raises(PullTimeoutError, match="update_weights"):
        asked(one, "collective_rpc", "update_weights", None, (), {"update_info": {"step": 1}})
    with pytest.raises(PullTimeoutError, match="is_scheduler_paused"):
        asked(one, "is_scheduler_paused")
    assert guard_front._patience(one, "reload_weights", None) is None
    assert guard_front._patience(one, "pause_scheduler", None) is None
    guard_front._patience(one, "init_weight_transfer_engine", {"init_info": {"timeout": "soon"}})
    assert guard_front._patience(one, "update_weights", None) == pytest.approx(0.2)
    assert guard_front._patience(client(), "update_weights", None) is None


def test_other_backends_are_left_alone() -> None:
    one = client(process("EngineCore", -9))
    one.vllm_config = SimpleNamespace(weight_transfer_config=None)
    one.fails = Dead("see stack trace above")
    for call in (one._call_utility_async("quick", engine=b"0"), one.get_output_async()):
        with pytest.raises(Dead, match="stack trace"):
            asyncio.run(call)
