# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch bundle``: one file that tells all, whoever does not answer, and no secret."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import fanin
import pytest
from local_world import PATIENCE, SLOWNESS, addresses, nixl_fetch

PARTS = ["environment.txt", "version", "doctor", "status", "ping", "list", "keys", "pull"]
TRACE = "pull.trace.json"

#: Lines that must not be handed on as they are, and sentences that must.
SECRETS = (
    "2026-11-23 engine: -----BEGIN PRIVATE KEY-----\n"
    "2026-11-23 hunter10\nhunter11==\n-----END PRIVATE KEY-----\nafter the block\n"
    '{"pem": "-----BEGIN KEY-----\\nhunter12\\n-----END KEY-----\\n", "n": 1}\n'
    "no -----BEGIN CERTIFICATE----- in ca.pem\nstill told\n"
    f"{'hunter13' * 8}\nhunter14\n-----END RSA PRIVATE KEY-----\n"
    "password is hunter15, user bob\nthe secret hunter16 is wrong\nBearer hunter17\n"
    "token hunter18 and secret 'hunter19'\nsession cookie hunter20\n"
    "no secret file /run/secret/launch42: give both ends the same\n"
    "12 tokens 4096 in the cache\nkey lora:0:layers.0.q_proj is behind\n"
)
STRUCK = (
    "2026-11-23 engine: ***\n***\n***\n***\nafter the block\n"
    '{"pem": "***\n'
    "no ***\nstill told\n"
    "***\n***\n***\n"
    "password is ***, user bob\nthe secret *** is wrong\nBearer ***\n"
    "token *** and secret '***'\nsession cookie ***\n"
    "no secret file /run/secret/launch42: give both ends the same\n"
    "12 tokens 4096 in the cache\nkey lora:0:layers.0.q_proj is behind\n"
)


def bundle(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [nixl_fetch(), "bundle", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **environment},
    )


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path, "r:") as archive:
        members = archive.getmembers()
        assert all(m.isreg() and m.mode == 0o600 for m in members)
        assert all(m.name.startswith("nixl-fetch-bundle/") for m in members)
        return {
            m.name.split("/", 1)[1]: archive.extractfile(m).read().decode()  # type: ignore[union-attr]
            for m in members
        }


def part(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return next(p for p in manifest["parts"] if p["part"] == name)


def test_all_parts_and_no_secret(ranks: list[fanin.Server], tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "x" * 300_000 + "\n\x1b[31mred\nuser password: hunter2 and so on\nkey lora:0\n"
        "Authorization: Bearer hunter6\nserve m --api-key hunter7\nredis://user:hunter8@host:1/0\n"
        "http://host/a@b?c\n" + SECRETS
    )
    out = tmp_path / "b.tar"
    done = bundle(
        ",".join(addresses(ranks)),
        "--log",
        log,
        "--log",
        tmp_path / "absent.log",
        "--no-unix",
        "--path",
        "stream",
        "-o",
        out,
        FANIN_MY_TOKEN="hunter3",
        NCCL_API_KEY="hunter4",
        UCX_TLS="tcp",
        NIXL_STORE="etcd://user:hunter9@host:2379",
        HOME_SECRET="hunter5",
    )
    assert done.returncode == 0, done.stderr
    assert "look it over" in done.stdout
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["b.tar", "engine.log"]
    files = contents(out)
    assert b"hunter" not in out.read_bytes()
    manifest = json.loads(files["manifest.json"])
    logs = ["log.0.txt", "log.1.txt"]
    assert [p["part"] for p in manifest["parts"]] == [*PARTS, TRACE, *logs]
    names = {event["name"] for event in json.loads(files[TRACE])["traceEvents"]}
    assert {"pull", "connect", "catalog", "read"} <= names
    for name in ("status", "ping", "list", "keys", "pull"):
        assert part(manifest, name)["exit_status"] == 0, part(manifest, name)
        assert json.loads(files[f"{name}.json"])["schema"] == 1
    assert len(json.loads(files["keys.json"])["keys"]) == 2
    assert "stream" in files["pull.json"]
    assert files["version.txt"].startswith("nixl-fetch ")
    environment = files["environment.txt"].splitlines()
    assert "FANIN_MY_TOKEN=***" in environment
    assert "NCCL_API_KEY=***" in environment
    assert "UCX_TLS=tcp" in environment
    assert "NIXL_STORE=etcd://***" in environment
    assert not any(row.startswith("HOME_") for row in environment)
    assert files["log.0.txt"] == (
        "\\x1b[31mred\nuser password:***\nkey lora:0\nAuthorization:***\n"
        "serve m --api-key ***\nredis://***\nhttp://host/a@b?c\n" + STRUCK
    )
    assert "No such file" in part(manifest, "log.1.txt")["why"]


def test_a_rank_that_says_nothing_costs_no_more_than_the_timeout(
    ranks: list[fanin.Server], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a process that is stopped
        target = ",".join([*addresses(ranks)[:2], f"127.0.0.1:{silent.getsockname()[1]}"])
        started = time.monotonic()
        done = bundle(target, "--timeout", "2s", "--json", "--out", tmp_path / "b.tar")
        assert (
            time.monotonic() - started < 10 * SLOWNESS
        )  # its parts one after the other would take 14
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    files = contents(tmp_path / "b.tar")
    assert [p["part"] for p in told["parts"]] in (PARTS, [*PARTS, TRACE])  # had it time to pull
    assert told["bytes"] == (tmp_path / "b.tar").stat().st_size
    assert json.loads(files["manifest.json"])["parts"] == told["parts"]
    for p in told["parts"]:
        assert p["exit_status"] == 0 or p["why"] or p["part"] == "environment.txt", p
    assert part(told, "doctor")["why"] == "see doctor.json"
    assert part(told, "status")["exit_status"] != 0


def test_a_pull_whose_trace_has_no_place(ranks: list[fanin.Server], tmp_path: Path) -> None:
    out, nowhere = tmp_path / "b.tar", str(tmp_path / "nowhere")
    done = bundle(",".join(addresses(ranks)), "--json", "-o", out, TMPDIR=nowhere)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert part(told, "pull")["exit_status"] == 0
    assert "TMPDIR" in part(told, TRACE)["why"]
    assert TRACE not in contents(out)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("127.0.0.1:1", "-o", "there.tar"), 11, "there.tar: File exists"),
        (("127.0.0.1:1", "-o", "link.tar"), 11, "link.tar: File exists"),
        (("127.0.0.1:1", "-o", "no/where.tar"), 15, "no/where.tar: No such file"),
        (("no-such.json",), 11, "no-such.json"),
        (("127.0.0.1:1", "--path", "teleport"), 2, "teleport"),
    ],
)
def test_what_cannot_be_written_or_asked(
    words: tuple[str, ...],
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.tar").write_text("mine")
    Path("link.tar").symlink_to("elsewhere")
    done = bundle(*words, "--timeout", "500ms", "--no-pull")
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert Path("there.tar").read_text() == "mine"
    assert sorted(os.listdir()) == ["link.tar", "there.tar"]


def test_nobody_there_still_makes_a_bundle(tmp_path: Path) -> None:
    done = bundle("127.0.0.1:1", "full:0", "--timeout", "2s", "-o", tmp_path / "b.tar", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert part(told, "status")["exit_status"] == 13
    assert "nobody answers" in part(told, "status")["why"]
    assert "a whole model" in part(told, "pull")["why"]
    assert "no-pull" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        words = [nixl_fetch(), "bundle", target, "--timeout", "1h", "-o", str(tmp_path / "b.tar")]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as tool:
            with silent.accept()[0]:  # by a part, which waits for an answer
                tool.send_signal(number)
                _, err = tool.communicate(timeout=2 * PATIENCE)
    assert (tool.returncode, os.listdir(tmp_path)) == (128 + number, [])
    assert "interrupted, nothing is written" in err


def test_what_a_killed_one_left_is_in_nobodys_way(tmp_path: Path) -> None:
    # By exec the command has a number that is known beforehand.
    script = 'echo old >".nixl-fetch-$$"; exec "$0" "$@"'
    words = ["bundle", "127.0.0.1:1", "--no-pull", "--timeout", "500ms", "-o", "b.tar"]
    done = subprocess.run(
        ["bash", "-c", script, nixl_fetch(), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    contents(tmp_path / "b.tar")
