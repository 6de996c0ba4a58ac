# SPDX-License-Identifier: Apache-2.0
"""What a worker asks for, and what it tells of what came."""

from __future__ import annotations

from typing import Any

import fanin
import pytest
from fanin._puller import _PHASES
from fanin.engine import deltas
from fanin.engine.landing import Summary, part_of
from fanin.engine.trainers import Published
from fanin.errors import RequestError
from fanin.fleet.engine_vllm import _joined, _pulled


def published(**metadata: str) -> Published:
    return Published((), metadata, "", "a launch")


def result(path: str = "stream", **fields: Any) -> Any:
    plain = dict.fromkeys(("bytes", "tensors", "reads", "restarts", "stale"), 0)
    plain |= dict.fromkeys(_PHASES, 0.0) | {"total": 0.0, "fixed": 0.0}
    plain |= {"map": 0.0, "table": 0.0, "step": 7, "world_id": "a launch", "reused": False}
    ranks = [{"path": path, "bytes": 9}, {"path": "cma", "bytes": 0}]
    named: dict[str, Any] = plain | {"path": path, "path_reason": "", "ranks": ranks} | fields
    return fanin.PullResult(**named)


@pytest.mark.parametrize(
    ("said", "relay", "metadata", "asks"),
    [
        ("auto", None, {}, False),
        ("auto", None, {"deltas": "4"}, True),
        ("auto", "host", {"deltas": "4"}, False),
        (False, None, {"deltas": "4"}, False),
        (True, None, {}, True),
    ],
)
def test_when_a_worker_asks(said: Any, relay: Any, metadata: dict[str, str], asks: bool) -> None:
    assert deltas.Asking(said, None, relay).asks(published(**metadata)) is asks


@pytest.mark.parametrize("verify", [None, True, False])
def test_what_it_asks_is_proven_unless_somebody_says_no(verify: bool | None) -> None:
    assert deltas.Asking(True, verify, None).options() == {"verify": verify, "deltas": True}


@pytest.mark.parametrize(("said", "asks"), [("auto", False), (True, True)])
def test_a_worker_on_another_path_gives_up_unless_it_was_told(said: Any, asks: bool) -> None:
    """Proofs are not for free, and no patch comes by shared memory."""
    asking, first = deltas.Asking(said, None, None), published(deltas="4")
    asking.came(result())
    assert asking.asks(first)
    asking.came(result("cma", whole_because="of the path"))
    assert asking.asks(first) is asks
    again = Published((), {"deltas": "4"}, "", "another launch")
    assert asking.asks(again)


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("prometheus_client", reason="tools/setup test installs it")
    from fanin.engine import metrics

    registry = client.CollectorRegistry()
    monkeypatch.setattr(metrics, "_deltas", metrics._make_deltas(registry))
    counts = deltas.Counts()
    counts.add(result(bytes=1000, patch_bytes=20, base_step=6))
    counts.add(result(bytes=1000, whole_because="of the path"))
    assert counts.told() == {"pulls": 1, "saved_bytes": 980, "wholes": {"of the path": 1}}
    read = {"whole_because": ""}
    assert registry.get_sample_value("fanin_delta_pulls_total", read) == 1
    assert registry.get_sample_value("fanin_delta_saved_bytes_total") == 980


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("yes", None, "auto"), "'yes'.*auto"),
        ((1, None, "auto"), "is 1.*true, false"),
        ((True, "host", "auto"), "relay"),
        ((True, None, "loader"), "loader"),
    ],
)
def test_init_info_that_cannot_be(fields: tuple[Any, Any, str], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        deltas.check_deltas(*fields)
    assert caught.value.key == "deltas"
    for good in (True, False, "auto"):
        deltas.check_deltas(good, None, "auto")


def test_how_a_step_came() -> None:
    assert part_of(1_220_000_000, 61_000_000_000, 6) == ", 2.0 % of 61 GB since step 6"
    summary = Summary(bytes=20, tensors=3, path="stream", whole=1000, since=6)
    assert "by stream, 2.0 % of 0.001 MB since step 6 in" in str(summary)
    summary = Summary(path="stream", whole_because="a rank was started again")
    assert str(summary).endswith("; the whole was read, because a rank was started again")


def test_how_the_workers_of_an_engine_say_it() -> None:
    def said(**last: Any) -> dict[str, Any]:
        return {"step": 7, "last": {"path": "stream", "read": 0.1, **last}}

    one = _pulled(said(bytes=2_000_000, whole=60_000_000, since=6))
    assert one.way() == "stream, 3.3 % of 60 MB since step 6"
    assert _joined(one, one).way() == "stream, 3.3 % of 120 MB since step 6"
    other = _pulled(said(bytes=60_000_000))
    assert other.way() == "stream"
    assert _joined(one, other).way() == "stream, 51.7 % of 120 MB since step 6"
