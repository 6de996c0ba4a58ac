#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""readers.py [--readers N,...] [--data-threads N,...] [--tcp] [--secret]
                [--connections N] [--megabytes N] [--seconds S] [--updates N] [--verify]

One rank and several workers, all processes of their own on this host, by the path "stream": what
all workers together receive a second, by number of data threads of the rank; and, while they read,
what the rank's trainer and its control connections wait for: begin_update with a lease of a
millisecond (so that what is left is the send under way), and the round trip of a ping. Settings
take turns; medians of the rounds. Over Unix sockets, with --tcp over TCP with checksums, with
--secret by TLS, with a secret made for it. --connections: data connections of each worker, as many
as a client makes by itself unless said. --verify: only the CPU time of the rank's data threads
for digests, while all workers pull once at the same time by the path "cma". Needs the package.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time

import fanin
import talk

RUN, TENSORS = "lora:0", 64
PINGS = 50


def memory(megabytes: int) -> tuple[mmap.mmap, list[fanin.Shard]]:
    """Pages that are there, as tensors of equal size."""
    each = (megabytes << 20) // TENSORS
    arena = mmap.mmap(-1, each * TENSORS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    for page in range(0, len(arena), mmap.PAGESIZE):
        arena[page] = 1
    shards = []
    for i in range(TENSORS):
        box = fanin.Box((0,), (each,), (0,), start + i * each)
        shards.append(fanin.Shard(f"layer.{i}", "U8", (each,), (box,), owner=arena))
    return arena, shards


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


# ------------------------------------------------------------------------ the processes


def rank(options: argparse.Namespace) -> None:
    """Answers "cpu", and else an update, by numbers, until stdin closes."""
    _, shards = memory(options.megabytes)
    lease = 0.001 if options.hasty else 1.0
    with fanin.Server(
        world_id=bytes(range(16)), rank=0, world_size=1, lease=lease, use_ucx=False,
        data_threads=options.data_threads, secret_file=options.secret_file,
    ) as server:  # fmt: skip
        server.put(RUN, shards)
        server.commit(RUN, 1)
        print(server.port, flush=True)
        for step, line in enumerate(sys.stdin, 2):
            if line.strip() == "cpu":
                print(server.stats()["data_cpu_ns"] / 1e9, flush=True)
                continue
            began = time.perf_counter()
            server.begin_update(RUN)
            waited = time.perf_counter() - began
            server.commit(RUN, step)
            print(waited, flush=True)


def worker(options: argparse.Namespace) -> None:
    """Pulls for so many seconds after a line has come; tells how many bytes in how long."""
    _, wanted = memory(options.megabytes)
    packed = fanin.pack(wanted)
    patience = options.seconds if options.hasty else 60.0  # updates overtake who is hasty
    with fanin.Client(
        [f"127.0.0.1:{options.port}"],
        path="cma" if options.verify else "stream",
        use_ucx=False,
        use_unix=not options.tcp,
        secret_file=options.secret_file,
        streams_per_rank=options.connections,
    ) as client:
        client.pull_into(RUN, packed)
        print("ready", flush=True)
        sys.stdin.readline()
        if options.verify:
            client.pull_into(RUN, packed, verify=True)
            print("ready", flush=True)
            return
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < options.seconds:
            try:
                count += client.pull_into(RUN, packed, timeout=patience).bytes
            except (fanin.StaleError, fanin.PullTimeoutError):
                if not options.hasty:
                    raise
        print(json.dumps([count, passed]), flush=True)


def start(options: argparse.Namespace, *words: str) -> subprocess.Popen[str]:
    common = ["--megabytes", str(options.megabytes), "--seconds", str(options.seconds)]
    common += ["--tcp"] if options.tcp else []
    common += ["--verify"] if options.verify else []
    common += ["--secret-file", options.secret_file, "--connections", str(options.connections)]
    return talk.start(__file__, *common, *words)


# ---------------------------------------------------------------------------- measuring


def scene(
    options: argparse.Namespace, threads: int, readers: int, hasty: bool
) -> tuple[float, list[float], list[float]]:
    """Bytes a second; if hasty, what updates waited, and round trips."""
    more = ["--hasty"] if hasty else []
    server = start(options, "--be", "rank", "--data-threads", str(threads), *more)
    processes = [server]
    updates, pings = [], []
    try:
        port = talk.told(server)
        for _ in range(readers):
            processes.append(start(options, "--be", "worker", "--port", str(port), *more))
        for one in processes[1:]:
            talk.told(one)
        for one in processes[1:]:
            talk.say(one)
        if hasty:
            with fanin.Client(
                [f"127.0.0.1:{port}"],
                use_ucx=False,
                use_unix=not options.tcp,
                secret_file=options.secret_file,
            ) as c:
                for _ in range(PINGS):
                    time.sleep(options.seconds / PINGS / 2)
                    pings.append(c.ping()[0][1])
            for _ in range(options.updates):
                time.sleep(options.seconds / options.updates / 4)
                talk.say(server)
                updates.append(talk.told(server))
        answers = [talk.told(one) for one in processes[1:]]
        return sum(count / passed for count, passed in answers), updates, pings
    finally:
        for one in reversed(processes):
            one.communicate()


def digesting(options: argparse.Namespace, threads: int, readers: int) -> float:
    """CPU seconds of the rank's data threads."""
    server = start(options, "--be", "rank", "--data-threads", str(threads))
    processes = [server]
    try:
        port = talk.told(server)
        for _ in range(readers):
            processes.append(start(options, "--be", "worker", "--port", str(port)))
            talk.told(processes[-1])
        talk.say(server, "cpu")
        before = talk.told(server)
        for one in processes[1:]:
            talk.say(one)
        for one in processes[1:]:
            talk.told(one)
        talk.say(server, "cpu")
        return talk.told(server) - before
    finally:
        for one in reversed(processes):
            one.communicate()


def upper(values: list[float]) -> str:
    middle, most = statistics.median(values), max(values)
    late = sorted(values)[len(values) * 99 // 100]
    return f"{middle * 1e6:6.0f} us (p99 {late * 1e6:.0f}, most {most * 1e6:.0f})"


def measure(options: argparse.Namespace) -> None:
    settings = [(r, t) for r in options.readers for t in options.threads]
    for readers, threads in settings if options.verify else ():
        taken = [digesting(options, threads, readers) for _ in range(options.rounds)]
        print(
            f"{readers:2} readers {threads:2} data threads {options.megabytes} MiB: digests took "
            f"{statistics.median(taken):.3f} s of CPU ({min(taken):.3f} to {max(taken):.3f})"
        )
    if options.verify:
        return
    rates: dict[tuple[int, int], list[float]] = {one: [] for one in settings}
    for _ in range(options.rounds):
        for readers, threads in settings:
            rate, _, _ = scene(options, threads, readers, False)
            rates[readers, threads].append(rate)
    cores = len(os.sched_getaffinity(0))
    way = "TLS" if options.secret_file else "TCP" if options.tcp else "Unix"
    print(f"{cores} cores, {options.megabytes} MiB a pull, {way}")
    for (readers, threads), values in rates.items():
        middle, least, most = (
            statistics.median(values) / 1e9,
            min(values) / 1e9,
            max(values) / 1e9,
        )
        print(
            f"{readers:2} readers {threads:2} data threads "
            f"{middle:6.2f} GB/s ({least:.2f} to {most:.2f})"
        )
    for readers, threads in settings:
        if readers == options.readers[-1]:
            _, updates, pings = scene(options, threads, readers, True)
            print(
                f"{readers:2} readers {threads:2} data threads: "
                f"begin_update {upper(updates)}, ping {upper(pings)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=numbers, default=[1, 4, 8])
    parser.add_argument("--data-threads", dest="threads", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--secret", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--connections", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    for hidden in ("--be", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--hasty", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--secret-file", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be == "rank":
        options.data_threads = options.threads[0]
        rank(options)
    elif options.be == "worker":
        worker(options)
    elif options.secret:
        with tempfile.NamedTemporaryFile("w", prefix="readers-") as secret:
            secret.write(os.urandom(32).hex() + "\n")
            secret.flush()
            options.tcp, options.secret_file = True, secret.name
            measure(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
