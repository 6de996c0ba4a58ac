# SPDX-License-Identifier: Apache-2.0
"""The library's lines arrive in logging."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fanin
import local_world
import numpy as np
import pytest
from fanin import _ffi, _log
from fanin._library import library
from local_world import client_of, run_script, servers, until


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record)

    def find(self, logger: str, event: str) -> logging.LogRecord | None:
        for record in self.all:
            if (record.name, record.__dict__["event"]) == (logger, event):
                return record
        return None


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    logger = logging.getLogger("fanin")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


def test_lines_of_servers_and_clients(records: Records) -> None:
    begin = time.time()
    with servers(1, name="my_job") as (server,):
        server.put("lora:0", [fanin.shard_of("x", np.zeros(4, np.float32))])
        server.commit("lora:0", 1)
        with client_of([server], path="auto") as client:
            client.pull_into(0, {"x": np.zeros(4, np.float32)})
        until(lambda: records.find("fanin.client", "path"))
    until(lambda: records.find("fanin.server", "server-stop"))
    record = records.find("fanin.server", "server-start")
    assert record is not None and record.levelno == logging.INFO
    assert record.getMessage().startswith("my_job_0, rank 0 of 1")
    assert begin - 1 <= record.created <= time.time() + 1
    assert 0 <= record.msecs < 1000


def test_a_step_that_nobody_has_written_is_told(
    records: Records, ranks: list[fanin.Server], client: fanin.Client, tmp_path: Path
) -> None:
    client.pull_adapter(0, tmp_path / "before")
    for rank in ranks:
        rank.begin_update(local_world.PUBLICATION)
        rank.commit(local_world.PUBLICATION, 2)
    client.pull_adapter(0, tmp_path / "after", step=2)
    until(lambda: records.find("fanin.client", "same-bytes"))
    said = records.find("fanin.client", "same-bytes")
    assert said and "lora:0 step 2 has the very bytes of step 1" in said.getMessage()


def test_levels_are_loggings(records: Records) -> None:
    logging.getLogger("fanin.server").setLevel(logging.WARNING)
    try:
        with servers(1) as (server,):
            port = server.port
        # Lines are judged when they are handled: those of that server are before this one.
        ring = _log._rings["server"].handle
        library().fanin_log_ring_write(ring, _ffi.LOG_WARNING, b"all-handled", b"")
        until(lambda: records.find("fanin.server", "all-handled"))
    finally:
        logging.getLogger("fanin.server").setLevel(logging.NOTSET)
    with servers(1) as (other,):
        until(lambda: any(str(other.port) in r.getMessage() for r in records.all))
    assert not any(f"port {port}" in record.getMessage() for record in records.all)


def test_lines_beyond_what_fits_are_counted(records: Records) -> None:
    written = 3 * _log._LINES
    blocked, go_on = threading.Event(), threading.Event()

    class Blocks(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            blocked.set()
            return go_on.wait(local_world.PATIENCE)

    with servers(1):
        ring = _log._rings["server"].handle
    write, blocks = library().fanin_log_ring_write, Blocks()
    records.addFilter(blocks)
    try:
        write(ring, _ffi.LOG_INFO, b"overflow", b"the first")
        assert blocked.wait(local_world.PATIENCE)
        for _ in range(written - 1):
            write(ring, _ffi.LOG_INFO, b"overflow", b"one of many")
    finally:
        go_on.set()
        records.removeFilter(blocks)

    def lost() -> list[str]:
        return [r.getMessage() for r in records.all if r.__dict__["event"] == "log-lost"]

    until(lambda: bool(lost()))
    here = [r for r in records.all if r.__dict__["event"] == "overflow"]
    (said,) = lost()
    assert len(here) + int(said.split()[0]) == written
    record = records.find("fanin.server", "log-lost")
    assert record is not None and record.levelno == logging.WARNING


def test_a_line_has_its_time_and_no_broken_characters(records: Records) -> None:
    with servers(1):  # so that there is a ring
        ring = _log._rings["server"]
    line = _ffi.LogLine(level=_ffi.LOG_ERROR, event=b"some-event", message=b"it \xff broke")
    line.time_ns = 1_700_000_000_123_456_789
    ring._forward(line)
    (said,) = [r for r in records.all if r.created == pytest.approx(1_700_000_000.123, abs=1e-3)]
    assert (said.levelno, said.getMessage()) == (logging.ERROR, "it \ufffd broke")


def test_a_filter_that_raises_does_not_end_the_log(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not what pytest captures: what is written while that is emptied is lost.
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)

    def wrong(record: logging.LogRecord) -> bool:
        raise ValueError("a filter's own fault")

    logger = logging.getLogger("fanin.server")
    logger.addFilter(wrong)
    try:
        with servers(1):
            until(lambda: "a filter's own fault" in told.getvalue())
    finally:
        logger.removeFilter(wrong)
    with servers(1, name="after"):
        until(lambda: any(r.getMessage().startswith("after_0") for r in records.all))


LINES = """
import logging, os, sys
import fanin
logging.basicConfig(level=getattr(logging, sys.argv[1]), format="%(name)s|%(levelname)s|%(event)s")
for _ in range(3):
    fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False).close()
server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False)
"""


def test_all_lines_are_there_when_the_process_has_ended() -> None:
    done = run_script(LINES, "INFO")
    assert done.returncode == 0
    assert done.stderr.splitlines().count("fanin.server|INFO|server-start") == 4
    assert done.stderr.splitlines().count("fanin.server|INFO|server-stop") == 4
    assert "Traceback" not in done.stderr


def test_nothing_is_said_unless_logging_is_configured() -> None:
    assert run_script(LINES, "WARNING").stderr == ""


def test_debug_lines_are_made_only_when_asked_for() -> None:
    level = """
from fanin import _log
_log.library().fanin_log_ring_write(_log._rings["server"].handle, 4, b"fine-print", b"a detail")
"""
    assert "fine-print" in run_script(LINES + level, "DEBUG").stderr
    assert "fine-print" not in run_script(LINES + level, "INFO").stderr


def test_a_forked_child_has_a_log_of_its_own() -> None:
    done = run_script(
        LINES
        + """
child = os.fork()
if child == 0:
    fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, name="child", use_ucx=False)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
        "INFO",
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 0
    # The child's own line; and the parent's stop is said once, by the parent.
    assert lines.count("fanin.server|INFO|server-start") == 5
    assert lines.count("fanin.server|INFO|server-stop") == 5


PULLS = """
import os, sys, time, logging, fanin, numpy as np
if sys.argv[1:] == ["own"]:
    logging.basicConfig(format="own %(message)s", level=logging.WARNING)
    logging.getLogger("fanin").setLevel(logging.ERROR)
with fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, use_ucx=False) as server:
    server.put("lora:0", [fanin.shard_of("x", np.zeros(4, np.float32))])
    server.commit("lora:0", 7)
    with fanin.Client([f"127.0.0.1:{server.port}"], use_ucx=False) as client:
        for _ in range(30):
            client.pull_into(0, {"x": np.zeros(4, np.float32)})
    while server.stats()["sessions"]:  # a server that ends says nothing of those it has yet
        time.sleep(0.01)
"""


def test_what_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_LOG", f"info,{tmp_path / 'log'}")
    assert run_script(PULLS).stderr == ""
    lines = (tmp_path / "log").read_text().splitlines()
    pulls = [line for line in lines if " INFO pull: " in line]
    assert 10 <= len(pulls) <= 30  # at most ten a second
    told = re.search(
        r"trace ([0-9a-f]{32})/1: lora:0 step 7 of rank 0 at 127\.0\.0\.1:\d+, 1 tensors, 16 bytes "
        r"by \w+, [\d.]+ ms \(connect [\d.]+, wait .*\), 0 restarts, 0 stale",
        pulls[0],
    )
    assert told is not None, pulls[0]
    opened = next(line for line in lines if " session-open: " in line)
    closed = next(line for line in lines if " session-close: " in line)
    assert f"trace {told[1]}" in opened and f"trace {told[1]}" in closed
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_phases_in_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_LOG", "debug")
    assert re.search(
        r"DEBUG phase: trace [0-9a-f]{32}/30 attempt 1: read [\d.]+ ms\n", run_script(PULLS).stderr
    )


def test_the_program_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_LOG", "debug")
    assert run_script(PULLS, "own").stderr == ""


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("loud", "FANIN_LOG=loud is not debug, info or warn"),
        ("info,", "FANIN_LOG=info, is not debug, info or warn"),
        ("info,/nowhere/log", "cannot append to FANIN_LOG's file /nowhere/log"),
    ],
)
def test_what_the_environment_may_not_say(
    value: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANIN_LOG", value)
    with pytest.raises((fanin.RequestError, fanin.HostError), match=re.escape(sentence)):
        _log._follow_environment()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes another user's files")
def test_another_users_file_or_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.touch()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for theirs in (file, pipe):
            os.chown(theirs, 4321, 4321)
            monkeypatch.setenv("FANIN_LOG", f"info,{theirs}")
            with pytest.raises(fanin.ConnectionFailedError, match="belongs to another user"):
                _log._follow_environment()
    finally:
        os.close(reader)
