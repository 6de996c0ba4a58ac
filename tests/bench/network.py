#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""network.py NIXL_FETCH [--shape SHAPE] [--rounds N] [--seconds S] [--loopback] [--json]

One rank and one worker in two network namespaces, joined by a veth pair, so that bytes go by TCP;
beside it iperf3 the same way over the same link, with as many connections as the worker has. Rounds
of iperf3, the worker and the worker without checksums take turns; medians, and medians of the
ratios of each round. iperf3 throws away what it receives, the worker puts it in its place. Needs
root, ip (iproute2) and iperf3; without one of them it says so and exits with status 77. --loopback
does it over 127.0.0.1 instead, where neither root nor ip is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

RANK, WORKER, PORT, IPERF_PORT, DEADLINE = "10.213.9.1", "10.213.9.2", 6000, 6100, 120
STREAM = ["--path", "stream", "--no-unix", "--json"]


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode != 0:
        sys.exit(
            f"network: {' '.join(words)}: status {done.returncode}: {done.stderr or done.stdout}"
        )
    return done.stdout


def skip(why: str) -> None:
    print(f"network: skipped: {why}", file=sys.stderr)
    sys.exit(77)


class Link:
    """Two namespaces, removed at the end; or this one, of both sides."""

    def __init__(self, stack: ExitStack, loopback: bool) -> None:
        self.names: list[str] = []
        self.rank = "127.0.0.1" if loopback else RANK
        if not loopback:
            self.join(stack)

    def join(self, stack: ExitStack) -> None:
        self.names = [f"fanin-{side}-{os.getpid()}" for side in "rw"]
        for name in self.names:
            added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if added.returncode != 0:
                skip(f"no network namespaces here: {added.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        first, second = self.names
        pair = ["type", "veth", "peer", "name", "veth1", "netns", second]
        run("ip", "-n", first, "link", "add", "veth0", *pair)
        for name, device, address in ((first, "veth0", RANK), (second, "veth1", WORKER)):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def inside(self, side: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[side], *words] if self.names else list(words)

    def start(self, stack: ExitStack, *words: str) -> subprocess.Popen[str]:
        """On the rank's side, until the end; returns when it has said that it is ready."""
        process = subprocess.Popen(self.inside(0, *words), stdout=subprocess.PIPE, text=True)
        stack.callback(process.wait, DEADLINE)
        stack.callback(process.terminate)
        if process.stdout is None or not process.stdout.readline():
            sys.exit(f"network: {words[0]} does not start")
        return process

    def worker(self, *words: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(run(*self.inside(1, *words)))
        return answer


def connections(link: Link, tool: str) -> int:
    """That the worker has to the rank by itself."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/adapter"
        pulled = link.worker(tool, "pull", f"{link.rank}:{PORT}", *STREAM, "--out", out)
    return int(pulled["ranks"][0]["connections"])


def measure(link: Link, arguments: argparse.Namespace) -> dict[str, Any]:
    tool, target = arguments.nixl_fetch, f"{link.rank}:{PORT}"
    streams = connections(link, tool)
    iperf = ["iperf3", "-c", link.rank, "-p", str(IPERF_PORT), "-R", "-J", "-P", str(streams)]
    iperf += ["-t", str(arguments.seconds)]
    pull = [tool, "bench", target, *STREAM, "--iterations", str(arguments.iterations)]
    rates: dict[str, list[float]] = {"iperf3": [], "fanin": [], "fanin, no checksums": []}
    for _ in range(arguments.rounds):
        rates["iperf3"].append(link.worker(*iperf)["end"]["sum_received"]["bits_per_second"] / 8)
        rates["fanin"].append(link.worker(*pull)["bytes_per_second"])
        rates["fanin, no checksums"].append(
            link.worker(*pull, "--no-checksums")["bytes_per_second"]
        )
    return {
        "connections": streams,
        "cores": len(os.sched_getaffinity(0)),
        "bytes_per_second": rates,
    }


def tell(result: dict[str, Any]) -> None:
    rates = result["bytes_per_second"]
    print(f"{result['connections']} connections, {result['cores']} cores")
    for name, values in rates.items():
        ratios = [one / base for one, base in zip(values, rates["iperf3"], strict=True)]
        spread = f"({min(values) / 1e9:.2f} to {max(values) / 1e9:.2f})"
        print(
            f"{name:20} {statistics.median(values) / 1e9:6.2f} GB/s {spread}, "
            f"{statistics.median(ratios):.2f} x of iperf3 ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nixl_fetch")
    parser.add_argument("--shape", default="dense")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each run of iperf3")
    parser.add_argument("--iterations", type=int, default=20, help="pulls of each round")
    parser.add_argument("--data-threads", type=int, help="of the rank")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.nixl_fetch = os.path.abspath(arguments.nixl_fetch)
    if os.geteuid() != 0 and not arguments.loopback:
        skip("network namespaces need root")
    for program in ["iperf3"] if arguments.loopback else ["ip", "iperf3"]:
        if shutil.which(program) is None:
            skip(f"there is no {program}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces go in any case
    with ExitStack() as stack:
        link = Link(stack, arguments.loopback)
        serve = [
            arguments.nixl_fetch,
            "serve",
            "--adapter-shape",
            arguments.shape,
            "--world-size",
            "1",
        ]
        serve += ["--base-port", str(PORT)]
        if not arguments.loopback:
            serve += ["--open", "--bind", RANK, "--allow", f"{RANK.rsplit('.', 1)[0]}.0/24"]
        if arguments.data_threads:
            serve += ["--data-threads", str(arguments.data_threads)]
        link.start(stack, *serve)
        link.start(stack, "stdbuf", "-oL", "iperf3", "-s", "-p", str(IPERF_PORT))
        result = measure(link, arguments)
    print(json.dumps(result, indent=2)) if arguments.json else tell(result)


if __name__ == "__main__":
    main()
