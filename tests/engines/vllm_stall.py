#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vllm_stall.py [--adapters N] [--wait]

How long a request that runs in a real vLLM waits for its next step while new adapters come.

Live FSDP2 trainers (2 ranks), one engine with two slots, and requests that stream tokens by an
adapter, one after the other. In turns the trainers train and commit a step; the engine brings what
they have committed straight into a slot; nothing happens for as long; it brings the step by a
directory.
Of each turn the longest time from one step of the engine to the next, noted in its worker: of the
longest of all turns of a kind median, p90, p99 and longest, in milliseconds, and how much these are
beyond those of the turns in which nothing happens. The longest of all are listed with what held
them up: how long a CPU of the machine stood still (`pulse.py`), the part in which the worker's
thread waited for a processor within its step and in which Python collected garbage, and the pages
that the worker waited for to come from files: those of libraries that the kernel has let go of.

--wait: says "ready", and begins when a line comes, so that the machine need be quiet for the turns
alone.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from live_trainer import LiveTrainer
from pulse import Pulse
from vllm_measure import learn_the_slots
from vllm_server import LONGEST, TokenStream, VllmServer, save_model

PROMPT = [5, 9, 13, 17, 21]


class Turn(NamedTuple):
    what: str
    begun: float
    ended: float


class Gap(NamedTuple):
    """From one step to the next: seconds, of these waiting for a processor and collecting, and
    pages that were read; and when it began."""

    whole: float
    waited: float
    collected: float
    faults: float
    begun: float


class Place:
    def __init__(self, scratch: Path, trainer: LiveTrainer, engine: VllmServer) -> None:
        self.scratch, self.trainer, self.engine = scratch, trainer, engine

    def notes(self, method: str) -> Any:
        return self.engine.ask("POST", "/collective_rpc", {"method": method})["results"][0]

    def commit(self) -> int:
        return int(self.trainer.step(record=False)["step"])

    def bring(self, landing: str) -> None:
        name = f"{landing}-run0-step{self.trainer.published}"
        body = {"lora_name": name, "landing": "auto" if landing == "slot" else landing}
        answer = self.engine.ask("POST", "/load_lora_adapter_nixl", body)
        if answer["landing"] != landing:
            raise SystemExit(f"not into a {landing}: {answer['landing_why']}")

    def turns(self, count: int) -> tuple[list[Turn], list[list[float]]]:
        found: list[Turn] = []
        for at in range(count):
            # A new request each time: the more tokens one has, the longer its steps take.
            name = f"{'directory' if at else 'slot'}-run0-step{self.trainer.published}"
            with TokenStream(self.engine, name, PROMPT, LONGEST - 100) as stream:
                stream.wait_for(200)  # what is slow at first is not what is asked here
                if at == 0:
                    self.notes("start_noting")
                found += self.round(stream)
                if not stream.running:
                    raise SystemExit("the request ended before the adapters had come")
        return found, self.notes("noted")

    def round(self, stream: TokenStream) -> Iterator[Turn]:
        ways: dict[str, Callable[[], Any]] = {
            "a commit": self.commit,
            "slot": lambda: self.bring("slot"),
            "nothing": lambda: time.sleep(ended - begun),
            "directory": lambda: self.bring("directory"),
        }
        begun = ended = 0.0
        for what, way in ways.items():
            at = time.monotonic()
            way()
            begun, ended = at, time.monotonic()
            stream.wait_for(len(stream.tokens) + 3)
            yield Turn(what, begun, ended)


def longest(turn: Turn, steps: list[list[float]]) -> Gap:
    """The longest gap that overlaps the turn."""
    gaps = [
        Gap(*(b - a for a, b in zip(one, two, strict=True)), begun=one[0])
        for one, two in zip(steps, steps[1:], strict=False)
        if two[0] > turn.begun and one[0] < turn.ended
    ]
    return max(gaps)


def of(values: list[float], part: float) -> float:
    """The value that this part of the sorted ones does not exceed."""
    return values[math.ceil(len(values) * part) - 1]


def show(turns: list[Turn], steps: list[list[float]], pulse: Pulse) -> None:
    found: dict[str, list[Gap]] = defaultdict(list)
    for turn in turns:
        found[turn.what].append(longest(turn, steps))
    parts = {"median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
    sorted_ = {what: sorted(gap.whole * 1e3 for gap in gaps) for what, gaps in found.items()}
    plain = sorted_["nothing"]
    print(f"\nlongest step of a turn, ms, of {len(plain)} turns; and beyond that without anything:")
    for what, values in sorted_.items():
        cells = (
            f"{name} {of(values, part):6.1f} ({of(values, part) - of(plain, part):+5.1f})"
            for name, part in parts.items()
        )
        print(f"{what:>10}: {', '.join(cells)}")
    print("\nthe longest, ms: whole, a CPU stood, waiting for one, collecting garbage; pages read")
    everything = sorted(((gap, what) for what, gaps in found.items() for gap in gaps), reverse=True)
    for gap, what in everything[:12]:
        stood = pulse.within(gap.begun, gap.begun + gap.whole)
        parts = (gap.whole, stood, gap.waited, gap.collected)
        print(f"{what:>10}: {', '.join(f'{part * 1e3:7.1f}' for part in parts)}; {gap.faults:.0f}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--adapters", type=int, default=100, help="of each way")
    parser.add_argument("--wait", action="store_true", help="for a line before the turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fanin-stall-", dir="/dev/shm") as folder:
        scratch = Path(folder)
        model = save_model(scratch / "model")
        environment = {
            "FANIN_TRAINER": str(scratch / "trainer" / "nixl_info.json"),
            "NIXL_LORA_CACHE_DIR": str(scratch / "cache"),
            "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
        }
        arguments = ["--max-loras", "2", "--max-cpu-loras", "4"]
        arguments += ["--worker-extension-cls", "noting.Noting"]
        with (
            LiveTrainer(model, scratch / "trainer") as trainer,
            VllmServer(model, scratch, *arguments, environment=environment) as engine,
        ):
            trainer.wait_ready()
            engine.wait_ready()
            place = Place(scratch, trainer, engine)
            learn_the_slots(trainer, engine)
            for way in ("slot", "directory", "slot"):
                place.commit()
                place.bring(way)
            if options.wait:
                print("ready", flush=True)
                sys.stdin.readline()
            with Pulse() as pulse:
                turns, steps = place.turns(options.adapters)
            show(turns, steps, pulse)


if __name__ == "__main__":
    main()
