# SPDX-License-Identifier: Apache-2.0
"""A worker that a test stops between two reads of a session (a child of worlds.py).

Options: addresses, run. It tells `reading` with a session open, reads the rest when it is told to,
and tells how the session ended, and which step a pull gave after that.
"""

from __future__ import annotations

import json
import sys

import fanin
import torch
from worlds import Control

KINDS = {"F32": torch.float32, "BF16": torch.bfloat16}


def main() -> None:
    control, options = Control(), json.loads(sys.argv[1])
    with fanin.Client(options["addresses"]) as client:
        tensors = {
            one.name: torch.empty(one.shape, dtype=KINDS[one.dtype])
            for one in client.catalog(options["run"])
        }
        packed = fanin.pack([fanin.shard_of(name, one) for name, one in tensors.items()])
        ended = ""
        with client.begin(options["run"], packed, timeout=600) as session:
            session.read(0, 2)
            control.say("reading")
            control.hear()
            try:
                session.read()
                session.end()
            except fanin.FaninError as error:
                ended = type(error).__name__
        result = client.pull_into(options["run"], packed, timeout=60)
        control.say("read", ended=ended, step=result.step)


if __name__ == "__main__":
    main()
