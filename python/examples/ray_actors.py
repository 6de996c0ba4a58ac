# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks and inference workers as Ray actors: a whole model at each step, by fanin.

    pip install ray
    python ray_actors.py --ranks 2 --workers 2 --steps 5

Ray places the actors, carries the addresses and tells who died. The weights do not go through Ray:
each worker reads them out of the ranks' memory, into its own copy of the model. On a cluster of
several hosts give --allow the networks that the workers are in.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import fanin
import ray

RUN = "full:0"


def make_model(name: str | None, seed: int) -> Any:
    """A pretrained model, or a tiny one with the random weights of this seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(seed)
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config = AutoConfig.for_model("qwen2", **tiny, **heads, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@ray.remote
class Rank:
    """One rank of an FSDP2 trainer."""

    def __init__(self, rank: int, size: int, model: str | None) -> None:
        self.rank, self.size, self.name = rank, size, model

    def meeting_point(self) -> str:
        """Where the ranks find each other; rank 0 says it."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"{host}:{free.getsockname()[1]}"

    def start(self, meeting_point: str, allow: str | None) -> list[str]:
        """Shards the model and publishes it; the addresses of all ranks."""
        import torch
        import torch.distributed as dist
        from fanin.torch import WeightServer
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        # fanin serves on the interface that leads to this address.
        os.environ["MASTER_ADDR"] = meeting_point.rpartition(":")[0]
        dist.init_process_group(
            "gloo", init_method=f"tcp://{meeting_point}", rank=self.rank, world_size=self.size
        )
        self.model = make_model(self.name, seed=0)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.server = WeightServer(self.model, run=RUN, base_port=0, allow=allow)
        self.server.publish(0)
        return self.server.addresses

    def step(self, number: int) -> float:
        """Trains one step and publishes it; the loss."""
        import torch

        tokens = torch.randint(self.model.config.vocab_size, (4, 32))
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        with self.server.updating(number):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def digest(self) -> str:
        """Of all weights, gathered: only to show that the workers have the same."""
        return digest({k: v.full_tensor() for k, v in self.model.state_dict().items()})


@ray.remote
class Worker:
    """One inference worker with a copy of the model, which it fills in place."""

    def __init__(self, addresses: list[str], model: str | None) -> None:
        self.model = make_model(model, seed=1)
        tensors = dict(self.model.state_dict())
        self.client = fanin.Client(addresses)
        self.packed = fanin.pack([fanin.shard_of(name, value) for name, value in tensors.items()])

    def pull(self, step: int, timeout: float = 60.0) -> tuple[int, float]:
        """Fills the model with this step's weights; bytes and seconds."""
        result = self.client.pull_into(RUN, self.packed, step=step, timeout=timeout)
        return result.bytes, result.total - result.wait

    def digest(self) -> str:
        return digest(self.model.state_dict())


def digest(tensors: dict[str, Any]) -> str:
    import hashlib

    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def start_trainer(
    size: int, model: str | None = None, allow: str | None = None
) -> tuple[list[Any], list[str]]:
    """The ranks' actors, and their addresses in fanin."""
    ranks = [Rank.remote(rank, size, model) for rank in range(size)]
    meeting_point = ray.get(ranks[0].meeting_point.remote())
    answers = ray.get([rank.start.remote(meeting_point, allow) for rank in ranks])
    return ranks, answers[0]


def train(options: argparse.Namespace) -> None:
    ranks, addresses = start_trainer(options.ranks, options.model, options.allow)
    workers = [Worker.remote(addresses, options.model) for _ in range(options.workers)]
    for step in range(1, options.steps + 1):
        losses = ray.get([rank.step.remote(step) for rank in ranks])
        pulls = ray.get([worker.pull.remote(step) for worker in workers])
        print(
            f"step {step}: loss {losses[0]:.4f}; {len(pulls)} workers pulled "
            f"{pulls[0][0] / 1e6:.2f} MB each in {max(took for _, took in pulls) * 1e3:.1f} ms",
            flush=True,
        )
    theirs = ray.get([rank.digest.remote() for rank in ranks])[0]
    ours = ray.get([worker.digest.remote() for worker in workers])
    print("weights equal" if set(ours) == {theirs} else "weights differ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--model", help="a name or directory for transformers; default: a tiny one")
    parser.add_argument("--allow", help="networks of the workers on other hosts, as 10.0.0.0/8")
    options = parser.parse_args()
    ray.init(include_dashboard=False, ignore_reinit_error=True)
    try:
        train(options)
    except fanin.FaninError as error:  # of whichever actor: Ray hands it on as it was raised
        raise SystemExit(f"ray_actors.py: {error}") from error
    except ray.exceptions.RayActorError as error:
        raise SystemExit(f"ray_actors.py: an actor died: {error}") from error
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
