#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""network.py NIXL_FETCH [--shape SHAPE] [--rounds N] [--seconds S] [--streams N,...] [--loopback]
           [--secret]
network.py NIXL_FETCH --deltas [--share PERCENT,...] [--rates GBITS,...] [--mib N] [--rounds N]
           [--secret] [--directory DIR]

One rank and one worker in two network namespaces, joined by a veth pair, so that bytes go by TCP;
beside it iperf3 the same way over the same link, with as many connections as the worker has.
Rounds of iperf3, the worker and the worker without checksums take turns, each round beginning with
another one; medians, and medians of the ratios of each round. iperf3 throws away what it receives,
the worker puts it in its place. Needs ip (iproute2), iperf3, and root or namespaces of users;
without one of them it says so and exits with status 77. --loopback does it over 127.0.0.1 instead,
where neither namespaces nor ip is needed. With --secret a worker pulls by TLS too, from a second
rank.

--deltas measures something else, without iperf3: pulls of what has changed beside whole ones, over
links of so many Gb/s, see deltas.py. With --directory the command pulls into model directories
below DIR, and not a worker into its memory. It needs NumPy.
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
DEVICES, NETWORK = ("veth0", "veth1"), "10.213.9.0/24"
SECURED_PORT = 6200
STREAM = ["--path", "stream", "--no-unix", "--json"]


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=DEADLINE)
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
            added = subprocess.run(
                ["ip", "netns", "add", name],
                capture_output=True,
                text=True,
                check=False,
            )
            if added.returncode != 0:
                skip(f"no network namespaces here: {added.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        first, second = self.names
        pair = ["type", "veth", "peer", "name", DEVICES[1], "netns", second]
        run("ip", "-n", first, "link", "add", DEVICES[0], *pair)
        for name, device, address in zip(self.names, DEVICES, (RANK, WORKER), strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def shape(self, gbits: float) -> None:
        """Both directions carry so much, by token buckets, which take packets of 64 KiB."""
        for name, device in zip(self.names, DEVICES, strict=True):
            bucket = f"{max(256, round(400 * gbits))}kb"
            carries = ["rate", f"{gbits}gbit", "burst", bucket, "latency", "50ms", "mtu", "70000"]
            run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *carries)

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


def rates_of(link: Link, arguments: argparse.Namespace, streams: int) -> dict[str, list[float]]:
    """Bytes a second of each round."""
    iperf = ["iperf3", "-c", link.rank, "-p", str(IPERF_PORT), "-R", "-J"]
    iperf += ["-P", str(streams), "-t", str(arguments.seconds)]
    bench = [arguments.nixl_fetch, "bench", *STREAM]
    bench += ["--iterations", str(arguments.iterations), "--streams", str(streams)]
    pull = [*bench, f"{link.rank}:{PORT}"]
    kinds = {
        "iperf3": lambda: link.worker(*iperf)["end"]["sum_received"]["bits_per_second"] / 8,
        "fanin": lambda: link.worker(*pull)["bytes_per_second"],
        "fanin, no checksums": lambda: link.worker(*pull, "--no-checksums")["bytes_per_second"],
    }
    if arguments.secret_file:
        secured = [*bench, f"{link.rank}:{SECURED_PORT}", "--secret-file", arguments.secret_file]
        kinds["fanin, TLS"] = lambda: link.worker(*secured)["bytes_per_second"]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for _ in range(arguments.rounds):
        for kind in order:
            rates[kind].append(kinds[kind]())
        order.append(order.pop(0))
    return rates


def measure(link: Link, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "iperf3": run("iperf3", "--version").split()[1],
        "cores": len(os.sched_getaffinity(0)),
        "link": "veth" if link.names else "loopback",
        "bytes_per_second": {n: rates_of(link, arguments, n) for n in arguments.streams},
    }


def spread(values: list[float], unit: float = 1) -> str:
    """The median, the least and the most."""
    middle = statistics.median(values) / unit
    return f"{middle:5.2f} ({min(values) / unit:.2f} to {max(values) / unit:.2f})"


def tell(result: dict[str, Any]) -> None:
    print(f"{result['link']}, {result['cores']} cores, iperf3 {result['iperf3']}")
    for streams, rates in result["bytes_per_second"].items():
        for name, values in rates.items():
            ratios = [one / base for one, base in zip(values, rates["iperf3"], strict=True)]
            print(
                f"{streams:2} connections  {name:20} {spread(values, 1e9)} GB/s, "
                f"{spread(ratios)} x of iperf3"
            )


def have_namespaces() -> None:
    """This process may make networks; else it begins again as root of a user namespace, where it
    may. A /run of its own is where ip keeps their names."""
    spaces = ["--net", "--mount"]
    for command in (["unshare", *spaces], ["unshare", "--map-root-user", *spaces]):
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            continue
        if len(command) > 3:
            mounted = 'mount -t tmpfs tmpfs /run && exec "$@"'
            inside = ["sh", "-c", mounted, "sh", sys.executable]
            os.execvp(command[0], [*command, *inside, *sys.argv])
        return
    skip(f"no network namespaces here: {tried.stderr.strip()}")


def numbers_of(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def streams_of(text: str) -> list[int]:
    streams = [int(one) for one in text.split(",")]
    if not all(1 <= one <= 16 for one in streams):
        raise ValueError(text)
    return streams


def make_secret(stack: ExitStack, arguments: argparse.Namespace) -> None:
    arguments.secret_file = None
    if arguments.secret:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="network-"))
        arguments.secret_file = os.path.join(folder, "secret")
        run(arguments.nixl_fetch, "secret", arguments.secret_file)


def measure_deltas(stack: ExitStack, link: Link, arguments: argparse.Namespace) -> None:
    import deltas

    make_secret(stack, arguments)
    # Without a secret the worker is a stranger, whose CPU time is limited else.
    served = {"open": True, "bind": RANK, "allow": NETWORK, "stranger_cpu": 16.0}
    found = deltas.measure(link, arguments, served)
    if arguments.json:
        print(json.dumps(found, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nixl_fetch")
    parser.add_argument("--shape", default="dense")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each run of iperf3")
    parser.add_argument("--iterations", type=int, default=20, help="pulls of each round")
    parser.add_argument("--streams", type=streams_of, default=[1, 4, 8], help="connections, 1,4,8")
    parser.add_argument("--data-threads", type=int, help="of the rank")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--secret", action="store_true", help="also by TLS")
    parser.add_argument("--deltas", action="store_true")
    parser.add_argument("--share", type=numbers_of, default=[0.1, 1, 5], dest="shares")
    parser.add_argument("--rates", type=numbers_of, default=[1, 10], help="Gb/s, of --deltas")
    parser.add_argument("--mib", type=int, default=512, help="of --deltas")
    parser.add_argument("--directory", help="of --deltas: where the command makes directories")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.nixl_fetch = os.path.abspath(arguments.nixl_fetch)
    if arguments.deltas and arguments.loopback:
        parser.error("--deltas needs links of a rate")
    wanted = ["ip", "unshare", "tc"] if arguments.deltas else ["ip", "unshare", "iperf3"]
    for program in ["iperf3"] if arguments.loopback else wanted:
        if shutil.which(program) is None:
            skip(f"there is no {program}")
    if not arguments.loopback:
        have_namespaces()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces go in any case
    with ExitStack() as stack:
        link = Link(stack, arguments.loopback)
        if arguments.deltas:
            measure_deltas(stack, link, arguments)
            return
        shape = ["--adapter-shape", arguments.shape, "--world-size", "1"]
        serve = [arguments.nixl_fetch, "serve", *shape]
        if not arguments.loopback:
            serve += ["--open", "--insecure", "--bind", RANK, "--allow", NETWORK]
        if arguments.data_threads:
            serve += ["--data-threads", str(arguments.data_threads)]
        link.start(stack, *serve, "--base-port", str(PORT))
        make_secret(stack, arguments)
        if arguments.secret:
            secured = ["--base-port", str(SECURED_PORT), "--secret-file", arguments.secret_file]
            link.start(stack, *serve, *secured)
        link.start(stack, "stdbuf", "-oL", "iperf3", "-s", "-p", str(IPERF_PORT))
        result = measure(link, arguments)
    print(json.dumps(result, indent=2)) if arguments.json else tell(result)


if __name__ == "__main__":
    main()
