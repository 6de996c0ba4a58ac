#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vllm_adapters.py [--rounds N]

From a trainer's commit to the first token of the new adapter, through fanin (straight into the
layout of vLLM's slots, or by a directory) and through a file.

Live FSDP2 trainers (2 ranks) and a real vLLM on this machine; the adapter is the tests' model's,
small, so the figures are what each way costs at least. Each way in turns, twice: on an idle engine
for the times, and beside a request that streams tokens for its stall (its longest wait for a token
less its median one). "there already" is what no way can do without: after a step of the trainers a
token by an adapter that has its slot. Medians in milliseconds, in brackets the extremes. Wants the
environment of tools/check-engines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import fanin

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "engines"))

from live_trainer import LiveTrainer
from vllm_server import TokenStream, VllmServer, save_model

PROMPT = [5, 9, 13, 17, 21]

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


def measure(rounds: int, scratch: Path) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fanin-measure-", dir="/dev/shm") as scratch:
        measure(options.rounds, Path(scratch))


if __name__ == "__main__":
    main()
