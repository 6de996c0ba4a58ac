# SPDX-License-Identifier: Apache-2.0
"""Ranks that stop, or die, after a pull whose end a thread of the client still tells them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import fanin
import pytest
from local_world import SLOWNESS, served, stop

WORLD = 5  # from four on a thread tells them
TIME = 0.5 * SLOWNESS


def fails(client: fanin.Client, directory: Path, rank: int) -> None:
    """A pull of a rank that is not there ends in its time, and names it."""
    started = time.monotonic()
    with pytest.raises(fanin.FaninError, match=f"rank {rank}") as failed:
        client.pull_adapter(0, directory, timeout=TIME)
    assert time.monotonic() - started < 4 * TIME, failed.value
    assert not directory.exists()


def threads() -> set[str]:
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def test_who_is_still_to_be_told_of_an_end(tmp_path: Path) -> None:
    with served(WORLD) as (target, processes):
        with fanin.Client(target.split(","), use_ucx=False, path="cma") as client:
            for i, rank in enumerate((2, 0)):
                client.pull_adapter(0, tmp_path / f"before-{i}")
                assert "fanin-late" in threads() or len(os.sched_getaffinity(0)) == 1
                stop(processes[rank])
                fails(client, tmp_path / f"stopped-{i}", rank)
                os.kill(processes[rank], signal.SIGCONT)
                client.pull_adapter(0, tmp_path / f"after-{i}")
            os.kill(processes[3], signal.SIGKILL)
            fails(client, tmp_path / "killed", 3)
            stop(processes[1])
            started = time.monotonic()
        assert time.monotonic() - started < 4 * TIME
        os.kill(processes[1], signal.SIGCONT)
