# SPDX-License-Identifier: Apache-2.0
"""What a training loop calls when the registry lives in another process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fanin._http import FAILURES, ask_json, base_url, checked_key
from fanin._options import handed_on
from fanin.errors import (
    ConnectionFailedError,
    PeerError,
    RequestError,
    UnreachableError,
    error_class,
)

from .driver import CODES
from .endpoints import check_seconds
from .registry import Registry

# What the server needs beyond the sync's own time to say how it ended.
_EXTRA = 15.0


class SyncClient:
    """Calls a server of :class:`Service`. Any thread; no state but the address.

    Args:
        url: ``http://host:port``.
        api_key: of that server, printable ASCII. Whitespace at its ends is dropped.
        timeout: seconds for a sync.

    Raises:
        RequestError: an argument is wrong; an empty key.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 300.0) -> None:
        self.url = base_url(url)
        self.timeout = check_seconds(timeout, "timeout")
        self._api_key = checked_key(api_key)

    def add(
        self,
        host: str,
        port: int,
        *,
        world_size: int | None = None,
        pool: str = "default",
        api_key: str | None = None,
    ) -> dict[str, Any]:
        """Adds an engine that lives; twice is safe.

        Args:
            host: the engine's host.
            port: the engine's port.
            world_size: its workers; None: not said.
            pool: the group of :meth:`Registry.add`.
            api_key: the engine's. None: the one that the server has for engines, if the server asks
                its callers for a key; else none.

        Returns:
            The reply's object.

        Raises:
            RequestError: *api_key* is no key.
            FaninError: as :meth:`call`.
        """
        body: dict[str, Any] = {"host": host, "port": port, "pool": pool}
        if world_size is not None:
            body["world_size"] = world_size
        if api_key is not None:
            body["api_key"] = checked_key(api_key)
        return self.call("add_inference_endpoint", body, 60.0)

    def remove(self, host: str, port: int) -> bool:
        """Forgets an engine. False: it was not there. Raises as :meth:`call`."""
        reply = self.call("remove_inference_endpoint", {"host": host, "port": port}, 60.0)
        return reply.get("success") is True

    def list(self) -> list[dict[str, Any]]:
        """The engines. Raises as :meth:`call`."""
        found = self.call("list_inference_endpoints", {}, 60.0).get("endpoints")
        return found if isinstance(found, list) else []

    def sync_weights(
        self,
        step: int | None = None,
        *,
        pools: Sequence[str] | None = None,
        weight_version: str | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Brings a step to all engines, or to those of the pools.

        Blocks at most *timeout* and a little.

        Args:
            step: None: the newest.
            pools: the groups; None: all engines.
            weight_version: as the *version* of :meth:`Registry.sync`.
            timeout: seconds; None: the client's.
            options: what else :meth:`Registry.sync` takes: pause_mode, keep_caches, skip_dead,
                again, prefetch, verify_served, quantization, skip_modules. None: as that server was
                told.

        Returns:
            The reply's object.

        Raises:
            RequestError: *timeout* is no number of seconds above 0.
            TypeError: an option that :meth:`Registry.sync` does not take.
            FaninError: as :meth:`call`, with the sentence that names every engine that failed.
        """
        more = handed_on("sync_weights", Registry.sync, options, "urls", "version", "timeout")
        seconds = self.timeout if timeout is None else check_seconds(timeout, "timeout")
        groups = None if pools is None else [*pools]
        given = {"step": step, "pools": groups, "weight_version": weight_version, **more}
        body = {name: value for name, value in given.items() if value is not None}
        return self.call("sync_inference_weights", {**body, "timeout": seconds}, seconds + _EXTRA)

    def set_quantization(
        self, quantization: Any, skip_modules: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Chooses the run that the next syncs bring, as :meth:`Registry.set_quantization`.

        Returns:
            The reply's object, with ``run`` and its ``quantization``.

        Raises:
            FaninError: as :meth:`call`; RequestError says what the trainer publishes.
        """
        skip = None if skip_modules is None else [*skip_modules]
        body = {"quantization": quantization, "skip_modules": skip}
        return self.call("set_sync_quantization", body, 60.0)

    def call(self, route: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Posts to a route. Blocks at most *timeout* seconds.

        Args:
            route: the path.
            body: the JSON object.
            timeout: seconds.

        Returns:
            The reply's object.

        Raises:
            UnreachableError: there is no answer.
            PeerError: the answer is none of this service.
            FaninError: the answer is an error: of the class that its code says, with its sentence.
        """
        deadline = time.monotonic() + timeout
        try:
            reply = ask_json(
                "POST", self.url, f"/api/v1/{route}", body, deadline=deadline, api_key=self._api_key
            )
        except FAILURES as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise UnreachableError.make(
                f"{self.url}: {why}", "check that fanin.sync runs there", address=self.url
            ) from error
        content = reply.json()
        if reply.status == 200 and isinstance(content, dict):
            return content
        if not isinstance(content, dict):
            raise PeerError.make(
                f"{self.url} answers HTTP {reply.status}: {reply.reason}",
                "check the address: this is not fanin.sync",
                address=self.url,
            )
        code = CODES.get(reply.code)
        kind = RequestError if reply.status < 500 else ConnectionFailedError
        raise (error_class(code) if code is not None else kind).make(
            reply.reason, str(reply.error().get("remedy") or ""), address=self.url, code=code
        )
