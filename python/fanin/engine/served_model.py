# SPDX-License-Identifier: Apache-2.0
"""One of a worker's models: where it comes from, how it is filled, and how it stands."""

from __future__ import annotations

from typing import Any

from fanin.engine.landing import Landing, Summary
from fanin.engine.read_ahead import Prefetch, StepMemory
from fanin.engine.trainers import Published, Trainer
from fanin.engine.updates import Updates
from fanin.errors import StateError
from fanin.mapping._coverage import Taken


class ServedModel:
    """One of the worker's models: the model itself, or its draft."""

    def __init__(self, worker: str, model: Any, model_config: Any) -> None:
        self.worker, self.model, self.model_config = worker, model, model_config
        self.updates = Updates(worker)
        self.trainer: Trainer | None = None
        self.landing: Landing | None = None
        self.published: Published | None = None
        self.shadow: StepMemory | None = None
        self.prefetch: Prefetch | None = None
        #: What the last update did, in bytes and seconds.
        self.last: Summary | None = None
        #: Published tensors of which not all goes into this worker's model; None: nobody asks.
        self.taken: Taken | None = None
        #: Of all that is published.
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: Paths of what stays as the engine has loaded it.
        self.kept: frozenset[str] = frozenset()
        #: What the last pull that wrote has kept, None: none has written.
        self.intact: frozenset[str] | None = None
        #: Names of what is published and not for this model.
        self.unused: frozenset[str] = frozenset()
        #: Patterns of ``keep`` that name nothing of this worker's model.
        self.idle: frozenset[str] = frozenset()
        #: Why vLLM has given up the weights since it has loaded them, and what it has put back.
        self.given_up: tuple[str, frozenset[str]] | None = None

    def require_kept(self) -> None:
        """Raises StateError if what nobody publishes is not there any more."""
        if self.given_up is None or not self.kept:
            return
        why, back = self.given_up
        own = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        if gone := sorted((self.kept & own) - back):
            raise StateError.make(
                f"keep names '{gone[0]}', which is not as it was loaded: {why}",
                "load the checkpoint by reload_weights first, or name it in vLLM's"
                " sleep_preserve_parameter_names",
                key="keep",
            )

    def fills(self, publication: str) -> bool:
        """Whether the model comes from there."""
        return self.trainer is not None and self.trainer.run == publication

    def require_at(self, step: int) -> None:
        """Raises StateError if the model is not whole at that step."""
        if self.updates.step != step or self.updates.dirty:
            raise StateError.make(
                f"{self.worker} is at step {self.updates.step}, not whole at {step}",
                f"update to step {step}, of which the trainer has made digests, and ask again",
                key=str(step),
            )

    def writing(self, step: int) -> None:
        """From now on weights are written, but for what is kept."""
        self.intact = self.kept
        self.updates.writing(step)

    def touched(self) -> None:
        """Something else than a pull into the model has written its weights, or will."""
        if self.landing is not None:
            self.landing.touched()

    def give_up_prefetch(self) -> None:
        ahead, self.prefetch = self.prefetch, None
        if ahead is not None:
            ahead.cancel()

    def close(self) -> None:
        self.give_up_prefetch()
        self.shadow = None
        if self.trainer is not None:
            self.trainer.close()
        if self.landing is not None:
            self.landing.close()
        self.trainer = self.landing = self.published = None
