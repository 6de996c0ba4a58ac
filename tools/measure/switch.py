# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: network namespaces behind a bridge, each by a link of a given rate.

The bridge has a namespace of its own, so that nothing is left when the namespaces are removed.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import ExitStack

NETWORK = "10.214.0.0/16"
DEADLINE = 60
QUEUE = "48kb"  # of a link: 20 ms at 20 Mbit/s
LARGEST = "8192"  # a packet; tbf drops what is larger than its bucket


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=DEADLINE)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Switch:
    """So many hosts, removed at the end of *stack*. Needs root and ip, tc, tbf.

    congestion: TCP's control on the hosts; None: this machine's.
    far: so many hosts, the last ones, lie behind a line of *line* Mbit/s, another site.

    Raises:
        OSError: this machine lacks one of them; says which command failed, and how.
    """

    def __init__(
        self,
        stack: ExitStack,
        hosts: int,
        mbit: float,
        congestion: str | None = None,
        far: int = 0,
        line: float = 0.0,
    ) -> None:
        self._name = f"fanin-switch-{os.getpid()}"
        self.mbit, self._congestion = mbit, congestion
        self._add(stack, self._name)
        self._bridge("bridge")
        if far:
            self._bridge("far")
            run("ip", "-n", self._name, "link", "add", "line0", "type", "veth", "peer", "line1")
            for end, bridge in (("line0", "bridge"), ("line1", "far")):
                self._plug(end, bridge)
                self._shape(self._name, end, line)
        for host in range(hosts):
            self._join(stack, host, "far" if host >= hosts - far else "bridge")

    def address(self, host: int) -> str:
        return f"10.214.{host >> 8}.{(host & 255) + 1}"

    def _host(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _add(self, stack: ExitStack, name: str) -> None:
        run("ip", "netns", "add", name)
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)

    def _bridge(self, name: str) -> None:
        run("ip", "-n", self._name, "link", "add", name, "type", "bridge")
        run("ip", "-n", self._name, "link", "set", name, "up")

    def _plug(self, device: str, bridge: str) -> None:
        words = ["master", bridge, "gso_max_size", LARGEST, "up"]
        run("ip", "-n", self._name, "link", "set", "dev", device, *words)

    def _join(self, stack: ExitStack, host: int, bridge: str) -> None:
        own, port = self._host(host), f"port{host}"
        self._add(stack, own)
        pair = ["type", "veth", "peer", "name", "link", "netns", own]
        run("ip", "-n", self._name, "link", "add", port, *pair)
        self._plug(port, bridge)
        run("ip", "-n", own, "addr", "add", f"{self.address(host)}/16", "dev", "link")
        run("ip", "-n", own, "link", "set", "dev", "link", "gso_max_size", LARGEST, "up")
        run("ip", "-n", own, "link", "set", "lo", "up")
        if self._congestion is not None:
            setting = f"net.ipv4.tcp_congestion_control={self._congestion}"
            run("ip", "netns", "exec", own, "sysctl", "-qw", setting)
        self.up(host, self.mbit)
        self._shape(self._name, port, self.mbit)

    def up(self, host: int, mbit: float) -> None:
        """From now on the host sends so fast."""
        self._shape(self._host(host), "link", mbit)

    def _shape(self, name: str, device: str, mbit: float) -> None:
        rate = ["rate", f"{mbit}mbit", "burst", "16kb", "limit", QUEUE]
        run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def sent(self, host: int) -> int:
        """Bytes that the host has sent, with all headers."""
        return self._counted(f"port{host}", "rx")

    def crossed(self) -> int:
        """Bytes that have crossed the line, both ways."""
        return self._counted("line0", "rx") + self._counted("line0", "tx")

    def _counted(self, device: str, way: str) -> int:
        told = run("ip", "-n", self._name, "-s", "-j", "link", "show", device)
        return int(json.loads(told)[0]["stats64"][way]["bytes"])

    def inside(self, host: int) -> list[str]:
        """What runs a command on that host."""
        return ["ip", "netns", "exec", self._host(host)]
