# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's store, whose every answer is waited for so long and no longer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

_log = logging.getLogger("fanin.torch")

_WAIT = 600.0
"""Seconds for an answer."""
_QUIET = 10.0
"""Seconds after which the log says who does not answer."""

_Asked = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Store:
    """Asks the store in a thread of its own: PyTorch waits without an end where the process that
    keeps the store stands still. Any thread may call any method, and all raise RuntimeError."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._silent: Future[Any] | None = None
        """What has got no answer in time."""
        asks = threading.Thread(target=_answer, args=(self._asked,), daemon=True)
        asks.name = "fanin-store"
        asks.start()

    def set(self, key: str, value: Any) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> Any:
        return self._ask(self._store.get, key)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        return self._ask(self._store.compare_set, key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self._store.add, key, amount))

    def check(self, keys: list[str]) -> Any:
        return self._ask(self._store.check, keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._ask(self._store.wait, keys, timeout)

    def delete_key(self, key: str) -> Any:
        return self._ask(self._store.delete_key, key)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._silent is not None and not self._silent.done():
            raise RuntimeError("it is silent")
        answer: Future[Any] = Future()
        self._asked.put((answer, call, arguments))
        try:
            return answer.result(_QUIET)
        except NotYet:
            _log.warning(
                "fanin: rank %d waits for torch.distributed's store to answer, %.0f s more at most:"
                " see whether the process that keeps it stands still (MASTER_ADDR, mostly rank 0)",
                *(self._rank, _WAIT - _QUIET),
            )
        try:
            return answer.result(_WAIT - _QUIET)
        except NotYet:
            self._silent = answer
            raise RuntimeError(f"nothing came in {_WAIT:.0f} s") from None


def _answer(asked: SimpleQueue[_Asked]) -> None:
    while True:
        answer, call, arguments = asked.get()
        try:
            answer.set_result(call(*arguments))
        except BaseException as error:  # it is the caller's
            answer.set_exception(error)
        del answer, call, arguments
