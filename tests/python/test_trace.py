# SPDX-License-Identifier: Apache-2.0
"""Traces: what is in them, that they nest, whose file is whose."""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path
from typing import Any

import fanin
import pytest
from local_world import PUBLICATION, client_of, publish, run_script, weights

Event = dict[str, Any]


def read(file: Path) -> tuple[dict[str, Any], list[Event]]:
    """The file's header, and its spans; all of it is what viewers expect."""
    whole = json.loads(file.read_text())
    rows = {(e["pid"], e["tid"]) for e in whole["traceEvents"] if e["name"] == "thread_name"}
    spans = [e for e in whole["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in whole["traceEvents"]} <= {"M", "X"}
    for event in spans:
        assert event["ts"] > 0 and event["dur"] >= 0, event
        assert (event["pid"], event["tid"]) in rows, event
        assert event["args"]["outcome"].startswith("FANIN_"), event
    return whole["otherData"], spans


def assert_nested(spans: list[Event]) -> None:
    """Two spans of a row lie beside each other, or one in the other."""
    rows = collections.defaultdict(list)
    for e in spans:
        rows[e["tid"]].append((round(e["ts"] * 1000), -round(e["dur"] * 1000), e["name"]))
    for row in rows.values():
        open_until: list[int] = []
        for begin, minus_duration, name in sorted(row):
            end = begin - minus_duration
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1, (name, row)
            open_until.append(end)


def of_ranks(spans: list[Event], name: str) -> set[int]:
    return {e["args"]["rank"] for e in spans if e["name"] == name and "rank" in e["args"]}


def test_a_pull_rank_by_rank(ranks: list[fanin.Server], tmp_path: Path) -> None:
    file = tmp_path / "pull.json"
    with fanin.trace(file):
        publish(ranks, 2)
        with client_of(ranks) as client:
            client.pull_adapter(0, tmp_path / "a")
            into = {name: value * 0 for name, value in weights(2).items()}
            result = client.pull_into(0, into)
    about, spans = read(file)
    assert_nested(spans)
    assert about["pid"] == os.getpid() and len(about["boot_id"]) == 36
    assert file.stat().st_mode & 0o777 == 0o600
    pulls = [e for e in spans if e["name"] == "pull"]
    assert [(e["args"]["step"], e["args"]["about"]) for e in pulls] == [(2, PUBLICATION)] * 2
    second = pulls[1]
    assert second["args"]["bytes"] == result.bytes
    parts = [e for e in spans if e["args"].get("pull") == second["args"]["pull"]]
    whole = {e["name"]: e for e in parts if "rank" not in e["args"]}
    for phase in ("connect", "wait", "catalog", "plan", "paths", "begin", "read", "end", "write"):
        assert second["ts"] <= whole[phase]["ts"], phase
        assert whole[phase]["dur"] <= second["dur"], phase
    assert whole["read"]["args"]["bytes"] == result.bytes
    assert sum(e["args"].get("bytes", 0) for e in parts if e["name"] == "read") == 2 * result.bytes
    holders = {0, 1}  # rank 2 holds nothing
    assert of_ranks(parts, "read") - {2} == of_ranks(parts, "end") - {2} == holders
    assert of_ranks(parts, "wait") == {0, 1, 2}
    first = [e for e in spans if e["args"].get("pull") == pulls[0]["args"]["pull"]]
    assert "publish" in {e["name"] for e in first}
    assert of_ranks(first, "catalog") == {0, 1, 2}
    assert {"resolve", "connect"} <= {e["name"] for e in spans}
    # The trainer's calls lie beside it, on the same clock.
    assert of_ranks(spans, "begin_update") == of_ranks(spans, "commit") == {0, 1, 2}
    assert all(e["ts"] < pulls[0]["ts"] for e in spans if e["cat"] == "trainer")


def test_what_ends_otherwise_is_marked(ranks: list[fanin.Server], tmp_path: Path) -> None:
    file = tmp_path / "stale.json"
    with fanin.trace(file), client_of(ranks) as client:
        into = {name: value * 0 for name, value in weights(1).items()}
        with pytest.raises(fanin.StaleError), client.begin(0, into) as session:
            publish(ranks, 2)
            session.read()
        with pytest.raises(fanin.PullTimeoutError):
            client.pull_into(0, into, step=9, timeout=0.05)
    _, spans = read(file)
    assert_nested(spans)
    stale = [e for e in spans if e["args"]["outcome"] == "FANIN_ERR_STALE"]
    assert stale and all(e["cname"] == "bad" for e in stale)
    late = [e for e in spans if e["args"]["outcome"] == "FANIN_ERR_TIMEOUT"]
    assert {"pull", "attempt", "wait"} <= {e["name"] for e in late}
    assert of_ranks(late, "wait") == {0, 1, 2}


def test_whose_file_it_is(tmp_path: Path) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for file in (there, link):
        with pytest.raises(fanin.RequestError, match="cannot make the trace"), fanin.trace(file):
            pass
    assert there.read_text() == "mine" and not (tmp_path / "elsewhere").exists()
    with fanin.trace(tmp_path / "one.json"):
        with (
            pytest.raises(fanin.StateError, match="has a trace already"),
            fanin.trace(tmp_path / "two.json"),
        ):
            pass
    with pytest.raises(fanin.RequestError):
        fanin.trace(7).__enter__()  # type: ignore[arg-type]
    with fanin.trace(tmp_path / "two.json"):
        pass
    assert read(tmp_path / "two.json")[1] == []


FORKS = """
import os, sys, fanin, numpy as np
def serve(step):
    with fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False) as server:
        server.put("lora:0", [fanin.shard_of("x", np.zeros(4, np.float32))])
        server.commit("lora:0", step)
serve(1)
if (child := os.fork()) == 0:
    serve(2)
    os._exit(0)  # what is not written by now never is
os.waitpid(child, 0)
serve(3)
"""


def test_each_process_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_TRACE", str(tmp_path))
    assert run_script(FORKS).returncode == 0
    files = sorted(tmp_path.iterdir())
    steps = {}
    for file in files:
        about, spans = read(file)
        assert file.name.startswith(f"fanin-{about['pid']}-")
        steps[file.name] = [e["args"]["step"] for e in spans if e["name"] == "commit"]
    assert sorted(steps.values()) == [[1, 3], [2]]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes another user's folder")
def test_another_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    os.chown(theirs, 4321, 4321)
    mine.mkdir()
    (tmp_path / "link").symlink_to(mine)
    os.lchown(tmp_path / "link", 4321, 4321)
    for folder in (theirs, tmp_path / "link", f"{tmp_path / 'link'}//"):
        monkeypatch.setenv("FANIN_TRACE", str(folder))
        done = run_script("import logging; logging.basicConfig()\n" + FORKS)
        assert done.returncode == 0
        assert "there is no trace: FANIN_TRACE=" in done.stderr
    assert not list(theirs.iterdir()) and not list(mine.iterdir())


FULL = """
import resource, signal, sys, fanin, numpy as np, os
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    with fanin.trace(sys.argv[1]):
        with fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False) as server:
            server.put("lora:0", [fanin.shard_of("x", np.zeros(4, np.float32))])
            for step in range(1, 100):
                server.begin_update("lora:0")
                server.commit("lora:0", step)
except fanin.HostError as error:
    print(error.sys_errno, error)
"""


def test_a_full_disk_leaves_whole_json(tmp_path: Path) -> None:
    done = run_script(FULL, str(tmp_path / "t.json"))
    assert "not all of the trace could be written" in done.stdout, done.stderr
    _, spans = read(tmp_path / "t.json")
    assert spans == []
