# SPDX-License-Identifier: Apache-2.0
"""Strikes secrets out of what is to be shown to others."""

from __future__ import annotations

import re

from telling import plain

_SURELY = re.compile("password|passwd|credential", re.I)
_SECRET = re.compile(f"{_SURELY.pattern}|secret|key|token|authorization|cookie", re.I)
_NAME = re.compile(r"[\w.-]*", re.A)
_ASSIGNED = re.compile("[ \t\"']*[=:]")
_USER = re.compile("://[^/?# \t\"']*@")  # of a URL
# The word behind a name, "is" and quotes left out.
_WORD = re.compile("[ \t\"']+(?:(?:is|was|->|=>)(?=[ \t\"'])[ \t\"']*)?([^ \t\"',;)]+)", re.I)
_ROW = re.compile(r"[ \t]*([\w+/=-]+)[ \t\r]*", re.A)
_ROW_LEAST = 32  # characters of a line of base64: a key's lines have 64


def _looks_random(word: str) -> bool:
    """What no sentence is made of: a digit among other things, or letters of both cases."""
    letters = sum(c.isalpha() for c in word)
    capitals = sum(c.isupper() for c in word[1:])
    mixed = any(c.isdigit() for c in word) or 0 < capitals < letters - 1
    return letters > 0 and len(word) >= 5 and mixed


def _is_value(name: str, word: str) -> bool:
    """Keys are also tensors' names, with a run before them."""
    if word.startswith("/") or ("key" in name.lower() and ":" in word):
        return False
    return bool(_SURELY.search(name)) or _looks_random(word)


def _opens_rest(line: str, name: str, end: int) -> int:
    """Where the rest of the line begins that is a secret, behind a name's *end*; 0: it is none."""
    secret = _SECRET.search(name)
    if secret and (sign := _ASSIGNED.match(line, end)):
        return sign.end()
    option = secret and len(name) > 2 and name.startswith("--") and line[end : end + 1] in " \t"
    if end < len(line) and (option or name.lower() == "bearer"):
        return end + 1
    return end + 3 if _USER.match(line, end) else 0


def _words(line: str) -> str:
    """A line that is not of a block."""
    out, put, at = "", 0, 0
    while at < len(line):
        found = _NAME.match(line, at)
        assert found
        name, end = found[0], found.end()
        if rest := _opens_rest(line, name, end):
            return out + plain(line[put:rest]) + "***"
        word = _WORD.match(line, end) if _SECRET.search(name) else None
        if word and _is_value(name, word[1]):
            out += plain(line[put : word.start(1)]) + "***"
            put = end = word.end(1)
        at = end + 1
    return out + plain(line[put:])


class Striking:
    """Lines one after the other, each without its end.

    What would steer a terminal is escaped. "***" stands instead of

    - the rest of a line behind the first name with SECRET, KEY, TOKEN, PASSWORD, PASSWD,
      CREDENTIAL, AUTHORIZATION or COOKIE in it, in any case, that '=' or ':' follows, perhaps after
      a quote or blanks, or that is an option with a value; behind BEARER; behind "://" of a URL
      with a user;
    - the word behind such a name, of which no sentence about secrets is made: any behind PASSWORD,
      PASSWD and CREDENTIAL, else one with a digit or of mixed case, but no path;
    - a block of PEM, and lines that are nothing but base64 or hexadecimal digits.
    """

    def __init__(self) -> None:
        self._in_block = False  # of PEM, whose end has not come
        self._in_rows = False  # of a block whose beginning was not seen

    def line(self, line: str) -> str:
        begin, end = line.find("-----BEGIN "), line.find("-----END ")
        row = _ROW.fullmatch(line)
        least = 1 if self._in_rows else _ROW_LEAST
        self._in_rows = row is not None and len(row[1]) >= least
        if self._in_block or self._in_rows or (end >= 0 and begin < 0):
            self._in_block = self._in_block and end < 0
            return "***"
        if begin < 0:
            return _words(line)
        parts = line[begin:].split("-----", 2)
        # The block goes on if its first row, or nothing, stands behind "BEGIN ...-----".
        rest = parts[2] if len(parts) == 3 else "."
        self._in_block = end < 0 and (not rest.strip(" \t\r\"'\\n") or bool(_ROW.fullmatch(rest)))
        return _words(line[:begin]) + "***"
