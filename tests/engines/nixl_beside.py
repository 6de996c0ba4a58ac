# SPDX-License-Identifier: Apache-2.0
"""A process that uses fanin and NVIDIA's nixl, in an order (a child of worlds.py).

Options: role ('trainer', 'worker' or 'alone') and first ('fanin' or 'nixl'), the library that is
imported, makes its objects and moves bytes before the other is imported. A trainer lends one tensor
by both; a worker reads it by both, by each again after the other was there. 'alone' uses nixl and
never fanin.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import torch
from worlds import PATIENCE, Control

ROWS, COLUMNS = 512, 1024
NAME = "model.layers.0.self_attn.q_proj.lora_{}.weight"


def values(rank: int = 0) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + rank


class Nixl:
    """An agent; imports nixl when made."""

    def __init__(self, name: str):
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(name, nixl_agent_config(True, False, 0))

    def lend(self, tensor: torch.Tensor) -> dict[str, Any]:
        self.agent.register_memory(tensor)
        metadata = self.agent.get_agent_metadata().hex()
        return {"metadata": metadata, "address": tensor.data_ptr(), "bytes": tensor.nbytes}

    def connect(self, lent: dict[str, Any]) -> None:
        peer = self.agent.add_remote_agent(bytes.fromhex(lent["metadata"]))
        self.into = torch.zeros(ROWS, COLUMNS)
        self.agent.register_memory(self.into)
        here = self.agent.get_xfer_descs([(self.into.data_ptr(), lent["bytes"], 0)], "DRAM")
        there = self.agent.get_xfer_descs([(lent["address"], lent["bytes"], 0)], "DRAM")
        self.transfer = self.agent.initialize_xfer("READ", here, there, peer)

    def read(self) -> None:
        self.into.zero_()
        state = self.agent.transfer(self.transfer)
        limit = time.monotonic() + PATIENCE
        while state == "PROC":
            assert time.monotonic() < limit, "nixl's transfer does not end"
            state = self.agent.check_xfer_state(self.transfer)
        assert state == "DONE", f"nixl's transfer: {state}"
        assert torch.equal(self.into, values()), "nixl read other bytes"


class Fanin:
    """A server, or clients of both paths; imports fanin when made."""

    def __init__(self) -> None:
        import fanin

        self.fanin = fanin

    def serve(self, tensor: torch.Tensor) -> str:
        world_id = os.urandom(16)
        self.server = self.fanin.Server(world_id=world_id, rank=0, world_size=1)
        parts = {"A": tensor, "B": tensor.t()}
        self.server.put(
            "lora:0", [self.fanin.shard_of(NAME.format(p), t) for p, t in parts.items()]
        )
        self.server.set_metadata("lora:0", {"lora_alpha": "16", "base_model_name_or_path": "none"})
        self.server.commit("lora:0", 1)
        return f"127.0.0.1:{self.server.port}"

    def connect(self, address: str) -> None:
        self.clients = {p: self.fanin.Client([address], path=p) for p in ("cma", "stream")}

    def pull(self, folder: pathlib.Path) -> None:
        for path, client in self.clients.items():
            into = torch.zeros(ROWS, COLUMNS)
            result = client.pull_into("0", {NAME.format("A"): into})
            assert result.path == path, f"{result.path}: {result.path_reason}"
            assert torch.equal(into, values()), f"fanin read other bytes by {path}"
            client.pull_adapter("0", folder / f"{path}-{time.monotonic_ns()}")


def trainer(control: Control, first: str) -> None:
    tensor = values()
    if first == "fanin":
        fanin_part = Fanin()
        address = fanin_part.serve(tensor)
        nixl_part = Nixl("trainer")
        lent = nixl_part.lend(tensor)
    else:
        nixl_part = Nixl("trainer")
        lent = nixl_part.lend(tensor)
        fanin_part = Fanin()
        address = fanin_part.serve(tensor)
    control.say("ready", address=address, lent=lent)
    control.hear()
    fanin_part.server.close()
    control.say("closed")


def worker(control: Control, first: str, options: dict[str, Any]) -> None:
    folder = pathlib.Path(options["out"])

    def start_fanin() -> Fanin:
        part = Fanin()
        part.connect(options["address"])
        part.pull(folder)
        return part

    def start_nixl() -> Nixl:
        part = Nixl("worker")
        part.connect(options["lent"])
        part.read()
        return part

    other = "nixl" if first == "fanin" else "fanin"
    assert other not in sys.modules, f"{other} is there before its turn"
    if first == "fanin":
        fanin_part = start_fanin()
        nixl_part = start_nixl()
    else:
        nixl_part = start_nixl()
        fanin_part = start_fanin()
    for _ in range(3):
        fanin_part.pull(folder)
        nixl_part.read()
    control.say("pulled")
    for client in fanin_part.clients.values():
        client.close()
    nixl_part.read()
    control.say("closed")


def alone(control: Control) -> None:
    Nixl("alone").lend(values())
    assert "fanin" not in sys.modules
    control.say("closed")


def main() -> None:
    control = Control()
    options = json.loads(sys.argv[1])
    if options["role"] == "alone":
        alone(control)
    elif options["role"] == "trainer":
        trainer(control, options["first"])
    else:
        worker(control, options["first"], options)


if __name__ == "__main__":
    main()
