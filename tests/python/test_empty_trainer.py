# SPDX-License-Identifier: Apache-2.0
"""What nixl-fetch says of ranks that run and publish nothing."""

from __future__ import annotations

import json
import subprocess

import fanin
from local_world import CONFIG, PUBLICATION, nixl_fetch, servers, shards_of


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([nixl_fetch(), *arguments], capture_output=True, text=True, timeout=60)


def addresses(made: list[fanin.Server]) -> str:
    return ",".join(f"127.0.0.1:{server.port}" for server in made)


def test_an_empty_trainer_is_told() -> None:
    with servers(2) as made:
        target = addresses(made)
        listed = run("list", target)
        assert listed.returncode == 0, listed.stderr
        assert listed.stdout == "nothing is published: 2 of 2 ranks answered, and hold no run\n"
        assert json.loads(run("list", target, "--json").stdout)["runs"] == []
        shown = run("show", target, "any.lora_A.weight", "--timeout", "2s")
        assert shown.returncode == 12  # it may come yet
        assert "ranks 0-1 do not publish it" in shown.stderr
        examined = run("doctor", target)
        assert "nothing is published: none of the 2 ranks that answer has" in examined.stdout


def test_doctor_names_the_rank_that_publishes_nothing() -> None:
    with servers(3) as made:
        for rank in (0, 2):
            made[rank].put(PUBLICATION, shards_of(rank, 1, 3))
            made[rank].set_metadata(PUBLICATION, CONFIG)
            made[rank].commit(PUBLICATION, 1)
        examined = run("doctor", addresses(made))
        assert "rank 1 publishes nothing, others do (1 of 3 ranks)" in examined.stdout
        assert examined.returncode == 4
