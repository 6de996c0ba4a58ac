# SPDX-License-Identifier: Apache-2.0
"""crowd.py: strangers from 52 addresses at one rank, all of which flood. Run it in a network
namespace of its own, whose loopback gets them all. 51 of them have four connections each; the 52nd
has one. Prints for IPv4, and for /64s of IPv6, how many turns that one had, and how many the one of
the others that had most."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

from limits import limits
from open_rank import serve, usable
from strangers import PING, Stranger, frame

PEERS, EACH, TURNS = 51, 4, 4
A_TURN = 32  # requests, after which it is looked whether there is something left
SHARE = 0.004
DEADLINE_S = 50.0
NETWORKS = {
    "IPv4": ("10.52.0.0/16", "10.52.0.1", "10.52.1.{}"),
    "IPv6": ("fd52::/16", "fd52::1", "fd52:0:0:{:x}::1"),
}


class Crowd:
    """Those who flood: so much lies before the rank of each that none has to be quick to be served.
    The last one has one connection."""

    def __init__(self, port: int, address: str, sources: str) -> None:
        each = [EACH] * PEERS + [1]
        strangers = [
            (peer, Stranger(port, sources.format(peer + 2), target=address))
            for peer, connections in enumerate(each)
            for _ in range(connections)
        ]
        last = strangers[-1][1]
        last.socket.sendall(frame(PING, 1, {}))
        self.turn = A_TURN * (24 + len(last.answer()[1]))  # bytes of its answers
        self.peer_of = {one.socket: peer for peer, one in strangers}
        for one in self.peer_of:
            one.setblocking(False)
        self.blob = b"".join(frame(PING, i + 2, {}) for i in range(4 * A_TURN))
        self.left = dict.fromkeys(self.peer_of, b"")
        self.got = [0] * len(each)

    def go_on(self) -> None:
        """What their sockets take and have."""
        for one, peer in self.peer_of.items():
            self.left[one] = self.left[one] or self.blob
            with contextlib.suppress(BlockingIOError):
                self.left[one] = self.left[one][one.send(self.left[one]) :]
            with contextlib.suppress(BlockingIOError):
                self.got[peer] += len(one.recv(1 << 20))


def crowd(network: str, address: str, sources: str) -> tuple[float, float]:
    """Turns of the peer with one connection, and of the one of the others that had most."""
    with limits(peer_cpu=round(1000 * SHARE)), serve(address, network, insecure=True) as server:
        all_of_them = Crowd(server.port, address, sources)
        deadline = time.monotonic() + DEADLINE_S
        while (delayed := server.stats()["requests_delayed"]) <= PEERS * EACH:
            all_of_them.go_on()
            assert time.monotonic() < deadline, f"only {delayed} times had anybody to wait"
        for turns in (1, TURNS):  # what was had at once, and is under way, does not count
            all_of_them.got = [0] * (PEERS + 1)
            while all_of_them.got[-1] < turns * all_of_them.turn:
                all_of_them.go_on()
                assert time.monotonic() < deadline, f"bytes of answers: {all_of_them.got}"
        *others, last = (got / all_of_them.turn for got in all_of_them.got)
        return last, max(others)


def main() -> None:
    """Both families."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for name, (network, address, sources) in NETWORKS.items():
        all_of_them = [address] + [sources.format(i + 2) for i in range(PEERS + 1)]
        added = "".join(f"address add {one} dev lo\n" for one in all_of_them)
        subprocess.run(["ip", "-batch", "-"], input=added, text=True, check=True)
        for one in all_of_them:
            usable(one, address)
        print(name, *crowd(network, address, sources))


if __name__ == "__main__":
    sys.exit(main())
