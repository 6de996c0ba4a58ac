# SPDX-License-Identifier: Apache-2.0
"""Where one worker is between two steps, and which call is right then.

An update writes into the weights of a model that serves. So there is one thing to know at any time:
whether what lies there is the whole of one step. :class:`Updates` knows it, and nothing else here
does. It imports neither PyTorch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fanin.errors import FaninError, RequestError, StateError
from fanin.names import MAX_STEP

#: Seconds for an update where init_info says nothing.
DEFAULT_TIMEOUT = 120.0

_WHOLE = "start an update and pull a step that the trainer has; do not resume before"


def check_step(value: Any) -> int:
    """A step of update_info. Raises RequestError, naming the field."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STEP:
        raise RequestError.make(
            f"update_info's step is {value!r}, not an integer from 0 to {MAX_STEP}",
            'give {"step": s}',
            key="step",
        )
    return value


def check_timeout(value: Any) -> float:
    """A timeout of init_info, seconds. Raises RequestError, naming the field."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not 0 < value < 1e6:
        raise RequestError.make(
            f"init_info's timeout is {value!r}, not seconds above 0", "give 120", key="timeout"
        )
    return float(value)


def full_run(value: Any) -> str:
    """The publication of a run of full weights, from ``0``, ``"0"`` or ``"full:0"``.

    Raises RequestError, naming the field.
    """
    from fanin.server import publication_of

    plain = isinstance(value, (int, str)) and not isinstance(value, bool)
    try:
        name = publication_of(value if ":" in str(value) else f"full:{value}") if plain else ""
    except RequestError:
        name = ""
    if not name.startswith("full:"):
        raise RequestError.make(
            f"init_info's run is {value!r}, not the run of a whole model",
            'give "0" or "full:0"; adapters ("lora:") are loaded by /load_lora_adapter_nixl',
            key="run",
        )
    return name


class Updates:
    """The state of one model's weights in one worker. One thread.

    worker: names this worker in errors, "worker 1 of 4".
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._open = False
        self._pulled: int | None = None
        self._held: int | None = None
        self._there: int | None = None
        self._world, self._incarnations = "", dict[str, str]()
        self._dirty = self._failed = ""

    @property
    def open(self) -> bool:
        """Whether an update is under way."""
        return self._open

    @property
    def dirty(self) -> str:
        """Why the weights are not the whole of one step; "" if they are."""
        return self._dirty

    @property
    def step(self) -> int | None:
        """The step of the last update that ended well; None: the weights it was started with."""
        return self._held

    def reloaded(self) -> None:
        """The engine has loaded its own weights again: they are whole, and those of no step."""
        self._there = self._held = None
        self._world, self._incarnations = "", {}
        self._dirty = self._failed = ""

    def lost(self, why: str) -> None:
        """The weights are gone until they are pulled, or loaded from disk."""
        self._pulled, self._dirty = None, why

    def holds(self) -> dict[str, Any]:
        """What lies in this worker's memory, for :mod:`fanin.vllm.guard`, as plain values.

        Returns:
            step: of the last pull that ended well, whether the update did or not.
            world: the launch of the trainer that the step came from. Another launch has other
                weights in its step of the same number.
            incarnations: of the launch's ranks then. So may a rank that was started again in it.
            failed: why the last pull failed, "" if it did not.
        """
        return {
            "worker": self._worker,
            "dirty": self._dirty,
            "step": self._there,
            "world": self._world,
            "incarnations": self._incarnations,
            "failed": self._failed,
        }

    def _refuse(self, what: str, remedy: str) -> StateError:
        return StateError.make(f"{self._worker}: {what}", remedy)

    def start(self) -> None:
        """An update begins. Raises StateError if one is under way."""
        if self._open:
            raise self._refuse(
                "start_weight_update while an update is under way", "update and finish it first"
            )
        self._open, self._pulled = True, None

    def leave(self) -> None:
        """The update is over without an end: what was written stays dirty."""
        self._open, self._pulled = False, None

    @contextmanager
    def pull(self, step: int) -> Iterator[None]:
        """Around everything that brings *step*: an exception ends the update.

        :meth:`writing` says from where on the weights are at stake, :meth:`came_from` which launch
        of the trainer they are of. Raises StateError if no update is under way.
        """
        if not self._open:
            raise self._refuse(
                "update_weights without start_weight_update", "call start_weight_update first"
            )
        self._pulled = None
        try:
            yield
        except BaseException as error:
            self._failed = f"the pull of step {step} failed: {_first_line(error)}"
            if self._dirty:
                self._dirty = self._failed
            self.leave()
            raise
        self._pulled = self._there = step
        self._dirty = self._failed = ""

    def writing(self, step: int) -> None:
        """From now on the weights may be written: they are dirty until the pull has ended well."""
        self._dirty = self._dirty or f"the pull of step {step} has not ended"

    def came_from(self, world: str, incarnations: Mapping[str, str]) -> None:
        """All of the pull is there, of the launch *world* of the trainer: 32 hex digits.

        incarnations: of its ranks, see :func:`fanin.engine.clients.incarnations_of`.
        """
        self._world, self._incarnations = world, dict(incarnations)

    def finish(self) -> int:
        """The update is over; its step. Raises StateError, and nothing changes, if nothing was
        pulled."""
        if not self._open:
            raise self._refuse("finish_weight_update without an update", "start and update first")
        if self._pulled is None:
            if self._dirty:
                raise self._refuse(f"the weights are not whole: {self._dirty}", _WHOLE)
            raise self._refuse(
                "finish_weight_update, and nothing was pulled since start_weight_update",
                'call update_weights with {"step": s} first',
            )
        self._held, self._open, self._pulled = self._pulled, False, None
        return self._held


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    kind = "" if isinstance(error, FaninError) else f"{type(error).__name__}: "
    return kind + (text[0] if text else "")
