# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers of one host that hand on to each other what they read ahead."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import fanin
import torch
from fanin.engine.landing import torch_dtype_of
from fanin.info import read_info
from fanin.sync import Registry
from full_models import save_full_model
from full_trainer import FullTrainer
from vllm_server import SLOWNESS, VllmServer

BACKEND = ("--weight-transfer-config", '{"backend": "fanin"}', "--dtype", "bfloat16")
PROMPT = [5, 9, 13, 17, 21]
RUN = "full:0"
PATIENCE = 60.0 * SLOWNESS


class Fleet:
    """A trainer of two ranks, and engines in the groups "first" and "second".

    names: of the engines, and what vLLM is started with besides.
    """

    def __init__(self, scratch: Path, names: tuple[str, ...] = ("one", "two"), *more: str) -> None:
        # Else all is read before the others are found.
        wide = {"hidden_size": 512, "intermediate_size": 4096}
        self.model = save_full_model(scratch / "model", "qwen3", tied=True, **wide)
        self.trainer = FullTrainer(self.model, scratch / "run", world_size=2, digests=True)
        self.engines = [self._engine(scratch / name, *more) for name in names]
        self.trainer.wait_ready()
        for engine in self.engines:
            engine.wait_ready()
        self.registry = self.registry_of()

    def _engine(self, place: Path, *more: str) -> VllmServer:
        place.mkdir()
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "FANIN_RELAY": "host",
            # Two workers of one machine without as many memory nodes.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        arguments = (*BACKEND, *more)
        return VllmServer(self.model, place, *arguments, environment=environment, adapters=False)

    def registry_of(self, **options: Any) -> Registry:
        """One of all engines."""
        registry = Registry(str(self.trainer.info), timeout=2 * PATIENCE, **options)
        for engine, group in zip(self.engines, ("first", "second"), strict=False):
            registry.add(engine.url, group=group)
        return registry

    @property
    def addresses(self) -> list[str]:
        """The trainer's."""
        return list(read_info(self.trainer.info).addresses)

    def step(self) -> int:
        return int(self.trainer.step()["step"])

    def answers(self) -> list[Any]:
        """Tokens with the logarithms of their probabilities, and checksums, of each engine."""
        told = []
        for engine in self.engines:
            body = {**VllmServer.completion("base", PROMPT, 8), "logprobs": 3}
            choice = engine.ask("POST", "/v1/completions", body, PATIENCE)["choices"][0]
            sums = engine.ask("POST", "/weight_checker", {"action": "checksum"}, PATIENCE)
            told.append((choice["text"], choice["logprobs"]["token_logprobs"], sums["checksums"]))
        return told

    def sync(self, step: int, group: str, **more: Any) -> int:
        """Percent that came from relays. Proves by the ranks' digests what is served."""
        result = self.registry.sync(step, group, prefetch=True, verify_served=True, **more)
        assert result.ok
        (entry,) = result.results.values()
        return share_of(entry.how)

    def sync_all(self, step: int, **more: Any) -> None:
        """All engines at the same time."""
        assert self.registry.sync(step, prefetch=True, verify_served=True, **more).ok

    def relays(self, step: int) -> list[dict[str, Any]]:
        """What the trainer has been told of the relays that hold this step."""
        command = [os.environ["NIXL_FETCH"], "status", str(self.trainer.info), RUN, "--json"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        ranks = json.loads(told.stdout)["ranks"]
        found = [relay for rank in ranks for relay in rank.get("told_relays", [])]
        return [relay for relay in found if relay["step"] == step]

    def room(self) -> dict[str, Any]:
        """Memory for the whole model, as the trainer publishes it."""
        return room_for(self.addresses)

    def close(self) -> None:
        for engine in self.engines:
            engine.stop()
        self.trainer.close()


def room_for(addresses: list[str]) -> dict[str, Any]:
    """Memory for all that this trainer publishes."""
    with fanin.Client(addresses) as client:
        return {
            one.name: torch.zeros(one.shape, dtype=torch_dtype_of(one.dtype))
            for one in client.catalog(RUN)
        }


def share_of(how: str) -> int:
    """Percent that came from relays."""
    found = re.search(r"with relays \((\d+) %", how)
    assert found, how
    return int(found[1])
