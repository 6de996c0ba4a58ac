# SPDX-License-Identifier: Apache-2.0
"""One rank that holds a part of a model: some layers, some experts, Megatron's tensor-parallel
parts (a child of worlds.py).

Options: base_port, rendezvous. It is told to `make` a model's part and its server, one after the
other. A step multiplies every element by -2, which is exact, so that a test knows what must be
pulled. Each command is a method; its answer is 'done' with what it returned, or with the error it
raised.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import fanin
import torch
import torch.distributed as dist
from fanin.torch import Slice, WeightServer, weights
from fanin.torch._names import slices_of
from fanin.torch.names import experts, megatron
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from worlds import Control, join_world

Made = tuple[Any, dict[str, Any]]


def stages(model: Any, rank: int, size: int) -> Made:
    """Pipeline parallelism: a layer each, embeddings first, norm and head last."""
    layers = dict(enumerate(model.model.layers))
    model.model.layers = torch.nn.ModuleDict({str(rank): layers[rank]})
    if rank > 0:
        del model.model.embed_tokens
    if rank < size - 1:
        del model.model.norm, model.lm_head
    return model, {}


def replicas(model: Any, rank: int, size: int) -> Made:
    """Every rank has all of it."""
    return torch.compile(torch.nn.parallel.DistributedDataParallel(model)), {}


def local_experts(model: Any, rank: int, size: int) -> Made:
    """Expert parallelism by plain tensors: each rank has some experts, and all of the rest."""
    first = 0
    for layer in model.model.layers:
        held = layer.mlp.experts
        count = held.down_proj.shape[0] // size
        first = rank * count
        for name in ("gate_up_proj", "down_proj"):
            mine = getattr(held, name).detach()[first : first + count].clone()
            setattr(held, name, torch.nn.Parameter(mine))
    return model, {"names": experts(first=first)}


def unnamed_experts(model: Any, rank: int, size: int) -> Made:
    """A mistake: every rank says that its experts are the first ones."""
    return local_experts(model, rank, size)[0], {"names": experts()}


def unnamed_rows(model: Any, rank: int, size: int) -> Made:
    """A mistake: tensor parallelism by hand, of which nobody tells."""
    for layer in model.model.layers:
        for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            part = getattr(layer.mlp, name).weight.detach().chunk(size, dim)[rank].clone()
            getattr(layer.mlp, name).weight = torch.nn.Parameter(part)
    return model, {}


def unnamed_vocabulary(model: Any, rank: int, size: int) -> Made:
    """A mistake: each rank has some rows of the embeddings."""
    for module in (model.model.embed_tokens, model.lm_head):
        module.weight = torch.nn.Parameter(module.weight.detach().chunk(size)[rank].clone())
    return model, {}


def sharded_experts(model: Any, rank: int, size: int) -> Made:
    """Experts as DTensors over one half of the mesh, FSDP2 over the other, as torchtitan does."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "expert"))
    for layer in model.model.layers:
        held = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(held, name).detach()
            part = distribute_tensor(whole, mesh["expert"], [Shard(0)])
            setattr(held, name, torch.nn.Parameter(part))
        fully_shard(held, mesh=mesh["data"])
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, {}


def _held(parts: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module tree that has these parameters under these names."""
    root = torch.nn.Module()
    for path, value in parts.items():
        *above, leaf = path.split(".")
        module = root
        for name in above:
            if name not in module._modules:
                module.add_module(name, torch.nn.Module())
            module = module._modules[name]
        module.register_parameter(leaf, torch.nn.Parameter(value.clone()))
    return root


class Float16Module(torch.nn.Module):
    """Named and built as Megatron's."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.add_module("module", module)


def megatron_parts(model: Any, rank: int, size: int) -> Made:
    """What Megatron-Core's GPTModel keeps of the same weights at tensor-parallel rank *rank*."""
    config, state = model.config, model.state_dict()
    heads, groups, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )

    def rows(value: torch.Tensor) -> torch.Tensor:
        return value.chunk(size, 0)[rank]

    def padded(value: torch.Tensor) -> torch.Tensor:
        """Vocabularies are padded to a multiple, here of 96."""
        missing = -len(value) % 96
        return rows(torch.cat([value, torch.full((missing, value.shape[1]), 7.0)]).to(value.dtype))

    def qkv(layer: str) -> torch.Tensor:
        q, k, v = (state[f"{layer}.self_attn.{letter}_proj.weight"] for letter in "qkv")
        per = heads // groups * width
        fused = [
            part
            for group in range(groups)
            for part in (
                q[group * per : (group + 1) * per],
                k[group * width : (group + 1) * width],
                v[group * width : (group + 1) * width],
            )
        ]
        return rows(torch.cat(fused))

    parts = {
        "embedding.word_embeddings.weight": padded(state["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": padded(state["lm_head.weight"]),
    }
    for number in range(config.num_hidden_layers):
        hf, ours = f"model.layers.{number}", f"decoder.layers.{number}"
        gate, up = (state[f"{hf}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        parts |= {
            f"{ours}.self_attention.linear_qkv.weight": qkv(hf),
            f"{ours}.self_attention.linear_qkv.layer_norm_weight": state[
                f"{hf}.input_layernorm.weight"
            ],
            f"{ours}.self_attention.q_layernorm.weight": state[f"{hf}.self_attn.q_norm.weight"],
            f"{ours}.self_attention.k_layernorm.weight": state[f"{hf}.self_attn.k_norm.weight"],
            f"{ours}.self_attention.linear_proj.weight": state[
                f"{hf}.self_attn.o_proj.weight"
            ].chunk(size, 1)[rank],
            f"{ours}.mlp.linear_fc1.weight": torch.cat([rows(gate), rows(up)]),
            f"{ours}.mlp.linear_fc1.layer_norm_weight": state[
                f"{hf}.post_attention_layernorm.weight"
            ],
            f"{ours}.mlp.linear_fc2.weight": state[f"{hf}.mlp.down_proj.weight"].chunk(size, 1)[
                rank
            ],
        }
    names = megatron(config, tp_rank=rank, tp_size=size)
    return Float16Module(_held(parts)), {"names": names, "config": config if rank else None}


KINDS = {
    "ddp": replicas,
    "pp": stages,
    "ep": local_experts,
    "ep+fsdp": sharded_experts,
    "megatron": megatron_parts,
    "unnamed-experts": unnamed_experts,
    "unnamed-rows": unnamed_rows,
    "unnamed-vocabulary": unnamed_vocabulary,
}


class Float8Tensor(torch.Tensor):
    """A tensor whose values lie in another one, with their scale."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Float8Tensor(args[0]) if func is torch.ops.aten.detach.default else NotImplemented


class Trainer:
    def __init__(self, options: dict[str, Any]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.base_port = options.get("base_port", 0)
        self.server: WeightServer | None = None
        self.told: dict[str, Any] = {}

    def write(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(-2)

    # ------------------------------------------------------------------ commands

    def make(
        self, model: str, kind: str, ranks: list[int] | None = None, **server: Any
    ) -> list[str]:
        """This rank's part, and step 0 of it; the addresses of all ranks.

        ranks: only these make up the trainer; on others nothing is made.
        """
        if self.server is not None:
            self.server.close()
        rank, size = self.rank, self.size
        if ranks is not None:
            server["group"] = dist.new_group(ranks)
            if self.rank not in ranks:
                return []
            rank, size = ranks.index(self.rank), len(ranks)
        whole = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        self.model, told = KINDS[kind](whole, rank, size)
        self.told = told | server
        self.server = WeightServer(self.model, base_port=self.base_port, use_ucx=False, **self.told)
        self.number = 0
        self.server.publish(0)
        dist.barrier(server.get("group"))
        return self.server.addresses

    def mistake(self, model: str, kind: str) -> list[str]:
        """What each of two publishes says."""
        whole = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        part, told = KINDS[kind](whole, self.rank, self.size)
        with WeightServer(part, base_port=0, use_ucx=False, **told) as server:
            return [_refusal(server, turn) for turn in range(2)]

    def stale(self, model: str) -> list[str]:
        """Every rank has all of the model, and at step 2 each has written its own half of the
        tensors alone. Nobody compares replicas; the addresses of all ranks."""
        guard, weights.replicas_of = weights.replicas_of, lambda *_: None
        try:
            addresses = self.make(model, "ddp")
        finally:
            weights.replicas_of = guard
        assert self.server is not None
        self.server.publish(1, digests=True)
        parameters = list(self.model.parameters())
        half = len(parameters) // 2
        own = parameters[:half] if self.rank == 0 else parameters[half:]
        with self.server.updating(2, digests=True), torch.no_grad():
            for parameter in own:
                parameter.mul_(-2)
        dist.barrier()
        return addresses

    def step(self) -> None:
        self.number += 1
        with self.server.updating(self.number):
            self.write()

    def move_experts(self, model: str) -> None:
        """Each rank takes the experts of the next one, in place; its names tell their numbers."""
        whole = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        part, _ = local_experts(whole, (self.rank + 1) % self.size, self.size)
        self.number += 1
        with self.server.updating(self.number):
            self.write()
            for mine, other in zip(self.model.model.layers, part.model.layers, strict=True):
                for name in ("gate_up_proj", "down_proj"):
                    moved = getattr(other.mlp.experts, name).detach() * (-2) ** self.number
                    getattr(mine.mlp.experts, name).detach().copy_(moved)
            self.first = (self.rank + 1) % self.size * 2
            self.server.refresh()

    def make_moving(self, model: str) -> list[str]:
        """As make() of "ep", with names that say which experts are here now."""
        self.first = 2 * self.rank
        told = {"names": lambda name, shape: experts(first=self.first)(name, shape)}
        return self.make(model, "ep", **told)

    def call(self, method: str, arguments: list[Any] | None = None) -> None:
        assert self.server is not None
        getattr(self.server, method)(*(arguments or []))

    def drop(self, name: str) -> None:
        """This rank has that parameter no more."""
        owner, _, leaf = name.rpartition(".")
        delattr(self.model.get_submodule(owner), leaf)

    def add(self, name: str) -> None:
        """A parameter joins."""
        owner, _, leaf = name.rpartition(".")
        value = torch.nn.Parameter(torch.ones(3, 2))
        self.model.get_submodule(owner).register_parameter(leaf, value)

    def convert(self, name: str, dtype: str) -> None:
        parameter = self.model.get_parameter(name)
        parameter.data = parameter.data.to(getattr(torch, dtype))

    def lose(self, key: str, rows: list[int]) -> None:
        """Another server of the same model, whose names leave out rows of one expert."""
        assert self.told["names"] is not None

        def names(name: str, shape: tuple[int, ...]) -> Any:
            out: list[Slice] = []
            for part in slices_of(self.told["names"], name, shape):
                if part.key != key:
                    out.append(part)
                    continue
                expert, where = part.index
                for first, end in ((0, rows[0]), (rows[1], 96)):
                    index = (expert, slice(where.start + first, where.start + end))
                    out.append(Slice(key, index, (first, 0), (96, 128)))
            return out

        WeightServer(self.model, base_port=0, use_ucx=False, names=names).close()

    def partial(self, where: int) -> None:
        """A server of a parameter that is a summand on one rank, for all that rank knows."""
        mesh = init_device_mesh("cpu", (self.size,))
        kind = Partial() if self.rank == where else Replicate()
        one = DTensor.from_local(torch.ones(4), mesh, [kind])
        WeightServer(_held_as_is(one), base_port=0, use_ucx=False).close()

    def packed(self) -> None:
        """A server of what FSDP2 makes of parameters of torchao: DTensors of its own tensors."""
        mesh = init_device_mesh("cpu", (self.size,))
        one = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
        one._local_tensor = Float8Tensor(torch.ones(4))
        WeightServer(_held_as_is(one), base_port=0, use_ucx=False).close()

    def fp8(self) -> list[str]:
        """A server of a checkpoint in block fp8 under FSDP2: values of one byte, scales of F32."""
        if self.server is not None:
            self.server.close()
        self.model = torch.nn.Module()
        for name, value in fp8_values().items():
            self.model.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.size,)))
        self.server = WeightServer(self.model, base_port=0, use_ucx=False)
        self.server.publish(0)
        dist.barrier()
        return self.server.addresses

    def packed_four_bit(self) -> None:
        """A server of bitsandbytes' weights of four bits, which FSDP2 shards as bytes."""
        model = torch.nn.Sequential(Linear4bit())
        fully_shard(model, mesh=init_device_mesh("cpu", (self.size,)))
        WeightServer(model, base_port=0, use_ucx=False).close()

    def replicated(self) -> None:
        """DTensors that every rank has whole."""
        mesh = init_device_mesh("cpu", (self.size,))
        whole = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
        WeightServer(_held_as_is(whole), base_port=0, use_ucx=False).close()


def fp8_values() -> dict[str, torch.Tensor]:
    """The same on every rank; no shard is even."""
    drawn = torch.Generator().manual_seed(8)
    values = torch.randn(7, 5, generator=drawn).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": torch.rand(3, 2, generator=drawn)}


class Linear4bit(torch.nn.Module):
    """Looks like bitsandbytes' class of this name, which needs a GPU to be made."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.zeros(8, 1, dtype=torch.uint8)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)


Linear4bit.__module__ = "bitsandbytes.nn.modules"


def _held_as_is(value: torch.Tensor) -> torch.nn.Module:
    holder = torch.nn.Module()
    holder.register_parameter("weight", torch.nn.Parameter(value))
    return holder


def _refusal(server: WeightServer, step: int) -> str:
    try:
        server.publish(step)
        return ""
    except fanin.FaninError as error:
        return f"{error.key} {error.rank} {error} {error.remedy}"


def answer(trainer: Trainer, command: dict[str, Any]) -> dict[str, Any]:
    name = command.pop("event")
    if name in ("call", "drop", "add", "convert") and command.pop("where", trainer.rank) != (
        trainer.rank
    ):
        return {"result": None, "error": None}
    try:
        return {"result": getattr(trainer, name)(**command), "error": None}
    except fanin.FaninError as error:
        told = {"type": type(error).__name__, "text": str(error), "key": error.key}
        return {"result": None, "error": told | {"rank": error.rank, "remedy": error.remedy}}


def main() -> None:
    control = Control()
    options = json.loads(sys.argv[1])
    join_world(options)
    trainer = Trainer(options)
    control.say("ready")
    while (command := control.hear())["event"] != "exit":
        control.say("done", **answer(trainer, command))
    if trainer.server is not None:
        trainer.server.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
