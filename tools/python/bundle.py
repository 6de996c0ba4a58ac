# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch bundle``: what somebody else needs to know of a run in trouble, in one file."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from strike import Striking
from telling import duration, print_json, print_table, say, size, warn, write_whole

_PART_S, _GRACE_S = 8.0, 2.0
_LOG_BYTES, _OUTPUT_BYTES = 256 << 10, 64 << 20
_TRACE = "pull.trace.json"
_VARIABLES = ("FANIN_", "NIXL_", "UCX_", "NCCL_", "CUDA_VISIBLE_DEVICES")


class _Part(NamedTuple):
    name: str
    words: tuple[str, ...]
    asks: bool = True  # ranks
    of_run: bool = False
    pulls: bool = False


_PARTS = (
    _Part("version", ("--version",), asks=False),
    _Part("doctor", ("doctor",)),
    _Part("status", ("status",), of_run=True),
    _Part("ping", ("ping",)),
    _Part("list", ("list",)),
    _Part("keys", ("list",), of_run=True),
    _Part("pull", ("bench", "--iterations", "1"), of_run=True, pulls=True),
)


class _Interrupted(BaseException):
    """A signal came."""


def _interrupt(number: int, frame: object) -> None:
    raise _Interrupted(number)


def _struck(lines: Iterable[str]) -> bytes:
    striking = Striking()
    return "".join(f"{striking.line(line)}\n" for line in lines).encode()


class _Bundle:
    def __init__(self, program: str, target: list[str], publication: str, timeout: float) -> None:
        self.program, self.target, self.publication = program, target, publication
        self.now, self.end = int(time.time()), time.monotonic() + timeout
        self.parts: list[dict[str, Any]] = []
        self._file = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)

    def add(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"nixl-fetch-bundle/{name}")
        member.size, member.mtime, member.mode = len(data), self.now, 0o600
        self._tar.addfile(member, io.BytesIO(data))

    def tell(
        self, part: str, why: str, *, status: int | None = None, ns: int = 0, count: int = 0
    ) -> None:
        told = {"part": part, "exit_status": status, "why": why or None, "ns": ns, "bytes": count}
        self.parts.append(told)

    def add_text(self, name: str, data: bytes, why: str = "") -> None:
        self.add(name, data)
        self.tell(name, why, count=len(data))

    def told(self) -> dict[str, Any]:
        return {
            "target": self.target[0],
            "publication": self.publication or None,
            "time_s": self.now,
            "parts": self.parts,
        }

    def finished(self) -> bytes:
        manifest = json.dumps({"schema": 1, **self.told()}, indent=2)
        self.add("manifest.json", manifest.encode())
        self._tar.close()
        return self._file.getvalue()

    # ------------------------------------------------------------------- the parts

    def add_environment(self) -> None:
        host = os.uname()
        shown = [f"{name}={value}" for name, value in os.environ.items() if self._is_told(name)]
        data = _struck([f"{host.sysname} {host.release} {host.machine}"])
        self.add_text("environment.txt", data + b"".join(_struck([row]) for row in shown))

    @staticmethod
    def _is_told(name: str) -> bool:
        return name == _VARIABLES[-1] or name.startswith(_VARIABLES[:-1])

    def add_part(self, part: _Part, no_pull: bool) -> None:
        left = self.end - time.monotonic()
        why = ""
        if part.of_run and not self.publication:
            why = "the target file names several publications, give --run R"
        elif part.pulls and no_pull:
            why = "--no-pull"
        elif part.pulls and self.publication.startswith("full:"):
            why = "a whole model is not pulled to memory"
        elif left <= 0:
            why = "--timeout is over"
        if why:
            self.tell(part.name, f"left out: {why}")
        elif part.pulls:
            self._run_traced(part, left)
        else:
            self._run(part, left, [])

    def _run_traced(self, part: _Part, left: float) -> None:
        """Its trace goes to a folder that is this user's alone, and is there also if it failed."""
        temporary = os.environ.get("TMPDIR", "")
        parent = temporary if temporary.startswith("/") else "/tmp"
        try:
            folder = tempfile.TemporaryDirectory(prefix="nixl-fetch-", dir=parent)
        except OSError:
            self._run(part, left, [])
            self.tell(_TRACE, "left out: no folder could be made in TMPDIR")
            return
        with folder as place:
            file = Path(place, "trace")
            self._run(part, left, ["--trace", str(file)])
            if not file.exists():
                self.tell(_TRACE, "the pull wrote none")
            else:
                self.add_text(_TRACE, file.read_bytes(), "for ui.perfetto.dev and nixl-fetch trace")

    def _run(self, part: _Part, left: float, more: list[str]) -> None:
        patience = min(left, _PART_S + _GRACE_S)
        limit = patience - _GRACE_S if patience > 2 * _GRACE_S else patience / 2
        words = ["nixl-fetch", *part.words, *more]
        if part.asks:
            words += [*self.target, "--timeout", f"{max(limit, 0.001):.3f}s", "--json", "--quiet"]
        if part.of_run:
            words += ["--run", self.publication]
        began = time.monotonic_ns()
        status, why, out, err = self._child(words, patience)
        ns = time.monotonic_ns() - began
        if not why and status != 0:
            first = err.decode(errors="replace").partition("\n")[0]
            why = first or f"see {part.name}.json"
        self.tell(part.name, why, status=status, ns=ns, count=len(out))
        self.add(f"{part.name}.{'json' if part.asks else 'txt'}", out)
        if err:
            self.add(f"{part.name}.stderr.txt", err)

    def _child(self, words: list[str], patience: float) -> tuple[int | None, str, bytes, bytes]:
        """Its exit status, why it has none, and what it said."""
        try:
            done = subprocess.run(
                words,
                executable=self.program,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=patience,
            )
        except subprocess.TimeoutExpired as late:
            why = f"did not end within {patience:.1f} s"
            return None, why, (late.stdout or b"")[:_OUTPUT_BYTES], late.stderr or b""
        except OSError as error:
            return None, f"cannot be started: {error.strerror}", b"", b""
        out, err = done.stdout[:_OUTPUT_BYTES], done.stderr[:_OUTPUT_BYTES]
        if done.returncode < 0:
            return None, f"ended by signal {-done.returncode}", out, err
        return done.returncode, "", out, err

    def add_log(self, path: str, number: int) -> None:
        """The last bytes from the first whole line on: of a line that is cut it cannot be told what
        must be struck out.
        """
        name = f"log.{number}.txt"
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            with open(file, "rb") as log:
                about = os.fstat(file)
                if not stat.S_ISREG(about.st_mode):
                    raise OSError(0, "is no regular file")
                start = max(about.st_size - _LOG_BYTES, 0)
                log.seek(start)
                data = log.read(_LOG_BYTES)
        except OSError as error:
            self.tell(name, f"{path[:120]}: {error.strerror}")
            return
        if start:
            data = data.partition(b"\n")[2]
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        self.add_text(name, _struck(lines[:-1] if not lines[-1] else lines), path[:120])


def _row(part: dict[str, Any]) -> tuple[str, ...]:
    status = part["exit_status"]
    result = [f"exit status {status}"] * (status is not None) + [part["why"]] * bool(part["why"])
    return part["part"], duration(part["ns"]), size(part["bytes"]), ": ".join(result)


def _made(bundle: _Bundle, path: str, no_pull: bool, logs: list[str]) -> int:
    """Makes the file; its bytes."""
    bundle.add_environment()
    for part in _PARTS:
        bundle.add_part(part, no_pull)
    for number, log in enumerate(logs):
        bundle.add_log(log, number)
    data = bundle.finished()
    write_whole("cannot write the bundle", path, data)
    return len(data)


def main(
    as_json: bool,
    program: str,
    publication: str,
    timeout_ms: str,
    out: str,
    no_pull: str,
    n_logs: str,
    *rest: str,
) -> int:
    """Makes it.

    Args:
        as_json: what is told.
        program: nixl-fetch.
        publication: "": several, and none is chosen.
        timeout_ms: for all of it.
        out: "": a name of its own.
        no_pull: "": with a pull.
        n_logs: how many of *rest* are logs.
        rest: logs, the target, and options of its connections.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    logs, target = list(rest[: int(n_logs)]), list(rest[int(n_logs) :])
    bundle = _Bundle(program, target, publication, int(timeout_ms) / 1000)
    path = out or time.strftime("nixl-fetch-%Y%m%dT%H%M%SZ.tar", time.gmtime(bundle.now))
    try:
        count = _made(bundle, path, bool(no_pull), logs)
    except _Interrupted as interrupted:
        warn("warning: interrupted, nothing is written")
        sys.exit(128 + interrupted.args[0])
    if as_json:
        print_json({**bundle.told(), "file": path, "bytes": count})
    else:
        print_table("PART TIME> BYTES> RESULT", map(_row, bundle.parts))
        say(f"{path}: {size(count)}; look it over before you hand it on")
    return 0
