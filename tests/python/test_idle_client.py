# SPDX-License-Identifier: Apache-2.0
"""A client that is kept between calls, as engines do: nobody listens meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import fanin
import pytest
from limits import limits
from local_world import Processes, stop

LOST = 1.0  # seconds


@pytest.fixture
def trainer() -> Iterator[Processes]:
    made = Processes(use_ucx=False)
    try:
        made.publish(3)
        yield made
    finally:
        made.close()


def test_an_answer_that_nobody_read_is_no_silence(trainer: Processes, tmp_path: Path) -> None:
    """What rank 0 says ends the pull, and rank 1's answer comes when nobody listens."""
    slow = trainer.processes[1].pid
    assert slow is not None
    with limits(lost_ms=int(1000 * LOST)), fanin.Client(trainer.addresses, use_ucx=False) as client:
        assert client.pull_adapter("0", tmp_path / "a", step=3).step == 3
        stop(slow)
        try:
            with pytest.raises(fanin.SupersededError):
                client.pull_adapter("0", tmp_path / "b", step=2, timeout=20.0)
        finally:
            os.kill(slow, signal.SIGCONT)
        # Longer than a rank that owes an answer may be silent: that is what is tested.
        time.sleep(1.5 * LOST)
        assert len(client.publications(timeout=20.0)) == len(trainer.addresses)
