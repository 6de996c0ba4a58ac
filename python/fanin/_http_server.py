# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server of the standard library: few connections, with threads and deadlines."""

from __future__ import annotations

import contextlib
import errno
import http.server
import io
import json
import logging
import os
import socket
import socketserver
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, TypeAlias

from fanin._http import Until

_DEAF = 0.1  # seconds until a connection is taken again, when one could not be
_SAY_AGAIN = 60.0  # seconds until it is logged again that none could be
_REMEDIES = {
    errno.EMFILE: "raise this process' limit of open files (ulimit -n)",
    errno.ENFILE: "raise the host's limit of open files (fs.file-max)",
    errno.ENOBUFS: "free memory on this host",
    errno.ENOMEM: "free memory on this host",
}
_MORE_THREADS = "raise the limit of threads (ulimit -u, the container's pids limit)"

_log = logging.getLogger("fanin")
_servers: weakref.WeakSet[HttpServer] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Request:
    """What a peer asks. ``method``: GET, also for HEAD, or POST. ``path``: without its query."""

    method: str
    path: str
    headers: Message
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What it is told. ``kind``: the content's type. ``headers``: what else the head has."""

    status: int
    content: bytes
    kind: str
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpServer:
    """Answers requests on a port by *answering*, in threads, until :meth:`close`.

    A forked child has none of its sockets.

    Args:
        answering: called from any thread, several at once. The server calls it only when all of a
            request has come. An exception of it closes the connection and is logged. The server
            refuses a body in chunks (411).
        host: numeric address.
        port: 0: one that the system chooses.
        most: connections at a time. For one more the server closes the connection that has been
            silent longest. If all wait for answers, it closes the new one.
        seconds: that a request may take to come, and its answer to be taken.
        keep: a connection may ask again.
        largest: bytes of a request's body.
        rate: connections a second that the server takes, after twice as many at once. Others wait.

    Raises:
        OSError: the server cannot listen there.
        OverflowError: *port* is no port.
    """

    def __init__(
        self,
        answering: Callable[[Request], Answer],
        host: str,
        port: int,
        *,
        name: str,
        most: int,
        seconds: float,
        keep: bool,
        largest: int = 0,
        rate: float = 1e9,
    ) -> None:
        self._pid = os.getpid()
        self._listener = _Listener(host, port, answering, most, seconds, keep, largest, rate)
        self._thread = threading.Thread(target=self._listener.run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._listener.server_close()
            raise
        _servers.add(self)

    @property
    def host(self) -> str:
        """Where it listens, and :attr:`port`."""
        return str(self._listener.server_address[0])

    @property
    def port(self) -> int:
        """The port, also when it was the system's to choose."""
        return int(self._listener.server_address[1])

    @property
    def address(self) -> str:
        """Both: ``127.0.0.1:41234``, ``[::1]:41234``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        """Listens no longer and drops who is silent; answers that are made are still given.

        Any thread; does nothing the second time, and in a forked child.
        """
        if self._pid == os.getpid():
            self._listener.end()
            self.wait()

    def wait(self) -> None:
        """Blocks until :meth:`close`."""
        if threading.current_thread() is not self._thread:
            self._thread.join()


class _Listener(socketserver.TCPServer):
    allow_reuse_address = True

    def __init__(
        self,
        host: str,
        port: int,
        answering: Callable[[Request], Answer],
        most: int,
        seconds: float,
        keep: bool,
        largest: int,
        rate: float,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.request_queue_size = most
        self.answering, self.seconds, self.keep, self.largest = answering, seconds, keep, largest
        self._most = most
        self._rate, self._left, self._counted = rate, 2 * rate, time.monotonic()
        self._ended = threading.Event()
        self._say_from = 0.0
        self._lock = threading.Lock()
        # Since when each connection has been silent; None: it waits for an answer.
        self._open: dict[socket.socket, float | None] = {}
        super().__init__((host, port), _Handler)

    def run(self) -> None:
        while not self._ended.is_set():
            if rest := self._rest():
                self._ended.wait(rest)
                continue
            try:
                self.handle_request()
            except OSError as error:  # not even that it may wait for
                self._be_deaf(error, _REMEDIES.get(error.errno or 0, ""))
        self.server_close()

    def _be_deaf(self, why: Exception, remedy: str) -> None:
        """Takes no connection for a moment: as long as *why* lasts, each would fail.

        remedy: "" if it is no shortage, but somebody who hung up, say; that is not logged.
        """
        now = time.monotonic()
        if remedy and now >= self._say_from and not self._ended.is_set():
            self._say_from = now + _SAY_AGAIN
            address, port = self.server_address[:2]
            _log.warning(
                "fanin: HTTP requests to %s, port %d, get no answer: %s; remedy: %s",
                address,
                port,
                why,
                remedy,
            )
        self._ended.wait(_DEAF)

    def _rest(self) -> float:
        """Seconds until one more may be taken: who asks without end does not get all the time."""
        now = time.monotonic()
        self._left = min(2 * self._rate, self._left + (now - self._counted) * self._rate)
        self._counted = now
        return max(0.0, (1 - self._left) / self._rate)

    def end(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):  # ended before
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes run()
        with self._lock:
            silent = [peer for peer, since in self._open.items() if since is not None]
            for peer in silent:
                self._drop(peer)

    def sockets(self) -> list[socket.socket]:
        return [self.socket, *self._open]

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return self.socket.accept()
        except OSError as error:
            self._be_deaf(error, _REMEDIES.get(error.errno or 0, ""))
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self._left -= 1
        with self._lock:
            if len(self._open) >= self._most:
                since = {peer: at for peer, at in self._open.items() if at is not None}
                if not since:
                    self.shutdown_request(request)
                    return
                self._drop(min(since, key=since.__getitem__))
            self._open[request] = time.monotonic()
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="fanin-http", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be had
            self._forget(request)
            self.shutdown_request(request)
            self._be_deaf(error, _MORE_THREADS)

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:  # the peer has gone
            pass
        except Exception:
            _log.exception("fanin: a request over HTTP was not answered")
        finally:
            self._forget(request)
            self.shutdown_request(request)

    def silent(self, request: socket.socket, since: float | None) -> bool:
        """Notes since when it says nothing; None: it has asked. Whether it may ask."""
        with self._lock:
            if request in self._open:
                self._open[request] = since
            return not self._ended.is_set()

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)

    def _drop(self, peer: socket.socket) -> None:
        """Wakes its thread, which closes it. Under the lock."""
        del self._open[peer]
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self._incoming = Until(self.rfile.detach(), self.connection, 0.0)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        now = time.monotonic()
        self._incoming.deadline = now + self.server.seconds
        if self.server.silent(self.connection, now):
            super().handle_one_request()
        else:
            self.close_connection = True

    def do_GET(self) -> None:
        # What is not read here would be taken for the next request.
        if "Transfer-Encoding" in self.headers:
            self._refuse(411, "a body has a Content-Length here, and no Transfer-Encoding\n")
            return
        length = ",".join(self.headers.get_all("Content-Length", ["0"]))
        if not (length.isascii() and length.isdigit()) or int(length) > self.server.largest:
            self._refuse(413, f"a body has a length, and {self.server.largest} bytes at most\n")
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):  # the peer has gone: what it wanted is not known
            self.close_connection = True
            return
        self._answer(body)

    do_HEAD = do_POST = do_GET

    def _refuse(self, status: int, told: str) -> None:
        self.close_connection = True
        self._send(Answer(status, told.encode(), "text/plain; charset=utf-8"))

    def _answer(self, body: bytes) -> None:
        self.server.silent(self.connection, None)
        method = "GET" if self.command == "HEAD" else self.command
        path = self.path.partition("?")[0]
        self._send(self.server.answering(Request(method, path, self.headers, body)))

    def _send(self, answer: Answer) -> None:
        self.connection.settimeout(self.server.seconds)
        self.close_connection = self.close_connection or not self.server.keep
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.content)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    def version_string(self) -> str:
        return "fanin"

    def log_message(self, format: str, *args: Any) -> None:
        """Handlers log their own work."""


# ------------------------------------------------------------------- in applications of others


Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[Any]]


async def asgi_body(receive: Receive, largest: int) -> bytes | None:
    """A request's body, or more than *largest* of it. None: the peer has gone before it came."""
    body, more = b"", True
    while more and len(body) <= largest:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def asgi_answer(send: Send, status: int, body: Any) -> None:
    """Answers with *body* as JSON."""
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _after_fork() -> None:
    """Threads stay with the parent, and so do their connections."""
    for server in list(_servers):
        for one in server._listener.sockets():
            with contextlib.suppress(OSError):  # closed already
                os.close(one.detach())


os.register_at_fork(after_in_child=_after_fork)
