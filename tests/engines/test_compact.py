# SPDX-License-Identifier: Apache-2.0
"""compact(): parameters in few allocations, and nothing else of a model is another one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fanin.errors import RequestError
from fanin.torch import compact
from fanin.torch._segments import count_segments, tell_segments
from full_models import random_model
from safetensors.torch import load_file
from worlds import World, case_world, run_case

ARENA = 64 << 10


def local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def tensors(model: Any) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def objects(model: Any) -> dict[str, Any]:
    """What must stay: the objects, and what is known of them."""
    return {
        name: (id(one), id(local(one)), id(getattr(one, "_spec", None)), one.requires_grad)
        + (local(one).shape, local(one).stride(), local(one).untyped_storage().nbytes())
        for name, one in tensors(model).items()
    }


def same_now(first: Any, second: Any) -> None:
    others = tensors(second)
    for name, one in tensors(first).items():
        assert torch.equal(local(one), local(others[name])), name


def train(models: list[Any], optimizers: list[Any], seed: int) -> None:
    """One step of each on the same tokens."""
    tokens = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(seed))
    for model, optimizer in zip(models, optimizers, strict=True):
        out = model(tokens)
        getattr(out, "logits", out).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with case_world(4, tmp_path_factory.mktemp("four"), "compact_ranks.py") as ranks:
        yield ranks


@pytest.mark.parametrize("layout", ["odd", "ddp", "fsdp", "hsdp", "fsdp+tp"])
@pytest.mark.parametrize("case", ["trained", "published"])
def test_in_a_world(four: World, case: str, layout: str) -> None:
    run_case(four, case, layout)


def test_what_fsdp_holds_elsewhere_is_refused_by_name(four: World) -> None:
    run_case(four, "refused", "")


def test_a_compiled_model_of_one_process() -> None:
    plain, packed = random_model("qwen2", tied=True), random_model("qwen2", tied=True)
    wrapped = torch.compile(packed, backend="eager")
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, packed)]
    train([plain, wrapped], optimizers, 1)
    compact(wrapped, arena_bytes=ARENA)
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    for seed in (2, 3):
        train([plain, wrapped], optimizers, seed)
        same_now(plain, packed)


def test_files_are_those_of_before(tmp_path: Path) -> None:
    """Each tensor has a storage of its own, so that a saved one is as large as it is."""
    model = random_model("qwen3-moe")
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    done = compact(model, arena_bytes=ARENA)
    assert done.arenas > 2
    torch.save(model.model.norm.weight, tmp_path / "norm.pt")
    assert (tmp_path / "norm.pt").stat().st_size < 4096
    for name, value in copy.deepcopy(model).state_dict().items():
        assert torch.equal(value, whole[name])
    model.save_pretrained(tmp_path / "packed")
    random_model("qwen3-moe").save_pretrained(tmp_path / "plain")
    first, second = (load_file(tmp_path / one / "model.safetensors") for one in ("packed", "plain"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_few_allocations_and_the_old_ones_are_free() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    old = [weakref.ref(one.untyped_storage()) for one in model.parameters()]
    done = compact(model, arena_bytes=8192)
    assert (done.tensors, done.bytes, done.left) == (40, 20 * (256 + 32), 0)
    addresses = sorted(one.data_ptr() for one in model.parameters())
    jumps = [b - a for a, b in zip(addresses, addresses[1:], strict=False) if b - a != 512]
    assert len(jumps) < done.arenas == 3
    gc.collect()
    assert [one() for one in old] == [None] * 40


def test_what_stays_where_it_is() -> None:
    """Slices of a larger buffer, which would leave it; what is large; what is no plain tensor."""
    flat = torch.arange(64.0)
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(flat[:32].view(4, 8))
    model.b = torch.nn.Parameter(flat[32:].view(8, 4))
    model.large = torch.nn.Parameter(torch.zeros(1024))
    model.sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    model.meta = torch.nn.Parameter(torch.empty(4, device="meta"))
    model.own = torch.nn.Parameter(torch.ones(3))
    model.view = torch.nn.Parameter(model.own.data)  # a tie of two objects
    model.turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("cache", torch.ones(4), persistent=False)
    done = compact(model, arena_bytes=4096)
    assert (done.tensors, done.arenas) == (4, 1)
    flat.fill_(5.0)
    assert model.a.eq(5).all() and model.b.eq(5).all()
    with torch.no_grad():
        model.own.add_(1)
    assert model.view.tolist() == [2, 2, 2] and model.count.item() == 7
    assert model.turned.tolist() == [[0, 3], [1, 4], [2, 5]] and model.turned.stride() == (1, 3)


def test_many_allocations_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the first rank of each host, with what its ranks have together."""
    segments = [{"device": 0, "address": at << 21, "total_size": 2 << 20} for at in range(1, 1002)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    shards = [(0, (at << 21) + part) for at in range(1, 1001) for part in (0, 512, 4096)]
    assert count_segments(shards) == 1000
    assert count_segments([*shards, (0, 7), (1, 1 << 21)]) == 1002  # another allocator's
    assert count_segments(shards[:6]) == 6
    for rank, (hosts, counts) in enumerate([(["a", "a", "b"], [1000, 1001, 2000])] * 3):
        tell_segments(rank, hosts, counts)
    (record,) = caplog.records
    assert "the 2 ranks of this host publish lies in 2001 allocations" in record.getMessage()
    assert "fanin.torch.compact(model)" in record.getMessage()
    assert "about 0.1 s faster" in record.getMessage()


def test_calls_that_are_wrong() -> None:
    with pytest.raises(RequestError, match="arena_bytes is 0"):
        compact(torch.nn.Linear(2, 2), arena_bytes=0)
    with pytest.raises(RequestError, match="the model is a dict"):
        compact({})
    assert compact(torch.nn.ReLU()) == (0, 0, 0, 0)


def test_wherever_it_is_called() -> None:
    """In inference mode, beside lazy modules, with gradients, between forward and backward."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    x = torch.randn(3, 4)
    model(x).square().sum().backward()
    wanted = [one.grad.clone() for one in model.parameters()]
    with torch.inference_mode():
        assert compact(model, arena_bytes=4096).tensors == 4
    assert all(map(torch.equal, wanted, (one.grad for one in model.parameters())))
    model.zero_grad()
    loss = model(x).square().sum()
    compact(model, arena_bytes=4096)
    loss.backward()
    assert all(map(torch.equal, wanted, (one.grad for one in model.parameters())))
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 1))
    assert compact(lazy, arena_bytes=4096).tensors == 2
