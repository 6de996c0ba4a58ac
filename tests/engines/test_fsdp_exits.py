# SPDX-License-Identifier: Apache-2.0
"""How trainers end, and what a worker sees of it. Of killed ranks tests/faults tells."""

from __future__ import annotations

import concurrent.futures
import pathlib

import fanin
import pytest
from worlds import PATIENCE, World

ENDS = {
    "close, destroy": 0,
    "destroy, close": 0,
    "destroy": 0,
    "nothing": 0,
    "exception": 1,
    "exception in an update": 1,
    "exception in with": 1,
    "status 3": 3,
}
CRASHES = ("Fatal Python error", "Segmentation", "terminate called", "double free")


@pytest.mark.parametrize("how", ENDS)
def test_trainers_end(how: str, tmp_path: pathlib.Path) -> None:
    """While a worker waits for their next step, which then fails and tells whom it lost."""
    with World(2, {}, tmp_path / "world", "fsdp_trainer.py") as world:
        with (
            fanin.Client(world.expect("ready")[0]["addresses"]) as client,
            concurrent.futures.ThreadPoolExecutor(1) as pool,
        ):
            assert client.pull_adapter("0", tmp_path / "first").step == 1
            waiting = pool.submit(
                client.pull_adapter, "0", tmp_path / "never", at_least=1000, timeout=PATIENCE
            )
            world.tell("end", how=how)
            world.expect("ending")
            assert world.wait() == [ENDS[how]] * 2
            with pytest.raises(fanin.FaninError) as failure:
                waiting.result(timeout=PATIENCE)
            ours = (fanin.errors.RequestError, fanin.errors.PullTimeoutError)
            assert not isinstance(failure.value, ours), failure.value
            assert failure.value.rank in (0, 1), failure.value
        for rank in world.ranks:
            log = rank.log.read_text()
            assert not [word for word in CRASHES if word in log], rank.tail()
            assert ("Traceback" in log) == how.startswith("exception"), rank.tail()
    assert not (tmp_path / "never").exists()
