# SPDX-License-Identifier: Apache-2.0
"""One rank of test_compact.py (a child of worlds.py): the same training with and without compact().

It is told to `run` one of the cases below, which fail by an assertion.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import fanin
import torch
import torch.distributed as dist
from fanin.errors import RequestError, StateError
from fanin.torch import WeightServer, compact
from fanin.torch._fsdp import fsdp_params
from full_models import random_model, shard
from test_compact import local, objects, same_now, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from worlds import run_cases

ARENA = 64 << 10
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Odd(torch.nn.Module):
    """Shards that are uneven and empty, a tie, a frozen parameter, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 7)
        self.body = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 7))
        self.gate = torch.nn.Linear(7, 1)
        self.head = torch.nn.Linear(7, 16, bias=False)
        self.head.weight = self.embed.weight
        self.body[1].weight.requires_grad_(False)
        self.register_buffer("shift", torch.arange(7.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.shift
        return self.head(self.body(hidden) * self.gate(hidden).sigmoid())


def odd() -> Any:
    torch.manual_seed(3)
    model = Odd()
    for layer in model.body:
        fully_shard(layer, mesh=init_device_mesh("cpu", (SIZE,)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))


def replicated() -> Any:
    model = random_model("qwen3", dtype="float32")
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


MAKE: dict[str, Callable[[], Any]] = {
    "odd": odd,
    "ddp": replicated,
    "fsdp": lambda: shard(random_model("qwen3-moe"), "fsdp", SIZE),
    "hsdp": lambda: shard(random_model("qwen3"), "hsdp", SIZE),
    "fsdp+tp": lambda: shard(random_model("qwen2", tied=True), "fsdp+tp", SIZE),
}


def kept(model: Any) -> None:
    """What FSDP2 gathers from is where the parameter is."""
    for param in fsdp_params(model):
        shown = local(param.sharded_param)
        if shown.numel():
            held = param._sharded_param_data.untyped_storage().data_ptr()
            assert held == shown.untyped_storage().data_ptr()


def small(model: Any) -> list[StorageWeakRef]:
    """Memory that compact() is to move."""
    found = [local(one).untyped_storage() for one in model.parameters()]
    return [StorageWeakRef(one) for one in found if 0 < one.nbytes() <= ARENA // 2]


def trained(layout: str) -> None:
    """Steps, FSDP2's own resets and loads leave a compacted model as one that is not."""
    plain, packed = MAKE[layout](), MAKE[layout]()
    optimizers = [torch.optim.AdamW(plain.parameters(), lr=0.02)]
    optimizers.append(torch.optim.AdamW(packed.parameters(), lr=0.02))
    # Some ranks of one tensor-parallel group must see the same batch.
    seed = RANK // 2 if layout == "fsdp+tp" else RANK
    both = [plain, packed]
    train(both, optimizers, seed)  # FSDP2 makes what it makes at the first forward
    for model in both if layout != "ddp" else ():
        model.reshard()
    before, old = objects(packed), small(packed)
    done = compact(packed, arena_bytes=ARENA)
    assert old and all(one.expired() for one in old), "what was moved is held yet"
    assert done.tensors > 5 and done.bytes > 0 and done.arenas < done.tensors
    assert objects(packed) == before
    kept(packed)
    same_now(plain, packed)
    train(both, optimizers, seed + 10)
    same_now(plain, packed)
    for param in fsdp_params(packed):
        param.reset_sharded_param()
    kept(packed)
    states = [{k: v.clone() for k, v in model.state_dict().items()} for model in both]
    train(both, optimizers, seed + 20)
    for model, state in zip(both, states, strict=True):
        model.load_state_dict(state)
    same_now(plain, packed)
    train(both, optimizers, seed + 30)
    same_now(plain, packed)
    for model, state in zip(both, states, strict=True):
        model.load_state_dict(state, assign=True)
    compact(packed, arena_bytes=ARENA)
    kept(packed)
    for model in both:
        model._apply(torch.clone)  # as .to(device) does it
    kept(packed)
    compact(packed, arena_bytes=2 * ARENA)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in both]
    train(both, optimizers, seed + 40)
    same_now(plain, packed)


def published(layout: str) -> None:
    """A server follows, whether it is made before or after."""
    model = MAKE[layout]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with WeightServer(model, base_port=0, use_ucx=False) as server:
        server.publish(0)
        first = pulled(server)
        compact(model, arena_bytes=ARENA)
        server.publish(1)
        second = pulled(server)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
        with server.updating(2):
            train([model], [optimizer], 0 if layout == "fsdp+tp" else RANK)
        third = pulled(server)
        assert any(not torch.equal(first[name], third[name]) for name in first)


def pulled(server: WeightServer) -> dict[str, torch.Tensor]:
    """What every rank pulls of the step that all have published, before one goes on."""
    dist.barrier()
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16}
    with fanin.Client(server.addresses) as client:
        into = {
            one.name: torch.empty(one.shape, dtype=kinds[one.dtype])
            for one in client.catalog("full:0")
        }
        client.pull_into("full:0", into, timeout=60)
    dist.barrier()
    return into


def refused(layout: str) -> None:
    """What FSDP2 holds elsewhere is told by name."""
    model = MAKE["odd"]()
    with torch.no_grad():
        model(torch.arange(4))
    try:
        compact(model)
    except StateError as error:
        assert error.key and "temporary unsharded buffer" in str(error), error
    else:
        raise AssertionError("whole parameters were moved")
    policy = CPUOffloadPolicy(pin_memory=False)
    mesh = init_device_mesh("cpu", (SIZE,))
    model = fully_shard(torch.nn.Linear(6, 4), mesh=mesh, offload_policy=policy)
    try:
        compact(model)
    except RequestError as error:
        assert error.key == "weight" and "CPUOffloadPolicy" in str(error), error
    else:
        raise AssertionError("an offloaded parameter was moved")


if __name__ == "__main__":
    run_cases(globals())
