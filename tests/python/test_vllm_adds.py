# SPDX-License-Identifier: Apache-2.0
"""Who asks the workers to add an adapter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fanin import errors
from fanin.engine.faults import to_wire
from fanin.vllm.models import Adds


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
        adapter: Any = SimpleNamespace(path=Path("/slot"), is_3d=False)
        models = SimpleNamespace(engine_client=self.client)
        Adds(models, {"/slot": adapter}.get, self.client.workers)

    async def add(self, path: str, number: int) -> bool:
        request = SimpleNamespace(lora_name="a", lora_path=path, lora_int_id=number)
        return bool(await self.client.add_lora(request))


async def test_of_an_adapter_in_slots_the_workers_are_asked() -> None:
    place = Place()
    assert await place.add("/slot", 6)
    ((method, told),) = place.client.calls
    assert method == "fanin_add_lora"
    assert told == {"adapter": "a", "number": 6, "path": "/slot", "is_3d": False}


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
