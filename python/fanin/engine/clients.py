# SPDX-License-Identifier: Apache-2.0
"""Connections to trainers, kept between pulls.

A client is used by one pull at a time, so there are several of each trainer; one that waits for
its step has none of them (see :mod:`fanin.engine.waits`), and a trainer that does not answer
holds up no other. Each of them demands the world that it was made for: a trainer that was started
again is another world, and bytes of it never go into a directory of the old one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fanin._cover import uncovered
from fanin._options import Credentials
from fanin.errors import (
    CancelledError,
    ConnectionFailedError,
    FaninError,
    NotFoundError,
    PeerError,
    PullAgainError,
    PullTimeoutError,
    RequestError,
)
from fanin.info import addresses_of, is_path, read_info, secret_arguments

MAX_CLIENTS = 8
"""Connected clients of one trainer at a time, busy and idle ones; and idle ones of all trainers."""

_CONNECT = 5.0
_NO_CREDENTIALS = Credentials()

Factory: TypeAlias = Callable[..., Any]


def remaining(deadline: float) -> float:
    """Seconds until *deadline* (of time.monotonic). Raises PullTimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise PullTimeoutError.make("the pull's time is over", "give it a longer timeout")
    return left


@dataclass(frozen=True)
class Target:
    """A trainer as it is to be found now.

    world_id: 32 hex digits that are demanded, or None. secret_file: that its nixl_info.json names.
    """

    addresses: tuple[str, ...]
    server_name: str | None = None
    world_id: str | None = None
    secret_file: str | None = None

    @property
    def key(self) -> tuple[tuple[str, ...], str | None]:
        return self.addresses, self.server_name


@dataclass(frozen=True)
class Source:
    """What somebody said of where the trainer is: its addresses, or the path of a file.

    text: for humans, and what two equal sources have in common.
    """

    text: str
    addresses: tuple[str, ...] = ()
    path: str | None = None
    server_name: str | None = None

    @classmethod
    def of(cls, trainer: Any, server_name: str | None = None) -> Source:
        """From a path, ``"host:port,host:port"``, ``["host:port", ...]`` or ``[[host, port],
        ...]``.

        A path's file is not read here but at each pull. Raises RequestError.
        """
        if isinstance(trainer, str) and trainer.strip() and is_path(trainer):
            return cls(trainer, path=trainer, server_name=server_name)
        if not isinstance(trainer, (str, list, tuple)):
            raise RequestError.make(
                f"trainer_addresses is {type(trainer).__name__}",
                'give ["host:port", ...], [["host", port], ...] or the path of a nixl_info.json',
                key="trainer_addresses",
            )
        addresses = tuple(addresses_of(trainer))
        return cls(",".join(addresses), addresses=addresses, server_name=server_name)

    def resolve(self) -> Target:
        """Where the trainer is now; reads the file. Raises as :func:`fanin.info.read_info`."""
        if self.path is None:
            return Target(self.addresses, self.server_name)
        info = read_info(self.path)
        return Target(
            tuple(info.addresses),
            self.server_name or info.server_name,
            info.world_id,
            info.secret_file,
        )


def incarnations_of(client: Any) -> dict[str, str]:
    """Of each rank that a client is connected to, as fanin.json has them. Does not block."""
    return {
        str(one.rank): str(one.incarnation)
        for one in client.ranks()
        if one.connected and one.rank is not None
    }


def restarted_between(pulls: Iterable[Mapping[str, str]]) -> tuple[str, int, int] | None:
    """The rank that was started again between two of several pulls of a launch, and the numbers of
    these; None if none was. It may have other bytes under the number of a step.

    pulls: what :func:`incarnations_of` said after each: not every one has met all ranks.
    """
    met: dict[str, tuple[int, str]] = {}
    for number, lives in enumerate(pulls):
        for rank, life in lives.items():
            before, known = met.setdefault(rank, (number, life))
            if known != life:
                return rank, before, number
    return None


def is_outlived(client: Any, run: str, then: Mapping[str, str], deadline: float) -> bool:
    """Whether the bytes of a step may be others than when the ranks were those of *then*.

    A rank that was started again may have other bytes of the same step. As the C library judges
    directories, that does not matter if the ranks that are still the same hold all of the run.
    Asks *client*'s ranks only if one is another; if they do not say, the bytes may be others.
    """
    now = incarnations_of(client)
    same = {int(rank) for rank, incarnation in now.items() if then.get(rank) == incarnation}
    if not same or len(same) == len(now):
        return len(same) < len(now)
    try:
        entries = client.catalog(run, timeout=remaining(deadline))
    except FaninError:
        return True
    return any(
        uncovered(entry.shape, ((o.offset, o.extent) for o in entry.owners if o.rank in same))
        for entry in entries
    )


class ClientPool:
    """Clients by trainer and world, at most *limit* of a trainer. Any thread.

    factory: makes a connected client; :class:`fanin.Client`, whose arguments it gets.
    path: how bytes travel, as :class:`fanin.Client` takes it. credentials: this engine's own; where
    it has none a trainer's nixl_info.json may name a secret.
    """

    def __init__(
        self,
        factory: Factory | None = None,
        *,
        path: str = "auto",
        limit: int = MAX_CLIENTS,
        credentials: Credentials = _NO_CREDENTIALS,
    ) -> None:
        self._factory = factory
        self._path = path
        self._credentials = credentials
        self._limit = limit
        self._changed = threading.Condition()
        # A key is (trainer, what it is shown, world).
        self._idle: list[tuple[Any, Any]] = []  # (key, client), the longest unused first
        self._busy: dict[Any, Any] = {}  # client: key
        self._making: list[Any] = []  # their keys
        self._worlds: dict[Any, str] = {}
        self._closed = False

    def connect(self, target: Target, world: str | None, deadline: float) -> Any:
        """A client of the caller's own, who closes it; it is not counted. Blocks for connecting."""
        factory = self._factory
        if factory is None:
            # Not at import: it loads libfanin, and workers that never pull need none.
            from fanin.client import Client

            factory = Client
        return factory(
            list(target.addresses),
            server_name=target.server_name,
            world_id=world,
            connect_timeout=min(_CONNECT, remaining(deadline)),
            path=self._path,
            **self._arguments(target),
        )

    def _arguments(self, target: Target) -> dict[str, Any]:
        return self._credentials.arguments() or secret_arguments(target.secret_file)

    def key_of(self, target: Target) -> tuple[Any, ...]:
        """What clients of *target*, and what they find there, are kept by. Does not block."""
        # One that shows nothing is shown nothing: it does not know that its ranks are the trainer.
        return target.key, tuple(sorted(self._arguments(target).items()))

    def shown(self, target: Target) -> str:
        """What ranks of *target* over a network are shown, for humans; "": nothing that it knows
        of. Does not block."""
        given = self._arguments(target)
        for name, kind in (("secret_file", "the secret"), ("tls_cert", "the certificate")):
            if name in given:
                return f"{kind} {given[name]}"
        return ""

    def discover(self, target: Target, deadline: float) -> str:
        """The world that answers at *target* now, 32 hex digits.

        Blocks for connecting, until *deadline*. Raises as :class:`fanin.Client`.
        """
        with self.meet(target, deadline) as (_, world):
            return world

    @contextlib.contextmanager
    def meet(self, target: Target, deadline: float) -> Iterator[tuple[Any, str]]:
        """As :meth:`discover`, with a client of that world for the block."""
        with contextlib.closing(self.connect(target, None, deadline)) as client:
            worlds = [str(info.world_id) for info in client.ranks() if info.rank is not None]
            if not worlds:
                raise PeerError.make(
                    "no rank said which world it is of", "look at the trainer's log"
                )
            with self._changed:
                self._worlds[self.key_of(target)] = worlds[0]
            yield client, worlds[0]

    def world_of(self, target: Target, deadline: float) -> str:
        """The world that *target* names or that was last seen there; else :meth:`discover`."""
        with self._changed:
            world = target.world_id or self._worlds.get(self.key_of(target))
        return world or self.discover(target, deadline)

    def forget(self, target: Target) -> None:
        """The trainer at *target* is another than before: drops what is known and idle."""
        gone = self.key_of(target)
        with self._changed:
            self._worlds.pop(gone, None)
            old = [client for key, client in self._idle if key[:2] == gone]
            self._idle = [pair for pair in self._idle if pair[0][:2] != gone]
            self._changed.notify_all()
        for client in old:
            client.close()

    @contextlib.contextmanager
    def borrow(
        self,
        target: Target,
        world: str,
        deadline: float,
        prefer: Callable[[Any], bool] | None = None,
    ) -> Iterator[Any]:
        """A client for this thread alone, connected to *world*.

        prefer: which idle one would be best; quick, and calls nothing of the pool. Blocks until
        one is free and connected, until *deadline*. It is closed, not kept, if the body raises
        anything that may leave its connections in doubt.
        """
        key = (*self.key_of(target), world)
        client = self._take(key, deadline, prefer)
        if client is None:
            client = self._make(key, target, world, deadline)
        keep = False
        try:
            yield client
            keep = True
        except FaninError as error:
            # These say something of the request or the moment; the connections are sound.
            keep = isinstance(error, (NotFoundError, RequestError, PullAgainError))
            keep = keep and not isinstance(error, CancelledError)
            raise
        finally:
            self._give_back(key, client, keep)

    def _take(self, key: Any, deadline: float, prefer: Callable[[Any], bool] | None = None) -> Any:
        """An idle client of *key*; None: the caller may make one, and is counted for it."""
        victim = None
        with self._changed:
            while True:
                if self._closed:
                    raise CancelledError.make("the engine is shutting down", "")
                mine = [pair for pair in self._idle if pair[0] == key]
                best = [pair for pair in mine if prefer is not None and prefer(pair[1])]
                for pair in (best + mine)[:1]:
                    self._idle.remove(pair)
                    self._busy[pair[1]] = key
                    return pair[1]
                idle = [index for index, (k, _) in enumerate(self._idle) if k[0] == key[0]]
                if self._in_use(key) + len(idle) < self._limit:
                    self._making.append(key)
                    return None
                if idle:
                    victim = self._idle.pop(idle[0])[1]
                    self._making.append(key)
                    break
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise ConnectionFailedError.make(
                        f"all {self._limit} connections to the trainer are busy with other pulls",
                        "ask again",
                        code=-302,
                    )
        victim.close()
        return None

    def _in_use(self, key: Any) -> int:
        """Clients of the trainer of *key* that are not idle."""
        return sum(other[0] == key[0] for other in (*self._busy.values(), *self._making))

    def _make(self, key: Any, target: Target, world: str, deadline: float) -> Any:
        client = None
        try:
            client = self.connect(target, world, deadline)
        finally:
            with self._changed:
                self._making.remove(key)
                if client is not None:
                    self._busy[client] = key
                self._changed.notify_all()
        return client

    def _give_back(self, key: Any, client: Any, keep: bool) -> None:
        unwanted = [] if keep else [client]
        with self._changed:
            self._busy.pop(client, None)
            if keep and not self._closed:
                self._idle.append((key, client))
                while len(self._idle) > self._limit:
                    unwanted.append(self._idle.pop(0)[1])
            elif keep:
                unwanted.append(client)
            self._changed.notify_all()
        for one in unwanted:
            one.close()

    def close(self) -> None:
        """Cancels running pulls and closes idle clients; busy ones are closed by their pulls."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
            self._changed.notify_all()
        for client in busy:
            client.cancel()
        for _, client in idle:
            client.close()

    def stats(self) -> dict[str, int]:
        """How many clients are busy and idle."""
        with self._changed:
            return {"busy": len(self._busy) + len(self._making), "idle": len(self._idle)}
