# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not answer are in the trace: for how long, and in which part of the call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fanin
import pytest
from local_world import PATIENCE, Processes, empty, stop

WAITED = 0.4
"""Seconds that calls have."""


@pytest.fixture
def ranks() -> Iterator[Processes]:
    """The second one is stopped, or gone."""
    made = Processes(use_ucx=False)
    made.publish(1)
    yield made
    for process in made.processes:
        process.kill()
        process.join(PATIENCE)


def stop_one(ranks: Processes) -> None:
    pid = ranks.processes[1].pid
    assert pid is not None
    stop(pid)


def failed(file: Path) -> list[dict[str, Any]]:
    """The spans that did not end well, of ranks (also of those that are not known)."""
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X" and "rank" in e["args"]]
    for span in spans:
        span["row"] = rows[span["tid"]]
    return [e for e in spans if e["args"]["outcome"] != "FANIN_OK"]


def expect(file: Path, phase: str, row: str, address: str) -> None:
    spans = failed(file)
    (silent,) = [e for e in spans if e["dur"] > WAITED * 1e6 * 0.8]
    assert silent["name"] == phase and silent["row"].startswith(row), spans
    assert silent["args"]["about"] == address
    assert silent["args"]["outcome"] in ("FANIN_ERR_TIMEOUT", "FANIN_ERR_UNREACHABLE")


def times_out(call: Callable[[], object]) -> None:
    began = time.monotonic()
    with pytest.raises(fanin.FaninError) as caught:
        call()
    assert caught.value.name in ("FANIN_ERR_TIMEOUT", "FANIN_ERR_UNREACHABLE")
    assert time.monotonic() - began < PATIENCE


def test_one_that_is_stopped_before_it_is_known(ranks: Processes, tmp_path: Path) -> None:
    stop_one(ranks)
    with fanin.trace(tmp_path / "t"):
        times_out(
            lambda: fanin.Client(ranks.addresses, use_ucx=False, connect_timeout=WAITED).pull_into(
                0, empty(), timeout=WAITED
            )
        )
    assert failed(tmp_path / "t")
    for span in failed(tmp_path / "t"):
        assert (span["name"], span["row"]) == ("connect", f"rank ? at {ranks.addresses[1]}")
        assert span["args"]["rank"] is None
    assert max(e["dur"] for e in failed(tmp_path / "t")) > WAITED * 1e6 * 0.4


def test_one_that_has_gone(ranks: Processes, tmp_path: Path) -> None:
    ranks.processes[1].kill()
    ranks.processes[1].join(PATIENCE)
    with fanin.trace(tmp_path / "t"):
        times_out(
            lambda: fanin.Client(ranks.addresses, use_ucx=False).pull_into(
                0, empty(), timeout=WAITED
            )
        )
    rows = {(e["name"], e["row"]) for e in failed(tmp_path / "t")}
    assert rows == {("connect", f"rank ? at {ranks.addresses[1]}")}


def test_one_that_is_stopped_while_steps_are_waited_for(ranks: Processes, tmp_path: Path) -> None:
    with fanin.Client(ranks.addresses, use_ucx=False) as client:
        client.pull_into(0, empty())
        stop_one(ranks)
        with fanin.trace(tmp_path / "t"):
            times_out(lambda: client.pull_into(0, empty(), timeout=WAITED))
    expect(tmp_path / "t", "wait", "rank 1", ranks.addresses[1])


@pytest.mark.parametrize("phase", ["read", "end"])
def test_one_that_is_stopped_under_its_lease(phase: str, ranks: Processes, tmp_path: Path) -> None:
    """By stream it sends neither what is read nor whether it stood still."""
    with (
        fanin.Client(ranks.addresses, use_ucx=False, path="stream") as client,
        fanin.trace(tmp_path / "t"),
    ):
        session = client.begin(0, empty(), timeout=2 * WAITED)
        if phase == "end":
            session.read()
        stop_one(ranks)
        times_out(session.read if phase == "read" else session.end)
        session.close()
    expect(tmp_path / "t", phase, "rank 1", ranks.addresses[1])
