# SPDX-License-Identifier: Apache-2.0
"""How commands in Python tell what they found: as nixl-fetch's others do."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_CODES = {"ARGUMENT": -100, "EXISTS": -101, "NOT_FOUND": -102, "TIMEOUT": -201, "IO": -500}
# What is printable and not seen.
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]")


class Failed(Exception):
    """A failure that has been given its class, its words and its remedy."""

    def __init__(self, status: str, what: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.status, self.what, self.message, self.remedy = status, what, message, remedy


def _escaped(c: str) -> str:
    if c == " " or (c.isprintable() and not _UNSEEN.match(c)):
        return c
    return "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", "surrogateescape"))


def plain(text: str) -> str:
    """Text of others on its way to a terminal, which it may not steer."""
    # Of JSON there may be halves of characters, which are no bytes of anybody's.
    text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", text)
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def say(text: str) -> None:
    """A line on standard output."""
    print(plain(text))


def warn(text: str) -> None:
    """A line on standard error."""
    print(plain(f"nixl-fetch: {text}"), file=sys.stderr, flush=True)


def refuse(command: str, why: str) -> NoReturn:
    """Ends with the status of wrong usage."""
    warn(f"{command}: {why}: see 'nixl-fetch {command} --help'")
    sys.exit(2)


def end(failed: Failed, as_json: bool) -> NoReturn:
    """Tells a failure and ends with its status."""
    code = _CODES[failed.status]
    warn(": ".join(part for part in (failed.what, failed.message, failed.remedy) if part))
    if as_json:
        nothing = dict.fromkeys(("rank", "key", "address", "phase"))
        told = {"code": code, "status": f"FANIN_ERR_{failed.status}", "message": failed.message}
        print_json({"error": {**told, **nothing, "remedy": failed.remedy or None}}, None)
    sys.exit(10 + -code // 100)


def print_json(body: dict[str, Any], indent: int | None = 2) -> None:
    """An object of schema 1; what is no Unicode becomes '?'."""
    whole = json.dumps({"schema": 1, **body}, ensure_ascii=False).encode("utf-8", "replace")
    separators = (",", ": ") if indent else (",", ":")
    print(json.dumps(json.loads(whole), indent=indent, separators=separators))


def print_table(heads: str, rows: Iterable[Sequence[str]]) -> None:
    """Columns as "RANK PHASE N>", where '>' is for numbers."""
    columns = heads.split()
    cells = [[name.rstrip(">") for name in columns], *([plain(c) for c in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = (
            cell.rjust(width) if head.endswith(">") else cell.ljust(width)
            for cell, width, head in zip(row, widths, columns, strict=True)
        )
        print(" ".join(line).rstrip())


def duration(ns: int) -> str:
    """As "12.30 ms"."""
    if ns < 10**6:
        return f"{ns / 1e3:.1f} us"
    return f"{ns / 1e6:.2f} ms" if ns < 10**10 else f"{ns / 1e9:.2f} s"


def age(ns: int | str | None) -> str:
    """As "12 s"; None: "-"."""
    ms = int(ns or 0) // 10**6
    for below, unit, name in (
        (1000, 1, "ms"),
        (600_000, 1000, "s"),
        (36_000_000, 60_000, "min"),
        (1_728_000_000, 3_600_000, "h"),
    ):
        if ms < below:
            return f"{ms // unit} {name}" if ms else "-"
    return f"{ms // 86_400_000} d"


def size(count: int) -> str:
    """As "84.1 MB"."""
    value, unit = float(count), 0
    while value >= 999.95 and unit < 6:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {('B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[unit]}"


def write_whole(what: str, path: str, data: bytes) -> None:
    """Makes *path*, mode 0600, whole or not at all: never over what is there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        file, hidden = tempfile.mkstemp(prefix=".nixl-fetch-", dir=os.path.dirname(path) or ".")
        try:
            with open(file, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(file)
            _give_name(hidden, path)
        finally:
            if os.path.lexists(hidden):
                os.unlink(hidden)
    except OSError as error:
        there = isinstance(error, FileExistsError)
        remedy = "remove it, or give another name"
        if not there:
            remedy = "give a file in a directory that can be written"
        why = f"{path}: {error.strerror}"
        raise Failed("EXISTS" if there else "IO", what, why, remedy) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _give_name(hidden: str, path: str) -> None:
    try:
        os.link(hidden, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: the name is taken first
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.replace(hidden, path)
