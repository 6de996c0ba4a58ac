# SPDX-License-Identifier: Apache-2.0
"""A page for Prometheus over HTTP: one thread, few connections, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable

from fanin.errors import FaninError

__all__ = ["MetricsPage"]

_MOST, _REQUEST, _SECONDS, _FRESH, _DEAF = 16, 4096, 5.0, 1.0, 0.1
_pages: weakref.WeakSet[MetricsPage] = weakref.WeakSet()


class _Scraper:
    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.end = time.monotonic() + _SECONDS
        self.request = b""
        self.answer = b""


class MetricsPage:
    """Answers ``GET /metrics`` until :meth:`close`.

    :ivar address: ``"127.0.0.1:41234"``, where it listens.
    """

    def __init__(self, text: Callable[[], str], host: str, port: int) -> None:
        self._text = text
        self._cache, self._cached_at = b"", float("-inf")
        self._pid = os.getpid()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_MOST)
        self._listener.setblocking(False)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._wake, self._woken = socket.socketpair()
        self._scrapers: list[_Scraper] = []
        self._deaf_until = float("-inf")  # no connection is taken before
        self._thread = threading.Thread(target=self._run, name="fanin-metrics", daemon=True)
        _pages.add(self)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes its sockets; waits for a page that is being made.

        Any thread; does nothing the second time, and in a forked child.
        """
        if self._pid != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(10 * _SECONDS)

    def _sockets(self) -> list[socket.socket]:
        own = [self._listener, self._wake, self._woken]
        return own + [scraper.socket for scraper in self._scrapers]

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for one in self._sockets():
                one.close()

    def _turn(self) -> bool:
        """Waits once and does what there is; False: the end."""
        now = time.monotonic()
        ends = [scraper.end for scraper in self._scrapers]
        with selectors.PollSelector() as selector:  # of all it alone needs no descriptor
            selector.register(self._woken, selectors.EVENT_READ)
            if now < self._deaf_until:
                ends.append(self._deaf_until)
            else:
                selector.register(self._listener, selectors.EVENT_READ)
            for scraper in self._scrapers:
                wanted = selectors.EVENT_WRITE if scraper.answer else selectors.EVENT_READ
                selector.register(scraper.socket, wanted, scraper)
            ready = selector.select(max(0.0, min(ends) - now) if ends else None)
        for key, _ in ready:
            if key.fileobj is self._woken:
                return False
            if key.data is not None and not self._serve(key.data):
                self._dismiss(key.data)
        for scraper in [one for one in self._scrapers if one.end <= time.monotonic()]:
            self._dismiss(scraper)
        if any(key.fileobj is self._listener for key, _ in ready):
            self._accept()
        return True

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # as long as no descriptor is left, it would be asked without end
            self._deaf_until = time.monotonic() + _DEAF
            return
        peer.setblocking(False)
        if len(self._scrapers) == _MOST:
            self._dismiss(min(self._scrapers, key=lambda one: one.end))
        self._scrapers.append(_Scraper(peer))

    def _dismiss(self, scraper: _Scraper) -> None:
        scraper.socket.close()
        self._scrapers.remove(scraper)

    def _serve(self, scraper: _Scraper) -> bool:
        """Receives, or sends, once; False: it is through."""
        try:
            if scraper.answer:
                scraper.answer = scraper.answer[scraper.socket.send(scraper.answer) :]
                return bool(scraper.answer)
            got = scraper.socket.recv(_REQUEST - len(scraper.request))
        except BlockingIOError:
            return True
        except OSError:
            return False
        scraper.request += got
        if b"\r\n\r\n" in scraper.request:
            scraper.answer = self._answer(scraper.request)
            scraper.end = time.monotonic() + _SECONDS
        elif len(scraper.request) == _REQUEST:
            scraper.answer = _response("431 Request Header Fields Too Large", b"too long\n")
        return bool(got)

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"only GET is known\n", "Allow: GET\r\n")
        if rest.split(b" ")[0].split(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"there is only /metrics\n")
        if time.monotonic() - self._cached_at >= _FRESH:
            try:
                self._cache = self._text().encode()
            except FaninError as error:
                return _response("503 Service Unavailable", f"{error}\n".encode())
            self._cached_at = time.monotonic()
        return _response("200 OK", self._cache)


def _response(status: str, content: bytes, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(content)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + content


def _after_fork() -> None:
    """The thread stays with the parent, and so do its scrapers."""
    for page in list(_pages):
        for one in page._sockets():
            one.close()


os.register_at_fork(after_in_child=_after_fork)
