# SPDX-License-Identifier: Apache-2.0
"""The HTTP server behind a rank's metrics page and fanin.sync's routes."""

from __future__ import annotations

import errno
import http.client
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from fanin._http_server import Answer, HttpServer, Request
from local_world import PATIENCE


class Desk:
    """Answers with what it was asked; ``/held`` only once ``release`` is set."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.release = threading.Event()

    def __call__(self, request: Request) -> Answer:
        self.asked.release()
        if request.path == "/held":
            assert self.release.wait(PATIENCE)
        if request.path == "/broken":
            raise ValueError("a fault of the program's own")
        said = f"{request.method} {request.path} {request.body.decode()}"
        return Answer(200, said.encode(), "text/plain")


@contextmanager
def serving(
    *, most: int = 4, seconds: float = PATIENCE, keep: bool = True, rate: float = 1e9
) -> Iterator[tuple[HttpServer, Desk]]:
    desk = Desk()
    server = HttpServer(
        desk,
        "127.0.0.1",
        0,
        name="test",
        most=most,
        seconds=seconds,
        keep=keep,
        largest=8,
        rate=rate,
    )
    try:
        yield server, desk
    finally:
        desk.release.set()
        server.close()


def connected(server: HttpServer) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.connect()
    return connection


def told(connection: http.client.HTTPConnection, method: str, path: str, body: str = "") -> str:
    connection.request(method, path, body or None)
    response = connection.getresponse()
    return f"{response.status} {response.read().decode()}"


def test_a_connection_asks_again_and_again() -> None:
    with serving() as (server, _), closing(connected(server)) as one:
        assert told(one, "GET", "/a?b=c") == "200 GET /a "
        assert told(one, "HEAD", "/a") == "200 "
        assert told(one, "POST", "/b", "content") == "200 POST /b content"
        assert told(one, "POST", "/b", "too much").startswith("200")
        assert told(one, "POST", "/b", "far too much").startswith("413")
    with serving(keep=False) as (server, _), closing(connected(server)) as one:
        one.request("GET", "/a")
        assert one.getresponse().getheader("Connection") == "close"


def answered(server: HttpServer, sent: bytes) -> bytes:
    """What comes back until the server closes, which has no more than *sent* to read."""
    got = b""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as peer:
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        while piece := peer.recv(65536):
            got += piece
    return got


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_what_did_not_come_whole_is_not_acted_on(method: str) -> None:
    head = f"{method} /a HTTP/1.1\r\nContent-Length: 7\r\n\r\n".encode()
    with serving() as (server, desk):
        for sent in (head, head + b"cont"):
            assert answered(server, sent) == b""
        assert not desk.asked.acquire(blocking=False)
        assert answered(server, head + b"content").endswith(f"{method} /a content".encode())


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_body_in_chunks_is_refused(method: str) -> None:
    """Not taken for none, nor its chunks for the next request."""
    head = f"{method} /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    chunks = "\r\n7\r\ncontent\r\n0\r\n\r\nGET /b HTTP/1.1\r\n\r\n"
    with serving() as (server, desk):
        for more in ("", "Content-Length: 7\r\n"):
            got = answered(server, (head + more + chunks).encode())
            assert got.startswith(b"HTTP/1.1 411 ") and got.count(b"HTTP/1.1") == 1
            assert b"Content-Length here" in got and b"Connection: close" in got
        assert not desk.asked.acquire(blocking=False)


def test_one_length_and_the_body_of_a_get_is_no_request() -> None:
    inner = b"GET /b"
    with serving() as (server, desk):
        head = b"GET /a HTTP/1.1\r\nContent-Length: 6\r\n"
        got = answered(server, head + b"\r\n" + inner)
        assert got.count(b"HTTP/1.1") == 1 and got.endswith(b"GET /a GET /b")
        assert desk.asked.acquire(blocking=False)
        got = answered(server, head + b"Content-Length: 0\r\n\r\n" + inner)
        assert got.startswith(b"HTTP/1.1 413 ") and got.count(b"HTTP/1.1") == 1
        assert not desk.asked.acquire(blocking=False)


def test_who_is_silent_makes_room_and_who_waits_does_not() -> None:
    with serving(most=2) as (server, desk), closing(connected(server)) as waiting:
        waiting.request("GET", "/held")
        assert desk.asked.acquire(timeout=PATIENCE)
        with closing(connected(server)) as silent, closing(connected(server)) as other:
            assert told(other, "GET", "/") == "200 GET / "
            assert silent.sock.recv(1) == b""
            other.request("GET", "/held")
            assert desk.asked.acquire(timeout=PATIENCE)
            assert desk.asked.acquire(timeout=PATIENCE)
            with closing(connected(server)) as refused:
                assert refused.sock.recv(1) == b""
            desk.release.set()
            assert other.getresponse().status == 200
        assert waiting.getresponse().read() == b"GET /held "


def test_a_request_has_so_long_to_come_whole() -> None:
    with serving(seconds=0.2) as (server, _), closing(connected(server)) as slow:
        end = threading.Event()

        def drip() -> None:
            try:
                while not end.wait(0.02):
                    slow.sock.sendall(b"x")
            except OSError:
                pass

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert slow.sock.recv(1) == b""
        except ConnectionResetError:
            pass
        finally:
            end.set()
            thread.join(PATIENCE)


def test_a_fault_closes_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (server, _):
        with closing(connected(server)) as one, pytest.raises(http.client.RemoteDisconnected):
            told(one, "GET", "/broken")
        assert "a fault of the program's own" in caplog.text
        with closing(connected(server)) as one:
            assert told(one, "GET", "/") == "200 GET / "


@pytest.mark.parametrize("again", [60.0, 0.0])
@pytest.mark.parametrize("lacking", ["descriptors", "threads"])
def test_who_cannot_be_answered_is_told_of_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lacking: str,
    again: float,
) -> None:
    monkeypatch.setattr("fanin._http_server._DEAF", 0.001)
    monkeypatch.setattr("fanin._http_server._SAY_AGAIN", again)
    failures = iter(range(3))
    accept, start = socket.socket.accept, threading.Thread.start

    def take(self: socket.socket) -> Any:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    def begin(self: threading.Thread) -> None:
        if self.name == "fanin-http" and next(failures, None) is not None:
            raise RuntimeError("can't start new thread")
        start(self)

    with serving() as (server, _):
        if lacking == "threads":
            monkeypatch.setattr(threading.Thread, "start", begin)
            for _ in range(3):
                with closing(connected(server)) as one:
                    assert one.sock.recv(1) == b""
        else:
            monkeypatch.setattr(socket.socket, "accept", take)
        with closing(connected(server)) as one:
            assert told(one, "GET", "/") == "200 GET / "
        said = [one.getMessage() for one in caplog.records]
        assert len(said) == (1 if again else 3)
        cause = "Too many open files; .*ulimit -n" if lacking == "descriptors" else "thread; .*pids"
        assert all(re.search(rf"{server.port}.*{cause}", one) for one in said)


def test_who_hung_up_while_it_was_taken_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aborted = threading.Event()
    accept = socket.socket.accept

    def abort(self: socket.socket) -> Any:
        if not aborted.is_set():
            aborted.set()
            raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return accept(self)

    with serving() as (server, _):
        monkeypatch.setattr(socket.socket, "accept", abort)
        with closing(connected(server)) as one:
            assert told(one, "GET", "/") == "200 GET / "
    assert aborted.is_set() and not caplog.records


def test_the_end_drops_who_is_silent_and_answers_who_waits() -> None:
    with serving(seconds=2 * PATIENCE) as (server, desk), closing(connected(server)) as waiting:
        silent = connected(server)
        assert told(silent, "GET", "/") == "200 GET / "
        assert desk.asked.acquire(timeout=PATIENCE)
        waiting.request("GET", "/held")
        assert desk.asked.acquire(timeout=PATIENCE)
        server.close()
        server.close()
        assert silent.sock.recv(1) == b""
        silent.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), PATIENCE)
        desk.release.set()
        assert waiting.getresponse().read() == b"GET /held "
        # Answered after the end, and silent since.
        assert waiting.sock.recv(1) == b""


def test_who_asks_without_end_waits() -> None:
    """Each connection takes a thread and the interpreter from the program."""
    with serving(rate=1.5, keep=False) as (server, _):  # three at once
        for _ in range(3):
            with closing(connected(server)) as one:
                assert told(one, "GET", "/a") == "200 GET /a "
    with serving(rate=0.001 * 1.5, keep=False) as (server, desk), closing(connected(server)) as one:
        one.sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            told(one, "GET", "/a")
        assert not desk.asked.acquire(blocking=False)
