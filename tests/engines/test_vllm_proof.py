# SPDX-License-Identifier: Apache-2.0
"""A real vLLM behind HTTP that fanin.sync compares with its trainer before it answers.

One server for the file. The tests run in order, each on what the earlier ones left.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fanin.sync import Registry, SyncError
from fanin.torch import WeightServer
from full_models import random_model, save_full_model
from vllm_server import Refused, VllmServer

BACKEND = ("--weight-transfer-config", '{"backend": "fanin"}', "--dtype", "float32")
PROMPT = [5, 9, 13, 17, 21]


class Place:
    """right: a trainer. rounding: another one of the same model, which rounds what it publishes."""

    def __init__(self, scratch: Path) -> None:
        self.engine = VllmServer(
            save_full_model(scratch / "model", "qwen3", dtype="float32"),
            scratch,
            *BACKEND,
            environment={"VLLM_SERVER_DEV_MODE": "1"},
            adapters=False,
        )
        self.model = random_model("qwen3", dtype="float32")
        self.right = WeightServer(self.model, base_port=0)
        self.rounding = WeightServer(self.model, base_port=0, snapshot=True, cast="BF16")
        self.tensors = len(list(self.model.parameters()))

    def registry(self, server: WeightServer, **more: Any) -> Registry:
        registry = Registry(server.addresses, timeout=120, **more)
        registry.add(self.engine.url)
        return registry

    def command(self, server: WeightServer) -> tuple[int, str]:
        command = [sys.executable, "-m", "fanin.check", self.engine.url]
        done = subprocess.run(
            [*command, ",".join(server.addresses)], capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        self.engine.stop()
        self.right.close()
        self.rounding.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    one = Place(tmp_path_factory.mktemp("proof"))
    try:
        one.engine.wait_ready()
        yield one
    finally:
        one.close()


def test_the_first_update_is_compared(place: Place) -> None:
    place.right.publish(1)
    registry = place.registry(place.right)
    (told,) = registry.sync(1).results.values()
    assert told.verified == place.tensors and not told.note, told
    assert place.command(place.right)[0] == 0
    with place.right.updating(2, digests=True), torch.no_grad():
        place.model.model.norm.weight.mul_(2)
    (told,) = registry.sync(2).results.values()
    assert told.verified is None and "verify" not in told.seconds
    # Weights from disk, and then the next step.
    body = {"method": "reload_weights"}
    place.engine.ask("POST", "/collective_rpc", body, 120)
    with place.right.updating(3, digests=True):
        pass
    (told,) = registry.sync(3).results.values()
    assert told.verified == place.tensors


def test_an_engine_that_differs(place: Place) -> None:
    place.rounding.publish(1)
    assert place.registry(place.rounding, verify_served=False).sync(1).ok
    status, said = place.command(place.rounding)
    assert status == 14 and said.count("rounded to BF16 on the way") == place.tensors, said
    # An explicit cast is a note, unless the sync demands the proof.
    (told,) = place.registry(place.rounding).sync(1).results.values()
    assert told.ok and told.verified == 0 and "rounded to BF16 on the way" in told.note, told
    with pytest.raises(SyncError, match=f"{place.tensors} tensors are not served .* rounded") as c:
        place.registry(place.rounding, verify_served=True).sync(1)
    (told,) = c.value.result.results.values()
    assert told.phase == "verify" and told.paused
    # Nobody else resumes it either, until a whole step has come that is the right one.
    with pytest.raises(Refused, match="not served as step 1 was trained"):
        place.engine.ask("POST", "/resume")
    (told,) = place.registry(place.right).sync(3).results.values()
    assert told.ok and told.verified == place.tensors
    assert len(place.engine.tokens("base", PROMPT, 4)) == 4
