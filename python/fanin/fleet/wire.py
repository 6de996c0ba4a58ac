# SPDX-License-Identifier: Apache-2.0
"""Requests to one engine, and errors that name it and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fanin._http import FAILURES, Reply, ask_json, checked_key
from fanin.errors import (
    ConnectionFailedError,
    FaninError,
    PullTimeoutError,
    RequestError,
    UnreachableError,
    error_class,
    status_name,
)

CHECKPOINT, UNSAID = "checkpoint", "default"
"""The version of weights that no update has brought, and what SGLang calls such."""

CODES = {status_name(code): code for code in range(-699, -99)}
"""By name, of the errors that engines pass on."""

_WITHHELD = (
    "give the engine's api_key with the request that adds it: where callers are asked for no key,"
    " the registry's own is not sent to engines that they add"
)


@dataclass(frozen=True, slots=True)
class InitInfo:
    """Where the trainer is, and how engines pull from it.

    Args:
        trainer: a path, or the ranks' addresses.
        run: of ``full:<run>``.
        timeout: seconds of a pull.
        server_name: demand this job's ranks.
        more: what vLLM's init_info takes besides. Of it SGLang takes unused, keep, config and
            external_kv.
    """

    trainer: str | tuple[str, ...]
    run: str
    timeout: float
    server_name: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """How one sync is made.

    Args:
        pause_mode: of PAUSE_MODES.
        keep_caches: what was computed with the old weights stays.
        prefetch: of PREFETCH.
        verify: compare the served with the trained tensors. True: now. "auto": if no sync has,
            since the weights came from elsewhere. False: never.
    """

    pause_mode: str = "retract"
    keep_caches: bool = False
    prefetch: bool | str = "auto"
    verify: bool | str = "auto"


class Wire:
    """Requests to one engine, whose errors name it and say what to do. Any thread.

    Raises RequestError for what is no key.

    Args:
        withheld: there is a key that this engine is not sent, for the sake of who added it.
    """

    def __init__(self, url: str, api_key: str | None = None, *, withheld: bool = False) -> None:
        self.url = url
        self.api_key = checked_key(api_key)
        self.withheld = withheld

    @contextlib.contextmanager
    def asked(self, phase: str) -> Iterator[None]:
        """Errors that are raised inside have the engine's address and the phase."""
        try:
            yield
        except FaninError as error:
            error.address, error.phase = error.address or self.url, error.phase or phase
            raise

    def get(self, path: str, deadline: float) -> Reply:
        """The answer, whatever its status. Raises UnreachableError, PullTimeoutError."""
        return self.ask("GET", path, None, deadline)

    def post(self, path: str, body: Mapping[str, Any] | None, deadline: float) -> Reply:
        """The answer, if its status is 2xx. Raises what :meth:`refusal` makes otherwise."""
        reply = self.ask("POST", path, body, deadline)
        if not 200 <= reply.status < 300:
            raise self.refusal(reply, path)
        return reply

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> Reply:
        """The answer, whatever its status. Raises UnreachableError, PullTimeoutError."""
        try:
            return ask_json(method, self.url, path, body, deadline=deadline, api_key=self.api_key)
        except TimeoutError as error:
            raise PullTimeoutError.make(
                f"{self.url}{_bare(path)}: no answer in time",
                "look into the engine's log; give the sync a longer timeout if it was at work",
            ) from error
        except FAILURES as error:
            raise UnreachableError.make(
                f"{self.url}{_bare(path)}: {error or type(error).__name__}",
                "check that the engine runs, or remove it",
            ) from error

    def refusal(self, reply: Reply, path: str, remedy: str = "") -> FaninError:
        """The error that a reply means, with what it tells of code, rank and remedy."""
        told = reply.told()
        code = CODES.get(reply.code)
        if reply.status in (401, 403):
            remedy = _WITHHELD if self.withheld else "give the engine's api_key"
        kind: type[FaninError] = RequestError if reply.status < 500 else ConnectionFailedError
        return (kind if code is None else error_class(code)).make(
            f"{self.url}{_bare(path)}: HTTP {reply.status}: {reply.reason}",
            told.get("remedy") or remedy,
            code=code,
            rank=told.get("rank"),
        )


def _bare(path: str) -> str:
    return path.partition("?")[0]
