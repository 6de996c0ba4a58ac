# SPDX-License-Identifier: Apache-2.0
"""Pulls into PyTorch's tensors by name: whose memory is written, and how long it stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import fanin
import fanin.client
import pytest
import torch
from fanin._named import TRIES, Named
from torch.multiprocessing.reductions import StorageWeakRef

SHAPE = (6, 4)
PUBLISHED = torch.arange(24.0).reshape(SHAPE)


@pytest.fixture
def client() -> Iterator[fanin.Client]:
    with fanin.Server(world_id=b"n" * 16, rank=0, world_size=1) as server:
        server.put("lora:0", [fanin.shard_of("a", PUBLISHED)])
        server.commit("lora:0", 1)
        address = f"127.0.0.1:{server.port}"
        with fanin.Client([address], path="stream") as one:
            yield one


def room() -> dict[str, torch.Tensor]:
    return {"a": torch.full(SHAPE, -1.0)}


def test_a_pull_keeps_what_it_writes(client: fanin.Client) -> None:
    """Another thread may give a tensor other memory meanwhile."""
    into = room()
    client.pull_into("0", into)
    for _ in range(2):
        seen: list[bool] = []
        storage = StorageWeakRef(into["a"].untyped_storage())

        def swap(_: int, __: int, of: Any = storage, told: Any = seen) -> None:
            into["a"].data = torch.zeros(SHAPE)
            gc.collect()
            told.append(of.expired())

        client.pull_into("0", into, progress=swap)
        assert seen and not any(seen)
        # What it has now was not asked for.
        assert torch.equal(into["a"], torch.zeros(SHAPE))
        gc.collect()
        assert storage.expired()


def test_what_is_kept_is_what_was_described(
    client: fanin.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever moves a tensor after it was read and before its storage is held."""
    into, find, shard_of = room(), Named.find, fanin.client.shard_of
    calls, moves = 0, 1
    alone: list[str] = []

    def moving(self: Named, names: list[str], values: list[Any]) -> Any:
        nonlocal calls, moves
        found = find(self, names, values)
        calls += 1
        if calls % 2 == 1 and moves > 0:
            moves -= 1
            into["a"].data = torch.zeros(SHAPE)
        return found

    def spy(name: str, *arguments: Any, **more: Any) -> fanin.Shard:
        alone.append(name)
        return shard_of(name, *arguments, **more)

    monkeypatch.setattr(Named, "find", moving)
    monkeypatch.setattr(fanin.client, "shard_of", spy)
    client.pull_into("0", into)
    assert (calls, alone) == (4, [])
    assert torch.equal(into["a"], PUBLISHED)
    calls, moves = 0, 1000  # it never rests
    client.pull_into("0", into)
    assert (calls, alone) == (2 * TRIES, ["a"])
    assert torch.equal(into["a"], PUBLISHED)
