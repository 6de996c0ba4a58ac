# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch trace``: what took how long in traces of one or several processes, rank by rank."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from telling import Failed, duration, plain, print_json, print_table, refuse, say, write_whole

# Above the numbers that a kernel gives processes: of a further file whose process has the same.
_PROCESSES = 10_000_000
# Some thirty years, of spans and clocks.
_LONGEST_US = 1e15
_LAG_NS = 1_000_000  # a rank that is slower by less is not worth a line
_UNKNOWN, _CALL = -2, -1  # of a rank that has not said which it is; of no rank


@dataclass
class Span:
    """What took how long; its beginning is on the first file's clock."""

    name: str
    outcome: str
    about: str
    began_us: float
    took_us: float
    rank: int
    trainer: bool
    pull: tuple[int, int]  # its file, and its number there
    number: int = 0  # of the pull over all files; 0: of none

    @property
    def ns(self) -> int:
        return int(self.took_us * 1000)

    @property
    def is_pull(self) -> bool:
        return self.rank < 0 and self.name in ("pull", "open")


@dataclass
class Row:
    """One phase of the calls, or of one rank's part in them."""

    rank: int
    name: str
    ns: list[int] = field(default_factory=list)
    bad: int = 0
    others: int | None = None  # of the slowest rank: the median of the others' medians

    def of(self, percent: int) -> int:
        """The least that so many percent do not exceed."""
        return self.ns[(len(self.ns) * percent + 99) // 100 - 1]

    @property
    def median(self) -> int:
        low, high = self.ns[(len(self.ns) - 1) // 2], self.ns[len(self.ns) // 2]
        return low + (high - low) // 2


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any, kind: Any = (int, float)) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else 0


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice in one object")
    return dict(pairs)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _began_at(about: dict[str, Any]) -> float:
    """The time of day when the file's clock began."""
    try:
        return (int(about["realtime_ns"]) - int(about["monotonic_ns"])) / 1e3
    except (KeyError, TypeError, ValueError):
        return 0.0


class Traces:
    """Files that were read, laid on one clock."""

    def __init__(self, paths: list[str]) -> None:
        self.files: list[dict[str, Any]] = []
        self.later_us: list[float] = []  # of each file: what its clock is behind the first one's
        self.spans: list[Span] = []
        self.lost = 0  # spans that found no room
        for path in paths:
            try:
                with open(path, encoding="utf-8") as file:
                    read = json.load(file, object_pairs_hook=_once, parse_constant=_no_number)
                self._add(_dict(read))
            except (OSError, ValueError, RecursionError) as error:
                remedy = "give files of --trace or FANIN_TRACE"
                why = f"{path}: {getattr(error, 'strerror', None) or error}"
                raise Failed("ARGUMENT", "cannot read the trace", why, remedy) from None
        self._count_pulls()

    def _add(self, file: dict[str, Any]) -> None:
        events, about = file.get("traceEvents"), file.get("otherData")
        if not isinstance(events, list) or not isinstance(about, dict):
            raise ValueError("it is no trace of this kind")
        self.files.append(file)
        first = self.files[0]["otherData"]
        one_clock = _text(first.get("boot_id")) == _text(about.get("boot_id"))
        self.later_us.append(0.0 if one_clock else _began_at(about) - _began_at(first))
        for event in map(_dict, events):
            if event.get("ph") == "X":
                self._add_span(event, _dict(event.get("args")))
            elif event.get("ph") == "i":
                lost = _number(_dict(event.get("args")).get("spans"), int)
                self.lost += lost
                if lost < 0 or self.lost >= 1 << 63:
                    raise ValueError("it is no trace of this kind")

    def _add_span(self, event: dict[str, Any], args: dict[str, Any]) -> None:
        rank = args.get("rank", _CALL)
        known = type(rank) is int and 0 <= rank < 65536
        one = Span(
            name=_text(event.get("name")),
            outcome=_text(args.get("outcome")),
            about=_text(args.get("about")),
            began_us=_number(event.get("ts")) + self.later_us[-1],
            took_us=_number(event.get("dur")),
            rank=_UNKNOWN if rank is None else rank if known else _CALL,
            trainer=event.get("cat") == "trainer",
            pull=(len(self.files), _number(args.get("pull"), int)),
        )
        if not one.name or "ts" not in event or not 0 <= one.took_us <= _LONGEST_US:
            raise ValueError("it is no trace of this kind")
        if abs(one.began_us) > _LONGEST_US:
            raise ValueError("it is no trace of this kind")
        self.spans.append(one)

    def _count_pulls(self) -> None:
        """Numbers them over all files; their parts have their numbers."""
        wholes = [one for one in self.spans if one.is_pull]
        numbers = {one.pull: n for n, one in enumerate(wholes, 1)}
        for one in self.spans:
            one.number = numbers.get(one.pull, 0)
        self.pulls = len(wholes)

    def longest(self, number: int) -> Span | None:
        """The span of that pull; 0: of the one that took longest."""
        wholes = (one for one in self.spans if one.is_pull and number in (0, one.number))
        return max(wholes, key=lambda one: one.took_us, default=None)

    def merged(self) -> Iterator[str]:
        """All as one trace, whose processes have numbers of their own."""
        yield '{"displayTimeUnit":"ms","otherData":'
        yield json.dumps(self.files[0]["otherData"]) + ',"traceEvents":['
        seen: list[Any] = []
        between = "\n"
        for index, file in enumerate(self.files):
            for event in file["traceEvents"]:
                if isinstance(event, dict):
                    if isinstance(event.get("ts"), float):
                        event["ts"] += self.later_us[index]
                    if _number(event.get("pid"), int) and event["pid"] in seen:
                        event["pid"] += index * _PROCESSES
                yield between + json.dumps(event, separators=(",", ":"))
                between = ",\n"
            seen.append(file["otherData"].get("pid"))
        yield "\n]}\n"


# --------------------------------------------------------------------------- figures


def _rows(spans: list[Span]) -> list[Row]:
    """Calls first, then ranks; each in the order in which phases were seen first."""
    found: dict[tuple[int, str], Row] = {}
    of_phase: dict[str, list[Row]] = defaultdict(list)
    for one in spans:
        row = found.setdefault((one.rank, one.name), Row(one.rank, one.name))
        row.ns.append(one.ns)
        row.bad += one.outcome != "FANIN_OK"
    for row in found.values():
        row.ns.sort()
        if row.rank >= 0:
            of_phase[row.name].append(row)
    for ranks in of_phase.values():
        ranks.sort(key=lambda row: (-row.median, row.rank))
        if len(ranks) > 1:
            ranks[0].others = ranks[len(ranks) // 2].median
    return sorted(found.values(), key=lambda row: row.rank)


def _laggard(rows: list[Row]) -> Row | None:
    """Where one rank costs the most time beyond what the others take; None: nowhere."""
    found, most = None, _LAG_NS - 1
    for row in rows:
        more = row.median - row.others if row.others is not None else 0
        if more > most and row.others is not None and more >= row.others:
            found, most = row, more
    return found


def _tell_text(traces: Traces, rows: list[Row], longest: Span | None) -> None:
    say(f"{traces.pulls} pulls of {len(traces.files)} processes")
    if longest:
        took = duration(longest.ns)
        say(f"longest: number {longest.number}, {longest.about}, {took}, {longest.outcome}")
    slow = _laggard(rows)
    if slow:
        times = f"{slow.median / slow.others:.1f} times as long as" if slow.others else "against"
        say(
            f"slowest: rank {slow.rank}, {duration(slow.median)} in {slow.name}, {times} the "
            f"{duration(slow.others or 0)} of the other ranks: look at its host's network and CPU"
        )
    names = {_UNKNOWN: "?", _CALL: "-"}
    cells = []
    for row in rows:
        notes = ["slowest"] * (row.others is not None) + [f"{row.bad} not good"] * (row.bad > 0)
        figures = (row.median, row.of(90), row.ns[-1])
        rank, count = names.get(row.rank, str(row.rank)), str(len(row.ns))
        cells.append((rank, row.name, count, *map(duration, figures), ", ".join(notes)))
    print_table("RANK PHASE N> MEDIAN> P90> MAX> NOTE", cells)
    if traces.lost:
        say(f"{traces.lost} spans found no room")


def _tell_json(traces: Traces, rows: list[Row]) -> None:
    def one(row: Row) -> dict[str, Any]:
        return {
            "rank": row.rank if row.rank >= 0 else None,
            "phase": row.name,
            "count": len(row.ns),
            "not_good": row.bad,
            "median_ns": row.median,
            "p90_ns": row.of(90),
            "max_ns": row.ns[-1],
            "slowest": row.others is not None,
        }

    slow = _laggard(rows)
    told = slow and {
        "rank": slow.rank,
        "phase": slow.name,
        "median_ns": slow.median,
        "others_median_ns": slow.others,
    }
    counts = {"processes": len(traces.files), "pulls": traces.pulls, "lost": traces.lost}
    print_json({**counts, "slowest": told, "phases": list(map(one, rows))})


# --------------------------------------------------------------------------- a picture

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _TICKS = 1000, 120, 20, 64, 20, 5
# In the order of a pull, which is the legend's.
_COLORS = {
    "resolve": "#8c959f",
    "connect": "#6e7781",
    "wait": "#d4a72c",
    "catalog": "#8250df",
    "plan": "#bf3989",
    "paths": "#953800",
    "map": "#e16f24",
    "begin": "#0550ae",
    "read": "#1a7f37",
    "digest": "#4ac26b",
    "end": "#54aeff",
    "apply": "#bf8700",
    "write": "#57606a",
    "publish": "#24292f",
    "begin_update": "#cf222e",
    "commit": "#ff8182",
}


def _picture(spans: list[Span], whole: Span | None) -> Iterator[str]:
    """The pull *whole*, or all if it is None, and what trainers did meanwhile."""
    among = [whole] if whole else spans
    began = min((one.began_us for one in among), default=0.0)
    ended = max((one.began_us + one.took_us for one in among), default=0.0)
    took = ended - began or 1.0

    def is_shown(one: Span) -> bool:
        if one.name not in _COLORS:
            return False
        if whole is None or (not one.trainer and one.number == whole.number):
            return True
        return one.trainer and one.began_us < ended and one.began_us + one.took_us > began

    def x_of(us: float) -> float:
        return _LEFT + min(max((us - began) / took, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT)

    shown = [one for one in spans if is_shown(one)]
    # Readers' rows first; row 0 is the call's.
    ranks = sorted({(one.trainer, one.rank) for one in shown if one.rank >= 0})
    places = {rank: row for row, rank in enumerate(ranks, 1)}
    height = _TOP + (len(ranks) + 1) * _ROW + 10
    title = escape(plain(whole.about if whole else "all"))
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="system-ui,sans-serif" font-size="12" '
        'fill="#24292f">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="8" y="16" font-weight="600">{title}: {duration(int(took * 1000))} in all</text>'
    )
    x = 8
    used = {one.name for one in shown}
    for name in filter(used.__contains__, _COLORS):
        yield f'<rect x="{x}" y="27" width="10" height="10" fill="{_COLORS[name]}"/>'
        yield f'<text x="{x + 14}" y="36">{name}</text>'
        x += 28 + 7 * len(name)
    for tick in range(_TICKS + 1):
        at = _LEFT + tick * (_WIDTH - _LEFT - _RIGHT) / _TICKS
        yield f'<line x1="{at}" y1="{_TOP}" x2="{at}" y2="{height - 10}" stroke="#d0d7de"/>'
        after = duration(int(took * 1000 * tick / _TICKS))
        yield f'<text x="{at}" y="{_TOP - 6}" text-anchor="middle">{after}</text>'
    yield f'<text x="8" y="{_TOP + 14}">call</text>'
    for (trainer, rank), row in places.items():
        text = f"{'trainer, ' if trainer else ''}rank {rank}"
        yield f'<text x="8" y="{_TOP + row * _ROW + 14}">{text}</text>'
    for one in shown:
        left, right = x_of(one.began_us), x_of(one.began_us + one.took_us)
        bad = "" if one.outcome == "FANIN_OK" else ' stroke="#cf222e" stroke-width="2"'
        told = f"{one.name} {duration(one.ns)}" + (f", {one.outcome}" if bad else "")
        y = _TOP + places.get((one.trainer, one.rank), 0) * _ROW + 3
        yield (
            f'<rect x="{left:.2f}" y="{y}" width="{max(right - left, 0.5):.2f}" '
            f'height="{_ROW - 6}" fill="{_COLORS[one.name]}"{bad}>'
            f"<title>{escape(plain(told))}</title></rect>"
        )
    yield "</svg>\n"


def main(as_json: bool, svg: str, merge: str, pull: str, *paths: str) -> int:
    """*svg*, *merge*: files to be made, "": none. *pull*: its number, "0": all."""
    number = int(pull)
    traces = Traces(list(paths))
    longest = traces.longest(number)
    if number and longest is None:
        refuse("trace", f"--pull {number}: the trace has {traces.pulls}")
    rows = _rows([one for one in traces.spans if number in (0, one.number)])
    for path, made in ((svg, "\n".join(_picture(traces.spans, longest))), (merge, "")):
        if path:
            text = made or "".join(traces.merged())
            write_whole("cannot write the results", path, text.encode("utf-8", "replace"))
    if as_json:
        _tell_json(traces, rows)
    else:
        _tell_text(traces, rows, longest)
    return 0
