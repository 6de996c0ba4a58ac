# SPDX-License-Identifier: Apache-2.0
"""A page for Prometheus over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fanin._http_server import Answer, HttpServer, Request
from fanin.errors import FaninError

_MOST, _SECONDS, _FRESH = 16, 5.0, 1.0
_RATE = 50.0  # connections a second: each takes a thread and the interpreter from the trainer
_KIND = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage:
    """Answers ``GET /metrics`` until :meth:`close`.

    :ivar address: ``"127.0.0.1:41234"``, where it listens.
    """

    def __init__(self, text: Callable[[], str], host: str, port: int) -> None:
        self._text = text
        self._cache, self._cached_at = b"", float("-inf")
        self._lock = threading.Lock()
        self._server = HttpServer(
            self._answer,
            host,
            port,
            name="fanin-metrics",
            most=_MOST,
            seconds=_SECONDS,
            keep=False,
            rate=_RATE,
        )
        self.address = self._server.address

    def close(self) -> None:
        """Listens no longer; who has asked is still answered.

        Any thread; does nothing the second time, and in a forked child.
        """
        self._server.close()

    def _answer(self, request: Request) -> Answer:
        if request.method != "GET":
            return Answer(405, b"only GET and HEAD are known\n", _KIND, {"Allow": "GET, HEAD"})
        if request.path != "/metrics":
            return Answer(404, b"there is only /metrics\n", _KIND)
        try:
            return Answer(200, self._fresh(), _KIND)
        except FaninError as error:
            return Answer(503, f"{error}\n".encode(), _KIND)

    def _fresh(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._cached_at >= _FRESH:
                self._cache = self._text().encode()
                self._cached_at = time.monotonic()
            return self._cache
