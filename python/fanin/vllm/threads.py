# SPDX-License-Identifier: Apache-2.0
"""Work that blocks, away from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from fanin._otel import carry

__all__ = ["in_thread"]

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Runs *work* in a thread of its own and waits for it.

    Not asyncio.to_thread: a pull waits for up to a minute, and the loop's few shared threads are
    vLLM's. A caller that is cancelled leaves the thread running.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.cancelled():
            setter(value)

    def run() -> None:
        setter: Callable[[Any], None]
        try:
            value: Any = work()
            setter = future.set_result
        except BaseException as error:
            value, setter = error, future.set_exception
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, setter, value)

    threading.Thread(target=carry(run), name="fanin-pull", daemon=True).start()
    return await future
