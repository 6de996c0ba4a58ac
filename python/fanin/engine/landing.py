# SPDX-License-Identifier: Apache-2.0
"""How one step of a whole model comes into a worker's parameters."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from fanin._dtypes import torch_types
from fanin._records import PullProgress, PullResult
from fanin.engine.clients import incarnations_of, restarted_between
from fanin.engine.trainers import Published, Trainer, left
from fanin.errors import PeerError, StaleError

_log = logging.getLogger("fanin.engine")

_SAY_EVERY = 5.0


@dataclass
class Origin:
    """What the pulls of one update came from. worlds: launches of the trainer. incarnations: of
    their ranks after the last pull."""

    worlds: set[str] = field(default_factory=set)
    incarnations: dict[str, str] = field(default_factory=dict)

    def came_from(self, client: Any, result: PullResult) -> None:
        """*client* has brought *result*. StaleError: since the pull before, a rank was started
        again in the same launch. Of several launches tells who has all pulls."""
        self.worlds.add(str(result.world_id))
        lives = incarnations_of(client)
        again = restarted_between((self.incarnations, lives))
        if again and len(self.worlds) == 1:
            raise StaleError.make(
                f"rank {again[0]} of the trainer was started again while step {result.step} was "
                "read",
                "update again",
            )
        self.incarnations.update(lives)


@dataclass
class Summary(Origin):
    """What an update did. bytes: that were read. Seconds: ready, until the first byte could be
    read; read and install, which may overlap; proof, until all ranks had said that it holds."""

    bytes: int = 0
    tensors: int = 0
    ready: float = 0.0
    read: float = 0.0
    install: float = 0.0
    proof: float = 0.0
    path: str = ""
    #: Bytes of the step, if what has changed since the step *since* was read alone; else 0.
    whole: int = 0
    since: int = 0
    #: Why all of it was read though deltas were asked for.
    whole_because: str = ""
    restarts: int = 0

    def add(self, result: PullResult, asked: bool = False) -> None:
        """What one more pull has brought; asked: for deltas."""
        patched = asked and not result.whole_because
        self.bytes += result.patch_bytes if patched else result.bytes
        self.tensors += result.tensors
        self.read += result.read
        self.restarts += result.restarts
        self.path = result.path
        self.whole_because = result.whole_because
        if patched:
            self.whole, self.since = result.bytes, result.base_step

    def as_dict(self) -> dict[str, Any]:
        """As plain values, which JSON has too."""
        told = asdict(self) | {"worlds": sorted(self.worlds)}
        del told["incarnations"]  # for this worker alone
        return told

    def __str__(self) -> str:
        rate = self.bytes / self.read / 1e9 if self.read else 0.0
        again = f", {self.restarts} times begun again" if self.restarts else ""
        if self.whole_because:
            again += f"; the whole was read, because {self.whole_because}"
        changed = part_of(self.bytes, self.whole, self.since) if self.whole else ""
        return (
            f"{self.bytes / 1e6:.1f} MB of {self.tensors} tensors by {self.path}{changed} in "
            f"{self.read:.3f} s ({rate:.2f} GB/s), installed in {self.install:.3f} s, "
            f"ready after {self.ready:.3f} s, proven in {self.proof:.3f} s{again}"
        )


def part_of(read: int, whole: int, since: int) -> str:
    """ ", 2.0 % of 61 GB since step 6"."""
    size = f"{whole / 1e9:.3g} GB" if whole >= 1e9 else f"{whole / 1e6:.3g} MB"
    return f", {read / whole:.1%} of {size} since step {since}".replace("%", " %")


class Progress:
    """Says in the log how far a long update is, and which rank it waits for: a pull's
    *rank_progress*. done, total: bytes, 0: not known."""

    def __init__(self, step: int, total: int) -> None:
        self._step, self.total, self._before = step, total, 0
        self.done = 0
        self._start = self._said = time.monotonic()

    def __call__(self, told: PullProgress) -> None:
        now = time.monotonic()
        self.done = done = told.bytes_done + self._before
        if now - self._said < _SAY_EVERY:
            return
        self._said = now
        rate = done / (now - self._start)
        rest = f", {max(self.total - done, 0) / rate:.0f} s to go" if rate and self.total else ""
        _log.info(
            "fanin: step %d: %.0f of %.0f MB, %.2f GB/s%s%s",
            self._step,
            done / 1e6,
            self.total / 1e6,
            rate / 1e9,
            rest,
            f"; waits for {told.slowest}" if told.slowest else "",
        )

    def add(self, done: int) -> None:
        """A part has come; what follows is counted from here."""
        self._before += done


class Landing(ABC):
    """One model of one worker, and how it is filled."""

    #: Modules that vLLM's own loader fills, where that is known.
    by_loader: tuple[str, ...] = ()

    @abstractmethod
    def pull(
        self, trainer: Trainer, step: int, deadline: float, writing: Callable[[], None]
    ) -> Summary:
        """Brings *step* into the parameters, all of it, or raises.

        writing is called before the first byte of a parameter is written. When this raises, the
        model's tensors are where its kernels expect them. Blocks until *deadline* at most, or a
        little longer for what is installed then.
        """

    def touched(self) -> None:  # noqa: B027
        """Something else than :meth:`pull` has written the model, or will."""

    def reach(self, trainer: Trainer, deadline: float) -> None:  # noqa: B027
        """Makes ready what a pull needs: the plan, and the ranks' device memory in this process.

        So the first update does not wait for it. Reads no weights. Raises as a pull.
        """

    def close(self) -> None:  # noqa: B027
        """Releases memory that is only there for updates."""


def torch_dtype_of(name: str) -> Any:
    """The torch.dtype of safetensors' name. Raises PeerError if PyTorch has none."""
    if (found := torch_types().get(name)) is not None:
        return found
    raise PeerError.make(
        f"the trainer publishes {name}, and this PyTorch has no such dtype", "cast it there"
    )


def groups_of(names: Iterable[str]) -> list[list[str]]:
    """Names by decoder layer: those without a number first, then by their outermost number.

    The embedding comes before all layers, and norm and head after them are in a group of their
    own at the end.
    """
    before: list[str] = []
    after: list[str] = []
    layers: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            layers.setdefault((".".join(parts[:at]), int(parts[at])), []).append(name)
        elif "embed" in name:
            before.append(name)
        else:
            after.append(name)
    ordered = [layers[key] for key in sorted(layers)]
    return [group for group in [before, *ordered, after] if group]


def lend(
    trainer: Trainer,
    published: Published,
    names: Iterable[str],
    deadline: float,
    device: Any,
    came: Callable[[PullResult], None],
    **options: Any,
) -> Iterator[tuple[str, Any]]:
    """Whole tensors for an engine's own loader, a decoder layer at a time.

    One exact step has the same bytes in every pull from the same lives of the ranks.

    Args:
        came: told of each pull, before its tensors are given.
        options: of ``pull_into``, the step among them.
    """
    import torch

    entries = {entry.name: entry for entry in published.entries}
    for group in groups_of(names):
        # New memory each time: an engine may keep what a module was given until it is complete.
        tensors = {}
        for name in group:
            entry = entries[name]
            dtype = torch_dtype_of(entry.dtype)
            tensors[name] = torch.empty(entry.shape, dtype=dtype, device=device)
        came(trainer.client.pull_into(trainer.run, tensors, timeout=left(deadline), **options))
        yield from tensors.items()
