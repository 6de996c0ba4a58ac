# SPDX-License-Identifier: Apache-2.0
"""The trainer that one worker pulls whole models from, and what it publishes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from fanin._quantization import QUANTIZATION
from fanin.config import engine_credentials, inference_setting
from fanin.engine.clients import Source, Target
from fanin.errors import CancelledError, FaninError, PullTimeoutError, SupersededError
from fanin.info import secret_arguments

_log = logging.getLogger("fanin.engine")

_CONNECT = 10.0


@dataclass(frozen=True)
class Published:
    """What a run's ranks publish.

    entries: the catalog, :class:`fanin.client.Entry` each. metadata: as the trainer set it.
    digest: of the key table, which all ranks have in common. world: 32 hex digits.
    """

    entries: tuple[Any, ...]
    metadata: dict[str, str]
    digest: str
    world: str

    def layout(self) -> tuple[Any, ...]:
        """What a mapping depends on: names, dtypes and shapes."""
        return tuple((entry.name, entry.dtype, tuple(entry.shape)) for entry in self.entries)

    def names(self) -> frozenset[str]:
        """Of the tensors."""
        return frozenset(entry.name for entry in self.entries)

    @property
    def config(self) -> str | None:
        """The model's config.json, None: the trainer does not tell it."""
        return self.metadata.get("config")

    @cached_property
    def quantization(self) -> str | None:
        """The quantization_config by which the trainer has quantized, None: it does not tell it.

        Of a trainer that publishes fp8 tensors of its own, what its model's configuration has.
        """
        told = self.metadata.get(QUANTIZATION)
        if told is None and any(entry.dtype.startswith("F8_") for entry in self.entries):
            told = _quantization_in(self.config)
        return told

    def same_model(self, other: Published) -> bool:
        """Whether what was found out about *other* is so of this."""
        alike = self.config == other.config and self.quantization == other.quantization
        return alike and self.layout() == other.layout()


def _quantization_in(config: str | None) -> str | None:
    try:
        fields = json.loads(config or "{}")
    except ValueError:
        return None
    told = fields.get("quantization_config") if isinstance(fields, dict) else None
    return None if told is None else json.dumps(told)


def without(published: Published, patterns: Iterable[str]) -> Published:
    """*published*, but for tensors with names of these patterns: loaders refuse some by name."""
    entries = tuple(
        entry
        for entry in published.entries
        if not any(fnmatchcase(entry.name, pattern) for pattern in patterns)
    )
    return replace(published, entries=entries)


class Trainer:
    """A client of one trainer, made anew when the trainer is somewhere else. One thread.

    Args:
        source: where the trainer is; a path is read at each :meth:`ready`.
        run: the publication.
        factory: makes a connected client; :class:`fanin.Client` unless a test says otherwise.
        relay: whom what is read ahead is handed on to: "host", or networks; None: nobody.
        lease: most seconds that :meth:`release` waits for those who read.
    """

    def __init__(
        self,
        source: Source,
        run: str,
        factory: Callable[..., Any] | None = None,
        relay: str | None = None,
        lease: float = 1.0,
    ) -> None:
        self.source = source
        self.run = run
        self.relay, self._lease = relay, lease
        self._place = inference_setting("place") if relay is not None else None
        self._factory = factory
        self._relay: Any = None
        self._how: dict[str, Any] = {}
        self._client: Any = None
        self._target: Target | None = None
        self._published: Published | None = None

    @property
    def client(self) -> Any:
        """The connected client; :meth:`ready` comes first."""
        assert self._client is not None
        return self._client

    @property
    def published(self) -> Published:
        """What :meth:`ready` has found last."""
        assert self._published is not None
        return self._published

    @property
    def reader(self) -> Any:
        """What fills memory that is left alone afterwards: the client, or a relay, which hands it
        on. :meth:`ready` comes first."""
        assert self._target is not None
        if self.relay is None:
            return self.client
        if self._relay is None:
            from fanin.relay import Relay

            network = None if self.relay == "host" else self.relay
            how = {"network": network, "place": self._place, "lease": self._lease, **self._how}
            self._relay = Relay(list(self._target.addresses), **how)
        return self._relay

    def release(self) -> None:
        """Hands nothing on any more: the memory may be written. Blocks at most the lease."""
        if self._relay is not None:
            self._relay.release()

    def cancel(self) -> None:
        """Ends the call of another thread. Where there is none, the next one ends so."""
        for one in (self._client, self._relay):
            if one is not None:
                one.cancel()

    def ready(self, deadline: float, step: int | None = None) -> Published:
        """Connects, or connects again, and says what is published now.

        step: waits for this one first, with which names may come that were not there before; None:
        for any. Blocks until *deadline* (of time.monotonic) at most. Raises as
        :class:`fanin.Client`, and what reading a nixl_info.json raises.
        """
        target = self.source.resolve()
        if self._client is None or target != self._target:
            self.close()
            self._connect(target, deadline)
        digest, world = self._look(deadline, step)
        known = self._published
        if known is None or (known.digest, known.world) != (digest, world):
            if known is not None and known.world != world:
                _log.info("fanin: the trainer of %s was started again", self.source.text)
            client = self.client
            entries = tuple(client.catalog(self.run, timeout=left(deadline), owners=False))
            metadata = dict(client.metadata(self.run, timeout=left(deadline)))
            known = self._published = Published(entries, metadata, digest, world)
        return known

    def _connect(self, target: Target, deadline: float) -> None:
        factory = self._factory
        if factory is None:
            from fanin.client import Client

            factory = Client
        self._how = {
            "server_name": target.server_name,
            "world_id": target.world_id,
            "connect_timeout": min(_CONNECT, left(deadline)),
            **(engine_credentials().arguments() or secret_arguments(target.secret_file)),
        }
        if (path := inference_setting("path")) is not None:
            self._how["path"] = path
        self._client = factory(list(target.addresses), **self._how)
        self._target = target

    def _look(self, deadline: float, step: int | None) -> tuple[str, str]:
        """The key table's digest and the world, of whoever answers first."""
        client = self.client
        try:
            # Without a step: for a first commit, which list does not wait for.
            client.wait(self.run, step=step, timeout=left(deadline))
            seen = [one for one in client.publications(left(deadline)) if one.name == self.run]
            worlds = [one.world_id for one in client.ranks() if one.connected]
        except (SupersededError, PullTimeoutError, CancelledError):
            raise  # the connections are as good as ever
        except FaninError:
            self.close()
            raise
        digest = max((one.key_digest for one in seen), default="")
        return digest, worlds[0] if worlds else ""

    def close(self) -> None:
        """Releases the connections; the next :meth:`ready` makes new ones."""
        client, self._client = self._client, None
        relay, self._relay = self._relay, None
        for one in (client, relay):
            if one is not None:
                one.close()


def left(deadline: float) -> float:
    """Seconds until *deadline* (of time.monotonic). Raises PullTimeoutError if it has passed."""
    rest = deadline - time.monotonic()
    if rest <= 0:
        raise PullTimeoutError.make(
            "the update's time is over", "give init_info a longer timeout", key="timeout"
        )
    return rest
