# SPDX-License-Identifier: Apache-2.0
"""In front of vLLM's own route that names a trainer, ``/init_weight_transfer_engine``.

vLLM's API key guards what is below ``/v1`` and a few paths beside. Whoever reaches the port would
else choose whose weights the engine serves, and where its workers write.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from fanin.engine.faults import body_of, status_of
from fanin.errors import FaninError, RequestError

UNAUTHORIZED = {"error": "Unauthorized"}
"""The body of a 401, which is vLLM's own."""

_PATH = "/init_weight_transfer_engine"
_MOST = 1 << 20

Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[Any]]


def shows_key(keys: Sequence[str], authorization: str | None) -> bool:
    """Whether a request's Authorization header bears one of the engine's keys."""
    scheme, _, token = (authorization or "").partition(" ")
    given = token.encode()
    good = [hmac.compare_digest(given, key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(good)


class RouteAuth:
    """Lets all pass until :meth:`close`."""

    def __init__(self) -> None:
        self._keys: Sequence[str] = ()
        self._check: Callable[[dict[str, Any]], None] | None = None

    def stand_before(self, app: Any) -> None:
        """Puts itself before the route, if *app*, a FastAPI application, has it.

        Not as a middleware, which would have to know all forms of a path that lead to a route.
        """
        for route in app.routes:
            if getattr(route, "path", None) == _PATH:
                route.app = self._before(route.app)

    def close(self, keys: Sequence[str], check: Callable[[dict[str, Any]], None]) -> None:
        """From now on a request passes with one of the *keys*; if there are none, if *check*,
        which is given its ``init_info``, raises no FaninError."""
        self._keys, self._check = keys, check

    def _before(self, inner: Any) -> Any:
        async def door(scope: Any, receive: Receive, send: Send) -> None:
            if self._check is not None and self._keys:
                authorization = dict(scope["headers"]).get(b"authorization", b"")
                if not shows_key(self._keys, authorization.decode("latin-1")):
                    return await _answer(send, 401, UNAUTHORIZED)
            elif self._check is not None:
                body = await _read(receive)
                if body is None:
                    return None
                receive = _again(body, receive)
                try:
                    _look(body, self._check)
                except FaninError as error:
                    status = 413 if len(body) > _MOST else status_of(error)
                    return await _answer(send, status, body_of(error))
            return await inner(scope, receive, send)

        return door


async def _read(receive: Receive) -> bytes | None:
    """A request's body, or more of it than may be; None: the caller has gone."""
    body, more = b"", True
    while more and len(body) <= _MOST:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """*receive* for whoever reads the body after it was read."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again


def _look(body: bytes, check: Callable[[dict[str, Any]], None]) -> None:
    """Raises FaninError for a body that may not pass. What is no init_info vLLM refuses."""
    if len(body) > _MOST:
        raise RequestError.make(
            f"the body of {_PATH} is longer than {_MOST} bytes",
            "name the trainer by the path of its nixl_info.json",
        )
    try:
        request = json.loads(body)
    except ValueError:
        return
    except RecursionError:
        raise RequestError.make(
            f"the body of {_PATH} is nested too deeply", "send what init_info takes"
        ) from None
    info = request.get("init_info") if isinstance(request, dict) else None
    if isinstance(info, dict):
        check(info)


async def _answer(send: Send, status: int, body: Any) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
