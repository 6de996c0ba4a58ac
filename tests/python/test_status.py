# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch status`` and ``top``: each way in which a run stalls is told, by real processes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
from local_world import (
    PATIENCE,
    PUBLICATION,
    addresses,
    client_of,
    empty,
    nixl_fetch,
    packed,
    publish,
    publish_rank,
    served,
    servers,
    stop,
    weights,
)
from odd_ranks import NarrowWay, refuse


def status(target: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, which ends in its own time whatever the ranks do."""
    return subprocess.run(
        [nixl_fetch(), "status", target, *options], capture_output=True, text=True, timeout=PATIENCE
    )


def told(target: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = status(target, "--json", *options)
    return done.returncode, json.loads(done.stdout)


REMEDIES = {
    "updating": "nobody can read it until its trainer commits: see what that process does",
    "no-answer": "see on its host whether the ",
    "slow": "see its host's network and CPU",
    "lease": "see what that engine does",
    "stale": "let readers pull right after a commit",
    "paused": "readers wait until the trainer resumes the run",
    "version": "install one release of fanin for trainer and engines",
}


def kinds(report: dict[str, Any]) -> list[tuple[str, int | None]]:
    for problem in report["problems"]:
        assert REMEDIES.get(problem["kind"], "") in problem["remedy"]
    return [(problem["kind"], problem["rank"]) for problem in report["problems"]]


def text_of(report: dict[str, Any], kind: str) -> str:
    return next(p["text"] for p in report["problems"] if p["kind"] == kind)


def test_nothing_is_wrong(target: str) -> None:
    done = status(target)
    assert done.returncode == 0, done.stderr
    head = r"step 1, 3 of 3 ranks answer, nothing is wrong, last commit [0-9]+ (ms|s) ago\n"
    assert re.search(head, done.stdout)
    code, report = told(target, "--max-age", "1h")
    assert (code, report["healthy"], report["step"]) == (0, True, 1)
    assert kinds(report) == []
    assert [rank["state"] for rank in report["ranks"]] == ["stable"] * 3


def test_steps_that_no_json_integer_holds(ranks: list[fanin.Server], target: str) -> None:
    for step in (2**63 - 1, 2**63 + 7, 2**64 - 1):
        publish(ranks, step)
        code, report = told(target)
        assert code == 0
        wanted = step if step < 2**63 else str(step)
        assert [report["step"], report["ranks"][2]["step"]] == [wanted, wanted]


def test_a_rank_in_its_update(ranks: list[fanin.Server], target: str) -> None:
    ranks[1].begin_update(PUBLICATION)
    code, report = told(target)
    assert (code, kinds(report)) == (12, [("updating", 1)])
    assert re.fullmatch(
        r"rank 1: in its update for \S+ m?s, its last step is 1", text_of(report, "updating")
    )
    # A probe that allows for updates does not mind, until the last commit is too old.
    assert told(target, "--max-age", "1h")[0] == 0
    code, report = told(target, "--max-age", "1ms")
    assert (code, ("old", 1) in kinds(report)) == (12, True)


def test_a_rank_that_is_behind(ranks: list[fanin.Server], target: str) -> None:
    for rank in (0, 1):
        ranks[rank].begin_update(PUBLICATION)
        ranks[rank].commit(PUBLICATION, 2)
    code, report = told(target)
    assert (code, kinds(report)) == (12, [("behind", 2)])
    assert text_of(report, "behind") == "rank 2 is behind: step 1, the furthest 2"


def test_a_paused_run(ranks: list[fanin.Server], target: str) -> None:
    for rank in ranks:
        rank.pause(PUBLICATION, "evaluating\x1b[2J")
    done = status(target)
    assert done.returncode == 12
    assert "rank 0 is paused for " in done.stdout
    assert "evaluating" in done.stdout
    assert done.stdout.count(REMEDIES["paused"]) == 1  # once for them all
    assert "\x1b" not in done.stdout  # what a rank says does not steer the terminal
    words = [nixl_fetch(), "list", target]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "paused" in done.stdout
    assert "is paused: evaluating" in done.stderr


def test_a_run_that_nobody_publishes(target: str) -> None:
    code, report = told(target, "--run", "other")
    assert (code, kinds(report)) == (11, [("absent", 0), ("absent", 1), ("absent", 2)])


@pytest.mark.parametrize("way", ["own user", "stranger"])
def test_an_engine_that_holds_a_lease(ranks: list[fanin.Server], target: str, way: str) -> None:
    options = ["--no-unix"] if way == "stranger" else []
    with client_of(ranks) as client, client.begin(0, packed(empty())) as session:
        assert session.step == 1
        limit = time.monotonic() + PATIENCE
        code, report = told(target, *options)
        while not kinds(report):
            assert time.monotonic() < limit
            code, report = told(target, *options)
        assert code == 0  # whoever reads may
        assert {kind for kind, _ in kinds(report)} == {"lease"}
        assert len(kinds(report)) == 1  # told once, not for every rank
        holders = report["ranks"][0]["holders"]
        if way == "stranger":
            assert text_of(report, "lease").startswith("an engine has held a lease for ")
            assert holders == []
            assert report["ranks"][0]["leases"] == 1
        else:
            assert text_of(report, "lease").startswith("engine of this user has held a lease for ")
            assert [holder["who"] for holder in holders] == ["this user"]
    assert kinds(told(target)[1]) == []


def test_readers_that_are_always_stale(ranks: list[fanin.Server], target: str) -> None:
    with client_of(ranks) as client:
        for step in range(2, 8):
            session = client.begin(0, packed(empty()))
            publish(ranks, step)
            with pytest.raises(fanin.StaleError):
                session.end()
    code, report = told(target)
    assert (code, kinds(report)) == (0, [("stale", None)])
    assert "6 of 6 pulls were overtaken by an update" in text_of(report, "stale")


def test_a_rank_that_is_stopped_or_dead() -> None:
    with served(2) as (target, processes):
        assert told(target)[0] == 0
        stop(processes[1])
        try:
            code, report = told(target)
            assert (code, kinds(report)) == (13, [("no-answer", 1)])
            assert text_of(report, "no-answer").startswith("rank 1 does not answer (stopped?)")
            assert "the process is stopped" in report["problems"][0]["remedy"]
        finally:
            os.kill(processes[1], signal.SIGCONT)
        os.kill(processes[1], signal.SIGKILL)
        limit = time.monotonic() + PATIENCE
        while "(stopped?)" in text_of(report, "no-answer"):
            assert time.monotonic() < limit
            code, report = told(target)
        assert (code, kinds(report)) == (13, [("no-answer", 1)])


def test_a_rank_of_another_release() -> None:
    with servers(2, lease=0.0) as ranks, socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in ranks:
            publish_rank(rank, 1)
        thread = threading.Thread(target=refuse, args=(listener,), daemon=True)
        thread.start()
        ranks[1].close()
        mixed = f"{addresses(ranks[:1])[0]},127.0.0.1:{listener.getsockname()[1]}"
        code, report = told(mixed)
        doctor = subprocess.run(
            [nixl_fetch(), "doctor", mixed, "-q"], capture_output=True, text=True, timeout=PATIENCE
        )
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
    assert (code, kinds(report)[0][0]) == (14, "version")
    assert "versions 7 to 7" in text_of(report, "version")
    assert doctor.returncode == 4
    assert "1 of 2 ranks are of another release: " in doctor.stdout


@contextmanager
def launches(*worlds: tuple[bytes, int] | None) -> Iterator[int]:
    """A rank of each world and size (None: one that says nothing), which listen on ports that
    follow each other: the first."""
    for _ in range(100):
        with ExitStack() as made, socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            taken.close()
            try:
                for rank, of in enumerate(worlds):
                    if of is None:
                        made.enter_context(socket.create_server(("127.0.0.1", port + rank)))
                        continue
                    server = fanin.Server(
                        world_id=of[0], rank=rank, world_size=of[1], base_port=port, use_ucx=False
                    )
                    made.callback(server.close)
            except (fanin.FaninError, OSError, OverflowError):
                continue  # another program has one of them
            yield port
            return
    pytest.fail("no ports that follow each other are free")


def test_ranks_of_two_launches() -> None:
    one, other = os.urandom(16), os.urandom(16)
    with launches((one, 3), (other, 2), (one, 3)) as port:
        for _ in range(10):  # whoever answers first
            done = status(f"127.0.0.1:{port}", "--world-size", "3", "--timeout", "20s")
            assert done.returncode == 14
            assert "is of another world (launch) than " in done.stderr
            assert "--world-size" not in done.stderr


def test_a_world_size_that_would_leave_a_rank_out() -> None:
    with launches(None, (os.urandom(16), 2), None) as port:
        done = status(f"127.0.0.1:{port}", "--world-size", "3")
        assert done.returncode == 14
        assert "says the world size is 2, but 3 addresses were given" in done.stderr
        assert "--world-size" not in done.stderr


def test_another_world_size() -> None:
    one = os.urandom(16)
    with launches((one, 2), (one, 2)) as port:
        done = status(f"127.0.0.1:{port}", "--world-size", "3", "--timeout", "20s")
        assert done.returncode == 14
        assert done.stderr.endswith(": give --world-size 2\n")


def test_one_rank_that_is_slow() -> None:
    rows, columns = 2, 4 << 20
    name = "w"
    with servers(2, lease=60.0) as ranks:
        for rank in ranks:
            part = np.zeros((1, columns), np.float32)
            shard = fanin.shard_of(name, part, shape=(rows, columns), offset=(rank.rank, 0))
            rank.put(PUBLICATION, [shard])
            rank.commit(PUBLICATION, 1)
        way = NarrowWay(ranks[1].port, 1 << 16)
        whole = np.zeros((rows, columns), np.float32)
        into = fanin.pack([fanin.shard_of(name, whole, writable=True)])
        target = ",".join(addresses(ranks))
        options = {"use_ucx": False, "path": "stream"}
        with fanin.Client([addresses(ranks)[0], way.address], **options) as client:
            pull = threading.Thread(target=client.pull_into, args=(0, into), daemon=True)
            pull.start()
            limit = time.monotonic() + PATIENCE
            code, report = told(target)
            while ("slow", 1) not in kinds(report):
                assert time.monotonic() < limit, report
                code, report = told(target)
            assert code == 0
            assert text_of(report, "slow").startswith("rank 1 is slow: readers have waited ")
            way.wide.set()
            pull.join(PATIENCE)
            assert not pull.is_alive()
            assert kinds(told(target)[1]) == []
        way.listener.shutdown(socket.SHUT_RDWR)


class Screen:
    """A terminal of *columns* by *lines* with ``nixl-fetch top`` in it."""

    def __init__(self, target: str, columns: int, lines: int, *options: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.slave)
        self.seen, self.told = "", 0
        self.process = subprocess.Popen(
            [nixl_fetch(), "top", target, *options],
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm"},
            # Of its own, so that Ctrl-C on it is a signal.
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def frames(self) -> list[list[str]]:
        """What was drawn so far, whole frames alone: lines without what colours them."""
        whole = [part for part in self.seen.split("\x1b[H")[1:] if "\x1b[J" in part]
        return [
            re.sub(r"\x1b\[[0-9;]*m|\x1b\[2?K", "", part.split("\x1b[J")[0])
            .replace("\r", "")
            .split("\n")
            for part in whole
        ]

    def read(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        self.seen += os.read(self.master, 65536).decode()
        return True

    def until(self, wanted: str) -> list[str]:
        """The first frame after those that were told that has *wanted* in it."""
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            for frame in self.frames()[self.told :]:
                self.told += 1
                if any(wanted in line for line in frame):
                    return frame
            self.read(0.1)
        raise AssertionError(f"no {wanted!r} in {self.frames()[-1:]!r}")

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def end(self) -> int:
        """Its exit status, once the terminal is as it was."""
        limit = time.monotonic() + PATIENCE
        while self.process.poll() is None:  # what it writes last waits for who reads it
            assert time.monotonic() < limit
            self.read(0.02)
        while self.read(0):
            pass
        assert self.seen.endswith("\x1b[?7h\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(self.slave) == self.before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self.master)
        os.close(self.slave)


@contextmanager
def top(target: str, columns: int, lines: int, *options: str) -> Iterator[Screen]:
    screen = Screen(target, columns, lines, *options)
    try:
        yield screen
    finally:
        screen.close()


def test_top_draws_what_is_wrong_first(ranks: list[fanin.Server], target: str) -> None:
    with top(target, 60, 24, "--interval", "100ms") as screen:
        first = screen.until("nothing is wrong")
        assert "3 of 3 ranks answer" in first[0]
        assert {"RANK", "STATE", "STEP", "AGE", "HELD", "SENDS"} <= set(first[1].split())
        assert [line.split()[0] for line in first[2:]] == ["0", "1", "2"]
        for rank in (0, 1):
            ranks[rank].begin_update(PUBLICATION)
            ranks[rank].commit(PUBLICATION, 2)
        wrong = screen.until("rank 2 is behind: step 1, the furthest 2")
        assert [line.split()[0] for line in wrong[3:]] == ["2", "0", "1"]  # the culprit first
        assert max(map(len, wrong)) <= 60
        screen.resize(200, 24)
        assert "DRAIN50" in screen.until("SESSIONS")[2]
        screen.resize(60, 4)  # no room for all: the culprit stays
        small = screen.until("... and 3 more ranks")
        assert len(small) == 4 and small[1] == "  rank 2 is behind: step 1, the furthest 2"
        screen.press(b"q")
        assert screen.end() == 0


def test_top_tells_by_which_path_readers_get_how_much(
    ranks: list[fanin.Server], target: str
) -> None:
    with top(target, 200, 24, "--interval", "100ms") as screen:
        assert screen.until("nothing is wrong")[1].split()[-2:] == ["SENDS", "PATH"]
        with client_of(ranks, use_ucx=False, path="stream") as client:
            client.pull_into(0, packed(empty()))
        drawn = screen.until("stream")
        assert any(re.search(r" \S+ [kMG]?B/s +stream$", line) for line in drawn[2:])
    _, report = told(target)
    read = [rank["bytes_read"] for rank in report["ranks"]]
    assert sum(rank["stream"] for rank in read) == sum(w.nbytes for w in weights(1).values())
    assert {rank[path] for rank in read for path in ("tls", "cma", "rdma", "cuda_ipc")} == {0}


def test_top_ends_by_ctrl_c_and_gives_the_terminal_back(target: str) -> None:
    with top(target, 80, 24, "--interval", "1h") as screen:
        screen.until("nothing is wrong")
        screen.press(b" ")  # looks at once
        screen.until("nothing is wrong")
        screen.press(b"\x03")
        assert screen.end() == 130


def test_top_that_crashes_gives_the_terminal_back(target: str) -> None:
    with top(target, 80, 24, "--interval", "1h") as screen:
        screen.until("nothing is wrong")
        resource.prlimit(screen.process.pid, resource.RLIMIT_CORE, (0, 0))
        screen.process.send_signal(signal.SIGABRT)
        assert screen.end() == -signal.SIGABRT


def test_top_without_a_terminal(ranks: list[fanin.Server], target: str) -> None:
    ranks[1].pause(PUBLICATION, "evaluating\x1b[2J")
    options = ["--count", "2", "--interval", "100ms"]
    done = subprocess.run(
        [nixl_fetch(), "top", target, *options], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 12  # as status, by the last look
    assert done.stdout.count("rank 1 is paused for ") == 2
    assert "\x1b" not in done.stdout
    ends = [line.split()[-2] for line in done.stdout.splitlines() if line.startswith("   2 ")]
    assert ends == ["-", "0"]  # what it sends is known from the second look on
    done = subprocess.run(
        [nixl_fetch(), "top", target, "--json", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kinds(look) for look in looks] == [[("paused", 1)]] * 2


def test_top_leaves_no_trace_a_look(target: str, tmp_path: Path) -> None:
    subprocess.run(
        [nixl_fetch(), "top", target, "--count", "3", "--interval", "100ms"],
        env={**os.environ, "FANIN_TRACE": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        timeout=PATIENCE,
    )
    assert len(list(tmp_path.iterdir())) <= 1  # of the command itself


def test_top_that_cannot_look_tells_why(target: str) -> None:
    words = [nixl_fetch(), "top", target, "--tls-cert", "nowhere.pem"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (11, "")
    assert "cannot make a client: " in done.stderr


def test_top_follows_the_target_file(target: str, tmp_path: Path) -> None:
    info, ports = (
        tmp_path / "nixl_info.json",
        [int(one.rpartition(":")[2]) for one in target.split(",")],
    )
    hosts = [
        {"host": "127.0.0.1", "base_port": port - rank, "ranks": [rank]}
        for rank, port in enumerate(ports)
    ]
    whole = json.dumps({"world_size": 3, "hosts": hosts})
    info.write_text(whole)
    with top(str(info), 80, 24, "--interval", "100ms") as screen:
        screen.until("nothing is wrong")
        info.write_text("{")
        screen.until("no status: ")
        info.write_text(whole)
        screen.until("nothing is wrong")
        screen.press(b"q")
        assert screen.end() == 0
        assert screen.process.stderr is not None
        assert screen.process.stderr.read() == b""  # of the last look


def test_top_tells_of_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools" / "python"))
    tools = import_module("top")
    told = dict.fromkeys(("bytes_origin", "bytes_relays", "bytes_handed_on", "taken_over"), 0)
    relay = {"address": "10.0.0.7:7000", "place": "a/r3", "step": 7, "late": 2, **told}
    rank = {"rank": 0, "address": "a:1", "status": "FANIN_OK"}
    rank["told_relays"] = [{**relay, "units": 512, "landed": 500}]
    look = {"problems": [], "ranks": [rank]}
    row = tools.View(200, 0, False).fill("", look, [()])[-1].split()
    assert (row[0], row[2], row[-1]) == ("10.0.0.7:7000", "500/512", "a/r3")
    assert len(tools.View(200, 4, False).fill("", look, [()])) == 3  # no room for a row


def test_top_waits_for_ranks_that_are_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = subprocess.run(
        [nixl_fetch(), "top", f"127.0.0.1:{port}", "--count", "2", "--interval", "100ms"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 13
    assert done.stdout.count("no status: ") == 2
