# SPDX-License-Identifier: Apache-2.0
"""Where requests come into vLLM: its clients of the engine core, and what is in front of them.

What :mod:`fanin.vllm.guard` keeps in the engine core is told to the callers here, and no call waits
for a core that has died (:mod:`fanin.vllm.alive`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fanin.engine.updates import DEFAULT_TIMEOUT, check_timeout
from fanin.errors import RequestError, StateError
from fanin.vllm import alive
from fanin.vllm.alive import Watch
from fanin.vllm.guard import MARK, REMEDY, WATCHED, called, ours, requires_step, watched, wrap

__all__ = ["guard_client", "guard_offline", "guard_server", "tell_why"]

_QUESTIONS = ("fanin_leave_update", "fanin_not_whole", "fanin_step")
#: What a core does at once when it has ended what it is at: at most an update.
_AT_ONCE = (
    "fanin_weights_state",
    "get_weight_version",
    "is_scheduler_paused",
    "reset_prefix_cache",
    "resume_scheduler",
    "set_weight_version",
)
_BOUNDED = WATCHED.union(_AT_ONCE) - {"reload_weights", "fanin_check_weights"}
# Seconds beside twice the timeout, in which an update may be installed.
_MORE = 60.0


def _patience(client: Any, method: str, kwargs: Any) -> float | None:
    """How long *method* may take: for an update more than twice the time that init gave.

    None: as long as it needs.
    """
    if method in _QUESTIONS:
        return alive.QUESTION
    if method not in _BOUNDED:
        return None
    info = kwargs.get("init_info") if isinstance(kwargs, dict) else None
    if isinstance(info, dict):
        with contextlib.suppress(RequestError):  # the workers refuse it
            client._fanin_timeout = check_timeout(info.get("timeout", DEFAULT_TIMEOUT))
    given: float | None = getattr(client, "_fanin_timeout", None)
    return None if given is None else 2 * given + _MORE


@contextlib.contextmanager
def _named(client: Any, dead: tuple[type[Exception], ...]) -> Iterator[None]:
    """Of the errors *dead*, which stay what they are, the text names the process that has died."""
    try:
        yield
    except dead as error:
        if ours(client.vllm_config):
            error.args = (str(alive.death_of(client)),)
        raise


def guard_client(client_class: Any, dead: tuple[type[Exception], ...]) -> None:
    """vLLM's asynchronous client: nothing that is asked by it waits for a core that has died.

    dead: what it raises for that by itself, where it does; the text names nobody.
    """

    def calling(original: Any) -> Any:
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
                raise alive.death_of(self) from error

        return _call_utility_async

    def bringing(original: Any) -> Any:
        async def get_output_async(self: Any) -> Any:
            with _named(self, dead):  # vLLM gives it to all requests that are under way
                return await original(self)

        return get_output_async

    wrap(client_class, "_call_utility_async", calling)
    wrap(client_class, "get_output_async", bringing)


async def _of_all(engine: Any, method: str, *arguments: Any) -> list[Any]:
    return list(await engine.engine_core.call_utility_all_async(method, *arguments))


async def _against_resuming(engine: Any) -> str:
    """Before any replica is resumed: of several one alone would refuse. "": nothing."""
    said = [str(text) for text in await _of_all(engine, "fanin_not_whole") if text]
    if said:
        return said[0]
    held = [called(step, world) for step, world in await _of_all(engine, "fanin_step")]
    if len(set(held)) < 2:
        return ""
    text = f"the replicas have the weights of different steps: {', '.join(held)}"
    return str(StateError.make(text, REMEDY))


def guard_server(
    server_class: Any, refusal: Callable[[str], Any], dead: tuple[type[Exception], ...]
) -> None:
    """vLLM's asynchronous engine, behind its API servers. dead: as in :func:`guard_client`."""

    def resuming(original: Any) -> Any:
        async def resume_generation(self: Any) -> Any:
            if ours(self.vllm_config) and (why := await _against_resuming(self)):
                raise refusal(why)
            return await original(self)

        return resume_generation

    def updating(original: Any) -> Any:
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

    def adding(original: Any) -> Any:
        async def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _named(self.engine_core, dead):
                return await original(self, *args, **kwargs)

        return add_request

    wrap(server_class, "resume_generation", resuming)
    wrap(server_class, "update_weights", updating)
    wrap(server_class, "add_request", adding)


def tell_why(processor_class: Any, failed: Any, refusal: Callable[[str], Any]) -> None:
    """Requests that the core has refused fail with its text; vLLM's own is "internal error".

    failed: the FinishReason of such.
    """

    def processing(original: Any) -> Any:
        def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            for one in outputs:
                if one.finish_reason == failed and str(one.stop_reason).startswith(MARK):
                    state = self.request_states.get(one.request_id)
                    if state is not None and state.queue is not None:
                        state.queue.put(refusal(one.stop_reason[len(MARK) :]))
                    if state is not None and state.detokenizer is None:
                        import torch

                        one.pooling_output = torch.empty(0)  # or vLLM takes it for text
            return original(self, outputs, *args, **kwargs)

        return process_outputs

    wrap(processor_class, "process_outputs", processing)


def guard_offline(engine_class: Any, dead: tuple[type[Exception], ...]) -> None:
    """vLLM's synchronous engine, behind ``LLM``. dead: as in :func:`guard_client`."""

    def calling(original: Any) -> Any:
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
            except dead as error:
                raise alive.death_of(client) from error
            finally:
                self._fanin_not_whole = _asked(client, dead)
                under_way = list(self.output_processor.request_states)
                if self._fanin_not_whole and under_way:
                    self.abort_request(under_way, internal=True)

        return collective_rpc

    def adding(original: Any) -> Any:
        def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            said = self.__dict__.get("_fanin_not_whole")
            if said is None and ours(self.vllm_config) and requires_step():
                said = self._fanin_not_whole = _asked(self.engine_core, dead)
            if said:
                raise StateError.make(said)
            return original(self, *args, **kwargs)

        return add_request

    wrap(engine_class, "collective_rpc", calling)
    wrap(engine_class, "add_request", adding)


def _asked(client: Any, dead: tuple[type[Exception], ...]) -> str:
    """What the core behind *client* says; one in this process is an attribute."""
    question = "fanin_not_whole"
    try:
        if hasattr(client, "call_utility"):
            watch = Watch(client, question, alive.QUESTION)
            return str(watch.of(lambda: client.call_utility(question)))
        return str(client.engine_core.fanin_not_whole())
    except Exception as error:
        why = alive.death_of(client) if isinstance(error, dead) else error
        return f"the engine does not say what its weights are: {why}"
