# SPDX-License-Identifier: Apache-2.0
"""Names of adapters mean one run and one step, and are read back as they were made."""

from __future__ import annotations

import random

import pytest
from fanin.errors import RequestError
from fanin.names import MAX_STEP, AdapterName, check_run, check_step, parse, run_of

PIECES = ["a", "Z", "0", "9", ".", "_", "-", "-run", "-step", "run", "step", "-run1", "-step2", "x"]


def test_text_and_parts() -> None:
    name = AdapterName("policy", "3", 120)
    assert str(name) == "policy-run3-step120"
    assert parse("policy-run3-step120") == name
    assert name.at(121) == AdapterName("policy", "3", 121)
    assert str(AdapterName("a", 7, 0)) == "a-run7-step0"  # type: ignore[arg-type]
    assert hash(name) == hash(parse(str(name)))


def test_prefix_is_greedy() -> None:
    assert parse("a-run1-run2-step3") == AdapterName("a-run1", "2", 3)
    assert parse("a-run1-step2-run3-step4") == AdapterName("a-run1-step2", "3", 4)
    assert parse("org/model-run1-step2") == AdapterName("org/model", "1", 2)
    # "-run" that cannot begin a run belongs to the run before.
    assert parse("a-run1-run-step3") == AdapterName("a", "1-run", 3)


@pytest.mark.parametrize("run", ["1-run2", "x-runy", "-run1"])
def test_runs_that_cannot_be_told_apart_are_refused(run: str) -> None:
    with pytest.raises(RequestError, match="could not be told from"):
        AdapterName("a", run, 5)


def test_whatever_can_be_made_is_read_back() -> None:
    random.seed(20)
    made = refused = 0
    for _ in range(40000):
        prefix = "".join(random.choices(PIECES, k=random.randint(1, 4)))
        run = "".join(random.choices(PIECES, k=random.randint(1, 4)))
        step = random.choice([0, 1, 9, 10, 10**6, MAX_STEP, random.getrandbits(64)])
        try:
            name = AdapterName(prefix, run, step)
        except RequestError:
            refused += 1
            assert run in (".", "..") or "-run" in run or "-run" in prefix + "-" + run
            continue
        made += 1
        assert parse(str(name)) == name
    assert made > 1000 and refused > 100


def test_two_names_never_have_one_text() -> None:
    random.seed(21)
    texts: dict[str, AdapterName] = {}
    for _ in range(40000):
        prefix = "".join(random.choices(PIECES[6:], k=random.randint(1, 3)))
        run = "".join(random.choices(PIECES[6:], k=random.randint(1, 3)))
        try:
            name = AdapterName(prefix, run, random.randint(1, 2))
        except RequestError:
            continue
        assert texts.setdefault(str(name), name) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "policy",
        "policy-run1",
        "policy-step1",
        "-run1-step1",
        "policy-run-step1",
        "policy-run1-step",
        "policy-run1-step-1",
        "policy-run1-step01",
        "policy-run1-step1 ",
        "policy-run1-step1\n",
        " policy-run1-step1",
        "policy-run1/2-step1",
        "policy-run..-step1",
        f"policy-run1-step{2**64}",
        f"policy-run{'1' * 65}-step1",
        f"{'p' * 257}-run1-step1",
        "policy-run\u0661-step1",
        "policy-run1-step\u0661",
    ],
)
def test_other_names_are_left_to_others(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize("step", [-1, 2**64, 1.0, "1", True, None])
def test_steps(step: object) -> None:
    with pytest.raises(RequestError, match="step"):
        check_step(step)  # type: ignore[arg-type]
    assert check_step(0) == 0 and check_step(MAX_STEP) == MAX_STEP


@pytest.mark.parametrize("run", ["", ".", "..", "a b", "a/b", "x" * 65, "é", None, 1.5, True])
def test_runs(run: object) -> None:
    with pytest.raises(RequestError, match="run"):
        check_run(run)  # type: ignore[arg-type]


def test_run_of_publication() -> None:
    assert run_of("lora:0") == run_of("0") == run_of(0) == "0"
    assert run_of("lora:my.run-1") == "my.run-1"
    with pytest.raises(RequestError):
        run_of("lora:")


@pytest.mark.parametrize("prefix", ["", "a b", "a\x00", "p" * 257, 5])
def test_prefixes(prefix: object) -> None:
    with pytest.raises(RequestError, match="prefix"):
        AdapterName(prefix, "1", 1)  # type: ignore[arg-type]
