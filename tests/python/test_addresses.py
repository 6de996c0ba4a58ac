# SPDX-License-Identifier: Apache-2.0
"""Who comes from many addresses, of IPv4 and IPv6, over the kernel's own sockets: fleets have room
by default, and an address that is cheap to have is no peer of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from namespaces import run_alone

ENGINES, VERY_MANY, EACH, FEW = 52, 512, 5, 16


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    """What tests/support/addresses.py tells, by family."""
    told = [json.loads(line) for line in run_alone("addresses.py").splitlines()]
    return {one["family"]: one for one in told}


@pytest.fixture(params=["IPv4", "IPv6"])
def told(request: pytest.FixtureRequest, families: dict[str, Any]) -> dict[str, Any]:
    """Of one family, if this machine has it."""
    one: dict[str, Any] = families[request.param]
    if "missing" in one:
        pytest.skip(f"no {request.param} here: {one['missing']}")
    return one


def test_fleets_have_room(told: dict[str, Any]) -> None:
    assert told["engines"] == {"sessions": ENGINES * EACH, "sessions_refused": 0}


def test_large_fleets_have_room_with_enough_descriptors(told: dict[str, Any]) -> None:
    if "very many" not in told:
        pytest.skip("the limit of open files is too low for 512 engines")
    assert told["very many"] == {"sessions": VERY_MANY * EACH, "sessions_refused": 0}


def test_cheap_addresses_are_one_peer(told: dict[str, Any]) -> None:
    """All of 127/8, or a /64 of IPv6, which a host has to itself: half of the connections, half of
    which are for bytes; whoever else comes gets in."""
    assert told["one peer"] == {"admitted": FEW // 4, "of": 3 * FEW}


def test_pulls_go_by_either_family(told: dict[str, Any]) -> None:
    assert told["pull"]["secret"] == "stream"
    assert "demands the launch's secret" in told["pull"]["none"]
    assert "no network that the server allows" in told["pull"]["not allowed"]
