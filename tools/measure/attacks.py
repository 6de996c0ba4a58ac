#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attacks.py [--attacks NAME,...] [--rounds N] [--seconds S] [--peer-cpu X] [--stranger-cpu X]

What a stranger who can reach a rank's port takes from its trainer (tests/support/strangers.py). The
rank is a process of its own; a step hashes 4 MiB and is committed. For each attack rounds without
and with it take turns: medians of steps a second and their ratio, the CPU time of the server's
threads by the kernel's clock, the own user's pulls and the slowest, and what the server counted.
What a stranger may take at once, 20 s of its shares, is in the first rounds: more than that shows
what lasts. The attacker is a process of its own, too: without CPUs to spare it takes its own from
the trainer, as any program would. Needs the package.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fanin

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "engines")]
from limits import limits  # noqa: E402
from strangers import ATTACKS, RUN, attack  # noqa: E402
from worlds import Child, Control  # noqa: E402

STEP_BYTES = 4 << 20
COUNTERS = (
    "sessions_refused",
    "requests_delayed",
    "log_lines_left_out",
    "drains_cut",
    "held_up_ns_max",
)

# ------------------------------------------------------------------------------- the rank


def cpu_of_threads() -> float:
    """Seconds that the library's threads of this process have run."""
    ns = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("fanin-"):
            ns += int((task / "schedstat").read_text().split()[0])
    return ns / 1e9


def tensor() -> fanin.Shard:
    """What is published, or room for it."""
    array = (ctypes.c_char * STEP_BYTES)()
    box = fanin.Box((0,), (STEP_BYTES,), (0,), ctypes.addressof(array))
    return fanin.Shard("a", "U8", (STEP_BYTES,), (box,), owner=array)


class Lines(logging.Handler):
    """Counts what is logged."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


class Rank:
    """Trains for so many seconds whenever it is told to."""

    def __init__(self, options: argparse.Namespace, server: fanin.Server) -> None:
        self.seconds, self.server, self.step = options.seconds, server, 1
        self.lines, self.shard = Lines(), tensor()
        logging.basicConfig(level=logging.INFO, handlers=[self.lines])
        server.put(RUN, [self.shard])
        server.commit(RUN, self.step)

    def train(self) -> dict[str, Any]:
        memory = bytes(STEP_BYTES)
        began, cpu, first = time.perf_counter(), cpu_of_threads(), self.step
        while (passed := time.perf_counter() - began) < self.seconds:
            hashlib.sha256(memory).digest()
            self.step += 1
            self.server.begin_update(RUN)
            self.server.commit(RUN, self.step)
        told = {"steps": (self.step - first) / passed, "cpu": (cpu_of_threads() - cpu) / passed}
        return told | {"lines": self.lines.count, "stats": dict(self.server.stats())}


def rank(options: argparse.Namespace) -> None:
    control = Control()
    shares = {"peer_cpu": options.peer_cpu, "stranger_share_ms": options.stranger_share}
    with (
        limits(**{name: round(1000 * share) for name, share in shares.items()}),
        fanin.Server(
            world_id=bytes(range(16)),
            rank=0,
            world_size=1,
            use_ucx=False,
            stranger_cpu=options.stranger_cpu,
        ) as server,
    ):
        made = Rank(options, server)
        control.say("here", port=server.port)
        control.obey(made)


# ---------------------------------------------------------------------------- measuring


def stretch(trainer: Child, client: fanin.Client, seconds: float) -> Any:
    """What the trainer tells of so many seconds, and the own user's pulls meanwhile."""
    shard = tensor()
    trainer.tell("train")
    slowest, pulls, until = 0.0, 0, time.perf_counter() + seconds * 0.9
    while (began := time.perf_counter()) < until:
        client.pull_into(RUN, [shard], timeout=30.0)
        slowest = max(slowest, time.perf_counter() - began)
        pulls += 1
        time.sleep(0.05)
    return trainer.expect("done") | {"slowest": slowest, "pulls": pulls / seconds}


def rounds_of(options: argparse.Namespace, name: str, calm: bool, folder: Path) -> Any:
    def child(be: str, **more: Any) -> Child:
        return Child(be, str(Path(__file__).resolve()), vars(options) | {"be": be, **more}, folder)

    trainer = child("rank")
    rounds: dict[bool, list[Any]] = {False: [], True: []}
    try:
        port = trainer.expect("here")["port"]
        with fanin.Client([f"127.0.0.1:{port}"], path="stream", use_ucx=False) as client:
            for _ in range(options.rounds):
                if calm:
                    rounds[False].append(stretch(trainer, client, options.seconds))
                attacker = child(name, port=port)
                try:
                    rounds[True].append(stretch(trainer, client, options.seconds))
                    ended = attacker.process.poll() is not None
                    assert not ended, f"{name} has ended:\n{attacker.tail()}"
                finally:
                    attacker.close()
    finally:
        trainer.close()
    return rounds


def observe(options: argparse.Namespace, name: str, calm: bool = True) -> dict[bool, list[Any]]:
    """What stretches without (if calm) and with the attack tell."""
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        found: dict[bool, list[Any]] = rounds_of(options, name, calm, Path(folder))
    return found


def measure(options: argparse.Namespace, name: str) -> None:
    """A line about it."""
    rounds = observe(options, name)
    steps = {on: statistics.median(one["steps"] for one in rounds[on]) for on in rounds}
    cpu = {on: statistics.median(one["cpu"] for one in rounds[on]) for on in rounds}
    counted = rounds[True][-1]["stats"]
    print(
        f"{name:8} steps/s {steps[False]:6.1f} -> {steps[True]:6.1f} "
        f"({steps[True] / steps[False]:.2f}); "
        f"server's threads {100 * cpu[False]:5.1f} -> {100 * cpu[True]:5.1f} % of a CPU; "
        f"own user's pulls {min(one['pulls'] for one in rounds[True]):.1f}/s, "
        f"slowest {1e3 * max(one['slowest'] for one in rounds[True]):.0f} ms; "
        f"lines logged {rounds[True][-1]['lines']}, "
        + ", ".join(f"{key} {counted[key]}" for key in COUNTERS),
        flush=True,
    )


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        role = argparse.Namespace(**json.loads(sys.argv[1]))
        rank(role) if role.be == "rank" else attack(role.be, role.port)
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[2])
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--peer-cpu", type=float, default=0.05)
    parser.add_argument("--stranger-cpu", type=float)
    parser.add_argument("--stranger-share", type=float, default=2.0)
    options = parser.parse_args()
    for name in options.attacks.split(","):
        measure(options, name)


if __name__ == "__main__":
    main()
