# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch status``: each way in which a run stalls is told in words, by real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fanin
import numpy as np
import pytest
from local_world import (
    A_NAME,
    B_NAME,
    PATIENCE,
    PUBLICATION,
    SLOWNESS,
    addresses,
    client_of,
    nixl_fetch,
    publish,
    publish_rank,
    servers,
    weights,
)


def status(target: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, which ends within two seconds whatever the ranks do."""
    started = time.monotonic()
    done = subprocess.run(
        [nixl_fetch(), "status", target, *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert time.monotonic() - started < 2 * SLOWNESS
    return done


def told(target: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = status(target, "--json", *options)
    return done.returncode, json.loads(done.stdout)


def kinds(report: dict[str, Any]) -> list[tuple[str, int | None]]:
    return [(problem["kind"], problem["rank"]) for problem in report["problems"]]


def text_of(report: dict[str, Any], kind: str) -> str:
    return next(p["text"] for p in report["problems"] if p["kind"] == kind)


@pytest.fixture
def target(ranks: list[fanin.Server]) -> str:
    return ",".join(addresses(ranks))


def packed() -> fanin.PackedTensors:
    got = {name: np.zeros_like(value) for name, value in weights(1).items()}
    return fanin.pack(fanin.shard_of(name, got[name], writable=True) for name in (A_NAME, B_NAME))


def test_nothing_is_wrong(target: str) -> None:
    done = status(target)
    assert done.returncode == 0, done.stderr
    assert "step 1, 3 of 3 ranks answer, nothing is wrong" in done.stdout
    code, report = told(target, "--max-age", "1h")
    assert (code, report["healthy"], report["step"]) == (0, True, 1)
    assert kinds(report) == []
    assert [rank["state"] for rank in report["ranks"]] == ["stable"] * 3


def test_a_rank_in_its_update(ranks: list[fanin.Server], target: str) -> None:
    ranks[1].begin_update(PUBLICATION)
    code, report = told(target)
    assert (code, kinds(report)) == (12, [("updating", 1)])
    assert text_of(report, "updating").startswith("rank 1: in its update for ")
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
    assert "\x1b" not in done.stdout  # what a rank says does not steer the terminal


def test_a_run_that_nobody_publishes(target: str) -> None:
    code, report = told(target, "--run", "other")
    assert (code, kinds(report)) == (11, [("absent", 0), ("absent", 1), ("absent", 2)])


@pytest.mark.parametrize("way", ["own user", "stranger"])
def test_an_engine_that_holds_a_lease(ranks: list[fanin.Server], target: str, way: str) -> None:
    options = ["--no-unix"] if way == "stranger" else []
    with client_of(ranks) as client, client.begin(0, packed()) as session:
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
            session = client.begin(0, packed())
            publish(ranks, step)
            with pytest.raises(fanin.StaleError):
                session.end()
    code, report = told(target)
    assert (code, kinds(report)) == (0, [("stale", None)])
    assert "6 of 6 pulls were overtaken by an update" in text_of(report, "stale")


@contextmanager
def another_process() -> Iterator[tuple[str, list[int]]]:
    """Two ranks of `nixl-fetch serve`: their target, their processes."""
    serve = subprocess.Popen(
        [nixl_fetch(), "serve", "--adapter-shape", "small", "--world-size", "2", "--keep-going"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serve.stdout is not None
        ready = serve.stdout.readline()
        children = subprocess.run(
            ["pgrep", "-P", str(serve.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        by_name = {open(f"/proc/{pid}/comm").read().strip(): int(pid) for pid in children}
        yield ready.split("target ")[1].strip(), [by_name["nixl-rank-0"], by_name["nixl-rank-1"]]
    finally:
        serve.terminate()
        serve.wait(PATIENCE)


def stands(pid: int) -> bool:
    threads = os.listdir(f"/proc/{pid}/task")
    return all(") T " in open(f"/proc/{pid}/task/{thread}/stat").read() for thread in threads)


def test_a_rank_that_is_stopped_or_dead() -> None:
    with another_process() as (target, processes):
        assert told(target)[0] == 0
        os.kill(processes[1], signal.SIGSTOP)
        limit = time.monotonic() + PATIENCE
        while not stands(processes[1]):
            assert time.monotonic() < limit
        try:
            code, report = told(target)
            assert (code, kinds(report)) == (13, [("no-answer", 1)])
            assert text_of(report, "no-answer").startswith("rank 1 does not answer (stopped?)")
        finally:
            os.kill(processes[1], signal.SIGCONT)
        os.kill(processes[1], signal.SIGKILL)
        limit = time.monotonic() + PATIENCE
        while "(stopped?)" in text_of(report, "no-answer"):
            assert time.monotonic() < limit
            code, report = told(target)
        assert (code, kinds(report)) == (13, [("no-answer", 1)])


def refuse(listener: socket.socket) -> None:
    """Answers every hello as a release of another protocol does."""
    text = b"this server speaks protocol versions 7 to 7, the client 1 to 1"
    body = b"\x82\x01\xd1" + struct.pack(">h", -401) + b"\x02\xd9" + bytes([len(text)]) + text
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        with peer:
            peer.settimeout(PATIENCE)
            head = peer.recv(24, socket.MSG_WAITALL)
            peer.recv(struct.unpack_from("<I", head, 16)[0], socket.MSG_WAITALL)
            request = struct.unpack_from("<Q", head, 8)[0]
            peer.sendall(b"FAN1" + struct.pack("<HHQII", 1, 31, request, len(body), 0) + body)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass


def test_a_rank_of_another_release() -> None:
    with servers(2, lease=0.0) as ranks, socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in ranks:
            publish_rank(rank, 1)
        thread = threading.Thread(target=refuse, args=(listener,), daemon=True)
        thread.start()
        ranks[1].close()
        mixed = f"{addresses(ranks[:1])[0]},127.0.0.1:{listener.getsockname()[1]}"
        code, report = told(mixed)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
    assert (code, kinds(report)[0][0]) == (14, "version")
    assert "versions 7 to 7" in text_of(report, "version")
