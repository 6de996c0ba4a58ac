#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether the second of two results of ``nixl-fetch bench --json`` is slower, beyond noise.

Prints for each phase both medians, their ratio B/A and where it lies with 99 % confidence: blocks
of pulls that follow each other are drawn again and again, the same each time, and the interval is
widened by what the machine's limits in the two files differ by.

Exit status, about the phase *total*: 0: B is as fast or faster. 1: it is slower. 2: the two were
not measured alike. 11: a file is no result. Needs numpy.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

LEAST_SAMPLES = 5
MOST_DRIFT = 1.5  # of one limit, before it is another machine, or a busy one
DRAWS = 2000
ALIKE = (
    "tensors bytes world_size destination device path cold snapshot workers mappings "
    "all_checked verify pull_dtype spare_file pause_ns secured no_unix checksums"
).split()
MACHINE = "processor cores memory_bytes devices".split()


def refuse(path: str, why: object) -> None:
    print(
        f"compare.py: {path}: {why}: give what 'nixl-fetch bench --json' of this version printed",
        file=sys.stderr,
    )
    sys.exit(11)


def is_series(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(type(one) is int and one >= 0 for one in values)
    )


def fault(result: Any) -> str:
    """What of it is not as bench writes it; "": all is."""
    if not isinstance(result, dict) or result.get("schema") != 1:
        return "it is no result of bench"
    if "error" in result:
        return "it is an error, not a result"
    kinds = {"samples": dict, "limits": list, "machine": dict, "phases": dict}
    if not all(isinstance(result.get(name), kind) for name, kind in kinds.items()):
        return "it is no result of bench"
    samples = result["samples"]
    if not all(is_series(samples.get(phase)) for phase in {*result["phases"], "total"}):
        return "its samples are not such as bench writes"
    if len({len(values) for values in samples.values()}) > 1:
        return "its figures have different numbers of samples"
    return ""


def load(path: str) -> dict[str, Any]:
    try:
        result = json.loads(Path(path).read_text())
    except OSError as error:
        refuse(path, error.strerror)
    except (ValueError, RecursionError) as error:
        refuse(path, error)
    if why := fault(result):
        refuse(path, why)
    return dict(result)


def byte_ns(limit: dict[str, Any]) -> float:
    """The least time of a byte; 0: not known."""
    return limit.get("min_ns", 0) / limit["bytes"] if limit["bytes"] else 0.0


def compared_limits(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[str], float]:
    """How they differ too much, and by which factor at most."""
    of_a, of_b = (
        {(limit["name"], limit["threads"]): byte_ns(limit) for limit in one["limits"]}
        for one in (a, b)
    )
    differences, most = [], 1.0
    for key in sorted(of_a.keys() | of_b.keys()):
        x, y = of_a.get(key), of_b.get(key)
        drift = max(x / y, y / x) if x and y else 1.0
        most = max(most, drift)
        if x is None or y is None or (x > 0) != (y > 0) or drift > MOST_DRIFT:
            differences.append(f"limit {key[0]!r}, ns of a byte: {x} and {y}")
    return differences, most


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What was not measured alike, but for the limits."""
    found = []
    for names, x, y in ((ALIKE, a, b), (MACHINE, a["machine"], b["machine"])):
        for name in names:
            if name not in x or name not in y or x[name] != y[name]:
                found.append(f"{name}: {x.get(name)!r} and {y.get(name)!r}")
    counts = [len(one["samples"]["total"]) for one in (a, b)]
    if min(counts) < LEAST_SAMPLES:
        found.append(f"too few samples ({LEAST_SAMPLES} are needed): {counts[0]} and {counts[1]}")
    return found


def drawn_medians(values: list[int], chance: np.random.Generator) -> np.ndarray:
    """Of as many values each, drawn in blocks: pulls that follow each other are alike."""
    all_of, count = np.array(values), len(values)
    length = round(count ** (1 / 3))
    medians = np.empty(DRAWS)
    for i in range(DRAWS):
        first = chance.integers(0, count, -(-count // length))
        medians[i] = np.median(all_of[(first[:, None] + np.arange(length)).ravel()[:count] % count])
    return medians


def ratio(a: list[int], b: list[int]) -> tuple[float, float, float]:
    """Of the medians, b's over a's, and where it lies with 99 % confidence."""
    chance = np.random.default_rng(1)
    ratios = drawn_medians(b, chance) / np.maximum(drawn_medians(a, chance), 1)
    low, high = np.quantile(ratios, [0.005, 0.995])
    return float(np.median(b) / np.median(a)), float(low), float(high)


def figures(a: dict[str, Any], b: dict[str, Any], drift: float) -> list[dict[str, Any]]:
    """Of each phase that took time."""
    found = []
    for phase in a["samples"]:
        x, y = a["samples"][phase], b["samples"].get(phase, [0])
        medians = int(np.median(x)), int(np.median(y))
        one = {"name": phase, "a_ns": medians[0], "b_ns": medians[1]}
        if all(medians):
            middle, low, high = ratio(x, y)
            low, high = low / drift, high * drift
            verdict = "slower" if low > 1 else "faster" if high < 1 else "same"
            one |= {"ratio": middle, "low": low, "high": high, "verdict": verdict}
        if any(medians):
            found.append(one)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--json", action="store_true", help="print one object")
    given = parser.parse_args()
    a, b = load(given.a), load(given.b)
    limits, drift = compared_limits(a, b)
    unlike = differences(a, b) + limits
    for line in unlike:
        print(f"{given.a} and {given.b} cannot be compared: {line}", file=sys.stderr)
    rows = [] if unlike else figures(a, b, drift)
    verdict = {row["name"]: row.get("verdict", "same") for row in rows}.get("total")
    if given.json:
        told = {"differences": unlike, "drift": drift, "verdict": verdict, "figures": rows}
        print(json.dumps(told))
    elif rows:
        print(f"{'PHASE':10}{'A us':>12}{'B us':>12}{'B/A':>8}{'FROM':>8}{'TO':>8}  B IS")
        for row in rows:
            print(f"{row['name']:10}{row['a_ns'] / 1e3:12.1f}{row['b_ns'] / 1e3:12.1f}", end="")
            numbers = "".join(f"{row[of]:8.3f}" for of in ("ratio", "low", "high") if of in row)
            print(f"{numbers}  {row.get('verdict', '')}".replace("same", "within noise"))
        print(f"limits differ by up to {100 * (drift - 1):.1f} %, which is added")
    return 2 if unlike else int(verdict == "slower")


if __name__ == "__main__":
    sys.exit(main())
