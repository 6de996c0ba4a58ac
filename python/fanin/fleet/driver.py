# SPDX-License-Identifier: Apache-2.0
"""How an engine is asked: one method a phase, every one with an absolute deadline. Requests to it,
and errors that name it and the remedy."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fanin._http import FAILURES, Reply, ask_json, checked_key
from fanin.engine.landing import part_of
from fanin.errors import (
    ConnectionFailedError,
    FaninError,
    PeerError,
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


Tell = Callable[[int, int], None]
"""Is told bytes and of how many, while something is read."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What an engine says that an update did.

    Args:
        bytes: of all its workers.
        seconds: of the slowest worker, reading.
        how: the path, and where the bytes were read to.
        worlds: the launches of the trainer that the weights are of. Empty: the engine does not
            tell.
        workers: that told; None: not known.
        external: some of what the engine computes lies outside of it.
        drafts: the engine has a draft model.
        basis: another text after each init, sleep and reload. "": the engine does not tell.
        whole: bytes of the step, if what has changed was read alone; 0: all was read.
        since: the step since which that has changed.
    """

    step: int
    bytes: int
    seconds: float
    how: str = ""
    worlds: frozenset[str] = frozenset()
    workers: int | None = None
    external: bool = False
    drafts: bool = False
    basis: str = ""
    whole: int = 0
    since: int = 0

    def way(self) -> str:
        """*how*, and how much of the step was read if not all."""
        return self.how + (part_of(self.bytes, self.whole, self.since) if self.whole else "")


def launches(told: Mapping[str, Any]) -> frozenset[str]:
    """Of what an engine tells of its weights: Pulled.worlds."""
    worlds = told.get("worlds")
    return frozenset(map(str, worlds) if isinstance(worlds, list) else ())


class Driver(ABC):
    """One engine. One thread at a time; each call blocks until the deadline at most.

    All raise FaninError. Callers add the phase and the engine's address, by :meth:`Wire.asked`.
    """

    kind = ""
    reads_ahead = False

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    @abstractmethod
    def check_options(self, options: Options) -> None:
        """Raises RequestError if this kind of engine cannot do that. Does not block."""

    @abstractmethod
    def health(self, deadline: float) -> str:
        """The version of the engine's weights."""

    def holds(self, step: int, world: str, deadline: float) -> bool:
        """Whether all workers say that they hold *step* of that launch of the trainer.

        True also of an engine that does not tell: of such the version is all that is known.
        """
        del step, world, deadline
        return True

    def ahead(self, step: int, deadline: float, tell: Tell) -> str:
        """Has all workers read the step beside the model, in an update that is open.

        "" when all of it is there; else why it will not be, and the update is an ordinary one: it
        may have been closed. Raises also SupersededError: then no update can bring the step.
        """
        raise NotImplementedError

    @abstractmethod
    def pause(self, options: Options, deadline: float) -> None:
        """No request is worked on from here to :meth:`resume`."""

    @abstractmethod
    def init(self, info: InitInfo, deadline: float) -> None:
        """Tells it where the trainer is."""

    @abstractmethod
    def start(self, may_be_open: bool, deadline: float) -> None:
        """Opens an update. may_be_open: an earlier one may not have been closed."""

    @abstractmethod
    def update(self, info: InitInfo, step: int, options: Options, deadline: float) -> None:
        """Has all workers pull the step."""

    @abstractmethod
    def finish(self, step: int, version: str, options: Options, deadline: float) -> Pulled:
        """Closes the update; the engine's version is *version* and its workers hold *step* then, as
        they say themselves."""

    def update_draft(self, step: int, version: str, options: Options, deadline: float) -> None:
        """A whole update of the engine's draft model, of the run that :meth:`init` has told."""
        raise NotImplementedError

    def disown(self, why: str, deadline: float) -> None:
        """Has the engine refuse all requests, also once it is resumed. One that cannot stays
        paused.
        """
        del why, deadline

    @abstractmethod
    def resume(self, deadline: float) -> None:
        """Generation goes on."""

    def _proven(self, version: str, deadline: float) -> None:
        said = self.health(deadline)
        if said != version:
            raise PeerError.make(
                f"{self.wire.url} says that its weights are {said!r} after {version!r} was"
                " committed",
                "see that nobody else updates this engine, then sync again",
            )

    def _holding(self, pulled: Pulled | None, step: int) -> Pulled:
        """Raises PeerError unless *step* is what the workers say that they hold."""
        if pulled is None or pulled.step != step:
            said = "nothing" if pulled is None else f"step {pulled.step}"
            raise PeerError.make(
                f"{self.wire.url}: its workers say that they hold {said}, after step {step} was"
                " pulled",
                "see that nobody else updates this engine, then sync again",
            )
        return pulled

    def _of_one_launch(self, pulled: Pulled, remedy: str) -> Pulled:
        """Raises PeerError unless the workers say of which launch of the trainer they have it.
        remedy: what to do where they say nothing of it."""
        if len(pulled.worlds) == 1:
            return pulled
        problem = "do not say of which launch of the trainer it is"
        if pulled.worlds:
            several = ", ".join(sorted(pulled.worlds))
            problem = f"have it of different launches of the trainer: {several}"
            remedy = "the trainer was started again meanwhile: sync again"
        raise PeerError.make(
            f"{self.wire.url}: its workers hold step {pulled.step}, and {problem}", remedy
        )

    def _version(self, reply: Reply, path: str, remedy: str) -> str:
        if reply.status != 200:
            raise self.wire.refusal(reply, path, remedy)
        body = reply.json()
        version = body.get("weight_version") if isinstance(body, dict) else None
        if not isinstance(version, str):
            raise PeerError.make(
                f"{self.wire.url}{path} does not say a weight_version: {reply.reason}",
                "check the URL, and that this is the engine that you mean",
            )
        return version
