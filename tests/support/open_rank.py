# SPDX-License-Identifier: Apache-2.0
"""A rank that is open to a network, at an address of a namespace of the test's own, and what such a
test waits for."""

from __future__ import annotations

import ctypes
import socket
import time
from typing import Any

import fanin
from strangers import RUN

DEADLINE_S = 50.0


def tensor() -> fanin.Shard:
    """What is published, or room for it."""
    memory = (ctypes.c_char * 64)()
    box = fanin.Box((0,), (64,), (0,), ctypes.addressof(memory))
    return fanin.Shard("a", "U8", (64,), (box,), owner=memory)


def serve(address: str, allow: str, **more: Any) -> fanin.Server:
    """A rank that has published."""
    server = fanin.Server(
        world_id=bytes(range(1, 17)),
        rank=0,
        world_size=1,
        bind=address,
        allow=allow,
        open=True,
        use_ucx=False,
        **more,
    )
    server.put(RUN, [tensor()])
    server.commit(RUN, 1)
    return server


def usable(source: str, target: str) -> None:
    """Waits until the kernel lets *source* speak to *target*: an address of IPv6 is there, and its
    route, when a worker of the kernel has come round to it, which takes a while on a busy machine."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((source, 0))
                probe.connect((target, 9))  # sends nothing
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.01)
