# SPDX-License-Identifier: Apache-2.0
"""crowd.py: strangers from 52 addresses at one rank. Run it in a network namespace of its own,
whose loopback gets them all. 51 of them have four connections each, which flood; the 52nd has one.
Prints for IPv4, and for /64s of IPv6, how often it was answered, and how often in the same time a
peer of the others had a turn: the one that had most."""

from __future__ import annotations

import contextlib
import ctypes
import select
import subprocess
import sys
import time

import fanin
from strangers import PING, Stranger, frame

PEERS, EACH, ANSWERS = 51, 4, 3
A_TURN = 32  # requests, after which it is looked whether there is something left
SHARE = 0.004
BEFORE_S = 30.0
NETWORKS = {
    "IPv4": ("10.52.0.0/16", "10.52.0.1", "10.52.1.{}"),
    "IPv6": ("fd52::/16", "fd52::1", "fd52:0:0:{:x}::1"),
}


def serve(network: str, address: str) -> fanin.Server:
    """A rank, with a tensor of its memory."""
    memory = (ctypes.c_char * 64)()
    box = fanin.Box((0,), (64,), (0,), ctypes.addressof(memory))
    server = fanin.Server(
        world_id=bytes(range(16)),
        rank=0,
        world_size=1,
        bind=address,
        allow=network,
        open=True,
        insecure=True,
        use_ucx=False,
        peer_cpu=SHARE,
    )
    server.put(0, [fanin.Shard("a", "U8", (64,), (box,), owner=memory)])
    server.commit(0, 1)
    return server


class Crowd:
    """Those who flood."""

    def __init__(self, port: int, address: str, sources: str) -> None:
        self.peer_of = {
            Stranger(port, sources.format(i + 2), target=address).socket: i
            for i in range(PEERS)
            for _ in range(EACH)
        }
        for one in self.peer_of:
            one.setblocking(False)
        self.blob = b"".join(frame(PING, i + 2, {}) for i in range(4 * A_TURN))
        self.left = dict.fromkeys(self.peer_of, b"")
        self.got = [0] * PEERS

    def go_on(self) -> None:
        """What their sockets take and have."""
        for one, peer in self.peer_of.items():
            self.left[one] = self.left[one] or self.blob
            with contextlib.suppress(BlockingIOError):
                self.left[one] = self.left[one][one.send(self.left[one]) :]
            with contextlib.suppress(BlockingIOError):
                self.got[peer] += len(one.recv(1 << 20))


def answered(one: Stranger) -> int:
    """Asks; how many bytes the answer has, when it has come. 0: it has not yet."""
    if not select.select([one.socket], [], [], 0)[0]:
        return 0
    _, body = one.answer()
    return 24 + len(body)


def crowd(network: str, address: str, sources: str) -> tuple[int, float]:
    """Answers to one connection, and turns of the peer that had most."""
    with serve(network, address) as server:
        others = Crowd(server.port, address, sources)
        one = Stranger(server.port, sources.format(PEERS + 2), target=address)
        deadline, answers, size = time.monotonic() + BEFORE_S, 0, 0
        while server.stats()["requests_delayed"] < PEERS * EACH:
            others.go_on()
            assert time.monotonic() < deadline, "nobody has to wait"
        one.socket.sendall(frame(PING, 1, {}))
        while answers <= ANSWERS:
            others.go_on()
            assert time.monotonic() < deadline, f"{answers} answers, others {others.got}"
            if more := answered(one):
                answers, size = answers + 1, more
                one.socket.sendall(frame(PING, 1, {}))
                if answers == 1:  # by now what was had at once is under no way any more
                    others.got = [0] * PEERS
        return answers - 1, max(others.got) / size / A_TURN


def main() -> None:
    """Both families."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for name, (network, address, sources) in NETWORKS.items():
        all_of_them = [address] + [sources.format(i + 2) for i in range(PEERS + 1)]
        added = "".join(f"address add {one} dev lo\n" for one in all_of_them)
        subprocess.run(["ip", "-batch", "-"], input=added, text=True, check=True)
        answers, turns = crowd(network, address, sources)
        print(name, answers, turns)


if __name__ == "__main__":
    sys.exit(main())
