# SPDX-License-Identifier: Apache-2.0
"""WeightServer(merge=True), step after step: what is kept from one to the next, and what is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, case_world, run_case


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with case_world(2, tmp_path_factory.mktemp("steady"), "merge_steady.py") as ranks:
        yield ranks


@pytest.mark.parametrize("layout", [None, "fsdp"])
@pytest.mark.parametrize("adapter", ["embedding", "experts", "linear, fp8", "experts, fp8"])
def test_steps_that_differ_in_more_than_contents(
    world: World, adapter: str, layout: str | None
) -> None:
    name, _, quantize = adapter.partition(", ")
    run_case(world, "steps", name, layout, quantize or None)


@pytest.mark.parametrize("layout", [None, "fsdp"])
def test_an_adapter_that_is_not_applied(world: World, layout: str | None) -> None:
    run_case(world, "refused", layout)


def test_a_step_that_was_interrupted(world: World) -> None:
    run_case(world, "partial")


@pytest.mark.parametrize("change", ["hot", "float"])
def test_what_the_kernel_cannot_make(world: World, change: str) -> None:
    run_case(world, "unfit", change)
