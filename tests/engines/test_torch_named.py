# SPDX-License-Identifier: Apache-2.0
"""Pulls into PyTorch's tensors by name: what may happen to them between two pulls and in one."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import fanin
import pytest
import torch
from fanin import _ffi, _puller
from fanin._library import library
from fanin._named import KEPT, Named
from fanin._tensors import BOX_SIZE, TENSOR_SIZE, pack, shard_of
from torch.multiprocessing.reductions import StorageWeakRef

SHAPE = (6, 4)
NAMES = ("a", "b", "c")


class Rank:
    """A trainer of one rank; every element of a tensor is its place in it, plus what was added."""

    def __init__(self) -> None:
        self.server = fanin.Server(world_id=b"n" * 16, rank=0, world_size=1)
        self.tensors = {
            name: torch.arange(24.0).reshape(SHAPE) + 100 * i for i, name in enumerate(NAMES)
        }
        self.server.put("lora:0", [shard_of(n, t) for n, t in self.tensors.items()])
        self.step = 1
        self.server.commit("lora:0", 1)

    def advance(self) -> None:
        self.step += 1
        self.server.begin_update("lora:0")
        for tensor in self.tensors.values():
            tensor += 1000
        self.server.commit("lora:0", self.step)


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    with one.server:
        yield one


@pytest.fixture
def client(rank: Rank) -> Iterator[fanin.Client]:
    with fanin.Client([f"127.0.0.1:{rank.server.port}"], path="stream") as one:
        yield one


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of tensors that Python has described one by one."""
    seen: list[str] = []

    def spy(name: str, *arguments: Any, **more: Any) -> fanin.Shard:
        seen.append(name)
        return shard_of(name, *arguments, **more)

    monkeypatch.setattr(_puller, "shard_of", spy)
    return seen


def room() -> dict[str, torch.Tensor]:
    return {name: torch.full(SHAPE, -1.0) for name in NAMES}


def pull(client: fanin.Client, rank: Rank, into: dict[str, Any]) -> None:
    client.pull_into("0", into)
    for name, tensor in into.items():
        assert torch.equal(tensor, rank.tensors[name]), name
    rank.advance()


def test_new_dict_of_new_objects(rank: Rank, client: fanin.Client, described: list[str]) -> None:
    into = {name: torch.nn.Parameter(t) for name, t in room().items()}
    for _ in range(3):
        pull(client, rank, {name: parameter.data for name, parameter in into.items()})
        pull(client, rank, into)  # as parameters, which want gradients
    assert described == []


def test_replaced_under_its_name(rank: Rank, client: fanin.Client) -> None:
    into = room()
    for _ in range(3):
        pull(client, rank, into)
    old = into["b"]
    before = old.clone()
    into["b"] = torch.zeros(SHAPE)
    pull(client, rank, into)
    assert torch.equal(old, before)


def test_names_change_places(rank: Rank, client: fanin.Client) -> None:
    into = room()
    for _ in range(3):
        pull(client, rank, into)
    into["a"], into["c"] = into["c"], into["a"]
    pull(client, rank, into)
    pull(client, rank, dict(reversed(into.items())))
    pull(client, rank, {"c": into["c"]})


@pytest.mark.parametrize("how", ["data", "set_", "strides", "transposed", "offset"])
def test_other_memory_in_the_same_object(rank: Rank, client: fanin.Client, how: str) -> None:
    into = room()
    for _ in range(3):
        pull(client, rank, into)
    one = into["b"]
    kept, before = one.view(-1), one.clone()
    if how == "data":
        one.data = torch.zeros(SHAPE)
    elif how == "set_":
        one.set_(torch.zeros(SHAPE))  # type: ignore[call-overload]
    elif how == "strides":
        one.data = torch.zeros(6, 8)[:, ::2]
    elif how == "transposed":
        one.data = torch.zeros(4, 6).t()
    else:
        one.data = torch.zeros(48)[24:].view(SHAPE)
    pull(client, rank, into)
    pull(client, rank, into)
    assert torch.equal(kept, before.view(-1))


def test_resized(rank: Rank, client: fanin.Client) -> None:
    into = room()
    for _ in range(3):
        pull(client, rank, into)
    into["b"].resize_(7, 4)
    with pytest.raises(fanin.PeerError, match="shape"):
        client.pull_into("0", into)
    into["b"].resize_(*SHAPE)
    pull(client, rank, into)


def test_dtype_of_the_same_memory(rank: Rank, client: fanin.Client) -> None:
    into = room()
    for _ in range(3):
        pull(client, rank, into)
    with pytest.raises(fanin.PeerError, match="F32"):
        client.pull_into("0", {**into, "b": into["b"].view(torch.int32)})
    pull(client, rank, into)


def test_storage_that_was_freed(rank: Rank, client: fanin.Client) -> None:
    """As FSDP frees parameters: an error, and nothing is written where the memory was."""
    into = room()
    for _ in range(3):
        pull(client, rank, into)
    storage = into["b"].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(fanin.FaninError):
        client.pull_into("0", into)
    storage.resize_(size)
    pull(client, rank, into)


def test_memory_is_not_kept(rank: Rank, client: fanin.Client) -> None:
    into = room()
    for _ in range(3):
        pull(client, rank, into)
    tensors = [weakref.ref(tensor) for tensor in into.values()]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in into.values()]
    into.clear()
    gc.collect()
    assert [ref() for ref in tensors] == [None] * len(tensors)
    assert all(storage.expired() for storage in storages)


def test_little_is_kept(rank: Rank, client: fanin.Client) -> None:
    rooms = [room() for _ in range(3 * KEPT)]
    for into in rooms + rooms:
        pull(client, rank, into)
    assert len(client._named._kept) == KEPT


def test_two_rooms_in_turn(rank: Rank, client: fanin.Client, described: list[str]) -> None:
    first, second = room(), room()
    for _ in range(3):
        pull(client, rank, first)
        pull(client, rank, second)
    assert described == []


def test_refused_as_ever(rank: Rank, client: fanin.Client) -> None:
    """What is refused when it is described one by one also is when the same memory was accepted."""
    into = room()
    plane = torch.zeros(*SHAPE, dtype=torch.complex64)
    into["b"] = plane.imag
    for _ in range(3):
        pull(client, rank, into)
    with pytest.raises(fanin.RequestError, match="negative"):
        client.pull_into("0", {**into, "b": plane.conj().imag})
    with pytest.raises(fanin.RequestError, match="share memory"):
        client.pull_into("0", {**into, "b": torch.zeros(1, 4).expand(*SHAPE)})
    with pytest.raises(fanin.RequestError, match="layout"):
        client.pull_into("0", {**into, "b": torch.zeros(SHAPE).to_sparse()})
    with pytest.raises(fanin.RequestError, match="meta"):
        client.pull_into("0", {**into, "b": torch.zeros(SHAPE, device="meta")})
    with pytest.raises(fanin.RequestError, match="NUL"):
        client.pull_into("0", {**into, "b\0b": torch.zeros(SHAPE)})
    with pytest.raises(fanin.RequestError):
        client.pull_into("0", {**into, 7: torch.zeros(SHAPE)})  # type: ignore[dict-item]
    with pytest.raises(fanin.RequestError):
        client.pull_into("0", {})
    pull(client, rank, into)


def test_parts_of_other_tensors(rank: Rank, client: fanin.Client) -> None:
    """A subclass with placements is one rank's part, whatever its memory."""

    class Part(torch.Tensor):
        placements = ()

    into = room()
    for _ in range(3):
        pull(client, rank, into)
    with pytest.raises(fanin.RequestError, match="DTensor"):
        client.pull_into("0", {**into, "b": into["b"].as_subclass(Part)})


def test_beside_arrays(rank: Rank, client: fanin.Client, described: list[str]) -> None:
    into = room()
    array = into["b"].numpy()
    for _ in range(3):
        client.pull_into("0", {**into, "b": array})
        assert torch.equal(into["b"], rank.tensors["b"])
        rank.advance()
    assert set(described) == set(NAMES)


def test_session_keeps_the_memory(rank: Rank, client: fanin.Client) -> None:
    into = room()
    pull(client, rank, into)
    for _ in range(2):
        old = into["b"].view(-1)
        with client.begin("0", into) as session:
            session.read(0, 1)
            into["b"].data = torch.zeros(SHAPE)
            storage = StorageWeakRef(old.untyped_storage())
            expected = rank.tensors["b"].view(-1)
            kept, old = old.clone(), None  # type: ignore[assignment]
            assert not storage.expired()
            session.read(1, 2)
            session.end()
        assert not torch.equal(kept, expected)
        assert torch.equal(into["b"], torch.zeros(SHAPE))  # what it has now was not asked for
        assert torch.equal(into["c"], rank.tensors["c"])
        rank.advance()
    del session
    gc.collect()
    assert storage.expired()


def fields(address: int, count: int) -> list[Any]:
    """What the C library is told, without addresses of its own arrays."""
    found = []
    for index in range(count):
        tensor = _ffi.Tensor.from_address(address + index * TENSOR_SIZE)
        raw = ctypes.string_at(tensor.boxes, BOX_SIZE) if tensor.n_boxes else b""
        memory = tensor.memory.kind, tensor.memory.device
        found.append((tensor.name, tensor.dtype, list(tensor.shape), tensor.n_dims, raw, memory))
    return found


def test_described_as_by_python() -> None:
    """Of every dtype and many layouts the same is said as by shard_of()."""
    tensors: dict[str, torch.Tensor] = {}
    for name in fanin._tensors.TORCH_DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None or name in ("complex64", "float4_e2m1fn_x2"):
            continue
        whole = torch.empty(4, 6, 10, dtype=dtype)
        for i, view in enumerate(
            (whole, whole[1:, 2:4], whole.permute(2, 0, 1), whole[:, :, ::3], whole[:1, :1, 4:5])
        ):
            tensors[f"{name}{i}"] = view
        tensors[f"{name}-scalar"] = torch.empty((), dtype=dtype)
        tensors[f"{name}-empty"] = torch.empty(3, 0, dtype=dtype)
    held = Named(library()).hold(list(tensors), list(tensors.values()))
    assert held is not None
    named = held[0]
    packed = pack(shard_of(name, tensor) for name, tensor in tensors.items())
    assert fields(named.address, len(named)) == fields(packed.address, len(packed))


# --------------------------------------------------------------- while a pull is under way


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
    rank: Rank, client: fanin.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever moves a tensor after it was looked for and before it is described."""
    into, describe = {"a": room()["a"]}, Named._describe
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
    assert torch.equal(into["a"], rank.tensors["a"])


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


def test_what_the_first_call_reads_stays(client: fanin.Client) -> None:
    """The library reads the first call's description as long as that runs."""
    into = room()
    alive: list[bool] = []

    def again(*_: int) -> None:
        (described,) = client._named._kept
        arrays = [one for one in described._buffers if isinstance(one, ctypes.Array)]
        memory = [weakref.ref(one) for one in arrays]
        del arrays
        for call in (client.pull_into, client.begin):
            with pytest.raises(fanin.StateError, match="under way"):
                call("0", into)
        gc.collect()
        alive.extend(ref() is not None for ref in memory)

    client.pull_into("0", into, progress=again)
    assert alive and all(alive)
    for _ in range(3):
        client.pull_into("0", into)
