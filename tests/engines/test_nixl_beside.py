# SPDX-License-Identifier: Apache-2.0
"""fanin and NVIDIA's nixl, each with its own UCX, in one process: both orders, on both sides."""

from __future__ import annotations

import pathlib

import pytest
from worlds import child


@pytest.fixture(scope="module")
def end_of_nixl(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The exit status of a process that used nixl alone: its libraries may crash as they unload."""
    folder = tmp_path_factory.mktemp("alone")
    with child("alone", "nixl_beside.py", {"role": "alone"}, folder) as alone:
        alone.expect("closed")
        return alone.wait()


@pytest.mark.parametrize(("trainer_first", "worker_first"), [("fanin", "nixl"), ("nixl", "fanin")])
def test_both_read(
    trainer_first: str, worker_first: str, tmp_path: pathlib.Path, end_of_nixl: int
) -> None:
    serving = {"role": "trainer", "first": trainer_first}
    with child("trainer", "nixl_beside.py", serving, tmp_path) as trainer:
        ready = trainer.expect("ready")
        pulling = {
            "role": "worker",
            "first": worker_first,
            "address": ready["address"],
            "lent": ready["lent"],
            "out": str(tmp_path),
        }
        with child("worker", "nixl_beside.py", pulling, tmp_path) as worker:
            worker.expect("pulled")
            worker.expect("closed")
            assert worker.wait() == end_of_nixl, worker.tail()
        trainer.tell("end")
        trainer.expect("closed")
        assert trainer.wait() == end_of_nixl, trainer.tail()
