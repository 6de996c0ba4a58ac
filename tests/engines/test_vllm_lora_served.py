# SPDX-License-Identifier: Apache-2.0
"""A real vLLM over HTTP whose adapters are compared with those that are trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin.check
import pytest
from fanin.errors import HostError, NotFoundError, RequestError
from live_trainer import LiveTrainer
from vllm_server import MODULES, VllmServer, save_model

PATH = "model.layers.1.mlp.down_proj"
NAME = f"base_model.model.{PATH}.lora_B.weight"


class Place:
    """An engine of BF16, and two FSDP2 ranks that train adapters in F32."""

    def __init__(self, scratch: Path) -> None:
        model = save_model(scratch / "model")
        self.engine = VllmServer(
            model,
            scratch,
            *("--dtype", "bfloat16", "--max-loras", "1", "--max-cpu-loras", "4"),
            *("--worker-extension-cls", "hurting_slots.HurtingSlots"),
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
        try:
            self.trainer = LiveTrainer(model, scratch / "run", digests=True).wait_ready()
            self.engine.wait_ready()
        except BaseException:
            self.engine.stop()
            raise

    def close(self) -> None:
        self.engine.stop()
        self.trainer.close()

    def load(self) -> dict[str, Any]:
        """The newest step, and what the engine says of its adapter."""
        name = f"a-run0-step{self.trainer.published}"
        body = {"lora_name": name, "trainer_addresses": self.trainer.addresses}
        self.engine.ask("POST", "/load_lora_adapter_nixl", body, 120)
        self.engine.tokens(name, [5, 9, 13], 4)
        (one,) = [one for one in self.status()["adapters"] if one["name"] == name]
        return dict(one)

    def status(self) -> dict[str, Any]:
        return dict(self.engine.ask("GET", "/nixl/status"))

    def served(self) -> list[str]:
        """What differs."""
        try:
            report = fanin.check.served(self.engine.url, self.trainer.addresses, "lora:0")
        except HostError as error:
            return list(error.report.different)  # type: ignore[attr-defined]
        assert report.step == self.trainer.published and report.ranks == 2
        assert report.tensors == 2 * 2 * len(MODULES) and not report.unseen
        return []

    def scribble(self, whole: bool) -> None:
        body = {"method": "scribble", "args": [PATH, whole]}
        self.engine.ask("POST", "/collective_rpc", body)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    one = Place(tmp_path_factory.mktemp("served"))
    yield one
    one.close()


def test_adapters_of_either_landing(place: Place) -> None:
    with pytest.raises(RequestError, match="no adapter of step 0 of lora:0"):
        place.served()
    assert place.load()["landing"] == "directory"
    assert place.served() == []
    deadline = time.monotonic() + 60
    while not place.status()["slots"]["layouts"] and time.monotonic() < deadline:
        time.sleep(0.2)
    place.trainer.step(record=False)
    with pytest.raises(RequestError, match="no adapter of step 1 of lora:0"):
        place.served()
    assert place.load()["landing"] == "slot"
    assert place.served() == []


def test_what_lies_in_a_slot_otherwise(place: Place) -> None:
    place.trainer.step(record=False)
    place.load()
    for whole in (False, True):  # the second as if vLLM had no place for the module
        place.scribble(whole)
        assert place.served() == [f"{NAME}: other values than those that are trained (BF16*2)"]


def test_who_has_no_digests(place: Place) -> None:
    with pytest.raises(RequestError, match="only vLLM's server"):
        fanin.check.served(object(), place.trainer.addresses, "lora:0")
    with pytest.raises(NotFoundError, match="lora:other"):
        fanin.check.served(place.engine.url, place.trainer.addresses, "lora:other", timeout=3)
