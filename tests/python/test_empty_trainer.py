# SPDX-License-Identifier: Apache-2.0
"""What nixl-fetch says of ranks that run and publish nothing."""

from __future__ import annotations

import json
import subprocess

from local_world import addresses, nixl_fetch, publish, servers


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([nixl_fetch(), *arguments], capture_output=True, text=True, timeout=60)


def test_an_empty_trainer_is_told() -> None:
    with servers(2) as made:
        target = ",".join(addresses(made))
        listed = run("list", target)
        assert listed.returncode == 0, listed.stderr
        assert listed.stdout == "nothing is published: 2 of 2 ranks answered, and hold no run\n"
        assert json.loads(run("list", target, "--json").stdout)["runs"] == []
        shown = run("show", target, "any.lora_A.weight", "--timeout", "2s")
        assert shown.returncode == 12  # it may come yet
        assert "ranks 0-1 do not publish it" in shown.stderr


def test_the_rank_that_publishes_nothing_is_named() -> None:
    with servers(3) as made:
        publish([made[0], made[2]], 1)
        target = ",".join(addresses(made))
        listed = run("list", target)
        assert "stable, 2 of 3 ranks" in listed.stdout and "absent" in listed.stdout
        told = run("status", target)
        assert "rank 1 does not publish this run" in told.stdout
        assert told.returncode == 11
