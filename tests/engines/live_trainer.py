# SPDX-License-Identifier: Apache-2.0
"""Real FSDP2 trainers of a LoRA adapter, which a test drives step by step.

`LiveTrainer` starts the ranks (this file, run as a program). Every call tells all ranks what to do
and waits until all have done it, so nothing that a test does depends on time. The ranks train in
place (AdamW on random tokens), commit each step through `fanin.torch.AdapterServer`, and save each
step's adapter, gathered whole, as PEFT's directory `step-<n>` to compare with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from worlds import Control, World, join_world


class LiveTrainer:
    """The ranks of one launch, and what they have published."""

    script = "live_trainer.py"

    def __init__(
        self,
        model: Path,
        scratch: Path,
        *,
        run: str = "0",
        world_size: int = 2,
        step: int = 0,
        seed: int = 1,
        **more: Any,
    ) -> None:
        self.scratch = scratch
        self.info = scratch / "nixl_info.json"
        self.addresses: list[str] = []
        self.world_id = ""
        self.published = step
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "rendezvous").unlink(missing_ok=True)
        options: dict[str, Any] = {"model": str(model), "scratch": str(scratch), "run": run}
        options |= {"step": step, "seed": seed}
        self._world = World(world_size, options | more, scratch, self.script)

    def __enter__(self) -> LiveTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> LiveTrainer:
        """Until the first step is published, and `info` is written."""
        ready = self._world.expect("ready")[0]
        self.addresses, self.world_id = ready["addresses"], ready["world"]
        return self

    def step(self, count: int = 1, *, record: bool = True) -> dict[str, Any]:
        """Trains and commits this many steps. The answer: `step`."""
        answers = self._world.do("step", count=count, record=record)
        self.published = int(answers[0]["step"])
        return answers[0]

    def pause(self) -> None:
        self._world.do("pause")

    def resume(self) -> None:
        self._world.do("resume")

    def exit(self) -> list[int]:
        """An orderly end; the ranks' exit statuses."""
        self._world.tell("exit")
        return self._world.wait()

    def stop(self) -> None:
        """SIGSTOP to all ranks: they say nothing, and their connections stay."""
        for rank in self._world.ranks:
            rank.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, rank.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """SIGKILL to all ranks, whatever they are doing."""
        for rank in self._world.ranks:
            rank.kill()

    def close(self) -> None:
        self._world.close()

    def record(self, step: int) -> Path:
        """The directory of what was gathered after this step."""
        return self.scratch / f"step-{step}"


# ----------------------------------------------------------------------------- in the ranks


class Trainer:
    """One rank: an FSDP2-wrapped model with PEFT's LoRA, its optimizer, its adapter server."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from fanin.torch import AdapterServer
        from peft import LoraConfig, get_peft_model
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import distribute_tensor
        from transformers import AutoModelForCausalLM
        from vllm_server import ALPHA, MODULES, RANK

        self.rank, _ = join_world(options)
        base = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
        self.config = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=MODULES, task_type="CAUSAL_LM"
        )
        self.model = get_peft_model(base, self.config)
        for layer in self.model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

        # The same whole values on every rank, large enough to change what greedy decoding gives.
        generator = torch.Generator().manual_seed(options["seed"])
        self.trained = {k: p for k, p in self.model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for parameter in self.trained.values():
                whole = torch.empty(parameter.shape).normal_(0, 0.2, generator=generator)
                parameter.copy_(
                    distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                )
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.05)
        self.tokens = torch.Generator().manual_seed(options["seed"] + self.rank)
        self.scratch = Path(options["scratch"])
        self.number = int(options["step"])
        self.run = options["run"]
        self.digests = options.get("digests")  # of each step, if it is true
        self.server = AdapterServer(self.model, run=self.run, base_port=0)
        self.server.publish(self.number, digests=self.digests)
        self.gather(self.scratch / f"step-{self.number}")
        self.server.write_info(self.scratch, run=self.run, step=self.number)

    def pause(self) -> None:
        self.server.pause(self.run)

    def resume(self) -> None:
        self.server.resume(self.run)

    def step(self, count: int, record: bool) -> dict[str, Any]:
        import torch

        for _ in range(count):
            tokens = torch.randint(3, 256, (2, 16), generator=self.tokens)
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            with self.server.updating(self.number + 1, digests=self.digests):
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.number += 1
            if record:
                self.gather(self.scratch / f"step-{self.number}")
        return {"step": self.number}

    def gather(self, directory: Path) -> None:
        from safetensors.torch import save_file

        tensors = {}
        for name, parameter in self.trained.items():
            whole = parameter.full_tensor().detach()
            if self.rank == 0:
                tensors[name.replace(".default.", ".")] = whole.contiguous()
        if self.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
            self.config.save_pretrained(str(directory))


def main() -> None:
    control = Control()
    trainer = Trainer(json.loads(sys.argv[1]))
    import torch.distributed as dist

    dist.barrier()
    world = trainer.server.world_id
    control.say(
        "ready",
        addresses=list(trainer.server.addresses),
        world=world.hex() if isinstance(world, bytes) else str(world),
    )
    control.obey(trainer)
    trainer.server.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
