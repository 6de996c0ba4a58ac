# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers of one host that hand on to each other what they read ahead.

One fleet for the file. The tests run in order, each on what the earlier ones left.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from fanin.sync import Registry
from full_models import save_full_model
from full_trainer import FullTrainer
from vllm_server import VllmServer

BACKEND = ("--weight-transfer-config", '{"backend": "fanin"}', "--dtype", "bfloat16")
PROMPT = [5, 9, 13, 17, 21]


class Fleet:
    def __init__(self, scratch: Path) -> None:
        wide = {"intermediate_size": 32768}  # else all is read before the others are found
        self.model = save_full_model(scratch / "model", "qwen3", tied=True, **wide)
        self.trainer = FullTrainer(self.model, scratch / "run", world_size=2)
        self.engines = [self.engine(scratch / name) for name in ("one", "two")]
        self.trainer.wait_ready()
        for engine in self.engines:
            engine.wait_ready()
        self.registry = Registry(str(self.trainer.info), timeout=120)
        for engine, group in zip(self.engines, ("first", "second"), strict=True):
            self.registry.add(engine.url, group=group)

    def engine(self, place: Path) -> VllmServer:
        place.mkdir()
        environment = {"VLLM_SERVER_DEV_MODE": "1", "FANIN_RELAY": "host"}
        return VllmServer(self.model, place, *BACKEND, environment=environment, adapters=False)

    def step(self) -> int:
        return int(self.trainer.step()["step"])

    def answers(self) -> list[Any]:
        """Tokens with the logarithms of their probabilities, and checksums, of each engine."""
        told = []
        for engine in self.engines:
            body = {**VllmServer.completion("base", PROMPT, 8), "logprobs": 3}
            choice = engine.ask("POST", "/v1/completions", body)["choices"][0]
            sums = engine.ask("POST", "/weight_checker", {"action": "checksum"})["checksums"]
            told.append((choice["text"], choice["logprobs"]["token_logprobs"], sums))
        return told

    def sync(self, step: int, group: str, **more: Any) -> int:
        """Percent that came from relays."""
        result = self.registry.sync(step, group, prefetch=True, verify_served=True, **more)
        assert result.ok
        (entry,) = result.results.values()
        found = re.search(r"with relays \((\d+) %", entry.how)
        assert found, entry.how
        return int(found[1])

    def close(self) -> None:
        for engine in self.engines:
            engine.stop()
        self.trainer.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = Fleet(tmp_path_factory.mktemp("fleet"))
    yield one
    one.close()


def test_they_answer_as_without_relays(fleet: Fleet) -> None:
    """Each sync also proves by the ranks' digests what is served."""
    shares = []
    for _ in range(3):
        step = fleet.step()
        assert fleet.sync(step, "first") == 0
        shares.append(fleet.sync(step, "second"))
        with_relays = fleet.answers()
        assert with_relays[0] == with_relays[1]
        fleet.registry.sync(step, prefetch=False, again=True)
        assert fleet.answers() == with_relays
    assert max(shares) > 0, "relays have brought nothing"


def test_one_that_is_killed_is_read_no_more(fleet: Fleet) -> None:
    step = fleet.step()
    fleet.sync(step, "first")
    os.killpg(fleet.engines[0]._process.pid, signal.SIGKILL)
    fleet.registry.remove(fleet.engines.pop(0).url)
    assert fleet.sync(step, "second") == 0
