# SPDX-License-Identifier: Apache-2.0
"""One of a worker's models: where it comes from and how it stands; and memory beside it: of a step
that is read ahead, and of what the model should hold.

What stalls an engine is a copy within its device then, not the way from the trainer. The memory of
a step is as much as the worker's part of the model: on its device if there is room, in pinned host
memory otherwise.

Whether a model holds what is published is found by reading it once more beside the model, proven by
digests that the trainer's ranks make of their own memory. What processing makes of the tensors
(other scales, another layout) is made again and compared. What processing makes beside the tensors
(a packed copy on the CPU) is asked by one-hot inputs, whose products are the weight's elements. Of
digests for :mod:`fanin.check` a mapping says the way back: which elements of which published tensor
lie where. What processing has made into something else has no way back, and is compared so, too.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fanin.engine.clients import incarnations_of, is_outlived
from fanin.engine.copies import laid_out, room_of, span
from fanin.engine.deltas import Asking
from fanin.engine.landing import Landing, Progress, Summary
from fanin.engine.trainers import Published, Trainer, left
from fanin.engine.updates import Updates
from fanin.engine.weights_state import require_host_room
from fanin.errors import CancelledError, FaninError, PeerError, PullTimeoutError, StateError
from fanin.mapping import PackedMapping
from fanin.mapping._checks import Taken
from fanin.mapping._held import Told, held_of
from fanin.vllm import reload
from fanin.vllm.landings import MappedLanding

_log = logging.getLogger("fanin.engine")

_BLOCK = 256
_PINNED = "pinned host memory"
_GIVE_UP = 15.0
# For the ranks to say which launch they are, while the engine is paused; one round is less than a
# millisecond, and one that is silent is not worth more.
_ASK = 0.3
# Of the device's free memory, for what else is allocated meanwhile.
_SPARE = 1.1
# Types whose elements are values by themselves.
_ASKED = ("torch.bfloat16", "torch.float16", "torch.float32")


class Shadow:
    """Memory for one step of a mapped model. Nothing but pulls writes it.

    Args:
        workers: of this engine, who take as much each.
        asking: for what has changed alone, or not; None: for the whole.

    Raises HostError if the host has not so much.
    """

    def __init__(
        self, landing: MappedLanding, workers: int = 1, asking: Asking | None = None
    ) -> None:
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
        self._asking = asking if self._packed.dtype is None else None
        #: Whether the last :meth:`fill` has asked for deltas.
        self.asked = False
        #: Copies what was read into the model, and processes what has to be.
        self.install = landing.installation(self._tensors)

    def _lay_out(
        self, layouts: dict[tuple[str, str], Any], workers: int
    ) -> dict[tuple[str, str], Any]:
        import torch

        self.bytes = room_of(layouts.values())
        device, pinned = self._landing.device, False
        if device.type == "cuda":
            pinned = torch.cuda.mem_get_info(device)[0] < self.bytes * _SPARE
            device = torch.device("cpu") if pinned else device
        if device.type == "cpu":
            require_host_room(self.bytes, workers)
        self.place = _PINNED if pinned else str(device)
        room = torch.empty(self.bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        return laid_out(room, layouts)

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
        how: dict[str, Any] = {"verify": self._landing.verify}
        asking = self._asking
        if asking is not None and not asking.asks(trainer.published):
            asking = None
        self.asked = asking is not None
        if asking is not None:
            how = asking.options()
        result = trainer.reader.pull_into(
            trainer.run,
            self._packed.tensors,
            step=step,
            timeout=left(deadline),
            dtype=self._packed.dtype,
            rank_progress=progress,
            **how,
        )
        if asking is not None:
            asking.came(result)
        self._packed.settle()
        return result

    def touched(self) -> None:
        self._packed.tensors.touched()


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
        summary = Summary({str(result.world_id)}, self._incarnations)
        summary.add(result, self._shadow.asked)
        summary.install = time.monotonic() - start
        summary.path += f"{relayed}, read ahead into {self._shadow.place}"
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
        self.shadow: Shadow | None = None
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


@dataclass
class Comparison:
    """What a worker's model holds, beside what is published."""

    step: int
    #: That hold what is published.
    modules: int = 0
    tensors: int = 0
    bytes: int = 0
    #: Paths of parameters and buffers that hold something else.
    different: list[str] = field(default_factory=list)
    #: Modules of which nothing shows what their kernels use.
    unseen: list[str] = field(default_factory=list)
    #: Parameters that no update fills, by ``keep``.
    kept: list[str] = field(default_factory=list)


def poison(landing: MappedLanding) -> None:
    """Overwrites everything that a pull fills. The engine's own tensors stay."""
    for path, leaf in sorted(landing.filled):
        tensor = reload.Skeleton(path, landing.module(path)).live(leaf)
        if tensor is not None and tensor.numel():
            tensor.data.fill_(math.nan if tensor.is_floating_point() else 90)
    filled = {path for path, _ in landing.filled}
    direct = sorted(path for path in filled if not landing.staged(path))
    landing.mapping.fill(lambda path, leaf: getattr(landing.module(path), leaf), direct)


def compare(landing: MappedLanding, trainer: Trainer, step: int, deadline: float) -> Comparison:
    """Reads *step* beside the model, a module at a time, and compares.

    Takes the memory of the largest module twice. Blocks until *deadline* at most; raises what a
    pull raises.
    """
    import torch

    found = Comparison(step)
    with torch.no_grad():
        for module in landing.mapping.modules:
            if module.filled and not module.fallback:
                Module(landing, module.path).compare(trainer, step, deadline, found)
    return found


class Module:
    """One module of the model, and memory of its own for what it should hold."""

    def __init__(self, landing: MappedLanding, path: str) -> None:
        import torch

        self._landing, self._path = landing, path
        self._skeleton = reload.Skeleton(path, landing.module(path))
        #: What was read, before processing.
        self.tensors: dict[str, Any] = {}
        for leaf, layout in self._skeleton.leaves.items():
            room = torch.empty(span(layout), dtype=layout.dtype, device=landing.device)
            self.tensors[leaf] = room.as_strided(layout.shape, layout.stride())
            live = self._skeleton.live(leaf)
            own = (path, leaf) not in landing.filled
            if own and live is not None and live.shape == layout.shape:
                self.tensors[leaf].copy_(live)
        for place, leaf in landing.filled:
            if place == path and leaf not in self.tensors:  # never a skeleton: a bias
                self.tensors[leaf] = torch.empty_like(self._skeleton.live(leaf))

    def compare(self, trainer: Trainer, step: int, deadline: float, found: Comparison) -> None:
        landing, path = self._landing, self._path

        def lookup(_: str, leaf: str) -> Any:
            return self.tensors[leaf]

        landing.mapping.fill(lookup, [path])
        packed = landing.mapping.pack(lookup, [path])
        result = trainer.client.pull_into(
            trainer.run,
            packed.tensors,
            step=step,
            timeout=left(deadline),
            dtype=packed.dtype,
            verify=True,
        )
        packed.settle()
        found.bytes += result.bytes
        found.tensors += result.tensors
        module = landing.module(path)
        wanted = {
            leaf: reload.as_loaded(module, leaf, tensor) for leaf, tensor in self.tensors.items()
        }
        if landing.staged(path):
            own = {leaf: self.tensors[leaf].clone() for leaf in self._skeleton.leaves}
            made = self._skeleton.result_of(own)
            wanted.update((leaf, made[leaf]) for leaf in made if leaf in own or leaf not in wanted)
        different = []
        for leaf, tensor in wanted.items():
            live = self._skeleton.live(leaf)
            if tensor is not None and live is not None and not reload.same_bytes(live, tensor):
                different.append(f"{path}.{leaf}")
        seen = not landing.derives(path) or self._asked(different)
        found.different += dict.fromkeys(different)
        if not seen:
            found.unseen.append(path)
        elif not different:
            found.modules += 1

    def _asked(self, different: list[str]) -> bool:
        """Whether the module could be asked by one-hot inputs: what differs is in *different*.

        Products of a quantized weight are no elements of it.
        """
        import torch

        weight, live = self.tensors.get("weight"), self._skeleton.live("weight")
        if weight is None or weight.dim() != 2 or str(weight.dtype) not in _ASKED:
            return False
        if live is not None and live.numel() and live.dtype != weight.dtype:
            return False
        width = weight.shape[1]
        for first in range(0, width, _BLOCK):
            count = min(_BLOCK, width - first)
            inputs = torch.zeros(count, width, dtype=weight.dtype, device=weight.device)
            inputs[torch.arange(count), first + torch.arange(count)] = 1
            made = self._skeleton.rows_of(inputs).to(weight.dtype)
            if not torch.equal(made, weight[:, first : first + count].t()):
                different.append(f"{self._path}.weight")
                break
        return True


def held(
    landing: MappedLanding, trainer: Trainer, step: int, deadline: float
) -> tuple[list[Told], Comparison]:
    """What the model holds, and how its processed modules compare with *step*.

    Only processed modules are read from the trainer. Blocks until *deadline* at most; raises what
    a pull raises.
    """
    import torch

    found: list[Told] = []
    compared = Comparison(step)
    with torch.no_grad():
        for module in landing.mapping.modules:
            if module.fallback:
                continue
            compared.different += module.unfilled()
            if not module.filled:
                continue
            tensors: dict[str, Any] | None = None
            if landing.hidden(module.path):
                beside = Module(landing, module.path)
                beside.compare(trainer, step, deadline, compared)
                if landing.staged(module.path):
                    tensors = beside.tensors
            found += held_of(
                (leaf, tensors[leaf.name] if tensors else landing.live(module.path, leaf.name))
                for leaf in module.leaves
                if leaf.sources
            )
    return found, compared
