# SPDX-License-Identifier: Apache-2.0
"""One step of a whole model by vLLM's own loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

from fanin.engine.landing import Landing, Progress, Summary, groups_of, torch_dtype_of
from fanin.engine.trainers import Published, Trainer, left
from fanin.errors import StaleError
from fanin.vllm import reload

__all__ = ["StockLanding"]


class StockLanding(Landing):
    """vLLM's own `load_weights` on whole tensors, a decoder layer at a time.

    For models whose loaders compute, so that no mapping can be recorded. Every worker reads every
    tensor whole, and holds a layer of them beside the model.
    """

    mode = "loader"

    def __init__(
        self,
        model: Any,
        model_config: Any,
        device: Any,
        published: Published,
        others: Container[str] = frozenset(),
    ) -> None:
        self._model, self._config, self._device = model, model_config, device
        #: Paths of tensors that are another model's.
        self._others = others
        self._entries = {entry.name: entry for entry in published.entries}
        self._groups = groups_of(self._entries)

    def pull(
        self, trainer: Trainer, step: int, deadline: float, writing: Callable[[], None]
    ) -> Summary:
        summary = Summary(tensors=len(self._entries))
        progress = Progress(step, sum(entry.bytes for entry in self._entries.values()))
        writing()
        reload.begin(self._model, others=self._others)
        try:
            for group in self._groups:
                self._one(group, trainer, step, deadline, summary, progress)
            if len(summary.worlds) != 1:
                raise StaleError.make(
                    f"the trainer was started again while step {step} was read", "update again"
                )
            reload.require_filled(
                self._model, "publish the whole model under the names of its checkpoint"
            )
            start = time.monotonic()
            reload.end(self._model, self._config)
            summary.install += time.monotonic() - start
        finally:
            reload.abandon(self._model)
        return summary

    def _one(
        self,
        group: list[str],
        trainer: Trainer,
        step: int,
        deadline: float,
        summary: Summary,
        progress: Progress,
    ) -> None:
        """Reads and loads one group."""
        import torch

        # New memory each time: vLLM keeps what a module was given until the module is complete.
        tensors = {}
        for name in group:
            entry = self._entries[name]
            dtype = torch_dtype_of(entry.dtype)
            tensors[name] = torch.empty(entry.shape, dtype=dtype, device=self._device)
        start = time.monotonic()
        # One exact step of one world has the same bytes in every pull.
        result = trainer.client.pull_into(
            trainer.run, tensors, step=step, timeout=left(deadline), rank_progress=progress
        )
        loaded = time.monotonic()
        self._model.load_weights(iter(tensors.items()))
        summary.install += time.monotonic() - loaded
        summary.read += loaded - start
        summary.bytes += result.bytes
        summary.restarts += result.restarts
        summary.path = result.path
        summary.worlds.add(str(result.world_id))
        progress.add(result.bytes)
