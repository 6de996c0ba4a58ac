# SPDX-License-Identifier: Apache-2.0
"""``show --map``, ``show --svg`` and ``list --map``: who holds what, as pictures and in sums."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import fanin
import numpy as np
import pytest
from local_world import (
    A_NAME,
    B_NAME,
    CONFIG,
    PATIENCE,
    PUBLICATION,
    addresses,
    nixl_fetch,
    servers,
)

SVG = "{http://www.w3.org/2000/svg}"


def tool(*words: str | Path, locale: str = "C") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [nixl_fetch(), *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        env={**os.environ, "LC_ALL": locale},
    )


def picture(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith(("  |", "  │"))]


@pytest.fixture
def holey() -> Iterator[str]:
    """Ranks 0 and 1 have the first two rows, rank 2 the last one; the third one nobody has."""
    whole = np.zeros((4, 100), np.float32)
    with servers(3, lease=0.0) as made:
        for server, (first, last) in zip(made, ((0, 2), (0, 2), (3, 4)), strict=True):
            part = whole[first:last].copy()
            shard = fanin.shard_of("x", part, shape=(4, 100), offset=(first, 0))
            server.put(PUBLICATION, [shard])
        for server in made:
            server.set_metadata(PUBLICATION, CONFIG)
            server.commit(PUBLICATION, 1)
        yield ",".join(addresses(made))


def test_a_tensor_is_drawn_as_it_is_cut(target: str) -> None:
    done = tool("show", target, A_NAME, "--map")
    assert (done.returncode, done.stderr) == (0, "")
    assert picture(done.stdout) == ["|00000000|"] * 2 + ["|11111111|"]
    assert "RANK" in done.stdout  # the table still says all
    assert picture(tool("show", target, B_NAME, "--map").stdout) == ["|001|"] * 8
    both = tool("show", target, "*q_proj*", "--map").stdout
    assert len(picture(both)) == 11
    told = tool("show", target, A_NAME, "--map", locale="C.UTF-8").stdout
    assert picture(told)[0] == "│00000000│"
    assert "┌────────┐" in told
    assert "\x1b" not in told


def test_gaps_and_replicas(holey: str) -> None:
    rows = picture(tool("show", holey, "x", "--map").stdout)
    assert rows == [f"|{c * 72}|" for c in "00.2"]
    assert "·" * 72 in tool("show", holey, "x", "--map", locale="C.UTF-8").stdout
    done = tool("list", holey, "--map")
    assert done.returncode == 0
    assert "gaps, which no rank holds: 400 B in 1 tensors, the first x" in done.stdout
    told = json.loads(tool("list", holey, "--run", "0", "--map", "--json").stdout)
    assert (told["bytes"], told["gap_bytes"], told["overlap_bytes"]) == (1600, 400, 0)
    assert told["map"] == [
        {"rank": 0, "boxes": 1, "bytes": 800, "replica_bytes": 0},
        {"rank": 1, "boxes": 1, "bytes": 800, "replica_bytes": 800},
        {"rank": 2, "boxes": 1, "bytes": 400, "replica_bytes": 0},
    ]


def test_a_gap_and_an_overlap_of_one_size_are_two_faults() -> None:
    """Of six rows the first three, two of these again, and the last: sums say that all is well."""
    boxes = [((0, 0), (3, 4)), ((1, 0), (2, 4)), ((5, 0), (1, 4))]
    with servers(3, lease=0.0) as made:
        for server, (offset, extent) in zip(made, boxes, strict=True):
            part = np.zeros(extent, np.float32)
            shard = fanin.shard_of("x", part, shape=(6, 4), offset=offset)
            server.put(PUBLICATION, [shard])
        for server in made:
            server.set_metadata(PUBLICATION, CONFIG)
            server.commit(PUBLICATION, 1)
        target = ",".join(addresses(made))
        done = tool("list", target, "--map")
        told = json.loads(tool("list", target, "--run", "0", "--map", "--json").stdout)
    assert "gaps, which no rank holds: 32 B in 1 tensors, the first x" in done.stdout
    assert "overlaps that are no replicas: 32 B in 1 tensors, the first x" in done.stdout
    assert sum(row["bytes"] for row in told["map"]) == told["bytes"] == 96
    assert (told["gap_bytes"], told["overlap_bytes"]) == (32, 32)


def test_an_svg_is_to_scale_and_never_written_over(target: str, tmp_path: Path) -> None:
    out = tmp_path / "map.svg"
    assert tool("show", target, A_NAME, "--svg", out).returncode == 0
    root = ElementTree.parse(out).getroot()
    boxes = [rect.attrib for rect in root.iter(f"{SVG}rect")][1:]
    assert [float(b["width"]) for b in boxes] == [960.0, 960.0]
    heights = [float(b["height"]) for b in boxes]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.02)
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles[0] == "rank 0: offset [0, 0], extent [2, 8], 64 bytes"
    done = tool("show", target, A_NAME, "--svg", out)
    assert (done.returncode, "File exists" in done.stderr) == (11, True)
    done = tool("show", target, "*", "--svg", tmp_path / "no.svg")
    assert (done.returncode, "one key" in done.stderr) == (2, True)
    assert not (tmp_path / "no.svg").exists()


def test_a_name_is_no_markup(tmp_path: Path) -> None:
    name, out = "<b>&amp;\"'\ufffe", tmp_path / "map.svg"
    with servers(1) as made:
        made[0].put("full:0", [fanin.shard_of(name, np.zeros(2, np.float32))])
        made[0].commit("full:0", 1)
        done = tool("show", addresses(made)[0], name, "--run", "full:0", "--svg", out)
        assert done.returncode == 0, done.stderr
    root = ElementTree.parse(out).getroot()
    assert root.findtext(f"{SVG}text") == "full:0:<b>&amp;\"'  F32 [2]"


@pytest.mark.parametrize(("columns", "said"), [(70, b"\x1b[30;41m0"), (59, b"needs 60 columns")])
def test_colours_are_for_terminals(target: str, columns: int, said: bytes) -> None:
    here, there = pty.openpty()
    try:
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        done = subprocess.run(
            [nixl_fetch(), "show", target, A_NAME, "--map"],
            stdout=there,
            timeout=PATIENCE,
            env=environment,
        )
        assert done.returncode == 0
        assert said in os.read(here, 65536)
    finally:
        os.close(here)
        os.close(there)
