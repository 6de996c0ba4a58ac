# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch diff`` against numbers that numpy and exact sums make of the same bytes."""

from __future__ import annotations

import json
import math
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
from local_world import (
    A_NAME,
    B_NAME,
    PATIENCE,
    PUBLICATION,
    nixl_fetch,
    publish,
    weights,
)
from safetensors.numpy import save_file

FILE = "adapter_model.safetensors"
#: Floats of at most 16 bits: exponent's bits, mantissa's, bias, what is special.
SMALL = {
    "F4": (2, 1, 1, ""),
    "F6_E2M3": (2, 3, 1, ""),
    "F6_E3M2": (3, 2, 3, ""),
    "F8_E5M2": (5, 2, 15, "ieee"),
    "F8_E4M3": (4, 3, 7, "fn"),
    "F8_E8M0": (8, 0, 127, "powers"),
    "F8_E4M3FNUZ": (4, 3, 8, "fnuz"),
    "F8_E5M2FNUZ": (5, 2, 16, "fnuz"),
    "BF16": (8, 7, 127, "ieee"),
}
PLAIN = {
    "BOOL": "?",
    "U8": "<u1",
    "I8": "<i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
COUNT = 2056  # two pieces and a bit, of whole bytes in every dtype


def diff(*words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [nixl_fetch(), "diff", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        **more,
    )


def told(*words: str | Path) -> tuple[int, dict[str, Any]]:
    done = diff(*words, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def write(directory: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / FILE).write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(t[2] for t in tensors.values())
    )
    return directory


def save(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / FILE)
    return directory


def small_value(dtype: str, code: int) -> float:
    """By the formats' definitions, case by case."""
    exponent_bits, mantissa_bits, bias, special = SMALL[dtype]
    if special == "powers":
        return math.nan if code == 255 else 2.0 ** (code - bias)
    mantissa = code % 2**mantissa_bits
    exponent = code // 2**mantissa_bits % 2**exponent_bits
    sign = -1 if code // 2 ** (mantissa_bits + exponent_bits) else 1
    top = exponent == 2**exponent_bits - 1
    if special == "ieee" and top:
        return math.nan if mantissa else sign * math.inf
    if special == "fn" and top and mantissa == 2**mantissa_bits - 1:
        return math.nan
    if special == "fnuz" and code == 128:
        return math.nan
    fraction = mantissa / 2**mantissa_bits
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def codes_of(dtype: str, data: bytes) -> list[int]:
    """An element's bits: the first one's are a byte's lowest."""
    bits = BITS.get(dtype, 16 if dtype == "BF16" else 8)
    whole = int.from_bytes(data, "little")
    return [whole >> i * bits & (2**bits - 1) for i in range(len(data) * 8 // bits)]


def elements(dtype: str, data: bytes) -> tuple[list[Any], list[Any]]:
    """Bits and values."""
    if dtype in SMALL:
        codes = codes_of(dtype, data)
        return codes, [small_value(dtype, code) for code in codes]
    array = np.frombuffer(data, PLAIN[dtype])
    size = array.itemsize
    return [data[i : i + size] for i in range(0, len(data), size)], array.tolist()


def norm(values: list[Any]) -> float:
    return math.sqrt(math.fsum(float(abs(v)) ** 2 for v in values))


def is_finite(value: Any) -> bool:
    value = complex(value) if isinstance(value, complex) else value
    if isinstance(value, complex):
        return math.isfinite(value.real) and math.isfinite(value.imag)
    return isinstance(value, int) or math.isfinite(value)


def is_nan(value: Any) -> bool:
    return bool(value != value)


def expected(dtype: str, old: bytes, new: bytes) -> dict[str, Any]:
    bits_a, a = elements(dtype, old)
    bits_b, b = elements(dtype, new)
    steps = [abs(y - x) for x, y in zip(a, b, strict=True) if is_finite(x) and is_finite(y)]
    return {
        "elements": len(a),
        "changed": sum(x != y for x, y in zip(bits_a, bits_b, strict=True)),
        "norm_a": norm([x for x in a if is_finite(x)]),
        "norm_b": norm([x for x in b if is_finite(x)]),
        "norm_of_change": norm(steps),
        "largest": float(max(steps)),
        "nan_a": sum(map(is_nan, a)),
        "nan_b": sum(map(is_nan, b)),
        "infinite_a": sum(not is_finite(x) and not is_nan(x) for x in a),
        "infinite_b": sum(not is_finite(x) and not is_nan(x) for x in b),
    }


def random_bytes(dtype: str, rng: np.random.Generator) -> tuple[bytes, bytes]:
    """Any bits (of large floats: numbers whose squares a double holds, and some special ones)."""
    if dtype in ("F32", "C64", "F64"):
        kind = PLAIN[dtype]
        parts = COUNT * (2 if dtype == "C64" else 1)
        real = np.dtype("<f8" if dtype == "F64" else "<f4")
        values = rng.standard_normal(parts) * 10.0 ** rng.integers(-30, 30, parts)
        old = values.astype(real)
        old[:5] = [np.inf, -np.inf, np.nan, 0.0, -0.0]
        new = old.copy()
        new[rng.integers(0, parts, parts // 3)] *= 3
        new[7], new[3], new[100] = np.nan, -0.0, np.inf
        assert np.dtype(kind).itemsize * COUNT == old.nbytes
        return old.tobytes(), new.tobytes()
    bits = BITS.get(dtype, 16 if dtype == "BF16" else 8)
    size = COUNT * (bits // 8 or 1) if dtype in SMALL else COUNT * np.dtype(PLAIN[dtype]).itemsize
    size = COUNT * bits // 8 if dtype in BITS else size
    top = 2 if dtype == "BOOL" else 256
    first = rng.integers(0, top, size, dtype=np.uint8)
    second = first.copy()
    places = rng.integers(0, size, size // 8)
    second[places] = rng.integers(0, top, len(places), dtype=np.uint8)
    return first.tobytes(), second.tobytes()


def test_every_dtype_is_what_exact_sums_say(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    pairs = {dtype: random_bytes(dtype, rng) for dtype in [*SMALL, *PLAIN]}
    shape = [257, 8]
    a = write(tmp_path / "a", {d: (d, shape, old) for d, (old, _) in pairs.items()})
    b = write(tmp_path / "b", {d: (d, shape, new) for d, (_, new) in pairs.items()})
    code, report = told(a, b)
    assert (code, report["equal"]) == (1, False)
    rows = {row["name"]: row for row in report["tensors"]}
    assert rows.keys() == pairs.keys()
    for dtype, (old, new) in pairs.items():
        row, wanted = rows[dtype], expected(dtype, old, new)
        assert row["a"] == row["b"] == {"dtype": dtype, "shape": shape}
        assert row["what"] == "changed", dtype
        for name, value in wanted.items():
            assert row["change"][name] == pytest.approx(value, rel=1e-12), (dtype, name)
    relative = [
        math.inf if (r := row["change"]["relative"]) is None else r for row in rows.values()
    ]
    assert relative == sorted(relative, reverse=True)
    assert told(a, a)[0] == 0


def test_squares_that_no_double_holds(tmp_path: Path) -> None:
    old = {"big": np.array([3e200, 4e200]), "tiny": np.array([3e-200, 4e-200])}
    new = {"big": old["big"] * 2, "tiny": old["tiny"] * 2}
    a, b = save(tmp_path / "a", old), save(tmp_path / "b", new)
    code, report = told(a, b)
    changes = {row["name"]: row["change"] for row in report["tensors"]}
    assert code == 1
    assert changes["big"]["norm_a"] == pytest.approx(5e200, rel=1e-12)
    assert changes["tiny"]["norm_of_change"] == pytest.approx(5e-200, rel=1e-12)
    assert changes["tiny"]["relative"] == pytest.approx(1.0)
    c = save(tmp_path / "c", {"big": np.array([1.7e308, 0]), "tiny": np.zeros(2)})
    d = save(tmp_path / "d", {"big": np.array([-1.7e308, 0]), "tiny": np.ones(2)})
    changes = {row["name"]: row["change"] for row in told(c, d)[1]["tensors"]}
    assert changes["big"]["norm_of_change"] is None  # no double holds it
    assert changes["tiny"]["relative"] is None  # from zero
    assert "from zero" in diff(c, d).stdout


def test_what_only_one_has_and_what_has_another_form(tmp_path: Path) -> None:
    one, two = np.ones(4, np.float32), np.full(4, 2, np.float32)
    a = save(tmp_path / "a", {"same": one, "gone": one, "shape": one, "cast": one, "value": one})
    b = save(
        tmp_path / "b",
        {
            "same": one,
            "new": one,
            "shape": one.reshape(2, 2),
            "cast": one.astype(np.float16),
            "value": np.array([1, np.nan, 1, 1], np.float32),
        },
    )
    code, report = told(a, b)
    assert code == 1
    kinds = [(row["name"], row["what"]) for row in report["tensors"]]
    assert kinds == [
        ("value", "changed"),
        ("cast", "dtype"),
        ("shape", "shape"),
        ("gone", "only-a"),
        ("new", "only-b"),
        ("same", "same"),
    ]
    cast = report["tensors"][1]["change"]
    assert (cast["changed"], cast["norm_a"], cast["norm_b"]) == (0, 2.0, 2.0)
    assert [row["change"] is None for row in report["tensors"][2:5]] == [True] * 3
    assert "1 tensor has NaN in B: value" in report["summary"]
    text = diff(a, b).stdout
    assert "[4] -> [2, 2]" in text
    assert "F32 -> F16" in text
    code, report = told(a, b, "--pattern", "s[ah]*", "--limit", "1")
    assert (code, len(report["tensors"]), report["a"]["tensors"]) == (1, 1, 2)
    assert diff(a, b, "--pattern", "same").returncode == 0
    done = diff(a, b, "--pattern", "nothing*")
    assert done.returncode == 2
    assert "no such tensors" in done.stderr
    assert told(save(tmp_path / "c", {"x": two}), save(tmp_path / "d", {"x": two}))[0] == 0


def test_long_lists_are_cut(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {f"t{i:02}": np.ones(1) for i in range(30)})
    b = save(tmp_path / "b", {f"t{i:02}": np.full(1, i + 2.0) for i in range(30)})
    lines = diff(a, b).stdout.splitlines()
    assert lines[2].startswith("30 of 30 tensors changed, the most t29 (by 3e+03 %")
    assert lines[-1] == "and 10 more: --limit"
    assert lines[4].split()[-1] == "t29"  # the largest first
    assert sum(line.startswith("changed") for line in lines) == 20
    assert len(told(a, b)[1]["tensors"]) == 30


def test_shares_near_the_ends_are_readable(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"most": np.zeros(1000), "one": np.zeros(1000)})
    most, one = np.ones(1000), np.zeros(1000)
    most[0], one[0] = 0, 1
    text = diff(a, save(tmp_path / "b", {"most": most, "one": one})).stdout
    assert " 99.9 % " in text
    assert " 0.1 % " in text


def test_what_is_no_side_is_refused_by_a_sentence(tmp_path: Path) -> None:
    good = save(tmp_path / "good", {"x": np.ones(4, np.float32)})
    cut = save(tmp_path / "cut", {"x": np.ones(4, np.float32)})
    os.truncate(cut / FILE, os.path.getsize(cut / FILE) - 1)
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, said in (
        ((good, cut), f"{cut}: not a valid safetensors file"),
        ((good, empty), "holds neither adapter_model.safetensors"),
        ((good, tmp_path / "absent"), "absent"),
        ((good,), "two directories or TARGETs are needed"),
        ((good, good, good), "unexpected argument"),
        (("--wait-step", good), "is a directory of tensors"),
        (("lora:0", good, good), "unexpected argument 'lora:0'"),
        ((good, "127.0.0.1:1"), "127.0.0.1:1"),
    ):
        done = diff(*words)
        assert done.returncode == 2, done
        assert said in done.stderr
        assert done.stdout == ""


def model(directory: Path, files: dict[str, list[str]], index: dict[str, str]) -> Path:
    """A model's directory: the tensors of each file, and which file the index says has each."""
    directory.mkdir()
    for file, names in files.items():
        save_file({name: np.ones(4, np.float32) for name in names}, directory / file)
    if index:
        text = json.dumps({"weight_map": index})
        (directory / "model.safetensors.index.json").write_text(text)
    return directory


def test_models_from_which_engines_load_other_bytes(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = {"a": one, "b": two}
    good = model(tmp_path / "good", {one: ["a"], two: ["b"]}, index)
    whole = model(tmp_path / "whole", {"model.safetensors": ["a", "b"]}, {})
    assert diff(good, whole).returncode == 0
    more = model(tmp_path / "more", {one: ["a"], two: ["b", "evil"]}, index)
    twice = model(tmp_path / "twice", {one: ["a"], two: ["a", "b"]}, index)
    files = {"model.safetensors": ["a", "b"], one: ["a"], two: ["b"]}
    both = model(tmp_path / "both", files, index)
    beside = model(tmp_path / "beside", {"model.safetensors": ["a", "b"], one: ["c"]}, {})
    for other, said in (
        (more, f"{more}/{two}: has a tensor 'evil', which the index does not name"),
        (twice, f"{twice}/{two}: has a tensor 'a', which the index says is in {one}"),
        (both, "lies beside model.safetensors"),
        (beside, f"{beside}/{one}: lies beside model.safetensors"),
    ):
        done = diff(good, other)
        assert done.returncode == 2, done
        assert said in done.stderr


def test_what_ranks_publish(ranks: list[fanin.Server], target: str, tmp_path: Path) -> None:
    assert (
        subprocess.run(
            [nixl_fetch(), "pull", target, "--out", str(tmp_path / "one")], timeout=PATIENCE
        ).returncode
        == 0
    )
    code, report = told(tmp_path / "one", target)
    assert (code, report["b"]["step"], report["a"]["step"]) == (0, 1, None)
    done = diff(f"{target}@1", target)
    assert (done.returncode, "nothing changed: all 2 tensors" in done.stdout) == (0, True)
    publish(ranks, 2)
    code, report = told(tmp_path / "one", f"{target}@2", "--pattern", "*q_proj*")
    assert code == 1
    old, new = weights(1), weights(2)
    changes = {row["name"]: row["change"] for row in report["tensors"]}
    for name in (A_NAME, B_NAME):
        change = changes[f"base_model.model.{name}" if name not in changes else name]
        assert change["norm_of_change"] == pytest.approx(
            float(np.linalg.norm((new[name] - old[name]).ravel().astype(float))), rel=1e-12
        )
        assert change["changed"] == 24
    done = diff(f"{target}@1", target)  # it has passed
    assert done.returncode == 2
    assert "step" in done.stderr
    assert diff(target, target, "--max-bytes", "10").returncode == 2


@pytest.mark.parametrize("written", [True, False])
def test_the_next_step_is_waited_for(ranks: list[fanin.Server], target: str, written: bool) -> None:
    with subprocess.Popen(
        [nixl_fetch(), "diff", "--wait-step", target, "--json", "--timeout", "20s"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        # Its second pull waits for a step after its first one's: whatever comes from then on.
        step = 2
        try:
            while process.poll() is None:
                if written:
                    publish(ranks, step)
                else:
                    for rank in ranks:
                        rank.begin_update(PUBLICATION)
                        rank.commit(PUBLICATION, step)
                step += 1
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
            assert process.stdout is not None
            report = json.loads(process.stdout.read())
        finally:
            process.kill()
    assert report["b"]["step"] > report["a"]["step"]
    assert (process.returncode, report["equal"]) == (written, not written)
    assert written or any("did the optimizer write?" in one for one in report["summary"])
    done = diff("--wait-step", target, "--timeout", "3s")  # connects, then waits in vain
    assert done.returncode == 2
    assert "cannot compare with the next step" in done.stderr
