# SPDX-License-Identifier: Apache-2.0
"""The routes over HTTP: a server of its own, or mounted in a trainer's ASGI application.

::

    server = SyncServer(Service(registry), port=8700)   # a thread; loopback
    app.mount("/", asgi_app(Service(registry)))         # FastAPI, Starlette
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fanin._otel import within
from fanin.errors import HostError, RequestError
from fanin.info import is_loopback

from .service import Service

__all__ = ["SyncServer", "asgi_app"]

_MAX_BODY = 1 << 20
_IDLE = 60.0  # seconds that a connection may be silent in the midst of a request


class SyncServer:
    """The routes on a port, in threads of this process, by the standard library only.

    bind: numeric address to listen on. port: 0: one that the system chooses. A server that others
    can reach needs the service's api_key: whoever may add an engine and sync it decides where
    requests of this process go. Any thread. Raises RequestError, HostError if it cannot listen.
    """

    def __init__(self, service: Service, *, bind: str = "127.0.0.1", port: int = 0) -> None:
        if not is_loopback(bind) and not service.guarded:
            raise RequestError.make(
                f"{bind} can be reached by others, and nothing is asked of them",
                "give an api_key, or bind 127.0.0.1",
                address=bind,
            )

        class Handler(_Handler):
            answering = service

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET

        try:
            self._server = Listener((bind, port), Handler)
        except (OSError, OverflowError) as error:
            raise HostError.make(
                f"cannot listen on {bind}, port {port}: {error}",
                "choose another port, or 0",
                address=bind,
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="fanin-sync http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """For clients on this host."""
        host = str(self._server.server_address[0])
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Listens no longer; a sync that is under way ends by itself. Twice is safe."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def wait(self) -> None:
        """Blocks until :meth:`close`."""
        self._thread.join()

    def __enter__(self) -> SyncServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE
    answering: Service

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > _MAX_BODY:
            self.close_connection = True
            self._send(413, {"detail": f"a body has a length, and {_MAX_BODY} bytes at most"})
            return
        self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        authorization = self.headers.get("Authorization", "")
        with within(self.headers):
            answer = self.answering.answer(self.command, path, body, authorization)
        self._send(*answer)

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the caller has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Syncs are logged where they are made."""


_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def asgi_app(service: Service) -> Callable[[_Scope, _Receive, _Send], Awaitable[None]]:
    """An ASGI application with the routes, to be mounted or served. Syncs run in threads."""

    async def app(scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        body = await _body_of(receive)
        if body is None:
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
    """None: it is too large."""
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MAX_BODY:
            return None
        if message["type"] != "http.request" or not message.get("more_body"):
            return body
