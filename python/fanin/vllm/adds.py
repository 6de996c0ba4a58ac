# SPDX-License-Identifier: Apache-2.0
"""How an adapter that lies in the layout of the workers' slots is added to the engine.

vLLM numbers an adapter, and calls ``add_lora`` of all workers. Of their answers it reads those up
to the first failure, and takes what it has left for answers to its next call; so such adapters are
added by a call that fails nowhere. Where a pull was begun with vLLM's number the workers have added
the adapter with the answer that it is there, and nobody is called again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from fanin.engine.faults import from_wire
from fanin.engine.pulls import Adapter
from fanin.errors import FaninError

__all__ = ["Adds", "Numbers"]

_given: ContextVar[int] = ContextVar("fanin_given_number", default=0)
_taken: ContextVar[int] = ContextVar("fanin_taken_number", default=0)

Call = Callable[..., Awaitable[list[Any]]]


class Numbers:
    """vLLM's counter of adapters (AtomicCounter), of which a task can take a number beforehand."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counter, name)

    def inc(self, by: int = 1) -> int:
        number = _given.get()
        _given.set(0)
        if not number:
            number = int(self._counter.inc(by))
        _taken.set(number)
        return number

    def taken(self) -> int:
        """The number that this task was given last, once; 0: none."""
        number = _taken.get()
        _taken.set(0)
        return number

    @contextlib.contextmanager
    def given(self, number: int) -> Iterator[None]:
        """The next number that this task is given is *number*; 0: a new one."""
        _given.set(number)
        try:
            yield
        finally:
            _given.set(0)


class Adds:
    """vLLM's ``add_lora`` for one engine. Used in the event loop's thread.

    find: the adapter that is at a path in the slots' layout, or None. call: a method of all
    workers.
    """

    def __init__(self, models: Any, find: Callable[[str], Adapter | None], call: Call) -> None:
        self._find, self._call = find, call
        self._client = models.engine_client
        self._numbers: Numbers | None = None
        counter, self._add = (
            getattr(models, "lora_id_counter", None),
            getattr(self._client, "add_lora", None),
        )
        if counter is not None and self._add is not None:
            models.lora_id_counter = self._numbers = Numbers(counter)
            self._client.add_lora = self.add_lora

    def reserve(self) -> int:
        """A number for an adapter to come; 0: this vLLM has other numbers."""
        return 0 if self._numbers is None else self._numbers.inc()

    def taken(self) -> int:
        """See :meth:`Numbers.taken`."""
        return 0 if self._numbers is None else self._numbers.taken()

    def given(self, number: int) -> contextlib.AbstractContextManager[None]:
        """See :meth:`Numbers.given`."""
        if self._numbers is None:
            return contextlib.nullcontext()
        return self._numbers.given(number)

    async def add_lora(self, request: Any) -> bool:
        """As vLLM's own. Raises FaninError if a worker has not added it: then none has."""
        adapter = self._find(request.lora_path)
        if adapter is None:
            assert self._add is not None
            return bool(await self._add(request))
        number = int(request.lora_int_id)
        if number in adapter.numbers:
            adapter.numbers.discard(number)
            return True
        wanted = {"adapter": request.lora_name, "number": number, "path": request.lora_path}
        answers = await self._call("fanin_add_lora", {**wanted, "is_3d": adapter.is_3d})
        failed = [answer["error"] for answer in answers if answer["error"] is not None]
        if failed:
            await self._client.remove_lora(number)
            error: FaninError = from_wire(failed[0])
            raise error
        return True
