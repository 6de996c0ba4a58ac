#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""draw.py [--check]: draw the documents' pictures from their descriptions.

A TOML file describes boxes and arrows, a CSV file the bars of a chart. Each becomes an SVG file of
the same name beside it. The pictures follow the reader's light or dark mode. --check writes
nothing; its exit status is 1 if a picture is not what its description says.
"""

import csv
import math
import pathlib
import sys
import tomllib
from xml.sax.saxutils import escape

HERE = pathlib.Path(__file__).resolve().parent
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.strong { font-weight: 600 }
.frame { fill: none; stroke: #d1d9e0; stroke-dasharray: 4 3 }
.box { fill: #f6f8fa; stroke: #818b98 }
.arrow { stroke: #0969da; fill: none; stroke-width: 1.5 }
.head { fill: #0969da }
.bar { fill: #afb8c1 }
.ours { fill: #0969da }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.small { fill: #9198a1 }
.frame { stroke: #3d444d }
.box { fill: #151b23; stroke: #656c76 }
.arrow { stroke: #4493f8 }
.head { fill: #4493f8 }
.bar { fill: #656c76 }
.ours { fill: #4493f8 }
}
</style>"""


def text(x, y, line, style="", anchor="start"):
    return f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}">{escape(line)}</text>'


def picture(title, width, height, parts):
    """An SVG document; *title* is read aloud to those who do not see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}">'
    )
    return "\n".join([head, STYLE, *parts, "</svg>", ""])


def arrow(start, end):
    """From the left edge of *end* to the right edge of *start*: the reader reaches for the rank."""
    (x, y), (w, h) = start["at"], start["size"]
    x1, y1 = x + w, y + h / 2
    x2, y2 = end["at"][0], end["at"][1] + end["size"][1] / 2
    angle = math.atan2(y1 - y2, x1 - x2)
    tip = [(x1, y1)]
    for turn in (2.75, -2.75):
        tip.append((x1 + 10 * math.cos(angle + turn), y1 + 10 * math.sin(angle + turn)))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in tip)
    return (
        f'<line class="arrow" x1="{x2}" y1="{y2}" x2="{x1}" y2="{y1}"/>'
        f'<polygon class="head" points="{points}"/>'
    )


def diagram(description):
    parts = [text(16, 24, description["title"], "strong")]
    for frame in description.get("frame", []):
        (x, y), (w, h) = frame["at"], frame["size"]
        parts.append(f'<rect class="frame" x="{x}" y="{y}" width="{w}" height="{h}" rx="8"/>')
        parts.append(text(x + 12, y + 24, frame["label"], "small"))
    boxes = {box["name"]: box for box in description["box"]}
    parts += [arrow(boxes[one["from"]], boxes[one["to"]]) for one in description["arrow"]]
    for box in boxes.values():
        (x, y), (w, h) = box["at"], box["size"]
        parts.append(f'<rect class="box" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>')
        first = y + h / 2 + 5 - 9 * (len(box["lines"]) - 1)
        for i, line in enumerate(box["lines"]):
            style = "strong" if i == 0 else "small"
            parts.append(text(x + w / 2, first + 18 * i, line, style, "middle"))
    for one in description.get("text", []):
        parts.append(text(*one["at"], one["line"], "small", "middle"))
    return picture(description["title"], description["width"], description["height"], parts)


def shown(milliseconds):
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.2f} s"
    return f"{milliseconds:.4g} ms"


def chart(rows, title):
    """Bars in groups, on a logarithmic axis: the times lie a thousandfold apart."""
    parts, y, width, left, room = [text(16, 24, title, "strong")], 50, 860, 270, 480
    times = [float(row["milliseconds"]) for row in rows]
    low = 10 ** math.floor(math.log10(min(times)))
    span = math.log10(max(times) / low)
    group = None
    for row, time in zip(rows, times, strict=True):
        if row["group"] != group:
            group = row["group"]
            parts.append(text(16, y + 8, group, "strong"))
            y += 18
        long = round(room * math.log10(time / low) / span, 1)
        style = "ours" if row["bar"] == "fanin" else "bar"
        parts.append(text(left - 10, y + 12, row["bar"], "small", "end"))
        parts.append(
            f'<rect class="{style}" x="{left}" y="{y}" width="{long}" height="15" rx="2"/>'
        )
        parts.append(text(left + long + 8, y + 12, shown(time), "small"))
        y += 21
        if row is rows[-1] or rows[rows.index(row) + 1]["group"] != group:
            y += 14
    return picture(title, width, y, parts)


def drawn(source):
    if source.suffix == ".toml":
        return diagram(tomllib.loads(source.read_text()))
    with source.open() as file:
        return chart(list(csv.DictReader(file)), "One warm pull, GPU to GPU (logarithmic)")


def main():
    stale = []
    for source in sorted([*HERE.glob("*.toml"), *HERE.glob("*.csv")]):
        target = source.with_suffix(".svg")
        image = drawn(source)
        if "--check" not in sys.argv:
            target.write_text(image)
        elif not target.exists() or target.read_text() != image:
            stale.append(target.name)
    for name in stale:
        print(f"docs/pictures/{name} is not what its description says: run docs/pictures/draw.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
