# SPDX-License-Identifier: Apache-2.0
"""relay_hosts.py: a trainer and readers that hand on, each on a host of its own: network namespaces
on one bridge. Run it in a namespace of its own. Obeys lines of JSON, one a host at a time, and
answers each by a line: {"host": NAME, "do": "serve" | "pull" | "end", ...}. The first line it
prints tells that the hosts can be made, or why not."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from typing import IO, Any

import fanin
import fanin.relay
import numpy as np

NETWORK = "10.91.0.0/16"
RUN, TENSORS = "full:0", 8
PATIENCE = 30.0


# ------------------------------------------------------------------------- on a host


class Host:
    """What one host runs. Calls by name; what they return is the answer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.told: list[str] = []
        self.relay: fanin.Relay | None = None
        self.server: fanin.Server | None = None
        self.command: subprocess.Popen[str] | None = None
        handler = logging.Handler()
        handler.emit = lambda record: self.told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fanin").addHandler(handler)
        logging.getLogger("fanin").setLevel(logging.INFO)

    def serve(self, **credentials: str) -> dict[str, Any]:
        """A trainer of one rank, in place of the one before."""
        if self.server is not None:
            self.server.close()
        self.memory = [np.zeros((1024, 1024), np.uint8) for _ in range(TENSORS)]
        self.server = fanin.Server(
            world_id=os.urandom(16),
            rank=0,
            world_size=1,
            bind=self.address,
            allow=NETWORK,
            open=True,
            use_ucx=False,
            **credentials,
        )
        self.server.put(RUN, [fanin.shard_of(f"t{i}", v) for i, v in enumerate(self.memory)])
        return {"address": f"{self.address}:{self.server.port}"}

    def commit(self, step: int) -> dict[str, Any]:
        """Another step of random bytes."""
        assert self.server is not None
        random = np.random.default_rng(step)
        self.server.begin_update(RUN)
        for tensor in self.memory:
            tensor[:] = random.integers(0, 256, tensor.shape, np.uint8)
        self.server.commit(RUN, step)
        return {"digest": digest_of(self.memory)}

    def reader(self, trainer: str, shows: dict[str, str] | None = None, **credentials: str) -> Any:
        """A reader that hands on to the network, in place of the one before. shows: what it proves
        itself to other readers by, if not by the same."""
        if self.relay is not None:
            self.relay.close()
        serving = fanin.relay._serving

        def other(options: Any) -> Any:
            made = serving(options)
            for name, value in (shows or {}).items():
                object.__setattr__(made, name, value)
            return made

        fanin.relay._serving = other
        try:
            how: dict[str, Any] = {"network": NETWORK, "use_ucx": False, "connect_timeout": 10.0}
            self.relay = fanin.Relay([trainer], **how, **credentials)
        finally:
            fanin.relay._serving = serving
        self.into = {f"t{i}": np.zeros((1024, 1024), np.uint8) for i in range(TENSORS)}
        return {}

    def run(self, words: list[str]) -> dict[str, Any]:
        """A command that runs as long as the host does; the first line that it prints."""
        self.command = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.command.stdout is not None
        return {"line": self.command.stdout.readline()}

    def pull(self, step: int) -> dict[str, Any]:
        """Its bytes, where they came from, and what the library has logged."""
        assert self.relay is not None
        self.told.clear()
        before = self.relay.stats()
        result = self.relay.pull_into(RUN, self.into, step=step, timeout=PATIENCE)
        after = self.relay.stats()
        names = ("bytes_from_origin", "bytes_from_relays")
        counts = {name: after[name] - before[name] for name in names}
        digest = digest_of([self.into[f"t{i}"] for i in range(TENSORS)])
        return {**counts, "digest": digest, "path": result.path, "log": list(self.told)}


def digest_of(memory: list[np.ndarray]) -> str:
    whole = hashlib.sha256()
    for tensor in memory:
        whole.update(tensor.tobytes())
    return whole.hexdigest()


def obey(host: Host) -> None:
    """Until its lines end."""
    for line in sys.stdin:
        fields = json.loads(line)
        try:
            told = getattr(host, fields.pop("do"))(**fields)
        except fanin.FaninError as error:
            told = {"error": error.message, "remedy": error.remedy, "type": type(error).__name__}
        print(json.dumps(told), flush=True)
    if host.command is not None:
        host.command.kill()


# ------------------------------------------------------------------------- the switch


class Switch:
    """Hosts by name, each made when it is named first."""

    def __init__(self) -> None:
        self._hosts: dict[str, subprocess.Popen[str]] = {}
        self._made = 0
        ip("link set lo up", "link add switch type bridge", "link set switch up")

    def ask(self, name: str, fields: dict[str, Any]) -> str:
        """A host's answer; "" if it has ended."""
        host = self._hosts.get(name) or self._add(name)
        assert host.stdin is not None and host.stdout is not None
        host.stdin.write(json.dumps(fields) + "\n")
        host.stdin.flush()
        return host.stdout.readline()

    def end(self, name: str) -> None:
        """A host's power fails: nothing is said any more."""
        host = self._hosts.pop(name)
        ip(f"link delete to-{host.pid}")
        host.kill()
        host.wait()

    def _add(self, name: str) -> subprocess.Popen[str]:
        self._made += 1
        address = f"10.91.0.{self._made}"
        # Of another IPC namespace: else they would be one host for whom bytes need no network.
        command = ["unshare", "--net", "--ipc", sys.executable, "-B", __file__, address]
        host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hosts[name] = host
        assert host.stdout is not None
        assert host.stdout.readline() == "here\n"
        ip(
            f"link add to-{host.pid} type veth peer name eth0 netns {host.pid}",
            f"link set to-{host.pid} master switch up",
        )
        inside = ["nsenter", f"--net=/proc/{host.pid}/ns/net"]
        ip(f"address add {address}/16 dev eth0", "link set eth0 up", "link set lo up", by=inside)
        return host


def ip(*lines: str, by: list[str] | None = None) -> None:
    """Lines of `ip -batch`. Raises what it says."""
    told = subprocess.run(
        [*(by or []), "ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        check=False,
    )
    if told.returncode != 0:
        raise OSError(told.stderr.strip())


def main() -> None:
    """The switch, or the host at the address that is given."""
    if len(sys.argv) > 1:
        print("here", flush=True)
        obey(Host(sys.argv[1]))
        return
    try:
        switch = Switch()
    except OSError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    print(json.dumps({"missing": ""}), flush=True)
    for line in sys.stdin:
        fields = json.loads(line)
        name = fields.pop("host")
        if fields["do"] == "end":
            switch.end(name)
            print("{}", flush=True)
        else:
            print(switch.ask(name, fields), end="", flush=True)


if __name__ == "__main__":
    main()
