# SPDX-License-Identifier: Apache-2.0
"""What a stranger takes from a rank is counted and bounded, and its own user's pulls go on: each
attack of tests/support/strangers.py in a process of its own, against a rank in another. The shares
are small, so that they are had at once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import run_alone

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "tools" / "measure"), str(TESTS / "support")]
import attacks  # noqa: E402
from strangers import ATTACKS  # noqa: E402

PEER_CPU, STRANGER_CPU, SHARE = 0.002, 0.002, 0.1
# Had at once: 20 s of the shares of requests and of tensors, 2 s of that of connections. The rest
# is what cannot be counted: looking who may go on, and the turns that were under way.
MOST_CPU = 20 * PEER_CPU + 20 * STRANGER_CPU + 2 * PEER_CPU + 0.3
# What says that the limit was met; of the others nothing is to be said but that they do no harm.
LIMITED = {
    "ping": "requests_delayed",
    "ping16": "requests_delayed",
    "list": "requests_delayed",
    "keys": "requests_delayed",
    "waits": "requests_delayed",
    "reads": "requests_delayed",
    "digests": "requests_delayed",
    "leases": "drains_cut",
    "garbage": "log_lines_left_out",
    "hellos": "log_lines_left_out",
}


CALM: dict[float, Any] = {}  # what is told of so many seconds without an attack


def observe(name: str, seconds: float) -> tuple[Any, Any]:
    """What is told of as many seconds without an attack, and with this one."""
    options = argparse.Namespace(
        rounds=1,
        seconds=seconds,
        peer_cpu=PEER_CPU,
        stranger_cpu=STRANGER_CPU,
        stranger_share=SHARE,
    )
    rounds = attacks.observe(options, name, calm=seconds not in CALM)
    for calm in rounds[False]:
        CALM[seconds] = calm
    return CALM[seconds], rounds[True][0]


def harm(calm: Any, attacked: Any) -> str:
    """What an attack did to the trainer or to its own user, if it is more than a busy machine does.

    Without limits the attacks left 3 % of the steps. tools/measure/attacks.py measures.
    """
    steps = f"{calm['steps']:.1f} steps a second became {attacked['steps']:.1f}"
    if attacked["steps"] < calm["steps"] / 5:
        return steps
    return f"a pull took {attacked['slowest']:.1f} s" if attacked["slowest"] > 10 else ""


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_stranger_takes(name: str) -> None:
    why = ""
    for seconds in (1.0, 3.0, 10.0, 30.0):  # of a busy machine an attacker gets little
        calm, attacked = observe(name, seconds)
        stats = attacked["stats"]
        assert attacked["pulls"] > 0
        cpu = {"calm": calm["cpu"] * seconds, "attacked": attacked["cpu"] * seconds}
        assert cpu["attacked"] < 2 * cpu["calm"] + MOST_CPU + 0.05 * seconds
        if stats["held_up_by"] == "this host":
            assert stats["held_up_ns_max"] <= SHARE * 1e9
        # Connections that are opened are told of, fifty times as many as faults.
        assert attacked["lines"] < 500 + 250 * seconds
        met = name not in LIMITED or stats[LIMITED[name]] > 0
        why = harm(calm, attacked) if met else f"{LIMITED[name]} is 0"
        if not why:
            return
    pytest.fail(why)


def test_a_crowd_of_addresses_leaves_everybody_a_turn() -> None:
    """52 addresses, of IPv4 and of IPv6: what is common to all of them goes from peer to peer, not
    from connection to connection."""
    families = [line.split() for line in run_alone("crowd.py").splitlines()]
    assert [name for name, _, _ in families] == ["IPv4", "IPv6"]
    for name, last, others in families:
        # From connection to connection each of the others would have four times as much.
        assert float(others) <= 2 * float(last), f"{name}: {others} turns against {last}"
