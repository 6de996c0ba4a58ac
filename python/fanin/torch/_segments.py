# SPDX-License-Identifier: Apache-2.0
"""How many allocations of device memory the ranks' shards lie in, and what that costs workers."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence

import torch

_log = logging.getLogger("fanin.torch")

MANY = 2000
"""Allocations of the ranks of one host from which on mapping them is worth a word."""
_SECONDS = 50e-6
"""What the driver takes to map one; it does one after the other."""


def count_segments(addresses: Sequence[tuple[int, int]]) -> int:
    """Of (device, address): how many allocations of PyTorch's hold them.

    Addresses in none (another allocator's) count as one each. Asks the allocator only if many.
    """
    different = set(addresses)
    if len(different) <= MANY // 64:  # no world whose ranks are 64 a host has too many
        return len(different)
    try:
        snapshot = torch.cuda.memory_snapshot()
    except RuntimeError:  # another allocator, whose memory is not mapped either
        return 0
    segments = sorted((one["device"], one["address"], one["total_size"]) for one in snapshot)
    found = set()
    for device, address in different:
        at = bisect.bisect_right(segments, (device, address, 1 << 63)) - 1
        inside = at >= 0 and segments[at][0] == device
        inside = inside and address < segments[at][1] + segments[at][2]
        found.add(segments[at][:2] if inside else (device, address))
    return len(found)


def tell_segments(rank: int, hosts: Sequence[str], segments: Sequence[int]) -> None:
    """The first rank of each host says in the log how many allocations its ranks' shards lie in.

    hosts, segments: of each rank.
    """
    here = [at for at, host in enumerate(hosts) if host == hosts[rank]]
    total = sum(segments[at] for at in here)
    if total <= MANY or rank != here[0]:
        return
    _log.warning(
        "what the %d rank%s of this host publish lies in %d allocations of device memory, which "
        "each worker on it maps before its first pull: fanin.torch.compact(model), before the "
        "server is made, makes the first pull of each worker about %.1f s faster",
        len(here),
        "" if len(here) == 1 else "s",
        total,
        total * _SECONDS,
    )
