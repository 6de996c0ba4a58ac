# SPDX-License-Identifier: Apache-2.0
"""Errors of pulls as HTTP answers, and on their way from a worker's process to the API server."""

from __future__ import annotations

from typing import Any

from fanin import errors
from fanin.errors import FaninError, RequestError

# The most special class first.
_STATUS: tuple[tuple[type[BaseException], int], ...] = (
    (errors.NotFoundError, 404),
    (errors.SupersededError, 404),
    (errors.PullTimeoutError, 504),
    (errors.StaleError, 504),
    (errors.PullAgainError, 503),
    (errors.ConnectionFailedError, 503),
    (errors.PeerError, 503),
    (errors.StateError, 503),
    (errors.RequestError, 400),
    (errors.HostError, 500),
    (errors.ProcessError, 500),
)

_FIELDS = ("code", "rank", "key", "address", "phase", "message", "remedy")


def status_of(error: BaseException) -> int:
    """The HTTP status that tells a caller who has to act.

    403: the request names a trainer that it may not; 404: no such run, or the step has passed; 503:
    the trainer is away, paused or wrong, or the engine is not ready; 504: the step did not come in
    time; 400: the request, or an adapter that this engine cannot load as it was started; 500: this
    host.
    """
    if isinstance(error, RequestError) and error.name == "FANIN_ERR_AUTH":
        return 403
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return 500


def refused_as_too_large(error: FaninError, remedy: str) -> FaninError:
    """*error*; if max_bytes refused the adapter, a RequestError with this remedy instead.

    The library's code for it is that of a trainer whose connections are all taken, and asking again
    helps there.
    """
    if error.name != "FANIN_ERR_LIMIT" or "max_bytes" not in error.remedy:
        return error
    return RequestError.make(
        error.message, remedy, key="max_bytes", code=error.code, phase=error.phase
    )


def says(error: BaseException) -> str:
    """Message, place and remedy in one line."""
    return str(error) or type(error).__name__


def body_of(error: BaseException) -> dict[str, Any]:
    """The JSON object of an error answer: ``{"error": {code, message, remedy, rank, key}}``."""
    if isinstance(error, FaninError):
        return {
            "error": {
                "code": error.name,
                "message": error.message or says(error),
                "remedy": error.remedy,
                "rank": error.rank,
                "key": error.key,
                "address": error.address,
            }
        }
    return {
        "error": {
            "code": "FANIN_ERR_INTERNAL",
            "message": f"{type(error).__name__}: {error}",
            "remedy": "see the engine's log",
            "rank": None,
            "key": "",
            "address": "",
        }
    }


def to_wire(error: BaseException) -> dict[str, Any]:
    """*error* as plain values that vLLM's processes can send to each other."""
    if not isinstance(error, FaninError):
        return {"class": "ProcessError", "message": f"{type(error).__name__}: {error}"}
    wire: dict[str, Any] = {name: getattr(error, name) for name in _FIELDS}
    wire["class"] = type(error).__name__
    return wire


def from_wire(wire: dict[str, Any]) -> FaninError:
    """The error that :func:`to_wire` was given. An unknown class becomes FaninError."""
    kind = getattr(errors, str(wire.get("class")), None)
    if not (isinstance(kind, type) and issubclass(kind, FaninError)):
        kind = FaninError
    return kind.make(
        str(wire.get("message", "")),
        str(wire.get("remedy", "")),
        key=str(wire.get("key", "")),
        rank=wire.get("rank"),
        address=str(wire.get("address", "")),
        code=wire.get("code"),
        phase=str(wire.get("phase", "")),
    )
