# SPDX-License-Identifier: Apache-2.0
"""Who numbers an adapter, and who asks the workers to add it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fanin import errors
from fanin.engine.faults import to_wire
from fanin.vllm.models import Adds, Numbers


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def inc(self, by: int = 1) -> int:
        self.value += by
        return self.value


class Client:
    """vLLM's EngineClient: what reached it, of two workers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answers: list[Any] = [{"error": None}, {"error": None}]

    async def add_lora(self, request: Any) -> bool:
        self.calls.append(("vLLM's", request.lora_path))
        return True

    async def remove_lora(self, number: int) -> bool:
        self.calls.append(("remove", number))
        return True

    async def workers(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, *args))
        return self.answers


class Place:
    def __init__(self) -> None:
        self.client = Client()
        self.models = SimpleNamespace(engine_client=self.client, lora_id_counter=Counter())
        self.adapter: Any = SimpleNamespace(path=Path("/slot"), numbers=set(), is_3d=False)
        find = {"/slot": self.adapter}.get
        self.adds = Adds(self.models, find, self.client.workers)

    async def add(self, path: str, number: int) -> bool:
        request = SimpleNamespace(lora_name="a", lora_path=path, lora_int_id=number)
        return bool(await self.client.add_lora(request))


def test_a_number_is_given_once_to_whoever_took_it() -> None:
    place = Place()
    counter, adds = place.models.lora_id_counter, place.adds  # vLLM's, and whoever pulls
    number = counter.inc(1)
    assert adds.taken() == number and adds.taken() == 0
    with adds.given(number):
        assert counter.inc(1) == number
        assert counter.inc(1) == number + 1
    with adds.given(number):
        pass  # as where vLLM refuses before it numbers
    assert counter.inc(1) == number + 2 and counter.value == number + 2


async def test_numbers_of_tasks_do_not_mix() -> None:
    numbers = Numbers(Counter())
    seen: list[tuple[int, int]] = []

    async def one() -> None:
        taken = numbers.inc(1)
        await asyncio.sleep(0)
        with numbers.given(taken):
            await asyncio.sleep(0)
            seen.append((taken, numbers.inc(1)))

    await asyncio.gather(*(one() for _ in range(8)))
    assert all(taken == given for taken, given in seen)
    assert len({taken for taken, _ in seen}) == 8


async def test_what_is_added_already_asks_nobody() -> None:
    place = Place()
    place.adapter.numbers.add(5)
    assert await place.add("/slot", 5)
    assert place.client.calls == [] and place.adapter.numbers == set()


async def test_under_another_number_the_workers_are_asked() -> None:
    place = Place()
    place.adapter.numbers.add(5)
    assert await place.add("/slot", 6)
    ((method, told),) = place.client.calls
    assert method == "fanin_add_lora"
    assert told == {"adapter": "a", "number": 6, "path": "/slot", "is_3d": False}
    assert place.adapter.numbers == {5}, "that one is to be forgotten still"


async def test_a_directory_is_vllms_own_affair() -> None:
    place = Place()
    assert await place.add("/elsewhere", 1)
    assert place.client.calls == [("vLLM's", "/elsewhere")]


@pytest.mark.parametrize("worker", [0, 1])
async def test_a_worker_that_fails_makes_all_forget_it(worker: int) -> None:
    place = Place()
    error = errors.HostError.make("no memory for an adapter")
    place.client.answers[worker] = {"error": to_wire(error)}
    with pytest.raises(errors.HostError, match="no memory"):
        await place.add("/slot", 7)
    assert place.client.calls[-1] == ("remove", 7)


async def test_a_vllm_without_such_a_counter_is_left_alone() -> None:
    client = Client()
    adds = Adds(SimpleNamespace(engine_client=client), lambda path: None, client.workers)
    assert adds.reserve() == 0 and adds.taken() == 0
    with adds.given(0):
        assert client.calls == []
    assert "add_lora" not in vars(client)
