# SPDX-License-Identifier: Apache-2.0
"""Calls of workers for which the engine's core does not wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from fanin.vllm import models, patches


class Answer(Future[Any]):
    """As vLLM's: whoever wants it takes what was asked before, in order."""

    def __init__(self, asked: deque[Answer], ask: Callable[[], Any]) -> None:
        super().__init__()
        self._asked, self._ask = asked, ask
        asked.append(self)

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            first = self._asked.popleft()
            try:
                first.set_result(first._ask())
            except Exception as error:
                first.set_exception(error)
        return super().result()


class Executor:
    """Workers that answer when they are asked for the answer."""

    def __init__(self) -> None:
        self.futures_queue: deque[Answer] = deque()
        self.done: list[str] = []
        self.failing = ""

    def collective_rpc(
        self, method: str, timeout: Any = None, args: Any = (), non_block: bool = False
    ) -> Any:
        def answer() -> list[Any]:
            if method == self.failing:
                raise RuntimeError(f"{method} failed")
            self.done.append(method)
            return [(method, args)]

        future = Answer(self.futures_queue, answer)
        return future if non_block else future.result()


class Core:
    """What of vLLM's core is used; running: whether it has requests."""

    def __init__(self, running: bool = True) -> None:
        self.model_executor: Any = Executor()
        self.scheduler = SimpleNamespace(has_requests=lambda: self.running)
        self.running = running
        self.vllm_config = SimpleNamespace(weight_transfer_config=None)
        self._idle_state_callbacks: list[Callable[[Core], None]] = []

    def collective_rpc(
        self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.model_executor.collective_rpc(method, timeout, args)

    def step(self) -> None:
        self.model_executor.collective_rpc("execute_model", non_block=True).result()

    def idle(self) -> None:
        while self._idle_state_callbacks:
            self._idle_state_callbacks.pop()(self)

    def call(self, method: str, *arguments: Any) -> Any:
        return self.fanin_call(method, list(arguments))  # type: ignore[attr-defined]


patches.put(Core, "EngineCore")


def test_a_step_brings_the_answers_of_calls_before_it() -> None:
    core = Core()
    answers = [core.call("one", 1), core.call("two", 2, 3)]
    assert not any(answer.done() for answer in answers) and not core.model_executor.done
    core.step()
    assert core.model_executor.done == ["one", "two", "execute_model"]
    assert [answer.result(0) for answer in answers] == [[("one", (1,))], [("two", (2, 3))]]


def test_without_requests_there_is_no_step_to_come() -> None:
    core = Core(running=False)
    assert core.call("one", 1) == [("one", (1,))]
    assert not core._idle_state_callbacks


def test_a_core_that_has_nothing_more_to_do_takes_them() -> None:
    """The requests that ran were taken back before the next step."""
    core = Core()
    answer = core.call("one", 1)
    core.idle()
    assert answer.done() and answer.result(0) == [("one", (1,))]
    core.idle()
    assert core.model_executor.done == ["one"]


def test_one_look_is_enough_however_many_calls_there_were() -> None:
    core = Core()
    for number in range(100):
        core.call("one", number)
        core.step()
    assert len(core._idle_state_callbacks) == 1
    core.idle()
    assert len(core.model_executor.done) == 200
    last = core.call("one", 100)  # after the look it is asked for anew
    core.idle()
    assert last.done()


@pytest.mark.parametrize("taken", ["by a step", "when idle"])
def test_a_failure_is_its_callers_alone(taken: str) -> None:
    core = Core()
    core.model_executor.failing = "bad"
    bad, good = core.call("bad"), core.call("good")
    core.step() if taken == "by a step" else core.idle()
    with pytest.raises(RuntimeError, match="bad failed"):
        bad.result(0)
    assert good.result(0) == [("good", ())]


def test_workers_that_answer_in_no_order_are_waited_for() -> None:
    """An executor that keeps no such queue: Ray's first one, or one process for all."""
    core = Core()
    done: list[Any] = []
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda method, timeout, args: done.append((method, args)) or ["here"]
    )
    assert core.call("one", 1) == ["here"] and done == [("one", (1,))]


class Client:
    """Of one engine's core or of two."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.engine_core = self

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return await self.call_utility_async("collective_rpc", method, None, args, None)

    async def call_utility_async(self, *call: Any) -> list[Any]:
        self.asked.append(call)
        return ["answer"]

    async def call_utility_all_async(self, *call: Any) -> list[list[Any]]:
        self.asked.append(call)
        return [["first"], ["second"]]


@pytest.mark.parametrize("known", [True, False])
def test_how_cores_are_called(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the method that they were given, or, in another vLLM, by its own."""
    monkeypatch.setattr(patches, "_installed", known)
    client = Client()
    assert asyncio.run(models.call_one(client, "one", (1,))) == ["answer"]
    assert asyncio.run(models.call_all(client, "one", (1,))) == ["first", "second"]
    mine, theirs = ("fanin_call", "one", (1,)), ("collective_rpc", "one", None, (1,), None)
    assert client.asked == [mine if known else theirs] * 2
