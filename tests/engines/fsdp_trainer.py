# SPDX-License-Identifier: Apache-2.0
"""One rank of a trainer: FSDP2 and PEFT over gloo, with an AdapterServer (a child of worlds.py).

Options: kind, r, targets, layout and shard (models), server (keyword arguments of AdapterServer),
record (folder), rendezvous. The rank publishes step 1, tells 'ready' and does what it is told: each
command is a method below; its answer is 'done' with what it returned, or with the error it raised.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from fanin.torch import AdapterServer
from fsdp_models import adapted, logits, sharded, trainable
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from worlds import Control, join_world, saved_name


class Planned(Exception):
    """An error that the test asked for."""


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


class Trainer:
    """A model that is trained, and the server that lends its adapter."""

    def __init__(self, options: dict[str, Any], control: Control):
        self.options, self.control = options, control
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.record = pathlib.Path(options["record"])
        self.layout = options.get("layout", "fsdp")
        shard = options.get("shard", {})
        self.model = sharded(adapted(options), self.layout, self.size, **shard)
        self.new_optimizer()
        self.server = AdapterServer(self.model, base_port=0, **options.get("server", {}))
        self.step = 0

    def new_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(trainable(self.model).values(), lr=1e-2)

    def save(self, step: int) -> None:
        """Rank 0 writes down the whole adapter, gathered by torch, under PEFT's names."""
        adapter = self.options.get("adapter", "default")
        state = {
            saved_name(name, adapter): whole(value).contiguous().clone()
            for name, value in trainable(self.model).items()
        }
        if self.rank == 0:
            path = self.record / f"step-{step}.safetensors"
            save_file(state, f"{path}.new")
            os.rename(f"{path}.new", path)

    def backward(self, step: int) -> None:
        """Gradients of this step; ranks that share one batch by tensor parallelism see the same."""
        batch = self.rank // 2 if self.layout == "fsdp+tp" else self.rank
        generator = torch.Generator().manual_seed(1000 * step + batch)
        tokens = torch.randint(0, 256, (1, 16), generator=generator)
        self.model(input_ids=tokens, labels=tokens).loss.backward()

    # ------------------------------------------------------------------ commands

    def publish(self, step: int) -> None:
        self.server.publish(step)
        self.save(step)

    def train(self, first: int, last: int) -> None:
        """In place, step by step; what was published is written down after each."""
        for step in range(first, last + 1):
            self.backward(step)
            with self.server.updating(step):
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.save(step)

    def evaluate(self) -> None:
        """The trainer's own logits, of a forward without gradients."""
        found = whole(logits(self.model))
        if self.rank == 0:
            torch.save(found, self.record / "logits.pt")

    def end(self, how: str) -> None:
        """The end of the process: `how` is one of those of test_fsdp_exits.py."""
        self.control.say("ending")
        if how == "close, destroy":
            self.server.close()
            dist.destroy_process_group()
        elif how == "destroy, close":
            dist.destroy_process_group()
            self.server.close()
        elif how == "destroy":
            dist.destroy_process_group()
        elif how == "exception":
            raise Planned("an exception that nobody catches")
        elif how == "exception in an update":
            with self.server.updating(1000):
                raise Planned("an exception that nobody catches")
        elif how == "exception in with":
            with self.server:
                raise Planned("an exception that nobody catches")
        elif how == "status 3":
            sys.exit(3)
        elif how != "nothing":
            raise ValueError(how)


def main() -> None:
    control = Control()
    options = json.loads(sys.argv[1])
    join_world(options)
    trainer = Trainer(options, control)
    trainer.publish(1)
    server = trainer.server
    control.say("ready", addresses=list(server.addresses), world=str(server.world_id))
    trainer.end(control.obey(trainer, "end")["how"])


if __name__ == "__main__":
    main()
