# SPDX-License-Identifier: Apache-2.0
"""A step beside the model: read while requests are answered, installed in a moment.

What stalls an engine is then a copy within its device, not the way from the trainer. The memory is
as much as the worker's part of the model: on its device if there is room, in pinned host memory
otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fanin.engine.landing import Progress, Summary
from fanin.engine.trainers import Published, Trainer, left
from fanin.engine.weights_state import require_host_room
from fanin.errors import CancelledError, FaninError, PeerError, PullTimeoutError
from fanin.mapping import PackedMapping
from fanin.vllm import reload
from fanin.vllm.mapped import MappedLanding, span

__all__ = ["Prefetch", "Shadow"]

_log = logging.getLogger("vllm.fanin")

_ALIGN = 256
# Of the device's free memory, for what else is allocated meanwhile.
_SPARE = 1.1
_GIVE_UP = 15.0
# For the ranks to say which launch they are, while the engine is paused; one round is less than a
# millisecond, and one that is silent is not worth more.
_ASK = 0.3


class Shadow:
    """Memory for one step of a mapped model. workers: of this engine, who take as much each.

    Raises HostError if the host has not so much.
    """

    def __init__(self, landing: MappedLanding, workers: int = 1) -> None:
        self._landing = landing
        layouts: dict[tuple[str, str], Any] = {}
        for module in landing.mapping.modules:
            if not module.filled:
                continue
            leaves = dict(reload.Skeleton(module.path, landing.module(module.path)).leaves)
            if not landing.staged(module.path):
                leaves = {}
            for place, leaf in landing.filled:
                if place == module.path and leaf not in leaves:
                    leaves[leaf] = getattr(landing.module(module.path), leaf)
            layouts.update({(module.path, leaf): tensor for leaf, tensor in leaves.items()})
        self._tensors = self._lay_out(layouts, workers)
        self._packed: PackedMapping = landing.mapping.pack(self._lookup)
        self._installing = landing.installation(self._tensors)

    def _lay_out(
        self, layouts: dict[tuple[str, str], Any], workers: int
    ) -> dict[tuple[str, str], Any]:
        import torch

        sizes = {
            key: -(-span(tensor) * tensor.element_size() // _ALIGN) * _ALIGN
            for key, tensor in layouts.items()
        }
        self.bytes = sum(sizes.values())
        device, pinned = self._landing.device, False
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < self.bytes * _SPARE:
            device, pinned = torch.device("cpu"), True
        if device.type == "cpu":
            require_host_room(self.bytes, workers)
        self.place = "pinned host memory" if pinned else str(device)
        room = torch.empty(self.bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        found, at = {}, 0
        for key, tensor in layouts.items():
            flat = room[at : at + span(tensor) * tensor.element_size()].view(tensor.dtype)
            found[key] = flat.as_strided(tensor.shape, tensor.stride())
            at += sizes[key]
        return found

    def _lookup(self, path: str, leaf: str) -> Any:
        return self._tensors[path, leaf]

    def on_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """What another thread has to be in when it fills: the stream that this one installs on.

        PyTorch gave the shadow memory in the order of that stream. Until the work that is on the
        stream now has ended, that work may write to it.
        """
        if self._landing.device.type != "cuda":
            return nullcontext
        import torch

        stream = torch.cuda.current_stream(self._landing.device)
        return lambda: torch.cuda.stream(stream)

    def fill(self, trainer: Trainer, step: int, deadline: float, progress: Progress) -> Any:
        """Reads *step*, proven; the pull's result. Blocks until *deadline* at most."""
        self._landing.mapping.fill(self._lookup)
        result = trainer.client.pull_into(
            trainer.run,
            self._packed.tensors,
            step=step,
            timeout=left(deadline),
            dtype=self._packed.dtype,
            verify=self._landing.verify,
            rank_progress=progress,
        )
        self._packed.settle()
        return result

    def install(self) -> None:
        """Copies what was read into the model, and processes what has to be."""
        self._installing()


class Prefetch:
    """One step on its way into a shadow, in a thread of its own.

    Only that thread uses the trainer's client, until :meth:`wait` or :meth:`cancel` has returned.

    published: what the shadow is laid out for.
    """

    def __init__(
        self, shadow: Shadow, trainer: Trainer, step: int, published: Published, timeout: float
    ) -> None:
        self.step = step
        self._shadow, self._trainer, self._published = shadow, trainer, published
        #: Where the trainer was; before it is asked, so that what changes meanwhile is noticed.
        self._target: Any = None
        self._result: Any = None
        self._error: Exception | None = None
        self._progress = Progress(step, shadow.bytes)
        self._on_stream = shadow.on_stream()
        self._thread = threading.Thread(
            target=self._run, args=(time.monotonic() + timeout,), name="fanin-prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, deadline: float) -> None:
        try:
            self._target = self._trainer.source.resolve()
            if not self._trainer.ready(deadline, self.step).same_model(self._published):
                raise PeerError.make(
                    "other names, types, shapes or another configuration are published than before",
                    "update without it",
                )
            with self._on_stream():
                self._result = self._shadow.fill(self._trainer, self.step, deadline, self._progress)
        except Exception as error:
            self._error = error
            _log.warning("fanin: step %d was not read ahead: %s", self.step, error)

    def state(self) -> dict[str, Any]:
        """How far it is, as plain values: state is "reading", "ready" or "failed"."""
        state = "failed" if self._error is not None else "ready"
        return {
            "step": self.step,
            "state": "reading" if self._thread.is_alive() else state,
            "bytes": self._progress.done if self._result is None else self._result.bytes,
            "total": self._progress.total,
            "place": self._shadow.place,
            "why": "" if self._error is None else str(self._error),
            "code": getattr(self._error, "name", ""),
        }

    def wait(self, deadline: float) -> bool:
        """Whether the step may be installed: it is in the shadow, whole, and the trainer is still
        the launch that it was read from. Blocks until it is there, or has failed."""
        self._thread.join(left(deadline))
        if self._thread.is_alive():
            self.cancel()
            raise PullTimeoutError.make(
                f"step {self.step} is still being read ahead", "give init_info a longer timeout"
            )
        if self._error is None and not self._is_of_now(deadline):
            _log.warning(
                "fanin: step %d was read ahead from launch %s of the trainer, which is not there"
                " now; it is pulled again",
                self.step,
                self._result.world_id,
            )
            return False
        return self._error is None

    def _is_of_now(self, deadline: float) -> bool:
        """A trainer that was started again has other weights in its step of the same number, and
        other workers may have read those.

        Trainer.ready() would wait here while the trainer writes its next step.
        """
        trainer = self._trainer
        try:
            if trainer.source.resolve() != self._target:
                return False
            trainer.client.publications(min(_ASK, left(deadline)))
            worlds = {one.world_id for one in trainer.client.ranks() if one.connected}
        except FaninError as error:
            _log.info("fanin: the trainer does not say which launch it is: %s", error)
            return False
        return worlds == {self._result.world_id}

    def install(self, writing: Callable[[], None]) -> Summary:
        """Brings it into the model; :meth:`wait` has said that it is there."""
        start = time.monotonic()
        writing()
        self._shadow.install()
        result = self._result
        return Summary(
            bytes=result.bytes,
            tensors=result.tensors,
            read=result.read,
            install=time.monotonic() - start,
            path=f"{result.path}, read ahead into {self._shadow.place}",
            restarts=result.restarts,
            worlds={str(result.world_id)},
        )

    def cancel(self) -> None:
        """Gives it up. Blocks for moments."""
        if not self._thread.is_alive():
            return
        try:
            self._trainer.client.cancel()
        except (AssertionError, FaninError):
            pass  # it is connecting, which has a deadline
        self._thread.join(_GIVE_UP)
        if not isinstance(self._error, CancelledError):
            self._trainer.close()  # the cancel came after its last call, and would end the next one
