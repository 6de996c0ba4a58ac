# SPDX-License-Identifier: Apache-2.0
"""What is said of an engine, and what a sync did to it: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fanin._http import base_url
from fanin.errors import FaninError, RequestError

KINDS = ("auto", "vllm", "sglang")
PAUSE_MODES = ("retract", "keep", "wait", "abort")
DONE = "done"
PREFETCH = (True, False, "auto")
"""Whether engines read ahead: all of them, none, those that can."""
PHASES = (
    "health", "init", "ahead", "pause", "start", "update", "finish", "verify", "resume", DONE,
)  # fmt: skip
"""In this order; ``done``: the engine has the step and generates. ``ahead`` begins with the start
of the update, if there is reading ahead."""
_LONGEST = 1e6  # seconds: engines take no longer timeout, and no clock one that is much longer


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine. Immutable.

    Args:
        url: ``http://host:port``, without ``/v1``.
        kind: "vllm" or "sglang", "auto" until the first health check has told.
        group: a name that syncs can choose by.
        world_size: its workers, None: not said.
    """

    url: str
    kind: str = "auto"
    group: str = "default"
    world_size: int | None = None


def check_group(group: object) -> str:
    """*group* if it can name one. Raises RequestError."""
    if not isinstance(group, str) or not group or len(group) > 128 or not group.isprintable():
        raise RequestError.make(f"group {group!r} is no name", "give 1 to 128 printable characters")
    return group


def check_seconds(seconds: object, name: str) -> float:
    """*seconds* if they can be a timeout, of an engine's pull too. Raises RequestError."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise RequestError.make(f"{name} {seconds!r} is not above 0", "give seconds", key=name)
    if seconds >= _LONGEST:
        raise RequestError.make(f"{name} is not below {_LONGEST:.0f}", "give seconds", key=name)
    return float(seconds)


def endpoint_of(url: str, kind: str, group: str, world_size: int | None) -> Endpoint:
    """A checked Endpoint. Raises RequestError naming what is wrong."""
    if kind not in KINDS:
        raise RequestError.make(f"kind {kind!r} is unknown", "give one of " + ", ".join(KINDS))
    number = isinstance(world_size, int) and not isinstance(world_size, bool)
    if world_size is not None and not (number and world_size > 0):
        raise RequestError.make(f"world_size {world_size!r} is not above 0", "give its workers")
    return Endpoint(base_url(url), kind, check_group(group), world_size)


@dataclass(frozen=True, slots=True)
class EndpointResult:
    """What one sync did to one engine.

    Args:
        endpoint: the engine.
        phase: the last that was reached, of PHASES. "done": nothing failed. "": nothing was asked
            of the engine, because the health check of another had failed.
        error: one sentence with the endpoint and the remedy, "" if there is none.
        paused: whether the engine is left paused, by this sync or one before.
        skipped: the engine had the step already.
        initialised: the sync told the engine where the trainer is.
        version: what the engine says its weights are now, None: not known.
        seconds: by phase.
        bytes: pulled by its workers, None: it did not tell.
        code: of the error, "" if there is none.
        step: that the engine was given, None: none.
        stall: seconds from before the pause until after the resume, None: it was not both.
        read: seconds in which its workers pulled *bytes*, None: it did not tell.
        how: the path of the bytes, where they were read to, and how much of the step they are if
            not all: ", 2.0 % of 61 GB since step 6".
        ahead: whether they were there before the pause.
        note: why nothing was compared or read ahead, though the sync was to try it. Also how many
            of its workers have told what they hold, if not all.
        verified: tensors that are served as they are trained, None: they were not compared.
    """

    endpoint: Endpoint
    phase: str
    error: str = ""
    paused: bool = False
    skipped: bool = False
    initialised: bool = False
    version: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: int | None = None
    code: str = ""
    step: int | None = None
    stall: float | None = None
    read: float | None = None
    how: str = ""
    ahead: bool = False
    note: str = ""
    verified: int | None = None

    @property
    def rate(self) -> float | None:
        """Bytes a second while they were read, None: not known."""
        return self.bytes / self.read if self.bytes is not None and self.read else None

    @property
    def ok(self) -> bool:
        """Whether the engine has the step and generates."""
        return self.phase == DONE and not self.error

    def to_json(self) -> dict[str, Any]:
        """Plain values, for an HTTP answer."""

        def rounded(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds, 6)

        same = ("phase", "code", "paused", "skipped", "initialised", "step", "bytes", "how")
        return {
            "url": self.endpoint.url,
            "kind": self.endpoint.kind,
            "group": self.endpoint.group,
            "success": self.ok,
            "message": self.error,
            "weight_version": self.version,
            "seconds": {name: rounded(took) for name, took in self.seconds.items()},
            "stall_s": rounded(self.stall),
            "read_s": rounded(self.read),
            "bytes_per_s": None if self.rate is None else round(self.rate),
            **{name: getattr(self, name) for name in (*same, "ahead", "note", "verified")},
        }


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What a sync did.

    Args:
        step: of the weights.
        version: what the engines call the weights.
        results: by URL.
        seconds: for all of it.
        run: of ``full:<run>``, which the engines pulled.
    """

    step: int
    version: str
    results: Mapping[str, EndpointResult]
    seconds: float
    run: str

    @property
    def ok(self) -> bool:
        """Whether every engine has the step and generates."""
        return all(result.ok for result in self.results.values())

    @property
    def failed(self) -> dict[str, EndpointResult]:
        """Those that have not, by URL."""
        return {url: result for url, result in self.results.items() if not result.ok}

    @property
    def bytes(self) -> int | None:
        """Pulled by all engines that told, None if none did."""
        told = [result.bytes for result in self.results.values() if result.bytes is not None]
        return sum(told) if told else None


class SyncError(FaninError):
    """Some engines did not get the step, or were not even asked.

    Args:
        result: of every engine. Those that are fine have the step and generate; the next sync of
            the same step leaves them alone. The code is that of the first failure that has one.
    """

    default_code = -300
    result: SyncResult

    @classmethod
    def of(cls, result: SyncResult, what: str, codes: Mapping[str, int]) -> SyncError:
        """The error that names each engine that failed."""
        failed = result.failed
        told = "; ".join(entry.error for entry in failed.values() if entry.error)
        known = [codes[entry.code] for entry in failed.values() if entry.code in codes]
        error = cls.make(
            f"{len(failed)} of {len(result.results)} engines {what}: {told}",
            code=known[0] if known else cls.default_code,
        )
        error.result = result
        return error
