# SPDX-License-Identifier: Apache-2.0
"""What can happen to a worker of vLLM in the middle of an update: `--worker-extension-cls`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def before_module(at: int, what: Callable[[], None]) -> None:
    """When the next update of this process has installed *at* modules: *what*, once."""
    from fanin.vllm import reload

    one, whole = reload.Skeleton.install, reload.Skeleton.process_live
    left = iter(range(at))

    def next_one() -> None:
        if next(left, None) is None:
            reload.Skeleton.install, reload.Skeleton.process_live = one, whole
            what()

    def install(skeleton: reload.Skeleton, tensors: dict[str, object]) -> None:
        next_one()
        one(skeleton, tensors)

    def process_live(skeleton: reload.Skeleton) -> None:
        next_one()
        whole(skeleton)

    reload.Skeleton.install, reload.Skeleton.process_live = install, process_live


def run_short() -> None:
    raise MemoryError("no memory for a packed copy")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold() -> None:
    """Stands still until the file that this makes is taken away, a minute at most."""
    held = Path(os.environ["HURTING_HELD"])
    part = held.with_name(f"{held.name}.{os.getpid()}")
    part.write_text(str(os.getpid()))
    part.rename(held)
    deadline = time.monotonic() + 60
    while held.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class Hurting:
    """Methods for `collective_rpc`."""

    def compute_in_loader(self, name: str) -> None:
        """From now on the model's loader computes with this tensor before it writes it: the same
        bits come of it, and no recording can know."""
        model = self.get_model()  # type: ignore[attr-defined]
        load = model.load_weights

        def load_weights(weights: Iterable[tuple[str, Any]]) -> Any:
            return load((one, tensor * 1 if one == name else tensor) for one, tensor in weights)

        model.load_weights = load_weights

    def hurt(self, at: int, rank: int, how: str = "run_short") -> int:
        """In the worker of this rank, and replica, in the next update; the worker's process."""
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        if parallel.data_parallel_index * parallel.world_size + parallel.rank == rank:
            before_module(at, globals()[how])
        return os.getpid()
