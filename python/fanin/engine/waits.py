# SPDX-License-Identifier: Apache-2.0
"""Steps that are waited for, and trainers whose end is: connections of their own.

However many names wait, a run of a trainer has one connection and one thread that wait for its
steps; none of those that pulls need.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeAlias

from fanin.engine.clients import ClientPool, Target
from fanin.errors import CancelledError, PullTimeoutError

MAX_RUNS = 64
"""Runs that are waited for by a connection of their own; of others it is asked now and then."""

_CONNECT = 5.0
_ROUND = 300.0  # seconds that one call waits; then it is made again
_ASK = 0.5

Done: TypeAlias = "Future[None]"


class _Run:
    """Those who wait for steps of one run of one world, and the thread that waits for them."""

    def __init__(self) -> None:
        self.waiters: list[tuple[int, Done]] = []
        self.client: Any = None
        self.least = -1  # the step that the call under way waits for; -1: no call

    def cancel(self) -> None:
        if self.client is not None:
            self.client.cancel()


class Waits:
    """Waits for steps and for the ends of connections. Any thread.

    pool: makes the connections.
    """

    def __init__(self, pool: ClientPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._runs: dict[Any, _Run] = {}
        self._watching: set[Any] = set()  # clients
        self._closed = False

    # ------------------------------------------------------------------ steps

    def expect(self, target: Target, world: str, run: str, step: int) -> Done:
        """Done when it is worth while to look: *step* or a later one has come, or may have.

        The error of a wait that failed is the future's. A caller that needs it no more cancels it.
        Does not block.
        """
        future: Done = Future()
        key = (self._pool.key_of(target), world, run)
        with self._lock:
            found = self._runs.get(key)
            if found is None and len(self._runs) >= MAX_RUNS:
                timer = threading.Timer(_ASK, _wake, (future, None))
                timer.daemon = True
                timer.start()
                return future
            if found is None:
                found = _Run()
                threading.Thread(
                    target=self._wait,
                    args=(key, found, target, world, run),
                    name="fanin-wait",
                    daemon=True,
                ).start()
                self._runs[key] = found  # only if there is a thread
            found.waiters.append((step, future))
            if step < found.least:
                found.cancel()
        future.add_done_callback(lambda done: self._left(found) if done.cancelled() else None)
        return future

    def _left(self, run: _Run) -> None:
        with self._lock:
            if all(future.done() for _, future in run.waiters):
                run.cancel()

    def _least(self, key: Any, run: _Run) -> int | None:
        """The step to wait for now; None: nobody waits, and the run is forgotten."""
        with self._lock:
            if self._closed:
                raise CancelledError.make("the engine is shutting down", "")
            run.waiters = [(step, f) for step, f in run.waiters if not f.done()]
            run.least = min((step for step, _ in run.waiters), default=-1)
            if run.waiters:
                return run.least
            self._end(key, run)
            return None

    def _end(self, key: Any, run: _Run) -> list[Done]:
        """Nobody may join *run* any more; those who wait. With the lock held."""
        if self._runs.get(key) is run:
            del self._runs[key]
        left, run.waiters, run.least = run.waiters, [], -1
        return [future for _, future in left]

    def _wait(self, key: Any, run: _Run, target: Target, world: str, name: str) -> None:
        problem: BaseException | None = None
        try:
            client = self._pool.connect(target, world, time.monotonic() + _CONNECT)
            with self._lock:
                run.client = client
            while (least := self._least(key, run)) is not None:
                with contextlib.suppress(PullTimeoutError, CancelledError):
                    self._reached(run, client.wait(name, at_least=least, timeout=_ROUND))
        except BaseException as error:
            problem = error
        with self._lock:
            left = self._end(key, run)
            client, run.client = run.client, None
        for future in left:
            _wake(future, problem)
        if client is not None:
            client.close()

    def _reached(self, run: _Run, step: int) -> None:
        with self._lock:
            reached = [future for least, future in run.waiters if least <= step]
        for future in reached:
            _wake(future, None)

    # ------------------------------------------------------------------- ends

    def lost(self, target: Target, world: str, run: str) -> Done:
        """Fails when a connection to *world* is lost, at once, or cannot be made.

        run: one that it has. A caller that needs it no more cancels it. Does not block.
        """
        future: Done = Future()
        threading.Thread(
            target=self._watch, args=(future, target, world, run), name="fanin-watch", daemon=True
        ).start()
        return future

    def _watch(self, future: Done, target: Target, world: str, run: str) -> None:
        client: Any = None
        problem: BaseException
        try:
            client = self._pool.connect(target, world, time.monotonic() + _CONNECT)
            with self._lock:
                self._watching.add(client)
            future.add_done_callback(lambda _: client.cancel())
            while not future.done() and not self._closed:
                with contextlib.suppress(PullTimeoutError):
                    client.watch(run, lambda event: None, _ROUND)
            return
        except BaseException as error:
            problem = error
        finally:
            if client is not None:
                with self._lock:
                    self._watching.discard(client)
                client.close()
        _wake(future, problem)

    def close(self) -> None:
        """Ends all waiting."""
        with self._lock:
            self._closed = True
            for run in self._runs.values():
                run.cancel()
            for client in self._watching:
                client.cancel()


def _wake(future: Done, problem: BaseException | None) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled meanwhile
        if problem is None:
            future.set_result(None)
        else:
            future.set_exception(problem)
