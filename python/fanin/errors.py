# SPDX-License-Identifier: Apache-2.0
"""What fanin raises.

The classes say who has to act before another try makes sense:

===========================  ======================================================
:class:`RequestError`        the call is wrong: fix the arguments
:class:`PullAgainError`      this pull failed: pull again
:class:`ConnectionFailedError`  the connection is unusable: connect again
:class:`PeerError`           the trainer's ranks are wrong: fix the trainer
:class:`HostError`           this host is wrong: fix it
:class:`ProcessError`        this process is wrong: restart it
===========================  ======================================================

Every one is a :class:`FaninError` and carries the code of the C library and whatever is known of
the rank, the tensor's key and the address at fault, and what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = [
    "CancelledError",
    "ConnectionFailedError",
    "FaninError",
    "HostError",
    "NotFoundError",
    "PausedError",
    "PeerError",
    "ProcessError",
    "PullAgainError",
    "PullTimeoutError",
    "RequestError",
    "StaleError",
    "StateError",
    "SupersededError",
    "UnreachableError",
    "error_class",
    "status_name",
]

_Error = TypeVar("_Error", bound="FaninError")


def first_of(what: Iterable[object], most: int = 4, between: str = ", ") -> str:
    """The first few of a list, and how many more there are."""
    told = [str(one) for one in what]
    more = f" and {len(told) - most} more" if len(told) > most else ""
    return between.join(told[:most]) + more


# By the first code of each class, counted down from there.
_CODES = {
    -100: "ARGUMENT EXISTS NOT_FOUND STATE",
    -200: "STALE TIMEOUT CANCELLED SUPERSEDED PAUSED",
    -300: "UNREACHABLE CLOSED LIMIT AUTH",
    -400: "PROTOCOL VERSION WORLD INCOMPLETE UNSUPPORTED MISMATCH",
    -500: "IO MEMORY TRANSPORT",
    -600: "FORKED INTERNAL",
}
_NAMES = {
    first - at: f"FANIN_ERR_{name}"
    for first, names in _CODES.items()
    for at, name in enumerate(names.split())
}

# What the same call may survive without anybody changing anything: all that a later pull can
# mend, and a connection that is made anew.
_NEVER_AGAIN = frozenset((-202, -203))
_CONNECT_AGAIN = frozenset((-300, -301))


def status_name(code: int) -> str:
    """The name of a code of the C library, ``"FANIN_ERR_UNKNOWN"`` for one of a later version."""
    return _NAMES.get(code, "FANIN_ERR_UNKNOWN")


class FaninError(Exception):
    """Base of all errors of this package.

    ``str(error)`` is the message, where it happened, and the remedy, in one line.
    """

    #: The code that an error made in Python has.
    default_code = -601

    #: Code of the C library, negative: the hundred is the class.
    code: int
    #: The trainer rank at fault, None if none is.
    rank: int | None
    #: The tensor's key ``"<publication>:<name>"`` or name, ``""`` if none is at fault.
    key: str
    #: Address of the peer at fault, ``""`` if none is.
    address: str
    #: What was being done: connect, catalog, plan, wait, begin, read, end, write; or ``""``.
    phase: str
    #: What happened and why, one sentence.
    message: str
    #: What to do about it, ``""`` if nothing is known.
    remedy: str
    #: errno of the system call that failed, 0 if none did.
    sys_errno: int
    #: ``ucs_status_t`` of the UCX call that failed, 0 if none did.
    ucx_status: int

    def __init__(
        self,
        message: str = "",
        *,
        code: int | None = None,
        remedy: str = "",
        key: str = "",
        rank: int | None = None,
        address: str = "",
        phase: str = "",
        sys_errno: int = 0,
        ucx_status: int = 0,
    ) -> None:
        super().__init__(message)
        self.code = self.default_code if code is None else code
        self.rank = rank
        self.key = key
        self.address = address
        self.phase = phase
        self.message = message
        self.remedy = remedy
        self.sys_errno = sys_errno
        self.ucx_status = ucx_status

    @classmethod
    def make(
        cls: type[_Error],
        message: str,
        remedy: str = "",
        *,
        key: str = "",
        rank: int | None = None,
        address: str = "",
        code: int | None = None,
        phase: str = "",
    ) -> _Error:
        """An error that Python code found, with the code of its class unless one is given."""
        return cls(
            message, code=code, remedy=remedy, key=key, rank=rank, address=address, phase=phase
        )

    @property
    def name(self) -> str:
        """The code's name, ``"FANIN_ERR_STALE"``."""
        return status_name(self.code)

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed without anybody changing anything."""
        if self.code in _NEVER_AGAIN:
            return False
        return -300 < self.code <= -200 or self.code in _CONNECT_AGAIN

    def __str__(self) -> str:
        text = self.message or self.name
        # Most messages of the library say these themselves.
        place = []
        if self.key and not _mentions(text, self.key):
            place.append(f"key '{self.key}'")
        if self.rank is not None and not _mentions(text, f"rank {self.rank}"):
            place.append(f"rank {self.rank}")
        if self.address and not _mentions(text, self.address):
            place.append(f"address {self.address}")
        if place:
            text += f" ({', '.join(place)})"
        if self.remedy:
            text += f"; remedy: {self.remedy}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between the processes of an engine; keyword arguments would be lost.
        return _revive, (type(self), self.message, dict(self.__dict__))


def _mentions(text: str, what: str) -> bool:
    """Whether *what* is in *text*, and not as a part of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(what)}(?!\w)", text) is not None


def _revive(cls: type[FaninError], message: str, state: dict[str, Any]) -> FaninError:
    error = cls.__new__(cls, message)
    FaninError.__init__(error, message)
    error.__dict__.update(state)
    return error


class RequestError(FaninError):
    """The call is wrong: an argument, a name, a state. Fix the call."""

    default_code = -100


class NotFoundError(RequestError):
    """There is no such run, key, publication or directory."""

    default_code = -102


class StateError(RequestError):
    """Not in a state in which the call makes sense: closed, in use, no update open."""

    default_code = -103


class PullAgainError(FaninError):
    """This pull failed, and nothing is broken: pull again (or another step)."""

    default_code = -200


class StaleError(PullAgainError):
    """The weights were rewritten while they were read, as often as the pull was willing to try."""

    default_code = -200


class PullTimeoutError(PullAgainError, TimeoutError):
    """The caller's deadline passed."""

    default_code = -201


class CancelledError(PullAgainError):
    """The call was cancelled."""

    default_code = -202


class SupersededError(PullAgainError):
    """The exact step that was asked for has passed: ask for the newest one."""

    default_code = -203


class PausedError(PullAgainError):
    """The trainer's memory is offloaded for now: pull again when it is back."""

    default_code = -204


class ConnectionFailedError(FaninError):
    """The connection is unusable, or a cap or an allow-list forbids it: connect again."""

    default_code = -301


class UnreachableError(ConnectionFailedError):
    """Nobody answers at the address."""

    default_code = -300


class PeerError(FaninError):
    """The trainer's ranks contradict each other, the protocol or the caller: fix the trainer."""

    default_code = -405


class HostError(FaninError):
    """This host is wrong: a file operation, memory, a data path, the library: fix the host."""

    default_code = -500


class ProcessError(FaninError):
    """This process is wrong: a handle of the parent in a forked child, or a bug."""

    default_code = -600


_CLASSES: dict[int, type[FaninError]] = {
    kind.default_code: kind
    for kind in (
        *(NotFoundError, StateError, StaleError, PullTimeoutError, CancelledError),
        *(SupersededError, PausedError, UnreachableError),
    )
}
_FIRST = (RequestError, PullAgainError, ConnectionFailedError, PeerError, HostError, ProcessError)
_HUNDREDS: dict[int, type[FaninError]] = dict(enumerate(_FIRST, 1))


def error_class(code: int) -> type[FaninError]:
    """The class of a code of the C library; one of a later version has its hundred's class."""
    return _CLASSES.get(code) or _HUNDREDS.get(-code // 100, FaninError)
