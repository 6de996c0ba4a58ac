# SPDX-License-Identifier: Apache-2.0
"""Pulls into PyTorch's tensors by name that are refused while another one is under way."""

from __future__ import annotations

import ctypes
import gc
import weakref

import fanin
import pytest
import torch

NAMES = [f"t{i}" for i in range(8)]


def test_what_the_first_call_reads_stays() -> None:
    """The library reads the first call's description as long as that runs."""
    with fanin.Server(world_id=b"n" * 16, rank=0, world_size=1, use_ucx=False) as server:
        server.put("lora:0", [fanin.shard_of(name, torch.full((4,), 1.0)) for name in NAMES])
        server.commit("lora:0", 1)
        with fanin.Client([f"127.0.0.1:{server.port}"], use_ucx=False, path="stream") as client:
            into = {name: torch.zeros(4) for name in NAMES}
            alive: list[bool] = []

            def again(*_: int) -> None:
                (described,) = client._named._kept
                arrays = [one for one in described._buffers if isinstance(one, ctypes.Array)]
                memory = [weakref.ref(one) for one in arrays]
                del arrays
                for call in (client.pull_into, client.begin):
                    with pytest.raises(fanin.StateError, match="under way"):
                        call("0", into)
                gc.collect()
                alive.extend(ref() is not None for ref in memory)

            client.pull_into("0", into, progress=again)
            assert alive and all(alive)
            assert all(bool((one == 1).all()) for one in into.values())
            for _ in range(3):
                client.pull_into("0", into)
