# SPDX-License-Identifier: Apache-2.0
"""One of a worker's models: where it comes from, how it is filled, and how it stands; and a step
that is read while requests are answered, and installed in a moment."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fanin.engine.clients import incarnations_of, is_outlived
from fanin.engine.landing import Landing, Progress, Summary, note_delta
from fanin.engine.trainers import Published, Trainer, left
from fanin.engine.updates import Updates
from fanin.errors import CancelledError, FaninError, PeerError, PullTimeoutError, StateError
from fanin.mapping._checks import Taken

_log = logging.getLogger("fanin.engine")

_GIVE_UP = 15.0
# For the ranks to say which launch they are, while the engine is paused; one round is less than a
# millisecond, and one that is silent is not worth more.
_ASK = 0.3


class StepMemory(Protocol):
    """Memory beside a model for one step of it. bytes: of it, with gaps. place: where, for the log.
    asked: whether it was filled by a pull that asked for deltas."""

    bytes: int
    place: str
    asked: bool

    def on_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """What another thread has to be in when it fills."""
        ...

    def fill(self, trainer: Trainer, step: int, deadline: float, progress: Progress) -> Any:
        """Reads *step*, proven; the pull's result. Blocks until *deadline* at most."""
        ...

    def install(self) -> None:
        """Brings what was read into the model."""
        ...

    def touched(self) -> None:
        """It is not known any more what is there."""
        ...


class Prefetch:
    """One step on its way into a shadow, in a thread of its own.

    Only that thread uses the trainer's client, until :meth:`wait` or :meth:`cancel` has returned.

    published: what the shadow is laid out for.
    """

    def __init__(
        self, shadow: StepMemory, trainer: Trainer, step: int, published: Published, timeout: float
    ) -> None:
        self.step = step
        self._shadow, self._trainer, self._published = shadow, trainer, published
        #: Where the trainer was; before it is asked, so that what changes meanwhile is noticed.
        self._target: Any = None
        self._incarnations: dict[str, str] = {}
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
            self._incarnations = incarnations_of(self._trainer.client)
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
                "fanin: step %d was read ahead from launch %s of the trainer, whose ranks are not"
                " there now; it is pulled again",
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
            until = min(time.monotonic() + _ASK, deadline)
            if is_outlived(trainer.client, trainer.run, self._incarnations, until):
                return False
        except FaninError as error:
            _log.info("fanin: the trainer does not say which launch it is: %s", error)
            return False
        return worlds == {self._result.world_id}

    def install(self, writing: Callable[[], None]) -> Summary:
        """Brings it into the model; :meth:`wait` has said that it is there."""
        start = time.monotonic()
        writing()
        self._shadow.install()
        result, relayed = self._result, ""
        if self._trainer.relay is not None:
            relayed = f" with relays ({result.path_reason})"
        summary = Summary(
            bytes=result.bytes,
            tensors=result.tensors,
            read=result.read,
            install=time.monotonic() - start,
            path=f"{result.path}{relayed}, read ahead into {self._shadow.place}",
            restarts=result.restarts,
            worlds={str(result.world_id)},
            incarnations=self._incarnations,
        )
        note_delta(summary, result, self._shadow.asked)
        return summary

    def cancel(self) -> None:
        """Gives it up. Blocks for moments."""
        if not self._thread.is_alive():
            return
        try:
            self._trainer.cancel()
        except (AssertionError, FaninError):
            pass  # it is connecting, which has a deadline
        self._thread.join(_GIVE_UP)
        if not isinstance(self._error, CancelledError) or self._trainer.relay is not None:
            self._trainer.close()  # a cancel that found no call would end the next one


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
