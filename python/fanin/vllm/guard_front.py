# SPDX-License-Identifier: Apache-2.0
"""Where requests come into vLLM: its clients of the engine core, and what is in front of them.

What :mod:`fanin.vllm.guard` keeps in the engine core is told to the callers here. And no call waits
for a core that has died since it was asked, or that is stopped: vLLM's clients, the synchronous and
the asynchronous one, would wait without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from http import HTTPStatus
from typing import Any

from fanin.engine.clients import restarted_between
from fanin.engine.updates import DEFAULT_TIMEOUT, check_timeout
from fanin.errors import HostError, PullTimeoutError, RequestError, StateError
from fanin.vllm.guard import MARK, REMEDY, WATCHED, called, ended, ours, requires_step, watched

#: Seconds for an answer that takes no work. A core is at work on one thing at a time.
QUESTION = 30.0
#: A process that is stopped for so long is not waited for.
STANDS = 5.0
_LOOK = 0.1
_LOOK_CLOSELY = 1.0  # of each thread of a core, for its children


def death_of(client: Any) -> HostError:
    """The error for the end of a core behind *client*, which names it if it is of this host."""
    manager = _manager(client)
    first = getattr(manager, "failed_proc_name", None)  # the others are ended for it
    who = ended(one for one in _processes(client) if first in (None, one.name))
    return HostError.make(
        "vLLM's engine core has ended" + (f": {who}" if who else ""),
        "see its log for the reason, and start the engine again",
    )


class Watch:
    """One wait for an answer of the cores behind a client of vLLM's. One thread.

    what: is waited for, for errors. patience: seconds, None: as long as the core is at work.
    """

    def __init__(self, client: Any, what: str, patience: float | None) -> None:
        self._client, self._what, self._patience = client, what, patience
        self._began = self._ran = time.monotonic()
        self._looked = -math.inf

    def look(self) -> None:
        """Raises HostError if no answer will come, PullTimeoutError if none has come in time."""
        if getattr(getattr(self._client, "resources", None), "engine_dead", False):
            raise death_of(self._client)
        now = time.monotonic()
        if now - self._looked >= min(STANDS, _LOOK_CLOSELY):
            self._looked = now
            self._look_closely(now)
        if self._patience is not None and now - self._began >= self._patience:
            raise PullTimeoutError.make(
                f"vLLM's engine core has not answered {self._what} for {self._patience:.0f} s",
                "see its log: a worker may stand still; if it does, start the engine again",
            )

    def _look_closely(self, now: float) -> None:
        stopped = _stopped(one.pid for one in _processes(self._client))
        if not stopped:
            self._ran = now
        elif now - self._ran >= STANDS:
            raise HostError.make(
                f"vLLM's engine core does not answer {self._what}: {', '.join(stopped)} is stopped",
                "let it go on (SIGCONT): it does then what it was asked; update it once more, "
                "or start the engine again",
            )

    def of(self, call: Callable[[], Any]) -> Any:
        """What *call* returns or raises, in another thread, or what :meth:`look` raises."""
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="fanin-ask", daemon=True).start()
        while not wait([answer], timeout=_LOOK).done:
            self.look()
        return answer.result()

    async def of_async(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What *call* returns or raises, or what :meth:`look` raises."""
        asked = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOK))[0]:
                self.look()
            return asked.result()
        finally:
            asked.cancel()


def _manager(client: Any) -> Any:
    return getattr(getattr(client, "resources", None), "engine_manager", None)


def _processes(client: Any) -> list[Any]:
    """Of cores that *client* has started on this host."""
    return list(getattr(_manager(client), "processes", None) or [])


def _stopped(pids: Iterable[int | None]) -> list[str]:
    """Those of these processes and their children, a core's workers, that a signal has stopped."""
    found = []
    for pid in pids:
        for one in (str(pid), *_children(pid)):
            name, _, rest = _text(f"/proc/{one}/stat").rpartition(")")
            if rest.split()[:1] == ["T"]:
                found.append(f"process {one}{name.removeprefix(one)})")
    return found


def _children(pid: int | None) -> list[str]:
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        return [
            child for one in threads for child in _text(f"/proc/{pid}/task/{one}/children").split()
        ]
    return []


def _text(path: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return file.read()
    return ""


# ---------------------------------------------------------------- how long a call may take

_QUESTIONS = ("fanin_leave_update", "fanin_not_whole", "fanin_step")
#: What a core does at once when it has ended what it is at: at most an update.
_AT_ONCE = (
    "fanin_weights_state get_weight_version is_scheduler_paused reset_prefix_cache"
    " resume_scheduler set_weight_version"
).split()
_BOUNDED = WATCHED.union(_AT_ONCE) - {"reload_weights", "fanin_check_weights"}
# Seconds beside twice the timeout, in which an update may be installed.
_MORE = 60.0


def _patience(client: Any, method: str, kwargs: Any) -> float | None:
    """How long *method* may take: for an update more than twice the time that init gave.

    None: as long as it needs.
    """
    if method in _QUESTIONS:
        return QUESTION
    if method not in _BOUNDED:
        return None
    info = kwargs.get("init_info") if isinstance(kwargs, dict) else None
    if isinstance(info, dict):
        with contextlib.suppress(RequestError):  # the workers refuse it
            client._fanin_timeout = check_timeout(info.get("timeout", DEFAULT_TIMEOUT))
    given: float | None = getattr(client, "_fanin_timeout", None)
    return None if given is None else 2 * given + _MORE


def dead_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises by itself where a core has died; the text names nobody."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return (EngineDeadError,)


def _refusal(text: str) -> Exception:
    from vllm.exceptions import GracefulHTTPError

    error: Exception = GracefulHTTPError(text, HTTPStatus.SERVICE_UNAVAILABLE)
    return error


@contextlib.contextmanager
def _named(client: Any) -> Iterator[None]:
    """vLLM's errors stay what they are, and the text names the process that has died."""
    try:
        yield
    except dead_errors() as error:
        if ours(client.vllm_config):
            error.args = (str(death_of(client)),)
        raise


# ----------------------------------- vLLM's asynchronous client: nothing waits for a dead core


def asking(original: Any, _: Any) -> Any:
    from vllm.v1.engine.core_client import zmq

    dead = (*dead_errors(), zmq.ZMQError)

    async def _call_utility_async(self: Any, method: str, *args: Any, engine: Any) -> Any:
        call = original(self, method, *args, engine=engine)
        if not ours(self.vllm_config):
            return await call
        name, kwargs = method, None
        if method == "collective_rpc" and args and isinstance(args[0], str):
            name, kwargs = args[0], args[3] if len(args) > 3 else None
        try:
            return await Watch(self, name, _patience(self, name, kwargs)).of_async(call)
        except dead as error:
            raise death_of(self) from error

    return _call_utility_async


def bringing(original: Any, _: Any) -> Any:
    async def get_output_async(self: Any) -> Any:
        with _named(self):  # vLLM gives it to all requests that are under way
            return await original(self)

    return get_output_async


# --------------------------------------- vLLM's asynchronous engine, behind its API servers


async def _of_all(engine: Any, method: str, *arguments: Any) -> list[Any]:
    return list(await engine.engine_core.call_utility_all_async(method, *arguments))


async def _against_resuming(engine: Any) -> str:
    """Before any replica is resumed: of several one alone would refuse. "": nothing."""
    said = [str(text) for text in await _of_all(engine, "fanin_not_whole") if text]
    if said:
        return said[0]
    told = await _of_all(engine, "fanin_step")
    held = [called(step, world) for step, world, _ in told]
    if len(set(held)) > 1:
        text = f"the replicas have the weights of different steps: {', '.join(held)}"
    elif again := restarted_between(lives for *_, lives in told):
        text = f"rank {again[0]} of the trainer was started again between the replicas' pulls"
    else:
        return ""
    return str(StateError.make(text, REMEDY))


def resuming(original: Any, _: Any) -> Any:
    async def resume_generation(self: Any) -> Any:
        if ours(self.vllm_config) and (why := await _against_resuming(self)):
            raise _refusal(why)
        return await original(self)

    return resume_generation


def updating(original: Any, _: Any) -> Any:
    async def update_weights(self: Any, request: Any) -> Any:
        try:
            return await original(self, request)
        except Exception:
            if ours(self.vllm_config):
                with contextlib.suppress(Exception):  # the error that matters is raised
                    # A replica that has ended well would refuse the next start.
                    await _of_all(self, "collective_rpc", "fanin_leave_update")
            raise

    return update_weights


def adding(original: Any, _: Any) -> Any:
    async def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _named(self.engine_core):
            return await original(self, *args, **kwargs)

    return add_request


def telling(original: Any, _: Any) -> Any:
    """Requests that the core has refused fail with its text; vLLM's own is "internal error"."""
    from vllm.v1.engine import FinishReason

    def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for one in outputs:
            if one.finish_reason == FinishReason.ERROR and str(one.stop_reason).startswith(MARK):
                state = self.request_states.get(one.request_id)
                if state is not None and state.queue is not None:
                    state.queue.put(_refusal(one.stop_reason[len(MARK) :]))
                if state is not None and state.detokenizer is None:
                    import torch

                    one.pooling_output = torch.empty(0)  # or vLLM takes it for text
        return original(self, outputs, *args, **kwargs)

    return process_outputs


# ------------------------------------------------- vLLM's synchronous engine, behind ``LLM``


def calling_offline(original: Any, _: Any) -> Any:
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not watched(method, self.vllm_config):
            return original(self, method, timeout, args, kwargs)
        client = self.engine_core

        def call() -> Any:
            return original(self, method, timeout, args, kwargs)

        try:
            if not hasattr(client, "call_utility"):  # it is in this process
                return call()
            return Watch(client, method, _patience(client, method, kwargs)).of(call)
        except dead_errors() as error:
            raise death_of(client) from error
        finally:
            self._fanin_not_whole = _asked(client)
            under_way = list(self.output_processor.request_states)
            if self._fanin_not_whole and under_way:
                self.abort_request(under_way, internal=True)

    return collective_rpc


def adding_offline(original: Any, _: Any) -> Any:
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        said = self.__dict__.get("_fanin_not_whole")
        if said is None and ours(self.vllm_config) and requires_step():
            said = self._fanin_not_whole = _asked(self.engine_core)
        if said:
            raise StateError.make(said)
        return original(self, *args, **kwargs)

    return add_request


def _asked(client: Any) -> str:
    """What the core behind *client* says; one in this process is an attribute."""
    question = "fanin_not_whole"
    try:
        if hasattr(client, "call_utility"):
            watch = Watch(client, question, QUESTION)
            return str(watch.of(lambda: client.call_utility(question)))
        return str(client.engine_core.fanin_not_whole())
    except Exception as error:
        why = death_of(client) if isinstance(error, dead_errors()) else error
        return f"the engine does not say what its weights are: {why}"
