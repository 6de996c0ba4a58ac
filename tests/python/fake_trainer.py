# SPDX-License-Identifier: Apache-2.0
"""A trainer that lives in the test's process, and the client of it, as the plugin uses one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fanin.engine.threads import Hands
from fanin.errors import (
    CancelledError,
    ConnectionFailedError,
    NotFoundError,
    PeerError,
    PullTimeoutError,
    RequestError,
    SupersededError,
    UnreachableError,
)


async def until(condition: Callable[[], object]) -> None:
    """Lets others have their turn until *condition*; a test has a minute."""
    while not condition():
        await asyncio.sleep(0.001)


def at_rest(*hands: Hands) -> None:
    """Waits until all that they were given is done."""
    deadline = time.monotonic() + 60
    while any(each.busy for each in hands):
        assert time.monotonic() < deadline
        time.sleep(0.001)


WORLD = "0123456789abcdef" * 2
OTHER_WORLD = "fedcba9876543210" * 2
ADDRESS = "127.0.0.1:6000"
CONFIG = {"r": 8, "lora_alpha": 16, "base_model_name_or_path": "org/base"}
NAMES = ("base_model.model.model.layers.0.q_proj.lora_A.default.weight",)


@dataclass
class Entry:
    name: str
    shape: tuple[int, ...] = (8, 64)
    dtype: str = "F32"

    @property
    def owners(self) -> list[Any]:
        """Each rank has all of it."""
        whole = {"offset": (0,) * len(self.shape), "extent": self.shape}
        return [SimpleNamespace(rank=rank, **whole) for rank in (0, 1)]


@dataclass
class Run:
    step: int = 1
    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))
    entries: list[Entry] = field(default_factory=lambda: [Entry(name) for name in NAMES])
    catalog_version: int = 1
    state: str = "stable"


class FakeTrainer:
    """All ranks of a trainer. `client` is the factory that takes the place of fanin.Client."""

    def __init__(self) -> None:
        self.world = WORLD
        self.incarnation, self.replica = "a", ""  # of rank 0, and of rank 1 if there is one
        self.alive = True
        self.runs = {"0": Run()}
        self.changed = threading.Condition(threading.RLock())
        self.clients: list[FakeClient] = []
        self.pulls: list[tuple[str, int, str]] = []
        self.catalogs = 0
        self.waits = self.looks = self.watching = 0
        self.mixed = False
        self.how: list[dict[str, Any]] = []
        self.spares: list[bool] = []  # what each pull asked for
        self.pulled_by: list[FakeClient] = []
        self.all_ranks = True
        self.before_pull: Callable[[], None] = lambda: None

    def commit(self, step: int, run: str = "0") -> None:
        with self.changed:
            self.runs[run].step = step
            self.changed.notify_all()

    def restart(self, world: str, step: int) -> None:
        """A new launch; connections to the old one are closed, which their next use tells."""
        with self.changed:
            self.world = world
            self.hang_up()
            self.runs = {"0": Run(step=step)}
            self.alive = True
            self.changed.notify_all()

    def end(self) -> None:
        """All ranks are gone, and nobody listens there."""
        with self.changed:
            self.alive = False
            self.hang_up()

    def hang_up(self) -> None:
        """All connections are closed."""
        with self.changed:
            for client in self.clients:
                client.hung_up = True
            self.changed.notify_all()

    def client(self, addresses: list[str], **options: Any) -> FakeClient:
        return FakeClient(self, addresses, **options)

    @property
    def connected(self) -> int:
        return sum(not client.closed for client in self.clients)


class FakeClient:
    def __init__(
        self,
        trainer: FakeTrainer,
        addresses: list[str],
        *,
        server_name: str | None,
        world_id: str | None,
        connect_timeout: float,
        path: str,
    ) -> None:
        assert connect_timeout > 0
        self.trainer, self.addresses, self.demanded = trainer, addresses, world_id
        self.closed = self.cancelled = self.hung_up = False
        self._look()
        trainer.clients.append(self)

    def _look(self) -> None:
        assert not self.closed
        if self.hung_up:
            raise ConnectionFailedError.make("rank 0 closed the connection", code=-301)
        if not self.trainer.alive:
            raise UnreachableError.make("rank 0 does not answer", address=self.addresses[0])
        if self.trainer.mixed:
            raise PeerError.make("rank 1 is of another world than rank 0", code=-402)
        if self.demanded is not None and self.demanded != self.trainer.world:
            raise PeerError.make(f"rank 0 is of world {self.trainer.world}", code=-402)

    def _run(self, run: str) -> Run:
        self._look()
        if run not in self.trainer.runs:
            raise NotFoundError.make(f"no run {run}")
        return self.trainer.runs[run]

    def ranks(self) -> list[Any]:
        here, trainer = {"world_id": self.trainer.world, "connected": True}, self.trainer
        lives = enumerate(filter(None, (trainer.incarnation, trainer.replica)))
        return [
            SimpleNamespace(rank=None, world_id="", incarnation="", connected=trainer.all_ranks),
            *(SimpleNamespace(rank=rank, incarnation=life, **here) for rank, life in lives),
        ]

    def publications(self, timeout: float) -> list[Any]:
        self._look()
        self.trainer.looks += 1
        return [
            SimpleNamespace(
                name=f"lora:{name}",
                rank=0,
                catalog_version=run.catalog_version,
                key_digest="d",
                step=run.step,
                state=run.state,
            )
            for name, run in self.trainer.runs.items()
        ]

    def metadata(self, run: str, timeout: float) -> dict[str, str]:
        return {"peft_config": json.dumps(self._run(run).config)}

    def catalog(self, run: str, timeout: float) -> list[Entry]:
        self.trainer.catalogs += 1
        return self._run(run).entries

    def _until(self, come: Callable[[], bool], timeout: float, what: str) -> None:
        """With the trainer's lock held."""
        deadline = time.monotonic() + timeout
        while not come():
            left = deadline - time.monotonic()
            if self.cancelled:
                self.cancelled = False
                raise CancelledError.make("cancelled")
            if left <= 0 or not self.trainer.changed.wait(left):
                raise PullTimeoutError.make(f"{what} did not come")

    def wait(
        self,
        run: str,
        *,
        timeout: float,
        step: int | None = None,
        at_least: int | None = None,
    ) -> int:
        self.trainer.waits += 1
        least = step if step is not None else at_least or 0
        with self.trainer.changed:
            self._until(lambda: self._run(run).step >= least, timeout, f"step {least}")
            return self._run(run).step

    def watch(self, run: str, callback: Any, timeout: float) -> None:
        self._look()
        with self.trainer.changed:
            self.trainer.watching += 1
            try:
                self._until(lambda: bool(self._look()), timeout, "its end")
            finally:
                self.trainer.watching -= 1

    def pull_adapter(
        self,
        run: str,
        directory: str,
        *,
        step: int,
        timeout: float,
        progress: Any,
        **how: Any,
    ) -> Any:
        self.trainer.before_pull()
        self.trainer.spares.append(how.pop("spare_file"))
        self.trainer.pulled_by.append(self)
        assert set(how) == {"dtype", "trust_config", "max_bytes"}
        self.trainer.how.append(how)
        with self.trainer.changed:
            self._until(lambda: self._run(run).step >= step, timeout, f"step {step}")
            now = self._run(run).step
        if now > step:
            raise SupersededError.make(f"step {step} has passed, {now} is committed")
        place = Path(directory)
        what = [self.trainer.world, run, step, how["dtype"], how["trust_config"]]
        ranks = {"0": self.trainer.incarnation}
        identity = json.dumps({"what": what, "incarnations": ranks})
        reused = place.exists()
        if reused and (place / "fanin.json").read_text() != identity:
            raise RequestError.make(f"{place} holds something else", code=-101)
        if not reused:
            place.mkdir()
            (place / "fanin.json").write_text(identity)
        if progress is not None:
            progress(100, 100)
        self.trainer.pulls.append((run, step, directory))
        phases = dict.fromkeys(("catalog", "plan", "wait", "begin", "end", "write"), 0.0)
        return SimpleNamespace(
            bytes=100,
            reused=reused,
            path="stream",
            **{**phases, "connect": 0.001, "read": 0.002},
            ranks=[{"rank": 0}, {"rank": 1}],
        )

    def cancel(self) -> None:
        with self.trainer.changed:
            self.cancelled = True
            self.trainer.changed.notify_all()

    def close(self) -> None:
        self.closed = True
