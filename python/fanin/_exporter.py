# SPDX-License-Identifier: Apache-2.0
"""A page for Prometheus; and ``nixl-fetch status`` as one, which ``nixl-fetch exporter`` runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NoReturn

from fanin import _counters
from fanin._http_server import Answer, HttpServer, Request
from fanin.errors import FaninError

METRICS = {
    "fanin_run_up": "Whether any rank answered, and all belong together.",
    "fanin_rank_up": "Whether the rank answered.",
    "fanin_publication_step": "The last step that was committed.",
    "fanin_publication_commit_timestamp_seconds": "When the last step was committed, in seconds "
    "since 1970 by this host's clock.",
    "fanin_publication_state": "1 for the state that the publication has, 0 for the others.",
    "fanin_lease_age_seconds": "How long the oldest lease has been held; 0: there is none.",
    "fanin_lease_holder_age_seconds": "How long a reader has held leases, by where it is; told to "
    "whom the rank trusts, the oldest 16.",
    **_counters.METRICS,
    "fanin_read_bytes_total": "Tensor bytes read, by path; stream and tls as sent, the others as "
    "readers told.",
    "fanin_drain_seconds": "Updates and pauses by how long they waited for readers.",
    "fanin_problems": "What nixl-fetch status finds wrong, by its kind: how many times.",
}
"""Each metric, and what it is; in the page's order."""

_STATES = ("unpublished", "stable", "draining", "writing", "paused")

_Sample = tuple[str, dict[str, Any], Any]
"""A metric with its labels and its value, which is in nanoseconds if the name says seconds."""


def _of_rank(rank: dict[str, Any]) -> Iterator[_Sample]:
    """What one rank tells; a part that it does not tell is left out."""
    yield "fanin_rank_up", {"address": rank["address"]}, int(rank["status"] == "FANIN_OK")
    if rank.get("commit_age_ns") is not None:
        at = time.time_ns() - rank["commit_age_ns"]
        yield "fanin_publication_step", {}, rank["step"]
        yield "fanin_publication_commit_timestamp_seconds", {}, at
    for state in _STATES if "state" in rank else ():
        yield "fanin_publication_state", {"state": state}, int(state == rank["state"])
    if "leases" not in rank:  # an older release, which does not count
        return
    if "state" in rank:
        yield "fanin_lease_age_seconds", {}, rank["lease_age_ns"] or 0
    for nth, one in enumerate(rank["holders"]):
        labels = {"holder": one["who"] or "", "nth": nth}
        yield "fanin_lease_holder_age_seconds", labels, one["age_ns"] or 0
    for member, (name, result) in _counters.TOLD.items():
        # "leases" are the publication's there
        yield name, result, rank["rank_leases" if member == "leases" else member]
    for path, size in rank["bytes_read"].items():
        yield "fanin_read_bytes_total", {"path": path}, size
    updates = list(accumulate(one["updates"] for one in rank["drain_waits"]))
    for one, count in zip(rank["drain_waits"], updates, strict=True):
        bound = "+Inf" if one["bound_ns"] is None else f"{one['bound_ns'] / 1e9:g}"
        yield "fanin_drain_seconds_bucket", {"le": bound}, count
    yield "fanin_drain_seconds_sum", {}, rank["drain_wait_ns"]
    yield "fanin_drain_seconds_count", {}, updates[-1]


def _samples(publication: str, status: dict[str, Any]) -> Iterator[_Sample]:
    run = {"publication": publication}
    yield "fanin_run_up", run, int("error" not in status)
    for rank in status.get("ranks", ()):
        number = "" if rank["rank"] is None else rank["rank"]
        for name, labels, value in _of_rank(rank):
            yield name, {**run, "rank": number, **labels}, value
    for kind, times in Counter(one["kind"] for one in status.get("problems", ())).items():
        yield "fanin_problems", {**run, "kind": kind}, times


def _plain(text: str) -> str:
    """A label's value, or a comment: peers choose some of them."""
    return "".join(c if " " <= c <= "~" and c not in '"\\' else "_" for c in text)


def _line(name: str, labels: dict[str, Any], value: Any) -> str:
    told = ",".join(f'{key}="{_plain(str(one))}"' for key, one in labels.items())
    number = int(value)
    if "_seconds" in name and not name.endswith(("_bucket", "_count")):
        return f"{name}{{{told}}} {number // 10**9}.{number % 10**9:09}"
    return f"{name}{{{told}}} {number}"


def _kind(metric: str) -> str:
    if metric == "fanin_drain_seconds":
        return "histogram"
    return "counter" if metric.endswith("_total") else "gauge"


def page(publication: str, status: dict[str, Any]) -> str:
    """Text exposition format 0.0.4 of what ``nixl-fetch status --json`` has told."""
    lines: dict[str, list[str]] = {metric: [] for metric in METRICS}
    for name, labels, value in _samples(publication, status):
        metric = "fanin_drain_seconds" if name.startswith("fanin_drain_seconds") else name
        lines[metric].append(_line(name, labels, value))
    text = ""
    if error := status.get("error"):
        text = f"# no status: {_plain(error['message'])}: {_plain(error['remedy'] or '')}\n"
    for metric, told in lines.items():
        head = f"# HELP {metric} {METRICS[metric]}\n# TYPE {metric} {_kind(metric)}\n"
        text += head + "".join(f"{line}\n" for line in told)
    return text


def _status(command: list[str]) -> dict[str, Any]:
    """What *command* says, or why it says nothing; it ends by itself (``--timeout``)."""
    done = subprocess.run(command, stdout=subprocess.PIPE)
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        why = f"nixl-fetch status has ended with {done.returncode}"
        return {"error": {"message": why, "remedy": "run it by hand"}}
    return told


def _listen(text: Callable[[], str], address: str) -> MetricsPage:
    """Ends the process where that cannot be."""
    host, _, port = address.rpartition(":")
    try:
        return MetricsPage(text, host.removeprefix("[").removesuffix("]"), int(port))
    except (ValueError, OverflowError):
        _refuse(2, f"--listen '{address}' is no ADDRESS:PORT: give one as 127.0.0.1:9470")
    except OSError as error:
        why = f"cannot listen on {address}: {error.strerror}"
        _refuse(15, f"{why}: free the port, or give a numeric address of this host")


def _refuse(code: int, why: str) -> NoReturn:
    print(f"nixl-fetch: exporter: {why}", file=sys.stderr)
    sys.exit(code)


def main(as_json: bool, address: str, publication: str, *command: str) -> None:
    """Answers scrapers at *address* until SIGINT or SIGTERM.

    Args:
        as_json: how it says where it listens.
        address: "127.0.0.1:9470".
        publication: that *command* is about.
        command: ``nixl-fetch status --json``, with all its words.
    """
    ends = {signal.SIGINT, signal.SIGTERM}
    # A handler may come at any line, and block on a lock that the line holds. Commands that this
    # process starts do not hear these signals either; they end by themselves.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    told = _listen(lambda: page(publication, _status(list(command))), address)
    port = told.address.rpartition(":")[2]
    if as_json:
        body = {"schema": 1, "listening": address, "port": int(port)}
        print(json.dumps(body, separators=(",", ":")), flush=True)
    else:
        print(f"listening on {address}, port {port}: /metrics", flush=True)
    signal.sigwait(ends)
    told.close()


# ----------------------------------------------------------------------------------------- the page


_MOST, _SECONDS, _FRESH = 16, 5.0, 1.0
_RATE = 50.0  # connections a second: each takes a thread and the interpreter from the trainer
_KIND = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage:
    """Answers ``GET /metrics`` until :meth:`close`.

    :ivar address: ``"127.0.0.1:41234"``, where it listens.
    """

    def __init__(self, text: Callable[[], str], host: str, port: int) -> None:
        self._text = text
        self._cache, self._cached_at = b"", float("-inf")
        self._lock = threading.Lock()
        self._server = HttpServer(
            self._answer,
            host,
            port,
            name="fanin-metrics",
            most=_MOST,
            seconds=_SECONDS,
            keep=False,
            rate=_RATE,
        )
        self.address = self._server.address

    def close(self) -> None:
        """Listens no longer; who has asked is still answered.

        Any thread; does nothing the second time, and in a forked child.
        """
        self._server.close()

    def _answer(self, request: Request) -> Answer:
        if request.method != "GET":
            return Answer(405, b"only GET and HEAD are known\n", _KIND, {"Allow": "GET, HEAD"})
        if request.path != "/metrics":
            return Answer(404, b"there is only /metrics\n", _KIND)
        try:
            return Answer(200, self._fresh(), _KIND)
        except FaninError as error:
            return Answer(503, f"{error}\n".encode(), _KIND)

    def _fresh(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._cached_at >= _FRESH:
                self._cache = self._text().encode()
                self._cached_at = time.monotonic()
            return self._cache
