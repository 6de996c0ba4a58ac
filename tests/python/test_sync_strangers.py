# SPDX-License-Identifier: Apache-2.0
"""What listens at an engine's address and is none, or is none any more; and two who sync one."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import fleet
import pytest
from fanin.sync import Registry, SyncError
from fleet import FakeEngine, FakeSGLang, FakeVLLM
from http_engine import Engine

SOON = 20.0
OK = b"HTTP/1.1 200 OK\r\n"


registry_of = functools.partial(fleet.registry_of, prefetch="auto")


class Raw:
    """Bytes to whoever connects, by *talk*, until the test ends or the peer has gone."""

    def __init__(self, talk: Callable[[socket.socket, threading.Event], None]) -> None:
        self._talk, self.over = talk, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._main = threading.Thread(target=self._accept)
        self._main.start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._one, args=(peer,))
            thread.start()
            self._threads.append(thread)

    def _one(self, peer: socket.socket) -> None:
        with peer:
            try:
                peer.recv(65536)
                self._talk(peer, self.over)
            except OSError:
                pass

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in [self._main, *self._threads]:
            thread.join()


def drip(head: bytes, piece: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """A byte now and then, for ever: no read of it ever takes long."""

    def talk(peer: socket.socket, over: threading.Event) -> None:
        peer.sendall(head)
        while not over.wait(0.05):
            peer.sendall(piece)

    return talk


def flood(head: bytes, piece: bytes) -> Callable[[socket.socket, threading.Event], None]:
    def talk(peer: socket.socket, over: threading.Event) -> None:
        peer.sendall(head)
        while not over.is_set():
            peer.sendall(piece)

    return talk


def silence(_: socket.socket, over: threading.Event) -> None:
    over.wait(60)


LATE = "no answer in time"
STRANGERS: dict[str, tuple[Callable[[Any, threading.Event], None], str]] = {
    "says nothing": (silence, LATE),
    "drips a header": (drip(OK + b"X: ", b"a"), LATE),
    "drips headers": (drip(OK, b"X: a\r\n"), LATE),
    "drips a body": (drip(OK + b"Content-Length: 1000000\r\n\r\n", b" "), LATE),
    "drips chunks": (drip(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"), LATE),
    "goes on and on": (drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), LATE),
    "floods": (flood(OK + b"\r\n", b" " * 65536), "does not say a weight_version"),
    "floods headers": (flood(OK, b"X: " + b"a" * 60000 + b"\r\n"), "more than 100 headers"),
    "speaks no HTTP": (lambda peer, _: peer.sendall(b"SSH-2.0-OpenSSH_9.9\r\n"), "OpenSSH_9.9"),
    "hangs up": (lambda peer, _: None, "closed connection"),
    "redirects": (
        lambda peer, _: peer.sendall(
            b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\n"
            b"Content-Length: 0\r\n\r\n"
        ),
        "HTTP 307",
    ),
}


def test_no_engines_but_something_else(stack: ExitStack) -> None:
    """All at once, as each takes the whole of the time."""
    engine = stack.enter_context(FakeVLLM())
    urls = {what: stack.enter_context(Raw(talk)).url for what, (talk, _) in STRANGERS.items()}
    registry = registry_of(*urls.values(), engine.url, timeout=3)
    began = time.monotonic()
    with pytest.raises(SyncError, match="nothing was paused") as caught:
        registry.sync(1)
    assert time.monotonic() - began < SOON
    for what, url in urls.items():
        told = caught.value.result.results[url]
        # The route is named where the request ends by itself, and need not be given up.
        assert (what, told.phase) == (what, "health") and f"{url}/" in told.error
        assert STRANGERS[what][1] in told.error
    assert not engine.count("/pause")


BODIES: list[Any] = [
    b"<html><body>It works!</body></html>",
    {},
    [],
    {"success": True},
    {"weight_version": "step-7"},
    {"weight_version": "step-7", "success": True, "message": "Success", "is_paused": True},
    {"weight_version": "step-7", "model_path": "m", "success": True, "message": "Success"},
    {"weight_version": "step-7", "is_paused": True, "results": []},
    {"weight_version": "step-7", "is_paused": True, "results": [{}]},
    {"weight_version": "step-7", "is_paused": True, "results": [{"dirty": ""}]},
    {"weight_version": "step-7", "is_paused": True, "results": [{"dirty": "", "step": 6}]},
    {"weight_version": "step-7", "is_paused": True, "results": [{"dirty": "torn", "step": 7}]},
    {"weight_version": "step-7", "is_paused": True, "results": [{"dirty": "", "step": 7}]},
]


@pytest.mark.parametrize("body", BODIES, ids=str)
@pytest.mark.parametrize("prefetch", [False, "auto"])
def test_what_answers_yes_to_everything_has_got_nothing(
    stack: ExitStack, body: Any, prefetch: Any
) -> None:
    """200 and nothing transferred is no success."""
    yes = stack.enter_context(Engine([(200, body)]))
    with pytest.raises(SyncError) as caught:
        registry_of(yes.url, prefetch=prefetch).sync(7, timeout=5)
    told = caught.value.result.results[yes.url]
    assert not told.ok and yes.url in told.error and told.phase != "done"


@pytest.mark.parametrize("status", [401, 404, 500, 503])
@pytest.mark.parametrize("kind", [FakeSGLang, FakeVLLM])
def test_what_stands_before_an_engine_does_not_say_what_it_is(
    stack: ExitStack, kind: type[FakeEngine], status: int
) -> None:
    """A gateway while the engine is being started."""
    engine = stack.enter_context(kind())
    registry = registry_of(engine.url)
    for path in ("/model_info", "/health", "/weight_info"):
        engine.hooks[path] = lambda _: (status, b"<html>later</html>")
    with pytest.raises(SyncError, match=f"HTTP {status}"):
        registry.sync(1)
    assert registry.healthy() == set()
    assert [entry.kind for entry in registry.endpoints()] == ["auto"]
    engine.hooks.clear()
    assert registry.sync(1).ok and registry.healthy() == {engine.url}
    known = "vllm" if kind is FakeVLLM else "sglang"
    assert [entry.kind for entry in registry.endpoints()] == [known]


# ------------------------------------------------------------------ who has gone, and come again


def test_two_registries_one_engine(stack: ExitStack) -> None:
    """The other one's step is brought in the midst of this one's update: neither takes it for its
    own, and the next sync is right again."""
    engine = stack.enter_context(FakeVLLM())
    one, other = registry_of(engine.url), registry_of(engine.url)
    between: list[SyncError] = []

    def intrude(_: Any) -> None:
        del engine.hooks["/finish_weight_update"]
        with pytest.raises(SyncError) as error:
            engine.hooks["/resume"] = lambda _: (409, {"detail": "not yours"})
            other.sync(9)
        del engine.hooks["/resume"]
        engine.active = True  # the first one's finish comes now
        between.append(error.value)

    engine.hooks["/finish_weight_update"] = intrude
    with pytest.raises(SyncError) as caught:
        one.sync(8)
    assert "they hold step 9, after step 8 was pulled" in str(caught.value)
    assert between and engine.paused
    assert one.sync(8).ok and engine.model == "weights of step 8" and not engine.paused


def test_a_resume_of_another_registry_during_an_update(stack: ExitStack) -> None:
    """It was on its way when this one paused: requests may have been answered meanwhile."""
    engine = stack.enter_context(FakeVLLM())
    registry = registry_of(engine.url)

    def resume(_: Any) -> None:
        engine.paused = False

    engine.hooks["/update_weights"] = resume
    with pytest.raises(SyncError) as caught:
        registry.sync(8)
    assert "does not say that it is" in str(caught.value)
    del engine.hooks["/update_weights"]
    assert registry.sync(8).ok and not engine.paused


@pytest.mark.parametrize(
    "path",
    ["/start_weight_update", "/pause", "/update_weights", "/finish_weight_update", "/resume"],
)
def test_a_registry_that_was_killed_in_the_midst(stack: ExitStack, path: str) -> None:
    """Its engine is left as it was then; a new registry, which knows nothing of it, mends it."""
    engine = stack.enter_context(FakeVLLM())
    hold = engine.hang(path)
    first = registry_of(engine.url)
    thread = threading.Thread(target=lambda: _ignored(first))
    thread.start()
    assert engine.at[path].wait(30)
    assert first.remove(engine.url)  # it does nothing more there, as one that was killed
    del engine.hooks[path]
    second = registry_of(engine.url)
    assert second.sync(8).ok
    assert engine.model == "weights of step 8" and engine.version == "step-8"
    hold.set()
    thread.join()


def _ignored(registry: Registry) -> None:
    with pytest.raises(SyncError):
        registry.sync(7)


def test_a_paused_engine_can_be_let_go_by_who_knows_nothing_of_it(stack: ExitStack) -> None:
    engine = stack.enter_context(FakeVLLM())
    engine.paused = True
    registry = registry_of(engine.url)
    registry.resume(engine.url)
    assert not engine.paused


@pytest.mark.parametrize(
    "path",
    ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"],
)
def test_restarted_in_the_midst(stack: ExitStack, path: str) -> None:
    """The engine's process ends in a phase and another one is there at once."""
    engine = stack.enter_context(FakeVLLM())
    registry = registry_of(engine.url, prefetch=False)
    registry.sync(6)

    def restart(_: Any) -> None:
        del engine.hooks[path]
        engine.restart()

    engine.hooks[path] = restart
    try:
        result = registry.sync(7)
    except SyncError:
        assert engine.version != "step-7"
    else:
        # Told anew, or its last word was that it has the step.
        assert result.ok and (engine.version == "step-7" or path == "/resume")
    assert registry.sync(7).ok
    assert engine.version == "step-7" and engine.model == "weights of step 7" and not engine.paused


def test_removed_in_each_phase_and_never_resumed(stack: ExitStack) -> None:
    for path in ("/start_weight_update", "/pause", "/update_weights", "/finish_weight_update"):
        engine = stack.enter_context(FakeVLLM())
        registry = registry_of(engine.url)

        def remove(_: Any, engine: FakeVLLM = engine, registry: Registry = registry) -> None:
            registry.remove(engine.url)

        engine.hooks[path] = remove
        with pytest.raises(SyncError, match="was removed during the sync"):
            registry.sync(1)
        assert not engine.count("/resume")


def test_removed_while_another_engine_is_still_at_it(stack: ExitStack) -> None:
    """The thread of the removed one ends first: that is no success."""
    gone, slow = stack.enter_context(FakeVLLM()), stack.enter_context(FakeVLLM())
    registry = registry_of(gone.url, slow.url)
    hold = slow.hang("/update_weights")
    removed, caught = threading.Event(), list[SyncError]()

    def remove(_: Any) -> None:
        registry.remove(gone.url)
        removed.set()

    gone.hooks["/update_weights"] = remove

    def sync() -> None:
        with pytest.raises(SyncError) as error:
            registry.sync(1)
        caught.append(error.value)

    thread = threading.Thread(target=sync)
    thread.start()
    assert slow.at["/update_weights"].wait(30) and removed.wait(30)
    for other in threading.enumerate():
        if other.name == f"fanin-sync {gone.url}":
            other.join(30)
    hold.set()
    thread.join()
    results = caught[0].result.results
    assert "was removed during the sync" in results[gone.url].error and results[slow.url].ok
