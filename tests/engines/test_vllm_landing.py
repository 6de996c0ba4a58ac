# SPDX-License-Identifier: Apache-2.0
"""What the engine's log says of a long update."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import fanin
import pytest
from fanin.engine.landing import Progress, Summary, groups_of


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def told(done: int, slowest: fanin.RankProgress | None = None) -> fanin.PullProgress:
    return fanin.PullProgress(done, 40_000_000_000, (), slowest)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Clock]:
    one = Clock()
    monkeypatch.setattr(time, "monotonic", one.monotonic)
    caplog.set_level(logging.INFO, "fanin.engine")
    yield one


def test_bytes_rate_and_the_time_that_is_left(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress(7, 40_000_000_000)
    for second in range(1, 13):
        clock.now = 1000.0 + second
        progress(told(second * 2_000_000_000))
    assert [record.getMessage() for record in caplog.records] == [
        "fanin: step 7: 10000 of 40000 MB, 2.00 GB/s, 15 s to go",
        "fanin: step 7: 20000 of 40000 MB, 2.00 GB/s, 10 s to go",
    ]


def test_a_short_update_says_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(7, 1000)
    clock.now += 4.9
    progress(told(1000))
    assert not caplog.records


def test_parts_add_up(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own loader is fed a layer at a time, each by a pull that counts from nothing."""
    progress = Progress(7, 8_000_000_000)
    progress.add(2_000_000_000)
    clock.now += 5
    progress(told(2_000_000_000))
    assert "4000 of 8000 MB, 0.80 GB/s, 5 s to go" in caplog.text


def test_nothing_has_come_yet(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(7, 8_000_000_000)
    clock.now += 6
    progress(told(0))
    assert "0 of 8000 MB, 0.00 GB/s" in caplog.text and "to go" not in caplog.text


def test_the_rank_that_it_waits_for(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(7, 8_000_000_000)
    slow = fanin.RankProgress(3, "10.0.0.5:6003", "stream", 5_000_000, 2_000_000_000, 7.2)
    clock.now += 6
    progress(told(1_200_000_000, slow))
    assert caplog.text.rstrip().endswith(
        "34 s to go; waits for rank 3 10.0.0.5:6003: 5.0 of 2000.0 MB, no byte for 7 s"
    )


def test_what_an_update_did() -> None:
    done = Summary(bytes=3_000_000, tensors=27, read=0.5, install=0.25, path="cma", restarts=2)
    done.ready, done.proof = 0.125, 0.001
    assert str(done) == (
        "3.0 MB of 27 tensors by cma in 0.500 s (0.01 GB/s), installed in 0.250 s, "
        "ready after 0.125 s, proven in 0.001 s, 2 times begun again"
    )


def test_layers_come_in_order() -> None:
    names = ["lm_head.weight", "model.layers.1.b", "model.embed_tokens.weight", "model.layers.0.a"]
    assert groups_of(names) == [
        ["model.embed_tokens.weight"],
        ["model.layers.0.a"],
        ["model.layers.1.b"],
        ["lm_head.weight"],
    ]
