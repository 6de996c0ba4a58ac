# SPDX-License-Identifier: Apache-2.0
"""One rank of a model that is sharded in some way and published as fp8 (a child of worlds.py).

Options: rendezvous. It is told to `make` a case. All ranks, and the test, make the same tensors of
a case's seed. Each command is a method; its answer is 'done' with what it returned.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from fanin.errors import FaninError
from fanin.torch import Slice, WeightServer
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from worlds import Control, join_world

SIZES = (1, 2, 5, 63, 127, 128, 129, 130, 200, 256, 300, 513)


def whole_tensors(seed: int, step: int) -> dict[str, torch.Tensor]:
    """A model's tensors at a step: matrices of odd shapes, and a stack of experts."""
    draw, values = random.Random(seed), torch.Generator().manual_seed(seed * 100 + step)
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.{at}.m{at}.weight": (draw.choice(SIZES), draw.choice(SIZES)) for at in range(5)
    }
    shapes["experts.w"] = (draw.choice((2, 3, 5, 8)), draw.choice(SIZES), draw.choice(SIZES))
    shapes["norm.weight"] = (draw.choice(SIZES),)
    out = {}
    for at, (name, shape) in enumerate(shapes.items()):
        one = torch.randn(shape, generator=values)
        spread = 10 ** torch.randn((*shape[:-1], 1), generator=values)
        one = one * spread * 0.02
        out[name] = one if (seed + at) % 3 == 0 else one.bfloat16()
    return out


def names(name: str, shape: tuple[int, ...]) -> Any:
    """Experts under names of their own."""
    if name != "experts.w":
        return name
    return [Slice(f"experts.{at}.w.weight", (at,)) for at in range(shape[0])]


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    root = torch.nn.Module()
    for path, value in tensors.items():
        *above, leaf = path.split(".")
        module = root
        for part in above:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        parameter = value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value)
        module.register_parameter(leaf, parameter)
    return root


def placed(seed: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor anywhere on a mesh of any shape."""
    draw, size = random.Random(seed), dist.get_world_size()
    shape = draw.choice([(size,), (1, size), (size, 1)] + ([(2, 2)] if size == 4 else []))
    mesh = init_device_mesh("cpu", shape)
    out = {}
    for name, value in tensors.items():
        kinds = [Replicate(), *(Shard(dim) for dim in range(value.dim()))]
        out[name] = distribute_tensor(value, mesh, [draw.choice(kinds) for _ in shape])
    return out


def by_hand(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
    """Plain tensors of every other piece of 50 rows, as no placement has them; and the names that
    tell of it. Pieces of one block lie on one rank and on several."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts: dict[str, torch.Tensor] = {}
    slices: dict[str, Any] = {}
    for name, value in tensors.items():
        if value.dim() < 2:
            parts[name], slices[name] = value.clone(), name
            continue
        firsts = [at for at in range(0, len(value), 50) if at // 50 % size == rank]
        if firsts:
            parts[name] = torch.cat([value[at : at + 50] for at in firsts])
        slices[name] = [
            Slice(name, (slice(50 * i, 50 * i + 50),), (at, 0), tuple(value.shape))
            for i, at in enumerate(firsts)
        ]
    return parts, lambda name, shape: slices[name]


def sharded(kind: str, seed: int, step: int) -> tuple[torch.nn.Module, Any]:
    tensors = whole_tensors(seed, step)
    size = dist.get_world_size()
    if kind == "placed":
        return module_of(placed(seed, tensors)), names
    if kind == "hand":
        parts, told = by_hand({n: one for n, one in tensors.items() if one.dim() < 3})
        return module_of(parts), told
    mesh = None
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copy", "shard"))
    if kind == "fsdp+tp":
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "parts"))
        mesh = both["data"]
        tensors = {
            name: torch.nn.Parameter(
                distribute_tensor(one, both["parts"], [Shard(min(at % 2, one.dim() - 1))])
            )
            for at, (name, one) in enumerate(tensors.items())
        }
    model = module_of(tensors)
    for child in model.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh), names


class Trainer:
    server: WeightServer

    def make(self, kind: str, seed: int, **server: Any) -> dict[str, Any]:
        if hasattr(self, "server"):
            self.server.close()
        self.kind, self.seed = kind, seed
        self.model, told = sharded(kind, seed, 0)
        options = {"use_ucx": False, "names": told, "quantize": "fp8"} | server
        self.server = WeightServer(self.model, base_port=0, **options)
        self.server.publish(0)
        dist.barrier()
        return {"addresses": self.server.addresses}

    def load(self, model: str, **server: Any) -> dict[str, Any]:
        """A language model under FSDP2 that is trained by AdamW."""
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.server = WeightServer(self.model, base_port=0, use_ucx=False, **server)
        self.server.publish(0)
        dist.barrier()
        return {"addresses": self.server.addresses}

    def train(self, number: int, file: str) -> None:
        """One step on a batch of this rank's own; *file* gets the gathered tensors after it."""
        batch = torch.Generator().manual_seed(100 * number + dist.get_rank())
        tokens = torch.randint(3, 200, (2, 16), generator=batch)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        with self.server.updating(number):
            self.optimizer.step()
        self.optimizer.zero_grad()
        whole = {name: one.full_tensor() for name, one in self.model.state_dict().items()}
        if dist.get_rank() == 0 and file:
            save_file({name: one.clone() for name, one in whole.items()}, file)
        dist.barrier()

    def step(self, number: int) -> None:
        other = dict(sharded(self.kind, self.seed, number)[0].named_parameters())
        with self.server.updating(number), torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(other[name])
        dist.barrier()

    def fail(self, number: int, rank: int, body: bool) -> dict[str, Any]:
        """Rank *rank* cannot publish, for a parameter has joined or the body of the update raises;
        nobody waits for it."""
        error = ""
        if dist.get_rank() == rank:
            self.model.register_parameter("joined", torch.nn.Parameter(torch.ones(3)))
        try:
            with self.server.updating(number):
                if body and dist.get_rank() == rank:
                    raise ValueError("the loss is NaN")
        except (FaninError, ValueError) as caught:
            error = str(caught)
        if dist.get_rank() == rank:
            del self.model.joined
        dist.barrier()
        return {"error": error}

    def differ(self, key: str, values: list[Any]) -> dict[str, Any]:
        """Each rank has its own argument."""
        model, told = sharded("placed", 1, 0)
        mine = {"quantize": "fp8", key: values[dist.get_rank() % len(values)]}
        with contextlib.ExitStack() as made:
            try:
                server = WeightServer(model, base_port=0, use_ucx=False, names=told, **mine)
                made.callback(server.close)
                return {"error": ""}
            except FaninError as error:
                return {"error": str(error)}


def main() -> None:
    control, options = Control(), json.loads(sys.argv[1])
    join_world(options)
    control.say("ready")
    trainer = Trainer()
    control.obey(trainer)
    if hasattr(trainer, "server"):
        trainer.server.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
