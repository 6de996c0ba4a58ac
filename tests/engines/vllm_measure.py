#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vllm_measure.py [--rounds N] [--engine [--wait] | --moe]

From a trainer's commit to the first token of the new adapter, through fanin (straight into the
layout of vLLM's slots, or by a directory) and through a file.

engine: live FSDP2 trainers (2 ranks) and a real vLLM on this machine; the adapter is the test
    model's, small, so the figures are what each way costs at least. One round of either way after
    the other, twice: on an idle engine for the times, and beside a request that streams tokens for
    its stall (its longest wait for a token less its median one). "there already" is what no way can
    do without: after a step of the trainers a token by an adapter that has its slot. --wait: says
    "ready", and begins when a line comes.
moe: 9,216 tensors of per-expert LoRA and the same weights fused, in 2 ranks of another process,
    through a pull or through one file, and then through vLLM's own reading and packing (vLLM's CPU
    build cannot run such a model); or straight into the layout of vLLM's slots, and from there into
    a slot, which the other ways' figures do not have.

Medians in milliseconds, in brackets the extremes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fanin
import moe_engine
import slots_engine
from live_trainer import LiveTrainer
from pulse import Pulse
from vllm_server import TokenStream, VllmServer, save_model
from worlds import Child, Control

PROMPT = [5, 9, 13, 17, 21]
LARGE = moe_engine.Shape(layers=12, experts=128, hidden=2048, width=768, rank=8, alpha=16)
LAYOUTS = {"per-expert": moe_engine.per_expert, "fused": moe_engine.fused}

Times = dict[str, float]  # part: seconds


class Table:
    """Times by way and part, of several rounds."""

    def __init__(self, title: str, parts: list[str]) -> None:
        self._title = title
        self._parts = parts
        self._rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, way: str, times: Times) -> None:
        for part, seconds in times.items():
            self._rows[way][part].append(seconds * 1e3)

    def print(self) -> None:
        rows = [["", *self._parts]]
        for way, parts in self._rows.items():
            rows.append([way, *(self._cell(parts.get(part, [])) for part in self._parts)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        print(f"\n{self._title}")
        for row in rows:
            cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            print("  ".join([row[0].ljust(widths[0]), *cells]))
        sys.stdout.flush()

    @staticmethod
    def _cell(values: list[float]) -> str:
        if not values:
            return "-"
        return f"{statistics.median(values):.1f} [{min(values):.1f}..{max(values):.1f}]"


# ------------------------------------------------------------------------------- the engine


def stall(stream: TokenStream, begun: float, ended: float) -> float:
    """The longest gap between tokens that overlaps this time, less the median of those before."""
    stream.wait_for(len(stream.tokens) + 1)
    came = list(stream.came)
    gaps = list(zip(came, came[1:], strict=False))
    before = [second - first for first, second in gaps if second <= begun]
    during = [second - first for first, second in gaps if second > begun and first < ended]
    return max(during) - statistics.median(before)


def first_token(engine: VllmServer, name: str) -> float:
    begun = time.monotonic()
    engine.tokens(name, PROMPT, 1)
    return time.monotonic() - begun


def through_fanin(
    trainer: LiveTrainer, engine: VllmServer, client: fanin.Client, scratch: Path, landing: str
) -> tuple[float, float, Times]:
    """(commit, first token, parts): the engine pulls, loads, and is asked for a token.

    What the engine's pull spends on writing is not told by it; a pull of the same step into
    another directory, by this process, tells.
    """
    done = trainer.step(record=False)
    name = f"policy-run0-step{done['step']}"
    body = {"lora_name": name, "landing": "auto" if landing == "slot" else landing}
    answer = engine.ask("POST", "/load_lora_adapter_nixl", body)
    loaded = time.monotonic()
    if answer["landing"] != landing:
        raise SystemExit(f"not into a {landing}: {answer['landing_why']}")
    first = first_token(engine, name)
    ended = time.monotonic()
    pull, load = answer["pull_seconds"], answer["load_seconds"]
    times = {
        "commit to first token": ended - done["committed"],
        "pull": pull,
        "vLLM's load": load,
        "first token": first,
        "rest": loaded - done["committed"] - pull - load,
    }
    if landing == "directory":
        pulled = client.pull_adapter("0", scratch / name, step=done["step"])
        times["of it write"] = pulled.write
    return done["committed"], ended, times


def already_there(trainer: LiveTrainer, engine: VllmServer, name: str) -> Times:
    """The parts of a first token by an adapter that the engine has run with, after a step."""
    done = trainer.step(record=False)
    first = first_token(engine, name)
    return {"commit to first token": time.monotonic() - done["committed"], "first token": first}


def learn_the_slots(trainer: LiveTrainer, engine: VllmServer) -> None:
    """Loads the first adapter of its layout, and waits until the workers know where it goes."""
    name = f"policy-run0-step{trainer.step(record=False)['step']}"
    engine.ask("POST", "/load_lora_adapter_nixl", {"lora_name": name})
    deadline = time.monotonic() + 60
    while (slots := engine.ask("GET", "/nixl/status")["slots"])["layouts"] == 0:
        if slots["why_not"] or slots["refused"] or time.monotonic() > deadline:
            raise SystemExit(f"nothing goes into slots: {slots}")
        time.sleep(0.02)


def through_a_file(
    trainer: LiveTrainer, engine: VllmServer, scratch: Path
) -> tuple[float, float, Times]:
    """(commit, first token, parts): rank 0 gathers and saves, the engine loads the directory."""
    done = trainer.step(record=False)
    name = f"file-{done['step']}"
    gathered = trainer.gather(scratch / name)
    begun = time.monotonic()
    body = {"lora_name": name, "lora_path": str(scratch / name)}
    engine.ask("POST", "/v1/load_lora_adapter", body)
    loaded = time.monotonic()
    first = first_token(engine, name)
    ended = time.monotonic()
    times = {
        "commit to first token": ended - done["committed"],
        "gather, save": gathered,
        "vLLM's load": loaded - begun,
        "first token": first,
        "rest": begun - done["committed"] - gathered,
    }
    engine.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
    return done["committed"], ended, times


def measure_engine(rounds: int, scratch: Path, wait: bool) -> None:
    model = save_model(scratch / "model")
    files = scratch / "files"
    parts = ["commit to first token", "pull", "of it write", "gather, save", "vLLM's load"]
    parts += ["first token", "rest", "stall of others"]
    table = Table("dense adapter, 28 tensors, 2 FSDP2 ranks, ms", parts)
    environment = {
        "FANIN_TRAINER": str(scratch / "trainer" / "nixl_info.json"),
        "NIXL_LORA_CACHE_DIR": str(scratch / "cache"),
    }
    arguments = ["--max-loras", "2", "--max-cpu-loras", "4"]
    files.mkdir()
    with (
        LiveTrainer(model, scratch / "trainer") as trainer,
        VllmServer(model, scratch, *arguments, environment=environment) as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        with fanin.Client(trainer.addresses) as client:
            ways: dict[str, Callable[[], tuple[float, float, Times]]] = {
                "slot": lambda: through_fanin(trainer, engine, client, files, "slot"),
                "directory": lambda: through_fanin(trainer, engine, client, files, "directory"),
                "file": lambda: through_a_file(trainer, engine, files),
            }
            learn_the_slots(trainer, engine)
            for way in (*ways.values(), *ways.values()):
                way()
            if wait:
                print("ready", flush=True)
                sys.stdin.readline()
            with Pulse() as pulse:
                for _ in range(rounds):
                    for name, way in ways.items():
                        table.add(name, way()[2])
                        if name == "slot":
                            there = f"policy-run0-step{trainer.published}"
                            table.add("there already", already_there(trainer, engine, there))
                    for name, way in ways.items():
                        with TokenStream(engine, engine.base, PROMPT, 60000) as stream:
                            stream.wait_for(50)
                            begun, ended, _ = way()
                            table.add(name, {"stall of others": stall(stream, begun, ended)})
    table.print()
    print(f"the longest that a CPU of the machine stood still: {pulse.longest * 1e3:.1f} ms")


# --------------------------------------------------------------------- mixtures of experts


@contextlib.contextmanager
def expert_ranks(layout: str, scratch: Path) -> Iterator[Child]:
    child = Child("ranks", "vllm_measure.py", {"layout": layout}, scratch)
    try:
        yield child
    finally:
        child.close()


def be_the_ranks(options: dict[str, str]) -> None:
    """In the child: ranks that serve an adapter, and save it to a file when told to."""
    import torch
    from safetensors.torch import save_file

    control = Control()
    tensors, config = LAYOUTS[options["layout"]](LARGE, torch.bfloat16)
    halves = {name: value.chunk(2) for name, value in tensors.items()}
    with moe_engine.ranks_of(tensors, config) as addresses:
        control.say("ready", addresses=addresses, tensors=len(tensors))
        while (command := control.hear(600.0))["event"] == "save":
            begun = time.monotonic()
            directory = Path(command["directory"])
            directory.mkdir(parents=True)
            whole = {name: torch.cat(parts) for name, parts in halves.items()}
            save_file(whole, directory / "adapter_model.safetensors", {"format": "pt"})
            (directory / "adapter_config.json").write_text(json.dumps(config))
            control.say("done", seconds=time.monotonic() - begun)


def read_and_pack(directory: Path, layout: str) -> Times:
    """vLLM's part, up to the copy onto its device."""
    loader = moe_engine.worker(LARGE, is_3d_model=layout == "fused")
    begun = time.monotonic()
    lora = moe_engine.read(loader, directory, is_3d=layout == "fused")
    read = time.monotonic()
    moe_engine.pack(loader, lora)
    return {"vLLM reads": read - begun, "vLLM packs": time.monotonic() - read}


def into_slots(client: fanin.Client, layout: Any, slots: Any) -> Times:
    """A pull into the layout of a slot, and vLLM's part: the copy into a slot that is clear."""
    image = slots.take(layout)
    begun = time.monotonic()
    client.pull_into("0", image.packed.tensors, step=1)
    pulled = time.monotonic()
    image.finish()
    finished = time.monotonic()
    image.put(slots.manager, 0)
    ended = time.monotonic()
    slots.give_back(image)
    times = {"pull": pulled - begun, "order, scale": finished - pulled}
    return {**times, "copy": ended - finished, "whole": ended - begun}


def learn_layout(client: fanin.Client, layout: str) -> tuple[Any, Any, float]:
    """The slots of a worker, an adapter's layout in them, and how long that took to record."""
    import torch
    from fanin.vllm.slots import Layout, Slots

    engine = slots_engine.Engine(
        "experts" if layout == "per-expert" else "fused",
        dtype=torch.bfloat16,
        max_rank=LARGE.rank,
        hidden=LARGE.hidden,
        width=LARGE.width,
        experts=LARGE.experts,
        depth=LARGE.layers,
    )
    slots = Slots(slots_engine.worker(engine))
    entries, config = client.catalog("0"), json.loads(client.metadata("0")["peft_config"])
    begun = time.monotonic()
    made = Layout.record(slots.loader, entries, config, is_3d=layout == "fused")
    return slots, made, time.monotonic() - begun


def measure_moe(rounds: int, scratch: Path) -> None:
    for layout in LAYOUTS:
        with expert_ranks(layout, scratch) as ranks:
            ready = ranks.expect("ready")
            parts = ["pull", "of it write", "gather, save", "vLLM reads", "vLLM packs"]
            parts += ["order, scale", "copy", "whole"]
            table = Table(f"{layout} experts, {ready['tensors']} tensors, 2 ranks, ms", parts)
            with fanin.Client(ready["addresses"]) as client:
                slots, made, recording = learn_layout(client, layout)
                for number in range(rounds + 1):
                    landed = into_slots(client, made, slots)
                    directory = scratch / f"{layout}-{number}"
                    begun = time.monotonic()
                    pulled = client.pull_adapter("0", directory, step=1)
                    times = {"pull": time.monotonic() - begun, "of it write": pulled.write}
                    times |= read_and_pack(directory, layout)
                    times["whole"] = times["pull"] + times["vLLM reads"] + times["vLLM packs"]
                    shutil.rmtree(directory)
                    filed = scratch / f"{layout}-{number}-file"
                    ranks.tell("save", directory=str(filed))
                    saved = {"gather, save": ranks.expect("done")["seconds"]}
                    saved |= read_and_pack(filed, layout)
                    saved["whole"] = sum(saved.values())
                    shutil.rmtree(filed)
                    if number > 0:  # the first round warms caches
                        table.add("slot", landed)
                        table.add("directory", times)
                        table.add("file", saved)
            ranks.tell("exit")
            ranks.wait()
        table.print()
        print(f"the layout was recorded in {recording:.3f} s")


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        be_the_ranks(json.loads(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine", action="store_true", help="only the engine's part")
    parser.add_argument("--moe", action="store_true", help="only the mixtures of experts")
    parser.add_argument("--wait", action="store_true", help="for a line before the engine's rounds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fanin-measure-", dir="/dev/shm") as scratch:
        if options.engine or not options.moe:
            measure_engine(options.rounds, Path(scratch), options.wait)
        if options.moe or not options.engine:
            measure_moe(options.rounds, Path(scratch))


if __name__ == "__main__":
    main()
