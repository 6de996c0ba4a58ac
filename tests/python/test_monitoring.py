# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told, by ``nixl-fetch exporter`` and by a rank itself."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
from local_world import (
    PATIENCE,
    PUBLICATION,
    ROWS,
    addresses,
    nixl_fetch,
    publish,
    run_script,
    servers,
    until,
    weights,
)
from prometheus import MONITORING, tool

SAMPLE = re.compile(r'([a-z_]+)(\{[a-z]+="[^"\\\n]*"(?:,[a-z]+="[^"\\\n]*")*\})? (\d+(?:\.\d+)?)')


def ask(
    address: str, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
) -> tuple[str, str]:
    """The status line's number and the content."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), PATIENCE) as peer:
        peer.sendall(request)
        got = b""
        while part := peer.recv(65536):
            got += part
    head, _, content = got.decode().partition("\r\n\r\n")
    assert request.startswith(b"HEAD ") or f"Content-Length: {len(content)}\r\n" in head
    return head.split()[1], content


def samples(text: str) -> dict[str, float]:
    """Every sample, by name and labels, of a text that keeps to the format."""
    found: dict[str, float] = {}
    kind: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, what = line.split()[2:]
            assert name not in kind and what in ("counter", "gauge", "histogram")
            kind[name] = what
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            family = re.sub("_(bucket|sum|count)$", "", name)
            family = family if kind.get(family) == "histogram" else name
            assert family == list(kind)[-1], f"{name} is not with its family"
            assert name + (labels or "") not in found
            found[name + (labels or "")] = float(value)
    lint = tool("promtool")
    if lint:
        subprocess.run(
            [lint, "check", "metrics"], input=text, text=True, timeout=PATIENCE, check=True
        )
    return found


@contextmanager
def exported(command: list[str]) -> Iterator[tuple[str, int]]:
    """Where it listens, and its process; it ends by SIGTERM with exit status 0."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().split("port ")[1].split(":")[0]
        yield f"127.0.0.1:{port}", process.pid
        process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def exporting(ranks: list[fanin.Server]) -> Iterator[tuple[str, int]]:
    target = ",".join(addresses(ranks))
    with exported([nixl_fetch(), "exporter", target, "--listen", "127.0.0.1:0"]) as found:
        yield found


@pytest.fixture
def exporter(exporting: tuple[str, int]) -> str:
    return exporting[0]


def test_the_exporter_tells_of_all_ranks(ranks: list[fanin.Server], exporter: str) -> None:
    ranks[1].begin_update(PUBLICATION)
    code, text = ask(exporter)
    assert ask(exporter)[1] == text  # within a second ranks are not asked again
    told = samples(text)
    assert code == "200" and told[f'fanin_run_up{{publication="{PUBLICATION}"}}'] == 1
    for rank, state in enumerate(("stable", "writing", "stable")):
        of = f'publication="{PUBLICATION}",rank="{rank}"'
        assert told[f"fanin_publication_step{{{of}}}"] == 1
        assert told[f'fanin_publication_state{{{of},state="{state}"}}'] == 1
        last = told[f'fanin_drain_seconds_bucket{{{of},le="+Inf"}}']
        assert last == told[f"fanin_drain_seconds_count{{{of}}}"]
    assert told[f'fanin_problems{{publication="{PUBLICATION}",kind="updating"}}'] == 1


def misbehave(address: str) -> None:
    """More half-open connections than there is room for, and requests that are none."""
    host, port = address.rsplit(":", 1)
    with ExitStack() as stack:
        for _ in range(20):
            peer = stack.enter_context(closing(socket.create_connection((host, int(port)))))
            peer.sendall(b"GET /metr")
        assert ask(address)[0] == "200"  # at once: nobody waits for those
    assert ask(address, b"GET / HTTP/1.1\r\n\r\n")[0] == "404"
    assert ask(address, b"GET /metricsx HTTP/1.1\r\n\r\n")[0] == "404"
    assert ask(address, b"POST /metrics HTTP/1.1\r\n\r\n")[0] == "405"
    assert ask(address, b"HEAD / HTTP/1.1\r\n\r\n") == ("404", "")
    assert ask(address, b"HEAD /metrics HTTP/1.1\r\n\r\n") == ("200", "")
    assert ask(address, b"GET /metrics?a=b HTTP/1.0\r\n\r\n")[0] == "200"


WITHOUT_DESCRIPTORS = """
import os, resource, socket, time
from fanin._exporter import MetricsPage
from local_world import PATIENCE, until

page = MetricsPage(lambda: "x 1\\n", "127.0.0.1", 0)
host, port = page.address.split(":")
first, last = socket.create_connection((host, int(port)), PATIENCE), socket.socket()
listener = page._server._listener
until(lambda: listener._open)
taken = []


def take_all() -> bool:  # whether there was one
    before = len(taken)
    try:
        while True:
            taken.append(os.dup(1))
    except OSError:
        return len(taken) > before


resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
take_all()
first.sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
assert first.recv(12) == b"HTTP/1.1 200"
taken.append(first.detach())
until(take_all)  # the place that the page gives back a moment after its answer
last.connect((host, int(port)))
last.sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
last.settimeout(0.5)
spent = time.process_time()
try:
    raise SystemExit(last.recv(1))
except TimeoutError:
    assert time.process_time() - spent < 0.1
for one in taken:
    os.close(one)
last.settimeout(PATIENCE)
assert last.recv(12) == b"HTTP/1.1 200"
"""


def test_a_page_without_descriptors_lives_and_waits_for_one() -> None:
    done = run_script(WITHOUT_DESCRIPTORS)
    assert done.returncode == 0, done.stderr


def test_the_exporter_lives_without_ranks() -> None:
    with servers(1) as ranks:
        gone = ",".join(addresses(ranks))
    process = subprocess.Popen(
        [nixl_fetch(), "exporter", gone, "--listen", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(re.findall(r'"port":(\d+)', process.stdout.readline())[0])
        why, _, text = ask(f"127.0.0.1:{port}")[1].partition("\n")
        assert re.match(rf"# no status: .*{re.escape(gone)}", why)
        told = samples(text)
        assert told == {f'fanin_run_up{{publication="{PUBLICATION}"}}': 0}
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdout.close()


def test_the_exporter_says_why_it_cannot_be(tmp_path: Path) -> None:
    command = [nixl_fetch(), "exporter", "127.0.0.1:1", "--listen"]
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        for address, code, why in (
            ("here", 2, "--listen 'here' is no ADDRESS:PORT"),
            (f"127.0.0.1:{port}", 15, f"cannot listen on 127.0.0.1:{port}: Address already"),
        ):
            done = subprocess.run([*command, address], capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (code, "")
            assert why in done.stderr
    if Path(nixl_fetch()).read_bytes().startswith(b"#!"):
        return  # the package's own command, which is not there without it
    (tmp_path / "fanin.py").write_text("raise ImportError('no fanin here')")
    own = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, "127.0.0.1:0"], capture_output=True, text=True, env=own)
    assert done.returncode == 15 and "no exporter: no fanin here: put a python3" in done.stderr
    own["PATH"] = str(tmp_path)
    done = subprocess.run([*command, "127.0.0.1:0"], capture_output=True, text=True, env=own)
    assert done.returncode == 15 and "cannot run python3" in done.stderr


def test_the_exporter_follows_ranks_that_end(
    ranks: list[fanin.Server], exporting: tuple[str, int]
) -> None:
    up = f'fanin_run_up{{publication="{PUBLICATION}"}} '
    assert up + "1\n" in ask(exporting[0])[1]
    for rank in ranks:
        rank.close()
    until(lambda: up + "0\n" in ask(exporting[0])[1])


def test_a_rank_tells_of_itself(ranks: list[fanin.Server]) -> None:
    page = ranks[0].serve_metrics()
    code, text = ask(page.address)
    assert ask(page.address)[1] == text
    told = samples(text)
    assert code == "200" and told["fanin_commits_total"] == 1
    misbehave(page.address)
    other = ranks[0].serve_metrics()  # as many as one likes
    page.close()
    page.close()
    with pytest.raises(OSError):
        ask(page.address)
    child = os.fork()
    if child == 0:  # has nothing of it: the port is free once the parent has closed its own
        other.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(other.address)[0] == "200"
    ranks[0].close()
    with pytest.raises(OSError):
        ask(other.address)
    with pytest.raises(fanin.StateError):
        ranks[0].serve_metrics()


def told_alike(text: str) -> dict[str, str]:
    """What the page says each metric is."""
    return dict(re.findall(r"# HELP (\w+) (.*)", text)) | {
        f"{name} is a": kind for name, kind in re.findall(r"# TYPE (\w+) (\w+)", text)
    }


def test_both_pages_call_the_same_by_one_name(ranks: list[fanin.Server], exporter: str) -> None:
    of_run, of_rank = told_alike(ask(exporter)[1]), told_alike(ranks[0].prometheus())
    both = of_run.keys() & of_rank.keys()
    assert len(both) > 20
    assert {name: of_run[name] for name in both} == {name: of_rank[name] for name in both}


@pytest.mark.parametrize("way", ["stream", "tls", "cma"])
def test_bytes_by_path(way: str, tmp_path: Path) -> None:
    """On both pages, and what the reader itself says."""
    options: dict[str, Any] = {}
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("ab" * 31 + "cd")
    reads: dict[str, Any] = {"path": "cma" if way == "cma" else "stream"}
    if way == "tls":
        options["secret_file"] = reads["secret_file"] = secret
        reads["use_unix"] = False
    with servers(lease=1.0, **options) as ranks:
        publish(ranks, 1)
        with fanin.Client(addresses(ranks), use_ucx=False, **reads) as client:
            got = {name: np.zeros_like(value) for name, value in weights(1).items()}
            result = client.pull_into("0", got, timeout=PATIENCE)
        by_rank = [2 * (last - first) * 8 * 4 for first, last in ROWS]
        assert sum(by_rank) == result.bytes > 0
        command = [nixl_fetch(), "exporter", ",".join(addresses(ranks)), "--listen", "127.0.0.1:0"]
        more = ["--secret-file", str(secret)] if way == "tls" else []
        with exported([*command, *more]) as (address, _):
            run = samples(ask(address)[1])
        for rank, server in enumerate(ranks):
            told = samples(server.prometheus())
            for path in ("stream", "tls", "cma", "rdma", "cuda_ipc"):
                wanted = by_rank[rank] if path == way else 0
                assert told[f'fanin_read_bytes_total{{path="{path}"}}'] == wanted
                of = f'publication="{PUBLICATION}",rank="{rank}",path="{path}"'
                assert run[f"fanin_read_bytes_total{{{of}}}"] == wanted
            if way == "stream" and by_rank[rank]:
                assert told["fanin_data_cpu_seconds_total"] > 0
            assert told["fanin_control_cpu_seconds_total"] > 0


def test_rules_and_dashboard_ask_for_what_there_is(
    ranks: list[fanin.Server], exporter: str
) -> None:
    there = set(re.findall(r"# TYPE (\w+)", ask(exporter)[1] + ranks[0].prometheus()))
    for name in ("alerts.yml", "dashboard.json"):
        text = (MONITORING / name).read_text()
        wanted = set(re.findall(r"\bfanin_(?!pull_)\w+", text))  # those are engines'
        assert len(wanted) > 4
        assert {re.sub("_bucket$", "", metric) for metric in wanted} <= there
