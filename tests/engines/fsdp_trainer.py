# SPDX-License-Identifier: Apache-2.0
"""One rank of a trainer of test_fsdp_exits.py: FSDP2 and PEFT over gloo, with an AdapterServer (a
child of worlds.py).

It publishes step 1, tells 'ready' and ends as it is told to.
"""

from __future__ import annotations

import json
import sys

import torch.distributed as dist
from fanin.torch import AdapterServer
from models import ATTENTION, TINY
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from worlds import Control, join_world


class Planned(Exception):
    """An error that the test asked for."""


def end(how: str, server: AdapterServer) -> None:
    if how == "close, destroy":
        server.close()
        dist.destroy_process_group()
    elif how == "destroy, close":
        dist.destroy_process_group()
        server.close()
    elif how == "destroy":
        dist.destroy_process_group()
    elif how == "exception":
        raise Planned("an exception that nobody catches")
    elif how == "exception in an update":
        with server.updating(1000):
            raise Planned("an exception that nobody catches")
    elif how == "exception in with":
        with server:
            raise Planned("an exception that nobody catches")
    elif how == "status 3":
        sys.exit(3)
    elif how != "nothing":
        raise ValueError(how)


def main() -> None:
    control = Control()
    join_world(json.loads(sys.argv[1]))
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=ATTENTION)
    base = AutoModelForCausalLM.from_config(TINY["qwen2"])
    base.name_or_path = "qwen2"  # PEFT writes it into the adapter's configuration
    model = get_peft_model(base, config)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    server = AdapterServer(model, base_port=0)
    server.publish(1)
    control.say("ready", addresses=list(server.addresses))
    how = control.hear()["how"]
    control.say("ending")
    end(how, server)


if __name__ == "__main__":
    main()
