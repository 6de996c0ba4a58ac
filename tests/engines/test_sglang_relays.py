# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server that has its steps of a host's cache."""

from __future__ import annotations

from pathlib import Path

import fanin
from fanin.sync import Registry
from full_models import save_full_model
from full_trainer import FullTrainer
from relay_fleet import PATIENCE, RUN, room_for, share_of
from sglang_server import SGLangServer, needs_sglang

pytestmark = needs_sglang


def test_a_server_takes_a_step_from_another_reader(tmp_path: Path) -> None:
    """Each sync also proves by the ranks' digests what is served."""
    model = save_full_model(tmp_path / "model", "qwen3", tied=True)
    with (
        FullTrainer(model, tmp_path / "run", world_size=2, digests=True) as trainer,
        SGLangServer(model, tmp_path, FANIN_RELAY="host") as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        registry = Registry(str(trainer.info), timeout=2 * PATIENCE)
        registry.add(engine.url)
        memory = room_for(trainer.addresses)
        shares = []
        with fanin.Relay(trainer.addresses) as cache:
            while not shares or (
                max(shares) == 0 and len(shares) < 10
            ):  # if it is slow to be found
                step = int(trainer.step()["step"])
                cache.pull_into(RUN, memory, step=step, timeout=PATIENCE)
                result = registry.sync(step, verify_served=True)
                (entry,) = result.results.values()
                shares.append(share_of(entry.how))
        assert max(shares) > 90, shares
