# SPDX-License-Identifier: Apache-2.0
"""A step into a model of which a part has to go through vLLM's own `load_weights`.

Some loaders compute what they write: no mapping can say that. Only the modules in question are
loaded so; all others are filled as if there were none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fanin.engine.landing import Landing, Progress, Summary, groups_of, torch_dtype_of
from fanin.engine.trainers import Published, Trainer, left
from fanin.errors import StaleError
from fanin.mapping import Mapping
from fanin.vllm import reload
from fanin.vllm.mapped import MappedLanding

__all__ = ["MixedLanding", "with_neighbours"]


def with_neighbours(mapping: Mapping) -> Mapping:
    """*mapping*, with the fallback widened to modules that share a tensor with it.

    The loader, given a published tensor, writes into all modules that take from it.
    """
    modules = list(mapping.modules)
    taken = {name for module in modules for name in module.taken if module.fallback}
    while True:
        before = len(taken)
        for index, module in enumerate(modules):
            names = {source.name for leaf in module.leaves for source in leaf.sources}
            if not module.fallback and names & taken:
                shared = min(names & taken)
                why = f"'{shared}' is of a module that is filled by the loader"
                modules[index] = module._replace(fallback=why, taken=tuple(sorted(names)))
                taken |= names
        if len(taken) == before:
            return replace(mapping, modules=tuple(modules))


class MixedLanding(Landing):
    """Fills the modules of the mapping by boxes, and those of its fallback by the loader.

    mapping: what :func:`with_neighbours` has made. options: of :class:`MappedLanding`.
    """

    mode = "mixed"

    def __init__(
        self,
        model: Any,
        model_config: Any,
        device: Any,
        mapping: Mapping,
        published: Published,
        **options: Any,
    ) -> None:
        self.mapped = MappedLanding(model, model_config, device, mapping, **options)
        self._model, self._config, self._device = model, model_config, device
        self._verify = bool(options.get("verify", False))
        self._entries = {entry.name: entry for entry in published.entries}
        loaded = [module for module in mapping.modules if module.fallback]
        self.by_loader = tuple(module.path for module in loaded)
        self._names = list(dict.fromkeys(name for module in loaded for name in module.taken))

    def __str__(self) -> str:
        return f"{self.mapped}; {len(self.by_loader)} modules by vLLM's loader"

    def reach(self, trainer: Trainer, deadline: float) -> None:
        self.mapped.reach(trainer, deadline)

    def pull(
        self, trainer: Trainer, step: int, deadline: float, writing: Callable[[], None]
    ) -> Summary:
        """The loader's part first: what comes after all modules is the mapped part's to do."""
        loaded = Summary()
        writing()
        reload.begin(self._model, self.by_loader)
        try:
            progress = Progress(step, sum(self._entries[name].bytes for name in self._names))
            self._model.load_weights(self._lend(trainer, step, deadline, loaded, progress))
            # It was seen to fill them when it was given all tensors.
            reload.require_filled(self._model, 'init with {"mode": "loader"}')
            start = time.monotonic()
            reload.end(self._model, self._config)
            loaded.install += time.monotonic() - start
        finally:
            reload.abandon(self._model)
        done = self.mapped.pull(trainer, step, deadline, writing)
        if loaded.worlds | done.worlds != done.worlds:
            raise StaleError.make(
                f"the trainer was started again while step {step} was read", "update again"
            )
        return replace(
            done,
            bytes=done.bytes + loaded.bytes,
            tensors=done.tensors + loaded.tensors,
            read=done.read + loaded.read,
            install=done.install + loaded.install,
            restarts=done.restarts + loaded.restarts,
        )

    def _lend(
        self, trainer: Trainer, step: int, deadline: float, summary: Summary, progress: Progress
    ) -> Iterator[tuple[str, Any]]:
        """The loader's tensors, whole, a decoder layer at a time. One exact step of one world has
        the same bytes in every pull."""
        import torch

        for names in groups_of(self._names):
            tensors = {}
            for name in names:
                entry = self._entries[name]
                dtype = torch_dtype_of(entry.dtype)
                tensors[name] = torch.empty(entry.shape, dtype=dtype, device=self._device)
            result = trainer.client.pull_into(
                trainer.run,
                tensors,
                step=step,
                timeout=left(deadline),
                verify=self._verify,
                rank_progress=progress,
            )
            progress.add(result.bytes)
            summary.bytes += result.bytes
            summary.tensors += result.tensors
            summary.read += result.read
            summary.restarts += result.restarts
            summary.worlds.add(str(result.world_id))
            yield from tensors.items()

    def close(self) -> None:
        self.mapped.close()
