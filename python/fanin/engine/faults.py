# SPDX-License-Identifier: Apache-2.0
"""Errors of pulls as HTTP answers, and on their way from a worker's process to the API server."""

from __future__ import annotations

from typing import Any

from fanin import errors
from fanin.errors import FaninError, RequestError

# The most special class first.
_STATUS: tuple[tuple[int, tuple[type[BaseException], ...]], ...] = (
    (404, (errors.NotFoundError, errors.SupersededError)),
    (504, (errors.PullTimeoutError, errors.StaleError)),
    (503, (errors.PullAgainError, errors.ConnectionFailedError, errors.PeerError)),
    (503, (errors.StateError,)),
    (400, (errors.RequestError,)),
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
    return next((status for status, kinds in _STATUS if isinstance(error, kinds)), 500)


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
    told, code = error, "FANIN_ERR_INTERNAL"
    if isinstance(told, FaninError):
        code = told.name
    else:
        told = FaninError.make(f"{type(error).__name__}: {error}", "see the engine's log")
    fields = {name: getattr(told, name) for name in ("remedy", "rank", "key", "address")}
    return {"error": {"code": code, "message": told.message or says(told), **fields}}


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
    texts = {name: str(wire.get(name, "")) for name in _FIELDS if name not in ("code", "rank")}
    return kind.make(texts.pop("message"), **texts, rank=wire.get("rank"), code=wire.get("code"))
