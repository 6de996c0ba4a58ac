# SPDX-License-Identifier: Apache-2.0
"""A trainer that is written to vLLM's interface for trainers, and is not all of its job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from local_world import PATIENCE, PYTHON

pytest.importorskip("torch")

# vLLM's base classes are stand-ins: importing vLLM takes longer than all else here.
RANK = """
import datetime, json, sys, types
from dataclasses import dataclass
from typing import Generic, TypeVar

Info = TypeVar("Info")


@dataclass
class TrainerInitInfo:
    is_sender: bool = True


class TrainerWeightTransferEngine(Generic[Info]):
    def __init__(self, *, client, source=None, is_sender=True):
        self.client, self.source, self.is_sender = client, source, is_sender


for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
    sys.modules[name] = types.ModuleType(name)
base = types.ModuleType("vllm.distributed.weight_transfer.base")
base.TrainerInitInfo = TrainerInitInfo
base.TrainerWeightTransferEngine = TrainerWeightTransferEngine
sys.modules[base.__name__] = base

import torch
import torch.distributed as dist
from fanin.vllm.weights_trainer import TrainerEngine, TrainerInit


class Client:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)


rank, patience = int(sys.argv[1]), float(sys.argv[3])
dist.init_process_group(
    "gloo", init_method=sys.argv[2], rank=rank, world_size=3,
    timeout=datetime.timedelta(seconds=patience),
)
group = dist.new_group([1, 2])
if rank > 0:
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    engine = TrainerEngine.trainer_init(
        TrainerInit(is_sender=rank == 1, server={"group": group, "use_ucx": False}),
        client=Client(),
        source=model,
    )
    engine.send_weights()
    errors = []
    if rank == 2:
        engine._server.server.close()  # it cannot publish any more
    try:
        engine.send_weights()
    except Exception as error:
        errors.append(str(error))
    print(json.dumps({"step": engine.step, "calls": engine.client.calls, "errors": errors}))
    sys.stdout.flush()
sys.stdin.read()
"""


def test_ranks_outside_of_the_group_are_not_waited_for(tmp_path: Path) -> None:
    """Rank 0 of three has nothing to do with the weights and calls nothing."""
    where = f"file://{tmp_path}/rendezvous"
    path = os.pathsep.join((str(PYTHON), os.environ.get("PYTHONPATH", "")))
    with ExitStack() as stack:
        ranks = []
        for rank in range(3):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(rank), where, str(PATIENCE)],
                    env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            ranks.append(process)
        told = []
        for process in ranks[1:]:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "a rank ended without a word: see its standard error"
            told.append(json.loads(line))
    calls = ["init_weight_transfer_engine"]
    calls += ["start_weight_update", "update_weights", "finish_weight_update"]
    assert [one["calls"] for one in told] == [calls, []]
    assert [one["step"] for one in told] == [2, 2]
    # Whoever fails is named by its rank of the trainer.
    assert "rank 1 failed" in told[0]["errors"][0] and told[1]["errors"]
