#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""slot_landing.py FOLDER [--device cuda|cpu] [--ranks N] [--steps N] [--layers N] [--json FILE]

How an adapter lands in vLLM's LoRA slots on a GPU, by the plugin's own code (Image of
fanin.engine.slot_images), in stacks as vLLM has them, with max_lora_rank of twice the adapter's r;
vLLM itself is not needed. FOLDER is what tests/gpu/record_slots.py made. Ranks whose BF16 shards
are cut by rows, as FSDP2 does, lie round robin on the GPUs, the last worker of each layout on the
last one. Each step is pulled while a CUDA graph reads the slots on the engine's stream, then
scaled, and put into the slot that was cleared on that stream:

  the slot that a request uses is the same in every replay
  the replay behind the put sees the whole adapter, those before none of it
  every byte of the slot is what vLLM makes: scaled on the CPU as LoRALayerWeights.optimize does,
  zeros beyond the rank; also when the image was moved to the host's memory before

Needs PyTorch, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77 without GPUs
or mappings. The last line is "N passed, N failed"; before it, JSON with medians in ms.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from types import SimpleNamespace
from typing import Any

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "engines"))

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
from worlds import Child, Control  # noqa: E402

SLOWEST = 150.0  # seconds that any wait may take
SLOTS, FILLED = 2, 1
RUN = "full:slots"
FINITE = 0xBFFF  # bits of a BF16 that is less than 2
OTHER = 7.0  # what the other slot holds
SCALE = 10 / 3
TIMES = 2  # max_lora_rank, in r
BY_CPU = 1  # layers of which the CPU says what is right; of the others the GPU does, as a whole


def layer(name: str) -> int:
    """Of a tensor or module."""
    return int(name.split(".layers.")[1].split(".")[0])


def pattern(number: int, shape: tuple[int, ...], first: int, device: Any) -> torch.Tensor:
    """Rows from ``first`` on of tensor ``number``: finite, and they differ by tensor and place."""
    count, start = torch.Size(shape).numel(), first * torch.Size(shape[1:]).numel()
    flat = torch.arange(start, start + count, device=device, dtype=torch.int32)
    flat.mul_(31).add_(number * 17).bitwise_and_(FINITE)
    return flat.short().reshape(shape).view(torch.bfloat16)


def on(options: dict[str, Any], index: int) -> torch.device:
    if options["device"] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def published(options: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    entries = json.loads((pathlib.Path(options["folder"]) / "slots.json").read_text())
    limit = options["layers"]
    wanted = [e for e in entries if limit is None or layer(e["name"]) < limit]
    return {entry["name"]: tuple(entry["shape"]) for entry in wanted}


# --------------------------------------------------------------------------------- trainers


class Rank:
    """A trainer rank: rows of every tensor, one allocation each, as FSDP2 has them."""

    def __init__(self, control: Control, options: dict[str, Any]):
        import fanin

        self.control = control
        rank, ranks = options["rank"], options["ranks"]
        device = on(options, rank)
        self.server = fanin.Server(
            world_id=bytes.fromhex(options["world"]), rank=rank, world_size=ranks
        )
        self.kept, shards = [], []
        for number, (name, shape) in enumerate(published(options).items()):
            chunk = -(-shape[0] // ranks)
            first = min(rank * chunk, shape[0])
            rows = pattern(number, (min(chunk, shape[0] - first), *shape[1:]), first, device)
            self.kept.append(rows)
            offset = (first, *(0,) * (len(shape) - 1))
            shards.append(fanin.shard_of(name, rows, shape=shape, offset=offset))
        settle(device)
        self.server.put(RUN, shards)
        self.server.commit(RUN, 1)

    def run(self) -> None:
        self.control.say("here", address=f"127.0.0.1:{self.server.port}")
        self.control.hear(20 * SLOWEST)
        self.server.close()


# ---------------------------------------------------------------------------------- worker


def parts_of(mapping: Any) -> list[Any]:
    from fanin.engine.slot_images import Part

    found = []
    for module in mapping.modules:
        for leaf in module.leaves:
            attribute, _, place = leaf.name.partition(".")
            scale = SCALE if "lora_b" in attribute else 1.0
            found.append(Part(module.path, attribute, int(place), leaf.name, torch.bfloat16, scale))
    return found


class Engine:
    """What the plugin's code sees of vLLM's manager; the stacks of all slots."""

    def __init__(self, mapping: Any, device: torch.device):
        self.device = device
        self.modules: dict[str, Any] = {}
        self.stacks: dict[tuple[str, str], torch.Tensor] = {}
        for module in mapping.modules:
            made: dict[str, tuple[torch.Tensor, ...]] = {}
            for leaf in module.leaves:
                attribute = leaf.name.partition(".")[0]
                shape = list(leaf.shape)
                shape[-2 if "lora_a" in attribute else -1] *= TIMES
                stack = torch.full((SLOTS, *shape), OTHER, dtype=torch.bfloat16, device=device)
                made[attribute] = (*made.get(attribute, ()), stack)
                self.stacks[module.path, leaf.name] = stack
            self.modules[module.path] = SimpleNamespace(
                **made, adapter_enabled=torch.zeros(SLOTS + 1, dtype=torch.int, device=device)
            )

    def clear(self) -> None:
        """As vLLM's reset_lora."""
        for stack in self.stacks.values():
            stack[FILLED] = 0


class Reader:
    """A model that runs on a stream of its own as a CUDA graph, and reads the slots."""

    def __init__(self, engine: Engine):
        cuda = engine.device.type == "cuda"
        self.some = list(engine.stacks.values())[:: max(len(engine.stacks) // 24, 1)]
        self.seen = torch.zeros(len(self.some), SLOTS, dtype=torch.int64, device=engine.device)
        self.stream, self.graph = None, None
        if cuda:
            self.stream, self.graph = torch.cuda.Stream(engine.device), torch.cuda.CUDAGraph()
            self.stream.wait_stream(torch.cuda.current_stream(engine.device))
            with torch.cuda.stream(self.stream):
                self._read()
                self.stream.synchronize()
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self._read()

    def _read(self) -> None:
        for number, stack in enumerate(self.some):
            bits = stack.view(torch.int16).flatten(1)
            self.seen[number].copy_(bits.sum(1, dtype=torch.int64))

    def read(self) -> torch.Tensor:
        """What it sees, in the order of the stream; a copy that stays."""
        if self.graph is None:
            self._read()
        else:
            self.graph.replay()
        return self.seen.clone()


class Worker:
    def __init__(self, control: Control, options: dict[str, Any]):
        from fanin.mapping import load
        from fanin.mapping._mapping import Mapping

        self.control, self.options = control, options
        self.device = on(options, -options["workers"] + options["worker"])
        folder = pathlib.Path(options["folder"])
        whole = load(folder / f"slots-{options['layout']}-{options['worker']}.json")
        limit = options["layers"]
        modules = tuple(m for m in whole.modules if limit is None or layer(m.path) < limit)
        self.mapping = Mapping(whole.about, whole.keys, whole.digest, modules, whole.unwanted)
        self.numbers = {name: number for number, name in enumerate(published(options))}

    def expected(self, key: tuple[str, str], leaf: Any, like: torch.Tensor) -> torch.Tensor:
        """One stack, both slots."""
        device = torch.device("cpu") if layer(key[0]) < BY_CPU else self.device
        made = torch.full(like.shape, OTHER, dtype=like.dtype, device=device)
        made[FILLED] = 0
        there = torch.zeros(torch.Size(leaf.shape).numel(), dtype=like.dtype, device=device)
        for source in leaf.sources:
            values = pattern(self.numbers[source.name], source.shape, 0, device)
            if "lora_b" in leaf.name:
                values *= SCALE
            for piece in source.pieces:
                places = zip(piece.offset, piece.extent, strict=True)
                box = tuple(slice(o, o + n) for o, n in places)
                steps = [step // 2 for step in piece.stride]
                there.as_strided(piece.extent, steps, piece.at // 2).copy_(values[box])
        steps = [step // 2 for step in leaf.stride]
        place = tuple(slice(n) for n in leaf.shape)
        made[FILLED][place] = there.as_strided(leaf.shape, steps)
        return made.to(self.device)

    def wrong(self, engine: Engine) -> list[str]:
        found = []
        for module in self.mapping.modules:
            for leaf in module.leaves:
                key = module.path, leaf.name
                stack = engine.stacks[key]
                right = self.expected(key, leaf, stack)
                if not torch.equal(right.view(torch.int16), stack.view(torch.int16)):
                    found.append(".".join(key))
        return found

    def step(self, engine: Engine, reader: Reader, image: Any, client: Any) -> dict[str, Any]:
        """One pull beside a running graph, and its landing."""
        other = reader.stream
        with torch.cuda.stream(other) if other else contextlib.nullcontext():
            engine.clear()
            before = [reader.read() for _ in range(20)]
            begun = time.perf_counter()
            client.pull_into(RUN, image.packed.tensors, timeout=SLOWEST, stream=image.stream)
            pulled = time.perf_counter()
            image.finish()
            finished = time.perf_counter()
            before.append(reader.read())
            settle(self.device)
            putting = time.perf_counter()
            image.put(engine, FILLED)
            told = time.perf_counter()
            after = reader.read()
            settle(self.device)
            put = time.perf_counter()
        busy = {tuple(seen[:, 1 - FILLED].tolist()) for seen in (*before, after)}
        empty = all(not bool(seen[:, FILLED].any()) for seen in before)
        return {
            "pull": 1e3 * (pulled - begun),
            "scale": 1e3 * (finished - pulled),
            "engine": 1e3 * (told - putting),
            "put": 1e3 * (put - putting),
            "steady": len(busy) == 1,
            "empty": empty,
            "seen": after[:, FILLED].tolist(),
        }

    def run(self) -> None:
        import fanin
        from fanin.engine.slot_images import Image
        from fanin.engine.slot_images import Layout

        self.control.say("here")
        told = self.control.hear(SLOWEST)
        parts = tuple(parts_of(self.mapping))
        switched = tuple(m.path for m in self.mapping.modules if "experts" in m.path)
        layout = Layout(self.mapping, parts, switched, ())
        engine = Engine(self.mapping, self.device)
        reader = Reader(engine)
        cuda = self.device.type == "cuda"
        # In turn, as steps have them.
        images = [Image(layout, device=self.device if cuda else None) for _ in range(2)]
        image = images[-1]
        settle(self.device)
        with fanin.Client(told["addresses"]) as client:
            steps = [
                self.step(engine, reader, images[number % 2], client)
                for number in range(2 * told["steps"])
            ]
        wrong, again = self.wrong(engine), reader.read().tolist()
        moved = 0.0
        if cuda:
            begun = time.perf_counter()
            image.to_host()
            moved = 1e3 * (time.perf_counter() - begun)
            engine.clear()
            image.put(engine, FILLED)
            settle(self.device)
            wrong += self.wrong(engine)
        on_now = [int(engine.modules[path].adapter_enabled[FILLED]) for path in switched]
        result = {"wrong": wrong[:3], "moved": moved, "switched": all(on_now)}
        result["seen"] = all(
            one["seen"] == [pair[FILLED] for pair in again] and any(one["seen"]) for one in steps
        )
        for key in ("steady", "empty"):
            result[key] = all(one.pop(key) for one in steps)
        for one in steps:
            one.pop("seen")
        medians = {key: statistics.median(s[key] for s in steps[4:]) for key in steps[0]}
        self.control.say("done", **result, **medians)


# ------------------------------------------------------------------------------------- test


def layouts(folder: pathlib.Path) -> dict[str, int]:
    """Those that are there, with how many workers they have."""
    found = collections.Counter(path.stem.split("-")[1] for path in folder.glob("slots-*-*.json"))
    return dict(sorted(found.items(), key=lambda one: (one[1], one[0])))


def land(options: argparse.Namespace, folder: pathlib.Path, layout: str, size: int) -> Any:
    """What the layout's last worker tells of its steps. AssertionError: one did not land well."""
    common = {key: getattr(options, key) for key in ("device", "layers", "ranks")}
    common |= {"folder": str(options.folder), "world": os.urandom(16).hex()}
    ranks = [
        Child(f"{layout}-rank{rank}", str(HERE), {**common, "rank": rank}, folder)
        for rank in range(options.ranks)
    ]
    role = {**common, "layout": layout, "worker": size - 1, "workers": size}
    worker = Child(f"{layout}-worker", str(HERE), role, folder)
    try:
        addresses = [one.expect("here", SLOWEST)["address"] for one in ranks]
        worker.expect("here", SLOWEST)
        worker.tell("land", addresses=addresses, steps=options.steps)
        told = worker.expect("done", SLOWEST)
        assert not told["wrong"], f"{told['wrong']} are not what vLLM makes of it"
        assert told["steady"], "the slot of a request in use changed"
        assert told["empty"], "a slot was written before its put"
        assert told["seen"], "a replay behind a put did not see all of it"
        assert told["switched"], "a module's switch is not on"
        return told
    except AssertionError:
        for one in (worker, *ranks):
            print(one.tail(12), file=sys.stderr)
        raise
    finally:
        for one in (worker, *ranks):
            one.close()


def check(options: argparse.Namespace, folder: pathlib.Path) -> int:
    """Of each layout; how many have failed."""
    found, failed = {}, 0
    for layout, size in layouts(options.folder).items():
        try:
            found[layout] = land(options, folder, layout, size)
        except AssertionError:
            traceback.print_exc()
            failed += 1
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    print(f"{len(found)} passed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        options = json.loads(sys.argv[1])
        (Worker if "worker" in options else Rank)(Control(), options).run()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    if not layouts(options.folder):
        print(f"skipped: {options.folder} has nothing that tests/gpu/record_slots.py made")
        return 77
    with tempfile.TemporaryDirectory(prefix="slots-") as folder:
        return check(options, pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
