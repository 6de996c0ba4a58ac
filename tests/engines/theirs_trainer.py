# SPDX-License-Identifier: Apache-2.0
"""A sharded trainer that is written to vLLM's `trainer_init` and `send_weights`: one rank.

Its engine is a stand-in on rank 0 that pulls what an engine would pull, and compares it with what
torch's own gather makes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from worlds import Control, join_world


class Engine:
    """vLLM's client of one engine, of which rank 0 has one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.expected: dict[str, Any] = {}
        self.fails = False

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        import fanin

        self.run, self.client = f"full:{info['run']}", fanin.Client(info["trainer"])
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        import torch

        if self.fails:
            raise ConnectionError("the engine is gone")
        got = {name: torch.zeros_like(tensor) for name, tensor in self.expected.items()}
        self.client.pull_into(self.run, got, step=info["step"], timeout=30)
        assert all(torch.equal(got[name], one) for name, one in self.expected.items())
        self.calls.append(f"update {info['step']}")

    def finish_weight_update(self, version: str) -> None:
        self.calls.append(f"finish {version}")


class Rank:
    def __init__(self, options: dict[str, Any]) -> None:
        from fanin.torch import _replicas
        from fanin.vllm import register
        from fanin.vllm.weights_trainer import TrainerInit
        from full_models import random_model, shard
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.base import ModuleSource

        rank, size = join_world(options)
        _replicas._WAIT = 20.0  # a launcher would end this rank soon
        register()
        self.rank = rank
        self.kept: list[Any] = []
        self.model = shard(random_model("qwen2"), options["layout"], size)
        self.engine = Engine() if rank == 0 else None
        self.trainer = WeightTransferTrainerFactory.trainer_init(
            TrainerInit(rank=rank, run="theirs", step=10),
            client=self.engine,
            source=ModuleSource(self.model),
        )

    def _write(self) -> None:
        import torch

        with torch.no_grad():  # outside of anything, as optimizers write
            for parameter in self.model.parameters():
                parameter.mul_(1.25)
        whole = {
            name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.data
            for name, parameter in self.model.named_parameters()
        }
        if self.engine is not None:
            self.engine.expected = whole

    def send(self, write: bool = True) -> dict[str, Any]:
        if write:
            self._write()
        error = ""
        try:
            self.trainer.send_weights()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        calls = [] if self.engine is None else self.engine.calls
        return {"error": error, "step": self.trainer.step, "calls": calls}

    def lose_engine(self, lost: bool) -> None:
        if self.engine is not None:
            self.engine.fails = lost

    def exchange(self, rank: int) -> None:
        """On this rank a parameter becomes one of another shape, and then what it was."""
        import torch

        if self.rank == rank:
            norm = self.model.model.layers[1].input_layernorm
            other = self.kept.pop() if self.kept else torch.nn.Parameter(torch.zeros(3))
            if other.dim() == 1 and other.numel() == 3:
                self.kept.append(norm._parameters["weight"])
            norm._parameters["weight"] = other

    def close(self) -> None:
        self.trainer.shutdown()


def main() -> None:
    control = Control()
    rank = Rank(json.loads(sys.argv[1]))
    control.say("ready")
    control.obey(rank)


if __name__ == "__main__":
    main()
