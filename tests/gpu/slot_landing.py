#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""slot_landing.py FOLDER [--device cuda|cpu] [--ranks N] [--steps N] [--layers N] [--json FILE]

How an adapter lands in vLLM's LoRA slots on a GPU, by the plugin's own code (Image of
fanin.engine.slot_images), in stacks as vLLM has them, with max_lora_rank of twice the adapter's r; vLLM
itself is not needed. FOLDER is what tests/gpu/record_slots.py made. Each step is pulled while a
CUDA graph reads the slots on the engine's stream, then scaled, and put into the slot that was
cleared on that stream:

  the slot that a request uses is the same in every replay
  the replay behind the put sees the whole adapter, those before none of it
  every byte of the slot is what vLLM makes: scaled on the CPU as LoRALayerWeights.optimize does,
  zeros beyond the rank; also when the image was moved to the host's memory before

Needs PyTorch, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77 without GPUs
or mappings. The last line is "N passed, N failed"; before it, JSON with medians in ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

from lora_slots import (
    FILLED,
    OTHER,
    RUN,
    SLOTS,
    SLOWEST,
    Child,
    Control,
    layer,
    layouts,
    main_of,
    on,
    pattern,
    published,
    settle,
    torch,
)

HERE = pathlib.Path(__file__).resolve()
SCALE = 10 / 3
TIMES = 2  # max_lora_rank, in r
BY_CPU = 1  # layers of which the CPU says what is right; of the others the GPU does, as a whole


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


def check(options: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    common = {key: getattr(options, key) for key in ("device", "layers", "ranks")}
    common |= {"folder": str(options.folder), "world": os.urandom(16).hex()}
    script = str(HERE.with_name("lora_slots.py"))
    layout, size = next(iter(layouts(options.folder).items()))
    ranks = [
        Child(f"rank{rank}", script, {**common, "rank": rank}, folder)
        for rank in range(options.ranks)
    ]
    role = {**common, "layout": layout, "worker": size - 1, "workers": size}
    worker = Child("worker", str(HERE), role, folder)
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
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(told, indent=1))
        print(json.dumps(told))
        return [told]
    except AssertionError:
        for one in (worker, *ranks):
            print(one.tail(12), file=sys.stderr)
        raise
    finally:
        for one in (worker, *ranks):
            one.close()


def role_of(options: dict[str, Any]) -> Any:
    return Worker(Control(), options)


if __name__ == "__main__":
    sys.exit(main_of(__doc__, role_of, "--steps=8", check))
