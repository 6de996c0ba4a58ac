# SPDX-License-Identifier: Apache-2.0
"""The routes over HTTP: a server of its own, or mounted in a trainer's ASGI application.

::

    server = SyncServer(Service(registry), port=8700)   # a thread; loopback
    app.mount("/", asgi_app(Service(registry)))         # FastAPI, Starlette
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fanin._http_server import Answer, HttpServer, Request
from fanin._otel import within
from fanin.errors import HostError, RequestError
from fanin.info import is_loopback

from .service import Service

_MAX_BODY = 1 << 20
_IDLE = 60.0  # seconds that a connection may be silent, and that a request may take to come
_MOST = 256  # connections


class SyncServer:
    """The routes on a port, in threads of this process, by the standard library only. Any thread.

    Args:
        service: the routes.
        bind: numeric address to listen on.
        port: 0: one that the system chooses. A server that others can reach needs the service's
            api_key. A caller that may add an engine and sync it decides where requests of this
            process go.

    Raises:
        RequestError: an argument is wrong; no api_key where others can reach the server.
        HostError: it cannot listen.
    """

    def __init__(self, service: Service, *, bind: str = "127.0.0.1", port: int = 0) -> None:
        if not is_loopback(bind) and not service.guarded:
            raise RequestError.make(
                f"{bind} can be reached by others, and nothing is asked of them",
                "give an api_key, or bind 127.0.0.1",
                address=bind,
            )

        def answering(request: Request) -> Answer:
            authorization = request.headers.get("Authorization", "")
            with within(request.headers):
                status, body = service.answer(
                    request.method, request.path, request.body, authorization
                )
            return Answer(status, json.dumps(body).encode(), "application/json")

        try:
            self._server = HttpServer(
                answering,
                bind,
                port,
                name="fanin-sync http",
                most=_MOST,
                seconds=_IDLE,
                keep=True,
                largest=_MAX_BODY,
            )
        except (OSError, OverflowError) as error:
            raise HostError.make(
                f"cannot listen on {bind}, port {port}: {error}",
                "choose another port, or 0",
                address=bind,
            ) from error

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    @property
    def url(self) -> str:
        """For clients on this host."""
        return f"http://{self._server.address}"

    def close(self) -> None:
        """Listens no longer; a sync that is under way ends by itself. Twice is safe."""
        self._server.close()

    def wait(self) -> None:
        """Blocks until :meth:`close`."""
        self._server.wait()

    def __enter__(self) -> SyncServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def asgi_app(service: Service) -> Callable[[_Scope, _Receive, _Send], Awaitable[None]]:
    """An ASGI application with the routes, to be mounted or served. Syncs run in threads.

    A peer that has gone before its request came whole is not answered, and nothing is done.
    """

    async def app(scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        body = await _body_of(receive)
        if body is None:
            return
        if len(body) > _MAX_BODY:
            status, reply = 413, {"detail": f"a body has {_MAX_BODY} bytes at most"}
        else:
            headers = {name.lower(): value for name, value in scope["headers"]}
            path = scope["path"]
            root = scope.get("root_path", "")
            path = path[len(root) :] if root and path.startswith(root) else path
            status, reply = await asyncio.to_thread(
                service.answer,
                scope["method"],
                path,
                body,
                headers.get(b"authorization", b"").decode("latin-1"),
            )
        content = json.dumps(reply).encode()
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": content})

    return app


async def _lifespan(receive: _Receive, send: _Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _body_of(receive: _Receive) -> bytes | None:
    """All of it, or more than _MAX_BODY. None: the peer has gone before all of it came."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > _MAX_BODY or not message.get("more_body"):
            return body
