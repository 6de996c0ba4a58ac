#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""mapped_pulls.py PUBLISHED MAPPING... [--device cuda|cpu] [--pulls N] [--layers N] [--json FILE]

A whole model of two FSDP2 ranks (NCCL, a GPU each), published by fanin.torch.WeightServer, whose
optimizer writes it in place on a side stream, while one worker a MAPPING pulls it without pause
into memory laid out as an engine's modules. PUBLISHED and the mappings are what record_mapping.py
makes: tp1 is one worker on the last GPU, the files of tp2 or ep2 are two workers at once.

Each step adds 1 to every element (at every 64th step all go back), each pull compares every element
that it fills with what its step must have. So none may be torn, mixed or late. --layers takes only
the first of them. Needs PyTorch, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit
status 77 without two GPUs. The last line is "N passed, N failed".
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch_pulls import SLOWEST, Child, Control, Streams, on, torch

AROUND = 64  # steps after which values are again those of the start: BF16 counts to 256 exactly
BASES = 97


def layer(name: str) -> int:
    """Of a tensor or module; -1: of none."""
    found = re.search(r"\.layers\.(\d+)(\.|$)", f".{name}.")
    return int(found[1]) if found else -1


def start_of(number: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Values at step 0; integers that differ by tensor and place."""
    flat = torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.int32)
    return flat.mul_(31).add_(number * 17).remainder_(BASES).bfloat16().reshape(shape)


class Published:
    """The tensors that the trainer has, in the order of the file."""

    def __init__(self, options: dict[str, Any]):
        entries = json.loads(pathlib.Path(options["published"]).read_text())
        limit = options["layers"]
        wanted = [entry for entry in entries if limit is None or layer(entry["name"]) < limit]
        self.shapes = {entry["name"]: tuple(entry["shape"]) for entry in wanted}
        self.numbers = {name: number for number, name in enumerate(self.shapes)}

    def start(self, name: str, device: torch.device) -> torch.Tensor:
        return start_of(self.numbers[name], self.shapes[name], device)


# ------------------------------------------------------------------------------- trainers


def tree(published: Published, device: torch.device) -> torch.nn.Module:
    """Modules that have parameters of these names and values."""
    root = torch.nn.Module()
    for name in published.shapes:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, torch.nn.Parameter(published.start(name, device)))
    return root


class Trainer:
    def __init__(self, control: Control, options: dict[str, Any]):
        import torch.distributed as dist

        self.control, self.options = control, options
        rank = int(os.environ["RANK"])
        self.device = on(options["device"], rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=options["rendezvous"],
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=SLOWEST),
        )
        self.dist, self.rank = dist, rank

    def goes_on(self) -> bool:
        """What rank 0 has heard, for both."""
        flag = torch.zeros(1)
        if self.rank == 0 and self.control.heard() is None:
            flag += 1
        self.dist.broadcast(flag, 0)
        return bool(flag)

    def run(self) -> None:
        from fanin.torch import WeightServer
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (2,))
        model = tree(Published(self.options), self.device)
        for each in model.get_submodule("model.layers").children():
            fully_shard(each, mesh=mesh)
        fully_shard(model, mesh=mesh)
        streams, step = Streams(self.device), 0
        for value in model.parameters():
            value.grad = torch.full_like(value, -1)
        gradients = [value.grad for value in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with WeightServer(model, base_port=0) as server:
            server.publish(0)
            self.control.say("ready", addresses=server.addresses)
            while self.goes_on():
                step += 1
                if step % AROUND < 2:  # back to the start, and on from there
                    torch._foreach_zero_(gradients)
                    torch._foreach_add_(gradients, -1.0 if step % AROUND else AROUND - 1.0)
                with streams.aside(), server.updating(step):
                    optimizer.step()
                streams.work()
            self.control.say("stopped", steps=step)
        if self.rank != 0:
            self.control.hear(SLOWEST)  # the word to stop, which rank 0 has passed on
        self.dist.destroy_process_group()


# -------------------------------------------------------------------------------- workers


Key = tuple[str, str]


class Filled(NamedTuple):
    """Elements of a module's tensor that are pulled, and beside them their values of step 0."""

    name: str
    key: Key
    view: torch.Tensor
    start: torch.Tensor


class Worker:
    def __init__(self, control: Control, options: dict[str, Any]):
        from fanin.mapping import load

        self.control = control
        self.device = on(options["device"], -options["workers"] + options["worker"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        published = Published(options)
        mapping = load(options["mapping"])
        limit = options["layers"]
        modules = [m.path for m in mapping.modules if limit is None or layer(m.path) < limit]
        self.live = mapping.allocate(self.device, modules)
        for tensor in self.live.values():
            tensor.zero_()
        self.start = {key: torch.zeros_like(tensor) for key, tensor in self.live.items()}
        self.packed = mapping.pack(self.live, modules)
        self.boxes = list(self.filled(mapping, frozenset(modules), published))
        self.checked = self.compared()

    def filled(
        self, mapping: Any, modules: frozenset[str], published: Published
    ) -> Iterator[Filled]:
        """Each box that is filled; and writes the values of step 0 to where they are kept."""
        for module, leaf, source in mapping.sources():
            if module.path not in modules:
                continue
            whole = published.start(source.name, self.device)
            key = module.path, leaf.name
            for piece in source.pieces:
                box = tuple(
                    slice(o, o + e) for o, e in zip(piece.offset, piece.extent, strict=True)
                )
                views = []
                for tensor in (self.live[key], self.start[key]):
                    size = tensor.element_size()
                    steps = [stride // size for stride in piece.stride]
                    views.append(tensor.as_strided(piece.extent, steps, piece.at // size))
                views[1].copy_(whole[box])
                yield Filled(source.name, key, *views)

    def compared(self) -> list[Filled]:
        """As few tensors as hold all boxes: whole ones, but for those that have padding."""
        sizes = collections.Counter[Key]()
        for one in self.boxes:
            sizes[one.key] += one.view.numel()
        whole = {key for key, size in sizes.items() if size == self.live[key].numel()}
        rest = [one for one in self.boxes if one.key not in whole]
        return rest + [Filled("", key, self.live[key], self.start[key]) for key in whole]

    def wrong(self, step: int) -> str:
        """The first box that is not what the step must have, ``""``: none is."""
        counted = step % AROUND
        fine = torch.ones((), dtype=torch.bool, device=self.device)
        for one in self.checked:
            fine &= (one.view - one.start == counted).all()
        if bool(fine):
            return ""
        for one in self.boxes:
            differences = one.view - one.start
            different = differences != counted
            if bool(different.any()):
                found = float(differences[different][0])
                return f"{one.name}: {int(different.sum())} elements, one {found}, not {counted}"
        return "elements differed when they were first compared, and then did not"

    def pulls(self, addresses: list[str], count: int, seconds: float) -> dict[str, Any]:
        import fanin

        limit = time.monotonic() + seconds
        times, steps, torn, stale, paths = [], [], [], 0, set()
        with fanin.Client(addresses) as client:
            while len(times) < count and time.monotonic() < limit:
                stream = None
                if self.device.type == "cuda":
                    current = torch.cuda.current_stream()
                    stream = fanin.Stream(current.cuda_stream, self.device.index)
                begun = time.perf_counter()
                result = client.pull_into(
                    "full:0",
                    self.packed.tensors,
                    timeout=SLOWEST,
                    stream=stream,
                    dtype=self.packed.dtype,
                    at_least=steps[-1] + 1 if steps else None,
                )
                times.append(time.perf_counter() - begun)
                self.packed.settle()
                steps.append(result.step)
                stale += result.stale
                paths.add(result.path)
                why = self.wrong(result.step)
                if why:
                    torn.append(f"step {result.step}: {why}")
        return {
            "pulls": len(times),
            "steps": len(set(steps)),
            "bytes": result.bytes,
            "torn": torn[:5],
            "stale": stale,
            "paths": sorted(paths),
            "median_ms": 1e3 * statistics.median(times),
        }

    def run(self) -> None:
        self.control.say("here")
        told = self.control.hear(SLOWEST)
        told.pop("event")
        self.control.say("pulled", **self.pulls(**told))


# ----------------------------------------------------------------------------------- test


def check(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """AssertionError: a pull was torn, or there were too few of them to tell."""
    common = {key: getattr(options, key) for key in ("device", "layers", "published")}
    common["rendezvous"] = f"file://{folder}/rendezvous"
    script = str(pathlib.Path(__file__).resolve())
    ranks = [
        Child(f"rank{rank}", script, {**common, "role": "trainer"}, folder, RANK=str(rank))
        for rank in range(2)
    ]
    workers = []
    for number, mapping in enumerate(options.mapping):
        role = {**common, "role": "worker", "mapping": mapping}
        role |= {"worker": number, "workers": len(options.mapping)}
        workers.append(Child(f"worker{number}", script, role, folder))
    try:
        for one in workers:
            one.expect("here", SLOWEST)
        addresses = [rank.expect("ready", SLOWEST) for rank in ranks][0]["addresses"]
        for one in workers:
            one.tell("pull", addresses=addresses, count=options.pulls, seconds=options.seconds)
        results = [one.expect("pulled", options.seconds + SLOWEST) for one in workers]
        for rank in ranks:
            rank.tell("stop")
        steps = [rank.expect("stopped", SLOWEST) for rank in ranks][0]["steps"]
        for result in results:
            assert not result["torn"], f"{len(result['torn'])} torn: {result['torn'][0]}"
            assert result["pulls"] >= options.pulls, f"{result['pulls']} pulls only, in time"
            assert result["steps"] == result["pulls"], "a step was pulled twice"
            if options.device == "cuda":
                assert result["paths"] == ["cuda_ipc"], f"paths {result['paths']}"
        return {"steps": steps, "workers": results}
    except AssertionError:
        for one in (*workers, *ranks):
            print(one.tail(), file=sys.stderr)
        raise
    finally:
        for one in (*workers, *ranks):
            one.close()


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        control, role = Control(), json.loads(sys.argv[1])
        (Worker if role["role"] == "worker" else Trainer)(control, role).run()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("published")
    parser.add_argument("mapping", nargs="+")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--pulls", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=100.0, help="that the pulls may take")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        print("skipped: no two GPUs")
        return 77
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mapped-pulls-", dir=room) as folder:
        try:
            result = check(options, pathlib.Path(folder))
        except AssertionError:
            traceback.print_exc()
            print("0 passed, 1 failed")
            return 1
    if options.json:
        with contextlib.suppress(OSError):
            pathlib.Path(options.json).write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    print("1 passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
