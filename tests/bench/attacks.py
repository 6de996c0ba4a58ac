#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attacks.py [--attacks NAME,...] [--rounds N] [--seconds S] [--peer-cpu X]

What a stranger who can reach a rank's port takes from its trainer. The rank is a process of its
own; a step hashes 4 MiB and is committed. For each attack rounds without and with it take turns:
medians of steps a second and their ratio, the CPU time of the server's threads, the slowest of the
own user's pings, and what the server counted. The attacker is a process of its own, too: without
CPUs to spare it takes its own from the trainer, as any program would. Needs the package.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fanin
import talk

RUN, STEP_BYTES = "lora:0", 4 << 20
HELLO, LIST, PING = 1, 7, 25

# ------------------------------------------------------------------------------- the rank


def cpu_of_threads() -> float:
    """Seconds that the library's threads of this process have run."""
    ticks = 0
    for stat in Path("/proc/self/task").glob("*/stat"):
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        if name.startswith("fanin-"):
            ticks += sum(int(one) for one in rest.split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def rank(options: argparse.Namespace) -> None:
    """Trains for so many seconds after each line that comes, until stdin closes."""
    memory, array, step = bytes(STEP_BYTES), (ctypes.c_char * 4096)(), 1
    box = fanin.Box((0,), (4096,), (0,), ctypes.addressof(array))
    shard = fanin.Shard("a", "U8", (4096,), (box,), owner=array)
    with fanin.Server(
        world_id=bytes(range(16)), rank=0, world_size=1, use_ucx=False, peer_cpu=options.peer_cpu
    ) as server:
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
            print(json.dumps(told | {"stats": dict(server.stats())}), flush=True)


# --------------------------------------------------------------------------- the attacks


def frame(kind: int, request: int, body: bytes) -> bytes:
    return struct.pack("<4sBBHQII", b"FAN1", 1, 0, kind, request, len(body), 0) + body


def connected(port: int, source: int = 1) -> socket.socket:
    one = socket.socket()
    one.bind((f"127.0.0.{source}", 0))
    one.settimeout(10.0)
    one.connect(("127.0.0.1", port))
    return one


def session(port: int, source: int = 1) -> socket.socket:
    one = connected(port, source)
    one.sendall(frame(HELLO, 1, b"\x84\x01\x01\x02\x01\x04\x01\x05\xc4\x10" + os.urandom(16)))
    one.recv(4096)
    return one


def idle(port: int) -> None:
    """Connections that say nothing, from many addresses of this host."""
    held = []
    while True:
        with contextlib.suppress(OSError):
            held.append(session(port, len(held) % 200 + 2))
        time.sleep(0.001 if len(held) < 256 else 0.1)


def flood(port: int, kind: int, sessions: int) -> None:
    """One request as often as it is taken, and all answers are read."""
    blob = b"".join(frame(kind, i + 2, b"\x80") for i in range(500))
    all_of_them = [session(port) for _ in range(sessions)]
    for one in all_of_them:
        one.setblocking(False)
    left = {one: b"" for one in all_of_them}
    while True:
        for one in all_of_them:
            left[one] = left[one] or blob
            with contextlib.suppress(BlockingIOError):
                left[one] = left[one][one.send(left[one]) :]
            with contextlib.suppress(BlockingIOError):
                one.recv(1 << 20)


def churn(port: int) -> None:
    """Connections that are reset at once."""
    while True:
        with contextlib.suppress(OSError), connected(port) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def garbage(port: int) -> None:
    """Connections that say what is no message."""
    while True:
        with contextlib.suppress(OSError), connected(port) as one:
            one.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3)
            one.recv(100)


ATTACKS: dict[str, Callable[[int], None]] = {
    "idle": idle,
    "ping": lambda port: flood(port, PING, 1),
    "ping16": lambda port: flood(port, PING, 16),
    "list": lambda port: flood(port, LIST, 1),
    "churn": churn,
    "garbage": garbage,
}

# ---------------------------------------------------------------------------- measuring


def start(options: argparse.Namespace, *words: str) -> subprocess.Popen[str]:
    common = ["--seconds", str(options.seconds), "--peer-cpu", str(options.peer_cpu)]
    return talk.start(__file__, *common, *words)


def stretch(trainer: subprocess.Popen[str], client: fanin.Client, seconds: float) -> Any:
    """What the trainer tells of so many seconds, and the slowest ping meanwhile."""
    talk.say(trainer)
    slowest, until = 0.0, time.perf_counter() + seconds * 0.9
    while time.perf_counter() < until:
        slowest = max(slowest, client.ping()[0][1])
        time.sleep(0.05)
    return talk.told(trainer) | {"ping": slowest}


def measure(options: argparse.Namespace, name: str) -> None:
    trainer = start(options, "--be", "rank")
    rounds: dict[bool, list[Any]] = {False: [], True: []}
    try:
        port = talk.told(trainer)
        with fanin.Client([f"127.0.0.1:{port}"], use_ucx=False) as client:
            for _ in range(options.rounds):
                rounds[False].append(stretch(trainer, client, options.seconds))
                attacker = start(options, "--be", name, "--port", str(port))
                try:
                    rounds[True].append(stretch(trainer, client, options.seconds))
                finally:
                    attacker.kill()
                    attacker.wait()
    finally:
        trainer.kill()
        trainer.wait()
    steps = {on: statistics.median(one["steps"] for one in rounds[on]) for on in rounds}
    cpu = {on: statistics.median(one["cpu"] for one in rounds[on]) for on in rounds}
    counted = rounds[True][-1]["stats"]
    ratio = steps[True] / steps[False]
    print(
        f"{name:8} steps/s {steps[False]:6.1f} -> {steps[True]:6.1f} ({ratio:.2f}); "
        f"server's threads {100 * cpu[False]:5.1f} -> {100 * cpu[True]:5.1f} % of a CPU; "
        f"slowest ping {1e3 * max(one['ping'] for one in rounds[True]):.1f} ms; "
        + ", ".join(
            f"{key} {counted[key]}"
            for key in ("sessions_refused", "requests_delayed", "log_lines_left_out")
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[2])
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--peer-cpu", type=float, default=0.05)
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be == "rank":
        rank(options)
    elif options.be:
        ATTACKS[options.be](options.port)
    else:
        for name in options.attacks.split(","):
            measure(options, name)


if __name__ == "__main__":
    main()
