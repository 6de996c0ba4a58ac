# SPDX-License-Identifier: Apache-2.0
"""Real trainers of a whole model, which a test drives step by step.

`FullTrainer` starts the ranks (this file, run as a program) and tells them what to do, as
`LiveTrainer` does for adapters::

    model = save_full_model(tmp_path / "model", "qwen3", tied=True)
    with FullTrainer(model, tmp_path / "run", world_size=4, layout="hsdp") as trainer:
        trainer.wait_ready()                     # step 0 is published, trainer.info is written
        trainer.step()                           # in place, and published as the next step
        trainer.gather(tmp_path / "step-1")      # as transformers saves it, from torch's own gather
        trainer.pause(); trainer.resume(); trainer.kill(); trainer.stop(); trainer.cont()

Ranks train in place (AdamW on random tokens) and publish by `fanin.torch.WeightServer`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from live_trainer import LiveTrainer
from worlds import Control, join_world

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class FullTrainer(LiveTrainer):
    """The ranks of one launch.

    Keyword arguments: run, world_size, step and seed as for LiveTrainer; layout ("fsdp", see
    full_models.py), dtype ("bfloat16"), server (keyword arguments of WeightServer), record (True:
    each step is gathered into `record(step)` when it is published), device ("cpu"; "cuda": a GPU a
    rank, over NCCL), dummy (True: the model is a config.json, its values are drawn on the device),
    adapter (the fields of a LoraConfig: PEFT's model is trained), train (False: a step adds noise
    to every element instead of training), lr (of AdamW, 0.02), digests (True: of every step, for
    `fanin.check.served`).
    """

    script = "full_trainer.py"

    def __init__(self, model: Path, scratch: Path, **options: Any) -> None:
        self.recorded = options.setdefault("record", False)
        super().__init__(model, scratch, **options)

    def step(self, count: int = 1, *, record: bool | None = None) -> dict[str, Any]:
        return super().step(count, record=self.recorded if record is None else record)

    def publish(self, step: int) -> None:
        """Publishes what is there as this step, without training."""
        self._world.do("publish", step=step)
        self.published = step

    def gather(self, directory: Path) -> None:
        """Has torch gather the model and saves it there, as transformers does."""
        self._world.do("gather", directory=str(directory))

    def write_outside(self) -> None:
        """The mistake: a write outside of updating()."""
        self._world.do("write_outside")

    def pause(self, rank: int | None = None) -> None:
        """One rank or all: nothing of it is readable until resume()."""
        self._tell_some("pause", rank)

    def resume(self, rank: int | None = None) -> None:
        self._tell_some("resume", rank)

    def step_on(self, rank: int) -> None:
        """This rank alone publishes the next step: the others stay behind."""
        self._tell_some("publish", rank, step=self.published + 1)

    @property
    def pids(self) -> list[int]:
        """Of the ranks, for whoever is to kill them at its own moment."""
        return [rank.process.pid for rank in self._world.ranks]

    def refused(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """What each rank's FaninError said of that command, which must fail on all."""
        return [one["refused"] for one in self._world.do("refused", call=what, fields=fields)]

    def do(self, what: str, **fields: Any) -> None:
        """Any command of the ranks' (see below), on all."""
        self._world.do(what, **fields)

    def growth(self) -> list[int]:
        """How many bytes more than then each rank has used at most since forget_peak()."""
        return [int(one["bytes"]) for one in self._world.do("growth")]

    def kill_rank(self, rank: int) -> None:
        self._world.ranks[rank].kill()

    def cont(self) -> None:
        """SIGCONT to all ranks, after stop()."""
        for rank in self._world.ranks:
            rank.process.send_signal(signal.SIGCONT)

    def _tell_some(self, what: str, rank: int | None, **fields: Any) -> None:
        some = self._world.ranks if rank is None else [self._world.ranks[rank]]
        for one in some:
            one.tell(what, **fields)
        for one in some:
            one.expect("done")


# ----------------------------------------------------------------------------- in the ranks


def memory(field: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) for one in lines if one.startswith(f"{field}:")) << 10


class Trainer:
    """One rank: a sharded model, its optimizer, its weight server."""

    def __init__(self, options: dict[str, Any], control: Control) -> None:
        import torch
        from fanin.torch import WeightServer

        self.options, self.control = options, control
        self.device = torch.device(options.get("device", "cpu"))
        backend = "gloo"
        if self.device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            self.device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.rank, size = join_world(options, backend)
        self.layout = options.get("layout", "fsdp")
        self.model = self.make(size).train()
        rate = options.get("lr", 0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        # Ranks of one tensor-parallel group see the same batch.
        batch = self.rank // 2 if self.layout == "fsdp+tp" else self.rank
        seed = options["seed"] if self.layout == "plain" else 1000 * options["seed"] + batch
        self.tokens = torch.Generator().manual_seed(seed)
        self.number = int(options["step"])
        self.scratch = Path(options["scratch"])
        self.server = WeightServer(
            self.model, run=options["run"], **{"base_port": 0, **options.get("server", {})}
        )
        self.publish(self.number)
        if options["record"]:
            self.gather(str(self.scratch / f"step-{self.number}"))
        self.server.write_info(self.scratch, run=options["run"], step=self.number)

    def make(self, size: int) -> Any:
        """The sharded model."""
        import torch
        from full_models import shard
        from merged import with_adapter
        from transformers import AutoConfig, AutoModelForCausalLM

        dtype = getattr(torch, self.options.get("dtype", "bfloat16"))
        where = self.options["model"]
        if not self.options.get("dummy"):
            model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype).to(self.device)
            if (adapter := self.options.get("adapter")) is None:
                return shard(model, self.layout, size, self.device.type)
            adapted = with_adapter(model, wide=False, **adapter)
            shard(adapted.get_base_model(), self.layout, size, self.device.type)
            return adapted
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where), dtype=dtype)
        model = shard(model, self.layout, size, self.device.type).to_empty(device=self.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().normal_(0, 0.02)
        return model

    def publish(self, step: int) -> None:
        self.server.publish(step)
        self.number = step

    def forget_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.resident = memory("VmRSS")

    def growth(self) -> dict[str, Any]:
        return {"bytes": memory("VmHWM") - self.resident}

    def close(self) -> None:
        self.server.close()

    def give_up_update(self) -> None:
        """A little is written; then the update ends by an error, and its step never comes."""
        import torch

        with contextlib.suppress(InterruptedError), self.server.updating(self.number + 1):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.to_local().view(-1)[::50] *= 1.01
            raise InterruptedError

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def refresh(self) -> None:
        self.server.refresh()

    def refused(self, call: str, fields: dict[str, Any]) -> dict[str, Any]:
        from fanin.errors import FaninError

        try:
            getattr(self, call)(**fields)
        except FaninError as error:
            told = {"type": type(error).__name__, "text": str(error), "key": error.key}
            return {"refused": told}
        raise AssertionError(f"{call} was not refused")

    def publish_between(self, step: int) -> None:
        """Between forward and backward, when FSDP2 shows whole parameters in place of its own."""
        import torch

        tokens = torch.arange(3, 19).reshape(1, 16)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        try:
            self.server.publish(step)
        finally:
            loss.backward()
            self.optimizer.zero_grad()

    def convert(self, dtype: str) -> None:
        import torch

        self.model.to(getattr(torch, dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def write_outside(self) -> None:
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)

    def step(self, count: int, record: bool) -> dict[str, Any]:
        import torch

        for _ in range(count):
            if self.options.get("train", True):
                tokens = torch.randint(3, 256, (2, 16), generator=self.tokens).to(self.device)
                self.model(input_ids=tokens, labels=tokens).loss.backward()
            with self.server.updating(self.number + 1, digests=self.options.get("digests")):
                if self.options.get("train", True):
                    self.optimizer.step()
                else:
                    self.disturb()
            self.optimizer.zero_grad()
            self.number += 1
            if record:
                self.gather(str(self.scratch / f"step-{self.number}"))
        return {"step": self.number}

    def nccl_begin(self, url: str) -> None:
        """vLLM's own NCCL engine, from this world's rank 0 to the one worker of that server."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm_server import free_ports

        info = NCCLTrainerInitInfo(
            rank=self.rank, master_address="127.0.0.1", master_port=free_ports(), world_size=2
        )
        self.nccl = WeightTransferTrainerFactory.trainer_init(
            info, client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(self.model)
        )

    def nccl_send(self) -> None:
        self.nccl.send_weights()

    def disturb(self) -> None:
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local()
                local.add_(torch.randn_like(local), alpha=0.02)

    def gather(self, directory: str) -> dict[str, Any]:
        """Saves the model as transformers does; torch gathers it, nothing of fanin is used."""
        from merged import with_adapter
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from transformers import AutoModelForCausalLM

        begun = time.monotonic()
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=whole)
        if self.rank == 0:
            dtype = next(iter(state.values())).dtype
            copy = AutoModelForCausalLM.from_config(self.model.config, dtype=dtype)
            if (adapter := self.options.get("adapter")) is not None:
                copy = with_adapter(copy, wide=False, **adapter)
            copy.load_state_dict(state)
            if adapter is not None:
                copy = copy.merge_and_unload()
            copy.tie_weights()
            copy.save_pretrained(directory)
            for name in TOKENIZER:
                if (Path(self.options["model"]) / name).exists():
                    shutil.copy(Path(self.options["model"]) / name, directory)
        return {"seconds": time.monotonic() - begun}


def main() -> None:
    control = Control()
    trainer = Trainer(json.loads(sys.argv[1]), control)
    import torch.distributed as dist

    dist.barrier()
    server = trainer.server
    control.say("ready", addresses=list(server.addresses), world=server.world_id)
    control.obey(trainer)
    server.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
