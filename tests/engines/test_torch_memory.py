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
from fanin._library import library
from fanin._named import Named
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
    """Whoever moves a tensor after it was looked for and before it is described."""
    into, describe = room(), Named._describe
    storages: list[Any] = []

    def moving(self: Named, *arguments: Any) -> Any:
        into["a"].data = torch.zeros(SHAPE)
        found = describe(self, *arguments)
        assert found is not None
        storages.extend(found[1])
        return found

    monkeypatch.setattr(Named, "_describe", moving)
    client.pull_into("0", into)
    assert [s.data_ptr() for s in storages] == [into["a"].data_ptr()]
    assert torch.equal(into["a"], PUBLISHED)


def test_a_subclass_does_nothing_in_between(client: fanin.Client) -> None:
    """It could give the tensor other memory when its storage is asked for."""

    class Restless(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *rest: Any, **more: Any) -> Any:
            if func is torch.Tensor.untyped_storage:
                raise AssertionError("asked")
            return super().__torch_function__(func, *rest, **more)

    into = {"a": room()["a"].as_subclass(Restless)}
    held = Named(library()).hold(list(into), list(into.values()))
    assert held is not None and held[1][0].data_ptr() == into["a"].data_ptr()


# ------------------------------------------------------------------- many tensors in few storages
