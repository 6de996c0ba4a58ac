#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A result of ``nixl-fetch bench --json`` as one HTML file, which loads nothing.

It has a table of the figures, and a histogram of each phase with the machine's limits as lines.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, BINS = 760, 130, 48
COLORS = ("#c0392b", "#b7791f", "#6b4fbb", "#2f855a", "#0e7490", "#9d174d")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.15em .8em;text-align:right;"
    "border-bottom:1px solid #d5dae0}td:first-child,th:first-child{text-align:left}"
)


def time(ns: float) -> str:
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def named_limits(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The limits that have a figure."""
    return {
        f"limit: {one['name']}" + (f", threads: {one['threads']}" if one["threads"] else ""): one
        for one in result["limits"]
        if one.get("median_ns")
    }


def table(rows: list[list[str]]) -> str:
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table>\n{body}</table>\n"


def figures(result: dict[str, Any]) -> str:
    rows = [["phase", "samples", "median", "p90", "p99", "min", "max"]]
    phases = {name: one for name, one in result["phases"].items() if one["max_ns"]}
    for name, one in {**phases, **named_limits(result)}.items():
        times = [time(one[f"{of}_ns"]) for of in ("median", "p90", "p99", "min", "max")]
        rows.append([name, str(one["count"]), *times])
    return table(rows)


def histogram(phase: str, samples: list[int], limits: dict[str, dict[str, Any]]) -> str:
    """Times on a logarithmic axis."""
    medians = [one["median_ns"] for one in limits.values()]
    low = max(min(samples + medians), 1) / 1.1
    high = max(*samples, *medians, low * 1.2) * 1.1

    def place(ns: float) -> float:
        return WIDTH * math.log(max(ns, 1) / low) / math.log(high / low)

    bins = [0] * BINS
    for one in samples:
        bins[min(max(int(place(one) / WIDTH * BINS), 0), BINS - 1)] += 1
    wide = WIDTH / BINS
    parts = [
        f'<rect x="{i * wide:.1f}" y="{HEIGHT - n / max(bins) * HEIGHT:.1f}" width="{wide - 1:.1f}"'
        f' height="{n / max(bins) * HEIGHT:.1f}" fill="#4c8dd6"><title>{n}</title></rect>'
        for i, n in enumerate(bins)
        if n
    ]
    room = 0.0
    for ns in (step * 10**decade for decade in range(13) for step in (1, 2, 5)):
        if low < ns < high and place(ns) >= room:
            room = place(ns) + 70
            parts.append(f'<text x="{place(ns):.1f}" y="{HEIGHT + 16}">{time(ns)}</text>')
    for i, (name, one) in enumerate(limits.items()):
        color, x = COLORS[i % len(COLORS)], place(one["median_ns"])
        parts.append(f'<path d="M{x:.1f} 0v{HEIGHT}" stroke="{color}" stroke-width="2"/>')
        parts.append(
            f'<text y="{HEIGHT + 36 + 16 * i}" fill="{color}">'
            f"{escape(name)}, {time(one['median_ns'])}</text>"
        )
    tall = HEIGHT + 28 + 16 * len(limits)
    return (
        f"<figure><figcaption>{escape(phase)}</figcaption>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" font-size="12">\n'
        + "\n".join(parts)
        + "\n</svg></figure>\n"
    )


def page(result: dict[str, Any]) -> str:
    about = ("command", "date", "machine", "path", "bytes", "tensors", "world_size")
    limits = named_limits(result)
    drawn = "".join(
        histogram(phase, samples, limits if phase in ("total", "read") else {})
        for phase, samples in result["samples"].items()
        if any(samples)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>nixl-fetch bench</title><style>{STYLE}</style></head><body>\n"
        f"<h1>nixl-fetch bench</h1>\n{table([[name, str(result[name])] for name in about])}"
        f"<h2>Figures</h2>\n{figures(result)}<h2>Pulls</h2>\n{drawn}</body></html>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("html", type=Path, help="the file to be written")
    given = parser.parse_args()
    given.html.write_text(page(json.loads(given.result.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
