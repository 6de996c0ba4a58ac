# SPDX-License-Identifier: Apache-2.0
"""What vLLM's /metrics tells of pulls."""

from __future__ import annotations

import json
import re
from pathlib import Path

import fanin
import pytest
from fanin.engine.metrics import Metrics
from prometheus import MONITORING

client = pytest.importorskip("prometheus_client", reason="tools/setup test installs it")


def test_parts_of_pulls_and_their_paths() -> None:
    registry = client.CollectorRegistry()
    metrics = Metrics(registry)

    def told(name: str, **labels: str) -> float | None:
        value = registry.get_sample_value(name, labels)
        assert value is None or isinstance(value, float)
        return value

    for path, read in (("cma", 0.0005), ("cma", 0.02), ("stream", 0.2)):
        metrics.began()
        metrics.ended(
            1.0, None, run="0", step=1, size=100, path=path, phases={"read": read, "end": 0.00005}
        )
    metrics.began()
    metrics.ended(1.0, fanin.StateError.make("no"))
    metrics.began()
    metrics.ended(1.0, None, run="0", step=1)  # another engine had pulled it
    assert told("fanin_pull_bytes_total", path="cma") == 200
    assert told("fanin_pull_bytes_total", path="stream") == 100
    assert told("fanin_pull_phase_seconds_count", phase="read") == 3
    assert told("fanin_pull_phase_seconds_bucket", phase="read", le="0.001") == 1
    assert told("fanin_pull_phase_seconds_bucket", phase="read", le="0.03") == 2
    assert told("fanin_pull_phase_seconds_bucket", phase="end", le="0.0001") == 3
    assert told("fanin_pulls_total", result="ok") == 4
    assert told("fanin_pull_inflight") == 0
    there = set(re.findall(r"# TYPE (\w+)", client.generate_latest(registry).decode()))
    assert engines_metrics() <= there


def engines_metrics() -> set[str]:
    """What the dashboard asks engines for."""
    dashboard = json.loads(Path(MONITORING / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [one["query"] for one in dashboard["templating"]["list"] if one["name"] == "engines"]
    names = set(re.findall(r"\bfanin_pull_\w+", " ".join(asked)))
    assert len(names) == 3
    return {re.sub("_bucket$", "", name) for name in names}
