#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_captures.py

A trainer that captures a CUDA graph, in PyTorch's default mode, while a reader has the rank do all of
it for the first time: streams, pinned memory, handles, digests. The graph has to be whole, and so
has what was read: by stream into host memory, by stream into a device, verified, and by cuda_ipc.

Needs PyTorch, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77 without a
GPU. A line for each kind of read, and last "N passed, N failed".
"""

from __future__ import annotations

import os
import subprocess
import sys

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

SIZE = 8 << 20  # elements: more than one chunk
#: Path, the reader's device, verified.
READS = (("stream", "cpu", False), ("stream", "cuda", True), ("cuda_ipc", "cuda", False))


def read(address: str, path: str, device: str, verify: str) -> int:
    """The reader's process. Waits for a line before it connects."""
    import fanin

    into = torch.zeros(SIZE, device=device)
    torch.cuda.synchronize()
    sys.stdin.readline()
    with fanin.Client([address], path=path) as client:
        client.pull_into("0", {"t": into}, timeout=60.0, verify=verify == "True")
    print("good" if bool((into == 7).all()) else "other bytes", flush=True)
    return 0


def capture(path: str, device: str, verify: bool) -> str:
    """What went wrong, or ""."""
    import fanin

    tensor = torch.full((SIZE,), 7.0, device="cuda")
    other = torch.zeros(1024, device="cuda")
    server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1)
    server.put("lora:0", [fanin.shard_of("t", tensor)])
    torch.cuda.synchronize()
    server.commit("lora:0", 1)
    words = [sys.executable, __file__, f"127.0.0.1:{server.port}", path, device, str(verify)]
    reader = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    graph, said = torch.cuda.CUDAGraph(), ""
    try:
        with torch.cuda.graph(graph):
            other.add_(1)
            said = reader.communicate("\n", timeout=90)[0].strip()
            other.add_(1)
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        return f"the capture failed: {str(error).splitlines()[0]}; the reader: {said}"
    finally:
        reader.kill()
        reader.wait()
        server.close()
    if said != "good":
        return f"the reader: {said or 'nothing'}"
    return "" if bool((other == 2).all()) else "the graph does something else"


def main() -> int:
    """Runs all of them."""
    if len(sys.argv) > 1:
        return read(*sys.argv[1:])
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    failed = 0
    for what in READS:
        why = capture(*what)
        failed += bool(why)
        print(f"{'failed' if why else 'passed'}  {', '.join(map(str, what))}  {why}".rstrip())
    print(f"{len(READS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
