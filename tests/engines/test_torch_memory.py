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
from fanin._anchors import Anchors
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

MANY = 40


def parts() -> dict[str, torch.Tensor]:
    # As .data, since a view keeps what it is a view of.
    return {f"t{i}": one.data for i, one in enumerate(torch.zeros(MANY, *SHAPE).unbind())}


def hold(named: Named, into: dict[str, torch.Tensor]) -> tuple[Any, list[Any]]:
    found = named.hold(list(into), list(into.values()))
    assert found is not None
    found[0].used = True
    return found


def test_few_storages_are_held_at_once() -> None:
    named, into = Named(library()), parts()
    described, storages = hold(named, into)
    assert [len(hold(named, into)[1]) for _ in range(3)] == [MANY, 1, 1]
    known, again = hold(named, into)
    assert known is described and again[0] is storages[0]
    into["t7"] = torch.zeros(SHAPE)
    other, storages = hold(named, into)
    assert other is not described and len(storages) == MANY
    del into, storages, again
    gc.collect()
    assert known.anchors.hold() is None  # nothing keeps them


def test_few_storages_are_kept_while_they_are_written() -> None:
    published = {name: one + i for i, (name, one) in enumerate(parts().items())}
    with fanin.Server(world_id=b"n" * 16, rank=0, world_size=1) as server:
        server.put("lora:0", [fanin.shard_of(n, t) for n, t in published.items()])
        server.commit("lora:0", 1)
        with fanin.Client([f"127.0.0.1:{server.port}"], path="stream") as client:
            into = parts()
            for _ in range(3):
                client.pull_into("0", into)
            assert all(torch.equal(into[name], published[name]) for name in into)
            assert len(hold(client._named, into)[1]) == 1
            storage = StorageWeakRef(into["t0"].untyped_storage())
            seen: list[bool] = []

            def swap(_: int, __: int) -> None:
                for tensor in into.values():
                    tensor.data = torch.zeros(SHAPE)
                gc.collect()
                seen.append(storage.expired())

            client.pull_into("0", into, progress=swap)
            assert seen and not any(seen)
            gc.collect()
            assert storage.expired()


class Memory:
    """What an anchor asks of a storage."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size = begin, size

    def data_ptr(self) -> int:
        return self.begin

    def nbytes(self) -> int:
        return self.size


def test_anchors_that_have_moved() -> None:
    memory = [Memory(1000, 100), Memory(100, 50)]
    addresses = [0, *range(100, 150, 5), *range(1000, 1100, 5), 1099]
    anchors = Anchors.of(memory * 16, addresses)
    assert anchors is not None and set(anchors.hold() or ()) == set(memory)
    memory[1].size = 49
    assert anchors.hold() is None
    memory[1].size = 50
    memory[0].begin = 1001
    assert anchors.hold() is None
    memory[0].begin = 1000
    assert anchors.hold() is not None
    memory.pop()
    assert anchors.hold() is None


@pytest.mark.parametrize("address", [99, 150, 999, 1100])
def test_addresses_beside_all_anchors(address: int) -> None:
    memory = [Memory(1000, 100), Memory(100, 50)]
    assert Anchors.of(memory * 16, [100, 1000]) is not None
    assert Anchors.of(memory * 16, [100, address, 1000]) is None
    assert Anchors.of(memory * 7, [100, 1000]) is None  # too many for so few tensors
