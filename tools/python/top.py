# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch top``: what a run is at, again and again, drawn over a terminal."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from itertools import groupby
from typing import Any, NamedTuple

from telling import age, duration, plain, print_json, size

_PLAIN_COLUMNS = 200
_BOLD, _RED = "\033[1m", "\033[31m"

# ------------------------------------------------------------------- the screen


class _Screen:
    """Another page of the terminal, without a cursor, on which long lines are cut."""

    ENTER, LEAVE = b"\033[?1049h\033[?25l\033[?7l", b"\033[?7h\033[?25h\033[?1049l"

    def __init__(self, as_json: bool) -> None:
        term = os.environ.get("TERM", "")
        self.drawn = not as_json and term not in ("", "dumb") and os.isatty(1)
        self.keys = self.drawn and os.isatty(0)
        self.before: list[Any] = termios.tcgetattr(0) if self.keys else []
        self._is_open = False
        self.woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def open(self) -> None:
        """Takes the terminal; also after a shell may have changed it."""
        self._is_open = self.drawn
        if self.keys:
            raw = [*self.before[:6], list(self.before[6])]
            raw[3] &= ~(termios.ICANON | termios.ECHO)
            # Ctrl-Z and Ctrl-\ come as keys.
            raw[6][termios.VSUSP] = raw[6][termios.VQUIT] = os.fpathconf(0, "PC_VDISABLE")
            raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
            termios.tcsetattr(0, termios.TCSADRAIN, raw)
        self._write(self.ENTER * self.drawn)

    def close(self) -> None:
        """Gives it back as it was."""
        if not self._is_open:
            return
        try:
            self._write(self.LEAVE)
        finally:
            if self.before:
                termios.tcsetattr(0, termios.TCSAFLUSH, self.before)
            self._is_open = False

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    def draw(self, lines: list[str]) -> None:
        text = "\r\n".join(f"\033[2K{line}" for line in lines)
        self._write(f"\033[H{text}\033[J".encode("utf-8", "replace"))

    def size(self) -> tuple[int, int]:
        """Columns and lines that there is room for; lines 0: no end."""
        if not self.drawn:
            return _PLAIN_COLUMNS, 0
        columns, lines = os.get_terminal_size(1)
        return (columns, lines) if columns and lines else (80, 24)

    def wait(self, seconds: float) -> bytes:
        """What comes first: a key, or "resized", also after it was stopped.

        b"": the time is over.
        """
        ready = select.select([self.woken, *[0] * self.keys], [], [], max(0.0, seconds))[0]
        if self.woken in ready:
            if signal.SIGCONT in os.read(self.woken, 4096):
                self.open()
            return b"resized"
        key = self._key() if 0 in ready else b""
        if key == b"\x1a":  # Ctrl-Z: the shell gets its terminal as it was
            self.close()
            os.kill(os.getpid(), signal.SIGTSTP)
            self.open()
            return b"resized"
        return key

    def _key(self) -> bytes:
        try:
            key = os.read(0, 1)
        except OSError:
            key = b""
        self.keys = key != b""  # else nobody types any more
        return key


def _handle_signals(screen: _Screen) -> None:
    """Whatever signal ends the process, but SIGKILL, the terminal is given back."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    def die(number: int, frame: object) -> None:
        screen.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)
    for number in (signal.SIGQUIT, signal.SIGABRT):
        signal.signal(number, die)
    for number in (signal.SIGWINCH, signal.SIGCONT):  # they wake it up
        signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


# ---------------------------------------------------------------------- looks


class _Sent(NamedTuple):
    """What readers got of a rank since the look before, and by which path most of it."""

    rate: str = "-"
    path: str = "-"


class _Rates:
    """Compares each look with the one before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, dict[str, int]]] = {}

    def of(self, rank: dict[str, Any], now: float) -> _Sent:
        if "bytes_read" not in rank:
            return _Sent()
        counts = {path: int(count) for path, count in rank["bytes_read"].items()}
        counts["-"] = int(rank["pulls_good"]) + int(rank["pulls_stale"])
        at, before = self._before.get(rank["address"], (now, {}))
        self._before[rank["address"]] = now, counts
        more = {path: count - before.get(path, 0) for path, count in counts.items()}
        if now <= at or min(more.values()) < 0:  # what counts backwards is another process
            return _Sent()
        del more["-"]
        if not (count := sum(more.values())):
            return _Sent("0")
        rate = count / (now - at) / 1e6
        told = f"{rate / 1e3:.2f} GB/s" if rate >= 1e3 else f"{rate:.1f} MB/s"
        return _Sent(told, max(more, key=lambda path: more[path]))


class _Looks:
    """``nixl-fetch status --json``, again and again."""

    def __init__(self, publication: str, words: tuple[str, ...], quiet: bool) -> None:
        self.publication, self._words = publication, words
        self.said = tempfile.TemporaryFile() if quiet else None  # a screen has no room for it
        self.code = 0

    def take(self) -> dict[str, Any]:
        """What it tells, or its error; {}: it was ended before."""
        if self.said:
            self.said.seek(0)
            self.said.truncate()
        done = subprocess.run(self._words, stdout=subprocess.PIPE, stderr=self.said)
        self.code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        told: dict[str, Any] = json.loads(done.stdout or "{}")
        return told

    def tell(self) -> None:
        """What the last look said on standard error, if it had no room."""
        if self.said:
            self.said.seek(0)
            sys.stderr.write(self.said.read().decode("utf-8", "replace"))


# ----------------------------------------------------------------- a look as lines

_COLUMNS = "RANK> STATE STEP> AGE> HELD> BY LEASES> SESSIONS> STALE> DRAIN50> DRAIN99> SENDS> PATH"
_HEADS = _COLUMNS.replace(">", "").split()
# Those that matter most first.
_KEPT = "RANK STATE STEP AGE HELD SENDS STALE BY DRAIN99 LEASES SESSIONS DRAIN50 PATH".split()
_WHO = 20
# Kinds of problems that are told together.
_LIKE = {
    "protocol": "version",
    "unpublished": "absent",
    "pending": "draining",
    "updating": "draining",
}


def _holder(holders: list[dict[str, Any]]) -> str:
    others = f" +{len(holders) - 1}" if len(holders) > 1 else ""
    return (holders[0]["who"] or "")[:_WHO] + others if holders else "-"


def _cells(rank: dict[str, Any], sent: _Sent) -> list[str]:
    there = "state" in rank
    silent = "absent" if rank["status"] == "FANIN_OK" else "no answer"
    cells = [
        "-" if rank["rank"] is None else str(rank["rank"]),
        rank["state"] if there else silent,
        str(rank["step"]) if there else "-",
        age(rank["commit_age_ns"]) if there else "-",
    ]
    if "leases" not in rank:  # it does not count
        return cells + ["-"] * (len(_HEADS) - len(cells))
    drains = (int(rank[f"drain_p{percent}_ns"]) for percent in (50, 99))
    return [
        *cells,
        age(rank["lease_age_ns"]),
        _holder(rank["holders"]),
        *(str(rank[name]) for name in ("leases", "sessions", "pulls_stale")),
        *(duration(ns) if ns else "-" for ns in drains),
        *sent,
    ]


class View:
    """What is wrong on top, the worst first, then the ranks, those first with whom it is.

    Where there is no room for all, each kind of problem keeps its first ones, and columns that
    matter less are left out.
    """

    def __init__(self, columns: int, lines: int, color: bool) -> None:
        self.columns, self.color = columns, color
        self.lines = lines or sys.maxsize
        self.text: list[str] = []

    def fill(self, head: str, look: dict[str, Any], rates: list[_Sent]) -> list[str]:
        self.put(head, _BOLD)
        self._put_problems(look)
        self._put_ranks(look, rates)
        for rank in look["ranks"]:
            self._put_relays(rank.get("told_relays", []))
        return self.text[: self.lines]

    def put(self, text: str, style: str = "") -> None:
        text = plain(text)[: self.columns]
        self.text.append(f"{style}{text}\033[0m" if self.color and style else text)

    def left(self) -> int:
        return self.lines - len(self.text) - 1

    def _wrapped(self, text: str) -> list[str]:
        """In two lines at most: who and what stand in the first."""
        width = self.columns - 2
        if self.lines == sys.maxsize or len(text) <= width:
            return [f"  {text}"]
        cut = text.rfind(" ", 0, width + 1)
        cut = cut if cut > 0 else width
        return [f"  {text[:cut]}", f"    {text[cut:].lstrip()}"]

    def _problems(self, problems: list[dict[str, Any]], each: int) -> list[tuple[str, str]]:
        """The first *each* of every kind, and the lines' styles."""
        told = []
        for _, alike in groupby(problems, lambda one: _LIKE.get(one["kind"], one["kind"])):
            first = list(alike)
            for one in first[:each]:
                told += [(line, _RED) for line in self._wrapped(one["text"])]
            if len(first) > each:
                told.append((f"  ... and {len(first) - each} more of this kind", ""))
        return told

    def _put_problems(self, look: dict[str, Any]) -> None:
        problems = look["problems"]
        room = max(self.lines // 2, self.lines - 2 - len(look["ranks"]))
        each = 1 if self.lines < sys.maxsize else len(problems)
        while each < min(len(problems), room) and len(self._problems(problems, each + 1)) <= room:
            each += 1
        for line in self._problems(problems, each):
            self.put(*line)

    def _put_ranks(self, look: dict[str, Any], rates: list[_Sent]) -> None:
        problems = look["problems"]

        def first(rank: dict[str, Any]) -> int:
            """The first problem that it has; as many as there are: none."""
            bad = rank["status"] != "FANIN_OK"
            mine = (
                bad and one["fails"] if one["rank"] is None else one["rank"] == rank["rank"]
                for one in problems
            )
            return next((i for i, is_mine in enumerate(mine) if is_mine), len(problems))

        rows = [
            (first(rank), _cells(rank, sent))
            for rank, sent in zip(look["ranks"], rates, strict=True)
        ]
        rows.sort(key=lambda row: (row[0], -1 if row[1][0] == "-" else int(row[1][0])))
        room = self.left()
        shown = rows if room >= len(rows) else rows[: max(0, room - 1)]
        self._put_table([cells for _, cells in shown], [at < len(problems) for at, _ in shown])
        rest = rows[len(shown) :]
        wrong = sum(at < len(problems) for at, _ in rest)
        if rest and room > 0:
            what = f"something is wrong with {wrong}" if wrong else "nothing is wrong with them"
            self.put(f"... and {len(rest)} more ranks, {what}")

    def _put_table(self, rows: list[list[str]], wrong: list[bool]) -> None:
        columns = list(zip(_HEADS, *rows, strict=True))
        widths, room = dict.fromkeys(_HEADS, 0), self.columns + 2
        for name in _KEPT:
            width = max(map(len, columns[_HEADS.index(name)]))
            if width + 2 <= room:
                widths[name] = width
                room -= width + 2
        for row, style in zip(
            [_HEADS, *rows], [_BOLD, *(_RED * bad for bad in wrong)], strict=True
        ):
            cells = (
                cell.rjust(width) if column.endswith(">") else cell.ljust(width)
                for cell, width, column in zip(row, widths.values(), _COLUMNS.split(), strict=True)
                if width
            )
            self.put("  ".join(cells).rstrip(), style)

    def _put_relays(self, relays: list[dict[str, Any]]) -> None:
        row = "{:24.63} {:>8} {:>13} {:>9} {:>9} {:>9} {:>5} {:>5}  {:.63}"
        heads = "RELAY STEP UNITS ORIGIN RELAYS HANDED LATE TAKEN".split()
        if relays and self.left() > 0:
            self.put(row.format(*heads, "").rstrip(), _BOLD)
        for one in relays[: max(0, self.left())]:
            sizes = (size(int(one[f"bytes_{name}"])) for name in ("origin", "relays", "handed_on"))
            units = f"{one['landed']}/{one['units']}"
            late, place = (one["late"], one["taken_over"]), one["place"] or ""
            line = row.format(one["address"] or "", one["step"], units, *sizes, *late, place)
            self.put(line.rstrip())


class _Top:
    def __init__(self, screen: _Screen, looks: _Looks, as_json: bool, color: bool) -> None:
        self.screen, self.looks, self.as_json, self.color = screen, looks, as_json, color
        self.rates = _Rates()
        self.last: dict[str, Any] = {}
        self.sent: list[_Sent] = []

    def take(self, look: dict[str, Any]) -> None:
        if self.as_json:
            print_json(look, None)
            sys.stdout.flush()
            return
        self.last, now = look, time.monotonic()
        self.sent = [self.rates.of(rank, now) for rank in look.get("ranks", [])]
        self.show()

    def show(self) -> None:
        if error := self.last.get("error"):
            why = ": ".join(filter(None, (error["message"], error["remedy"])))
            lines = [plain(f"{self.looks.publication}: no status: {why}")]
        else:
            tail = time.strftime("%H:%M:%S") + ", q ends" * self.screen.drawn
            view = View(*self.screen.size(), self.color and self.screen.drawn)
            lines = view.fill(f"{self.last['summary']}  {tail}", self.last, self.sent)
        if self.screen.drawn:
            self.screen.draw(lines)
        else:
            print("\n".join(lines), end="\n\n", flush=True)

    def pause_until(self, due: float) -> bool:
        """False: the user has had enough."""
        while True:
            event = self.screen.wait(due - time.monotonic())
            if event in (b"q", b"Q", b"\x1c"):
                return False
            if event in (b" ", b"\n") or (event == b"" and time.monotonic() >= due):
                return True
            if event == b"resized" and self.last:
                self.show()

    def watch(self, count: int, interval_s: float) -> int:
        """The last look's exit status; 0: the user has had enough."""
        due = time.monotonic() + interval_s
        while look := self.looks.take():
            self.take(look)
            count -= 1
            if count == 0:
                break
            if not self.pause_until(due):
                return 0
            due = time.monotonic() + interval_s
        return self.looks.code


def main(
    as_json: bool, count: str, interval_ms: str, color: str, publication: str, *words: str
) -> int:
    """*count* 0: endless. *color*: "color", or "". *words*: of the looks' command line."""
    screen = _Screen(as_json)
    _handle_signals(screen)
    looks = _Looks(publication, words, screen.drawn)
    try:
        screen.open()
        code = _Top(screen, looks, as_json, color != "").watch(int(count), int(interval_ms) / 1e3)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed at exit
        sys.exit(128 + signal.SIGPIPE)
    finally:
        screen.close()
        looks.tell()
    return code
