# SPDX-License-Identifier: Apache-2.0
"""docs/monitoring against a real Prometheus, and its rules by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fanin
import numpy as np
import pytest
from local_world import (
    PATIENCE,
    PUBLICATION,
    addresses,
    client_of,
    nixl_fetch,
    publish,
    servers,
    until,
    weights,
)
from prometheus import MONITORING, needed, running

DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
ALERTS = (MONITORING / "alerts.yml").read_text()

# ------------------------------------------------------------------------------ the rules alone

RANK = 'job="run",publication="lora:0",rank="1"'
SUMS = 'job="run",rank="1"'


class Case(NamedTuple):
    """Series by name, and in promtool's notation what they are, minute by minute; and the summary
    of the one alert that fires after so many minutes. None: it is quiet."""

    alert: str
    series: dict[str, str]
    minutes: int
    summary: str | None
    labels: dict[str, str] = {}


def drains(at_most_1_s: str, above: str) -> dict[str, str]:
    """Counts of updates that waited for 0.3 to 1 s, and of all."""
    name = f"fanin_drain_seconds_bucket{{{SUMS},le="
    return {f'{name}"0.3"}}': "0x40", f'{name}"1"}}': at_most_1_s, f'{name}"+Inf"}}': above}


def pulls(good: str, stale: str) -> dict[str, str]:
    name = f"fanin_pulls_total{{{SUMS},result="
    return {f'{name}"good"}}': good, f'{name}"stale"}}': stale}


def moved(series: str) -> str:
    """The same of a page at another address."""
    return series.replace('"a:1"', '"b:1"')


def silent(
    alert: str, series: str, then: str, summary: str, labels: dict[str, str]
) -> Iterator[Case]:
    """A page with *series* that answers twice: it is told a minute later, and for an hour."""
    for minutes, told in ((2, None), (3, summary), (60, summary), (62, None)):
        yield Case(alert, {PAGE: f"1 1 {then}", series: "1 1 stale"}, minutes, told, labels)


AT = 'job="run",instance="a:1"'
PAGE = f"up{{{AT}}}"
EXPORTED = f'fanin_run_up{{{AT},publication="lora:0"}}'
CONNECTIONS = f"fanin_connections{{{AT}}}"
PUBLISHED = f'fanin_publication_state{{{AT},publication="lora:0",rank="1",state="stable"}}'
OF_PAGE = {"job": "run", "instance": "a:1"}
SILENT = "a:1, a rank's page or an exporter of run, does not answer"
UP = 'fanin_run_up{job="run",publication="lora:0"}'
STEP = f"fanin_publication_step{{{RANK}}}"
OTHER = STEP.replace('rank="1"', 'rank="0"')
ANOTHER_RUN = STEP.replace('job="run"', 'job="another"')
COMMITTED = f"fanin_publication_commit_timestamp_seconds{{{RANK}}}"
NEVER = f'fanin_publication_state{{{RANK},state="unpublished"}}'
ABSENT = 'fanin_problems{job="run",publication="lora:0",kind="absent"}'
STATE = f'fanin_publication_state{{{RANK},state="writing"}}'
OF_RANK = {"job": "run", "publication": "lora:0", "rank": "1"}
OF_RUN = {"job": "run", "publication": "lora:0"}
CASES = (
    Case(
        "FaninRunDown",
        {UP: "1 0x9"},
        3,
        "no rank of run's lora:0 answers, or they are of two launches",
        OF_RUN,
    ),
    Case("FaninRunDown", {UP: "1 0 1x9"}, 3, None),
    Case(
        "FaninRankDown",
        {f"fanin_rank_up{{{RANK}}}": "1 0x9"},
        3,
        "rank 1 of run's lora:0 does not answer",
        OF_RANK,
    ),
    Case("FaninRankDown", {f"fanin_rank_up{{{RANK}}}": "1 0 1 0 1x9"}, 3, None),
    *silent("FaninPageDown", EXPORTED, "0x90", SILENT, OF_PAGE),
    *silent("FaninPageDown", CONNECTIONS, "0x90", SILENT, OF_PAGE),
    Case("FaninPageDown", {PAGE: "1 0 1 0 1x9", CONNECTIONS: "1 stale 1 stale 1x9"}, 4, None),
    Case("FaninPageDown", {PAGE: "0x9"}, 5, None),  # of something else, or it was never there
    Case("FaninPageDown", {PAGE: "0x9", moved(CONNECTIONS): "1x9"}, 5, None),
    Case("FaninPageDown", {PAGE: "1 1 stale", CONNECTIONS: "1 1 stale"}, 5, None),
    *silent(
        "FaninPageGone",
        EXPORTED,
        "stale",
        "no target tells of the exporter of run any more",
        {"job": "run"},
    ),
    *silent(
        "FaninPageGone",
        PUBLISHED,
        "stale",
        "no target tells of rank 1 of run any more",
        {"job": "run", "rank": "1"},
    ),
    Case("FaninPageGone", {PUBLISHED: "1 1 stale", moved(PUBLISHED): "_ _ 1x9"}, 5, None),
    Case("FaninPageGone", {PUBLISHED: "1 1 stale", PAGE: "1x9"}, 5, None),  # it was withdrawn
    Case("FaninPageGone", {PUBLISHED: "1 1 stale", PAGE: "1 1 0x9"}, 5, None),
    Case("FaninPageGone", {EXPORTED: "1 1 stale", moved(EXPORTED): "_ _ 1x9"}, 5, None),
    Case(
        "FaninNoCommit",
        {COMMITTED: "60x40"},
        31,
        "run's lora:0 has committed nothing for 30m 0s",
        OF_RUN,
    ),
    Case("FaninNoCommit", {COMMITTED: "60x40"}, 15, None),
    Case("FaninNoCommit", {COMMITTED: "60+60x40"}, 31, None),
    Case(
        "FaninNothingToRead",
        {NEVER: "1x40", OTHER: "0+1x40"},
        11,
        "rank 1 of run's lora:0 has nothing to read: nothing is committed there yet, or its last "
        "step was taken back",
        OF_RANK,
    ),
    Case("FaninNothingToRead", {NEVER: "1x5 0 1x9"}, 11, None),
    Case(
        "FaninNotPublished",
        {ABSENT: "2x40"},
        11,
        "2 of run's ranks do not publish lora:0, which its exporter looks for",
        OF_RUN,
    ),
    Case("FaninNotPublished", {ABSENT: "2x5 stale 2x9"}, 11, None),
    Case(
        "FaninRankBehind",
        {STEP: "7x9", OTHER: "8x9"},
        6,
        "rank 1 of run's lora:0 is still at step 7",
        OF_RANK,
    ),
    Case("FaninRankBehind", {STEP: "7x9", OTHER: "8x9"}, 4, None),
    Case("FaninRankBehind", {STEP: "7x3 8x9", OTHER: "7 8x12"}, 6, None),
    Case("FaninRankBehind", {STEP: "7x9", ANOTHER_RUN: "8x9"}, 6, None),
    Case(
        "FaninUpdateStuck", {STATE: "1x20"}, 11, "rank 1 of run's lora:0 is in one update", OF_RANK
    ),
    Case("FaninUpdateStuck", {STATE: "1x5 0 1x9"}, 11, None),
    Case(
        "FaninDrainNearLease",
        drains("0+9x40", "0+9x40"),
        25,
        "one update of run in a hundred waits 993ms for readers",
        {"job": "run"},
    ),
    Case(
        "FaninDrainNearLease",
        {**drains("0+9x40", "0+9x40"), f'fanin_drain_seconds_bucket{{{SUMS},le="0.3"}}': "0+9x40"},
        25,
        None,
    ),
    Case("FaninDrainNearLease", drains("0x40", "0x40"), 25, None),
    Case(
        "FaninPullsStale",
        pulls("0+3x40", "0+1x40"),
        35,
        "25% of run's pulls are overtaken by updates",
        {"job": "run"},
    ),
    Case("FaninPullsStale", pulls("0+9x40", "0+1x40"), 35, None),
    Case("FaninPullsStale", pulls("0x40", "0x40"), 35, None),
)


def as_promtool(case: Case, severity: str) -> dict[str, Any]:
    fires = {
        "exp_labels": {**case.labels, "severity": severity},
        "exp_annotations": {"summary": case.summary},
    }
    return {
        "name": f"{case.alert}: {case.series} after {case.minutes} minutes",
        "interval": "1m",
        "input_series": [{"series": name, "values": is_} for name, is_ in case.series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{case.minutes}m",
                "alertname": case.alert,
                "exp_alerts": [] if case.summary is None else [fires],
            }
        ],
    }


def test_each_rule_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    severity = dict(re.findall(r"alert: (\w+)(?s:.*?)severity: (\w+)", ALERTS))
    assert ALERTS.count("alert: ") == len(severity) > 5
    assert severity.keys() == {case.alert for case in CASES if case.summary}
    assert severity.keys() == {case.alert for case in CASES if not case.summary}
    rules = {
        "rule_files": [str(MONITORING / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [as_promtool(case, severity[case.alert]) for case in CASES],
    }
    (tmp_path / "cases.yml").write_text(json.dumps(rules))
    command = [needed("promtool"), "test", "rules", str(tmp_path / "cases.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------------------- all together


def panels() -> list[dict[str, Any]]:
    found = DASHBOARD["panels"]
    assert isinstance(found, list)
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.fixture
def exporting() -> Iterator[tuple[list[fanin.Server], str]]:
    """Three ranks and where their exporter listens."""
    with servers(lease=0.0) as ranks:
        publish(ranks, 1)
        command = [nixl_fetch(), "exporter", ",".join(addresses(ranks)), "--listen", "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                port = process.stdout.readline().split("port ")[1].split(":")[0]
                yield ranks, f"127.0.0.1:{port}"
            finally:
                process.kill()


def packed() -> fanin.PackedTensors:
    return fanin.pack(
        fanin.shard_of(name, np.zeros_like(value), writable=True)
        for name, value in weights(1).items()
    )


def stage(ranks: list[fanin.Server]) -> None:
    """Rank 0 goes on, rank 1 is in an update, rank 2 is gone."""
    ranks[1].begin_update(PUBLICATION)
    ranks[0].begin_update(PUBLICATION)
    ranks[0].commit(PUBLICATION, 2)
    ranks[2].close()


def of_run(expression: str) -> str:
    """With the dashboard's variables in place."""
    return expression.replace("$publication", PUBLICATION).replace("$job", "run")


#: Alerts whose state is staged; the others' expressions give nothing.
STAGED = {"FaninRankDown", "FaninRankBehind", "FaninUpdateStuck"}


def test_a_real_prometheus(exporting: tuple[list[fanin.Server], str], tmp_path: Path) -> None:
    needed("prometheus")
    ranks, exporter = exporting
    page = ranks[0].serve_metrics()
    jobs = {"run": exporter, "rank": page.address}
    wanted = {of_run(one) for one in expressions() if "$engines" not in one}
    of_leases = {one for one in wanted if "_lease_holder_" in one}
    with running(tmp_path, jobs) as prometheus:
        for one in expressions():
            prometheus.value(of_run(one))  # also those of engines can be evaluated
        for job in jobs:
            until(lambda job=job: prometheus.value(f'up{{job="{job}"}} == 1'))
        with client_of(ranks) as client, client.begin(0, packed()):
            until(lambda: all(prometheus.value(one) for one in of_leases))
        stage(ranks)
        until(lambda: all(prometheus.value(one) for one in wanted - of_leases))
        (group,) = prometheus.ask("rules")["groups"]
        rules = {rule["name"]: rule for rule in group["rules"]}
        assert set(rules) == {case.alert for case in CASES}
        assert {rule["health"] for rule in rules.values()} == {"ok"}
        for name, rule in rules.items():
            if name in STAGED:
                until(lambda rule=rule: prometheus.value(rule["query"]))
            else:
                assert prometheus.value(rule["query"]) == [], name
        told = prometheus.ask("targets")["activeTargets"]
        assert {target["labels"]["job"]: target["health"] for target in told} == {
            job: "up" for job in jobs
        }
        silent_pages = rules["FaninPageDown"]["query"]
        page.close()
        until(lambda: [one["metric"]["job"] for one in prometheus.value(silent_pages)] == ["rank"])
        assert sum(len(page) for page in prometheus.ask("metadata").values()) > 20


# ------------------------------------------------------------------------------- the dashboard


def test_the_dashboard_keeps_to_grafanas_model() -> None:
    """As far as can be told without Grafana: what it demands of a dashboard that is imported."""
    assert DASHBOARD["uid"] and DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 38
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert len(variables) == len(DASHBOARD["templating"]["list"])
    assert variables["source"]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${source}"}
    for one in variables.values():
        assert one["type"] == "datasource" or one["datasource"] == source
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["datasource"] == source and panel["title"]
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names) > 0
        for target in panel["targets"]:
            assert target["datasource"] == source
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            assert used <= variables.keys(), target["expr"]
