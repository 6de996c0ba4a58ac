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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fanin
import talk

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from limits import limits
from strangers import ATTACKS, RUN, attack

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


def rank(options: argparse.Namespace) -> None:
    """Trains for so many seconds after each line that comes, until stdin closes."""
    lines = Lines()
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    memory, shard, step = bytes(STEP_BYTES), tensor(), 1
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
        server.put(RUN, [shard])
        server.commit(RUN, step)
        print(server.port, flush=True)
        for _ in sys.stdin:
            began, cpu, first = time.perf_counter(), cpu_of_threads(), step
            while (passed := time.perf_counter() - began) < options.seconds:
                hashlib.sha256(memory).digest()
                step += 1
                server.begin_update(RUN)
                server.commit(RUN, step)
            told = {"steps": (step - first) / passed, "cpu": (cpu_of_threads() - cpu) / passed}
            told["lines"] = lines.count
            print(json.dumps(told | {"stats": dict(server.stats())}), flush=True)


# ---------------------------------------------------------------------------- measuring


def start(options: argparse.Namespace, *words: str) -> subprocess.Popen[str]:
    common = ["--seconds", str(options.seconds), "--peer-cpu", str(options.peer_cpu)]
    common += ["--stranger-share", str(options.stranger_share)]
    if options.stranger_cpu is not None:
        common += ["--stranger-cpu", str(options.stranger_cpu)]
    return talk.start(__file__, *common, *words)


def stretch(trainer: subprocess.Popen[str], client: fanin.Client, seconds: float) -> Any:
    """What the trainer tells of so many seconds, and the own user's pulls meanwhile."""
    shard = tensor()
    talk.say(trainer)
    slowest, pulls, until = 0.0, 0, time.perf_counter() + seconds * 0.9
    while (began := time.perf_counter()) < until:
        client.pull_into(RUN, [shard], timeout=30.0)
        slowest = max(slowest, time.perf_counter() - began)
        pulls += 1
        time.sleep(0.05)
    return talk.told(trainer) | {"slowest": slowest, "pulls": pulls / seconds}


def observe(options: argparse.Namespace, name: str, calm: bool = True) -> dict[bool, list[Any]]:
    """What stretches without (if calm) and with the attack tell."""
    trainer = start(options, "--be", "rank")
    rounds: dict[bool, list[Any]] = {False: [], True: []}
    try:
        port = talk.told(trainer)
        with fanin.Client([f"127.0.0.1:{port}"], path="stream", use_ucx=False) as client:
            for _ in range(options.rounds):
                if calm:
                    rounds[False].append(stretch(trainer, client, options.seconds))
                attacker = start(options, "--be", name, "--port", str(port))
                try:
                    rounds[True].append(stretch(trainer, client, options.seconds))
                    assert attacker.poll() is None, f"{name} has ended: its message is above"
                finally:
                    attacker.kill()
                    attacker.communicate()
    finally:
        trainer.kill()
        trainer.communicate()
    return rounds


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[2])
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--peer-cpu", type=float, default=0.05)
    parser.add_argument("--stranger-cpu", type=float)
    parser.add_argument("--stranger-share", type=float, default=2.0)
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be == "rank":
        rank(options)
    elif options.be:
        attack(options.be, options.port)
    else:
        for name in options.attacks.split(","):
            measure(options, name)


if __name__ == "__main__":
    main()
