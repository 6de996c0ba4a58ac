# SPDX-License-Identifier: Apache-2.0
"""What an installed wheel must do with Python alone: serve a tensor of bytes and pull it."""
import importlib.metadata
import os
import sys
from pathlib import Path

import fanin
from fanin import _library

home = Path(fanin.__file__).resolve()
assert Path(sys.prefix).resolve() in home.parents, f"fanin is of {home}"
assert _library.library_path() == str(home.parent / "lib" / "libfanin.so.0"), _library.library_path()
assert importlib.metadata.version("fanin") == fanin.__version__
assert (home.parent / "py.typed").exists()
heavy = {"numpy", "torch", "vllm"} & set(sys.modules)
assert not heavy, f"import fanin imports {heavy}"
names = {e.group: e.value for e in importlib.metadata.distribution("fanin").entry_points}
assert names["vllm.general_plugins"] == "fanin.vllm:register", names
assert names["vllm.endpoint_plugins"] == "fanin.vllm:endpoint_plugin", names

weights, landed = bytearray(os.urandom(4096)), bytearray(4096)
with fanin.Server(world_id=os.urandom(16), rank=0, world_size=1) as server:
    server.put("lora:0", [fanin.shard_of("w", weights)])
    server.commit("lora:0", 7)
    with fanin.Client([f"127.0.0.1:{server.port}"]) as client:
        result = client.pull_into(0, {"w": landed}, step=7)
assert landed == weights
assert result.step == 7
print(f"ok: fanin {fanin.__version__} of {home}")
