# SPDX-License-Identifier: Apache-2.0
"""What tools/measure says of results of ``nixl-fetch bench --json``."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MEASURE = Path(__file__).parents[2] / "tools" / "measure"
ALIKE = (
    "tensors bytes world_size destination device path cold snapshot workers mappings "
    "all_checked verify pull_dtype spare_file pause_ns secured no_unix checksums"
).split()
TIMES = {"median_ns": 900, "p90_ns": 950, "p99_ns": 950, "min_ns": 900, "max_ns": 950, "count": 5}
RESULT: dict[str, Any] = {
    "schema": 1,
    **dict.fromkeys(ALIKE, 1),
    "machine": {"processor": "x", "cores": 2, "memory_bytes": 1, "devices": None},
    "command": "nixl-fetch bench <here>",
    "date": "2026-01-01",
    "limits": [{"name": "memcpy", "threads": 1, "bytes": 9, **TIMES}],
    "phases": {"total": TIMES},
    "samples": {"total": [1000000 + 9000 * (i % 7) for i in range(40)]},
}


def measure(name: str, *words: str | Path) -> SimpleNamespace:
    """Runs one of the programs in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(MEASURE / name), run_name="__main__")
    code = ended.value.code or 0
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def altered(path: Path, change: Callable[[dict[str, Any]], object] = id) -> Path:
    result = copy.deepcopy(RESULT)
    change(result)
    path.write_text(json.dumps(result))
    return path


def times(factor: float) -> Callable[[dict[str, Any]], object]:
    def change(result: dict[str, Any]) -> None:
        result["samples"]["total"] = [int(factor * one) for one in result["samples"]["total"]]

    return change


def shuffled(result: dict[str, Any]) -> None:
    random.Random(1).shuffle(result["samples"]["total"])


def stretches(result: dict[str, Any]) -> None:
    """A machine that was busy for a while makes neighbours alike: nobody is surer for that."""
    result["samples"]["total"] = [1000000 * (1 + i // 10 % 2) + i for i in range(40)]


def drifted(result: dict[str, Any]) -> None:
    times(1.3)(result)
    result["limits"][0]["min_ns"] *= 1.4


@pytest.mark.parametrize(
    ("change", "code", "verdict"),
    [
        (id, 0, "same"),
        (times(2), 1, "slower"),
        (times(1.1), 1, "slower"),
        (times(0.5), 0, "faster"),
        (shuffled, 0, "same"),
        (stretches, 0, "same"),
        (drifted, 0, "same"),
    ],
)
def test_what_is_slower(change: Any, code: int, verdict: str, tmp_path: Path) -> None:
    a, b = altered(tmp_path / "a.json"), altered(tmp_path / "b.json", change)
    done = measure("compare.py", a, b, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["verdict"], done.stderr) == (code, verdict, "")
    (figure,) = told["figures"]
    assert figure["low"] <= figure["ratio"] <= figure["high"]
    assert measure("compare.py", a, b, "--json").stdout == done.stdout
    done = measure("compare.py", a, b)
    assert re.search(rf"^total .* {verdict.replace('same', 'within noise')}$", done.stdout, re.M)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda result, name=name: result.update({name: 2}) for name in ("path", "checksums")),
        lambda result: result.pop("destination"),
        lambda result: result["machine"].update(cores=3),
        lambda result: result["limits"].clear(),
        lambda result: result["limits"][0].update(min_ns=1800),
        lambda result: result["samples"].update(total=[1] * 4),
    ],
)
def test_what_was_not_measured_alike(change: Any, tmp_path: Path) -> None:
    a, b = altered(tmp_path / "a.json"), altered(tmp_path / "b.json", change)
    for pair in ((a, b), (b, a)):
        done = measure("compare.py", *pair)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{pair[0]} and {pair[1]} cannot be compared: " in done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1"),
        (json.dumps(RESULT)[:-9], "line 1"),
        ("[" * 100000, "recursion"),
        ("[]", "no result of bench"),
        ('{"schema": 1, "healthy": true}', "no result of bench"),
        ('{"schema": 1, "error": {}}', "an error"),
        (json.dumps(RESULT | {"samples": {"total": [-1]}}), "samples"),
        (json.dumps(RESULT | {"samples": {"total": [float("nan")]}}), "samples"),
        (json.dumps(RESULT | {"samples": {"total": [1], "read": [1, 2]}}), "different numbers"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_results(text: str | None, why: str, tmp_path: Path) -> None:
    a, b = altered(tmp_path / "a.json"), tmp_path / "b.json"
    if text is not None:
        b.write_text(text)
    for pair in ((a, b), (b, a)):
        done = measure("compare.py", *pair)
        assert done.returncode == 11 and f"{b}: " in done.stderr and why in done.stderr


# ------------------------------------------------------------------------------------ layouts

MAPPINGS = Path(__file__).parents[1] / "support" / "mappings"
LAYOUT = SimpleNamespace(**runpy.run_path(str(MEASURE / "layout.py")))


def boxes(mapping: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Where each box of a tensor goes."""
    return {
        (source["name"], *box["offset"], *box["extent"], box["at"])
        for module in mapping["modules"]
        for tensor in module["tensors"]
        for source in tensor.get("sources", ())
        for box in source["boxes"]
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layout_is_what_an_engines_loader_recorded(rank: int) -> None:
    tensors = LAYOUT.tensors_of(json.loads((MAPPINGS / "qwen3-small.json").read_text()))
    recorded = json.loads((MAPPINGS / f"qwen3-small-pp2-{rank}.json").read_text())
    ours = LAYOUT.mapping(tensors, LAYOUT.Shape(pp=2), rank)
    assert boxes(ours) == boxes(recorded)
    assert set(ours["published"]["unwanted"]) == set(recorded["published"]["unwanted"])


def published(**shapes: list[int]) -> Any:
    named = [(name.replace("__", "."), shape) for name, shape in shapes.items()]
    return LAYOUT.tensors_of(
        [{"name": name, "dtype": "BF16", "shape": shape} for name, shape in named]
    )


EXPERTS = published(
    **{f"model__layers__0__mlp__experts__{i}__gate_proj__weight": [6, 8] for i in range(4)},
    **{f"model__layers__0__mlp__experts__{i}__up_proj__weight": [6, 8] for i in range(4)},
    **{f"model__layers__0__mlp__experts__{i}__down_proj__weight": [8, 6] for i in range(4)},
)


def test_experts_are_shared_out_or_cut() -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    shared = boxes(LAYOUT.mapping(EXPERTS, LAYOUT.Shape(ep=2), 1))
    assert len(shared) == 6 and (name, 0, 0, 6, 8, 3 * 96) in shared
    cut = boxes(LAYOUT.mapping(EXPERTS, LAYOUT.Shape(tp=2), 1))
    assert len(cut) == 12 and (name, 3, 0, 3, 8, 7 * 48) in cut
    assert (name.replace("up", "down"), 0, 3, 8, 3, 3 * 48) in cut


def test_words_are_padded_and_heads_are_shared() -> None:
    tensors = published(lm_head__weight=[500, 8], a__k_proj__weight=[16, 8])
    ranks = [LAYOUT.mapping(tensors, LAYOUT.Shape(tp=4, heads=2), rank) for rank in range(4)]
    of = {"lm_head.weight": [], "a.k_proj.weight": []}
    for name, *place in sorted(box for rank in ranks for box in boxes(rank)):
        of[name].append(place)
    assert of["lm_head.weight"] == [[128 * i, 0, 128 if i < 3 else 116, 8, 0] for i in range(4)]
    assert of["a.k_proj.weight"] == [[0, 0, 8, 8, 0]] * 2 + [[8, 0, 8, 8, 0]] * 2
    (lm_head,) = (one for one in ranks[3]["modules"][0]["tensors"] if one["name"][:2] == "lm")
    assert lm_head["shape"] == [128 * 8]
