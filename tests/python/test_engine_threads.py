# SPDX-License-Identifier: Apache-2.0
"""Threads that stand by for the work of an engine that is not to wait."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from fake_trainer import at_rest
from fanin.engine.threads import Hands


def here(hands: Hands) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == hands._name]


def soon(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_as_much_at_a_time_as_there_is() -> None:
    hands, go = Hands("test-many"), threading.Event()
    all_there = threading.Barrier(6)

    def work() -> None:
        all_there.wait(60)
        go.wait(60)

    for _ in range(5):
        hands.give(work)
    all_there.wait(60)
    assert hands.busy == 5 and len(here(hands)) == 5
    go.set()
    at_rest(hands)


def test_who_is_there_is_given_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """And giving begins no thread, which would be waited for."""
    hands, seen = Hands("test-next"), list[int | None]()
    for _ in range(4):
        hands.give(lambda: seen.append(threading.get_ident()))
        soon(lambda: hands._idle == 1)
        monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("another one"))
    assert len(seen) == 4 and len(set(seen)) == 1


def test_those_that_nobody_needs_end() -> None:
    hands, together = Hands("test-few", idle=1), threading.Barrier(4)
    for _ in range(4):
        hands.give(lambda: together.wait(60))
    soon(lambda: len(here(hands)) == 1)
    assert not hands.busy


def test_what_is_done_is_let_go_of() -> None:
    """Memory of an adapter, say: the thread waits for days, perhaps."""

    class Large:
        def use(self) -> None: ...

    hands, large = Hands("test-memory"), Large()
    there: weakref.ref[Any] = weakref.ref(large)
    hands.give(large.use)
    del large
    soon(lambda: hands._idle == 1)
    assert there() is None


def test_what_one_has_set_is_unknown_to_the_next() -> None:
    hands, variable = Hands("test-context"), contextvars.ContextVar[str]("variable")
    found: list[str | None] = []

    def work() -> None:
        found.append(variable.get(None))
        variable.set("by the one before")

    for _ in range(2):
        hands.give(work)
        soon(lambda: hands._idle == 1)
    assert found == [None, None]


def test_a_failure_is_logged_and_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    hands, done = Hands("test-failing"), threading.Event()

    def fail() -> None:
        raise RuntimeError("no disk")

    with caplog.at_level(logging.ERROR, "fanin.engine"):
        hands.give(fail)
        at_rest(hands)
    assert "no disk" in caplog.text
    hands.give(done.set)
    assert done.wait(60)


def test_without_a_thread_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    hands = Hands("test-none")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            hands.give(lambda: None)
    assert not hands.busy
    done = threading.Event()
    hands.give(done.set)
    assert done.wait(60)
