# SPDX-License-Identifier: Apache-2.0
"""This host's address on the way to others."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from .info import is_loopback


def route_address(targets: Sequence[str]) -> str | None:
    """This host's address on the way to the first target that another address than 127.x leads to.

    Sends nothing; a name among the targets is looked up, which may block.
    """
    for target in targets:
        try:
            infos = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in infos:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    found = str(probe.getsockname()[0])
            except OSError:
                continue
            if not is_loopback(found):
                return found
    return None
