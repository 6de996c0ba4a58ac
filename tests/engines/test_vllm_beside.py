# SPDX-License-Identifier: Apache-2.0
"""Calls of workers beside vLLM's own core, executor's futures and handling of requests."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fanin.vllm import patches
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor, WorkerProc


class Workers(MultiprocExecutor):
    """vLLM's executor; its queues answer in the place of two workers."""

    def __init__(self) -> None:
        self.is_failed = False
        self.futures_queue = deque[FutureWrapper]()
        self.calls: deque[Any] = deque()
        self.rpc_broadcast_mq = SimpleNamespace(enqueue=self.calls.append)
        answers = SimpleNamespace(dequeue=self._answer), SimpleNamespace(dequeue=self._again)
        self.response_mqs = answers

    def _answer(self, timeout: float | None) -> Any:
        return self._success(self.calls[0])

    def _again(self, timeout: float | None) -> Any:
        return self._success(self.calls.popleft())

    def _success(self, call: Any) -> Any:
        method, arguments, *_ = call
        return WorkerProc.ResponseStatus.SUCCESS, [method, *arguments]

    def shutdown(self) -> None: ...


def core_of(requests: list[Any]) -> Any:
    patches.install()
    assert patches.installed()
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.model_executor = Workers()
    core.scheduler = SimpleNamespace(has_requests=lambda: bool(requests))
    core.vllm_config = SimpleNamespace(weight_transfer_config=None)
    core.output_queue = queue.Queue()
    core.shutdown_state = EngineShutdownState.RUNNING
    core._idle_state_callbacks = []
    return core


def ask(core: Any, number: int, method: str, *arguments: Any) -> None:
    """As it comes from an API server."""
    call = (0, number, "fanin_call", [method, list(arguments)])
    core._handle_client_request(EngineCoreRequestType.UTILITY, call)


def told(core: Any) -> list[tuple[int, Any]]:
    """What the API server has been told: by number, the answers or why there are none."""
    found = []
    while not core.output_queue.empty():
        output = core.output_queue.get_nowait()[1].utility_output
        answer = output.failure_message or output.result.result
        found.append((output.call_id, answer))
    return found


def step(core: Any) -> Any:
    return core.model_executor.collective_rpc("execute_model", non_block=True).result()


@pytest.mark.parametrize("take", [step, EngineCoreProc._notify_idle_state_callbacks])
def test_the_core_goes_on_and_the_answer_comes_later(take: Callable[[Any], Any]) -> None:
    core = core_of(["a request"])
    ask(core, 1, "one", 5)
    ask(core, 2, "two")
    assert not told(core) and len(core.model_executor.calls) == 2
    take(core)
    assert told(core) == [(1, [["one", 5]] * 2), (2, [["two"]] * 2)]
    assert not core.model_executor.calls and not core.model_executor.futures_queue
    core._notify_idle_state_callbacks()
    assert not told(core)


def test_an_engine_without_requests_answers_at_once() -> None:
    core = core_of([])
    ask(core, 1, "one", 5)
    assert told(core) == [(1, [["one", 5]] * 2)]


def test_vllms_own_call_is_answered_behind_it() -> None:
    core = core_of(["a request"])
    ask(core, 1, "one")
    assert core.collective_rpc("theirs") == [["theirs"]] * 2
    assert told(core) == [(1, [["one"]] * 2)]
